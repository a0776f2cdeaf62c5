"""Which pieces make up which global batch: a function of the corpus, the seed and the budget, never of the ranks.

Epoch ``e`` reads the pieces in permutation ``e``, which depends on (seed, ``e``) alone. The permutations follow each
other as one endless stream, and batches are cut from it: whole pieces until the next one would exceed the budget. So
every epoch consumes every piece exactly once, and the one batch that an epoch ends in goes on with the next epoch;
ending it there instead would give one small and noisy update per epoch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from bytescale.common.errors import CheckpointError, ConfigError, problem
from bytescale.data.pieces import PieceTable

IntArray = NDArray[np.int64]

SamplerState = dict[str, Any]


class Drawable(Protocol):
    """What batches are drawn from: a ``Corpus``, or its index alone."""

    @property
    def pieces(self) -> PieceTable:
        """All pieces."""
        ...

    @property
    def fingerprint(self) -> str:
        """Changes when a piece does."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class GlobalBatch:
    """The sequences of one step; the plan's sequence number is the place in these arrays. Shape letter: S sequences."""

    step: int
    """Number of the batch, from 0."""
    epoch: int
    """Epoch of the first sequence."""
    pieces: IntArray  # [S] piece numbers of the corpus
    lengths: IntArray  # [S] tokens
    num_targets: IntArray  # [S] tokens with a label: the loss is divided by their sum
    ends_epoch: bool
    """Whether the last piece of an epoch is among them."""

    @property
    def num_sequences(self) -> int:
        return len(self.pieces)

    @property
    def num_tokens(self) -> int:
        return int(self.lengths.sum())

    @property
    def total_targets(self) -> int:
        return int(self.num_targets.sum())


def epoch_order(num_pieces: int, seed: int, epoch: int, *stream: int) -> IntArray:
    """``[num_pieces]`` the permutation of one epoch (of one ``stream``, when a corpus has several).

    Sorts raw 64-bit draws: NumPy promises that bit streams and ``SeedSequence`` never change, which it does not
    promise of ``Generator.permutation``. A resumed run may have another NumPy.
    """
    draws = np.random.PCG64(np.random.SeedSequence((seed, epoch, *stream))).random_raw(num_pieces)
    return np.argsort(draws, kind="stable")


def check_drawable(corpus: Drawable, batch_tokens: int, shuffle_seed: int) -> None:
    """Raise ``ConfigError`` if some piece fits in no batch, or the seed cannot be one."""
    longest = int(corpus.pieces.length.max())
    if longest > batch_tokens:
        piece = int(corpus.pieces.length.argmax())
        raise ConfigError(
            problem(
                f"document {corpus.pieces.document[piece]} has a sequence of {longest} tokens, more than "
                f"data.batch_tokens = {batch_tokens}",
                so="it would fit in no global batch",
                fix=f"raise data.batch_tokens to at least {longest}, or lower data.context_length",
            )
        )
    if shuffle_seed < 0:
        raise ConfigError(problem(f"data.shuffle_seed is {shuffle_seed}", fix="use 0 or more"))


class Sampler(Protocol):
    """An order of the corpus, cut into global batches."""

    @property
    def next_step(self) -> int: ...

    def next_batch(self) -> GlobalBatch: ...

    def state_dict(self) -> SamplerState: ...

    def load_state_dict(self, state: SamplerState) -> None: ...


class BatchSampler:
    """Cuts the stream of pieces into global batches of at most ``batch_tokens`` tokens."""

    def __init__(self, corpus: Drawable, batch_tokens: int, shuffle_seed: int) -> None:
        """Start at the first batch.

        Raises:
            ConfigError: the longest piece exceeds ``batch_tokens``, or the seed is negative.
        """
        check_drawable(corpus, batch_tokens, shuffle_seed)
        self._corpus = corpus
        self._batch_tokens = batch_tokens
        self._seed = shuffle_seed
        self._step = 0
        self._position = 0  # pieces of the epoch already drawn, below the number of all
        self._enter_epoch(0)

    @property
    def next_step(self) -> int:
        """Number of the batch that ``next_batch`` would draw."""
        return self._step

    def next_batch(self) -> GlobalBatch:
        """Draw the next global batch: at least one sequence."""
        first_epoch = self._epoch
        budget = self._batch_tokens
        drawn: list[IntArray] = []
        while True:
            # 1. Whole pieces from here on that fit in what is left of the budget.
            limit = self._tokens_before[self._position] + budget
            stop = int(np.searchsorted(self._tokens_before, limit, side="right")) - 1
            drawn.append(self._order[self._position : stop])
            budget = int(limit - self._tokens_before[stop])
            self._position = stop
            # 2. The epoch has more: its next piece exceeds the budget and starts the next batch.
            if stop < self._corpus.pieces.num_pieces:
                break
            # 3. It has not: go on with the next one.
            self._enter_epoch(self._epoch + 1)
            self._position = 0
        pieces = np.concatenate(drawn)
        self._step += 1
        return GlobalBatch(
            step=self._step - 1,
            epoch=first_epoch,
            pieces=pieces,
            lengths=self._corpus.pieces.length[pieces],
            num_targets=self._corpus.pieces.num_targets[pieces],
            ends_epoch=self._epoch > first_epoch,
        )

    def state_dict(self) -> SamplerState:
        """Where the next batch starts: plain numbers and strings, for a checkpoint."""
        return {
            "step": self._step,
            "epoch": self._epoch,
            "position": self._position,
            "shuffle_seed": self._seed,
            "corpus": self._corpus.fingerprint,
        }

    def load_state_dict(self, state: SamplerState) -> None:
        """Go on where ``state`` was taken: no piece repeated, none skipped, also with another ``batch_tokens``.

        Raises:
            CheckpointError: the state belongs to another corpus, context, over-length policy or seed.
        """
        self._check_same("corpus", state, self._corpus.fingerprint, "the files, tokenizer, context_length, over_length")
        self._check_same("shuffle_seed", state, self._seed, "shuffle_seed")
        self._check_same("weights", state, None, "weights")
        if not 0 <= state["position"] < self._corpus.pieces.num_pieces:
            raise CheckpointError(
                problem(
                    f"the checkpoint's data position {state['position']} lies outside the corpus "
                    f"({self._corpus.pieces.num_pieces} sequences)",
                    fix="the checkpoint is damaged: resume from an older one",
                )
            )
        self._step = state["step"]
        self._position = state["position"]
        self._enter_epoch(state["epoch"])

    def _check_same(self, key: str, state: SamplerState, ours: object, settings: str) -> None:
        if state.get(key) != ours:
            raise CheckpointError(
                problem(
                    f"the checkpoint was made with data {key} {state.get(key)}, this run has {ours}",
                    so="sequences would be repeated or skipped",
                    fix=f"restore what [data] said then ({settings}), or start a new run",
                )
            )

    def _enter_epoch(self, epoch: int) -> None:
        lengths = self._corpus.pieces.length
        self._epoch = epoch
        self._order = epoch_order(len(lengths), self._seed, epoch)
        self._tokens_before = np.zeros(len(lengths) + 1, dtype=np.int64)  # tokens of the epoch before each place
        np.cumsum(lengths[self._order], out=self._tokens_before[1:])
