"""The memory model against counted tensors: every saved byte, and the peaks of forward, loss and backward."""

from __future__ import annotations

import math
from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from bytescale.cost.memory.model import MemoryModel

from bytescale.attention import AttentionKernel, PackedAttention, RingBuffers, select_kernel
from bytescale.common.errors import PlanError
from bytescale.config.architecture import PRESETS, Architecture
from bytescale.cost.memory.device_kernels import (
    HEAD_NUMBERS_PER_CHUNK,
    LOGITS_PER_CHUNK,
    ROWS_PER_CHUNK,
    KernelMemory,
    loss_chunk_tokens,
)
from bytescale.cost.memory.rows import ModelShare
from bytescale.plan import Plan, RankPlan
from bytescale.plan.plan import GroupSpec
from bytescale.plan.verify import verify
from bytescale.runtime.executor import Decoder, Executor
from bytescale.runtime.group import RankGroup
from bytescale.runtime.mesh import Mesh
from bytescale.runtime.optimizer.flat import FlatParameters
from bytescale.runtime.saved.activations import Activations
from bytescale.runtime.saved.host_pool import HostPool
from tests.helpers.cuda_like import CudaLikeFlash, fuse_norms
from tests.helpers.decoder import PlainDecoder, Sizes
from tests.helpers.effort import one_in, one_of
from tests.helpers.live_bytes import LiveBytes
from tests.helpers.ranks import run_ranks
from tests.helpers.reference_loss import linear_cross_entropy
from tests.helpers.steps import make_model, random_batch, slice_batch

TINY = PRESETS["tiny"]
WIDE_HEAD = replace(TINY, vocab_size=8192, num_layers=3)
NARROW_HEAD = replace(TINY, vocab_size=256, num_layers=6, num_kv_heads=4)


def plain(shape: Architecture, dtype: torch.dtype) -> PlainDecoder:
    """A decoder of this shape."""
    return make_model(Sizes(**{one.name: getattr(shape, one.name) for one in fields(Sizes)}), dtype)


def measured(
    shape: Architecture,
    dtype: torch.dtype,
    mode: str,
    tokens: int,
    *,
    ratio: float = 0.0,
    num_ranks: int = 1,
    chunk_rows: int = 2**20,
    kernel: AttentionKernel | None = None,
    columns: int = 1,
) -> tuple[int, int]:
    """Bytes saved after forward, and the peak of a micro-batch, on the fullest member of a group of all ranks."""
    plan = shared_plan(tokens * num_ranks, num_ranks, ratio, columns=columns)
    batch = random_batch([tokens * num_ranks], shape.vocab_size, 0, masked_share=0.0)

    def one_rank(hdp: RankGroup) -> tuple[int, int]:
        model = plain(shape, dtype)
        FlatParameters(model.named_parameters(), 1)
        pool = HostPool(2**30, pinned=False) if ratio else None
        activations = Activations(
            list(model.layers),
            checkpointing=mode,  # type: ignore[arg-type]
            pool=pool,
            row_wise=[(layer, "feed_forward") for layer in model.layers],
            chunk_rows=chunk_rows,
        )
        micro_batch = RankPlan.of(plan, hdp.rank).micro_batches[0]
        data = slice_batch(batch, micro_batch)
        chosen = kernel or select_kernel("auto", torch.device("cpu"), dtype)
        buffers = RingBuffers()
        attention = PackedAttention(micro_batch, chosen, hdp.exchange, activations.attention_memory, buffers)
        activations.begin_step([micro_batch])
        with LiveBytes() as live:
            with activations.forward(micro_batch):
                hidden = model(data.tokens, data.position_ids, attention)
                buffers.release()
                saved = live.now
                loss = linear_cross_entropy(hidden, model.head_weight, data.labels)
                del hidden
            loss.backward()
        on_host = 0 if pool is None else pool.bytes_allocated  # pages live on this machine's one memory
        inputs = sum(tensor.nbytes for tensor in (data.tokens, data.labels, data.position_ids))
        return saved - on_host + inputs, live.peak - on_host + inputs

    saved, peaks = zip(*run_ranks(num_ranks, one_rank), strict=True)
    return max(saved), max(peaks)


