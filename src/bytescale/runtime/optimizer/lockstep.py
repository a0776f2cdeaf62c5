"""Opens the parts of a model whose parameters a lockstep domain shares, and closes them behind (``units``).

A pass goes through the *parts*: the embedding, the layers and the head, in the order of forward. The head is open from
the end of the last layer to the beginning of that layer's backward, whoever computes logits or a loss in between, and
however often.
"""

from __future__ import annotations

import weakref
from collections import defaultdict, deque
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Variable
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

from bytescale.common.cut import Cut
from bytescale.common.errors import ConfigError, RankFailure
from bytescale.runtime.experts import ParallelExperts
from bytescale.runtime.group import PendingCollective
from bytescale.runtime.loss import AT_ONCE
from bytescale.runtime.mesh import Mesh
from bytescale.runtime.optimizer.units import DomainParameters, ExpertParameters, Named, Unit, UnitParameters


class Units:
    """Opens and closes the parts of a model while they compute, forward and backward."""

    def __init__(
        self,
        parts: Sequence[nn.Module],
        stores: Sequence[UnitParameters],
        mixtures: Sequence[ParallelExperts] = (),
        experts: Sequence[ExpertParameters] = (),
    ) -> None:
        """Hook the parts. ``stores``: all of their parameters, by dtype and by whether they are trained.

        ``experts`` are in other memory, and those of ``mixtures``, whose messages all ranks of a domain need.
        """
        self.stores, self.mixtures = list(stores), list(mixtures)
        self._experts = {id(p): store for store in experts for p in store.parameters}
        self._unit_of = units_of(parts)
        self._first, self._head = 0 if any(True for _ in parts[0].parameters()) else 1, len(parts) - 1
        self._head_module, self._trains = parts[-1], _trains_layers(parts)
        self._of: dict[int, list[Unit]] = defaultdict(list)  # by number: one for each dtype, trained or not
        for own in (own for store in stores for own in store.units):
            self._of[own.number].append(own)
        self._gathering: dict[int, list[PendingCollective]] = {}
        self._open: set[int] = set()
        self._reducing: deque[tuple[Unit, PendingCollective]] = deque()
        self._entered = 0  # the part that comes next in the forward that runs
        self._backward: int | None = None  # the part that backward has come to; None: there is no backward
        self._is_queued = False  # whether autograd will tell that this backward has ended
        self._shared = {id(p) for store in stores for p in store.parameters}
        self._hooks = [hook for place, part in enumerate(parts) for hook in self._hook(place, part)]
        trained = [p for p in parts[-1].parameters() if p.requires_grad and id(p) in self._shared]
        self._hooks += map(self._hook_gradient, trained)

    def begin(self) -> None:
        """Forget a pass that an error has ended. Called before the first pass of a step, and after the last one."""
        self._finish_reductions()
        self._backward, self._is_queued = None, False
        for unit in [*self._gathering, *self._open]:
            self._show([unit])
            self._close([unit])

    def pass_without_work(self, *, backward: bool) -> None:
        """Take part in the gathers and reductions of a round in which this rank has no micro-batch."""
        for place in range(self._first, self._head):
            self._enter_forward(place)
            self._leave_forward(place, backward=backward)
        if backward and self._trains:
            self._backward = self._head + 1
            self._finish_backward()

    def whole(self, parameter: nn.Parameter) -> Tensor:
        """A parameter's values: a copy, if ranks share it. All ranks of the domain call it, in the same order."""
        if id(parameter) in self._experts:
            return self._experts[id(parameter)].gathered(parameter)
        if id(parameter) not in self._shared:
            return parameter.detach()
        unit = self._unit_of[id(parameter)]
        if unit not in self._open:
            self.begin()
            self._show([unit])
        return parameter.detach().clone()

    def held(self) -> dict[int, tuple[Cut, int, Tensor]]:
        """By ``id`` of a parameter that ranks share: a part, where in it (flat) this rank's values begin, and they."""
        found = {}
        for unit in (unit for store in self.stores for unit in store.units):
            bucket, held, domain = unit.bucket, unit.store.held(unit.bucket), unit.store.domain
            ahead = bucket.start + domain.rank * (held.stop - held.start) - held.start
            for entry, parameter in unit.pairs:
                start, stop = (min(max(place - ahead, held.start), held.stop) for place in (entry.start, entry.stop))
                found[id(parameter)] = entry.cut, start + ahead - entry.start, unit.store.values[start:stop]
        for store in dict.fromkeys(self._experts.values()):
            found |= {id(p): (entry.cut, 0, p.detach().reshape(-1)) for entry, p in store.held_entries()}
        return found

    def dissolve(self) -> None:
        """Give every rank whole parameters again."""
        self.begin()
        for hook in self._hooks:
            hook.remove()
        self._show(sorted({*self._unit_of.values()}))
        for store in dict.fromkeys(self._experts.values()):
            for parameter in dict.fromkeys(store.parameters):
                parameter.data = store.gathered(parameter)
        for mixture in self.mixtures:
            mixture.undo()

    # -- the order of operations, the same on all ranks of a domain ------------------------------------------------

    def _units(self, place: int) -> list[int]:
        """Those that are open in a part: its own, and, at both ends, the one of a tied embedding."""
        if not 0 <= place <= self._head:
            return []
        return [place, self._head + 1] if place in (0, self._head) else [place]

    def _enter_forward(self, place: int) -> None:
        if place == self._first:
            self.begin()
            self._entered = place
        if place != self._entered:
            raise RankFailure(
                f"part {place} of the model runs after {self._entered} parts of this pass",
                so="ranks would gather the parameters of different parts",
                fix='run the embedding and every layer once, in order, or use shard = "optimizer"',
            )
        self._entered += 1
        self._show(self._units(place))
        self._start(self._units(place + 1))

    def _leave_forward(self, place: int, *, backward: bool) -> None:
        if not backward or place + 1 < self._head:  # backward comes back to the last layer soon
            self._close(self._units(place))
        if place + 1 == self._head:
            self._show(self._units(self._head))

    def _enter_backward(self, place: int, *, is_outermost: bool = True) -> None:
        """``is_outermost``: whether no other backward is around the one that runs, so that its end is the end."""
        if place == self._head and getattr(self._head_module, AT_ONCE, False):
            return
        if self._backward is None:
            self._backward = self._head + 1
        if is_outermost and not self._is_queued:
            self._is_queued = True
            Variable._execution_engine.queue_callback(self._finish_backward)
        if place > self._backward:  # one backward runs through two passes, the later one first
            self._leave_parts()
            self._backward = self._head + 1
        while self._backward > place:
            self._step_backward()

    def _step_backward(self) -> None:
        """Leave the part that backward has come to, if it is one, and enter the one before it, if there is one."""
        assert self._backward is not None, "a backward runs"
        self._backward -= 1
        entered, left = self._units(self._backward), self._units(self._backward + 1)
        self._finish_reductions()  # of the part behind it, which had all of its backward for it
        self._reducing += [(own, own.start_reduction()) for own in self._trained(left)]
        self._close(left)
        self._show(entered)
        self._start(self._units(self._backward - 1))
        for own in self._trained(entered):
            own.begin_gradients()

    def _finish_backward(self) -> None:
        self._leave_parts()
        self._finish_reductions()
        self._backward, self._is_queued = None, False

    def _leave_parts(self) -> None:
        while self._backward is not None and self._backward >= 0:
            self._step_backward()

    def _finish_reductions(self) -> None:
        while self._reducing:
            own, pending = self._reducing.popleft()
            pending.wait()
            own.finish_reduction()

    def _trained(self, units: Collection[int]) -> list[Unit]:
        return [own for unit in units for own in self._of[unit] if own.store.trained]

    def _start(self, units: Collection[int]) -> None:
        for unit in units:
            if unit not in self._open and unit not in self._gathering:
                self._gathering[unit] = [own.start_gather() for own in self._of[unit]]

    def _show(self, units: Collection[int]) -> None:
        self._start(units)
        for unit in units:
            if unit in self._gathering:
                for pending in self._gathering.pop(unit):
                    pending.wait()
                for own in self._of[unit]:
                    own.attach()
                self._open.add(unit)

    def _close(self, units: Collection[int]) -> None:
        for unit in units:
            for own in self._of[unit]:
                own.close()
            self._open.discard(unit)

    # -- hooks -----------------------------------------------------------------------------------------------------

    def _hook(self, place: int, part: nn.Module) -> list[Any]:
        def enter(*_: object) -> None:
            if place < self._head and self._backward is None:  # otherwise the part is computed again
                self._enter_forward(place)
            elif place == self._head and torch._C._current_graph_task_id() != -1:  # in backward, which may begin so
                self._enter_backward(place, is_outermost=False)

        def leave(module: nn.Module, args: object, output: object) -> None:
            if self._backward is not None:
                return
            if place < self._head:
                self._leave_forward(place, backward=torch.is_grad_enabled())
            leaves = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor) and leaf.requires_grad]
            for leaf in leaves[:1]:
                leaf.register_hook(lambda _: self._enter_backward(place))

        return [
            part.register_forward_pre_hook(enter, prepend=True),
            part.register_forward_hook(leave),
            *refuse_state_dicts(part),
        ]

    def _hook_gradient(self, parameter: nn.Parameter) -> Any:
        """Enter the head's backward when its gradient comes, which may have been computed in forward."""
        own = weakref.ref(self)  # the hooks of a parameter keep nothing alive that has parameters (``buckets``)
        is_tied = self._unit_of[id(parameter)] > self._head

        def comes(_: Tensor) -> None:
            units = own()
            if units is not None and (units._backward is None or not is_tied):  # otherwise it may be the embedding's
                units._enter_backward(units._head, is_outermost=False)

        return parameter.register_hook(comes)


