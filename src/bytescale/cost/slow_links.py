"""How many times as slow as the first cost model's the links of a run are, found from how long its passes take.

A host sees no message of a GPU. What it sees, on every device, is when the passes of a step have ended, on average over
the ranks. The cost model says the same of the step's plan for links of any speed: the longer messages take, the more of
them no compute hides. So every step makes each of the ``FACTORS`` more or less probable, by the error that it gives::

    log weight of a factor after a step = FORGET  log weight before  -  log(1 + (error / NOISE)^2 / 2)

The last term, of a Cauchy distribution, lets no single disturbed step decide. Steps without messages to wait for say
nothing. Before any step, the logarithm of the factor is normally distributed.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from bytescale.common.arrays import FloatArray
from bytescale.cost.model import CostModel

FACTORS: FloatArray = np.exp2(np.arange(-20, 21) / 4.0)
"""The factors that are told apart: 32 times as fast to 32 times as slow, each a fifth above the one before."""
EVALUATED: FloatArray = FACTORS[::4]
"""The factors for which a plan is evaluated. Its seconds grow almost linearly between them."""
FORGET = 0.85
NOISE = 0.15
"""Relative error of the seconds by the right costs. With a third of it, right links seemed up to 2.8 times as slow."""
DEVIATION = math.log(3.0)
NEAR = 3
"""Factors on each side of the largest that count. All are as probable as it is where compute hides all messages: then
the first cost model's links are kept."""


def with_slow_links(cost: CostModel, factor: float) -> CostModel:
    """The costs where each byte takes ``factor`` times as long."""
    return replace(
        cost,
        intra_node_bytes_per_second=cost.intra_node_bytes_per_second / factor,
        inter_node_bytes_per_second=cost.inter_node_bytes_per_second / factor,
    )


def after_step(weights: tuple[float, ...], seconds_at: Callable[[float], float], seconds: float) -> tuple[float, ...]:
    """The log weights ``[FACTORS]`` after a step whose passes took ``seconds``; empty weights: nothing is known.

    Args:
        seconds_at: gives those of the step's plan if links are so many times as slow as the first cost model's.
    """
    shortest, longest = seconds_at(float(EVALUATED[0])), seconds_at(float(EVALUATED[-1]))
    if longest <= shortest * (1 + NOISE):  # links make no difference
        return weights
    seconds_of = [shortest, *map(seconds_at, EVALUATED[1:-1].tolist()), longest]
    error = np.log(np.interp(FACTORS, EVALUATED, seconds_of) / seconds) / NOISE
    after: FloatArray = FORGET * np.array(weights or [0.0] * len(FACTORS)) - np.log1p(error**2 / 2)
    return tuple((after - after.max()).tolist())


def most_probable(weights: tuple[float, ...]) -> float:
    """The most probable factor: the mean of the logarithms near the largest weight. Without any weight, 1."""
    if not weights:
        return 1.0
    logs = np.log(FACTORS)
    posterior = np.array(weights) - (logs / DEVIATION) ** 2 / 2
    near = slice(max(0, int(posterior.argmax()) - NEAR), int(posterior.argmax()) + NEAR + 1)
    probable = np.exp(posterior[near])
    return math.exp(float(probable @ logs[near] / probable.sum()))
