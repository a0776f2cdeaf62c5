"""What ranks send of the weights to an inference engine: each its share, and of it what has changed.

A *part* has some values of one tensor of Hugging Face's files, and their places in it. The parts of all ranks together
have every value once. Where every rank has all weights, a rank cuts its share out of each tensor. Where ranks share the
weights, a rank's share lies in what it holds, and nothing is gathered.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor, nn
from transformers.core_model_loading import revert_weight_conversion

from bytescale.common.cut import Cut
from bytescale.common.errors import ConfigError
from bytescale.hf.files.weight_stream import exported
from bytescale.runtime.mesh import Mesh
from bytescale.runtime.optimizer.lockstep import Units

Convert = Callable[[str, Tensor], Iterable[tuple[str, Tensor]]]
"""From a tensor of Hugging Face's files to what the receiver has in its place."""

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class WeightPart(NamedTuple):
    """Some values of one tensor.

    Attributes:
        name, shape: of the whole tensor.
        start: the place of the first value in the whole tensor, flattened.
        positions: ``[n]`` the places of all values, rising, in int32 (int64 in tensors of 2**31 values and more); None:
            they lie side by side from ``start`` on.
        values: ``[n]``, which may be none, and may be the model's own memory.
    """

    name: str
    shape: tuple[int, ...]
    start: int
    positions: Tensor | None
    values: Tensor

    @property
    def num_bytes(self) -> int:
        return self.values.nbytes + (0 if self.positions is None else self.positions.nbytes)

    def put(self, tensor: Tensor) -> None:
        """Write the values to their places in a receiver's contiguous tensor, of the whole shape and the same dtype."""
        if tuple(tensor.shape) != self.shape or tensor.dtype != self.values.dtype:
            raise ConfigError(
                f"a part of {self.name} {list(self.shape)} in {self.values.dtype} came to a tensor "
                f"{list(tensor.shape)} in {tensor.dtype}",
                so="the receiver would run another model",
                fix="export in the receiver's dtype, to tensors with the names and shapes of Hugging Face's files",
            )
        bits = _BITS[tensor.element_size()]
        flat, values = tensor.detach().view(-1).view(bits), self.values.view(bits).to(tensor.device)
        if self.positions is None:
            flat[self.start : self.start + len(values)] = values
        else:
            flat[self.positions.to(tensor.device).long()] = values


class SentWeights:
    """What one receiver has of this rank's parts: a copy in host memory, in the dtype that was exported."""

    def __init__(self) -> None:
        self._copies: dict[str, tuple[int, Tensor]] = {}

    @property
    def num_bytes(self) -> int:
        """Of the copies: as many as one whole export of this rank's parts has values."""
        return sum(copy.nbytes for _, copy in self._copies.values())

    def changed(self, parts: Iterable[WeightPart]) -> Iterator[WeightPart]:
        """Yield of the parts what the receiver does not have to the last bit, in the form that takes fewer bytes.

        A part counts as received when the next one is asked for. What an error has kept from the receiver comes again.
        """
        for part in parts:
            values = part.values.view(_BITS[part.values.element_size()])
            start, copy = self._copies.get(part.name, (-1, values[:0]))
            if (start, copy.shape, copy.dtype) != (part.start, values.shape, values.dtype):  # new, or of other ranks
                copy = values.to("cpu", copy=True)
                if len(copy):
                    yield part
                self._copies[part.name] = part.start, copy
                continue
            moved = (values != copy.to(values.device)).nonzero()[:, 0]
            if not len(moved):
                continue
            places = moved + part.start if part.positions is None else part.positions[moved].long()
            some, new = _placed(part.name, part.shape, places, part.values[moved]), values[moved].cpu()
            yield min(some, part, key=lambda one: one.num_bytes)
            copy[moved.cpu()] = new


def parts_of(
    tensors: Iterable[tuple[str, Tensor]], rank: int, num_ranks: int, convert: Convert | None = None
) -> Iterator[WeightPart]:
    """Of whole tensors, the share of one of the ranks that all have them."""
    for given in tensors:
        for name, tensor in [given] if convert is None else convert(*given):
            own = _share(tensor.numel(), rank, num_ranks)
            yield WeightPart(name, tuple(tensor.shape), own.start, None, tensor.detach().reshape(-1)[own])


