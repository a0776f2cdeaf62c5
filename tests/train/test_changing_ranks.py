"""Ranks that die inside a run, and new ones that come: losses, rows and tokens are those of one undisturbed process."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

import bytescale.train.launch.torchrun as torchrun
import bytescale.train.loop.trainer as trainer
from bytescale.checkpoint.checkpointer import Checkpointer
from bytescale.common.errors import ConfigError
from bytescale.config.load import config_to_toml
from bytescale.config.schema import Config
from bytescale.config.validate import validate
from bytescale.runtime.executor import Executor
from bytescale.runtime.optimizer.copies import StateCopies
from bytescale.runtime.optimizer.sharded_optimizer import ShardedOptimizer
from bytescale.train.changing import JOINS
from bytescale.train.loop.evaluation import Evaluation
from tests.helpers.command import Command
from tests.helpers.effort import one_of
from tests.train.runs import losses, metrics, small_run, with_trainer, write_corpus

PHASES: Mapping[str, tuple[Any, str, bool]] = {
    "begin": (trainer, "train_step", False),
    "passes": (Executor, "run", True),
    "norm": (ShardedOptimizer, "reduce_gradients", True),
    "update": (ShardedOptimizer, "update", False),
    "copy": (StateCopies, "keep", True),
    "row": (trainer, "train_step", True),
    "evaluation": (Evaluation, "run", True),
    "checkpoint": (Checkpointer, "save", True),
}
"""Where a rank dies: at a function, before or behind it."""


def dies(
    plan: Mapping[int, tuple[int, str]],
    how: Callable[[], object] = lambda: os.kill(os.getpid(), 9),
    *,
    full_at: tuple[int, int] = (0, 0),
) -> Callable[[], None]:
    """Makes ranks die: of each a step, from which on, and a phase. Ranks are copies of the process that calls it.

    ``full_at``: a step, and how many ranks there are behind it at least: the first one waits for one that comes.
    """
    step_now = [0]

    def watch(phase: str) -> None:
        owner, name, is_behind = PHASES[phase]
        original = getattr(owner, name)

        def watched(*arguments: Any, **options: Any) -> Any:
            if owner is trainer:
                job, step_now[0] = arguments[:2]
                until = time.monotonic() + 60.0
                is_short = step_now[0] == full_at[0] and job.ranks.world.size < full_at[1] and job.ranks.is_first
                while is_short and not job.changing.num_waiting() and time.monotonic() < until:
                    time.sleep(0.05)
            step, where = plan.get(int(os.environ.get("RANK", "-1")), (0, ""))
            is_due = where == phase and step_now[0] >= step and JOINS not in os.environ
            if is_due and not is_behind:
                how()
            result = original(*arguments, **options)
            if is_due and is_behind:
                how()
            return result

        setattr(owner, name, watched)

    def prepare() -> None:
        for phase in PHASES:
            watch(phase)
        torchrun._SETTLE_SECONDS = 0.3

    return prepare


def changing_run(tmp_path: Path, name: str, *, ranks: int, steps: int, **changes: Any) -> Config:
    corpus = tmp_path / "corpus"
    if not corpus.exists():
        write_corpus(corpus)
    config = with_trainer(
        small_run(corpus, tmp_path / name), steps=steps, dtype="fp64", ranks=ranks, elastic=ranks > 1,
        timeout_seconds=30.0, **changes,
    )  # fmt: skip
    return replace(
        config,
        data=replace(config.data, record=True),
        optimizer=replace(config.optimizer, lr=2e-3),
        eval=replace(config.eval, every=4, sources=config.data.sources),
    )


def trained(config: Config, *words: str, before: Callable[[], object] = list, seconds: float = 120.0) -> str:
    """Run the command to its end. Returns what it printed."""
    file = Path(config.trainer.run_dir).with_suffix(".toml")
    file.write_text(config_to_toml(config), encoding="utf-8")
    command = Command(["train", str(file), *words], before)
    printed, errors = command.communicate(seconds)
    assert command.returncode == 0, printed + errors
    return printed


def assert_as_undisturbed(run: Path, alone: Path) -> None:
    """Every step has one row, evaluations too, with the same loss; and every token was trained on once."""
    assert [row["step"] for row in metrics(run)] == [row["step"] for row in metrics(alone)]
    assert losses(run) == pytest.approx(losses(alone), rel=0, abs=1e-10)
    evaluated = [
        [(row["step"], row["loss"]) for row in map(json.loads, (one / "evaluations.jsonl").read_text().splitlines())]
        for one in (run, alone)
    ]
    assert [step for step, _ in evaluated[0]] == [step for step, _ in evaluated[1]]
    assert [loss for _, loss in evaluated[0]] == pytest.approx([loss for _, loss in evaluated[1]], rel=0, abs=1e-10)
    audit = Command(["data", "audit", str(run)])
    printed, errors = audit.communicate(60.0)
    assert audit.returncode == 0, printed + errors


def test_a_run_outlives_its_first_rank_and_takes_in_a_new_one(tmp_path: Path) -> None:
    alone = changing_run(tmp_path, "alone", ranks=1, steps=9)
    trained(alone)
    several = changing_run(tmp_path, "several", ranks=3, steps=9)
    printed = trained(several, "--max-restarts", "1", before=dies({0: (3, "update")}, full_at=(6, 3)))
    assert "rank 0 is gone, and 2 go on behind step 2" in printed
    assert re.search(r"^ranks   3 go on behind step [2-6]", printed, re.MULTILINE), printed
    assert_as_undisturbed(tmp_path / "several", tmp_path / "alone")


SHARED = {"shard": "parameters", "domain": 2}


@pytest.mark.parametrize(
    ("mesh", "rank", "phase"),
    one_of(
        [
            ({"tp": 2}, 3, "update"),
            ({"tp": 2}, 0, "passes"),
            ({"pp": 2}, 1, "passes"),
            ({"pp": 2}, 2, "begin"),
            *((SHARED, rank, phase) for rank in (0, 3) for phase in ("passes", "norm", "update", "copy")),
        ],
        (SHARED, 0, "update"),
    ),
)
def test_a_whole_copy_of_the_model_goes_on(tmp_path: Path, mesh: dict[str, Any], rank: int, phase: str) -> None:
    """Of two pairs of ranks one loses a rank. The other rank of it waits, and goes on with one that comes."""
    trained(changing_run(tmp_path, "alone", ranks=1, steps=9))
    several = changing_run(tmp_path, "several", ranks=4, steps=9, **mesh)
    printed = trained(several, "--max-restarts", "1", before=dies({rank: (3, phase)}, full_at=(6, 4)))
    assert re.search(rf"rank {rank} is gone, and 2 go on behind step [12], .* later; 1 more waits", printed), printed
    assert re.search(r"^ranks   4 go on behind step [2-6]", printed, re.MULTILINE), printed
    assert_as_undisturbed(tmp_path / "several", tmp_path / "alone")


@pytest.mark.exhaustive
def test_what_is_left_of_two_copies_of_the_model_makes_one(tmp_path: Path) -> None:
    """Of three pairs of ranks two lose a rank each. Nobody waits at the end, and the run ends."""
    trained(changing_run(tmp_path, "alone", ranks=1, steps=12))
    several = changing_run(tmp_path, "several", ranks=6, steps=12, tp=2)
    printed = trained(several, before=dies({0: (3, "passes"), 3: (7, "update")}))
    assert re.search(r"rank 0 is gone, and 4 go on behind step 2, .* later; 1 more waits", printed), printed
    assert re.search(r"rank \d is gone, and 4 go on behind step [56], [\d.]+ s later$", printed, re.MULTILINE), printed
    assert_as_undisturbed(tmp_path / "several", tmp_path / "alone")


@pytest.mark.exhaustive
@pytest.mark.parametrize("experts", ["parallel", "gathered"])
def test_domains_with_experts_lose_ranks_twice(tmp_path: Path, experts: str) -> None:
    """Of three domains two lose a rank each, and one is made of what is left. Experts compute in fp32."""

    def with_experts(config: Config) -> Config:
        mixture = {**config.model.config, "num_local_experts": 4, "num_experts_per_tok": 2}
        return replace(config, model=replace(config.model, preset="tiny-moe", config=mixture))

    shared = changing_run(tmp_path, "several", ranks=6, steps=12, shard="parameters", domain=2, experts=experts)
    shared = with_trainer(with_experts(shared), dtype="fp32")
    printed = trained(shared, before=dies({1: (3, "passes"), 5: (7, "update")}))
    assert re.search(r"rank 1 is gone, and 4 go on behind step 2, .* later; 1 more waits", printed), printed
    assert re.search(r"rank \d is gone, and 4 go on behind step [56], [\d.]+ s later$", printed, re.MULTILINE), printed
    trained(with_trainer(with_experts(changing_run(tmp_path, "alone", ranks=1, steps=12)), dtype="fp32"))
    assert losses(tmp_path / "several") == pytest.approx(losses(tmp_path / "alone"), rel=2e-5)


@pytest.mark.exhaustive
@pytest.mark.parametrize("phase", PHASES)
def test_a_rank_dies_in_any_phase(tmp_path: Path, phase: str) -> None:
    trained(changing_run(tmp_path, "alone", ranks=1, steps=12))
    for rank in (0, 2):
        name = f"without-{rank}"
        printed = trained(changing_run(tmp_path, name, ranks=4, steps=12), before=dies({rank: (4, phase)}))
        assert f"rank {rank} is gone" in printed
        assert_as_undisturbed(tmp_path / name, tmp_path / "alone")


@pytest.mark.exhaustive
def test_states_that_are_lost_come_from_the_checkpoint(tmp_path: Path) -> None:
    """Rank 2 keeps the copies of rank 1, which kills both."""
    trained(changing_run(tmp_path, "alone", ranks=1, steps=12))

    def kill_both() -> None:
        for one in psutil.Process(os.getppid()).children():
            if one.name() == "bytescale-2":
                one.kill()
        os.kill(os.getpid(), signal.SIGKILL)

    config = changing_run(tmp_path, "several", ranks=4, steps=12)
    printed = trained(config, before=dies({1: (8, "passes")}, kill_both))
    assert "states of rank 1 are lost" in printed
    assert re.search("resuming after step [36] ", printed), printed  # that of step 6 may not have been written yet
    assert_as_undisturbed(tmp_path / "several", tmp_path / "alone")


def fail() -> None:
    raise RuntimeError("CUDA error: an illegal memory access was encountered")


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("how", "seen"), [(fail, "exit code 1"), (lambda: os.kill(os.getpid(), signal.SIGSTOP), "SIGKILL")]
)
def test_a_rank_that_fails_or_stands_still(tmp_path: Path, how: Callable[[], object], seen: str) -> None:
    trained(changing_run(tmp_path, "alone", ranks=1, steps=40))
    config = changing_run(tmp_path, "several", ranks=3, steps=40)
    config = with_trainer(config, timeout_seconds=3.0)
    printed = trained(config, before=dies({1: (4, "passes")}, how))
    assert "rank 1 is gone, and 2 go on behind step 3" in printed
    assert re.search(rf"rank 1 \(pid \d+\) has ended \({seen}\); the others go on", printed), printed
    assert_as_undisturbed(tmp_path / "several", tmp_path / "alone")


@pytest.mark.exhaustive
def test_many_deaths_at_any_moment(tmp_path: Path) -> None:
    """Ranks are killed from outside, each when a step was made since the last death; as many come."""
    trained(changing_run(tmp_path, "alone", ranks=1, steps=60), seconds=300.0)
    config = with_trainer(changing_run(tmp_path, "several", ranks=6, steps=60), timeout_seconds=15.0)
    file = tmp_path / "several.toml"
    file.write_text(config_to_toml(config), encoding="utf-8")
    command, chance, kills, rows = Command(["train", str(file), "--max-restarts", "12"]), random.Random(5), 0, 1
    until = time.monotonic() + 700.0
    while command.poll() is None and time.monotonic() < until:
        time.sleep(0.05)
        seen = len(re.findall(r"^\d+/60 ", command._printed()[0], re.MULTILINE))
        if kills == 12 or seen <= rows:
            continue
        with suppress(psutil.Error):  # one has ended meanwhile
            time.sleep(chance.choice([0.0, 0.1, 0.3, 0.6, 1.0]))
            ranks = [one for one in psutil.Process(command.pid).children() if one.status() != psutil.STATUS_ZOMBIE]
            if len(ranks) > 2:
                ranks[chance.randrange(len(ranks))].kill()
                kills, rows = kills + 1, seen
    printed, errors = command.communicate(30.0)
    assert command.returncode == 0, printed + errors
    assert kills >= 6  # the steps of a fast machine are over before all 12
    assert_as_undisturbed(tmp_path / "several", tmp_path / "alone")


@pytest.mark.exhaustive
def test_a_rank_that_ray_feeds_dies(tmp_path: Path) -> None:
    """Ray's servers live on. Ranks are processes of their own here, and the first is killed from outside."""
    trained(changing_run(tmp_path, "alone", ranks=1, steps=60))
    config = changing_run(tmp_path, "several", ranks=3, steps=60)
    config = replace(config, data=replace(config.data, loader="ray", servers=1))
    file, killed = tmp_path / "several.toml", list[int]()
    file.write_text(config_to_toml(config), encoding="utf-8")
    command = Command(["train", str(file), "--max-restarts", "1"])
    until = time.monotonic() + 200.0
    while command.poll() is None and time.monotonic() < until and not killed:
        time.sleep(0.05)
        if re.search(r"^4/60 ", command._printed()[0], re.MULTILINE):
            (victim,) = [p for p in psutil.Process(command.pid).children() if p.environ().get("RANK") == "0"]
            killed.append(victim.pid)
            victim.kill()
    printed, errors = command.communicate(200.0)
    assert command.returncode == 0, printed + errors
    assert re.search(r"rank 0 is gone, and 2 go on behind step \d+,", printed), printed
    assert_as_undisturbed(tmp_path / "several", tmp_path / "alone")


def test_domains_need_a_size_that_stays(tmp_path: Path) -> None:
    config = changing_run(tmp_path, "refused", ranks=4, steps=2, shard="parameters")
    with pytest.raises(ConfigError, match=r"parallel.elastic beside .*where parallel.domain is not a number"):
        validate(config)
