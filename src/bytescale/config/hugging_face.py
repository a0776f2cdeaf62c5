"""Hugging Face's config.json to ``Architecture`` and back. Free of torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from bytescale.common.errors import ConfigError
from bytescale.common.parsing import parse_json
from bytescale.config.architecture import Architecture

FAMILIES = {"LlamaForCausalLM": "llama", "MixtralForCausalLM": "mixtral"}
"""Supported architectures and their ``model_type``."""

SPECIAL_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")
"""Written as unknown: left out, transformers would take 1 and 2, whatever the tokenizer."""

_NAMES = {
    "vocab_size": "vocab_size",
    "num_layers": "num_hidden_layers",
    "hidden_size": "hidden_size",
    "num_heads": "num_attention_heads",
    "ffn_hidden_size": "intermediate_size",
    "norm_eps": "rms_norm_eps",
    "tie_embeddings": "tie_word_embeddings",
    "init_std": "initializer_range",
}
_EXPERT_NAMES = {
    "num_experts": "num_local_experts",
    "experts_per_token": "num_experts_per_tok",
    "router_aux_loss_weight": "router_aux_loss_coef",
}
# What transformers takes where a file is silent.
_LLAMA = {"rms_norm_eps": 1e-6, "tie_word_embeddings": False, "initializer_range": 0.02, "rope_theta": 1e4}
_MIXTRAL = _LLAMA | {"rms_norm_eps": 1e-5, "rope_theta": 1e6, "num_local_experts": 8, "num_experts_per_tok": 2,
                     "router_aux_loss_coef": 0.001}  # fmt: skip
_LLAMA3_FACTORS = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}


class NotOurs(ConfigError):
    """A model that our own code does not have. Transformers' code may have it (``config.attached``)."""


def read_hf_config(folder: Path) -> dict[str, Any]:
    """The content of a folder's config.json. Raises ``ConfigError`` when there is none."""
    path = folder / "config.json"
    try:
        content = parse_json(path.read_text(encoding="utf-8"))
        return dict(content)
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(
            f"{path} cannot be read ({error})", fix="name the folder of a model saved by save_pretrained()"
        ) from error