@torch.no_grad()
def held_parts(
    model: nn.Module, dtype: torch.dtype | None, mesh: Mesh, units: Units | None, cuts: dict[int, Cut] | None
) -> Iterator[WeightPart]:
    """Of what this rank holds of the weights, its share. ``cuts``: by ``id`` of a parameter; None: they are whole."""
    held = {} if units is None else units.held()
    for root, name, parameter in exported(model):
        if id(parameter) in held:
            cut, start, values = held[id(parameter)]
            own = _share(len(values), mesh.replicas.rank, mesh.replicas.size)
        else:
            cut = Cut(shape=tuple(parameter.shape)) if cuts is None else cuts[id(parameter)]
            start, values = 0, parameter.detach().reshape(-1)
            rank = mesh.hdp.rank * cut.replicas + cut.replica
            own = _share(len(values), rank, mesh.hdp.size * cut.replicas)
        values = values[own] if dtype is None else values[own].to(dtype)
        yield from _written(root, name, cut, start + own.start, values)


def _written(root: nn.Module, name: str, cut: Cut, start: int, values: Tensor) -> Iterator[WeightPart]:
    """The values under the names of files. ``start``: where they begin in the flattened part that ``cut`` names."""
    stand_in = torch.empty(cut.shape, device="meta")
    found = revert_weight_conversion(root, {name: stand_in})
    ((written, like), *others) = found.items()
    if cut.count == 1 and like is stand_in and not others:
        yield WeightPart(written, cut.shape, start, None, values)
        return
    # The numbers of the values, and -1 where others' are, move to the places of the files as the values would.
    numbers = torch.full(cut.shape, -1, dtype=torch.int64, device=values.device)
    part = torch.full(cut.part_shape, -1, dtype=torch.int64, device=values.device)
    part.view(-1)[start : start + len(values)] = torch.arange(len(values), device=values.device)
    cut.put(part, numbers)
    moved = {key: own.reshape(-1) for key, own in revert_weight_conversion(root, {name: numbers}).items()}
    places = {key: (own >= 0).nonzero()[:, 0] for key, own in moved.items()}
    seen = torch.cat([moved[key][places[key]] for key in moved])
    if not torch.equal(seen.sort().values, torch.arange(len(values), device=seen.device)):
        raise ConfigError(
            f"the files of a {type(root).__name__} have {name} in a form that is not only its values in other places",
            so="a rank's part of it is no part of theirs",
            fix='send whole tensors (hdp.weights()), or use neither shard = "parameters" nor tp',
        )
    for key, like in found.items():
        yield _placed(key, tuple(like.shape), places[key], values[moved[key][places[key]]])


def _placed(name: str, shape: tuple[int, ...], places: Tensor, values: Tensor) -> WeightPart:
    """``places``: ``[n]`` int64, rising."""
    start = int(places[0]) if len(places) else 0
    if not len(places) or int(places[-1]) - start + 1 == len(places):
        return WeightPart(name, shape, start, None, values)
    return WeightPart(name, shape, start, places.to(torch.int32 if math.prod(shape) < 2**31 else torch.int64), values)


def _share(size: int, rank: int, num_ranks: int) -> slice:
    return slice(size * rank // num_ranks, size * (rank + 1) // num_ranks)


def fp8_blocks(name: str, tensor: Tensor, *, block: int = 128) -> Iterator[tuple[str, Tensor]]:
    """A matrix in FP8 as DeepSeek-V3's files have it: ``convert``, for receivers that say that they want it.

    Yields ``name`` in float8_e4m3fn and ``name + "_scale_inv"``, fp32 ``[ceil(rows / block), ceil(columns / block)]``:
    what the values of each block have to be multiplied by. It is a block's largest absolute value over 448. Which
    matrices a receiver has in FP8, its own configuration says: the embedding, the head and routers are none of them.
    """
    rows, columns = tensor.shape
    wide = nn.functional.pad(tensor.float(), (0, -columns % block, 0, -rows % block))
    blocks = wide.unflatten(1, (-1, block)).unflatten(0, (-1, block))  # [R, block, C, block]
    largest = blocks.abs().amax((1, 3))
    scale = torch.where(largest > 0, largest / torch.finfo(torch.float8_e4m3fn).max, 1.0)
    small = (blocks / scale[:, None, :, None]).flatten(2).flatten(0, 1)[:rows, :columns]
    yield name, small.to(torch.float8_e4m3fn)
    yield f"{name}_scale_inv", scale
