"""A checkpoint of ours as a Hugging Face folder."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bytescale.checkpoint.initial_weights import parameters_of
from bytescale.checkpoint.reading import CheckpointReader
from bytescale.common.errors import ConfigError
from bytescale.config.architecture import Architecture
from bytescale.config.hugging_face import SPECIAL_TOKENS, hf_config_of, read_hf_config
from bytescale.config.resolve import described_architecture
from bytescale.config.schema import Config
from bytescale.data.tokens.tokenizer import load_tokenizer
from bytescale.models.hf_folder import copy_companions, hf_tensors, write_json, write_weights
from bytescale.runtime.optimizer.flat import DTYPES
from bytescale.storage.place import Place


def export_checkpoint(
    checkpoint: str | Place,
    target: Path,
    *,
    dtype: str = "fp32",
    shard_bytes: int = 5 * 2**30,
    run_config: Config | None = None,
    origin: Path | None = None,
) -> None:
    """Write ``target`` with config.json, safetensors shards, and the tokenizer's files that the run has kept.

    The process holds one shard, and the parameter that is being read. ``target`` appears when it is complete.

    Args:
        dtype: ``fp32``, ``bf16`` or ``fp64``; master weights are rounded to it.
        run_config: of the run, for the context length.
        origin: what the run has kept beside its weights (``train.origin``).

    Raises ``ConfigError`` if ``target`` exists; ``CheckpointError`` if ``checkpoint`` is none, or is incomplete.
    """
    stored = CheckpointReader(checkpoint)
    shape = described_architecture(stored.state.architecture, str(stored.folder))
    assert isinstance(shape, Architecture), "models of transformers are exported by ``export_attached``"
    parameters = ((name, stored.read(f"master.{name}")) for name in parameters_of(shape))
    weights = ((name, value.to(DTYPES[dtype], copy=True)) for name, value in hf_tensors(parameters))
    with appearing(target) as hidden:
        write_weights(hidden, weights, shard_bytes=shard_bytes)
        special = _end_of_text(origin)
        write_json(hidden / "config.json", _config_json(shape, dtype, run_config, origin) | special)
        if special:
            write_json(hidden / "generation_config.json", special)
        if origin is not None:
            copy_companions(origin, hidden)


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


def _config_json(shape: Architecture, dtype: str, run_config: Config | None, origin: Path | None) -> dict[str, Any]:
    """``config.json``; what only the folder that the run began with knows is taken from there."""
    before = read_hf_config(origin) if origin is not None and (origin / "config.json").is_file() else {}
    context = 0 if run_config is None else run_config.data.context_length
    context = max(context, int(before.get("max_position_embeddings", 0)))
    torch_name = str(DTYPES[dtype]).removeprefix("torch.")
    content = hf_config_of(shape, dtype=torch_name, max_position_embeddings=context or None)
    return content | {name: before[name] for name in SPECIAL_TOKENS if name in before}


def _end_of_text(origin: Path | None) -> dict[str, int]:
    """``eos_token_id`` of a model that began with random weights, if its run has kept a tokenizer."""
    if origin is None or (origin / "config.json").is_file() or not (origin / "tokenizer.json").is_file():
        return {}
    return {"eos_token_id": load_tokenizer(str(origin)).eos_id}
