"""Rows of a decoder that is cut for tensor parallelism: gathered before its regions, scattered behind them.

Shape letters: T tokens of a micro-batch, N ranks, n = ceil(T / N) rows of a rank, t of them no padding, C hidden size.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bytescale.common.errors import ConfigError
from bytescale.hf.model.beside_products import BesideProducts
from bytescale.hf.model.interface import running_pass
from bytescale.runtime.group import RankGroup
from bytescale.runtime.token_shards import TokenShards, own_rows


class TokenRows:
    """The rows of the pass that runs: all of them, or this rank's n. T is that of the pass, also when it runs again.

    An empty micro-batch runs on one row that stands for none, on all ranks alike.
    """

    def __init__(self, shards: TokenShards, *, splits_loss: bool) -> None:
        self.shards, self.splits_loss = shards, splits_loss

    def begin(self) -> int:
        """Tell the messages what T is. Returns n."""
        target = running_pass()
        if target is None:
            raise ConfigError(
                "a model that is cut for tensor parallelism was run outside of a plan",
                so="it has a part of its weights, and would not know whose rows it has",
                fix="run it in micro-batches of a plan",
            )
        self.shards.begin(max(1, target.num_rows))
        return -(-self.shards.num_tokens // self.shards.tp.size)

    def gathered(self, rows: Tensor) -> Tensor:
        """``[n, ...] -> [T, ...]``; the gradient is summed over ranks."""
        return self.shards.gather(rows[: len(self._own())])

    def scattered(self, partial: Tensor) -> Tensor:
        """``[T, ...]``, summed over ranks, ``-> [n, ...]``."""
        return self._padded(self.shards.scatter(partial))

    def kept(self, whole: Tensor) -> Tensor:
        """``[T, ...]``, the same on every rank, ``-> [n, ...]``."""
        own = self._own()
        return self._padded(whole[own.start : own.stop])

    def output(self, hidden: Tensor, num_rows: int) -> Tensor:
        """``[n, C]`` of the last norm ``->`` what the loss takes: ``[T, C]``, or this rank's ``[t, C]``."""
        own = self.own(hidden, num_rows)
        return own if self.splits_loss else self.shards.gather_for_loss(own)

    def own(self, rows: Tensor, num_rows: int) -> Tensor:
        """``[n, ...] -> [t, ...]``: without those that pad."""
        self.shards.begin(num_rows)
        return rows[: len(self._own())]

    def range_of(self, num_rows: int) -> range:
        """Which of T = ``num_rows`` rows are this rank's, without those that pad."""
        return own_rows(num_rows, self.shards.tp)

    def tokens(self, tokens: Tensor) -> Tensor:
        """``[T] -> [n]``: what the model is given. Rows that pad repeat the last token, which any model can have."""
        count, tp = -(-len(tokens) // self.shards.tp.size), self.shards.tp
        padding = tokens[-1:].expand(count * tp.size - len(tokens))
        return torch.cat([tokens, padding]).view(tp.size, count)[tp.rank]

    def embedded(self, module: nn.Embedding, tokens: Tensor) -> Tensor:
        """``[1, n]`` tokens ``-> [1, n, C]`` by an embedding of which each rank has some words."""
        tp, words = self.shards.tp, len(module.weight)
        everyone = tokens.new_empty(tp.size * tokens.shape[1])
        tp.all_gather(everyone, tokens[0].contiguous())
        own = everyone - tp.rank * words
        here = (own >= 0) & (own < words)
        rows: Tensor = type(module).forward(module, own.where(here, 0)) * here[:, None]
        self.shards.begin(len(everyone))
        return self.shards.scatter(rows)[None]

    def _own(self) -> range:
        return self.range_of(self.shards.num_tokens)

    def _padded(self, rows: Tensor) -> Tensor:
        count = -(-self.shards.num_tokens // self.shards.tp.size)
        return F.pad(rows, (0, 0) * (rows.dim() - 1) + (0, count - len(rows)))


def gather_around(
    module: nn.Module, rows: TokenRows, *, is_partial: bool, takes_choices: bool, beside: BesideProducts | None = None
) -> None:
    """Give ``module`` all rows, and its caller this rank's rows of the result.

    ``takes_choices``: experts, which are given integers for each row, too. ``beside``: sends what it can.
    """

    def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        count, waiting = rows.begin(), [] if beside is None else [beside]

        def whole(value: Any) -> Any:
            if not isinstance(value, Tensor) or not (value.is_floating_point() or takes_choices):
                return value
            is_rows = value.shape[:2] == (1, count) if value.dim() > 2 else value.dim() == 2 and len(value) == count
            if is_rows and value.dim() <= 3 and waiting:
                return waiting.pop().begin(value)
            if value.dim() > 2 and is_rows:
                return rows.gathered(value[0])[None]
            return rows.gathered(value) if is_rows else value

        return tuple(map(whole, args)), {key: whole(value) for key, value in kwargs.items()}

    def after(module: nn.Module, args: Any, result: Any) -> Any:
        if result is None:  # stopped, as a recomputation is behind what it has to compute
            if beside is not None:
                beside.forget()
            return None
        rows.begin()
        first, *others = result if isinstance(result, tuple) else (result,)
        if beside is not None and beside.end(first):
            return result
        back = rows.scattered if is_partial else rows.kept
        first = back(first[0])[None] if first.dim() > 2 else back(first)
        return (first, *others) if isinstance(result, tuple) else first

    module.register_forward_pre_hook(before, with_kwargs=True)
    module.register_forward_hook(after, always_call=True)


class GatherColumns(torch.autograd.Function):
    """``[..., C/N] -> [..., C]``. The gradient of each rank is a partial sum."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, tp: RankGroup) -> Tensor:
        ctx.tp = tp
        parts = part.new_empty(tp.size, *part.shape)
        tp.all_gather(parts.view(-1), part.contiguous().view(-1))
        return torch.cat(list(parts), -1)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        own = torch.stack(gradients[0].chunk(ctx.tp.size, -1))
        return ctx.tp.reduce_scatter(own)[0], None
