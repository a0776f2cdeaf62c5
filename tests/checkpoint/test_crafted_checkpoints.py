"""Checkpoints of format 2 that were made to run code: every command refuses them, and nothing in them runs."""

from __future__ import annotations

import io
import os
import pickle
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import LoadItemType, ReadItem

from bytescale.checkpoint.format_2 import METADATA_FILE, TensorPlanner, load_tensors, read_metadata
from bytescale.cli.main import main
from bytescale.common.errors import CheckpointError
from bytescale.config import config_to_toml
from tests.helpers.effort import one_of, pairs
from tests.helpers.forks import run_forked
from tests.helpers.format_2 import downgrade
from tests.train.runs import on_ranks, run, small_run, write_corpus

STEP = Path("checkpoints") / "step-000001"


@dataclass
class Calls:
    """Becomes a call when it is unpickled."""

    function: Callable[..., Any]
    argument: str

    def __reduce__(self) -> tuple:
        return self.function, (self.argument,)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run of one step on two ranks."""
    folder = tmp_path_factory.mktemp("crafted")
    config = on_ranks(small_run(write_corpus(folder / "corpus"), folder / "run", steps=1), 2)
    run(config)
    downgrade(folder / "run" / STEP)
    later = replace(config, parallel=replace(config.parallel, ranks=1), trainer=replace(config.trainer, steps=2))
    (folder / "run" / "config.toml").write_text(config_to_toml(later), encoding="utf-8")
    return folder / "run"


@pytest.fixture
def victim(trained: Path, tmp_path: Path) -> Path:
    """A copy of the run, to be crafted."""
    return Path(shutil.copytree(trained, tmp_path / "run"))


def real_metadata(checkpoint: Path) -> Metadata:
    """As PyTorch reads it."""
    return pickle.loads((checkpoint / METADATA_FILE).read_bytes())


def shell(marker: Path) -> Calls:
    return Calls(os.system, f"touch {marker}")


def whole_file(checkpoint: Path, evil: Calls) -> object:
    return evil


def in_a_shape(checkpoint: Path, evil: Calls) -> object:
    metadata = real_metadata(checkpoint)
    next(iter(metadata.state_dict_metadata.values())).chunks[0].offsets = evil  # type: ignore[assignment]
    return metadata


def in_the_planner_data(checkpoint: Path, evil: Calls) -> object:
    return replace(real_metadata(checkpoint), planner_data={"a": [evil]})


def in_a_place(checkpoint: Path, evil: Calls) -> object:
    metadata = real_metadata(checkpoint)
    next(iter(metadata.storage_data.values())).transform_descriptors = evil
    return metadata


def in_the_paths(checkpoint: Path, evil: Calls) -> object:
    metadata = real_metadata(checkpoint)
    metadata.storage_meta.checkpoint_id = evil  # type: ignore[union-attr, assignment]
    return metadata


CRAFTED = [whole_file, in_a_shape, in_the_planner_data, in_a_place, in_the_paths]


@pytest.mark.parametrize("where", CRAFTED)
@pytest.mark.parametrize("function", [os.system, eval, exec])
def test_no_function_that_a_checkpoint_names_is_called(
    victim: Path, tmp_path: Path, where: Callable, function: Callable
) -> None:
    marker = tmp_path / "marker"
    code = f"touch {marker}" if function is os.system else f"open({str(marker)!r}, 'w').close()"
    crafted = pickle.dumps(where(victim / STEP, Calls(function, code)))
    pickle.loads(crafted)
    assert marker.exists(), "ordinary unpickling runs the code: otherwise this test would show nothing"
    marker.unlink()
    (victim / STEP / METADATA_FILE).write_bytes(crafted)
    with pytest.raises(CheckpointError, match=r"\.metadata names (posix\.system|builtins\.(eval|exec)), which no"):
        read_metadata(victim / STEP)
    assert not marker.exists()


METADATA_MODULE = b"torch.distributed.checkpoint.metadata"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"\x80\x04\x8c\x25" + METADATA_MODULE + b"\x8c\x09os.system\x93.", r"names .*metadata\.os\.system, which"),
        (b"c" + METADATA_MODULE + b"\nos\n.", r"names .*metadata\.os, which"),
        (b"cos\nsystem\n.", r"names os\.system, which"),
        (b"(S'true'\nios\nsystem\n.", r"names os\.system, which"),
        (b"ca\x1b[2J\nb\n.", r"names a\\x1b\[2J\.b, which"),
        (b"ctorch\nload\n.", r"names torch\.load, which"),
        (b"c" + METADATA_MODULE + b"\nMetadata\n(N}S'__call__'\nNst\x86b.", "is no metadata of a checkpoint"),
        (b"ctorch\nSize\n(N}S'numel'\nNst\x86b.", "is no metadata of a checkpoint"),
        (b"Pos.system\n.", "is no metadata of a checkpoint"),
        (b"\x80\x02\x82\x01.", "is no metadata of a checkpoint"),
        (b"", "is no metadata of a checkpoint"),
        (b"N.", "it has NoneType where Metadata is expected"),
        (b"c" + METADATA_MODULE + b"\nMetadata\n.", "it has type where Metadata is expected"),
        (b"c" + METADATA_MODULE + b"\nMetadata\n)\x81.", "it has NoneType where a dictionary is expected"),
    ],
)
def test_pickles_by_hand(tmp_path: Path, content: bytes, message: str) -> None:
    """Opcodes that no pickler writes: dotted names, attributes of classes, persistent ids, registered extensions."""
    (tmp_path / METADATA_FILE).write_bytes(content)
    with pytest.raises(CheckpointError, match=message):
        read_metadata(tmp_path)


def first_weight(checkpoint: Path) -> str:
    return min(name for name in real_metadata(checkpoint).state_dict_metadata if name.startswith("master."))


def point_at(checkpoint: Path, name: str, file: str, length: int) -> Metadata:
    """Metadata in which all parts of ``name`` lie in ``file``."""
    metadata = real_metadata(checkpoint)
    for index, place in metadata.storage_data.items():
        if index.fqn == name:
            place.relative_path, place.offset, place.length = file, 0, length
    return metadata


def as_metadata(checkpoint: Path, evil: Calls) -> str:
    (checkpoint / METADATA_FILE).write_bytes(pickle.dumps(in_a_shape(checkpoint, evil)))
    return r"names posix\.system, which no checkpoint of bytescale does"


def as_bytes(checkpoint: Path, evil: Calls) -> str:
    """A tensor is called a pickled object: DCP would read it without any restriction."""
    name = first_weight(checkpoint)
    torch.save(evil, checkpoint / "evil.distcp")
    metadata = point_at(checkpoint, name, "evil.distcp", (checkpoint / "evil.distcp").stat().st_size)
    metadata.state_dict_metadata[name] = BytesStorageMetadata()
    place = next(place for index, place in metadata.storage_data.items() if index.fqn == name)
    metadata.storage_data[MetadataIndex(name)] = place
    (checkpoint / METADATA_FILE).write_bytes(pickle.dumps(metadata))
    return f"calls {name} a pickled object"


def as_a_tensor(checkpoint: Path, evil: Calls) -> str:
    """The file of a tensor holds another object."""
    torch.save(evil, checkpoint / "evil.distcp")
    size = (checkpoint / "evil.distcp").stat().st_size
    metadata = point_at(checkpoint, first_weight(checkpoint), "evil.distcp", size)
    (checkpoint / METADATA_FILE).write_bytes(pickle.dumps(metadata))
    return "could not be read"


def outside(checkpoint: Path, evil: Calls) -> str:
    """A tensor lies in a file that is no part of the checkpoint."""
    torch.save(evil, checkpoint.parent / "evil.distcp")
    metadata = point_at(checkpoint, first_weight(checkpoint), "../evil.distcp", 10)
    (checkpoint / METADATA_FILE).write_bytes(pickle.dumps(metadata))
    return r"places a tensor in '\.\./evil\.distcp', which is no file of the checkpoint's folder"


def convert(run_folder: Path) -> list[str]:
    return ["convert", str(run_folder / STEP), str(run_folder.parent / "out")]


def start_from(run_folder: Path) -> list[str]:
    config, new = run_folder / "config.toml", run_folder.parent / "new"
    return ["train", str(config), "--init", f"checkpoint:{run_folder / STEP}", "--trainer.run-dir", str(new)]


def resume(run_folder: Path) -> list[str]:
    return ["train", "--resume", str(run_folder)]


@pytest.mark.parametrize(
    ("craft", "command"), pairs([as_metadata, as_bytes, as_a_tensor, outside], [convert, start_from, resume])
)
def test_every_command_refuses_and_runs_nothing(
    victim: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], command: Callable, craft: Callable
) -> None:
    marker = tmp_path / "marker"
    message = craft(victim / STEP, shell(marker))
    code = run_forked(1, lambda _: main(command(victim)))
    said = capfd.readouterr().err
    assert not marker.exists()
    assert code == [1], said
    assert re.search(message, said), said
    assert "To fix: use an older checkpoint of the run" in said
    assert "Traceback" not in said
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("command", one_of([convert, start_from, resume], resume))
def test_every_command_takes_the_checkpoint_as_it_was_written(victim: Path, command: Callable) -> None:
    """Otherwise the refusals above could have other reasons."""
    assert run_forked(1, lambda _: main(command(victim))) == [0]


def test_metadata_is_what_pytorch_reads(trained: Path) -> None:
    ours, theirs = read_metadata(trained / STEP), real_metadata(trained / STEP)
    assert ours.state_dict_metadata == theirs.state_dict_metadata
    assert ours.storage_data == theirs.storage_data
    assert [index.index for index in ours.storage_data] == [index.index for index in theirs.storage_data]


def test_a_tensor_with_a_missing_part_is_refused(victim: Path) -> None:
    checkpoint = victim / STEP
    metadata, name = real_metadata(checkpoint), first_weight(checkpoint)
    del metadata.state_dict_metadata[name].chunks[0]  # type: ignore[union-attr]
    (checkpoint / METADATA_FILE).write_bytes(pickle.dumps(metadata))
    with pytest.raises(CheckpointError, match=f"the parts of {name} are not the whole of it"):
        read_metadata(checkpoint)


def test_a_rank_that_cannot_read_tells_every_rank(victim: Path) -> None:
    """Ranks read in one collective call: were the error one rank's own, the others would wait for it."""
    (victim / STEP / METADATA_FILE).write_bytes(b"cos\nsystem\n.")

    def read(rank: int) -> str:
        dist.init_process_group("gloo")
        with pytest.raises(CheckpointError) as caught:
            load_tensors(victim / STEP, {"master.a": torch.ones(1)}, planner=TensorPlanner(), group=dist.group.WORLD)
        dist.destroy_process_group()
        return str(caught.value)

    said = run_forked(2, read)
    assert said[0] == said[1]
    assert "names os.system" in said[0]


def test_the_planner_never_unpickles(tmp_path: Path) -> None:
    """The second line of defence: DCP calls this for every object that is no tensor."""
    marker = tmp_path / "marker"
    content = io.BytesIO()
    torch.save(shell(marker), content)
    content.seek(0)
    index, none = MetadataIndex("master.a"), torch.Size([0])
    item = ReadItem(LoadItemType.BYTE_IO, index, none, index, none, none)
    with pytest.raises(CheckpointError, match=r"keeps master\.a as a pickled object"):
        TensorPlanner().load_bytes(item, content)
    assert not marker.exists()
