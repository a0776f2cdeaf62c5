"""Refines a cost model from what the ranks of a run measure in every step.

The seconds that rank r computes in a step, without waiting, are modelled as::

    y_r = (a q_r + b n_r + g m_r + o k_r) / v_r

with q_r, n_r, m_r, k_r the pairs, tokens, micro-batches and ring steps of its plan, and v_r its speed. Every step adds
each rank's row, divided by y_r, to one sum of normal equations, in which older steps and outliers count less.

The coefficients are the most probable ones, if rows have relative errors of ``NOISE``, and if the logarithm of each
coefficient over that of the first cost model is normally distributed: ``SAME_FACTOR`` is the deviation of what all of
them have in common, and ``OWN_FACTOR`` of what each has for itself. So every coefficient stays above 0, and terms that
the rows cannot tell apart keep their ratio.

The speed of a rank is the median over some steps of its speed beside the middle rank of the step. The rates of links
are those of the first cost model over one factor (``cost.slow_links``). Latencies stay.

The state after each step is a function of sums that all ranks have with the same bits, and of the state before. So all
ranks plan alike. A plan for step k uses the state after step ``k - LAG`` (``planner.calibrated``), which every loader
has by then.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from bytescale.common.arrays import FloatArray
from bytescale.cost.model import CostModel
from bytescale.cost.slow_links import most_probable, with_slow_links

TERMS = ("attention_seconds_per_pair", "token_seconds", "micro_batch_seconds", "ring_message_seconds")
"""The fields of ``CostModel`` that the rows give, in the order of their columns."""
FORGET = 0.85
"""Weight of a step's rows, divided by that of the step after."""
NOISE = 0.1
SAME_FACTOR = math.log(10.0)
OWN_FACTOR = math.log(10.0) / 2
UNKNOWN_SHARE = 0.05
"""Share of the time that a coefficient has at first, if it is 0 in the first cost model."""
FIRST_STEPS = 1
"""Steps at the start of a process that are not used: memory is fresh and connections are made."""
FEWEST_STEPS = 2
"""Steps before the estimate replaces the first cost model."""
NEWTON_STEPS = 60
OUTLIER = 0.25
"""Relative errors above this count less, once the estimate is in use."""
SPEED_STEPS = 5
"""Steps whose speeds count."""
FEWEST_SPEEDS = 3
NOTICED = 0.15
"""A rank counts as fast as the middle one while its speed differs by no more than this share."""
SPEED_GRID = 0.05
"""Speeds are rounded to multiples of this, so that plans do not follow every flicker. For speeds below a half the
multiples are half as far apart, for those below a quarter a fourth, and so on."""


class RankCounts(NamedTuple):
    """What one rank computes and sends in a step: the columns of its row."""

    pairs: float
    """q: sum of s^2 over its sequences, of shared ones its share."""
    tokens: float
    micro_batches: float
    ring_steps: float


@dataclass(frozen=True)
class State:
    """The calibration after a step. It holds plain numbers, so that it can be written as JSON."""

    steps: int = 0
    """Steps that were used."""
    matrix: tuple[float, ...] = (0.0,) * 16
    vector: tuple[float, ...] = (0.0,) * 4
    speeds: tuple[tuple[float, ...], ...] = ()
    """Measured speeds of all ranks in each of the last steps."""
    terms: tuple[float, ...] = ()
    """Estimated ``TERMS``; empty: too few steps."""
    slow_links: tuple[float, ...] = ()
    """How probable each factor of ``cost.slow_links`` is; empty: no step has told."""

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_dict(stored: dict[str, Any]) -> State:
        """The inverse of ``as_dict`` after a detour through JSON."""
        lists = {name: tuple(stored.get(name, ())) for name in ("matrix", "vector", "terms", "slow_links")}
        rows = tuple(tuple(row) for row in stored["speeds"])
        return State(steps=stored["steps"], speeds=rows, **lists)

    def for_ranks(self, num_ranks: int) -> State:
        """This state for a run on other ranks: what was learned of single ranks does not hold there."""
        same = all(len(row) == num_ranks for row in self.speeds)
        return self if same else replace(self, speeds=())


