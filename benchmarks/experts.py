"""Experts in parallel beside experts that are gathered: bytes of known models, and seconds of a small one.

    python benchmarks/experts.py                                    # the counts; nothing runs
    torchrun --nproc-per-node 4 benchmarks/experts.py [--repeats 7] # the counts, and four gloo ranks measured

A domain of d ranks has the experts of a layer between them. There are two ways to compute with all of them:

    gathered    every rank gathers the layer's experts (``parallel.shard = "parameters"``): their weights twice a round,
                in BF16, and their gradients are reduced once, in FP32, however many tokens the rank has
    parallel    every token travels to the ranks that have its experts and back (EP), in forward and in backward, and
                with full checkpointing once more

The measured small model has nothing but layers of routers and experts. EP here is plain: a token goes once to each of
its experts, no token is dropped, and nothing is overlapped. Both are compared with one process first, in FP64.
"""

from __future__ import annotations

import argparse
import copy
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

from bytescale.config import PRESETS, Architecture
from bytescale.models.balance import count_tokens
from bytescale.models.llama import swiglu
from bytescale.models.moe import MixtureOfExperts, expert_products, route
from bytescale.runtime import RankGroup
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


class AllToAll(torch.autograd.Function):
    """Rows to the ranks that they are for, and gradients back."""

    bytes = 0

    @staticmethod
    def forward(ctx: Any, rows: Tensor, sent: list[int], received: list[int]) -> Tensor:
        ctx.counts = sent, received
        arrived = rows.new_empty(sum(received), rows.shape[1])
        dist.all_to_all_single(arrived, rows.contiguous(), received, sent)
        AllToAll.bytes += (sum(sent) - sent[dist.get_rank()]) * rows.shape[1] * rows.element_size()
        return arrived

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        sent, received = ctx.counts
        return AllToAll.apply(gradients[0], received, sent), None, None


