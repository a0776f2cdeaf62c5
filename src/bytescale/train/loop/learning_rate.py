"""The learning rate of a step."""

from __future__ import annotations

import math

from bytescale.config import OptimizerConfig


def learning_rate(step: int, total_steps: int, config: OptimizerConfig) -> float:
    """Linear warm-up to ``lr`` over ``warmup_steps``, then a cosine down to ``lr * min_lr_ratio`` at the last step.

    ``step`` counts from 1; the first step already trains (at ``lr / warmup_steps``).
    """
    if step <= config.warmup_steps:
        return config.lr * step / config.warmup_steps
    progress = (step - config.warmup_steps) / max(1, total_steps - config.warmup_steps)
    cosine = 0.5 * (1.0 + math.cos(math.pi * min(progress, 1.0)))
    return config.lr * (config.min_lr_ratio + (1.0 - config.min_lr_ratio) * cosine)
