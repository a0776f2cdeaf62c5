"""Trains on a cluster of network namespaces with costs that are ten times wrong, and shows how calibration mends them.

    sudo PYTHONPATH=src:. python -m benchmarks.cluster.calibration --out FOLDER [--cases links] [--slow 0.5]

FOLDER has the profile and the links' rate from ``benchmarks.cluster.tables --stage profile``. For every case, the table
has the error of predicted steps after ``LEARNED`` steps (median and largest), and the median step over that of a run
that starts with the right profile. With ``--slow``, the last node has that share of the others' CPU time instead, and
the table compares calibration with equal treatment; ``--from-step`` and ``--to-step`` slow it down for some steps only.
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

from benchmarks.cluster.network import Network
from benchmarks.cluster.tables import KIBI, Setting, train, write_corpus

from bytescale.cost import Profile, load_profile, save_profile
from bytescale.cost.curve import Curve

LEARNED = 15
WRONG = 10.0


def wrong(profile: Profile, case: str) -> Profile:
    """``profile`` with one term ten times too large, or links ten times too slow."""
    links = profile.links
    if case == "attention":
        return replace(profile, attention_forward=times(profile.attention_forward, quadratic=WRONG),
                       attention_backward=times(profile.attention_backward, quadratic=WRONG))  # fmt: skip
    if case == "tokens":
        return replace(profile, rest_forward=times(profile.rest_forward, linear=WRONG),
                       rest_backward=times(profile.rest_backward, linear=WRONG))  # fmt: skip
    if case == "constant":
        return replace(profile, rest_forward=times(profile.rest_forward, constant=WRONG),
                       attention_backward=times(profile.attention_backward, constant=WRONG))  # fmt: skip
    if case in ("slow links", "fast links"):
        factor = WRONG if case == "fast links" else 1 / WRONG
        rates = {
            name: factor * getattr(links, name)
            for name in ("intra_node_bytes_per_second", "inter_node_bytes_per_second")
        }
        return replace(profile, links=replace(links, **rates))
    if case == "latency":
        across = WRONG * links.ring_latency_seconds(True)
        return replace(profile, links=replace(links, latency_seconds=across, inter_node_latency_seconds=across))
    return profile


def times(curve: Curve, *, quadratic: float = 1.0, linear: float = 1.0, constant: float = 1.0) -> Curve:
    return Curve(quadratic * curve.quadratic, linear * curve.linear, constant * curve.constant)


CASES = ("right", "attention", "tokens", "constant", "slow links", "fast links", "latency")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/out/cluster"))
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument("--steps", type=int, default=25)
    parser.add_argument("--batch-tokens", type=int, default=32 * KIBI)
    parser.add_argument("--lengths", default="byted")
    parser.add_argument("--slow", type=float, help="share of the others' CPU time that the last node gets")
    parser.add_argument("--from-step", type=int, default=0)
    parser.add_argument("--to-step", type=int, default=10**9)
    parser.add_argument("--again", action="store_true", help="train nothing, only print")
    given = parser.parse_args(arguments)
    base = Setting(
        nodes=4, ranks_per_node=1, cpus=0.45, capacity=2 * KIBI, batch_tokens=given.batch_tokens,
        batches=given.steps - 1, lengths=given.lengths, published="case-study", out=given.out,
    )  # fmt: skip
    cases = given.cases.split(",") if given.slow is None else ["equal", "calibrated"]
    folders = {case: given.out / f"{'slow' if given.slow else 'wrong'}-{case.replace(' ', '-')}" for case in cases}
    if not given.again:
        rate = json.loads((given.out / "rate.json").read_text())
        profile = load_profile(given.out / "profile.toml")
        with base.network(rate) as network:
            for case, folder in folders.items():
                folder.mkdir(parents=True, exist_ok=True)
                save_profile(wrong(profile, case), folder / "profile.toml")
                setting = replace(base, out=folder)
                write_corpus(setting)
                extra = ["--cost.calibrate", "False" if case == "equal" else "True"]
                run_one(setting, network, extra, given)
                print(line(case, folder), flush=True)
    for case, folder in folders.items():
        print(line(case, folder))
    return 0


def run_one(setting: Setting, network: Network, extra: list[str], given: argparse.Namespace) -> None:
    """Train, and meanwhile slow the last node down if that is asked for."""
    done = threading.Event()

    def watch() -> None:
        metrics, last = setting.out / "adaptive" / "metrics.jsonl", len(network.nodes) - 1
        slow: bool | None = None
        while given.slow is not None and not done.is_set():
            steps = metrics.read_text(encoding="utf-8").count("\n") if metrics.exists() else 0
            wanted = given.from_step <= steps < given.to_step
            if wanted != slow:
                slow = wanted
                network.set_cpus(last, setting.cpus * (given.slow if slow else 1.0))
            time.sleep(0.05)

    watcher = threading.Thread(target=watch)
    (setting.out / "adaptive" / "metrics.jsonl").unlink(missing_ok=True)
    watcher.start()
    try:
        train(setting, "adaptive", network, extra)
    finally:
        done.set()
        watcher.join()


def line(case: str, folder: Path) -> str:
    text = (folder / "adaptive" / "metrics.jsonl").read_text(encoding="utf-8")
    metrics = [json.loads(row) for row in text.splitlines()]
    late = metrics[LEARNED:]
    seconds = [row["step_seconds"] for row in late]
    errors = [abs(row["predicted_seconds"] / row["step_seconds"] - 1) for row in late if row["predicted_seconds"]]
    predicted = f"error median {statistics.median(errors):4.0%} largest {max(errors):4.0%}" if errors else ""
    first = " ".join(f"{row['step_seconds']:.2f}" for row in metrics[1:])
    return f"{case:>12}: step median {statistics.median(seconds):5.2f} s after {LEARNED}  {predicted}  | all: {first}"


if __name__ == "__main__":
    sys.exit(main())
