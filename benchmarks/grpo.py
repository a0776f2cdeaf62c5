"""An update of GRPO on rollouts of unequal length behind slow links: ours against the scheme of verl's FSDP engine.

    python -m benchmarks.grpo [--ranks 4] [--ranks-per-node 1] [--mbit 150] [--rounds 5]           (Linux, root)

Rollouts have the lengths of agents' traces, 1K to 64K tokens, divided by 16: lognormal around 512, from 64 to 4096. The
model is a Llama of 3.4M parameters in fp32, and a rank's micro-batch holds 1024 tokens. Nodes are network namespaces
(``benchmarks/cluster``), whose links have ``--mbit`` in each direction, and ranks share ``--cpus`` cores by quotas.
Recorded log-probabilities, the clipped loss of GRPO over tokens, clipping by norm, AdamW. The sides take turns, update
by update, on the same rollouts, and their losses and gradient norms are compared:

    loop          a loop over ``hdp.plan(batch, last=True)``, the loss on each micro-batch
    engine        what the engine of ``bytescale.integrations.verl`` does for a loss that is a sum over documents:
                  ``WholeBatch``, given the loss; each rank has every n-th rollout, as verl deals them
    two passes    what it does for others
    FSDP          verl's scheme with its defaults: FSDP2, whose gradients are reduced in each micro-batch and whose
                  weights are gathered for each forward and backward; Ulysses, whose degree is the smallest that holds
                  the longest rollout; micro-batches of at most capacity times degree tokens, balanced by work, equally
                  many on all ranks; sequences packed, attention by PyTorch's kernel for each of them
    FSDP, tuned   the same with both of verl's options for slow links: weights stay gathered from forward to backward,
                  and gradients are reduced once an update

verl's own engine needs flash-attn, and so a GPU, for Ulysses. Seconds are those of the slowest rank, medians of rounds.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from benchmarks.cluster.network import Link, Network, Node
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM, LlamaConfig
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import bytescale
from bytescale.cost.assumed import Rates
from bytescale.integrations.whole_batch import LOG_PROBS, WholeBatch, word_columns

PORT, SECONDS = 29583, 520
VOCABULARY, HEADS, KEY_HEADS, LAYERS = 1024, 8, 4, 4
SHORTEST, LONGEST, CAPACITY = 64, 4096, 1024
CLIP, LR, MAX_NORM = 0.2, 1e-3, 1.0
FLOPS_PER_CORE = 3e10
SIDES = ("loop", "engine", "two passes", "FSDP", "FSDP, tuned")
NAMES = ("old_logprobs", "advantage", "weights")
Batch = list[dict[str, Any]]


def make_model(key_heads: int = KEY_HEADS) -> Any:
    """The same on every rank."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=256, intermediate_size=704, num_hidden_layers=LAYERS,
        num_attention_heads=HEADS, num_key_value_heads=key_heads, max_position_embeddings=LONGEST,
    )  # fmt: skip
    return AutoModelForCausalLM.from_config(config).train()


