"""From a model section to the concrete architecture, and the checks of its numbers. Free of torch."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from bytescale.common.errors import ConfigError, typed_path
from bytescale.common.parsing import parse_json
from bytescale.config.description import ModelDescription, trained_of
from bytescale.config.foreign_config import checked_config
from bytescale.config.hugging_face import read_hf_config
from bytescale.config.load import nearest
from bytescale.config.presets import PRESETS
from bytescale.config.schema import ModelConfig

HF_PREFIX = "hf:"
CHECKPOINT_PREFIX = "checkpoint:"
SEEN_WEIGHTS = "weights.json"
"""In ``origin/`` of a run that trains a part of a model: which weights the others are (``weights_fingerprint``)."""


def resolve_model(config: ModelConfig, *, tokenizer_vocab_size: int | None = None) -> ModelDescription:
    """What is trained: a decoder that transformers has, by its config.json with the fields of ``model.config``.

    A preset ``hf:FOLDER`` or ``checkpoint:FOLDER`` is the model in that folder and keeps its vocabulary, which is that
    of its weights. Another preset's is the tokenizer's rounded up to a multiple of 64 if a tokenizer is known.

    Raises ``ConfigError`` for an unknown preset, for fields that a model does not have, and for shapes that contradict
    each other.
    """
    if config.preset.startswith(HF_PREFIX):
        found = ModelDescription(content=read_hf_config(source_folder(config.preset)), trained=trained_of(config))
    elif config.preset.startswith(CHECKPOINT_PREFIX):
        found = _stored_architecture(config.preset.removeprefix(CHECKPOINT_PREFIX))
    elif config.preset in PRESETS:
        return _of_preset(config, tokenizer_vocab_size)
    else:
        raise ConfigError(
            f"model.preset is {config.preset!r}, which does not exist",
            fix="use one of " + ", ".join(PRESETS) + ", hf:FOLDER or checkpoint:FOLDER",
        )
    if config.router_aux_loss_weight is not None:
        found = replace(found, balance=config.router_aux_loss_weight)
    stage, coefficient = config.indexer_loss, config.indexer_loss_coefficient
    learned = None if stage == "off" else (stage, coefficient)
    return replace(found, content=_changed(found.content, config), indexer_loss=learned)


def _of_preset(config: ModelConfig, tokenizer_vocab_size: int | None) -> ModelDescription:
    content, weight = dict(PRESETS[config.preset]), config.router_aux_loss_weight
    if weight is not None and "router_aux_loss_coef" in content:
        content["router_aux_loss_coef"] = weight
    if tokenizer_vocab_size is not None:
        content["vocab_size"] = -(-tokenizer_vocab_size // 64) * 64
    content = _changed(content, config)
    hidden, heads = content["hidden_size"], content["num_attention_heads"]
    if "head_dim" not in config.config and config.config.keys() & {"hidden_size", "num_attention_heads"}:
        if hidden % heads:
            raise ConfigError(
                f"hidden_size = {hidden} of model.config is not a multiple of num_attention_heads = {heads}",
                fix="change one of them, or set head_dim",
            )
        content["head_dim"] = hidden // heads
    kv_heads, width = content["num_key_value_heads"], content["head_dim"]
    if heads % kv_heads:
        raise ConfigError(
            f"num_attention_heads = {heads} of model.config is not a multiple of num_key_value_heads = {kv_heads}",
            so="query heads could not share key and value heads evenly",
            fix="use a divisor of num_attention_heads",
        )
    if width % 2:
        raise ConfigError(
            f"head_dim of model.config is {width}, odd", so="rotary embeddings turn pairs", fix="make it even"
        )
    chosen, experts = content.get("num_experts_per_tok", 1), content.get("num_local_experts", 1)
    if not 1 <= chosen <= experts:
        raise ConfigError(
            f"num_experts_per_tok of model.config is {chosen}, and num_local_experts {experts}",
            so="a token could not be sent to that many experts",
            fix="use 1 to num_local_experts",
        )
    return ModelDescription(
        content=content, balance=content.get("router_aux_loss_coef", 0.0) if weight is None else weight
    )


def _changed(content: dict[str, Any], config: ModelConfig) -> dict[str, Any]:
    """The content of config.json with the fields of ``model.config``, whose types are as before."""
    for name, value in config.config.items():
        usual = content.get(name)
        if name not in content:
            raise ConfigError(
                f"model.config has {name}, and the config.json of {config.preset} does not",
                so="it would have no effect",
                fix=nearest(name, content),
            )
        if not (usual is None or type(value) in (type(usual), int if isinstance(usual, float) else type(usual))):
            raise ConfigError(f"model.config has {name} = {value!r}", fix=f"write a value such as {usual!r}")
    return checked_config({**content, **config.config}, "model.config")


def source_folder(source: str) -> Path:
    """The folder of ``hf:FOLDER``."""
    return typed_path(source.removeprefix(HF_PREFIX))


def _stored_architecture(folder: str) -> ModelDescription:
    """How a checkpoint describes its model. ``folder`` may be a URL."""
    from bytescale.storage.place import place_at, read_file  # imports fsspec

    file = place_at(folder) / "run_state.json"
    try:
        return described_architecture(dict(parse_json(read_file(file))["architecture"]), str(file))
    except ConfigError:
        raise
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ConfigError(
            f"the folder {folder} is not a checkpoint of bytescale: {error}", fix="name a folder checkpoints/step-*"
        ) from error


def described_architecture(stored: dict[str, Any], where: str) -> ModelDescription:
    """The model that a checkpoint describes (``RunState.architecture``). Raises ``ConfigError`` if it is none."""
    if "num_layers" in stored:
        raise ConfigError(
            f"{where} is of a Llama or Mixtral of an earlier version's own code",
            so="its weights have other names",
            fix="make a folder of it with the version that wrote it (`bytescale convert`), and begin with --init "
            "hf:FOLDER",
        )
    try:
        found = ModelDescription.of_dict(stored)
        if not all(isinstance(own, dict) for own in (found.content, found.buffers, found.trained)):
            raise TypeError("what should be an object is none")
        return replace(found, content=checked_config(found.content, where))
    except ConfigError:
        raise
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ConfigError(f"{where} describes no model ({error})", fix="name another checkpoint") from error
