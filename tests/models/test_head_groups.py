"""Attention in groups of heads gives the same numbers up to rounding, and computes nothing unnecessary."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor

from bytescale.attention import PackedAttention, select_kernel
from bytescale.attention.kernels import CpuFlashKernel
from bytescale.config.architecture import Architecture
from bytescale.models.head_groups import apply_head_groups
from bytescale.models.llama import Attention
from bytescale.models.rope import rope_rotation
from bytescale.plan import MicroBatch, Plan, RankPlan
from bytescale.plan.plan import GroupSpec
from bytescale.runtime.group import RankGroup
from tests.helpers.steps import small_shape

LENGTHS = [30, 1, 17]


def micro_batch() -> MicroBatch:
    groups = [GroupSpec(sequences=list(range(len(LENGTHS))), ranks=[0])]
    plan = Plan.build(lengths=LENGTHS, capacity_tokens=[sum(LENGTHS)], groups=groups, schedule=[[[0]]])
    return RankPlan.of(plan, 0).micro_batches[0]


def results(
    shape: Architecture, dtype: torch.dtype, num_groups: int, compute: torch.dtype, kernel: str = "math"
) -> list[Tensor]:
    """Output, gradient of the input and of every weight of one attention block, whose numbers are ``dtype``'s."""
    torch.manual_seed(0)
    module = Attention(shape).to(dtype).to(compute)
    apply_head_groups(module, num_groups)
    hidden = torch.randn(sum(LENGTHS), shape.hidden_size).to(dtype).to(compute).requires_grad_()
    upstream = torch.randn(sum(LENGTHS), shape.hidden_size).to(dtype).to(compute)
    batch = micro_batch()
    rotation = rope_rotation(torch.as_tensor(batch.position_ids()), shape, compute)
    chosen = select_kernel(kernel, torch.device("cpu"), compute)
    out = module(hidden, rotation, PackedAttention(batch, chosen, RankGroup().exchange))
    out.backward(upstream)
    assert hidden.grad is not None
    return [out.detach(), hidden.grad, *(weight.grad for weight in module.parameters())]  # type: ignore[list-item]


@pytest.mark.parametrize("kernel", ["math", "flash"])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "num_groups"), [(4, 4, 2), (4, 4, 4), (8, 4, 2), (8, 2, 2), (6, 3, 3), (6, 6, 3)]
)
def test_groups_give_the_numbers_of_all_heads_at_once(heads: int, kv_heads: int, num_groups: int, kernel: str) -> None:
    shape = small_shape(num_heads=heads, num_kv_heads=kv_heads)
    ours = results(shape, torch.float64, num_groups, torch.float64, kernel)
    at_once = results(shape, torch.float64, 1, torch.float64, kernel)
    for mine, reference in zip(ours, at_once, strict=True):
        torch.testing.assert_close(mine, reference, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("num_groups", [2, 4, 8])
def test_in_bf16_groups_are_about_as_near_to_the_truth_as_all_heads_at_once(num_groups: int) -> None:
    """The input's gradient is rounded after every group."""
    shape = small_shape(hidden_size=64, num_heads=16, num_kv_heads=8, head_dim=8)
    truth = results(shape, torch.bfloat16, 1, torch.float64)

    def errors(groups: int) -> list[float]:
        ours = results(shape, torch.bfloat16, groups, torch.bfloat16)
        return [float((a.double() - b).norm() / b.norm()) for a, b in zip(ours, truth, strict=True)]

    for grouped, at_once in zip(errors(num_groups), errors(1), strict=True):
        assert grouped <= 1.5 * at_once


def test_backward_does_not_compute_attention_again(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    forward = CpuFlashKernel.forward

    def counted(self: CpuFlashKernel, q: Tensor, *rest: object) -> tuple[Tensor, Tensor]:
        calls.append(q.shape[1])
        return forward(self, q, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(CpuFlashKernel, "forward", counted)
    results(small_shape(num_heads=4, num_kv_heads=2), torch.float32, 2, torch.float32, "flash")
    assert calls == [2, 2]


def test_unequal_groups_are_refused() -> None:
    module = Attention(small_shape(num_heads=6, num_kv_heads=3))
    with pytest.raises(ValueError, match="3 key/value heads do not make 2 equal groups"):
        apply_head_groups(module, 2)


def test_one_group_changes_nothing() -> None:
    module = Attention(small_shape())
    before = copy.copy(module.__dict__)
    apply_head_groups(module, 1)
    assert module.__dict__ == before