def rollouts(num_tokens: int, seed: int) -> Batch:
    """Recorded rollouts, the same on every rank, of ``num_tokens`` in all. The first one is of the longest ones."""
    random, generator = np.random.default_rng(seed), torch.Generator().manual_seed(seed)
    lengths = [LONGEST]
    while sum(lengths) < num_tokens:
        length = int(np.clip(random.lognormal(np.log(512), 1.1), SHORTEST, LONGEST))
        lengths.append(max(SHORTEST, min(length, num_tokens - sum(lengths))))
    batch = []
    for length in lengths:
        weights = torch.ones(length)
        weights[: SHORTEST // 4] = weights[-1] = 0.0  # the prompt, and the row after which nothing comes
        batch.append(
            {
                "tokens": torch.randint(2, VOCABULARY, (length,), generator=generator),
                "weights": weights,
                "old_logprobs": -np.log(VOCABULARY) + 0.2 * torch.randn(length, generator=generator),
                "advantage": torch.full((length,), float(torch.randn((), generator=generator))),
            }
        )
    return batch


def loss_sum(logprobs: Tensor, old: Tensor, advantage: Tensor, weights: Tensor) -> Tensor:
    """GRPO's clipped loss, a sum over tokens."""
    ratio = (logprobs - old).exp()
    gain = torch.minimum(ratio * advantage, ratio.clamp(1 - CLIP, 1 + CLIP) * advantage)
    return -(weights * gain).sum()


def trained(batch: Batch) -> float:
    return sum(float(rollout["weights"].sum()) for rollout in batch)


class Ours:
    """An update under ``HDP``."""

    def __init__(self, arguments: argparse.Namespace, side: str) -> None:
        self.model, self.side = make_model(), side
        rate, flops = arguments.mbit * 1e6 / 8, FLOPS_PER_CORE * arguments.cpus / arguments.ranks
        rates = Rates(
            flops_per_second=flops, attention_flops_per_second=flops, inter_node_bytes_per_second=rate,
            intra_node_bytes_per_second=2e8, latency_seconds=2e-3, launch_seconds=0.0,
        )  # fmt: skip
        spec = bytescale.HDP(make_model(), capacity_tokens=CAPACITY).engine.decoder.spec
        cost = rates.profile(spec, bytes_per_element=4).cost_model(ranks_per_node=arguments.ranks_per_node)
        self.hdp = bytescale.HDP(self.model, capacity_tokens=CAPACITY, cost=cost)
        self.hdp.adamw(LR, weight_decay=0.01)

    def update(self, batch: Batch) -> tuple[float, float]:
        """This rank's part of the loss, and the norm of the gradient."""
        total = trained(batch)
        loss = self._loop(batch, total) if self.side == "loop" else self._whole(batch, total)
        return loss, self.hdp.step(max_grad_norm=MAX_NORM).grad_norm

    def _loop(self, batch: Batch, total: float) -> float:
        seen = 0.0
        for micro in self.hdp.plan(batch, last=True):
            logprobs = micro.logprobs(self.model)
            loss = loss_sum(logprobs, micro.old_logprobs, micro.advantage, micro.weights) / total
            loss.backward()
            seen += float(loss.detach())
        return seen

    def _whole(self, batch: Batch, total: float) -> float:
        """Rank r has every n-th rollout, and computes the loss of these."""

        def loss_of(documents: list[dict[str, Tensor]], values: list[Tensor]) -> Tensor:
            columns = [torch.cat([own[name] for own in documents]) for name in NAMES]
            return loss_sum(torch.cat(values)[:, LOG_PROBS], *columns) / total

        own = batch[dist.get_rank() :: dist.get_world_size()]
        fields = {name: [rollout[name] for rollout in own] for name in ("tokens", *NAMES)}
        labels = [F.pad(ids[1:], (0, 1), value=-100) for ids in fields["tokens"]]
        whole = WholeBatch(self.hdp, word_columns(self.model, count=1), num_trained=1)
        values, _ = whole.run(fields | {"labels": labels}, loss=loss_of if self.side == "engine" else None)
        loss = loss_of(own, list(values.split([len(ids) for ids in labels])))
        loss.backward()
        whole.finish()
        return float(loss.detach())


class Exchange(torch.autograd.Function):
    """Ulysses: ``[S / n, H, D]`` to ``[S, H / n, D]`` over n ranks, or back."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, group: Any, to_heads: bool) -> Tensor:
        ctx.group, ctx.to_heads = group, to_heads
        n = dist.get_world_size(group)
        if to_heads:
            sent = rows.unflatten(1, (n, -1)).transpose(0, 1).contiguous()
            received = torch.empty_like(sent)
            dist.all_to_all_single(received, sent, group=group)
            return received.flatten(0, 1)
        sent = rows.contiguous()
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=group)
        return received.unflatten(0, (n, -1)).transpose(0, 1).flatten(1, 2).contiguous()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return Exchange.apply(gradients[0], ctx.group, not ctx.to_heads), None, None


class Fsdp:
    """verl's scheme on FSDP2: dynamic batches within a token budget, and Ulysses of one degree for all."""

    def __init__(self, model: Any, capacity: int, *, tuned: bool) -> None:
        world = dist.get_world_size()
        self.capacity, self.degree = capacity, -(-LONGEST // capacity)
        self.tuned, self.replicas = tuned, world // self.degree
        mesh = init_device_mesh("cpu", (self.replicas, self.degree), mesh_dim_names=("dp", "sp"))
        self.group: Any = mesh["sp"].get_group()
        self.replica, self.place = mesh.get_local_rank("dp"), mesh.get_local_rank("sp")
        name = f"ulysses {tuned}"
        ALL_ATTENTION_FUNCTIONS.register(name, self._attention)
        self.model = model
        self.model.config._attn_implementation = name
        for layer in self.model.model.layers:
            fully_shard(layer, reshard_after_forward=not tuned)
        fully_shard(self.model, reshard_after_forward=not tuned)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=LR, weight_decay=0.01, fused=True)
        self.lengths: list[int] = []

    def _attention(self, module: Any, q: Tensor, k: Tensor, v: Tensor, *_: Any, **__: Any) -> tuple[Tensor, None]:
        """``[1, H, S / n, D]`` of this rank's rows: attention of all rows, for its part of the heads."""
        heads = [part.shape[1] for part in (q, k, v)]
        rows = torch.cat([part[0].transpose(0, 1).unflatten(1, (self.degree, -1)) for part in (q, k, v)], dim=2)
        whole = Exchange.apply(rows.flatten(1, 2), self.group, True)
        parts = whole.split([count // self.degree for count in heads], dim=1)
        done = [
            F.scaled_dot_product_attention(*(p.transpose(0, 1)[None] for p in own), is_causal=True, enable_gqa=True)
            for own in zip(*(part.split(self.lengths) for part in parts), strict=True)
        ]
        out = torch.cat(done, dim=2)[0].transpose(0, 1)
        return Exchange.apply(out, self.group, False)[None], None

    def micro_batches(self, batch: Batch) -> list[Batch]:
        """This replica's, as verl makes them: replicas balanced by work, then micro-batches, equally many."""
        replicas = balanced(batch, self.replicas)
        budget, count = self.capacity * self.degree, 1
        while any(
            sum(len(rollout["tokens"]) for rollout in part) > budget
            for replica in replicas
            for part in balanced(replica, count)
        ):
            count += 1
        return balanced(replicas[self.replica], count)

    def update(self, batch: Batch) -> tuple[float, float]:
        """This rank's part of the loss, and the norm of the gradient."""
        total, seen = trained(batch), 0.0
        micro_batches = self.micro_batches(batch)
        for number, own in enumerate(micro_batches):
            if self.tuned:
                self.model.set_requires_gradient_sync(number == len(micro_batches) - 1)
            loss = self._loss(own) / total
            (loss * dist.get_world_size()).backward()  # FSDP averages
            seen += float(loss.detach())
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), MAX_NORM)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return seen, float(norm.full_tensor())  # type: ignore[attr-defined]

    def _loss(self, own: Batch) -> Tensor:
        """Of this rank's rows of a pack."""
        logprobs, rows = self._logprobs(own)
        return loss_sum(logprobs, *(rows([rollout[name] for rollout in own]) for name in NAMES))

    def _logprobs(self, own: Batch) -> tuple[Tensor, Callable[[list[Tensor]], Tensor]]:
        """Of this rank's rows of a pack, and what takes these rows from a column."""
        lengths = [len(rollout["tokens"]) for rollout in own]
        padding = -sum(lengths) % self.degree
        self.lengths = [*lengths, padding] if padding else lengths

        def rows(parts: list[Tensor]) -> Tensor:
            return F.pad(torch.cat(parts), (0, padding)).chunk(self.degree)[self.place]

        tokens = rows([rollout["tokens"] for rollout in own])
        positions = rows([torch.arange(length) for length in lengths])
        labels = rows([F.pad(rollout["tokens"][1:], (0, 1)) for rollout in own])
        logits = self.model(input_ids=tokens[None], position_ids=positions[None], use_cache=False).logits[0]
        return -F.cross_entropy(logits, labels, reduction="none"), rows


def balanced(batch: Batch, count: int) -> list[Batch]:
    """Parts of about equal work: the most work first, to the part that has least."""
    parts: list[Batch] = [[] for _ in range(count)]
    work = [0.0] * count
    for rollout in sorted(batch, key=lambda rollout: -len(rollout["tokens"])):
        length = len(rollout["tokens"])
        least = work.index(min(work))
        parts[least].append(rollout)
        work[least] += length * (length / 2 + 6 * 256)  # attention beside the rest of a layer
    return parts


def worker(arguments: argparse.Namespace) -> None:
    """One rank. The first one writes seconds, losses and norms of each side to a file."""
    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    makers: dict[str, Callable[[], Any]] = {
        **{name: partial(Ours, arguments, name) for name in ("loop", "engine", "two passes")},
        "FSDP": lambda: Fsdp(make_model(), CAPACITY, tuned=False),
        "FSDP, tuned": lambda: Fsdp(make_model(), CAPACITY, tuned=True),
    }
    found: dict[str, list[tuple[float, float, float]]] = {name: [] for name in SIDES}
    sides = {name: makers[name]() for name in SIDES}
    for number in range(arguments.rounds + 1):
        batch = rollouts(arguments.tokens, number)
        for name, side in sides.items():
            dist.barrier()
            started = time.perf_counter()
            loss, norm = side.update(batch)
            numbers = torch.tensor([time.perf_counter() - started, loss], dtype=torch.float64)
            dist.all_reduce(numbers[:1], op=dist.ReduceOp.MAX)
            dist.all_reduce(numbers[1:])
            found[name].append((float(numbers[0]), float(numbers[1]), norm))
            if rank == 0:
                print(f"{number} {name}: {found[name][-1]}", flush=True)
                Path(arguments.out).write_text(json.dumps(found), encoding="utf-8")
    dist.destroy_process_group()


def measure(arguments: argparse.Namespace, module: str = "benchmarks.grpo") -> dict[str, list[list[float]]]:
    """Run the ranks of a benchmark on their nodes."""
    per_node = arguments.ranks_per_node
    link = Link(bytes_per_second=arguments.mbit * 1e6 / 8)
    node = Node(link=link, cpus=arguments.cpus / arguments.ranks, ranks=per_node)
    with tempfile.TemporaryDirectory() as folder, Network([node] * (arguments.ranks // per_node)) as network:
        out = Path(folder) / "found.json"
        options = [f"--{name.replace('_', '-')}={value}" for name, value in vars(arguments).items() if name != "out"]
        processes = []
        for rank in range(arguments.ranks):
            environment = {
                "RANK": str(rank), "LOCAL_RANK": str(rank % per_node), "WORLD_SIZE": str(arguments.ranks),
                "MASTER_ADDR": network.address(0), "MASTER_PORT": str(PORT), "LOCAL_WORLD_SIZE": str(per_node),
                "GLOO_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": "1",
            }  # fmt: skip
            command = [sys.executable, "-m", module, *options, f"--out={out}"]
            log = Path(folder) / f"{rank}.log"
            processes.append(network.start(rank // per_node, command, environment=environment, output=log))
            network.place(rank // per_node, rank % per_node, processes[-1].pid)
        deadline = time.monotonic() + SECONDS
        while any(process.poll() is None for process in processes) and time.monotonic() < deadline:
            if any(process.poll() for process in processes):
                break
            time.sleep(0.2)
        codes = [process.poll() for process in processes]
        if any(codes):
            failed = next(rank for rank, code in enumerate(codes) if code)
            raise SystemExit((Path(folder) / f"{failed}.log").read_text(encoding="utf-8")[-4000:])
        if not out.exists():
            raise SystemExit(f"no update within {SECONDS} s")
        result: dict[str, list[list[float]]] = json.loads(out.read_text(encoding="utf-8"))
        return result


def report(found: dict[str, list[list[float]]], arguments: argparse.Namespace) -> None:
    """Tokens per second of each side, and how ours compares. The first update warms up."""
    rounds = min(map(len, found.values()))
    tokens = [sum(len(r["tokens"]) for r in rollouts(arguments.tokens, number)) for number in range(rounds)]
    apart = max(
        abs(a - b) / max(abs(b), 1e-2)
        for own in found.values()
        for mine, theirs in zip(own, found["FSDP"], strict=False)
        for a, b in zip(mine[1:], theirs[1:], strict=True)
    )
    nodes = arguments.ranks // arguments.ranks_per_node
    print(
        f"{arguments.ranks} ranks on {nodes} nodes, {arguments.mbit:g} Mbit/s, {rounds - 1} rounds of "
        f"{statistics.mean(tokens):.0f} tokens, losses and norms within {apart:.0e}"
    )
    for name in SIDES:
        rates = sorted(count / row[0] for count, row in zip(tokens[1:], found[name][1:rounds], strict=True))
        ratios = [
            statistics.median(
                other[0] / own[0] for own, other in zip(found[name][1:rounds], them[1:rounds], strict=True)
            )
            for them in (found["FSDP"], found["FSDP, tuned"])
        ]
        print(
            f"{name:12} {statistics.median(rates):7.0f} tokens/s ({rates[0]:.0f} to {rates[-1]:.0f})  "
            f"{ratios[0]:5.2f} times FSDP, {ratios[1]:5.2f} times tuned"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--ranks-per-node", type=int, default=1)
    parser.add_argument("--mbit", type=float, default=150.0, help="rate of every node's link, Mbit/s")
    parser.add_argument("--cpus", type=float, default=1.6, help="cores of all ranks together")
    parser.add_argument("--tokens", type=int, default=16384, help="of an update's rollouts")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.out:
        worker(arguments)
    else:
        report(measure(arguments), arguments)


if __name__ == "__main__":
    main()
