"""TensorBoard, Weights & Biases and trackio take a run's numbers; a missing package is one clear error."""

from __future__ import annotations

import importlib.util
import json
import os
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from bytescale.common.errors import ConfigError
from bytescale.config.schema import Config, LogConfig
from bytescale.train.reporting import trackers
from bytescale.train.reporting.trackers import check_trackers, open_trackers
from bytescale.train.run_folder import RunFolder


def test_an_offline_run_of_wandb_holds_what_was_logged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights & Biases' own variables say where it is filed."""
    wandb = pytest.importorskip("wandb")
    variables = {"PROJECT": "trial", "ENTITY": "us", "NAME": "mine", "RUN_GROUP": "all", "TAGS": "a,b"}
    for name, value in variables.items():
        monkeypatch.setenv(f"WANDB_{name}", value)
    folder = RunFolder(tmp_path / "first-run")
    folder.path.mkdir()
    monkeypatch.setenv("WANDB_MODE", "offline")
    (tracker,) = open_trackers(folder, Config(log=LogConfig(trackers=("wandb",))))
    tracker.log(7, {"loss": 5.5, "num_tokens": 12})
    tracker.log(8, {"loss": 5.25, "num_tokens": 13})
    tracker.close()
    wandb.teardown()  # W&B's own process may still be writing; it ends with the process that started it
    (file,) = (folder.path / "wandb").glob("offline-run-*/run-*.wandb")
    header, history = read_wandb(file)
    assert (header.project, header.display_name, header.entity) == ("trial", "mine", "us")
    assert (header.run_group, list(header.tags)) == ("all", ["a", "b"])
    assert header.run_id == folder.wandb_id.read_text(encoding="ascii").strip()  # a resumed run keeps it
    logged = [{name: row[name] for name in ("step", "loss", "num_tokens")} for row in history]
    assert logged == [{"step": 7, "loss": 5.5, "num_tokens": 12}, {"step": 8, "loss": 5.25, "num_tokens": 13}]


def test_a_run_of_wandb_is_named_after_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = pytest.importorskip("wandb")
    asked: dict[str, object] = {}

    def init(**settings: object) -> SimpleNamespace:
        asked.update(settings)
        return SimpleNamespace(define_metric=lambda *names, **options: None, log=None, finish=None)

    monkeypatch.setattr(wandb, "init", init)
    for name in ("WANDB_PROJECT", "WANDB_NAME"):
        monkeypatch.delenv(name, raising=False)
    folder = RunFolder(tmp_path / "first-run")
    folder.path.mkdir()
    open_trackers(folder, Config(log=LogConfig(trackers=("wandb",))))
    assert (asked["project"], asked["name"]) == ("bytescale", "first-run")


def test_a_resumed_run_of_trackio_goes_on_in_its_database(tmp_path: Path) -> None:
    """In a process of its own, which opens no connection and no port."""
    pytest.importorskip("trackio")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("TRACKIO", "HF_"))}
    environment |= {"TRACKIO_DIR": str(tmp_path / "database"), "HF_HOME": str(tmp_path / "hub")}  # nobody is logged in
    for folder, first in (("a", 0), ("a", 2), ("b", 7)):  # two folders of one name are two runs
        place = tmp_path / folder / "run"
        place.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-c", TRACKIO_RUN, str(place), str(first)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=True)
        assert json.loads(done.stdout) == []  # neither messages of trackio nor connections
    read = [sys.executable, "-c", TRACKIO_READ]
    done = subprocess.run(read, env=environment, capture_output=True, text=True, timeout=120, check=True)
    assert json.loads(done.stdout) == [[[0, 5.5], [1, 5.25], [2, 5.5], [3, 5.25]], [[7, 5.5], [8, 5.25]]]


TRACKIO_RUN = """
import json, pathlib, sys
opened = []
sys.addaudithook(lambda event, args: opened.append(event) if event in ("socket.connect", "socket.bind") else None)
from bytescale.config.schema import Config, LogConfig
from bytescale.train.reporting.trackers import open_trackers
from bytescale.train.run_folder import RunFolder
folder, first = RunFolder(pathlib.Path(sys.argv[1])), int(sys.argv[2])
(tracker,) = open_trackers(folder, Config(log=LogConfig(trackers=("trackio",))))
for step, loss in ((first, 5.5), (first + 1, 5.25)):
    tracker.log(step, {"loss": loss, "num_tokens": 12})
tracker.close()
print(json.dumps(opened))
"""
TRACKIO_READ = """
import json
from trackio.sqlite_storage import SQLiteStorage
runs = [SQLiteStorage.get_logs("bytescale", name) for name in SQLiteStorage.get_runs("bytescale")]
print(json.dumps(sorted([[row["step"], row["loss"]] for row in rows] for rows in runs)))
"""


