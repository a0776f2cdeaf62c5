"""Loss, log-probabilities and every gradient of many families, equal to plain transformers on one process."""

from __future__ import annotations

import copy
import time

import psutil
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from bytescale import HDP
from bytescale.parity import FAMILIES, Setup, compare, small_model
from bytescale.parity.__main__ import TOLERANCE, main
from bytescale.parity.compare import WideCasts
from bytescale.parity.thread_ranks import run_ranks
from bytescale.plan import Plan
from bytescale.plan.plan import GroupSpec

from .support import documents, on_ranks, plain_update, printed_loop

CHUNKED = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "olmo_hybrid", "kimi_linear")
"""Delta rules solve a triangular system for every chunk, which loses more of fp32 than sums do."""
QUICK = ("llama", "mixtral", "granite", "gpt2", "opt", "gemma2", "gpt_oss", "deepseek_v3", "qwen3_next", "falcon_h1")


@pytest.mark.parametrize("name", QUICK)
def test_a_family_equals_one_process(name: str) -> None:
    """In fp64, conversions to fp32 included, sums in another order are all that differs."""
    model = small_model(name)
    assert compare(model, Setup(num_ranks=3)).worst <= TOLERANCE["fp64"]


def test_llama4_without_chunks_equals_one_process() -> None:
    """What it names as its decoder is another part of it; chunks of attention are refused by name elsewhere."""
    model = small_model("llama4_text", layer_types=["full_attention"] * 2)
    assert compare(model, Setup(num_ranks=2)).worst <= TOLERANCE["fp64"]


def test_ranks_leave_no_thread_behind() -> None:
    """Two thousand forgotten threads of gloo had slowed all later tests of a process down, some of them tenfold."""
    model, process = small_model("llama"), psutil.Process()
    before = process.num_threads()
    compare(model, Setup(num_ranks=2))
    deadline = time.monotonic() + 5.0  # OpenMP ends its threads a moment after the rank's thread that used them
    while process.num_threads() > before and time.monotonic() < deadline:
        time.sleep(0.05)
    assert process.num_threads() <= before


def test_ranks_that_fail_leave_no_thread_behind() -> None:
    """Although their errors keep the frames that made the groups, and are each other's cause and context."""

    def fail(group: dist.ProcessGroup) -> None:
        group.allreduce([torch.ones(1)]).wait()
        first, second = ValueError("first"), KeyError("second")
        first.__cause__, second.__context__ = second, first
        raise first

    process = psutil.Process()
    before = process.num_threads()
    with pytest.raises(AssertionError, match="first"):
        run_ranks(2, fail)
    assert process.num_threads() <= before


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_on_more_plans(name: str) -> None:
    model = small_model(name)
    for seed in (2, 4):
        assert compare(model, Setup(num_ranks=seed, seed=seed)).worst <= TOLERANCE["fp64"]


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_in_fp32(name: str) -> None:
    model = small_model(name, dtype=torch.float32)
    tolerance = 1e-4 if name in CHUNKED else TOLERANCE["fp32"]
    for seed in (1, 2, 3):
        assert compare(model, Setup(num_ranks=seed, seed=seed)).worst <= tolerance


@pytest.mark.parametrize(
    "planner",
    ["adaptive", "paper", *(pytest.param(name, marks=pytest.mark.exhaustive) for name in ("static", "naive"))],
)
def test_planners_of_hdp(planner: str) -> None:
    model = small_model("qwen3")
    setup = Setup(num_ranks=4, lengths=(50, 7, 3, 12, 1), planner=planner, equal_counts=planner == "adaptive")
    assert compare(model, setup).worst <= 1e-10


@pytest.mark.parametrize("name", [pytest.param("qwen3", marks=pytest.mark.exhaustive), "gemma2"])
def test_a_grid_of_two_columns(name: str) -> None:
    """Also where every second layer has a window, whose rows travel beside the grid."""
    model, batch = small_model(name), documents([61, 9])
    plan = Plan.build(
        lengths=[61, 9],
        capacity_tokens=[40] * 4,
        groups=[GroupSpec(sequences=[0], ranks=range(4), columns=2), GroupSpec(sequences=[1], ranks=[0])],
        schedule=[[[0, 1]], [[0]], [[0]], [[0]]],
    )
    reference = copy.deepcopy(model)
    with WideCasts():
        expected = plain_update(reference, batch, torch.optim.SGD(reference.parameters(), lr=0.0), float("inf"))

    def work(group: dist.ProcessGroup, own: nn.Module) -> tuple[float, dict[str, Tensor]]:
        hdp = HDP(own, group, capacity_tokens=40)
        hdp.adamw(lr=0.0)
        with WideCasts():
            return printed_loop(hdp, own, batch, plan=plan), hdp.gradients()

    results = on_ranks(4, model, work)
    assert sum(loss for loss, _ in results) == pytest.approx(expected, rel=1e-8)
    tolerance = TOLERANCE["fp64"]
    for key, parameter in reference.named_parameters():
        assert parameter.grad is not None
        torch.testing.assert_close(results[0][1][key], parameter.grad, rtol=tolerance, atol=tolerance)


def test_the_command_compares_and_refuses(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["qwen2", "--plans", "1"]) == 0
    assert main(["rwkv", "--plans", "1"]) == 2
    printed = capsys.readouterr().out
    assert "equal: loss" in printed
    assert "refused: " in printed
