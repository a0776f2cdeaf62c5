"""A profile: the measured or counted costs of one layer on one HDP rank. The full cost model is built from it.

All times are per LAYER and per RANK, which is ``tensor_parallel`` devices. All bytes are per DEVICE.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any

from bytescale.common.errors import ConfigError
from bytescale.common.limits import limits
from bytescale.config.architecture import Architecture
from bytescale.cost import flops
from bytescale.cost.curve import Curve
from bytescale.cost.links import Links
from bytescale.cost.model import CostModel, Pass
from bytescale.cost.spec import ModelSpec

_SHAPE = (
    *("hidden_size", "num_heads", "num_kv_heads", "head_dim", "ffn_hidden_size"),
    *("num_experts", "experts_per_token"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One raw measurement behind a fit."""

    curve: str
    """The name of the curve, such as ``attention_forward``."""
    tokens: int
    """The length of the sequence."""
    value: float
    """Seconds; for the curve ``activation_bytes``, bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """Costs of one model on one kind of device. Curves are in seconds per layer unless they say bytes."""

    name: str
    architecture: Architecture
    tensor_parallel: int = 1
    source: str = ""
    """Where the numbers come from, as a text for people."""
    device: str = ""
    """The measured device and dtype (``train.profiling.peak.device_name``). Empty: the figures are published ones."""
    attention_forward: Curve
    """Seconds of attention for one sequence on one rank: a1 s^2 + b1 s, plus g1 once per micro-batch."""
    attention_backward: Curve
    rest_forward: Curve
    """Seconds of everything in a layer except attention, for all tokens of a micro-batch."""
    rest_backward: Curve
    head_forward: Curve = field(default_factory=Curve)
    """Seconds of the output projection and the loss, on the last stage."""
    head_backward: Curve = field(default_factory=Curve)
    activation_bytes: Curve
    """Bytes that a layer keeps for its backward, per device (Act in the paper)."""
    sequence_forward_seconds: float = field(default=0.0, metadata=limits(least=0))
    """What every sequence adds to each block of attention, however short it is: a shared one has a block in each step
    of its ring."""
    sequence_backward_seconds: float = field(default=0.0, metadata=limits(least=0))
    ring_forward_bytes_per_token: float = field(metadata=limits(least=0))
    """Bytes of K and V of one token, per device."""
    ring_backward_bytes_per_token: float = field(metadata=limits(least=0))
    """Bytes of K, V, dK and dV of one token, per device."""
    links: Links = field(default_factory=Links)
    layer_parameters: int = field(metadata=limits(least=1))
    """Weights of one layer, over all tp devices and all experts. Gradients are reduced for all of them."""
    parameter_bytes: int = 2
    """Bytes of one parameter, which is gathered after every update."""
    points: tuple[Point, ...] = ()
    recurrent_share: float = 0.0
    state_bytes: float = 0.0
    """Of a layer and a pass, as ``CostModel.state_bytes``."""
    windows: tuple[tuple[int, float], ...] = ()
    """Sliding windows, as in ``CostModel.windows``. The curves of attention are those of short sequences."""

    @property
    def row_bytes_per_token(self) -> tuple[tuple[float, float], tuple[float, float]]:
        """``flops.row_bytes_per_token`` per device, of the layers whose keys travel around rings."""
        element, ring = self.parameter_bytes, self.ring_forward_bytes_per_token
        forward, backward = flops.row_bytes_per_token(self.architecture, bytes_per_element=element)
        whole = flops.kv_bytes_per_token(self.architecture, bytes_per_element=element)
        tp = self.tensor_parallel / round(ring * self.tensor_parallel / whole, 9) if ring else math.inf
        return (forward[0] / tp, forward[1] / tp), (backward[0] / tp, backward[1] / tp)

    @property
    def hidden_bytes_per_token(self) -> float:
        """Bytes per token and device that a stage sends to the next one: the residual stream in bf16, divided by tp."""
        return 2 * self.architecture.hidden_size / self.tensor_parallel

    @staticmethod
    def from_flops(
        model: Architecture | ModelSpec,
        *,
        flops_per_second: float,
        attention_flops_per_second: float | None = None,
        launch_seconds: float = 0.0,
        links: Links | None = None,
        tensor_parallel: int = 1,
        bytes_per_element: int = 2,
    ) -> Profile:
        """Make a profile by counting operations.

        Args:
            model: its shape, or its counts.
            flops_per_second: the rate of one device for matrix products.
            attention_flops_per_second: the rate of one device for attention; None: the same rate.
            launch_seconds: a fixed time that attention and the rest of a layer each take, in each direction.
            links: the links of one device; None: ideal links.
            tensor_parallel: devices that share the heads and matrices of a rank.
            bytes_per_element: bytes of one number in activations.

        Raises:
            ConfigError: a rate is not above 0.
        """
        if not flops_per_second > 0 or not (attention_flops_per_second or flops_per_second) > 0:
            raise ConfigError(f"flops_per_second is {flops_per_second}", fix="use a rate above 0")
        spec, rate = ModelSpec.of(model), tensor_parallel * flops_per_second
        attention = spec.pair_numbers / (tensor_parallel * (attention_flops_per_second or flops_per_second))
        rest, rest_backward = 2 * spec.active / rate, 2 * (spec.active + spec.trained) / rate
        head, head_backward = 2 * spec.head / rate, 2 * (spec.head + spec.head_trained) / rate
        kept = flops.layer_activation_bytes_per_token(spec.stack, bytes_per_element=bytes_per_element)
        keys = spec.key_numbers * bytes_per_element
        gradients = spec.key_numbers * max(4, bytes_per_element)
        return Profile(
            name="flops",
            architecture=spec.stack,
            tensor_parallel=tensor_parallel,
            source=f"counted operations at {flops_per_second:.3g} FLOP/s a device",
            attention_forward=Curve(attention, 0.0, launch_seconds),
            attention_backward=Curve(flops.BACKWARD_ATTENTION_RATIO * attention, 0.0, launch_seconds),
            rest_forward=Curve(0.0, rest, launch_seconds),
            rest_backward=Curve(0.0, rest_backward, launch_seconds),
            head_forward=Curve(0.0, head, 0.0),
            head_backward=Curve(0.0, head_backward, 0.0),
            activation_bytes=Curve(0.0, kept / tensor_parallel, 0.0),
            ring_forward_bytes_per_token=keys / tensor_parallel,
            ring_backward_bytes_per_token=(keys + gradients) / tensor_parallel,
            links=links or Links(),
            layer_parameters=spec.parameters,
            parameter_bytes=bytes_per_element,
            recurrent_share=spec.recurrent_share,
            state_bytes=spec.state_numbers * max(4, bytes_per_element),
            windows=spec.windows,
        )

    def of_model(self, architecture: Architecture) -> Profile:
        """This profile for a model with the same layers, but another number of them or another size of the vocabulary.

        Curves are per layer, so they stay. The head's curves scale with the vocabulary.
        """
        words = architecture.vocab_size / self.architecture.vocab_size
        return replace(
            self,
            architecture=architecture,
            head_forward=_scaled(self.head_forward, words),
            head_backward=_scaled(self.head_backward, words),
        )

    def scaled_to(
        self, architecture: Architecture, *, tensor_parallel: int, layer_parameters: int | None = None
    ) -> Profile:
        """This profile's device with another model or another tp. Every cost is scaled by the ratio of its counts.

        Args:
            architecture: the other model. For a mixture of experts, give the feed-forward width that one token uses.
            layer_parameters: all weights of a layer, if a token uses only some of them; None: the counted ones.
        """
        old, new, tp = self.architecture, architecture, tensor_parallel / self.tensor_parallel
        attention = flops.layer_attention_flops_per_square(new) / flops.layer_attention_flops_per_square(old) / tp
        rest = flops.layer_linear_flops_per_token(new) / flops.layer_linear_flops_per_token(old) / tp
        head = flops.head_parameters(new) / flops.head_parameters(old) / tp
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
        """Sum this profile up for the planner: all layers, forward and backward together.

        Stages work at the same time, so the layers and the head count ``1 / pipeline_parallel``.
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
            attention_block_seconds=layers * (self.sequence_forward_seconds + self.sequence_backward_seconds),
            ring_bytes_per_token=layers * (self.ring_forward_bytes_per_token + self.ring_backward_bytes_per_token),
            row_bytes_per_token=layers * sum(map(sum, self.row_bytes_per_token)),
            ring_step_seconds=2 * layers * self.links.ring_latency_seconds(False),
            inter_node_ring_step_seconds=2 * layers * self.links.ring_latency_seconds(True),
            ring_message_seconds=2 * layers * self.links.message_seconds,
            intra_node_bytes_per_second=self.links.intra_node_bytes_per_second,
            inter_node_bytes_per_second=self.links.ring_bytes_per_second(True),
            ranks_per_node=ranks_per_node,
            recurrent_share=self.recurrent_share,
            state_bytes=2 * layers * self.state_bytes,
            windows=self.windows,
            passes=self._passes(),
        )

    def with_parallel_experts(
        self, model: Architecture | ModelSpec, *, domain: int, ranks_per_node: int = 8
    ) -> Profile:
        """This profile where the ranks of a ``domain`` have the experts in parallel (``runtime.experts``).

        A row goes to each of a token's experts and back, in forward, and again in backward. Messages are spread evenly,
        and nothing hides them. Experts are neither gathered nor reduced; that domains reduce theirs once is left out.
        """
        spec = ModelSpec.of(model)
        if domain == 1:
            return self
        row_bytes = self.architecture.hidden_size * self.parameter_bytes
        sent = 2 * spec.expert_rows * row_bytes * (domain - 1) / domain
        seconds = sent / self.links.ring_bytes_per_second(domain > ranks_per_node)
        return replace(
            self,
            rest_forward=replace(self.rest_forward, linear=self.rest_forward.linear + seconds),
            rest_backward=replace(self.rest_backward, linear=self.rest_backward.linear + seconds),
            layer_parameters=max(1, self.layer_parameters - spec.experts),
        )

    def _passes(self) -> tuple[Pass, ...]:
        """Forward and backward, with their shares of the sums in ``cost_model``."""
        attention = (self.attention_forward.quadratic, self.attention_backward.quadratic)
        keys = (self.ring_forward_bytes_per_token, self.ring_backward_bytes_per_token)
        rows = self.row_bytes_per_token
        of_rows = sum(map(sum, rows)) or 1.0
        return tuple(
            Pass(
                attention=attention[place] / (sum(attention) or 1.0),
                keys=keys[place] / (sum(keys) or 1.0),
                queries=rows[place][0] / of_rows,
                results=rows[place][1] / of_rows,
                steps=0.5,
            )
            for place in (0, 1)
        )

    def with_costs(self, cost: CostModel) -> Profile:
        """This profile with the times that calibration learns, from a cost model of the same model without a pipeline.

        Each term is shared out as it was among layers, head, forward and backward; what was 0, evenly between forward
        and backward of the layers.
        """
        profile = self._with_term("quadratic", cost.attention_seconds_per_pair, ("attention",))
        profile = profile._with_term("linear", cost.token_seconds, ("rest", "attention", "head"))
        profile = profile._with_term("constant", cost.micro_batch_seconds, ("rest", "attention", "head"))
        of_message = cost.ring_message_seconds / (2 * self.architecture.num_layers)
        return replace(profile, links=replace(self.links, message_seconds=of_message), points=())

    def _with_term(self, term: str, seconds: float, parts: tuple[str, ...]) -> Profile:
        """This profile with ``seconds`` as the sum of a coefficient over the curves of ``parts``, over all layers."""
        curves: dict[str, Curve] = {}
        before, layers = 0.0, self.architecture.num_layers
        for part in parts:
            for name in (f"{part}_forward", f"{part}_backward"):
                curves[name] = getattr(self, name)
                before += getattr(curves[name], term) * (1 if part == "head" else layers)
        if before > 0:
            changed = {name: getattr(curve, term) * seconds / before for name, curve in curves.items()}
        else:
            changed = {f"{parts[0]}_{direction}": seconds / (2 * layers) for direction in ("forward", "backward")}
        values: dict[str, Any] = {name: replace(curves[name], **{term: value}) for name, value in changed.items()}
        return replace(self, **values)


def _scaled(curve: Curve, factor: float) -> Curve:
    """Scale the work, which grows with the model, and keep the fixed part, which is the time of launches."""
    return Curve(curve.quadratic * factor, curve.linear * factor, curve.constant)


def require_model(profile: Profile, architecture: Architecture) -> None:
    """Raise ``ConfigError`` unless a layer of ``architecture`` has the shape of the layer that was measured.

    The number of layers and the size of the vocabulary may differ (``Profile.of_model``).
    """
    for name in _SHAPE:
        measured, wanted = getattr(profile.architecture, name), getattr(architecture, name)
        if measured != wanted:
            raise ConfigError(
                f"profile {profile.name!r} is of another model: its {name} is {measured}, the model's {wanted}",
                so="plans would be made for the times of another model",
                fix="run `bytescale profile` with this model, or leave cost.profile unset to count operations",
            )
