"""Which pipeline stage a decoder is, and how its pass ends (``hf.model.stages`` makes one)."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor, nn


class StageEnd(Exception):
    """Ends the pass of a stage, with its output ``[1, T, C]``."""

    def __init__(self, hidden: Tensor) -> None:
        super().__init__()
        self.hidden = hidden


@dataclass(kw_only=True)
class Stage:
    """One stage of a decoder, from its first to its last own layer.

    Attributes:
        names: of the parameters that it owns. A tied head is owned by the first stage, with the embedding.
        tied: the weights of the embedding or of the head, where they are one and lie on two stages; else None.
        received: ``[1, T, C]`` that the first own layer is given in the pass that runs; None on the first stage.
    """

    number: int
    count: int
    names: frozenset[str] = frozenset()
    tied: nn.Parameter | None = None
    received: Tensor | None = field(default=None, repr=False)

    @property
    def is_first(self) -> bool:
        return self.number == 0

    @property
    def is_last(self) -> bool:
        return self.number == self.count - 1
