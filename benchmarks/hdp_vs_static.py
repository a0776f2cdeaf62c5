"""Compares the static CP mesh, naive HDP and balanced HDP in one run, with the same corpus, model, ranks and batches.

    .venv/bin/python benchmarks/hdp_vs_static.py [--ranks 2] [--rounds 3]

Every rank is a process with one thread. The planners take turns on the same global batches, round after round, so noise
of the machine affects all of them alike. A planner's time for a batch is the median over the rounds. A step is the same
as in training: agree, forward and backward of the plan, reduce-scatter, AdamW, all-gather.

The last line is the price of the ring. It compares a step of all ranks together on the longest document with a step of
one process alone. The perfect result would be the time of the one process divided by the number of ranks.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import statistics
import time
from collections.abc import Sequence
from datetime import date
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from bytescale.common.ports import reserve_port
from bytescale.config import DataConfig, ModelConfig, OptimizerConfig, resolve_architecture
from bytescale.cost import Cluster
from bytescale.cost.assumed import assumed_cost
from bytescale.data.loading.assemble import Segments
from bytescale.data.loading.corpus import Corpus, prepare_corpus
from bytescale.data.order.batches import BatchSampler, GlobalBatch
from bytescale.plan import Plan, RankPlan
from bytescale.plan.plan import GroupSpec
from bytescale.planner import adaptive_plan, naive_plan, paper_plan, static_plan

CONTEXT = 8192
BATCH_TOKENS = 32768
NUM_BATCHES = 2
NUM_LAYERS = 2


def main() -> None:
    arguments = parse_arguments()
    os.environ["OMP_NUM_THREADS"] = "1"
    data = DataConfig(
        sources=("python:stdlib",),
        tokenizer="bpe",
        context_length=CONTEXT,
        over_length="drop",
        batch_tokens=BATCH_TOKENS,
    )
    prepare_corpus(data)
    results = run_processes(arguments.ranks, data, arguments.rounds)
    report = {
        "date": str(date.today()),
        "machine": f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores",
        "ranks": arguments.ranks,
        "rounds": arguments.rounds,
        **results,
    }
    print_tables(report)
    if arguments.json:
        arguments.json.write_text(json.dumps(report, indent=1), encoding="utf-8")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2, help="processes, one thread each")
    parser.add_argument("--rounds", type=int, default=3, help="how often each planner takes its turn on each batch")
    parser.add_argument("--json", type=Path, help="write all numbers to this file")
    return parser.parse_args()


def run_processes(num_ranks: int, data: DataConfig, rounds: int) -> dict[str, Any]:
    """Start the ranks on loopback and return what the first one measured."""
    reservation = reserve_port()
    port = reservation.getsockname()[1]
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    ranks = [
        context.Process(target=one_rank, args=(rank, num_ranks, port, data, rounds, sender))
        for rank in range(num_ranks)
    ]
    for process in ranks:
        process.start()
    sender.close()
    try:
        return receiver.recv()
    except EOFError:
        raise SystemExit("a rank failed: its stack trace is above") from None
    finally:
        for process in ranks:
            process.join(10)
        reservation.close()


def one_rank(rank: int, num_ranks: int, port: int, data: DataConfig, rounds: int, sender: Connection) -> None:
    os.environ.update(GLOO_SOCKET_IFNAME="lo", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=num_ranks)
    corpus = prepare_corpus(data)
    worker = Worker(corpus, num_ranks)
    results = {"planners": worker.compare_planners(data, rounds), "ring": worker.price_of_the_ring(rounds)}
    if rank == 0:
        sender.send(results)
    dist.destroy_process_group()


class Worker:
    """One rank with a model, an optimizer and the means to time a step under any plan."""

    def __init__(self, corpus: Corpus, num_ranks: int) -> None:
        import torch
        import torch.distributed as dist

        from bytescale.attention import select_kernel
        from bytescale.models import Llama
        from bytescale.runtime import FlatParameters, Mesh, RankGroup, ShardedOptimizer

        self.corpus = corpus
        self.num_ranks = num_ranks
        self.shape = resolve_architecture(
            ModelConfig(preset="tiny", num_layers=NUM_LAYERS), tokenizer_vocab_size=corpus.facts.vocab_size
        )
        self.model = Llama(self.shape)
        self.model.initialise(0)
        self.hdp = RankGroup(dist.group.WORLD)
        self.flat = FlatParameters(self.model.named_parameters(), num_ranks)
        self.optimizer = ShardedOptimizer.adamw(self.flat, OptimizerConfig(lr=1e-4), Mesh.of_hdp(self.hdp))
        self.kernel = select_kernel("flash", torch.device("cpu"), torch.float32)

    def compare_planners(self, data: DataConfig, rounds: int) -> dict[str, dict[str, float]]:
        """Return seconds and bytes per planner, summed over the batches."""
        sampler = BatchSampler(self.corpus.index, data.batch_tokens, data.shuffle_seed)
        batches = [sampler.next_batch() for _ in range(NUM_BATCHES)]
        cluster = Cluster.uniform(self.num_ranks, CONTEXT // self.num_ranks)
        cost = assumed_cost(self.shape, device="cpu", bytes_per_element=4)
        planners = {
            f"static CP={self.num_ranks}": static_plan,
            "naive HDP": naive_plan,
            "balanced HDP (paper)": paper_plan,
            "balanced HDP (adaptive)": adaptive_plan,
        }
        totals = {name: {"seconds": 0.0, "bytes_sent": 0.0} for name in planners}
        for batch in batches:
            plans = {name: planner(batch.lengths, cluster=cluster, cost=cost) for name, planner in planners.items()}
            seconds: dict[str, list[float]] = {name: [] for name in planners}
            for _ in range(rounds):
                for name, plan in plans.items():
                    elapsed, sent = self.step(batch, plan)
                    seconds[name].append(elapsed)
                    totals[name]["bytes_sent"] += sent / rounds
            for name, times in seconds.items():
                totals[name]["seconds"] += statistics.median(times)
        num_tokens = sum(batch.num_tokens for batch in batches)
        for name in planners:
            totals[name]["tokens_per_second"] = num_tokens / totals[name]["seconds"]
        return totals

    def price_of_the_ring(self, rounds: int) -> dict[str, float]:
        """Time a step on the longest document, with a ring of all ranks and with one process alone."""
        piece = int(self.corpus.pieces.length.argmax())
        pieces = self.corpus.all_pieces[[piece]]
        batch = GlobalBatch.of(self.corpus.index, pieces, step=0, epoch=0, ends_epoch=False)
        length = batch.num_tokens
        ring, alone = (one_document_plan(length, ranks, self.num_ranks) for ranks in (range(self.num_ranks), [0]))
        times: dict[str, list[float]] = {"ring_seconds": [], "alone_seconds": []}
        for _ in range(rounds):
            times["ring_seconds"].append(self.step(batch, ring)[0])
            times["alone_seconds"].append(self.step(batch, alone)[0])
        medians = {name: statistics.median(values) for name, values in times.items()}
        return {
            "length": length,
            **medians,
            "overhead": self.num_ranks * medians["ring_seconds"] / medians["alone_seconds"] - 1,
        }

    def step(self, batch: GlobalBatch, plan: Plan) -> tuple[float, int]:
        """Take one training step. Return the slowest rank's wall seconds, and all ranks' bytes of attention traffic."""
        from bytescale.runtime import Executor, Mesh, ModelPart

        rank_plan = RankPlan.of(plan, self.hdp.rank)
        micro_batches = self.corpus.micro_batches(rank_plan, Segments.of(batch, rank_plan, "token"))
        sent_before = self.hdp.exchange.bytes_sent
        self.hdp.agree("the plan", rank_plan.digest)
        started = time.perf_counter()
        self.flat.zero_gradients()
        Executor(parts=[ModelPart(model=self.model)], kernel=self.kernel, mesh=Mesh.of_hdp(self.hdp)).run(
            rank_plan, micro_batches, num_global_targets=batch.total_targets
        )
        share = self.optimizer.reduce_gradients()
        rows = self.hdp.share([share, float(self.hdp.exchange.bytes_sent - sent_before)])
        self.optimizer.update(sum(row[0] for row in rows) ** 0.5, 1.0, 1e-4)
        elapsed = max(row[0] for row in self.hdp.share([time.perf_counter() - started]))
        return elapsed, int(sum(row[1] for row in rows))


def one_document_plan(length: int, ranks: Sequence[int], num_ranks: int) -> Plan:
    """Return a plan in which ``ranks`` share a document of ``length`` tokens and other ranks have nothing to do."""
    return Plan.build(
        lengths=[length],
        capacity_tokens=[length] * num_ranks,
        groups=[GroupSpec(sequences=[0], ranks=ranks)],
        schedule=[[[0]] if rank in ranks else [] for rank in range(num_ranks)],
    )


def print_tables(report: dict[str, Any]) -> None:
    print(f"{report['date']}, {report['machine']}, {report['ranks']} ranks of one thread, {report['rounds']} rounds")
    print(
        f"stdlib corpus, context {CONTEXT}, {NUM_BATCHES} global batches of {BATCH_TOKENS} tokens, tiny Llama of "
        f"{NUM_LAYERS} layers, fp32\n"
    )
    static = next(iter(report["planners"].values()))["tokens_per_second"]
    print(f"{'planner':<26} {'tokens/s':>9} {'ratio':>6} {'attention MiB sent':>19}")
    for name, numbers in report["planners"].items():
        ratio = numbers["tokens_per_second"] / static
        sent = numbers["bytes_sent"] / 2**20
        print(f"{name:<26} {numbers['tokens_per_second']:>9.0f} {ratio:>6.2f} {sent:>19.1f}")
    ring = report["ring"]
    print(
        f"\none document of {ring['length']} tokens: ring of {report['ranks']} {ring['ring_seconds']:.2f} s, alone "
        f"{ring['alone_seconds']:.2f} s a step; overhead against perfect division {ring['overhead']:+.1%}"
    )


if __name__ == "__main__":
    main()
