"""The connections of gloo's groups, which this process can end, so that nobody waits for it any more.

PyTorch 2.13 aborts a gloo group without ending its connections: a message that this rank or another one waits for
stays pending until the time limit (tests/runtime/test_members.py shows it). Shut connections end both ends at once.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Collection, Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

_LISTENS = "0A"


class _Connection(NamedTuple):
    number: int  # file descriptor
    own_port: int
    other_port: int
    listens: bool


def listening_ports() -> list[int]:
    """The ports at which this process waits for connections, without the store's. Empty where Linux's /proc is not."""
    return sorted({own.own_port for own in _connections() if own.listens})


def shut_connections(ports: Collection[int]) -> None:
    """Shut all connections of this process from or to one of ``ports``. Whoever waits at either end gets an error."""
    for own in _connections():
        if not own.listens and (own.own_port in ports or own.other_port in ports):
            with suppress(OSError), socket.socket(fileno=os.dup(own.number)) as connection:
                connection.shutdown(socket.SHUT_RDWR)


def _connections() -> Iterator[_Connection]:
    """TCP sockets of this process, as proc(5) shows them."""
    numbers = {}
    with suppress(OSError):
        for number in os.listdir("/proc/self/fd"):
            with suppress(OSError):
                target = os.readlink(f"/proc/self/fd/{number}")
                numbers[target.removeprefix("socket:[").removesuffix("]")] = int(number)
        for table in ("tcp", "tcp6"):
            for line in Path(f"/proc/self/net/{table}").read_text().splitlines()[1:]:
                _, own, other, state, *rest = line.split()
                if rest[5] in numbers:
                    yield _Connection(numbers[rest[5]], int(own[-4:], 16), int(other[-4:], 16), state == _LISTENS)
