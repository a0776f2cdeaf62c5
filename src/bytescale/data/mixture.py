"""Several sources mixed by weights: whichever is furthest behind its share of the tokens gives the next sequence.

Each source is its own endless stream of epochs, whose order is a function of (seed, epoch, source) alone. After any
number of sequences, the tokens drawn from source ``i`` differ from ``weight_i`` of all by less than the length of the
two longest sequences. Sources pass at different speeds, so one may be in its third epoch while another is in its first.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from bytescale.common.errors import CheckpointError, DataError, problem
from bytescale.config.schema import DataConfig
from bytescale.data.batches import (
    BatchSampler,
    GlobalBatch,
    IntArray,
    Sampler,
    SamplerState,
    check_drawable,
    epoch_order,
)
from bytescale.data.corpus import Corpus, CorpusIndex


def make_sampler(corpus: Corpus | CorpusIndex, config: DataConfig) -> Sampler:
    """The order that ``config`` asks for: one shuffle of everything, or sources mixed by ``data.weights``.

    Raises:
        ConfigError: the longest sequence exceeds ``data.batch_tokens``, or the seed is negative.
        DataError: a source with a weight has nothing to draw from.
    """
    if not config.weights:
        return BatchSampler(corpus, config.batch_tokens, config.shuffle_seed)
    index = corpus.index if isinstance(corpus, Corpus) else corpus
    return MixtureSampler(index, config.sources, config.weights, config.batch_tokens, config.shuffle_seed)


class _Stream:
    """The sequences of one source, epoch after epoch."""

    def __init__(self, number: int, weight: float, pieces: IntArray, seed: int) -> None:
        self._number = number
        self._weight = weight
        self._pieces = pieces
        self._seed = seed
        self.num_tokens = 0  # drawn so far
        self._enter(0, 0)

    @property
    def progress(self) -> float:
        """Tokens drawn over the weight: the source that has least is next, of equals the first."""
        return self.num_tokens / self._weight

    def peek(self) -> int:
        return int(self._order[self.position])

    def advance(self, num_tokens: int) -> bool:
        """Take the sequence that ``peek`` showed; whether it was the last of its epoch."""
        self.num_tokens += num_tokens
        self.position += 1
        if self.position < len(self._pieces):
            return False
        self._enter(self.epoch + 1, 0)
        return True

    def state(self) -> dict[str, int]:
        return {"epoch": self.epoch, "position": self.position, "tokens": self.num_tokens}

    def load(self, state: dict[str, int]) -> None:
        self.num_tokens = state["tokens"]
        self._enter(state["epoch"], state["position"])

    def _enter(self, epoch: int, position: int) -> None:
        self.epoch = epoch
        self.position = position
        self._order = self._pieces[epoch_order(len(self._pieces), self._seed, epoch, self._number)]


class MixtureSampler:
    """Cuts the mixed stream into global batches of at most ``batch_tokens`` tokens."""

    def __init__(
        self,
        index: CorpusIndex,
        sources: Sequence[str],
        weights: Sequence[float],
        batch_tokens: int,
        shuffle_seed: int,
    ) -> None:
        """Start at the first batch. Raises as ``make_sampler``."""
        check_drawable(index, batch_tokens, shuffle_seed)
        self._index = index
        self._weights = list(weights)
        self._batch_tokens = batch_tokens
        self._seed = shuffle_seed
        self._step = 0
        of_piece = index.piece_sources()
        self._streams = []
        for number, source in enumerate(sources):
            pieces = np.flatnonzero(of_piece == number)
            if not len(pieces):
                raise DataError(
                    problem(
                        f"data source {source!r} has weight {weights[number]} but holds no sequence",
                        so="its share of the tokens could not be drawn",
                        fix="check the source and the length filters, or leave it and its weight out",
                    )
                )
            self._streams.append(_Stream(number, weights[number], pieces, shuffle_seed))

    @property
    def next_step(self) -> int:
        """Number of the batch that ``next_batch`` would draw."""
        return self._step

    def next_batch(self) -> GlobalBatch:
        """Draw the next global batch: at least one sequence."""
        first_epoch = min(stream.epoch for stream in self._streams)
        lengths = self._index.pieces.length
        drawn: list[int] = []
        budget, ends_epoch = self._batch_tokens, False
        while True:
            stream = min(self._streams, key=lambda stream: stream.progress)
            piece = stream.peek()
            if int(lengths[piece]) > budget:
                break
            budget -= int(lengths[piece])
            drawn.append(piece)
            ends_epoch |= stream.advance(int(lengths[piece]))
        pieces = np.array(drawn, dtype=np.int64)
        self._step += 1
        return GlobalBatch(
            step=self._step - 1,
            epoch=first_epoch,
            pieces=pieces,
            lengths=lengths[pieces],
            num_targets=self._index.pieces.num_targets[pieces],
            ends_epoch=ends_epoch,
        )

    def state_dict(self) -> SamplerState:
        """Where the next batch starts, in every source: plain numbers and strings, for a checkpoint."""
        return {
            "step": self._step,
            "sources": [stream.state() for stream in self._streams],
            "weights": list(self._weights),
            "shuffle_seed": self._seed,
            "corpus": self._index.fingerprint,
        }

    def load_state_dict(self, state: SamplerState) -> None:
        """Go on where ``state`` was taken. Raises ``CheckpointError`` when it belongs to another mixture."""
        ours = {"corpus": self._index.fingerprint, "shuffle_seed": self._seed, "weights": self._weights}
        for key, value in ours.items():
            if state.get(key) != value:
                raise CheckpointError(
                    problem(
                        f"the checkpoint was made with data {key} {state.get(key)}, this run has {value}",
                        so="sequences would be repeated or skipped",
                        fix="restore what [data] said then, or start a new run",
                    )
                )
        self._step = state["step"]
        for stream, saved in zip(self._streams, state["sources"], strict=True):
            stream.load(saved)
