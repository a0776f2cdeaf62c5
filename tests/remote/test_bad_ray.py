"""The errors that a user sees if Ray is missing, does not answer, or fails."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import ray
import ray.exceptions

from bytescale.common.errors import ConfigError, DataError, LoaderFailure
from bytescale.data.remote import ray_cluster, served_corpus
from bytescale.data.remote.calls import translated, wait_for
from tests.helpers.disk import small_disk
from tests.helpers.ports import reserve_port
from tests.remote.support import (
    feeds,
    kill_minus_9,
    numbered_config,
    planner_for,
    servers,
    take_steps,
    write_numbered_corpus,
)


def test_ray_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"Ray, which is not installed.*pip install 'bytescale\[ray\]'"):
        ray_cluster.check_installed()


def test_an_address_where_nobody_listens() -> None:
    with reserve_port() as reservation:
        port = reservation.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"Ray at 127.0.0.1:{port} does not answer .*ray start --head"):
            ray_cluster.connect(f"127.0.0.1:{port}")


@pytest.mark.parametrize("address", ["somewhere", "host:port"])
def test_an_address_that_is_none(address: str) -> None:
    with pytest.raises(ConfigError, match=rf"Ray address '{address}' is not host:port"):
        ray_cluster.connect(address)


def test_a_ray_that_does_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(**_: object) -> None:
        raise TimeoutError("timed out while waiting for the\n  GCS")

    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(ray, "init", refuse)
    with (
        pytest.raises(LoaderFailure, match=r"Ray did not start \(timed out .* the GCS\).*less busy"),
        ray_cluster.ray_cluster(2),
    ):
        pass


def test_a_ray_client_address() -> None:
    with pytest.raises(ConfigError, match=r"ray://host:10001 is one of Ray Client.*port 6379"):
        ray_cluster.connect("ray://host:10001")


def test_another_version(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(**_: object) -> None:
        raise RuntimeError("Version mismatch: The cluster was started with:\n    Ray: 2.51.0\n    Python: 3.12.1")

    monkeypatch.setattr(ray, "init", refuse)
    with pytest.raises(ConfigError, match=r"has other versions than this process: .*Ray: 2.51.0 .*same versions"):
        ray_cluster.connect("auto")


@pytest.mark.parametrize(
    "error", [ray.exceptions.ObjectStoreFullError("full"), ray.exceptions.OutOfDiskError("no space")]
)
def test_no_room_left(error: Exception) -> None:
    told = translated(error, "data server 1")
    assert isinstance(told, LoaderFailure)
    assert "Ray has no room left for what data server 1 sent" in str(told)
    assert "--object-store-memory" in str(told)


@pytest.mark.usefixtures("ray_joined")
@pytest.mark.exhaustive
def test_an_actor_that_does_not_answer(tmp_path: Path) -> None:
    class Sleeper:
        def sleep(self) -> None:
            import time

            time.sleep(30)

    sleeper = ray.remote(Sleeper).options(num_cpus=0).remote()
    with pytest.raises(
        LoaderFailure, match=r"Data server 0 did not answer within 1 s.*checkpoints written before are whole"
    ):
        wait_for(sleeper.sleep.remote(), "data server 0", 0.6)
    ray.kill(sleeper)
    with pytest.raises(LoaderFailure, match=r"Data server 0 is gone \(Actor"):
        wait_for(sleeper.sleep.remote(), "data server 0", 30)


@pytest.mark.usefixtures("ray_joined")
def test_a_server_that_answers_nothing_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Silent:
        def read(self, *_: object) -> None:
            import time

            time.sleep(60)

    write_numbered_corpus(tmp_path / "numbers")
    monkeypatch.setattr(served_corpus, "ANSWER_SECONDS", 1.0)
    with feeds(numbered_config(tmp_path, servers=1), "ray", 1) as (loader,):
        loader.state_dict()
        servers(loader)[:] = [ray.remote(Silent).options(num_cpus=0).remote()]
        message = r"Data server 0 did not answer within 1 s.*look at the load of its node"
        with loader.open(planner_for(1), 1) as steps, pytest.raises(LoaderFailure, match=message):
            next(steps)
        ray.kill(servers(loader)[0])


@pytest.mark.usefixtures("ray_joined")
def test_a_source_that_goes_away_after_the_start(tmp_path: Path) -> None:
    """What was tokenised stays; a ``.bin`` that is mapped survives being unlinked, as the kernel keeps it."""
    write_numbered_corpus(tmp_path / "numbers")
    with feeds(numbered_config(tmp_path), "ray", 1) as opened:
        before, state = take_steps(opened, 1)
        (tmp_path / "numbers.bin").unlink()
        after, _ = take_steps(opened, 1, state=state)
        assert after[0][0].step == before[0][0].step + 1
    with pytest.raises(ConfigError, match=r"numbers.bin' does not exist"), feeds(numbered_config(tmp_path), "ray", 1):
        pass


READ_TOO_MUCH = """
import os, sys
import numpy as np
import ray
from pathlib import Path
import bytescale.data.remote
from bytescale.common.errors import LoaderFailure
from bytescale.data.remote.calls import wait_for
from tests.remote.support import feeds, numbered_config, servers, write_numbered_corpus

