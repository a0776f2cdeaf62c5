"""A loop of one's own goes on without ranks that died: losses, weights and learning rates are those of one process."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from datetime import timedelta
from functools import cache, partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

import bytescale
from bytescale import HDP
from bytescale.common.errors import CheckpointError, ConfigError, RanksLost
from bytescale.hf.loop.micro_batch import Engine, Micro
from bytescale.hf.loop.planned_batch import PlannedBatch
from bytescale.parity import small_model
from bytescale.runtime import watch as watch_file
from bytescale.runtime.members import Members
from bytescale.runtime.mesh import Mesh
from bytescale.runtime.optimizer.copies import StateCopies
from bytescale.runtime.optimizer.sharded_optimizer import ShardedOptimizer
from bytescale.runtime.optimizer.zero import ZeroShards
from bytescale.runtime.sockets import shut_connections
from tests.helpers.effort import one_in
from tests.helpers.forks import run_forked
from tests.hf.support import documents, on_ranks, trained_alone
from tests.runtime.test_watch import WELL, die_with_open_sockets

STEPS = 8
Dies = Callable[[int, str], None]
PHASES: dict[str, tuple[Any, str, bool]] = {
    "forward": (Engine, "micro", False),
    "end": (PlannedBatch, "_end", True),
    "reduction": (ShardedOptimizer, "reduce_gradients", True),
    "update": (ZeroShards, "publish", False),
    "copy": (StateCopies, "keep", True),
}
"""Where a rank dies: at a function, before or behind it."""


def model_of_loop() -> nn.Module:
    return small_model("llama", num_hidden_layers=4, seed=3)


def batch_of(number: int) -> tuple[list[dict[str, Any]], float]:
    """The documents of a batch, and the sum of their weights."""
    batch = documents([5 + 3 * ((number * 7 + place) % 9) for place in range(9)], seed=number)
    return batch, sum(float(document["weights"].sum()) for document in batch)


def rate_of(number: int) -> float:
    return 2e-3 * 0.5 ** (number // 3)


def trained(hdp: HDP, model: nn.Module, dies: Dies = lambda number, where: None) -> dict[int, float]:
    """The loop of docs/own_loop.md. Returns the loss of each step that returned on this rank."""
    losses: dict[int, float] = {}
    while (number := hdp.num_updates) < STEPS:  # which may be one less than before, where a copy had not arrived
        batch, total = batch_of(number)
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
            hdp.step(lr=rate_of(number))
            losses[number] = whole
        except RanksLost:
            hdp.recover()
    return losses


def trained_by_function(
    hdp: HDP, model: nn.Module, *, full: int, last: bool = False, fails: Callable[[int], object] = lambda number: None
) -> dict[int, float]:
    """The same with the body as a function. Behind 4 updates, fewer than ``full`` ranks wait for new ones.

    ``fails``: is called in the loss, and may raise ``ValueError``.
    """
    losses: dict[int, float] = {}

    def loss_of(micro: Micro, number: int, total: float) -> torch.Tensor:
        logprobs = micro.logprobs(model)
        fails(number)
        return -(micro.weights * logprobs).sum() / total

    while (number := hdp.num_updates) < STEPS:
        batch, total = batch_of(number)
        until = time.monotonic() + 60.0
        while number >= 4 and hdp.group.rank == 0 and hdp.group.size < full and time.monotonic() < until:
            assert hdp.recovery is not None
            until *= not hdp.recovery.num_waiting()
            time.sleep(0.02)
        try:
            planned = hdp.plan(batch, last=last)
            whole = planned.forward_backward(partial(loss_of, number=number, total=total))
            hdp.step(lr=rate_of(number))
            losses[number] = whole
            if hdp.ranks_wait:
                hdp.recover()
        except (RanksLost, ValueError):
            hdp.recover()
    return losses


@cache
def in_plain_pytorch() -> tuple[dict[int, float], dict[str, torch.Tensor]]:
    """Losses of all steps, and the weights behind them: one process, one document at a time."""
    model, losses = model_of_loop(), dict[int, float]()
    named = dict(model.named_parameters())
    kinds = [
        {"params": [p for p in named.values() if p.dim() > 1]},
        {"params": [p for p in named.values() if p.dim() == 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(kinds)
    for number in range(STEPS):
        batch, total = batch_of(number)
        logprobs = trained_alone(model, batch, lambda document: None)
        losses[number] = (
            -sum(float((document["weights"] * own).sum()) for document, own in zip(batch, logprobs, strict=True))
            / total
        )
        torch.nn.utils.clip_grad_norm_(named.values(), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = rate_of(number)
        optimizer.step()
        optimizer.zero_grad()
    return losses, {name: p.detach() for name, p in named.items()}


def loop(hdp: HDP) -> torch.optim.Optimizer:
    kinds = {"group_options": lambda name, p: {} if p.dim() > 1 else {"weight_decay": 0.0}}
    return hdp.adamw(lr=2e-3, **kinds)


def attached(
    rank: int, file: Path | None = None, size: int = 4, joins: bool = False, **options: Any
) -> tuple[HDP, nn.Module, torch.optim.Optimizer]:
    """One of several ranks, with copies. ``file``: in which they meet; None: where the first rank serves them.

    ``joins``: whether it is a new one.
    """
    limit, store = timedelta(seconds=60), None
    if file is None:
        dist.init_process_group("gloo", timeout=limit)
    else:
        store = dist.FileStore(str(file), size)
    if joins:
        model = model_of_loop()
        options["joined"] = bytescale.join(store, "gloo", timeout=limit, wait_seconds=60.0)
    elif file is not None:
        dist.init_process_group("gloo", store=dist.PrefixStore("w", store), rank=rank, world_size=size, timeout=limit)
    model = model_of_loop()
    hdp = HDP(model, capacity_tokens=40, **options)
    optimizer = loop(hdp)
    hdp.keep_copies(store=store, model=model_of_loop)
    return hdp, model, optimizer


def test_losses_and_weights_are_those_of_one_process(tmp_path: Path) -> None:
    """Of four ranks, the first dies in a forward, the third in an update."""
    expected, weights = in_plain_pytorch()

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


SHARED = {"shard": "parameters", "domain": 2}


@pytest.mark.parametrize(
    ("mesh", "victim", "phase"),
    one_in(13, [(mesh, rank, phase) for mesh in ({"tp": 2}, {"pp": 2}, SHARED) for rank in (0, 3) for phase in PHASES]),
)
def test_a_whole_copy_of_the_model_goes_on_and_takes_in_new_ranks(
    tmp_path: Path, mesh: dict[str, Any], victim: int, phase: str
) -> None:
    """Of two pairs of ranks one loses a rank. The other rank of it waits, and goes on with a new process."""
    expected, weights = in_plain_pytorch()

    def one_rank(rank: int) -> Any:
        made = list[HDP]()
        if rank == victim:
            die_in(phase, lambda: bool(made) and made[0].num_updates == 2)
        hdp, model, _optimizer = attached(rank, tmp_path / "store", joins=rank == 4, **mesh)
        made.append(hdp)
        losses = trained_by_function(hdp, model, full=4)
        different = max(float((own - weights[name]).abs().max()) for name, own in hdp.weights())
        hdp.detach()
        return losses, different, hdp.group.size

    outcomes = run_forked(5, one_rank, timeout_seconds=150, lost={victim})
    for rank, outcome in enumerate(outcomes):
        if rank != victim:
            losses, different, size = outcome
            assert size == 4
            assert different < 1e-10
            assert all(abs(loss - expected[number]) < 1e-10 for number, loss in losses.items())
            assert len(losses) >= (3 if rank == 4 else 4)


def test_after_an_error_in_the_loss_of_one_rank_all_run_the_batch_again(tmp_path: Path) -> None:
    """Only the last stage has the loss. Where it catches the error and recovers, the others wait for no time limit."""
    expected, weights = in_plain_pytorch()

    def one_rank(rank: int) -> Any:
        raised = list[int]()

        def fails(number: int) -> None:
            if rank == 3 and number == 2 and not raised:
                raised.append(number)
                raise ValueError("a reward is missing")

        hdp, model, _optimizer = attached(rank, tmp_path / "store", pp=2)
        losses = trained_by_function(hdp, model, full=4, fails=fails)
        different = max(float((own - weights[name]).abs().max()) for name, own in hdp.weights())
        hdp.detach()
        return losses, different, hdp.group.size, raised

    outcomes = run_forked(4, one_rank, timeout_seconds=50)
    assert [raised for *_, raised in outcomes] == [[], [], [], [2]]
    for losses, different, size, _ in outcomes:
        assert size == 4
        assert different < 1e-10
        assert losses == pytest.approx(expected, abs=1e-10)


def test_a_rank_dies_whose_connections_stay_open(tmp_path: Path) -> None:
    """Nothing tells the others but their watch: here shut connections stand for NCCL's abort."""
    expected, weights = in_plain_pytorch()
    ports = set[int]()
    opened = Members.opened

    def watched(self: Members, mesh: Mesh) -> None:
        opened(self, mesh)
        ports.update(port for about in self._about.values() for port in about["ports"])

    def one_rank(rank: int) -> Any:
        hdp, model, _optimizer = attached(rank, tmp_path / "store")

        def dies(number: int, where: str) -> None:
            if (rank, number, where) == (1, 2, "forward"):
                die_with_open_sockets(55.0)

        losses = trained(hdp, model, dies)
        different = max(float((own - weights[name]).abs().max()) for name, own in model.named_parameters())
        hdp.detach()
        return losses, different, hdp.group.size

    with (
        mock.patch.object(Members, "opened", watched),
        mock.patch.object(watch_file, "_nccl", return_value=[WELL]),
        mock.patch.object(watch_file, "abort_nccl", side_effect=lambda: shut_connections(ports)),
    ):
        outcomes = run_forked(4, one_rank, timeout_seconds=50, lost={1})
    for losses, different, size in (outcomes[0], outcomes[2], outcomes[3]):
        assert size == 3
        assert different < 1e-10
        assert len(losses) >= STEPS - 1
        assert all(abs(loss - expected[number]) < 1e-10 for number, loss in losses.items())


