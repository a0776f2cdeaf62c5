"""Documents with images on simulated accelerators: encoders, and the exchange of what they made."""

from __future__ import annotations

import copy
from collections import Counter
from typing import Any

import pytest
from torch import Tensor

from bytescale import HDP
from bytescale.attention.kernels import CudaFlashKernel
from bytescale.parity.compare import WideCasts
from tests.accelerator.device import Machine
from tests.accelerator.groups import Communicator, run_machines
from tests.accelerator.loops import MICRO_BATCH, waits_amid
from tests.hf.test_images import alone, batch_of, model_of


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("family", "num_ranks", "options"),
    [
        ("llava", 2, {}),
        ("qwen2_5_vl", 2, {"shard": "parameters", "domain": 2}),
        ("qwen2_5_vl", 4, {"tp": 2}),
        ("llava", 2, {"tp": 2, "checkpointing": "full"}),
    ],
)
def test_documents_with_images_are_clean(family: str, num_ranks: int, options: dict[str, Any]) -> None:
    """In a micro-batch the host waits twice, where transformers counts placeholders and rows."""
    model, batch = model_of(family), batch_of(family)
    total = sum(len(document["tokens"]) - 1 for document in batch)

    def one_rank(own: Machine, group: Communicator) -> tuple[float, dict[str, Tensor], int, Counter[str]]:
        ours = copy.deepcopy(model).to(own.device)
        room = 50 if num_ranks > options.get("tp", 1) else 400
        hdp = HDP(ours, group, capacity_tokens=room, kernel="math", **options)
        hdp.engine._kernel = lambda dtype: CudaFlashKernel()  # type: ignore[method-assign, assignment]
        hdp.adamw(lr=0.0)
        with WideCasts():
            for _ in range(2):
                before, parts = len(own.waits), []
                for micro in hdp.plan(batch):
                    with own.part(MICRO_BATCH):
                        share = micro.loss_sum(ours) / total
                        share.backward()
                        parts.append(share.detach())
                gradients = {name: value.cpu() for name, value in hdp.gradients().items()}
                waits = waits_amid(own, before)
                hdp.zero_grad()
        return sum(map(float, parts)), gradients, len(parts), waits

    results, machines = run_machines(num_ranks, one_rank)
    with WideCasts():
        loss, gradients = alone(model, batch)
    assert abs(sum(own for own, *_ in results) - loss) < 1e-10
    assert all(float((results[0][1][name] - value).abs().max()) < 1e-10 for name, value in gradients.items())
    assert not [fault for own in machines for fault in own.faults]
    for *_, count, waits in results:
        assert sum(waits.values()) == 2 * count or ("tp" in options and not waits), waits  # some have no rows of images
