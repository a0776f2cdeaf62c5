"""The weights of a model, one tensor at a time, under the names that Hugging Face's files have: for inference engines.

transformers may hold a weight in another form than its files do, such as the experts of a layer in one tensor. Each
tensor is brought into the files' form by itself. Adapters (LoRA) are added to the weights that they are for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from transformers.core_model_loading import revert_weight_conversion

from bytescale.common.errors import ConfigError
from bytescale.hf.model.head import causal_model, embeddings_of
from bytescale.runtime.optimizer.lockstep import Units

_BASE = ".base_layer."


@torch.no_grad()
def named_weights(
    model: nn.Module,
    dtype: torch.dtype | None,
    whole: Callable[[nn.Parameter], Tensor] = nn.Parameter.detach,
    units: Units | None = None,
) -> Iterator[tuple[str, Tensor]]:
    """Yield names and whole tensors; ``HDP.weights``. ``whole``: all of a parameter's values. ``units``: open it."""
    for root, name, parameter in exported(model):
        value: Any = whole(parameter)
        value = value.full_tensor() if hasattr(value, "full_tensor") else value
        if _BASE in name:
            owner, _, rest = name.partition(_BASE)
            layer: Any = root.get_submodule(owner)
            if rest == "weight" and not layer.merged:
                for adapter in layer.active_adapters:
                    value = value + layer.get_delta_weight(adapter).to(value.dtype)
            name = f"{owner}.{rest}"
        for written, tensor in revert_weight_conversion(root, {name: value}).items():
            yield written, tensor if dtype is None else tensor.to(dtype)
    if units is not None:
        units.begin()


def exported(model: nn.Module) -> Iterator[tuple[Any, str, nn.Parameter]]:
    """The model of transformers, and name and parameter of each of its weights. Raises as ``HDP.weights``."""
    root = causal_model(model)
    if adapted_ties(root):
        raise ConfigError(
            f"an adapter (LoRA) is on the embedding or the head of the {type(root).__name__}, which are one matrix",
            so="an inference engine would use it for both, and so be another model",
            fix="leave embed_tokens and lm_head out of the adapter's targets; `bytescale convert` and "
            "merge_and_unload() of a model with two matrices (tie_word_embeddings = false) can write such adapters",
        )
    for name, parameter in root.named_parameters():
        if ".lora_" in name:
            continue
        if ".modules_to_save." in name or ".lora_magnitude_vector." in name:
            raise ConfigError(
                f"{name} is neither a weight of the model nor an adapter that is added to one",
                so="an inference engine would run another model",
                fix="merge the adapters (merge_and_unload()) into a copy, and give it that",
            )
        yield root, name, parameter


def adapted_ties(model: nn.Module) -> bool:
    """Whether one matrix is a model's embedding and its head, and an adapter (LoRA) belongs to one of the two uses."""
    first, last = embeddings_of(model)
    if first is None or last is None or _plain(first).weight is not _plain(last).weight:
        return False
    return _plain(first) is not first or _plain(last) is not last


def untie(model: nn.Module) -> None:
    """Give the head a matrix of its own, with the same numbers."""
    head = _plain(embeddings_of(model)[1])
    head.weight = nn.Parameter(head.weight.detach().clone(), requires_grad=False)
    causal_model(model).config.tie_word_embeddings = False


def _plain(module: Any) -> Any:
    """The module itself, without an adapter around it."""
    return getattr(module, "base_layer", module)
