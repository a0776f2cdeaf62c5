"""Measures the costs of one layer on this device and fits the curves of the cost model to them (``bytescale profile``).

Each value is a median: of several sweeps over all lengths, and of several runs within each sweep. Training runs at the
usual speed, not at the fastest one. With the fastest runs, predicted steps were a tenth too short (docs/LOG.md).
Lengths double from ``MIN_TOKENS`` until one more would exceed the time, so the same call takes about as long on a
laptop as on a GPU. When ranks train they share caches, memory and power, so several ranks measure the same things at
the same time. The slowest rank counts, because the others wait for it.

* attention   Forward and backward of the causal kernel for one sequence.
* rest        A layer whose attention does next to nothing: projections, norms, rotation, feed-forward. Backward adds to
              existing gradients, as it does from the second micro-batch on.
* head        The linear cross-entropy as in training: its forward computes the gradients and its backward scales them.
* activations The bytes that autograd saves in a layer. Each allocation counts once. Parameters and inputs that all
              layers share do not count.
* ring block  One step of a ring: n queries against n / 2 keys. This block has the area of the causal triangle of n
              tokens, so the s^2 term of the attention curve should predict its time. Only the raw points are kept.
* host        Copies of 64 MiB to and from host memory, which is pinned if the device is a GPU.
* links       The ring exchange between ranks, if there are several. Transfers of several sizes, the fastest of several
              runs each, give latency and bandwidth. A ring attention gives the time of a step beyond that of its
              blocks; a quiet round counts.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from bytescale.attention import AttentionKernel, PackedAttention, select_kernel
from bytescale.attention.blocks import BlockSet, causal_triangles
from bytescale.config import Architecture
from bytescale.cost import Links, Profile, flops
from bytescale.cost.curve import Curve, fit_curve, relative_errors
from bytescale.cost.profile import Point
from bytescale.cost.profile_file import CURVES
from bytescale.models import build_model
from bytescale.models.rope import rope_rotation
from bytescale.plan import Plan, RankPlan
from bytescale.plan.plan import GroupSpec
from bytescale.runtime import RankGroup, linear_cross_entropy
from bytescale.train.profiling.peak import device_name

MIN_TOKENS = 256
SWEEPS = 5
"""Number of sweeps over all lengths. A burst of other load on the machine disturbs only one of them."""
MIN_SECONDS = 0.05
"""Within a sweep, the runs of one quantity are repeated for this long."""
HOST_COPY_BYTES = 2**26
LINK_BYTES = (2**12, 2**16, 2**20, 2**23)
RING_TOKENS = 512
"""Tokens of each member's slice in the ring attention that is measured."""
RING_ROUNDS = 20


