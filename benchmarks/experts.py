"""Experts in parallel beside experts that are gathered: bytes of known models, and seconds of a small one.

    python benchmarks/experts.py                                    # the counts; nothing runs
    torchrun --nproc-per-node 4 benchmarks/experts.py [--repeats 7] # the counts, and four gloo ranks measured

A domain of d ranks has the experts of a layer between them. There are two ways to compute with all of them:

    gathered    every rank gathers the layer's experts (``parallel.shard = "parameters"``): their weights twice a round,
                in BF16, and their gradients are reduced once, in FP32, however many tokens the rank has
    parallel    every token travels to the ranks that have its experts and back (EP), in forward and in backward, and
                with full checkpointing once more

The measured small model has nothing but layers of routers and experts of Qwen3, on the engine itself
(``runtime.experts``). Both ways are compared with one process first, in FP64, and with the ideal: the experts that a
rank has, on as many rows as it would get if all experts were chosen alike, without a message. At the end, the bytes
that were sent are counted.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts, Qwen3MoeSparseMoeBlock

from bytescale.parity.compare import WideCasts
from bytescale.runtime.group import RankGroup
from bytescale.runtime.mesh import Mesh
from bytescale.runtime.optimizer.take_over import take_over

GIB = 2**30
BYTES_PER_SECOND, OPERATIONS_PER_SECOND = 200e9, 400e12
"""What collectives reach inside of a node of H100s, and dense products in BF16: the figures of the simulator."""


@dataclass(frozen=True)
class Experts:
    """The shape of one layer's mixture, and the other weights of the layer that every token uses."""

    name: str
    hidden: int
    width: int
    experts: int
    chosen: int
    other: float

    @property
    def weights(self) -> int:
        return 3 * self.experts * self.width * self.hidden

    @property
    def used(self) -> float:
        """Weights that a token is multiplied with."""
        return self.weights * self.chosen / self.experts + self.other


MODELS = (
    Experts("Mixtral 8x7B", 4096, 14336, 8, 2, 42e6),
    Experts("Qwen3-30B-A3B", 2048, 768, 128, 8, 19e6),
    Experts("Qwen3-235B-A22B", 4096, 1536, 128, 8, 71e6),
    Experts("DeepSeek-V3", 7168, 2048, 256, 8, 231e6),
    Experts("gpt-oss-120b", 2880, 2880, 128, 4, 27e6),
)


def copies(model: Experts, domain: int, *, once_a_rank: bool) -> float:
    """How often a token is sent to another rank, on average: for each of its experts, or once for each rank."""
    away = (domain - 1) / domain
    return domain * (1 - away**model.chosen) * away if once_a_rank else model.chosen * away


def counts(domain: int) -> None:
    """Where both ways send equally many bytes, and where they take equally long."""
    print(f"Domains of {domain} ranks. Tokens are those of a rank in a round; GiB are of two open layers.")
    print(
        f"{'':16} {'open':>6} {'gather':>8} | {'equal bytes at tokens':^31} | {'gather':>8} {'as fast':>8}\n"
        f"{'':16} {'GiB':>6} {'MB':>8} | {'plain':>9} {'once a rank':>11} {'and full':>9} | {'hidden':>8} {'as EP':>8}"
    )
    for model in MODELS:
        gathered = 8 * model.weights * (domain - 1) / domain
        of_token = 8 * model.hidden * copies(model, domain, once_a_rank=False)
        least = 8 * model.hidden * copies(model, domain, once_a_rank=True)
        # With full checkpointing a round takes four forwards' time, and tokens travel three times there and back.
        compute = 4 * 2 * model.used / OPERATIONS_PER_SECOND
        message = 1.5 * least / BYTES_PER_SECOND
        seconds = gathered / BYTES_PER_SECOND
        print(
            f"{model.name:16} {2 * 6 * model.weights / GIB:6.1f} {gathered / 1e6:8.0f} | {gathered / of_token:9.0f} "
            f"{gathered / least:11.0f} {gathered / least / 1.5:9.0f} | {seconds / compute:8.0f} "
            f"{seconds / (compute + message):8.0f}"
        )


