"""The sharded optimizer against torch's AdamW in one process."""

from __future__ import annotations

import pytest
import torch

from bytescale.config.overrides import optimizer_options
from bytescale.config.schema import OptimizerConfig
from bytescale.runtime.group import RankGroup
from bytescale.runtime.mesh import Mesh
from bytescale.runtime.optimizer.flat import FlatParameters
from bytescale.runtime.optimizer.sharded_optimizer import ShardedOptimizer
from tests.helpers.decoder import Sizes
from tests.helpers.live_bytes import LiveBytes
from tests.helpers.ranks import run_ranks
from tests.helpers.steps import make_model

STEPS = 4
CONFIG = OptimizerConfig(lr=1e-2, weight_decay=0.2, clip_grad_norm=0.5)


def gradients_of(model: torch.nn.Module, step: int, rank: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(step * 100 + rank)
    return [torch.randn(p.shape, generator=generator, dtype=torch.float64).to(p.dtype) for p in model.parameters()]


def reference_parameters(num_ranks: int) -> dict[str, torch.Tensor]:
    model = make_model(Sizes(), torch.float64)
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    vectors = [p for p in model.parameters() if p.dim() < 2]
    adam = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": CONFIG.weight_decay}, {"params": vectors, "weight_decay": 0.0}],
        lr=CONFIG.lr,
        **optimizer_options(CONFIG),
    )
    for step in range(STEPS):
        shares = zip(*(gradients_of(model, step, rank) for rank in range(num_ranks)), strict=True)
        for parameter, share in zip(model.parameters(), shares, strict=True):
            parameter.grad = sum(share)
        torch.nn.utils.clip_grad_norm_(model.parameters(), CONFIG.clip_grad_norm)
        adam.step()
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def test_flat_parameters_take_six_bytes_at_the_peak() -> None:
    """Of BF16: gradients in FP32 come when the parameters' own memory is free."""
    with LiveBytes() as live:
        model = torch.nn.Sequential(*(torch.nn.Linear(256, 256) for _ in range(8))).to(torch.bfloat16)
        count = sum(parameter.numel() for parameter in model.parameters())
        assert live.now == pytest.approx(2 * count, rel=0.01)
        live.peak = live.now
        FlatParameters(model.named_parameters(), 1)
    assert live.now == pytest.approx(6 * count, rel=0.01)
    assert live.peak <= 6.1 * count


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 5])
def test_sharded_updates_equal_adamw(num_ranks: int) -> None:
    def one_rank(hdp: RankGroup) -> dict[str, torch.Tensor]:
        model = make_model(Sizes(), torch.float64)
        flat = FlatParameters(model.named_parameters(), hdp.size)
        optimizer = ShardedOptimizer.of_config(flat, CONFIG, Mesh.of_hdp(hdp))
        for step in range(STEPS):
            flat.zero_gradients()
            for parameter, gradient in zip(model.parameters(), gradients_of(model, step, hdp.rank), strict=True):
                parameter.grad.add_(gradient)
            share = optimizer.reduce_gradients()
            norm = sum(row[0] for row in hdp.share([share])) ** 0.5
            optimizer.update(norm, CONFIG.clip_grad_norm)
        return {name: p.detach().clone() for name, p in model.named_parameters()}

    reference = reference_parameters(num_ranks)
    for parameters in run_ranks(num_ranks, one_rank):
        for name, expected in reference.items():
            torch.testing.assert_close(parameters[name], expected, rtol=1e-9, atol=1e-12)


def test_bf16_parameters_keep_fp32_master_weights() -> None:
    """A thousand updates far below bf16's resolution must add up, as they do in fp32."""
    model = make_model(Sizes(), torch.bfloat16)
    flat = FlatParameters(model.named_parameters(), 1)
    optimizer = ShardedOptimizer.of_config(
        flat, OptimizerConfig(lr=1e-5, weight_decay=0.0, clip_grad_norm=0.0), Mesh.of_hdp(RankGroup())
    )
    before = model.layers[0].input_layernorm.weight.detach().float().clone()
    for _ in range(1000):
        flat.zero_gradients()
        flat.gradients.fill_(1.0)
        optimizer.reduce_gradients()
        optimizer.update(1.0, 0.0)
    moved = before - model.layers[0].input_layernorm.weight.detach().float()
    # Each update moves a weight by lr: 1000 of them by 0.01, where one alone rounds away (bf16 step at 1.0: 0.004).
    torch.testing.assert_close(moved, torch.full_like(moved, 0.01), rtol=0.25, atol=0.0)


def test_gradients_of_low_precision_micro_batches_are_summed_in_fp32() -> None:
    model = torch.nn.Linear(4, 4, bias=False).to(torch.bfloat16)
    flat = FlatParameters(model.named_parameters(), 1)
    for _ in range(300):  # bf16 cannot count beyond 256
        model(torch.ones(1, 4, dtype=torch.bfloat16)).sum().backward()
    assert flat.gradients[:16].tolist() == [300.0] * 16


def test_layout_does_not_depend_on_the_number_of_shards() -> None:
    layouts = [
        FlatParameters(make_model(Sizes(), torch.float32).named_parameters(), shards).entries for shards in (1, 3, 7)
    ]
    assert layouts[0] == layouts[1] == layouts[2]


def test_parameters_of_several_dtypes_are_refused() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2).double())
    with pytest.raises(ValueError, match="several dtypes"):
        FlatParameters(model.named_parameters(), 1)


def test_an_update_needs_no_copies_of_the_gradients() -> None:
    """They are there when memory is full of states; a norm in fp64 taken whole would need 16 bytes a weight."""
    model = torch.nn.Linear(4096, 4096, bias=False)
    flat = FlatParameters(model.named_parameters(), 1)
    optimizer = ShardedOptimizer.of_config(flat, CONFIG, Mesh.of_hdp(RankGroup()))
    flat.gradients.fill_(0.01)
    optimizer.update(optimizer.reduce_gradients() ** 0.5, CONFIG.clip_grad_norm)  # makes the states
    with LiveBytes() as live:
        share = optimizer.reduce_gradients()
        optimizer.update(share**0.5, CONFIG.clip_grad_norm)
    assert share == pytest.approx(CONFIG.clip_grad_norm**2, rel=1e-4)
    assert live.peak < 6 * flat.gradients.numel()
