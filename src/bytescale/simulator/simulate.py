"""Simulates one step of a plan on a modelled cluster.

1. Find what each micro-batch holds, and which micro-batches run together (``events.events_of``).
2. Compute what each micro-batch costs every stage (``cost.stage``).
3. Compute when every forward and backward runs (``engine.run_events``).
4. Compute how much of each stage's gradient sync is not hidden by computation (``cost.gradient_sync``).
5. Add up where the time of every rank and stage went (here).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np

from bytescale.common.arrays import FloatArray, IntArray
from bytescale.common.errors import ConfigError
from bytescale.cost.cluster import Cluster
from bytescale.cost.gradient_sync import (
    UPDATE_BYTES,
    bucket_seconds,
    gather_bytes,
    num_buckets,
    round_seconds,
    stage_parameters,
    sync_bytes,
    visible_gathering,
    visible_reduction,
)
from bytescale.cost.model import CostModel
from bytescale.cost.profile import Profile
from bytescale.cost.stage import Loads, StageTimes, movable_layers, stage_times
from bytescale.cost.visible import state_rounds
from bytescale.plan import Plan
from bytescale.plan.last_message import silent_last_backwards
from bytescale.planner.evaluate import run_in_order, run_rounds
from bytescale.simulator.cluster_config import ClusterConfig
from bytescale.simulator.engine import Timeline, run_events
from bytescale.simulator.events import Events, events_of
from bytescale.simulator.result import SimulatedStep, Traffic


def simulate(
    plan: Plan, profile: Profile, cluster: ClusterConfig, *, speeds: FloatArray | None = None
) -> SimulatedStep:
    """Execute ``plan`` event by event. ``profile`` gives the time of each. Input costs no time.

    Args:
        plan: a verified plan for as many ranks as ``cluster`` has.
        profile: costs per layer at the cluster's tp.
        speeds: ``[R]`` relative speeds of the ranks; None: all are 1.

    Raises:
        ConfigError: plan, profile and cluster do not belong together.
        PlanError: 1F1B deadlocks.
    """
    events, parts, seconds, transfer = _prepared(plan, profile, cluster, speeds)
    if plan.domain > 1:
        timeline, rounds_end = _in_lockstep(plan, profile, cluster, events, seconds[0])
    else:
        timeline, rounds_end = run_events(events, seconds, transfer), 0.0
    return _account(_Executed(plan, profile, cluster, events, timeline, rounds_end), parts)


def step_seconds(plan: Plan, profile: Profile, cluster: ClusterConfig, *, speeds: FloatArray | None = None) -> float:
    """Return ``simulate(...).step_seconds``, without a pipeline some ten times as fast: planners compare plans by it.

    Arguments and errors are those of ``simulate``.
    """
    if cluster.pp > 1 or plan.domain > 1:
        return simulate(plan, profile, cluster, speeds=speeds).step_seconds
    events, _, seconds, _ = _prepared(plan, profile, cluster, speeds)
    event = events.micro_batch_events
    forward, backward = seconds[0]
    _, ends = run_in_order(plan, (forward + backward)[event])
    end = np.empty((events.num_events, 1, 2))
    end[event, 0, 1] = ends
    end[:, 0, 0] = end[:, 0, 1] - backward
    start = end - seconds[0].T[:, None]
    sync = _visible_sync(_Executed(plan, profile, cluster, events, Timeline(arrival=start, start=start, end=end)), 0)
    return float(ends.max()) + sync


def _in_lockstep(
    plan: Plan, profile: Profile, cluster: ClusterConfig, events: Events, seconds: FloatArray
) -> tuple[Timeline, float]:
    """When tasks run in lockstep domains, from their ``[2, E]`` seconds, and when the last round ends.

    A rank that waits for the gathers of a round counts as waiting for other ranks.
    """
    least = np.array(round_seconds(profile, domain=plan.domain, ranks_per_node=cluster.ranks_per_node))[:, None]
    begins, ends = run_rounds(plan, np.maximum(seconds[:, events.micro_batch_events], least))
    start = np.empty((events.num_events, 1, 2))
    at = plan.micro_batch_rounds, plan.micro_batch_ranks // plan.domain
    start[events.micro_batch_events, 0] = begins[(slice(None), *at)].T
    return Timeline(arrival=start, start=start, end=start + seconds.T[:, None]), float(ends.max())


@dataclass(frozen=True, slots=True)
class _Executed:
    """A plan that was executed: on what, what its events were, and when they ran."""

    plan: Plan
    profile: Profile
    cluster: ClusterConfig
    events: Events
    timeline: Timeline
    rounds_end: float = 0.0  # in lockstep, seconds after which the last gradients of a domain are reduced

    def stage_parameters(self, stage: int) -> float:
        return stage_parameters(self.profile, stage=stage, pipeline_parallel=self.cluster.pp)


def _prepared(
    plan: Plan, profile: Profile, cluster: ClusterConfig, speeds: FloatArray | None
) -> tuple[Events, list[StageTimes], FloatArray, FloatArray]:
    """The events, and their times on each stage; from these the ``[pp, 2, E]`` duration of every task, and the ``[E]``
    time to send its result to the next stage. Raises ``ConfigError`` as ``simulate``."""
    if plan.num_ranks != cluster.num_ranks:
        raise ConfigError(
            f"the plan is for {plan.num_ranks} ranks but {cluster.num_gpus} devices at tp = {cluster.tp}, pp = "
            f"{cluster.pp} make {cluster.num_ranks}",
            fix="plan for the ranks of this cluster",
        )
    if profile.tensor_parallel != cluster.tp:
        raise ConfigError(
            f"profile {profile.name!r} is for tp = {profile.tensor_parallel} but parallel.tp is {cluster.tp}",
            fix="use Profile.scaled_to, or a profile taken at this tp",
        )
    if plan.domain > 1 and cluster.pp > 1:
        raise ConfigError(
            f"the plan is for domains of {plan.domain} ranks in lockstep, but parallel.pp is {cluster.pp}",
            so="every stage would gather its parameters at times of its own",
            fix="plan without domains, or simulate without a pipeline",
        )
    events = events_of(plan, ranks_per_node=cluster.ranks_per_node, speeds=speeds, windows=profile.spec.windows)
    stages = [profile.of_stage(stage, cluster.pp) for stage in range(cluster.pp)]
    parts = [stage_times(own, events.loads, has_head=own is stages[-1]) for own in stages]
    seconds = np.stack([events.longest_member(times.total) for times in parts])
    hop = profile.hidden_bytes_per_token * events.loads.tokens / profile.links.inter_node_bytes_per_second
    return events, parts, seconds, events.longest_member(hop + profile.links.ring_latency_seconds(True))


def _account(done: _Executed, parts: list[StageTimes]) -> SimulatedStep:
    events, timeline, pp = done.events, done.timeline, done.cluster.pp
    ranks, num_ranks = events.micro_batch_ranks, events.num_ranks
    spent = {name: np.zeros((num_ranks, pp)) for name in ("compute", "exposed_ring", "exposed_offload", "wait_members")}
    dp_bubble, pp_bubble, last, sync = np.zeros((4, num_ranks, pp))
    for stage, times in enumerate(parts):
        for name in ("compute", "exposed_ring", "exposed_offload"):
            spent[name][:, stage] = _per_rank(getattr(times, name).sum(axis=0), ranks, num_ranks)
        own = times.total
        waited = events.longest_member(own)[:, events.micro_batch_events] - own
        spent["wait_members"][:, stage] = _per_rank(waited.sum(axis=0), ranks, num_ranks)
        dp_bubble[:, stage], pp_bubble[:, stage], last[:, stage] = _waits(events, timeline, stage)
        sync[:, stage] = _visible_sync(done, stage)
    stage_done = last.max(axis=0)  # gradients of a stage are reduced when all its ranks have run their last backward
    dp_bubble += stage_done - last
    end = float((stage_done + sync[0]).max())
    pp_bubble += end - (stage_done + sync[0])
    return SimulatedStep(
        step_seconds=end,
        dp_bubble=dp_bubble,
        pp_bubble=pp_bubble,
        sync_seconds=sync,
        traffic=_traffic(done),
        events=events,
        timeline=timeline,
        num_tokens=done.plan.num_tokens,
        encoders=(),
        **spent,
    )


def _visible_sync(done: _Executed, stage: int) -> float:
    """Return the seconds of a stage's reduction, gathering and update in host memory that no computation hides.

    The gathering runs beside the next step, which is taken to be like this one.
    """
    plan, profile, cluster, events, timeline = done.plan, done.profile, done.cluster, done.events, done.timeline
    parameters = done.stage_parameters(stage)
    updated = cluster.optimizer_on_host * UPDATE_BYTES * parameters / events.num_ranks
    update = updated / profile.links.host_update_bytes_per_second
    count = num_buckets(parameters, cluster.gradient_bucket_mib * 2**20)
    ranks = {"num_ranks": events.num_ranks, "ranks_per_node": cluster.ranks_per_node}
    if plan.domain > 1:  # what a rank has of the parameters is reduced with the same part in the other domains
        parameters, count = parameters / plan.domain, 1
        ranks = {"num_ranks": events.num_ranks // plan.domain, "ranks_per_node": ranks["ranks_per_node"] // plan.domain}
    seconds = bucket_seconds(profile, parameters, count, **ranks)
    if count == 1:
        late = max(0.0, done.rounds_end - float(timeline.end.max()))
        return late + seconds.reduce + update + seconds.gather
    some = np.diff(plan.rank_micro_batch_offsets) > 0
    first = events.micro_batch_events[plan.rank_micro_batch_offsets[:-1][some]]
    last = events.micro_batch_events[plan.rank_micro_batch_offsets[1:][some] - 1]
    starts, ends = np.zeros((2, events.num_ranks))
    starts[some], ends[some] = (times[last, stage, 1] for times in (timeline.start, timeline.end))
    # The embedding's share: forward needs it first, and its gradient is complete last.
    in_front = profile.spec.outside / profile.tensor_parallel / parameters * (stage == 0)
    reduction = visible_reduction(
        seconds.reduce,
        count,
        starts=starts,
        ends=ends,
        silent=silent_last_backwards(plan) & (stage == 0),
        in_front=in_front,
    )
    gathering = visible_gathering(
        seconds.gather,
        count,
        starts=timeline.start[first, stage, 0],
        ends=timeline.end[first, stage, 0],
        first=in_front,
    )
    return reduction + update + gathering


def _per_rank(values: FloatArray, ranks: IntArray, num_ranks: int) -> FloatArray:
    return np.bincount(ranks, weights=values, minlength=num_ranks).astype(np.float64)


def _waits(events: Events, timeline: Timeline, stage: int) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Return for one stage of each rank: seconds waited for other ranks, for other stages, and its end. Each ``[R]``.

    A gap before a task counts as waiting for other stages until its input has arrived, and then for other ranks.
    """
    start, end, arrival = (
        times[events.micro_batch_events, stage].ravel() for times in (timeline.start, timeline.end, timeline.arrival)
    )
    ranks = np.repeat(events.micro_batch_ranks, 2)
    order = np.lexsort((end, start, ranks))
    ranks, start, end, arrival = ranks[order], start[order], end[order], arrival[order]
    free = np.concatenate([[0.0], end[:-1]])
    free[np.concatenate([[True], ranks[1:] != ranks[:-1]])] = 0.0
    for_stage = np.clip(arrival - free, 0.0, start - free)
    num_ranks = events.num_ranks
    last = np.zeros(num_ranks)
    np.maximum.at(last, ranks, end)
    return _per_rank(start - free - for_stage, ranks, num_ranks), _per_rank(for_stage, ranks, num_ranks), last


