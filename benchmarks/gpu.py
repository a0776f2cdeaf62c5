"""Measures offloading, MFU, the longest context, the cross-entropy and a profile on one device. Runs from a checkout.

    PYTHONPATH=src:. python benchmarks/gpu.py                    # a GPU if there is one, else small sizes on the CPU
    PYTHONPATH=src:. python benchmarks/gpu.py --only loss,offload --out benchmarks/out/first.json

It prints Markdown tables in the form of docs/benchmarks/memory.md, row by row. It also writes every row to ``--out``
as soon as the row is measured. On an H200, each part takes at most ten minutes, and all parts together half an hour.
A case that would not end within ``--seconds`` is left out, and its row says so. The row of a case that fails says
why, and the next case runs.

It needs torch and NumPy, Triton on a GPU, and matplotlib for the picture of the profile. The loss is compared with
``torch.nn.functional.linear_cross_entropy`` and Liger where they exist (``liger-kernel`` is a wheel of pure Python;
unpack it into PYTHONPATH).

A step is a complete one: forward, backward into fp32 sums, AdamW. Times are medians, measured between synchronisations
after a warm-up. If the first run of a case takes longer than ``LONG_SECONDS``, it is the only one, and ``warm_ups`` is
0. Pinned pages are allocated before anything is timed. Peak memory does not include parameters, gradients and
optimizer. On a GPU it is the allocator's peak. On a CPU it is the peak of counted tensors, from a separate run; there,
offloaded bytes are subtracted although they lie in the same memory.
"""

from __future__ import annotations

import argparse
import gc
import inspect
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

# One process runs contexts of many lengths; segments that grow avoid fragments. CUDA reads this when it starts.
os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig

from bytescale.attention import AttentionKernel, AttentionRules, select_kernel
from bytescale.attention.blocks import BlockSet, causal_triangles
from bytescale.attention.kernels import OfQueries
from bytescale.config.schema import OptimizerConfig
from bytescale.cost.model import BACKWARD_ATTENTION_RATIO
from bytescale.cost.profile_file import fit_warnings, save_profile
from bytescale.hf.model.decoder import HFDecoder
from bytescale.hf.model.measure import measure_rows, measured_memory
from bytescale.plan import MicroBatch, Plan, RankPlan
from bytescale.plan.plan import GroupSpec
from bytescale.runtime.executor import Decoder, Executor
from bytescale.runtime.group import RankGroup
from bytescale.runtime.loss import PlainHead, loss_sum
from bytescale.runtime.mesh import Mesh
from bytescale.runtime.optimizer.flat import FlatParameters
from bytescale.runtime.optimizer.sharded_optimizer import ShardedOptimizer
from bytescale.runtime.saved.activations import Activations
from bytescale.runtime.saved.host_pool import HostPool

GIB = 2**30
LONG_SECONDS = 100.0
"""A first run that takes longer than this counts. Its warm-up, allocations, is less than a hundredth of it."""
CASE_SECONDS = 20.0
"""Runs of one case stop after this many seconds."""
GUESSED_FLOPS = 350e12
"""FLOP/s of a step on an H200 with FlashAttention 2. It only serves to leave out cases that would not end in time."""

Row = dict[str, Any]
Case = tuple[Row, float, Callable[[], Row]]
"""A case: its name, about how many seconds it takes on a GPU, and a function that measures and returns figures."""


@dataclass(frozen=True, kw_only=True)
class Llama:
    """The sizes of a Llama of transformers."""

    num_layers: int
    hidden_size: int
    ffn_hidden_size: int
    num_heads: int
    num_kv_heads: int
    vocab_size: int
    tied: bool = False

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_heads

    def model(self, device: torch.device, dtype: torch.dtype) -> Any:
        config = LlamaConfig(
            vocab_size=self.vocab_size, hidden_size=self.hidden_size, intermediate_size=self.ffn_hidden_size,
            num_hidden_layers=self.num_layers, num_attention_heads=self.num_heads,
            num_key_value_heads=self.num_kv_heads, max_position_embeddings=2**22,
            tie_word_embeddings=self.tied,
        )  # fmt: skip
        with device:
            return AutoModelForCausalLM.from_config(config, dtype=dtype).train()

    def attention_flops(self, tokens: int) -> float:
        """Of one layer's forward on one document."""
        return 2.0 * self.num_heads * self.head_dim * tokens**2

    def training_flops(self, documents: int, tokens: int) -> float:
        """Two for each weight and token, and attention; backward twice as many."""
        heads = 2 * (self.num_heads + self.num_kv_heads) * self.head_dim
        layer = self.hidden_size * (heads + 3 * self.ffn_hidden_size)
        products = 2.0 * (self.num_layers * layer + self.vocab_size * self.hidden_size) * documents * tokens
        return 3 * (products + self.num_layers * documents * self.attention_flops(tokens))


