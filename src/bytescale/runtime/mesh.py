"""The mesh of ranks: pipeline stages x hybrid data parallelism x tensor parallelism.

Ranks are ordered (pp, hdp, tp) with tp innermost, where messages are most frequent and links fastest (inside a node)::

    rank = (stage * hdp + hdp_index) * tp + tp_index

Every (stage, tp index) has its own HDP group, every (stage, HDP index) its TP group, every (HDP index, tp index) its
pipeline. A rank makes the groups that it is in, and none for a dimension of one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

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
        hdp: the ranks with the same weights: rings, and sums at the end of a step.
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
    ) -> Mesh:
        """The mesh over ``world``, whose size is the shape's; called by every rank of it.

        ``interleaved``: the last stage also sends to the first. ``overlapped``: gradients are reduced while ranks
        compute (``runtime.buckets``), and need a group of their own.
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
        )

    @staticmethod
    def of_hdp(hdp: RankGroup) -> Mesh:
        """The mesh without tensor and pipeline parallelism: one group for everything."""
        alone = RankGroup(device=hdp.device)
        shape = MeshShape(hdp=hdp.size)
        return Mesh(shape=shape, stage=0, world=hdp, hdp=hdp, gradients=hdp, tp=alone, forward=(), backward=())


def boundary_colour(boundary: int, num_stages: int) -> int:
    """Neighbouring boundaries have different ones, also around the ring of stages."""
    closes_odd_ring = boundary == num_stages - 1 and num_stages % 2 == 1
    return 2 if closes_odd_ring else boundary % 2
