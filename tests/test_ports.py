"""A reserved port is nobody's but the server's that it was reserved for."""

from __future__ import annotations

import socket
from datetime import timedelta

import pytest
import torch.distributed as dist

from bytescale.common.ports import reserve_port


def test_a_store_listens_at_a_reserved_port() -> None:
    with reserve_port() as reservation:
        port = reservation.getsockname()[1]
        store = dist.TCPStore("127.0.0.1", port, world_size=1, is_master=True, timeout=timedelta(seconds=60))
        store.set("key", "value")
        assert store.get("key") == b"value"


def test_nobody_else_gets_a_reserved_port() -> None:
    with reserve_port() as reservation, reserve_port() as another, socket.socket() as other:
        port = reservation.getsockname()[1]
        assert another.getsockname()[1] != port
        with pytest.raises(OSError, match="in use"):
            other.bind(("127.0.0.1", port))
