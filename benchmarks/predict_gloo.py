"""Compares simulated steps with real ones on this machine: profile, train, then simulate the same plans.

    .venv/bin/python benchmarks/predict_gloo.py [--rounds 3] [--steps 4] [--ranks 1,2] [--out FOLDER]

Every round has three steps:

1. ``bytescale profile`` measures a layer of the tiny model and the links of gloo, on 1 and on 2 ranks of one thread.
2. ``bytescale train`` trains the demo's model on every mix of documents with every planner and with that profile.
3. The plans of every run folder are simulated with the round's profile and compared with its metrics.jsonl, step by
   step. The first step of a run is left out because its memory is fresh. For every other step, the median over the
   rounds counts.

The speed of a shared machine changes by up to a fifth within an hour. Therefore every round has its own profile. The
work of other processes affects measured times but not predicted ones. Therefore each run waits until the machine is
idle (``--quiet-seconds``). If other processes take more than ``--others`` of the machine during a run, it is repeated,
at most ``--tries`` times. The last attempt counts in any case. ``--again`` only repeats step 3 for existing runs.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from bytescale.cost.profile_file import load_profile
from bytescale.plan.io import load_plan
from bytescale.simulator import ClusterConfig, simulate

CONFIG = Path(__file__).with_suffix(".toml")
LONG = [str(path) for path in sorted(Path(json.__file__).parents[1].glob("*.py")) if path.stat().st_size > 12_000]
"""Files of the standard library with 3000 tokens or more."""
CAPACITY = {1: 8192, 2: 4096}
MIXES: dict[str, list[str]] = {
    "short": ["--data.context-length", "1K"],
    "mixed": [],
    "long": ["--data.sources", *LONG, "--data.batch-tokens", "24K"],
}
PLANNERS: dict[str, list[str]] = {
    "static": ["--planner.name", "static"],
    "naive": ["--planner.name", "naive"],
    "adaptive": ["--planner.name", "adaptive"],
}
WITHIN = 0.15
SUMMED = ("shared", "predicted", "measured")


@dataclass(frozen=True)
class Case:
    """One kind of run."""

    ranks: int
    mix: str
    planner: str

    def folder(self, out: Path, number: int) -> Path:
        return out / f"{self.ranks}-{self.mix}-{self.planner}-{number}"


def main() -> None:
    arguments = parse_arguments()
    out: Path = arguments.out
    out.mkdir(parents=True, exist_ok=True)
    all_ranks = [int(text) for text in arguments.ranks.split(",")]
    cases = [Case(ranks, mix, planner) for ranks in all_ranks for mix in MIXES for planner in PLANNERS]
    if not arguments.again:
        for number in range(arguments.rounds):
            for ranks in all_ranks:
                take = partial(take_profile, out, ranks, number, arguments)
                in_quiet(arguments, f"round {number}: profile on {ranks} ranks", take)
                for case in (case for case in cases if case.ranks == ranks):
                    in_quiet(arguments, f"round {number}: {case}", partial(train, case, out, number, arguments))
    rows = [row for case in cases for row in compare(case, out, arguments.rounds)]
    print_table(rows)
    (out / "predict_gloo.json").write_text(json.dumps(rows, indent=1), encoding="utf-8")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", default="1,2", help="numbers of ranks to try")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=4, help="steps of each run; the first one is not counted")
    parser.add_argument("--profile-seconds", type=float, default=40.0)
    parser.add_argument("--quiet-seconds", type=float, default=600.0, help="how long a run waits for an idle machine")
    parser.add_argument("--others", type=float, default=0.05, help="share of the machine that other processes may take")
    parser.add_argument("--tries", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/out/predict_gloo"))
    parser.add_argument("--again", action="store_true", help="train nothing, only compare")
    return parser.parse_args()


def in_quiet(arguments: argparse.Namespace, what: str, work: Callable[[], None]) -> None:
    """Run ``work`` when the machine is quiet, and again if other processes disturbed it."""
    for attempt in range(arguments.tries):
        deadline = time.monotonic() + arguments.quiet_seconds
        while others_share(lambda: time.sleep(2.0)) > arguments.others and time.monotonic() < deadline:
            pass
        share = others_share(work)
        print(f"{what}: others took {share:.0%} of the machine", flush=True)
        if share <= arguments.others or attempt == arguments.tries - 1:
            return


def others_share(work: Callable[[], None]) -> float:
    """Run ``work``. Return the share of all cores that other processes took meanwhile (Linux)."""

    def busy() -> float:
        ticks = [int(text) for text in Path("/proc/stat").read_text(encoding="ascii").split("\n", 1)[0].split()[1:9]]
        idle = ticks[3] + ticks[4]
        return (sum(ticks) - idle) / os.sysconf("SC_CLK_TCK")

    def own() -> float:
        used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
        return sum(usage.ru_utime + usage.ru_stime for usage in used)

    started, before = time.monotonic(), busy() - own()
    work()
    return (busy() - own() - before) / ((time.monotonic() - started) * (os.cpu_count() or 1))


def profile_path(out: Path, ranks: int, number: int) -> Path:
    return out / f"profile-{ranks}-{number}.toml"


def take_profile(out: Path, ranks: int, number: int, arguments: argparse.Namespace) -> None:
    bytescale(
        *("profile", str(CONFIG), "--parallel.ranks", str(ranks), "--seconds", str(arguments.profile_seconds)),
        *(
            "--max-tokens",
            str(max(CAPACITY.values())),
            "--device",
            "cpu",
            "--out",
            str(profile_path(out, ranks, number)),
        ),
    )


def train(case: Case, out: Path, number: int, arguments: argparse.Namespace) -> None:
    folder = case.folder(out, number)
    shutil.rmtree(folder, ignore_errors=True)
    bytescale(
        *("train", str(CONFIG), "--trainer.run-dir", str(folder), "--trainer.steps", str(arguments.steps)),
        *("--parallel.ranks", str(case.ranks), "--parallel.capacity-tokens", str(CAPACITY[case.ranks])),
        *("--data.cache-dir", str(out / "cache"), "--trainer.device", "cpu", "--checkpoint.every", "0"),
        *("--cost.profile", str(profile_path(out, case.ranks, number)), *MIXES[case.mix], *PLANNERS[case.planner]),
    )


def bytescale(*arguments: str) -> None:
    """Run the command. If it fails, show its output and stop."""
    command = [sys.executable, "-m", "bytescale", *arguments]
    done = subprocess.run(command, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}\n{done.stdout}\n{done.stderr}")


def compare(case: Case, out: Path, rounds: int) -> list[dict[str, object]]:
    """Return one row per step except the first: predicted and measured seconds and their ratio, medians of rounds."""
    by_step: dict[int, list[tuple[float, float, int]]] = {}
    for number in range(rounds):
        folder, profile = case.folder(out, number), load_profile(profile_path(out, case.ranks, number))
        for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()[1:]:
            metrics = json.loads(line)
            plan = load_plan(folder / "plans" / f"step-{metrics['step']:06d}.npz")
            predicted = simulate(plan, profile, ClusterConfig(num_gpus=plan.num_ranks)).step_seconds
            shared = int((plan.group_sizes > 1).sum())
            by_step.setdefault(metrics["step"], []).append((predicted, metrics["step_seconds"], shared))
    return [
        {
            "ranks": case.ranks,
            "mix": case.mix,
            "planner": case.planner,
            "step": step,
            "shared": found[0][2],
            "predicted": statistics.median(predicted for predicted, _, _ in found),
            "measured": statistics.median(measured for _, measured, _ in found),
            "ratio": statistics.median(predicted / measured for predicted, measured, _ in found),
        }
        for step, found in by_step.items()
    ]


def print_table(rows: list[dict[str, object]]) -> None:
    """Print one line per case for all its steps, then how many steps are within the limit."""
    print(f"{'ranks':>5} {'mix':>6} {'planner':>9} {'shared':>6} {'predicted':>9} {'measured':>9}  ratio of the steps")
    keys = dict.fromkeys((row["ranks"], row["mix"], row["planner"]) for row in rows)
    for key in keys:
        mine = [row for row in rows if (row["ranks"], row["mix"], row["planner"]) == key]
        shared, predicted, measured = (sum(float(str(row[name])) for row in mine) for name in SUMMED)
        ratios = [float(str(row["ratio"])) for row in mine]
        print(
            f"{key[0]:>5} {key[1]:>6} {key[2]:>9} {shared:>6.0f} {predicted:>8.2f}s {measured:>8.2f}s  "
            f"median {statistics.median(ratios):.3f}, from {min(ratios):.3f} to {max(ratios):.3f}"
        )
    ratios = [float(str(row["ratio"])) for row in rows]
    good = sum(abs(ratio - 1) <= WITHIN for ratio in ratios)
    print(
        f"predicted / measured: {good} of {len(ratios)} steps within {WITHIN:.0%}, "
        f"median {statistics.median(ratios):.3f}, from {min(ratios):.3f} to {max(ratios):.3f}"
    )


if __name__ == "__main__":
    main()
