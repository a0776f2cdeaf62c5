"""Experts in parallel: tokens travel to the ranks of a lockstep domain that have their experts, and back.

Rank r of the d ranks of a domain has the experts ``r E / d`` to ``(r + 1) E / d - 1`` of every mixture, whole. What the
router has chosen is sent, to the last row: there is no capacity, and no token is dropped. A token is sent once for each
of its experts, in its own dtype::

    this rank's rows      [T K, C]   sorted by expert      1. counts of rows for each expert
    rows for its experts  [R, C]     sorted by sender      2. rows there    3. the experts    4. rows back
    this rank's rows      [T K, C]                         5. a token's rows, weighted by the router and added

Steps 2 and 4 are messages again in backward, in reverse order, and steps 1 to 4 in each recomputation of a layer. All
ranks of the domain take part in all of them, also with no row to send or to compute: autograd runs the same steps on
all of them, whatever the router chooses. The messages are in the communicator of the layers' gathers and reductions,
so one order of calls on all ranks is enough; all ranks run the same layers in the same order (``lockstep``).

Shape letters: T tokens, C hidden size, E experts, K experts of a token, R rows that come to this rank.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from bytescale.common.errors import ConfigError, RankFailure
from bytescale.runtime.group import RankGroup

Messages = Callable[[Tensor], Tensor]


class ParallelExperts:
    """Makes a module of all E experts of a mixture the module of this rank's own, with messages around its forward.

    The module maps ``hidden [T, C], chosen [T, K] int64, weights [T, K]`` to ``[T, C]``, the weighted sum of what the
    chosen experts say. All its parameters are stacked, ``[E, ...]``; somebody else gives it this rank's part of them.
    """

    def __init__(self, module: nn.Module, group: RankGroup) -> None:
        """``group``: the domain. Raises ``ConfigError`` where it does not divide the experts."""
        self.module, self.group = module, group
        self.num_experts = num_experts_of(module, group.size)
        self._forward, self._before = module.forward, vars(module).get("forward")
        self._anchor = torch.zeros((), requires_grad=True)
        self._set(self.forward, self.num_experts // group.size)

    def undo(self) -> None:
        """Give the module back the forward that it had. Its parameters have to be whole again."""
        self._set(self._before, self.num_experts)

    def forward(self, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """``hidden [T, C], chosen [T, K] int64, weights [T, K] -> [T, C]``, whoever has the experts."""
        if chosen.shape != weights.shape or chosen.dim() != 2 or len(hidden) != len(chosen):
            raise RankFailure(
                f"experts got {list(hidden.shape)} hidden states, {list(chosen.shape)} choices and "
                f"{list(weights.shape)} weights",
                so="which token goes to which rank is not known",
                fix='use experts = "gathered" for this model',
            )
        size, here = self.group.size, self.num_experts // self.group.size
        experts = chosen.flatten()
        leaving = chosen.new_zeros(self.num_experts).scatter_add_(0, experts, torch.ones_like(experts))
        arriving = self.group.all_to_all(leaving, [here] * size, [here] * size).view(size, here)
        sent, received = self.group.read(torch.stack([leaving.view(size, here).sum(1), arriving.sum(1)]))
        there = partial(self.group.all_to_all, sent=sent, received=received)  # [T K, C] -> [R, C]
        back = partial(self.group.all_to_all, sent=received, received=sent)
        order = experts.argsort(stable=True)  # by expert, and so by rank
        place = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))

        rows = _ToExperts.apply(hidden, chosen.shape, order, place, there, back)
        local = torch.arange(here, device=hidden.device).repeat(size)
        local = local.repeat_interleave(arriving.flatten(), output_size=len(rows))
        if len(rows):  # otherwise none of the experts has anything to say
            rows = self._forward(rows, local[:, None], rows.new_ones(len(rows), 1))
        # On all ranks the result has a gradient, or on none, whichever rows have come.
        trains = hidden.requires_grad or any(parameter.requires_grad for parameter in self.module.parameters())
        rows = _FromExperts.apply(rows, order, place, there, back, self._anchor if trains else None)
        return (rows.view(*chosen.shape, rows.shape[1]) * weights[..., None]).sum(1).to(hidden.dtype)

    def _set(self, forward: Any, num_experts: int) -> None:
        if forward is None:
            del self.module.forward
        else:
            self.module.forward = forward
        if hasattr(self.module, "num_experts"):  # of transformers' modules
            self.module.num_experts = num_experts  # type: ignore[assignment]


def num_experts_of(module: nn.Module, domain: int) -> int:
    """E. Raises ``ConfigError`` unless every rank of a ``domain`` can have equally many of the module's experts."""
    counts = {len(parameter) for parameter in module.parameters()}
    if any(count % domain for count in counts) or len(counts) > 1:
        raise ConfigError(
            f"a domain of {domain} ranks does not divide the {min(counts)} experts of {type(module).__name__}",
            so="some ranks would have more experts than others, and more memory and work",
            fix='set domain to a divisor of both the experts and the ranks, or use experts = "gathered"',
        )
    return counts.pop()


class _ToExperts(torch.autograd.Function):
    """``hidden [T, C] -> [R, C]``. A token's gradient is the sum of its rows', in a fixed order."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, shape: torch.Size, order: Tensor, place: Tensor, there: Messages, back: Messages
    ) -> Tensor:
        ctx.back, ctx.shape = back, shape
        ctx.save_for_backward(place)
        return there(hidden[order // shape[1]])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (place,) = ctx.saved_tensors
        rows: Tensor = ctx.back(gradients[0])[place]
        return rows.view(*ctx.shape, rows.shape[1]).sum(1), None, None, None, None, None


class _FromExperts(torch.autograd.Function):
    """``rows [R, C] -> [T K, C]``, by token. Something is saved, so that a recomputation of the layer comes here."""

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, order: Tensor, place: Tensor, there: Messages, back: Messages, anchor: Tensor | None
    ) -> Tensor:
        ctx.there = there
        ctx.save_for_backward(order)
        return back(rows)[place]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (order,) = ctx.saved_tensors
        return ctx.there(gradients[0][order]), None, None, None, None, None
