"""Calibration finds the costs that steps were made with, and does not believe a disturbed step."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

from bytescale.cost.calibration import TERMS, Calibrator, RankCounts, State
from bytescale.cost.model import CostModel

TRUE = CostModel(
    attention_seconds_per_pair=3e-8,
    token_seconds=2e-4,
    micro_batch_seconds=5e-3,
    ring_message_seconds=1e-3,
    ring_bytes_per_token=2048,
    ring_step_seconds=1e-3,
    intra_node_bytes_per_second=1e8,
    inter_node_bytes_per_second=2e7,
)


def some_counts(random: np.random.Generator) -> RankCounts:
    tokens = float(random.uniform(2000, 6000))
    return RankCounts(
        pairs=tokens * float(random.uniform(100, 4000)),
        tokens=tokens,
        micro_batches=float(random.integers(1, 5)),
        ring_steps=float(random.integers(0, 7)),
    )


def seconds_of(counts: RankCounts, speed: float = 1.0) -> float:
    return float(np.array(counts) @ [getattr(TRUE, name) for name in TERMS]) / speed


def run(calibrator: Calibrator, steps: int, *, speeds: list[float], noise: float = 0.02, odd: int = -1) -> list[State]:
    """States after each step of ranks with these speeds. In step ``odd`` everything takes three times as long."""
    random = np.random.default_rng(0)
    states = [State()]
    for step in range(steps):
        state = states[-1]
        counts = [some_counts(random) for _ in speeds]
        factor = 3.0 if step == odd else 1.0
        seconds = [
            factor * seconds_of(c, v) * float(random.normal(1, noise)) for c, v in zip(counts, speeds, strict=True)
        ]
        pairs = list(enumerate(zip(counts, seconds, strict=True)))
        sums = sum(calibrator.normal_equations(state, c, y, rank) for rank, (c, y) in pairs)
        own = [calibrator.speed(state, c, y) for _, (c, y) in pairs]
        states.append(calibrator.after(state, sums.tolist(), own))
    return states


def worst_error(cost: CostModel) -> float:
    """Largest relative error of the seconds of a rank."""
    random = np.random.default_rng(1)
    found = []
    for _ in range(100):
        row = some_counts(random)
        found.append(float(np.array(row) @ [getattr(cost, name) for name in TERMS]) / seconds_of(row) - 1)
    return float(np.abs(found).max())


@pytest.mark.parametrize("term", TERMS)
@pytest.mark.parametrize("factor", [0.1, 10.0])
def test_a_term_ten_times_wrong_is_found(term: str, factor: float) -> None:
    wrong = replace(TRUE, **{term: factor * getattr(TRUE, term)})
    calibrator = Calibrator(first=wrong)
    states = run(calibrator, 15, speeds=[1.0] * 4)
    assert worst_error(calibrator.cost(states[-1])) < 0.05
    assert (calibrator.speeds(states[-1]) == 1).all()


def test_a_disturbed_step_changes_little() -> None:
    calibrator = Calibrator(first=TRUE)
    assert worst_error(calibrator.cost(run(calibrator, 12, speeds=[1.0] * 4, odd=10)[-1])) < 0.15


def test_equal_rows_leave_the_terms_near_the_first_ones() -> None:
    """With the same counts in every step, only their sum can be known."""
    calibrator = Calibrator(first=TRUE)
    counts, state = RankCounts(pairs=1e6, tokens=4e3, micro_batches=2, ring_steps=0), State()
    for _ in range(10):
        sums = calibrator.normal_equations(state, counts, 2 * seconds_of(counts), 0)
        state = calibrator.after(state, sums.tolist(), [1.0])
    cost = calibrator.cost(state)
    assert float(np.array(counts) @ [getattr(cost, name) for name in TERMS]) == pytest.approx(
        2 * seconds_of(counts), rel=0.01
    )
    assert cost.token_seconds > TRUE.token_seconds


def test_no_term_vanishes_where_all_time_follows_the_ring_steps() -> None:
    """Small steps on a busy machine can look like this. Costs of nothing but messages would make any plan as good."""
    first = replace(TRUE, ring_message_seconds=0.0)
    calibrator, state, random = Calibrator(first=first), State(), np.random.default_rng(0)
    for _ in range(8):
        counts = RankCounts(pairs=2e4, tokens=300.0, micro_batches=3, ring_steps=float(random.integers(1, 4)))
        sums = calibrator.normal_equations(state, counts, 0.0278 * counts.ring_steps, 0)
        state = calibrator.after(state, sums.tolist(), [1.0])
        cost = calibrator.cost(state)
    assert cost.ring_message_seconds == pytest.approx(0.0278, rel=0.4)
    for name in TERMS[:3]:
        assert getattr(cost, name) > getattr(TRUE, name) / 100


def test_a_ring_step_that_never_came_costs_what_it_did() -> None:
    """A rank without groups measures nothing of rings: their cost keeps its ratio to the others."""
    for message in (0.0, 1e-3):
        first = replace(TRUE, ring_message_seconds=message)
        calibrator, state = Calibrator(first=first), State()
        for tokens in (2e3, 3e3, 4e3):
            counts = RankCounts(pairs=300 * tokens, tokens=tokens, micro_batches=2, ring_steps=0)
            sums = calibrator.normal_equations(state, counts, 4 * seconds_of(counts), 0)
            state = calibrator.after(state, sums.tolist(), [1.0])
        assert calibrator.cost(state).ring_message_seconds == pytest.approx(4 * message, rel=0.3)


def test_slow_ranks_are_found_and_do_not_change_the_terms() -> None:
    calibrator = Calibrator(first=TRUE)
    states = run(calibrator, 20, speeds=[1.0, 1.0, 0.5, 1.0, 0.25])
    assert calibrator.speeds(states[-1]).tolist() == pytest.approx([1.0, 1.0, 0.5, 1.0, 0.25], abs=0.051)
    assert worst_error(calibrator.cost(states[-1])) < 0.1


def test_speeds_ignore_steps_that_are_slow_for_all_and_two_disturbed_steps_of_a_rank() -> None:
    calibrator = Calibrator(first=TRUE)
    rows = (
        (1.0, 1.1, 0.9, 1.0),
        (0.5, 0.55, 0.5, 0.5),
        (1.0, 0.4, 1.0, 1.05),
        (1.0, 0.5, 1.0, 1.0),
        (0.9, 1.0, 1.0, 1.0),
    )
    assert calibrator.speeds(State(speeds=rows)).tolist() == [1.0] * 4
    slow = ((1.0, 0.5, 1.0, 1.1),) * 3
    assert calibrator.speeds(State(speeds=(*rows[:2], *slow))).tolist() == [1.0, 0.5, 1.0, 1.0]
    idle = ((1.0, 0.0, 1.0, 0.3),) * 5
    assert calibrator.speeds(State(speeds=idle)).tolist() == pytest.approx([1.0, 1.0, 1.0, 0.3]), "one never computed"


def test_speeds_of_slow_ranks_are_as_exact_as_those_of_fast_ones() -> None:
    calibrator = Calibrator(first=TRUE)
    for speed in (0.8, 0.5, 0.37, 0.25, 0.223, 0.11, 0.013):
        found = calibrator.speeds(State(speeds=((1.0, 1.0, 1.0, speed),) * 3))
        assert found[-1] == pytest.approx(speed, rel=0.051)
        assert found[:-1].tolist() == [1.0] * 3


def test_too_few_steps_change_nothing() -> None:
    calibrator = Calibrator(first=TRUE)
    states = run(calibrator, 1, speeds=[1.0, 0.2])
    assert calibrator.cost(states[-1]) == TRUE
    with pytest.raises(ValueError, match="no ranks"):
        calibrator.speeds(states[-1])


def test_a_state_is_the_same_after_json() -> None:
    calibrator = Calibrator(first=TRUE)
    for state in run(calibrator, 4, speeds=[1.0, 0.5]):
        assert State.from_dict(json.loads(json.dumps(state.as_dict()))) == state
    assert state.for_ranks(2) == state
    assert state.for_ranks(3).speeds == ()
