"""Counts against hand computations and published sizes."""

from dataclasses import replace

import pytest

from bytescale.config.architecture import PRESETS, Architecture
from bytescale.cost import flops
from bytescale.cost.spec import ModelSpec

TOY = Architecture(
    vocab_size=100, num_layers=3, hidden_size=8, num_heads=4, num_kv_heads=2, head_dim=2, ffn_hidden_size=20
)


def test_parameters_of_a_toy_by_hand() -> None:
    # q and o: 8 x 8 each; k and v: 8 x 4 each; gate, up, down: 8 x 20 each; two norms of 8.
    layer = 2 * 64 + 2 * 32 + 3 * 160 + 16
    assert flops.layer_parameters(TOY) == layer
    assert flops.total_parameters(TOY) == 3 * layer + 2 * 800 + 8


@pytest.mark.parametrize(("preset", "billions"), [("7b", 8.03), ("70b", 70.6)])
def test_parameters_of_presets_are_those_of_llama_3(preset: str, billions: float) -> None:
    assert flops.total_parameters(PRESETS[preset]) / 1e9 == pytest.approx(billions, rel=2e-3)


def test_forward_flops_by_hand() -> None:
    linear = 2 * (2 * 64 + 2 * 32 + 3 * 160)
    attention = 2 * 8
    expected = 3 * (linear * 5 + attention * 13) + 2 * 800 * 5  # sequences of 2 and 3 tokens
    assert ModelSpec.of(TOY).training_flops(num_tokens=5, sum_of_squares=13) == 3 * expected


def test_ring_and_activation_bytes_by_hand() -> None:
    assert flops.ring_bytes_per_token(TOY, bytes_per_element=2) == (2 * 4 * 2, 2 * 4 * 2 + 2 * 4 * 4)
    elements = 4 * 8 + 2 * 8 + 2 * 4 + 4 * 20
    assert flops.layer_activation_bytes_per_token(TOY) == 2 * elements + 4 * 6


@pytest.mark.parametrize(
    ("preset", "total", "active"), [("mixtral-8x7b", 46.70, 12.88), ("mixtral-8x22b", 140.63, 39.16)]
)
def test_parameters_of_mixtures_are_the_published_ones(preset: str, total: float, active: float) -> None:
    assert flops.total_parameters(PRESETS[preset]) / 1e9 == pytest.approx(total, rel=1e-3)
    assert flops.active_parameters(PRESETS[preset]) / 1e9 == pytest.approx(active, rel=1e-3)


def test_a_token_pays_for_the_experts_that_it_runs_through() -> None:
    mixture = replace(TOY, num_experts=6, experts_per_token=2)
    blocks, router = 2 * 480, 6 * 8
    linear = 2 * (2 * 64 + 2 * 32 + blocks + router)
    assert flops.layer_linear_flops_per_token(mixture) == linear
    assert flops.feed_forward_parameters(mixture) == 6 * (480 + 8)
    assert flops.active_parameters(TOY) == flops.total_parameters(TOY)
