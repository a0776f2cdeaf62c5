"""Any elementwise optimizer of PyTorch on this rank's shards of the parameters (ZeRO-1).

*Elementwise* means that the update of a number depends on its own gradients and states alone, as in Adam, SGD or Lion,
and not in LAMB. Such an optimizer does the same to a flat shard as to the parameters themselves.
"""

from __future__ import annotations

import itertools
import math
from collections import ChainMap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from bytescale.common.errors import CheckpointError, ConfigError
from bytescale.config.schema import OptimizerConfig
from bytescale.plan import RankPlan
from bytescale.runtime.mesh import Mesh
from bytescale.runtime.optimizer.buckets import Overlap
from bytescale.runtime.optimizer.flat import FlatParameters, Range, values_of
from bytescale.runtime.optimizer.host_states import HostTransfers
from bytescale.runtime.optimizer.lockstep import Units
from bytescale.runtime.optimizer.optimizers import LR_RATIO, GroupOptions, named_optimizer
from bytescale.runtime.optimizer.zero import OptimizerShard, ZeroShards, of_all_stages
from bytescale.runtime.plain_data import all_gather_json


@dataclass(frozen=True, kw_only=True)
class Update:
    """What one update did."""

    num_updates: int
    grad_norm: float
    """Of the global gradient, before it was clipped."""
    skipped: bool = False
    """Whether the gradients were not numbers, and the weights stayed as they were."""


