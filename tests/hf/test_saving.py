"""``hdp.save`` and ``hdp.load``: exact, on other numbers of ranks, and refused for other models."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import bytescale
from bytescale.common.errors import CheckpointError, ConfigError
from tests.helpers.effort import one_of
from tests.helpers.forks import run_forked

from .support import documents, printed_loop, small_model


def train(
    folder: Path,
    num_ranks: int,
    *,
    updates: int,
    save: bool,
    load: bool,
    domain: int = 1,
    tp: int = 1,
    offload: bool = False,
    head: torch.dtype | None = None,
) -> list[dict[str, Any]]:
    """Train on ``num_ranks`` processes; every rank's weights as arrays, and what ``load`` gave back."""
    llama = small_model("llama")
    if head is not None:
        llama.lm_head.to(head).register_forward_pre_hook(lambda module, args: (args[0].to(head),))
    batch = documents([37, 1, 8, 3, 60])

    def one_rank(rank: int) -> dict[str, Any]:
        torch.set_num_threads(1)
        dist.init_process_group("gloo")
        model = copy.deepcopy(llama)
        shard: Any = "parameters" if domain > 1 else "optimizer"
        hdp = bytescale.HDP(model, capacity_tokens=120 * tp // num_ranks, tp=tp, shard=shard, domain=domain)
        hdp.optimizer(
            torch.optim.AdamW,
            lr=1e-2,
            offload=offload,
            group_options=lambda name, p: {"weight_decay": 0.0} if p.dim() < 2 else {},
        )
        extra = hdp.load(folder) if load else {}
        for _ in range(updates):
            printed_loop(hdp, model, batch)
            hdp.step()
        if save:
            hdp.save(folder, {"place": [1, 2]})
        weights = {name: value.clone().numpy() for name, value in hdp.weights()}
        dist.destroy_process_group()
        return {"extra": extra, **weights}

    return run_forked(num_ranks, one_rank, timeout_seconds=120)


@pytest.mark.parametrize(("ranks", "domain", "tp"), one_of([(3, 1, 1), (3, 3, 1), (4, 1, 2), (4, 2, 2)], (4, 2, 2)))
def test_a_run_continues_exactly_on_other_ranks(tmp_path: Path, ranks: int, domain: int, tp: int) -> None:
    """Ranks that may share parameters and matrices and have the optimizer in host memory, then two without all this."""
    straight = train(tmp_path / "none", 2, updates=3, save=False, load=False)[0]
    train(tmp_path / "saved", ranks, updates=2, save=True, load=False, domain=domain, tp=tp, offload=domain > 1)
    assert [path.name for path in (tmp_path / "saved").iterdir()] == ["step-000002"]
    for continued in train(tmp_path / "saved", 2, updates=1, save=False, load=True, tp=1 if tp > 1 else 2):
        assert continued.pop("extra") == {"place": [1, 2]}
        for name, value in continued.items():
            assert abs(value - straight[name]).max() <= 1e-7, name


def test_parameters_of_several_dtypes_are_saved(tmp_path: Path) -> None:
    """Those of each dtype are in flat buffers of their own."""
    straight = train(tmp_path / "none", 1, updates=2, save=False, load=False, head=torch.float32)[0]
    train(tmp_path / "saved", 2, updates=1, save=True, load=False, head=torch.float32)
    for continued in train(tmp_path / "saved", 1, updates=1, save=False, load=True, head=torch.float32):
        assert continued.pop("extra") == {"place": [1, 2]}
        assert len({value.dtype for value in continued.values()}) == 2
        for name, value in continued.items():
            assert abs(value - straight[name]).max() <= 1e-5, name


def test_a_folder_with_later_checkpoints_is_refused(tmp_path: Path) -> None:
    """The newest are kept, so the new checkpoint was deleted at once, and the old run's was loaded."""
    train(tmp_path, 1, updates=2, save=True, load=False)
    with pytest.raises(AssertionError, match="has step-000002, and this model has made 1 updates"):
        train(tmp_path, 2, updates=1, save=True, load=False)
    assert [path.name for path in tmp_path.iterdir()] == ["step-000002"]


def test_weights_without_updates_can_be_saved(tmp_path: Path) -> None:
    first = train(tmp_path, 1, updates=0, save=True, load=False)[0]
    again = train(tmp_path, 2, updates=0, save=False, load=True)[0]
    assert all((again[name] == value).all() for name, value in first.items() if name != "extra")


def test_other_models_are_refused(tmp_path: Path) -> None:
    train(tmp_path, 1, updates=1, save=True, load=False)
    gpt2 = small_model("gpt2")

    def one_rank(rank: int) -> str:
        dist.init_process_group("gloo")
        hdp = bytescale.HDP(gpt2, capacity_tokens=100)
        hdp.adamw(lr=1e-3)
        with pytest.raises(CheckpointError) as caught:
            hdp.load(tmp_path)
        with pytest.raises(CheckpointError, match="is not a checkpoint"):
            hdp.load(tmp_path / "nothing")
        dist.destroy_process_group()
        return str(caught.value)

    (message,) = run_forked(1, one_rank, timeout_seconds=60)
    assert "LlamaForCausalLM there, GPT2LMHeadModel here" in message


def test_saving_needs_process_groups(tmp_path: Path) -> None:
    model: nn.Module = small_model("llama")
    hdp = bytescale.HDP(model, capacity_tokens=100)
    hdp.adamw(lr=1e-3)
    with pytest.raises(ConfigError, match="init_process_group"):
        hdp.save(tmp_path)
