"""ZeRO-1 over all HDP ranks (paper section 5.1): each rank keeps the optimizer state of its part of every bucket.

A step reduce-scatters the gradient sums, computes the global norm, updates this rank's parts in fp32, and all-gathers
the parameters. With ``overlap_with``, the reductions start during the last backward and the gathers end during the next
forward (``runtime.optimizer.buckets``). Without it, all of this happens between two steps: the slow twin, with the same
numbers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from bytescale.common.cut import Cut
from bytescale.runtime.group import RankGroup
from bytescale.runtime.mesh import Mesh
from bytescale.runtime.optimizer.buckets import BucketCollectives, Chunk, Overlap
from bytescale.runtime.optimizer.flat import Bucket, FlatParameters
from bytescale.runtime.plain_data import all_gather_json

_SQUARES_AT_A_TIME = 2**22  # all at once, their fp64 copies would be as large as the optimizer's states


@dataclass(frozen=True)
class OptimizerShard:
    """This rank's part of one bucket.

    Attributes:
        master: ``[n]`` weights in at least fp32, on the device or in host memory.
        gradient: ``[n]``, reduced in place.
        value: ``[n]`` of the parameters' buffer; the same tensor as ``master`` if dtype and memory are the same.
        counted: ranges of the shard, each with the number of ranks that hold the same parameters.
    """

    master: Tensor
    gradient: Tensor
    value: Tensor
    counted: Sequence[tuple[slice, int]]

    @staticmethod
    def of(parameters: FlatParameters, place: slice, *, on_host: bool = False) -> OptimizerShard:
        own = parameters.own(place)
        value = parameters.values[own]
        wide = parameters.master_dtype
        master = value.to("cpu", wide, copy=True) if on_host else value if value.dtype == wide else value.to(wide)
        counted = parameters.runs(place, lambda entry: entry.cut.replicas)
        return OptimizerShard(master, parameters.gradients[own], value, counted)

    def add_squares(self, total: Tensor) -> None:
        """Add the gradient's sum of squares to ``total`` (fp64). What several ranks hold counts once over all ranks."""
        for own, replicas in self.counted:
            squares = torch.zeros_like(total)
            for piece in self.gradient[own].split(_SQUARES_AT_A_TIME):
                squares += piece.double().square().sum()
            total += squares / replicas


class ZeroShards:
    """This rank's shards of one ``FlatParameters``, with the collectives before and after an update.

    Attributes:
        shards: one per bucket, in the order of ``parameters.shards``.
    """

    def __init__(self, parameters: FlatParameters, mesh: Mesh, *, on_host: bool = False) -> None:
        """``on_host``: whether master weights and states are in host memory (``host_states``)."""
        self.parameters = parameters
        self.on_host = on_host
        self.mesh = mesh
        self.collectives = BucketCollectives(parameters, parameters.holders(mesh))
        self.overlap: Overlap | None = None
        places = parameters.shards(mesh.hdp.rank)
        self.shards = [OptimizerShard.of(parameters, place, on_host=on_host) for place in places]
        self._shard_of: dict[Bucket, OptimizerShard] = dict(zip(parameters.buckets, self.shards, strict=True))

    def overlap_with(self, chunk: Chunk, *, in_steps: bool = True) -> None:
        """Begin to reduce during backward and, ``in_steps``, to gather during forward (``buckets.Overlap``)."""
        self.overlap = Overlap(self.collectives, chunk, stage=self.mesh.stage, in_steps=in_steps)

    def reduce_gradients(self) -> float:
        """Sum gradients over ranks. Returns this rank's share of the squared norm.

        The shares of all ranks add up to the squared norm in which every parameter counts once.
        """
        self.parameters.require_adopted()
        self.parameters.collect_gradients()
        sum_replicas(self.parameters, self.mesh.tp)
        self.collectives.wait_for_parameters()  # a rank without micro-batches has not waited yet
        total = torch.zeros((), dtype=torch.float64, device=self.mesh.hdp.device)
        for bucket in self.collectives.reduced():
            self._shard_of[bucket].add_squares(total)
        return float(total)

    def follow_changes(self) -> None:
        """Make weights that somebody else has written to since the last call the master weights."""
        changed = {entry.start for entry in self.parameters.changed()}
        for shard, place in zip(self.shards, self.parameters.shards(self.mesh.hdp.rank), strict=True):
            for piece in self.parameters.pieces(place):
                if piece.entry.start in changed:
                    own = piece.inside(place)
                    shard.master.data[own].copy_(shard.value[own])

    def whole_values(self, own: Tensor, *, is_sum: bool = False) -> Iterator[tuple[str, Tensor]]:
        """Whole parameters' values by name, from flat buffers of which ranks have parts, and zeros elsewhere."""
        parts = self.parameters.by_name(self.mesh.hdp.all_reduce(own))
        for entry in self.parameters.entries:
            yield entry.name, whole_of(parts[entry.name], entry.cut, self.mesh, is_sum=is_sum)

    def clip(self, grad_norm: float, largest: float) -> None:
        """Scale the reduced gradients so that their global norm, now ``grad_norm``, is at most ``largest`` (0: any)."""
        for shard in self.shards if 0 < largest < grad_norm else ():
            shard.gradient.mul_(largest / (grad_norm + 1e-6))

    def publish(self) -> None:
        """Give the updated parameters to all ranks."""
        for bucket, shard in self._shard_of.items():
            if shard.value.data_ptr() != shard.master.data_ptr():
                shard.value.copy_(shard.master)
            self.collectives.gather(bucket)
        self.end_publishing()

    def end_publishing(self) -> None:
        """After the last bucket has begun to be gathered. Autocast forgets its copies of the old parameters."""
        torch.clear_autocast_cache()
        if self.overlap is None or not self.overlap.gathers:
            self.collectives.wait_for_parameters()


