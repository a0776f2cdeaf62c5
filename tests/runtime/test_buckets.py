"""Gradients that are reduced while ranks compute: the same numbers as with one reduction, and no order can hang."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise, product
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from bytescale.attention import select_kernel
from bytescale.attention.rings.exchange import Exchange, Transfer
from bytescale.config.schema import OptimizerConfig
from bytescale.parity import small_model
from bytescale.plan import Plan, RankPlan
from bytescale.plan.last_message import last_backward_is_silent, silent_last_backwards
from bytescale.plan.plan import GroupSpec
from bytescale.runtime.group import PendingCollective, RankGroup
from bytescale.runtime.mesh import Mesh, MeshShape
from bytescale.runtime.optimizer.buckets import BucketCollectives, Overlap
from bytescale.runtime.optimizer.flat import ALIGNMENT, FlatParameters
from bytescale.runtime.optimizer.sharded_optimizer import ShardedOptimizer
from tests.helpers.decoder import Sizes
from tests.helpers.effort import one_of
from tests.helpers.plans import random_plan
from tests.helpers.ranks import run_mesh
from tests.helpers.steps import Batch, make_model, random_batch, slice_batch
from tests.hf.mesh_steps import plan_of, rank_model

LENGTHS = [33, 5, 18, 1, 9, 27, 2]
CLIPPING = OptimizerConfig(lr=1e-2, weight_decay=0.1, clip_grad_norm=1e-3)
SEVERAL_BUCKETS = 12 * 1024  # bytes; a stage has 70 to 300 KB of gradients
WORDS = 68  # which 2 and 4 ranks share
FAMILIES: dict[str, dict[str, Any]] = {"llama": {}, "tied": {"tie_word_embeddings": True}, "mixtral": {}}


@dataclass
class Steps:
    """What some steps of training left behind, parameters by (stage, tp index, name)."""

    losses: list[float]
    norms: list[float]
    gradients: list[dict[tuple[int, int, str], Tensor]] = field(default_factory=list)  # of each step, summed over ranks
    parameters: dict[tuple[int, int, str], Tensor] = field(default_factory=dict)


def train(
    mesh_of: MeshShape,
    family: str,
    plans: list[Plan],
    batch: Batch,
    *,
    bucket_bytes: int,
    checkpointing: str = "none",
) -> Steps:
    """One step per plan on a mesh of threads; ``bucket_bytes`` 0 is the slow twin."""
    numbers = {"num_hidden_layers": 4, "vocab_size": WORDS, **FAMILIES[family]}
    whole = small_model("llama" if family == "tied" else family, dtype=torch.float32, **numbers)

    def one_rank(mesh: Mesh) -> tuple[list, list, list, dict]:
        model = rank_model(whole, mesh, bucket_bytes=bucket_bytes)
        optimizer = ShardedOptimizer.of_config(model.parameters, CLIPPING, mesh)
        if bucket_bytes:
            assert mesh.hdp.size == 1 or len(model.parameters.buckets) > 2
            optimizer.zeros[0].overlap_with(model.layers)
        executor = model.executor(
            mesh,
            select_kernel("auto", torch.device("cpu"), torch.float32),
            checkpointing=checkpointing,
            wait_for_parameters=optimizer.zeros[0].collectives.wait_for_parameters,
        )
        losses, norms, gradients = [], [], []
        for plan in plans:
            own = RankPlan.of(plan, mesh.hdp.rank)
            optimizer.begin_step(own)
            result = executor.run(
                own,
                [slice_batch(batch, micro_batch) for micro_batch in own.micro_batches],
                num_global_targets=batch.num_targets,
                after_last_message=optimizer.after_last_message,
            )
            rows = mesh.world.share([optimizer.reduce_gradients(), result.loss_sum])
            norms.append(sum(row[0] for row in rows) ** 0.5)
            losses.append(sum(row[1] for row in rows) / batch.num_targets)
            gradients.append(own_pieces(model.parameters, mesh))
            optimizer.update(norms[-1], CLIPPING.clip_grad_norm)
        optimizer.wait_for_parameters()
        values = {
            (mesh.stage, mesh.tp.rank, entry.name): model.parameters.value_of(entry).clone()
            for entry in model.parameters.entries
        }
        return losses, norms, gradients, values

    outcomes = run_mesh(mesh_of, one_rank, overlapped=bucket_bytes > 0)
    steps = Steps(losses=outcomes[0][0], norms=outcomes[0][1])
    for number in range(len(plans)):
        flat: dict[tuple[int, int, str], list[tuple[int, Tensor]]] = {}
        for _, _, gradients, _ in outcomes:
            for key, pieces in gradients[number].items():
                flat.setdefault(key, []).extend(pieces)
        steps.gradients.append(
            {key: torch.cat([piece for _, piece in sorted(p, key=lambda item: item[0])]) for key, p in flat.items()}
        )
    for _, _, _, values in outcomes:
        for key, value in values.items():
            assert torch.equal(steps.parameters.setdefault(key, value), value), "ranks of one HDP group differ"
    return steps


def own_pieces(parameters: FlatParameters, mesh: Mesh) -> dict[tuple[int, int, str], list[tuple[int, Tensor]]]:
    """The reduced gradients that this rank owns, with the place of each piece."""
    pieces: dict[tuple[int, int, str], list[tuple[int, Tensor]]] = {}
    for place in parameters.shards(mesh.hdp.rank):
        for piece in parameters.pieces(place):
            values = parameters.gradients[piece.start : piece.stop].clone()
            pieces.setdefault((mesh.stage, mesh.tp.rank, piece.entry.name), []).append((piece.start, values))
    return pieces


def assert_same(ours: Steps, twin: Steps, num_ranks: int) -> None:
    """To the last bit on two ranks. On more, the first step's sums differ by their order alone."""
    first, reference = ours.gradients[0], twin.gradients[0]
    assert first.keys() == reference.keys()
    if num_ranks <= 2:
        assert ours.losses == twin.losses
        assert all(torch.equal(first[key], reference[key]) for key in reference)
        assert all(torch.equal(ours.parameters[key], twin.parameters[key]) for key in twin.parameters)
        return
    all_ours = torch.cat([first[key] for key in reference]).double()
    all_twin = torch.cat([reference[key] for key in reference]).double()
    assert float((all_ours - all_twin).norm() / all_twin.norm()) <= 1e-7
    np.testing.assert_allclose(ours.losses, twin.losses, rtol=1e-5)  # updates in between


