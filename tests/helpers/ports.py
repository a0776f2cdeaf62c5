"""Ports of this machine that nobody else gets."""

from __future__ import annotations

import socket
import sys

# The server will listen on all addresses. On Linux, a socket that does not listen may have the same address and port as
# the server's. Elsewhere, the addresses have to differ.
_ADDRESS = "" if sys.platform == "linux" else "127.0.0.1"


def reserve_port() -> socket.socket:
    """A socket that keeps its port, ``getsockname()[1]``, until it is closed; it never listens.

    Nobody who asks for any free port gets this one, and connections do not leave from it. A server that names it and
    sets ``SO_REUSEADDR``, as PyTorch's key-value store does, can listen there. A port that had only been looked up
    could be another process's by then.
    """
    reservation = socket.socket()
    reservation.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    reservation.bind((_ADDRESS, 0))
    return reservation
