"""Parameters that the ranks of a node share, on two nodes behind slow links, beside the default and FSDP2.

    python -m benchmarks.sharing_cluster [--lengths github] [--mbit 200] [--rounds 3] [--sides ours]  (Linux, root)

Two nodes of four ranks are network namespaces (``benchmarks/cluster``): ranks of a node talk over loopback, and a
node's link has ``--mbit`` in each direction. Quotas give each rank the same part of ``--cpus`` cores. Lengths are those
of ``bytescale.data.length_distributions`` divided by 512, so that the longest, 2M, is 4096 tokens, which 8 ranks of 512
hold; documents below 32 tokens are joined to ones of at least 32, and the first one of a batch is of the longest ones.
The model is a Llama of 3.8M parameters in fp32. The sides take turns, step by step, on the same batches:

    d = 1          every rank has all parameters and gradients; optimizer states are sharded (``shard="optimizer"``)
    d = 4          the ranks of a node share parameters and gradients (``shard="parameters"``)
    FSDP2          fully_shard over all ranks, with Ulysses of the smallest degree that holds the longest document;
                   gradients are reduced in each micro-batch and weights are gathered for each forward and backward
    FSDP2, tuned   weights stay gathered from forward to backward, gradients are kept whole and reduced once a step

Seconds are those of the slowest rank, medians of rounds. CPU seconds are those of all ranks together. Messages inside a
node take a part of them: the cores that compute copy their bytes, too, where GPUs have engines of their own. Of the
gathers of d = 4 three times are added up over a step: ``alone``, what they take when no rank computes; ``waited``, for
which ranks wait in them; and ``exposed``, the part of the waiting after the last rank of the domain has posted its
gather. Before that a rank waits for slower ranks, whatever the gather takes. (All ranks read one clock, because they
are on one machine.) Hidden is 1 - exposed / alone.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from benchmarks.grpo import (
    CAPACITY,
    FLOPS_PER_CORE,
    HEADS,
    LONGEST,
    LR,
    MAX_NORM,
    VOCABULARY,
    Batch,
    Fsdp,
    make_model,
    measure,
    trained,
)
from torch import Tensor

import bytescale
from bytescale.cost.assumed import Rates
from bytescale.cost.gradient_sync import round_seconds
from bytescale.data.length_distributions import distribution_names, sample_lengths
from bytescale.runtime.group import PendingCollective
from bytescale.runtime.optimizer.units import Unit

CAPACITY_TOKENS, SHORTEST, SCALE = CAPACITY // 2, 32, 2**21 // LONGEST
SIDES = {"ours": ("d = 1", "d = 4"), "all": ("d = 1", "d = 4", "FSDP2", "FSDP2, tuned")}
TIMES = ("alone", "waited", "exposed")


def documents(name: str, num_tokens: int, seed: int) -> Batch:
    """The same on every rank."""
    drawn = sample_lengths(name, (num_tokens - LONGEST) * SCALE, seed, LONGEST * SCALE) // SCALE
    lengths, joined = [LONGEST], 0
    for length in drawn.tolist():
        joined += length
        if joined >= SHORTEST:
            lengths.append(min(joined, LONGEST))
            joined = 0
    generator, batch = torch.Generator().manual_seed(seed), []
    for length in lengths:
        weights = torch.ones(length)
        weights[-1] = 0.0  # nothing comes after it
        batch.append({"tokens": torch.randint(2, VOCABULARY, (length,), generator=generator), "weights": weights})
    return batch


class Ours:
    """Steps under ``HDP``."""

    def __init__(self, arguments: argparse.Namespace, domain: int) -> None:
        self.model, self.domain, per_node = make_model(HEADS), domain, arguments.ranks_per_node
        flops = FLOPS_PER_CORE * arguments.cpus / arguments.ranks
        rates = Rates(
            flops_per_second=flops, attention_flops_per_second=flops,
            inter_node_bytes_per_second=arguments.mbit * 1e6 / 8, intra_node_bytes_per_second=2e8,
            latency_seconds=2e-3, launch_seconds=0.0,
        )  # fmt: skip
        spec = bytescale.HDP(make_model(HEADS), capacity_tokens=CAPACITY_TOKENS).engine.decoder.spec
        profile = rates.profile(spec, bytes_per_element=4)
        cost = replace(
            profile.cost_model(ranks_per_node=per_node),
            gather_seconds=sum(round_seconds(profile, domain=domain, ranks_per_node=per_node)),
        )
        options: dict[str, Any] = {"shard": "parameters", "domain": domain} if domain > 1 else {}
        self.hdp = bytescale.HDP(self.model, capacity_tokens=CAPACITY_TOKENS, cost=cost, **options)
        self.hdp.adamw(LR, weight_decay=0.01)
        self.step_seconds = 0.0

    def update(self, batch: Batch) -> tuple[float, float]:
        """This rank's part of the mean loss, and the norm of the gradient."""
        total, seen = trained(batch), 0.0
        for micro in self.hdp.plan(batch, last=self.domain == 1):  # reductions of domains do not overlap
            loss = micro.loss_sum(self.model) / total
            loss.backward()
            seen += float(loss.detach())
        started = time.perf_counter()
        norm = self.hdp.step(max_grad_norm=MAX_NORM).grad_norm
        self.step_seconds = time.perf_counter() - started
        return seen, norm


