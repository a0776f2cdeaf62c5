"""All parameters of a rank in one flat buffer and all gradients in another, so that sharding is a matter of slicing.

Parameters lie in the order in which forward needs them, so backward finishes their gradients from the end of the buffer
to its start. *Late* parameters come before all others: their gradients are complete only after the last backward. They
are norms, replicated parameters, and those that the caller names. Only the padding at the end of the buffer depends on
the number of ranks. Gradients are summed over micro-batches in at least fp32.

The buffers are divided into *buckets*: contiguous ranges that need not begin or end with a parameter. Every rank owns
an equal part of every bucket::

    buffer    | late | embedding |   layer 0   |   layer 1   |    head     | padding |
    buckets   |  0  |       1       |       2       |       3       |       4        |
    of rank   | 0 1 |   0   .   1   |   0   .   1   |   0   .   1   |   0    .   1   |

Only the first bucket may be smaller than the others: it is reduced last, when no compute is left to overlap with.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice, pairwise, takewhile
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from bytescale.attention.kernels import lse_dtype
from bytescale.common.cut import Cut
from bytescale.common.errors import ConfigError
from bytescale.cost.gradient_sync import MOST_BUCKETS
from bytescale.runtime.group import RankGroup
from bytescale.runtime.mesh import Mesh

ALIGNMENT = 64
_NUM_COPIES = 4
"""Of the smallest gradients, from which it is seen that somebody has changed all of them."""
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32, "fp64": torch.float64}
"""Of parameters, by the names that settings and options use."""


@dataclass(frozen=True)
class Entry:
    """Where one parameter, or this rank's part of it, lies in the flat buffers, in elements."""

    name: str
    cut: Cut
    start: int

    @property
    def shape(self) -> tuple[int, ...]:
        return self.cut.part_shape

    @property
    def stop(self) -> int:
        return self.start + int(torch.Size(self.shape).numel())


@dataclass(frozen=True)
class Bucket:
    """A range of the flat buffers that is reduced, or gathered, by one collective over ``num_shards`` ranks."""

    start: int
    stop: int
    num_shards: int

    def part(self, number: int) -> slice:
        """One of the equal parts that the ranks own."""
        size = (self.stop - self.start) // self.num_shards
        return slice(self.start + number * size, self.start + (number + 1) * size)


@dataclass(frozen=True)
class Piece:
    """A part of one parameter inside a range of the flat buffers, in elements of the buffers."""

    entry: Entry
    start: int
    stop: int

    def inside(self, place: slice) -> slice:
        """Where the piece lies in a part of the buffers, which has all of it."""
        return slice(self.start - place.start, self.stop - place.start)


@dataclass(frozen=True, slots=True)
class Range:
    """One state of neighbouring weights: ``values [n]``, the optimizer's own memory, begin at ``start`` of the buffers.

    What a rank has of a parameter in a bucket lies in one range.
    """

    start: int
    values: Tensor

    @property
    def place(self) -> slice:
        return slice(self.start, self.start + len(self.values))


def values_of(ranges: Sequence[Range], start: int, stop: int) -> Tensor:
    """The elements ``start`` to ``stop`` of the flat buffers: a view of one of ``ranges``, which are in order."""
    found = ranges[bisect_right(ranges, start, key=lambda own: own.start) - 1]
    return found.values[start - found.start : stop - found.start]


