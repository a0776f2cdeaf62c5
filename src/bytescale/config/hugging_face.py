"""Hugging Face's config.json: read from a folder, and made for a preset. Free of torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from bytescale.common.errors import ConfigError
from bytescale.common.parsing import MOST_SETTINGS, parse_json, read_input
from bytescale.config.architecture import Architecture
from bytescale.config.foreign_config import checked_config, refuse_links_out

FAMILIES = {"LlamaForCausalLM": "llama", "MixtralForCausalLM": "mixtral"}
"""Architectures of presets, and their ``model_type``."""

SPECIAL_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")
"""Written as unknown: left out, transformers would take 1 and 2, whatever the tokenizer."""

NAMES = {
    "vocab_size": "vocab_size",
    "num_layers": "num_hidden_layers",
    "hidden_size": "hidden_size",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "rope_theta": "rope_theta",
    "ffn_hidden_size": "intermediate_size",
    "norm_eps": "rms_norm_eps",
    "tie_embeddings": "tie_word_embeddings",
    "init_std": "initializer_range",
}
"""Numbers of an ``Architecture``, and what config.json calls them."""
EXPERT_NAMES = {
    "num_experts": "num_local_experts",
    "experts_per_token": "num_experts_per_tok",
}


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


def hf_config_of(shape: Architecture) -> dict[str, Any]:
    """The content of a preset's config.json; versions 4 and 5 of transformers read it."""
    family = "MixtralForCausalLM" if shape.num_experts else "LlamaForCausalLM"
    names = NAMES | EXPERT_NAMES if shape.num_experts else NAMES
    content: dict[str, Any] = {
        "architectures": [family],
        "model_type": FAMILIES[family],
        **{theirs: getattr(shape, ours) for ours, theirs in names.items()},
        "hidden_act": "silu",
        "max_position_embeddings": 8192,  # nothing is computed from it
        "rope_scaling": None,
        **dict.fromkeys(SPECIAL_TOKENS),
    }
    if shape.num_experts:
        content |= {"sliding_window": None, "router_aux_loss_coef": shape.router_aux_loss_weight}
    return content


def shape_of(content: dict[str, Any]) -> Architecture:
    """The shape of a Llama or Mixtral with this config.json, the other way round."""
    names = NAMES | EXPERT_NAMES if "num_local_experts" in content else NAMES
    return Architecture(**{ours: content[theirs] for ours, theirs in names.items()})


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
