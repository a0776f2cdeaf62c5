"""Offloading, MFU, the longest context and the cross-entropy on one device, from a checkout, without installing.

    PYTHONPATH=src:. python benchmarks/gpu.py                 # a GPU if there is one, else small sizes on the CPU
    PYTHONPATH=src:. python benchmarks/gpu.py --only loss,offload --out benchmarks/out/gpu.json

Prints Markdown tables as docs/benchmarks.md has them. Needs torch and NumPy (Triton on a GPU); compares with Liger
(``liger-kernel``) and ``torch.nn.functional.linear_cross_entropy`` where they exist, and says where they do not.
On a GPU times are between synchronisations and memory is the allocator's peak; on a CPU memory is that of counted
tensors, in a run of its own, and offloaded bytes are taken off although they lie in the same memory.
"""

from __future__ import annotations

import argparse
import gc
import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bytescale.attention import PackedAttention, select_kernel
from bytescale.config import PRESETS, Architecture
from bytescale.cost import flops
from bytescale.models import Llama
from bytescale.plan import MicroBatch, Plan, RankPlan
from bytescale.plan.plan import GroupSpec
from bytescale.runtime import Activations, HostPool, RankGroup, linear_cross_entropy

GIB = 2**30


@dataclass(frozen=True)
class Sizes:
    """What is measured on a kind of device."""

    shape: Architecture
    offload: tuple[tuple[int, int, str, tuple[float, ...]], ...]  # (tokens, layers, checkpointing, ratios)
    mfu: tuple[tuple[int, int, int, str], ...]  # (documents, tokens of each, layers, checkpointing)
    longest: tuple[tuple[str, Architecture, int, int], ...]  # (name, shape, layers, first length to try)
    loss: tuple[tuple[int, int, int], ...]  # (tokens, hidden, vocabulary)
    host_bytes: int
    steps: int


GPU = Sizes(
    shape=replace(PRESETS["7b"], vocab_size=32000),
    offload=(
        (65536, 8, "none", (0.0, 0.5, 1.0)),
        (65536, 8, "full", (0.0,)),
        (262144, 12, "attention", (0.0, 1.0)),
        (262144, 12, "full", (0.0, 1.0)),
    ),
    mfu=((8, 8192, 8, "none"), (1, 65536, 8, "none"), (1, 262144, 8, "attention"), (1, 524288, 4, "attention")),
    longest=(("7B width", PRESETS["7b"], 4, 262144), ("1B", PRESETS["1b"], 16, 262144)),
    loss=((8192, 4096, 131072), (32768, 4096, 131072)),
    host_bytes=100 * GIB,
    steps=5,
)
CPU = Sizes(
    shape=PRESETS["tiny"],
    offload=((2048, 6, "none", (0.0, 0.5, 1.0)), (2048, 6, "full", (0.0,)), (2048, 6, "attention", (0.0, 1.0))),
    mfu=((4, 512, 4, "none"), (1, 2048, 4, "attention")),
    longest=(),
    loss=((1024, 128, 8192), (4096, 128, 8192)),
    host_bytes=GIB,
    steps=3,
)