def die_in(phase: str, is_due: Callable[[], bool]) -> None:
    """Let this process die in a phase as soon as it is due."""
    owner, name, is_behind = PHASES[phase]
    original = getattr(owner, name)

    def watched(*arguments: Any, **options: Any) -> Any:
        due = is_due()
        if due and not is_behind:
            os.kill(os.getpid(), signal.SIGKILL)
        result = original(*arguments, **options)
        if due:
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    setattr(owner, name, watched)


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


def test_copies_without_room_in_host_memory_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def one_rank(group: dist.ProcessGroup, model: nn.Module) -> None:
        hdp = HDP(model, group, capacity_tokens=40)
        hdp.adamw(lr=1e-3)
        with pytest.raises(ConfigError, match="ost memory is too small"):
            hdp.keep_copies()
        assert hdp.recovery is None

    monkeypatch.setattr("bytescale.common.environment.machine_bytes", lambda: 1000.0)
    on_ranks(2, model_of_loop(), one_rank)


def test_parts_of_a_model_need_one_that_is_whole() -> None:
    """And a domain whose size stays."""

    def one_rank(rank: int) -> None:
        dist.init_process_group("gloo", timeout=timedelta(seconds=60))
        for options, message in (
            ({"tp": 2}, "ranks have parts of the model, and model is None"),
            ({"shard": "parameters"}, "domain is no number"),
        ):
            hdp = HDP(model_of_loop(), capacity_tokens=40, **options)
            hdp.adamw(lr=1e-3)
            with pytest.raises(ConfigError, match=message):
                hdp.keep_copies()

    run_forked(2, one_rank, timeout_seconds=60)


@pytest.mark.parametrize("dies", [False, True])
def test_new_ranks_come_where_none_is_lost(tmp_path: Path, dies: bool) -> None:
    """To two ranks comes a third one. ``dies``: before, the others have lost one, and had begun to reduce gradients."""
    expected, weights = in_plain_pytorch()

    def one_rank(rank: int) -> Any:
        made = list[HDP]()
        if rank == 3:
            die_in("end", lambda: bool(made) and made[0].num_updates == 2)
        hdp, model, _optimizer = attached(rank - (rank == 3), tmp_path / "store", size=2 + dies, joins=rank == 2)
        made.append(hdp)
        losses = trained_by_function(hdp, model, full=3, last=dies)
        different = max(float((own - weights[name]).abs().max()) for name, own in model.named_parameters())
        hdp.detach()
        return losses, different, hdp.group.size

    for losses, different, size in run_forked(3 + dies, one_rank, timeout_seconds=120, lost={3} & {3 * dies})[:3]:
        assert size == 3
        assert different < 1e-10
        assert len(losses) >= 2
        assert all(abs(loss - expected[number]) < 1e-10 for number, loss in losses.items())
