"""The mesh of ranks: pipeline stages x hybrid data parallelism x tensor parallelism.

Ranks are ordered (pp, hdp, tp) with tp innermost, where messages are most frequent and links fastest (inside a node)::

    rank = (stage * hdp + hdp_index) * tp + tp_index

Every (stage, tp index) has its own HDP group, every (stage, HDP index) its TP group, every (HDP index, tp index) its
pipeline. A rank makes the groups that it is in, and none for a dimension of one.

Why rings inside a node have a communicator of their own. NCCL gives every pair of a communicator's ranks the same
number of channels: the smallest that any pair would get (``ncclTopoComputeP2pChannelsPerPeer`` in src/graph/paths.cc,
NCCL 2.29 and 2.30). Two neighbours on NVSwitch would get up to 32. A peer behind the network gets two or as many as
its adapters need, and with more than one node that is halved until 8 peers a channel make room for all ranks: about 4
channels at 64 ranks, 1 at 256. A communicator of one node has no such peers. The other way would be the variable
NCCL_NCHANNELS_PER_NET_PEER. It holds for all communicators of the process, gives every neighbour behind the network
as many channels with their buffers, and takes away NCCL's own bound where many peers share an adapter. So we do not set
it.

Why rings in two communicators hang no more than in one. Operations that meet in NCCL belong to one ring call of one
slice group, at the same step. Give each such set a place: (action, ring call inside the action, step, keys before
gradients). Actions have an order that all ranks share: that of slice groups, forward before backward; in a pipeline
that of ``plan.pipeline_order``, which places the messages between stages too. ``plan.verify`` holds every plan against
it. Each rank posts its operations in rising order of places, whatever their communicators, and all members of a slice
group choose the same communicator. An operation waits on its own rank only for what was posted before it: operations
ahead of it in its communicator, kernels, a host that a first use or a device-wide wait has blocked. Now take the
lowest place with an operation that never ends. Everything lower has ended on all its members, so each of them posts its
operation and starts it; so it ends, a contradiction. One order of actions is all that this needs, not one communicator.
Moreover each ring waits for its own messages before it returns, so that a device never has two rings' operations at
once, as NCCL's guide demands of several communicators.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from bytescale.attention import Exchange
from bytescale.plan import SharedGroup
from bytescale.runtime.group import RankGroup

GroupMaker = Callable[[str, Sequence[int]], dist.ProcessGroup]
"""``(name, world ranks in order) -> process group``, called by the group's members alone, in the same order on each."""


@dataclass(frozen=True, slots=True)
class MeshShape:
    """How many ranks there are along each dimension."""

    hdp: int
    tp: int = 1
    pp: int = 1

    @property
    def size(self) -> int:
        return self.pp * self.hdp * self.tp

    def coordinates(self, rank: int) -> tuple[int, int, int]:
        """Stage, HDP index and tp index of a world rank."""
        rest, tp = divmod(rank, self.tp)
        stage, hdp = divmod(rest, self.hdp)
        return stage, hdp, tp

    def rank(self, stage: int, hdp: int, tp: int) -> int:
        """The world rank at a place."""
        return (stage * self.hdp + hdp) * self.tp + tp


