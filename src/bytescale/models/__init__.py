"""Floor 3: decoder models as plain mathematics. They know tokens, positions and an attention callable, no rank."""

from bytescale.models.llama import Llama

__all__ = ["Llama"]
