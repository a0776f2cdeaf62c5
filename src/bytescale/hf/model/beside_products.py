"""A region's messages beside its products (``runtime.token_shards``), without a change of its module's code.

A module multiplies the rows that it is given with some weights, one after the other, and ends with another product. So
it is given a stand-in with the shape of all rows, whose products are computed when the region begins, while rows
arrive. Whoever does anything else with the stand-in gets all rows, in a message of their own, and in later passes the
region waits for its rows. The first pass, which sends each message by itself, shows which products there are, and
whether the module ends with one. All of it depends on the module's code alone, so ranks agree.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from bytescale.common.errors import RankFailure
from bytescale.runtime.token_shards import TokenShards, own_rows


class BesideProducts:
    """Of one region.

    Attributes:
        gathers, scatters: whether rows are gathered and scattered beside products.
    """

    def __init__(self, shards: TokenShards, first: Sequence[nn.Linear], last: nn.Linear | None) -> None:
        """``first``: what may be called with what the module is given. ``last``: has no bias."""
        self.shards = shards
        self.gathers, self.scatters = True, False
        self._is_known = False
        self._first: list[nn.Linear] = []
        self._products: dict[nn.Linear, Tensor] = {}
        self._last: Tensor | None = None
        for linear in first:
            vars(linear)["forward"] = partial(self._project_in, linear)
        if last is not None:
            vars(last)["forward"] = partial(self._project_out, last)

    def begin(self, rows: Tensor) -> Tensor:
        """``[1, n, C]`` or ``[n, C]`` rows ``->`` what the module is given in place of all rows."""
        own = rows.flatten(0, -2)[: len(own_rows(self.shards.num_tokens, self.shards.tp))]
        shape = (*rows.shape[:-2], self.shards.num_tokens, rows.shape[-1])
        if not self.gathers:
            return self.shards.gather(own).view(shape)
        if self._is_known:
            products = self.shards.gather_and_project(own, self._first)
            self._products = dict(zip(self._first, products, strict=True))
        result = rows.detach().new_zeros(()).expand(shape).as_subclass(_StandIn)
        result.own, result.region, result.everyone = own, self, None
        return result

    def end(self, result: Tensor) -> bool:
        """Whether ``result`` is of this rank's rows already."""
        is_last = result is self._last
        self.forget()
        if not self._is_known:
            self._is_known, self.scatters = True, is_last
            self.gathers &= bool(self._first)
            return False
        if self.scatters and not is_last:
            raise RankFailure(
                "a module of a model that is cut for tensor parallelism ends with another operation than in its first "
                "pass",
                so="rows of its result would be counted twice",
                fix="run it with the same configuration in every pass",
            )
        return self.scatters

    def forget(self) -> None:
        """After a forward, also one that an exception has stopped."""
        self._products, self._last = {}, None

    def _project_in(self, linear: nn.Linear, rows: Tensor) -> Tensor:
        if not isinstance(rows, _StandIn):
            return F.linear(rows, linear.weight, linear.bias)
        if not self._is_known:
            self._first += [linear] * (linear not in self._first)
            return F.linear(rows.all_rows(), linear.weight, linear.bias)
        product = self._products[linear].view(*rows.shape[:-1], -1)
        return product if linear.bias is None else product + linear.bias

    def _project_out(self, linear: nn.Linear, rows: Tensor) -> Tensor:
        if self.scatters:
            self._last = self.shards.project_and_scatter(rows.flatten(0, -2), linear)
            count = -(-self.shards.num_tokens // self.shards.tp.size)
            self._last = F.pad(self._last, (0, 0, 0, count - len(self._last))).view(*rows.shape[:-2], count, -1)
        else:
            self._last = F.linear(rows, linear.weight)
        return self._last


class _StandIn(Tensor):
    """Has the shape, dtype and device of all rows. Any operation on it gathers them."""

    own: Tensor
    region: BesideProducts
    everyone: Tensor | None

    def all_rows(self) -> Tensor:
        if self.everyone is None:
            self.everyone = self.region.shards.gather(self.own).view(self.shape)
        return self.everyone

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _SHAPES:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)

        def real(value: Any) -> Any:
            if not isinstance(value, _StandIn):
                return value
            value.region.gathers = False
            return value.all_rows()

        return func(*tree_map(real, args), **tree_map(real, kwargs))


_SHAPES = {
    *(getattr(Tensor, name).__get__ for name in ("shape", "dtype", "device", "ndim", "is_cuda", "requires_grad")),
    Tensor.size, Tensor.dim, Tensor.is_floating_point, Tensor.element_size, Tensor.numel,
}  # fmt: skip
"""What tells nothing of the rows themselves."""
