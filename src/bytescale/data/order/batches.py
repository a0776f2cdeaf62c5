"""Decides which samples make up which global batch, by the corpus, the seed and the token budget, never by the ranks.

Epoch ``e`` reads the samples in an order that depends on (seed, ``e``) alone (``data.order.epoch``). The epochs form
one endless stream of samples. A batch takes whole samples from the stream until the next one would exceed the budget.
So every epoch consumes every sample exactly once. A batch in which an epoch ends is filled up with samples of the
next epoch: ending the batch early would give one small and noisy update per epoch.

If ``data.weights`` mixes several sources, each source is such a stream of its own, whose order depends on (seed, epoch,
source). The source that is furthest behind its share of the tokens gives the next sample. After any number of samples,
the tokens drawn from source ``i`` differ from the share ``weight_i`` of all tokens drawn by less than the length of the
two longest samples. Sources pass at different speeds, so one may be in its third epoch while another is in its first.
"""

from __future__ import annotations

import logging
import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bytescale.common.arrays import IntArray, blocks
from bytescale.common.errors import CheckpointError, DataError
from bytescale.config.schema import DataConfig, LossPer
from bytescale.config.validate import check_batches
from bytescale.data.order.epoch import EVERYTHING, SampleStream
from bytescale.data.order.index import CorpusIndex
from bytescale.data.tokens.samples import Samples, SampleTable

SamplerState = dict[str, Any]
logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LossScaling:
    """The loss of a batch is ``sum of scale * weight * cross-entropy over labels / divisor``. Letter: S sequences."""

    scales: NDArray[np.float64]  # [S]
    divisor: float


@dataclass(frozen=True, slots=True, kw_only=True)
class GlobalBatch:
    """The sequences of one step. A plan numbers them by their place in these arrays. Shape letter: S sequences."""

    step: int
    epoch: int
    """Epoch of the first sequence."""
    samples: Samples  # S of them

    @property
    def lengths(self) -> IntArray:
        """``[S]`` tokens of each sequence."""
        return self.samples.length

    @property
    def num_tokens(self) -> int:
        return self.samples.num_tokens

    @property
    def total_targets(self) -> int:
        """Labels with a weight other than 0: those that are trained on."""
        return int(self.samples.num_trained.sum())

    def scaling(self, loss_per: LossPer) -> LossScaling:
        """How the weighted losses of the batch become its loss (``data.loss_per``)."""
        ones, sums = np.ones(len(self.samples)), self.samples.weight_sums
        match loss_per:
            case "token":
                return LossScaling(ones, max(1.0, float(self.total_targets)))
            case "weight":
                return LossScaling(ones, float(sums.sum()) or 1.0)
            case _:
                counted = self.samples.num_trained > 0
                scales = np.divide(1.0, sums, out=np.zeros_like(ones), where=counted)
                return LossScaling(scales, max(1.0, float(counted.sum())))


def check_same(key: str, state: SamplerState, ours: object, settings: str) -> None:
    """Raise ``CheckpointError`` if entry ``key`` of a saved state is not ``ours``, which comes from ``settings``."""
    if state.get(key) != ours:
        raise CheckpointError(
            f"the checkpoint was made with data {key} {state.get(key)}, this run has {ours}",
            so="sequences would be repeated or skipped",
            fix=f"restore the [data] settings of that run ({settings}), or start a new run",
        )


def batches_of_epochs(index: CorpusIndex, config: DataConfig, epochs: int) -> int:
    """The number of batches that begin in the first ``epochs`` epochs, with ``data.weights`` of every source."""
    sampler = BatchSampler(index, config)
    while True:
        batch = sampler.next_batch()
        if batch.epoch >= epochs:
            return batch.step