def refuse_state_dicts(part: nn.Module) -> list[RemovableHandle]:
    """From now on, let ``state_dict`` and ``load_state_dict`` of a model with this part raise ``ConfigError``."""

    def refuse(*_: object) -> None:
        raise ConfigError(
            "the parameters of the model are shared by the ranks, and no rank has all of them",
            so="a state_dict would hold numbers that mean nothing",
            fix="use hdp.weights(), hdp.save() and hdp.load(), or load weights before they are shared (hdp.adamw(), "
            "or HDP(...) with tp)",
        )

    return [part.register_state_dict_pre_hook(refuse), part.register_load_state_dict_pre_hook(refuse)]


def _trains_layers(parts: Sequence[nn.Module]) -> bool:
    """Whether a backward comes through the parts in front of the head."""
    return any(parameter.requires_grad for part in parts[:-1] for parameter in part.parameters())


def units_of(parts: Sequence[nn.Module]) -> dict[int, int]:
    """By the id of a parameter that ranks can share: its unit, which is the place of its part.

    A tied embedding, which is in the first and the last part, is one unit more. Parameters of other parts together stay
    whole, and so does a head that is trained alone: no backward comes behind it.
    """
    uses: dict[int, list[int]] = {}
    for place, part in enumerate(parts):
        for parameter in part.parameters():
            uses.setdefault(id(parameter), []).append(place)
    both_ends = [0, len(parts) - 1]
    if not _trains_layers(parts):
        uses = {key: places for key, places in uses.items() if places != both_ends[1:]}
    return {
        key: len(parts) if places == both_ends else places[0]
        for key, places in uses.items()
        if len(places) == 1 or places == both_ends
    }


