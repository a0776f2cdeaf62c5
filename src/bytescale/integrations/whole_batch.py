"""A padded batch of each rank, run by ``HDP`` as one global batch: what trainers see as a model.

Trainers of other people give every rank a padded batch of its own, ask a model for the log-probabilities of its labels,
and compute a loss from these, as they like. ``WholeBatch`` stands where they expect the model. A call gathers the rows
of all ranks, plans them together, and returns this rank's results, as if its model had computed them. The loss goes
backward into these results. ``finish`` then goes backward through the model, on the same plan.

That takes one forward more than a model would, unless the gradient can be *guessed*: where the loss is minus the sum of
log-probabilities over a known number, backward runs with the guess in the first pass. What the trainer's loss then says
decides: where the guess was wrong, a second pass makes up for the difference.

Shape letters: B sequences of a rank's padded batch, L its length; S tokens of a document; R ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from bytescale.attach.hdp import HDP
from bytescale.attach.micro_batch import Micro
from bytescale.attach.planned_batch import PlannedBatch
from bytescale.attach.row_scores import RowScores
from bytescale.common.errors import ConfigError
from bytescale.common.labels import IGNORE_INDEX

LOG_PROBS, ENTROPY = 0, 1
"""Columns of the values that a loss may go backward into."""


@dataclass(kw_only=True)
class _Call:
    planned: PlannedBatch
    places: list[Tensor]
    """``[B]`` of each sequence, the places ``[S]`` of its tokens among L."""
    first: int
    """The number of this rank's first sequence among those of all ranks."""
    values: Tensor
    """``[B, L, 2]``, a leaf."""
    guess: Tensor | None


@dataclass(frozen=True)
class Scores:
    """Results of a padded batch, ``[B, L]`` each: at place i those of the token at place i + 1. 0 without a label."""

    log_probs: Tensor
    entropy: Tensor
    is_top1: Tensor
    mean_logits: Tensor