def _traffic(done: _Executed) -> Traffic:
    profile, cluster, events = done.profile, done.cluster, done.events
    layers, tp, (num_forwards, _) = profile.spec.num_layers, cluster.tp, profile.forwards
    ring = num_forwards * profile.ring_forward_bytes_per_token + profile.ring_backward_bytes_per_token
    forward, backward = profile.row_bytes_per_token
    row = events.row_tokens @ np.array([num_forwards * forward[place] + backward[place] for place in (0, 1)])
    loads: Loads = events.loads
    states = (num_forwards + 1) * profile.state_bytes * state_rounds(loads.degree)
    around = ring * events.ring_tokens + states
    inside = np.where(events.ring_is_near, around, 0.0) + np.where(events.row_is_near, row, 0.0)
    parameters = [done.stage_parameters(stage) for stage in range(cluster.pp)]
    moved = loads.offload_ratio * profile.activation_bytes(loads.tokens)
    synced = sum(sync_bytes(profile, count, events.num_ranks) for count in parameters) * tp * events.num_ranks
    if done.plan.domain > 1:
        gathered = gather_bytes(profile, parameters[0], done.plan.domain) * float(done.plan.rank_rounds.sum())
        between = sync_bytes(profile, parameters[0] / done.plan.domain, events.num_ranks // done.plan.domain)
        synced = tp * (gathered + between * events.num_ranks)
    movable = sum(movable_layers(profile.of_stage(stage, cluster.pp).spec.num_layers) for stage in range(cluster.pp))
    return Traffic(
        ring_intra_node=layers * tp * float(inside.sum()),
        ring_inter_node=layers * tp * float((around + row - inside).sum()),
        pipeline=2 * (cluster.pp - 1) * tp * profile.hidden_bytes_per_token * float(loads.tokens.sum()),
        gradient_sync=synced,
        offload=movable * tp * float(moved.sum()),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimes:
    """The simulator with all that it has to know of a run besides the plan. It can be sent to another process."""

    profile: Profile
    """The times of the model's layers, without calibration."""
    devices: ClusterConfig

    def __call__(self, cluster: Cluster, cost: CostModel) -> Callable[[Plan], float]:
        """Return the function from a plan to the seconds of its step at these speeds and costs (``step_seconds``)."""
        profile, speeds = self._at(cost), cluster.speeds
        return partial(step_seconds, profile=profile, cluster=self.devices, speeds=speeds)

    def simulated(self, plan: Plan, cost: CostModel) -> SimulatedStep:
        """Simulate ``plan`` at these costs. The data costs no time. Raises as ``simulate``."""
        return simulate(plan, self._at(cost), self.devices)

    def _at(self, cost: CostModel) -> Profile:
        # The planner's costs are sums over all layers, of which the stages of a pipeline have parts.
        return self.profile.with_costs(cost) if self.devices.pp == 1 else self.profile
