"""Measures how much of tensor parallelism's messages products hide, on a slow link between two ranks.

    sudo PYTHONPATH=src:. python benchmarks/tp_overlap.py [--mbit 200 400] [--tokens 1024] [--rounds 15]

Each of two tensor-parallel ranks has a network namespace and one thread for products (`benchmarks/cluster/network.py`).
The model is a Llama of four layers without a loss: forward and backward of one micro-batch, with the same gradient of
the result. Four modes take turns in the same processes:

    none         Nothing is sent, so this is computation alone; its numbers are wrong.
    whole        Rows travel in one message, and every message is waited for at once.
    plain        Rows travel in slices, and every message is waited for at once (`TokenShards(overlap=False)`).
    overlapped   The same messages travel beside products.

The table has medians over rounds of rank 0's seconds, and of the seconds in which it waits for messages. Before that,
both ranks compare the gradients of plain and overlapped bit by bit.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from benchmarks.cluster.network import Link, Network, Node, missing
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig

from bytescale.attention import PackedAttention, select_kernel
from bytescale.hf.model.decoder import HFDecoder
from bytescale.hf.model.tensor_parallel import apply_tensor_parallelism
from bytescale.plan import Plan, RankPlan
from bytescale.plan.plan import GroupSpec
from bytescale.runtime.group import PendingCollective, RankGroup
from bytescale.runtime.token_shards import TokenShards

CONFIG = LlamaConfig(
    vocab_size=1024, num_hidden_layers=4, hidden_size=512, num_attention_heads=8, num_key_value_heads=4,
    intermediate_size=1536,
)  # fmt: skip
ROOT = Path(__file__).parents[1]
MODES = ("none", "whole", "plain", "overlapped")
PORT = 29500


class Silent(RankGroup):
    """A group whose ranks send nothing. They have their own numbers in place of the others', as quickly as possible."""

    def all_gather(self, full: Tensor, shard: Tensor) -> None:
        full.view(self.size, -1).copy_(shard.reshape(1, -1))

    def reduce_scatter(self, full: Tensor) -> Tensor:
        return full[: len(full) // self.size]

    def start_reduce_scatter(self, full: Tensor) -> PendingCollective:
        return PendingCollective(self, None)

    def start_all_gather(self, full: Tensor, own: Tensor | None = None) -> PendingCollective:
        return PendingCollective(self, None)


def run_rank(rank: int, num_tokens: int, rounds: int) -> None:
    """One rank's process. Rank 0 prints the medians as JSON."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://node0:{PORT}", rank=rank, world_size=2)
    tp, silent = RankGroup(dist.group.WORLD, name="TP"), Silent(dist.group.WORLD)
    shards = TokenShards(tp)
    torch.manual_seed(0)
    model = HFDecoder(AutoModelForCausalLM.from_config(CONFIG).train())
    apply_tensor_parallelism(model, shards)
    attention = whole_document(num_tokens)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(CONFIG.vocab_size, (num_tokens,), generator=generator)
    d_hidden = torch.randn(num_tokens, CONFIG.hidden_size, generator=generator)

    def step(mode: str) -> float:
        shards.tp, shards.overlap = (silent if mode == "none" else tp), mode == "overlapped"
        shards.least_work = 1e18 if mode == "whole" else None
        model.zero_grad()
        tp.all_reduce(torch.zeros(1))  # both ranks begin together
        tp.clock.take()
        started = time.perf_counter()
        model(tokens, torch.arange(num_tokens), attention).backward(d_hidden)
        return time.perf_counter() - started

    gradients = []
    for mode in ("plain", "overlapped"):
        step(mode)
        gradients.append([parameter.grad for parameter in model.parameters() if parameter.grad is not None])
    assert gradients[0], "there is something to compare"
    assert all(map(torch.equal, *gradients)), "overlap has changed bits"
    seconds: dict[str, list[tuple[float, float]]] = {mode: [] for mode in MODES}
    for number in range(rounds):
        for mode in MODES[:: 1 if number % 2 else -1]:
            seconds[mode].append((step(mode), tp.clock.take()()))
    if rank == 0:
        columns = {mode: zip(*rows, strict=True) for mode, rows in seconds.items()}
        print(json.dumps({mode: list(map(statistics.median, pair)) for mode, pair in columns.items()}), flush=True)
    dist.destroy_process_group()


def whole_document(num_tokens: int) -> PackedAttention:
    """Causal attention of one document."""
    groups = [GroupSpec(sequences=[0], ranks=[0])]
    plan = Plan.build(lengths=[num_tokens], capacity_tokens=[num_tokens], groups=groups, schedule=[[[0]]])
    kernel = select_kernel("auto", torch.device("cpu"), torch.float32)
    return PackedAttention(RankPlan.of(plan, 0).micro_batches[0], kernel, RankGroup().exchange)


def measured(mbit: float, num_tokens: int, rounds: int) -> dict[str, list[float]]:
    """Median seconds of a step and of waiting, by mode, on links of ``mbit`` Mbit/s."""
    environment = {"PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)]), "GLOO_SOCKET_IFNAME": "eth0"}
    link = Link(bytes_per_second=mbit * 1e6 / 8)
    with tempfile.TemporaryDirectory() as folder, Network([Node(link=link)] * 2) as network:
        outputs = [Path(folder) / str(rank) for rank in range(2)]
        options = ["--tokens", str(num_tokens), "--rounds", str(rounds)]
        processes = [
            network.start(
                rank, [sys.executable, __file__, *options, "--rank", str(rank)], environment=environment, output=output
            )
            for rank, output in enumerate(outputs)
        ]
        for process, output in zip(processes, outputs, strict=True):
            if process.wait(timeout=600):
                raise RuntimeError(output.read_text())
        result: dict[str, list[float]] = json.loads(outputs[0].read_text().splitlines()[-1])
        return result


def main(arguments: Sequence[str] | None = None) -> int | str:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mbit", type=float, nargs="+", default=[200, 400])
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.rank is not None:
        run_rank(options.rank, options.tokens, options.rounds)
        return 0
    if missing():
        return "error: " + "; ".join(missing())
    print("| Mbit/s | mode | step, ms | waiting, ms | share waiting |\n|---|---|---|---|---|")
    for mbit in options.mbit:
        for mode, (step, waiting) in measured(mbit, options.tokens, options.rounds).items():
            print(f"| {mbit:g} | {mode} | {1e3 * step:.0f} | {1e3 * waiting:.0f} | {waiting / step:.0%} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
