"""Checkpoints behind URLs: an S3 server that fails and refuses, and a client that dies at any point."""

from __future__ import annotations

import contextlib
import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest

from bytescale.checkpoint import upload as upload_module
from bytescale.checkpoint.checkpointer import Checkpointer
from bytescale.checkpoint.manifest import MANIFEST
from bytescale.checkpoint.upload import Store
from bytescale.checkpoint.verify import problems_of
from bytescale.cli.main import main
from bytescale.common.errors import CheckpointError
from bytescale.runtime.mesh import MeshShape
from bytescale.runtime.optimizer.sharded_optimizer import ShardedOptimizer
from bytescale.storage import retry
from bytescale.storage.place import folders_in, place_at
from bytescale.storage.retry import tried
from tests.checkpoint.meshes import SHAPE, assert_states, run_state, set_states, with_checkpointer
from tests.data.s3_server import S3Server, s3_server

pytest.importorskip("s3fs", reason="s3:// is written with s3fs: pip install 'bytescale[s3]'")
pytest.importorskip("flask_cors", reason="moto's server needs it: make setup")
pytest.importorskip("moto", reason="the S3 server of these tests: make setup")

URL = "s3://bucket/run"


@pytest.fixture(scope="module")
def running() -> Iterator[S3Server]:
    with s3_server() as server:
        yield server