@dataclass(frozen=True, kw_only=True)
class Calibrator:
    """Makes states and cost models of a run. It holds nothing that changes."""

    first: CostModel
    """The cost model without calibration."""
    first_speeds: tuple[float, ...] = ()
    """``[R]`` speeds by the data sheets of the ranks' devices; empty: all are 1."""

    def normal_equations(self, state: State, counts: RankCounts, seconds: float, rank: int) -> FloatArray:
        """``[20]`` this rank's part of the step's sums: matrix, then vector. Zeros if it did not compute."""
        row: FloatArray = np.array(counts)
        if seconds <= 0 or not row.any():
            return np.zeros(20)
        if state.speeds or self.first_speeds:
            seconds *= float(self.speeds(state)[rank])
        row = row / seconds
        weight = 1.0
        if len(state.terms):
            error = abs(float(row @ np.array(state.terms)) - 1.0)
            weight = min(1.0, OUTLIER / error) if error > 0 else 1.0
        return weight * np.concatenate([np.outer(row, row).ravel(), row])

    def speed(self, state: State, counts: RankCounts, seconds: float) -> float:
        """How fast this rank was beside the model; 0 if it did not compute."""
        predicted = float(np.array(counts) @ np.array(state.terms or self._first_terms()))
        return predicted / seconds if seconds > 0 and predicted > 0 else 0.0

    def after(self, state: State, sums: Sequence[float], speeds: Sequence[float]) -> State:
        """The state after one more step.

        Args:
            sums: ``[20]`` sum of ``normal_equations`` over ranks.
            speeds: ``[R]`` ``speed`` of every rank.
        """
        matrix = FORGET * np.array(state.matrix) + np.array(sums[:16])
        vector = FORGET * np.array(state.vector) + np.array(sums[16:])
        steps = state.steps + 1
        terms = self._solve(matrix.reshape(4, 4), vector) if steps >= FEWEST_STEPS else ()
        return State(
            steps=steps,
            matrix=tuple(matrix.tolist()),
            vector=tuple(vector.tolist()),
            speeds=(*state.speeds, tuple(speeds))[-SPEED_STEPS:] if len(state.terms) else (),
            terms=terms,
            slow_links=state.slow_links,
        )

    def cost(self, state: State) -> CostModel:
        """The cost model that a state gives."""
        if not len(state.terms):
            return self.first
        found: dict[str, Any] = dict(zip(TERMS, state.terms, strict=True))
        return with_slow_links(replace(self.first, **found), most_probable(state.slow_links))

    def speeds(self, state: State) -> FloatArray:
        """``[R]`` relative speeds: measured ones after enough steps, else the first ones.

        Raises ``ValueError`` for a state without any, if there are no first ones.
        """
        if len(state.speeds) < FEWEST_SPEEDS and self.first_speeds:
            return np.array(self.first_speeds)
        if not state.speeds:
            raise ValueError("the state knows no ranks")
        rows = [np.array(row) for row in state.speeds]
        beside = np.array([row / np.median(row[row > 0]) if (row > 0).any() else row for row in rows])
        relative = np.array([float(np.median(own[own > 0])) if (own > 0).any() else 1.0 for own in beside.T])
        if len(rows) < FEWEST_SPEEDS:
            return np.ones(len(relative))
        # Powers of two are exact, so all ranks get the same bits.
        grid = SPEED_GRID * np.exp2(np.minimum(np.frexp(relative)[1], 0))
        on_grid = np.round(relative / grid) * grid
        return np.where(np.abs(relative - 1.0) <= NOTICED, 1.0, on_grid)

    def _first_terms(self) -> list[float]:
        return [float(getattr(self.first, name)) for name in TERMS]

    def _solve(self, matrix: FloatArray, vector: FloatArray) -> tuple[float, ...]:
        """The most probable terms. Those that no row has had, and that are 0 in the first cost model, stay 0."""
        first = np.array(self._first_terms())
        seen = np.diag(matrix) > 0
        alone = np.divide(vector, np.diag(matrix), out=np.zeros(len(first)), where=seen)
        first = np.where(first > 0, first, UNKNOWN_SHARE * alone)
        terms = first.copy()
        if seen.any():
            known = first > 0
            part = np.ix_(known, known)
            scale = first[known]
            factors = most_probable_factors(matrix[part] * np.outer(scale, scale), vector[known] * scale)
            terms[known] = scale * factors
        return tuple(terms.tolist())


def most_probable_factors(matrix: FloatArray, vector: FloatArray) -> FloatArray:
    """``[N]`` the factors f with the smallest ``f M f - 2 v f + x P x``, where x = log f.

    M and v are normal equations ``[N, N]`` and ``[N]`` of rows whose products with f should be 1. P is the inverse of
    the covariance of x, times the variance of the rows. Newton's method with damping begins with equal factors.
    """
    count = len(vector)
    covariance = OWN_FACTOR**2 * np.eye(count) + SAME_FACTOR**2
    prior: FloatArray = np.asarray(NOISE**2 * np.linalg.inv(covariance), dtype=np.float64)
    logs = np.full(count, math.log(float(vector.sum()) / float(matrix.sum())))

    def penalty(logs: FloatArray) -> float:
        factors = np.exp(logs)
        return float(factors @ matrix @ factors - 2 * vector @ factors + logs @ prior @ logs)

    least, damping = penalty(logs), 1e-3
    for _ in range(NEWTON_STEPS):
        factors = np.exp(logs)
        slope = factors * (matrix @ factors - vector) + prior @ logs
        curved = np.outer(factors, factors) * matrix + prior
        step = np.linalg.solve(curved + damping * np.diag(np.diag(curved)), -slope)
        tried = logs + np.clip(step, -1.0, 1.0)
        found = penalty(tried)
        if found >= least:
            damping *= 10
            continue
        done = least - found < 1e-12
        logs, least, damping = tried, found, damping / 10
        if done:
            break
    return np.exp(logs)
