"""Batches of all ranks as one global batch under ``HDP``: what trainers and engines of other people run as a model.

``WholeBatch.run`` gathers the sequences of all ranks, plans them together, and returns the values of this rank's, such
as log-probabilities, as if a model had computed them. A loss goes backward into these values. ``finish`` then goes
backward through the model, on the same plan.

That takes one forward more than a model would, unless the gradient can be *guessed*: where the loss is minus the sum of
log-probabilities over a known number, backward runs with the guess in the first pass. Where what the trainer's loss
then says differs, a second pass makes up for the difference.

Shape letters: S tokens of a sequence, N of all sequences of this rank; K values of a token, D of them differentiable.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from bytescale.common.labels import IGNORE_INDEX
from bytescale.hf.loop.coupled import Values, backward_from
from bytescale.hf.loop.hdp import HDP
from bytescale.hf.loop.micro_batch import Micro
from bytescale.hf.loop.planned_batch import PlannedBatch

LOG_PROBS, ENTROPY, IS_TOP1, MEAN_LOGITS = range(4)
"""Values that ``word_columns`` gives; the first two are differentiable."""


class Sequences(NamedTuple):
    """Sequences of one rank. Integers and, perhaps, a number for each token."""

    tokens: Sequence[Tensor]
    """Of each ``[S]``."""
    labels: Sequence[Tensor]
    """Of each ``[S]``: what the model has to predict at each token; -100 for nothing."""
    numbers: Sequence[Tensor] | None = None
    """Of each ``[S]``: the micro-batches' field ``number``."""


@dataclass(kw_only=True)
class _Call:
    planned: PlannedBatch
    lengths: list[int]
    values: Tensor
    """``[N, D]``, a leaf."""
    guess: Tensor | None


class WholeBatch:
    """Runs of one model in one training step. Every rank makes the same."""

    def __init__(self, hdp: HDP, columns: Values, *, num_trained: int) -> None:
        """``columns``: a micro-batch's values ``[T, K]``. ``num_trained``: D; 0: none, as for a second model."""
        self.hdp, self._columns, self._num_trained = hdp, columns, num_trained
        self._calls: list[_Call] = []

    def run(
        self, sequences: Sequences, *, guess: float = 0.0, capacity_tokens: int | None = None
    ) -> tuple[Tensor, Tensor]:
        """Run the sequences of all ranks. Returns ``[N, D]``, a leaf where gradients are enabled, and ``[N, K - D]``.

        Args:
            guess: the gradient that the first column of each label is expected to get; 0: nothing is expected.
            capacity_tokens: as ``HDP.plan`` takes it.
        """
        trains = torch.is_grad_enabled() and self._num_trained > 0
        guess = guess if trains else 0.0
        first, documents = self._documents_of_all(sequences, guess)
        share = self.hdp.can_share_prefixes
        planned = self.hdp.plan(documents, capacity_tokens=capacity_tokens, share_prefixes=share)
        with torch.set_grad_enabled(bool(guess)):
            for micro in planned:
                columns = self._columns(micro)
                if guess:
                    guesses = micro.guess.to(columns) * micro.multiplicity
                    (columns[:, 0] * guesses).sum().backward()
                self.hdp.collect(micro, columns)
        found = self.hdp.collected()[first : first + len(sequences.tokens)]
        rows = torch.cat(found) if found else torch.zeros(0, self._num_trained, device=self.hdp.group.device)
        values, rest = rows[:, : self._num_trained].clone(), rows[:, self._num_trained :]
        if trains:
            values.requires_grad_()
            own = None
            if guess:
                counted = torch.cat(list(sequences.labels)) != IGNORE_INDEX
                own = torch.zeros_like(values).index_fill_(1, torch.tensor(0), guess) * counted[:, None]
            lengths = [len(tokens) for tokens in sequences.tokens]
            self._calls.append(_Call(planned=planned, lengths=lengths, values=values, guess=own))
        return values, rest

    def finish(self, share: float = 1.0) -> None:
        """Go backward through the model, after the loss has gone backward into the values of all runs.

        ``share``: what gradients are multiplied with: 1 / ranks where those of all ranks are averaged.
        """
        calls, self._calls = self._calls, []
        for call in calls:
            gradient = torch.zeros_like(call.values) if call.values.grad is None else call.values.grad * share
            if call.guess is not None:
                gradient = gradient - call.guess
                largest = [float(own.abs().max()) if own.numel() else 0.0 for own in (gradient, call.guess)]
                wrong, scale = self.hdp.group.max_of(largest)
                if wrong <= 1e-5 * scale:
                    continue
            _, coefficients = self._gathered(list(gradient.T.split(call.lengths, dim=1)), gradient.T)
            gradients = [rows.T for rows in coefficients]
            backward_from(call.planned, gradients, lambda micro: self._columns(micro)[:, : self._num_trained])

    def _documents_of_all(self, sequences: Sequences, guess: float) -> tuple[int, list[dict[str, Any]]]:
        numbers = sequences.numbers or [torch.zeros(len(tokens)) for tokens in sequences.tokens]
        own = [  # integers below 2^53 are exact
            torch.stack([part.to(self.hdp.group.device, torch.float64) for part in parts])
            for parts in zip(sequences.tokens, sequences.labels, numbers, strict=True)
        ]
        first, rows = self._gathered(own, torch.zeros(3, 0, dtype=torch.float64))
        documents: list[dict[str, Any]] = [
            # Weights are a loss's own affair: they may sum to zero here.
            {"tokens": tokens.long(), "labels": labels.long(), "number": number, "weights": torch.ones(len(labels))}
            for tokens, labels, number in rows
        ]
        for document in documents if guess else ():
            document["guess"] = (document["labels"] != IGNORE_INDEX).double() * guess
        return first, documents

    def _gathered(self, own: list[Tensor], like: Tensor) -> tuple[int, list[Tensor]]:
        """All ranks' tensors ``[rows of like, S]``, in rank order, on the CPU; and the number of this rank's first."""
        group = self.hdp.group
        counts = [int(row[0]) for row in group.share([float(len(own))])]
        lengths = [float(rows.shape[1]) for rows in own] + [0.0] * (max(counts) - len(own))
        table = [[int(n) for n in row[:count]] for row, count in zip(group.share(lengths), counts, strict=True)]
        mine = torch.zeros(1, len(like), max(map(sum, table)), dtype=like.dtype, device=group.device)
        if own:
            mine[0, :, : int(sum(lengths))] = torch.cat(own, dim=1)
        everything = mine.new_zeros(group.size, *mine.shape[1:])
        group.all_gather(everything, mine)
        whole = everything.cpu()
        found = [part for rank, row in enumerate(table) for part in whole[rank, :, : sum(row)].split(row, dim=1)]
        return sum(counts[: group.rank]), found