class StaticFsdp(Fsdp):
    """``Fsdp`` with the mean loss of all tokens."""

    def _loss(self, own: Batch) -> Tensor:
        logprobs, rows = self._logprobs(own)
        return -(rows([document["weights"] for document in own]) * logprobs).sum()


@dataclass
class Watched:
    """A gather whose times are noted: posted, and when its rank begins and ends to wait."""

    pending: PendingCollective
    times: list[float]

    def wait(self) -> None:
        self.times.append(time.perf_counter())
        self.pending.wait()
        self.times.append(time.perf_counter())


class Gathers:
    """Notes the times of all gathers of the parameters that this rank shares."""

    def __init__(self) -> None:
        self._start: Callable[[Unit], PendingCollective] = Unit.start_gather
        self.seen: list[tuple[Unit, list[float]]] = []
        Unit.start_gather = self._watched  # type: ignore[method-assign, assignment]

    @property
    def _watched(self) -> Callable[[Unit], Watched]:
        def start(unit: Unit) -> Watched:
            pending = self._start(unit)
            self.seen.append((unit, [time.perf_counter()]))
            return Watched(pending, self.seen[-1][1])

        return start

    def of_step(self, ranks_per_node: int) -> list[tuple[int, float, float]]:
        """The unit of each gather since the last call, and for how long this rank has waited: in all, and exposed."""
        own = [(unit.number, times) for unit, times in self.seen if len(times) == 3]
        every: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(every, own)
        first = dist.get_rank() // ranks_per_node * ranks_per_node
        found = []
        for gather in zip(*every[first : first + ranks_per_node], strict=True):  # all ranks make them in one order
            assert len({unit for unit, _ in gather}) == 1, "the ranks of a domain gather the same units"
            unit, (_, began, ended) = own[len(found)]
            posted = max(times[0] for _, times in gather)
            found.append((unit, ended - began, max(0.0, ended - max(began, posted))))
        return found

    def alone(self, repeats: int = 7) -> dict[int, float]:
        """Seconds of the gather of each unit while no rank computes: medians, of the slowest rank."""
        units = {unit.number: unit for unit, _ in self.seen}
        found = {}
        for number, unit in sorted(units.items()):
            seconds = []
            for _ in range(repeats):
                dist.barrier()
                unit.store.domain.sum_of([0.0])  # the domain starts together
                started = time.perf_counter()
                self._start(unit).wait()
                worst = torch.tensor(time.perf_counter() - started)
                unit.close()
                dist.all_reduce(worst, op=dist.ReduceOp.MAX)
                seconds.append(float(worst))
            found[number] = statistics.median(seconds)
        return found


