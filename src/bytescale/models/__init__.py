"""Floor 3: decoder models as plain mathematics. They know tokens, positions and an attention callable, no rank."""

from bytescale.config import Architecture
from bytescale.models.llama import Llama
from bytescale.models.mixtral import Mixtral

__all__ = ["Llama", "Mixtral", "build_model"]


def build_model(architecture: Architecture) -> Llama:
    """The family that ``architecture`` describes, with uninitialised weights (``model.initialise(seed)``)."""
    return Mixtral(architecture) if architecture.num_experts else Llama(architecture)