def whole_of(part: Tensor, cut: Cut, mesh: Mesh, *, is_sum: bool = False, is_here: bool | None = None) -> Tensor:
    """A whole parameter from the tensor-parallel ranks' parts. They call it in the same order; a copy if they are many.

    Of what several ranks hold alike, one counts; with ``is_sum`` they hold summands, which are added up.
    ``is_here``: whether this stage has the parameter, where all stages of a pipeline call it; None: this one alone.
    """
    if mesh.tp.size == 1 and (is_here is None or mesh.shape.pp == 1):
        return part
    whole = part.new_zeros(cut.shape)
    if is_here is not False and (is_sum or cut.replica == 0):
        cut.put(part, whole)
    mesh.tp.all_reduce(whole)
    return whole if is_here is None else mesh.pipeline.all_reduce(whole)


def of_all_stages(own: Mapping[str, Tensor], mesh: Mesh) -> Iterator[tuple[str, Tensor]]:
    """What each stage of a pipeline has under its own names, one tensor at a time, on all of them, which call it."""
    pipeline = mesh.pipeline
    mine = [(name, list(value.shape), str(value.dtype).removeprefix("torch.")) for name, value in own.items()]
    for stage, told in enumerate(all_gather_json(mine, pipeline.group, pipeline.device)):
        for name, shape, dtype in told:
            whole = own[name] if stage == mesh.stage else torch.zeros(shape, dtype=getattr(torch, dtype))
            yield name, whole if pipeline.size == 1 else pipeline.all_reduce(whole.to(pipeline.device))


def sum_replicas(parameters: FlatParameters, tp: RankGroup) -> None:
    """Sum the gradients of replicated parameters over their tensor-parallel ranks, which get the same bits.

    They are norms, routers, and key/value heads of which there are fewer than ranks.
    """
    shared = [entry for entry in parameters.entries if entry.cut.replicas > 1]
    if not shared:
        return
    # A rank leaves zeros in the places of the parts that it does not hold.
    sizes = [entry.cut.count * (entry.stop - entry.start) for entry in shared]
    total = parameters.gradients.new_zeros(sum(sizes))
    pieces = [
        piece.view(entry.cut.count, -1)[entry.cut.index]
        for entry, piece in zip(shared, total.split(sizes), strict=True)
    ]
    for entry, piece in zip(shared, pieces, strict=True):
        piece.copy_(parameters.gradient_of(entry).view(-1))
    tp.all_reduce(total)
    for entry, piece in zip(shared, pieces, strict=True):
        parameters.gradient_of(entry).view(-1).copy_(piece)
