"""The lowest loss of a run's evaluations: which checkpoint is kept for it, and when there is no hope of a lower one."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from bytescale.config import EvalConfig


@dataclass(frozen=True, kw_only=True)
class BestEvaluation:
    """The evaluations so far. All ranks have the same one, and checkpoints keep it."""

    settings: EvalConfig
    step: int = 0
    loss: float = math.inf
    num_worse: int = 0
    """Evaluations after it, none of which had a lower loss."""

    @staticmethod
    def of(settings: EvalConfig, stored: dict[str, float]) -> BestEvaluation:
        """Go on from what ``as_dict`` has stored, or begin if that is empty."""
        if not stored:
            return BestEvaluation(settings=settings)
        step, num_worse = int(stored["step"]), int(stored["num_worse"])
        return BestEvaluation(settings=settings, step=step, loss=stored["loss"], num_worse=num_worse)

    def as_dict(self) -> dict[str, float]:
        """For a checkpoint. ``kept``: whether the best one's checkpoint is to be kept; 0 or 1."""
        if not self.step:
            return {}
        kept = int(self.settings.keep_best)
        return {"step": self.step, "loss": self.loss, "num_worse": self.num_worse, "kept": kept}

    def after(self, step: int, loss: float) -> BestEvaluation:
        """With one more evaluation. A loss that is no number is not the lowest one."""
        if loss < self.loss:
            return replace(self, step=step, loss=loss, num_worse=0)
        return replace(self, num_worse=self.num_worse + 1)

    def is_saved_at(self, step: int) -> bool:
        """Whether the checkpoint after this step is to be kept for its loss."""
        return self.settings.keep_best and self.step == step

    @property
    def is_final(self) -> bool:
        """Whether the run ends, because the loss has not become lower for long enough."""
        return 0 < self.settings.patience <= self.num_worse

    def why_final(self) -> str:
        """A line for people."""
        return (
            f"stop    {self.num_worse} evaluations in a row had no lower loss than {self.loss:.4f}, that of step "
            f"{self.step} (eval.patience = {self.settings.patience})"
        )
