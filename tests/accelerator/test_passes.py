"""Passes without backward on simulated accelerators: scores, and prefill with the caches that it leaves.

No race, early free or mix, no wait from the first micro-batch to the last one, and transformers' own numbers.
"""

from __future__ import annotations

import copy
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor

from bytescale import HDP, score
from bytescale.attention.kernels import CudaFlashKernel
from bytescale.hf.model.head import cache_name
from bytescale.hf.model.selectors import LowestFirst
from bytescale.parity.compare import WideCasts
from tests.accelerator.device import Machine
from tests.accelerator.groups import Communicator, run_machines
from tests.accelerator.loops import micro_batches_are_parts, waits_amid
from tests.hf import test_images as images
from tests.hf.support import documents, small_model

EXACT = 1e-10
LENGTHS = [37, 11, 2, 24]


def attached(own: Machine, group: Communicator, model: Any, **options: Any) -> HDP:
    ours = copy.deepcopy(model).to(own.device)
    if ours._can_set_experts_implementation():  # their loops in Python wait for the device
        ours.set_experts_implementation("grouped_mm")
    hdp = HDP(ours, group, kernel="math", forward_only=True, **options)
    hdp.engine._kernel = lambda dtype: CudaFlashKernel()  # type: ignore[method-assign, assignment]
    return hdp


def require_clean(machines: list[Machine], waits: list[Counter[str]], amid: int = 0) -> None:
    assert not [fault for own in machines for fault in own.faults]
    for own, found in zip(machines, waits, strict=True):
        assert sum(found.values()) <= amid * own.num_micro_batches, found


def logprobs_of(logits: Tensor, tokens: Tensor) -> Tensor:
    return logits[:-1].log_softmax(-1).gather(-1, tokens[1:, None])[:, 0]


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("family", "num_ranks", "options"),
    [
        ("llama", 3, {}),
        ("mixtral", 2, {}),
        ("qwen3_next", 2, {}),
        ("llama", 4, {"tp": 2}),
        ("llama", 4, {"pp": 2}),
        ("llama", 2, {"shard": "parameters", "domain": 2}),
    ],
)
def test_scores_are_clean(family: str, num_ranks: int, options: dict[str, Any]) -> None:
    """``bytescale.score``, whose documents share a prefix."""
    model, batch = small_model(family), documents(LENGTHS)
    batch[3]["tokens"][:20] = batch[0]["tokens"][:20]

    def one_rank(own: Machine, group: Communicator) -> tuple[list[Tensor], Counter[str]]:
        hdp = attached(own, group, model, capacity_tokens=25, **options)
        with WideCasts():
            found = [scores.cpu() for scores in score(hdp, batch)]
        return found, waits_amid(own)

    with micro_batches_are_parts():
        results, machines = run_machines(num_ranks, one_rank)
    require_clean(machines, [waits for _, waits in results])
    with WideCasts(), torch.no_grad():
        wanted = [logprobs_of(model(input_ids=d["tokens"][None]).logits[0], d["tokens"]) for d in batch]
    for found, _ in results:
        assert all(float((own[:-1] - other).abs().max()) < EXACT for own, other in zip(found, wanted, strict=True))


@pytest.mark.exhaustive
@pytest.mark.parametrize("tp", [1, 2])
def test_scores_of_images_are_clean(tp: int) -> None:
    """Twice in a micro-batch the host waits for transformers, which counts placeholders and rows."""
    model, batch = images.model_of("qwen2_5_vl"), images.batch_of("qwen2_5_vl")

    def one_rank(own: Machine, group: Communicator) -> tuple[float, Counter[str]]:
        hdp = attached(own, group, model, capacity_tokens=50, tp=tp)
        with WideCasts():
            total = sum(float(scores.sum()) for scores in score(hdp, batch))
        return total, waits_amid(own)

    with micro_batches_are_parts():
        results, machines = run_machines(2 * tp, one_rank)
    require_clean(machines, [waits for _, waits in results], amid=2)
    with WideCasts():
        loss, _ = images.alone(model, batch)
    for total, _ in results:
        assert -total / sum(len(d["tokens"]) - 1 for d in batch) == pytest.approx(loss, rel=EXACT)


@pytest.mark.exhaustive
@pytest.mark.parametrize("family", ["qwen3", "deepseek_v3", "deepseek_v32", "qwen3_next", "falcon_h1"])
def test_prefill_is_clean(family: str) -> None:
    """Logits of next tokens, and caches that travel; from the caches, the next logits are those of transformers."""
    model = small_model(family).eval()
    prompts = [d["tokens"] for d in documents(LENGTHS)]

    def one_rank(own: Machine, group: Communicator) -> tuple[Tensor, dict[int, Tensor], Counter[str]]:
        hdp = attached(own, group, model, capacity_tokens=25)
        with WideCasts(), LowestFirst():
            filled = hdp.prefill(prompts)
            waits, after = waits_amid(own), {}
            for number in range(len(prompts)):
                given = filled.inputs(number, number % 2)
                if given is not None:
                    name = cache_name(hdp.model)
                    tokens = given["input_ids"][:, -1:]
                    with torch.no_grad():
                        after[number] = hdp.model(input_ids=tokens, **{name: given[name]}).logits[0, -1].cpu()
            return filled.next_logits().cpu(), after, waits

    with micro_batches_are_parts():
        results, machines = run_machines(2, one_rank)
    require_clean(machines, [waits for *_, waits in results])
    with WideCasts(), LowestFirst(), torch.no_grad():
        for number, prompt in enumerate(prompts):
            logits = model(input_ids=prompt[None]).logits[0, -1]
            longer = torch.cat([prompt, logits.argmax()[None]])
            wanted = model(input_ids=longer[None]).logits[0, -1]
            assert float((results[0][0][number] - logits).abs().max()) < EXACT
            assert float((results[number % 2][1][number] - wanted).abs().max()) < EXACT
