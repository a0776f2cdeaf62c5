"""Parameters that the ranks of a lockstep domain share: gathered for the time of a unit, and freed behind it.

A *unit* is the embedding, one decoder layer, or the head; a matrix that is embedding and head is a unit that is opened
at both ends. Each of the d ranks of a domain (``Mesh.domain``) keeps 1/d of every unit in ``values``, and 1/d of its
gradient sums. A unit's full parameters and full gradients have memory only while the unit computes::

    domain's communicator  GE G0   G1   GH         |         RH   GE    R1     R0     RE       G: gather, R: reduce
    compute                   E    L0   L1    head | head back   L1 back   L0 back   E back

A gather is posted one unit ahead. The last layer and the head stay open until backward comes. Behind a unit's backward
its gradients are summed over the domain, and this rank's part is added to the sums of earlier rounds. All ranks of a
domain post the same operations in the same order, in every round: a rank that has no work in a round goes through the
same steps (``lockstep.Units.pass_without_work``). Parameters outside of units (the last norm) are in ordinary flat
buffers, and are always there.

What lies between two steps is ZeRO-1 over the ranks with the same part (``Mesh.replicas``). Positions in the flat
buffers are those of whole units, one bucket for each. Shard p m + g of a bucket belongs to place p of domain g, of m
domains, so that the shards of one place lie side by side::

    unit          |        place 0        |        place 1        |      d = 2, m = 3
    of rank       |   0   |   2   |   4   |   1   |   3   |   5   |

A closed parameter is NaN in its own shape and has no memory. So nobody computes with it in silence.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from bytescale.attention.kernels import lse_dtype
from bytescale.common.cut import Cut
from bytescale.common.errors import RankFailure
from bytescale.runtime.group import PendingCollective, RankGroup
from bytescale.runtime.mesh import Mesh
from bytescale.runtime.optimizer.flat import ALIGNMENT, Bucket, Entry, FlatParameters, move_gradient_to, moved

Named = tuple[str, nn.Parameter]


class DomainParameters(FlatParameters):
    """Parameters of one dtype, of which this rank keeps 1/d. What lies between two steps is the same for all of them.

    Attributes:
        values: ``[padded / d]`` this rank's parts of all buckets, in order.
        gradients: ``[padded / d]`` in fp32 or wider; empty where the parameters are not trained.
    """

    def __init__(self, mesh: Mesh, *, trained: bool) -> None:
        self.trained = trained
        self.domain, self.num_domains = mesh.domain, mesh.replicas.size
        self.late_stop = 0
        self.entries, self.parameters, self.buckets = [], [], []
        self._hooks, self._versions, self._copies, self._watched = [], [], [], []

    @property
    def num_held(self) -> int:
        return self.buckets[-1].stop // self.domain.size

    def part_of(self, rank: int) -> int:
        domain, place = divmod(rank, self.domain.size)
        return place * self.num_domains + domain

    def held(self, bucket: Bucket) -> slice:
        """As ``FlatParameters``: this rank's part of a bucket."""
        return slice(bucket.start // self.domain.size, bucket.stop // self.domain.size)

    def own(self, place: slice) -> slice:
        bucket = self.buckets[bisect_right(self.buckets, place.start, key=lambda bucket: bucket.start) - 1]
        held = self.held(bucket)
        start = held.start + place.start - bucket.start - self.domain.rank * (held.stop - held.start)
        return slice(start, start + place.stop - place.start)

    def holders(self, mesh: Mesh) -> RankGroup:
        return mesh.replicas

    def whole(self, own: Tensor) -> Tensor:
        whole = own.new_zeros(self.buckets[-1].stop)
        for bucket in self.buckets:
            self.own_part(whole[bucket.start : bucket.stop]).copy_(own[self.held(bucket)])
        return whole

    def own_part(self, full: Tensor) -> Tensor:
        """What this rank keeps of a whole bucket."""
        return full.view(self.domain.size, -1)[self.domain.rank]


class UnitParameters(DomainParameters):
    """The parameters of one dtype in the units of a model: one bucket for each unit, from its start to its end."""

    def __init__(
        self,
        units: Sequence[Sequence[Named]],
        mesh: Mesh,
        *,
        dtype: torch.dtype,
        trained: bool = True,
        cuts: Mapping[str, Cut] | None = None,
    ) -> None:
        """Take over parameters, one unit after the other, so that one of them at a time exists twice.

        Args:
            units: the parameters of each; there may be none.
            mesh: on whose device they are from now on.
            trained: whether their gradients are summed.
            cuts: as in ``FlatParameters``.
        """
        super().__init__(mesh, trained=trained)
        stop, quantum = 0, mesh.hdp.size * ALIGNMENT
        own: list[tuple[int, slice]] = []  # of the units that have parameters: number and entries
        for number, named in enumerate(units):
            start, first = stop, len(self.entries)
            for name, parameter in named:
                self.entries.append(Entry(name, cuts[name] if cuts else Cut(shape=tuple(parameter.shape)), stop))
                self.parameters.append(parameter)
                stop += -(-parameter.numel() // ALIGNMENT) * ALIGNMENT
            stop = -(-stop // quantum) * quantum
            if named:
                self.buckets.append(Bucket(start, stop, mesh.hdp.size))
                own.append((number, slice(first, len(self.entries))))
        device = mesh.hdp.device
        self.values = torch.zeros(self.num_held, dtype=dtype, device=device)
        self.gradients = torch.zeros(self.num_held if trained else 0, dtype=lse_dtype(dtype), device=device)
        self.nothing = torch.full((1,), torch.nan, dtype=dtype, device=device)
        pairs = list(zip(self.entries, self.parameters, strict=True))
        self.units: list[Unit] = []
        for (number, places), bucket in zip(own, self.buckets, strict=True):
            self.units.append(Unit(self, number, bucket, pairs[places]))
            self._hooks += self.units[-1].hooks

    def held_entries(self) -> list[tuple[Entry, nn.Parameter]]:
        """None: a parameter has memory while its unit is open."""
        return []

    def require_adopted(self) -> None:
        """As ``FlatParameters``, between two passes."""
        for parameter, entry in zip(self.parameters, self.entries, strict=True):
            if parameter.data_ptr() != self.nothing.data_ptr() or parameter.dtype != self.values.dtype:
                raise moved(entry.name)

    def changed(self) -> list[Entry]:
        """None: a closed parameter cannot be written to."""
        return []


class Unit:
    """One unit's parameters of one dtype. They have memory while the unit is open, gradients during its backward.

    Attributes:
        full, gradients: ``[stop - start]`` of the unit's bucket, or without memory.
    """

    def __init__(
        self,
        store: UnitParameters,
        number: int,
        bucket: Bucket,
        pairs: Sequence[tuple[Entry, nn.Parameter]],
    ) -> None:
        self.store, self.number, self.bucket, self.pairs = store, number, bucket, pairs
        self.hooks: list[RemovableHandle] = []
        self.full = torch.zeros(bucket.stop - bucket.start, dtype=store.values.dtype, device=store.values.device)
        self.gradients = store.gradients.new_zeros(len(self.full) if store.trained else 0)
        for entry, parameter in pairs:
            with torch.no_grad():
                self._of(self.full, entry).copy_(parameter)
            if store.trained:
                hook = _add_to(self._of(self.gradients, entry), entry.name)  # a view, made while there is memory
                self.hooks.append(parameter.register_post_accumulate_grad_hook(hook))
        store.values[store.held(bucket)] = store.own_part(self.full)
        self.close()
        self.gradients.untyped_storage().resize_(0)

    def start_gather(self) -> PendingCollective:
        """Give the unit memory, and start to gather its parameters."""
        self.full.untyped_storage().resize_(self.full.nbytes)
        return self.store.domain.start_all_gather(self.full, self.store.values[self.store.held(self.bucket)])

    def attach(self) -> None:
        """The gather has ended: show the parameters."""
        for entry, parameter in self.pairs:
            parameter.data = self._of(self.full, entry)

    def close(self) -> None:
        """Free the parameters. What autograd has saved of them is right again once they are gathered again."""
        for entry, parameter in self.pairs:
            parameter.data = self.store.nothing.expand(entry.shape)
        self.full.untyped_storage().resize_(0)

    def begin_gradients(self) -> None:
        """Give the gradients memory that is zero."""
        self.gradients.untyped_storage().resize_(self.gradients.nbytes)
        self.gradients.zero_()

    def start_reduction(self) -> PendingCollective:
        """Start to sum the gradients over the domain."""
        return self.store.domain.start_reduce_scatter(self.gradients)

    def finish_reduction(self) -> None:
        """Add this rank's part to the sums of earlier rounds."""
        self.store.gradients[self.store.held(self.bucket)] += self.store.own_part(self.gradients)
        self.gradients.untyped_storage().resize_(0)

    def _of(self, full: Tensor, entry: Entry) -> Tensor:
        return full[entry.start - self.bucket.start : entry.stop - self.bucket.start].view(entry.shape)


class ExpertParameters(DomainParameters):
    """Experts that every rank of a domain has some of, and computes with: its part is never gathered (``experts``).

    There is one bucket for each mixture. The experts of the domain's ranks lie one behind the other in it, all
    parameters of those of one rank together. So a parameter has an entry for each rank of the domain.
    """

    def __init__(
        self,
        mixtures: Sequence[Sequence[Named]],
        mesh: Mesh,
        *,
        dtype: torch.dtype,
        trained: bool = True,
    ) -> None:
        """Take over the parameters ``[E, ...]`` of each mixture, which have this rank's experts alone from now on."""
        super().__init__(mesh, trained=trained)
        quantum, stop = self.num_domains * ALIGNMENT, 0
        for named in mixtures:
            first = stop
            for place in range(self.domain.size):
                for name, parameter in named:
                    cut = Cut(shape=tuple(parameter.shape), index=place, count=self.domain.size)
                    self.entries.append(Entry(name, cut, stop))
                    self.parameters.append(parameter)
                    stop += -(-(parameter.numel() // self.domain.size) // ALIGNMENT) * ALIGNMENT
                stop = first + -(-(stop - first) // quantum) * quantum
            self.buckets.append(Bucket(first, stop, mesh.hdp.size))
        self._take_over(
            dtype,
            mesh.hdp.device,
            lambda entry, whole: entry.cut.of(whole),
            trained=trained,
        )

    def gathered(self, parameter: nn.Parameter) -> Tensor:
        """A parameter's values of all ranks, ``[E, ...]``. All ranks of the domain call it, in the same order."""
        whole = parameter.new_empty(len(parameter) * self.domain.size, *parameter.shape[1:])
        self.domain.all_gather(whole, parameter.detach())
        return whole

    def held_entries(self) -> list[tuple[Entry, nn.Parameter]]:
        return [
            (entry, parameter) for entry, parameter in super().held_entries() if entry.cut.index == self.domain.rank
        ]


def _add_to(total: Tensor, name: str) -> Callable[[Tensor], None]:
    """A hook that adds a gradient to its sum and frees it. It keeps nothing alive that has parameters (``buckets``)."""
    add = move_gradient_to(total)

    def hook(parameter: Tensor) -> None:
        if not total.untyped_storage().nbytes():
            raise RankFailure(
                f"parameter {name} got a gradient outside of its unit's backward",
                so="the sum over ranks would lack it",
                fix='use shard = "optimizer" for a model that uses the parameters of a layer or its head elsewhere',
            )
        add(parameter)

    return hook