def word_columns(model: nn.Module, temperature: float | None = 1.0) -> Values:
    """``[T, 4]``: log-probability, entropy, whether the label is the likeliest word, mean of logits; 0 without label.

    ``temperature``: None: the micro-batches' field ``number`` has it.
    """

    def columns(micro: Micro) -> Tensor:
        divisor = micro.number if temperature is None else temperature
        scores: Any = micro.logprobs(model, temperature=divisor, entropy=True, top=1, mean_logits=True)
        hit = (scores.top_words[:, 0] == micro.labels).to(scores.entropy)
        four = torch.stack([scores.logprobs, scores.entropy, hit, scores.mean_logits], dim=1)
        return four * (micro.labels != IGNORE_INDEX)[:, None]

    return columns


def value_columns(model: nn.Module) -> Values:
    """``[T, 1]``: the only number that a model for token classification gives each token."""

    def columns(micro: Micro) -> Tensor:
        logits: Tensor = model(**micro.inputs).logits[0, : micro.num_rows]
        return logits.to(torch.promote_types(logits.dtype, torch.float32))

    return columns


def load_schedule(schedule: Any, state: dict[str, Any]) -> None:
    """Restore a schedule of learning rates from another rank's, and give its optimizer the rates.

    A schedule's lists have an entry for each group of options. A rank's shards may be of other groups than another's,
    whose rates are the same share of their first ones.
    """
    own = schedule.state_dict()
    schedule.load_state_dict({name: own[name] if isinstance(own[name], list) else state[name] for name in own})
    share = next((now / first for now, first in zip(state["_last_lr"], state["base_lrs"], strict=True) if first), 0.0)
    schedule._last_lr = [first * share for first in schedule.base_lrs]
    for group, rate in zip(schedule.optimizer.param_groups, schedule._last_lr, strict=True):
        group["lr"] = rate
