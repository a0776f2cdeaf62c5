"""Floor 3: decoder models as plain mathematics. They know tokens, positions and an attention callable, no rank."""

from bytescale.config import Architecture
from bytescale.models.llama import Llama
from bytescale.models.mixtral import Mixtral

__all__ = ["Llama", "Mixtral", "build_model"]


def build_model(architecture: Architecture, layers: range | None = None) -> Llama:
    """The family that ``architecture`` describes, or some of its layers, with uninitialised weights."""
    return (Mixtral if architecture.num_experts else Llama)(architecture, layers)
