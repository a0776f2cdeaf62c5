"""A loop of one's own goes on without ranks that died: losses, weights and learning rates are those of one process."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from bytescale import HDP
from bytescale.common.errors import CheckpointError, ConfigError, RanksLost
from bytescale.parity import small_model
from bytescale.runtime.optimizer.sharded_optimizer import ShardedOptimizer
from tests.helpers.forks import run_forked
from tests.hf.support import documents, on_ranks

STEPS = 8
Dies = Callable[[int, str], None]


def model_of_loop() -> nn.Module:
    torch.manual_seed(3)
    return small_model("llama")


def trained(hdp: HDP, model: nn.Module, dies: Dies = lambda number, where: None) -> dict[int, float]:
    """The loop of docs/own_loop.md. Returns the loss of each step that returned on this rank."""
    losses: dict[int, float] = {}
    while (number := hdp.num_updates) < STEPS:  # which may be one less than before, where a copy had not arrived
        batch = documents([5 + 3 * ((number * 7 + place) % 9) for place in range(9)], seed=number)
        total = sum(float(document["weights"].sum()) for document in batch)
        try:
            loss = 0.0
            for micro in hdp.plan(batch):
                dies(number, "forward")
                own = -(micro.weights * micro.logprobs(model)).sum() / total
                own.backward()
                loss += own.item()
                dies(number, "backward")
            whole = hdp.group.sum_of([loss])[0]
            dies(number, "step")
            hdp.step(lr=2e-3 * 0.5 ** (number // 3))
            losses[number] = whole
        except RanksLost:
            hdp.recover()
    return losses


def loop(hdp: HDP) -> torch.optim.Optimizer:
    kinds = {"group_options": lambda name, p: {} if p.dim() > 1 else {"weight_decay": 0.0}}
    return hdp.adamw(lr=2e-3, **kinds)


def attached(rank: int, file: Path | None = None) -> tuple[HDP, nn.Module, torch.optim.Optimizer]:
    """One of several ranks, with copies. ``file``: in which four ranks meet; None: where the first rank serves them."""
    limit, store = timedelta(seconds=60), None
    if file is None:
        dist.init_process_group("gloo", timeout=limit)
    else:
        store = dist.FileStore(str(file), 4)
        dist.init_process_group("gloo", store=dist.PrefixStore("w", store), rank=rank, world_size=4, timeout=limit)
    model = model_of_loop()
    hdp = HDP(model, capacity_tokens=40)
    optimizer = loop(hdp)
    hdp.keep_copies(store=store)
    return hdp, model, optimizer


def in_one_process() -> tuple[dict[int, float], dict[str, torch.Tensor]]:
    model = model_of_loop()
    hdp = HDP(model, capacity_tokens=200)
    loop(hdp)
    return trained(hdp, model), dict(model.named_parameters())


def test_losses_and_weights_are_those_of_one_process(tmp_path: Path) -> None:
    """Of four ranks, the first dies in a forward, the third in an update."""
    expected, weights = in_one_process()

    def die() -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def one_rank(rank: int) -> Any:
        hdp, model, optimizer = attached(rank, tmp_path / "store")
        update = ShardedOptimizer.update

        def dies_in_update(self: ShardedOptimizer, *arguments: Any, **options: Any) -> Any:
            if rank == 2 and self.num_updates == 5:
                self.zeros[0].publish = die  # type: ignore[method-assign]
            return update(self, *arguments, **options)

        ShardedOptimizer.update = dies_in_update  # type: ignore[method-assign]
        losses = trained(
            hdp, model, lambda number, where: die() if (rank, number, where) == (0, 2, "forward") else None
        )
        rates = [group["lr"] for group in optimizer.param_groups]
        different = max(float((own - weights[name]).abs().max()) for name, own in model.named_parameters())
        return losses, different, rates, hdp.group.size

    outcomes = run_forked(4, one_rank, timeout_seconds=120, lost={0, 2})
    for losses, different, rates, size in (outcomes[1], outcomes[3]):
        assert size == 2
        assert different < 1e-10
        assert all(abs(loss - expected[number]) < 1e-10 for number, loss in losses.items())
        assert len(losses) >= STEPS - 1  # of the step in which rank 2 died, a rank may know the update alone
        assert rates == pytest.approx([2e-3 * 0.25] * len(rates))


def test_the_store_of_the_first_rank_is_not_left() -> None:
    """Ranks meet in the store that ``init_process_group`` has made, whose connections are none of a group's."""

    def one_rank(rank: int) -> int:
        hdp, model, _optimizer = attached(rank)
        trained(hdp, model, lambda number, where: os._exit(9) if (rank, number) == (1, 2) else None)
        return hdp.group.size

    outcomes = run_forked(3, one_rank, timeout_seconds=120, lost={1})
    assert (outcomes[0], outcomes[2]) == (2, 2)


@pytest.mark.exhaustive
def test_states_whose_copy_is_lost_too(tmp_path: Path) -> None:
    def one_rank(rank: int) -> str:
        hdp, model, _optimizer = attached(rank, tmp_path / "store")
        with pytest.raises(CheckpointError, match="states of rank 1 are lost") as caught:
            trained(hdp, model, lambda number, where: os._exit(9) if number == 3 and rank in (1, 2) else None)
        return str(caught.value)

    assert run_forked(4, one_rank, timeout_seconds=120, lost={1, 2})[0]


def test_what_cannot_be_recovered_is_refused() -> None:
    def one_rank(group: dist.ProcessGroup, model: nn.Module) -> None:
        hdp = HDP(model, group, capacity_tokens=40)
        hdp.adamw(lr=1e-3)
        with pytest.raises(ConfigError, match="without keep_copies"):
            hdp.recover()
        with pytest.raises(ConfigError, match="the ranks are not those of WORLD"):
            hdp.keep_copies()

    on_ranks(2, model_of_loop(), one_rank)
