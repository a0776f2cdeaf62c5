"""Fits, profile files, and the shipped profiles against the published figures."""

from dataclasses import astuple, fields, replace
from pathlib import Path

import numpy as np
import pytest

from bytescale.common.errors import ConfigError
from bytescale.config.load import config_to_toml
from bytescale.config.schema import Checkpointing
from bytescale.cost.curve import Curve, fit_curve, relative_errors
from bytescale.cost.gradient_sync import round_seconds
from bytescale.cost.links import Links
from bytescale.cost.model import CostModel
from bytescale.cost.profile import Profile, require_model
from bytescale.cost.profile_file import (
    load_profile,
    save_profile,
    shipped_profiles,
    worst_residual,
)
from tests.helpers.llama import spec_of_llama


def test_fit_recovers_an_exact_curve() -> None:
    tokens = np.array([128, 1024, 8192, 65536])
    truth = Curve(3e-12, 2e-7, 1e-4)
    found = fit_curve(tokens, truth(tokens))
    np.testing.assert_allclose(found(tokens), truth(tokens), rtol=1e-9)
    assert found.quadratic == pytest.approx(truth.quadratic, rel=1e-6)


def test_fit_never_falls_with_length() -> None:
    found = fit_curve([100, 200, 400], [4.0, 3.0, 2.5])
    assert min(found.quadratic, found.linear, found.constant) >= 0


def test_fit_of_one_point_goes_through_it() -> None:
    assert float(fit_curve([512], [2.0])(512)) == pytest.approx(2.0)


def test_fit_refuses_nothing_and_zeros() -> None:
    with pytest.raises(ConfigError, match="0 lengths"):
        fit_curve([], [])
    with pytest.raises(ConfigError, match="above 0"):
        fit_curve([1, 2], [0.0, 1.0])


@pytest.mark.parametrize("name", shipped_profiles())
def test_shipped_profiles_survive_a_round_trip(name: str, tmp_path: Path) -> None:
    profile = load_profile(name)
    save_profile(profile, tmp_path / "again.toml")
    assert load_profile(tmp_path / "again.toml") == profile
    assert config_to_toml(load_profile(tmp_path / "again.toml")) == config_to_toml(profile)


def test_figure_6_is_met_within_four_percent() -> None:
    profile = load_profile("figure-6")
    for curve in ("attention_forward", "rest_forward"):
        points = [point for point in profile.points if point.curve == curve]
        assert len(points) == 6
        errors = relative_errors(getattr(profile, curve), [p.tokens for p in points], [p.value for p in points])
        assert np.abs(errors).max() < 0.04
        assert abs(worst_residual(profile, curve)[0]) == np.abs(errors).max()  # type: ignore[index]


def test_case_study_gives_back_its_published_times() -> None:
    profile = load_profile("case-study")
    assert float(profile.attention_forward(312 * 1024)) / 39 == pytest.approx(0.110)
    links = profile.links
    forward, backward = (
        links.latency_seconds + 8192 * num_bytes / links.inter_node_bytes_per_second
        for num_bytes in (profile.ring_forward_bytes_per_token, profile.ring_backward_bytes_per_token)
    )
    assert 256 * forward == pytest.approx(0.405, rel=0.01)
    assert backward / forward == pytest.approx(2.7)
    assert 0.009 < float(profile.rest_forward(8192)) < 0.010


