"""Checks whether a plan is valid: ``verify`` proves every rule that the runtime relies on, or names a broken one.

The rules are checked in this order:

1. **Arrays**: lengths, offsets and numbers are well formed.
2. **Tokens**: every sequence is in exactly one group. ``plan.layout`` then gives every token to exactly one rank.
3. **Members**: the ranks of a group are distinct, and its columns divide their number.
4. **Micro-batches**: each has at most one shared group, and that group comes first.
5. **Schedule**: every group is scheduled exactly once on each of its members, and on no other rank.
6. **Capacity**: no micro-batch holds more tokens than its rank has room for. Offloaded tokens do not count.
7. **Order**: every rank runs its shared groups in rising order of their numbers. This is one total order for all ranks,
   so without a pipeline no ranks can wait for each other in a cycle.
8. **Memory** (if ``limits`` is given): no micro-batch needs more memory of its device or its host than there is.
9. **Lockstep** (if ``plan.domain`` > 1): domains divide the ranks, and a shared group is in one round on all its
   members. So whatever waits in a layer of a round waits for work of the same round and layer, never in a cycle.
10. **Pipeline** (if ``num_stages`` > 1): the actions of 1F1B cannot wait for each other in a cycle either
   (``plan.pipeline_order``).

Without a pipeline, a plan for 16,384 ranks and 22,500 sequences takes about 10 ms.
"""

from __future__ import annotations

from typing import NoReturn

import numpy as np

from bytescale.common.arrays import IntArray
from bytescale.common.errors import PlanError
from bytescale.common.units import format_bytes
from bytescale.plan.limits import MemoryLimits
from bytescale.plan.plan import Plan, segment_sums
from bytescale.plan.slices import largest_slice, micro_batch_tokens, slice_tokens


def verify(plan: Plan, *, num_stages: int = 1, limits: MemoryLimits | None = None) -> None:
    """Raise ``PlanError`` for the first rule that ``plan`` breaks. The message gives the numbers that break it.

    Args:
        num_stages: number of pipeline stages. With more than one, rule 10 is checked for 1F1B.
        limits: memory of a rank. None: rule 8 is not checked, and in rule 6 an offloaded token needs no room on the
            device, although in fact the last layers never offload.
    """
    _check_arrays(plan)
    _check_tokens(plan)
    _check_members(plan)
    _check_micro_batches(plan)
    _check_schedule(plan)
    _check_capacity(plan, limits)
    _check_order(plan)
    if limits is not None:
        _check_memory(plan, limits)
    if plan.domain != 1:
        _check_lockstep(plan)
    if num_stages > 1:
        _check_pipeline(plan, num_stages)


def _check_arrays(plan: Plan) -> None:
    """Rule 1."""
    if plan.num_ranks < 1:
        _refuse("arrays", "the plan has no ranks")
    for name, least in (("lengths", 1), ("capacity_tokens", 1), ("group_weights", 1), ("group_columns", 1)):
        values = getattr(plan, name)
        if len(values) and values.min() < least:
            place = int(values.argmin())
            _refuse("arrays", f"{name}[{place}] is {values[place]}, below {least}")
    delimited = (
        ("group_sequence_offsets", "group_sequences", 1),
        ("group_rank_offsets", "group_ranks", 1),
        ("rank_micro_batch_offsets", None, 0),
        ("micro_batch_group_offsets", "micro_batch_groups", 1),
    )
    for name, items, least in delimited:
        total = plan.num_micro_batches if items is None else len(getattr(plan, items))
        _check_offsets(name, getattr(plan, name), total, least)
    sizes = (
        ("group_rank_offsets", len(plan.group_rank_offsets), plan.num_groups + 1),
        ("group_weights", len(plan.group_weights), len(plan.group_ranks)),
        ("group_columns", len(plan.group_columns), plan.num_groups),
        ("group_offload_ratio", len(plan.group_offload_ratio), plan.num_groups),
        ("rank_micro_batch_offsets", len(plan.rank_micro_batch_offsets), plan.num_ranks + 1),
    )
    for name, size, expected in sizes:
        if size != expected:
            _refuse("arrays", f"{name} has {size} entries where {expected} belong")
    numbers = (
        ("group_sequences", plan.group_sequences, plan.num_sequences),
        ("group_ranks", plan.group_ranks, plan.num_ranks),
        ("micro_batch_groups", plan.micro_batch_groups, plan.num_groups),
    )
    for name, values, count in numbers:
        if len(values) and (values.min() < 0 or values.max() >= count):
            place = int(np.flatnonzero((values < 0) | (values >= count))[0])
            _refuse("arrays", f"{name}[{place}] is {values[place]}, outside 0..{count - 1}")
    ratio = plan.group_offload_ratio
    if not ((ratio >= 0) & (ratio <= 1)).all():
        place = int(np.flatnonzero(~((ratio >= 0) & (ratio <= 1)))[0])
        _refuse("arrays", f"the offload ratio of group {place} is {ratio[place]}, outside 0..1")


