"""Schedules of the learning rate, by their formulas."""

from __future__ import annotations

import math
from typing import get_args, get_type_hints

import pytest

from bytescale.config.schema import OptimizerConfig
from bytescale.train.loop.step import learning_rate

WARMUP, STEPS = 10, 110
EXPECTED = {
    "cosine": {35: 0.1 + 0.9 * (1 + math.cos(math.pi / 4)) / 2, 60: 0.55, STEPS: 0.1},
    "linear": {35: 0.1 + 0.9 * 0.75, 60: 0.55, STEPS: 0.1},
    "constant": {35: 1.0, 60: 1.0, STEPS: 1.0},
    "wsd": {35: 1.0, 85: 1.0, 90: 1.0, 100: 0.55, STEPS: 0.1},
    "inverse-sqrt": {40: 0.5, 90: 1 / 3, 10_000: 0.1},
}


@pytest.mark.parametrize("schedule", get_args(get_type_hints(OptimizerConfig)["schedule"]))
def test_a_schedule_warms_up_and_then_follows_its_formula(schedule: str) -> None:
    config = OptimizerConfig(lr=2.0, warmup_steps=WARMUP, min_lr_ratio=0.1, schedule=schedule)  # type: ignore[arg-type]
    assert learning_rate(1, STEPS, config) == pytest.approx(0.2)
    assert learning_rate(WARMUP, STEPS, config) == 2.0
    for step, share in EXPECTED[schedule].items():
        assert learning_rate(step, STEPS, config) == pytest.approx(2.0 * share), step


def test_without_warm_up_the_first_step_is_on_the_schedule() -> None:
    for schedule in EXPECTED:
        config = OptimizerConfig(lr=1.0, warmup_steps=0, schedule=schedule)  # type: ignore[arg-type]
        assert 0.9 < learning_rate(1, 1000, config) <= 1.0
