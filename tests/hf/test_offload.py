"""Activations of a user's loop that are offloaded or computed again: the same bits, and longer documents on a rank."""

from __future__ import annotations

import copy
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import bytescale
from bytescale.attention import select_kernel
from bytescale.common.errors import ConfigError, PlanError
from bytescale.cost.memory.device_memory import States
from bytescale.hf.model.counting import LiveBytes
from bytescale.hf.model.measure import measure_rows, measured_memory
from bytescale.plan import Plan
from tests.helpers.effort import one_of

from .support import documents, on_ranks, plain_update, printed_loop, small_model

LENGTHS = [60, 11, 4, 35]


def deep_model(name: str = "qwen3", num_layers: int = 5) -> Any:
    return small_model(name, num_hidden_layers=num_layers)


def gradients(hdp: bytescale.HDP, model: nn.Module, plan: Plan) -> dict[str, Tensor]:
    hdp.adamw(lr=1e-3)
    printed_loop(hdp, model, documents(LENGTHS), plan=plan)
    return hdp.gradients()


@pytest.mark.parametrize("checkpointing", one_of(["none", "attention", "full"], "attention"))
def test_gradients_have_the_same_bits(checkpointing: str) -> None:
    """Two ranks share the longest document; all of it, some of the others, or nothing of them moves."""
    plan = bytescale.make_planner(num_ranks=2, capacity_tokens=40)(np.array(LENGTHS))
    ratios = np.array([1.0, 0.0, 0.6] * plan.num_groups)[: plan.num_groups]
    moving = replace(plan, group_offload_ratio=ratios)

    def with_offload(group: dist.ProcessGroup, model: nn.Module) -> dict[str, Tensor]:
        hdp = bytescale.HDP(
            model,
            group,
            capacity_tokens=40,
            checkpointing=checkpointing,  # type: ignore[arg-type]
            host_gib=0.25,
        )
        offload = hdp.engine.activations.offload
        assert offload is not None
        before = offload.bytes_moved
        found = gradients(hdp, model, moving)
        assert offload.bytes_moved > before
        assert offload.pool.bytes_in_use == 0
        return found

    def without(group: dist.ProcessGroup, model: nn.Module) -> dict[str, Tensor]:
        return gradients(bytescale.HDP(model, group, capacity_tokens=40), model, plan)

    model = deep_model()
    for ours, reference in zip(on_ranks(2, model, with_offload), on_ranks(2, model, without), strict=True):
        assert ours.keys() == reference.keys()
        assert all(torch.equal(value, reference[name]) for name, value in ours.items())


def test_one_rank_trains_on_documents_that_it_could_not_hold() -> None:
    """A capacity of 40 and a document of 60; the update is that of plain transformers."""
    batch, model = documents(LENGTHS), deep_model(num_layers=6)
    plain = copy.deepcopy(model)
    expected = plain_update(plain, batch, torch.optim.AdamW(plain.parameters(), lr=1e-3), 1.0)
    with pytest.raises(PlanError):
        bytescale.HDP(copy.deepcopy(model), capacity_tokens=40).plan(batch)
    hdp = bytescale.HDP(model, capacity_tokens=40, host_gib=0.25)
    hdp.adamw(lr=1e-3)
    assert all(not bool(gradient.any()) for gradient in hdp.gradients().values()), "measuring leaves no gradients"
    offload = hdp.engine.activations.offload
    assert offload is not None
    before = offload.bytes_moved
    losses = []
    for micro in hdp.plan(batch):  # twice the same rows, as policies and their references; backward comes at the end
        losses += [micro.loss_sum(model), micro.loss_sum(model)]
    total = sum(float(d["weights"].sum()) for d in batch)
    (sum(losses) / (2 * total)).backward()  # type: ignore[union-attr]
    assert offload.bytes_moved > before
    hdp.step()
    assert float(sum(losses).detach()) / (2 * total) == pytest.approx(expected, rel=1e-9)  # type: ignore[union-attr]
    for name, value in plain.named_parameters():
        torch.testing.assert_close(model.get_parameter(name), value, rtol=1e-6, atol=1e-9)
    assert offload.pool.bytes_in_use == 0


def test_detaching_and_copies_leave_nothing_behind() -> None:
    model, batch = deep_model(), documents(LENGTHS)
    hdp = bytescale.HDP(model, capacity_tokens=200, checkpointing="full", host_gib=0.25)
    other = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(1.5)
    tokens = batch[0]["tokens"][None]
    assert not torch.equal(other(input_ids=tokens).logits, model(input_ids=tokens).logits), "its own weights"
    for layer in model.model.layers:
        assert "forward" in vars(layer)
    hdp.detach()
    fresh = deep_model()
    assert torch.equal(fresh(input_ids=tokens).logits, model(input_ids=tokens).logits)
    for layer, bare in zip(model.model.layers, fresh.model.layers, strict=True):
        assert "forward" not in vars(layer)
        assert len(layer._forward_pre_hooks) == len(bare._forward_pre_hooks)


def test_an_optimizer_without_room_in_host_memory_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = deep_model()
    hdp = bytescale.HDP(model, capacity_tokens=100)
    monkeypatch.setattr("bytescale.common.environment.machine_bytes", lambda: 1000.0)
    with pytest.raises(ConfigError, match=r"ost memory is too small.* 800 B that a rank may use"):
        hdp.adamw(lr=1e-2, offload=True)
    assert not hdp.has_optimizer
    states = States(
        num_parameters=sum(p.numel() for p in model.parameters()), element_bytes=8, num_ranks=1, on_host=True
    )
    monkeypatch.setattr("bytescale.common.environment.machine_bytes", lambda: 0.9 * states.host_bytes / 0.8)
    with pytest.raises(ConfigError, match="ost memory is too small"):  # FP64, of which each number takes 8 bytes
        hdp.adamw(lr=1e-2, offload=True)
    monkeypatch.undo()
    hdp.adamw(lr=1e-2, offload=True)


