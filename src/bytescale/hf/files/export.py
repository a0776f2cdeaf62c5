"""A checkpoint as a Hugging Face folder."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers.initialization import no_init_weights

from bytescale.checkpoint.reading import CheckpointReader
from bytescale.common.errors import CheckpointError, ConfigError, typed_path
from bytescale.common.parsing import parse_json, read_input
from bytescale.config.presets import PRESETS, SPECIAL_TOKENS
from bytescale.config.resolve import SEEN_WEIGHTS, described_architecture, source_folder
from bytescale.config.schema import Config
from bytescale.data.tokens.tokenizer import load_tokenizer
from bytescale.hf.files.folder import load_model, make_model, parameters_of, quiet, set_constants, train_a_part
from bytescale.hf.files.hf_folder import copy_companions, weights_fingerprint, write_json
from bytescale.hf.files.weight_stream import adapted_ties, untie
from bytescale.runtime.optimizer.flat import DTYPES
from bytescale.storage.hub import local_folder
from bytescale.storage.place import Place


def export_checkpoint(
    checkpoint: str | Place,
    target: Path,
    *,
    dtype: str = "fp32",
    shard_bytes: int = 5 * 2**30,
    run_config: Config | None = None,
    origin: Path | None = None,
    base: str = "",
) -> None:
    """Write ``target`` with config.json, safetensors shards, and the tokenizer's files that the run has kept.

    The process holds the whole model once. ``target`` appears when it is complete. config.json is the one that the run
    began with, with the dtype of the weights that are written. What was not trained is read from ``base``, or the
    folder that the run began with. Adapters are merged; as they are, they lie in ``adapter/``. An adapter on a matrix
    that is embedding and head at once is for one of them alone, so they are two matrices then.

    Raises ``ConfigError`` if ``target`` exists; ``CheckpointError`` if ``checkpoint`` is none, or is incomplete.
    """
    stored, target_dtype = CheckpointReader(checkpoint), DTYPES[dtype]
    architecture = described_architecture(stored.state.architecture, str(stored.folder))
    if base and not architecture.trained:
        raise ConfigError(f"--base is {base!r}, and this run trained all weights", fix="leave --base out")
    if architecture.trained:
        model: Any = load_model(_base_of(run_config, origin, base), architecture.content, torch.float32)
        wrapped: Any = train_a_part(model, architecture.trained, seed=0)
    else:
        held = {name.removeprefix("master.") for name in stored.shapes() if name.startswith("master.")}
        if lost := sorted(held - parameters_of(architecture.content).keys()):
            raise CheckpointError(
                f"{checkpoint} has {lost[0]}, for which its model has no place",
                so="it would be lost",
                fix="set tie_word_embeddings to false in the model's config.json, and train it anew",
            )
        with no_init_weights():  # which would take 15 s for a billion parameters
            model = make_model(architecture.content, target_dtype)
        model.tie_weights()
        set_constants(model, architecture.buffers)
    content, name = dict(architecture.content), str(target_dtype).removeprefix("torch.")
    with torch.no_grad(), appearing(target) as hidden:
        for name_of, parameter in model.named_parameters():
            if parameter.requires_grad:
                _fill(parameter, stored.read(f"master.{name_of}"), name_of)
        if "lora" in architecture.trained:
            wrapped.save_pretrained(hidden / "adapter")
            if adapted_ties(model):
                untie(model)
                content["tie_word_embeddings"] = False
            model = wrapped.merge_and_unload()
        if architecture.trained:
            model = model.to(target_dtype)
        with quiet():
            model.save_pretrained(hidden, max_shard_size=shard_bytes)
        written = {key: name for key in ("dtype", "torch_dtype") if key in content} or {"dtype": name}
        new = _known_of_run(content, run_config, origin)
        write_json(hidden / "config.json", content | written | new)
        if "eos_token_id" in new:
            write_json(hidden / "generation_config.json", {"eos_token_id": new["eos_token_id"]})
        if origin is not None:
            copy_companions(origin, hidden)


def _known_of_run(content: dict[str, Any], run_config: Config | None, origin: Path | None) -> dict[str, Any]:
    """What config.json of a model that began with random weights lacks: its context, and what ends a document."""
    if run_config is None or not {*SPECIAL_TOKENS, "max_position_embeddings"} <= content.keys():
        return {}
    if run_config.model.preset not in PRESETS or run_config.trainer.init:
        return {}
    context = max(run_config.data.context_length, int(content["max_position_embeddings"]))
    has_tokenizer = origin is not None and (origin / "tokenizer.json").is_file()
    end = {"eos_token_id": load_tokenizer(str(origin)).eos_id} if has_tokenizer else {}
    return {"max_position_embeddings": context, **end}


@contextmanager
def appearing(target: Path) -> Iterator[Path]:
    """A hidden folder that becomes ``target`` when the block has ended. Raises ``ConfigError`` if that exists."""
    if target.exists():
        raise ConfigError(f"{target} exists", so="it would be overwritten", fix="name a new folder")
    hidden = target.with_name(f".{target.name}.tmp")
    shutil.rmtree(hidden, ignore_errors=True)
    hidden.mkdir(parents=True)
    try:
        yield hidden
        hidden.replace(target)
    finally:
        shutil.rmtree(hidden, ignore_errors=True)


def _fill(parameter: nn.Parameter, value: torch.Tensor, name: str) -> None:
    if parameter.shape != value.shape:
        raise CheckpointError(
            f"{name} is {list(value.shape)} in the checkpoint, and {list(parameter.shape)} in its model",
            so="the checkpoint contradicts itself",
            fix="name another checkpoint",
        )
    parameter.copy_(value)


def _base_of(run_config: Config | None, origin: Path | None, given: str) -> Path:
    """The folder with the weights that were not trained: the ``given`` one, or the one that the run began with.

    Raises ``CheckpointError`` if it is not there, or its weights are others than those that the run has seen.
    """
    if given:
        return typed_path(local_folder(given))
    base = source_folder("" if run_config is None else run_config.model.preset)
    remedy = "name the folder of the model that the run began with: --base FOLDER"
    if not (base / "config.json").is_file():
        raise CheckpointError(
            f"the checkpoint has what was trained alone, and the model that it belongs to is not there ({base})",
            so="there is nothing to put it into",
            fix=remedy,
        )
    try:
        seen = str(parse_json(read_input((origin or base) / SEEN_WEIGHTS))["fingerprint"])
    except (OSError, ValueError, KeyError, TypeError):
        seen = "not known"
    if seen != weights_fingerprint(base):
        raise CheckpointError(
            f"the weights of {base} are not those with which the run began",
            so="what was trained would be put into another model",
            fix=remedy,
        )
    return base
