"""One Ray for all tests of the remote loader, held by a process of its own: forked ranks and CLI runs join it too."""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
from collections.abc import Iterator

import pytest

import bytescale.data.remote  # noqa: F401  sets what Ray reads when it is imported, before any test module imports it

# A Ray that a program starts lets in only those who know its token. The starter's children inherit these variables; the
# test process is none, and reads them when it imports Ray.
os.environ.setdefault("RAY_AUTH_MODE", "token")
os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))

OWN_PROCESS = "BYTESCALE_TESTS_RAY"
"""Set in the process of a test that forks ranks: the address of the Ray that it joins."""

HOLD_RAY = """
import sys
from bytescale.data.remote.ray_cluster import ray_cluster

with ray_cluster(8) as address:
    print(address, flush=True)
    sys.stdin.read()
"""


@pytest.fixture(scope="session")
def ray_address() -> Iterator[str]:
    """host:port of a Ray on loopback; it ends when the holder's input does."""
    if OWN_PROCESS in os.environ:
        yield os.environ[OWN_PROCESS]
        return
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD_RAY], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert holder.stdin is not None
    assert holder.stdout is not None
    try:
        address = holder.stdout.readline().strip()
        assert address.startswith("127.0.0.1:"), f"Ray did not start: {address!r}"
        yield address
    finally:
        holder.stdin.close()
        holder.wait(30)


@pytest.fixture
def ray_joined(ray_address: str) -> Iterator[str]:
    """This process as a driver."""
    import ray

    from bytescale.data.remote.ray_cluster import connect

    connect(ray_address)
    try:
        yield ray_address
    finally:
        ray.shutdown()


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a test marked ``forks_ranks`` in a pytest of its own.

    A process that has joined Ray once keeps gRPC's state after it has left. Ranks that it forks would wait for Ray for
    ever.
    """
    if "forks_ranks" not in pyfuncitem.keywords or OWN_PROCESS in os.environ:
        return None
    address = pyfuncitem.funcargs.get("ray_address", "")  # without: the ranks start a Ray of their own
    told = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", pyfuncitem.nodeid],
        cwd=pyfuncitem.config.rootpath,
        env={**os.environ, OWN_PROCESS: address},
        capture_output=True,
        text=True,
    )
    assert told.returncode == 0, told.stdout + told.stderr
    return True