def test_a_missing_curve_is_named(tmp_path: Path) -> None:
    text = config_to_toml(load_profile("case-study")).replace("[rest_backward]", "[other]")
    (tmp_path / "broken.toml").write_text(text)
    with pytest.raises(ConfigError, match=r"unknown section other.*known: .*rest_backward"):
        load_profile(tmp_path / "broken.toml")


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("[rest_forward]\nquadratic = 0.0", "[rest_forward]\nquadratic = -1.0", "rest_forward.quadratic is -1"),
        ("layer_parameters = 177217536.0\n", "", "lacks layer_parameters"),
        (
            "ring_forward_bytes_per_token = 2048.0",
            "ring_forward_bytes_per_token = 0.0",
            "per_token is 0.*cost nothing",
        ),
        ("backward_seconds = 0.0", "backward_seconds = -1.0", "sequence_backward_seconds is -1.0.*at least 0"),
        ("backward_seconds = 0.0", "seconds = 0.0", "unknown key sequence_seconds"),
        ("name = ", "name ", "not TOML"),
        ("latency_seconds", "latency", "unknown key links.latency"),
    ],
)
def test_broken_files_are_refused(tmp_path: Path, old: str, new: str, message: str) -> None:
    text = config_to_toml(load_profile("case-study"))
    assert old in text
    (tmp_path / "broken.toml").write_text(text.replace(old, new, 1))
    with pytest.raises(ConfigError, match=message):
        load_profile(tmp_path / "broken.toml")


def test_an_unknown_name_lists_the_shipped_profiles() -> None:
    with pytest.raises(ConfigError, match="case-study, figure-6"):
        load_profile("nowhere")


def test_another_model_is_refused_but_not_another_depth() -> None:
    profile = load_profile("case-study")
    require_model(profile, spec_of_llama("7b", intermediate_size=11008, num_hidden_layers=2))
    with pytest.raises(ConfigError, match="another model: its hidden_size is 4096, the model's 128"):
        require_model(profile, spec_of_llama("tiny"))
    with pytest.raises(ConfigError, match="another model: its key_numbers is 2048, the model's 8192"):
        require_model(profile, spec_of_llama("7b", intermediate_size=11008, num_key_value_heads=32, head_dim=128))


def test_a_profile_of_a_dense_model_is_not_one_of_a_mixture() -> None:
    mixture, dense = spec_of_llama("tiny-moe"), spec_of_llama("tiny-moe", num_local_experts=0)
    profile = Profile.from_flops(mixture, flops_per_second=1e12)
    require_model(profile, replace(mixture, layers=(replace(mixture.layers[0], trained_weights=0.0),)))
    with pytest.raises(ConfigError, match="its expert_weights is 589824, the model's 0"):
        require_model(profile, dense)


def test_a_profile_speaks_for_other_depths_and_vocabularies() -> None:
    rate = {"flops_per_second": 1e12}
    spec = spec_of_llama("tiny", num_hidden_layers=9, vocab_size=512)
    other = Profile.from_flops(spec_of_llama("tiny"), **rate).scaled_to(spec)
    counted = Profile.from_flops(spec, **rate)
    require_model(other, spec)
    assert other.head_backward.linear == pytest.approx(counted.head_backward.linear)
    assert other.cost_model().token_seconds == pytest.approx(counted.cost_model().token_seconds)


def test_counted_profile_folds_into_the_planners_model() -> None:
    spec = spec_of_llama("7b")
    links = Links(latency_seconds=1e-5, inter_node_bytes_per_second=1e9)
    rates = {"flops_per_second": 100e12, "attention_flops_per_second": 50e12}
    model = Profile.from_flops(spec, tensor_parallel=2, links=links, **rates).cost_model(ranks_per_node=4)
    assert model.attention_seconds_per_pair == pytest.approx(32 * 2 * 4096 * 3.5 / 100e12)
    linear = 32 * 2 * spec.mean("active_weights") + 2 * 128256 * 4096
    assert model.token_seconds == pytest.approx(3 * linear / 200e12)
    # K and V of 8 x 128 elements: 4 KiB in bf16 forward, and 4 + 8 KiB backward, halved by TP.
    assert model.ring_bytes_per_token == 32 * 16 * 1024 / 2
    assert model.ring_step_seconds == pytest.approx(32 * 2e-5)
    assert (model.inter_node_bytes_per_second, model.ranks_per_node, model.micro_batch_seconds) == (1e9, 4, 0.0)


