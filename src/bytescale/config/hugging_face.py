"""Hugging Face's config.json, read from a folder. Free of torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from bytescale.common.errors import ConfigError
from bytescale.common.parsing import MOST_SETTINGS, parse_json, read_input
from bytescale.config.foreign_config import checked_config, refuse_links_out

FAMILIES = {"LlamaForCausalLM": "llama", "MixtralForCausalLM": "mixtral"}
"""Architectures of presets, and their ``model_type``."""


def read_hf_config(folder: Path) -> dict[str, Any]:
    """The content of a folder's config.json, with its model_type. All use of a folder begins here.

    Raises ``ConfigError`` when there is none, or one from which no model can be built, for quantised weights, and for
    links out of the folder.
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
            f"{path} cannot be read ({error})",
            fix="name the folder of a model saved by save_pretrained(); `bytescale convert` makes one of a checkpoint",
        ) from error
    content = checked_config(content, str(path))
    if content.get("quantization_config"):
        method = content["quantization_config"].get("quant_method", "of an unknown method")
        raise ConfigError(
            f"{path} is of quantised weights ({method})",
            so="they would be read without their scales, and be off by orders of magnitude",
            fix="use the model's unquantised weights, or save them with transformers: "
            "from_pretrained(..., dequantize) and save_pretrained()",
        )
    if "model_type" not in content:
        named = content.get("architectures")
        model_type = FAMILIES.get(str(named[0])) if isinstance(named, list) and named else None
        if model_type is None:
            raise ConfigError(
                f"{path} does not say its model_type, and architectures has none of {', '.join(FAMILIES)}",
                so="what its weights belong to is not known",
                fix='name it, such as "model_type": "llama"',
            )
        content["model_type"] = model_type
    return content
