"""Compares the four planners on a cluster of network namespaces, and every measured step with its simulation.

    sudo PYTHONPATH=src:. python -m benchmarks.cluster.tables --out FOLDER [--nodes 4] [--lengths github] [--batches 20]

1. A first profile, over links without a limit, gives the seconds of the attention of these ranks. ``rates`` makes the
   links' rate from it. A second profile measures links and ranks together, as a user would.
2. torchrun trains on all nodes, with each planner and the same batches.
3. The plan of every step is simulated with the second profile.

The table has, for every planner, the median of the steps except the first: tokens per second, share of the time that
ranks wait for others in forward and backward, bytes on the wire (interface counters of all nodes, headers and start-up
included) over predicted bytes, and simulated over measured seconds. ``--stage table`` makes it from existing runs.

``--stage simulate`` needs a profile only. It says what other planners' steps take over adaptive's, and over a step in
which all ranks compute equally long, send nothing for attention, and reduce gradients: no plan is faster than that.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from benchmarks.cluster.network import Link, Network, Node
from benchmarks.cluster.rates import PUBLISHED, link_rate
from benchmarks.cluster.runs import told, torchrun

from bytescale.common.arrays import IntArray
from bytescale.common.errors import ConfigError
from bytescale.cost.cluster import Cluster
from bytescale.cost.gradient_sync import stage_parameters
from bytescale.cost.profile import Profile
from bytescale.cost.profile_file import load_profile
from bytescale.data.length_distributions import distribution_names, sample_lengths
from bytescale.plan import Plan
from bytescale.plan.io import load_plan
from bytescale.planner.adaptive.planner import adaptive_plan
from bytescale.planner.baselines import naive_plan, paper_plan
from bytescale.simulator import ClusterConfig, SimulatedStep, simulate

PLANNERS = {
    "static": ["--planner.name", "static"],
    "naive": ["--planner.name", "naive"],
    "paper": ["--planner.name", "paper"],
    "adaptive": ["--planner.name", "adaptive"],
}
KIBI = 1024
FULL_CONTEXT = 2 * KIBI * KIBI
SHORTEST = 64
"""Tokens of the shortest document of a scaled distribution."""
SECONDS = 3000.0
"""A run that has not ended by then hangs."""
UNLIMITED = 1e10
BUCKET_MIB = 1.0


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What is compared."""

    nodes: int
    ranks_per_node: int
    cpus: float
    capacity: int
    batch_tokens: int
    batches: int
    lengths: str
    published: str
    out: Path
    layers: int = 2
    megabits: float | None = None
    """Of a node's link per second; None: by the rule of ``rates``."""

    @property
    def num_ranks(self) -> int:
        return self.nodes * self.ranks_per_node

    @property
    def profile(self) -> Path:
        return self.out / "profile.toml"

    @property
    def corpus(self) -> Path:
        """Documents of these lengths, for this context and so many tokens."""
        context = self.capacity * self.num_ranks
        return self.out / f"{self.lengths}-{context}-{self.batch_tokens * self.batches}.jsonl"

    def network(self, rate: float) -> Network:
        link = Link(bytes_per_second=rate, burst_bytes=max(Link.burst_bytes, round(rate / 500)))
        return Network([Node(link=link, cpus=self.cpus, ranks=self.ranks_per_node)] * self.nodes)

    def model(self) -> list[str]:
        return ["--model.preset", "tiny", "--model.config", f"num_hidden_layers={self.layers}", "vocab_size=320"]


@dataclass(frozen=True, kw_only=True)
class Row:
    """One planner's result."""

    planner: str
    tokens_per_second: float
    waiting_share: float
    wire_bytes: int
    predicted_wire_bytes: float
    measured: list[float]
    simulated: list[float]
    losses: list[float]

    @property
    def ratio(self) -> float:
        """Median over steps of simulated over measured seconds."""
        return statistics.median(s / m for s, m in zip(self.simulated, self.measured, strict=True))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/out/cluster"))
    parser.add_argument("--nodes", type=int, default=4)
    parser.add_argument("--ranks-per-node", type=int, default=1)
    parser.add_argument("--cpus", type=float, default=0.45, help="cores of one rank")
    parser.add_argument("--capacity", type=int, default=2 * KIBI, help="tokens of a rank's micro-batch")
    parser.add_argument("--batch-tokens", type=int, help="default: 4 micro-batches a rank, as in the case study")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--batches", type=int, default=20)
    parser.add_argument("--lengths", choices=["code", *distribution_names()], default="github")
    parser.add_argument("--published", choices=list(PUBLISHED), default="case-study")
    parser.add_argument("--megabits", type=float, help="per second of a node's link, in place of the rule's")
    parser.add_argument("--planners", default=",".join(PLANNERS))
    parser.add_argument("--stage", choices=["all", "profile", "train", "table", "simulate"], default="all")
    given = vars(parser.parse_args(arguments))
    planners, stage = given.pop("planners").split(","), given.pop("stage")
    if given["batch_tokens"] is None:
        given["batch_tokens"] = 4 * given["capacity"] * given["nodes"] * given["ranks_per_node"]
    setting = Setting(**given)
    setting.out.mkdir(parents=True, exist_ok=True)
    if stage in ("all", "profile"):
        take_profiles(setting)
    if stage in ("all", "train"):
        with setting.network(measured_rate(setting.out)) as network:
            write_corpus(setting)
            for planner in planners:
                train(setting, planner, network)
                print(line(row_of(setting, planner)), flush=True)
    if stage == "simulate":
        compare_simulated(setting)
    if stage in ("all", "table"):
        table(setting, [planner for planner in PLANNERS if (setting.out / planner).exists()])
    return 0


