"""The loss for even use of experts under any plan and mesh: its value and the routers' gradients are one process's."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor, nn

from bytescale.attention import select_kernel
from bytescale.common.errors import ConfigError
from bytescale.hf.model.balance import BalanceLoss
from bytescale.hf.model.decoder import HFDecoder
from bytescale.hf.model.parallelize import parallelize
from bytescale.parity import small_model
from bytescale.plan import Plan, RankPlan
from bytescale.plan.plan import GroupSpec
from bytescale.runtime.executor import Decoder, Executor
from bytescale.runtime.mesh import Mesh, MeshShape
from bytescale.runtime.optimizer.flat import FlatParameters
from bytescale.runtime.optimizer.zero import sum_replicas
from bytescale.runtime.saved.activations import Activations
from tests.helpers.effort import examples
from tests.helpers.plans import random_plan
from tests.helpers.ranks import run_mesh
from tests.helpers.steps import Batch, random_batch, slice_batch
from tests.hf.mesh_steps import plan_of, put_together

WEIGHT = 0.5


def mixture(name: str = "mixtral", **changes: Any) -> Any:
    return small_model(name, dtype=torch.float64, **changes)


def routers_of(model: Any) -> dict[str, nn.Module]:
    return {name: module for name, module in model.named_modules() if type(module).__name__.endswith("Router")}


def one_process(model: Any, batch: Batch) -> tuple[float, dict[str, Tensor]]:
    """The definition, all tokens of the global batch at once; autograd through the routers alone."""
    routers = routers_of(model)
    given: dict[str, list[Tensor]] = {name: [] for name in routers}
    for name, router in routers.items():
        router.register_forward_pre_hook(lambda _, args, name=name: given[name].append(args[0].detach()))
    with torch.no_grad():
        for tokens in batch.tokens:
            model(tokens[None])
    count, chosen_of_token = len(next(iter(routers.values())).weight), model.config.num_experts_per_tok
    total = torch.zeros((), dtype=torch.float64)
    for name, router in routers.items():
        rows = torch.cat([own.reshape(-1, own.shape[-1]) for own in given[name]])
        probabilities = (rows @ router.weight.T).softmax(-1)
        chosen = probabilities.topk(chosen_of_token, dim=-1).indices
        fractions = F.one_hot(chosen, count).sum(1).double().mean(0)
        total = total + count * (fractions * probabilities.mean(0)).sum() / len(routers)
    loss = WEIGHT * total
    loss.backward()
    return float(loss.detach()), {f"{name}.weight": router.weight.grad for name, router in routers.items()}


def on_mesh(
    model: Any, batch: Batch, plan: Plan, shape: MeshShape, checkpointing: str = "none"
) -> tuple[list[float], dict[str, Tensor]]:
    """The loss of the ranks, of every stage once, and gradients without cross-entropy's: labels are masked."""

    def one_rank(mesh: Mesh) -> tuple[float, dict[str, Any]]:
        decoder = HFDecoder(copy.deepcopy(model).train())
        decoder.balance = BalanceLoss(decoder, WEIGHT)
        own = parallelize(decoder, mesh)
        flat = FlatParameters(own.named, 1, own.cuts, late=decoder.late_parameters())
        rank_plan = RankPlan.of(plan, mesh.hdp.rank)
        part = Decoder(
            module=decoder,
            activations=Activations(decoder.layers, checkpointing=checkpointing, tp=mesh.tp),  # type: ignore[arg-type]
            head=decoder.head,
            splits_loss=decoder.splits_loss,
            batch_loss=decoder.balance,
        )
        kernel = select_kernel("math", torch.device("cpu"), torch.float64)
        for _ in range(2):  # the second step must not see the first one's tokens
            flat.zero_gradients()
            result = Executor(part=part, kernel=kernel, mesh=mesh).run(
                rank_plan,
                [slice_batch(batch, micro_batch) for micro_batch in rank_plan.micro_batches],
                num_global_targets=1.0,
            )
        sum_replicas(flat, mesh.tp)
        return result.batch_loss, {entry.name: (entry.cut, flat.gradient_of(entry)) for entry in flat.entries}

    outcomes = run_mesh(shape, one_rank)
    losses = [loss for loss, _ in outcomes]
    return losses, put_together([gradients for _, gradients in outcomes])