def plans_of(mesh: MeshShape) -> list[Plan]:
    """Three steps whose ranks end at different times, some of them without a micro-batch."""
    return [plan_of(LENGTHS, mesh, seed) for seed in (1, 5, 11)]


MESHES = [
    MeshShape(hdp=2),
    MeshShape(hdp=3),
    MeshShape(hdp=2, tp=2),
    MeshShape(hdp=2, pp=2),
    MeshShape(hdp=2, tp=4),
]


def check(mesh: MeshShape, family: str, *, checkpointing: str = "none") -> None:
    batch = random_batch(LENGTHS, WORDS, seed=3)
    plans = plans_of(mesh)
    twin = train(mesh, family, plans, batch, bucket_bytes=0, checkpointing=checkpointing)
    with late_results():
        ours = train(mesh, family, plans, batch, bucket_bytes=SEVERAL_BUCKETS, checkpointing=checkpointing)
    assert_same(ours, twin, mesh.hdp)


@pytest.mark.parametrize(
    ("mesh", "family"),
    [
        *one_of(list(product(MESHES[1:3], FAMILIES)), (MESHES[2], "tied")),
        *one_of(list(product(MESHES[3:4], FAMILIES)), (MESHES[3], "mixtral")),
    ],
    ids=str,
)
def test_buckets_give_the_numbers_of_one_reduction(mesh: MeshShape, family: str) -> None:
    check(mesh, family, checkpointing="none" if mesh.pp == 1 else "full")


