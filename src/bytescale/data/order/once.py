"""Global batches that hold every sample of a corpus exactly once, for evaluation and scoring."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from bytescale.data.order.batches import GlobalBatch
from bytescale.data.order.index import CorpusIndex


def batches_once(index: CorpusIndex, batch_tokens: int) -> Iterator[GlobalBatch]:
    """Yield the samples in the order of the sources, in batches of at most ``batch_tokens`` tokens.

    A longer sample is a batch of its own. All parts of ``index`` must have been read. The batches depend on nothing
    else, so all ranks get the same.
    """
    # The index lists .bin files of all sources behind the text of all sources.
    parts = np.argsort(index.part_sources, kind="stable")
    pieces = index.pieces_of(parts.tolist())
    before = np.concatenate([[0], np.cumsum(index.pieces.length[index.rows(pieces)])])
    start = step = 0
    while start < len(pieces):
        stop = int(np.searchsorted(before, before[start] + batch_tokens, side="right")) - 1
        stop = max(stop, start + 1)
        yield GlobalBatch.of(index, pieces[start:stop], step=step, epoch=0, ends_epoch=stop == len(pieces))
        start, step = stop, step + 1