def test_what_cannot_be_offloaded_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"frees no memory of this model of 2 layers.*last two layers"):
        bytescale.HDP(deep_model(num_layers=2), capacity_tokens=100, host_gib=0.1)
    with pytest.raises(ConfigError, match=r"host_gib = 0.1 with forward_only = True"):
        bytescale.HDP(deep_model(), capacity_tokens=100, host_gib=0.1, forward_only=True)
    with pytest.raises(ConfigError, match=r"host_gib = 0.1 with equal_counts = True"):
        bytescale.HDP(deep_model(), capacity_tokens=100, host_gib=0.1, equal_counts=True)
    plan = bytescale.make_planner(num_ranks=1, capacity_tokens=200)(np.array(LENGTHS))
    moving = replace(plan, group_offload_ratio=np.ones(plan.num_groups))
    model = deep_model()
    with pytest.raises(PlanError, match=r"no host memory for activations.*HDP\(host_gib="):
        printed_loop(bytescale.HDP(model, capacity_tokens=200), model, documents(LENGTHS), plan=moving)


def test_a_capacity_is_found_and_kept_to() -> None:
    """``auto`` fits into the memory that is given, its estimate is what training needs, and larger ones are refused."""
    shape = {"num_hidden_layers": 4, "hidden_size": 128, "intermediate_size": 512}
    model = small_model("llama", dtype=torch.float32, **shape)
    hdp = bytescale.HDP(model, capacity_tokens="auto", device_gib=0.05)
    tokens = hdp.capacity_tokens
    assert hdp.room.memory is not None
    assert hdp.room.limits is not None
    estimate = float(hdp.room.limits.device_peak(tokens, 0, 0))
    assert estimate < 0.05 * 2**30 < float(hdp.room.limits.device_peak(tokens + 1, 0, tokens + 1))
    hdp.adamw(lr=1e-3)
    with LiveBytes() as live:
        for micro in hdp.plan(documents([tokens])):
            micro.loss_sum(model).backward()
    states = hdp.room.memory.states
    assert states.parameter_bytes + states.gradient_bytes + states.optimizer_bytes + live.peak == pytest.approx(
        estimate, rel=0.1
    )
    with pytest.raises(PlanError, match=r"needs .* on the device of rank 0"):  # grids are checked in the same way
        hdp.plan(documents([2 * tokens]), capacity_tokens=2 * tokens)
    with torch.no_grad():
        hdp.plan(documents([2 * tokens]), capacity_tokens=2 * tokens)
    small = partial(bytescale.HDP, small_model("llama", dtype=torch.float32, **shape))
    with pytest.raises(ConfigError, match=rf"capacity_tokens = {2 * tokens} needs .* to {tokens} or less"):
        small(capacity_tokens=2 * tokens, device_gib=0.05)
    with pytest.raises(ConfigError, match="Not one token would fit"):
        small(capacity_tokens="auto", device_gib=0.001)
    with pytest.raises(ConfigError, match=r'give a number of tokens, or "auto"'):
        small(capacity_tokens="full")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r'capacity_tokens = "auto" with forward_only = True'):
        small(capacity_tokens="auto", forward_only=True)


def test_gradients_that_do_not_exist_yet_do_not_hide_the_peak_of_layers() -> None:
    """What a token needs is the same before there is an optimizer and after, when gradients are in flat memory."""
    model = small_model("llama", dtype=torch.float32, num_hidden_layers=4, hidden_size=128, intermediate_size=512)
    cpu = torch.device("cpu")
    hdp = bytescale.HDP(model, capacity_tokens=64, checkpointing="full", host_gib=0.1)
    rule = hdp.planner.cluster.offload
    assert rule is not None
    assert all(parameter.grad is None for parameter in model.parameters())
    hdp.adamw(lr=0.0)
    rows = measure_rows(hdp.engine.decoder, select_kernel("auto", cpu, torch.float32), hdp.engine.activations, cpu)
    memory = measured_memory(hdp.engine.decoder, rows, kind="cpu", num_ranks=1)
    assert rule.movable_share == pytest.approx(memory.limits().movable_share, rel=0.02)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["qwen3_5_text", "qwen3_next", "olmo_hybrid", "lfm2"])
@pytest.mark.parametrize(("num_ranks", "shard"), [(3, "optimizer"), (4, "optimizer"), (4, "parameters")])
def test_recurrent_models_offload_on_several_ranks_and_end(name: str, num_ranks: int, shard: str) -> None:
    """Bounded in time by the threads' own limit; all ranks report one norm."""
    recurrent = "conv" if name == "lfm2" else "linear_attention"
    model = small_model(name, layer_types=[recurrent, "full_attention"] * 2, num_hidden_layers=4)

    def work(group: dist.ProcessGroup, own: nn.Module) -> tuple[float, int]:
        domain = 2 if shard == "parameters" else None
        hdp = bytescale.HDP(own, group, capacity_tokens=40, host_gib=0.25, shard=shard, domain=domain)
        hdp.adamw(lr=1e-3)
        for micro in hdp.plan(documents([40 * num_ranks + 10, 20, 9, 33])):
            micro.loss_sum(own).backward()
        assert hdp.engine.activations.offload is not None
        return hdp.step().grad_norm, hdp.engine.activations.offload.bytes_moved

    found = on_ranks(num_ranks, model, work)
    assert len({norm for norm, _ in found}) == 1
    assert any(moved for _, moved in found)
