"""Measures one long document's attention on real ranks behind slow links: rings against grids of every shape.

    python -m benchmarks.grid_attention [--ranks 16] [--mbit 40] [--rounds 5] [--json FILE]      (Linux, root)

Every rank is a node of its own (``benchmarks/cluster``), whose link has ``--mbit`` in each direction. The ranks run the
forward and the backward of one layer's attention on one sequence. Each round runs all shapes in turn. Times are those
of the slowest rank, and medians of the rounds. Bytes are the payload that all ranks together hand to gloo, beside what
the formula of ``attention.rings.grid`` says.

"Predicted" is what the simulator says of the plan. It is given what the same processes have measured before: the rate
and latency of a ring over all ranks, as ``bytescale profile`` measures them, and the seconds of a block of attention
while all ranks compute. The last columns are ratios to the ring with the same heads: of the formula's bytes, of
predicted seconds, and of measured ones.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from benchmarks.cluster.network import Link, Network, Node
from rich.console import Console
from rich.table import Table

from bytescale.attention import AttentionKernel, PackedAttention, RingBuffers, select_kernel
from bytescale.attention.kernels import OfQueries
from bytescale.config.presets import PRESETS
from bytescale.cost.curve import Curve
from bytescale.cost.links import Links
from bytescale.cost.profile import Profile
from bytescale.plan import Plan, RankPlan
from bytescale.plan.plan import GroupSpec
from bytescale.runtime.group import RankGroup
from bytescale.simulator import ClusterConfig, simulate
from bytescale.train.parts.describe import spec_of_content
from bytescale.train.profiling.links import ring_rate

PORT = 29577
QUERY_HEADS, WIDTH = 8, 64
KEY_HEADS = (8, 4, 2)
BLOCK_ROUNDS = 10
LIMIT_SECONDS = 900


@dataclass(frozen=True)
class Case:
    """One shape of the group: H query heads over G key heads, and the number of columns of the grid."""

    key_heads: int
    columns: int


def cases(num_ranks: int) -> list[Case]:
    """All shapes, for H = G, 2G and 4G."""
    shapes = [columns for columns in range(1, num_ranks) if num_ranks % columns == 0]
    return [Case(key_heads, columns) for key_heads in KEY_HEADS for columns in shapes]


def formula_bytes(case: Case, num_ranks: int, num_tokens: int) -> int:
    """What all ranks together send in a forward and a backward, fp32 (``attention.rings.grid``)."""
    rows, heads, keys = num_ranks // case.columns, QUERY_HEADS, case.key_heads * 2 * WIDTH
    forward = (rows - 1) * keys * 4 + (case.columns - 1) * heads * (2 * WIDTH * 4 + 4)
    backward = (rows - 1) * keys * 8 + (case.columns - 1) * heads * (3 * WIDTH * 4 + 8)
    return num_tokens * (forward + backward)


def plan_of(columns: int, num_ranks: int, num_tokens: int) -> Plan:
    """One sequence that all ranks share."""
    return Plan.build(
        lengths=[num_tokens],
        capacity_tokens=[num_tokens] * num_ranks,
        groups=[GroupSpec(sequences=[0], ranks=range(num_ranks), columns=columns)],
        schedule=[[[0]]] * num_ranks,
    )


def worker(arguments: argparse.Namespace) -> None:
    """One rank. The first one writes predicted seconds, and measured seconds and bytes, of every case to a file."""
    dist.init_process_group(
        "gloo",
        init_method=f"tcp://{arguments.master}:{PORT}",
        rank=arguments.rank,
        world_size=arguments.ranks,
    )
    group = RankGroup(dist.group.WORLD, device=torch.device("cpu"), name="HDP")
    kernel = select_kernel("auto", torch.device("cpu"), torch.float32)
    rate, latency = ring_rate(group, [range(arguments.ranks)])
    links = Links(
        intra_node_bytes_per_second=rate,
        inter_node_bytes_per_second=rate,
        latency_seconds=latency,
    )
    blocks = {heads: block_seconds(heads, arguments, group, kernel) for heads in KEY_HEADS}
    results: dict[str, list[tuple[float, float]]] = {}
    for repetition in range(arguments.rounds + 1):
        for case in cases(arguments.ranks):
            seconds, sent = one_run(case, arguments, group, kernel)
            numbers = torch.tensor([seconds, 0.0, sent], dtype=torch.float64)
            dist.all_reduce(numbers[:1], op=dist.ReduceOp.MAX)
            dist.all_reduce(numbers[2:])
            if repetition:  # the first round connects the ranks
                results.setdefault(json.dumps(asdict(case)), []).append((float(numbers[0]), float(numbers[2])))
    if arguments.rank == 0:
        predicted = {
            json.dumps(asdict(case)): predicted_seconds(case, arguments, links, blocks[case.key_heads])
            for case in cases(arguments.ranks)
        }
        content = {"bytes_per_second": rate, "latency": latency, "block_seconds": blocks}
        content |= {"predicted": predicted, "runs": results}
        Path(arguments.out).write_text(json.dumps(content), encoding="utf-8")
    dist.destroy_process_group()


def predicted_seconds(case: Case, arguments: argparse.Namespace, links: Links, blocks: tuple[float, float]) -> float:
    """What the simulator says of one layer's attention. ``blocks``: seconds of a block, forward and backward."""
    heads = {"num_attention_heads": QUERY_HEADS, "num_key_value_heads": case.key_heads, "head_dim": WIDTH}
    spec = spec_of_content(PRESETS["tiny"] | heads | {"num_hidden_layers": 1})
    keys = 4 * spec.mean("key_numbers")
    profile = Profile(
        name="measured",
        spec=spec,
        attention_forward=Curve(blocks[0] / arguments.tokens**2),
        attention_backward=Curve(blocks[1] / arguments.tokens**2),
        rest_forward=Curve(),
        rest_backward=Curve(),
        ring_forward_bytes_per_token=keys,
        ring_backward_bytes_per_token=2 * keys,
        links=links,
        layer_parameters=0,
    )
    plan = plan_of(case.columns, arguments.ranks, arguments.tokens * arguments.ranks)
    devices = ClusterConfig(num_gpus=arguments.ranks, gpus_per_node=1)
    return float(simulate(plan, profile, devices).rank_seconds.max())


