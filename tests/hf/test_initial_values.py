"""First values that are made a tile at a time (``hf.files.large``) have the distribution of those of transformers."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from bytescale.common.cut import Cut
from bytescale.common.errors import ConfigError
from bytescale.hf.files import large
from bytescale.hf.files.folder import make_model
from bytescale.hf.files.large import InitialValues
from bytescale.parity import small_model
from tests.helpers.effort import one_of

from . import sweep

FEW = ["qwen3_moe", "gpt2", "mamba2", "gemma3n_text", "deepseek_v3", "qwen3_5"]
IN_CONSTRUCTORS = {"apertus": "act_fn.alpha_", "apertus1p5_text": "act_fn.alpha_"}
"""Parameters that get their values where the module is made: refused by name."""


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(large, "_TILE", 300)


def assert_alike(values: Tensor, expected: Tensor) -> None:
    """Equal, where all elements are; otherwise with mean and deviation that differ by chance alone."""
    assert values.shape == expected.shape
    if expected.numel() < 2 or float(expected.std()) == 0:
        torch.testing.assert_close(values, expected, rtol=0, atol=0)
    elif expected.numel() >= 100:
        deviation, error = float(expected.std()), 6 / math.sqrt(expected.numel())
        assert float(values.std()) == pytest.approx(deviation, rel=2 * error)
        assert float(values.mean()) == pytest.approx(float(expected.mean()), abs=2 * error * deviation)


@pytest.mark.parametrize(
    "name",
    [
        *FEW,
        *(
            pytest.param(name, marks=pytest.mark.exhaustive)
            for name in sweep.equal_types(sweep.TABLE.read_text())
            if name not in FEW
        ),
    ],
)
def test_values_are_those_of_transformers(name: str) -> None:
    content: dict[str, Any] = sweep._small(name, torch.float32).config.to_dict()
    try:
        whole = make_model(content, torch.float32, seed=1)
    except ConfigError as error:
        pytest.skip(str(error))
    values, seen = InitialValues(content, torch.float32, 0), 0
    for key, parameter in whole.named_parameters():
        if IN_CONSTRUCTORS.get(name, " ") in key:
            with pytest.raises(ConfigError, match="its first value while the whole model is made"):
                values(key, Cut(shape=tuple(parameter.shape)))
            continue
        own = values(key, Cut(shape=tuple(parameter.shape))).view(parameter.shape)
        assert_alike(own, parameter.detach())
        seen += 1
    assert seen > 5


@pytest.mark.parametrize("name", one_of(["qwen3_moe", "mamba2"], "qwen3_moe"))
def test_a_part_is_a_part_of_the_whole(name: str) -> None:
    """Of any cut, and any range of it, whatever was asked for before."""
    content = small_model(name, dtype=torch.float32).config.to_dict()
    model = make_model(content, torch.float32)
    values = InitialValues(content, torch.float32, 7)
    wholes = {
        key: values(key, Cut(shape=tuple(own.shape))).view(own.shape).clone() for key, own in model.named_parameters()
    }
    again, num_ranges = InitialValues(content, torch.float32, 7), 0
    for key, whole in reversed(wholes.items()):
        for dim, packs in [(dim, packs) for dim in range(whole.dim()) for packs in (1, 2)]:
            if whole.shape[dim] % (2 * packs):
                continue
            for index in range(2):
                cut = Cut(shape=tuple(whole.shape), dim=dim, index=index, count=2, packs=packs)
                part = cut.of(whole).flatten()
                third = len(part) // 3
                for inside in (slice(0, third), slice(third, 2 * third + 1), slice(2 * third + 1, len(part))):
                    assert torch.equal(again(key, cut, inside), part[inside]), (key, cut, inside)
                    num_ranges += 1
    assert num_ranges > 100
    other = InitialValues(content, torch.float32, 8)
    assert not any(
        torch.equal(other(key, Cut(shape=tuple(whole.shape))), whole.flatten())
        for key, whole in wholes.items()
        if float(whole.std()) and key in other._fills.even
    )
