"""The calibration of a run on one rank: what the rank measures, what all ranks agree on, and its file."""

from __future__ import annotations

import json
from collections import deque
from dataclasses import asdict, replace
from pathlib import Path
from statistics import mean, median
from typing import Any, TextIO

import torch.distributed as dist

from bytescale.common.errors import PlanError
from bytescale.common.parsing import parse_json
from bytescale.cost.calibration import FIRST_STEPS, RankCounts, State
from bytescale.cost.model import CostModel
from bytescale.cost.slow_links import FACTORS, after_step, with_slow_links
from bytescale.cost.visible import num_messages
from bytescale.plan import Plan, RankPlan
from bytescale.planner.baselines import static_plan
from bytescale.planner.calibrated import LAG, CalibratedPlanner
from bytescale.planner.evaluate import evaluate
from bytescale.runtime.mesh import Mesh
from bytescale.runtime.plain_data import broadcast_json
from bytescale.train.run_folder import keep_until

PREDICTED_STEPS = 4
"""Steps whose remaining time (sync, update, data) is taken to be that of the next step."""


class RunCalibration:
    """Measures with every step, and keeps the states that plans are made from. Every rank has the same states."""

    def __init__(self, planner: CalibratedPlanner, mesh: Mesh) -> None:
        """``planner``: the one that the run's loader uses. ``mesh``: has neither tensor nor pipeline parallelism."""
        self.planner = planner
        self.state = State()
        self._mesh = mesh
        self._file: TextIO | None = None
        self._waited = 0  # steps of this process that were not used
        self._beyond: deque[float] = deque(maxlen=PREDICTED_STEPS)

    def open(self, path: Path, steps_done: int, group: dist.ProcessGroup) -> None:
        """Continue from the states in ``path`` up to step ``steps_done``. Called by every rank; the first one reads.

        Later lines are removed, because their steps are done again.
        """
        stored: list[dict[str, Any]] = []
        if self._mesh.world.rank == 0:
            lines = keep_until(path, steps_done)
            self._file = path.open("a", encoding="utf-8")
            stored = [parse_json(line) for line in lines[-LAG:]]
        size = self._mesh.hdp.size
        stored = broadcast_json(stored, group)
        states = {line["step"] - 1: State.from_dict(line["state"]).for_ranks(size) for line in stored}
        last = steps_done - 1
        if last in states:
            self.state = states[last]
            self.planner.first = min(states)
            self.planner.add(states)
        else:
            self.planner.first = steps_done

    @property
    def cost(self) -> CostModel:
        return self.planner.calibrator.cost(self.state)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()

    def predict(self, plan: Plan) -> float:
        """Seconds of a step with ``plan``: its makespan by the current state, and what recent steps took beyond it."""
        return self._makespan(plan) + max(0.0, median(self._beyond) if self._beyond else 0.0)

    def predict_static(self, plan: Plan, context: int) -> float | None:
        """The same for the plan's sequences on a static mesh that holds ``context`` tokens; None: there is none."""
        try:
            static = static_plan(plan.lengths, cluster=self.planner.with_state(self.state).cluster, context=context)
        except PlanError:  # no mesh of these ranks holds it, or they differ in memory
            return None
        return self.predict(static)

    def took(self, plan: Plan, seconds: float) -> None:
        if self.state.steps:
            self._beyond.append(seconds - self._makespan(plan))

    def observe(self, step: int, plan: Plan, rank_plan: RankPlan, busy_seconds: float, passes_seconds: float) -> None:
        """Agree with all other ranks on the state after ``step``, counted from 0. Every rank calls it once a step.

        Args:
            busy_seconds: for which this rank computed.
            passes_seconds: from the start of its passes to their end.
        """
        mesh, state = self._mesh, self.state
        self._waited += 1
        if self._waited > FIRST_STEPS:
            calibrator = self.planner.calibrator
            counts = counts_of(rank_plan, calibrator.first)
            own = calibrator.normal_equations(state, counts, busy_seconds, mesh.hdp.rank).tolist()
            sums = mesh.world.sum_of(own)
            rows = mesh.world.share([calibrator.speed(state, counts, busy_seconds), passes_seconds])
            found = calibrator.after(state, sums, [round(speed, 4) for speed, _ in rows])
            self.state = (
                self._of_first_rank(found, plan, mean(seconds for _, seconds in rows)) if found.terms else found
            )
        self.planner.add({step: self.state})
        if self._file is not None:
            planner = self.planner.with_state(self.state)
            line = {"step": step + 1, "cost": asdict(planner.cost), "speeds": planner.cluster.speeds.tolist()}
            self._file.write(json.dumps({**line, "state": self.state.as_dict()}) + "\n")
            self._file.flush()

    def _of_first_rank(self, found: State, plan: Plan, seconds: float) -> State:
        """``found`` with what ``seconds``, the mean of the ranks' passes, say of links, and the first rank's estimates.

        Processors of different kinds round logarithms differently. What the first rank found holds for all.
        """
        numbers = [0.0] * (len(found.terms) + len(FACTORS))
        if self._mesh.world.rank == 0:
            alike = self.planner.with_state(replace(found, slow_links=()))

            def seconds_at(factor: float) -> float:
                outcome = evaluate(plan, cluster=alike.cluster, cost=with_slow_links(alike.cost, factor))
                return float(outcome.rank_end_seconds.mean())

            links = after_step(found.slow_links, seconds_at, seconds)
            numbers = [*found.terms, *(links or numbers[len(found.terms) :])]
        numbers = self._mesh.world.sum_of(numbers)
        terms, links = tuple(numbers[: len(found.terms)]), tuple(numbers[len(found.terms) :])
        return replace(found, terms=terms, slow_links=links if any(links) else ())

    def _makespan(self, plan: Plan) -> float:
        found = self.planner.with_state(self.state)
        return evaluate(plan, cluster=found.cluster, cost=found.cost).end_seconds


def counts_of(rank_plan: RankPlan, cost: CostModel) -> RankCounts:
    """What a rank computes and sends in a step, by the windows of ``cost``."""
    pairs = tokens = ring_steps = 0.0
    for micro_batch in rank_plan.micro_batches:
        tokens += micro_batch.num_tokens
        pairs += float(cost.squares_of(micro_batch.local_lengths).sum())
        shared = micro_batch.shared
        if shared is not None:
            share = float(shared.weights[shared.member] / shared.weights.sum())
            pairs += share * float(cost.squares_of(shared.lengths).sum())
            ring_steps += num_messages(shared.size // shared.columns, shared.columns)
    return RankCounts(pairs=pairs, tokens=tokens, micro_batches=len(rank_plan.micro_batches), ring_steps=ring_steps)
