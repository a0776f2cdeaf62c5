"""Mixture of experts as mathematics: grouped products against the loop, routing, the load-balancing loss."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from bytescale.common.errors import ConfigError
from bytescale.config.architecture import PRESETS
from bytescale.config.resolve import resolve_model
from bytescale.config.schema import ModelConfig
from bytescale.models import Llama, Mixtral, build_model
from bytescale.models.balance import count_tokens
from bytescale.models.moe import ExpertProducts, expert_products, grouped_products, looped_products, route
from tests.helpers.reference_attention import reference_attention
from tests.helpers.steps import make_model, small_shape

MIXTURE = {"num_experts": 4, "experts_per_token": 2}
COUNTS = {"mixed": [5, 0, 7, 1], "one expert": [0, 0, 9, 0], "no token": [0, 0, 0, 0], "first and last": [3, 0, 0, 4]}


def outcome(products: ExpertProducts, counts: list[int], dtype: torch.dtype, device: str) -> list[Tensor]:
    """Result and gradients of rows and of all three weights, for the same random numbers."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(sum(counts), 24), (4, 40, 24), (4, 40, 24), (4, 24, 40), (sum(counts), 24)]
    *inputs, seed = (torch.randn(shape, generator=generator).to(device, dtype) for shape in shapes)
    for tensor in inputs:
        tensor.requires_grad_()
    rows, gate, up, down = inputs
    out = products(rows, torch.tensor(counts, device=device), gate, up, down)
    out.backward(seed)
    gradients = [tensor.grad for tensor in inputs]
    return [
        out.detach(),
        *(g if g is not None else torch.zeros_like(t) for g, t in zip(gradients, inputs, strict=True)),
    ]


def assert_products_agree(counts: list[int], dtype: torch.dtype, device: str) -> None:
    fast, slow = (outcome(products, counts, dtype, device) for products in (grouped_products, looped_products))
    tolerance = 1e-5 if dtype == torch.float32 else 0.03  # bf16: 8 bits, kept between the two products
    for ours, theirs in zip(fast, slow, strict=True):
        scale = float(theirs.abs().max()) if theirs.numel() else 1.0
        torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance * max(scale, 1e-6))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS.keys())
def test_grouped_products_agree_with_the_loop(counts: list[int], dtype: torch.dtype) -> None:
    assert_products_agree(counts, dtype, "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS.keys())
def test_grouped_products_agree_with_the_loop_on_a_gpu(counts: list[int], dtype: torch.dtype) -> None:
    assert_products_agree(counts, dtype, "cuda")


def test_only_fp64_goes_through_the_loop() -> None:
    assert expert_products(torch.float64) is looped_products
    assert {expert_products(dtype) for dtype in (torch.float32, torch.bfloat16)} == {grouped_products}


def test_weights_of_the_chosen_sum_to_one_and_the_likeliest_come_first() -> None:
    logits = torch.tensor([[0.0, 2.0, 1.0], [3.0, 0.0, 0.0]])
    weights, chosen = route(logits, 2)
    assert chosen[0].tolist() == [1, 2]
    assert chosen[1, 0] == 0
    torch.testing.assert_close(weights.sum(-1), torch.ones(2))
    torch.testing.assert_close(weights[0, 0] / weights[0, 1], torch.tensor(1.0).exp())
    assert count_tokens(chosen, 3).sum() == 4


def test_the_family_follows_the_architecture() -> None:
    assert type(build_model(small_shape())) is Llama
    assert isinstance(build_model(small_shape(**MIXTURE)), Mixtral)


def test_routing_is_in_fp32_for_bf16_weights() -> None:
    model = make_model(small_shape(**MIXTURE), torch.bfloat16)
    logits = model.layers[0].mlp.router(torch.randn(3, 24, dtype=torch.bfloat16))
    assert logits.dtype == torch.float32


@pytest.mark.parametrize("num_layers", [1, 3])
def test_the_balance_loss_against_hugging_face(num_layers: int) -> None:
    """Equal for one layer; for several, ours is the mean of each layer's."""
    from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

    shape = small_shape(**MIXTURE, num_layers=num_layers, router_aux_loss_weight=1.0, init_std=0.3)
    model = make_model(shape, torch.float64)
    logits: list[Tensor] = []
    for layer in model.layers:
        layer.mlp.router.register_forward_hook(lambda module, args, output: logits.append(output.detach()))
    model.begin_batch()
    hidden = model(torch.arange(40), torch.arange(40), lambda q, k, v: reference_attention(q, k, v, [len(q)]))
    hidden.square().sum().backward()
    ours = float(model.batch_loss(model.batch_sums()).detach())
    theirs = [float(load_balancing_loss_func((rows,), 4, 2)) for rows in logits]
    assert ours == pytest.approx(sum(theirs) / num_layers, rel=1e-6)  # theirs sums in fp32
    assert ours >= 2.0  # even use of 4 experts, 2 of them per token, is the least


def test_a_weight_of_zero_switches_the_balance_loss_off() -> None:
    model = make_model(small_shape(**MIXTURE), torch.float32)
    assert isinstance(model, Mixtral)
    assert model.batch_sums() is None
    assert all(layer.mlp.balance is None for layer in model.layers)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"experts_per_token": 9}, "experts_per_token is 9 and model.num_experts 8.*use 1 to num_experts"),
        ({"num_experts": 0}, "experts_per_token is 2 and model.num_experts 0"),
        ({"ffn_hidden_size": 100}, "ffn_hidden_size is 100, not a multiple of 8.*use 104"),
        ({"router_aux_loss_weight": -1.0}, "router_aux_loss_weight is -1.0"),
    ],
)
def test_shapes_that_cannot_be_are_refused(changes: dict[str, int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        resolve_model(ModelConfig(preset="tiny-moe", **changes))  # type: ignore[arg-type]


def test_presets_are_the_papers() -> None:
    big, small = PRESETS["mixtral-8x22b"], PRESETS["mixtral-8x7b"]
    assert (small.num_layers, small.num_heads, small.num_kv_heads, small.hidden_size) == (32, 32, 8, 4096)
    assert (big.num_layers, big.num_heads, big.num_kv_heads, big.hidden_size) == (56, 48, 8, 6144)
    assert {(p.num_experts, p.experts_per_token) for p in (big, small, PRESETS["tiny-moe"])} == {(8, 2)}
    assert replace(small, num_experts=0, experts_per_token=0, router_aux_loss_weight=0.0).ffn_hidden_size == 14336
