"""Checks that no plan hangs under NCCL's order of operations: runs many plans and replays them under each rule.

    python benchmarks/nccl_campaign.py --plans 1000

Batches, planners, meshes and modes are drawn at random. The real executor runs every rank's step, and a recorder writes
down what it posts. Then the records of all ranks are replayed together (``tests/nccl``) under several rules: streams
alone, host syncs, connections that block at their first use, device-wide waits, and all of these. The output has one
line per kind of mesh, with the number of steps that hang under each rule.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import defaultdict
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.nccl.replay import ALL_RULES, EVERYTHING, Mismatch, Replay
from tests.nccl.test_nccl import plan_of, recorded

from bytescale.runtime.mesh import MeshShape

KINDS = ("HDP alone", "pipeline", "tensor parallel", "pipeline and tensor parallel")
PLANNERS = ("static", "naive", "paper", "adaptive", "random")


def mesh_of(kind: str, random: np.random.Generator) -> MeshShape:
    """Draw a mesh of at most 32 ranks."""

    def of(*sizes: int) -> int:
        return int(random.choice(sizes))

    if kind == "HDP alone":
        return MeshShape(hdp=int(random.integers(1, 17)))
    if kind == "pipeline":
        return MeshShape(pp=of(2, 3, 4, 8), hdp=of(1, 2, 3, 4))
    if kind == "tensor parallel":
        return MeshShape(hdp=of(1, 2, 3, 4), tp=of(2, 4))
    return MeshShape(pp=of(2, 3, 4), hdp=of(1, 2), tp=2)


def one_case(kind: str, seed: int) -> tuple[list[bool], int]:
    """Return whether a drawn step hangs under each rule, and how many operations its ranks post."""
    random = np.random.default_rng(seed)
    mesh = mesh_of(kind, random)
    planner = str(random.choice(PLANNERS))
    lengths = np.minimum(1 + random.pareto(1.0, int(random.integers(1, 16))) * 6, 60).astype(int).tolist()
    plan = plan_of(planner, lengths, mesh, seed=seed)
    programs = recorded(
        plan,
        mesh,
        checkpointing=str(random.choice(["none", "full", "attention"])),
        tied=bool(random.integers(2)) and mesh.pp == mesh.tp == 1,
    )
    # A step that ends with all waits also ends with fewer of them.
    everything = bool(Replay(programs, EVERYTHING).run())
    hangs = [everything and bool(Replay(programs, rules).run()) for rules in ALL_RULES]
    return hangs, sum(len(replayed) for replayed in programs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plans", type=int, default=1000, help="steps to record and replay")
    parser.add_argument("--first-seed", type=int, default=0)
    arguments = parser.parse_args()
    hanging = {kind: np.zeros(len(ALL_RULES), dtype=int) for kind in KINDS}
    cases: dict[str, int] = defaultdict(int)
    events, started = 0, time.perf_counter()
    for seed in range(arguments.first_seed, arguments.first_seed + arguments.plans):
        kind = KINDS[seed % len(KINDS)]
        try:
            hangs, count = one_case(kind, seed)
        except Mismatch as error:
            raise SystemExit(f"seed {seed}: {error}") from error
        if any(hangs):
            print(f"seed {seed} hangs under {[rule for rule, hung in zip(ALL_RULES, hangs, strict=True) if hung]}")
        hanging[kind] += hangs
        cases[kind] += 1
        events += count
    print(f"\n{'mesh':30} {'steps':>6} {'streams':>8} {'+ syncs':>8} {'+ first':>8} {'+ device':>9} {'all':>6}")
    for kind in KINDS:
        counts = hanging[kind].tolist()
        print(f"{kind:30} {cases[kind]:>6} {counts[0]:>8} {counts[1]:>8} {counts[2]:>8} {counts[3]:>9} {counts[4]:>6}")
    print(f"{events} events of all ranks, {time.perf_counter() - started:.0f} s")


if __name__ == "__main__":
    main()