B1 = Llama(
    num_layers=16,
    hidden_size=2048,
    ffn_hidden_size=8192,
    num_heads=32,
    num_kv_heads=8,
    vocab_size=128256,
    tied=True,
)
B7 = Llama(num_layers=32, hidden_size=4096, ffn_hidden_size=14336, num_heads=32, num_kv_heads=8, vocab_size=32000)
TINY = Llama(num_layers=4, hidden_size=128, ffn_hidden_size=384, num_heads=4, num_kv_heads=2, vocab_size=4096)


@dataclass(frozen=True)
class Sizes:
    """The sizes of all cases for one kind of device."""

    shape: Llama
    offload: tuple[tuple[int, int, str, float], ...]  # (tokens, layers, checkpointing, ratio)
    offload_long: tuple[tuple[int, int, str, float], ...]
    mfu: tuple[tuple[int, int, int, str], ...]  # (documents, tokens of each, layers, checkpointing)
    mfu_long: tuple[tuple[int, int, int, str], ...]
    longest: tuple[tuple[str, Llama, int], ...]  # (name, shape, tokens to try first)
    attention: tuple[int, ...]  # tokens
    loss: tuple[tuple[int, int, int], ...]  # (tokens, hidden, vocabulary)
    profile: tuple[Llama, int, float]  # (shape, longest, seconds)
    device_bytes: float  # for the longest context; on a GPU the allocator knows it
    host_bytes: int
    steps: int


GPU = Sizes(
    shape=B7,
    offload=tuple((65536, 8, mode, r) for mode, r in (("none", 0.0), ("none", 0.5), ("none", 1.0), ("full", 0.0))),
    offload_long=tuple((262144, 12, mode, r) for mode, r in (("attention", 0.0), ("attention", 1.0), ("full", 0.0))),
    mfu=((8, 8192, 8, "none"), (1, 65536, 8, "none"), (1, 262144, 4, "attention")),
    mfu_long=((1, 1048576, 2, "attention"),),
    longest=(
        ("7B width", replace(B7, num_layers=2), 2**21),
        ("1B", B1, 2**21),
        ("7B width", replace(B7, num_layers=4), 2**21),
    ),
    attention=(8192, 65536),
    loss=((8192, 4096, 131072), (32768, 4096, 131072)),
    profile=(B7, 131072, 90.0),
    device_bytes=float("inf"),
    host_bytes=100 * GIB,
    steps=5,
)
CPU = Sizes(
    shape=TINY,
    offload=tuple((1024, 6, mode, r) for mode, r in (("none", 0.0), ("none", 0.5), ("none", 1.0), ("full", 0.0))),
    offload_long=tuple((2048, 8, mode, r) for mode, r in (("attention", 0.0), ("attention", 1.0), ("full", 0.0))),
    mfu=((4, 512, 4, "none"), (1, 1024, 4, "none")),
    mfu_long=((1, 2048, 4, "attention"),),
    longest=(("tiny", replace(TINY, num_layers=6), 2048),),
    attention=(512, 2048),
    loss=((1024, 128, 8192), (4096, 128, 8192)),
    profile=(TINY, 512, 20.0),
    device_bytes=70 * 2**20,
    host_bytes=GIB,
    steps=3,
)


