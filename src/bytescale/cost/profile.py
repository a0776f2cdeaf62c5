"""A profile: the measured or counted costs of one layer on one HDP rank. The full cost model is built from it.

All times are per LAYER and per RANK, which is ``tensor_parallel`` devices. All bytes are per DEVICE.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cache
from itertools import accumulate, pairwise
from typing import Any

from bytescale.common.errors import ConfigError
from bytescale.common.limits import limits
from bytescale.config.schema import Checkpointing, ModelConfig
from bytescale.config.sharing import check_stages
from bytescale.cost.curve import Curve
from bytescale.cost.links import Links
from bytescale.cost.model import BACKWARD_ATTENTION_RATIO, CostModel, Pass
from bytescale.cost.spec import LayerSpec, ModelSpec, counted


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One raw measurement behind a fit."""

    curve: str
    """The name of the curve, such as ``attention_forward``."""
    tokens: int
    """The length of the sequence."""
    value: float
    """Seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """Costs of one model on one kind of device. Curves are in seconds per layer unless they say bytes."""

    name: str
    spec: ModelSpec
    model: ModelConfig = field(default_factory=ModelConfig)
    """Of a measured profile, the settings of the model."""
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
    activation_bytes: Curve = field(default_factory=Curve)
    """Bytes that a layer keeps for its backward, per device (Act in the paper). 0: the model's memory tells them."""
    sequence_forward_seconds: float = field(default=0.0, metadata=limits(least=0))
    """What every sequence adds to each block of attention, however short it is: a shared one has a block in each step
    of its ring."""
    sequence_backward_seconds: float = field(default=0.0, metadata=limits(least=0))
    ring_forward_bytes_per_token: float = field(metadata=limits(least=0))
    """Bytes of K and V of one token, per device."""
    ring_backward_bytes_per_token: float = field(metadata=limits(least=0))
    """Bytes of K, V, dK and dV of one token, per device."""
    links: Links = field(default_factory=Links)
    layer_parameters: float = field(metadata=limits(least=1))
    """Weights of one layer, over all tp devices and all experts. Gradients are reduced for all of them."""
    parameter_bytes: int = 2
    """Bytes of one parameter, which is gathered after every update."""
    checkpointing: Checkpointing = "none"
    """What backward computes again: layers, their messages included, or all of a layer but its attention. All figures
    above are without it."""
    points: tuple[Point, ...] = ()

    @property
    def forwards(self) -> tuple[int, int]:
        """How often attention and the rest of a layer run forward, for one backward."""
        return (2 if self.checkpointing == "full" else 1), (1 if self.checkpointing == "none" else 2)

    @property
    def state_bytes(self) -> float:
        """Of a layer and a pass, as ``CostModel.state_bytes``."""
        return self.spec.mean("state_numbers") * max(4, self.parameter_bytes)

    @property
    def row_bytes_per_token(self) -> tuple[tuple[float, float], tuple[float, float]]:
        """Bytes that pass a device's link per token of a slice of queries, in a layer and a step of a grid's row.

        ``((there, home) in forward, (there, home) in backward)``, as a mean over layers. Forward sends the queries, and
        brings partial outputs and LSE home. Backward sends the output's gradient, the queries, LSE and delta, and
        brings the queries' gradient home (``attention.rings.grid``). LSE, delta and sums are in fp32 or wider.
        """
        ringed, wide = [layer for layer in self.spec.layers if layer.num_heads], max(4, self.parameter_bytes)
        parts = self.spec.num_layers * self.tensor_parallel
        width = sum(layer.count * layer.pair_numbers / 2 for layer in ringed) / parts  # of queries, of outputs: a mean
        rows, lse = width * self.parameter_bytes, wide * sum(layer.count * layer.num_heads for layer in ringed) / parts
        return (rows, rows + lse), (2 * rows + 2 * lse, width * wide)

    @property
    def flops_per_second(self) -> float:
        """In matrix products, of one device."""
        return 2 * self.spec.mean("active_weights") / (self.rest_forward.linear * self.tensor_parallel)

    @property
    def hidden_bytes_per_token(self) -> float:
        """Bytes per token and device that a stage sends to the next one: the residual stream in bf16, divided by tp."""
        return 2 * self.spec.hidden_size / self.tensor_parallel

    @staticmethod
    def from_flops(
        spec: ModelSpec,
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
            spec: the counts of the model.
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
        rate, active = tensor_parallel * flops_per_second, spec.mean("active_weights")
        attention = spec.mean("pair_numbers") / (tensor_parallel * (attention_flops_per_second or flops_per_second))
        rest, rest_backward = 2 * active / rate, 2 * (active + spec.mean("trained_weights")) / rate
        head, head_backward = 2 * spec.head / rate, 2 * (spec.head + spec.head_trained) / rate
        keys, gradients = (spec.mean("key_numbers") * size for size in (bytes_per_element, max(4, bytes_per_element)))
        return Profile(
            name="flops",
            spec=spec,
            tensor_parallel=tensor_parallel,
            source=f"counted operations at {flops_per_second:.3g} FLOP/s a device",
            attention_forward=Curve(attention, 0.0, launch_seconds),
            attention_backward=Curve(BACKWARD_ATTENTION_RATIO * attention, 0.0, launch_seconds),
            rest_forward=Curve(0.0, rest, launch_seconds),
            rest_backward=Curve(0.0, rest_backward, launch_seconds),
            head_forward=Curve(0.0, head, 0.0),
            head_backward=Curve(0.0, head_backward, 0.0),
            ring_forward_bytes_per_token=keys / tensor_parallel,
            ring_backward_bytes_per_token=(keys + gradients) / tensor_parallel,
            links=links or Links(),
            layer_parameters=spec.mean("parameters"),
            parameter_bytes=bytes_per_element,
        )

    def scaled_to(self, spec: ModelSpec, *, tensor_parallel: int | None = None) -> Profile:
        """This profile's device with other layers, or another tp. Every cost is scaled by the ratio of its counts.

        What layers keep for backward is not counted: it is divided by the ratio of the degrees alone.
        """
        degree = tensor_parallel or self.tensor_parallel
        tp = degree / self.tensor_parallel

        def scale(name: str) -> float:
            return (spec.mean(name) / self.spec.mean(name) if self.spec.mean(name) else 1.0) / tp

        attention, rest, ring, head = scale("pair_numbers"), scale("active_weights"), scale("key_numbers"), 1 / tp
        if self.spec.head:
            head = spec.head / self.spec.head / tp
        return replace(
            self,
            spec=spec,
            tensor_parallel=degree,
            attention_forward=_scaled(self.attention_forward, attention),
            attention_backward=_scaled(self.attention_backward, attention),
            rest_forward=_scaled(self.rest_forward, rest),
            rest_backward=_scaled(self.rest_backward, rest),
            head_forward=_scaled(self.head_forward, head),
            head_backward=_scaled(self.head_backward, head),
            activation_bytes=self.activation_bytes.times(1 / tp),
            ring_forward_bytes_per_token=self.ring_forward_bytes_per_token * ring,
            ring_backward_bytes_per_token=self.ring_backward_bytes_per_token * ring,
            layer_parameters=self.layer_parameters * scale("parameters") * tp,
            points=self.points if tp == 1 else (),
        )

    def of_stage(self, stage: int, num_stages: int) -> Profile:
        """This profile for the layers of a pipeline stage. Raises ``ConfigError`` for more stages than layers."""
        if num_stages == 1:
            return self
        return self.scaled_to(replace(self.spec, layers=stages_of(self.spec, num_stages)[stage]))

    def cost_model(self, *, ranks_per_node: int = 8, pipeline_parallel: int = 1) -> CostModel:
        """Sum this profile up for the planner: all layers, forward and backward together.

        Stages work at the same time, so the layers and the head count ``1 / pipeline_parallel``.
        """
        layers = self.spec.num_layers / pipeline_parallel
        (forwards, of_rest), row_bytes = self.forwards, self.row_bytes_per_token
        attention = (*[self.attention_forward] * forwards, self.attention_backward)
        rest = (*[self.rest_forward] * of_rest, self.rest_backward)
        heads = (self.head_forward, self.head_backward)
        linear = layers * sum(curve.linear for curve in attention + rest)
        linear += sum(curve.linear for curve in heads) / pipeline_parallel
        first = layers * (self.attention_forward.linear + self.rest_forward.linear)
        first += self.head_forward.linear / pipeline_parallel
        passes, blocks = (forwards + 1) * layers, forwards * self.sequence_forward_seconds
        ring_bytes = forwards * self.ring_forward_bytes_per_token + self.ring_backward_bytes_per_token
        return CostModel(
            attention_seconds_per_pair=layers * sum(curve.quadratic for curve in attention),
            token_seconds=linear,
            forward_share=first / linear if linear else 1 / 3,
            micro_batch_seconds=layers * sum(curve.constant for curve in attention + rest)
            + sum(curve.constant for curve in heads) / pipeline_parallel,
            attention_block_seconds=layers * (blocks + self.sequence_backward_seconds),
            ring_bytes_per_token=layers * ring_bytes,
            row_bytes_per_token=layers * (forwards * sum(row_bytes[0]) + sum(row_bytes[1])),
            ring_step_seconds=passes * self.links.ring_latency_seconds(False),
            inter_node_ring_step_seconds=passes * self.links.ring_latency_seconds(True),
            ring_message_seconds=passes * self.links.message_seconds,
            intra_node_bytes_per_second=self.links.intra_node_bytes_per_second,
            inter_node_bytes_per_second=self.links.ring_bytes_per_second(True),
            ranks_per_node=ranks_per_node,
            ring_share=self.spec.share_with("pair_numbers"),
            recurrent_share=self.spec.share_with("mixers"),
            state_bytes=passes * self.state_bytes,
            windows=self.spec.windows,
            passes=self._passes(),
        )

    def with_parallel_experts(self, *, domain: int, ranks_per_node: int = 8) -> Profile:
        """This profile where the ranks of a ``domain`` have the experts in parallel (``runtime.experts``).

        A row goes to each of a token's experts and back, in forward, and again in backward. Messages are spread evenly,
        and nothing hides them. Experts are neither gathered nor reduced; that domains reduce theirs once is left out.
        """
        if domain == 1:
            return self
        row_bytes = self.spec.hidden_size * self.parameter_bytes
        sent = 2 * self.spec.mean("expert_rows") * row_bytes * (domain - 1) / domain
        seconds = sent / self.links.ring_bytes_per_second(domain > ranks_per_node)
        return replace(
            self,
            rest_forward=replace(self.rest_forward, linear=self.rest_forward.linear + seconds),
            rest_backward=replace(self.rest_backward, linear=self.rest_backward.linear + seconds),
            layer_parameters=max(1.0, self.layer_parameters - self.spec.mean("expert_weights")),
        )

    def _passes(self) -> tuple[Pass, ...]:
        """Forward, once more if attention runs again, and backward, with their shares of the sums in ``cost_model``."""
        order = (*[0] * self.forwards[0], 1)
        attention = (self.attention_forward.quadratic, self.attention_backward.quadratic)
        keys = (self.ring_forward_bytes_per_token, self.ring_backward_bytes_per_token)
        rows = self.row_bytes_per_token
        of_rows = sum(sum(rows[place]) for place in order) or 1.0
        return tuple(
            Pass(
                attention=attention[place] / (sum(attention[own] for own in order) or 1.0),
                keys=keys[place] / (sum(keys[own] for own in order) or 1.0),
                queries=rows[place][0] / of_rows,
                results=rows[place][1] / of_rows,
                steps=1 / len(order),
            )
            for place in order
        )

    def with_costs(self, cost: CostModel) -> Profile:
        """This profile with the times that calibration learns, from a cost model of the same model without a pipeline.

        Each term is shared out as it was among layers, head, forward and backward; what was 0, evenly between forward
        and backward of the layers.
        """
        profile = self._with_term("quadratic", cost.attention_seconds_per_pair, ("attention",))
        profile = profile._with_term("linear", cost.token_seconds, ("rest", "attention", "head"))
        profile = profile._with_term("constant", cost.micro_batch_seconds, ("rest", "attention", "head"))
        of_message = cost.ring_message_seconds / ((self.forwards[0] + 1) * self.spec.num_layers)
        return replace(profile, links=replace(self.links, message_seconds=of_message), points=())

    def _with_term(self, term: str, seconds: float, parts: tuple[str, ...]) -> Profile:
        """This profile with ``seconds`` as the sum of a coefficient over the curves of ``parts``, over all layers."""
        curves: dict[str, Curve] = {}
        before, layers = 0.0, self.spec.num_layers
        forwards = dict(zip(("attention", "rest"), self.forwards, strict=True))
        for part in parts:
            for name, count in ((f"{part}_forward", forwards.get(part, 1)), (f"{part}_backward", 1)):
                curves[name] = getattr(self, name)
                before += getattr(curves[name], term) * count * (1 if part == "head" else layers)
        if before > 0:
            changed = {name: getattr(curve, term) * seconds / before for name, curve in curves.items()}
        else:
            one = seconds / ((forwards[parts[0]] + 1) * layers)
            changed = {f"{parts[0]}_{direction}": one for direction in ("forward", "backward")}
        values: dict[str, Any] = {name: replace(curves[name], **{term: value}) for name, value in changed.items()}
        return replace(self, **values)


def _scaled(curve: Curve, factor: float) -> Curve:
    """Scale the work, which grows with the model, and keep the fixed part, which is the time of launches."""
    return Curve(curve.quadratic * factor, curve.linear * factor, curve.constant)


@cache
def stages_of(spec: ModelSpec, num_stages: int) -> list[tuple[LayerSpec, ...]]:
    """The layers of each pipeline stage, as they are cut (``split_costs``). Raises ``ConfigError`` if one has none."""
    check_stages(num_stages, spec.num_layers)
    each = spec.each
    parts = split_costs([layer.active_weights for layer in each], spec.head, num_stages)
    return [counted(each[part.start : part.stop]) for part in parts]


def split_costs(costs: Sequence[float], head: float, num_stages: int) -> list[range]:
    """A contiguous range of layers for each stage, in order, with at least one layer each, by the layers' ``costs``.

    The sum over stages of (its cost) ** 8 is least, nearly the largest cost. Of stages with equal work the later ones
    take more layers, because under 1F1B the earlier ones keep the activations of more micro-batches.

    ``head``: what the last stage has in addition, in the same unit. There are at most as many stages as layers.
    """
    sums = [0.0, *accumulate(costs)]
    total = sums[-1] + head
    best: list[tuple[float, list[int]]] = [(0.0 if end == 0 else math.inf, [0]) for end in range(len(costs) + 1)]
    for stage in range(num_stages):
        extra, found = head * (stage == num_stages - 1), []
        for end in range(len(costs) + 1):
            chosen = (math.inf, [0])
            for start in range(stage, end):  # the earliest start leaves the fewest layers to the stages before
                value = best[start][0] + ((sums[end] - sums[start] + extra) / total) ** 8
                if value < chosen[0] * (1 - 1e-9):
                    chosen = value, [*best[start][1], end]
            found.append(chosen)
        best = found
    return [range(start, stop) for start, stop in pairwise(best[-1][1])]


def require_model(profile: Profile, spec: ModelSpec) -> None:
    """Raise ``ConfigError`` unless the layers of ``spec`` are of the kinds that were measured.

    Numbers of layers, the size of the vocabulary, and what is trained may differ (``Profile.scaled_to``).
    """
    for name in ("hidden_size", *(own.name for own in reversed(fields(LayerSpec)))):
        measured, wanted = (
            {one.hidden_size} if name == "hidden_size" else {getattr(layer, name) for layer in one.layers}
            for one in (profile.spec, spec)
        )
        if measured != wanted and name not in ("count", "trained_weights"):
            old, new = (", ".join(f"{number:g}" for number in sorted(numbers)) for numbers in (measured, wanted))
            raise ConfigError(
                f"profile {profile.name!r} is of another model: its {name} is {old}, the model's {new}",
                so="plans would be made for the times of another model",
                fix="run `bytescale profile` with this model, or leave cost.profile unset to count operations",
            )
