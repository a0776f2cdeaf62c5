"""What only a GPU can show, on one of them: flash kernels on blocks, NCCL with one rank, bf16 training."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from benchmarks import gpu
from bytescale.models.head_groups import apply_head_groups
from bytescale.models.llama import Attention
from bytescale.models.rope import rope_rotation

from bytescale.attention import PackedAttention
from bytescale.attention.blocks import BlockSet, causal_triangles
from bytescale.attention.flash import FASTEST_FIRST, FlashImplementation, Heads, active, why_not
from bytescale.attention.kernels import CudaFlashKernel, MathKernel, OfQueries
from bytescale.attention.trees import blocks_between
from bytescale.config.architecture import PRESETS
from bytescale.plan import SharedGroup
from bytescale.plan.trees import Forest
from bytescale.runtime.group import RankGroup
from tests.train.runs import losses, small_run, with_trainer, write_corpus

pytestmark = pytest.mark.gpu

HEADS, KV_HEADS, WIDTH = 8, 2, 64


def rows(count: int, heads: int) -> torch.Tensor:
    return torch.randn(count, heads, WIDTH, device="cuda", dtype=torch.bfloat16)


def block_sets() -> list[tuple[str, BlockSet, int, int]]:
    """Triangles of a pack, and what a ring member sees of members before and after it; rows of q and of k."""
    lengths = np.array([300, 1, 77])
    numbers = np.arange(len(lengths))
    group = SharedGroup(0, tuple(range(5)), 0, numbers, lengths, np.ones(5, dtype=np.int64))
    tokens, trees = group.tokens_per_member, Forest.without_trees(numbers, lengths)
    return [
        ("triangles", causal_triangles(lengths), int(lengths.sum()), int(lengths.sum())),
        ("source before", blocks_between(group, trees, 3, 1)[0], int(tokens[3]), int(tokens[1])),
        ("source after", blocks_between(group, trees, 1, 3)[0], int(tokens[1]), int(tokens[3])),
        ("nothing", causal_triangles([]), 0, 0),
        ("window", causal_triangles(lengths, 65), int(lengths.sum()), int(lengths.sum())),
        ("window, more keys", more_keys_than_queries(), 64, 200),
    ]


def more_keys_than_queries() -> BlockSet:
    """What a member computes of keys that a window reaches in others' segments."""
    return BlockSet.of(np.array([[0, 20], [20, 64]]), np.array([[0, 50], [60, 200]]), causal=True, window=31)


