"""The learning rate of a step."""

from __future__ import annotations

import math

from bytescale.config import OptimizerConfig


def learning_rate(step: int, total_steps: int, config: OptimizerConfig) -> float:
    """Linear warm-up to ``lr`` over ``warmup_steps``, then what ``schedule`` says, at least ``lr * min_lr_ratio``.

    ``step`` counts from 1; the first step already trains (at ``lr / warmup_steps``). P is the share of the steps after
    warm-up that are done, and the rate falls from ``lr`` at P = 0 to the floor at P = 1:

    - cosine: by ``(1 + cos(pi P)) / 2``
    - linear: by ``1 - P``
    - constant: not at all
    - wsd (warm-up, stable, decay): linearly over the last ``decay_share``
    - inverse-sqrt: as ``sqrt(warmup_steps / step)``, whatever the number of steps; it stops at the floor
    """
    if step <= config.warmup_steps:
        return config.lr * step / config.warmup_steps
    if config.schedule == "inverse-sqrt":
        return config.lr * max(config.min_lr_ratio, math.sqrt(max(1, config.warmup_steps) / step))
    done = min(1.0, (step - config.warmup_steps) / max(1, total_steps - config.warmup_steps))
    above_floor = {
        "cosine": 0.5 * (1.0 + math.cos(math.pi * done)),
        "linear": 1.0 - done,
        "constant": 1.0,
        "wsd": min(1.0, (1.0 - done) / config.decay_share),
    }[config.schedule]
    return config.lr * (config.min_lr_ratio + (1.0 - config.min_lr_ratio) * above_floor)
