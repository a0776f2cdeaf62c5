"""Initial weights do not depend on how a parameter is cut, and a rank draws little more than its part."""

from __future__ import annotations

import hashlib

import pytest
import torch

from bytescale.common.cut import Cut
from bytescale.config.architecture import PRESETS
from bytescale.models import initial_values as module
from bytescale.models.initial_values import initial_values

SHAPE = PRESETS["tiny"]


@pytest.mark.parametrize("columns", [3, 8, 1024])
@pytest.mark.parametrize(("shape", "dim"), [((16, 12), 0), ((16, 12), 1), ((4, 10, 6), 1), ((4, 10, 6), 2)])
def test_parts_are_parts_of_the_whole(
    shape: tuple[int, ...], dim: int, columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "TILE_COLUMNS", columns)
    monkeypatch.setattr(module, "TILE_NUMBERS", columns**2)
    whole = initial_values("layers.0.mlp.down_proj.weight", Cut(shape=shape), SHAPE, 3)
    for index in range(2):
        cut = Cut(shape=shape, dim=dim, index=index, count=2)
        part = initial_values("layers.0.mlp.down_proj.weight", cut, SHAPE, 3)
        assert torch.equal(part, cut.of(whole))
    assert len(whole.unique()) > 0.99 * whole.numel(), "no two tiles have the same numbers"
    assert whole.std() == pytest.approx(SHAPE.init_std / (2 * SHAPE.num_layers) ** 0.5, rel=0.3)


def test_a_parameter_of_one_tile_is_drawn_as_a_whole() -> None:
    """Small models keep the values that they had before there were tiles."""
    generator = torch.Generator().manual_seed(
        int.from_bytes(hashlib.blake2b(b"7/embed_tokens.weight", digest_size=8).digest(), "little") >> 1
    )
    expected = torch.empty(4096, 256).normal_(0.0, SHAPE.init_std, generator=generator)
    assert torch.equal(initial_values("embed_tokens.weight", Cut(shape=(4096, 256)), SHAPE, 7), expected)


def test_a_rank_draws_its_part_and_not_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = []
    make = module._generator
    monkeypatch.setattr(module, "TILE_COLUMNS", 8)
    monkeypatch.setattr(module, "TILE_NUMBERS", 64)
    monkeypatch.setattr(module, "_generator", lambda *args: drawn.append(args[1]) or make(*args))  # type: ignore[func-returns-value]
    initial_values("q_proj.weight", Cut(shape=(64, 16), index=5, count=8), SHAPE, 0)
    assert drawn == [(5, 0), (5, 1)]
