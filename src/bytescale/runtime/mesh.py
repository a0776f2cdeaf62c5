"""The mesh of ranks: pipeline stages x hybrid data parallelism x tensor parallelism.

Ranks are ordered (pp, hdp, tp). The tp index changes fastest, because tensor-parallel ranks exchange most messages, and
neighbouring ranks have the fastest links (inside a node)::

    rank = (stage * hdp + hdp_index) * tp + tp_index

Every (stage, tp index) has its own HDP group, every (stage, HDP index) its own TP group, and every (HDP index, tp
index) its own pipeline. A rank makes only the groups that it is in. A dimension of size one has no group.

**Why rings inside a node have their own communicator.** NCCL gives every pair of a communicator's ranks the same number
of channels, namely the smallest number that any pair would get (``ncclTopoComputeP2pChannelsPerPeer`` in
src/graph/paths.cc, NCCL 2.29 and 2.30). Two neighbours on NVSwitch alone would get up to 32; over several nodes about 4
are left at 64 ranks, and 1 at 256. NCCL_NCHANNELS_PER_NET_PEER holds for all communicators of the process, so we do not
set it.

**Why rings in two communicators cannot hang if rings in one cannot.** Two operations meet in NCCL only if they belong
to the same step of the same ring call of one slice group. Give every such set of operations a place: (action, ring
call inside the action, step, keys before gradients). All ranks share one order of actions. Without a pipeline it is
the order of slice groups, forward before backward. With a pipeline it is that of ``plan.pipeline_order``, which also
places the messages between stages; ``plan.verify`` checks every plan against it. Each rank posts its operations in
rising order of places, whatever their communicators, and all members of a slice group choose the same communicator.
On its own rank, an operation waits only for what was posted before it: earlier operations of its communicator,
kernels, and a host that is blocked by a first use or a device-wide wait. Suppose that some operation never ends, and
take the lowest place that has one. Everything with a lower place has ended on all members. So each member posts its
operation of this place, and starts it, and therefore it ends. This is a contradiction. The proof needs one order of
actions, and not one communicator. Each ring also waits for its own messages before it returns, so a device never runs
operations of two rings at once. NCCL's guide demands this of programs with several communicators.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from bytescale.attention import Exchange
from bytescale.common.environment import ranks_here
from bytescale.plan import SharedGroup
from bytescale.runtime.group import RankGroup

GroupMaker = Callable[[str, Sequence[int]], dist.ProcessGroup]
"""``(name, world ranks in order) -> process group``, called by the group's members alone, and equally often by all
ranks."""


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
        return (stage * self.hdp + hdp) * self.tp + tp


@dataclass(frozen=True, kw_only=True)
class Mesh:
    """One rank's place in the mesh, and the groups that it is in.

    Attributes:
        world: all ranks, for agreement and statistics.
        hdp: the ranks with the same weights, for rings between nodes and for sums at the end of a step.
        node: the HDP ranks on this rank's node, for rings inside the node. It is ``hdp`` itself if all HDP ranks are on
            this node, or if no other one is.
        gradients: the HDP ranks again, for gradients and parameters. With ``overlapped`` this is a group of its own.
            NCCL runs the operations of one group in order, so in ``hdp`` a running reduction would hold up a ring.
        domain: the HDP ranks that share the layers' parameters and run in lockstep (``runtime.optimizer.units``), for
            gathers and reductions of single layers. A group of its own, for the same reason.
        replicas: the HDP ranks with the same place in their domains, which hold the same part of the layers; it is
            ``gradients`` where a domain is a single rank.
        tp: the ranks that share this stage's matrices.
        forward, backward: the ranks of this pipeline in the order of stages, for messages in each direction. Each
            has one group for the even and one for the odd boundaries between stages. NCCL runs the messages of one
            group in order, so a receive would wait for an earlier send. With these groups a rank sends and receives
            in different groups, and waits only for what ``plan.pipeline_order`` knows.
    """

    shape: MeshShape
    stage: int
    world: RankGroup
    hdp: RankGroup
    node: RankGroup
    gradients: RankGroup
    domain: RankGroup
    replicas: RankGroup
    tp: RankGroup
    forward: Sequence[RankGroup]
    backward: Sequence[RankGroup]

    @property
    def encoding(self) -> tuple[int, int]:
        """This rank, and how many there are that encode pictures: those of the first stage, which come first."""
        return self.world.rank, self.world.size // self.shape.pp

    @property
    def is_last_stage(self) -> bool:
        return self.stage == self.shape.pp - 1

    @property
    def pipeline(self) -> RankGroup:
        """The stages of this rank's pipeline, for what is no message between two of them."""
        return self.forward[0] if self.forward else RankGroup(device=self.world.device)

    def ring_exchange(self, shared: SharedGroup | None) -> Exchange:
        """Return the exchange for a slice group: on all members the node's, if all of them are on this node.

        Peers are named by their HDP ranks in either.
        """
        if shared is None or self.node.members is None or not set(shared.ranks) <= set(self.node.members):
            return self.hdp.exchange
        return self.node.exchange

    def ring_groups(self) -> list[RankGroup]:
        return [self.hdp] if self.node is self.hdp else [self.hdp, self.node]

    def connect(self) -> None:
        """Send one number across every boundary between stages, in both directions; called once, by all ranks.

        Under NCCL the first message between two ranks blocks the host until the peer has posted its side. Here no rank
        waits for anything else, and all ranks take the boundaries in rising order. So ranks cannot wait in a circle.
        """
        for direction, groups in enumerate((self.forward, self.backward)):
            for before in range(self.shape.pp - 1):
                behind = before + 1
                if self.stage not in (before, behind):
                    continue
                exchange = groups[before % 2].exchange
                number = torch.zeros(1, device=self.world.device)
                peer = behind if self.stage == before else before
                message = (number, None) if self.stage == (behind if direction else before) else (None, number)
                exchange.start(send=message[0], to=peer, receive=message[1], source=peer, tag=0).wait()

    @staticmethod
    def of(
        world: RankGroup,
        shape: MeshShape,
        make_group: GroupMaker,
        *,
        overlapped: bool = False,
        nodes: Sequence[int] | None = None,
        domain: int = 1,
    ) -> Mesh:
        """Make the mesh of ``shape`` over ``world``. Every rank of ``world`` calls this.

        Args:
            overlapped: gradients are reduced while ranks compute, in a group of their own.
            nodes: every world rank's node, by number. None: all ranks are on one node.
            domain: consecutive HDP ranks that share the layers' parameters; it divides their number.
        """
        if world.size != shape.size:
            raise ValueError(f"a mesh of {shape.pp} x {shape.hdp} x {shape.tp} ranks, but there are {world.size}")
        stage, hdp, tp = shape.coordinates(world.rank)
        first, place = hdp - hdp % domain, hdp % domain
        members = {
            "domain": [shape.rank(stage, other, tp) for other in range(first, first + domain)],
            "replicas": [shape.rank(stage, other, tp) for other in range(place, shape.hdp, domain)],
            "HDP": [shape.rank(stage, other, tp) for other in range(shape.hdp)],
            "TP": [shape.rank(stage, hdp, other) for other in range(shape.tp)],
            "pipeline": [shape.rank(other, hdp, tp) for other in range(shape.pp)],
        }

        overlapped = overlapped and shape.hdp > 1
        colours = range(min(2, shape.pp - 1))

        def group(dimension: str, direction: str = "") -> RankGroup:
            ranks = members[dimension]
            if len(ranks) == 1:
                return RankGroup(device=world.device, name=dimension)
            if len(ranks) == world.size and not direction:
                return RankGroup(world.group, device=world.device, name=dimension)
            made = make_group(f"{dimension}{direction} {ranks[0]}", ranks)
            return RankGroup(made, device=world.device, name=dimension)

        hdp_group = world if shape.tp == shape.pp == 1 else group("HDP")
        gradients = group("HDP", " gradients") if overlapped else hdp_group
        return Mesh(
            shape=shape,
            stage=stage,
            world=world,
            hdp=hdp_group,
            gradients=gradients,
            domain=group("domain", " gathers"),
            replicas=group("replicas", " gradients") if domain > 1 else gradients,
            tp=group("TP"),
            forward=[group("pipeline", f" forward {colour}") for colour in colours],
            backward=[group("pipeline", f" backward {colour}") for colour in colours],
            node=node_group(hdp_group, shape, world.rank, nodes, make_group),
        )

    @staticmethod
    def of_hdp(world: RankGroup, domain: int = 1, tp: int = 1, pp: int = 1) -> Mesh:
        """The mesh of all ranks of ``world``, which call it together."""
        mesh = Mesh.of(world, MeshShape(hdp=world.size // (tp * pp), tp=tp, pp=pp), world.make_part, domain=domain)
        mesh.connect()
        return mesh

    def smallest_of_stage(self, own: Sequence[float]) -> list[float]:
        """The minimum over the ranks of this pipeline stage of each of these numbers. All of them call it."""
        return self.tp.min_of(self.hdp.min_of(own))


def hdp_ranks_per_node(world: RankGroup, tp: int) -> int:
    """Consecutive HDP ranks that share a node, on the node that has fewest. Every rank of ``world`` calls it."""
    return max(1, int(world.min_of([ranks_here(world.size)])[0]) // tp)


def node_group(
    hdp: RankGroup, shape: MeshShape, world_rank: int, nodes: Sequence[int] | None, make_group: GroupMaker
) -> RankGroup:
    """Return the group of the HDP ranks on this rank's node: ``hdp`` itself if it has all of them or only this one.

    Under NCCL, making a group splits the communicator of all ranks, which waits for all of them. So all ranks make one,
    or none: where any rank needs one, a rank that is alone on its node makes a group of itself, which it does not use.
    """
    if nodes is None:
        return hdp
    places = [shape.coordinates(rank) for rank in range(shape.size)]
    here_of = [(stage, tp, nodes[rank]) for rank, (stage, _, tp) in enumerate(places)]
    if all(number in (1, shape.hdp) for number in Counter(here_of).values()):
        return hdp
    ranks = [rank for rank, here in enumerate(here_of) if here == here_of[world_rank]]
    made = make_group(f"HDP node {ranks[0]}", ranks)
    if len(ranks) in (1, shape.hdp):
        return hdp
    return RankGroup(made, device=hdp.device, name=hdp.name, members=[places[rank][1] for rank in ranks])