@pytest.fixture
def server(running: S3Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[S3Server]:
    """A server with an empty bucket, and retries that do not wait."""
    for name, value in {
        "AWS_ENDPOINT_URL": running.url,
        "AWS_ACCESS_KEY_ID": "key",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_CONFIG_FILE": str(tmp_path / "no-config"),
        "AWS_SHARED_CREDENTIALS_FILE": str(tmp_path / "no-credentials"),
    }.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(retry, "FIRST_PAUSE_SECONDS", 0.001)
    monkeypatch.setattr(upload_module, "_LOOK_SECONDS", 0.01)
    monkeypatch.setattr(upload_module, "_PATIENCE_SECONDS", 5.0)
    system = fsspec.filesystem("s3")
    system.__class__.clear_instance_cache()
    running.failures_left, running.failing_method, running.status = 0, "", "500 Internal Server Error"
    running.changes_left = None
    fsspec.filesystem("s3").mkdir("bucket")
    running.requests.clear()
    yield running
    running.failures_left, running.changes_left = 0, None
    fsspec.filesystem("s3").rm("bucket", recursive=True)
    fsspec.filesystem("s3").__class__.clear_instance_cache()


def save_and_upload(mesh: MeshShape, folder: Path, /, *steps: int, **config: object) -> None:
    def work(checkpoints: Checkpointer, optimizer: ShardedOptimizer) -> None:
        for step in steps:
            set_states(optimizer, step)
            checkpoints.save(run_state(step), optimizer)
            if checkpoints._uploader is not None:
                checkpoints.finish()  # so that each of them is uploaded
        checkpoints.finish()

    with_checkpointer(mesh, folder, work, **{"folder": URL, **config})


def resume(mesh: MeshShape, folder: Path, url: str = URL) -> tuple[str, int]:
    """From where a run would resume, and at which step; every state compared bit for bit."""

    def work(checkpoints: Checkpointer, optimizer: ShardedOptimizer) -> tuple[str, int]:
        place = checkpoints.newest()
        if place is None:
            return "", 0
        state = checkpoints.restore(place, optimizer, SHAPE.as_dict())
        assert_states(optimizer, state.step)
        return str(place), state.step

    (found,) = set(with_checkpointer(mesh, folder, work, folder=url))
    return found


def test_a_run_goes_on_from_the_store_alone(
    tmp_path: Path, server: S3Server, capsys: pytest.CaptureFixture[str]
) -> None:
    """Uploaded by four ranks, pruned there, listed, verified, and resumed from by two ranks with an empty disk."""
    folder = tmp_path / "checkpoints"
    save_and_upload(MeshShape(2, tp=2), folder, 1, 2, 3, keep=2)
    assert Store(URL).complete() == [2, 3]
    assert sorted(path.name for path in folder.glob("step-*")) == ["step-000002", "step-000003"]
    assert resume(MeshShape(2), folder) == (str(folder / "step-000003"), 3)
    shutil.move(folder / ".run-id", tmp_path / "id")
    shutil.rmtree(folder)
    folder.mkdir()
    shutil.move(tmp_path / "id", folder / ".run-id")
    assert resume(MeshShape(2), folder) == (f"{URL}/step-000003", 3)
    assert main(["checkpoint", "list", URL]) == 0
    assert capsys.readouterr().out.count("whole") == 2
    assert main(["checkpoint", "verify", f"{URL}/step-000003"]) == 0
    assert main(["convert", f"{URL}/step-000003", str(tmp_path / "hf")]) == 0
    assert (tmp_path / "hf" / "model.safetensors").is_file()


@pytest.mark.exhaustive
def test_rot_in_the_store_is_noticed(tmp_path: Path, server: S3Server) -> None:
    save_and_upload(MeshShape(2), tmp_path / "checkpoints", 1)
    system = fsspec.filesystem("s3", skip_instance_cache=True)
    path = "bucket/run/step-000001/tensors-00001.safetensors"
    content = bytearray(system.cat_file(path))
    content[-7] ^= 1
    system.pipe_file(path, bytes(content))
    (found,) = problems_of(place_at(f"{URL}/step-000001"))
    assert f"{URL}/step-000001 is damaged: tensors-00001.safetensors: exp_avg_sq." in found
    shutil.rmtree(tmp_path / "checkpoints" / "step-000001")
    with pytest.raises(AssertionError, match="is not what was written"):
        resume(MeshShape(1), tmp_path / "checkpoints")


def test_faults_are_tried_again(tmp_path: Path, server: S3Server, caplog: pytest.LogCaptureFixture) -> None:
    server.failing_method, server.failures_left = "PUT GET DELETE", 7
    save_and_upload(MeshShape(2), tmp_path / "checkpoints", 1, 2, keep=1)
    assert server.failures_left == 0
    assert "Trying again in" in caplog.text
    assert Store(URL).complete() == [2]


@pytest.mark.exhaustive
def test_a_client_that_dies_at_any_change(tmp_path: Path, server: S3Server) -> None:
    """From the change number n on, the store hears no more of the client: what is complete there is whole.

    The first checkpoint is uploaded, then the second, and the first is deleted; for every n.
    """
    save_and_upload(MeshShape(2), tmp_path / "whole", 1)
    asked = len(server.changes())
    save_and_upload(MeshShape(2), tmp_path / "whole", 2, keep=1)
    num_changes = len(server.changes())
    seen = set()
    for last in range(asked, num_changes + 1):
        url, folder = f"s3://bucket/{last}", tmp_path / str(last)
        save_and_upload(MeshShape(2), folder, 1, folder=url)
        server.changes_left = last - asked
        with contextlib.suppress(AssertionError):  # what it says: see the last test
            save_and_upload(MeshShape(2), folder, 2, keep=1, folder=url)
        server.changes_left = None
        complete = Store(url).complete()
        assert complete
        for step in complete:
            assert problems_of(place_at(f"{url}/step-{step:06d}")) == []
        for local in folder.glob("step-*"):
            shutil.rmtree(local)
        seen.add(resume(MeshShape(1), folder, url)[1])
        save_and_upload(MeshShape(2), folder, 3, keep=1, folder=url)
        assert sorted(folders_in(Store(url).folder)) == ["step-000003"], "what was half uploaded is gone"
    assert seen == {1, 2}


def test_a_slow_store_holds_up_nothing(tmp_path: Path, server: S3Server) -> None:
    """While one checkpoint is on its way, two more are saved here; the last one arrives at the end."""
    gate = threading.Event()
    server.before_change = lambda: gate.wait(30)
    folder = tmp_path / "checkpoints"

    def work(checkpoints: Checkpointer, optimizer: ShardedOptimizer) -> None:
        for step in (1, 2, 3):
            set_states(optimizer, step)
            checkpoints.save(run_state(step), optimizer)
        assert checkpoints.latest() == folder / "step-000003"
        assert (folder / "step-000001").is_dir(), "it is being uploaded, so it is not deleted"
        gate.set()
        checkpoints.finish()

    def claim_first(checkpoints: Checkpointer, optimizer: ShardedOptimizer) -> None:
        checkpoints.finish()

    gate.set()
    with_checkpointer(MeshShape(2), folder, claim_first, folder=URL, keep=1)
    gate.clear()
    with_checkpointer(MeshShape(2), folder, work, folder=URL, keep=1)
    server.before_change = lambda: None
    assert Store(URL).complete() == [3]


def test_a_store_that_answers_nothing_holds_up_nothing(tmp_path: Path, server: S3Server) -> None:
    """No save waits for the store. The end waits as long as it is told to, and says what is not there."""
    gate = threading.Event()
    folder = tmp_path / "checkpoints"
    said: list[str] = []
    took: list[float] = []

    def work(checkpoints: Checkpointer, optimizer: ShardedOptimizer) -> None:
        server.before_request = lambda: gate.wait(60)
        checkpoints._log = said.append
        began = time.monotonic()
        for step in (1, 2, 3, 4):
            set_states(optimizer, step)
            checkpoints.save(run_state(step), optimizer)
            checkpoints.poll()
        took.append(time.monotonic() - began)
        began = time.monotonic()
        with pytest.raises(CheckpointError, match=r"step-000001 could not be uploaded .*copy .*step-000001 there"):
            checkpoints.finish(1.0)
        took.append(time.monotonic() - began)

    try:
        with_checkpointer(MeshShape(1), folder, work, folder=URL, keep=9)
    finally:
        gate.set()
        server.before_request = lambda: None
    assert took[0] < 5, "four small checkpoints were written meanwhile"
    assert took[1] < 5
    assert f"{folder}/step-000004 is on this machine alone" in said
    deadline = time.monotonic() + 60
    while Store(URL).complete() != [1]:  # what was given up arrives late
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_manifest_that_the_store_cut_short_is_not_complete(tmp_path: Path, server: S3Server) -> None:
    save_and_upload(MeshShape(1), tmp_path / "checkpoints", 1, 2)
    system = fsspec.filesystem("s3", skip_instance_cache=True)
    path = f"bucket/run/step-000002/{MANIFEST}"
    system.pipe_file(path, system.cat_file(path)[:-20])
    assert Store(URL).complete() == [1]
    (tmp_path / "checkpoints" / ".run-id").rename(tmp_path / "id")
    shutil.rmtree(tmp_path / "checkpoints")
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "id").rename(tmp_path / "checkpoints" / ".run-id")
    assert resume(MeshShape(1), tmp_path / "checkpoints") == (f"{URL}/step-000001", 1)
    assert main(["checkpoint", "verify", f"{URL}/step-000002"]) == 1, "it is kept, to be looked at"


