"""Recurrent layers on ranks behind slow links: how states may travel, and adaptive plans for a skewed mixture.

    python -m benchmarks.recurrent_cluster layer [--ranks 2,4,8,16] [--mbit 100] [--rounds 5]       (Linux, root)
    python -m benchmarks.recurrent_cluster mixture [--ranks 8] [--mbit 100] [--rounds 5]

Every rank is a node of its own (``benchmarks/cluster``), whose link has ``--mbit`` in each direction. Quotas give each
the same part of ``--cpus`` cores, so that ranks which compute one after the other do not get those of the others.

``layer``: forward and backward of one gated delta net, transformers' code in fp32 with 16 heads of 32 x 32, on one
document of ``--tokens``, of which each rank holds two segments as plans have it. The ways take turns:

    ours          what each segment does to a state, composed by a scan, or by a chain where the formula says so
    all-gather    the same, gathered on all ranks, each of which composes what it needs
    serial        no maps: a segment's kernel runs when the state before it has come
    heads         rows are exchanged for heads (all-to-all), each rank runs all rows of its heads, and back

Seconds are those of the slowest rank, medians of rounds. "Compute" is the CPU time of the layer on the rank that needs
most, over the N-th part of what one rank needs for the whole document, measured there in the first two rounds; and over
what the same segments need as whole documents, without a state before them. (Transformers' form without kernels copies
the gradient of all outputs for each 64 rows, so one rank's time for a whole document grows faster than its length.)

``mixture``: steps of a small model on one long and many short documents: a Qwen3.5, three gated delta nets and one
attention, or with ``--model deepseek_v32`` four layers whose queries choose 64 keys. The sides take turns on the same
batches, and losses are compared. ``static``: each document is shared by as many ranks as the longest one needs.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist
from benchmarks.cluster.network import Link, Network, Node
from benchmarks.grpo import Exchange
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import bytescale
from bytescale.attention import PackedAttention, select_kernel
from bytescale.cost.assumed import Rates
from bytescale.hf.model.interface import Attachment, Target
from bytescale.parity import small_model
from bytescale.plan import Plan, RankPlan
from bytescale.plan.plan import GroupSpec
from bytescale.plan.states import chain_is_faster, holder
from bytescale.recurrence.cuts import Cuts, GroupCuts, OneProcessCuts
from bytescale.recurrence.kernels import KERNELS
from bytescale.runtime.group import RankGroup

PORT, SECONDS = 29587, 560
HEADS, WIDTH, HIDDEN, KERNEL = 16, 32, 256, 4
RULE = "torch_chunk_gated_delta_rule"
WAYS = ("ours", "all-gather", "serial", "heads")
CAPACITY, LONGEST, VOCABULARY = 512, 4096, 512
FLOPS = 1.5e10
MODELS: dict[str, dict[str, Any]] = {
    "qwen3_5_text": {
        "layer_types": ["linear_attention"] * 3 + ["full_attention"], "head_dim": 32, "linear_num_key_heads": 4,
        "linear_num_value_heads": 4, "linear_key_head_dim": 32, "linear_value_head_dim": 32,
    },
    "deepseek_v32": {
        "q_lora_rank": 64, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 32,
        "index_topk": 64, "index_n_heads": 4, "index_head_dim": 32, "first_k_dense_replace": 4,
    },
}  # fmt: skip


class Gathered(torch.autograd.Function):
    """The state before each of this rank's segments, from what all segments do to a state, and its backward."""

    @staticmethod
    def forward(ctx: Any, out: Tensor, decay: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        decays, states = in_sequence(decay), in_sequence(state)
        before, entries = torch.zeros_like(states[0]), []
        for one, other in zip(decays, states, strict=True):
            entries.append(before)
            before = one @ before + other
        entry = torch.stack([entries[place] for place in places()])
        ctx.decays = decays
        ctx.save_for_backward(entry)
        return out.view_as(out), entry

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (entry,) = ctx.saved_tensors
        after, found = torch.zeros_like(entry[0]), []
        for decay, gradient in zip(reversed(ctx.decays), reversed(in_sequence(gradients[1])), strict=True):
            found.append(after)
            after = gradient + decay.mT @ after
        d_state = torch.stack([found[::-1][place] for place in places()])
        return gradients[0], d_state @ entry.mT, d_state


def places() -> tuple[int, int]:
    """This rank's two segments of the document."""
    return dist.get_rank(), 2 * dist.get_world_size() - 1 - dist.get_rank()


def in_sequence(own: Tensor) -> list[Tensor]:
    """``[2, ...]`` of all ranks, by segment in the document's order."""
    parts = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, own.contiguous())
    return [part[0] for part in parts] + [part[1] for part in reversed(parts)]


