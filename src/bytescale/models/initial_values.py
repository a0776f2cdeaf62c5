"""Initial weights: a function of the seed and the parameter's name, whatever the ranks, and drawn part by part.

A rank draws what it holds and little more. A parameter is cut into tiles of about a million numbers, and every tile has
a random generator of its own, so that no rank has to draw what comes before its part. (A 70B model in two stages has 35
billion numbers a stage: drawn whole on every rank, they took 7.5 minutes.)
"""

from __future__ import annotations

import hashlib
from itertools import product

import torch
from torch import Tensor

from bytescale.common.cut import Cut
from bytescale.config import Architecture

TILE_NUMBERS = 2**20
TILE_COLUMNS = 1024
"""At most; a tile of a narrower matrix has more rows."""


def initial_values(name: str, cut: Cut, architecture: Architecture, seed: int) -> Tensor:
    """The part ``cut`` of a parameter's initial values, fp32: ``[*cut.part_shape]``.

    Matrices are normal with ``init_std``; those that write to the residual stream are scaled down by
    ``sqrt(2 * layers)``, so that its variance does not grow with depth (GPT-2). Norms are ones.
    """
    if len(cut.shape) == 1:
        return torch.ones(cut.part_shape)
    residual = name.endswith(("o_proj.weight", "down_proj.weight", "down_proj"))  # the last: of experts
    std = architecture.init_std / (2 * architecture.num_layers) ** 0.5 if residual else architecture.init_std
    starts = [cut.start if dim == cut.dim else 0 for dim in range(len(cut.shape))]
    part = torch.empty(cut.part_shape)
    tile = _tile_shape(cut.shape)
    touched = (
        range(start // size, -(-(start + length) // size))
        for start, length, size in zip(starts, cut.part_shape, tile, strict=True)
    )
    for index in product(*touched):
        lows = [number * size for number, size in zip(index, tile, strict=True)]
        highs = [min(low + size, end) for low, size, end in zip(lows, tile, cut.shape, strict=True)]
        numbers = torch.empty([high - low for low, high in zip(lows, highs, strict=True)])
        numbers.normal_(0.0, std, generator=_generator(name, index, seed))
        here, there = [], []  # where the tile and the part overlap, in the part and in the tile
        for low, high, start, length in zip(lows, highs, starts, cut.part_shape, strict=True):
            first, last = max(low, start), min(high, start + length)
            here.append(slice(first - start, last - start))
            there.append(slice(first - low, last - low))
        part[tuple(here)] = numbers[tuple(there)]
    return part


def _tile_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Of all tiles but the last ones: whole matrices of several experts where these are small."""
    *experts, rows, columns = shape
    columns = min(columns, TILE_COLUMNS)
    rows = min(rows, max(1, TILE_NUMBERS // columns))
    together = max(1, TILE_NUMBERS // (rows * columns))
    return (*(min(count, together) for count in experts), rows, columns)


def _generator(name: str, index: tuple[int, ...], seed: int) -> torch.Generator:
    """Of one tile. The first tile's knows the name alone, as if there were no tiles."""
    place = "/" + ".".join(map(str, index)) if any(index) else ""
    digest = hashlib.blake2b(f"{seed}/{name}{place}".encode(), digest_size=8).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)
