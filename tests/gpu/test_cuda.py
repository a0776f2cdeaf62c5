"""What only a GPU can show, on one of them: flash kernels on blocks, NCCL with one rank, bf16 training."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from bytescale.attention.blocks import BlockSet, causal_triangles, ring_blocks
from bytescale.attention.kernels import CudaFlashKernel, MathKernel
from bytescale.plan import member_chunks
from tests.train.runs import losses, small_run, with_trainer, write_corpus

pytestmark = pytest.mark.gpu

HEADS, KV_HEADS, WIDTH = 8, 2, 64


def rows(count: int, heads: int) -> torch.Tensor:
    return torch.randn(count, heads, WIDTH, device="cuda", dtype=torch.bfloat16)


def block_sets() -> list[tuple[str, BlockSet, int, int]]:
    """Triangles of a pack, and what a ring member sees of members before and after it; rows of q and of k."""
    lengths = np.array([300, 1, 77])
    chunks = member_chunks(lengths, np.ones(5, dtype=np.int64))
    tokens = (chunks[0] + chunks[1]).sum(axis=0)
    return [
        ("triangles", causal_triangles(lengths), int(lengths.sum()), int(lengths.sum())),
        ("source before", ring_blocks(chunks, 3, 1), int(tokens[3]), int(tokens[1])),
        ("source after", ring_blocks(chunks, 1, 3), int(tokens[1]), int(tokens[3])),
        ("nothing", causal_triangles([]), 0, 0),
    ]


@pytest.mark.parametrize("case", range(4))
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
    gradients = fast.backward(dout, q, k, v, full_out, full_lse, blocks, scale)
    expected = slow.backward(dout, q, k, v, full_out, full_lse, blocks, scale)
    for got, wanted in zip(gradients, expected, strict=True):
        torch.testing.assert_close(got, wanted, rtol=3e-2, atol=3e-2)


def test_training_on_one_gpu_follows_the_cpu(tmp_path: Path) -> None:
    """bf16 through NCCL (one rank) against fp32 on the CPU: the same curve to bf16's 8 bits."""
    from bytescale.train import train

    corpus = write_corpus(tmp_path / "corpus")
    config = small_run(corpus, tmp_path / "cpu", steps=10)
    train(config, print_line=lambda line: None)
    train(
        with_trainer(config, run_dir=str(tmp_path / "gpu"), device="cuda", dtype="bf16"), print_line=lambda line: None
    )
    np.testing.assert_allclose(losses(tmp_path / "gpu"), losses(tmp_path / "cpu"), rtol=0.03)