class BatchSampler:
    """Cuts the stream of samples into global batches of at most ``data.batch_tokens`` tokens.

    Without ``data.weights``, the whole corpus is one source.
    """

    def __init__(self, index: CorpusIndex, config: DataConfig, state: SamplerState | None = None) -> None:
        """Start at the first batch, or where ``state`` was taken.

        Raises ``ConfigError`` as ``check_batches``, ``CheckpointError`` if ``state`` belongs to other data, and
        ``DataError`` if a source has nothing to draw from, or a part that has to be read first is broken.
        """
        check_batches(config)
        self._index = index
        self._batch_tokens = config.batch_tokens
        self._seed, window = config.shuffle_seed, config.shuffle_window_mib
        self._weights = list(config.weights) or None
        self.next_step = 0
        """Number of the batch that ``next_batch`` would draw."""
        parts = [np.flatnonzero(index.part_sources == number) for number in range(len(config.weights))]
        self._streams = [
            SampleStream(index, own, window, self._seed, number, config.weights[number])
            for number, own in enumerate(parts)
        ] or [SampleStream(index, np.arange(index.num_parts), window, self._seed)]
        if state is None:
            for stream in self._streams:
                stream.enter(0)
        else:
            self.load_state_dict(state)

    def next_batch(self) -> GlobalBatch:
        """Draw the next global batch. Where tokens have weights, batches in which all of them are 0 are left out.

        Raises as ``SampleStream.enter``, and ``DataError`` if a whole epoch has no target.
        """
        began = min(stream.epoch for stream in self._streams)
        while not (batch := self._drawn()).total_targets and self._index.has_weights:
            logger.warning("a batch of %d sequences has nothing to train on, and is left out", len(batch.samples))
            if min(stream.epoch for stream in self._streams) > began + 1:
                raise DataError(
                    "no sequence of the corpus has a token that is trained on",
                    so="every step would be empty",
                    fix="raise data.context_length, if documents are cut before what is trained on, or mend weights",
                )
        self.next_step += 1
        return batch

    def _drawn(self) -> GlobalBatch:
        first_epoch = min(stream.epoch for stream in self._streams)
        at_most = 1 if len(self._streams) > 1 else self._batch_tokens  # after each sample, another source may be behind
        drawn: list[tuple[Samples, IntArray]] = []
        budget, progress = self._batch_tokens, operator.attrgetter("progress")
        while True:
            stream = min(self._streams, key=progress)
            samples, rows, num_tokens = stream.draw(budget, at_most)
            if not len(rows):
                break
            drawn.append((samples, rows))
            budget -= num_tokens
        return GlobalBatch(step=self.next_step, epoch=first_epoch, samples=_picked(drawn))

    def state_dict(self) -> SamplerState:
        """Return where the next batch starts in every source, as plain numbers and strings for a checkpoint."""
        if self._weights is None:
            place = self._streams[0].state_dict()
        else:
            sources = [{**stream.state_dict(), "tokens": stream.num_tokens} for stream in self._streams]
            place = {"sources": sources, "weights": list(self._weights)}
        return {
            "step": self.next_step,
            **place,
            "shuffle_seed": self._seed,
            "shuffle_window": self._window,
            "corpus": self._index.fingerprint,
        }

    def load_state_dict(self, state: SamplerState) -> None:
        """Go on where ``state`` was taken. No sample is repeated or skipped, even if ``batch_tokens`` has changed."""
        check_same("corpus", state, self._index.fingerprint, "the files, tokenizer, context_length, over_length")
        check_same("shuffle_seed", state, self._seed, "shuffle_seed")
        check_same("weights", state, self._weights, "weights")
        check_same("shuffle_window", state, self._window, "shuffle_window_mib")
        places = [state] if self._weights is None else state["sources"]
        for stream, place in zip(self._streams, places, strict=True):
            stream.load_state_dict(place)
        self.next_step = state["step"]

    @property
    def _window(self) -> str:
        """What is shuffled together, as a text. It names the window size only if the order depends on that size."""
        scopes = {stream.scope for stream in self._streams} - {EVERYTHING}
        return scopes.pop() if scopes else EVERYTHING


def _picked(drawn: Sequence[tuple[Samples, IntArray]]) -> Samples:
    """Return rows of tables, in the order in which they were drawn. Each table is looked at once."""
    tables = {id(samples): samples for samples, _ in drawn}
    joined = SampleTable(list(tables.values()))
    first = dict(zip(tables, joined.starts.tolist(), strict=False))
    before = np.repeat([first[id(samples)] for samples, _ in drawn], [len(rows) for _, rows in drawn])
    return joined[before + np.concatenate([rows for _, rows in drawn])]


def batches_once(index: CorpusIndex, batch_tokens: int) -> Iterator[GlobalBatch]:
    """Yield the samples in the order of the sources, in batches of at most ``batch_tokens`` tokens.

    A longer sample is a batch of its own. The batches depend on nothing else, so all ranks get the same.
    """
    # The index lists .bin files of all sources behind the text of all sources.
    samples = index.load(np.argsort(index.part_sources, kind="stable").tolist())
    before = np.zeros(len(samples) + 1, dtype=np.int64)
    for own in blocks(len(samples)):
        before[own.start + 1 : own.stop + 1] = before[own.start] + np.cumsum(samples[own].length)
    start = step = 0
    while start < len(samples):
        stop = int(np.searchsorted(before, before[start] + batch_tokens, side="right")) - 1
        stop = max(stop, start + 1)
        yield GlobalBatch(step=step, epoch=0, samples=samples[start:stop])
        start, step = stop, step + 1