def _check_offsets(name: str, offsets: IntArray, total: int, least: int) -> None:
    if len(offsets) == 0 or offsets[0] != 0 or offsets[-1] != total:
        _refuse("arrays", f"{name} does not run from 0 to {total}")
    if len(offsets) > 1 and np.diff(offsets).min() < least:
        place = int(np.diff(offsets).argmin())
        _refuse("arrays", f"{name} delimits {offsets[place + 1] - offsets[place]} items at {place}, below {least}")


def _check_tokens(plan: Plan) -> None:
    """Rule 2."""
    times = np.bincount(plan.group_sequences, minlength=plan.num_sequences)
    if (times != 1).any():
        sequence = int(np.flatnonzero(times != 1)[0])
        _refuse(
            "tokens",
            f"sequence {sequence} ({plan.lengths[sequence]} tokens) is in {times[sequence]} groups instead of 1",
            so="its tokens would be " + ("left out" if times[sequence] == 0 else "counted more than once"),
        )


def _check_members(plan: Plan) -> None:
    """Rule 3. Ranks are usually in rising order, and then no sort is needed."""
    uneven = np.flatnonzero(plan.group_sizes % plan.group_columns)
    if len(uneven):
        group = int(uneven[0])
        _refuse(
            "members",
            f"group {group} has {plan.group_sizes[group]} ranks in {plan.group_columns[group]} columns",
            so="some rows of its grid would lack a member",
            fix="take a number of columns that divides the number of ranks; 1 is a ring",
        )
    if len(plan.group_ranks) < 2:
        return
    rising = np.diff(plan.group_ranks) > 0
    rising[plan.group_rank_offsets[1:-1] - 1] = True
    if rising.all():
        return
    keys = _member_keys(plan)
    twice = np.flatnonzero(keys[1:] == keys[:-1])
    if len(twice):
        group, rank = divmod(int(keys[twice[0]]), plan.num_ranks)
        _refuse("members", f"rank {rank} is twice in group {group}", so="it would wait for itself")


def _check_micro_batches(plan: Plan) -> None:
    """Rule 4."""
    shared = (plan.group_sizes > 1)[plan.micro_batch_groups]
    first = np.zeros(len(shared), dtype=bool)
    first[plan.micro_batch_group_offsets[:-1]] = True
    late = np.flatnonzero(shared & ~first)
    if len(late) == 0:
        return
    micro_batch = int(np.searchsorted(plan.micro_batch_group_offsets, late[0], side="right")) - 1
    groups = plan.groups_of(micro_batch)
    rank, index = _place_of(plan, micro_batch)
    shared_groups = groups[plan.group_sizes[groups] > 1].tolist()
    if len(shared_groups) > 1:
        what = f"holds the shared groups {_listed(shared_groups)}, but a micro-batch can have only one"
    else:
        what = f"has the shared group {shared_groups[0]} behind local ones, but a shared group has to come first"
    _refuse("micro-batches", f"micro-batch {index} of rank {rank} {what}")


def _check_schedule(plan: Plan) -> None:
    """Rule 5. The (group, rank) pairs of the schedule have to equal the pairs of the groups' members."""
    ranks = np.repeat(plan.micro_batch_ranks, np.diff(plan.micro_batch_group_offsets))
    scheduled, members = np.sort(plan.micro_batch_groups * plan.num_ranks + ranks), _member_keys(plan)
    if np.array_equal(scheduled, members):
        return
    keys, times = np.unique(scheduled, return_counts=True)
    if (times > 1).any():
        group, rank = divmod(int(keys[times > 1][0]), plan.num_ranks)
        _refuse("schedule", f"group {group} is scheduled {times[times > 1][0]} times on rank {rank}")
    missing = np.setdiff1d(members, keys)
    if len(missing):
        group, rank = divmod(int(missing[0]), plan.num_ranks)
        _refuse("schedule", f"group {group} is not scheduled on its member, rank {rank}", so="the others would wait")
    group, rank = divmod(int(np.setdiff1d(keys, members)[0]), plan.num_ranks)
    _refuse("schedule", f"group {group} is scheduled on rank {rank}, which is not its member")


def _check_capacity(plan: Plan, limits: MemoryLimits | None) -> None:
    """Rule 6. A cheap upper bound of the slices is tried first, and the exact sizes where the bound is too large."""
    offsets = plan.micro_batch_group_offsets
    shared = (plan.group_sizes > 1)[plan.micro_batch_groups]
    tokens = np.where(shared, largest_slice(plan)[plan.micro_batch_groups], plan.group_tokens[plan.micro_batch_groups])
    ranks = plan.micro_batch_ranks
    suspect = segment_sums(tokens, offsets) > plan.capacity_tokens[ranks]
    entries = np.flatnonzero(np.repeat(suspect, np.diff(offsets)) & shared)
    tokens[entries] = slice_tokens(plan, entries)
    total = segment_sums(tokens, offsets)
    over = total - plan.capacity_tokens[ranks]
    if len(over) and over.max() > 0 and plan.group_offload_ratio.any():
        movable_share = 1.0 if limits is None else limits.movable_share
        over = over - np.floor(movable_share * micro_batch_tokens(plan).offloaded + 1e-6).astype(np.int64)
    if len(over) and over.max() > 0:
        micro_batch = int(over.argmax())
        rank, index = _place_of(plan, micro_batch)
        _refuse(
            "capacity",
            f"micro-batch {index} of rank {rank} holds {total[micro_batch]} tokens, but the rank's capacity is "
            f"{plan.capacity_tokens[rank]} (groups {_listed(plan.groups_of(micro_batch).tolist())})",
            so="the rank would run out of memory",
        )