def take_profiles(setting: Setting) -> None:
    """Steps 1 of the benchmark: the links' rate, and the profile that planners and simulator use."""
    rate = UNLIMITED
    for name in ("unlimited", "profile"):
        path = setting.out / f"{name}.toml"
        command = ["profile", *setting.model(), "--data.context-length", str(4 * setting.capacity), "--seconds", "60"]
        with setting.network(rate) as network:
            arguments = [*command, "--trainer.device", "cpu", "--out", str(path)]
            torchrun(network, setting.ranks_per_node, arguments, setting.out / f"{name}.log", SECONDS)
        if rate == UNLIMITED:
            rate = link_rate(PUBLISHED[setting.published](), load_profile(path), setting.capacity)
            rate *= setting.ranks_per_node
            if setting.megabits is not None:
                rate = setting.megabits * 1e6 / 8
            (setting.out / "rate.json").write_text(json.dumps(rate))
    links = load_profile(setting.profile).links
    print(f"links {rate / 1e6:.2f} MB/s; profile {links.inter_node_bytes_per_second / 1e6:.2f} MB/s across", flush=True)


def measured_rate(folder: Path) -> float:
    """The links' rate that ``take_profiles`` has chosen. Raises ``ConfigError`` for a folder that has none."""
    path = folder / "rate.json"
    if not path.exists():
        raise ConfigError(
            f"{path} does not exist", fix="run benchmarks.cluster.tables with --stage profile and this --out first"
        )
    return float(json.loads(path.read_text()))


