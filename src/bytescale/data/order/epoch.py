"""The order of the samples in an epoch. It depends on the corpus, the seed and the epoch, never on the ranks.

If the text of the corpus fits in one *window* (``data.shuffle_window_mib``), all samples of an epoch are shuffled
together. If the text is larger, an epoch goes through it window by window:

1. The parts of text are shuffled, and cut into windows of about the configured size.
2. The samples of ``.bin`` files, which are known from the start, are shuffled over the whole epoch. Each window gets a
   share of them that is proportional to its bytes of text.
3. The samples of one window are shuffled among themselves.

So training starts as soon as the first window is tokenised, whatever the size of the corpus, and the next window is
tokenised while the current one trains.
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np

from bytescale.common.arrays import IntArray
from bytescale.common.errors import CheckpointError
from bytescale.data.order.index import CorpusIndex
from bytescale.data.order.samples import NO_SAMPLES, Samples

MIB = 1024**2
EVERYTHING = "everything"

# An epoch of several windows needs three more kinds of random draws. Each kind adds its own number to the seed.
_DRAW_OF_BINS, _DRAW_OF_PARTS, _DRAW_OF_WINDOW = 1, 2, 3


def epoch_order(num_samples: int, seed: int, epoch: int, *stream: int) -> IntArray:
    """Return the permutation of one epoch, int64 ``[num_samples]``. Numbers in ``stream`` give independent ones.

    The permutation sorts raw 64-bit draws. NumPy promises that its bit streams and ``SeedSequence`` never change, but
    makes no such promise for ``Generator.permutation``, and a resumed run may use another version of NumPy.
    """
    draws = np.random.PCG64(np.random.SeedSequence((seed, epoch, *stream))).random_raw(num_samples)
    return np.argsort(draws, kind="stable")


class SampleStream:
    """The samples of some parts, epoch after epoch, and a position, which is always in front of a sample."""

    def __init__(self, index: CorpusIndex, parts: IntArray, window_mib: int, seed: int, source: int | None = None):
        """Prepare the stream. It has no position before ``enter`` or ``load_state_dict`` is called.

        Args:
            index: the index of the corpus. The stream loads parts of text from it window by window, and expects those
                of the next window.
            parts: numbers of the parts to draw from, ascending.
            window_mib: MiB of text that are shuffled together.
            seed: the seed of the shuffle.
            source: place in ``data.sources`` of the one source that ``parts`` belong to; None if ``parts`` is the whole
                corpus.
        """
        self._index = index
        self._seed = seed
        self._source = source
        self._stream = () if source is None else (source,)
        self._text = parts[index.is_text[parts]]
        self._bins = parts[~index.is_text[parts]]
        self._window_bytes = window_mib * MIB
        self.epoch = self.window = self.position = 0
        self.samples = NO_SAMPLES
        """Samples of the window, and of one that is not windowed, of all epochs."""
        self.order = np.zeros(0, dtype=np.int64)  # [W] rows of ``samples`` in the order of the window
        self.tokens_before = np.zeros(1, dtype=np.int64)  # [W + 1] tokens of the window before each of ``order``
        self._content = ""
        self._bins_shuffled = -1, NO_SAMPLES  # an epoch, and all samples of .bin files in the order of that epoch

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
        """Go to the first sample of a window. If the window has no sample, go to the next window that has one.

        Raises:
            DataError: as ``CorpusIndex.load``; or the parts hold no sample at all.
        """
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

    def first_parts(self, state: dict[str, Any] | None) -> list[int]:
        """Return the parts that have to be read before the stream can stand at ``state`` (None: at its start)."""
        epoch, window = (0, 0) if state is None else (state["epoch"], state["window"])
        windows = self.windows(epoch)
        return windows[window].tolist() if 0 <= window < len(windows) else []

    def take(self, stop: int) -> bool:
        """Move to the position in front of sample ``stop`` of the window, or into the next window at the window's end.

        Returns whether this ended the epoch.
        """
        self.position = stop
        if stop < len(self.order):
            return False
        before = self.epoch
        last = self.window + 1 == len(self.windows(before))
        self.enter(*((before + 1, 0) if last else (before, self.window + 1)))
        return self.epoch > before

    def state_dict(self) -> dict[str, Any]:
        """Return the position, and the hash of the window's texts, as plain numbers and strings."""
        return {"epoch": self.epoch, "window": self.window, "position": self.position, "content": self._content}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to the position that ``state`` describes.

        Raises:
            CheckpointError: the texts of the window have changed, or the corpus has no such window or position.
            DataError: as ``CorpusIndex.load``.
        """
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

    def _expect(self, windows: list[IntArray], next_epoch: int) -> None:
        """Expect ``windows``, the rest of the epoch, and then those of ``next_epoch``, until enough parts are expected.

        ``CorpusIndex.parts_ahead`` says how many parts are enough.
        """
        num_parts = 0
        for window in itertools.chain(windows, self.windows(next_epoch)):
            num_parts += self._index.expect(window.tolist())
            if num_parts >= self._index.parts_ahead:
                return

    def _load(self, epoch: int, window: int, windows: list[IntArray]) -> None:
        parts, stream = windows[window].tolist(), self._stream
        if self.is_windowed:
            stream = (*stream, _DRAW_OF_WINDOW, window)
            share = self._share_of_bins(epoch, window, windows)
            self.samples = Samples.joined([self._index.load(parts), share])
        elif not len(self.samples):
            self.samples = self._index.load(sorted((*parts, *self._bins.tolist())))  # in corpus order
        self.epoch, self.window, self.position = epoch, window, 0
        self.order = epoch_order(len(self.samples), self._seed, epoch, *stream)
        self.tokens_before = np.concatenate([[0], np.cumsum(self.samples.length[self.order])])
        self._content = self._index.content_hash(parts)

    def _share_of_bins(self, epoch: int, window: int, windows: list[IntArray]) -> Samples:
        """Return the samples of ``.bin`` files that a window gets: in proportion to its bytes of text."""
        if self._bins_shuffled[0] != epoch:
            of_bins = self._index.load(self._bins.tolist())
            order = epoch_order(len(of_bins), self._seed, epoch, *self._stream, _DRAW_OF_BINS)
            self._bins_shuffled = (epoch, of_bins[order])
        shuffled = self._bins_shuffled[1]
        ends = np.cumsum([0, *(self._index.part_bytes[parts].sum() for parts in windows)]).tolist()
        # Python integers: the products may exceed 64 bits.
        first, stop = (end * len(shuffled) // ends[-1] for end in ends[window : window + 2])
        return shuffled[first:stop]


def _outside(place: str, what: str) -> CheckpointError:
    return CheckpointError(
        f"the checkpoint's data {place} lies outside the corpus ({what})",
        fix="the checkpoint is damaged: resume from an older one",
    )
