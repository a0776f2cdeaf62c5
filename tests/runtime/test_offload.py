"""Offloading and checkpointing do not change a single bit of the gradients."""

from __future__ import annotations

import gc
from dataclasses import replace
from itertools import product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bytescale.attention import PackedAttention, select_kernel
from bytescale.common.errors import PlanError
from bytescale.plan import Plan, RankPlan
from bytescale.plan.plan import GroupSpec
from bytescale.runtime.executor import Decoder, Executor
from bytescale.runtime.group import RankGroup
from bytescale.runtime.mesh import Mesh
from bytescale.runtime.optimizer.flat import FlatParameters
from bytescale.runtime.saved.activations import Activations
from bytescale.runtime.saved.host_pool import HostMemoryError, HostPool, PageWriter
from tests.helpers.decoder import FeedForward, Sizes
from tests.helpers.effort import examples, one_in
from tests.helpers.lazy_lanes import use_lazy_lanes
from tests.helpers.plans import random_plan
from tests.helpers.ranks import run_ranks
from tests.helpers.reference_loss import linear_cross_entropy
from tests.helpers.steps import Batch, make_model, random_batch, slice_batch

LIMIT = 2**24


def with_ratios(plan: Plan, ratios: list[float]) -> Plan:
    """The plan with these offload ratios, repeated over its groups."""
    values = [ratios[group % len(ratios)] for group in range(plan.num_groups)]
    return replace(plan, group_offload_ratio=torch.tensor(values, dtype=torch.float64).numpy())


def flat_gradients(
    batch: Batch,
    plan: Plan,
    checkpointing: str = "none",
    *,
    offload: bool = False,
    steps: int = 1,
    layers: int = 5,
) -> list[torch.Tensor]:
    """Each rank's own gradient sums after the last step; asserts that the pool is empty and within its limit."""

    def one_rank(hdp: RankGroup) -> torch.Tensor:
        model = make_model(Sizes(num_layers=layers), torch.float32)
        flat = FlatParameters(model.named_parameters(), hdp.size)
        pool = HostPool(LIMIT, pinned=False, page_bytes=1024) if offload else None
        activations = Activations(model.layers, checkpointing=checkpointing, pool=pool)  # type: ignore[arg-type]
        rank_plan = RankPlan.of(plan, hdp.rank)
        tokens = [slice_batch(batch, micro_batch) for micro_batch in rank_plan.micro_batches]
        for _ in range(steps):
            flat.zero_gradients()
            Executor(
                part=Decoder(module=model, activations=activations),
                kernel=select_kernel("auto", torch.device("cpu"), torch.float32),
                mesh=Mesh.of_hdp(hdp),
            ).run(rank_plan, tokens, num_global_targets=batch.num_targets)
        if pool is not None and activations.offload is not None:
            assert pool.bytes_in_use == 0
            assert pool.peak_bytes <= pool.bytes_allocated <= LIMIT
            moves = any(micro_batch.offloaded_tokens for micro_batch in rank_plan.micro_batches)
            assert (activations.offload.bytes_moved > 0) == (moves and layers > 2)
        return flat.gradients.clone()

    return run_ranks(plan.num_ranks, one_rank)


def same_bits(ours: list[torch.Tensor], reference: list[torch.Tensor]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(ours, reference, strict=True))


@examples(4, 12)
@given(
    lengths=st.lists(st.integers(1, 50), min_size=1, max_size=6),
    num_ranks=st.integers(1, 4),
    seed=st.integers(0, 1000),
    ratios=st.lists(st.sampled_from([0.0, 0.3, 0.5, 0.77, 1.0]), min_size=1, max_size=3),
    checkpointing=st.sampled_from(["none", "full", "attention"]),
    layers=st.sampled_from([2, 3, 5]),
)
def test_gradients_are_bitwise_those_without_offload_or_recomputation(
    lengths: list[int],
    num_ranks: int,
    seed: int,
    ratios: list[float],
    checkpointing: str,
    layers: int,
) -> None:
    plan = random_plan(lengths, num_ranks, seed, weighted=seed % 3 == 0)
    batch = random_batch(lengths, 61, seed)
    batch.labels[0][0] = 1
    plain = flat_gradients(batch, plan, layers=layers)
    offloaded = flat_gradients(batch, with_ratios(plan, ratios), checkpointing, offload=True, layers=layers)
    assert same_bits(offloaded, plain)