def scaled_lengths(setting: Setting) -> IntArray:
    """Lengths of a distribution, scaled to the context, for a little more than all batches."""
    scale = FULL_CONTEXT // (setting.capacity * setting.num_ranks)
    tokens = setting.batch_tokens * (setting.batches + 8)
    return (sample_lengths(setting.lengths, tokens * scale, seed=0) // scale).clip(SHORTEST)


def compare_simulated(setting: Setting) -> None:
    """Print medians over batches of simulated steps: over adaptive's, and over that of compute spread evenly."""
    profile, context = load_profile(setting.profile), setting.capacity * setting.num_ranks
    cost = profile.cost_model(ranks_per_node=setting.ranks_per_node)
    cluster = Cluster.uniform(setting.num_ranks, setting.capacity)
    planners = {"naive": naive_plan, "paper": paper_plan, "adaptive": adaptive_plan}
    lengths = np.minimum(scaled_lengths(setting), context)
    batches = np.split(lengths, np.flatnonzero(np.diff(np.cumsum(lengths) // setting.batch_tokens)) + 1)
    over: dict[str, list[list[float]]] = {name: [] for name in planners}
    for batch in batches[: setting.batches]:
        steps = {
            name: simulated(plan(batch, cluster=cluster, cost=cost), profile, setting)
            for name, plan in planners.items()
        }
        even = float(cost.work_seconds(batch).sum()) / setting.num_ranks + float(steps["adaptive"].sync_seconds.mean())
        for name, step in steps.items():
            over[name].append([step.step_seconds / steps["adaptive"].step_seconds, step.step_seconds / even])
    for name, rows in over.items():
        of_adaptive, of_even = np.median(rows, axis=0)
        print(f"{name:>9}: {of_adaptive:.2f} of adaptive, {of_even:.2f} of the least step")


def write_corpus(setting: Setting) -> None:
    """Documents of Python's standard library: whole, or cut to lengths of a distribution scaled to the context."""
    path = setting.corpus
    if setting.lengths == "code" or path.exists():
        return
    files = sorted(Path(json.__file__).parents[1].glob("*.py"))
    text = "".join(file.read_text(encoding="ascii", errors="ignore") for file in files)
    place = 0
    with path.open("w", encoding="ascii") as corpus:
        for length in scaled_lengths(setting).tolist():
            place = place if place + length <= len(text) else 0
            corpus.write(json.dumps({"text": text[place : place + length - 1]}) + "\n")  # one token ends the document
            place += length


def train(
    setting: Setting, planner: str, network: Network, extra: Sequence[str] = ("--cost.calibrate", "False")
) -> None:
    """Train with one planner. ``extra``: more options of ``bytescale train``."""
    folder = setting.out / planner
    shutil.rmtree(folder, ignore_errors=True)
    source = "python:stdlib" if setting.lengths == "code" else str(setting.corpus)
    config = setting.out / "config.toml"
    config.write_text(f'[data]\nsources = ["{source}"]\n', encoding="utf-8")
    context = setting.capacity * setting.num_ranks
    arguments = ["train", str(config), *setting.model(), *PLANNERS[planner], "--trainer.run-dir", str(folder)]
    arguments += ["--trainer.steps", str(setting.batches + 1), "--trainer.device", "cpu", "--checkpoint.every", "0"]
    arguments += ["--data.tokenizer", "bytes", "--data.context-length", str(context), "--data.over-length", "split"]
    arguments += ["--data.batch-tokens", str(setting.batch_tokens), "--data.cache-dir", str(setting.out / "cache")]
    arguments += ["--parallel.capacity-tokens", str(setting.capacity), "--cost.profile", str(setting.profile)]
    arguments += ["--optimizer.lr", "1e-2", *extra]
    traffic = torchrun(network, setting.ranks_per_node, arguments, setting.out / f"{planner}.log", SECONDS)
    (setting.out / f"{planner}-sent.json").write_text(json.dumps(traffic.sent))


def row_of(setting: Setting, planner: str) -> Row:
    """Simulate every step of a run and compare."""
    folder, profile = setting.out / planner, load_profile(setting.profile)
    metrics = [json.loads(text) for text in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    steps = [simulated(plan_of(folder, step["step"]), profile, setting) for step in metrics]
    # gloo's reduce-scatter is an all-reduce, which sends as much again. Its rings leave a node at one of its ranks.
    again = 4 * stage_parameters(profile, stage=0, pipeline_parallel=1) * (setting.num_ranks - 1)
    gradients = [(step.traffic.gradient_sync + again) / setting.ranks_per_node for step in steps]
    predicted = sum(step.traffic.ring_inter_node for step in steps) + sum(gradients)
    sent = json.loads((setting.out / f"{planner}-sent.json").read_text())
    return Row(
        planner=planner,
        tokens_per_second=statistics.median(step["tokens_per_second"] for step in metrics[1:]),
        waiting_share=statistics.median(step["waiting_share"] for step in metrics[1:]),
        wire_bytes=sum(sent),
        predicted_wire_bytes=predicted,
        measured=[step["step_seconds"] for step in metrics[1:]],
        simulated=[step.step_seconds for step in steps[1:]],
        losses=[step["loss"] for step in metrics],
    )


def plan_of(folder: Path, step: int) -> Plan:
    """The plan of a run's step."""
    return load_plan(folder / "plans" / f"step-{step:06d}.npz")


def simulated(plan: Plan, profile: Profile, setting: Setting) -> SimulatedStep:
    """A plan on the modelled cluster."""
    cluster = ClusterConfig(
        num_gpus=setting.num_ranks, gpus_per_node=setting.ranks_per_node, gradient_bucket_mib=BUCKET_MIB
    )
    return simulate(plan, profile, cluster)


def line(row: Row) -> str:
    return (
        f"{row.planner:>9} {row.tokens_per_second:8.0f} tokens/s  waiting {row.waiting_share:4.0%}  "
        f"wire {row.wire_bytes / 1e6:7.1f} MB, {row.wire_bytes / row.predicted_wire_bytes:.2f} of predicted  "
        f"step {statistics.median(row.measured):6.2f} s, simulated/measured {row.ratio:.2f}  "
        f"last loss {row.losses[-1]:.4f}"
    )


def table(setting: Setting, planners: Sequence[str]) -> None:
    """Print the table with the speed of adaptive over each planner, and draw measured beside simulated steps."""
    rows = {planner: row_of(setting, planner) for planner in planners}
    for row in rows.values():
        print(line(row))
    if "adaptive" in rows:
        own = rows["adaptive"].measured
        for planner, row in rows.items():
            if planner == "adaptive":
                continue
            faster = [other / mine for other, mine in zip(row.measured, own, strict=True)]
            print(f"adaptive over {planner}: median of batches {statistics.median(faster):.2f}x")
    (setting.out / "table.json").write_text(json.dumps([asdict(row) for row in rows.values()], indent=1))
    draw(rows, setting.out / "table.png")


def draw(rows: dict[str, Row], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axis = pyplot.subplots(figsize=(6, 6), constrained_layout=True)
    for planner, row in rows.items():
        axis.loglog(row.measured, row.simulated, "o", label=planner)
    ends = [min(min(row.measured) for row in rows.values()), max(max(row.measured) for row in rows.values())]
    axis.plot(ends, ends, color="black", linewidth=0.8)
    axis.set_xlabel("measured seconds of a step")
    axis.set_ylabel("simulated seconds")
    axis.legend()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


if __name__ == "__main__":
    sys.exit(told(main))