@pytest.mark.parametrize("case", range(6))
def test_flash_blocks_equal_the_slow_kernel(case: int) -> None:
    torch.manual_seed(case)
    _, blocks, num_queries, num_keys = block_sets()[case]
    q, dout = rows(num_queries, HEADS), rows(num_queries, HEADS)
    kv = torch.stack([rows(num_keys, KV_HEADS), rows(num_keys, KV_HEADS)], dim=1)  # strided, as in the ring
    k, v = kv[:, 0], kv[:, 1]
    fast, slow = CudaFlashKernel(), MathKernel()
    scale = WIDTH**-0.5
    out, lse = fast.forward(q, k, v, blocks, scale)
    expected_out, expected_lse = slow.forward(q, k, v, blocks, scale)
    torch.testing.assert_close(out, expected_out, rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(lse, expected_lse, rtol=1e-3, atol=1e-3)
    full_out, full_lse = torch.zeros_like(q), torch.zeros(num_queries, HEADS, device="cuda")
    picked = blocks.query_rows(q.device)
    full_out[picked], full_lse[picked] = expected_out, expected_lse
    gradients = fast.backward(OfQueries(dout, q, full_out, full_lse), k, v, blocks, scale)
    expected = slow.backward(OfQueries(dout, q, full_out, full_lse), k, v, blocks, scale)
    for got, wanted in zip(gradients, expected, strict=True):
        torch.testing.assert_close(got, wanted, rtol=3e-2, atol=3e-2)


@pytest.mark.parametrize(
    ("checkpointing", "head_groups"), [("none", 1), ("full", 1), ("full", 4), ("attention", 1), ("attention", 8)]
)
def test_the_estimated_peak_is_the_allocators(checkpointing: str, head_groups: int) -> None:
    """A step of one document, from parameters, gradients and optimizer on; within 10 %."""
    assert_peak(gpu.Device("cuda"), 65536, checkpointing, head_groups)


def assert_peak(device: gpu.Device, tokens: int, checkpointing: str, head_groups: int) -> None:
    shape = replace(PRESETS["1b"], num_layers=5, num_kv_heads=8, vocab_size=8192)
    model = gpu.memory_model(device, shape, checkpointing, head_groups)
    step = gpu.Step(device, shape, [tokens], checkpointing, head_groups=head_groups)
    estimate = float(model.limits().device_peak(tokens, 0, 0)) - model.states.device_bytes
    assert estimate == pytest.approx(device.figures(step, 1)["peak_gib"] * gpu.GIB, rel=0.1)


@pytest.mark.parametrize("implementation", FASTEST_FIRST, ids=lambda implementation: implementation.name)
def test_newer_flash_attention_where_it_is_installed(implementation: FlashImplementation) -> None:
    """All kinds of blocks as FlashAttention 2's, and no more memory than is estimated."""
    device, heads = torch.device("cuda"), Heads(HEADS, KV_HEADS, WIDTH)
    major, _ = torch.cuda.get_device_capability(device)
    reason = why_not(implementation, major, device, torch.bfloat16, heads)
    if reason is not None:
        assert "is installed" not in reason, f"{implementation.name} {reason}"
        pytest.skip(f"{implementation.name} {reason}")
    with active(implementation):
        for case in range(len(block_sets())):
            test_flash_blocks_equal_the_slow_kernel(case)
        assert_peak(gpu.Device("cuda"), 65536, "full", 1)


@pytest.mark.parametrize("num_groups", [2, 4])
def test_groups_of_heads_give_the_numbers_of_all_heads_at_once(num_groups: int) -> None:
    """Flash attention on strided outputs of some heads; sequences in one pack."""
    shape = replace(PRESETS["tiny"], hidden_size=512, num_heads=HEADS, num_kv_heads=4, head_dim=WIDTH)
    micro_batch = gpu.one_micro_batch([300, 1, 77], 0.0).micro_batches[0]
    rotation = rope_rotation(torch.as_tensor(micro_batch.position_ids()).cuda(), shape, torch.bfloat16)

    def results(groups: int) -> list[torch.Tensor]:
        torch.manual_seed(0)
        module = Attention(shape).to(device="cuda", dtype=torch.bfloat16)
        apply_head_groups(module, groups)
        hidden = torch.randn(378, 512, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        out = module(hidden, rotation, PackedAttention(micro_batch, CudaFlashKernel(), RankGroup().exchange))
        out.backward(torch.randn(378, 512, device="cuda", dtype=torch.bfloat16))
        return [out.detach(), hidden.grad, *(weight.grad for weight in module.parameters())]  # type: ignore[list-item]

    for ours, reference in zip(results(num_groups), results(1), strict=True):
        assert float((ours - reference).norm() / reference.norm()) < 1e-2


def test_training_on_one_gpu_follows_the_cpu(tmp_path: Path) -> None:
    """bf16 through NCCL (one rank) against fp32 on the CPU: the same curve to bf16's 8 bits."""
    from bytescale.train.loop.trainer import train

    corpus = write_corpus(tmp_path / "corpus")
    config = small_run(corpus, tmp_path / "cpu", steps=10)
    train(config, print_line=lambda line: None)
    train(
        with_trainer(config, run_dir=str(tmp_path / "gpu"), device="cuda", dtype="bf16"), print_line=lambda line: None
    )
    np.testing.assert_allclose(losses(tmp_path / "gpu"), losses(tmp_path / "cpu"), rtol=0.03)