@pytest.mark.parametrize("checkpointing", ["full", "attention"])
def test_recomputation_with_a_ring_is_exact_and_attention_mode_sends_nothing_twice(checkpointing: str) -> None:
    lengths = [42, 6]  # equal slices, so that every member sends as much as the others
    plan = everybody(lengths, 3)
    batch = random_batch(lengths, 61, 0)
    ours = flat_gradients(batch, plan, checkpointing)
    assert same_bits(ours, flat_gradients(batch, plan))

    def bytes_sent(mode: str) -> list[int]:
        def one_rank(hdp: RankGroup) -> int:
            model = make_model(Sizes(), torch.float32)
            rank_plan = RankPlan.of(plan, hdp.rank)
            Executor(
                part=Decoder(module=model, activations=Activations(model.layers, checkpointing=mode)),  # type: ignore[arg-type]
                kernel=select_kernel("auto", torch.device("cpu"), torch.float32),
                mesh=Mesh.of_hdp(hdp),
            ).run(
                rank_plan,
                [slice_batch(batch, micro_batch) for micro_batch in rank_plan.micro_batches],
                num_global_targets=batch.num_targets,
            )
            return hdp.exchange.bytes_sent

        return run_ranks(3, one_rank)

    plain, sent_by_ours = bytes_sent("none"), bytes_sent(checkpointing)
    # Forward sends K and V (1 part), backward K, V and their fp32 gradients (2 parts); a second forward sends 1 more.
    assert [3 * sent for sent in sent_by_ours] == [(4 if checkpointing == "full" else 3) * sent for sent in plain]


def test_what_recomputation_need_not_compute(monkeypatch: pytest.MonkeyPatch) -> None:
    """The feed-forward part's output: backward computes each chunk of rows again, and nothing else of it."""
    calls: list[int] = []
    forward = FeedForward.forward

    def counted(self: FeedForward, rows: torch.Tensor) -> torch.Tensor:
        calls.append(len(rows))
        return forward(self, rows)

    monkeypatch.setattr(FeedForward, "forward", counted)
    lengths, batch = [30], random_batch([30], 61, 0)
    model = make_model(Sizes(num_layers=2), torch.float32)
    row_wise = [(layer, "feed_forward") for layer in model.layers]
    activations = Activations(list(model.layers), checkpointing="full", row_wise=row_wise, chunk_rows=16)
    micro_batch = RankPlan.of(local_plan(lengths, [0.0]), 0).micro_batches[0]
    data = slice_batch(batch, micro_batch)
    kernel = select_kernel("auto", torch.device("cpu"), torch.float32)
    attention = PackedAttention(micro_batch, kernel, RankGroup().exchange, activations.attention_memory)
    loss = linear_cross_entropy(model(data.tokens, data.position_ids, attention), model.head_weight, data.labels)
    assert calls == [16, 14] * 2
    loss.backward()
    assert calls == [16, 14] * 4


def everybody(lengths: list[int], num_ranks: int) -> Plan:
    ranks = list(range(num_ranks))
    return Plan.build(
        lengths=lengths,
        capacity_tokens=[sum(lengths)] * num_ranks,
        groups=[GroupSpec(sequences=list(range(len(lengths))), ranks=ranks)],
        schedule=[[[0]] for _ in ranks],
    )


def local_plan(lengths: list[int], ratios: list[float]) -> Plan:
    """One rank, one micro-batch per sequence."""
    groups = [GroupSpec(sequences=[i], ranks=[0], offload_ratio=ratio) for i, ratio in enumerate(ratios)]
    return Plan.build(
        lengths=lengths, capacity_tokens=[max(lengths)], groups=groups, schedule=[[[i] for i in range(len(lengths))]]
    )


