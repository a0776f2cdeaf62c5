"""Trains on a cluster of network namespaces with costs that are ten times wrong, and shows how calibration mends them.

    sudo PYTHONPATH=src:. python -m benchmarks.cluster.calibration --out FOLDER [--cases latency] [--slow 0.5,0.25]

FOLDER has the profile and the links' rate from ``benchmarks.cluster.tables --stage profile``. For every case, the table
has the error of predicted steps after ``LEARNED`` steps (median and largest), and the step over that of a run that
starts with the right profile: as measured, and as the simulator says of the two runs' plans (medians over batches). The
case "again" is a second run with the right profile, which shows what chance does.

With ``--slow``, the last nodes have these shares of the others' CPU time instead. The table then compares calibration
and equal treatment with ``even``: the steps of the same batches on nodes of full speed, times the number of nodes over
the sum of speeds. ``--from-step`` and ``--to-step`` slow the nodes down for some steps only; steps count once
calibration has had ``ABSORBED`` steps to notice.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.cluster.network import Network
from benchmarks.cluster.runs import told
from benchmarks.cluster.tables import KIBI, Setting, measured_rate, plan_of, simulated, train, write_corpus

from bytescale.cost.curve import Curve
from bytescale.cost.profile import Profile
from bytescale.cost.profile_file import load_profile, save_profile

LEARNED = 15
ABSORBED = 10
WRONG = 10.0


def wrong(profile: Profile, case: str) -> Profile:
    """``profile`` with one time ten times too long ("slow ...") or too short ("fast ...")."""
    links = profile.links
    if " " not in case:
        return profile
    speed, term = case.split(maxsplit=1)
    factor = {"slow": WRONG, "fast": 1 / WRONG}[speed]
    if term == "attention":
        return replace(profile, attention_forward=times(profile.attention_forward, quadratic=factor),
                       attention_backward=times(profile.attention_backward, quadratic=factor))  # fmt: skip
    if term == "tokens":
        return replace(profile, rest_forward=times(profile.rest_forward, linear=factor),
                       rest_backward=times(profile.rest_backward, linear=factor))  # fmt: skip
    if term == "launches":
        curves = {f"{part}_{way}" for part in ("attention", "rest", "head") for way in ("forward", "backward")}
        return replace(profile, **{name: times(getattr(profile, name), constant=factor) for name in curves})
    if term == "links":
        rates = {
            name: getattr(links, name) / factor
            for name in ("intra_node_bytes_per_second", "inter_node_bytes_per_second")
        }
        return replace(profile, links=replace(links, **rates))
    if term == "messages":
        return replace(profile, links=replace(links, message_seconds=factor * links.message_seconds))
    assert term == "latency", case
    across = factor * links.ring_latency_seconds(True)
    return replace(profile, links=replace(links, latency_seconds=across, inter_node_latency_seconds=across))


def times(curve: Curve, *, quadratic: float = 1.0, linear: float = 1.0, constant: float = 1.0) -> Curve:
    return Curve(quadratic * curve.quadratic, linear * curve.linear, constant * curve.constant)


SLOW_CASES = ("even", "equal", "calibrated")
TERMS = ("links", "latency", "messages", "attention", "tokens", "launches")
CASES = ("right", "again", *(f"{speed} {term}" for term in TERMS for speed in ("slow", "fast")))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/out/cluster"))
    parser.add_argument("--cases", help="some of the cases; default: all")
    parser.add_argument("--steps", type=int, default=25)
    parser.add_argument("--batch-tokens", type=int, default=32 * KIBI)
    parser.add_argument("--lengths", default="byted")
    parser.add_argument("--slow", type=shares, default=(), help="shares of the others' CPU time of the last nodes")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--from-step", type=int, default=1, help="nodes start at full speed, so that starting is short")
    parser.add_argument("--to-step", type=int, help="default: the last step")
    parser.add_argument("--again", action="store_true", help="train nothing, only print")
    given = parser.parse_args(arguments)
    given.to_step = given.to_step or given.steps
    base = Setting(
        nodes=4, ranks_per_node=1, cpus=0.45, capacity=2 * KIBI, batch_tokens=given.batch_tokens,
        batches=given.steps - 1, lengths=given.lengths, published="case-study", out=given.out, layers=given.layers,
    )  # fmt: skip
    cases = list(SLOW_CASES if given.slow else CASES) if given.cases is None else given.cases.split(",")
    kind = "-".join(["slow", *map(str, given.slow)]) if given.slow else "wrong"
    folders = {case: given.out / f"{kind}-{case.replace(' ', '-')}" for case in cases}
    if not given.again:
        rate = measured_rate(given.out)
        profile = load_profile(given.out / "profile.toml")
        with base.network(rate) as network:
            for case, folder in folders.items():
                folder.mkdir(parents=True, exist_ok=True)
                save_profile(wrong(profile, case), folder / "profile.toml")
                setting = replace(base, out=folder)
                write_corpus(setting)
                extra = ["--cost.calibrate", "False" if case == "equal" else "True"]
                run_one(setting, network, extra, given, () if case == "even" else given.slow)
                print(line(case, folder), flush=True)
    for case, folder in folders.items():
        print(line(case, folder))
        if given.slow and case != "even" and "even" in folders:
            print(over_even(folder, folders["even"], given, base.num_ranks))
        elif case != "right" and "right" in folders:
            print(over_right(folder, folders["right"], load_profile(given.out / "profile.toml"), base))
    return 0


def shares(text: str) -> tuple[float, ...]:
    return tuple(float(part) for part in text.split(","))


def run_one(
    setting: Setting, network: Network, extra: list[str], given: argparse.Namespace, slow: Sequence[float]
) -> None:
    """Train, and meanwhile slow the last nodes down to the shares ``slow``."""
    done = threading.Event()

    def watch() -> None:
        metrics = setting.out / "adaptive" / "metrics.jsonl"
        is_slow: bool | None = None
        while slow and not done.is_set():
            steps = metrics.read_text(encoding="utf-8").count("\n") if metrics.exists() else 0
            wanted = given.from_step <= steps < given.to_step
            if wanted != is_slow:
                is_slow = wanted
                for place, share in enumerate(slow):
                    node = len(network.nodes) - len(slow) + place
                    network.set_cpus(node, setting.cpus * (share if is_slow else 1.0))
            time.sleep(0.05)

    watcher = threading.Thread(target=watch)
    (setting.out / "adaptive" / "metrics.jsonl").unlink(missing_ok=True)
    watcher.start()
    try:
        train(setting, "adaptive", network, extra)
    finally:
        done.set()
        watcher.join()
        for node in range(len(network.nodes)):
            network.set_cpus(node, setting.cpus)


def metrics_of(folder: Path) -> list[dict[str, Any]]:
    text = (folder / "adaptive" / "metrics.jsonl").read_text(encoding="utf-8")
    return [json.loads(row) for row in text.splitlines()]


def over_even(folder: Path, even: Path, given: argparse.Namespace, ranks: int) -> str:
    """Steps over what the same batches would take if all speeds were used, while nodes are slow and afterwards."""
    pairs = [(a["step_seconds"], b["step_seconds"]) for a, b in zip(metrics_of(folder), metrics_of(even), strict=True)]
    ideal = ranks / (ranks - len(given.slow) + sum(given.slow))
    parts = {
        "slow": (given.from_step + ABSORBED, given.to_step, ideal),
        "released": (given.to_step + ABSORBED, 10**9, 1),
    }
    found = []
    for name, (first, end, factor) in parts.items():
        ratios = [own / (factor * other) for own, other in pairs[first:end]]
        if ratios:
            found.append(f"{name}: {statistics.median(ratios):.2f} of work / sum of speeds")
    return f"{'':>14}" + ", ".join(found)


def over_right(folder: Path, right: Path, profile: Profile, setting: Setting) -> str:
    """The medians over late steps of a step over that of the run with the right profile: measured and simulated."""
    pairs = list(zip(metrics_of(folder)[LEARNED:], metrics_of(right)[LEARNED:], strict=True))
    measured = statistics.median(own["step_seconds"] / other["step_seconds"] for own, other in pairs)
    steps = [
        [simulated(plan_of(run / "adaptive", row["step"]), profile, setting).step_seconds for run in (folder, right)]
        for row, _ in pairs
    ]
    planned = statistics.median(own / other for own, other in steps)
    return f"{'':>14}median step over that of the right profile {measured:.3f}, simulated {planned:.3f}"


def line(case: str, folder: Path) -> str:
    metrics = metrics_of(folder)
    late = metrics[LEARNED:]
    seconds = [row["step_seconds"] for row in late]
    errors = [abs(row["predicted_seconds"] / row["step_seconds"] - 1) for row in late if row["predicted_seconds"]]
    predicted = f"error median {statistics.median(errors):4.0%} largest {max(errors):4.0%}" if errors else ""
    first = " ".join(f"{row['step_seconds']:.2f}" for row in metrics[1:])
    return f"{case:>12}: step median {statistics.median(seconds):5.2f} s after {LEARNED}  {predicted}  | all: {first}"


if __name__ == "__main__":
    sys.exit(told(main))
