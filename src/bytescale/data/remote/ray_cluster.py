"""Joins a running Ray, or starts a Ray of our own on this machine, which no other machine can reach."""

from __future__ import annotations

import importlib.util
import os
import secrets
import socket
import sys
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from tempfile import TemporaryDirectory
from types import ModuleType
from typing import Any

from bytescale.common.errors import ConfigError, LoaderFailure
from bytescale.data.loading.loader import Reader

NAMESPACE = "bytescale"
_OBJECT_STORE_BYTES = 256 * 1024**2
"""Object store of a Ray of our own: about a hundred batches of 1M tokens with 2 bytes a token."""
_ANSWER_SECONDS = 10.0


def check_installed() -> None:
    """Raise ``ConfigError`` where Ray is not installed. Does not import it."""
    if importlib.util.find_spec("ray") is None:
        raise ConfigError(
            "the remote loader needs Ray, which is not installed",
            so="there are no servers to read the data",
            fix="pip install 'bytescale[ray]', or set data.loader = \"local\"",
        )


def import_ray() -> ModuleType:
    """Import and return the module ``ray``. Raises ``ConfigError`` if Ray is not installed."""
    check_installed()
    import ray

    return ray


@contextmanager
def ray_cluster(num_ranks: int) -> Iterator[str]:
    """Join the Ray at ``RAY_ADDRESS``, or start one that lives as long as the block, with room for ``num_ranks``.

    Yields its address.

    Raises ``ConfigError`` if Ray is not installed, its address does not answer, or it runs another version of Ray or
    Python; ``LoaderFailure`` if a Ray of our own did not start.
    """
    if address := os.environ.get("RAY_ADDRESS", ""):
        connect(address)
        try:
            yield address
        finally:
            import_ray().shutdown()
        return
    # Ray would keep a token of its own in a file of mode 0644. This one is known to this process and its children.
    os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
    ray = import_ray()
    # Ray gives the folder mode 0777, so it lies in one of ours. A socket's path may have 107 characters only.
    with TemporaryDirectory(prefix="bytescale-ray-", dir="/tmp", ignore_cleanup_errors=True) as folder:
        try:
            context = ray.init(
                address="local",
                num_cpus=max(num_ranks, os.cpu_count() or 1),
                object_store_memory=_OBJECT_STORE_BYTES,
                include_dashboard=False,
                log_to_driver=False,
                logging_level="ERROR",
                namespace=NAMESPACE,
                _temp_dir=f"{folder}/r",
                _node_ip_address="127.0.0.1",
            )
        except Exception as error:  # Ray raises what it likes, most often because a busy machine starts it too slowly
            raise LoaderFailure(
                f"Ray did not start ({' '.join(str(error).split())[:300]})",
                so="there is nobody to read the data",
                fix="try again when the machine is less busy, or start a Ray (`ray start --head`) and set RAY_ADDRESS",
            ) from error
        try:
            yield str(context.address_info["gcs_address"])
        finally:
            ray.shutdown()


@contextmanager
def joined_ray(reader: Reader) -> Iterator[str]:
    """Join the Ray at ``RAY_ADDRESS``, or the one that the first process starts, for the time of the block.

    Every process calls it. Yields a name that is unique to this attempt, the same on all. Raises as ``ray_cluster``.
    """
    told: list[Any] = ["", f"bytescale-{uuid.uuid4().hex[:12]}", {}]
    if "ray" in sys.modules and sys.modules["ray"].is_initialized():  # a process that Ray itself has started
        reader.broadcast(told)
        yield told[1]
        return
    with ray_cluster(reader.num_processes) if reader.is_first else nullcontext("") as address:
        told[0], told[2] = address, {name: key for name, key in os.environ.items() if name.startswith("RAY_AUTH_")}
        reader.broadcast(told)
        address, session, keys = told
        os.environ.update(keys)  # before Ray is imported, which reads them once
        if not import_ray().is_initialized():
            connect(address)
        try:
            yield session
        finally:
            if not reader.is_first:
                import_ray().shutdown()


def connect(address: str) -> None:
    """Join the Ray at ``address`` as a driver. Raises ``ConfigError`` as ``ray_cluster``."""
    ray = import_ray()
    if address.startswith("ray://"):
        raise ConfigError(
            f"the Ray address {address} is one of Ray Client",
            so="its drivers have no shared memory with the servers",
            fix="run the ranks on nodes of the cluster and use host:port of its head (port 6379 by default)",
        )
    host, _, port = address.rpartition(":")
    if address != "auto" and (not host or not port.isdigit()):
        raise ConfigError(f"the Ray address {address!r} is not host:port", fix="write it like 10.0.0.1:6379, or 'auto'")
    try:
        if address != "auto":  # where nothing answers, Ray would try for a minute and then end the process
            socket.create_connection((host, int(port)), timeout=_ANSWER_SECONDS).close()
        # Without this address, Ray would find its own address by opening a connection to the internet.
        own = {"_node_ip_address": "127.0.0.1"} if host in ("127.0.0.1", "localhost") else {}
        ray.init(address=address, namespace=NAMESPACE, log_to_driver=False, logging_level="ERROR", **own)
    except (RuntimeError, OSError, ValueError) as error:
        if "version mismatch" in str(error).lower():
            raise ConfigError(
                f"the Ray at {address} has other versions than this process: {' '.join(str(error).split())}",
                so="they could not exchange objects",
                fix="install the same versions of Ray and Python on all nodes",
            ) from error
        raise ConfigError(
            f"the Ray at {address} does not answer ({error})",
            so="there is nobody to read the data",
            fix="start it (`ray start --head`), mend RAY_ADDRESS (if it asks for a token, also "
            "RAY_AUTH_MODE=token and RAY_AUTH_TOKEN), or unset it to start one here",
        ) from error