def worker(arguments: argparse.Namespace) -> None:
    """One rank. The first one writes seconds, losses, norms and the times of gathers of each side to a file."""
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    gathers = Gathers()
    sides: dict[str, Any] = {f"d = {domain}": Ours(arguments, domain) for domain in (1, 4)}
    names = SIDES[arguments.sides]
    for name in names[2:]:
        sides[name] = StaticFsdp(make_model(HEADS), CAPACITY_TOKENS, tuned="tuned" in name)
    found: dict[str, list[list[float]]] = {name: [] for name in (*names, "gathers")}
    alone: dict[int, float] = {}
    for number in range(arguments.rounds + 1):
        batch = documents(arguments.lengths, arguments.tokens, number)
        for name in names:
            gathers.seen.clear()
            dist.barrier()
            started, cpu = time.perf_counter(), time.process_time()
            loss, norm = sides[name].update(batch)
            worst = torch.tensor([time.perf_counter() - started], dtype=torch.float64)
            cpu = time.process_time() - cpu
            sums = torch.tensor([loss, 0.0, 0.0, 0.0, cpu], dtype=torch.float64)
            if name == "d = 4":
                times = gathers.of_step(arguments.ranks_per_node)
                alone = alone or gathers.alone()
                sums[1:4] = torch.tensor([[alone[unit], *rest] for unit, *rest in times], dtype=torch.float64).sum(0)
            dist.all_reduce(worst, op=dist.ReduceOp.MAX)
            dist.all_reduce(sums)
            found[name].append([float(worst), float(sums[0]), norm, float(sums[4])])
            if name in SIDES["ours"]:
                found[name][-1].append(sides[name].step_seconds)
            if name == "d = 4":
                found["gathers"].append((sums[1:4] / arguments.ranks).tolist())
            if os.environ["RANK"] == "0":
                Path(arguments.out).write_text(json.dumps(found), encoding="utf-8")
    dist.destroy_process_group()


def report(found: dict[str, list[list[float]]], arguments: argparse.Namespace) -> None:
    """Seconds of each side beside the others, and how much of the gathers is hidden. The first step warms up."""
    rounds, names = min(map(len, found.values())), SIDES[arguments.sides]
    lengths = [[len(d["tokens"]) for d in documents(arguments.lengths, arguments.tokens, n)] for n in range(rounds)]
    apart = max(
        abs(a / b - 1)
        for name in names
        for mine, theirs in zip(found[name][:rounds], found["d = 1"], strict=False)
        for a, b in zip(mine[1:3], theirs[1:3], strict=True)
    )
    tokens, count = statistics.mean(map(sum, lengths)), statistics.mean(map(len, lengths))
    print(
        f"{arguments.lengths}, {arguments.mbit:g} Mbit/s, {rounds - 1} rounds of {tokens:.0f} tokens in {count:.0f} "
        f"documents; losses and norms within {apart:.0e}"
    )
    for name in names:
        seconds = sorted(row[0] for row in found[name][1:rounds])
        over = [
            statistics.median(a[0] / b[0] for a, b in zip(found[name][1:rounds], found[base][1:], strict=False))
            for base in ("d = 1", "d = 4")
        ]
        print(
            f"{name:13} {statistics.median(seconds):6.2f} s ({seconds[0]:.2f} to {seconds[-1]:.2f})  "
            f"{over[0]:5.2f} times d = 1, {over[1]:5.2f} times d = 4, "
            f"{statistics.median(row[3] for row in found[name][1:rounds]):5.1f} CPU s"
        )
    steps = [statistics.median(row[4] for row in found[name][1:rounds]) for name in SIDES["ours"]]
    print(f"of these in hdp.step(), on the first rank: d = 1 {steps[0]:.2f} s, d = 4 {steps[1]:.2f} s")
    times = [statistics.mean(column) for column in zip(*found["gathers"][1:rounds], strict=True)]
    told = ", ".join(f"{name} {1e3 * value:.0f} ms" for name, value in zip(TIMES, times, strict=True))
    print(f"gathers of a rank and step: {told}; hidden {1 - times[2] / times[0]:.0%}, waiting for others counted "
          f"{1 - times[1] / times[0]:.0%}")  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", choices=distribution_names(), default="github")
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--ranks-per-node", type=int, default=4)
    parser.add_argument("--mbit", type=float, default=200.0, help="rate of every node's link, Mbit/s")
    parser.add_argument("--cpus", type=float, default=1.6, help="cores of all ranks together")
    parser.add_argument("--tokens", type=int, default=20480, help="of a step, about")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--sides", choices=list(SIDES), default="all")
    parser.add_argument("--out", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.out:
        worker(arguments)
    else:
        report(measure(arguments, "benchmarks.sharing_cluster"), arguments)


if __name__ == "__main__":
    main()
