"""How our parameter names and shapes correspond to those of Hugging Face's safetensors files.

Llama's tensors map one to one. Each expert of Mixtral is a tensor of its own there, and a slice of a parameter here.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import nn

_EXPERT_PARTS = {"gate_proj": "w1", "down_proj": "w2", "up_proj": "w3"}


@dataclass(frozen=True, slots=True)
class HFTensor:
    """One tensor of a Hugging Face file, and the parameter or slice of a parameter that it corresponds to."""

    hf_name: str
    name: str
    """Name of our parameter."""
    expert: int | None
    """The tensor is the slice ``parameter[expert]``; None: it is the whole parameter."""
    shape: tuple[int, ...]
    """Shape of the tensor."""


def pieces_of(model: nn.Module) -> list[HFTensor]:
    """Every tensor of ``model`` (which may live on the meta device), in the order of its parameters."""
    return [piece for name, value in model.named_parameters() for piece in _pieces(name, tuple(value.shape))]


def _pieces(name: str, shape: tuple[int, ...]) -> Iterator[HFTensor]:
    if ".mlp.experts." in name:
        layer, part = name.split(".mlp.experts.")
        for expert in range(shape[0]):
            hf_name = f"model.{layer}.block_sparse_moe.experts.{expert}.{_EXPERT_PARTS[part]}.weight"
            yield HFTensor(hf_name, name, expert, shape[1:])
        return
    hf_name = name if name == "lm_head.weight" else f"model.{name}"
    yield HFTensor(hf_name.replace(".mlp.router.", ".block_sparse_moe.gate."), name, None, shape)
