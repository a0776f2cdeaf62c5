"""Log-probabilities, entropies and best words of every row, a few rows of logits at a time.

With gradients enabled, the logits of a chunk are computed again in backward, so that no chunk's logits are kept.

Shape letters: T rows, n rows of a chunk, C hidden size, V vocabulary, K words of a row.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from bytescale.common.errors import DataError
from bytescale.common.labels import IGNORE_INDEX
from bytescale.cost.memory import loss_chunk_tokens
from bytescale.hf.model.head import hidden_states


class RowScores(NamedTuple):
    """Results of the rows of a micro-batch, in fp32 (fp64 for fp64). What was not asked for is None."""

    logprobs: Tensor
    """``[T]`` log-probability of each row's label; 0 where the label is -100."""
    entropy: Tensor | None
    """``[T]`` entropy of each row's distribution, in nats."""
    top_logprobs: Tensor | None
    """``[T, K]`` log-probabilities of each row's likeliest words, falling."""
    top_words: Tensor | None
    """``[T, K]`` int64: those words."""
    word_logprobs: Tensor | None
    """``[T, K]`` log-probabilities of the words that were asked for."""
    mean_logits: Tensor | None
    """``[T]`` mean of each row's logits."""
    hidden: Tensor
    """``[T, C]`` hidden states after the final norm, for a head of one's own."""


@dataclass(frozen=True, kw_only=True)
class WantedScores:
    """What is computed of each row.

    Attributes:
        temperature: logits are divided by it: a number, or ``[T]`` of them.
        entropy: whether entropies are.
        top: K likeliest words.
        words: ``[T, K]`` int64, words whose log-probabilities are wanted; None: none.
        mean_logits: whether means of logits are.
        rows_at_a_time: rows of a chunk; None: as many as the vocabulary allows.
    """

    temperature: float | Tensor = 1.0
    entropy: bool = False
    top: int = 0
    words: Tensor | None = None
    mean_logits: bool = False
    rows_at_a_time: int | None = None


def row_scores(model: nn.Module, inputs: dict[str, Any], labels: Tensor, wanted: WantedScores) -> RowScores:
    """Run the model, and score its rows ``labels [T]``. Raises ``DataError`` for a temperature that is not positive."""
    temperature = wanted.temperature
    if not isinstance(temperature, Tensor) and not temperature > 0:
        raise DataError(
            f"the temperature is {temperature}",
            so="logits cannot be divided by it",
            fix="give a number above 0, or one for each row",
        )
    states, head = hidden_states(model, inputs)
    hidden = states[0, : len(labels)]
    chunk_rows = wanted.rows_at_a_time or loss_chunk_tokens(head.num_words, hidden.device.type)
    targets = labels.split(chunk_rows)
    columns = [
        [values] * len(targets) if not isinstance(values, Tensor) else values.split(chunk_rows)
        for values in (temperature, wanted.words)
    ]

    def chunk(rows: Tensor, targets: Tensor, divisor: Any, asked: Tensor | None) -> list[Tensor | None]:
        return _scores(head(rows), targets, divisor, asked, wanted)

    parts = [
        checkpoint(chunk, *own, use_reentrant=False, preserve_rng_state=False) if torch.is_grad_enabled()
        else chunk(*own)
        for own in zip(hidden.split(chunk_rows), targets, *columns, strict=True)
    ]  # fmt: skip
    joined = [None if column[0] is None else torch.cat(column) for column in zip(*parts, strict=True)]
    return RowScores(*joined, hidden)  # type: ignore[call-arg, arg-type]


def _scores(
    logits: Tensor, labels: Tensor, divisor: float | Tensor, words: Tensor | None, wanted: WantedScores
) -> list[Tensor | None]:
    """From logits ``[n, V]`` to the columns of ``RowScores``."""
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if isinstance(divisor, Tensor):
        logits = logits / divisor.to(logits)[:, None]
    elif divisor != 1:
        logits = logits / divisor
    lse = logits.logsumexp(dim=1)
    counted = labels != IGNORE_INDEX
    chosen = logits.gather(1, labels.where(counted, 0)[:, None])[:, 0] - lse
    entropy = lse - (logits.softmax(dim=1) * logits).sum(dim=1) if wanted.entropy else None
    top_logprobs, top_words = None, None
    if wanted.top:
        values, top_words = logits.topk(wanted.top, dim=1)
        top_logprobs = values - lse[:, None]
    found = None if words is None else logits.gather(1, words) - lse[:, None]
    means = logits.mean(dim=1) if wanted.mean_logits else None
    return [chosen.where(counted, 0), entropy, top_logprobs, top_words, found, means]