def _check_order(plan: Plan) -> None:
    """Rule 7."""
    entries = np.flatnonzero((plan.group_sizes > 1)[plan.micro_batch_groups])
    groups = plan.micro_batch_groups[entries]
    ranks = np.repeat(plan.micro_batch_ranks, np.diff(plan.micro_batch_group_offsets))[entries]
    falling = np.flatnonzero((groups[1:] <= groups[:-1]) & (ranks[1:] == ranks[:-1]))
    if len(falling):
        place = int(falling[0])
        _refuse(
            "order",
            f"rank {ranks[place]} runs the shared group {groups[place]} before {groups[place + 1]}",
            so="ranks that run shared groups in different orders can wait for each other for ever",
        )


def _check_memory(plan: Plan, limits: MemoryLimits) -> None:
    """Rule 8."""
    tokens = micro_batch_tokens(plan)
    peaks = limits.device_peak(tokens.held, tokens.offloaded, tokens.shared, tokens.row)
    moved = limits.movable_bytes_per_token * tokens.offloaded
    needed = (
        ("device", peaks, limits.device_room(plan.micro_batch_ranks)),
        ("host memory", moved, np.full(len(moved), limits.host_bytes)),
    )
    for place, sizes, rooms in needed:
        if len(sizes) == 0 or (sizes <= rooms).all():
            continue
        worst = int((sizes - rooms).argmax())
        room = float(rooms[worst])
        rank, index = _place_of(plan, worst)
        sequences = np.concatenate([plan.sequences_of(group) for group in plan.groups_of(worst).tolist()])
        longest = int(sequences[plan.lengths[sequences].argmax()])
        size = plan.group_sizes[int(plan.groups_of(worst)[0])]
        over = f" over {size} ranks" if size > 1 else ""
        raise PlanError(
            f"sequence {longest} ({plan.lengths[longest]} tokens{over}) needs {format_bytes(float(sizes[worst]))} "
            f"on the {place} of rank {rank} (micro-batch {index}: "
            f"{tokens.held[worst]} tokens, {tokens.offloaded[worst]} of them offloaded), "
            f"{format_bytes(float(sizes[worst] - room))} more than the {format_bytes(room)} there are",
            so="the rank would run out of memory",
            fix="lower parallel.capacity_tokens (or use more ranks), set memory.checkpointing to attention or "
            "full, turn on memory.offload, or allow more with memory.device_gib or memory.host_gib",
        )


def _check_lockstep(plan: Plan) -> None:
    """Rule 9."""
    if plan.domain < 1 or plan.num_ranks % plan.domain:
        _refuse(
            "lockstep",
            f"a domain has {plan.domain} ranks, which do not divide the {plan.num_ranks} ranks",
            so="some ranks would gather parameters with nobody",
            fix="use a divisor of the number of ranks",
        )
    apart = plan.apart()
    if len(apart):
        _refuse(
            "lockstep",
            f"group {apart[0]} is in different rounds on its ranks {_listed(plan.ranks_of(int(apart[0])).tolist())}",
            so="a member would wait for another that cannot reach the group before the round has ended",
            fix="plan with the domain that the ranks run in, or align the plan (planner.align)",
        )


def _check_pipeline(plan: Plan, num_stages: int) -> None:
    """Rule 10."""
    from bytescale.plan.pipeline_order import find_cycle  # of pipelines alone

    cycle = find_cycle(plan, num_stages)
    if cycle:
        _refuse(
            "pipeline",
            f"with {num_stages} stages under 1F1B these actions wait for each other: " + " -> ".join(cycle),
            so="training would hang",
            fix="give ranks that share a group the same micro-batches before and after it",
        )


def _member_keys(plan: Plan) -> IntArray:
    """A number for each (group, rank) pair of the groups' members, rising."""
    return np.sort(np.repeat(np.arange(plan.num_groups), plan.group_sizes) * plan.num_ranks + plan.group_ranks)


def _place_of(plan: Plan, micro_batch: int) -> tuple[int, int]:
    """Return the rank of a micro-batch, and its index in that rank's order."""
    rank = int(np.searchsorted(plan.rank_micro_batch_offsets, micro_batch, side="right")) - 1
    return rank, micro_batch - int(plan.rank_micro_batch_offsets[rank])


def _listed(numbers: list[int]) -> str:
    shown = ", ".join(map(str, numbers[:6]))
    return f"{shown}, and {len(numbers) - 6} more" if len(numbers) > 6 else shown


def _refuse(rule: str, what: str, *, so: str = "", fix: str = "report this, with the file of the plan") -> NoReturn:
    raise PlanError(f"the plan breaks rule {rule!r}: {what}", so=so, fix=fix)