def architecture_from_hf(content: dict[str, Any], *, where: str = "config.json") -> Architecture:
    """Raises ``ConfigError`` for other architectures, and for features of these that our models do not have."""
    refuse_quantised(content, where)
    named = content.get("architectures") or [_architecture_of_type(content, where)]
    if named[0] not in FAMILIES:
        raise NotOurs(
            f"{where} is of a {named[0]}, which is not supported here",
            so="its weights have no place in our own models",
            fix=f"use one of {', '.join(FAMILIES)}; bytescale train, plan, simulate, score and "
            "convert also take other decoders",
        )
    _refuse_unknown_features(content, where)
    mixture = named[0] == "MixtralForCausalLM"
    names = _NAMES | _EXPERT_NAMES if mixture else _NAMES
    said = (_MIXTRAL if mixture else _LLAMA) | {name: value for name, value in content.items() if value is not None}
    missing = [name for name in names.values() if name not in said]
    if missing:
        raise ConfigError(f"{where} lacks {', '.join(missing)}", fix="save the model anew")
    numbers: dict[str, Any] = {ours: said[theirs] for ours, theirs in names.items()}
    heads = numbers["num_heads"]
    numbers["num_kv_heads"] = said.get("num_key_value_heads", heads)
    numbers["head_dim"] = said.get("head_dim", numbers["hidden_size"] // heads)
    return Architecture(**numbers, **_rope_from_hf(said, where))


def hf_config_of(shape: Architecture, *, dtype: str, max_position_embeddings: int | None = None) -> dict[str, Any]:
    """What ``config.json`` has to say; versions 4 and 5 of transformers read it.

    ``dtype``: of the weights, ``"float32"`` or ``"bfloat16"``. ``max_position_embeddings``: longest context, from which
    nothing is computed; None: RoPE's original context.
    """
    family = "MixtralForCausalLM" if shape.num_experts else "LlamaForCausalLM"
    names = _NAMES | _EXPERT_NAMES if shape.num_experts else _NAMES
    content: dict[str, Any] = {
        "architectures": [family],
        "model_type": FAMILIES[family],
        **{theirs: getattr(shape, ours) for ours, theirs in names.items()},
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": max_position_embeddings or shape.rope_original_context,
        "rope_theta": shape.rope_theta,
        "rope_scaling": None,
        "torch_dtype": dtype,
        **dict.fromkeys(SPECIAL_TOKENS),
    }
    if shape.rope_scaling != "none":
        content["rope_scaling"] = {"rope_type": shape.rope_scaling, "factor": shape.rope_scaling_factor}
    if shape.rope_scaling == "llama3":
        original = {"original_max_position_embeddings": shape.rope_original_context}
        content["rope_scaling"] |= {**_LLAMA3_FACTORS, **original}
    if shape.num_experts:
        content["sliding_window"] = None
    return content


def _architecture_of_type(content: dict[str, Any], where: str) -> str:
    """What ``model_type`` says where a file does not name its architecture, as older files of Llama do."""
    for architecture, model_type in FAMILIES.items():
        if content.get("model_type") == model_type:
            return architecture
    if "model_type" not in content:
        raise ConfigError(
            f"{where} says neither architectures nor model_type",
            so="what its weights belong to is not known",
            fix='name the architecture in it, such as "architectures": ["LlamaForCausalLM"]',
        )
    return f"model of type {content['model_type']}"


def _rope_from_hf(content: dict[str, Any], where: str) -> dict[str, Any]:
    """Version 5 writes ``rope_parameters``; version 4 ``rope_theta`` and ``rope_scaling``."""
    rope = {**(content.get("rope_scaling") or {}), **(content.get("rope_parameters") or {})}
    kind = rope.get("rope_type", rope.get("type", "default"))
    numbers: dict[str, Any] = {"rope_theta": float(rope.get("rope_theta", content["rope_theta"]))}
    if kind == "default":
        return numbers
    if kind not in ("linear", "llama3"):
        raise NotOurs(
            f"{where} stretches rotary positions by {kind!r}",
            so="attention would see other angles than the model was trained with",
            fix="use a model with none, linear or llama3",
        )
    numbers |= {"rope_scaling": kind, "rope_scaling_factor": float(rope["factor"])}
    if kind == "llama3":
        for name, ours in _LLAMA3_FACTORS.items():
            if float(rope[name]) != ours:
                raise NotOurs(f"{where}: llama3 scaling with {name} = {rope[name]}", fix=f"only {ours} is supported")
        numbers["rope_original_context"] = int(rope["original_max_position_embeddings"])
    return numbers


def refuse_quantised(content: dict[str, Any], where: str) -> None:
    """Raise ``ConfigError`` for weights that are stored with scales beside them."""
    if content.get("quantization_config"):
        method = content["quantization_config"].get("quant_method", "of an unknown method")
        raise ConfigError(
            f"{where} is of quantised weights ({method})",
            so="they would be read without their scales, and be off by orders of magnitude",
            fix="use the model's unquantised weights, or save them with transformers: "
            "from_pretrained(..., dequantize) and save_pretrained()",
        )


def _refuse_unknown_features(content: dict[str, Any], where: str) -> None:
    """Features whose weights or mathematics our models do not have, if they are switched on."""
    on = {
        "attention_bias": bool(content.get("attention_bias")),
        "mlp_bias": bool(content.get("mlp_bias")),
        "sliding_window": content.get("sliding_window") is not None,
        "hidden_act": content.get("hidden_act", "silu") not in ("silu", "swish"),
        "attention_dropout": bool(content.get("attention_dropout")),
    }
    for name, present in on.items():
        if present:
            # With dropout, no other code would give the results of one process either.
            raise (ConfigError if name == "attention_dropout" else NotOurs)(
                f"{where} has {name} = {content[name]!r}, which our models do not have",
                so="they would compute something else from its weights",
                fix="use a model without it" if name != "attention_dropout" else "set it to 0.0 in config.json",
            )