class ShardedOptimizer:
    """The trainable parameters of a model in flat memory, and an optimizer whose states are sharded over ranks.

    Attributes:
        torch_optimizer: on this rank's pieces, for learning-rate schedulers; ``update`` alone calls its ``step``.
        zeros: one ``ZeroShards`` for each dtype of parameters, and for those that ranks share.
        before_norm, behind_update: what others want to be called then (``runtime.optimizer.copies``).
    """

    def __init__(
        self,
        zeros: Sequence[ZeroShards],
        cls: type[torch.optim.Optimizer],
        options: dict[str, Any],
        group_options: GroupOptions | None = None,
        *,
        units: Units | None = None,
    ) -> None:
        """``cls`` is called as ``cls(parameter groups, **options)``; it has to be elementwise.

        ``group_options``: options of single parameters; None: all have the same. ``units``: open shared layers.
        Shards in host memory are updated one after the other.
        """
        self.zeros = list(zeros)
        self.units = units
        self.mesh = self.zeros[0].mesh
        self.group = self.mesh.hdp
        self._options = {
            entry.name: {} if group_options is None else group_options(entry.name, parameter)
            for zero in self.zeros
            for entry, parameter in zip(zero.parameters.entries, zero.parameters.parameters, strict=True)
        }
        self._made_with = cls, options
        self.torch_optimizer = cls(self._parameter_groups(), **options)
        shards = [shard for zero in self.zeros for shard in zero.shards]
        self._host = HostTransfers(shards, self.group.device) if zeros[0].on_host else None
        self.num_updates = 0
        self._has_left = False
        self.before_norm, self.behind_update = list[Callable[[], None]](), list[Callable[[], None]]()

    @staticmethod
    def of_config(
        parameters: FlatParameters,
        config: OptimizerConfig,
        mesh: Mesh,
        *,
        more: Sequence[FlatParameters] = (),
        units: Units | None = None,
    ) -> ShardedOptimizer:
        """The optimizer of the trainer (``optimizers.named_optimizer``). ``more``: parameters in other buffers."""
        cls, options, own_options = named_optimizer(config, [parameters, *more], mesh.gradients)
        zeros = [ZeroShards(own, mesh, on_host=config.offload) for own in (parameters, *more)]
        return ShardedOptimizer(zeros, cls, options, own_options, units=units)

    @property
    def overlap(self) -> Overlap | None:
        """Where all parameters are in one flat buffer, it may be reduced during backward (``ZeroShards``)."""
        return self.zeros[0].overlap

    def expect_last_backward(self, silent: bool) -> None:
        """See ``buckets.Overlap``; for a model that was taken over."""
        assert self.overlap is not None, "reductions overlap"
        self.overlap.expect_last_backward(silent)

    def begin_step(self, rank_plan: RankPlan, *, overlaps: bool = True) -> None:
        """Set gradients to zero, before a step whose plan is known. ``overlaps``: reductions and the last backward."""
        for zero in self.zeros:
            zero.parameters.zero_gradients()
        if self.overlap is not None:
            self.overlap.begin_step(rank_plan, overlaps)

    def after_last_message(self) -> None:
        """Start the remaining reductions. ``Executor.run`` calls it after this rank's last message."""
        if self.overlap is not None:
            self.overlap.after_last_message()

    def wait_for_parameters(self) -> None:
        """Wait until this rank has all updated parameters. With ``overlap_with``, forward waits by itself."""
        for zero in self.zeros:
            zero.collectives.wait_for_parameters()

    def require_not_replaced(self, model: nn.Module) -> None:
        """Raise ``ConfigError`` if ``model`` has joined another optimizer, which has its weights now."""
        if self.of(model) not in (None, self):
            raise ConfigError(
                "the model was taken over: another HDP has made an optimizer for it",
                so="the weights and gradients of the model are in the other one",
                fix="use the other HDP, or make a new one",
            )

    def require_attached(self) -> None:
        """Raise ``ConfigError`` if gradients go elsewhere since ``leave``."""
        if self._has_left:
            raise ConfigError("this HDP was detached", so="gradients do not come here any more", fix="make a new HDP")

    def require_adopted(self) -> None:
        """Raise ``ConfigError`` if the model has weights in other memory, which what is loaded here would not reach."""
        self._close_layers()
        for zero in self.zeros:
            zero.parameters.require_adopted()

    @staticmethod
    def of(model: nn.Module) -> ShardedOptimizer | None:
        """The optimizer that ``join`` has given to ``model``, if there is one."""
        owner = getattr(vars(model).get("zero_grad"), "__self__", None)
        return owner if isinstance(owner, ShardedOptimizer) else None

    def join(self, model: nn.Module) -> None:
        model.zero_grad = self.zero_grad  # type: ignore[method-assign]

    def leave(self, model: nn.Module) -> None:
        """Leave the parameters' gradients to others. No update may follow."""
        if self._has_left:
            return
        self._has_left = True
        if self.of(model) is self:
            del model.zero_grad
        if self.units is not None:
            self.units.dissolve()
        for zero in self.zeros:
            zero.parameters.release()
        if self.overlap is not None:
            self.overlap.remove()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget all gradients since the last update, whatever ``set_to_none`` is."""
        for zero in self.zeros:
            if zero.collectives.reducing_from < math.inf:
                raise ConfigError(
                    "gradients were set to zero while ranks reduce them",
                    so="the sums would be wrong",
                    fix="call hdp.step() after a batch that was planned with last=True",
                )
            zero.parameters.zero_gradients()

    def reduce_gradients(self) -> float:
        """Sum gradients over ranks. Returns this rank's share of the squared global norm (``ZeroShards``)."""
        self._close_layers()
        total = sum(zero.reduce_gradients() for zero in self.zeros)
        for call in self.before_norm:
            call()
        return total

    def _close_layers(self) -> None:
        if self.units is not None:
            self.units.begin()  # the last layer is open after a forward without a backward

    def stand_in_for(self, former: ShardedOptimizer) -> None:
        """Update with the ``torch_optimizer`` of another one and its options: schedulers and loops have that object."""
        own, known = self.torch_optimizer, former.torch_optimizer
        for group, kind in zip(own.param_groups, self._kinds, strict=True):
            number = former._kinds.index(kind) if kind in former._kinds else 0
            group.update({k: v for k, v in known.param_groups[number].items() if k != "params"} | kind)
        known.param_groups, known.state = own.param_groups, own.state
        self.torch_optimizer = known

    def set_options(self, options: dict[str, Any]) -> None:
        """Set options of all parameters, ``lr`` times their ``LR_RATIO``. Raises ``ConfigError`` for unknown ones."""
        for group in self.torch_optimizer.param_groups:
            if unknown := sorted(options.keys() - group.keys()):
                raise ConfigError(
                    f"{type(self.torch_optimizer).__name__} has no option {unknown[0]}",
                    fix=f"set one of {', '.join(sorted(group.keys() - {'params'}))}",
                )
            group.update(options)
            group["lr"] = options["lr"] * group.get(LR_RATIO, 1.0) if "lr" in options else group["lr"]

    def update(self, grad_norm: float, largest_norm: float, lr: float | None = None) -> Update:
        """One update with gradients scaled so that their norm, now ``grad_norm``, is at most ``largest_norm`` (0: any).

        ``lr``: see ``set_options``; None: it stays. The gradients are still there afterwards.
        """
        self.set_options({} if lr is None else {"lr": lr})
        for zero in self.zeros:
            zero.follow_changes()
            zero.clip(grad_norm, largest_norm)
        if self._host is None:
            self._attach_gradients()
            self.torch_optimizer.step()
            for zero in self.zeros:
                zero.publish()
        else:
            self._update_on_host(self._host)
        self.num_updates += 1
        for call in self.behind_update:
            call()
        return Update(num_updates=self.num_updates, grad_norm=grad_norm)

    def skip(self, grad_norm: float) -> Update:
        """An update that is left out, because the gradients are not numbers."""
        return Update(num_updates=self.num_updates, grad_norm=grad_norm, skipped=True)

    def _update_on_host(self, host: HostTransfers) -> None:
        """Bucket by bucket, while neighbouring ones travel."""
        self.torch_optimizer.zero_grad()
        of_shards = itertools.groupby(zip(self._pieces, self._parts, strict=True), key=lambda item: id(item[1][0]))
        host.begin()
        for zero in self.zeros:
            for bucket in zero.parameters.buckets:
                gradient, own = host.fetch(), list(next(of_shards)[1])
                for piece, (_, place) in own:
                    piece.grad = gradient[place]
                self.torch_optimizer.step()
                for piece, _ in own:
                    piece.grad = None
                host.send()
                zero.collectives.gather(bucket)
            zero.end_publishing()

    def whole_gradients(self) -> dict[str, Tensor]:
        """Sums over ranks of all parameters' gradients, by name. Copies."""
        found: dict[str, Tensor] = {}
        for zero in self.zeros:
            zero.parameters.collect_gradients()
            found.update(zero.whole_values(zero.parameters.whole(zero.parameters.gradients), is_sum=True))
        return dict(of_all_stages(found, self.mesh))

    def state(self) -> dict[str, Any]:
        """``{"num_updates", "numbers", "tensors": {parameter: {state: whole CPU tensor}}}``, the same on all ranks."""
        found, tensors = dict[str, Tensor](), dict[str, dict[str, Tensor]]()
        for zero in self.zeros:
            for name, ranges in sorted(self.states(zero).items()):
                whole = zero.parameters.gradients.new_zeros(zero.parameters.buckets[-1].stop)
                for own in ranges:
                    whole[own.place] = own.values
                found |= {f"{parameter} {name}": value.cpu() for parameter, value in zero.whole_values(whole)}
        for key, value in of_all_stages(found, self.mesh):
            parameter, name = key.split(" ")
            tensors.setdefault(parameter, {})[name] = value.cpu()
        return {"num_updates": self.num_updates, "numbers": self.state_numbers(), "tensors": tensors}

    def load_state(self, state: dict[str, Any]) -> None:
        """Continue from ``state()`` of any number of ranks.

        Raises ``CheckpointError`` where it does not fit, and ``ConfigError`` where it would not reach the model.
        """
        self.require_adopted()
        tensors: dict[str, dict[str, Tensor]] = state["tensors"]
        self._require_fitting(tensors)
        if state["num_updates"]:
            self.require_states()
        for zero in self.zeros:
            states = self.states(zero)
            for place in zero.parameters.shards(self.group.rank):
                for part in zero.parameters.pieces(place):
                    inside = part.inside(slice(part.entry.start, part.entry.stop))
                    for name, whole in tensors[part.entry.name].items():
                        own = part.entry.cut.of(whole).flatten()[inside]
                        values_of(states[name], part.start, part.stop).copy_(own)
        self.finish_restore(int(state["num_updates"]), state["numbers"])

    def states(self, zero: ZeroShards) -> dict[str, list[Range]]:
        """All states with one number per weight: ``master``, and what the optimizer has made by its first update.

        Each is a list over this rank's ranges, in the order of the buffers of ``zero``. Weights that somebody else has
        written to are the new masters.
        """
        zero.follow_changes()
        names = ["master"]
        if self.num_updates:
            first = self.torch_optimizer.state[self._pieces[0]]
            names += [name for name, value in first.items() if _is_per_weight(value, self._pieces[0])]
        found: dict[str, list[Range]] = {name: [] for name in names}
        for (own, start), piece in zip(self._places, self._pieces, strict=True):
            for name in names if own is zero else ():
                values = piece.data if name == "master" else self.torch_optimizer.state[piece][name]
                found[name].append(Range(start, values))
        return found

    def state_numbers(self) -> dict[str, float]:
        """States that are single numbers, such as the count of updates that Adam keeps."""
        if not self.num_updates:
            return {}
        first = self.torch_optimizer.state[self._pieces[0]]
        return {n: float(v) for n, v in first.items() if v is not None and not _is_per_weight(v, self._pieces[0])}

    def require_states(self) -> None:
        """Let the optimizer make its states, by an update without gradients, if it has none. A restore follows."""
        if not self.num_updates:
            self.zero_grad()
            self._attach_gradients()
            self.torch_optimizer.step()
            self.num_updates = 1

    def finish_restore(self, num_updates: int, numbers: dict[str, float]) -> None:
        """After ``states`` were filled: set the single numbers, and give the weights to all ranks."""
        if num_updates == 0:
            # The states are those of no update. Some optimizers have such states, most have none.
            cls, options = self._made_with
            untouched = cls([dict(group) for group in self.torch_optimizer.param_groups], **options)
            self.torch_optimizer.state.clear()
            self.torch_optimizer.state.update(untouched.state)
        for piece in self._pieces:
            states = self.torch_optimizer.state[piece]
            for name, number in numbers.items():  # in the form in which the optimizer keeps it
                old = states[name]
                states[name] = torch.full_like(old, number) if isinstance(old, Tensor) else type(old)(number)
        self.num_updates = num_updates
        for zero in self.zeros:
            zero.publish()
            zero.collectives.wait_for_parameters()
        self.zero_grad()
        for call in (*self.before_norm, *self.behind_update):
            call()

    def shapes(self) -> dict[str, list[int]]:
        """Of all whole parameters that are trained, by name. All stages of a pipeline call it."""
        own = {entry.name: list(entry.cut.shape) for zero in self.zeros for entry in zero.parameters.entries}
        return dict(ChainMap(*all_gather_json(own, self.mesh.pipeline.group, self.group.device)))

    def _require_fitting(self, tensors: dict[str, dict[str, Tensor]]) -> None:
        ours, theirs = self.shapes(), {name: list(states["master"].shape) for name, states in tensors.items()}
        if ours != theirs:
            different = sorted(name for name in {*ours, *theirs} if ours.get(name) != theirs.get(name))
            raise CheckpointError(
                f"the state and the model differ in {len(different)} parameters, such as {different[0]}: "
                f"{theirs.get(different[0])} there, {ours.get(different[0])} here",
                so="nothing was loaded",
                fix="load a state of the same model with the same trainable parameters",
            )

    def _attach_gradients(self) -> None:
        for piece, (shard, own) in zip(self._pieces, self._parts, strict=True):  # the optimizer's zero_grad drops them
            piece.grad = shard.gradient[own].to(piece.device)

    def _runs(self, zero: ZeroShards, place: slice) -> list[tuple[slice, Any]]:
        """Parts of a shard whose parameters have the same options. A shard of nothing but padding is one part."""
        runs = zero.parameters.runs(place, lambda entry: self._options[entry.name])
        return runs or [(slice(0, place.stop - place.start), {})]

    def _parameter_groups(self) -> list[dict[str, Any]]:
        self._pieces: list[Tensor] = []  # leaf tensors that share the memory of parts of shards' masters
        self._parts: list[tuple[OptimizerShard, slice]] = []  # which parts these are
        self._places: list[tuple[ZeroShards, int]] = []  # where each piece begins in the flat buffers
        groups: list[tuple[dict[str, Any], list[Tensor]]] = []
        for zero in self.zeros:
            places = zero.parameters.shards(self.group.rank)
            for shard, place in zip(zero.shards, places, strict=True):
                for own, options in self._runs(zero, place):
                    piece = shard.master.detach()[own]
                    self._pieces.append(piece)
                    self._parts.append((shard, own))
                    self._places.append((zero, place.start + own.start))
                    members = next((members for known, members in groups if known == options), None)
                    if members is None:
                        groups.append((options, members := []))
                    members.append(piece)
        self._kinds = [options for options, _ in groups]
        return [{"params": members, **options} for options, members in groups]


def _is_per_weight(value: Any, piece: Tensor) -> bool:
    return isinstance(value, Tensor) and value.shape == piece.shape
