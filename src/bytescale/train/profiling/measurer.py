"""Measures one layer of a model on one device: every quantity at one length. ``profiler`` fits curves to the values."""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from bytescale.attention import AttentionKernel, AttentionRules, PackedAttention, select_kernel
from bytescale.attention.blocks import causal_triangles
from bytescale.attention.choose import kernel_for
from bytescale.attention.kernels import OfQueries
from bytescale.attention.rules import PLAIN
from bytescale.common.errors import ConfigError
from bytescale.cost.gradient_sync import UPDATE_BYTES
from bytescale.plan import MicroBatch
from bytescale.runtime.group import RankGroup
from bytescale.runtime.loss import loss_sum

if TYPE_CHECKING:
    from bytescale.hf.model.decoder import HFDecoder

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
        prepare()
        self._synchronise()
        started = time.perf_counter()
        work()
        self._synchronise()
        return time.perf_counter() - started

    def _synchronise(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


class Measurer:
    """Measures one model on one device in one dtype."""

    def __init__(self, model: HFDecoder, device: torch.device, dtype: torch.dtype) -> None:
        """``model``: as it is trained, on ``device``; some layers of it stand for all (``hf.model.twin``)."""
        if chosen := next((layer for layer in model.structure.layers if layer.selection), None):
            raise ConfigError(
                f"{chosen.name} cannot be profiled: its keys are chosen by an indexer, for which there are no curves",
                so="a profile would have the times of attention to all keys",
                fix="leave the profile out: costs then follow from counts of operations",
            )
        self.device, self.dtype, self.model = device, dtype, model
        self.spec = model.spec
        self.watch = LapTimer(device)
        self.kernel: AttentionKernel = select_kernel("auto", device, dtype)
        self.sweeps: dict[tuple[str, int], list[float]] = {}  # of each (curve, tokens) a value per sweep

    def measure(self, tokens: int) -> None:
        """Measure every curve at one length."""
        self._attention("attention", [tokens])
        self._attention("sequences", [SHORT_TOKENS] * (tokens // SHORT_TOKENS))
        self._rest(tokens)
        self._head(tokens)

    def _forward_of(self, tokens: int) -> Callable[[Any], Tensor]:
        """A forward of one document, from the layers' attention to ``[T, C]``."""
        ids = torch.arange(tokens, device=self.device) % 61  # of any vocabulary; experts get different ones
        positions = torch.arange(tokens, device=self.device)
        return lambda attention: self.model(ids, positions, attention)

    def _attention(self, name: str, lengths: list[int]) -> None:
        """The mean of all layers, without windows (``ModelSpec.windows``)."""
        triangles, tokens = causal_triangles(lengths), sum(lengths)
        sums = np.zeros(2)
        calls = self.model.structure.layers
        kinds = Counter((a.num_heads, a.num_kv_heads, a.head_dim, a.value_dim, a.rules) for a in calls)
        for (heads, kv_heads, width, value_width, rules), count in kinds.items():
            kernel = kernel_for(self.kernel, replace(rules, window=None))
            q, k = self.random(tokens, heads, width), self.random(tokens, kv_heads, width)
            v, scale = self.random(tokens, kv_heads, value_width), rules.scale_of(q)
            out, lse = kernel.forward(q, k, v, triangles, scale)
            kept = OfQueries(out, q, out, lse)
            forward = self.watch.seconds(partial(kernel.forward, q, k, v, triangles, scale))
            backward = self.watch.seconds(partial(kernel.backward, kept, k, v, triangles, scale))
            sums += count * np.array([forward, backward])
        for way, seconds in zip(("forward", "backward"), sums / self.spec.num_layers, strict=True):
            self._add(f"{name}_{way}", tokens, float(seconds))

    def _rest(self, tokens: int) -> None:
        forward, gradient = self._forward_of(tokens), self.random(tokens, self.spec.hidden_size)
        none = _NoAttention(MicroBatch.of_documents(0, [tokens]), self.kernel, RankGroup(device=self.device).exchange)
        outputs: list[Tensor] = []

        def run() -> None:
            outputs[:] = [forward(none)]

        count = self.spec.num_layers
        self._add("rest_forward", tokens, self.watch.seconds(run, prepare=outputs.clear) / count)
        backward = self.watch.seconds(lambda: outputs[0].backward(gradient), prepare=run)
        self._add("rest_backward", tokens, backward / count)

    def _head(self, tokens: int) -> None:
        hidden = self.random(tokens, self.spec.hidden_size).requires_grad_()
        labels = torch.randint(self.spec.vocab_size, (tokens,), device=self.device)
        losses: list[Tensor] = []

        def forward() -> None:
            losses[:] = [loss_sum(self.model.head, hidden, labels)]

        def prepare_backward() -> None:
            hidden.grad = None
            forward()

        self._add("head_forward", tokens, self.watch.seconds(forward, prepare=losses.clear))
        self._add("head_backward", tokens, self.watch.seconds(lambda: losses[0].backward(), prepare=prepare_backward))

    def host_rates(self) -> tuple[float, float, float]:
        """Return the rates of copies to and from the host, and of AdamW's updates there, in bytes per second."""
        on_device = torch.zeros(HOST_COPY_BYTES, dtype=torch.uint8, device=self.device)
        on_host = torch.zeros(HOST_COPY_BYTES, dtype=torch.uint8, pin_memory=self.device.type == "cuda")
        to_host = self.watch.seconds(lambda: on_host.copy_(on_device, non_blocking=True))
        to_device = self.watch.seconds(lambda: on_device.copy_(on_host, non_blocking=True))
        weights = torch.zeros(HOST_COPY_BYTES // UPDATE_BYTES, requires_grad=True)
        weights.grad = torch.ones_like(weights)
        update = self.watch.seconds(torch.optim.AdamW([weights], fused=True).step)
        return HOST_COPY_BYTES / to_host, HOST_COPY_BYTES / to_device, HOST_COPY_BYTES / update

    def _add(self, curve: str, tokens: int, value: float) -> None:
        self.sweeps.setdefault((curve, tokens), []).append(value)

    def random(self, *shape: int) -> Tensor:
        return torch.randn(*shape, device=self.device).to(self.dtype)


class _NoAttention(PackedAttention):
    """Of one document. Recurrences run as they are."""

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, rules: AttentionRules = PLAIN, sinks: Tensor | None = None, **_: Any
    ) -> Tensor:
        """Use all inputs, so that each gets a gradient, and compute next to nothing. Shapes are those of attention."""
        q, k, v = (x.transpose(1, 2) if x.dim() == 4 else x for x in (q, k, v))
        if q.shape[-1] == v.shape[-1]:
            return q + k[..., :1, :] + v[..., :1, :]
        return v.repeat_interleave(q.shape[-2] // v.shape[-2], dim=-2) + q[..., :1] + k[..., :1, :1]
