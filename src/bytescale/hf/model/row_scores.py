"""Log-probabilities, entropies and best words of every row, a few rows of logits at a time.

With gradients enabled, the logits of a chunk are computed again in backward, so that no chunk's logits are kept.

Shape letters: T rows, n rows of a chunk, C hidden size, V vocabulary, K words of a row.
"""

from __future__ import annotations

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


def row_scores(
    model: nn.Module, inputs: dict[str, Any], labels: Tensor, *, temperature: float | Tensor = 1.0,
    rows_at_a_time: int | None = None, entropy: bool = False, top: int = 0, words: Tensor | None = None,
    mean_logits: bool = False,
) -> RowScores:  # fmt: skip
    """Run the model, and score its rows ``labels [T]``; ``Micro.logprobs``."""
    if not isinstance(temperature, Tensor) and not temperature > 0:
        raise DataError(
            f"the temperature is {temperature}",
            so="logits cannot be divided by it",
            fix="give a number above 0, or one for each row",
        )
    states, head = hidden_states(model, inputs)
    hidden = states[0, : len(labels)]
    chunk_rows = rows_at_a_time or loss_chunk_tokens(head.num_words, hidden.device.type)

    def scores(rows: Tensor, labels: Tensor, divisor: Any, asked: Tensor | None) -> list[Tensor | None]:
        logits = head(rows)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        if isinstance(divisor, Tensor):
            logits = logits / divisor.to(logits)[:, None]
        elif divisor != 1:
            logits = logits / divisor
        lse = logits.logsumexp(dim=1)
        counted = labels != IGNORE_INDEX
        chosen = logits.gather(1, labels.where(counted, 0)[:, None])[:, 0] - lse
        values, best = logits.topk(top, dim=1) if top else (None, None)
        return [
            chosen.where(counted, 0),
            lse - (logits.softmax(dim=1) * logits).sum(dim=1) if entropy else None,
            None if values is None else values - lse[:, None],
            best,
            None if asked is None else logits.gather(1, asked) - lse[:, None],
            logits.mean(dim=1) if mean_logits else None,
        ]

    targets = labels.split(chunk_rows)
    columns = [
        values.split(chunk_rows) if isinstance(values, Tensor) else [values] * len(targets)
        for values in (temperature, words)
    ]
    parts = [
        checkpoint(scores, *own, use_reentrant=False, preserve_rng_state=False) if torch.is_grad_enabled()
        else scores(*own)
        for own in zip(hidden.split(chunk_rows), targets, *columns, strict=True)
    ]  # fmt: skip
    joined = [None if column[0] is None else torch.cat(column) for column in zip(*parts, strict=True)]
    return RowScores(*joined, hidden)  # type: ignore[call-arg, arg-type]