def shard_parts(
    named: Sequence[Named],
    parts: Sequence[nn.Module],
    mesh: Mesh,
    *,
    dtype: torch.dtype | None = None,
    late: Collection[str] = (),
    cuts: Mapping[str, Cut] | None = None,
    experts: Sequence[nn.Module] = (),
) -> tuple[list[Named], list[DomainParameters], Units]:
    """Let the ranks of ``mesh.domain`` share the parameters of ``parts``: the embedding, the layers and the head.

    Returns the parameters that stay whole, what is trained of the others, and what opens the parts. Parameters stay
    whole that ``units_of`` leaves out, that tensor-parallel ranks hold alike, and ``late`` ones, whose gradients come
    after the layers' backward. ``dtype``: of the parameters; None: the one that each of them has. ``cuts``: see
    ``UnitParameters``. ``experts``: modules of mixtures in the parts, in order, whose experts are computed in
    parallel (``runtime.experts``), and not gathered.
    """
    mixtures = [ParallelExperts(module, mesh.domain) for module in experts]
    mixture_of = {id(parameter): place for place, module in enumerate(experts) for parameter in module.parameters()}
    unit_of = {key: unit for key, unit in units_of(parts).items() if key not in mixture_of}
    for name, parameter in named:
        if name in late or (cuts is not None and cuts[name].replicas > 1):
            unit_of.pop(id(parameter), None)
    rest = [item for item in named if id(item[1]) not in unit_of and id(item[1]) not in mixture_of]
    stores = [
        UnitParameters(units, mesh, dtype=kind, trained=trained, cuts=cuts)
        for trained, kind, units in _by_kind(named, unit_of, dtype)
    ]
    in_parallel = [
        ExpertParameters(list(filter(None, own)), mesh, dtype=kind, trained=trained)
        for trained, kind, own in _by_kind(named, mixture_of, dtype)
    ]
    return rest, [own for own in (*stores, *in_parallel) if own.trained], Units(parts, stores, mixtures, in_parallel)


def _by_kind(
    named: Sequence[Named], place_of: Mapping[int, int], dtype: torch.dtype | None
) -> list[tuple[bool, torch.dtype, list[list[Named]]]]:
    """Of the parameters that have a place: those of each place, by whether they are trained, and by dtype."""
    found: dict[tuple[bool, torch.dtype], list[list[Named]]] = {}
    for name, parameter in named:
        if id(parameter) in place_of:
            kind = parameter.requires_grad, dtype or parameter.dtype
            places = found.setdefault(kind, [[] for _ in range(max(place_of.values()) + 1)])
            places[place_of[id(parameter)]].append((name, parameter))
    return [(*kind, found[kind]) for kind in sorted(found, key=str)]
