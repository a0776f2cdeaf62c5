"""``bytescale init``: a commented config to start from, the demo's or one that fine-tunes a model of Hugging Face."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import tyro

from bytescale.common.errors import ConfigError, DataError, typed_path
from bytescale.config.load import DEMO_CONFIG
from bytescale.config.resolve import HF_PREFIX
from bytescale.config.schema import Config, DataConfig, TrainerConfig

_FINE_TUNE = DEMO_CONFIG.with_name("fine_tune.toml")
_CONTENTS = {
    "messages": "conversations: what the assistant says is trained on (docs/data.md)",
    "prompt": "`prompt` and `completion`, of which the completion is trained on",
    "tokens": "`tokens` or `input_ids`, with `labels` or `weights`",
    "text": "plain text, under data.text_key in JSONL and Parquet",
}
_FREEZE_INDEXERS = 'freeze = ["*.indexer.*"]      # they choose keys; model.indexer_loss trains them'
_CONTEXT = 8192
"""Where neither the data nor the model says how long documents may be."""
_LARGEST_BATCH, _BATCHES = 65536, 20
"""At most so many tokens in a batch, and about so many batches or more in an epoch."""


@dataclass(frozen=True)
class InitOptions:
    """Write a commented config to start from: bytescale init [FILE.toml] [--from MODEL --data FILE ...].

    Without --from it is the config of `bytescale demo`: a small new model on Python's standard library.
    """

    file: Annotated[Path, tyro.conf.Positional] = Path("bytescale.toml")
    """The file to write. It must not exist yet."""
    from_: Annotated[str, tyro.conf.arg(name="from")] = ""
    """A model to fine-tune: its folder, or its name on the Hub (OWNER/NAME), with or without hf: before it."""
    data: tuple[str, ...] = ()
    """With --from: files, folders or globs to fine-tune on. Their kind of record and the longest document decide what
    is written; they are tokenised for that, as training would do."""

    def run(self) -> int:
        """Return the exit code. Raises ``OSError`` if the file exists or cannot be written, ``ConfigError`` for a model
        or data that cannot be used."""
        if self.data and not self.from_:
            raise ConfigError("--data is given without --from", so="the demo's config has data of its own",
                              fix="name the model to fine-tune: --from FOLDER or --from OWNER/NAME")  # fmt: skip
        if self.file.exists():
            raise ConfigError(f"{self.file} exists", so="it would be overwritten", fix="name another file")
        text = _fine_tuning(self.from_, self.data) if self.from_ else DEMO_CONFIG.read_text(encoding="utf-8")
        with self.file.open("x", encoding="utf-8") as file:
            file.write(text)
        if not self.from_:
            print(f"wrote {self.file}, the demo's config: it trains a small new model. To fine-tune one: --from MODEL")
        elif not self.data:
            print(f"wrote {self.file}. Set data.sources and data.content in it (or name the data: --data), then run:")
        else:
            print(f"wrote {self.file}. It can train as it is. Look at it, then run:")
        print(f"  bytescale train {self.file} --dry-run   # check it, prepare the data, plan a batch, start nothing")
        print(f"  bytescale train {self.file}")
        return 0


def _fine_tuning(model: str, sources: tuple[str, ...]) -> str:
    """The text of a config that fine-tunes ``model`` on ``sources``."""
    from bytescale.config.hugging_face import read_hf_config
    from bytescale.storage.hub import local_folder

    named = model.removeprefix(HF_PREFIX)
    folder = typed_path(local_folder(named, weights=False))
    content = read_hf_config(folder)
    text = content.get("text_config") or content
    most = text.get("max_position_embeddings") or text.get("n_positions")
    most = most if isinstance(most, int) and most > 0 else None
    data = DataConfig(sources=sources, content="messages", tokenizer="auto", context_length=2**62)
    context, tokens, comment = min(_CONTEXT, most or _CONTEXT), 0, "   # the longest sequence in tokens"
    if sources:
        data, lengths = _tokenised(data, folder)
        longest, tokens = max(lengths), sum(lengths)
        context = -(-longest // 1024) * 1024
        comment = f"   # the longest document has {longest} tokens"
        if most is not None and context > most:
            context, comment = most, f"{comment}; {most} is what the model was made for"
    batch = max(context, min(_LARGEST_BATCH, -(-tokens // _BATCHES // 1024) * 1024))
    ranks, ranks_comment = _ranks()
    return _FINE_TUNE.read_text(encoding="utf-8").format(
        model=named,
        sources=", ".join(sources) or "your data: name it in data.sources",
        preset=json.dumps(f"{HF_PREFIX}{named}"),
        freeze=_FREEZE_INDEXERS if any("index_topk" in key for key in text) else '# freeze = ["*.embed_tokens.*"]',
        source_list=json.dumps(list(sources) or ["chats.jsonl"]),
        content=json.dumps(data.content),
        content_comment=_CONTENTS[data.content],
        context_length=context,
        context_comment=comment,
        over_length=json.dumps("split" if data.content == "text" else "truncate"),
        batch_tokens=batch,
        ranks=ranks,
        ranks_comment=ranks_comment,
        warmup_steps=max(2, tokens // batch // 10),
    )


def _tokenised(data: DataConfig, folder: Path) -> tuple[DataConfig, list[int]]:
    """The data with its kind of record, and the tokens of each document."""
    from bytescale.data.loading.corpus import prepare_corpus
    from bytescale.data.tokens.progress import progress_bar
    from bytescale.train.origin import with_its_tokenizer

    data = replace(data, content=_content_of(data))
    data = with_its_tokenizer(Config(data=data, trainer=TrainerConfig(init=f"{HF_PREFIX}{folder}"))).data
    with progress_bar() as progress:
        corpus = prepare_corpus(data, progress)
    return data, [int(length) for length in corpus.samples.length]


def _content_of(data: DataConfig) -> Any:
    """The first kind of record that the first record of the sources is. Raises ``DataError`` if it is none."""
    from bytescale.data.sources.files import expand_sources
    from bytescale.data.sources.records import ReadCounts, iter_records, kind_of, plan_units

    files = [file for file in expand_sources(data.sources, data.format, ()) if file.format != "bin"]
    errors: list[Exception] = []
    for content in _CONTENTS if files else ():
        kind = kind_of(replace(data, content=content))  # type: ignore[arg-type]
        try:
            for unit in plan_units(files[:1], kind)[:1]:
                next(iter_records(unit, kind, ReadCounts()), None)
            return content
        except (ConfigError, DataError) as error:
            errors.append(error)
    if errors:
        raise errors[-1]
    return "text"


def _ranks() -> tuple[int, str]:
    """How many ranks this machine has room for, and a comment."""
    import torch

    gpus = torch.cuda.device_count()
    if gpus:
        return gpus, "                     # training processes, one for each GPU"
    return min(2, os.cpu_count() or 1), "                     # training processes; on GPUs, one for each"