def attention_of(
    case: Case, arguments: argparse.Namespace, group: RankGroup, kernel: AttentionKernel
) -> PackedAttention:
    """This rank's attention of a case."""
    plan = plan_of(case.columns, arguments.ranks, arguments.tokens * arguments.ranks)
    (micro_batch,) = RankPlan.of(plan, arguments.rank).micro_batches
    return PackedAttention(micro_batch, kernel, group.exchange, buffers=RingBuffers())


def inputs(key_heads: int, arguments: argparse.Namespace) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """This rank's queries, keys and values."""
    torch.manual_seed(arguments.rank)
    q = torch.randn(arguments.tokens, QUERY_HEADS, WIDTH)
    k, v = (torch.randn(arguments.tokens, key_heads, WIDTH) for _ in range(2))
    return q, k, v


def block_seconds(
    key_heads: int, arguments: argparse.Namespace, group: RankGroup, kernel: AttentionKernel
) -> tuple[float, float]:
    """Seconds of a block of attention, forward and backward, while all ranks compute: means of all ranks' blocks."""
    attention = attention_of(Case(key_heads, 1), arguments, group, kernel)
    assert attention.grid is not None, "the only sequence is shared"
    parts = [attention.triangles, *chain.from_iterable(attention.grid.blocks.values())]
    q, k, v = inputs(key_heads, arguments)
    scale = WIDTH**-0.5
    out, lse = kernel.forward(q, k, v, attention.triangles, scale)

    def forward() -> None:
        for part in parts:
            kernel.forward(q, k, v, part, scale)

    def backward() -> None:
        for part in parts:
            kernel.backward(OfQueries(out, q, out, lse), k, v, part, scale)

    means = []
    for work in (forward, backward):
        work()
        dist.barrier()
        started = time.perf_counter()
        for _ in range(BLOCK_ROUNDS):
            work()
        total = torch.tensor([time.perf_counter() - started], dtype=torch.float64)
        dist.all_reduce(total)
        means.append(float(total) / (arguments.ranks * BLOCK_ROUNDS * len(parts)))
    return means[0], means[1]