@dataclass(frozen=True)
class Shape:
    """Of the small model."""

    hidden_size: int
    width: int
    num_layers: int = 4
    num_experts: int = 64
    experts_per_token: int = 4

    def config(self, dtype: torch.dtype) -> Qwen3MoeConfig:
        config = Qwen3MoeConfig(
            hidden_size=self.hidden_size,
            moe_intermediate_size=self.width,
            num_experts=self.num_experts,
            num_experts_per_tok=self.experts_per_token,
            norm_topk_prob=True,
        )
        config._experts_implementation = "eager" if dtype == torch.float64 else "grouped_mm"  # which has no fp64
        return config


class EvenExperts(nn.Module):
    """The ideal: as many experts and as many rows as a rank has where all are chosen alike, and no message."""

    def __init__(self, shape: Shape, dtype: torch.dtype, ranks: int) -> None:
        super().__init__()
        self.experts = Qwen3MoeExperts(replace(shape, num_experts=shape.num_experts // ranks).config(dtype))

    def forward(self, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        rows = torch.arange(chosen.numel(), device=chosen.device).view(chosen.shape)
        result: Tensor = self.experts(hidden, rows % len(self.experts.down_proj), weights)
        return result


class Layer(nn.Module):
    """A mixture on the residual stream."""

    def __init__(self, mixture: nn.Module) -> None:
        super().__init__()
        self.mixture = mixture

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.mixture(nn.functional.layer_norm(hidden, hidden.shape[-1:])[None])[0]


def layers_of(shape: Shape, dtype: torch.dtype) -> nn.ModuleList:
    torch.manual_seed(0)
    layers = nn.ModuleList(Layer(Qwen3MoeSparseMoeBlock(shape.config(dtype))) for _ in range(shape.num_layers))
    for parameter in layers.parameters():
        nn.init.normal_(parameter, std=shape.hidden_size**-0.5)
    return layers.to(dtype)


def run(layers: nn.ModuleList, hidden: Tensor) -> float:
    """Forward and backward of a loss that is a sum over tokens."""
    for layer in layers:
        hidden = layer(hidden)
    loss = hidden.square().sum() / hidden.shape[1]
    loss.backward()
    return float(loss.detach())


def on_ranks(shape: Shape, dtype: torch.dtype, way: str) -> tuple[nn.ModuleList, Any]:
    """The layers and their optimizer: ``gathered``, with their experts in ``parallel``, or ``ideal``."""
    layers = layers_of(shape, dtype)
    mixtures: list[Any] = [layer.mixture for layer in layers]
    if way == "ideal":
        for mixture in mixtures:
            mixture.experts = EvenExperts(shape, dtype, dist.get_world_size()).to(dtype)
            for parameter in mixture.experts.parameters():
                nn.init.normal_(parameter, std=shape.hidden_size**-0.5)
        return layers, None
    parts = [nn.Module(), *layers, nn.Module()]
    named = [*layers.named_parameters(), ("last", nn.Parameter(torch.zeros(1, dtype=dtype)))]
    experts = [mixture.experts for mixture in mixtures] if way == "parallel" else []
    mesh = Mesh.of_hdp(RankGroup(dist.group.WORLD), dist.get_world_size())
    optimizer = take_over(named, mesh, torch.optim.SGD, {"lr": 0.0}, chunk=(layers, parts), experts=experts)
    return layers, optimizer


def check(shape: Shape, tokens: int) -> float:
    """The largest difference of losses and gradients to one process, relative to the largest gradient, in FP64."""
    rank, size = dist.get_rank(), dist.get_world_size()
    inputs = torch.randn(
        size * tokens, shape.hidden_size, dtype=torch.float64, generator=torch.Generator().manual_seed(1)
    )
    whole, worst = layers_of(shape, torch.float64), 0.0
    with WideCasts():
        loss = run(whole, inputs)
    wanted = {name: parameter.grad for name, parameter in whole.named_parameters() if parameter.grad is not None}
    largest = max(float(value.abs().max()) for value in wanted.values())
    for way in ("gathered", "parallel"):
        layers, optimizer = on_ranks(shape, torch.float64, way)
        with WideCasts():
            own = run(layers, inputs.chunk(size)[rank])
        (ours,) = RankGroup(dist.group.WORLD).sum_of([own])
        found = optimizer.whole_gradients()
        worst = max(worst, abs(ours / loss - 1))
        worst = max(worst, *(float((found[name] - value).abs().max()) / largest for name, value in wanted.items()))
    return worst


class Counted:
    """Bytes that this rank sends to other ranks: by the engine's own calls, and by what the routers have chosen."""

    def __init__(self, layers: nn.ModuleList, row_bytes: int) -> None:
        self.sent = self.formula = 0
        plain, counted = RankGroup.all_to_all, self

        def all_to_all(group: RankGroup, rows: Tensor, sent: Any, received: Any) -> Tensor:
            counted.sent += (sum(sent) - sent[group.rank]) * rows[:1].nbytes
            return plain(group, rows, sent, received)

        RankGroup.all_to_all = all_to_all  # type: ignore[method-assign, assignment]
        for layer in layers:
            mixture: Any = layer.mixture
            mixture.gate.register_forward_hook(partial(self._routed, mixture, row_bytes))

    def _routed(self, mixture: Any, row_bytes: int, router: object, args: object, out: tuple[Tensor, ...]) -> None:
        """Each row goes there in forward and there in backward; the others' come back likewise. And the counts."""
        size, rank, here = dist.get_world_size(), dist.get_rank(), len(mixture.experts.down_proj)
        *_, chosen = out
        table = [torch.empty(size, dtype=torch.int64) for _ in range(size)]
        dist.all_gather(table, torch.bincount(chosen.flatten() // here, minlength=size))
        away = (
            int(table[rank].sum() - table[rank][rank]) + sum(int(row[rank]) for row in table) - int(table[rank][rank])
        )
        self.formula += 2 * away * row_bytes + (size - 1) * here * 8


def seconds_of(work: Callable[[], object]) -> float:
    dist.barrier()
    begin = time.perf_counter()
    work()
    taken = torch.tensor([time.perf_counter() - begin])
    dist.all_reduce(taken, op=dist.ReduceOp.MAX)
    return float(taken)


def measure(shape: Shape, repeats: int) -> None:
    size, rank = dist.get_world_size(), dist.get_rank()
    worst = check(replace(shape, num_layers=2), 40)
    assert worst < 1e-10, worst
    ways = {way: on_ranks(shape, torch.float32, way)[0] for way in ("ideal", "parallel", "gathered")}
    weights = 3 * shape.num_experts * shape.width * shape.hidden_size * shape.num_layers
    gathered = 3 * 4 * weights * (size - 1) / size  # in FP32, of two gathers and a reduction
    if rank == 0:
        print(
            f"\n{size} gloo ranks, {shape.num_layers} layers of {shape.num_experts} experts "
            f"({shape.hidden_size} x {shape.width}, {shape.experts_per_token} a token), FP32; "
            f"to one process {worst:.0e}\n"
            "tokens a rank   ideal s  parallel s  gathered s   parallel / ideal  gathered / parallel   parallel MB  "
            "gathered MB"
        )
    for tokens in (256, 1024, 2048):
        hidden = torch.randn(tokens, shape.hidden_size, generator=torch.Generator().manual_seed(rank)).requires_grad_()
        times: dict[str, list[float]] = {way: [] for way in ways}
        for number in range(repeats + 1):
            for way, layers in ways.items():
                taken = seconds_of(partial(run, layers, hidden))
                if number:
                    times[way].append(taken)
        a, b, c = (statistics.median(times[way]) for way in ways)
        moved = torch.tensor([4.0 * tokens * shape.experts_per_token * shape.num_layers * shape.hidden_size * 4])
        if rank == 0:
            print(
                f"{tokens:13} {a:9.3f} {b:11.3f} {c:11.3f} {b / a:18.3f} {c / b:20.2f} "
                f"{float(moved) * (size - 1) / size / 1e6:13.1f} {gathered / 1e6:12.1f}"
            )
    counted = Counted(ways["parallel"], 4 * shape.hidden_size)
    run(ways["parallel"], hidden)
    assert counted.sent == counted.formula, (counted.sent, counted.formula)
    print(f"rank {rank}: {counted.sent} bytes sent for the last row, as the formula says")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=7)
    arguments = parser.parse_args()
    if int(os.environ.get("RANK", 0)) == 0:
        counts(8)
    if "RANK" not in os.environ:
        return
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    for hidden, width in ((128, 64), (128, 512)):
        measure(Shape(hidden, width), arguments.repeats)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
