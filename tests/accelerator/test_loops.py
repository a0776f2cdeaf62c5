"""``HDP`` on simulated accelerators: no race, early free, mix or wait amid micro-batches, and the right numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from bytescale.parity.compare import Document
from tests.accelerator.loops import Outcome, loss_by_logprobs, loss_by_sum, run_loop
from tests.helpers.effort import one_of
from tests.hf.support import documents, small_model

EXACT = 1e-10
LENGTHS = [37, 11, 2, 24]
ROOM = 25
"""The capacity of a rank: the longest document is shared by two."""
WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "log-probabilities": {"loss": loss_by_logprobs},
    "reduced while ranks compute": {"last": True},
    "recomputed": {"checkpointing": "full"},
    "attention kept": {"checkpointing": "attention"},
    "optimizer on the host": {"on_host": True},
    "sharded": {"shard": "parameters", "domain": 2},
    "sharded and recomputed": {"shard": "parameters", "domain": 2, "checkpointing": "full"},
    "sharded, optimizer on the host": {"shard": "parameters", "domain": 2, "on_host": True},
    "products of attention": {"kernel": "math"},
}
QUICK = (2, "reduced while ranks compute")
FAMILIES = (*("gemma2", "gpt_oss", "deepseek_v3", "deepseek_v32", "qwen3_next", "falcon_h1", "lfm2"),)
"""Soft caps, absolute positions, experts, sinks, latent and chosen keys, recurrent layers of all kinds."""
PREFIXES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3_next": {},
    "deepseek_v32": {},
    "falcon_h1": {"checkpointing": "full"},
}


def require_clean(outcome: Outcome, waits: float = 0.0) -> None:
    """``waits``: of the host, in a micro-batch of a rank."""
    assert not outcome.faults, outcome.faults[:5]
    assert outcome.waits_per_micro_batch == waits, outcome.waits
    assert outcome.worst < EXACT


def tree() -> list[Document]:
    """Three documents with a common beginning, and another one."""
    made: list[Document] = documents([30, 28, 33, 12])
    common = torch.arange(18) % 60 + 2
    for own in made[:3]:
        own["tokens"] = torch.cat([common, own["tokens"][18:]])
    return made


@pytest.mark.parametrize(
    ("num_ranks", "way"),
    one_of([*((2, way) for way in WAYS), (1, "plain"), (3, "reduced while ranks compute")], QUICK),
)
def test_a_loop_is_clean(num_ranks: int, way: str) -> None:
    options = {"capacity_tokens": ROOM if num_ranks > 1 else sum(LENGTHS), **WAYS[way]}
    require_clean(run_loop(small_model("llama"), documents(LENGTHS), num_ranks, **options))


@pytest.mark.parametrize("family", [pytest.param(family, marks=pytest.mark.exhaustive) for family in FAMILIES])
def test_families_are_clean(family: str) -> None:
    require_clean(run_loop(small_model(family), documents(LENGTHS), 2, capacity_tokens=ROOM))


@pytest.mark.exhaustive
def test_gpt2_of_transformers_looks_for_padding() -> None:
    """In every forward: a wait for an index that is a list, and one for what it finds."""
    require_clean(run_loop(small_model("gpt2"), documents(LENGTHS), 2, capacity_tokens=ROOM), waits=2)


@pytest.mark.exhaustive
@pytest.mark.parametrize(("family", "way"), [("mixtral", "recomputed"), ("deepseek_v3", "plain")])
def test_experts_in_parallel_wait_once_a_layer(family: str, way: str) -> None:
    """For the numbers of rows that travel (``runtime.experts``); a recomputation learns them again."""
    model = small_model(family)
    options = {"shard": "parameters", "domain": 2, "experts": "parallel", "capacity_tokens": 60, **WAYS[way]}
    num_mixtures = sum(name.endswith(".experts") for name, _ in model.named_modules())
    times = 2 if way == "recomputed" else 1
    require_clean(run_loop(model, documents(LENGTHS), 2, **options), waits=times * num_mixtures)


@pytest.mark.exhaustive
@pytest.mark.parametrize(("family", "num_ranks"), [("llama", 4), ("qwen3_next", 2), ("mixtral", 2)])
def test_tensor_parallelism_is_clean(family: str, num_ranks: int) -> None:
    options = {"tp": 2, "capacity_tokens": ROOM if num_ranks > 2 else sum(LENGTHS)}
    require_clean(run_loop(small_model(family), documents(LENGTHS), num_ranks, **options))


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("checkpointing", "loss", "longest"), [("none", loss_by_sum, 37), ("full", loss_by_logprobs, 25)]
)
def test_offloaded_activations_are_clean(checkpointing: str, loss: Callable[..., Tensor], longest: int) -> None:
    """Documents of more tokens than fit on the ranks. With recomputation there is less to send."""
    options = {"capacity_tokens": 12, "host_gib": 0.25, "checkpointing": checkpointing, "loss": loss}
    model = small_model("qwen3", num_hidden_layers=5)
    require_clean(run_loop(model, documents([longest, 11, 2]), 2, **options))


@pytest.mark.exhaustive
@pytest.mark.parametrize("family", list(PREFIXES))
def test_shared_prefixes_are_clean(family: str) -> None:
    options = {"capacity_tokens": ROOM, "share_prefixes": True, **PREFIXES[family]}
    require_clean(run_loop(small_model(family), tree(), 2, **options))


STAGES: list[tuple[str, int, dict[str, Any]]] = [
    ("llama", 4, {"pp": 2}),
    ("llama", 4, {"pp": 2, "last": True, "loss": loss_by_logprobs}),
    ("gemma2", 4, {"pp": 2, "checkpointing": "full"}),
    ("qwen3_next", 4, {"pp": 2}),
    ("mixtral", 4, {"pp": 2, "tp": 2}),
    ("llama", 4, {"pp": 2, "share_prefixes": True}),
]
"""Gemma's head is its embedding, on two stages."""


@pytest.mark.exhaustive
@pytest.mark.parametrize(("family", "num_ranks", "options"), STAGES)
def test_loops_on_stages_are_clean(family: str, num_ranks: int, options: dict[str, Any]) -> None:
    """A loop's body as a function, on stages of a pipeline of two, and on tensor-parallel ranks of them."""
    room = ROOM if num_ranks > options["pp"] * options.get("tp", 1) else sum(LENGTHS)
    batch = tree() if options.get("share_prefixes") else documents(LENGTHS)
    layers = {} if family == "qwen3_next" else {"num_hidden_layers": 4}
    require_clean(run_loop(small_model(family, **layers), batch, num_ranks, capacity_tokens=room, **options))
