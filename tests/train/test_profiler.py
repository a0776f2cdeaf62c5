"""The profiler on a tiny model: planning can read its file, and all ranks make the same plan from it."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from bytescale.cli.main import main
from bytescale.common.errors import ConfigError
from bytescale.config.resolve import resolve_model
from bytescale.config.schema import Config, CostConfig, MemoryConfig, ModelConfig
from bytescale.cost.assumed import MeshCosts
from bytescale.cost.links import Links
from bytescale.cost.profile import Point, Profile
from bytescale.cost.profile_file import fit_warnings, load_profile, save_profile
from bytescale.parity import small_model
from bytescale.runtime.group import RankGroup
from bytescale.train.loop.trainer import train
from bytescale.train.parts.describe import layers_to_measure, spec_of_content
from bytescale.train.profiling import links, measurer
from bytescale.train.profiling.links import measure_links
from bytescale.train.profiling.measurer import Measurer
from bytescale.train.profiling.profiler import CURVES, measure_profile
from tests.helpers.ranks import run_ranks
from tests.train.runs import SHAPE, on_ranks, run, small_run, with_shape, with_trainer, write_corpus

MODEL = ModelConfig(preset="tiny", config={**SHAPE, "vocab_size": 320})


def measurer_of(model: ModelConfig = MODEL) -> Measurer:
    cpu = torch.device("cpu")
    return Measurer(layers_to_measure(Config(model=model), cpu, torch.float32)[0], cpu, torch.float32)


LONG = 1e6
"""Seconds that measuring may take: so long that no length is left out, however slow the machine is."""


@pytest.fixture(scope="module", autouse=True)
def short_measurements() -> Iterator[None]:
    """What is measured stays, for a tenth of the time: the tests are about the order of sizes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(measurer, "MIN_SECONDS", measurer.MIN_SECONDS / 10)
        for name in ("MESSAGE_SECONDS", "WINDOW_SECONDS"):
            patch.setattr(links, name, getattr(links, name) / 10)
        for name in ("SMALL_ROUNDS", "RING_ROUNDS"):
            patch.setattr(links, name, getattr(links, name) // 5)
        yield


@pytest.fixture(scope="module")
def profile(short_measurements: None) -> Profile:
    return measure_profile(measurer_of(), max_tokens=1024, seconds=LONG)


def test_every_curve_is_measured_and_fitted(profile: Profile) -> None:
    for name in CURVES:
        points = [point for point in profile.points if point.curve == name]
        assert [point.tokens for point in points] == [256, 512, 1024]
        assert all(point.value > 0 for point in points)
        assert float(getattr(profile, name)(512)) > 0
    assert profile.attention_forward.quadratic > 0
    assert profile.sequence_forward_seconds > 0
    assert profile.sequence_backward_seconds > 0
    assert profile.links.device_to_host_bytes_per_second > 1e6
    assert 1e6 < profile.links.host_update_bytes_per_second < 1e13
    assert profile.device == "cpu, float32"


@pytest.mark.exhaustive
def test_recurrences_are_measured_beside_attention_and_indexers_are_refused(tmp_path: Path) -> None:
    for name in ("qwen3_next", "deepseek_v32"):
        small_model(name, dtype=torch.float32).save_pretrained(tmp_path / name)
    measured = measurer_of(ModelConfig(preset=f"hf:{tmp_path / 'qwen3_next'}"))
    measured.measure(64)
    assert all(seconds > 0 for values in measured.sweeps.values() for seconds in values)
    with pytest.raises(ConfigError, match="cannot be profiled: its keys are chosen by an indexer"):
        measurer_of(ModelConfig(preset=f"hf:{tmp_path / 'deepseek_v32'}"))


@pytest.mark.exhaustive
def test_what_the_first_measurement_starts_up_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """A compiler that takes its time would leave a profile of one length."""
    measure, calls = Measurer.measure, []

    def slow_at_first(self: Measurer, tokens: int) -> None:
        if not calls:
            time.sleep(1.0)
        calls.append(tokens)
        measure(self, tokens)

    monkeypatch.setattr(Measurer, "measure", slow_at_first)
    taken = measure_profile(measurer_of(), max_tokens=512, seconds=LONG)
    assert {point.tokens for point in taken.points} == {256, 512}


def test_a_bad_fit_is_named_with_its_worst_point(profile: Profile) -> None:
    other = Point(curve="rest_forward", tokens=512, value=9.0)
    points = tuple(other if (p.curve, p.tokens) == ("rest_forward", 512) else p for p in profile.points)
    warnings = fit_warnings(replace(profile, points=points))
    assert any(line.startswith("rest_forward fits badly: -100% at 512 tokens") for line in warnings)


def test_a_bad_fit_is_named_wherever_it_is_used(
    profile: Profile, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    points = tuple(replace(point, value=9.0) if point.curve == "rest_forward" else point for point in profile.points)
    path, lengths = tmp_path / "bad.toml", tmp_path / "lengths.txt"
    save_profile(replace(profile, points=points, model=MODEL), path)
    lengths.write_text("100 200 300")
    batch = ["--batch.lengths", str(lengths), "--parallel.ranks", "2", "--parallel.capacity-tokens", "512"]
    assert main(["plan", *batch, "--cost.profile", str(path)]) == 0
    assert "rest_forward fits badly: -100% at" in caplog.text
    caplog.clear()
    config = small_run(write_corpus(tmp_path / "data" / "corpus"), tmp_path / "run", steps=1)
    config = replace(config, cost=CostConfig(profile=str(path)))
    train(config, print_line=lambda line: None)
    assert caplog.text.count("rest_forward fits badly: -100% at") == 1


def test_the_head_is_measured_as_it_trains(profile: Profile) -> None:
    """Its forward makes the gradients (some four times the logits' product), its backward scales them."""
    assert float(profile.head_forward(1024)) > 3 * float(profile.head_backward(1024)) > 0


@pytest.mark.exhaustive
def test_all_ranks_measure_together_and_get_the_same_profile() -> None:
    def one_rank(hdp: RankGroup) -> Profile:
        measurer = measurer_of()
        return measure_profile(measurer, max_tokens=512, seconds=LONG, hdp=hdp)

    first, second = run_ranks(2, one_rank)
    assert first == second
    assert [point.tokens for point in first.points if point.curve == "rest_forward"] == [256, 512]
    assert first.links.intra_node_bytes_per_second < 1e12


@pytest.mark.exhaustive
def test_links_between_ranks() -> None:
    def one_rank(hdp: RankGroup) -> Links:
        return measure_links(hdp, measurer_of())

    first, second = run_ranks(2, one_rank)
    assert first == second
    assert 0 <= first.message_seconds < 1
    assert 1e6 < first.intra_node_bytes_per_second < 1e12
    assert 0 <= first.latency_seconds < 1


def test_the_command_writes_a_profile_that_training_takes(tmp_path: Path) -> None:
    """One file for all ranks; a model or dtype that it is not of is refused."""
    corpus = write_corpus(tmp_path / "data" / "corpus")
    out = tmp_path / "tiny.toml"
    model = ["--model.config", *(f"{name}={value}" for name, value in SHAPE.items())]
    assert (
        main(
            [
                "profile",
                "--out",
                str(out),
                "--data.context-length",
                "512",
                "--seconds",
                str(LONG),
                "--trainer.device",
                "cpu",
                *model,
            ]
        )
        == 0
    )
    assert load_profile(out).spec.hidden_size == 32
    config = with_shape(on_ranks(small_run(corpus, tmp_path / "run", steps=2), 2, 128), num_hidden_layers=3)
    config = replace(config, cost=CostConfig(profile=str(out)), memory=MemoryConfig(offload="on", host_gib=0.1))
    assert len(run(config)) == 2
    flat, content = load_profile(out), resolve_model(config.model, tokenizer_vocab_size=300).content
    spec = spec_of_content(content)
    alone, sharded = (MeshCosts(kind="cpu", bytes_per_element=4, tensor_parallel=tp).times(spec, flat) for tp in (1, 2))
    assert alone == flat.scaled_to(spec)
    assert sharded.tensor_parallel == 2
    assert sharded.rest_forward.linear == flat.rest_forward.linear / 2
    wider = with_shape(config, intermediate_size=64)
    with pytest.raises(ConfigError, match="is of another model: its active_weights is 7680, the model's 9216"):
        train(with_trainer(wider, run_dir=str(tmp_path / "wider")), print_line=lambda line: None)
    with pytest.raises(ConfigError, match="was measured on 'cpu, float32', but this run is on 'cpu, float64'"):
        train(with_trainer(config, run_dir=str(tmp_path / "fp64"), dtype="fp64"), print_line=lambda line: None)


def test_numbers_that_make_no_sense_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["profile", "--seconds", "0"]) == 2
    assert "seconds is 0.0. To fix: use a number above 0" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("out", "message"),
    [
        ("missing/x.toml", "is not a writable folder. The measurements would be lost"),
        (".", "is no regular file"),
    ],
)
def test_a_place_where_nothing_can_be_written_is_refused_before_measuring(
    out: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["profile", "--out", str(tmp_path / out)]) == 2
    assert message in capsys.readouterr().err


