"""Recurrent layers of transformers: their own forward, with the kernels of ``recurrence`` in place of the stock ones.

In a pass of a plan the same code runs with other functions behind the names of its kernels. There is no list of model
types: whatever calls one of ``recurrence.KERNELS`` is a mixer, and the probe decides whether it can be cut.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextvars import ContextVar
from functools import partial
from types import FunctionType, MethodType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from bytescale.hf.model.refusal import refusal
from bytescale.recurrence import KERNELS, Cuts, LightningAttention

if TYPE_CHECKING:
    from bytescale.hf.model.interface import Target

_LIGHTNING = "get_linear_cache"
"""A method of the cache that MiniMax's mixer alone asks for its state."""

_cuts: ContextVar[Cuts] = ContextVar("bytescale_cuts")


def put_on_kernels(model: nn.Module, target_of: Callable[[dict[str, Any]], Target | None]) -> list[nn.Module]:
    """Replace ``forward`` of a model's mixers, which are returned.

    ``target_of`` takes the pass out of a forward's keywords, or knows it otherwise; None: outside of plans.
    """
    mixers = [module for module in model.modules() if _kernels(module)]
    for mixer in mixers:
        function = inspect.unwrap(type(mixer).forward)
        mixer.forward = MethodType(_forward(function, _kernels(mixer), target_of), mixer)
    return mixers


def _kernels(module: nn.Module) -> set[str]:
    """Names of the stock functions that a module's forward calls; of a module with a forward of its own none."""
    function = inspect.unwrap(type(module).forward)
    if not isinstance(function, FunctionType):
        return set()
    return set(function.__code__.co_names) & {*KERNELS, _LIGHTNING}


def _forward(
    function: FunctionType, names: set[str], target_of: Callable[[dict[str, Any]], Target | None]
) -> Callable[..., Any]:
    """The mixer's forward, as a function of the mixer, so that a copy of a model computes with its own weights."""
    if names == {_LIGHTNING}:
        cut_forward: Callable[..., Any] = _lightning
    else:
        ours = {name: partial(_carried, KERNELS[name], function.__globals__[name]) for name in names - {_LIGHTNING}}
        cut_forward = FunctionType(
            function.__code__, {**function.__globals__, **ours}, function.__name__, function.__defaults__,
            function.__closure__,
        )  # fmt: skip
        cut_forward.__kwdefaults__ = function.__kwdefaults__

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        target = target_of(kwargs)
        plain = partial(type(self).forward, self, *args, **kwargs)
        if target is not None:
            return target.mix(self, plain, partial(_with_cuts, partial(cut_forward, self, *args, **kwargs)))
        if torch._C._current_graph_task_id() != -1:
            raise refusal(
                type(self).__name__,
                "it is computed again in backward, and is not told for which micro-batch",
                so="documents of the micro-batch would see each other's states",
                fix="switch the model's own gradient checkpointing off, and use checkpointing='full' of HDP",
            )
        return plain()

    return forward


@torch.compiler.disable
def _with_cuts(compute: Callable[[], Any], cuts: Cuts) -> Any:
    before = _cuts.set(cuts)
    try:
        return compute()
    finally:
        _cuts.reset(before)


def _carried(kernel: Callable[..., Any], stock: Callable[..., Any], *args: Any, **options: Any) -> Any:
    return kernel(_cuts.get(), stock, *args, **options)


def _lightning(mixer: nn.Module, hidden_states: Any, *_: Any, **__: Any) -> Any:
    return LightningAttention.forward(_cuts.get(), mixer, hidden_states)
