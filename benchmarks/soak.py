"""Kills servers, ranks and launcher 50 times in one run, and checks that no token is lost or doubled.

    .venv/bin/python benchmarks/soak.py [--kills 50] [--seed 0]
    .venv/bin/python benchmarks/soak.py --matrix    # each loader, 1 to 8 ranks, one death of each kind

A run on the remote loader is started with enough restarts. At random moments one of its processes gets kill -9,
sometimes while the run is still recovering from the previous kill. A killed launcher is started again with
``--resume``. After the last kill, the run has to end by itself. Every (document, token range) that its ranks were given
is counted, step by step and epoch by epoch (``data.record``). The run is compared with the same run without kills. The
benchmark prints a table and exits with 1 if anything differs.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import string
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

import numpy as np
import psutil

from bytescale.checkpoint.verify import problems_of
from bytescale.common.errors import DataError
from bytescale.config.load import load_config
from bytescale.data.loading.corpus import Corpus, prepare_corpus
from bytescale.data.loading.record import check_record, read_record
from bytescale.data.order.epoch import epoch_order
from bytescale.plan.io import load_plan

CONFIG = """
[model]
preset = "tiny"

[model.config]
num_hidden_layers = 1
hidden_size = 16
num_attention_heads = 2
num_key_value_heads = 1
intermediate_size = 16

[data]
sources = ["{folder}/corpus"]
cache_dir = "{folder}/cache"
context_length = {context}
batch_tokens = 640
loader = "{loader}"
record = true

[parallel]
ranks = {ranks}
capacity_tokens = {capacity}
timeout_seconds = 30.0

[cost]
calibrate = false  # it learns from times, so a run that was killed would plan otherwise than one that was not

[trainer]
device = "cpu"
dtype = "fp32"
run_dir = "{folder}/{name}"
steps = {steps}

