"""A profile: what one layer costs on one HDP rank, measured or counted; the full cost model stands on it.

All curves are per LAYER and per RANK of ``tensor_parallel`` devices; bytes are per DEVICE. ``cost.stage`` turns them
into the times of a pipeline stage, ``Profile.cost_model`` folds them into the planner's few numbers, and
``cost.profile_file`` reads and writes them as TOML.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

from bytescale.common.errors import ConfigError, problem
from bytescale.config import Architecture, RingGradients
from bytescale.cost import flops
from bytescale.cost.curve import Curve
from bytescale.cost.links import Links
from bytescale.cost.model import CostModel


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One raw measurement behind a fit."""

    curve: str
    """Which curve, e.g. ``attention_forward``."""
    tokens: int
    """Length of the sequence."""
    value: float
    """Seconds, or bytes for ``activation_bytes``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """Costs of one model on one kind of device. Curves are in seconds per layer unless they say bytes."""

    name: str
    architecture: Architecture
    tensor_parallel: int = 1
    source: str = ""
    """Where the numbers come from, for people."""
    device: str = ""
    """Device and dtype that were measured, as ``train.profiler`` names them; empty: published figures, for any."""
    attention_forward: Curve
    """Of one sequence on one rank: a1 s^2 + b1 s, plus g1 once per micro-batch."""
    attention_backward: Curve
    rest_forward: Curve
    """Everything in a layer but attention, of all tokens of a micro-batch."""
    rest_backward: Curve
    head_forward: Curve = field(default_factory=Curve)
    """Output projection and loss, on the last stage."""
    head_backward: Curve = field(default_factory=Curve)
    activation_bytes: Curve
    """What a layer keeps for its backward, per device (the paper's Act)."""
    ring_forward_bytes_per_token: float
    """K and V of one token, per device."""
    ring_backward_bytes_per_token: float
    """K, V, dK and dV of one token, per device."""
    links: Links = field(default_factory=Links)
    layer_parameters: int
    """Weights of one layer that gradients are reduced for, over all tp devices (all experts of a mixture)."""
    points: tuple[Point, ...] = ()

    @property
    def hidden_bytes_per_token(self) -> float:
        """What a pipeline passes from stage to stage per token and device: the residual stream in bf16, split by tp."""
        return 2 * self.architecture.hidden_size / self.tensor_parallel

    @staticmethod
    def from_flops(
        architecture: Architecture,
        *,
        flops_per_second: float,
        attention_flops_per_second: float | None = None,
        launch_seconds: float = 0.0,
        links: Links | None = None,
        tensor_parallel: int = 1,
        bytes_per_element: int = 2,
    ) -> Profile:
        """A profile by counting operations.

        Args:
            architecture: the model.
            flops_per_second: of one device on matrix products.
            attention_flops_per_second: of one device on attention; the same when None.
            launch_seconds: fixed time of a layer's attention and again of its rest, in each direction.
            links: of one device; ideal when None.
            tensor_parallel: devices that share a rank's heads and matrices.
            bytes_per_element: of activations.
        """
        if not flops_per_second > 0 or not (attention_flops_per_second or flops_per_second) > 0:
            raise ConfigError(problem(f"flops_per_second is {flops_per_second}", fix="use a rate above 0"))
        attention_rate = tensor_parallel * (attention_flops_per_second or flops_per_second)
        attention = flops.layer_attention_flops_per_square(architecture) / attention_rate
        rest = flops.layer_linear_flops_per_token(architecture) / (tensor_parallel * flops_per_second)
        head = flops.head_flops_per_token(architecture) / (tensor_parallel * flops_per_second)
        ring = flops.ring_bytes_per_token(architecture, bytes_per_element=bytes_per_element)
        kept = flops.layer_activation_bytes_per_token(architecture, bytes_per_element=bytes_per_element)
        return Profile(
            name="flops",
            architecture=architecture,
            tensor_parallel=tensor_parallel,
            source=f"counted operations at {flops_per_second:.3g} FLOP/s a device",
            attention_forward=Curve(attention, 0.0, launch_seconds),
            attention_backward=Curve(flops.BACKWARD_ATTENTION_RATIO * attention, 0.0, launch_seconds),
            rest_forward=Curve(0.0, rest, launch_seconds),
            rest_backward=Curve(0.0, flops.BACKWARD_LINEAR_RATIO * rest, launch_seconds),
            head_forward=Curve(0.0, head, 0.0),
            head_backward=Curve(0.0, flops.BACKWARD_LINEAR_RATIO * head, 0.0),
            activation_bytes=Curve(0.0, kept / tensor_parallel, 0.0),
            ring_forward_bytes_per_token=ring[0] / tensor_parallel,
            ring_backward_bytes_per_token=ring[1] / tensor_parallel,
            links=links or Links(),
            layer_parameters=flops.layer_parameters(architecture),
        )

    def of_model(self, architecture: Architecture) -> Profile:
        """The same layers in a model of another depth or vocabulary: curves are per layer, the head's goes by words."""
        words = architecture.vocab_size / self.architecture.vocab_size
        return replace(
            self,
            architecture=architecture,
            head_forward=_scaled(self.head_forward, words),
            head_backward=_scaled(self.head_backward, words),
        )

    def with_ring_gradients(self, ring_gradients: RingGradients) -> Profile:
        """The same device with gradients of K and V that travel so; nothing else of a profile depends on it."""
        numbers = flops.kv_bytes_per_token(self.architecture, bytes_per_element=1) / self.tensor_parallel
        forward = self.ring_forward_bytes_per_token
        gradient_bytes = flops.ring_gradient_bytes(round(forward / numbers), ring_gradients)
        return replace(self, ring_backward_bytes_per_token=forward + numbers * gradient_bytes)

    def scaled_to(
        self, architecture: Architecture, *, tensor_parallel: int, layer_parameters: int | None = None
    ) -> Profile:
        """This profile's device running another model, or with another tp: every cost by the ratio of its count.

        Args:
            architecture: the other model; of a mixture of experts, give the width that a token passes through.
            tensor_parallel: devices per rank.
            layer_parameters: weights of a layer, when more exist than a token passes through.
        """
        old, new, tp = self.architecture, architecture, tensor_parallel / self.tensor_parallel
        attention = flops.layer_attention_flops_per_square(new) / flops.layer_attention_flops_per_square(old) / tp
        rest = flops.layer_linear_flops_per_token(new) / flops.layer_linear_flops_per_token(old) / tp
        head = flops.head_flops_per_token(new) / flops.head_flops_per_token(old) / tp
        kept = flops.layer_activation_bytes_per_token(new) / flops.layer_activation_bytes_per_token(old) / tp
        ring = flops.kv_bytes_per_token(new) / flops.kv_bytes_per_token(old) / tp
        return replace(
            self,
            architecture=new,
            tensor_parallel=tensor_parallel,
            source=f"{self.source}; scaled by operation counts",
            attention_forward=_scaled(self.attention_forward, attention),
            attention_backward=_scaled(self.attention_backward, attention),
            rest_forward=_scaled(self.rest_forward, rest),
            rest_backward=_scaled(self.rest_backward, rest),
            head_forward=_scaled(self.head_forward, head),
            head_backward=_scaled(self.head_backward, head),
            activation_bytes=self.activation_bytes.times(kept),
            ring_forward_bytes_per_token=self.ring_forward_bytes_per_token * ring,
            ring_backward_bytes_per_token=self.ring_backward_bytes_per_token * ring,
            layer_parameters=flops.layer_parameters(new) if layer_parameters is None else layer_parameters,
            points=(),
        )

    def cost_model(self, *, ranks_per_node: int = 8, pipeline_parallel: int = 1) -> CostModel:
        """The planner's view: all layers, forward and backward together.

        With a pipeline a rank's time per micro-batch is that of one stage while the others work beside it, so layers
        count ``1 / pipeline_parallel``, and the head, which only the last stage has, likewise.
        """
        layers = self.architecture.num_layers / pipeline_parallel
        attention = (self.attention_forward, self.attention_backward)
        rest = (self.rest_forward, self.rest_backward)
        heads = (self.head_forward, self.head_backward)
        linear = sum(curve.linear for curve in attention + rest)
        return CostModel(
            attention_seconds_per_pair=layers * sum(curve.quadratic for curve in attention),
            token_seconds=layers * linear + sum(curve.linear for curve in heads) / pipeline_parallel,
            micro_batch_seconds=layers * sum(curve.constant for curve in attention + rest)
            + sum(curve.constant for curve in heads) / pipeline_parallel,
            ring_bytes_per_token=layers * (self.ring_forward_bytes_per_token + self.ring_backward_bytes_per_token),
            ring_step_seconds=2 * layers * self.links.latency_seconds,
            ring_message_seconds=2 * layers * self.links.message_seconds,
            intra_node_bytes_per_second=self.links.intra_node_bytes_per_second,
            inter_node_bytes_per_second=self.links.inter_node_bytes_per_second,
            ranks_per_node=ranks_per_node,
        )

    def capacity_tokens(self, *, device_bytes: float, pipeline_parallel: int = 1) -> int:
        """Tokens that one micro-batch may hold when ``device_bytes`` are free for activations on every device.

        The first stage of a pipeline keeps ``pp`` micro-batches of ``1 / pp`` of the layers: as many as one rank
        without a pipeline keeps of one, so only uneven stages make a difference.
        """
        layers = math.ceil(self.architecture.num_layers / pipeline_parallel) * pipeline_parallel
        per_token = layers * self.activation_bytes.linear
        fixed = layers * self.activation_bytes.constant
        return max(0, int((device_bytes - fixed) / per_token)) if per_token else 0


def _scaled(curve: Curve, factor: float) -> Curve:
    """Work grows with the model; the fixed part, launches, does not."""
    return Curve(curve.quadratic * factor, curve.linear * factor, curve.constant)