class WholeBatch:
    """Calls of one model in one training step. Every rank makes the same calls."""

    def __init__(self, hdp: HDP, model: nn.Module | None = None, *, temperature: float = 1.0) -> None:
        """``model``: None: the attached one; or another that ``HDP.attach`` was given, which has no backward."""
        self.hdp, self.model, self.temperature = hdp, model or hdp.model, temperature
        self._calls: list[_Call] = []

    def run(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor, *, guess: float = 0.0) -> Scores:
        """Score ``labels [B, L]``, those of Hugging Face's kind.

        Args:
            input_ids, attention_mask: ``[B, L]``, padded on any side.
            guess: the gradient that each log-probability of a label is expected to get, times all ranks' number; 0:
                there is no expectation.
        """
        places = [mask.nonzero()[:, 0] for mask in attention_mask]
        shifted = torch.cat([labels[:, 1:], labels.new_full((len(labels), 1), IGNORE_INDEX)], dim=1)
        own = [torch.stack([input_ids[b, at], shifted[b, at]]) for b, at in enumerate(places)]
        trains = torch.is_grad_enabled() and self.model is self.hdp.model
        guess = guess if trains else 0.0
        first, documents = self._documents_of_all(own, guess)
        results = input_ids.new_zeros(*input_ids.shape, 4, dtype=torch.float64)
        planned = self.hdp.plan(documents)
        with torch.set_grad_enabled(bool(guess)):
            for micro in planned:
                scores = self._scores(micro)
                if guess:
                    (scores.logprobs * micro.guess.to(scores.logprobs.dtype)).sum().backward()
                self.hdp.collect(micro, _columns(scores, micro))
        collected = self.hdp.collected()[first : first + len(places)]
        for b, (at, rows) in enumerate(zip(places, collected, strict=True)):
            results[b, at] = rows.to(results)
        values = results[..., :2].to(collected[0].dtype if collected else torch.float32)
        if trains:
            values.requires_grad_()
            guesses = None
            if guess:
                guesses = torch.zeros_like(values)
                guesses[..., LOG_PROBS] = (shifted != IGNORE_INDEX) * guess
            self._calls.append(_Call(planned=planned, places=places, first=first, values=values, guess=guesses))
        return Scores(
            values[..., LOG_PROBS], values[..., ENTROPY], results[..., 2] > 0, results[..., 3].to(values.dtype)
        )

    def finish(self, share: float = 1.0) -> None:
        """Go backward through the model, after the loss has gone backward into the results of all calls.

        ``share``: what gradients are multiplied with, such as 1 / R where those of all ranks are averaged.
        """
        calls, self._calls = self._calls, []
        for call in calls:
            gradient = torch.zeros_like(call.values) if call.values.grad is None else call.values.grad * share
            if call.guess is not None:
                gradient = gradient - call.guess
                scale = float(call.guess.abs().max()) if call.guess.numel() else 0.0
                wrong = float(gradient.abs().max()) > 1e-5 * scale if gradient.numel() else False
                if not self.hdp.group.max_of([float(wrong)])[0]:
                    continue
            own = [gradient[b, at].T for b, at in enumerate(call.places)]
            _, coefficients = self._gathered(own, 2)
            for micro in call.planned:
                scores = self._scores(micro)
                values = torch.stack([scores.logprobs, scores.entropy], dim=1)  # type: ignore[list-item]
                rows = [coefficients[s][:, a:b].T for s, a, b in micro.plan.runs]
                (torch.cat([values[:0], *rows]).to(values) * values).sum().backward()

    def _scores(self, micro: Micro) -> RowScores:
        return micro.logprobs(self.model, temperature=self.temperature, entropy=True, top=1, mean_logits=True)

    def _documents_of_all(self, own: list[Tensor], guess: float) -> tuple[int, list[dict[str, Any]]]:
        first, rows = self._gathered(own, 2)
        documents = [{"tokens": tokens, "labels": labels} for tokens, labels in rows]
        for document in documents:
            # Weights are a loss's own affair: they may sum to zero here.
            document["guess"] = (document["labels"] != IGNORE_INDEX).double() * guess
            document["weights"] = torch.ones(len(document["labels"]))
        return first, documents

    def _gathered(self, own: list[Tensor], num_columns: int) -> tuple[int, list[Tensor]]:
        """All ranks' tensors ``[columns, S]``, in rank order, on the CPU; and the number of this rank's first one."""
        group = self.hdp.group
        counts = [int(row[0]) for row in group.share([float(len(own))])]
        lengths = [float(rows.shape[1]) for rows in own] + [0.0] * (max(counts) - len(own))
        table = [[int(n) for n in row[:count]] for row, count in zip(group.share(lengths), counts, strict=True)]
        longest = max(sum(row) for row in table)
        kind = own[0].dtype if own else torch.int64
        mine = torch.zeros(1, num_columns, longest, dtype=kind, device=group.device)
        if own:
            joined = torch.cat(own, dim=1)
            mine[0, :, : joined.shape[1]] = joined
        everything = mine.new_zeros(group.size, num_columns, longest)
        group.all_gather(everything, mine)
        whole = everything.cpu()
        found = [part for rank, row in enumerate(table) for part in whole[rank, :, : sum(row)].split(row, dim=1)]
        return sum(counts[: group.rank]), found


def _columns(scores: RowScores, micro: Micro) -> Tensor:
    """``[T, 4]`` log-probability, entropy, whether the label is the likeliest word, mean of logits; 0 without label."""
    assert scores.entropy is not None, "asked for"
    assert scores.top_words is not None, "asked for"
    assert scores.mean_logits is not None, "asked for"
    hit = (scores.top_words[:, 0] == micro.labels).to(scores.entropy)
    columns = torch.stack([scores.logprobs, scores.entropy, hit, scores.mean_logits], dim=1).detach()
    return columns * (micro.labels != IGNORE_INDEX)[:, None]


def require_plain(asked: dict[str, Any], what: str) -> None:
    """Raise ``ConfigError`` for inputs of a model that plans do not have, such as images."""
    unknown = sorted(name for name, value in asked.items() if value is not None and value is not False)
    if unknown:
        raise ConfigError(
            f"{what} was given {', '.join(unknown)}",
            so="a plan has tokens alone",
            fix="train on texts, without balance losses of experts",
        )
