"""Joins Ray, or starts one of our own on this machine that nobody else can reach."""

from __future__ import annotations

import fcntl
import importlib.util
import os
import shutil
import socket
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import ModuleType

from bytescale.common.errors import ConfigError, problem

NAMESPACE = "bytescale"
_OBJECT_STORE_BYTES = 256 * 1024**2
"""Of a Ray of our own: a hundred times what ranks have under way with 1M tokens a batch and 2 bytes a token."""
_ANSWER_SECONDS = 10.0


def check_installed() -> None:
    """Raise ``ConfigError`` where Ray is not installed. Does not import it."""
    if importlib.util.find_spec("ray") is None:
        raise ConfigError(
            problem(
                "the remote loader needs Ray, which is not installed",
                so="there are no servers to read the data",
                fix="pip install 'bytescale[ray]', or set data.loader = \"local\"",
            )
        )


def import_ray() -> ModuleType:
    """The module ``ray``. Raises ``ConfigError`` where it is not installed."""
    check_installed()
    import ray

    return ray


def is_joined() -> bool:
    """Whether this process is one of Ray's already. Does not import Ray."""
    return "ray" in sys.modules and sys.modules["ray"].is_initialized()


def configured_address(ray_address: str) -> str:
    """The address of a running Ray: ``data.ray_address``, else ``RAY_ADDRESS``; empty when there is none."""
    return ray_address or os.environ.get("RAY_ADDRESS", "")


@contextmanager
def ray_cluster(ray_address: str, num_ranks: int) -> Iterator[str]:
    """Join the Ray that is configured, or start one for the time of the block; yields its address.

    Args:
        ray_address: ``data.ray_address``.
        num_ranks: training ranks that a Ray of our own must have room for.

    Raises:
        ConfigError: Ray is not installed, its address does not answer, or it is of another version.
    """
    address = configured_address(ray_address)
    if address:
        connect(address)
        try:
            yield address
        finally:
            disconnect()
        return
    ray = import_ray()
    with _session_folder() as folder:
        context = ray.init(
            address="local",
            num_cpus=max(num_ranks, os.cpu_count() or 1),
            object_store_memory=_OBJECT_STORE_BYTES,
            include_dashboard=False,
            log_to_driver=False,
            logging_level="ERROR",
            namespace=NAMESPACE,
            _temp_dir=folder,
            _node_ip_address="127.0.0.1",
        )
        try:
            yield str(context.address_info["gcs_address"])
        finally:
            ray.shutdown()


@contextmanager
def _session_folder() -> Iterator[str]:
    """Where a Ray of our own has its sockets and logs; those of owners that were killed are removed.

    The owner holds a lock in it, which the kernel frees with the owner: process numbers would say nothing to a
    container that shares /tmp.
    """
    for lock in Path("/tmp").glob("bytescale-ray-*/lock"):  # socket paths may have 107 characters
        with suppress(OSError), lock.open("a") as file:  # somebody else's, in use, or gone in this moment
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(lock.parent, ignore_errors=True)
    folder = Path(tempfile.mkdtemp(prefix="bytescale-ray-", dir="/tmp"))
    try:
        with (folder / "lock").open("a") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield str(folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def connect(address: str) -> None:
    """Join the Ray at ``address`` as a driver. Raises ``ConfigError`` as ``ray_cluster``."""
    ray = import_ray()
    if address.startswith("ray://"):
        raise ConfigError(
            problem(
                f"the Ray address {address} is one of Ray Client",
                so="its drivers have no shared memory with the servers",
                fix="run the ranks on nodes of the cluster and use host:port of its head (port 6379 by default)",
            )
        )
    host, _, port = address.rpartition(":")
    if address != "auto":
        _check_answers(address, host, port)
    try:
        # Without the address of this node Ray would look for it by reaching out to the internet.
        own = {"_node_ip_address": "127.0.0.1"} if host in ("127.0.0.1", "localhost") else {}
        ray.init(address=address, namespace=NAMESPACE, log_to_driver=False, logging_level="ERROR", **own)
    except (RuntimeError, ConnectionError, ValueError) as error:
        raise _no_connection(address, error) from error


def keys_to_join() -> dict[str, str]:
    """Environment variables that let another process into the Ray that this one has started; its children have them."""
    return {name: value for name, value in os.environ.items() if name.startswith("RAY_AUTH_")}


def disconnect() -> None:
    """Leave Ray. May be called without having joined."""
    import_ray().shutdown()


def _check_answers(address: str, host: str, port: str) -> None:
    """Ray itself would try for a minute and then end the process."""
    if not host or not port.isdigit():
        raise ConfigError(
            problem(f"the Ray address {address!r} is not host:port", fix="write it like 10.0.0.1:6379, or 'auto'")
        )
    try:
        socket.create_connection((host, int(port)), timeout=_ANSWER_SECONDS).close()
    except OSError as error:
        raise _no_connection(address, error) from error


def _no_connection(address: str, error: Exception) -> ConfigError:
    if "version mismatch" in str(error).lower():
        first = " ".join(str(error).split())
        return ConfigError(
            problem(
                f"the Ray at {address} has other versions than this process: {first}",
                so="they could not exchange objects",
                fix="install the same versions of Ray and Python on all nodes",
            )
        )
    return ConfigError(
        problem(
            f"the Ray at {address} does not answer ({error})",
            so="there is nobody to read the data",
            fix="start it (`ray start --head`), mend data.ray_address or RAY_ADDRESS (if it asks for a token, also "
            "RAY_AUTH_MODE=token and RAY_AUTH_TOKEN), or unset them to start one here",
        )
    )