class FlatParameters:
    """Moves parameters into flat memory, in place, and gathers their gradients beside it.

    Attributes:
        values: ``[padded]`` in the parameters' dtype; every parameter is a view of it.
        gradients: ``[padded]`` in fp32 or wider; sums over all backwards since ``zero_gradients``.
        parameters: in the buffers' order.
        entries: where each of them lies, by rising places.
        buckets: in the buffers' order; together they cover the buffers.
        late_stop: where the late parameters end.
    """

    def __init__(
        self,
        named_parameters: Iterable[tuple[str, nn.Parameter]],
        num_shards: int,
        cuts: Mapping[str, Cut] | None = None,
        *,
        bucket_bytes: int = 0,
        late: Collection[str] = (),
    ) -> None:
        """Take over all parameters that require a gradient.

        Args:
            named_parameters: in the order in which a forward needs them.
            num_shards: ranks among which the buffers are divided.
            cuts: by name, which part of the whole parameter this rank holds; None: it holds whole parameters.
            bucket_bytes: bytes of gradients in one bucket, at least; 0: there is a single bucket.
            late: names of late parameters, in addition to norms and replicated parameters.
        """
        parameters = [(name, p) for name, p in named_parameters if p.requires_grad]
        if not parameters:
            raise ValueError("the model has no parameter that requires a gradient: there is nothing to train")
        dtypes = {p.dtype for _, p in parameters}
        if len(dtypes) > 1:
            raise ValueError(f"parameters have several dtypes, {sorted(map(str, dtypes))}: cast the model to one")
        self.entries: list[Entry] = []
        self.late_stop = 0
        stop = 0
        whole = {name: Cut(shape=tuple(p.shape)) for name, p in parameters} if cuts is None else cuts
        is_late = {name: p.dim() < 2 or whole[name].replicas > 1 or name in late for name, p in parameters}
        parameters.sort(key=lambda item: not is_late[item[0]])  # a stable sort: the given order is kept otherwise
        for name, parameter in parameters:
            self.entries.append(Entry(name, whole[name], stop))
            stop += -(-parameter.numel() // ALIGNMENT) * ALIGNMENT
            if is_late[name]:
                self.late_stop = stop
        self.parameters = [parameter for _, parameter in parameters]
        self._versions: list[int] = []
        self._copies: list[tuple[nn.Parameter, Tensor, Tensor]] = []
        self._watched = [name for name, _ in sorted(parameters, key=lambda item: item[1].numel())[:_NUM_COPIES]]
        self._start_of = {id(p): entry.start for (_, p), entry in zip(parameters, self.entries, strict=True)}

        (dtype,) = dtypes
        self.buckets = _buckets(stop, num_shards, -(-bucket_bytes // lse_dtype(dtype).itemsize))
        self._take_over(dtype, parameters[0][1].device, lambda entry, parameter: parameter)

    def _take_over(
        self,
        dtype: torch.dtype,
        device: torch.device,
        initial: Callable[[Entry, nn.Parameter], Tensor],
        *,
        trained: bool = True,
    ) -> None:
        """Move the parameters that this rank computes with into memory of their own, once the buckets are known."""
        self.values = torch.zeros(self.num_held, dtype=dtype, device=device)
        for entry, parameter in self.held_entries():
            value = self.value_of(entry)
            with torch.no_grad():
                value.copy_(initial(entry, parameter))
            parameter.data = value
        # After the parameters' own memory is free: BF16 parameters take 6 bytes at the peak, and not 8.
        num_summed = self.num_held if trained else 0
        self.gradients = torch.zeros(num_summed, dtype=lse_dtype(dtype), device=device)
        self._hooks = [self._hook(parameter, entry) for entry, parameter in self.held_entries() if trained]
        self.changed()

    @property
    def num_held(self) -> int:
        """Elements of the buffers that this rank has memory for."""
        return self.buckets[-1].stop

    def held_entries(self) -> list[tuple[Entry, nn.Parameter]]:
        """The parameters, or parts of them, that this rank always has memory for."""
        return list(zip(self.entries, self.parameters, strict=True))

    @property
    def master_dtype(self) -> torch.dtype:
        """Dtype of gradient sums, master weights and optimizer states."""
        return self.gradients.dtype

    def part_of(self, rank: int) -> int:
        """Which part of every bucket ``rank`` owns, in the buffers' order."""
        return rank

    def shards(self, rank: int) -> list[slice]:
        """The parts of the buffers that ``rank`` owns: one range of every bucket, in order."""
        return [bucket.part(self.part_of(rank)) for bucket in self.buckets]

    def held(self, bucket: Bucket) -> slice:
        """Where this rank has its part of a bucket in ``values`` and ``gradients``: all of the bucket."""
        return slice(bucket.start, bucket.stop)

    def own(self, place: slice) -> slice:
        """Where a range that this rank has lies in ``values`` and ``gradients``."""
        return place

    def holders(self, mesh: Mesh) -> RankGroup:
        """The ranks that have the same part as this one, and divide its updates among them."""
        return mesh.gradients

    def whole(self, own: Tensor) -> Tensor:
        """A copy ``[padded]`` of what this rank has in ``values`` or ``gradients``, with zeros for what it has not."""
        return own.clone()

    def by_name(self, whole: Tensor) -> dict[str, Tensor]:
        """Copies of what ``whole [padded]`` has of each parameter, whose entries are parts of its rows."""
        parts: dict[str, list[Tensor]] = {}
        for own in self.entries:
            parts.setdefault(own.name, []).append(whole[own.start : own.stop].view(own.shape))
        return {name: torch.cat(own) if len(own) > 1 else own[0].clone() for name, own in parts.items()}

    def pieces(self, place: slice) -> Iterator[Piece]:
        """The parts of parameters inside a range of the buffers, in order."""
        first = max(0, bisect_right(self.entries, place.start, key=lambda entry: entry.start) - 1)
        for entry in takewhile(lambda entry: entry.start < place.stop, islice(self.entries, first, None)):
            low, high = max(entry.start, place.start), min(entry.stop, place.stop)
            if low < high:
                yield Piece(entry, low, high)

    def runs(self, place: slice, kind: Callable[[Entry], Any]) -> list[tuple[slice, Any]]:
        """The kinds of parameters inside ``place``, each with the part of ``place``; gaps between them hold zeros."""
        found: list[tuple[slice, Any]] = []
        for piece in self.pieces(place):
            own, value = piece.inside(place), kind(piece.entry)
            if found and found[-1][1] == value:
                own = slice(found.pop()[0].start, own.stop)
            found.append((own, value))
        return found

    def extent(self, module: nn.Module) -> tuple[int, int] | None:
        """Where the parameters of ``module`` begin and end, without the late ones; None if it has no others."""
        starts = {self._start_of[id(p)] for p in module.parameters() if id(p) in self._start_of}
        own = [entry for entry in self.entries if entry.start in starts and entry.start >= self.late_stop]
        return (own[0].start, own[-1].stop) if own else None

    def require_own_gradients(self) -> None:
        """Raise ``ConfigError`` if somebody has changed gradients since the last backward, as clipping does."""
        for parameter, view, copy in self._copies:
            own = None if parameter.grad is None else parameter.grad.data_ptr()
            if own != view.data_ptr() or torch.allclose(view, copy, rtol=0, atol=0, equal_nan=True):
                continue  # also where ``grad`` is another tensor, which ``collect_gradients`` takes
            raise ConfigError(
                "gradients were changed between backward and step() (clip_grad_norm_, or an operation in place)",
                so="they are this rank's part: their norm, and what is done to them, would not be the batch's",
                fix="leave clipping to hdp.step(max_grad_norm=...), and multiply the loss by a factor instead of them",
            )

    def add_gradient(self, parameter: nn.Parameter, rows: Tensor) -> None:
        """Add what another rank has summed for a parameter, as if it were a backward of this one's."""
        entry = next(entry for entry, own in self.held_entries() if own is parameter)
        for total in (self.gradient_of(entry), *(copy for own, _, copy in self._copies if own is parameter)):
            total.add_(rows)

    def zero_gradients(self) -> None:
        self.gradients.zero_()
        for *_, copy in self._copies:
            copy.zero_()
        self._attach_gradients()

    def release(self) -> None:
        """Leave the parameters' gradients to others. The parameters stay views of ``values``."""
        for hook in self._hooks:
            hook.remove()
        for parameter in self.parameters:
            parameter.grad = None

    def require_adopted(self) -> None:
        """Raise ``ConfigError`` if a parameter has left ``values``, as ``model.to()`` makes it when it copies."""
        for entry, parameter in self.held_entries():
            if parameter.data_ptr() != self.value_of(entry).data_ptr() or parameter.dtype != self.values.dtype:
                raise moved(entry.name)

    def changed(self) -> list[Entry]:
        """Parameters that somebody else has written to since the last call, as ``load_state_dict`` does."""
        before, self._versions = self._versions, [parameter._version for parameter in self.parameters]
        pairs = zip(self.entries, before, self._versions, strict=False)
        return [entry for entry, old, new in pairs if old != new]

    def collect_gradients(self) -> None:
        """Bring the buffer up to date where somebody has replaced or removed a parameter's ``grad``.

        ``zero_grad()`` of a module or an optimizer sets ``grad`` to None, which means zero.
        """
        for entry, parameter in self.held_entries():
            if parameter.dtype != self.gradients.dtype:
                continue  # its gradient is moved into the buffer after every backward, and its ``grad`` is always None
            if parameter.grad is None:
                self.gradient_of(entry).zero_()
            elif parameter.grad.data_ptr() != self.gradient_of(entry).data_ptr():
                self.gradient_of(entry).copy_(parameter.grad)
        self._attach_gradients()

    def _attach_gradients(self) -> None:
        """Let every ``grad`` be its view of the buffer, where the dtypes allow it."""
        for entry, parameter in self.held_entries():
            if parameter.dtype == self.gradients.dtype and parameter.grad is None:
                parameter.grad = self.gradient_of(entry)

    def value_of(self, entry: Entry) -> Tensor:
        return self.values[self.own(slice(entry.start, entry.stop))].view(entry.shape)

    def gradient_of(self, entry: Entry) -> Tensor:
        return self.gradients[self.own(slice(entry.start, entry.stop))].view(entry.shape)

    def _hook(self, parameter: nn.Parameter, entry: Entry) -> RemovableHandle:
        gradient = self.gradient_of(entry)
        if gradient.dtype != parameter.dtype:
            return parameter.register_post_accumulate_grad_hook(move_gradient_to(gradient))
        parameter.grad = gradient  # autograd adds in place
        copy = torch.zeros_like(gradient) if entry.name in self._watched else None
        if copy is not None:
            self._copies.append((parameter, gradient, copy))
        return parameter.register_post_accumulate_grad_hook(_keep_gradient_in(gradient, copy))


def moved(name: str) -> ConfigError:
    """What to raise for a parameter that is not where it was put."""
    return ConfigError(
        f"parameter {name} has been moved or replaced since the optimizer took it over",
        so="updates would not reach the model",
        fix="move and convert the model (to(), half()) before hdp.adamw() or hdp.optimizer(); "
        "accelerate moves models too: see examples/hf_trainer.py",
    )


def _keep_gradient_in(view: Tensor, copy: Tensor | None) -> Callable[[Tensor], None]:
    """A hook for a ``grad`` that is a view of the buffer. After ``zero_grad()`` another tensor replaces what it has.

    ``copy``: of the view, which becomes what the view is.
    """

    def hook(parameter: Tensor) -> None:
        assert parameter.grad is not None, "the hook runs right after autograd has accumulated a gradient"
        if parameter.grad.data_ptr() != view.data_ptr():
            view.copy_(parameter.grad)
            parameter.grad = view
        if copy is not None:
            copy.copy_(view)

    return hook


def move_gradient_to(total: Tensor) -> Callable[[Tensor], None]:
    """A hook that adds a low-precision gradient to its wide sum and frees it."""

    def hook(parameter: Tensor) -> None:
        assert parameter.grad is not None, "the hook runs right after autograd has accumulated a gradient"
        total.add_(parameter.grad)
        parameter.grad = None

    return hook


def _buckets(num_elements: int, num_shards: int, bucket_elements: int) -> list[Bucket]:
    """Of equal size, counted from the end of the buffer; the first takes what remains. Every rank's part is aligned."""
    quantum = num_shards * ALIGNMENT
    padded = -(-num_elements // quantum) * quantum
    wanted = max(bucket_elements, -(-padded // MOST_BUCKETS))
    size = -(-wanted // quantum) * quantum if bucket_elements and num_shards > 1 else padded
    bounds = [0, *range(padded % size or size, padded + 1, size)]
    return [Bucket(start, stop, num_shards) for start, stop in pairwise(bounds)]
