"""The micro-batches that a loop was given since the last update, and whether it has run all of them."""

from __future__ import annotations

import itertools

from bytescale.common.errors import RankFailure
from bytescale.hf.model.passes import MicroBatchPass

_LACKS = "the gradient would lack its tokens"
_ALL = (
    "call model(**micro.inputs) and backward on every micro-batch of hdp.plan(batch), and score under torch.no_grad()"
)


class HandedOut:
    """Passes by batch and micro-batch. A loop may look at a batch first, and run it in a second one."""

    def __init__(self) -> None:
        self.numbers = itertools.count()
        self._batches: dict[int, tuple[int, dict[int, list[MicroBatchPass]]]] = {}

    def begin(self, batch: int, num_passes: int) -> None:
        """A loop over the batch of this number and of ``num_passes`` micro-batches begins."""
        self._batches.setdefault(batch, (num_passes, {}))

    def add(self, batch: int, index: int, target: MicroBatchPass) -> None:
        """A micro-batch is handed out."""
        self._batches[batch][1].setdefault(index, []).append(target)

    def require_backwards(self, before: str) -> None:
        """Raise ``RankFailure`` if a backward has not run ``before`` something."""
        for _, held in self._batches.values():
            for target in itertools.chain.from_iterable(held.values()):
                if target.backward_is_missing:
                    raise RankFailure(
                        f"{target.name}: its backward has not run before {before}",
                        so=_LACKS,
                        fix="call backward on every micro-batch's loss, inside of the loop over a batch that was "
                        "planned with last=True, and run scoring under torch.no_grad()",
                    )

    def require_trained(self, batch: int) -> None:
        """Raise ``RankFailure`` if a pass of a batch that was planned with last=True ran without gradients."""
        for target in itertools.chain.from_iterable(self._batches[batch][1].values()):
            if not target.trained:
                raise RankFailure(
                    f"{target.name}: the loop over a batch that was planned with last=True ended without a backward",
                    so=f"{_LACKS}, and ranks are about to reduce it",
                    fix="plan a batch that is only looked at without last=True",
                )

    def finish(self) -> None:
        """An update is due: forget all. Raises ``RankFailure`` if gradients would lack tokens."""
        self.require_backwards("step()")
        batches, self._batches = self._batches, {}
        trained = False
        for num_passes, held in batches.values():
            ran = {index for index, passes in held.items() if any(target.trained for target in passes)}
            trained |= bool(ran)
            for index, passes in held.items():
                if index not in ran and (ran or any(target.bypassed for target in passes)):
                    raise _not_run(passes[-1])
            if ran and len(ran) < num_passes:
                raise RankFailure(
                    f"the loop over a batch ended after {len(ran)} of its {num_passes} micro-batches",
                    so="the gradient would lack the tokens of the others",
                    fix=_ALL,
                )
        lost = [passes[-1] for _, held in batches.values() for passes in held.values()]
        if lost and not trained:
            raise _not_run(lost[0])


def _not_run(target: MicroBatchPass) -> RankFailure:
    if target.bypassed:
        return RankFailure(
            f"{target.name}: the model ran without micro.inputs, and attention of the plan was called zero times",
            so="its documents saw each other, and ranks that share them would wait",
            fix="call model(**micro.inputs) with all that is in it, hdp_attention included",
        )
    return RankFailure(f"{target.name} was not run by the model", so=_LACKS, fix=_ALL)
