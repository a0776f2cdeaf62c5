"""Mixture of experts under any plan: loss, load-balancing loss and every gradient are those of one process."""

from __future__ import annotations

import pytest
import torch
from bytescale.models import Mixtral
from bytescale.models.moe import MixtureOfExperts, looped_products, route
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor

from bytescale.attention import select_kernel
from bytescale.config.architecture import Architecture
from bytescale.plan import Plan, RankPlan
from bytescale.plan.plan import GroupSpec
from bytescale.runtime.executor import Decoder, Executor
from bytescale.runtime.group import RankGroup
from bytescale.runtime.mesh import Mesh
from bytescale.runtime.optimizer.flat import FlatParameters
from bytescale.runtime.saved.activations import Activations
from tests.helpers.effort import examples
from tests.helpers.plans import random_plan
from tests.helpers.ranks import run_ranks
from tests.helpers.reference_attention import reference_attention
from tests.helpers.reference_loss import reference_cross_entropy
from tests.helpers.steps import Batch, random_batch, slice_batch, worst_relative_error
from tests.models.own import make_model, small_shape

# fp64 differs only in the order of sums; fp32 keeps 24 bits and sums some hundred terms.
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5}


def moe_shape(**changes: object) -> Architecture:
    experts = {"num_experts": 5, "experts_per_token": 2, "router_aux_loss_weight": 0.5, "init_std": 0.2}
    return small_shape(**{**experts, **changes})


def obvious_balance_loss(shape: Architecture, router_inputs: list[list[Tensor]], model: Mixtral) -> Tensor:
    """The definition, all tokens of the global batch at once, autograd through the routers alone."""
    total = torch.zeros(())
    for layer, inputs in zip(model.layers, router_inputs, strict=True):
        probabilities = (torch.cat(inputs).detach() @ layer.mlp.router.weight.T).softmax(-1)
        _, chosen = route(probabilities.log(), shape.experts_per_token)
        fractions = torch.nn.functional.one_hot(chosen, shape.num_experts).sum(1).to(probabilities.dtype).mean(0)
        total = total + shape.num_experts * (fractions * probabilities.mean(0)).sum() / shape.num_layers
    return shape.router_aux_loss_weight * total


def reference(shape: Architecture, dtype: torch.dtype, batch: Batch) -> tuple[float, float, dict[str, Tensor]]:
    """Loss, balance loss and gradients of one process: documents one by one, experts one by one."""
    model = make_model(shape, dtype)
    router_inputs: list[list[Tensor]] = [[] for _ in model.layers]
    for layer, inputs in zip(model.layers, router_inputs, strict=True):
        layer.mlp.forward = slow_mixture(layer.mlp, inputs)
    loss = torch.zeros((), dtype=dtype)
    for tokens, labels in zip(batch.tokens, batch.labels, strict=True):
        hidden = model(tokens, torch.arange(len(tokens)), lambda q, k, v: reference_attention(q, k, v, [len(q)]))
        loss = loss + reference_cross_entropy(hidden, model.head_weight, labels) / batch.num_targets
    balance = obvious_balance_loss(shape, router_inputs, model)
    (loss + balance).backward()
    return float(loss.detach()), float(balance.detach()), {name: p.grad for name, p in model.named_parameters()}


def slow_mixture(mixture: MixtureOfExperts, inputs: list[Tensor]):
    """A forward that runs every expert on every token and multiplies with a mostly empty weight matrix."""

    def forward(hidden: Tensor) -> Tensor:
        inputs.append(hidden)
        weights, chosen = route(hidden @ mixture.router.weight.T, mixture.experts_per_token)
        experts = mixture.experts
        dense = torch.zeros(len(hidden), len(experts.gate_proj), dtype=hidden.dtype).scatter(1, chosen, weights)
        outputs = [
            looped_products(hidden, torch.tensor([len(hidden)]), gate[None], up[None], down[None])
            for gate, up, down in zip(experts.gate_proj, experts.up_proj, experts.down_proj, strict=True)
        ]
        return torch.einsum("te,etc->tc", dense, torch.stack(outputs))

    return forward


def planned(
    shape: Architecture, dtype: torch.dtype, batch: Batch, plan: Plan, checkpointing: str = "none"
) -> tuple[float, list[float], dict[str, Tensor]]:
    """Loss, every rank's balance loss, and gradients as the reduce-scatter sums them."""

    def one_rank(hdp: RankGroup):
        model = make_model(shape, dtype)
        flat = FlatParameters(model.named_parameters(), hdp.size)
        rank_plan = RankPlan.of(plan, hdp.rank)
        activations = Activations(list(model.layers), checkpointing=checkpointing)  # type: ignore[arg-type]
        for _ in range(2):  # the second step must not see the first one's tokens
            flat.zero_gradients()
            result = Executor(
                part=Decoder(module=model, activations=activations),
                kernel=select_kernel("auto", torch.device("cpu"), dtype),
                mesh=Mesh.of_hdp(hdp),
            ).run(
                rank_plan,
                [slice_batch(batch, micro_batch) for micro_batch in rank_plan.micro_batches],
                num_global_targets=batch.num_targets,
            )
        return result, hdp.reduce_scatter(flat.gradients), flat.entries

    outcomes = run_ranks(plan.num_ranks, one_rank)
    flat_gradient = torch.cat([shard for _, shard, _ in outcomes])
    gradients = {e.name: flat_gradient[e.start : e.stop].view(e.shape) for e in outcomes[0][2]}
    loss = sum(result.loss_sum for result, _, _ in outcomes) / batch.num_targets
    return loss, [result.batch_loss for result, _, _ in outcomes], gradients


def assert_parity(plan: Plan, lengths: list[int], dtype: torch.dtype, *, seed: int = 0, mode: str = "none") -> None:
    shape = moe_shape()
    batch = random_batch(lengths, shape.vocab_size, seed)
    if batch.num_targets == 0:
        batch.labels[0][0] = 1
    loss, balance, gradients = reference(shape, dtype, batch)
    our_loss, our_balances, our_gradients = planned(shape, dtype, batch, plan, mode)
    assert our_loss == pytest.approx(loss, rel=TOLERANCE[dtype])
    assert our_balances == pytest.approx([balance] * plan.num_ranks, rel=TOLERANCE[dtype])
    assert worst_relative_error(our_gradients, gradients) <= TOLERANCE[dtype]


@examples(3, 20)
@given(
    lengths=st.lists(st.integers(1, 50), min_size=1, max_size=8),
    num_ranks=st.integers(1, 8),
    seed=st.integers(0, 10_000),
    dtype=st.sampled_from([torch.float64, torch.float32]),
    mode=st.sampled_from(["none", "full", "attention"]),
)
@example(lengths=[1], num_ranks=8, seed=0, dtype=torch.float64, mode="none")
@example(lengths=[50, 1, 33], num_ranks=7, seed=2, dtype=torch.float32, mode="full")
def test_any_plan_gives_the_losses_and_gradients_of_one_process(
    lengths: list[int], num_ranks: int, seed: int, dtype: torch.dtype, mode: str
) -> None:
    plan = random_plan(lengths, num_ranks, seed, weighted=seed % 3 == 0)
    assert_parity(plan, lengths, dtype, seed=seed, mode=mode)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_ranks_without_work_know_the_balance_loss_too(dtype: torch.dtype) -> None:
    plan = Plan.build(
        lengths=[9],
        capacity_tokens=[9, 9, 9],
        groups=[GroupSpec(sequences=[0], ranks=[1])],
        schedule=[[], [[0]], []],
    )
    assert_parity(plan, [9], dtype)