class Device:
    """Times work and finds its peak memory."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.on_gpu = device.type == "cuda"
        self.dtype = torch.bfloat16 if self.on_gpu else torch.float32

    def synchronise(self) -> None:
        if self.on_gpu:
            torch.cuda.synchronize(self.device)

    def seconds(self, work: Callable[[], object], repeats: int) -> float:
        """The fastest of ``repeats`` after two to warm up (allocators, autotuners, host pages)."""
        times = []
        for _ in range(repeats + 2):
            self.synchronise()
            started = time.perf_counter()
            work()
            self.synchronise()
            times.append(time.perf_counter() - started)
        return min(times[2:])

    def peak_bytes(self, work: Callable[[], object]) -> int:
        """What ``work`` needs on top of what is there already."""
        if not self.on_gpu:
            from tests.helpers.live_bytes import LiveBytes

            with LiveBytes() as live:
                work()
            return live.peak
        self.synchronise()
        torch.cuda.reset_peak_memory_stats(self.device)
        before = torch.cuda.memory_allocated(self.device)
        work()
        self.synchronise()
        return torch.cuda.max_memory_allocated(self.device) - before

    @contextmanager
    def tidy(self) -> Iterator[None]:
        """Give everything back afterwards, so that cases do not share fragments."""
        try:
            yield
        finally:
            gc.collect()
            if self.on_gpu:
                torch.cuda.empty_cache()


class Step:
    """Forward and backward of one micro-batch of a model, gradients added in place."""

    def __init__(
        self, device: Device, shape: Architecture, lengths: list[int], checkpointing: str, ratio: float, host_bytes: int
    ) -> None:
        self.pool = HostPool(host_bytes, pinned=device.on_gpu) if ratio > 0 else None
        with device.device:
            self.model = Llama(shape).to(device.dtype)
        for parameter in self.model.parameters():
            torch.nn.init.normal_(parameter, std=0.02)
            parameter.grad = torch.zeros_like(parameter)
        self.activations = Activations(
            list(self.model.layers), checkpointing=checkpointing, pool=self.pool, device=device.device
        )
        self.micro_batch = one_micro_batch(lengths, ratio)
        tokens = sum(lengths)
        self.tokens = torch.randint(shape.vocab_size, (tokens,), device=device.device)
        self.positions = torch.as_tensor(self.micro_batch.position_ids(), device=device.device)
        kernel = select_kernel("auto", device.device, device.dtype)
        exchange = RankGroup(device=device.device).exchange
        self.attention = PackedAttention(self.micro_batch, kernel, exchange, self.activations.attention_memory)

    def __call__(self) -> None:
        self.activations.begin_step([self.micro_batch])
        with self.activations.forward(0):
            hidden = self.model(self.tokens, self.positions, self.attention)
            loss = linear_cross_entropy(hidden, self.model.head_weight, self.tokens)
            del hidden
        with self.activations.backward(0):
            (loss / len(self.tokens)).backward()


def one_micro_batch(lengths: list[int], ratio: float) -> MicroBatch:
    """All documents whole on one rank."""
    group = GroupSpec(sequences=list(range(len(lengths))), ranks=[0], offload_ratio=ratio)
    plan = Plan.build(lengths=lengths, capacity_tokens=[sum(lengths)], groups=[group], schedule=[[[0]]])
    return RankPlan.of(plan, 0).micro_batches[0]


def measure_offload(device: Device, sizes: Sizes) -> list[dict[str, Any]]:
    rows = []
    for tokens, layers, checkpointing, ratios in sizes.offload:
        for ratio in ratios:
            with device.tidy():
                shape = replace(sizes.shape, num_layers=layers)
                row = {"tokens": tokens, "layers": layers, "checkpointing": checkpointing, "r": ratio}
                rows.append(row | step_figures(device, sizes, shape, [tokens], checkpointing, ratio))
    return rows


def step_figures(
    device: Device, sizes: Sizes, shape: Architecture, lengths: list[int], checkpointing: str, ratio: float
) -> dict[str, Any]:
    """Seconds and peak GiB of a step, or the reason why there are none."""
    try:
        step = Step(device, shape, lengths, checkpointing, ratio, sizes.host_bytes)
        seconds = device.seconds(step, sizes.steps)
        peak = device.peak_bytes(step)
    except torch.cuda.OutOfMemoryError:
        return {"seconds": None, "peak_gib": None, "note": "out of memory"}
    host = step.pool.peak_bytes if step.pool is not None else 0
    return {"seconds": seconds, "peak_gib": peak / GIB, "host_gib": host / GIB}


def measure_mfu(device: Device, sizes: Sizes) -> list[dict[str, Any]]:
    rate = matmul_rate(device)
    rows = []
    for documents, tokens, layers, checkpointing in sizes.mfu:
        with device.tidy():
            shape = replace(sizes.shape, num_layers=layers)
            figures = step_figures(device, sizes, shape, [tokens] * documents, checkpointing, 0.0)
            work = flops.training_flops(shape, num_tokens=documents * tokens, sum_of_squares=documents * tokens**2)
            achieved = work / figures["seconds"] if figures["seconds"] else None
            rows.append(
                {"documents": documents, "tokens": tokens, "layers": layers, "checkpointing": checkpointing}
                | figures
                | {
                    "tflops": achieved and achieved / 1e12,
                    "matmul_tflops": rate / 1e12,
                    "share": achieved and achieved / rate,
                }
            )
    return rows


def matmul_rate(device: Device) -> float:
    """FLOP/s of a large matrix product."""
    side = 8192 if device.on_gpu else 1024
    left, right = (torch.randn(side, side, device=device.device).to(device.dtype) for _ in range(2))
    return 2 * side**3 / device.seconds(lambda: left @ right, 10)


def measure_longest(device: Device, sizes: Sizes) -> list[dict[str, Any]]:
    """Longest power-of-two multiple, then quarters of it, that one step runs through with everything offloaded."""
    rows = []
    for name, base, layers, tokens in sizes.longest:
        shape = replace(base, num_layers=layers)
        best, seconds, step_size = 0, 0.0, tokens
        while step_size >= 65536:
            with device.tidy():
                outcome = run_once(device, shape, best + step_size, sizes.host_bytes)
            if outcome is None:
                step_size //= 2
            else:
                best, seconds = best + step_size, outcome
        rows.append({"model": name, "layers": layers, "longest_tokens": best, "seconds": seconds})
    return rows


def run_once(device: Device, shape: Architecture, tokens: int, host_bytes: int) -> float | None:
    try:
        step = Step(device, shape, [tokens], "full", 1.0, host_bytes)
        device.synchronise()
        started = time.perf_counter()
        step()
        device.synchronise()
    except (torch.cuda.OutOfMemoryError, MemoryError):
        return None
    return time.perf_counter() - started


def losses(device: Device) -> dict[str, Callable[[Tensor, Tensor, Tensor], Tensor] | str]:
    """Each implementation, or why it is not there. All return sums over tokens."""
    found: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor] | str] = {
        "bytescale": linear_cross_entropy,
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
        from liger_kernel.ops.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyFunction as Liger
    except ImportError:
        found["Liger"] = "liger-kernel is not installed"
    else:
        loss = __import__("liger_kernel.transformers", fromlist=["x"]).LigerFusedLinearCrossEntropyLoss(reduction="sum")
        found["Liger"] = (lambda h, w, y: loss(w, h, y)) if device.on_gpu and Liger else "Liger needs a GPU"
    return found


def measure_loss(device: Device, sizes: Sizes) -> list[dict[str, Any]]:
    rows = []
    for tokens, width, vocab in sizes.loss:
        for name, function in losses(device).items():
            row: dict[str, Any] = {"tokens": tokens, "hidden": width, "vocabulary": vocab, "implementation": name}
            figures = {"note": function} if isinstance(function, str) else None
            with device.tidy():
                rows.append(row | (figures or loss_figures(device, function, tokens, width, vocab, sizes.steps)))
    return rows


def loss_figures(device: Device, function: Any, tokens: int, width: int, vocab: int, repeats: int) -> dict[str, Any]:
    """Seconds and peak GiB of forward and backward of one implementation."""
    hidden = torch.randn(tokens, width, device=device.device).to(device.dtype).requires_grad_()
    weight = (torch.randn(vocab, width, device=device.device) * 0.02).to(device.dtype).requires_grad_()
    labels = torch.randint(vocab, (tokens,), device=device.device)

    def forget() -> None:
        hidden.grad = weight.grad = None

    def both() -> None:
        forget()
        function(hidden, weight, labels).backward()

    try:
        seconds = device.seconds(both, repeats)
        forget()
        return {"seconds": seconds, "peak_gib": device.peak_bytes(both) / GIB}
    except torch.cuda.OutOfMemoryError:
        return {"note": "out of memory"}


MEASUREMENTS: dict[str, Callable[[Device, Sizes], list[dict[str, Any]]]] = {
    "loss": measure_loss,
    "offload": measure_offload,
    "mfu": measure_mfu,
    "longest": measure_longest,
}


def markdown(rows: list[dict[str, Any]]) -> str:
    columns = list(dict.fromkeys(name for row in rows for name in row))
    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    lines += ["| " + " | ".join(cell(row.get(name)) for name in columns) + " |" for row in rows]
    return "\n".join(lines)


def cell(value: object) -> str:
    if value is None:
        return ""
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(MEASUREMENTS), help="which, with commas: " + ", ".join(MEASUREMENTS))
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, help="also write JSON here")
    options = parser.parse_args()
    chosen = options.only.split(",")
    unknown = [name for name in chosen if name not in MEASUREMENTS]
    if unknown:
        parser.error(f"--only {unknown[0]}: choose from {', '.join(MEASUREMENTS)}")
    device = Device(torch.device(options.device))
    sizes = GPU if device.on_gpu else CPU
    name = torch.cuda.get_device_name() if device.on_gpu else f"cpu, {torch.get_num_threads()} threads"
    print(f"{name}, torch {torch.__version__}, {device.dtype}", flush=True)
    results: dict[str, Any] = {"device": name, "torch": torch.__version__}
    for what in chosen:
        results[what] = MEASUREMENTS[what](device, sizes)
        if results[what]:
            print(f"\n{what}\n\n{markdown(results[what])}", flush=True)
        if options.out:  # after each: a killed run keeps what it has
            options.out.parent.mkdir(parents=True, exist_ok=True)
            options.out.write_text(json.dumps(results, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