@dataclass
class Stopwatch:
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
        self.watch = Stopwatch(self.device)
        self.kernel: AttentionKernel = select_kernel("auto", self.device, self.dtype)
        model = build_model(replace(self.architecture, num_layers=1, vocab_size=64, tie_embeddings=True))
        model.initialise(0)
        self.layer: nn.Module = model.layers[0].to(device=self.device, dtype=self.dtype)
        head = self._random(self.architecture.vocab_size, self.architecture.hidden_size) * 0.02
        self.head = head.requires_grad_()

    def measure(self, tokens: int) -> None:
        """Measure every curve at one length."""
        self._attention(tokens)
        self._ring_block(tokens)
        self._rest(tokens)
        self._head(tokens)
        self._add("activation_bytes", tokens, float(self.activation_bytes(tokens)))

    def activation_bytes(self, tokens: int) -> int:
        """Return the bytes that autograd saves in one layer, including attention."""
        hidden = self._random(tokens, self.architecture.hidden_size).requires_grad_()
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

    def _attention(self, tokens: int) -> None:
        shape, triangles = self.architecture, causal_triangles([tokens])
        q = self._random(tokens, shape.num_heads, shape.head_dim)
        k, v = (self._random(tokens, shape.num_kv_heads, shape.head_dim) for _ in range(2))
        scale = shape.head_dim**-0.5
        out, lse = self.kernel.forward(q, k, v, triangles, scale)
        forward = self.watch.seconds(lambda: self.kernel.forward(q, k, v, triangles, scale))
        backward = self.watch.seconds(lambda: self.kernel.backward(out, q, k, v, out, lse, triangles, scale))
        self._add("attention_forward", tokens, forward)
        self._add("attention_backward", tokens, backward)

    def _ring_block(self, tokens: int) -> None:
        shape = self.architecture
        q = self._random(tokens, shape.num_heads, shape.head_dim)
        k, v = (self._random(tokens // 2, shape.num_kv_heads, shape.head_dim) for _ in range(2))
        block = BlockSet.of(np.array([[0, tokens]]), np.array([[0, tokens // 2]]), causal=False)
        seconds = self.watch.seconds(lambda: self.kernel.forward(q, k, v, block, shape.head_dim**-0.5))
        self._add("ring_block_forward", tokens, seconds)

    def _rest(self, tokens: int) -> None:
        hidden = self._random(tokens, self.architecture.hidden_size).requires_grad_()
        rotation, gradient = self._rotation(tokens), self._random(tokens, self.architecture.hidden_size)
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
        hidden = self._random(tokens, self.architecture.hidden_size).requires_grad_()
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

    def _random(self, *shape: int) -> Tensor:
        return torch.randn(*shape, device=self.device).to(self.dtype)

    def _rotation(self, tokens: int) -> tuple[Tensor, Tensor]:
        return rope_rotation(torch.arange(tokens, device=self.device), self.architecture, self.dtype)


def measure_profile(
    architecture: Architecture,
    *,
    device: torch.device,
    dtype: torch.dtype,
    max_tokens: int,
    seconds: float,
    hdp: RankGroup | None = None,
    progress: Callable[[int, float], None] = lambda tokens, share: None,
) -> Profile:
    """Measure at ``MIN_TOKENS`` tokens, twice that, and so on, and fit curves to the results.

    Every rank calls it and gets the same profile.

    Args:
        architecture: the model.
        device: the device to measure.
        dtype: the dtype of parameters and activations.
        max_tokens: the longest length.
        seconds: the time for all lengths together. A length is left out if the time of the previous length shows that
            it would take too long.
        hdp: the ranks that measure together; None: this rank alone. Links are then taken to be ideal.
        progress: called with the next length and the share of the time that has passed.
    """
    hdp = hdp or RankGroup(device=device)
    measurer = Measurer(architecture, device, dtype)
    measure_lengths(measurer, hdp, max_tokens=max_tokens, seconds=seconds, progress=progress)
    points = _points(measurer, hdp)
    links = measure_links(hdp, measurer) if hdp.size > 1 else Links()
    to_host, to_device = np.max(hdp.share(list(measurer.host_rates())), axis=0).tolist()
    element = dtype.itemsize
    ring = flops.ring_bytes_per_token(architecture, bytes_per_element=element)
    fits: dict[str, Any] = {name: _fit(points, name) for name in CURVES}
    return Profile(
        name=f"measured on {device_name(device, dtype)}",
        source=f"bytescale profile, median of {SWEEPS} sweeps on {hdp.size} rank(s), torch {torch.__version__}",
        device=device_name(device, dtype),
        architecture=architecture,
        ring_forward_bytes_per_token=ring[0],
        ring_backward_bytes_per_token=ring[1],
        links=replace(
            links,
            device_to_host_bytes_per_second=to_host,
            host_to_device_bytes_per_second=to_device,
        ),
        layer_parameters=flops.layer_parameters(architecture),
        points=tuple(points),
        **fits,
    )


def measure_lengths(
    measurer: Measurer,
    hdp: RankGroup,
    *,
    max_tokens: int,
    seconds: float,
    progress: Callable[[int, float], None],
) -> None:
    """Measure every curve at ``MIN_TOKENS`` tokens, twice that, and so on, ``SWEEPS`` times each.

    Every rank calls it. Arguments as in ``measure_profile``.
    """
    measurer.measure(MIN_TOKENS)  # warm-up: on a GPU, compilers and libraries take seconds to start
    measurer.sweeps.clear()
    lengths: list[int] = []
    started, last, tokens = time.perf_counter(), 0.0, MIN_TOKENS
    # The first sweep finds the lengths. A length that is twice as long takes at most four times as long.
    while not lengths or (tokens <= max_tokens and SWEEPS * (_elapsed(hdp, started) + 4 * last) <= seconds):
        progress(tokens, min(_elapsed(hdp, started) / seconds, 1.0))
        before = time.perf_counter()
        measurer.measure(tokens)
        last = float(np.max(hdp.share([time.perf_counter() - before])))
        lengths.append(tokens)
        tokens *= 2
    for _ in range(SWEEPS - 1):
        for tokens in lengths:
            progress(tokens, min(_elapsed(hdp, started) / seconds, 1.0))
            measurer.measure(tokens)


def _elapsed(hdp: RankGroup, started: float) -> float:
    """Return the seconds since ``started`` on the slowest rank, so that all ranks make the same decision."""
    return float(np.max(hdp.share([time.perf_counter() - started])))


def _points(measurer: Measurer, hdp: RankGroup) -> list[Point]:
    """Return every point: the median of its sweeps on each rank, and of these the slowest rank's."""
    keys = list(measurer.sweeps)
    values = np.max(hdp.share([statistics.median(measurer.sweeps[key]) for key in keys]), axis=0).tolist()
    return [Point(curve=curve, tokens=tokens, value=value) for (curve, tokens), value in zip(keys, values, strict=True)]


def measure_links(hdp: RankGroup, measurer: Measurer) -> Links:
    """Measure latency and bandwidth of a ring over all ranks while all of them send. Every rank calls it."""
    sizes, times = [], []
    for size in LINK_BYTES:
        send = torch.zeros(size, dtype=torch.uint8, device=hdp.device)
        receive = torch.empty_like(send)

        def transfer(send: Tensor = send, receive: Tensor = receive) -> None:
            following, previous = (hdp.rank + 1) % hdp.size, (hdp.rank - 1) % hdp.size
            hdp.exchange.start(send=send, to=following, receive=receive, source=previous, tag=0).wait()

        sizes.append(size)
        times.append(min(measurer.watch.once(transfer) for _ in range(RING_ROUNDS)))
    slowest = np.max(np.array(hdp.share(times)), axis=0)  # the slowest link of a ring sets its pace
    line = fit_curve(sizes, slowest, quadratic=False)
    rate = 1.0 / max(line.linear, 1e-15)
    return Links(
        intra_node_bytes_per_second=rate,
        inter_node_bytes_per_second=rate,
        latency_seconds=line.constant,
        message_seconds=measure_ring_step(hdp, measurer),
    )


def measure_ring_step(hdp: RankGroup, measurer: Measurer) -> float:
    """Measure the seconds that a step of ring attention takes beyond the time of its blocks.

    A ring over all ranks is compared with the same blocks computed without messages. The result is the mean of forward
    and backward in a quiet round, which is the 0.2 quantile of all rounds. Every rank calls it.
    """
    shape, length = measurer.architecture, hdp.size * RING_TOKENS
    plan = Plan.build(
        lengths=[length],
        capacity_tokens=[RING_TOKENS] * hdp.size,
        groups=[GroupSpec(sequences=[0], ranks=range(hdp.size))],
        schedule=[[[0]]] * hdp.size,
    )
    ring = PackedAttention(RankPlan.of(plan, hdp.rank).micro_batches[0], measurer.kernel, hdp.exchange)
    assert ring.grid is not None, "the only sequence is shared"
    blocks = list(ring.grid.blocks.values())
    q = measurer._random(RING_TOKENS, shape.num_heads, shape.head_dim).requires_grad_()
    k, v = (measurer._random(RING_TOKENS, shape.num_kv_heads, shape.head_dim).requires_grad_() for _ in range(2))
    scale = shape.head_dim**-0.5
    with torch.no_grad():
        out, lse = measurer.kernel.forward(q, k, v, ring.triangles, scale)

    def alone() -> None:
        with torch.no_grad():
            for part in (ring.triangles, *blocks):
                measurer.kernel.forward(q, k, v, part, scale)
                measurer.kernel.backward(out, q, k, v, out, lse, part, scale)

    beyond = []
    for _ in range(RING_ROUNDS):
        hdp.share([0.0])  # all start together
        seconds = measurer.watch.once(lambda: ring(q, k, v).backward(out))
        beyond.append(seconds - measurer.watch.once(alone))
    slowest = np.max(hdp.share(beyond[1:]), axis=0)
    return max(0.0, float(np.quantile(slowest, 0.2)) / (2 * (hdp.size - 1)))


def _fit(points: list[Point], name: str) -> Curve:
    """Fit a curve. If a few points are far off it, after a burst of other load, fit again without them."""
    chosen = [point for point in points if point.curve == name]
    tokens, values = (np.array(column) for column in zip(*((p.tokens, p.value) for p in chosen), strict=True))
    quadratic = name.startswith("attention")
    weights = np.sqrt(tokens)  # long micro-batches hold most of the tokens
    curve = fit_curve(tokens, values, quadratic=quadratic, weights=weights)
    errors = np.abs(relative_errors(curve, tokens, values))
    kept = errors <= max(3 * float(np.median(errors)), 0.1)
    if kept.all() or kept.sum() < max(3, 0.7 * len(kept)):
        return curve
    return fit_curve(tokens[kept], values[kept], quadratic=quadratic, weights=weights[kept])


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
