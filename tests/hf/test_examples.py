"""Every example in ``examples/`` runs, on one rank and on two, with the same results."""

from __future__ import annotations

import ast
import importlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_map_only

from tests.helpers.forks import run_forked

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture(scope="module", autouse=True)
def _examples_can_be_imported() -> Iterator[None]:
    sys.path.insert(0, str(EXAMPLES))
    yield
    sys.path.remove(str(EXAMPLES))


def example(name: str) -> ModuleType:
    return importlib.import_module(name)


def on_two_ranks(module: ModuleType, **options: Any) -> Any:
    """``on_ranks`` with two."""
    return on_ranks(2, module, **options)


def on_ranks(num_ranks: int, module: ModuleType, **options: Any) -> Any:
    """What rank 0 returns from ``main`` when so many processes run it, as torchrun would start them."""

    def one_rank(rank: int) -> Any:
        torch.set_num_threads(1)
        dist.init_process_group("gloo")
        try:
            return tree_map_only(Tensor, Tensor.numpy, module.main(**options))  # memory of tensors ends with a process
        finally:
            dist.destroy_process_group()

    result = run_forked(num_ranks, one_rank, timeout_seconds=300)[0]
    return tree_map_only(np.ndarray, torch.from_numpy, result)


def assert_same(ours: dict[str, Tensor], wanted: dict[str, Tensor], tolerance: float) -> None:
    assert ours.keys() == wanted.keys()
    for name, value in wanted.items():
        torch.testing.assert_close(ours[name], value, rtol=0, atol=tolerance)


def test_own_loop() -> None:
    alone, together = (
        example("own_loop").main(steps=4, lr=1e-2, capacity_tokens=256),
        on_two_ranks(example("own_loop"), steps=4, lr=1e-2),
    )
    assert together == pytest.approx(alone, rel=1e-4)
    assert alone[-1] < alone[0]


def test_lora() -> None:
    losses, adapters = example("lora").main(steps=3, capacity_tokens=256)
    their_losses, their_adapters = on_two_ranks(example("lora"), steps=3)
    assert their_losses == pytest.approx(losses, rel=1e-5)
    assert_same(their_adapters, adapters, 1e-4)
    assert all("lora" in name for name in adapters)


@pytest.mark.exhaustive
def test_fsdp_trains_like_the_own_loop() -> None:
    losses, _ = on_two_ranks(example("fsdp"), steps=3)
    assert losses == pytest.approx(example("own_loop").main(steps=3, capacity_tokens=256), rel=1e-4)


def test_scoring() -> None:
    for ours, wanted in zip(
        on_two_ranks(example("scoring")), example("scoring").main(capacity_tokens=256), strict=True
    ):
        torch.testing.assert_close(ours, wanted, rtol=0, atol=1e-5)


def test_replayed_routes() -> None:
    module = example("replayed_routes")
    ours, alone = on_two_ranks(module), module.main(capacity_tokens=512)
    assert ours == pytest.approx(alone, rel=0.05)
    assert 0.02 < ours["tokens with another route"] < 0.5
    assert ours["difference with replay"] < 0.8 * ours["difference without replay"]


def test_pictures() -> None:
    """Names are learned, the same on one rank."""
    ours, alone = on_two_ranks(example("pictures"), steps=12), example("pictures").main(steps=12)
    assert ours == pytest.approx(alone, rel=1e-3)
    assert ours[-1] < 0.6 * ours[0]


def test_driver() -> None:
    assert on_two_ranks(example("driver")) == pytest.approx(example("driver").main(capacity_tokens=256), rel=1e-5)


def test_hf_trainer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers' Trainer on one rank and on two: the losses of the printed loop."""
    monkeypatch.chdir(tmp_path)  # Trainer makes its folder
    options: dict[str, Any] = {"steps": 4, "lr": 1e-2}
    alone = run_forked(1, lambda rank: example("hf_trainer").main(**options, capacity_tokens=256))[0]
    together = on_two_ranks(example("hf_trainer"), **options)
    assert together == pytest.approx(alone, rel=1e-4)
    assert alone == pytest.approx(example("own_loop").main(**options, capacity_tokens=256), rel=1e-4)
    assert alone[-1] < 0.9 * alone[0]


