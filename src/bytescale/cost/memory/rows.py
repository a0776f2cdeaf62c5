"""The bytes that one token takes in the messages of a ring."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class RingWidths:
    """Bytes of one row, of the widest layer of a kind; 0 where the model has none.

    Attributes:
        query: of the queries and of the output, whichever is wider.
        keys: of keys and values together.
        lse: a number per head, in the dtype of sums.
        wide: bytes of a number in a sum, over those in the compute dtype.
        window: keys that a query sees; None: all of them.
    """

    query: float
    keys: float
    lse: float
    wide: float
    window: int | None = None

    @property
    def own_message(self) -> float:
        """The message with a slice's queries."""
        return 2 * self.query + 2 * self.lse

    @property
    def row_buffers(self) -> float:
        """Messages of a grid's row, per token of other columns: their queries, and results that go and that come.

        A buffer of results holds those of forward or of backward, whichever is larger.
        """
        return self.own_message + 2 * max(self.query * self.wide, self.query + self.lse)

    @property
    def ring_buffers(self) -> float:
        """Two messages of keys and values and two of their gradients."""
        return 2 * self.keys * (1 + self.wide)
