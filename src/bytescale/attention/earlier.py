"""All rows before each run of a rank, fetched at once: what queries choose their keys from.

A query that chooses its keys looks at every earlier token of its document, wherever that is. A member therefore sends
the rows of each of its runs (``runs``) once to every member that has a later run of the same path; in backward the
gradients of these rows travel back and are added up by their owner, in the dtype of sums.

Shape letters: T rows of the micro-batch, n rows that arrive, W numbers of a row.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import torch
from torch import Tensor

from bytescale.attention.blocks import RowRanges, Rows
from bytescale.attention.packed import PackedAttention
from bytescale.attention.rings.messages import Kind

_ALL = 2**62


class Path:
    """A run and all rows before it, in the order of positions.

    Attributes:
        rows: of the run.
        num_before: rows before it.
    """

    def __init__(self, rows: slice, before: Sequence[tuple[int, int]]) -> None:
        self.rows, self.num_before = rows, sum(stop - start for start, stop in before)
        self._all = RowRanges([*before, (rows.start, rows.stop)])

    def on(self, device: torch.device) -> Rows:
        """Picks the path's rows from those of ``EarlierRows.fetch``."""
        return self._all.on(device)


class EarlierRows:
    """The rows before each run of one micro-batch. The messages are those of ``attention``."""

    def __init__(self, attention: PackedAttention) -> None:
        self.attention, runs = attention, attention.runs
        self._before = runs.rows_before(_ALL)
        self._runs = runs.all_rows
        self.num_rows = runs.num_rows
        self.num_places = runs.num_rows + sum(self._before.arriving)

    @cached_property
    def paths(self) -> list[Path]:
        """Of all runs that have rows."""
        pairs = zip(self._runs, self._before.places, strict=True)
        return [Path(rows, before) for rows, before in pairs if rows.start < rows.stop]

    def fetch(self, rows: Tensor, kind: Kind) -> Tensor:
        """``rows [T, W]`` of this rank -> ``[T + n, W]``, behind them those of other members."""
        grid = self.attention.grid
        if grid is None:
            return rows
        return torch.cat([rows, self._before.fetch(rows, grid, kind)])

    def give_back(self, gradients: Tensor, kind: Kind) -> Tensor:
        """Of ``gradients [T + n, W]`` of what ``fetch`` returned, the sums over all members for the own rows."""
        grid, own = self.attention.grid, gradients[: self.num_rows]
        if grid is not None:
            self._before.give_back(own, gradients[self.num_rows :], grid, kind)
        return own
