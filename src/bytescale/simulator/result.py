"""The result of a simulated step: its time, where each rank's time went, and traffic."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from bytescale.common.arrays import FloatArray
from bytescale.simulator.engine import Timeline
from bytescale.simulator.events import Events


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Traffic:
    """Bytes that the devices of all ranks send together in one step. All tp devices of a rank are counted."""

    ring_intra_node: float  # with the states of recurrent layers
    ring_inter_node: float
    pipeline: float
    gradient_sync: float
    offload: float  # to host memory; as many bytes come back. Not part of ``total``

    @property
    def total(self) -> float:
        return self.ring_intra_node + self.ring_inter_node + self.pipeline + self.gradient_sync


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SimulatedStep:
    """One simulated step. Arrays are ``[R, pp]`` in seconds: R HDP ranks, pp stages.

    For every rank and stage,
    ``compute + exposed_ring + exposed_offload + wait_members + dp_bubble + pp_bubble + sync + encoders = step``.
    """

    step_seconds: float
    compute: FloatArray
    exposed_ring: FloatArray
    exposed_offload: FloatArray
    wait_members: FloatArray  # waiting for slower members inside a shared micro-batch
    dp_bubble: FloatArray  # waiting for other HDP ranks, to start a shared micro-batch or at the gradient sync
    pp_bubble: FloatArray  # waiting for other stages
    sync_seconds: FloatArray  # gradient reduce-scatter and parameter all-gather that no computation hides
    traffic: Traffic
    events: Events
    timeline: Timeline
    num_tokens: int
    encoders: tuple[FloatArray, ...]
    """Of pictures, ``[R]`` each: on the first stage before all text, and behind it."""

    def with_encoders(self, encoders: tuple[FloatArray, ...]) -> SimulatedStep:
        """The same step with these ``encoders``, if there are any. Ranks wait for each other's."""
        if not encoders:
            return self
        forward, backward = encoders
        first, both = float(forward.max()), float(forward.max() + backward.max())
        waiting = np.full_like(self.dp_bubble, both)
        waiting[:, 0] -= forward + backward
        times = {name: getattr(self.timeline, name) + first for name in ("arrival", "start", "end")}
        return replace(
            self,
            step_seconds=self.step_seconds + both,
            dp_bubble=self.dp_bubble + waiting,
            timeline=replace(self.timeline, **times),
            encoders=encoders,
        )

    @property
    def num_stages(self) -> int:
        return self.compute.shape[1]

    @property
    def stage_event_seconds(self) -> FloatArray:
        """``[E, pp]`` seconds that each event occupies each stage: forward and backward."""
        return (self.timeline.end - self.timeline.start).sum(axis=2)

    @property
    def rank_seconds(self) -> FloatArray:
        """``[R]`` seconds at which each rank's last backward ends; 0 for a rank without micro-batches."""
        ends = np.zeros(self.events.num_ranks)
        last = self.timeline.end[:, 0, 1][self.events.micro_batch_events]
        np.maximum.at(ends, self.events.micro_batch_ranks, last)
        return ends

    @property
    def tokens_per_second(self) -> float:
        return self.num_tokens / self.step_seconds

    @property
    def parts(self) -> dict[str, FloatArray]:
        """Seconds that each rank spends on each activity, ``[R, pp]``; of encoders ``[R]``."""
        parts = {
            "compute": self.compute,
            "ring": self.exposed_ring,
            "offload": self.exposed_offload,
            "members": self.wait_members,
            "dp bubble": self.dp_bubble,
            "pp bubble": self.pp_bubble,
            "gradient sync": self.sync_seconds,
        }
        return {**parts, "encoders": np.sum(self.encoders, axis=0)} if self.encoders else parts

    def shares(self) -> dict[str, float]:
        """Return the mean share of the step that ranks spend on each activity. The shares add up to 1."""
        return {name: float(own.sum()) / self.compute.size / self.step_seconds for name, own in self.parts.items()}