disk, folder = map(Path, sys.argv[1:])
num_tokens = write_numbered_corpus(folder / "numbers")
ray.init(address="local", num_cpus=1, object_store_memory=80 * 1024**2, include_dashboard=False, log_to_driver=False,
         logging_level="FATAL", _temp_dir=str(disk), _node_ip_address="127.0.0.1")
opened = feeds(numbered_config(folder, servers=1), "ray", 1)
(server,) = servers(opened.__enter__()[0])

def read(times):
    nothing = np.zeros(times, dtype=np.int64)
    reference = server.read.remote(nothing, nothing, np.full(times, num_tokens))
    return len(wait_for(reference, "data server 0", 60.0)[0]["tokens"]) == times * num_tokens

assert read(10)
free = os.statvfs(disk)
(disk / "filler").write_bytes(bytes(int(0.995 * free.f_bavail * free.f_frsize)))  # nothing can be spilled there
try:
    read(200 * 1024**2 // (4 * num_tokens))
except LoaderFailure as error:
    print(error)
(disk / "filler").unlink()
assert read(10), "and the server lives on"
"""


@pytest.mark.exhaustive
def test_an_object_store_that_is_really_full(tmp_path: Path) -> None:
    """200 MiB of tokens for a store of 80 MiB, whose overflow finds a full disk."""
    with (
        tempfile.TemporaryDirectory(prefix="rs-", dir="/tmp") as short,  # socket paths may have 107 characters
        small_disk(Path(short) / "d", 40 * 1024**2) as disk,
    ):
        told = subprocess.run(
            [sys.executable, "-c", READ_TOO_MUCH, str(disk), str(tmp_path)], capture_output=True, text=True, timeout=600
        )
        assert told.returncode == 0, told.stderr
        assert "Ray has no room left for what data server 0 sent" in told.stdout
        assert "or free its disk" in told.stdout


@pytest.mark.exhaustive
@pytest.mark.usefixtures("ray_joined")
def test_a_server_that_restarts_after_its_source_is_gone_names_the_file(tmp_path: Path) -> None:
    write_numbered_corpus(tmp_path / "numbers")
    with feeds(numbered_config(tmp_path, servers=1), "ray", 1) as opened:
        _, state = take_steps(opened, 1)
        (tmp_path / "numbers.bin").unlink()
        kill_minus_9(servers(opened[0])[0])
        with pytest.raises(DataError, match=r"numbers.bin.*(cannot be read|does not exist|No such file)"):
            take_steps(opened, 1, state=state)