class GatheringCuts(GroupCuts):
    def entry(self, out: Tensor, decay: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        found: tuple[Tensor, Tensor] = Gathered.apply(out, decay, state)
        return found


class Receive(torch.autograd.Function):
    """A state from another rank, whose gradient goes back there. ``rows`` ties backward to the layer."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, source: int) -> tuple[Tensor, Tensor]:
        ctx.source, state = source, rows.new_empty(1, HEADS, WIDTH, WIDTH)
        dist.recv(state, source)
        return rows.view_as(rows), state

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        dist.send(gradients[1].contiguous(), ctx.source)
        return gradients[0], None


class Send(torch.autograd.Function):
    """A state to another rank, whose gradient comes back. ``out`` ties backward to the layer."""

    @staticmethod
    def forward(ctx: Any, out: Tensor, state: Tensor, target: int) -> Tensor:
        ctx.target, ctx.shape = target, state.shape
        dist.send(state.contiguous(), target)
        return out.view_as(out)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        arrived = gradients[0].new_empty(ctx.shape)
        dist.recv(arrived, ctx.target)
        return gradients[0], arrived, None


def serial(cuts: Cuts, stock: Callable[..., Any], *given: Tensor, g: Tensor, beta: Tensor, **options: Any) -> Any:
    """Segment by segment, each with the state before it."""
    size, rank, outs, state = dist.get_world_size(), dist.get_rank(), [], None
    options["output_final_state"] = True
    for rows, place in zip(cuts.fragments, places(), strict=True):
        q, k, v, decay, rate = (part[:, rows] for part in (*given, g, beta))
        if place and (source := holder(place - 1, size)) != rank:
            v, state = Receive.apply(v, source)
        out, state = stock(q, k, v, g=decay, beta=rate, **(options | {"initial_state": state}))
        if place < 2 * size - 1 and (target := holder(place + 1, size)) != rank:
            out = Send.apply(out, state, target)
        outs.append(out)
    return torch.cat(outs, dim=1), None


def by_heads(cuts: Cuts, stock: Callable[..., Any], *given: Tensor, g: Tensor, beta: Tensor, **options: Any) -> Any:
    """All rows of some heads."""
    size, half = dist.get_world_size(), given[0].shape[1] // 2
    widths = [WIDTH] * 3 + [1, 1]
    own = torch.cat([*(part[0] for part in given), g[0, ..., None], beta[0, ..., None]], dim=2)
    rows = Exchange.apply(own, dist.group.WORLD, True).unflatten(0, (size, 2, half))
    whole = torch.cat([*rows[:, 0], *rows[:, 1].flip(0)])  # as the document has them
    q, k, v, decay, rate = whole[None].split(widths, dim=3)
    out, _ = stock(q, k, v, g=decay[..., 0], beta=rate[..., 0], **options)
    first, second = out[0].unflatten(0, (2 * size, half)).split(size)
    back = torch.stack([first, second.flip(0)], dim=1).flatten(0, 2)
    return Exchange.apply(back, dist.group.WORLD, False)[None], None


class WithCuts(Target):
    """Every recurrence is cut alike."""

    def __init__(self, cuts: Cuts) -> None:
        self.cuts = cuts

    def mix(self, mixer: nn.Module, plain: Callable[[], Any], cut: Callable[[Cuts], Any]) -> Any:
        return cut(self.cuts)


def make_mixer(kernel: Callable[..., Any]) -> Any:
    """The same layer on every rank; ``kernel`` takes the place of ours."""
    model: Any = small_model(
        "qwen3_5_text", dtype=torch.float32, num_hidden_layers=1, layer_types=["linear_attention"], hidden_size=HIDDEN,
        linear_num_key_heads=HEADS, linear_num_value_heads=HEADS, linear_key_head_dim=WIDTH,
        linear_value_head_dim=WIDTH, linear_conv_kernel_dim=KERNEL,
    )  # fmt: skip
    with patch.dict(KERNELS, {RULE: kernel}):
        Attachment(model)
    return model.model.layers[0].linear_attn


def expected_bytes(size: int) -> int:
    """What all ranks together send in a forward and a backward: states and the rows before segments, fp32."""
    state = 4 * HEADS * WIDTH**2
    last, total = 2 * size - 1, 0
    if chain_is_faster(size, state, state):
        total = state * sum(holder(place, size) != holder(place + 1, size) for place in range(last))
    else:
        for distance in (2**power for power in range(last.bit_length())):
            for place in range(last + 1 - distance):
                if holder(place, size) != holder(place + distance, size):
                    total += state * (2 if place >= distance else 1)
    return 2 * (total + (2 * size - 2) * (KERNEL - 1) * 3 * HEADS * WIDTH * 4)


def layer_worker(arguments: argparse.Namespace) -> None:
    """One rank. The first one writes seconds, compute times and bytes of each way to a file."""
    size, rank, group = dist.get_world_size(), dist.get_rank(), RankGroup(dist.group.WORLD, device=torch.device("cpu"))
    kernels = {"ours": KERNELS[RULE], "all-gather": KERNELS[RULE], "serial": serial, "heads": by_heads}
    mixers = {way: make_mixer(kernel) for way, kernel in kernels.items()}
    plan = Plan.build(
        lengths=[arguments.tokens],
        capacity_tokens=[arguments.tokens // size] * size,
        groups=[GroupSpec(sequences=[0], ranks=range(size))],
        schedule=[[[0]]] * size,
    )
    (micro_batch,) = RankPlan.of(plan, rank).micro_batches
    generator = torch.Generator().manual_seed(0)
    whole, weights = (torch.randn(arguments.tokens, HIDDEN, generator=generator) for _ in range(2))
    segments = [part.chunk(2 * size) for part in (whole, weights)]
    own = [torch.cat([parts[place] for place in places()]) for parts in segments]

    def timed(way: str, cuts: Cuts, rows: Tensor, weights: Tensor) -> list[float]:
        mixer, leaf = mixers[way], rows.clone().requires_grad_()
        mixer.zero_grad()
        started, computed = time.perf_counter(), time.thread_time()
        loss = (mixer(leaf[None], hdp_attention=WithCuts(cuts))[0] * weights).sum()
        loss.backward()
        times = [time.perf_counter() - started, time.thread_time() - computed]
        assert leaf.grad is not None
        return [*times, float(loss), float(leaf.grad.square().sum())]

    found: dict[str, list[list[float]]] = {way: [] for way in (*WAYS, "one rank", "documents")}
    half = len(own[0]) // 2
    alone = OneProcessCuts([0], [slice(0, half), slice(half, 2 * half)])
    for number in range(arguments.rounds + 1):
        if rank == 0 and number < 2:
            found["one rank"].append(timed("ours", OneProcessCuts([0], [slice(0, len(whole))]), whole, weights))
        for way in (*WAYS, "documents"):
            attention = PackedAttention(micro_batch, select_kernel("math", group.device, torch.float32), group.exchange)
            cuts: Cuts = (
                alone if way == "documents" else (GatheringCuts if way == "all-gather" else GroupCuts)(attention)
            )
            dist.barrier()
            sent = group.exchange.bytes_sent
            seconds, compute, loss, squares = timed("ours" if way == "documents" else way, cuts, *own)
            sums = torch.tensor([loss, squares, group.exchange.bytes_sent - sent], dtype=torch.float64)
            worst = torch.tensor([seconds, compute], dtype=torch.float64)
            dist.all_reduce(worst, op=dist.ReduceOp.MAX)
            dist.all_reduce(sums)
            found[way].append([*worst.tolist(), *sums.tolist()])
    if rank == 0:
        Path(arguments.out).write_text(json.dumps(found), encoding="utf-8")


def report_layers(arguments: argparse.Namespace) -> None:
    """One row for each number of ranks."""
    table = Table("ranks", *(f"{way}, ms" for way in WAYS), "ours / best", "MB sent", "formula", "compute")
    apart = 0.0
    for size in map(int, arguments.ranks.split(",")):
        found = measure(arguments, size)
        rounds = {way: rows[1:] for way, rows in found.items()}  # the first round connects the ranks
        (one,) = rounds["one rank"]
        apart = max(apart, *(abs(row[n] / one[n] - 1) for way in WAYS for row in rounds[way] for n in (2, 3)))
        seconds = {way: statistics.median(row[0] for row in rounds[way]) for way in WAYS}
        best = min(seconds[way] for way in WAYS if way != "ours")
        mine, plain = (statistics.median(row[1] for row in rounds[way]) for way in ("ours", "documents"))
        table.add_row(
            str(size), *(f"{1e3 * seconds[way]:.0f}" for way in WAYS), f"{seconds['ours'] / best:.2f}",
            f"{rounds['ours'][-1][4] / 1e6:.3f}", f"{expected_bytes(size) / 1e6:.3f}",
            f"{mine * size / one[1]:.2f}, {mine / plain:.2f}",
        )  # fmt: skip
    table.title = f"{arguments.tokens} tokens, {arguments.mbit:g} Mbit/s, losses and gradients within {apart:.0e}"
    Console(width=140).print(table)


def mixture(num_tokens: int, seed: int) -> list[dict[str, Tensor]]:
    """One long document and many short ones, lognormal around 128, the same on every rank."""
    random, generator = np.random.default_rng(seed), torch.Generator().manual_seed(seed)
    lengths = [LONGEST]
    while sum(lengths) < num_tokens:
        length = int(np.clip(random.lognormal(np.log(128), 1.0), 16, CAPACITY))
        lengths.append(max(16, min(length, num_tokens - sum(lengths))))
    return [{"tokens": torch.randint(2, VOCABULARY, (length,), generator=generator)} for length in lengths]


class Side:
    """Steps with one planner."""

    def __init__(self, planner: Any, arguments: argparse.Namespace) -> None:
        self.model: Any = small_model(
            arguments.model, dtype=torch.float32, vocab_size=VOCABULARY, hidden_size=128, intermediate_size=256,
            num_hidden_layers=4, max_position_embeddings=LONGEST, **MODELS[arguments.model],
        )  # fmt: skip
        rates = Rates(
            flops_per_second=FLOPS / dist.get_world_size(), attention_flops_per_second=FLOPS / dist.get_world_size(),
            inter_node_bytes_per_second=arguments.mbit * 1e6 / 8, intra_node_bytes_per_second=2e8,
            latency_seconds=2e-3, launch_seconds=0.0,
        )  # fmt: skip
        cost = rates.profile(self._spec(), bytes_per_element=4).cost_model(ranks_per_node=1)
        capacity = max(CAPACITY, LONGEST // dist.get_world_size())
        self.hdp = bytescale.HDP(self.model, capacity_tokens=capacity, planner=planner, cost=cost)
        self.hdp.adamw(1e-3)

    def _spec(self) -> Any:
        hdp = bytescale.HDP(self.model, capacity_tokens=CAPACITY)
        spec = hdp.engine.decoder.spec
        hdp.detach()
        return spec

    def step(self, batch: list[dict[str, Tensor]]) -> float:
        """This rank's part of the mean loss."""
        total, seen = sum(len(document["tokens"]) - 1 for document in batch), 0.0
        for micro in self.hdp.plan(batch):
            loss = micro.loss_sum(self.model) / total
            loss.backward()
            seen += float(loss.detach())
        self.hdp.step()
        return seen


def mixture_worker(arguments: argparse.Namespace) -> None:
    """One rank. The first one writes seconds, losses and bytes of each side to a file."""
    sides = {planner: Side(planner, arguments) for planner in ("adaptive", "static")}
    steps_in_turns(sides, mixture, arguments)


def steps_in_turns(
    sides: dict[str, Any], batch_of: Callable[[int, int], list[dict[str, Any]]], arguments: argparse.Namespace
) -> None:
    """Steps of all sides on the same batches. Of each step, the slowest rank's seconds, the loss and rings' bytes."""
    found: dict[str, list[list[float]]] = {name: [] for name in sides}
    for number in range(arguments.rounds + 1):
        batch = batch_of(arguments.tokens, number)
        for name, side in sides.items():
            dist.barrier()
            sent, started = side.hdp.group.exchange.bytes_sent, time.perf_counter()
            loss = side.step(batch)
            worst = torch.tensor([time.perf_counter() - started], dtype=torch.float64)
            sums = torch.tensor([loss, side.hdp.group.exchange.bytes_sent - sent], dtype=torch.float64)
            dist.all_reduce(worst, op=dist.ReduceOp.MAX)
            dist.all_reduce(sums)
            found[name].append([*worst.tolist(), *sums.tolist()])
            if dist.get_rank() == 0:
                print(number, name, found[name][-1], flush=True)
                Path(arguments.out).write_text(json.dumps(found), encoding="utf-8")


def report_mixture(arguments: argparse.Namespace) -> None:
    report_steps(measure(arguments, int(arguments.ranks)), arguments, "between ranks beside gradients")


def report_steps(found: dict[str, list[list[float]]], arguments: argparse.Namespace, of_bytes: str) -> None:
    """Both sides, and how many times as fast the adaptive one is. The first step warms up."""
    rounds = {name: rows[1:] for name, rows in found.items()}
    pairs = list(zip(rounds["adaptive"], rounds["static"], strict=False))
    apart = max(abs(ours[1] / other[1] - 1) for ours, other in pairs)
    ratio = statistics.median(other[0] / ours[0] for ours, other in pairs)
    print(f"{arguments.ranks} ranks, {arguments.mbit:g} Mbit/s, {len(pairs)} steps of {arguments.tokens} tokens")
    for name, rows in rounds.items():
        seconds = sorted(row[0] for row in rows)
        print(
            f"{name:9} {statistics.median(seconds):.2f} s ({seconds[0]:.2f} to {seconds[-1]:.2f}), "
            f"{statistics.median(row[2] for row in rows) / 1e6:.1f} MB {of_bytes}"
        )
    print(f"adaptive is {ratio:.2f} times as fast; losses within {apart:.0e}")


def measure(arguments: argparse.Namespace, size: int) -> dict[str, list[list[float]]]:
    """Run the ranks on nodes of their own."""
    node = Node(link=Link(bytes_per_second=arguments.mbit * 1e6 / 8), cpus=arguments.cpus / size)
    with tempfile.TemporaryDirectory() as folder, Network([node] * size) as network:
        out = Path(folder) / "found.json"
        given = {name: getattr(arguments, name) for name in ("mbit", "rounds", "tokens", "cpus", "model")}
        options = [f"--{name}={value}" for name, value in given.items()]
        command = [sys.executable, "-m", "benchmarks.recurrent_cluster", arguments.what, *options, f"--out={out}"]
        environment = {
            "WORLD_SIZE": str(size), "MASTER_ADDR": network.address(0), "MASTER_PORT": str(PORT),
            "GLOO_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": "1",
        }  # fmt: skip
        logs = [Path(folder) / f"{rank}.log" for rank in range(size)]
        processes = [
            network.start(rank, command, environment=environment | {"RANK": str(rank)}, output=log)
            for rank, log in enumerate(logs)
        ]
        for rank, process in enumerate(processes):
            network.place(rank, 0, process.pid)
        deadline = time.monotonic() + SECONDS
        while any(process.poll() is None for process in processes) and time.monotonic() < deadline:
            if any(process.poll() for process in processes):
                break
            time.sleep(0.2)
        for process, log in zip(processes, logs, strict=True):
            if process.poll():
                raise SystemExit(log.read_text(encoding="utf-8")[-4000:])
        if not out.exists():
            raise SystemExit(f"no result within {SECONDS} s")
        result: dict[str, list[list[float]]] = json.loads(out.read_text(encoding="utf-8"))
        return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["layer", "mixture"])
    parser.add_argument("--ranks", help="of a layer several numbers, such as 2,4,8,16")
    parser.add_argument("--mbit", type=float, default=100.0, help="rate of every link, Mbit/s")
    parser.add_argument("--cpus", type=float, default=1.6, help="cores of all ranks together")
    parser.add_argument("--tokens", type=int, help="of the document, or of a step")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--model", choices=list(MODELS), default="qwen3_5_text", help="of the mixture")
    parser.add_argument("--out", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    of_layer = arguments.what == "layer"
    arguments.tokens = arguments.tokens or (16384 if of_layer else 8192)
    arguments.ranks = arguments.ranks or ("2,4,8,16" if of_layer else "8")
    if arguments.out:
        dist.init_process_group("gloo")
        torch.set_num_threads(1)
        (layer_worker if of_layer else mixture_worker)(arguments)
        dist.destroy_process_group()
    else:
        (report_layers if of_layer else report_mixture)(arguments)


if __name__ == "__main__":
    main()