def shared_plan(tokens: int, num_ranks: int, ratio: float = 0.0, capacity: int | None = None, columns: int = 1) -> Plan:
    ranks = list(range(num_ranks))
    return Plan.build(
        lengths=[tokens],
        capacity_tokens=[capacity or tokens] * num_ranks,
        groups=[GroupSpec(sequences=[0], ranks=ranks, offload_ratio=ratio, columns=columns)],
        schedule=[[[0]] for _ in ranks],
    )


def model_of(shape: Architecture, dtype: torch.dtype, mode: str, num_ranks: int = 1) -> MemoryModel:
    return MemoryModel(
        share=ModelShare(architecture=shape),
        element_bytes=dtype.itemsize,
        num_ranks=num_ranks,
        checkpointing=mode,  # type: ignore[arg-type]
        kernels=KernelMemory(loss_chunk_tokens=loss_chunk_tokens(shape.vocab_size, "cpu")),
    )


def with_kernels(model: MemoryModel, **changes: Any) -> MemoryModel:
    return replace(model, kernels=replace(model.kernels, **changes))


def with_share(model: MemoryModel, **changes: Any) -> MemoryModel:
    return replace(model, share=replace(model.share, **changes))


CASES = [
    *((TINY, torch.float32, mode) for mode in ("none", "full", "attention")),
    *((NARROW_HEAD, torch.float32, mode) for mode in ("none", "full", "attention")),
    (WIDE_HEAD, torch.float32, "none"),
    (TINY, torch.bfloat16, "full"),
    (replace(TINY, vocab_size=2**15, num_layers=3), torch.bfloat16, "full"),
]


@pytest.mark.parametrize(("shape", "dtype", "mode"), one_in(3, CASES))
def test_saved_bytes_and_peak_within_ten_per_cent(shape: Architecture, dtype: torch.dtype, mode: str) -> None:
    tokens = 1024
    saved, peak = measured(shape, dtype, mode, tokens)
    model = model_of(shape, dtype, mode)
    assert model.saved_bytes_per_token * tokens == pytest.approx(saved, rel=0.02)
    estimate = float(model.limits().device_peak(tokens, 0, 0)) - model.states.device_bytes
    assert estimate == pytest.approx(peak, rel=0.1)


