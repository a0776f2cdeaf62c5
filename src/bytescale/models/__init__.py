"""Layer 3: decoder models as plain mathematics on tokens, positions and an attention callable, without ranks."""

from bytescale.config.architecture import Architecture
from bytescale.models.llama import Llama
from bytescale.models.mixtral import Mixtral

__all__ = ["Llama", "Mixtral", "build_model"]


def build_model(architecture: Architecture, layers: range | None = None) -> Llama:
    """Build the model that ``architecture`` describes, or some of its layers, with uninitialised weights."""
    return (Mixtral if architecture.num_experts else Llama)(architecture, layers)