def assert_parity(plan: Plan, shape: MeshShape, *, seed: int = 0, mode: str = "none", name: str = "mixtral") -> None:
    model = mixture(name)
    batch = random_batch(plan.lengths.tolist(), model.config.vocab_size, seed, masked_share=1.0)
    expected, gradients = one_process(copy.deepcopy(model), batch)
    losses, found = on_mesh(model, batch, plan, shape, mode)
    assert sum(losses) / (shape.hdp * shape.tp) == pytest.approx(expected, rel=1e-10)
    for weight, gradient in gradients.items():
        torch.testing.assert_close(found[weight], gradient, rtol=1e-9, atol=1e-12)
    assert all(not own.any() for weight, own in found.items() if weight not in gradients)


@examples(2, 15)
@given(
    lengths=st.lists(st.integers(1, 30), min_size=1, max_size=6),
    num_ranks=st.integers(1, 6),
    seed=st.integers(0, 10_000),
    mode=st.sampled_from(["none", "full", "attention"]),
)
@example(lengths=[1], num_ranks=4, seed=0, mode="none")
@example(lengths=[30, 1, 17], num_ranks=3, seed=2, mode="full")
def test_any_plan_gives_the_loss_of_one_process(lengths: list[int], num_ranks: int, seed: int, mode: str) -> None:
    plan = random_plan(lengths, num_ranks, seed, weighted=seed % 3 == 0)
    assert_parity(plan, MeshShape(hdp=num_ranks), seed=seed, mode=mode)


@pytest.mark.parametrize(
    ("shape", "name"),
    [
        (MeshShape(tp=2, pp=2, hdp=1), "mixtral"),
        pytest.param(MeshShape(tp=2, hdp=2), "mixtral", marks=pytest.mark.exhaustive),
        pytest.param(MeshShape(pp=2, hdp=2), "qwen3_moe", marks=pytest.mark.exhaustive),
        pytest.param(MeshShape(tp=2, pp=2, hdp=2), "qwen2_moe", marks=pytest.mark.exhaustive),
    ],
)
def test_any_mesh_gives_the_loss_of_one_process(shape: MeshShape, name: str) -> None:
    assert_parity(plan_of([23, 1, 9, 4, 17], shape, 3), shape, name=name)


def test_ranks_without_work_know_the_loss_too() -> None:
    plan = Plan.build(
        lengths=[9],
        capacity_tokens=[9, 9, 9],
        groups=[GroupSpec(sequences=[0], ranks=[1])],
        schedule=[[], [[0]], []],
    )
    assert_parity(plan, MeshShape(hdp=3))


def test_one_layer_has_the_value_of_transformers() -> None:
    model = mixture(num_hidden_layers=1)
    batch = random_batch([12], model.config.vocab_size, 0)
    loss, _ = one_process(copy.deepcopy(model), batch)
    theirs = model(batch.tokens[0][None], output_router_logits=True).aux_loss
    assert loss == pytest.approx(WEIGHT * theirs.item(), rel=1e-6)


@pytest.mark.parametrize("name", ["llama", "deepseek_v3"])
def test_a_model_without_plain_routers_is_refused_by_name(name: str) -> None:
    """DeepSeek-V3's choice has a bias, which the loss does not know."""
    with pytest.raises(ConfigError, match=r"set model.router_aux_loss_weight to 0"):
        BalanceLoss(HFDecoder(small_model(name, dtype=torch.float32)), WEIGHT)


def test_routers_that_choose_otherwise_are_refused() -> None:
    model = mixture()
    router = next(iter(routers_of(model).values()))
    before = router.forward
    router.forward = lambda rows: (*before(rows)[:2], before(-rows)[2])
    with pytest.raises(ConfigError, match=r"mlp\.gate cannot be attached"):
        BalanceLoss(HFDecoder(model), WEIGHT)
