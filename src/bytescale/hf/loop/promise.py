"""``hdp.plan(batch, last=True)``: the caller promises that ``step()`` follows, and gradients are reduced meanwhile.

It cannot be inferred: a rank without micro-batches does not see whether the others train or only look at a batch, and a
batch that came later would send ring messages behind reductions, which might never end (``plan.last_message``). With
the promise,

* a rank whose last micro-batch has no shared documents reduces during its backward, layer by layer;
* every other rank, including one without micro-batches, posts its reductions when its loop over the batch ends;
* nothing else may use the gradients until ``step()``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from bytescale.common.errors import ConfigError, RankFailure
from bytescale.plan.last_message import last_backward_is_silent

if TYPE_CHECKING:
    from bytescale.hf.loop.hdp import HDP
    from bytescale.hf.loop.planned_batch import PlannedBatch
    from bytescale.hf.model.decoder import AttachedDecoder
    from bytescale.hf.model.passes import MicroBatchPass


def layers_of(decoder: AttachedDecoder) -> dict[str, Any]:
    """What ``take_over`` is told of the layers, in whose order gradients are complete; nothing if none has a number."""
    try:
        return {"chunk": (decoder.model, decoder.layers), "late": decoder.late_parameters()}
    except ConfigError:
        return {}


class Promise:
    """Whether a batch has been planned as the last one before ``step()``, and how far its loop is."""

    def __init__(self, hdp: HDP) -> None:
        self._hdp = hdp
        self._batch: PlannedBatch | None = None
        self._reduces = False

    def require_none(self, what: str) -> None:
        """Raise ``ConfigError`` if ``what`` would come between the last batch's loop and ``step()``."""
        if self._reduces:
            raise ConfigError(
                f"{what} after the loop over a batch that was planned with last=True",
                so="ranks have begun to reduce gradients, and would wait for each other",
                fix="call hdp.step() first, or plan this batch without last=True",
            )

    def make(self, batch: PlannedBatch) -> None:
        """Take the promise for ``batch``. Raises ``ConfigError`` where gradients cannot be reduced layer by layer."""
        if not self._hdp.sharded().overlaps:
            raise ConfigError(
                "last=True, but the gradients of this model cannot be reduced layer by layer: its attention is not in "
                "numbered layers, or its trained parameters have several dtypes",
                so="nothing could overlap",
                fix="leave last=True out",
            )
        self._batch = batch

    def before(self, batch: PlannedBatch, index: int) -> None:
        """A micro-batch of a loop is about to be handed out."""
        if batch is not self._batch or index + 1 < len(batch):
            return
        _require_backwards(self._hdp.handed_out.passes())
        self._hdp.sharded().expect_last_backward(last_backward_is_silent(batch.rank_plan))

    def end(self, batch: PlannedBatch) -> None:
        """The loop over a batch has ended: post what has not been posted."""
        if batch is not self._batch:
            return
        passes = self._hdp.handed_out.passes(batch.number)
        _require_backwards(passes)
        if any(not target.trained for target in passes):
            raise RankFailure(
                f"{passes[-1].name}: the loop over a batch that was planned with last=True ended without a backward",
                so="the gradient would lack its tokens, and ranks are about to reduce it",
                fix="plan a batch that is only looked at without last=True",
            )
        self._hdp.sharded().after_last_message()
        self._reduces = True

    def kept(self) -> None:
        """``step()`` has come."""
        self._batch, self._reduces = None, False


def _require_backwards(passes: list[MicroBatchPass]) -> None:
    for target in passes:
        if target.backward_is_missing:
            raise RankFailure(
                f"{target.name}: its backward has not run, and gradients of a batch that was planned with last=True "
                "are about to be reduced",
                so="the sum would lack its tokens",
                fix="call backward inside of the loop, on every micro-batch's loss",
            )
