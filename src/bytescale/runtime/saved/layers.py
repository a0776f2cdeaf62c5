"""What hooks on a decoder's layers may assume, of our own layers and of those of transformers."""

from __future__ import annotations

from typing import Any

from torch import Tensor


def layer_input(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """The residual stream that a layer is given: its first argument, or ``hidden_states`` where all have names."""
    stream: Tensor = args[0] if args else kwargs["hidden_states"]
    return stream


def shared_arguments(args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
    """Everything else that a layer is given, which other layers may be given too, such as rotary angles."""
    return (args[1:], kwargs if args else {name: value for name, value in kwargs.items() if name != "hidden_states"})
