"""What ranks send of the weights to an inference engine: each its share, and of it what has changed.

The parts of all ranks together have every value once. Where every rank has all weights, it cuts its share out of each
tensor. Where ranks share the weights, a rank's share lies in what it holds, and nothing is gathered.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

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
    """Some values of one tensor of Hugging Face's files.

    Attributes:
        name, shape: of the whole tensor.
        start: the place of the first value in the whole tensor, flattened.
        positions: ``[n]`` all places, rising, in int32 (int64 from 2**31 values on); None: one behind the other.
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
            what = f"{self.name} is {self.values.dtype} {self.shape}, and here {tensor.dtype} {tuple(tensor.shape)}"
            raise ConfigError(what, so="the model would be another one", fix="export in its dtype, as files have it")
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
        """Of the copies, as many as one whole export of this rank's parts has."""
        return sum(copy.nbytes for _, copy in self._copies.values())

    def changed(self, parts: Iterable[WeightPart]) -> Iterator[WeightPart]:
        """Yield of the parts what the receiver does not have to the last bit, in the form that takes fewer bytes.

        A part counts as received when the next one is asked for. What an error has kept from the receiver comes again.
        """
        for part in parts:
            values = part.values.view(_BITS[part.values.element_size()])
            start, copy = self._copies.get(part.name, (-1, values[:0]))
            new, due = values.to("cpu", copy=True), part
            if (start, len(copy), copy.dtype) == (part.start, len(new), new.dtype):  # else it is new, or of other ranks
                moved = (values != copy.to(values.device)).nonzero()[:, 0]
                places = moved + part.start if part.positions is None else part.positions[moved].long()
                some = _placed(part.name, part.shape, places, part.values[moved])
                due = min(some, part, key=lambda one: one.num_bytes)
            if len(due.values):
                yield due
            self._copies[part.name] = part.start, new


def parts_of(
    tensors: Iterable[tuple[str, Tensor]], rank: int, num_ranks: int, convert: Convert | None = None
) -> Iterator[WeightPart]:
    """Of whole tensors, the share of one of the ranks that all have them."""
    for given in tensors:
        for name, tensor in [given] if convert is None else convert(*given):
            own = slice(tensor.numel() * rank // num_ranks, tensor.numel() * (rank + 1) // num_ranks)
            yield WeightPart(name, tuple(tensor.shape), own.start, None, tensor.detach().reshape(-1)[own])


@torch.no_grad()
def held_parts(
    model: nn.Module, dtype: torch.dtype | None, mesh: Mesh, units: Units | None, cuts: dict[str, Cut]
) -> Iterator[WeightPart]:
    """Of what this rank holds of the weights, its share. ``cuts``: of parameters that are cut for ``tp``."""
    held = {} if units is None else units.held()
    cut_of = {id(parameter): cuts[name] for name, parameter in model.named_parameters() if name in cuts}
    for root, name, parameter in exported(model):
        cut = cut_of.get(id(parameter), Cut(shape=tuple(parameter.shape)))
        cut, start, values = held.get(id(parameter), (cut, 0, parameter.detach().reshape(-1)))
        ranks = mesh.replicas if id(parameter) in held else mesh.hdp  # and those of tp that hold the same
        rank, num_ranks = ranks.rank * cut.replicas + cut.replica, ranks.size * cut.replicas
        own = slice(len(values) * rank // num_ranks, len(values) * (rank + 1) // num_ranks)
        yield from _written(root, name, cut, start + own.start, values[own] if dtype is None else values[own].to(dtype))


def _written(root: Any, name: str, cut: Cut, start: int, values: Tensor) -> Iterator[WeightPart]:
    """The values under the names of files. ``start``: where they begin in the flattened part that ``cut`` names."""
    stand_in = torch.empty(cut.shape, device="meta")
    (written, like), *_ = revert_weight_conversion(root, {name: stand_in}).items()
    if cut.count == 1 and like is stand_in:
        yield WeightPart(written, cut.shape, start, None, values)
        return
    # The numbers of the values, and -1 where others' are, move to the places of the files as the values would.
    numbers = torch.full(cut.shape, -1, dtype=torch.int64, device=values.device)
    part = torch.full(cut.part_shape, -1, dtype=torch.int64, device=values.device)
    part.view(-1)[start : start + len(values)] = torch.arange(len(values), device=values.device)
    cut.put(part, numbers)
    found = revert_weight_conversion(root, {name: numbers})
    places = {key: (own.reshape(-1) >= 0).nonzero()[:, 0] for key, own in found.items()}
    seen = {key: own.reshape(-1)[places[key]] for key, own in found.items()}
    if not torch.equal(torch.cat([*seen.values()]).sort().values, torch.arange(len(values), device=values.device)):
        what = f"files of a {type(root).__name__} have {name} in a form that is not only its values in other places"
        fix = 'send whole tensors (hdp.weights()), or use neither shard = "parameters" nor tp'
        raise ConfigError(what, so="a rank's part of it is no part of theirs", fix=fix)
    for key, own in found.items():
        yield _placed(key, tuple(own.shape), places[key], values[seen[key]])


def _placed(name: str, shape: tuple[int, ...], places: Tensor, values: Tensor) -> WeightPart:
    """``places``: ``[n]`` int64, rising."""
    start = int(places[0]) if len(places) else 0
    if not len(places) or int(places[-1]) - start + 1 == len(places):
        return WeightPart(name, shape, start, None, values)
    return WeightPart(name, shape, start, places.to(torch.int32 if math.prod(shape) < 2**31 else torch.int64), values)


def fp8_blocks(name: str, tensor: Tensor, *, block: int = 128) -> Iterator[tuple[str, Tensor]]:
    """A matrix in FP8 as DeepSeek-V3's files have it: a ``convert``, for receivers that are configured so.

    Yields ``name`` in float8_e4m3fn and ``name + "_scale_inv"``, fp32 ``[ceil(rows / block), ceil(columns / block)]``:
    a block's largest absolute value over 448, by which the values of the block have to be multiplied.
    """
    rows, columns = tensor.shape
    whole = nn.functional.pad(tensor.float(), (0, -columns % block, 0, -rows % block))
    blocks = whole.unflatten(1, (-1, block)).unflatten(0, (-1, block))  # [R, block, C, block]
    largest = blocks.abs().amax((1, 3))
    scale = torch.where(largest > 0, largest / torch.finfo(torch.float8_e4m3fn).max, 1.0)
    small = (blocks / scale[:, None, :, None]).flatten(2).flatten(0, 1)[:rows, :columns]
    yield from ((name, small.to(torch.float8_e4m3fn)), (f"{name}_scale_inv", scale))