def one_run(case: Case, arguments: argparse.Namespace, group: RankGroup, kernel: AttentionKernel) -> tuple[float, int]:
    """Seconds and bytes of this rank, for a forward and a backward."""
    attention = attention_of(case, arguments, group, kernel)
    q, k, v = inputs(case.key_heads, arguments)
    sent = group.exchange.bytes_sent
    dist.barrier()
    started = time.perf_counter()
    out, lse = attention.forward(q, k, v)
    attention.backward(out, q, k, v, out, lse)
    return time.perf_counter() - started, group.exchange.bytes_sent - sent


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Run the ranks on nodes of their own."""
    link = Link(bytes_per_second=arguments.mbit * 1e6 / 8)
    with tempfile.TemporaryDirectory() as folder, Network([Node(link=link)] * arguments.ranks) as network:
        out = Path(folder) / "result.json"
        options = [f"--{name}={getattr(arguments, name)}" for name in ("ranks", "rounds", "tokens", "mbit")]
        processes = [
            network.start(
                rank,
                [
                    sys.executable,
                    "-m",
                    "benchmarks.grid_attention",
                    *options,
                    f"--rank={rank}",
                    f"--master={network.address(0)}",
                    f"--out={out}",
                ],
                environment={"GLOO_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": "1"},
                output=Path(folder) / f"{rank}.log",
            )
            for rank in range(arguments.ranks)
        ]
        deadline = time.monotonic() + LIMIT_SECONDS
        for rank, process in enumerate(processes):
            if process.wait(timeout=max(1.0, deadline - time.monotonic())):
                raise SystemExit((Path(folder) / f"{rank}.log").read_text(encoding="utf-8"))
        result: dict[str, Any] = json.loads(out.read_text(encoding="utf-8"))
        return result


def report(content: dict[str, Any], arguments: argparse.Namespace) -> list[dict[str, object]]:
    """Print one row per shape, beside the ring with the same heads."""
    console = Console(width=140)
    console.print(
        f"measured: {content['bytes_per_second'] / 1e6:.3f} MB/s, latency {1e3 * content['latency']:.2f} ms, blocks of "
        + ", ".join(
            f"{1e3 * forward:.2f} + {1e3 * backward:.2f} ms ({heads} key heads)"
            for heads, (forward, backward) in content["block_seconds"].items()
        )
    )
    table = Table(
        title=f"{arguments.tokens * arguments.ranks} tokens on {arguments.ranks} ranks, {arguments.mbit} Mbit/s"
    )
    for heading in (
        *("heads H/G", "grid P x Q", "MB sent", "formula", "predicted, s", "measured, s", "measured / predicted"),
        *("ring / grid: bytes", "predicted", "measured"),
    ):
        table.add_column(heading, justify="right")
    rows: list[dict[str, Any]] = []
    for text, runs in content["runs"].items():
        case = Case(**json.loads(text))
        row: dict[str, Any] = {
            **asdict(case),
            "bytes": runs[-1][1],
            "formula_bytes": formula_bytes(case, arguments.ranks, arguments.tokens * arguments.ranks),
            "predicted": content["predicted"][text],
            "seconds": statistics.median(run[0] for run in runs),
        }
        rows.append(row)
        ring = next(other for other in rows if other["key_heads"] == case.key_heads)
        table.add_row(
            f"{QUERY_HEADS}/{case.key_heads}",
            f"{arguments.ranks // case.columns} x {case.columns}",
            f"{row['bytes'] / 1e6:.2f}",
            f"{row['formula_bytes'] / 1e6:.2f}",
            f"{row['predicted']:.2f}",
            f"{row['seconds']:.2f}",
            f"{row['seconds'] / row['predicted']:.2f}",
            *(f"{ring[name] / row[name]:.2f}" for name in ("formula_bytes", "predicted", "seconds")),
        )
    console.print(table)
    return rows


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=16)
    parser.add_argument("--mbit", type=float, default=40.0, help="rate of every link, Mbit/s")
    parser.add_argument("--tokens", type=int, default=64, help="tokens of the sequence on each rank")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    for name in ("rank", "master", "out"):
        parser.add_argument(f"--{name}", help=argparse.SUPPRESS, type=int if name == "rank" else str)
    arguments = parser.parse_args(argv)
    if arguments.rank is not None:
        worker(arguments)
        return
    rows = report(measure(arguments), arguments)
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