def test_trackio_is_asked_for_the_run_of_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether or not it is installed: the name stays with the folder, and what it refuses is one clear error."""
    asked: list[tuple[str, str, str]] = []
    logged: list[tuple[dict[str, float], int]] = []
    monkeypatch.setattr(trackers, "check_trackers", lambda log: None)

    def init(project: str, name: str, *, resume: str, **options: object) -> SimpleNamespace:
        if len(asked) == 3:
            raise ValueError("Self-hosted logging requires a write token")
        print("* Trackio project initialized")
        asked.append((project, name, resume))
        return SimpleNamespace(log=lambda scalars, step: logged.append((scalars, step)))

    monkeypatch.setitem(sys.modules, "trackio", SimpleNamespace(init=init))
    config = Config(log=LogConfig(trackers=("trackio",)))
    for parent in ("a", "a", "b"):
        folder = RunFolder(tmp_path / parent / "run")
        folder.path.mkdir(parents=True, exist_ok=True)
        (tracker,) = open_trackers(folder, config)
        tracker.log(7, {"loss": 5.5})
    assert asked[0] == asked[1]
    assert asked[0] != asked[2]
    assert all((project, name[:4], resume) == ("bytescale", "run-", "allow") for project, name, resume in asked)
    assert logged == [({"loss": 5.5}, 7)] * 3
    with pytest.raises(ConfigError, match=r"requires a write token.*TRACKIO_SERVER_URL"):
        open_trackers(folder, config)


@pytest.mark.parametrize(
    ("log", "message"),
    [
        (LogConfig(trackers=("wandb",)), r"log\.trackers has wandb, and the package wandb .*bytescale\[wandb\]"),
        (LogConfig(trackers=("trackio",)), r"log\.trackers has trackio.*bytescale\[trackio\]"),
        (LogConfig(trackers=("tensorboard",)), r"log\.trackers has tensorboard.*bytescale\[tensorboard\]"),
    ],
)
def test_a_missing_package_is_one_clear_error(monkeypatch: pytest.MonkeyPatch, log: LogConfig, message: str) -> None:
    monkeypatch.setattr(trackers.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=message):
        check_trackers(log)
    check_trackers(LogConfig())


def test_a_folder_named_wandb_is_not_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tracked").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    found = importlib.util.find_spec("tracked")
    assert found is not None
    monkeypatch.setattr(trackers.importlib.util, "find_spec", lambda name: found)
    with pytest.raises(ConfigError, match="the package wandb is not installed"):
        check_trackers(LogConfig(trackers=("wandb",)))


def test_what_wandb_refuses_is_one_clear_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = pytest.importorskip("wandb")

    def refuse(**settings: object) -> None:
        raise wandb.errors.UsageError("api_key not configured (no-tty)")

    monkeypatch.setattr(wandb, "init", refuse)
    with pytest.raises(ConfigError, match=r"api_key not configured.*wandb login"):
        open_trackers(RunFolder(tmp_path), Config(log=LogConfig(trackers=("wandb",))))


def read_wandb(path: Path) -> tuple:
    """The run's record and the logged rows of a .wandb file."""
    from wandb.proto import wandb_internal_pb2

    header, history = None, []
    for data in log_records(path.read_bytes()):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data)
        if record.HasField("run"):
            header = record.run
        if record.HasField("history"):
            items = record.history.item
            history.append({item.key or item.nested_key[0]: json.loads(item.value_json) for item in items})
    return header, history


def log_records(content: bytes) -> Iterator[bytes]:
    """The records of a LevelDB log: blocks of 32 KiB, parts with a header of checksum, length and kind."""
    place, record, block = 7, b"", 1 << 15  # after W&B's own header
    while place + 7 <= len(content):
        length, kind = struct.unpack_from("<HB", content, place + 4)
        if not kind or block - place % block < 7:  # the rest of a block is empty
            place = (place // block + 1) * block
            continue
        record += content[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # whole, or the last part
            yield record
            record = b""