@dataclass(frozen=True, kw_only=True)
class Mesh:
    """One rank's place, and the groups that it is in.

    Attributes:
        world: all ranks, for agreement and statistics.
        hdp: the ranks with the same weights: rings between nodes, and sums at the end of a step.
        node: those of them that share this rank's node, for rings inside it; ``hdp`` itself where all
            do, or none other.
        gradients: the same ranks, for gradients and parameters. With ``overlapped`` a group of its own: under NCCL the
            operations of one group are done in order, so that a reduction under way would hold up a ring.
        tp: the ranks that hold one another's parts of this stage.
        forward, backward: the ranks of this pipeline, stage by stage, for what travels in each direction; one group for
            every second boundary between stages. Under NCCL the messages of one group are done in order, so that a
            receive would wait for a send before it: with these, a rank receives and sends in different groups, and
            waits for nothing but what ``plan.pipeline_order`` knows.
    """

    shape: MeshShape
    stage: int
    world: RankGroup
    hdp: RankGroup
    node: RankGroup
    gradients: RankGroup
    tp: RankGroup
    forward: Sequence[RankGroup]
    backward: Sequence[RankGroup]

    @property
    def is_last_stage(self) -> bool:
        return self.stage == self.shape.pp - 1

    def across(self, groups: Sequence[RankGroup], boundary: int) -> RankGroup:
        """Of ``forward`` or ``backward`` the group of the boundary behind stage ``boundary`` (the last: to stage 0)."""
        return groups[boundary_colour(boundary, self.shape.pp)]

    def pipeline_groups(self) -> list[RankGroup]:
        """All of both directions."""
        return [*self.forward, *self.backward]

    def ring_exchange(self, shared: SharedGroup | None) -> Exchange:
        """Where the messages of a slice group's ring go: through its node's group if all members are in it.

        All members decide alike, since every group's members are known to all of them. Peers are named by their HDP
        ranks either way.
        """
        if shared is None or self.node.members is None or not set(shared.ranks) <= set(self.node.members):
            return self.hdp.exchange
        return self.node.exchange

    def ring_groups(self) -> list[RankGroup]:
        """The groups that rings use."""
        return [self.hdp] if self.node is self.hdp else [self.hdp, self.node]

    def connect(self) -> None:
        """Send one number across every boundary between stages, in both directions; called once, by all ranks.

        Under NCCL the first message between two ranks blocks the host until its peer has posted its side. Here nobody
        waits for anything else. All ranks take the boundaries in rising order, so that no circle can close.
        """
        for direction, groups in enumerate((self.forward, self.backward)):
            for boundary in range(self.shape.pp if groups else 0):
                before, behind = boundary, (boundary + 1) % self.shape.pp
                if self.stage not in (before, behind) or boundary_colour(boundary, self.shape.pp) >= len(groups):
                    continue
                exchange = self.across(groups, boundary).exchange
                number = torch.zeros(1, device=self.world.device)
                if self.stage == (behind if direction else before):
                    peer = before if direction else behind
                    exchange.start(send=number, to=peer, receive=None, source=peer, tag=0).wait()
                else:
                    peer = behind if direction else before
                    exchange.start(send=None, to=peer, receive=number, source=peer, tag=0).wait()

    @staticmethod
    def of(
        world: RankGroup,
        shape: MeshShape,
        make_group: GroupMaker,
        *,
        interleaved: bool = False,
        overlapped: bool = False,
        nodes: Sequence[int] | None = None,
    ) -> Mesh:
        """The mesh over ``world``, whose size is the shape's; called by every rank of it.

        ``interleaved``: the last stage also sends to the first. ``overlapped``: gradients are reduced while ranks
        compute (``runtime.buckets``), and need a group of their own. ``nodes``: the node of every world rank, by any
        number; None: all ranks share one.
        """
        if world.size != shape.size:
            raise ValueError(f"a mesh of {shape.pp} x {shape.hdp} x {shape.tp} ranks, but there are {world.size}")
        stage, hdp, tp = shape.coordinates(world.rank)
        members = {
            "HDP": [shape.rank(stage, other, tp) for other in range(shape.hdp)],
            "TP": [shape.rank(stage, hdp, other) for other in range(shape.tp)],
            "pipeline": [shape.rank(other, hdp, tp) for other in range(shape.pp)],
        }

        overlapped = overlapped and shape.hdp > 1
        boundaries = range(shape.pp - 1 + int(interleaved))
        colours = sorted({boundary_colour(boundary, shape.pp) for boundary in boundaries})

        def group(dimension: str, direction: str = "") -> RankGroup:
            ranks = members[dimension]
            if len(ranks) == 1:
                return RankGroup(device=world.device, name=dimension)
            if len(ranks) == world.size and not direction:
                return RankGroup(world.group, device=world.device, name=dimension)
            made = make_group(f"{dimension}{direction} {ranks[0]}", ranks)
            return RankGroup(made, device=world.device, name=dimension)

        hdp_group = world if shape.tp == shape.pp == 1 else group("HDP")
        return Mesh(
            shape=shape,
            stage=stage,
            world=world,
            hdp=hdp_group,
            gradients=group("HDP", " gradients") if overlapped else hdp_group,
            tp=group("TP"),
            forward=[group("pipeline", f" forward {colour}") for colour in colours],
            backward=[group("pipeline", f" backward {colour}") for colour in colours],
            # Last, because some ranks make one and others none. PyTorch names a group after its ranks and the number of
            # groups that a rank has made before: after a group of some, the others would wait under another name.
            node=node_group(hdp_group, members["HDP"], nodes, make_group),
        )

    @staticmethod
    def of_hdp(hdp: RankGroup) -> Mesh:
        """The mesh without tensor and pipeline parallelism: one group for everything."""
        alone = RankGroup(device=hdp.device)
        shape = MeshShape(hdp=hdp.size)
        return Mesh(
            shape=shape, stage=0, world=hdp, hdp=hdp, node=hdp, gradients=hdp, tp=alone, forward=(), backward=()
        )


def node_group(
    hdp: RankGroup, world_ranks: Sequence[int], nodes: Sequence[int] | None, make_group: GroupMaker
) -> RankGroup:
    """The HDP ranks on this rank's node: ``hdp`` itself where these are all of them, or this one alone.

    ``world_ranks``: of the HDP group, in its order. One communicator a node, made at the start, never one per slice
    group.
    """
    if nodes is None:
        return hdp
    here = [index for index, rank in enumerate(world_ranks) if nodes[rank] == nodes[world_ranks[hdp.rank]]]
    if len(here) in (1, len(world_ranks)):
        return hdp
    made = make_group(f"HDP node {world_ranks[here[0]]}", [world_ranks[index] for index in here])
    return RankGroup(made, device=hdp.device, name=hdp.name, members=here)


def boundary_colour(boundary: int, num_stages: int) -> int:
    """Neighbouring boundaries have different ones, also around the ring of stages."""
    closes_odd_ring = boundary == num_stages - 1 and num_stages % 2 == 1
    return 2 if closes_odd_ring else boundary % 2
