"""What an ``HDP`` holds while it is attached. The files of this package take it, and ``HDP`` adds what callers call."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import nn

from bytescale.common.errors import ConfigError
from bytescale.config.schema import Experts, Shard
from bytescale.config.sharing import check_experts, ranks_beside, require_beside, sharing_domain
from bytescale.cost.cluster import Cluster
from bytescale.cost.model import CostModel
from bytescale.hf.loop.alike import WEIGHTS_EVERY, digest_of, require_alike, weight_sums
from bytescale.hf.loop.micro_batch import Engine
from bytescale.hf.loop.pending import Collector, PendingPasses
from bytescale.hf.loop.room import Room
from bytescale.hf.model.probe import ModelStructure
from bytescale.planner.verified import VerifiedPlanner
from bytescale.runtime.group import RankGroup, answered
from bytescale.runtime.mesh import Mesh, hdp_ranks_per_node
from bytescale.runtime.parking import Parking

if TYPE_CHECKING:
    from bytescale.common.cut import Cut
    from bytescale.runtime.members import Members
    from bytescale.runtime.optimizer.lockstep import Units
    from bytescale.runtime.optimizer.sharded_optimizer import ShardedOptimizer
    from bytescale.runtime.tied import TiedHead


class Session:
    """One model on the ranks of a group: its engine and planner, and what is pending until the next update.

    Attributes:
        planner, room, cost: see ``HDP``.
        mesh, group: the ranks as a mesh, in which those of ``mesh.domain`` share parameters, and all of them.
        cuts: where ranks have parts of the model, by name which part of a parameter; None: they have whole ones.
        tied: keeps an embedding one that is the head, too, where they lie on two stages; None: they do not.
        domain: ranks that run in lockstep.
        looped: takes the results of the loop that ran last; None: a batch was planned since.
        encoders_backward: what the loop over a batch with images still owes; None: nothing.
        is_reducing: whether ranks reduce gradients already: the loop over a batch that was planned with last=True has
            ended.
        attach_anew: makes this object once more, as it was made, over the ranks that there are now.
        recovery: see ``HDP.recover``; it stays when ranks change. None: nobody keeps copies.
        ranks_wait: whether processes wait that ``HDP.recover`` would take in; the same on all ranks behind ``step()``.
    """

    engine: Engine
    planner: VerifiedPlanner
    room: Room
    cost: CostModel
    domain: int
    looped: Collector | None
    encoders_backward: Callable[[], None] | None
    tied: TiedHead | None
    attach_anew: partial[None]
    recovery: Members | None = None

    def __init__(self, model: nn.Module, mesh: Mesh, experts: Experts, joined: Members | None) -> None:
        self.model, self.mesh, self.group, self.experts = model, mesh, mesh.world, experts
        self.cuts: dict[str, Cut] | None = None
        self.pending = PendingPasses()
        self.looped = self.encoders_backward = self.tied = None
        self.is_reducing = self.ranks_wait = False
        self._num_agreed = 0
        self._optimizer: ShardedOptimizer | None = None
        self.checkpoint_group: dist.ProcessGroup | None = None
        self._parking = Parking()
        self._planners: dict[tuple[int, bool], VerifiedPlanner] = {}
        self.recovery = joined or self.recovery
        if self.recovery is not None:
            self.recovery.opened(mesh)

    @property
    def structure(self) -> ModelStructure:
        """Every layer's attention, as the probe has found it."""
        return self.engine.decoder.structure

    @property
    def routers(self) -> tuple[str, ...]:
        """Names of the routers, in the order that ``micro.routes`` and ``micro.replay`` have."""
        return self.engine.routers.names

    @property
    def indexers(self) -> tuple[str, ...]:
        """Names of the layers that choose keys, in the order that ``micro.chosen_keys`` has."""
        return tuple(self.engine.decoder.choosers)

    def planner_of(self, capacity_tokens: int | None) -> VerifiedPlanner:
        """The planner for another capacity; of passes without backward, where gradients are disabled."""
        if capacity_tokens is None:
            return self.planner
        key = (capacity_tokens, torch.is_grad_enabled())
        if key not in self._planners:
            cluster = Cluster.uniform(self.mesh.hdp.size, capacity_tokens, offload=self.planner.cluster.offload)
            planner = replace(self.planner, cluster=cluster)
            if not torch.is_grad_enabled():
                planner = replace(planner, cost=self.forward_cost(), limits=None)
            self._planners[key] = planner
        return self._planners[key]

    def indexer_loss(self) -> float:
        """The loss of indexers over the last global batch that was trained on (``hf.model.indexer_loss``).

        Every rank calls it, after the loop over the batch. 0 without ``HDP(indexer_loss=...)``.
        """
        loss = self.engine.decoder.indexer_loss
        return 0.0 if loss is None else float(self.group.read(self.group.all_reduce(loss.sums()))[0])

    def forward_cost(self) -> CostModel:
        return self.cost.forward_only(next(self.model.parameters()).element_size())

    def finish_items(self) -> None:
        """Run encoders backward. Every rank calls it, behind the loop over a batch, which may have been left early."""
        if self.encoders_backward is not None:
            backward, self.encoders_backward = self.encoders_backward, None
            backward()

    def require_ranks_of(self, mesh: Mesh) -> None:
        """Raise ``ConfigError`` for what was planned for other ranks than there are now."""
        if mesh is not self.mesh:
            raise ConfigError(
                "this batch was planned before hdp.recover()",
                so="its plan is for ranks that are not there any more",
                fix="plan it again, and begin a new hdp.planned(...) with it",
            )

    def begin_batch(self, looped: Collector) -> None:
        self.finish_items()
        self.require_no_reduction("a loop over a batch began")
        self.engine.decoder.attachment.require_attached()
        if self.cuts and any(module._compiled_call_impl for module in self.model.modules()):
            self.require("layer.compile()")
        for decoder in (self.engine.decoder, *self.engine.others):
            decoder.require_unchanged(with_training=self.has_optimizer)
        self.require_at_home("weights")
        if self.units is not None:
            self.units.begin()
        self.engine.activations.begin_step(looped.part.rank_plan.micro_batches)
        if (loss := self.engine.decoder.indexer_loss) is not None and torch.is_grad_enabled():
            if looped.part.forest is not None:
                raise ConfigError(
                    "share_prefixes = True beside indexer_loss",
                    so="the loss of indexers would count a row once that several documents have",
                    fix="leave share_prefixes out",
                )
            loss.reset(looped.part.rank_plan.num_tokens)
        self.looped = looped

    def require(self, what: str) -> None:
        """Raise ``ConfigError`` if ``what`` cannot be had on this mesh (``config.sharing``)."""
        require_beside(what, self.mesh.shape.tp, self.mesh.shape.pp)

    def agree(self, what: str, value: int) -> None:
        """Raise ``RankFailure`` unless all ranks hold the same ``value``, and in some batches the same weights.

        These are the first batch and every ``WEIGHTS_EVERY``-th one. Where ranks share parameters, nobody can write to
        those of one rank alone, and weights are not compared.
        """
        is_due, self._num_agreed = self._num_agreed % WEIGHTS_EVERY == 0, self._num_agreed + 1
        sums = weight_sums(self.model) if is_due and self.units is None else {}
        is_part = {name: cut.count > 1 or self.mesh.shape.pp > 1 for name, cut in (self.cuts or {}).items()}
        parts = {name: sums.pop(name) for name in [*sums] if is_part.get(name)}
        require_alike(self.group, what, value, sums)
        if parts:
            require_alike(self.mesh.hdp, "their parts of the weights", 0, parts)

    def require_at_home(self, *kinds: str) -> None:
        """Raise ``ConfigError`` if one of ``weights``, ``gradients`` and ``states`` was sent away by ``to``."""
        for kind in filter(self._parking.holds, kinds):
            raise ConfigError(
                f"the {kind} of the model are in host memory",
                so="nothing can be computed with them",
                fix=f'call hdp.to("{self.group.device.type}") first',
            )

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients since the last step. ``model.zero_grad()`` does the same once there is an optimizer."""
        self.encoders_backward = None
        self.sharded().zero_grad()
        self.engine.decoder.attachment.ran_plain_backward = False

    def require_no_reduction(self, what: str) -> None:
        """Raise ``ConfigError`` if ``what`` would come between the last batch's loop and ``step()``."""
        if self.is_reducing:
            raise ConfigError(
                f"{what} after the loop over a batch that was planned with last=True",
                so="ranks have begun to reduce gradients, and would wait for each other",
                fix="call hdp.step() first, or plan this batch without last=True",
            )

    @property
    def has_optimizer(self) -> bool:
        return self._optimizer is not None

    @property
    def units(self) -> Units | None:
        """What opens and closes the layers that ranks share; None: every rank has all of its own."""
        return None if self._optimizer is None else self._optimizer.units

    def sharded(self) -> ShardedOptimizer:
        """The optimizer. Raises ``ConfigError`` if there is none, or if another ``HDP`` has taken the model over."""
        if self._optimizer is None:
            raise ConfigError("this HDP has no optimizer", fix="call hdp.adamw(lr=...) or hdp.optimizer(...) first")
        self._optimizer.require_not_replaced(self.model)
        return self._optimizer