MANY = [
    (mesh, family, checkpointing)
    for mesh in (*MESHES, MeshShape(hdp=4), MeshShape(hdp=4, pp=2), MeshShape(hdp=3, pp=2))
    for family in FAMILIES
    for checkpointing in ("none", "full", "attention")
]


@pytest.mark.exhaustive
@pytest.mark.parametrize(("mesh", "family", "checkpointing"), MANY[::4], ids=str)
def test_every_mesh_and_family(mesh: MeshShape, family: str, checkpointing: str) -> None:
    """One in four of the product; every value of every factor is tried."""
    check(mesh, family, checkpointing=checkpointing)


def test_the_same_bits_in_every_run() -> None:
    mesh, batch = MeshShape(hdp=3), random_batch(LENGTHS, WORDS, seed=3)
    first, second = (train(mesh, "llama", plans_of(mesh)[:2], batch, bucket_bytes=SEVERAL_BUCKETS) for _ in range(2))
    assert first.losses == second.losses
    assert all(torch.equal(first.parameters[key], second.parameters[key]) for key in first.parameters)


@contextmanager
def late_results() -> Iterator[None]:
    """A collective's input is read when it is posted, and its result is there after ``wait`` and no earlier.

    Until then parameters that are being gathered are NaN, so that nobody can use them by good luck.
    """

    def start(group: RankGroup, full: Tensor, post: Any, *, hide: bool) -> PendingCollective:
        scratch = full.clone()
        pending = post(group, scratch)
        if hide:
            own = full.view(group.size, -1)[group.rank].clone()
            full.fill_(torch.nan)
            full.view(group.size, -1)[group.rank] = own
        wait = pending.wait

        def late_wait() -> None:
            wait()
            full.copy_(scratch)

        pending.wait = late_wait
        return pending

    reduce_scatter, all_gather = RankGroup.start_reduce_scatter, RankGroup.start_all_gather
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RankGroup, "start_reduce_scatter", lambda g, t: start(g, t, reduce_scatter, hide=False))
        patch.setattr(RankGroup, "start_all_gather", lambda g, t: start(g, t, all_gather, hide=True))
        yield


@contextmanager
def recorded_events() -> Iterator[dict[int, list[tuple[str, Any]]]]:
    """What each thread posts and waits for, in order: messages, buckets (by their start), the end of its messages."""
    events: dict[int, list[tuple[str, Any]]] = {}

    def note(kind: str, what: Any = None) -> None:
        events.setdefault(threading.get_ident(), []).append((kind, what))

    start, wait, after = Exchange.start, Transfer.wait, Overlap.after_last_message
    reduce, gather = BucketCollectives.reduce_from, BucketCollectives.gather

    def noted_reduce(self: BucketCollectives, first: int) -> None:
        before = list(self._to_reduce)
        reduce(self, first)
        for bucket in reversed(before[len(self._to_reduce) :]):
            note("reduce", bucket.start)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Exchange, "start", lambda self, **named: (note("message"), start(self, **named))[1])
        patch.setattr(Transfer, "wait", lambda self: (note("message"), wait(self))[1])
        patch.setattr(Overlap, "after_last_message", lambda self: (note("end"), after(self))[1])
        patch.setattr(BucketCollectives, "reduce_from", noted_reduce)
        patch.setattr(BucketCollectives, "gather", lambda self, bucket: (note("gather"), gather(self, bucket))[1])
        yield events


@pytest.mark.parametrize(
    "mesh",
    one_of([MeshShape(hdp=3), MeshShape(hdp=2, tp=2), MeshShape(hdp=2, pp=2)], MeshShape(hdp=2, pp=2)),
    ids=str,
)
def test_no_reduction_before_the_last_message_and_one_order_on_all_ranks(mesh: MeshShape) -> None:
    batch = random_batch(LENGTHS, WORDS, seed=3)
    for plan in plans_of(mesh):
        with recorded_events() as events:
            train(mesh, "llama", [plan], batch, bucket_bytes=SEVERAL_BUCKETS)
        orders = set()
        early = 0
        for own in events.values():
            kinds = [kind for kind, _ in own]
            if "reduce" in kinds:
                assert "message" not in kinds[kinds.index("reduce") :]
            orders.add(tuple(what for kind, what in own if kind == "reduce"))
            early += int("reduce" in kinds[: kinds.index("end")])
        assert len(orders) <= mesh.pp, "ranks of one HDP group reduce in different orders"
        assert all(a > b for order in orders for a, b in pairwise(order))
        silent = sum(last_backward_is_silent(RankPlan.of(plan, rank)) for rank in range(mesh.hdp))
        assert early == silent * mesh.tp  # on the first stage


