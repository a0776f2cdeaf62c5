"""What only a GPU can show, on one of them: flash kernels on blocks, NCCL with one rank, bf16 training."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from benchmarks import gpu

from bytescale.attention.blocks import BlockSet, causal_triangles
from bytescale.attention.flash import FASTEST_FIRST, FlashImplementation, Heads, active, why_not
from bytescale.attention.kernels import CudaFlashKernel, MathKernel, OfQueries
from bytescale.attention.trees import blocks_between
from bytescale.plan import SharedGroup
from bytescale.plan.trees import Forest
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


@pytest.mark.parametrize("checkpointing", ["none", "full", "attention"])
def test_the_estimated_peak_is_the_allocators(checkpointing: str) -> None:
    """A step of one document, from parameters, gradients and optimizer on; within 10 %."""
    assert_peak(gpu.Device("cuda"), 65536, checkpointing)


def assert_peak(device: gpu.Device, tokens: int, checkpointing: str) -> None:
    sizes = replace(gpu.B1, num_layers=5, num_kv_heads=8, vocab_size=8192)
    step = gpu.Step(device, sizes, [tokens], checkpointing)
    estimate = float(step.memory.limits().device_peak(tokens, 0, 0)) - step.memory.states.device_bytes
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
        assert_peak(gpu.Device("cuda"), 65536, "full")


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
