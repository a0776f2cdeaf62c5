"""Counts against hand computations and published sizes, of what transformers makes of the presets."""

from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from bytescale.config.presets import PRESETS
from bytescale.cost.profile import Profile
from bytescale.cost.spec import LayerSpec, ModelSpec
from bytescale.hf.model.decoder import HFDecoder
from bytescale.parity import small_model
from bytescale.train.parts.describe import spec_of_content
from tests.helpers.llama import spec_of_llama


@cache
def spec_of(preset: str) -> ModelSpec:
    return spec_of_content(PRESETS[preset])


@pytest.mark.parametrize("preset", PRESETS)
def test_counts_of_presets_are_those_by_hand(preset: str) -> None:
    assert spec_of(preset) == spec_of_llama(preset)


@pytest.mark.parametrize(
    ("preset", "billions"), [("7b", 8.03), ("70b", 70.6), ("mixtral-8x7b", 46.70), ("mixtral-8x22b", 140.63)]
)
def test_parameters_of_presets_are_the_published_ones(preset: str, billions: float) -> None:
    assert spec_of(preset).total / 1e9 == pytest.approx(billions, rel=2e-3)


@pytest.mark.parametrize(("preset", "active"), [("mixtral-8x7b", "12.9G"), ("mixtral-8x22b", "39.2G")])
def test_a_token_pays_for_the_experts_that_it_runs_through(preset: str, active: str) -> None:
    assert f" ({active} active), mixtral, " in spec_of(preset).describe()


def test_forward_flops_by_hand() -> None:
    shape = {"vocab_size": 100, "num_hidden_layers": 3, "hidden_size": 8, "num_attention_heads": 4, "head_dim": 2}
    spec = spec_of_llama("tiny", **shape, num_key_value_heads=2, intermediate_size=20)
    # q and o: 8 x 8 each; k and v: 8 x 4 each; gate, up, down: 8 x 20 each; two norms of 8.
    matrices = 2 * 64 + 2 * 32 + 3 * 160
    assert spec.total == 3 * (matrices + 16) + 2 * 800 + 8
    expected = 3 * (2 * matrices * 5 + 2 * 8 * 13) + 2 * 800 * 5  # sequences of 2 and 3 tokens
    assert spec.training_flops(num_tokens=5, sum_of_squares=13) == 3 * expected
    profile = Profile.from_flops(spec, flops_per_second=1.0)
    assert profile.ring_forward_bytes_per_token == 2 * 4 * 2
    assert profile.ring_backward_bytes_per_token == 2 * 4 * 2 + 2 * 4 * 4


def kinds(name: str, **changes: object) -> list[LayerSpec]:
    return HFDecoder(small_model(name, **changes)).spec.each


def test_layers_stay_what_they_are() -> None:
    """Dense layers before a mixture, windows in every other layer, recurrences in three of four."""
    dense, *mixtures = kinds("deepseek_v3", num_hidden_layers=4, first_k_dense_replace=1)
    assert (dense.expert_weights, dense.expert_rows) == (0, 0)
    assert all(layer.expert_weights and layer.expert_rows for layer in mixtures)
    assert all(layer == mixtures[0] for layer in mixtures)
    narrow, wide = kinds("gemma2", num_hidden_layers=2)
    assert narrow.window > 0 == narrow.key_numbers == narrow.num_heads
    assert wide.window == 0 < wide.key_numbers
    assert narrow.pair_numbers == wide.pair_numbers
    types = ["linear_attention", "full_attention"]
    mixer, full = kinds("qwen3_next", num_hidden_layers=2, layer_types=types)
    assert (mixer.mixers, mixer.pair_numbers, full.mixers, full.state_numbers) == (1, 0, 0, 0)
    assert mixer.state_numbers > 0 < full.pair_numbers


def test_a_stage_costs_what_its_own_layers_cost() -> None:
    """The stages of a hybrid add up to the model, and its heavy layers are on their own stage."""
    light = LayerSpec(count=6, parameters=10, active_weights=10.0, trained_weights=10.0, pair_numbers=2.0)
    heavy = LayerSpec(count=2, parameters=30, active_weights=30.0, trained_weights=30.0, mixers=1, state_numbers=8.0)
    spec = ModelSpec(layers=(light, heavy), vocab_size=4, hidden_size=2, outside=0, head=0)
    whole = Profile.from_flops(spec, flops_per_second=1.0)
    stages = [whole.of_stage(stage, 2) for stage in (0, 1)]
    assert [stage.spec.layers for stage in stages] == [(light,), (heavy,)]
    for name in ("rest_forward", "rest_backward"):
        times = [stage.spec.num_layers * getattr(stage, name).linear for stage in stages]
        np.testing.assert_allclose(times, [60 * 2 * (1 + (name == "rest_backward"))] * 2)
    assert stages[0].attention_forward.quadratic == pytest.approx(2.0)
    assert stages[1].attention_forward.quadratic == 0
    assert [stage.state_bytes for stage in stages] == [0, 8 * 4]
    assert sum(stage.spec.num_layers * stage.layer_parameters for stage in stages) == 120
    assert whole.of_stage(0, 1) == whole
    assert replace(spec, layers=(*stages[0].spec.layers, *stages[1].spec.layers)) == spec
