"""Opens the layers of a model whose parameters a lockstep domain shares, and closes them behind (``units``)."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Variable
from torch.utils._pytree import tree_leaves

from bytescale.common.cut import Cut
from bytescale.common.errors import ConfigError, RankFailure
from bytescale.runtime.group import PendingCollective
from bytescale.runtime.mesh import Mesh
from bytescale.runtime.optimizer.flat import Entry
from bytescale.runtime.optimizer.units import Named, UnitParameters


class Units:
    """Opens and closes the layers of a model while they compute, forward and backward."""

    def __init__(self, layers: Sequence[nn.Module], stores: Sequence[UnitParameters]) -> None:
        """Hook the layers. ``stores``: all of their parameters, by dtype and by whether they are trained."""
        self.stores = list(stores)
        self._num_layers = len(layers)
        self._gathering: dict[int, list[PendingCollective]] = {}
        self._open: set[int] = set()
        self._reducing: deque[tuple[PendingCollective, Callable[[], None]]] = deque()
        self._entered = 0  # layers of the forward that runs
        self._backward: int | None = None  # the layer that backward has come to; None: there is no backward
        self._unit_of = {id(p): unit for unit, layer in enumerate(layers) for p in layer.parameters()}
        self._shared = {id(p) for store in stores for p in store.parameters}
        self._hooks = [hook for unit, layer in enumerate(layers) for hook in self._hook(unit, layer)]

    def begin(self) -> None:
        """Forget a pass that an error has ended. Called before the first pass of a step, and after the last one."""
        self._finish_reductions()
        self._backward = None
        for unit in [*self._gathering, *self._open]:
            self._show(unit)
            self._close(unit)

    def pass_without_work(self, *, backward: bool) -> None:
        """Take part in the gathers and reductions of a round in which this rank has no micro-batch."""
        for unit in range(self._num_layers):
            self._enter_forward(unit)
            self._leave_forward(unit, backward=backward)
        if backward:
            self._backward = self._num_layers
            self._finish_backward()

    def whole(self, parameter: nn.Parameter) -> Tensor:
        """A parameter's values: a copy, if ranks share it. All ranks of the domain call it, in the same order."""
        if id(parameter) not in self._shared:
            return parameter.detach()
        unit = self._unit_of[id(parameter)]
        if unit not in self._open:
            self.begin()
            self._show(unit)
        return parameter.detach().clone()

    def dissolve(self) -> None:
        """Give every rank whole parameters again."""
        self.begin()
        for hook in self._hooks:
            hook.remove()
        for unit in range(self._num_layers):
            self._show(unit)

    # -- the order of operations, the same on all ranks of a domain ------------------------------------------------

    def _enter_forward(self, unit: int) -> None:
        if unit == 0:
            self.begin()
            self._entered = 0
        if unit != self._entered:
            raise RankFailure(
                f"layer {unit} of the model runs after {self._entered} layers of this pass",
                so="ranks would gather the parameters of different layers",
                fix='run every layer once, in order, or use shard = "optimizer"',
            )
        self._entered += 1
        self._show(unit)
        self._start(unit + 1)

    def _leave_forward(self, unit: int, *, backward: bool) -> None:
        if not backward or unit + 1 < self._num_layers:  # backward begins with the last layer
            self._close(unit)

    def _enter_backward(self, unit: int) -> None:
        if self._backward is None:
            self._backward = self._num_layers
            Variable._execution_engine.queue_callback(self._finish_backward)
        if unit > self._backward:  # one backward runs through two passes, the later one first
            self._leave_layers()
            self._backward = self._num_layers
        while self._backward > unit:
            self._step_backward()

    def _step_backward(self) -> None:
        """Leave the layer that backward has come to, if it is one, and enter the one before it, if there is one."""
        assert self._backward is not None, "a backward runs"
        self._backward -= 1
        entered, left = self._backward, self._backward + 1
        if left < self._num_layers:
            self._finish_reductions()  # of the layer behind it, which had all of its backward for it
            for store in self.stores:
                self._reducing += store.start_reduction(left)
            self._close(left)
        if entered >= 0:
            self._show(entered)
            self._start(entered - 1)
            for store in self.stores:
                store.begin_gradients(entered)

    def _finish_backward(self) -> None:
        self._leave_layers()
        self._finish_reductions()
        self._backward = None

    def _leave_layers(self) -> None:
        while self._backward is not None and self._backward >= 0:
            self._step_backward()

    def _finish_reductions(self) -> None:
        while self._reducing:
            pending, finish = self._reducing.popleft()
            pending.wait()
            finish()

    def _start(self, unit: int) -> None:
        if 0 <= unit < self._num_layers and unit not in self._open and unit not in self._gathering:
            self._gathering[unit] = [pending for store in self.stores for pending in store.start_gather(unit)]

    def _show(self, unit: int) -> None:
        self._start(unit)
        if unit in self._gathering:
            for pending in self._gathering.pop(unit):
                pending.wait()
            for store in self.stores:
                store.attach(unit)
            self._open.add(unit)

    def _close(self, unit: int) -> None:
        for store in self.stores:
            store.close(unit)
        self._open.discard(unit)

    # -- hooks -----------------------------------------------------------------------------------------------------

    def _hook(self, unit: int, layer: nn.Module) -> list[Any]:
        def enter(*_: object) -> None:
            if self._backward is None:  # otherwise the layer is computed again
                self._enter_forward(unit)

        def leave(module: nn.Module, args: object, output: object) -> None:
            if self._backward is not None:
                return
            self._leave_forward(unit, backward=torch.is_grad_enabled())
            leaves = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor) and leaf.requires_grad]
            for leaf in leaves[:1]:
                leaf.register_hook(lambda _: self._enter_backward(unit))

        def refuse(*_: object) -> None:
            raise ConfigError(
                "the parameters of the model's layers are shared by the ranks, and no rank has all of them",
                so="a state_dict would hold numbers that mean nothing",
                fix="use hdp.weights(), hdp.save() and hdp.load(), or load weights before hdp.adamw()",
            )

        return [
            layer.register_forward_pre_hook(enter, prepend=True),
            layer.register_forward_hook(leave),
            layer.register_state_dict_pre_hook(refuse),
            layer.register_load_state_dict_pre_hook(refuse),
        ]


