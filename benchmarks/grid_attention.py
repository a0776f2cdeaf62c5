"""Measures one long document's attention on real ranks behind slow links: rings against grids of every shape.

    python -m benchmarks.grid_attention [--ranks 16] [--mbit 40] [--rounds 5] [--json FILE]      (Linux, root)

Every rank is a node of its own (``benchmarks/cluster``), whose link has ``--mbit`` in each direction. The ranks run the
forward and the backward of one layer's attention on one sequence. Each round runs all shapes in turn. Times are those
of the slowest rank, and medians of the rounds. Bytes are the payload that all ranks together hand to gloo, beside what
the formula of ``attention.grid`` says.

The links are slow enough that messages decide, not the cores that all ranks share. So "expected" is the ratio of the
formula's bytes, and "measured" is the ratio of times, each to the ring with the same heads.
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
from pathlib import Path

import torch
import torch.distributed as dist
from benchmarks.cluster.network import Link, Network, Node
from rich.console import Console
from rich.table import Table

from bytescale.attention import PackedAttention, RingBuffers, select_kernel
from bytescale.plan import Plan, RankPlan
from bytescale.plan.plan import GroupSpec
from bytescale.runtime import RankGroup

PORT = 29577
QUERY_HEADS, WIDTH = 8, 64
LIMIT_SECONDS = 900


@dataclass(frozen=True)
class Case:
    """One shape of the group: H query heads over G key heads, and the number of columns of the grid."""

    key_heads: int
    columns: int


def cases(num_ranks: int) -> list[Case]:
    """All shapes, for H = G, 2G and 4G."""
    shapes = [columns for columns in range(1, num_ranks) if num_ranks % columns == 0]
    return [Case(key_heads, columns) for key_heads in (8, 4, 2) for columns in shapes]


def formula_bytes(case: Case, num_ranks: int, num_tokens: int) -> int:
    """What all ranks together send in a forward and a backward, fp32 (``attention.grid``)."""
    rows, heads, keys = num_ranks // case.columns, QUERY_HEADS, case.key_heads * 2 * WIDTH
    forward = (rows - 1) * keys * 4 + (case.columns - 1) * heads * (2 * WIDTH * 4 + 4)
    backward = (rows - 1) * keys * 8 + (case.columns - 1) * heads * (3 * WIDTH * 4 + 8)
    return num_tokens * (forward + backward)


def worker(arguments: argparse.Namespace) -> None:
    """One rank. The first one writes the seconds and bytes of every case to a file."""
    dist.init_process_group(
        "gloo",
        init_method=f"tcp://{arguments.master}:{PORT}",
        rank=arguments.rank,
        world_size=arguments.ranks,
    )
    group = RankGroup(dist.group.WORLD, device=torch.device("cpu"), name="HDP")
    kernel = select_kernel("auto", torch.device("cpu"), torch.float32)
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
        Path(arguments.out).write_text(json.dumps(results), encoding="utf-8")
    dist.destroy_process_group()


def one_run(case: Case, arguments: argparse.Namespace, group: RankGroup, kernel: object) -> tuple[float, int]:
    """Seconds and bytes of this rank, for a forward and a backward."""
    length = arguments.tokens * arguments.ranks
    plan = Plan.build(
        lengths=[length],
        capacity_tokens=[length] * arguments.ranks,
        groups=[GroupSpec(sequences=[0], ranks=range(arguments.ranks), columns=case.columns)],
        schedule=[[[0]]] * arguments.ranks,
    )
    (micro_batch,) = RankPlan.of(plan, arguments.rank).micro_batches
    attention = PackedAttention(micro_batch, kernel, group.exchange, buffers=RingBuffers())  # type: ignore[arg-type]
    torch.manual_seed(arguments.rank)
    q = torch.randn(micro_batch.num_tokens, QUERY_HEADS, WIDTH)
    k, v = (torch.randn(micro_batch.num_tokens, case.key_heads, WIDTH) for _ in range(2))
    sent = group.exchange.bytes_sent
    dist.barrier()
    started = time.perf_counter()
    out, lse = attention.forward(q, k, v)
    attention.backward(out, q, k, v, out, lse)
    return time.perf_counter() - started, group.exchange.bytes_sent - sent


def measure(arguments: argparse.Namespace) -> dict[str, list[tuple[float, float]]]:
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
        result: dict[str, list[tuple[float, float]]] = json.loads(out.read_text(encoding="utf-8"))
        return result


def report(results: dict[str, list[tuple[float, float]]], arguments: argparse.Namespace) -> list[dict[str, object]]:
    """Print one row per shape, beside the ring with the same heads."""
    table = Table(
        title=f"{arguments.tokens * arguments.ranks} tokens on {arguments.ranks} ranks, {arguments.mbit} Mbit/s"
    )
    for heading in ("heads H/G", "grid P x Q", "MB sent", "formula", "seconds", "expected", "measured"):
        table.add_column(heading, justify="right")
    rows: list[dict[str, object]] = []
    rings: dict[int, tuple[float, int]] = {}
    for text, runs in results.items():
        case = Case(**json.loads(text))
        seconds = statistics.median(run[0] for run in runs)
        formula = formula_bytes(case, arguments.ranks, arguments.tokens * arguments.ranks)
        ring = rings.setdefault(case.key_heads, (seconds, formula))
        row = {
            **asdict(case),
            "bytes": runs[-1][1],
            "formula_bytes": formula,
            "seconds": seconds,
            "expected": ring[1] / formula,
            "measured": ring[0] / seconds,
        }
        rows.append(row)
        table.add_row(
            f"{QUERY_HEADS}/{case.key_heads}",
            f"{arguments.ranks // case.columns} x {case.columns}",
            f"{runs[-1][1] / 1e6:.2f}",
            f"{formula / 1e6:.2f}",
            f"{seconds:.3f}",
            f"{ring[1] / formula:.2f}",
            f"{ring[0] / seconds:.2f}",
        )
    Console().print(table)
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
