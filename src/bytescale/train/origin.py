"""What belongs to weights besides their numbers: config.json, tokenizer, chat template, generation settings.

A run keeps what it trains with in ``origin/`` of its folder, and ``bytescale convert`` reads nothing else: what a
config.toml names may be gone, have changed, or be a file that the one who wrote the config wants to see published.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

from bytescale.common.errors import ConfigError, typed_path
from bytescale.config.foreign_config import refuse_links_out
from bytescale.config.resolve import CHECKPOINT_PREFIX, HF_PREFIX, SEEN_WEIGHTS, resolve_model, source_folder
from bytescale.config.schema import Config, DataConfig
from bytescale.data.loading.corpus import check_ids
from bytescale.data.tokens.tokenizer import JsonTokenizer, load_tokenizer, tokenizer_settings


def _folder_beside(init: str) -> Path | None:
    """The folder with what belongs to the weights of ``init``; None for random ones, and for checkpoints elsewhere."""
    if init.startswith(HF_PREFIX):
        return source_folder(init)
    if not init.startswith(CHECKPOINT_PREFIX):
        return None
    kept = typed_path(init.removeprefix(CHECKPOINT_PREFIX)).resolve().parent.parent / "origin"
    refuse_links_out(kept, kept.parent)
    return kept if kept.is_dir() else None


def with_its_tokenizer(config: Config) -> Config:
    """Put the tokenizer of the model that training begins with in the place of ``auto``.

    Raises ``ConfigError`` if the model has none, or ``data.tokenizer`` is another one, before a text is tokenised.
    """
    data, folder = config.data, _folder_beside(config.trainer.init)
    only_tokens = bool(data.sources) and all(source.endswith(".bin") for source in data.sources)
    has_own = folder is not None and (folder / "tokenizer.json").is_file()
    if folder is not None and has_own and data.tokenizer == "auto":
        data = replace(data, tokenizer=str(folder))
    elif folder is not None and has_own:
        _refuse_foreign(data, folder)
    elif data.tokenizer == "auto" and not only_tokens and config.trainer.init.startswith(HF_PREFIX):
        raise ConfigError(
            f"data.tokenizer is auto, and {folder} has no tokenizer.json",
            so="text would be cut into bytes, which its model was not trained with",
            fix="make it from the model's other files (transformers: AutoTokenizer.from_pretrained(FOLDER)"
            ".save_pretrained(FOLDER)), or set data.tokenizer to a tokenizer.json of this model, or to bytes if its "
            "tokens are bytes",
        )
    config = replace(config, data=data)
    if not (only_tokens and data.tokenizer in ("auto", "bytes")):
        _check_size(config)
    return config


def _refuse_foreign(data: DataConfig, folder: Path) -> None:
    """Raise ``ConfigError`` unless ``data.tokenizer`` gives the model's tokens the ids that the model's own gives."""
    what, own = "", JsonTokenizer.from_file(folder)
    if data.tokenizer == "bpe":
        what = "which trains a new one on the sources"
    else:
        tokens = own.tokens()
        found = load_tokenizer(data.tokenizer).tokens()
        for number in sorted(tokens.keys() & found.keys()):
            if tokens[number] != found[number]:
                what = f"in which id {number} is {found[number]!r} and not {tokens[number]!r}"
                break
    if what:
        raise ConfigError(
            f"data.tokenizer is {data.tokenizer!r}, {what}, but the weights of {folder} have a tokenizer of their own",
            so="ids would stand for other tokens than those that the weights have learned",
            fix="use the model's own: --data.tokenizer auto (`bytescale score`: leave --tokenizer out). To train on a "
            "new one on purpose, put that one's tokenizer.json into a copy of the model's folder",
        )


def _check_size(config: Config) -> None:
    """Raise ``ConfigError`` if the tokenizer has more ids than the model, where the model's are known before."""
    data, model = config.data, config.model
    if "vocab_size" not in model.config and not model.preset.startswith((HF_PREFIX, CHECKPOINT_PREFIX)):
        return  # it follows the tokenizer
    if data.tokenizer == "bpe":
        source, num_ids = f"data.bpe_vocab_size = {data.bpe_vocab_size}", data.bpe_vocab_size
    else:
        source = f"tokenizer {data.tokenizer!r}"
        num_ids = load_tokenizer(data.tokenizer).vocab_size
    check_ids(source, num_ids, resolve_model(model).vocab_size)


def with_kept_tokenizer(config: Config, kept: Path) -> Config:
    """For a run that goes on: its own copy of the tokenizer, where the one that it began with is not there any more."""
    named = config.data.tokenizer
    if named in ("auto", "bytes", "bpe") or typed_path(named).exists() or not (kept / "tokenizer.json").is_file():
        return config
    refuse_links_out(kept, kept.parent)
    return replace(config, data=replace(config.data, tokenizer=str(kept)))


def keep_origin(kept: Path, config: Config, tokenizer: str | None) -> None:
    """Copy what ``bytescale convert`` needs into the new folder ``kept``: all that the run trains with.

    ``tokenizer``: its name in the corpus (``CorpusMetadata``); None where the corpus has tokens alone.
    """
    from bytescale.hf.files.hf_folder import copy_companions, weights_fingerprint

    kept.mkdir()
    source, data = _folder_beside(config.trainer.init), config.data
    if source is not None and not (source / "config.json").is_file():
        source = None
    if source is not None:
        shutil.copyfile(source / "config.json", kept / "config.json")
        copy_companions(source, kept)
    if source is not None and (config.model.lora_rank or config.model.freeze):
        (kept / SEEN_WEIGHTS).write_text(
            json.dumps({"fingerprint": weights_fingerprint(source)}) + "\n", encoding="utf-8"
        )
    if tokenizer is not None:
        _keep_tokenizer(kept, tokenizer, data)
    if data.chat_template:
        shutil.copyfile(typed_path(data.chat_template), kept / "chat_template.jinja")


def _keep_tokenizer(kept: Path, name: str, data: DataConfig) -> None:
    """Write the tokenizer as transformers loads it, with the end of a document that the run has trained with."""
    from bytescale.hf.files.hf_folder import copy_companions

    path = typed_path(name)
    tokenizer = load_tokenizer(name)
    if path.is_dir():
        copy_companions(path, kept)
    settings = tokenizer_settings(path if path.is_dir() else path.parent) if path.exists() else {}
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", **settings}
    settings["eos_token"] = tokenizer.eos_text
    (kept / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
    if path.is_file():
        shutil.copyfile(path, kept / "tokenizer.json")
    elif not path.is_dir():
        (kept / "tokenizer.json").write_text(tokenizer.to_json(), encoding="utf-8")