[checkpoint]
every = 5
"""
CONTEXT = 256
SHARES = {"server": 24, "rank": 18, "launcher": 8}
RAYS_OWN = ("ray::DashboardAgent", "ray::RuntimeEnvAgent", "/ray/_private/workers/default_worker.py")
RAYS_SECONDS = 90.0
"""Ray itself ends its agents, and workers meant for an actor, within a minute after its head was killed."""


def write_corpus(folder: Path) -> None:
    """Write random letters, so that no two ranges of some length are equal."""
    dice = random.Random(0)
    folder.mkdir()
    for number in range(80):
        letters = dice.choices(string.ascii_lowercase, k=int(dice.lognormvariate(4, 1.3)) + 1)
        (folder / f"{number:03d}.txt").write_text("".join(letters), encoding="utf-8")


def write_config(folder: Path, name: str, loader: str, steps: int, ranks: int = 2) -> Path:
    """Write the config of a run in ``folder/name``. All its ranks together can hold one document of the longest."""
    path = folder / f"{name}.toml"
    capacity = -(-CONTEXT // ranks)
    path.write_text(
        CONFIG.format(
            folder=folder, name=name, loader=loader, steps=steps, ranks=ranks, capacity=capacity, context=CONTEXT
        ),
        encoding="utf-8",
    )
    return path


def start(log: Path, *arguments: str) -> psutil.Popen:
    """Start the real command in the background."""
    with log.open("ab") as file:
        command = [sys.executable, "-m", "bytescale", "train", *arguments]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        return psutil.Popen(command, stdout=file, stderr=subprocess.STDOUT, env=environment)


def kind_of(process: psutil.Process) -> str:
    try:
        title, environment = " ".join(process.cmdline()), process.environ()
    except psutil.Error:
        return ""
    if title.startswith("ray::DataServer"):
        return "server"
    return "rank" if "LOCAL_RANK" in environment and not title.startswith("ray::") else ""


def name_of(process: psutil.Process) -> str:
    """Empty when it is gone."""
    try:
        return " ".join(process.cmdline()[:6]).strip() if process.status() != psutil.STATUS_ZOMBIE else ""
    except psutil.Error:
        return ""


def is_rays_own(name: str) -> bool:
    return any(own in name for own in RAYS_OWN)


def num_lines(path: Path) -> int:
    return path.read_text(encoding="utf-8").count("\n") if path.exists() else 0


@dataclass
class Storm:
    """A run whose processes are killed."""

    folder: Path
    steps: int
    options: Sequence[str]
    deadline: float
    name: str = "ray"
    loader: str = "ray"
    ranks: int = 2
    launcher: psutil.Popen = None
    family: set[psutil.Process] = field(default_factory=set)
    killed: Counter[str] = field(default_factory=Counter)
    recovery_seconds: dict[str, list[float]] = field(default_factory=dict)
    mending: tuple[str, int, float] | None = None
    """What was killed last, after how many steps, and when."""
    checkpoints_loaded: int = 0
    survivors: list[str] = field(default_factory=list)
    """Processes that still ran 20 s after their launcher had been killed."""

    @property
    def run(self) -> Path:
        return self.folder / self.name

    @property
    def log(self) -> Path:
        """Return the output of the command."""
        return self.folder / f"{self.name}.log"

    def begin(self) -> None:
        config = str(write_config(self.folder, self.name, self.loader, self.steps, self.ranks))
        again = ("--resume", str(self.run)) if (self.run / "config.toml").exists() else (config,)
        self.launcher = start(self.log, *again, *self.options)

    def rage(self, kinds: Sequence[str], dice: random.Random, *, part: float = 0.95, in_a_row: float = 0.3) -> None:
        """Kill one process of each of ``kinds`` in the first ``part`` of the steps.

        Most kills come after a random step. A share of ``in_a_row`` comes while the run recovers from the last kill.
        """
        for kind, step in zip(kinds, sorted(dice.sample(range(2, int(part * self.steps)), len(kinds))), strict=True):
            in_recovery = dice.random() < in_a_row and self.killed
            pause, until = dice.uniform(0, 6.0 if in_recovery else 0.3), 0.0
            while not until or time.monotonic() < until:
                if not until and (in_recovery or self.steps_done() >= step):
                    until = time.monotonic() + pause
                self.look()
            self.kill(kind, dice)

    def kill(self, kind: str, dice: random.Random) -> None:
        while not (candidates := [self.launcher] if kind == "launcher" else self.members(kind)):
            self.look()
        self.mending = (kind, self.steps_done(), time.monotonic())
        dice.choice(sorted(candidates, key=lambda process: process.pid)).kill()
        self.killed[kind] += 1
        if kind == "launcher":
            self.launcher.wait()
            self.survivors += [name for name in self.alive(20.0) if not is_rays_own(name)]
            self.check_checkpoints()
            self.mending = (kind, self.steps_done(), self.mending[2])  # the ranks had time to go on
            self.begin()

    def steps_done(self) -> int:
        return num_lines(self.run / "metrics.jsonl")

    def look(self) -> None:
        assert time.monotonic() < self.deadline, f"hung: {self.steps_done()} of {self.steps} steps, {self.killed}"
        assert self.launcher.poll() is None, f"the run ended after {sum(self.killed.values())} kills"
        self.family.update(self.launcher.children(recursive=True))
        if self.mending and self.steps_done() > self.mending[1]:
            kind, _, killed_at = self.mending
            self.recovery_seconds.setdefault(kind, []).append(time.monotonic() - killed_at)
            self.mending = None
        time.sleep(0.05)

    def members(self, kind: str) -> list[psutil.Process]:
        return [process for process in self.launcher.children(recursive=True) if kind_of(process) == kind]

    def check_checkpoints(self) -> None:
        """Check that every folder named as a checkpoint loads completely."""
        for path in (self.run / "checkpoints").glob("step-*"):
            assert problems_of(path) == []
            self.checkpoints_loaded += 1

    def alive(self, seconds: float) -> list[str]:
        """Return the processes of this run that are left when only Ray's own remain, or after this many seconds."""
        deadline = time.monotonic() + seconds
        while (names := [name for name in map(name_of, self.family) if name]) and time.monotonic() < deadline:
            if seconds < RAYS_SECONDS and all(map(is_rays_own, names)):
                break
            time.sleep(0.1)
        return names

    def end_of_run(self) -> int | None:
        """Return the exit code of the run, or None if it did not end in time."""
        while self.launcher.poll() is None and time.monotonic() < self.deadline:
            self.family.update(self.launcher.children(recursive=True))
            time.sleep(0.1)
        return self.launcher.poll()

    def end(self) -> None:
        for process in self.family | ({self.launcher} if self.launcher else set()):
            if process.is_running():
                process.kill()


