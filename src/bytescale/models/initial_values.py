"""Initial weights: a function of the seed and the parameter's name, independent of the ranks.

A parameter is divided into tiles of about a million numbers, and every tile has a random generator of its own, so a
rank draws little more than the numbers that it holds.
"""

from __future__ import annotations

import hashlib
from itertools import product

import torch
from torch import Tensor

from bytescale.common.cut import Cut
from bytescale.config.architecture import Architecture

TILE_NUMBERS = 2**20
TILE_COLUMNS = 1024
"""Columns of a tile, at most. A tile of a narrower matrix has more rows."""


def initial_values(name: str, cut: Cut, architecture: Architecture, seed: int) -> Tensor:
    """The part ``cut`` of a parameter's initial values, fp32: ``[*cut.part_shape]``.

    Matrices are drawn from a normal distribution with standard deviation ``init_std``. For matrices that write to the
    residual stream it is divided by ``sqrt(2 * layers)``, so that the stream's variance does not grow with depth
    (GPT-2). Norms are ones.
    """
    if len(cut.shape) == 1:
        return torch.ones(cut.part_shape)
    residual = name.endswith(("o_proj.weight", "down_proj.weight", "down_proj"))  # the last name is that of experts
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
    """The last tiles may be smaller. A tile may hold the whole matrices of several small experts."""
    *experts, rows, columns = shape
    columns = min(columns, TILE_COLUMNS)
    rows = min(rows, max(1, TILE_NUMBERS // columns))
    together = max(1, TILE_NUMBERS // (rows * columns))
    return (*(min(count, together) for count in experts), rows, columns)


def _generator(name: str, index: tuple[int, ...], seed: int) -> torch.Generator:
    """The random generator of one tile. That of the first tile depends on the seed and the name alone."""
    place = "/" + ".".join(map(str, index)) if any(index) else ""
    digest = hashlib.blake2b(f"{seed}/{name}{place}".encode(), digest_size=8).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)