class ParallelExperts(nn.Module):
    """A mixture of which this rank has ``E / d`` experts, and the router."""

    def __init__(self, whole: MixtureOfExperts) -> None:
        super().__init__()
        self.router, self.chosen = copy.deepcopy(whole.router), whole.experts_per_token
        self.num_experts, self.ranks = len(whole.experts.gate_proj), dist.get_world_size()
        matrices = whole.experts.gate_proj, whole.experts.up_proj, whole.experts.down_proj
        own = [matrix.detach().chunk(self.ranks)[dist.get_rank()].clone() for matrix in matrices]
        self.matrices = nn.ParameterList(own)

    def forward(self, hidden: Tensor) -> Tensor:
        weights, chosen = route(self.router(hidden), self.chosen)
        order = chosen.flatten().argsort(stable=True)
        leaving = count_tokens(chosen, self.num_experts)
        arriving = torch.empty_like(leaving)
        dist.all_to_all_single(arriving, leaving)
        by_rank = arriving.view(self.ranks, -1)
        sent, received = leaving.view(self.ranks, -1).sum(1).tolist(), by_rank.sum(1).tolist()
        rows = AllToAll.apply(hidden[order // self.chosen], sent, received)
        # They lie by the rank that they come from, and then by expert.
        expert_of = torch.arange(by_rank.shape[1]).repeat(self.ranks).repeat_interleave(arriving)
        sorting = expert_of.argsort(stable=True)
        gate, up, down = self.matrices
        rows = expert_products(rows.dtype)(rows[sorting], by_rank.sum(0), gate, up, down, swiglu)
        rows = AllToAll.apply(rows[sorting.argsort()], received, sent)[order.argsort()]
        return (rows.view(*chosen.shape, -1) * weights[..., None]).sum(1).to(hidden.dtype)


class Layer(nn.Module):
    """A mixture on the residual stream."""

    def __init__(self, mixture: nn.Module) -> None:
        super().__init__()
        self.mixture = mixture

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.mixture(nn.functional.layer_norm(hidden, hidden.shape[-1:]))


def layers_of(shape: Architecture, dtype: torch.dtype) -> nn.ModuleList:
    torch.manual_seed(0)
    layers = nn.ModuleList(Layer(MixtureOfExperts(shape)) for _ in range(shape.num_layers))
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


def both(shape: Architecture, dtype: torch.dtype) -> tuple[nn.ModuleList, Any, nn.ModuleList]:
    """The layers gathered, with their optimizer, and in parallel."""
    gathered = layers_of(shape, dtype)
    parallel = nn.ModuleList(Layer(ParallelExperts(layer.mixture)) for layer in layers_of(shape, dtype))
    group, size = RankGroup(dist.group.WORLD), dist.get_world_size()
    parts = [nn.Module(), *gathered, nn.Module()]
    named = [*gathered.named_parameters(), ("last", nn.Parameter(torch.zeros(1, dtype=dtype)))]
    optimizer = take_over(named, group, torch.optim.SGD, {"lr": 0.0}, chunk=(gathered, parts), domain=size)
    return gathered, optimizer, parallel


def check(shape: Architecture, tokens: int) -> float:
    """The largest difference of losses and gradients to one process, relative to the largest gradient, in FP64."""
    rank, size = dist.get_rank(), dist.get_world_size()
    inputs = torch.randn(
        size * tokens, shape.hidden_size, dtype=torch.float64, generator=torch.Generator().manual_seed(1)
    )
    whole = layers_of(shape, torch.float64)
    loss = run(whole, inputs)
    wanted = {name: parameter.grad for name, parameter in whole.named_parameters() if parameter.grad is not None}
    largest = max(float(value.abs().max()) for value in wanted.values())
    gathered, optimizer, parallel = both(shape, torch.float64)
    losses = torch.tensor(
        [run(layers, inputs.chunk(size)[rank]) for layers in (gathered, parallel)], dtype=torch.float64
    )
    dist.all_reduce(losses)
    worst = float((losses / loss - 1).abs().max())
    found = optimizer.whole_gradients()
    for number, layer in enumerate(parallel):
        mixture: Any = layer.mixture
        router = mixture.router.weight.grad
        dist.all_reduce(router)
        pairs = [("router.weight", router, wanted[f"{number}.mixture.router.weight"])]
        for name, own in zip(("gate_proj", "up_proj", "down_proj"), mixture.matrices, strict=True):
            pairs.append((f"experts.{name}", own.grad, wanted[f"{number}.mixture.experts.{name}"].chunk(size)[rank]))
        for name, ours, theirs in pairs:
            whole_of = wanted[f"{number}.mixture.{name}"]
            worst = max(worst, float((ours - theirs).abs().max()) / largest)
            worst = max(worst, float((found[f"{number}.mixture.{name}"] - whole_of).abs().max()) / largest)
    return worst


def seconds_of(work: Callable[[], object]) -> float:
    dist.barrier()
    begin = time.perf_counter()
    work()
    taken = torch.tensor([time.perf_counter() - begin])
    dist.all_reduce(taken, op=dist.ReduceOp.MAX)
    return float(taken)


def measure(shape: Architecture, repeats: int) -> None:
    size, rank = dist.get_world_size(), dist.get_rank()
    worst = check(replace(shape, num_layers=2), 40)
    assert worst < 1e-10, worst
    gathered, _, parallel = both(shape, torch.float32)
    weights = 3 * shape.num_experts * shape.ffn_hidden_size * shape.hidden_size * shape.num_layers
    sent = 3 * 4 * weights * (size - 1) / size  # in FP32, of two gathers and a reduction
    if rank == 0:
        print(
            f"\n{size} gloo ranks, {shape.num_layers} layers of {shape.num_experts} experts; to one process {worst:.0e}"
        )
        print("tokens a rank   gathered      s     MB      parallel      s     MB   gathered / parallel: s, MB")
    for tokens in (256, 1024, 2048, 4096, 6144):
        hidden = torch.randn(tokens, shape.hidden_size, generator=torch.Generator().manual_seed(rank))
        times: dict[str, list[float]] = {"gathered": [], "parallel": []}
        for number in range(repeats + 1):
            for name, layers in (("gathered", gathered), ("parallel", parallel)):
                AllToAll.bytes = 0
                taken = seconds_of(partial(run, layers, hidden))
                if number:
                    times[name].append(taken)
        moved = torch.tensor([float(AllToAll.bytes)])
        dist.all_reduce(moved)
        if rank == 0:
            a, b = (statistics.median(times[name]) for name in ("gathered", "parallel"))
            mean = float(moved) / size
            print(
                f"{tokens:13} {a:19.3f} {sent / 1e6:6.1f} {b:20.3f} {mean / 1e6:6.1f} {a / b:14.2f} {sent / mean:.2f}"
            )


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
    tiny = replace(
        PRESETS["tiny-moe"], num_layers=4, hidden_size=128, ffn_hidden_size=64, num_experts=64, experts_per_token=4,
        router_aux_loss_weight=0.0,
    )  # fmt: skip
    measure(tiny, arguments.repeats)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