@pytest.mark.exhaustive  # its first step in BF16 takes half a minute on a CPU without AVX-512
def test_hf_trainer_in_bf16(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Trainer puts autocast around the model: the losses of fp32 within BF16's rounding, on one rank and on two."""
    monkeypatch.chdir(tmp_path)
    options: dict[str, Any] = {"steps": 4, "lr": 1e-2}
    alone = run_forked(1, lambda rank: example("hf_trainer").main(**options, capacity_tokens=256, bf16=True))[0]
    together = on_two_ranks(example("hf_trainer"), **options, bf16=True)
    plain = example("own_loop").main(**options, capacity_tokens=256)
    assert together == pytest.approx(alone, rel=5e-3)
    assert alone == pytest.approx(plain, rel=5e-3)
    assert alone != pytest.approx(plain, rel=1e-6), "something was computed in BF16"


@pytest.mark.exhaustive
def test_grpo_resumes_exactly(tmp_path: Path) -> None:
    """Two ranks that were stopped and go on get the rewards of two that were not, bit for bit."""
    options: dict[str, Any] = {"num_prompts": 2, "folder": str(tmp_path / "run")}
    on_two_ranks(example("grpo"), steps=1, **options)
    assert on_two_ranks(example("grpo"), steps=3, **options) == on_two_ranks(example("grpo"), steps=3, num_prompts=2)


@pytest.mark.exhaustive
def test_grpo_learns_on_four_ranks() -> None:
    rewards = on_ranks(4, example("grpo"), steps=10)
    assert sum(rewards[-2:]) > sum(rewards[:2]) + 0.4


def test_nano_hdp_is_short_and_imports_nothing_of_ours() -> None:
    source = (EXAMPLES / "nano_hdp.py").read_text(encoding="utf-8")
    assert len(source.splitlines()) <= 350
    nodes = list(ast.walk(ast.parse(source)))
    imported = {name.name for node in nodes if isinstance(node, ast.Import) for name in node.names}
    imported |= {str(node.module) for node in nodes if isinstance(node, ast.ImportFrom)}
    assert {name.partition(".")[0] for name in imported} <= {"torch", *sys.stdlib_module_names}


def test_nano_hdp_checks_itself() -> None:
    run_forked(4, lambda _: example("nano_hdp").main(), timeout_seconds=60)


def positions_in_the_piece(nano: ModuleType, patch: pytest.MonkeyPatch) -> None:
    right = nano.Rows.of
    patch.setattr(nano.Rows, "of", lambda *of: replace(right(*of), positions=torch.arange(len(right(*of).positions))))


def a_gradient_is_lost(nano: ModuleType, patch: pytest.MonkeyPatch) -> None:
    right = nano.RingAttention.backward

    def loses_a_value(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
        *others, d_value = right(ctx, d_out)
        return *others, d_value.index_fill(0, torch.tensor([0]), 0.0)

    patch.setattr(nano.RingAttention, "backward", loses_a_value)


@pytest.mark.parametrize(
    ("fault", "message"), [(positions_in_the_piece, "the loss is"), (a_gradient_is_lost, "gradients of")]
)
def test_nano_hdp_finds_a_fault(
    fault: Callable[[ModuleType, pytest.MonkeyPatch], None], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three documents on two ranks: one on both, two packed."""
    nano, lengths = example("nano_hdp"), (12, 5, 2)
    planned = nano.plan(lengths, 2, 8)
    assert {len(micro_batch.ranks) for micro_batch in planned} == {1, 2}

    def one_rank(rank: int) -> str:
        dist.init_process_group("gloo")
        return nano.check(lengths, planned, rank)

    run_forked(2, one_rank, timeout_seconds=60)
    fault(nano, monkeypatch)
    with pytest.raises(AssertionError, match=message):
        run_forked(2, one_rank, timeout_seconds=60)


def test_every_example_is_tested() -> None:
    names = {path.stem for path in EXAMPLES.glob("*.py")}
    in_remote = {"ray_train"}  # tests/remote/test_nodes.py
    here = {
        "own_loop",
        "lora",
        "fsdp",
        "scoring",
        "driver",
        "hf_trainer",
        "grpo",
        "nano_hdp",
        "replayed_routes",
        "pictures",
    }
    assert names == here | in_remote
