"""Mixes several sources by weights. The source that is furthest behind its share of the tokens gives the next sequence.

Each source is an endless stream of epochs of its own, whose order depends on (seed, epoch, source) alone. After any
number of sequences, the tokens drawn from source ``i`` differ from the share ``weight_i`` of all tokens drawn by less
than the length of the two longest sequences. Sources pass at different speeds, so one may be in its third epoch while
another is in its first.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from bytescale.config.schema import DataConfig
from bytescale.data.order.batches import BatchSampler, GlobalBatch, Sampler, SamplerState, check_drawable, check_same
from bytescale.data.order.epoch import EVERYTHING, PieceStream
from bytescale.data.order.index import CorpusIndex


def make_sampler(index: CorpusIndex, config: DataConfig, state: SamplerState | None = None) -> Sampler:
    """Return the sampler that ``config`` asks for: one shuffle of everything, or sources mixed by ``data.weights``.

    Args:
        index: the index of the corpus.
        config: the ``[data]`` section.
        state: where to start; None starts at the first batch.

    Raises:
        ConfigError: the longest sequence exceeds ``data.batch_tokens``, or the seed is negative.
        CheckpointError: ``state`` belongs to other data.
        DataError: a source with a weight has nothing to draw from, or a part that has to be read first is broken.
    """
    if config.weights:
        return MixtureSampler(index, config, state)
    window_mib = config.shuffle_window_mib
    return BatchSampler(index, config.batch_tokens, config.shuffle_seed, window_mib=window_mib, state=state)


class _Source:
    """The stream of samples of one source, and the number of tokens drawn from it."""

    def __init__(self, stream: PieceStream, weight: float) -> None:
        self.stream = stream
        self._weight = weight
        self._num_tokens = 0

    @property
    def progress(self) -> float:
        """Tokens drawn, divided by the weight. The source with the least progress is next; on a tie, the first one."""
        return self._num_tokens / self._weight

    @property
    def next_piece(self) -> int:
        return int(self.stream.pieces[self.stream.position])

    @property
    def next_length(self) -> int:
        return int(self.stream.lengths[self.stream.position])

    def take(self) -> bool:
        """Move past the next sample. Returns whether it was the last one of its epoch."""
        self._num_tokens += self.next_length
        return self.stream.take(self.stream.position + 1)

    def state_dict(self) -> dict[str, Any]:
        return {**self.stream.state_dict(), "tokens": self._num_tokens}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.stream.load_state_dict(state)
        self._num_tokens = state["tokens"]


class MixtureSampler:
    """Cuts the mixed stream into global batches of at most ``data.batch_tokens`` tokens."""

    def __init__(self, index: CorpusIndex, config: DataConfig, state: SamplerState | None = None) -> None:
        """Start at the first batch, or where ``state`` was taken. Raises as ``make_sampler``."""
        check_drawable(index, config.batch_tokens, config.shuffle_seed)
        self._index = index
        self._weights = list(config.weights)
        self._batch_tokens = config.batch_tokens
        self._seed = config.shuffle_seed
        self._step = 0
        self._sources = []
        for number, weight in enumerate(config.weights):
            parts = np.flatnonzero(index.part_sources == number)
            stream = PieceStream(index, parts, config.shuffle_window_mib, config.shuffle_seed, number)
            self._sources.append(_Source(stream, weight))
        if state is None:
            self._require_first([None] * len(self._sources))
            for source in self._sources:
                source.stream.enter(0)
        else:
            self.load_state_dict(state)

    @property
    def next_step(self) -> int:
        """Number of the batch that ``next_batch`` would draw."""
        return self._step

    def next_batch(self) -> GlobalBatch:
        """Draw the next global batch, which holds at least one sequence. Raises as ``PieceStream.enter``."""
        first_epoch = min(source.stream.epoch for source in self._sources)
        drawn: list[int] = []
        budget, ends_epoch = self._batch_tokens, False
        while True:
            source = min(self._sources, key=lambda source: source.progress)
            if source.next_length > budget:
                break
            budget -= source.next_length
            drawn.append(source.next_piece)
            ends_epoch |= source.take()
        pieces = np.array(drawn, dtype=np.int64)
        self._step += 1
        return GlobalBatch.of(self._index, pieces, step=self._step - 1, epoch=first_epoch, ends_epoch=ends_epoch)

    def state_dict(self) -> SamplerState:
        """Return where the next batch starts in every source, as plain numbers and strings for a checkpoint."""
        return {
            "step": self._step,
            "sources": [source.state_dict() for source in self._sources],
            "weights": list(self._weights),
            "shuffle_seed": self._seed,
            "shuffle_window": self._window,
            "corpus": self._index.fingerprint,
        }

    def load_state_dict(self, state: SamplerState) -> None:
        """Go on where ``state`` was taken. Raises ``CheckpointError`` when it belongs to another mixture."""
        check_same("corpus", state, self._index.fingerprint, "the files, tokenizer, context_length, over_length")
        check_same("shuffle_seed", state, self._seed, "shuffle_seed")
        check_same("weights", state, self._weights, "weights")
        check_same("shuffle_window", state, self._window, "shuffle_window_mib")
        self._require_first(state["sources"])
        for source, saved in zip(self._sources, state["sources"], strict=True):
            source.load_state_dict(saved)
        self._step = state["step"]

    def _require_first(self, states: Sequence[dict[str, Any] | None]) -> None:
        """Require what every source starts with, all at the same time and before any part is expected."""
        parts = [source.stream.first_parts(state) for source, state in zip(self._sources, states, strict=True)]
        self._index.require(part for own in parts for part in own)

    @property
    def _window(self) -> str:
        """What is shuffled together, as a text. It names the window size only if the order depends on that size."""
        scopes = {source.stream.scope for source in self._sources} - {EVERYTHING}
        return scopes.pop() if scopes else EVERYTHING