class Device:
    """Measures the time and the peak memory of work."""

    def __init__(self, name: str) -> None:
        self.device = torch.device(name)
        self.on_gpu = self.device.type == "cuda"
        if self.on_gpu:
            self.device = torch.device("cuda", self.device.index or 0)
            torch.cuda.set_device(self.device)
        self.dtype = torch.bfloat16 if self.on_gpu else torch.float32

    def synchronise(self) -> None:
        if self.on_gpu:
            torch.cuda.synchronize(self.device)

    def once(self, work: Callable[[], object]) -> float:
        """Return the seconds of one run."""
        self.synchronise()
        started = time.perf_counter()
        work()
        self.synchronise()
        return time.perf_counter() - started

    def figures(self, work: Callable[[], object], repeats: int) -> Row:
        """Return the median seconds of up to ``repeats`` runs, and the peak memory that they add to what is allocated.

        ``work`` must free what it allocates. Only its first run may make buffers that stay.
        """
        before = self._start_counting()
        times = [self.once(work)]
        warm_ups = 0
        if times[0] < LONG_SECONDS:
            warm_ups, times = 1, []
            before, started = self._start_counting(), time.perf_counter()
            while not times or (len(times) < repeats and time.perf_counter() - started < CASE_SECONDS):
                times.append(self.once(work))
        peak = torch.cuda.max_memory_allocated(self.device) - before if self.on_gpu else counted_peak(work)
        return {
            "seconds": statistics.median(times),
            "slowest": max(times),
            "runs": len(times),
            "warm_ups": warm_ups,
            "peak_gib": peak / GIB,
        }

    def _start_counting(self) -> int:
        if not self.on_gpu:
            return 0
        self.synchronise()
        torch.cuda.reset_peak_memory_stats(self.device)
        return torch.cuda.memory_allocated(self.device)

    @contextmanager
    def tidy(self) -> Iterator[None]:
        """Free all memory afterwards, so that a case does not inherit fragments from another."""
        try:
            yield
        finally:
            gc.collect()
            if self.on_gpu:
                torch.cuda.empty_cache()


def counted_peak(work: Callable[[], object]) -> int:
    """Return the largest number of bytes that tensors hold at one time during a run on the CPU."""
    from tests.helpers.live_bytes import LiveBytes

    with LiveBytes(with_numbers=True) as live:
        work()
    return live.peak


class Step:
    """A training step of one micro-batch: forward, backward, update."""

    def __init__(
        self,
        device: Device,
        shape: Llama,
        lengths: list[int],
        checkpointing: str,
        pool: HostPool | None = None,
        ratio: float | None = 0.0,
        kernel: AttentionKernel | None = None,
    ) -> None:
        """``ratio``: of the tokens whose activations move; None: as many as ``pool`` can hold."""
        model = HFDecoder(shape.model(device.device, device.dtype))
        self.mesh = Mesh.of_hdp(RankGroup(device=device.device))
        self.parameters = FlatParameters(model.model.named_parameters(), 1)
        self.optimizer = ShardedOptimizer.of_config(self.parameters, OptimizerConfig(), self.mesh)
        activations = Activations(
            model.layers,
            checkpointing=checkpointing,  # type: ignore[arg-type]
            pool=pool,
            device=device.device,
        )
        self.part = Decoder(module=model, activations=activations, head=model.head)
        self.kernel = kernel or select_kernel("auto", device.device, device.dtype)
        rows = measure_rows(model, self.kernel, activations, device.device)
        self.memory = measured_memory(model, rows, kind="cuda" if device.on_gpu else "cpu", num_ranks=1)
        if ratio is None:
            assert pool is not None, "memory that it can hold"
            ratio = min(1.0, 0.98 * pool.limit_bytes / (rows.movable_per_token * sum(lengths)))
        self.ratio, self.moved_bytes = ratio, rows.movable_per_token * int(ratio * sum(lengths))
        self.rank_plan = one_micro_batch(lengths, ratio)
        self.data = Tokens.random(shape.vocab_size, self.rank_plan.micro_batches[0], device.device)
        self.optimizer.require_states()  # made before the first step, so that the peak of no step counts them

    def __call__(self) -> None:
        self.parameters.zero_gradients()
        Executor(part=self.part, kernel=self.kernel, mesh=self.mesh).run(
            self.rank_plan, [self.data], num_global_targets=len(self.data.tokens)
        )
        self.optimizer.update(self.optimizer.reduce_gradients(), 1.0, 1e-5)


@dataclass(frozen=True)
class Tokens:
    """A ``runtime.executor.MicroBatchTokens`` on the device. Every token is its own target."""

    tokens: Tensor
    labels: Tensor
    position_ids: Tensor
    weights: None = None

    @staticmethod
    def random(vocab_size: int, micro_batch: MicroBatch, device: torch.device) -> Tokens:
        tokens = torch.randint(vocab_size, (micro_batch.num_tokens,), device=device)
        return Tokens(tokens, tokens, torch.as_tensor(micro_batch.position_ids(), device=device))


