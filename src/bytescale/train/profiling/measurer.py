"""Measures one layer of a model on one device: every quantity at one length. ``profiler`` fits curves to the values."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor, nn

from bytescale.attention import AttentionKernel, select_kernel
from bytescale.attention.blocks import BlockSet, causal_triangles
from bytescale.attention.kernels import OfQueries
from bytescale.config import Architecture
from bytescale.models import build_model
from bytescale.models.rope import rope_rotation
from bytescale.runtime import linear_cross_entropy

MIN_SECONDS = 0.05
"""Within a sweep, the runs of one quantity are repeated for this long."""
SHORT_TOKENS = 16
"""Tokens of a sequence whose own attention takes next to no time."""
HOST_COPY_BYTES = 2**26


@dataclass
class LapTimer:
    """Measures seconds of work on a device, with the host's clock. It synchronises before and after."""

    device: torch.device

    def seconds(self, work: Callable[[], object], prepare: Callable[[], object] = lambda: None) -> float:
        """Return the median of several runs, after a warm-up run. ``prepare`` runs before each and does not count."""
        self.once(work, prepare)
        started = time.perf_counter()
        times = [self.once(work, prepare)]
        while time.perf_counter() - started < MIN_SECONDS:
            times.append(self.once(work, prepare))
        return statistics.median(times)

    def once(self, work: Callable[[], object], prepare: Callable[[], object] = lambda: None) -> float:
        """Return the seconds of one run."""
        prepare()
        self._synchronise()
        started = time.perf_counter()
        work()
        self._synchronise()
        return time.perf_counter() - started

    def _synchronise(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


@dataclass
class Measurer:
    """Measures one model on one device in one dtype.

    ``sweeps`` collects the values of each (curve, tokens), one per sweep.
    """

    architecture: Architecture
    device: torch.device
    dtype: torch.dtype
    sweeps: dict[tuple[str, int], list[float]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.watch = LapTimer(self.device)
        self.kernel: AttentionKernel = select_kernel("auto", self.device, self.dtype)
        model = build_model(replace(self.architecture, num_layers=1, vocab_size=64, tie_embeddings=True))
        model.initialise(0)
        self.layer: nn.Module = model.layers[0].to(device=self.device, dtype=self.dtype)
        head = self.random(self.architecture.vocab_size, self.architecture.hidden_size) * 0.02
        self.head = head.requires_grad_()

    def measure(self, tokens: int) -> None:
        """Measure every curve at one length."""
        self._attention("attention", [tokens])
        self._attention("sequences", [SHORT_TOKENS] * (tokens // SHORT_TOKENS))
        self._ring_block(tokens)
        self._rest(tokens)
        self._head(tokens)
        self._add("activation_bytes", tokens, float(self.activation_bytes(tokens)))

    def activation_bytes(self, tokens: int) -> int:
        """Return the bytes that autograd saves in one layer, including attention."""
        hidden = self.random(tokens, self.architecture.hidden_size).requires_grad_()
        rotation = self._rotation(tokens)
        outside = {t.untyped_storage().data_ptr() for t in (*self.layer.parameters(), *rotation)}
        saved: dict[int, Tensor] = {}

        def pack(tensor: Tensor) -> Tensor:
            if tensor.untyped_storage().data_ptr() not in outside:
                saved[tensor.untyped_storage().data_ptr()] = tensor  # kept alive, so that no address is reused
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            self.layer(hidden, rotation, _WithLse(self.kernel, causal_triangles([tokens])))
        return sum(tensor.untyped_storage().nbytes() for tensor in saved.values())

    def _attention(self, name: str, lengths: list[int]) -> None:
        shape, triangles, tokens = self.architecture, causal_triangles(lengths), sum(lengths)
        q = self.random(tokens, shape.num_heads, shape.head_dim)
        k, v = (self.random(tokens, shape.num_kv_heads, shape.head_dim) for _ in range(2))
        scale = shape.head_dim**-0.5
        out, lse = self.kernel.forward(q, k, v, triangles, scale)
        forward = self.watch.seconds(lambda: self.kernel.forward(q, k, v, triangles, scale))
        backward = self.watch.seconds(lambda: self.kernel.backward(OfQueries(out, q, out, lse), k, v, triangles, scale))
        self._add(f"{name}_forward", tokens, forward)
        self._add(f"{name}_backward", tokens, backward)

    def _ring_block(self, tokens: int) -> None:
        shape = self.architecture
        q = self.random(tokens, shape.num_heads, shape.head_dim)
        k, v = (self.random(tokens // 2, shape.num_kv_heads, shape.head_dim) for _ in range(2))
        block = BlockSet.of(np.array([[0, tokens]]), np.array([[0, tokens // 2]]), causal=False)
        seconds = self.watch.seconds(lambda: self.kernel.forward(q, k, v, block, shape.head_dim**-0.5))
        self._add("ring_block_forward", tokens, seconds)

    def _rest(self, tokens: int) -> None:
        hidden = self.random(tokens, self.architecture.hidden_size).requires_grad_()
        rotation, gradient = self._rotation(tokens), self.random(tokens, self.architecture.hidden_size)
        outputs: list[Tensor] = []

        def forward() -> None:
            outputs[:] = [self.layer(hidden, rotation, _no_attention)]

        def reset() -> None:
            outputs.clear()
            hidden.grad = None

        def prepare_backward() -> None:
            reset()
            forward()

        self._add("rest_forward", tokens, self.watch.seconds(forward, prepare=reset))
        backward = self.watch.seconds(lambda: outputs[0].backward(gradient), prepare=prepare_backward)
        self._add("rest_backward", tokens, backward)

    def _head(self, tokens: int) -> None:
        hidden = self.random(tokens, self.architecture.hidden_size).requires_grad_()
        labels = torch.randint(self.architecture.vocab_size, (tokens,), device=self.device)
        losses: list[Tensor] = []

        def forward() -> None:
            losses[:] = [linear_cross_entropy(hidden, self.head, labels)]

        def prepare_backward() -> None:
            hidden.grad = None
            forward()

        self._add("head_forward", tokens, self.watch.seconds(forward, prepare=losses.clear))
        self._add("head_backward", tokens, self.watch.seconds(lambda: losses[0].backward(), prepare=prepare_backward))

    def host_rates(self) -> tuple[float, float]:
        """Return the rates of copies to the host and from the host, in bytes per second."""
        on_device = torch.zeros(HOST_COPY_BYTES, dtype=torch.uint8, device=self.device)
        on_host = torch.zeros(HOST_COPY_BYTES, dtype=torch.uint8, pin_memory=self.device.type == "cuda")
        to_host = self.watch.seconds(lambda: on_host.copy_(on_device, non_blocking=True))
        to_device = self.watch.seconds(lambda: on_device.copy_(on_host, non_blocking=True))
        return HOST_COPY_BYTES / to_host, HOST_COPY_BYTES / to_device

    def _add(self, curve: str, tokens: int, value: float) -> None:
        self.sweeps.setdefault((curve, tokens), []).append(value)

    def random(self, *shape: int) -> Tensor:
        return torch.randn(*shape, device=self.device).to(self.dtype)

    def _rotation(self, tokens: int) -> tuple[Tensor, Tensor]:
        return rope_rotation(torch.arange(tokens, device=self.device), self.architecture, self.dtype)


class _WithLse:
    """Local attention that saves the same tensors as ring attention: inputs, output and LSE."""

    def __init__(self, kernel: AttentionKernel, triangles: BlockSet) -> None:
        self.kernel, self.triangles = kernel, triangles

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return _SaveAttention.apply(q, k, v, self)


class _SaveAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q: Tensor, k: Tensor, v: Tensor, attention: _WithLse) -> Tensor:  # type: ignore[no-untyped-def]
        out, lse = attention.kernel.forward(q, k, v, attention.triangles, q.shape[-1] ** -0.5)
        ctx.save_for_backward(q, k, v, out, lse)
        return out


def _no_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Use all inputs, so that each gets a gradient, and compute next to nothing."""
    return q + k[:, :1] + v[:, :1]