def mesh_of(
    group: dist.ProcessGroup | None, model: nn.Module, degrees: tuple[int, int], shard: Shard, domain: int | None,
    experts: Experts, equal_counts: bool,
) -> Mesh:  # fmt: skip
    """The mesh of an ``HDP``, whose arguments these are; ``degrees``: tp and pp. Raises ``ConfigError``."""
    tp, pp = degrees
    check_experts(experts, shard)
    if equal_counts and shard == "parameters":
        raise ConfigError(
            'equal_counts = True with shard = "parameters"',
            so="two engines would shard the same parameters",
            fix="leave equal_counts out: ranks that share parameters run in lockstep",
        )
    if group is None and dist.is_available() and dist.is_initialized():
        group = dist.group.WORLD
    world = RankGroup(None if group is None or group.size() == 1 else group, device=next(model.parameters()).device)
    world.agree("tp, pp, shard, domain or experts of HDP", digest_of(degrees, shard, domain or 0, experts))
    num_hdp = ranks_beside(world.size, tp, pp)
    for what in (f"equal_counts = {equal_counts}", f'experts = "{experts}"', f'shard = "{shard}"'):
        require_beside(what, tp, pp)
    per_node = hdp_ranks_per_node(world, tp)
    with answered("ranks that were to meet did not all come"):
        return Mesh.of_hdp(world, sharing_domain(shard, domain or 0, num_hdp, per_node), tp, pp)
