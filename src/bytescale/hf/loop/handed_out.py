"""The micro-batches that a loop was given since the last update, and whether it has run all of them."""

from __future__ import annotations

from dataclasses import dataclass, field

from bytescale.common.errors import RankFailure
from bytescale.hf.model.passes import MicroBatchPass

_ALL = (
    "call model(**micro.inputs) and backward on every micro-batch of hdp.plan(batch), and score under torch.no_grad()"
)


@dataclass
class HandedOut:
    """Passes by batch and micro-batch. A loop may look at a batch first, and run it in a second one."""

    _batches: dict[int, tuple[int, dict[int, list[MicroBatchPass]]]] = field(default_factory=dict)

    _last_number: int = 0

    def new_number(self) -> int:
        """Return a number that identifies a new batch."""
        self._last_number += 1
        return self._last_number

    def begin(self, batch: int, num_passes: int) -> None:
        """A loop over a batch of ``num_passes`` micro-batches begins."""
        self._batches.setdefault(batch, (num_passes, {}))

    def add(self, batch: int, index: int, target: MicroBatchPass) -> None:
        """A micro-batch is handed out."""
        self._batches[batch][1].setdefault(index, []).append(target)

    def passes(self, batch: int | None = None) -> list[MicroBatchPass]:
        """All of a batch, or of all batches since the last update."""
        chosen = self._batches.values() if batch is None else [self._batches[batch]]
        return [target for _, held in chosen for own in held.values() for target in own]

    def finish(self) -> None:
        """An update is due: forget all. Raises ``RankFailure`` if gradients would lack tokens."""
        batches, self._batches = self._batches, {}
        trained = False
        for num_passes, held in batches.values():
            _require_backwards(held)
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


def _require_backwards(held: dict[int, list[MicroBatchPass]]) -> None:
    for passes in held.values():
        for target in passes:
            if target.backward_is_missing:
                raise RankFailure(
                    f"{target.name}: its backward has not run before step()",
                    so="the gradient would lack its tokens",
                    fix="call backward on every micro-batch's loss, and run scoring under torch.no_grad()",
                )


def _not_run(target: MicroBatchPass) -> RankFailure:
    if target.bypassed:
        return RankFailure(
            f"{target.name}: the model ran without micro.inputs, and attention of the plan was called zero times",
            so="its documents saw each other, and ranks that share them would wait",
            fix="call model(**micro.inputs) with all that is in it, hdp_attention included",
        )
    return RankFailure(f"{target.name} was not run by the model", so="the gradient would lack its tokens", fix=_ALL)