def test_scaling_a_counted_profile_is_counting_the_other_model() -> None:
    rates = {"flops_per_second": 2e14, "attention_flops_per_second": 1e14}
    small, large = spec_of_llama("7b"), spec_of_llama("70b")
    scaled = Profile.from_flops(small, tensor_parallel=2, **rates).scaled_to(large, tensor_parallel=8)
    counted = Profile.from_flops(large, tensor_parallel=8, **rates)
    lengths = np.array([1000, 100_000])
    for name in ("attention_forward", "rest_backward", "head_forward"):
        np.testing.assert_allclose(getattr(scaled, name)(lengths), getattr(counted, name)(lengths))
    assert scaled.ring_backward_bytes_per_token == pytest.approx(counted.ring_backward_bytes_per_token)
    assert scaled.layer_parameters == pytest.approx(counted.layer_parameters)
    kept = replace(counted, activation_bytes=Curve(0.0, 6.0, 0.0))
    assert kept.scaled_to(large, tensor_parallel=2).activation_bytes.linear == 24.0


def assert_equal_costs(found: CostModel, wanted: CostModel) -> None:
    """Equal but for rounding."""
    for spec in fields(wanted):
        if spec.name == "passes":
            assert [astuple(one) for one in found.passes] == [pytest.approx(astuple(one)) for one in wanted.passes]
        else:
            assert getattr(found, spec.name) == pytest.approx(getattr(wanted, spec.name)), spec.name


@pytest.mark.parametrize("checkpointing", ["none", "attention", "full"])
def test_a_profile_takes_the_terms_of_a_cost_model_and_keeps_how_they_are_shared_out(
    checkpointing: Checkpointing,
) -> None:
    measured = replace(
        load_profile("figure-6"),
        links=Links(intra_node_bytes_per_second=1e9, inter_node_bytes_per_second=5e8, node_bytes_per_second=4e8),
    )
    counted = Profile.from_flops(
        spec_of_llama("tiny"), flops_per_second=1e11
    )  # has no constants, and links without a limit
    for profile in (replace(measured, checkpointing=checkpointing), replace(counted, checkpointing=checkpointing)):
        own = profile.cost_model(ranks_per_node=2)
        same = profile.with_costs(own)
        assert_equal_costs(same.cost_model(ranks_per_node=2), own)
        other = replace(
            own,
            attention_seconds_per_pair=3 * own.attention_seconds_per_pair,
            token_seconds=0.5 * own.token_seconds,
            micro_batch_seconds=4e-3,
            ring_message_seconds=1e-3,
        )
        changed = profile.with_costs(other)
        assert_equal_costs(changed.cost_model(ranks_per_node=2), other)
        for name in ("attention_forward", "attention_backward"):
            assert getattr(changed, name).quadratic == pytest.approx(3 * getattr(profile, name).quadratic)
        for name in ("rest_forward", "rest_backward", "head_forward", "head_backward"):
            assert getattr(changed, name).linear == pytest.approx(0.5 * getattr(profile, name).linear)


def test_experts_in_parallel_are_messages_and_no_gathers() -> None:
    """K rows of a token go to other ranks and back, in forward and in backward, but those whose expert is at home."""
    spec, links = spec_of_llama("mixtral-8x7b"), Links(intra_node_bytes_per_second=2e11, node_bytes_per_second=2e11)
    profile = Profile.from_flops(spec, flops_per_second=4e14, links=links)
    assert profile.with_parallel_experts(domain=1) == profile
    ours = profile.with_parallel_experts(domain=4)
    added = ours.cost_model().token_seconds - profile.cost_model().token_seconds
    assert added == pytest.approx(spec.num_layers * 4 * 2 * 4096 * 2 * 3 / 4 / 2e11)
    experts = spec.num_layers * 3 * 8 * 14336 * 4096
    saved = [sum(round_seconds(one, domain=4, ranks_per_node=8)) for one in (profile, ours)]
    gathers = 2 - 1 / spec.num_layers  # the last layer stays open until backward comes
    assert saved[0] - saved[1] == pytest.approx(experts * (2 * gathers + 4) * 3 / 4 / 2e11)
