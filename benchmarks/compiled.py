"""Measures what ``kernels.compile`` gains: forward and backward of a layer, plain and compiled, in one run.

    python benchmarks/compiled.py [--device cuda] [--dtype bf16]

Attention is the same in both, so it is replaced by a no-op. The matrix products and the operations between them remain.
The plain and the compiled layer take turns at every length, so a burst of other load on the machine affects both. The
results are medians over the turns, and the ratio of the medians. The first call of a compiled function compiles it and
is timed separately.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import replace

import torch
from bytescale.models import build_model
from bytescale.models.compiled import RowCompiler, apply_compiled
from bytescale.models.rope import rope_rotation
from torch import Tensor, nn

from bytescale.config.architecture import PRESETS, Architecture

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", choices=DTYPES, default="fp32")
    parser.add_argument("--preset", default="tiny")
    parser.add_argument("--tokens", type=int, nargs="+", default=[256, 1000, 4096])
    parser.add_argument("--turns", type=int, default=9)
    options = parser.parse_args()
    device, dtype = torch.device(options.device), DTYPES[options.dtype]
    shape = replace(PRESETS[options.preset], num_layers=2, vocab_size=64, tie_embeddings=True)
    print(f"{options.preset}'s layers, hidden {shape.hidden_size}, {device}, {options.dtype}, {options.turns} turns")
    variants = {name: layer_of(shape, device, dtype, name == "compiled") for name in ("plain", "compiled")}
    started = time.perf_counter()
    steps(variants["compiled"], shape, device, dtype, options.tokens[0])()
    print(f"first forward and backward, which compiles: {time.perf_counter() - started:.1f} s")
    print("| tokens | plain ms | compiled ms | compiled / plain |")
    print("|---|---|---|---|")
    for tokens in options.tokens:
        works = {name: steps(layer, shape, device, dtype, tokens) for name, layer in variants.items()}
        row(f"layer, {tokens}", works, options.turns, device)


def layer_of(shape: Architecture, device: torch.device, dtype: torch.dtype, compiled: bool) -> nn.Module:
    model = build_model(shape)
    model.initialise(0)
    model = model.to(device=device, dtype=dtype)
    if compiled:
        apply_compiled(model, RowCompiler())
    return model.layers[0]


def steps(
    layer: nn.Module, shape: Architecture, device: torch.device, dtype: torch.dtype, tokens: int
) -> Callable[[], None]:
    """Return a function that runs forward and backward of one layer and adds to existing gradients of the weights."""
    hidden = torch.randn(tokens, shape.hidden_size, device=device, dtype=dtype, requires_grad=True)
    gradient = torch.randn_like(hidden)
    rotation = rope_rotation(torch.arange(tokens, device=device), shape, dtype)

    def no_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return q + (k + v).repeat_interleave(q.shape[1] // k.shape[1], dim=1)

    def step() -> None:
        hidden.grad = None
        layer(hidden, rotation, no_attention).backward(gradient)

    return step


def row(name: str, works: dict[str, Callable[[], None]], turns: int, device: torch.device) -> None:
    """Time both functions in turns and print their medians."""
    seconds: dict[str, list[float]] = {variant: [] for variant in works}
    for turn in range(turns + 1):
        for variant, work in works.items():
            synchronise(device)
            started = time.perf_counter()
            work()
            synchronise(device)
            if turn:  # the first turn is a warm-up
                seconds[variant].append(time.perf_counter() - started)
    plain, compiled = (statistics.median(seconds[variant]) * 1e3 for variant in ("plain", "compiled"))
    print(f"| {name} | {plain:.2f} | {compiled:.2f} | {compiled / plain:.2f} |", flush=True)


def synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


if __name__ == "__main__":
    main()
