"""What ``make check-verl`` runs on two ranks twice: verl's worker on our engine, on CPUs and on simulated accelerators.

torchrun --nproc-per-node 2 accelerators.py OUT [--simulated]

Both make the same updates, in one pass and in two. The second one compares its losses and gradient norms with the first
one's, and requires that there is no race, early free or mix, and that nothing of ours makes the host wait amid
micro-batches. verl's losses do, where they make metrics, so that one pass has waits of verl and two passes have none.
verl finds the platform "nvidia" then: nothing of verl is replaced.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

SIMULATED = "--simulated" in sys.argv
KINDS, UPDATES, TOLERANCE = ("sft", "ppo", "gspo", "critic"), 3, 2e-4


def train(out: Path, *, one_pass: bool) -> dict[str, list[list[float]]]:
    """By kind, of each update the loss and the norm of the gradient."""
    from check import Worker, make_model, our_engine, rollouts

    folder, found = out / "model", {}
    if dist.get_rank() == 0 and not folder.exists():
        make_model(folder)
    dist.barrier()
    for kind in KINDS:
        made = Worker(folder, kind, dataclasses.replace(our_engine(), one_pass=one_pass))
        found[kind] = [[float(n) for n in made.update(rollouts(dist.get_rank(), step))] for step in range(UPDATES)]
    return found


def compare(found: dict[str, list[list[float]]], wanted: dict[str, list[list[float]]]) -> float:
    """The largest difference of losses and norms."""
    worst = 0.0
    for kind in KINDS:
        for own, other in zip(found[kind], wanted[kind], strict=True):
            worst = max(worst, *(abs(a - b) / max(abs(b), 1e-3) for a, b in zip(own, other, strict=True)))
    assert worst < TOLERANCE, f"updates on simulated accelerators differ by {worst}: {found}, {wanted}"
    return worst


def checked(own: Any, out: Path, rank: int) -> str:
    from tests.accelerator.loops import waits_amid

    lines = []
    for name, one_pass in (("one pass", True), ("two passes", False)):
        waits, micro_batches = len(own.waits), own.num_micro_batches
        worst = compare(train(out, one_pass=one_pass), json.loads((out / f"cpu-{rank}-{one_pass}.json").read_text()))
        assert not own.faults, own.faults[:5]
        amid = waits_amid(own, waits)
        ours = {place: count for place, count in amid.items() if " at site-packages/verl/" not in place}
        assert not ours, ours
        assert one_pass or not amid, amid
        lines.append(
            f"simulated accelerators, {name}: {len(KINDS)} x {UPDATES} updates within {worst:.1e} of those on CPUs, no "
            f"fault, 0 waits of ours and {sum(amid.values())} of verl's losses in "
            f"{own.num_micro_batches - micro_batches} micro-batches"
        )
    return "\n".join(lines)


def planted(out: Path, own: Any) -> str:
    """A loss in one pass that looks at its value makes the host wait in every micro-batch."""
    from check import Worker, our_engine, rollouts
    from tests.accelerator.loops import waits_amid

    from bytescale.integrations.whole_batch import WholeBatch

    run, before = WholeBatch.run, len(own.waits)

    def looking(self: WholeBatch, fields: Any, *, loss: Any = None, **options: Any) -> Any:
        def looked(*given: Any) -> torch.Tensor:
            total: torch.Tensor = loss(*given)
            assert float(total.detach()) < 1e9
            return total

        return run(self, fields, loss=looked if loss else None, **options)

    with mock.patch.object(WholeBatch, "run", looking):
        Worker(out / "model", "sft", our_engine()).update(rollouts(dist.get_rank(), 0))
    found = sum(n for place, n in waits_amid(own, before).items() if " at site-packages/verl/" not in place)
    assert found, "the wait of the planted fault"
    return f"simulated accelerators: a loss that is looked at makes {found} waits, which are found"


def main() -> None:
    out, rank = Path(sys.argv[1]) / "accelerators", int(os.environ["RANK"])
    torch.set_num_threads(1)
    out.mkdir(parents=True, exist_ok=True)
    if not SIMULATED:
        dist.init_process_group("gloo")
        for one_pass in (True, False):
            (out / f"cpu-{rank}-{one_pass}.json").write_text(json.dumps(train(out, one_pass=one_pass)))
        dist.destroy_process_group()
        return
    os.environ["VERL_PLATFORM"] = "nvidia"
    from tests.accelerator.processes import BACKEND, simulated_process

    with simulated_process(rank) as own:
        dist.init_process_group(BACKEND)
        lines = [checked(own, out, rank), planted(out, own)]
        print("\n".join(lines if rank == 0 else []), flush=True)


if __name__ == "__main__":
    main()