def test_links_inside_and_across_nodes_are_measured_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four ranks that believe to be on two nodes. Each rank's clock jumps with every message across.

    A jump is so much longer than what the machine really takes that the machine's other work does not count.
    """
    slow = threading.local()

    def clock() -> float:
        return time.perf_counter() + getattr(slow, "seconds", 0.0)

    def one_rank(hdp: RankGroup) -> Links:
        start = hdp.exchange.start

        def slow_across(*, send: Tensor, to: int, receive: Tensor, source: int, tag: int) -> object:
            if to // 2 != hdp.rank // 2:
                slow.seconds = getattr(slow, "seconds", 0.0) + 0.2 + send.numel() / 2e4
            return start(send=send, to=to, receive=receive, source=source, tag=tag)

        hdp.exchange.start = slow_across  # type: ignore[method-assign,assignment]
        return measure_links(hdp, measurer_of(), nodes=[5, 5, 9, 9])

    monkeypatch.setattr(links, "time", SimpleNamespace(perf_counter=clock))
    first, *others = run_ranks(4, one_rank)
    assert all(other == first for other in others)
    assert 1e4 < first.inter_node_bytes_per_second < 2e4 < first.intra_node_bytes_per_second
    assert first.inter_node_latency_seconds is not None
    assert first.inter_node_latency_seconds > 0.2
    assert first.node_bytes_per_second == pytest.approx(2 * first.inter_node_bytes_per_second, rel=0.1)
    assert 0 < (first.reduce_bytes_per_second or 0) < 1e12


def test_a_profile_with_all_links_is_read_as_it_was_written(profile: Profile, tmp_path: Path) -> None:
    links = Links(
        inter_node_bytes_per_second=2e6, inter_node_latency_seconds=0.01, node_bytes_per_second=3e6,
        reduce_bytes_per_second=1e6, gather_bytes_per_second=2e6, collective_seconds=0.1,
    )  # fmt: skip
    path = tmp_path / "links.toml"
    for wanted in (links, Links(latency_seconds=1.0)):
        save_profile(replace(profile, links=wanted), path)
        assert load_profile(path).links == wanted
    cost = replace(profile, links=links).cost_model(ranks_per_node=2)
    assert cost.latency_seconds(True) == pytest.approx(2 * 2 * 0.01)
    assert cost.latency_seconds(False) == 0
