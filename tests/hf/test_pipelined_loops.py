"""``HDP(model, pp=...)``: the loop's body as a function, on stages of a pipeline, gives the numbers of one process."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from bytescale.common.errors import ConfigError
from bytescale.parity.compare import Setup, WideCasts, compare, difference, plain_step, planned_step, random_documents
from bytescale.parity.families import FAMILIES
from bytescale.runtime.optimizer import take_over
from bytescale.runtime.pipeline import StageLinks
from bytescale.runtime.tied import TiedHead
from tests.helpers.effort import one_in

from .support import documents, on_ranks, plain_update, small_model
from .test_tp_loops import LENGTHS, NAMES, TOLERANCE, assert_same_weights, trained

MESHES = [(4, 1, 2), (4, 2, 2), (2, 1, 2), (6, 1, 3), (8, 2, 2)]
"""Ranks, tensor-parallel ranks and stages among them."""


@pytest.mark.parametrize(
    ("name", "mesh", "seed"),
    one_in(29, [(name, mesh, seed) for seed in range(3) for mesh in MESHES for name in NAMES]),
)
def test_any_plan_gives_the_numbers_of_one_process(name: str, mesh: tuple[int, int, int], seed: int) -> None:
    """Loss, every gradient, and log-probabilities that ``hdp.collected`` gives back, under random plans."""
    ranks, tp, pp = mesh
    setup = Setup(num_ranks=ranks, tp=tp, pp=pp, lengths=tuple(LENGTHS), seed=seed)
    assert compare(small_model(name, num_hidden_layers=4), setup).worst <= TOLERANCE


def test_ranks_without_documents_take_part() -> None:
    setup = Setup(num_ranks=6, pp=2, lengths=(5,), planner="adaptive")
    assert compare(small_model("llama", tie_word_embeddings=True), setup).worst <= TOLERANCE


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_a_model_type_gives_the_numbers_of_one_process_or_is_refused(name: str) -> None:
    try:
        assert compare(small_model(name, **FAMILIES[name]), Setup(num_ranks=4, pp=2, seed=1)).worst <= TOLERANCE
    except ConfigError as error:
        if not re.search(r"ipeline|cannot be attached", str(error)):
            raise


CHAINS: list[list[tuple[int, dict[str, Any]]]] = [
    [(4, {"pp": 2}), (2, {"tp": 2}), (4, {"tp": 2, "pp": 2})],
    [(2, {"tp": 1}), (3, {"pp": 3, "checkpointing": "full"}), (4, {"pp": 2, "checkpointing": "attention"})],
]


@pytest.mark.parametrize(
    ("name", "chain", "last"),
    one_in(7, [(name, chain, last) for last in (True, False) for chain in (0, 1) for name in NAMES]),
)
def test_any_mesh_continues_what_another_has_begun(
    name: str, chain: int, last: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three clipped updates with AdamW, each on another mesh, are those of plain transformers in one process."""
    monkeypatch.setattr(take_over, "BUCKET_BYTES", 4096)  # so that there is something to overlap
    model = small_model(name, num_hidden_layers=4)
    plain = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    state: dict[str, Any] | None = None
    for seed, (num_ranks, options) in enumerate(CHAINS[chain]):
        results = on_ranks(num_ranks, model, lambda g, m: trained(g, m, state, seed, last=last, **options))  # noqa: B023
        with WideCasts():
            loss = plain_update(plain, documents(LENGTHS, seed), optimizer, 0.05)
        state = results[0]["state"]
        for own in results:
            assert own["loss"] == pytest.approx(loss, rel=TOLERANCE)
            assert own["norm"] == results[0]["norm"]
            assert_same_weights(own, plain)
            assert own["weights"].keys() == results[0]["weights"].keys()


def copies_keep_their_gradients(patch: pytest.MonkeyPatch) -> None:
    """The gradient of a tied embedding as the head does not come home."""
    patch.setattr(TiedHead, "add_gradient", lambda *_: None)


def losses_are_means(patch: pytest.MonkeyPatch) -> None:
    """The caller divides by the rows of this micro-batch."""
    patch.setattr(F, "cross_entropy", lambda *a, _plain=F.cross_entropy, **o: _plain(*a, **o) / max(1, len(a[0])))


def rows_arrive_late(patch: pytest.MonkeyPatch) -> None:
    """A stage is given the message of another micro-batch."""
    plain = StageLinks.receive

    def receive(self: StageLinks, place: int) -> Tensor | None:
        rows, before = plain(self, place), vars(self).get("before")
        vars(self)["before"] = None if rows is None else rows.clone()
        if before is not None and rows is not None and before.shape == rows.shape:
            rows.copy_(before)
        return rows

    patch.setattr(StageLinks, "receive", receive)


@pytest.mark.parametrize("fault", [copies_keep_their_gradients, losses_are_means, rows_arrive_late])
def test_these_tests_would_find_a_fault(
    fault: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = small_model("gemma2")
    setup = Setup(num_ranks=4, pp=2, lengths=(7, 7, 7, 7), planner="adaptive")
    given = random_documents(model, setup)
    reference = plain_step(copy.deepcopy(model), given)
    assert difference(reference, planned_step(model, given, setup)).worst <= TOLERANCE
    fault(monkeypatch)
    assert difference(reference, planned_step(model, given, setup)).worst > 1e-4