def test_a_call_without_an_answer_is_given_up() -> None:
    """Some file systems have no time limits of their own."""
    gate = threading.Event()
    began = time.monotonic()
    with pytest.raises(OSError, match=r"no answer within 0 s"):
        tried("hdfs://host/run", lambda: gate.wait(60), seconds=0.2)
    gate.set()
    assert time.monotonic() - began < 30


def test_two_runs_in_one_folder_are_refused(tmp_path: Path, server: S3Server) -> None:
    save_and_upload(MeshShape(1), tmp_path / "one", 1)
    with pytest.raises(AssertionError, match=r"Another run writes its checkpoints into s3://bucket/run.*To fix: name"):
        save_and_upload(MeshShape(2), tmp_path / "other", 1)
    shared = str(tmp_path / "shared")
    save_and_upload(MeshShape(1), tmp_path / "one", 1, folder=shared)
    assert (tmp_path / "shared" / "step-000001").is_dir()
    with pytest.raises(AssertionError, match=r"Another run writes its checkpoints into .*shared"):
        save_and_upload(MeshShape(2), tmp_path / "other", 1, folder=shared)


def test_a_store_that_answers_403(tmp_path: Path, server: S3Server) -> None:
    server.failing_method, server.status, server.failures_left = "GET PUT HEAD", "403 Forbidden", 10**6
    with pytest.raises(AssertionError, match=r"s3://bucket/run.* cannot be reached \(.*403.*credentials"):
        save_and_upload(MeshShape(2), tmp_path / "checkpoints", 1)


def test_keys_that_are_missing(tmp_path: Path, server: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    fsspec.filesystem("s3").__class__.clear_instance_cache()
    with pytest.raises(AssertionError, match=r"s3://bucket/run.* cannot be reached \(NoCredentialsError.*AWS_PROFILE"):
        save_and_upload(MeshShape(1), tmp_path / "checkpoints", 1)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    fsspec.filesystem("s3").__class__.clear_instance_cache()


def test_a_store_that_is_gone_costs_the_upload_alone(tmp_path: Path, server: S3Server) -> None:
    """The checkpoint here is whole, and the message says so."""
    folder = tmp_path / "checkpoints"
    save_and_upload(MeshShape(1), folder, 1)
    server.changes_left = 0
    with pytest.raises(AssertionError, match=r"step-000002 could not be uploaded .*The copy in .* is whole"):
        save_and_upload(MeshShape(1), folder, 2)
    server.changes_left = None
    assert resume(MeshShape(1), folder) == (str(folder / "step-000002"), 2)
    assert not isinstance(CheckpointError("x"), ValueError)