class NoAttention:
    """A kernel that allocates what flash attention allocates but computes nothing.

    It measures the memory of contexts that would take an hour to compute. In backward it allocates sums of dq in fp32,
    one number per row and head, and if heads share keys also dk and dv of every head (``mha_varlen_bwd`` in ATen's
    flash_api.cpp). The output of a group of heads is copied out of the output of all heads
    (``_flash_attention_backward``). tests/cost/test_memory.py compares the estimate with the same allocations.
    """

    def with_rules(self, rules: AttentionRules) -> NoAttention:
        return self

    def forward(self, q: Tensor, k: Tensor, v: Tensor, blocks: BlockSet, scale: float) -> tuple[Tensor, Tensor]:
        return torch.zeros_like(q), q.new_zeros(q.shape[1], len(q), dtype=torch.float32).T

    def backward(
        self, queries: OfQueries, k: Tensor, v: Tensor, blocks: BlockSet, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        dout, q, out, _ = queries
        gradients = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
        workspace = [dout.contiguous(), out.contiguous()]
        workspace += [q.new_empty(q.numel(), dtype=torch.float32), q.new_empty(q.shape[:2], dtype=torch.float32)]
        if k.shape[1] < q.shape[1]:
            workspace += [torch.empty_like(q), torch.empty_like(q)]
        return gradients


def one_micro_batch(lengths: list[int], ratio: float) -> RankPlan:
    """Return a plan with all documents whole on one rank."""
    group = GroupSpec(sequences=list(range(len(lengths))), ranks=[0], offload_ratio=ratio)
    plan = Plan.build(lengths=lengths, capacity_tokens=[sum(lengths)], groups=[group], schedule=[[[0]]])
    return RankPlan.of(plan, 0)


def device_room(device: Device, sizes: Sizes) -> float:
    """Bytes."""
    return torch.cuda.get_device_properties(device.device).total_memory if device.on_gpu else sizes.device_bytes


def step_seconds(shape: Llama, documents: int, tokens: int, checkpointing: str) -> float:
    """Estimate the seconds of a step on an H200."""
    work = shape.training_flops(documents, tokens)
    return work * (4 / 3 if checkpointing == "full" else 1.1) / GUESSED_FLOPS


def case_seconds(step: float) -> float:
    """Estimate the seconds that ``Device.figures`` takes for runs of ``step`` seconds."""
    return step if step > LONG_SECONDS else max(2 * step, CASE_SECONDS)


def step_figures(
    device: Device, sizes: Sizes, shape: Llama, lengths: list[int], checkpointing: str, ratio: float
) -> Row:
    """Measure the seconds and the peak memory of a step, beside the estimate of ``cost.memory``."""
    tokens = sum(lengths)
    pool = HostPool(sizes.host_bytes, pinned=device.on_gpu) if ratio > 0 else None
    step = Step(device, shape, lengths, checkpointing, pool, ratio)
    if pool is not None:
        make_pages(pool, step.moved_bytes)
    figures = device.figures(step, sizes.steps)
    peak = float(step.memory.limits().device_peak(tokens, int(ratio * tokens), 0)) - step.memory.states.device_bytes
    return figures | {"estimated_gib": peak / GIB, "host_gib": 0.0 if pool is None else pool.peak_bytes / GIB}


def make_pages(pool: HostPool, num_bytes: float) -> None:
    """Pin host memory before anything is timed. For tens of GiB this takes seconds."""
    pages = [pool.take() for _ in range(int(num_bytes) // pool.page_bytes)]
    for page in pages:
        pool.leave(page, None)


def offload_cases(device: Device, sizes: Sizes, chosen: tuple[tuple[int, int, str, float], ...]) -> Iterator[Case]:
    for tokens, layers, checkpointing, ratio in chosen:
        shape = replace(sizes.shape, num_layers=layers)
        row = {"tokens": tokens, "layers": layers, "checkpointing": checkpointing, "r": ratio}
        seconds = step_seconds(shape, 1, tokens, checkpointing)
        yield (
            row,
            case_seconds(seconds),
            lambda a=(shape, [tokens], checkpointing, ratio): step_figures(device, sizes, *a),
        )


def mfu_cases(device: Device, sizes: Sizes, chosen: tuple[tuple[int, int, int, str], ...]) -> Iterator[Case]:
    rate = matmul_rate(device)
    for documents, tokens, layers, checkpointing in chosen:
        shape = replace(sizes.shape, num_layers=layers)
        work = shape.training_flops(documents, tokens)

        def measure(
            shape: Llama = shape,
            lengths: list[int] = [tokens] * documents,
            checkpointing: str = checkpointing,
            work: float = work,
        ) -> Row:
            figures = step_figures(device, sizes, shape, lengths, checkpointing, 0.0)
            achieved = work / figures["seconds"]
            return figures | {
                "tflops": achieved / 1e12,
                "matmul_tflops": rate / 1e12,
                "share": achieved / rate,
            }

        row = {"documents": documents, "tokens": tokens, "layers": layers, "checkpointing": checkpointing}
        yield row, case_seconds(step_seconds(shape, documents, tokens, checkpointing)), measure


def matmul_rate(device: Device) -> float:
    """Measure the FLOP/s of a large matrix product, for long enough that the clock rates settle."""
    side, products = (8192, 50) if device.on_gpu else (1024, 4)
    left, right = (torch.randn(side, side, device=device.device).to(device.dtype) for _ in range(2))
    out = torch.empty_like(left)

    def work() -> None:
        for _ in range(products):
            torch.mm(left, right, out=out)

    device.once(work)
    return 2 * side**3 * products / statistics.median(device.once(work) for _ in range(5))


def attention_cases(device: Device, sizes: Sizes) -> Iterator[Case]:
    """Measure the attention kernel alone, which limits the MFU of long contexts."""
    rate, shape = matmul_rate(device), sizes.shape
    kernel = select_kernel("auto", device.device, device.dtype)
    for tokens in sizes.attention:

        def measure(tokens: int = tokens) -> Row:
            triangles, scale = causal_triangles([tokens]), shape.head_dim**-0.5
            widths = (shape.num_heads, shape.num_kv_heads, shape.num_kv_heads)
            q, k, v = (
                torch.randn(tokens, heads, shape.head_dim, device=device.device).to(device.dtype) for heads in widths
            )
            out, lse = kernel.forward(q, k, v, triangles, scale)
            forward = device.figures(lambda: kernel.forward(q, k, v, triangles, scale), 10)["seconds"]
            backward = device.figures(lambda: kernel.backward(OfQueries(out, q, out, lse), k, v, triangles, scale), 10)[
                "seconds"
            ]
            work = shape.attention_flops(tokens)
            rates = work / forward, BACKWARD_ATTENTION_RATIO * work / backward
            return {
                "forward_tflops": rates[0] / 1e12,
                "backward_tflops": rates[1] / 1e12,
                "matmul_tflops": rate / 1e12,
                "share": 3 * work / (work / rates[0] + 2 * work / rates[1]) / rate,
            }

        yield {"tokens": tokens}, CASE_SECONDS, measure


def longest_cases(device: Device, sizes: Sizes) -> Iterator[Case]:
    """Find the longest context by memory, without attention's arithmetic. Then take a real step of as many tokens as
    time allows.
    """
    pool = HostPool(sizes.host_bytes, pinned=device.on_gpu)
    for name, shape, first in sizes.longest:
        row = {"model": name, "layers": shape.num_layers, "checkpointing": "full"}
        unit, fits, too_many = first // 4, 0, 2 * first
        while too_many - fits > unit:
            tokens = first if fits == 0 and too_many == 2 * first else (fits + too_many) // (2 * unit) * unit
            outcome: list[bool] = []

            def measure(tokens: int = tokens, shape: Llama = shape, outcome: list[bool] = outcome) -> Row:
                figures = longest_figures(device, sizes, shape, tokens, pool, NoAttention())
                outcome.append(figures["fits"] == "yes")
                return figures

            yield row | {"tokens": tokens, "attention": "allocated, not computed"}, 60.0, measure
            if not outcome:
                return  # out of time
            fits, too_many = (tokens, too_many) if outcome[0] else (fits, tokens)
        while device.on_gpu and step_seconds(shape, 1, fits, "full") > 90:
            fits //= 2
        if fits:
            yield (
                row | {"tokens": fits, "attention": "computed"},
                step_seconds(shape, 1, fits, "full"),
                lambda a=(shape, fits, pool): longest_figures(device, sizes, *a),
            )


def longest_figures(
    device: Device,
    sizes: Sizes,
    shape: Llama,
    tokens: int,
    pool: HostPool,
    kernel: AttentionKernel | None = None,
) -> Row:
    """Return a step that offloads as much as host memory can hold, and whether the rest fits on the device."""
    room = device_room(device, sizes)
    row: Row = {"device_gib": room / GIB}
    try:
        step = Step(device, shape, [tokens], "full", pool, None, kernel)
        states = torch.cuda.memory_allocated(device.device) if device.on_gpu else step.memory.states.device_bytes
        peak = float(step.memory.limits().device_peak(tokens, int(step.ratio * tokens), 0))
        row |= {"r": step.ratio, "estimated_gib": peak / GIB}
        make_pages(pool, step.moved_bytes)
        if device.on_gpu:
            torch.cuda.reset_peak_memory_stats(device.device)
            seconds = device.once(step)
            peak = torch.cuda.max_memory_allocated(device.device)
        else:
            seconds, peak = device.once(step), counted_peak(step) + states
    except torch.cuda.OutOfMemoryError:
        return row | {"fits": "no"}
    row |= {"fits": "yes" if peak <= room else "no", "peak_gib": peak / GIB, "host_gib": pool.bytes_allocated / GIB}
    return row if kernel is not None else row | {"seconds": seconds}


def losses(device: Device) -> dict[str, Callable[[Tensor, Tensor, Tensor], Tensor] | str]:
    """Return each implementation, or the reason why it is missing. All of them return sums over tokens."""
    found: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor] | str] = {
        "bytescale": lambda h, w, y: loss_sum(PlainHead(w), h, y),
        "plain PyTorch": lambda h, w, y: F.cross_entropy((h @ w.T).float(), y, reduction="sum"),
    }
    if hasattr(F, "linear_cross_entropy"):
        options = torch.nn.LinearCrossEntropyOptions()
        found["torch linear_cross_entropy"] = lambda h, w, y: F.linear_cross_entropy(
            h, w, y, reduction="sum", options=options
        )
    else:
        found["torch linear_cross_entropy"] = f"not in torch {torch.__version__}"
    try:
        from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss as Liger
    except ImportError as error:
        return found | {"Liger": f"not installed ({error})"}
    if not device.on_gpu:
        return found | {"Liger": "needs a GPU"}
    liger = Liger(reduction="sum")
    found["Liger"] = lambda h, w, y: liger(w, h, y)
    if "accum_dtype" in inspect.signature(Liger).parameters:  # the head's gradient is in fp32, like ours
        wide = Liger(reduction="sum", accum_dtype=torch.float32)
        found["Liger, fp32 sums"] = lambda h, w, y: wide(w, h, y)
    return found


def loss_cases(device: Device, sizes: Sizes) -> Iterator[Case]:
    for tokens, width, vocab in sizes.loss:
        for name, function in losses(device).items():
            row = {"tokens": tokens, "hidden": width, "vocabulary": vocab, "implementation": name}
            yield (
                row,
                CASE_SECONDS / 4,
                lambda a=(function, tokens, width, vocab): loss_figures(device, sizes.steps, *a),
            )


def loss_figures(device: Device, repeats: int, function: Any, tokens: int, width: int, vocab: int) -> Row:
    """Measure the seconds and the peak GiB of forward and backward of one implementation."""
    if isinstance(function, str):
        return {"note": function}
    generator = torch.Generator(device=device.device).manual_seed(0)  # the same numbers for all implementations
    hidden = torch.randn(tokens, width, device=device.device, generator=generator).to(device.dtype).requires_grad_()
    weight = torch.randn(vocab, width, device=device.device, generator=generator).mul_(0.02).to(device.dtype)
    weight.requires_grad_()
    labels = torch.randint(vocab, (tokens,), device=device.device, generator=generator)
    values: list[float] = []

    def both() -> None:
        loss = function(hidden, weight, labels)
        loss.backward()
        values[:] = [float(loss.detach())]
        hidden.grad = weight.grad = None  # inside, so that every run finds the memory as it was

    return device.figures(both, 3 * repeats) | {"loss": values[0] / tokens}


def profile_cases(device: Device, sizes: Sizes) -> Iterator[Case]:
    """Run the measurement of ``bytescale profile`` without the packages that its command line needs."""
    shape, longest, seconds = sizes.profile

    def measure() -> Row:
        from bytescale.train.profiling.measurer import Measurer
        from bytescale.train.profiling.profiler import measure_profile

        model = HFDecoder(shape.model(device.device, device.dtype), longest_document=longest)
        profile = measure_profile(Measurer(model, device.device, device.dtype), max_tokens=longest, seconds=seconds)
        out = Path("benchmarks/out/profile.toml")
        out.parent.mkdir(parents=True, exist_ok=True)
        save_profile(profile, out)
        return {
            "to_host_gb_s": profile.links.device_to_host_bytes_per_second / 1e9,
            "from_host_gb_s": profile.links.host_to_device_bytes_per_second / 1e9,
            "longest": int(np.max([point.tokens for point in profile.points])),
            "file": str(out),
            "note": "; ".join(fit_warnings(profile)),
        }

    yield {"hidden": shape.hidden_size}, 1.5 * seconds, measure


PARTS: dict[str, Callable[[Device, Sizes], Iterator[Case]]] = {
    "loss": loss_cases,
    "attention": attention_cases,
    "offload": lambda device, sizes: offload_cases(device, sizes, sizes.offload),
    "offload_long": lambda device, sizes: offload_cases(device, sizes, sizes.offload_long),
    "mfu": lambda device, sizes: mfu_cases(device, sizes, sizes.mfu),
    "mfu_long": lambda device, sizes: mfu_cases(device, sizes, sizes.mfu_long),
    "longest": longest_cases,
    "profile": profile_cases,
}


class Table:
    """Prints Markdown row by row. The first row decides the columns; a last column holds what else a row has."""

    def __init__(self) -> None:
        self._columns: list[str] = []

    def add(self, row: Row) -> None:
        if not self._columns:
            self._columns = [name for name in row if name != "note"]
            print("| " + " | ".join([*self._columns, "note"]) + " |\n" + "|---" * (len(self._columns) + 1) + "|")
        others = [f"{name} {cell(row[name])}" for name in row if name not in (*self._columns, "note")]
        note = "; ".join([*others, *([str(row["note"])] if row.get("note") else [])])
        print("| " + " | ".join([*(cell(row.get(name)) for name in self._columns), note]) + " |", flush=True)


def cell(value: object) -> str:
    if value is None:
        return ""
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def measured(device: Device, case: Case, seconds_left: float) -> tuple[Row, bool]:
    """Return the row of a case, and whether it is valid. Running out of memory is a finding, and an error is not."""
    row, seconds, measure = case
    if device.on_gpu and seconds > seconds_left:
        return row | {"note": f"left out: takes about {seconds:.0f} s, {seconds_left:.0f} s are left"}, True
    with device.tidy():
        try:
            return row | measure(), True
        except (torch.cuda.OutOfMemoryError, MemoryError) as error:
            return row | {"note": f"out of memory: {str(error).splitlines()[0]}"}, True
        except Exception as error:  # it is printed and counts in the exit code; the following cases still run
            return row | {"note": f"failed: {type(error).__name__}: {(str(error).splitlines() or [''])[0]}"}, False


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(PARTS), help="which, with commas: " + ", ".join(PARTS))
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="cuda or cpu")
    parser.add_argument("--seconds", type=float, default=570.0, help="on a GPU, start no case after this many seconds")
    parser.add_argument("--out", type=Path, help="also write JSON here, after every row")
    options = parser.parse_args()
    started = time.perf_counter()
    chosen = options.only.split(",")
    unknown = [name for name in chosen if name not in PARTS]
    if unknown:
        parser.error(f"--only {unknown[0]}: choose from {', '.join(PARTS)}")
    if options.device.startswith("cuda") and not torch.cuda.is_available():
        parser.error(
            f"--device {options.device}: this torch ({torch.__version__}) sees no GPU; use cpu for small sizes"
        )
    device = Device(options.device)
    sizes = GPU if device.on_gpu else CPU
    name = torch.cuda.get_device_name() if device.on_gpu else f"cpu, {torch.get_num_threads()} threads"
    print(f"{name}, torch {torch.__version__}, {device.dtype}", flush=True)
    results: Row = {"device": name, "torch": torch.__version__}
    all_right = True
    for part in chosen:
        print(f"\n{part}\n", flush=True)
        table, results[part] = Table(), []
        for case in PARTS[part](device, sizes):
            row, is_right = measured(device, case, options.seconds - (time.perf_counter() - started))
            all_right &= is_right
            table.add(row)
            results[part].append(row)
            if options.out:
                options.out.parent.mkdir(parents=True, exist_ok=True)
                options.out.write_text(json.dumps(results, indent=1), encoding="utf-8")
    return 0 if all_right else 1


if __name__ == "__main__":
    sys.exit(main())
