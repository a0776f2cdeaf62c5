"""Experts and keys that are recorded and played back on simulated accelerators."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from bytescale import HDP
from bytescale.attention.kernels import CudaFlashKernel
from bytescale.hf.loop.micro_batch import Micro
from bytescale.hf.model.selectors import LowestFirst
from bytescale.parity.compare import WideCasts
from tests.accelerator.device import Machine
from tests.accelerator.groups import Communicator, run_machines
from tests.accelerator.loops import MICRO_BATCH, waits_amid
from tests.hf import test_chosen_keys as keys
from tests.hf import test_routes as routes
from tests.hf.support import documents

LENGTHS = [37, 11, 2, 24]
EXACT = 1e-10


@dataclass(frozen=True, kw_only=True)
class Choice:
    """A kind of choice: of experts, or of keys."""

    field: str
    model: Callable[[str], nn.Module]
    given: Callable[[Any, list[dict[str, Any]]], list[dict[str, Any]]]
    """The documents with random choices."""
    alone: Callable[[str, Any, list[dict[str, Any]]], tuple[list[Tensor], dict[str, Tensor]]]
    """Log-probabilities and gradients with them, in plain transformers."""
    play: Callable[[Micro], object]
    record: Callable[[Micro], object]
    recorded: Callable[[Micro], Tensor]


CHOICES = {
    "experts": Choice(
        field="routed",
        model=routes.model_of,
        given=routes.with_routes,
        alone=routes.alone,
        play=lambda micro: micro.replay("routed"),
        record=lambda micro: micro.record_routes(),
        recorded=lambda micro: micro.routes(),
    ),
    "keys": Choice(
        field="chosen",
        model=keys.choosing,
        given=keys.with_choices,
        alone=lambda name, model, batch: keys.alone(model, batch),
        play=lambda micro: micro.replay_chosen_keys("chosen"),
        record=lambda micro: micro.record_chosen_keys(),
        recorded=lambda micro: micro.chosen_keys(),
    ),
}


@pytest.mark.exhaustive
@pytest.mark.parametrize("options", [{}, {"checkpointing": "full"}], ids=["plain", "recomputed"])
@pytest.mark.parametrize(
    ("kind", "family"),
    [("experts", "mixtral"), ("experts", "deepseek_v3"), ("keys", "glm_moe_dsa"), ("keys", "deepseek_v32")],
)
def test_choices_are_played_back_and_recorded_clean(kind: str, family: str, options: dict[str, Any]) -> None:
    """No race, early free or mix, no wait amid micro-batches, and what is recorded is what was played."""
    choice = CHOICES[kind]
    model = choice.model(family)
    batch = choice.given(model, documents(LENGTHS))
    total = sum(float(own["weights"].sum()) for own in batch)

    def one_rank(
        own: Machine, group: Communicator
    ) -> tuple[list[Tensor], dict[str, Tensor], list[Tensor], Counter[str]]:
        ours: Any = copy.deepcopy(model).to(own.device)
        if ours._can_set_experts_implementation():  # their loops in Python wait for the device
            ours.set_experts_implementation("grouped_mm")
        hdp = HDP(ours, group, capacity_tokens=25, kernel="math", **options)
        hdp.engine._kernel = lambda dtype: CudaFlashKernel()  # type: ignore[method-assign, assignment]
        hdp.adamw(lr=0.0)
        with WideCasts():
            for _ in range(2):  # the first finds out what stays
                before = len(own.waits)
                for micro in hdp.plan(batch):
                    with own.part(MICRO_BATCH):
                        choice.play(micro)
                        logprobs = micro.logprobs(ours)
                        (-(micro.weights * logprobs).sum() / total).backward()
                        hdp.collect(micro, logprobs)
                collected, gradients = [own.cpu() for own in hdp.collected()], hdp.gradients()
                gradients = {name: value.cpu() for name, value in gradients.items()}
                hdp.zero_grad()
            with torch.no_grad():
                for micro in hdp.plan(batch):
                    with own.part(MICRO_BATCH):
                        choice.play(micro)
                        choice.record(micro)
                        micro.logprobs(ours)
                        found = choice.recorded(micro)
                    hdp.collect(micro, found)
        waits = waits_amid(own, before)
        return collected, gradients, [own.cpu() for own in hdp.collected()], waits

    results, machines = run_machines(2, one_rank)
    with WideCasts(), LowestFirst():
        logprobs, gradients = choice.alone(family, model, batch)
    for own, found, recorded, waits in results:
        assert all(float((a - b).abs().max()) < EXACT for a, b in zip(own, logprobs, strict=True))
        assert all(float((found[name] - value).abs().max()) < EXACT for name, value in gradients.items())
        for document, again in zip(batch, recorded, strict=True):
            known = document[choice.field].flatten(1).amax(1) >= 0
            assert torch.equal(*(one[known].sort(-1).values.long() for one in (again, document[choice.field])))
        assert not waits, waits
    assert not [fault for own in machines for fault in own.faults]