def layer_of(layers: Sequence[nn.Module]) -> dict[int, int]:
    """By the id of a parameter that belongs to exactly one layer: the layer's number."""
    uses: dict[int, list[int]] = {}
    for unit, layer in enumerate(layers):
        for parameter in layer.parameters():
            uses.setdefault(id(parameter), []).append(unit)
    return {key: units[0] for key, units in uses.items() if len(units) == 1}


def shard_layers(
    named: Sequence[Named],
    layers: Sequence[nn.Module],
    mesh: Mesh,
    *,
    dtype: torch.dtype | None = None,
    late: Collection[str] = (),
    cuts: Mapping[str, Cut] | None = None,
    initial: Callable[[Entry], Tensor] | None = None,
) -> tuple[list[Named], list[UnitParameters], Units]:
    """Let the ranks of ``mesh.domain`` share the parameters of ``layers``.

    Returns the parameters that stay whole, what is trained of the others, and what opens the layers. Parameters stay
    whole that belong to several layers, that tensor-parallel ranks hold alike, and ``late`` ones, whose gradients come
    after the layers' backward. ``dtype``: of the parameters; None: the one that each of them has. ``cuts, initial``:
    see ``UnitParameters``.
    """
    unit_of = layer_of(layers)
    for name, parameter in named:
        if name in late or (cuts is not None and cuts[name].replicas > 1):
            unit_of.pop(id(parameter), None)
    rest = [item for item in named if id(item[1]) not in unit_of]
    units: dict[tuple[bool, torch.dtype], list[list[Named]]] = {}
    for name, parameter in named:
        if id(parameter) in unit_of:
            key = parameter.requires_grad, dtype or parameter.dtype
            units.setdefault(key, [[] for _ in layers])[unit_of[id(parameter)]].append((name, parameter))
    stores = {
        key: UnitParameters(units[key], mesh, dtype=key[1], trained=key[0], cuts=cuts, initial=initial)
        for key in sorted(units, key=str)
    }
    trained = [store for (is_trained, _), store in stores.items() if is_trained]
    return rest, trained, Units(layers, list(stores.values()))