@pytest.mark.filterwarnings("error::pytest.PytestUnraisableExceptionWarning")  # a block's end may be what finds it
@pytest.mark.parametrize(
    ("order", "checkpointing", "lazy"),
    one_in(
        5,
        list(
            product(
                ["f0 f1 b0 f2 b1 b2", "f0 f1 f2 b2 b1 b0", "f0 f1 f2 b0 b1 b2"],
                ["none", "full", "attention"],
                [False, True],
            )
        ),
    ),
)
def test_interleaved_micro_batches(order: str, checkpointing: str, lazy: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Forwards and backwards as a pipeline mixes them; ``lazy``: copies come as late as events allow, as on CUDA."""
    if lazy:
        use_lazy_lanes(monkeypatch)
    lengths, plan = [40, 33, 21], local_plan([40, 33, 21], [1.0, 0.0, 0.6])
    batch = random_batch(lengths, 61, 0)

    def gradients(**options: object) -> torch.Tensor:
        model = make_model(Sizes(num_layers=5), torch.float32)
        flat = FlatParameters(model.named_parameters(), 1)
        activations = Activations(model.layers, **options)  # type: ignore[arg-type]
        micro_batches = RankPlan.of(plan, 0).micro_batches
        losses: dict[int, torch.Tensor] = {}
        for action in 2 * order.split():  # two steps: the second writes to pages that the first has read
            index = int(action[1])
            if options and not losses and action == "f0":
                activations.begin_step(micro_batches)
            if action[0] == "f":
                data = slice_batch(batch, micro_batches[index])
                attention = PackedAttention(
                    micro_batches[index],
                    select_kernel("auto", torch.device("cpu"), torch.float32),
                    RankGroup().exchange,
                    activations.attention_memory,
                )
                with activations.forward(micro_batches[index]):
                    hidden = model(data.tokens, data.position_ids, attention)
                    losses[index] = linear_cross_entropy(hidden, model.head_weight, data.labels)
            else:
                losses.pop(index).backward()
        return flat.gradients

    pool = HostPool(LIMIT, pinned=False, page_bytes=768)
    assert torch.equal(gradients(checkpointing=checkpointing, pool=pool), gradients())
    assert pool.peak_bytes > 0
    assert pool.bytes_in_use == 0


@pytest.mark.exhaustive
def test_two_hundred_steps_neither_leak_nor_grow() -> None:
    lengths, plan = [30, 17], local_plan([30, 17], [1.0, 0.4])
    batch = random_batch(lengths, 61, 0)
    model = make_model(Sizes(num_layers=3), torch.float32)
    pool = HostPool(LIMIT, pinned=False, page_bytes=2**14)
    activations = Activations(model.layers, checkpointing="attention", pool=pool)
    rank_plan = RankPlan.of(plan, 0)
    tokens = [slice_batch(batch, micro_batch) for micro_batch in rank_plan.micro_batches]
    allocated = []
    for _ in range(200):
        Executor(
            part=Decoder(module=model, activations=activations),
            kernel=select_kernel("auto", torch.device("cpu"), torch.float32),
            mesh=Mesh.of_hdp(RankGroup()),
        ).run(rank_plan, tokens, num_global_targets=batch.num_targets)
        assert pool.bytes_in_use == 0
        allocated.append(pool.bytes_allocated)
    assert allocated[-1] == allocated[0] == pool.peak_bytes


def test_what_is_left_on_the_device() -> None:
    """Of the layers before the last two, only what all layers share stays; a tensor saved twice moves once."""
    tokens, layers = 64, 5
    sizes = Sizes(num_layers=layers)
    model = make_model(sizes, torch.float32)
    FlatParameters(model.named_parameters(), 1)
    pool = HostPool(LIMIT, pinned=False, page_bytes=256)
    activations = Activations(model.layers, pool=pool)
    plan = local_plan([tokens], [1.0])
    micro_batch = RankPlan.of(plan, 0).micro_batches[0]
    data = slice_batch(random_batch([tokens], 61, 0), micro_batch)
    attention = PackedAttention(
        micro_batch, select_kernel("auto", torch.device("cpu"), torch.float32), RankGroup().exchange
    )
    assert activations.offload is not None
    activations.begin_step([micro_batch])
    with activations.forward(micro_batch):
        kept = model(data.tokens, data.position_ids, attention)
        hidden, query, kv, ffn = 24, 24, 8, 40
        # Each norm's input, scale, normalised (unless fused) and output; q, k, v, attention's output and LSE; gate, up,
        # silu(gate) and their product. Nothing twice: attention's output is also the input of o_proj.
        norms, rest = 2 * (2 * hidden + 1), 2 * query + 2 * kv + sizes.num_heads + 4 * ffn
        moved = activations.offload.bytes_moved / (4 * tokens * (layers - 2))
        assert moved in (norms + rest, norms + rest + 2 * hidden)
        assert pool.bytes_in_use >= activations.offload.bytes_moved
    del kept  # nobody asks for gradients: everything is given back all the same
    assert pool.bytes_in_use == 0


def test_a_device_may_be_named_without_its_index() -> None:
    """As in ``torch.device("cuda")``, which does not equal the ``cuda:0`` of its tensors."""
    moved = []
    for device in (torch.device("cpu"), torch.device("cpu", 0)):
        model = make_model(Sizes(num_layers=4), torch.float32)
        activations = Activations(model.layers, pool=HostPool(LIMIT, pinned=False), device=device)
        rank_plan = RankPlan.of(local_plan([30], [0.5]), 0)
        Executor(
            part=Decoder(module=model, activations=activations),
            kernel=select_kernel("auto", torch.device("cpu"), torch.float32),
            mesh=Mesh.of_hdp(RankGroup()),
        ).run(rank_plan, [slice_batch(random_batch([30], 61, 0), rank_plan.micro_batches[0])], num_global_targets=30)
        assert activations.offload is not None
        moved.append(activations.offload.bytes_moved)
    assert moved[0] == moved[1] > 0


def test_host_memory_ends() -> None:
    lengths, plan = [40], local_plan([40], [1.0])
    model = make_model(Sizes(num_layers=4), torch.float32)
    pool = HostPool(4100, pinned=False, page_bytes=1024)
    rank_plan = RankPlan.of(plan, 0)
    batch = random_batch(lengths, 61, 0)
    with pytest.raises(HostMemoryError, match=r"fill all 4 KiB .*To fix: raise memory.host_gib"):
        Executor(
            part=Decoder(module=model, activations=Activations(model.layers, pool=pool)),
            kernel=select_kernel("auto", torch.device("cpu"), torch.float32),
            mesh=Mesh.of_hdp(RankGroup()),
        ).run(rank_plan, [slice_batch(batch, rank_plan.micro_batches[0])], num_global_targets=batch.num_targets)
    assert pool.bytes_allocated <= 4100
    gc.collect()  # the error, which holds what autograd has saved
    assert pool.bytes_in_use == 0


def test_a_plan_that_offloads_needs_host_memory() -> None:
    micro_batches = RankPlan.of(local_plan([8], [0.5]), 0).micro_batches
    with pytest.raises(PlanError, match="offloads 4 of 8 tokens of micro-batch 0"):
        Activations([]).begin_step(micro_batches)


def test_pages_are_shared_by_neighbours_and_reused() -> None:
    pool = HostPool(1000, pinned=False, page_bytes=256)
    writer = PageWriter(pool)
    first, second = writer.reserve(100), writer.reserve(300)
    writer.close()
    assert [(extent.start, extent.stop) for extent in first + second] == [(0, 100), (128, 256), (0, 172)]
    assert pool.bytes_in_use == 512
    for extent in second:
        pool.leave(extent.page, None)
    assert pool.bytes_in_use == 256
    pool.leave(first[0].page, None)
    assert (pool.bytes_in_use, pool.bytes_allocated) == (0, 512)
    assert len(PageWriter(pool).reserve(512)) == 2
    assert pool.bytes_allocated == 512


def test_pages_are_there_before_the_first_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pinned in few pieces, since each of them waits for the whole device; no more than a step needs, or may have."""
    pieces, empty = list[int](), torch.empty
    monkeypatch.setattr(torch, "empty", lambda size, **options: (pieces.append(size), empty(size, **options))[1])
    pool = HostPool(10**6, pinned=False, page_bytes=256, token_bytes=100.0)
    pool.prepare(1000, 3)
    assert pieces == [64 * 256] * 6 + [8 * 256, 2 * 256]
    assert (pool.bytes_in_use, pool.bytes_allocated) == (0, 394 * 256)
    pool.prepare(900, 3)
    assert len(PageWriter(pool).reserve(100_000)) == 391
    assert len(pieces) == 8, "a forward has nothing to allocate"
    pool.prepare(10**9, 3)
    assert 10**6 - 256 < pool.bytes_allocated <= 10**6


def test_a_step_prepares_the_pages_of_its_largest_micro_batch() -> None:
    sizes = Sizes(num_layers=5)
    model = make_model(sizes, torch.float32)
    FlatParameters(model.named_parameters(), 1)
    pool = HostPool(LIMIT, pinned=False, page_bytes=256, token_bytes=1000.0)
    activations = Activations(model.layers, pool=pool)
    micro_batches = RankPlan.of(local_plan([30, 64], [0.5, 1.0]), 0).micro_batches
    activations.begin_step(micro_batches)
    assert pool.bytes_allocated == (64 * 1000 // 256 + 3) * 256


@pytest.mark.gpu
@pytest.mark.parametrize("checkpointing", ["none", "full", "attention"])
def test_on_a_gpu_gradients_are_bitwise_equal_and_memory_is_saved(checkpointing: str) -> None:
    """Pinned pages and two side streams; kernels that are deterministic, every token id once (embedding gradients)."""
    tokens, device = 4096, torch.device("cuda")
    sizes = Sizes(
        num_layers=8, vocab_size=tokens, hidden_size=512, num_heads=8, num_kv_heads=2, head_dim=64, ffn_hidden_size=1536
    )

    def step(ratio: float) -> tuple[torch.Tensor, int]:
        model = make_model(sizes, torch.bfloat16).to(device)
        flat = FlatParameters(model.named_parameters(), 1)
        pool = HostPool(2**31, pinned=True, page_bytes=2**20) if ratio else None
        activations = Activations(list(model.layers), checkpointing=checkpointing, pool=pool, device=device)  # type: ignore[arg-type]
        rank_plan = RankPlan.of(local_plan([tokens], [ratio]), 0)
        batch = random_batch([tokens], tokens, 0)
        batch.tokens[0] = torch.randperm(tokens, generator=torch.Generator().manual_seed(0))
        data = [slice_batch(batch, rank_plan.micro_batches[0])]
        for _ in range(3):  # pages and blocks of device memory are reused from the second step on
            flat.zero_gradients()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            Executor(
                part=Decoder(module=model, activations=activations),
                kernel=select_kernel("math", device, torch.bfloat16),
                mesh=Mesh.of_hdp(RankGroup(device=device)),
            ).run(rank_plan, data, num_global_targets=batch.num_targets)
            torch.cuda.synchronize()
        if activations.offload is not None:
            assert activations.offload.bytes_moved > 0
        return flat.gradients.clone(), torch.cuda.max_memory_allocated() - before

    plain, plain_bytes = step(0.0)
    for ratio in (0.5, 1.0):
        gradients, offloaded_bytes = step(ratio)
        assert torch.equal(gradients, plain)
        assert checkpointing != "none" or offloaded_bytes < plain_bytes
