"""50 kills at random moments in one run: servers, the planner, ranks. Nothing may be lost, doubled, hung or left over.

    .venv/bin/python benchmarks/soak.py [--kills 50] [--seed 0]

A run on the remote loader is started with restarts to spare; every few tenths of a second one of its processes gets
kill -9, until all kills are spent. Then it has to end by itself, and is compared with the same run left in peace: every
step once, the same plan (its digest: all lengths, in the same places), the same losses, the same place in the data at
the end. Prints a table and exits with 1 if anything differs.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import numpy as np
import psutil

from bytescale.plan.io import load_plan

CONFIG = """
[model]
preset = "tiny"
num_layers = 2
hidden_size = 32
num_heads = 4
num_kv_heads = 2
ffn_hidden_size = 48

[data]
sources = ["{folder}/corpus"]
cache_dir = "{folder}/cache"
context_length = 256
batch_tokens = 640
loader = "{loader}"

[parallel]
ranks = 2
capacity_tokens = 256
timeout_seconds = 30.0

[trainer]
device = "cpu"
dtype = "fp32"
run_dir = "{folder}/{loader}"
steps = {steps}

[checkpoint]
every = 1
"""


def write_corpus(folder: Path) -> None:
    dice = random.Random(0)
    folder.mkdir()
    for number in range(80):
        words = [
            dice.choice(["ring", "rank", "key", "the", "waits"]) for _ in range(int(dice.lognormvariate(2, 1.3)) + 1)
        ]
        (folder / f"{number:03d}.txt").write_text(" ".join(words), encoding="utf-8")


def start(folder: Path, loader: str, steps: int, *options: str) -> subprocess.Popen[bytes]:
    path = folder / f"{loader}.toml"
    path.write_text(CONFIG.format(folder=folder, loader=loader, steps=steps), encoding="utf-8")
    log = (folder / f"{loader}.log").open("wb")
    command = [sys.executable, "-m", "bytescale", "train", str(path), *options]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment)


def victims(launcher: psutil.Process) -> dict[str, list[psutil.Process]]:
    """The run's own processes by kind, found below its launcher and nowhere else."""
    found: dict[str, list[psutil.Process]] = {"server": [], "planner": [], "rank": []}
    for process in launcher.children(recursive=True):
        try:
            title, environment = " ".join(process.cmdline()), process.environ()
        except psutil.Error:
            continue
        if title.startswith("ray::DataServer"):
            found["server"].append(process)
        elif title.startswith("ray::PlannerActor"):
            found["planner"].append(process)
        elif "LOCAL_RANK" in environment and not title.startswith("ray::"):
            found["rank"].append(process)
    return found


def kill_at_random(launcher: psutil.Process, kills: int, dice: random.Random, run: Path) -> Counter[str]:
    """Mostly actors: a rank costs a restart of all ranks, some ten seconds, and the run then gets a step to recover."""
    done: Counter[str] = Counter()
    steps = 0
    while sum(done.values()) < kills and launcher.is_running():
        time.sleep(dice.uniform(0.1, 1.3))
        if done["rank"] and num_lines(run / "metrics.jsonl") <= steps:
            continue
        kind = dice.choices(["server", "planner", "rank"], weights=[5, 3, 1])[0]
        candidates = victims(launcher)[kind]
        if candidates:
            dice.choice(candidates).kill()
            done[kind] += 1
            steps = num_lines(run / "metrics.jsonl") if kind == "rank" else 0
    return done


def num_lines(path: Path) -> int:
    return path.read_text(encoding="utf-8").count("\n") if path.exists() else 0


def outcome(run: Path) -> tuple[list[int], list[float], list[int], dict[str, object]]:
    """Steps, losses, plan digests and the last data position of a run."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    digests = [load_plan(path).digest() for path in sorted((run / "plans").glob("step-*.npz"))]
    last = sorted((run / "checkpoints").glob("step-*"))[-1]
    state = json.loads((last / "run_state.json").read_text(encoding="utf-8"))
    return [line["step"] for line in lines], [line["loss"] for line in lines], digests, state["sampler"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--limit-seconds", type=float, default=1800.0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="bytescale-soak-") as name:
        folder = Path(name)
        write_corpus(folder / "corpus")
        assert start(folder, "local", options.steps).wait(options.limit_seconds) == 0, "the run in peace failed"
        started = time.perf_counter()
        run = start(folder, "ray", options.steps, "--max-restarts", str(options.kills))
        launcher = psutil.Process(run.pid)
        family: set[psutil.Process] = set()
        try:
            while not num_lines(folder / "ray" / "metrics.jsonl"):
                time.sleep(0.2)
            killed = kill_at_random(launcher, options.kills, random.Random(options.seed), folder / "ray")
            family = set(launcher.children(recursive=True)) if run.poll() is None else set()
            code = run.wait(options.limit_seconds - (time.perf_counter() - started))
        finally:
            for process in launcher.children(recursive=True) if run.poll() is None else []:
                process.kill()
            run.kill()
        _, orphans = psutil.wait_procs(family, timeout=20)
        peace, storm = outcome(folder / "local"), outcome(folder / "ray")
        worst = float(np.max(np.abs(np.array(storm[1]) / np.array(peace[1]) - 1)))
        checks = {
            "ended by itself, exit code 0": code == 0,
            f"{options.kills} kills": sum(killed.values()) == options.kills,
            "every step once": storm[0] == peace[0] == list(range(1, options.steps + 1)),
            "the same plans": storm[2] == peace[2],
            f"the same losses (worst relative difference {worst:.1e})": worst < 1e-6,
            "the same place in the data": storm[3] == peace[3],
            "no partial checkpoint": not list((folder / "ray" / "checkpoints").glob(".step-*")),
            "no process left over": not orphans,
        }
        print(f"{dict(killed)} killed, {options.steps} steps in {time.perf_counter() - started:.0f} s")
        for what, holds in checks.items():
            print(f"  {'yes' if holds else 'NO '}  {what}")
        if not all(checks.values()):
            print((folder / "ray.log").read_text(encoding="utf-8", errors="replace")[-3000:])
        return 0 if all(checks.values()) else 1


if __name__ == "__main__":
    raise SystemExit(main())
