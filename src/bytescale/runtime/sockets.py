"""The connections of gloo's groups, which this process can end, so that nobody waits for it any more.

PyTorch 2.13 aborts a gloo group without ending its connections: a message that this rank or another one waits for
stays pending until the time limit (tests/runtime/test_members.py shows it). Shut connections end both ends at once.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Collection, Iterator
from contextlib import suppress


def listening_ports() -> list[int]:
    """The ports at which this process waits for connections. Empty where Linux's /proc is not."""
    return sorted({own.getsockname()[1] for own in _sockets() if _listens(own)})


def shut_connections(ports: Collection[int]) -> None:
    """Shut all connections of this process from or to one of ``ports``. Whoever waits at either end gets an error."""
    for own in _sockets():
        with suppress(OSError):  # it has no other end any more
            if not _listens(own) and (own.getsockname()[1] in ports or own.getpeername()[1] in ports):
                own.shutdown(socket.SHUT_RDWR)


def _listens(own: socket.socket) -> bool:
    return bool(own.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))


def _sockets() -> Iterator[socket.socket]:
    """The TCP sockets of this process, each as a second handle that is closed behind its turn.

    /proc/net/tcp lists them, too, but leaves some out while others come and go.
    """
    with suppress(FileNotFoundError):
        for number in os.listdir("/proc/self/fd"):
            with suppress(OSError):
                if os.readlink(f"/proc/self/fd/{number}").startswith("socket:"):
                    with socket.socket(fileno=os.dup(int(number))) as own:
                        if own.family in (socket.AF_INET, socket.AF_INET6) and own.type == socket.SOCK_STREAM:
                            yield own
