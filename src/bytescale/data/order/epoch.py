"""The order of the samples in an epoch. It depends on the corpus, the seed and the epoch, never on the ranks.

If the text of the corpus fits in one *window* (``data.shuffle_window_mib``), all samples of an epoch are shuffled
together. If it is larger, an epoch goes through it window by window, and the next is tokenised while one trains:

1. The parts of text are shuffled, and cut into windows of about the configured size.
2. The samples of ``.bin`` files are shuffled over the whole epoch. Each window gets a share in proportion to its text.
3. The samples of one window are shuffled among themselves.
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bytescale.common.arrays import IntArray, blocks
from bytescale.common.errors import CheckpointError
from bytescale.data.order.index import CorpusIndex
from bytescale.data.tokens.samples import Samples, SampleTable

MIB = 1024**2
EVERYTHING = "everything"

# An epoch of several windows needs three more kinds of random draws. Each kind adds its own number to the seed.
_DRAW_OF_BINS, _DRAW_OF_PARTS, _DRAW_OF_WINDOW = 1, 2, 3
_SORTED_APART = 8
"""Ranges of draws that are sorted one after the other: a temporary array has an eighth of them."""
_BLOCK = 2**16
"""Samples of a window that are looked up together, before they are drawn."""
_ROWS = np.arange(_BLOCK)


def epoch_order(num_samples: int, seed: int, epoch: int, *stream: int) -> NDArray[np.integer]:
    """Return the permutation of one epoch, ``[num_samples]``. Numbers in ``stream`` give independent ones.

    The permutation sorts raw 64-bit draws. NumPy promises that its bit streams and ``SeedSequence`` never change, but
    makes no such promise for ``Generator.permutation``, and a resumed run may use another version of NumPy.
    """
    seeds, kind = np.random.SeedSequence((seed, epoch, *stream)), np.uint32 if num_samples < 2**32 else np.int64
    order: NDArray[np.integer] = np.empty(num_samples, kind)
    first = 0
    for number in range(_SORTED_APART):
        generator, draws, rows = np.random.PCG64(seeds), [np.zeros(0, np.uint64)], [np.zeros(0, kind)]
        for own in blocks(num_samples):
            drawn = generator.random_raw(own.stop - own.start)
            mine = np.flatnonzero(drawn // np.uint64(2**64 // _SORTED_APART) == number)
            draws.append(drawn[mine])
            rows.append((mine + own.start).astype(kind))
        by_draw = np.argsort(np.concatenate(draws), kind="stable")
        order[first : first + len(by_draw)] = np.concatenate(rows)[by_draw]
        first += len(by_draw)
    return order


class SampleStream:
    """The samples of some parts, epoch after epoch, and a position, which is always in front of a sample."""

    def __init__(
        self,
        index: CorpusIndex,
        parts: IntArray,
        window_mib: int,
        seed: int,
        source: int | None = None,
        weight: float = 1.0,
    ) -> None:
        """Prepare the stream. It has no position before ``enter`` or ``load_state_dict`` is called.

        Args:
            parts: numbers of the parts to draw from, ascending.
            window_mib: MiB of text that are shuffled together.
            source: place in ``data.sources`` that ``parts`` belong to; None if they are the whole corpus.
            weight: share of the tokens that the stream gives to a mixture.
        """
        self._index = index
        self._seed = seed
        self._source = source
        self._stream = () if source is None else (source,)
        self._text = parts[index.is_text[parts]]
        self._bins = parts[~index.is_text[parts]]
        self._window_bytes = window_mib * MIB
        self._weight = weight
        self.num_tokens = 0
        self.epoch = self.window = self.position = 0
        self.samples = SampleTable([])
        """Samples of the window, and of one that is not windowed, of all epochs."""
        self.order = epoch_order(0, 0, 0)  # [W] rows of ``samples`` in the order of the window
        self._content = ""
        self._at_hand, self._at_hand_from = self.samples[:], 0  # samples from a position on, in the order of the window
        self._tokens_before = np.zeros(1, dtype=np.int64)  # tokens before each of ``_at_hand``, then of all
        self._order_of_bins = -1, self.order  # an epoch, and the order of all samples of .bin files in it

    @property
    def progress(self) -> float:
        """Tokens drawn, divided by the weight. The source with the least progress is next; on a tie, the first one."""
        return self.num_tokens / self._weight

    @property
    def is_windowed(self) -> bool:
        """Whether an epoch has several windows."""
        return int(self._index.part_bytes[self._text].sum()) > self._window_bytes

    @property
    def scope(self) -> str:
        """What is shuffled together, as a text for people and checkpoints: ``"64 MiB"`` or ``"everything"``."""
        return f"{self._window_bytes // MIB} MiB" if self.is_windowed else EVERYTHING

    def windows(self, epoch: int) -> list[IntArray]:
        """Return the parts of text in each window of an epoch, ascending. There is at least one window."""
        if not self.is_windowed:
            return [self._text]
        shuffled = self._text[epoch_order(len(self._text), self._seed, epoch, *self._stream, _DRAW_OF_PARTS)]
        sizes = self._index.part_bytes[shuffled]
        number = (np.cumsum(sizes) - sizes) // self._window_bytes  # a part belongs to the window of its first byte
        windows = np.split(shuffled, np.flatnonzero(np.diff(number)) + 1)
        if len(windows) > 1 and self._index.part_bytes[windows[-1]].sum() < self._window_bytes // 2:
            windows[-2:] = [np.concatenate(windows[-2:])]
        return [np.sort(window) for window in windows]

    def enter(self, epoch: int, window: int = 0) -> None:
        """Go to the first sample of a window, or of the next one that has any. Raises ``DataError`` if none has."""
        last_epoch = epoch + 1  # at the end of the next epoch, every part has been looked at
        while True:
            windows = self.windows(epoch)
            self._load(epoch, window, windows)
            self._expect(windows[window + 1 :], epoch + 1)
            if len(self.order):
                return
            epoch, window = (epoch, window + 1) if window + 1 < len(windows) else (epoch + 1, 0)
            if epoch > last_epoch:
                raise self._index.nothing_to_draw(self._source)

    def draw(self, budget: int, at_most: int) -> tuple[Samples, IntArray, int]:
        """Take the next samples: as many as fit in ``budget`` tokens, are at hand, and are not over ``at_most``.

        Returns samples, rows of them, and their tokens. No row: the next one exceeds the budget.
        """
        first = self.position - self._at_hand_from
        if not 0 <= first < len(self._tokens_before) - 1:
            self._at_hand = self.samples[self.order[self.position : self.position + _BLOCK]]
            self._tokens_before = np.concatenate([[0], np.cumsum(self._at_hand.length)])
            self._at_hand_from, first = self.position, 0
        samples, before, count = self._at_hand, self._tokens_before, 1
        if at_most > 1:  # a search for a single sample takes twice as long
            tokens_before = before[first : first + at_most + 1]
            count = int(np.searchsorted(tokens_before, tokens_before[0] + budget, side="right")) - 1
        num_tokens = int(before[first + count] - before[first])
        if num_tokens > budget:
            count = num_tokens = 0
        rows = _ROWS[first : first + count]
        self.num_tokens += num_tokens
        self.position += count
        if self.position == len(self.order):
            last = self.window + 1 == len(self.windows(self.epoch))
            self.enter(*((self.epoch + 1, 0) if last else (self.epoch, self.window + 1)))
        return samples, rows, num_tokens

    def state_dict(self) -> dict[str, Any]:
        """Return the position, and the hash of the window's texts, as plain numbers and strings."""
        return {"epoch": self.epoch, "window": self.window, "position": self.position, "content": self._content}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to the position that ``state`` describes. Raises ``CheckpointError`` if the corpus has none such."""
        epoch, window, position = state["epoch"], state["window"], state["position"]
        windows = self.windows(epoch)
        if not 0 <= window < len(windows):
            raise _outside(f"window {window}", f"{len(windows)} windows")
        self.enter(epoch, window)
        if self._content != state["content"]:
            raise CheckpointError(
                f"the checkpoint was made with other texts: their content was {state['content']} and is now "
                f"{self._content}",
                so="sequences would be repeated or skipped",
                fix="restore the files that data.sources had then, or start a new run",
            )
        if not 0 <= position < len(self.order):
            raise _outside(f"position {position}", f"{len(self.order)} sequences")
        self.position = position
        self.num_tokens = state.get("tokens", 0)

    def _expect(self, windows: list[IntArray], next_epoch: int) -> None:
        """Expect ``windows``, then those of ``next_epoch``, until ``CorpusIndex.parts_ahead`` parts are expected."""
        num_parts = 0
        for window in itertools.chain(windows, self.windows(next_epoch)):
            self._index.expect(window.tolist())
            num_parts += len(window)
            if num_parts >= self._index.parts_ahead:
                return

    def _load(self, epoch: int, window: int, windows: list[IntArray]) -> None:
        parts, stream = windows[window].tolist(), self._stream
        if self.is_windowed:
            stream = (*stream, _DRAW_OF_WINDOW, window)
            share = self._share_of_bins(epoch, window, windows)
            self.samples = SampleTable([self._index.load(parts), share])
        elif not len(self.samples):
            self.samples = self._index.load(sorted((*parts, *self._bins.tolist())))  # in corpus order
        self.epoch, self.window, self.position = epoch, window, 0
        self.order = epoch_order(len(self.samples), self._seed, epoch, *stream)
        self._tokens_before = self._tokens_before[:1]
        self._content = self._index.content_hash(parts)

    def _share_of_bins(self, epoch: int, window: int, windows: list[IntArray]) -> SampleTable:
        """Return the samples of ``.bin`` files that a window gets: in proportion to its bytes of text."""
        of_bins = self._index.load(self._bins.tolist())
        if self._order_of_bins[0] != epoch:
            self._order_of_bins = epoch, epoch_order(len(of_bins), self._seed, epoch, *self._stream, _DRAW_OF_BINS)
        shuffled = self._order_of_bins[1]
        ends = np.cumsum([0, *(self._index.part_bytes[parts].sum() for parts in windows)]).tolist()
        # Python integers: the products may exceed 64 bits.
        first, stop = (end * len(shuffled) // ends[-1] for end in ends[window : window + 2])
        return SampleTable(of_bins.tables, shuffled[first:stop])


def _outside(place: str, what: str) -> CheckpointError:
    return CheckpointError(
        f"the checkpoint's data {place} lies outside the corpus ({what})",
        fix="the checkpoint is damaged: resume from an older one",
    )
