"""Decides which samples make up which global batch.

The decision depends on the corpus, the seed and the token budget. It never depends on the number of ranks. (In
identifiers a sample is called a *piece*; ``data.order.pieces`` defines it.)

Epoch ``e`` reads the samples in an order that depends on (seed, ``e``) alone (``data.order.epoch``). The epochs form
one endless stream of samples. A batch takes whole samples from the stream until the next one would exceed the budget.
So every epoch consumes every sample exactly once. A batch in which an epoch ends is filled up with samples of the
next epoch: ending the batch early would give one small and noisy update per epoch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from bytescale.common.arrays import IntArray
from bytescale.common.errors import CheckpointError, ConfigError, problem
from bytescale.data.order.epoch import PieceStream
from bytescale.data.order.index import CorpusIndex

SamplerState = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class GlobalBatch:
    """The sequences of one step. A plan numbers them by their place in these arrays. Shape letter: S sequences."""

    step: int
    """Number of the batch, from 0."""
    epoch: int
    """Epoch of the first sequence."""
    pieces: IntArray  # [S] names of the samples in the corpus (CorpusIndex.pieces_of)
    lengths: IntArray  # [S] tokens
    num_targets: IntArray  # [S] tokens with a label; the loss is divided by their sum
    ends_epoch: bool
    """Whether the batch holds the last sample of an epoch."""

    @staticmethod
    def of(index: CorpusIndex, pieces: IntArray, *, step: int, epoch: int, ends_epoch: bool) -> GlobalBatch:
        """Return the batch of ``pieces``, whose parts must have been read."""
        rows = index.rows(pieces)
        return GlobalBatch(
            step=step,
            epoch=epoch,
            pieces=pieces,
            lengths=index.pieces.length[rows],
            num_targets=index.pieces.num_targets[rows],
            ends_epoch=ends_epoch,
        )

    @property
    def num_sequences(self) -> int:
        return len(self.pieces)

    @property
    def num_tokens(self) -> int:
        return int(self.lengths.sum())

    @property
    def total_targets(self) -> int:
        return int(self.num_targets.sum())


def check_drawable(index: CorpusIndex, batch_tokens: int, shuffle_seed: int) -> None:
    """Raise ``ConfigError`` if a known sample is longer than ``batch_tokens``, or if the seed is negative.

    Samples of parts that have not been read yet need no check here: no sample is longer than the context, and the
    validation of the configuration has compared the context with the budget.
    """
    longest = int(index.pieces.length.max(initial=0))
    if longest > batch_tokens:
        piece = int(index.pieces.length.argmax())
        raise ConfigError(
            problem(
                f"document {index.pieces.document[piece]} has a sequence of {longest} tokens, more than "
                f"data.batch_tokens = {batch_tokens}",
                so="it would fit in no global batch",
                fix=f"raise data.batch_tokens to at least {longest}, or lower data.context_length",
            )
        )
    if shuffle_seed < 0:
        raise ConfigError(problem(f"data.shuffle_seed is {shuffle_seed}", fix="use 0 or more"))


def check_same(key: str, state: SamplerState, ours: object, settings: str) -> None:
    """Raise ``CheckpointError`` if entry ``key`` of a saved state differs from ``ours``, the value of this run.

    ``settings`` names the settings that the user would have to restore; it goes into the message.
    """
    if state.get(key) != ours:
        raise CheckpointError(
            problem(
                f"the checkpoint was made with data {key} {state.get(key)}, this run has {ours}",
                so="sequences would be repeated or skipped",
                fix=f"restore the [data] settings of that run ({settings}), or start a new run",
            )
        )


class Sampler(Protocol):
    """An order of the corpus, cut into global batches."""

    @property
    def next_step(self) -> int: ...

    def next_batch(self) -> GlobalBatch: ...

    def state_dict(self) -> SamplerState: ...

    def load_state_dict(self, state: SamplerState) -> None: ...


class BatchSampler:
    """Cuts the stream of samples into global batches of at most ``batch_tokens`` tokens."""

    def __init__(
        self,
        index: CorpusIndex,
        batch_tokens: int,
        shuffle_seed: int,
        *,
        window_mib: int = 2**40,
        state: SamplerState | None = None,
    ) -> None:
        """Start at the first batch, or where ``state`` was taken.

        Args:
            index: the index of the corpus.
            batch_tokens: the most tokens that a batch may hold.
            shuffle_seed: the seed of the order, 0 or more.
            window_mib: MiB of text that are shuffled together.
            state: a state as ``state_dict`` returns it; None starts at the first batch.

        Raises:
            ConfigError: the longest sample exceeds ``batch_tokens``, or the seed is negative.
            CheckpointError: as ``load_state_dict``.
            DataError: a part that the first batch needs cannot be read.
        """
        check_drawable(index, batch_tokens, shuffle_seed)
        self._index = index
        self._batch_tokens = batch_tokens
        self._seed = shuffle_seed
        self._stream = PieceStream(index, np.arange(index.num_parts), window_mib, shuffle_seed)
        self._step = 0
        if state is None:
            self._stream.enter(0)
        else:
            self.load_state_dict(state)

    @property
    def next_step(self) -> int:
        """Number of the batch that ``next_batch`` would draw."""
        return self._step

    def next_batch(self) -> GlobalBatch:
        """Draw the next global batch, which holds at least one sequence. Raises as ``PieceStream.enter``."""
        stream = self._stream
        first_epoch = stream.epoch
        budget = self._batch_tokens
        drawn: list[IntArray] = []
        while True:
            # 1. Take the whole samples, from the current position on, that fit in the rest of the budget.
            limit = stream.tokens_before[stream.position] + budget
            stop = int(np.searchsorted(stream.tokens_before, limit, side="right")) - 1
            drawn.append(stream.pieces[stream.position : stop])
            budget = int(limit - stream.tokens_before[stop])
            # 2. If the window has samples left, the next one exceeds the budget and starts the next batch.
            #    If it has none left, go on with the next window or with the next epoch.
            is_full = stop < len(stream.pieces)
            stream.take(stop)
            if is_full:
                break
        self._step += 1
        return GlobalBatch.of(
            self._index,
            np.concatenate(drawn),
            step=self._step - 1,
            epoch=first_epoch,
            ends_epoch=stream.epoch > first_epoch,
        )

    def state_dict(self) -> SamplerState:
        """Return where the next batch starts, as plain numbers and strings for a checkpoint."""
        return {
            "step": self._step,
            **self._stream.state_dict(),
            "shuffle_seed": self._seed,
            "shuffle_window": self._stream.scope,
            "corpus": self._index.fingerprint,
        }

    def load_state_dict(self, state: SamplerState) -> None:
        """Go on where ``state`` was taken. No sample is repeated or skipped, even if ``batch_tokens`` has changed.

        Raises:
            CheckpointError: the state belongs to another corpus, context, over-length policy or order.
            DataError: as ``PieceStream.enter``.
        """
        check_same("corpus", state, self._index.fingerprint, "the files, tokenizer, context_length, over_length")
        check_same("shuffle_seed", state, self._seed, "shuffle_seed")
        check_same("shuffle_window", state, self._stream.scope, "shuffle_window_mib")
        check_same("weights", state, None, "weights")
        self._stream.load_state_dict(state)
        self._step = state["step"]