def times_given(run: Path, corpus: Corpus, steps: int) -> np.ndarray:
    """Return ``[number of tokens]`` how often each token of the corpus was given to a rank."""
    known = corpus.samples
    before = np.cumsum(known.length) - known.length  # of the tokens of all samples, one sample behind the other
    counts = np.zeros(known.num_tokens + 1, dtype=np.int64)
    for samples, starts, stops, _ in (segments.T for segments, _ in read_record(run / "data", steps)):
        first = before[np.searchsorted(known.name, samples)]
        np.add.at(counts, first + starts, 1)
        np.add.at(counts, first + stops, -1)
    return np.cumsum(counts)[:-1]


def times_expected(corpus: Corpus, state: dict) -> np.ndarray:
    """Return the counts that follow from the seed: ``epoch`` times all tokens, and the start of the last epoch."""
    known = corpus.samples
    before = np.cumsum(known.length) - known.length
    counts = np.full(known.num_tokens, state["epoch"], dtype=np.int64)
    for sample in epoch_order(len(known), state["shuffle_seed"], state["epoch"])[: state["position"]]:
        counts[before[sample] :][: known.length[sample]] += 1
    return counts


def outcome(run: Path) -> tuple[list[int], list[float], list[int], dict]:
    """Return the steps, losses, plan fingerprints and last data position of a run."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    digests = [load_plan(path).digest() for path in sorted((run / "plans").glob("step-*.npz"))]
    last = sorted((run / "checkpoints").glob("step-*"))[-1]
    state = json.loads((last / "run_state.json").read_text(encoding="utf-8"))
    return [line["step"] for line in lines], [line["loss"] for line in lines], digests, state["sampler"]


def kinds_to_kill(number: int, dice: random.Random) -> list[str]:
    """Draw kinds in random order, each with its share and at least once if ``number`` allows."""
    kinds = [kind for kind, share in SHARES.items() for _ in range(max(1, round(share * number / 50)))]
    kinds += ["server"] * (number - len(kinds))
    dice.shuffle(kinds)
    return kinds[:number]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--limit-seconds", type=float, default=1500.0)
    parser.add_argument("--matrix", action="store_true", help="a short run for each loader and 1 to 8 ranks")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="bytescale-soak-") as name:
        return matrix(Path(name), options) if options.matrix else soak(Path(name), options)


def soak(folder: Path, options: argparse.Namespace) -> int:
    dice = random.Random(options.seed)
    kinds = kinds_to_kill(options.kills, dice)
    write_corpus(folder / "corpus")
    peaceful = start(folder / "local.log", str(write_config(folder, "local", "local", options.steps)))
    assert peaceful.wait(options.limit_seconds) == 0, (folder / "local.log").read_text(errors="replace")[-3000:]
    started = time.monotonic()
    storm = Storm(
        folder=folder,
        steps=options.steps,
        options=("--max-restarts", str(options.kills)),
        deadline=started + options.limit_seconds,
    )
    try:
        storm.begin()
        storm.rage(kinds, dice)
        print(f"{storm.steps_done()} of {options.steps} steps at the last kill, {time.monotonic() - started:.0f} s")
        code, seconds = storm.end_of_run(), time.monotonic() - started
        orphans = storm.alive(RAYS_SECONDS)
        checks = examine(folder, storm, code, orphans, kinds)
    except AssertionError:
        print(storm.log.read_text(encoding="utf-8", errors="replace")[-3000:])
        raise
    finally:
        storm.end()
    print(
        f"{dict(storm.killed)} killed, {options.steps} steps in {seconds:.0f} s (limit {options.limit_seconds:.0f} s)"
    )
    for kind, times in storm.recovery_seconds.items():
        print(f"  a step on after the death of a {kind}: median {median(times):.1f} s, worst {max(times):.1f} s")
    for what, holds in checks.items():
        print(f"  {'yes' if holds else 'NO '}  {what}")
    if not all(checks.values()):
        print(storm.log.read_text(encoding="utf-8", errors="replace")[-3000:])
    return 0 if all(checks.values()) else 1


def matrix(folder: Path, options: argparse.Namespace) -> int:
    """Run each loader on 1 to 8 ranks, kill a server and a rank in the middle, and count tokens."""
    dice, steps = random.Random(options.seed), 160
    write_corpus(folder / "corpus")
    config = write_config(folder, "peace", "local", steps, 1)
    assert start(folder / "peace.log", str(config)).wait(options.limit_seconds) == 0
    corpus, peace = prepare_corpus(load_config(config).data), outcome(folder / "peace")
    print(
        "loader  ranks  killed                         attempts  tokens  lost  doubled  worst loss  seconds", flush=True
    )
    all_right = True
    for loader, kinds in (("local", ["rank"]), ("ray", ["server", "rank"])):
        for ranks in range(1, 9):
            started = time.monotonic()
            storm = Storm(
                folder=folder,
                steps=steps,
                options=("--max-restarts", "3"),
                deadline=started + 400,
                name=f"{loader}-{ranks}",
                loader=loader,
                ranks=ranks,
            )
            try:
                storm.begin()
                storm.rage(dice.sample(kinds, len(kinds)), dice, part=0.5, in_a_row=0.0)
                code = storm.end_of_run()
            except AssertionError:
                print(storm.log.read_text(encoding="utf-8", errors="replace")[-3000:])
                raise
            finally:
                storm.end()
            done = outcome(storm.run)
            check = check_record(storm.run / "data", steps, corpus, load_config(folder / f"{storm.name}.toml").data)
            given, expected = times_given(storm.run, corpus, steps), times_expected(corpus, done[3])
            lost, doubled = np.maximum(expected - given, 0).sum(), np.maximum(given - expected, 0).sum()
            worst = float(np.max(np.abs(np.array(done[1]) / np.array(peace[1]) - 1)))
            right = code == 0 and not lost and not doubled and done[3] == peace[3] and worst < 1e-4
            all_right &= right and len(done[0]) == steps and storm.killed.total() == len(kinds)
            print(
                f"{loader:6}  {ranks:5}  {', '.join(storm.killed):29}  {check.num_attempts:8}  {given.sum():6}  "
                f"{lost:4}  "
                f"{doubled:7}  {worst:10.1e}  {time.monotonic() - started:7.0f}  {'' if right else 'WRONG'}",
                flush=True,
            )
    return 0 if all_right else 1


def examine(
    folder: Path, storm: Storm, code: int | None, orphans: Sequence[str], kinds: Sequence[str]
) -> dict[str, bool]:
    """Return all checks: what has to hold, and whether it does."""
    steps = storm.steps
    config = load_config(folder / "ray.toml").data
    corpus = prepare_corpus(config)
    peace, calm = outcome(folder / "local"), outcome(storm.run)
    try:
        check = check_record(storm.run / "data", steps, corpus, config)
        counted = (
            f"{check.num_tokens} tokens in {check.num_attempts} attempts: ranges tile every batch, tokens as written"
        )
        ranges_are_right = True
    except DataError as error:
        counted, ranges_are_right = str(error), False
    given, expected = times_given(storm.run, corpus, steps), times_expected(corpus, calm[3])
    lost, doubled = np.maximum(expected - given, 0).sum(), np.maximum(given - expected, 0).sum()
    same = len(calm[1]) == len(peace[1])
    worst = float(np.max(np.abs(np.array(calm[1]) / np.array(peace[1]) - 1))) if same else np.inf
    storm.check_checkpoints()
    return {
        "ended by itself, exit code 0": code == 0,
        f"{len(kinds)} kills": sum(storm.killed.values()) == len(kinds),
        "every step once": calm[0] == peace[0] == list(range(1, steps + 1)),
        counted: ranges_are_right,
        f"{expected[0]} epochs and more of {len(given)} tokens: {lost} lost, {doubled} doubled": not lost
        and not doubled,
        "the same plans": calm[2] == peace[2],
        f"the same losses (worst relative difference {worst:.1e})": worst < 1e-6,
        "the same place in the data": calm[3] == peace[3],
        f"no partial checkpoint ({storm.checkpoints_loaded} loaded)": not list(storm.run.glob("checkpoints/.step-*")),
        f"nothing outlives a killed launcher for 20 s ({', '.join(storm.survivors)})": not storm.survivors,
        f"no process left over ({', '.join(orphans)})": not orphans,
    }


if __name__ == "__main__":
    raise SystemExit(main())