def test_peak_of_a_large_head_in_bf16(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its gradient is summed in fp32, and there is no second one, be it a product to be added or the result."""
    shape, numbers = replace(TINY, vocab_size=2**15, num_layers=2), 2**18
    _, at_once = measured(shape, torch.bfloat16, "full", 512)
    monkeypatch.setitem(HEAD_NUMBERS_PER_CHUNK, "cpu", numbers)
    monkeypatch.setitem(LOGITS_PER_CHUNK, "cpu", 2**19)
    _, peak = measured(shape, torch.bfloat16, "full", 512)
    model = with_kernels(model_of(shape, torch.bfloat16, "full"), loss_chunk_tokens=2**4, head_chunk_numbers=numbers)
    head = shape.vocab_size * shape.hidden_size
    assert peak < 5.5 * head < 6 * head < at_once
    assert float(model.limits().device_peak(512, 0, 0)) - model.states.device_bytes == pytest.approx(peak, rel=0.1)


def test_a_tied_heads_gradient_is_gone_when_the_layers_come() -> None:
    """A step's own peak, of a model whose layers need more than its loss, is that of one without a tied head."""
    peaks, dtype = [], torch.float32
    for tied in (True, False):
        shape = replace(TINY, vocab_size=2**13, num_layers=6, tie_embeddings=tied)
        model = plain(shape, dtype)
        FlatParameters(model.named_parameters(), 1)
        plan = RankPlan.of(shared_plan(2048, 1), 0)
        data = [slice_batch(random_batch([2048], shape.vocab_size, 0), plan.micro_batches[0])]
        part = Decoder(module=model, activations=Activations(list(model.layers), checkpointing="full"))
        kernel = select_kernel("auto", torch.device("cpu"), dtype)
        with LiveBytes() as live:
            Executor(part=part, kernel=kernel, mesh=Mesh.of_hdp(RankGroup())).run(plan, data, num_global_targets=2048)
        peaks.append(live.peak)
        model_of_it = model_of(shape, dtype, "full")
        estimate = float(model_of_it.limits().device_peak(2048, 0, 0)) - model_of_it.states.device_bytes
        assert estimate == pytest.approx(live.peak, rel=0.06)
    assert peaks[0] == pytest.approx(peaks[1], rel=0.01)


@pytest.mark.parametrize("mode", ["none", "full"])
def test_peak_with_a_ring(mode: str) -> None:
    tokens = 1024
    _, peak = measured(NARROW_HEAD, torch.float32, mode, tokens, num_ranks=2)
    model = model_of(NARROW_HEAD, torch.float32, mode)
    estimate = float(model.limits().device_peak(tokens, 0, tokens)) - model.states.device_bytes
    assert estimate == pytest.approx(peak, rel=0.1)


@pytest.mark.parametrize("ratio", [0.5, 1.0])
def test_peak_with_offloading(ratio: float) -> None:
    tokens = 2048
    _, peak = measured(NARROW_HEAD, torch.float32, "none", tokens, ratio=ratio)
    model = model_of(NARROW_HEAD, torch.float32, "none")
    estimate = float(model.limits().device_peak(tokens, int(ratio * tokens), 0)) - model.states.device_bytes
    assert estimate == pytest.approx(peak, rel=0.1)


@pytest.mark.parametrize("mode", one_of(["full", "attention"], "full"))
def test_peak_with_feed_forward_in_chunks(mode: str) -> None:
    """Of four chunks' inner numbers one chunk's exist: the peak falls, to where the estimate says."""
    tokens, rows = 2048, 512
    _, whole = measured(NARROW_HEAD, torch.float32, mode, tokens)
    _, peak = measured(NARROW_HEAD, torch.float32, mode, tokens, chunk_rows=rows)
    model = with_kernels(model_of(NARROW_HEAD, torch.float32, mode), feed_forward_rows=rows)
    estimate = float(model.limits().device_peak(tokens, 0, 0)) - model.states.device_bytes
    assert peak < 0.8 * whole
    assert estimate == pytest.approx(peak, rel=0.1)


def test_as_few_groups_of_heads_as_do() -> None:
    """For a given capacity those with which it fits; else those beyond which there is next to nothing to gain."""
    shape, room = PRESETS["1b"], 80e9
    whole = MemoryModel.on_device(
        ModelShare(architecture=shape), "cuda", element_bytes=2, num_ranks=8, checkpointing="full"
    )

    def fitting(groups: int, moved: float = 0.0) -> int:
        return replace(whole, head_groups=groups).capacity_tokens(room, moved)

    def chosen(capacity: int | None, offload: bool = False) -> int:
        return whole.in_head_groups(room, capacity_tokens=capacity, offload=offload).head_groups

    assert fitting(1) < fitting(2) < fitting(4) < fitting(8) < fitting(8, 1.0)
    assert chosen(8192) == 1
    assert chosen(fitting(1)) == 1
    assert chosen(fitting(1) + 1) == 2
    assert chosen(fitting(4)) == 4
    assert chosen(fitting(8) + 1) == 8  # no number suffices: whoever asked has the most, and finds out
    for offload in (False, True):
        groups = chosen(None, offload)
        assert fitting(groups, float(offload)) >= 0.95 * fitting(8, float(offload))
        assert fitting(groups // 2, float(offload)) < 0.95 * fitting(8, float(offload))
    kept = replace(whole, checkpointing="none")
    assert kept.in_head_groups(room, capacity_tokens=None, offload=True).head_groups == 1
    one_head = with_share(whole, tensor_parallel=8)
    assert one_head.in_head_groups(room, capacity_tokens=None, offload=True).head_groups == 1


@pytest.mark.parametrize(
    ("shape", "gib"),
    [
        (replace(PRESETS["7b"], vocab_size=32000, num_layers=2), 127.6),
        (replace(PRESETS["7b"], vocab_size=32000, num_layers=4), 134.9),
        (PRESETS["1b"], 92.9),
    ],
)
def test_two_million_tokens_on_one_gpu(shape: Architecture, gib: float) -> None:
    """By the estimate, in an H200's 139.8 GiB with 100 GiB of host memory; in one group of heads they do not fit.

    ``benchmarks/gpu.py --only longest`` runs these three.
    """
    tokens, host = 2**21, 100 * 2**30

    def peak(groups: int) -> float:
        model = MemoryModel.on_device(
            ModelShare(architecture=shape), "cuda", element_bytes=2, num_ranks=1, checkpointing="full"
        )
        model = replace(model, head_groups=groups)
        moved = min(tokens, int(0.98 * host / max(1, model.movable_bytes_per_token)))
        return float(model.limits().device_peak(tokens, moved, 0)) / 2**30

    assert peak(8) == pytest.approx(gib, abs=0.1)
    assert peak(1) > 139.7


def test_without_checkpointing_the_feed_forward_part_is_not_in_chunks() -> None:
    """Whatever the model says of rows: a long micro-batch of a 7B model has the temporaries of all its rows."""
    whole = MemoryModel.on_device(ModelShare(architecture=PRESETS["7b"]), "cuda", element_bytes=2, num_ranks=8)
    tokens = 4 * ROWS_PER_CHUNK["cuda"]
    unchunked = with_kernels(whole, feed_forward_rows=math.inf)
    assert float(whole.limits().device_peak(tokens, 0, 0)) == float(unchunked.limits().device_peak(tokens, 0, 0))


CUDA_CASES = [
    *((heads, mode) for heads in (1, 4) for mode in ("none", "full", "attention")),
    (2, "full"),
]


@pytest.mark.parametrize(
    ("num_kv_heads", "mode", "num_ranks", "ratio"),
    one_in(
        8, [(*case, *ranks) for case, ranks in zip(CUDA_CASES * 3, [(1, 0.0), (1, 1.0), (2, 0.0)] * 7, strict=True)]
    ),
)
def test_peak_with_cudas_kernels(
    num_kv_heads: int, mode: str, num_ranks: int, ratio: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Long contexts on a GPU, where flash attention's own sums decide: counted from what its source allocates."""
    tokens, rows = 4096, 256
    shape = replace(NARROW_HEAD, num_kv_heads=num_kv_heads)
    monkeypatch.setitem(LOGITS_PER_CHUNK, "cpu", rows * shape.vocab_size)
    fuse_norms(monkeypatch)
    _, peak = measured(
        shape,
        torch.bfloat16,
        mode,
        tokens,
        ratio=ratio,
        num_ranks=num_ranks,
        chunk_rows=rows,
        kernel=CudaLikeFlash(),
    )
    model = with_kernels(
        model_of(shape, torch.bfloat16, mode),
        fused_norm=True,
        fused_attention=True,
        feed_forward_rows=rows if mode != "none" else math.inf,
    )
    shared = tokens if num_ranks > 1 else 0
    estimate = float(model.limits().device_peak(tokens, int(ratio * tokens), shared)) - model.states.device_bytes
    assert estimate == pytest.approx(peak, rel=0.1)


def test_capacity_is_the_largest_micro_batch_that_fits() -> None:
    model = MemoryModel(
        share=ModelShare(architecture=PRESETS["7b"]),
        element_bytes=2,
        num_ranks=64,
        kernels=KernelMemory(fused_norm=True, fused_loss=True),
    )
    room = 80e9
    capacity = model.capacity_tokens(room)
    assert float(model.limits().device_peak(capacity, 0, capacity)) <= room
    assert float(model.limits().device_peak(capacity + 1, 0, capacity + 1)) > room
    assert model.capacity_tokens(1e9) == 0


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        ({"device_bytes": 1e6}, r"Sequence 0 \(100 tokens over 2 ranks\) needs 3.* on the device of rank 0"),
        ({"host_bytes": 1e4}, r"Sequence 0 .* on the host memory of rank 0 .*25 of them offloaded"),
    ],
)
def test_verify_refuses_what_does_not_fit(limits: dict[str, float], message: str) -> None:
    model = model_of(TINY, torch.float32, "none")
    plan = shared_plan(100, 2, ratio=0.5)
    verify(plan, limits=model.limits())
    with pytest.raises(PlanError, match=message):
        verify(plan, limits=model.limits(**limits))


def test_offloaded_tokens_do_not_count_against_the_capacity() -> None:
    """60 tokens a rank, all offloaded: what is left on the device takes the room of 60 (1 - movable share) tokens."""
    limits = model_of(TINY, torch.float32, "none").limits()
    left = 60 - int(60 * limits.movable_share)
    assert 30 < left < 40  # two of four layers stay, and what the loss needs
    verify(shared_plan(120, 2, ratio=1.0, capacity=left), limits=limits)
    with pytest.raises(PlanError, match="capacity"):
        verify(shared_plan(120, 2, ratio=1.0, capacity=left - 1), limits=limits)
    with pytest.raises(PlanError, match="capacity"):
        verify(shared_plan(120, 2, ratio=0.5, capacity=left), limits=limits)


def test_a_pipeline_holds_as_much_as_its_fullest_stage() -> None:
    """The first stage keeps p micro-batches of 1 / p of the layers: about as many tokens fit as without a pipeline."""
    whole = MemoryModel(
        share=ModelShare(architecture=PRESETS["70b"], tensor_parallel=8),
        element_bytes=2,
        num_ranks=64,
        kernels=KernelMemory(fused_norm=True, fused_loss=True),
    )
    split = with_share(whole, num_stages=4)
    assert sum(stage.share.num_layers for stage in split.stages()) == 80
    assert sum(stage.share.num_parameters for stage in split.stages()) == whole.share.num_parameters
    room = whole.states.device_bytes + 40e9
    least = min(stage.capacity_tokens(stage.states.device_bytes + 40e9) for stage in split.stages())
    assert 0.9 * whole.capacity_tokens(room) < least < 1.1 * whole.capacity_tokens(room)


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
@pytest.mark.parametrize("tp", [1, 4])
def test_a_device_does_chunk_by_chunk_what_the_runtime_does(kind: str, tp: int) -> None:
    dense, mixture = (
        MemoryModel.on_device(
            ModelShare(architecture=PRESETS[name], tensor_parallel=tp),
            kind,  # type: ignore[arg-type]
            element_bytes=2,
            num_ranks=8,
        )
        for name in ("7b", "mixtral-8x7b")
    )
    assert dense.kernels.loss_chunk_tokens == loss_chunk_tokens(PRESETS["7b"].vocab_size // tp, kind)
    assert dense.kernels.feed_forward_rows == ROWS_PER_CHUNK[kind]
    assert mixture.kernels.feed_forward_rows == (ROWS_PER_CHUNK[kind] if tp == 1 else math.inf)
    assert dense.kernels.fused_norm == dense.kernels.fused_loss == (kind == "cuda")


def test_stages_have_their_layers() -> None:
    """The head counts as 2.4 layers, so the last stage has 2 of 6. Two layers of a stage stay on the device."""
    shape = replace(PRESETS["7b"], num_layers=6)
    whole = MemoryModel.on_device(ModelShare(architecture=shape), "cuda", element_bytes=2, num_ranks=8)
    stages = with_share(whole, num_stages=2).stages()
    assert [stage.share.num_layers for stage in stages] == [4, 2]
    assert sum(stage.share.num_parameters for stage in stages) == whole.share.num_parameters
    assert [stage.movable_bytes_per_token > 0 for stage in stages] == [True, False]


@pytest.mark.parametrize(("num_ranks", "columns"), one_of([(4, 2), (6, 3), (8, 4)], (4, 2)))
@pytest.mark.parametrize(("dtype", "mode"), [(torch.float32, "full"), (torch.bfloat16, "attention")])
def test_peak_of_a_grid_within_ten_per_cent(num_ranks: int, columns: int, dtype: torch.dtype, mode: str) -> None:
    shape, tokens = replace(TINY, vocab_size=64, num_layers=3), 768
    _, peak = measured(shape, dtype, mode, tokens, num_ranks=num_ranks, columns=columns)
    model = model_of(shape, dtype, mode, num_ranks)
    estimate = float(model.limits().device_peak(tokens, 0, tokens, (columns - 1) * tokens)) - model.states.device_bytes
    assert estimate == pytest.approx(peak, rel=0.1)
