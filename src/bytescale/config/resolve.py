"""From a model section to the concrete architecture, and the checks of its numbers. Free of torch."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from bytescale.common.errors import ConfigError, typed_path
from bytescale.common.limits import check_limits
from bytescale.common.parsing import parse_json
from bytescale.config.architecture import PRESETS, Architecture
from bytescale.config.attached import AttachedArchitecture, trained_of
from bytescale.config.foreign_config import checked_config
from bytescale.config.hugging_face import FAMILIES, architecture_from_hf, read_hf_config
from bytescale.config.schema import ModelConfig

HF_PREFIX = "hf:"
CHECKPOINT_PREFIX = "checkpoint:"
SEEN_WEIGHTS = "weights.json"
"""In ``origin/`` of a run that trains a part of a model: which weights the others are (``weights_fingerprint``)."""


def resolve_model(
    config: ModelConfig, *, tokenizer_vocab_size: int | None = None
) -> Architecture | AttachedArchitecture:
    """What is trained: our own Llama or Mixtral, or a decoder that runs on transformers' own code.

    It is the preset with the section's own numbers put in. ``vocab_size``, when the section does not set it, is the
    tokenizer's rounded up to a multiple of 64 if a tokenizer is known, else the preset's. A preset ``hf:FOLDER`` or
    ``checkpoint:FOLDER`` is the shape of the model in that folder and keeps its vocabulary, which is that of its
    weights. A folder whose model our own code has is our own, unless only a part of it is to be trained.

    Raises ``ConfigError`` for an unknown preset and for shapes that contradict each other.
    """
    is_folder = config.preset.startswith((HF_PREFIX, CHECKPOINT_PREFIX))
    if config.preset.startswith(HF_PREFIX):
        base = _model_of_folder(source_folder(config.preset), trained_of(config))
    elif is_folder:
        base = _stored_architecture(config.preset.removeprefix(CHECKPOINT_PREFIX))
    elif config.preset in PRESETS:
        base = PRESETS[config.preset]
    else:
        raise ConfigError(
            f"model.preset is {config.preset!r}, which does not exist",
            fix="use one of " + ", ".join(PRESETS) + ", hf:FOLDER or checkpoint:FOLDER",
        )
    if isinstance(base, AttachedArchitecture):
        return base
    given = {
        spec.name: getattr(config, spec.name) for spec in fields(Architecture) if getattr(config, spec.name) is not None
    }
    if "vocab_size" not in given and tokenizer_vocab_size is not None and not is_folder:
        given["vocab_size"] = -(-tokenizer_vocab_size // 64) * 64
    if "head_dim" not in given and ("hidden_size" in given or "num_heads" in given):
        hidden = given.get("hidden_size", base.hidden_size)
        heads = given.get("num_heads", base.num_heads)
        if heads < 1 or hidden % heads:
            raise ConfigError(
                f"model.hidden_size = {hidden} is not a multiple of model.num_heads = {heads}",
                fix="change one of them, or set model.head_dim",
            )
        given["head_dim"] = hidden // heads
    architecture = replace(base, **given)
    try:
        _check_architecture(architecture)
    except TypeError as error:  # a size of the folder's is no number
        raise ConfigError(f"{config.preset} describes no model ({error})", fix="use the config.json of its weights")\
            from error  # fmt: skip
    return architecture


def source_folder(source: str) -> Path:
    """The folder of ``hf:FOLDER``."""
    return typed_path(source.removeprefix(HF_PREFIX))


def _model_of_folder(folder: Path, trained: dict[str, Any]) -> Architecture | AttachedArchitecture:
    content, where = read_hf_config(folder), str(folder / "config.json")
    try:
        own = None if trained else architecture_from_hf(content, where=where)
    except ConfigError:
        raise
    except (ValueError, TypeError, LookupError, ArithmeticError, AttributeError) as error:
        raise ConfigError(
            f"{where} describes no {content.get('model_type')} model ({type(error).__name__}: {error})",
            fix="use the config.json that belongs to the weights",
        ) from error
    if own is None and "model_type" not in content:
        raise ConfigError(
            f"{where} does not say its model_type, and architectures has none of {', '.join(FAMILIES)}",
            so="what its weights belong to is not known",
            fix='name it, such as "model_type": "llama"',
        )
    return own or AttachedArchitecture(content=content, trained=trained)


def _stored_architecture(folder: str) -> Architecture | AttachedArchitecture:
    """How a checkpoint describes its model. ``folder`` may be a URL."""
    from bytescale.storage.place import place_at, read_file  # imports fsspec

    file = place_at(folder) / "run_state.json"
    try:
        return described_architecture(dict(parse_json(read_file(file))["architecture"]), str(file))
    except ConfigError:
        raise
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ConfigError(
            f"the folder {folder} is not a checkpoint of bytescale: {error}",
            fix="name a folder checkpoints/step-*",
        ) from error


def described_architecture(stored: dict[str, Any], where: str) -> Architecture | AttachedArchitecture:
    """The model that a checkpoint describes (``RunState.architecture``). Raises ``ConfigError`` if it is none."""
    try:
        if not AttachedArchitecture.is_in(stored):
            own = Architecture(**stored)
            _check_architecture(own)
            return own
        attached = AttachedArchitecture.of_dict(stored)
        if not all(isinstance(own, dict) for own in (attached.content, attached.buffers, attached.trained)):
            raise TypeError("what should be an object is none")
        return replace(attached, content=checked_config(attached.content, where))
    except ConfigError:
        raise
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ConfigError(f"{where} describes no model ({error})", fix="name another checkpoint") from error


def _check_architecture(shape: Architecture) -> None:
    check_limits(shape, "model.")
    if shape.num_heads % shape.num_kv_heads:
        raise ConfigError(
            f"model.num_heads = {shape.num_heads} is not a multiple of model.num_kv_heads = {shape.num_kv_heads}",
            so="query heads could not share key and value heads evenly",
            fix="use a divisor of num_heads",
        )
    if shape.head_dim % 2:
        raise ConfigError(
            f"model.head_dim is {shape.head_dim}, odd", so="rotary embeddings turn pairs", fix="make it even"
        )
    if not (shape.num_experts or shape.experts_per_token):
        return
    if not 1 <= shape.experts_per_token <= shape.num_experts:
        raise ConfigError(
            f"model.experts_per_token is {shape.experts_per_token} and model.num_experts {shape.num_experts}",
            so="a token could not be sent to that many experts",
            fix="use 1 to num_experts, or 0 for both (a dense model)",
        )
    for name in ("hidden_size", "ffn_hidden_size"):
        if getattr(shape, name) % 8:
            raise ConfigError(
                f"model.{name} is {getattr(shape, name)}, not a multiple of 8",
                so="grouped matrix products need rows of whole 16 bytes",
                fix=f"use {-(-getattr(shape, name) // 8) * 8}",
            )
