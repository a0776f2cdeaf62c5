"""How the states of recurrent layers travel between the members of a group (``recurrence.states`` has the steps)."""

from __future__ import annotations

_MESSAGE_BYTES = 2**18
"""A message costs as much as so many bytes: some 20 us at 12 GB/s between nodes. It decides between two right ways."""


def holder(position: int, size: int) -> int:
    """The member that holds one of the 2N segments of a sequence, counted from its first token (``plan.layout``)."""
    return min(position, 2 * size - 1 - position)


def scan_bytes(size: int, decay_bytes: int, state_bytes: int) -> list[int]:
    """Bytes that the busiest member sends or receives in each round of a scan over ``size`` members."""
    rounds = []
    distance, last = 1, 2 * size - 1
    while distance <= last:
        sent, received = [0] * size, [0] * size
        for position in range(last + 1 - distance):
            source, target = holder(position, size), holder(position + distance, size)
            if source != target:
                num_bytes = state_bytes + (decay_bytes if position >= distance else 0)
                sent[source] += num_bytes
                received[target] += num_bytes
        rounds.append(max(sent + received))
        distance *= 2
    return rounds


def chain_is_faster(size: int, decay_bytes: int, state_bytes: int) -> bool:
    """Whether handing the state on, position by position, beats the scan."""
    chain = (2 * size - 2) * (_MESSAGE_BYTES + state_bytes)
    return chain < sum(_MESSAGE_BYTES + num_bytes for num_bytes in scan_bytes(size, decay_bytes, state_bytes))
