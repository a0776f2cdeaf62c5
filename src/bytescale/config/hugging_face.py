"""Hugging Face's config.json to ``Architecture`` and back. Free of torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from bytescale.common.errors import ConfigError
from bytescale.common.parsing import MOST_SETTINGS, parse_json, read_input
from bytescale.config.architecture import Architecture
from bytescale.config.foreign_config import checked_config, refuse_links_out

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


def read_hf_config(folder: Path) -> dict[str, Any]:
    """The content of a folder's config.json. All use of a folder begins here.

    Raises ``ConfigError`` when there is none, or one from which no model can be built, and for links out of the folder.
    """
    path = folder / "config.json"
    refuse_links_out(folder)
    if (folder / "adapter_config.json").exists():
        raise ConfigError(
            f"{folder} holds an adapter (LoRA), which belongs to another model",
            so="that model's weights would be taken from wherever its adapter_config.json says",
            fix="merge it: PeftModel.from_pretrained(BASE, FOLDER).merge_and_unload().save_pretrained(NEW_FOLDER)",
        )
    try:
        content = dict(parse_json(read_input(path, MOST_SETTINGS)))
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(
            f"{path} cannot be read ({error})", fix="name the folder of a model saved by save_pretrained()"
        ) from error
    return checked_config(content, str(path))


def architecture_from_hf(content: dict[str, Any], *, where: str = "config.json") -> Architecture | None:
    """The model as our own code has it; None: transformers' code may have it (``config.attached``).

    Raises ``ConfigError`` for quantised weights, for dropout and where numbers are missing.
    """
    refuse_quantised(content, where)
    of_type = {model_type: family for family, model_type in FAMILIES.items()}
    # Older files of Llama have no architectures.
    named = content.get("architectures") or [of_type.get(str(content.get("model_type")))]
    if named[0] not in FAMILIES or _has_what_ours_lack(content):
        return None
    if content.get("attention_dropout"):  # no other code would give the results of one process either
        raise ConfigError(
            f"{where} has attention_dropout = {content['attention_dropout']!r}",
            so="the loss would depend on how sequences lie on ranks",
            fix="set it to 0.0 in config.json",
        )
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
    rope = _rope_from_hf(said)
    return None if rope is None else Architecture(**numbers, **rope)


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


def _rope_from_hf(content: dict[str, Any]) -> dict[str, Any] | None:
    """Version 5 writes ``rope_parameters``; version 4 ``rope_theta`` and ``rope_scaling``. None: ours cannot do it."""
    rope = {**(content.get("rope_scaling") or {}), **(content.get("rope_parameters") or {})}
    kind = rope.get("rope_type", rope.get("type", "default"))
    numbers: dict[str, Any] = {"rope_theta": float(rope.get("rope_theta", content["rope_theta"]))}
    if kind == "default":
        return numbers
    factors = {name: float(rope[name]) for name in _LLAMA3_FACTORS} if kind == "llama3" else _LLAMA3_FACTORS
    if kind not in ("linear", "llama3") or factors != _LLAMA3_FACTORS:
        return None
    numbers |= {"rope_scaling": kind, "rope_scaling_factor": float(rope["factor"])}
    if kind == "llama3":
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


def _has_what_ours_lack(content: dict[str, Any]) -> bool:
    """Whether features are switched on whose weights or mathematics our models do not have."""
    return (
        bool(content.get("attention_bias"))
        or bool(content.get("mlp_bias"))
        or content.get("sliding_window") is not None
        or content.get("hidden_act", "silu") not in ("silu", "swish")
    )
