"""The simulated accelerator itself: faults that are planted are found, and their correct twins are clean.

Each twin differs by the one line that makes it right.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.accelerator.answers import simulated
from tests.accelerator.device import Machine
from tests.accelerator.groups import Communicator, run_machines

Program = Callable[[Machine, bool], object]


def rows(own: Machine, size: int = 8) -> Tensor:
    return torch.ones(size, device=own.device)


def on(stream: torch.cuda.Stream) -> torch.cuda.StreamContext:
    return torch.cuda.stream(stream)


def reads_before_the_writer_is_done(own: Machine, right: bool) -> None:
    side, values = torch.cuda.Stream(), rows(own)
    if right:
        side.wait_stream(torch.cuda.current_stream())
    with on(side):
        values.sum()


def writes_what_is_still_read(own: Machine, right: bool) -> None:
    side, values = torch.cuda.Stream(), rows(own)
    side.wait_stream(torch.cuda.current_stream())
    with on(side):
        values.sum()
    if right:
        torch.cuda.current_stream().wait_event(side.record_event())
    values.zero_()


def waits_for_an_event_that_came_too_early(own: Machine, right: bool) -> None:
    side, values = torch.cuda.Stream(), torch.empty(8, device=own.device)
    early = torch.cuda.current_stream().record_event()
    values.fill_(1)
    side.wait_event(torch.cuda.current_stream().record_event() if right else early)
    with on(side):
        values.mul_(2)


def host_writes_pages_that_still_leave(own: Machine, right: bool) -> None:
    page = torch.ones(8, pin_memory=True)
    values = torch.empty(8, device=own.device)
    values.copy_(page, non_blocking=True)
    if right:
        torch.cuda.current_stream().record_event().synchronize()
    page.zero_()


def host_reads_pages_that_still_arrive(own: Machine, right: bool) -> float:
    page = torch.empty(8, pin_memory=True)
    page.copy_(rows(own), non_blocking=True)
    if right:
        torch.cuda.current_stream().synchronize()
    return float(page.sum())


def writes_memory_that_compute_may_still_use(own: Machine, right: bool) -> None:
    """Its stream has just given it back, and may not be there yet."""
    side, page = torch.cuda.Stream(), torch.ones(8, pin_memory=True)
    rows(own).sum()
    values = torch.empty(8, device=own.device)
    if right:
        side.wait_stream(torch.cuda.current_stream())
    with on(side):
        values.copy_(page, non_blocking=True)
    torch.cuda.current_stream().wait_stream(side)


def columns_that_meet(own: Machine, right: bool) -> None:
    side, table = torch.cuda.Stream(), torch.ones(4, 6, device=own.device)
    side.wait_stream(torch.cuda.current_stream())
    with on(side):
        table[:, :3].mul_(2)
    table[:, 3 if right else 2 :].mul_(2)


def gives_back_what_a_copy_reads(own: Machine, right: bool) -> None:
    side, values, page = torch.cuda.Stream(), rows(own), torch.empty(8, pin_memory=True)
    side.wait_stream(torch.cuda.current_stream())
    with on(side):
        page.copy_(values, non_blocking=True)
    if right:
        torch.cuda.current_stream().wait_stream(side)
    del values
    rows(own)


def gives_back_what_a_copy_writes(own: Machine, right: bool) -> None:
    side, page = torch.cuda.Stream(), torch.ones(8, pin_memory=True)
    values = torch.empty(8, device=own.device)
    side.wait_stream(torch.cuda.current_stream())
    with on(side):
        values.copy_(page, non_blocking=True)
    if right:
        values.record_stream(side)
    del values
    rows(own)


def gives_back_what_another_stream_allocated(own: Machine, right: bool) -> None:
    """Its own stream may use the memory again at once."""
    side = torch.cuda.Stream()
    with on(side):
        values = rows(own)
    torch.cuda.current_stream().wait_stream(side)
    values.sum()
    if right:
        values.record_stream(torch.cuda.current_stream())
    del values
    with on(side):
        rows(own)


def records_another_stream(own: Machine, right: bool) -> None:
    side, other, values = torch.cuda.Stream(), torch.cuda.Stream(), rows(own)
    side.wait_stream(torch.cuda.current_stream())
    with on(side):
        values.mul_(2)
    values.record_stream(side if right else other)
    del values
    rows(own)


def gives_storage_back_in_place(own: Machine, right: bool) -> None:
    side, values = torch.cuda.Stream(), rows(own)
    side.wait_stream(torch.cuda.current_stream())
    with on(side):
        values.sum()
    if right:
        torch.cuda.current_stream().wait_stream(side)
    values.untyped_storage().resize_(0)
    rows(own)


def adds_a_host_tensor(own: Machine, right: bool) -> None:
    rows(own) + torch.ones(8, device=own.device if right else "cpu")


def embeds_host_tokens(own: Machine, right: bool) -> None:
    tokens = torch.arange(3)
    torch.nn.functional.embedding(
        tokens.pin_memory().to(own.device, non_blocking=True) if right else tokens, rows(own)[:, None]
    )


def copies_pageable_memory_asynchronously(own: Machine, right: bool) -> None:
    page = torch.ones(8, pin_memory=right)
    torch.empty(8, device=own.device).copy_(page, non_blocking=True)


def brings_numbers_to_pageable_memory(own: Machine, right: bool) -> None:
    torch.empty(8, pin_memory=right).copy_(rows(own), non_blocking=True)


def accumulates_into_a_host_buffer(own: Machine, right: bool) -> None:
    total = torch.zeros(8, device=own.device if right else "cpu")
    total.add_(rows(own))


def joins_lists_of_both(own: Machine, right: bool) -> None:
    torch.cat([rows(own), torch.zeros(8, device=own.device if right else "cpu")])


RACES = [
    reads_before_the_writer_is_done,
    writes_what_is_still_read,
    waits_for_an_event_that_came_too_early,
    host_writes_pages_that_still_leave,
    host_reads_pages_that_still_arrive,
    writes_memory_that_compute_may_still_use,
    columns_that_meet,
]
EARLY = [
    gives_back_what_a_copy_reads,
    gives_back_what_a_copy_writes,
    gives_back_what_another_stream_allocated,
    records_another_stream,
    gives_storage_back_in_place,
]
MIXES = [
    adds_a_host_tensor,
    embeds_host_tokens,
    copies_pageable_memory_asynchronously,
    brings_numbers_to_pageable_memory,
    accumulates_into_a_host_buffer,
    joins_lists_of_both,
]
WAITS: list[tuple[str, Callable[[Tensor], object]]] = [
    ("item", lambda values: values[0].item()),
    ("bool", lambda values: bool((values > 0).all())),
    ("nonzero", lambda values: values.nonzero()),
    ("a mask as an index", lambda values: values[values > 0]),
    ("tolist", lambda values: values.tolist()),
    ("cpu", lambda values: values.cpu()),
    ("a copy that blocks", lambda values: values.copy_(torch.zeros(8, pin_memory=True))),
    ("an index of the host", lambda values: values[torch.tensor([1, 2])]),
    ("numbers of the host", lambda values: torch.tensor([1.0], device=values.device)),
    ("a device that is waited for", lambda values: torch.cuda.synchronize()),
    ("equal", lambda values: torch.equal(values, values)),
    ("repeats that only the device knows", lambda values: values.repeat_interleave(values.long())),
]
ASYNCHRONOUS: list[tuple[str, Callable[[Tensor], object]]] = [
    ("copies through pinned memory", lambda values: torch.zeros(8).pin_memory().to(values.device, non_blocking=True)),
    ("a mask that fills", lambda values: values.masked_fill(values > 0, 0.0)),
    ("a mask that is set to a number", lambda values: values.index_put_((values > 0,), values.new_zeros(()))),
    ("repeats of a known size", lambda values: values.repeat_interleave(values.long(), output_size=8)),
    ("a choice", lambda values: values.where(values > 0, 0)),
    ("an index of the device", lambda values: values[torch.arange(3, device=values.device)]),
    ("backward", lambda values: (values.clone().requires_grad_() * 2).sum().backward()),
]


@pytest.mark.parametrize(
    ("kind", "program"),
    [(kind, program) for kind, part in (("race", RACES), ("early free", EARLY), ("mix", MIXES)) for program in part],
)
def test_planted_faults_are_found_and_their_twins_are_clean(kind: str, program: Program) -> None:
    for right in (True, False):
        with simulated(), Machine().running() as own:
            program(own, right)
        assert {fault.kind for fault in own.faults} == (set() if right else {kind}), own.faults


@pytest.mark.parametrize(("name", "step"), WAITS)
def test_what_the_host_waits_for_is_counted(name: str, step: Callable[[Tensor], object]) -> None:
    with simulated(), Machine().running() as own:
        values = rows(own)
        with own.part("micro-batch"):
            step(values)
    assert [wait.during for wait in own.waits] == ["micro-batch"], name
    assert not own.faults


@pytest.mark.parametrize(("name", "step"), ASYNCHRONOUS)
def test_what_the_host_does_not_wait_for(name: str, step: Callable[[Tensor], object]) -> None:
    with simulated(), Machine().running() as own:
        step(rows(own))
    assert not own.waits, name
    assert not own.faults


def reads_before_it_waits(own: Machine, group: Communicator, right: bool) -> None:
    gathered, part = torch.empty(16, device=own.device), rows(own)
    work = dist.all_gather_into_tensor(gathered, part, group=group, async_op=True)
    if right:
        work.wait()
    gathered.sum()
    work.wait()


def writes_what_is_sent(own: Machine, group: Communicator, right: bool) -> None:
    values = rows(own)
    work = dist.all_reduce(values, group=group, async_op=True)
    if right:
        work.wait()
    values.add_(1)
    work.wait()


def waits_on_another_stream(own: Machine, group: Communicator, right: bool) -> None:
    values, side = rows(own), torch.cuda.Stream()
    work = dist.all_reduce(values, group=group, async_op=True)
    with on(torch.cuda.current_stream() if right else side):
        work.wait()
    values.sum()


@pytest.mark.parametrize("program", [reads_before_it_waits, writes_what_is_sent, waits_on_another_stream])
def test_races_with_nccl_are_found(program: Callable[[Machine, Communicator, bool], object]) -> None:
    for right in (True, False):
        _, machines = run_machines(2, lambda own, group, right=right: program(own, group, right))
        found = [{fault.kind for fault in own.faults} for own in machines]
        assert found == [set() if right else {"race"}] * 2


def test_nccl_keeps_its_tensors_and_takes_none_of_the_host() -> None:
    def program(own: Machine, group: Communicator) -> None:
        work = dist.all_reduce(rows(own), group=group, async_op=True)
        rows(own)
        work.wait()
        assert not own.faults
        dist.all_reduce(torch.ones(2), group=group)

    _, machines = run_machines(2, program)
    assert [[fault.kind for fault in own.faults] for own in machines] == [["mix"]] * 2