def test_the_rule_by_plan_and_by_rank() -> None:
    plans = [random_plan([7, 3, 9, 2, 5], 4, seed) for seed in range(30)]
    for plan in plans:
        by_rank = [last_backward_is_silent(RankPlan.of(plan, rank)) for rank in range(4)]
        assert silent_last_backwards(plan).tolist() == by_rank
    assert {True, False} == {bool(silent) for plan in plans for silent in silent_last_backwards(plan)}
    alone = Plan.build(
        lengths=[4], capacity_tokens=[4, 4], groups=[GroupSpec(sequences=[0], ranks=[0])], schedule=[[[0]], []]
    )
    assert silent_last_backwards(alone).tolist() == [True, False]
    assert not last_backward_is_silent(RankPlan.of(alone, 0), stage=1)


@pytest.mark.parametrize("num_shards", [1, 2, 3, 7, 1000])
@pytest.mark.parametrize("bucket_bytes", [0, 1, 4096, 10**9])
def test_buckets_cut_the_buffers_into_equal_parts(num_shards: int, bucket_bytes: int) -> None:
    flat = FlatParameters(make_model(Sizes(), torch.float32).named_parameters(), num_shards, bucket_bytes=bucket_bytes)
    sizes = [bucket.stop - bucket.start for bucket in flat.buckets]
    assert [bucket.start for bucket in flat.buckets] == np.cumsum([0, *sizes[:-1]]).tolist()
    assert len(sizes) <= 64
    assert sum(sizes) == len(flat.values) == len(flat.gradients)
    assert len(flat.values) - flat.entries[-1].stop < num_shards * ALIGNMENT + ALIGNMENT
    owned = [place for rank in range(num_shards) for place in flat.shards(rank)]
    assert sum(place.stop - place.start for place in owned) == len(flat.values)
    assert all(place.start % ALIGNMENT == 0 for place in owned)
    if bucket_bytes == 0:
        assert len(sizes) == 1
    else:
        if bucket_bytes == 1 and num_shards in (2, 3):
            assert len(sizes) > 20
        assert all(size == sizes[-1] for size in sizes[1:])
        assert sizes[0] <= sizes[-1]


def test_more_ranks_than_elements() -> None:
    """Ranks whose part of every bucket is padding take part all the same."""

    def one_rank(mesh: Mesh) -> Tensor:
        torch.manual_seed(0)
        model = nn.Linear(3, 2)
        flat = FlatParameters(model.named_parameters(), mesh.hdp.size, bucket_bytes=1)
        optimizer = ShardedOptimizer.of_config(flat, CLIPPING, mesh)
        optimizer.zeros[0].overlap_with((model, []))
        for _ in range(2):
            optimizer.begin_step(RankPlan.of(random_plan([1], mesh.hdp.size, 0), mesh.hdp.rank))
            flat.gradients.fill_(1.0)
            optimizer.after_last_message()
            norm = sum(row[0] for row in mesh.world.share([optimizer.reduce_gradients()])) ** 0.5
            assert norm == pytest.approx(5 * 8**0.5)  # five ranks, eight weights
            optimizer.update(norm, CLIPPING.clip_grad_norm)
        optimizer.wait_for_parameters()
        return torch.cat([p.detach().flatten() for p in model.parameters()])

    results = run_mesh(MeshShape(hdp=5), one_rank, overlapped=True)
    assert all(torch.equal(result, results[0]) for result in results)
    assert torch.isfinite(results[0]).all()
