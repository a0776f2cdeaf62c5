"""Whole runs have the same losses under every planner, on every number of ranks, and after any interruption."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
import pytest

from bytescale.common.errors import CheckpointError, ConfigError
from bytescale.config.schema import PlannerConfig
from bytescale.train.loop.trainer import train
from bytescale.train.reporting.metrics import NonFiniteError
from tests.helpers.effort import one_of
from tests.train.runs import (
    interrupt,
    losses,
    metrics,
    on_ranks,
    run,
    small_run,
    with_shape,
    with_trainer,
    write_corpus,
)

GOLDEN = Path(__file__).with_name("golden_losses.json")

# Ranks and planners change the order of fp32 sums, 1e-7 each; a hundred AdamW steps amplify that.
# A token lost, doubled or mislabelled in one step moves its loss by more than 1e-2.
CURVE_TOLERANCE = 2e-3


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("data") / "corpus")


@pytest.mark.parametrize(
    ("planner", "num_ranks", "steps"),
    one_of(
        [
            ("adaptive", 4, 10),
            *product(("adaptive",), (1, 2, 4), (100,)),
            *product(("static", "naive", "greedy", "paper"), (2, 4), (30,)),
        ],
        ("adaptive", 4, 10),
    ),
)
def test_losses_follow_the_golden_curve(corpus: Path, tmp_path: Path, planner: str, num_ranks: int, steps: int) -> None:
    config = on_ranks(small_run(corpus, tmp_path / "run", steps=100), num_ranks, 256 if num_ranks == 1 else 128)
    config = replace(config, planner=PlannerConfig(name=planner))  # type: ignore[arg-type]
    if steps < 100:
        interrupt(config, after_step=steps + 1)  # it dies before it writes that step down
    else:
        run(config)
    curve = losses(tmp_path / "run")
    golden = json.loads(GOLDEN.read_text(encoding="utf-8"))["losses"]
    assert len(curve) == steps
    np.testing.assert_allclose(curve, golden[:steps], rtol=CURVE_TOLERANCE)
    assert curve[-1] < 0.6 * curve[0]


def test_short_documents_send_no_attention_traffic_and_long_ones_do(corpus: Path, tmp_path: Path) -> None:
    run(on_ranks(small_run(corpus, tmp_path / "narrow", steps=5), 2, capacity_tokens=128))
    lines = metrics(tmp_path / "narrow")
    shared = [any(int(degree) > 1 for degree in line["group_sizes"]) for line in lines]
    assert any(shared)
    assert [line["attention_bytes_sent"] > 0 for line in lines] == shared


def test_resume_on_the_same_ranks_is_exact(corpus: Path, tmp_path: Path) -> None:
    config = on_ranks(small_run(corpus, tmp_path / "whole", steps=5), 2)
    whole = run(config)
    parts = with_trainer(config, run_dir=str(tmp_path / "parts"))
    interrupt(parts, after_step=4)
    assert run(with_trainer(parts, resume=True)) == whole


@pytest.mark.exhaustive  # meshes and folders go on on other ranks in `make test`
def test_resume_on_other_ranks_gives_the_same_losses(corpus: Path, tmp_path: Path) -> None:
    config = small_run(corpus, tmp_path / "whole", steps=6)
    config = replace(config, checkpoint=replace(config.checkpoint, every=2))
    whole = run(on_ranks(config, 2))
    parts = with_trainer(config, run_dir=str(tmp_path / "parts"))
    interrupt(on_ranks(parts, 4, 128), after_step=3)
    interrupt(on_ranks(with_trainer(parts, resume=True), 2), after_step=5)
    final = run(on_ranks(with_trainer(parts, resume=True), 3))
    # Fewer steps than the golden curve, hence less amplification of the order of sums.
    np.testing.assert_allclose(final, whole, rtol=1e-4)


def test_metrics_and_run_folder(corpus: Path, tmp_path: Path) -> None:
    run(on_ranks(small_run(corpus, tmp_path / "run", steps=4), 2))
    folder = tmp_path / "run"
    lines = metrics(folder)
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    for line in lines:
        assert line["num_tokens"] <= 640
        assert line["tokens_per_second"] > 0
        assert line["model_flops_per_second"] > 0
        assert line["mfu"] is None  # nobody knows the peak of this CPU
        assert line["imbalance"] >= 1
        assert 0 <= line["waiting_share"] <= 1
    assert sorted(path.name for path in (folder / "plans").iterdir()) == [f"step-{n:06d}.npz" for n in (1, 2, 3, 4)]
    assert sorted(path.name for path in (folder / "checkpoints").iterdir()) == ["step-000003", "step-000004"]
    assert "context_length = 256" in (folder / "config.toml").read_text(encoding="utf-8")
    # An untrained model knows nothing: ln(vocabulary), 257 byte tokens rounded up to 320.
    assert losses(folder)[0] == pytest.approx(np.log(320), rel=0.05)


def test_tensorboard_events_hold_the_losses(corpus: Path, tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run(small_run(corpus, tmp_path / "run", steps=3, trackers=("tensorboard",)))
    events = EventAccumulator(str(tmp_path / "run" / "tensorboard")).Reload()
    assert [event.step for event in events.Scalars("loss")] == [1, 2, 3]
    np.testing.assert_allclose([event.value for event in events.Scalars("loss")], losses(tmp_path / "run"), rtol=1e-6)


def test_a_batch_without_any_target_changes_nothing_but_time(tmp_path: Path) -> None:
    """Documents cut to their first token: nothing to predict, and no division by zero."""
    corpus = write_corpus(tmp_path / "corpus")
    config = small_run(corpus, tmp_path / "run", steps=2)
    config = replace(config, data=replace(config.data, context_length=1, over_length="truncate", batch_tokens=8))
    assert run(on_ranks(config, 2)) == [0.0, 0.0]


def test_a_run_folder_is_never_written_over(corpus: Path, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "notes.txt").write_text("mine", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"run folder .* exists .*To fix: continue it with"):
        train(small_run(corpus, tmp_path / "run"), print_line=lambda line: None)


def test_a_checkpoint_of_another_model_is_refused(corpus: Path, tmp_path: Path) -> None:
    config = small_run(corpus, tmp_path / "run", steps=1)
    run(config)
    other = with_shape(with_trainer(config, resume=True, steps=2), num_hidden_layers=3)
    with pytest.raises(CheckpointError, match=r"another model \(num_hidden_layers 2 there, 3 here\)"):
        train(other, print_line=lambda line: None)


def test_a_changed_corpus_is_refused(tmp_path: Path) -> None:
    corpus = write_corpus(tmp_path / "corpus")
    config = small_run(corpus, tmp_path / "run", steps=1)
    run(config)
    (corpus / "000.txt").write_text("something else", encoding="utf-8")
    with pytest.raises(CheckpointError, match="made with data corpus"):
        train(with_trainer(config, resume=True, steps=2), print_line=lambda line: None)


def test_a_loss_that_is_no_number_stops_the_run_before_the_update(corpus: Path, tmp_path: Path) -> None:
    config = small_run(corpus, tmp_path / "run", steps=6)
    config = replace(config, optimizer=replace(config.optimizer, lr=1e30, clip_grad_norm=0.0, warmup_steps=0))
    with pytest.raises(NonFiniteError, match=r"Step \d: loss is .*To fix: lower optimizer.lr"):
        train(config, print_line=lambda line: None)


def test_z_loss_raises_the_loss_by_its_weight(corpus: Path, tmp_path: Path) -> None:
    """In the first step, from equal weights: the mean of squared log-sum-exps, times the weight."""
    plain = run(on_ranks(small_run(corpus, tmp_path / "plain", steps=2), 2))
    config = on_ranks(small_run(corpus, tmp_path / "z", steps=2), 2)
    with_z = run(replace(config, optimizer=replace(config.optimizer, z_loss=0.1)))
    log_vocabulary = np.log(320)  # logits are nearly 0 at first: log-sum-exp is that of 320 zeros
    assert with_z[0] - plain[0] == pytest.approx(0.1 * log_vocabulary**2, rel=0.05)
