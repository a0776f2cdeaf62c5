"""Checkpoints of format 2, as bytescale 0.1 wrote them: they still load on any mesh, and can be upgraded."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bytescale.checkpoint.disk import Disk
from bytescale.checkpoint.folders import LocalFolder
from bytescale.checkpoint.restoring import StoredTensors
from bytescale.checkpoint.upgrade import upgrade
from bytescale.checkpoint.verify import problems_of
from bytescale.cli.main import main
from bytescale.common.errors import CheckpointError
from bytescale.runtime import MeshShape
from tests.checkpoint.meshes import restore, save, whole_state
from tests.checkpoint.test_format_3 import MIXTURE, SHAPE, TIED
from tests.checkpoint.test_kills import Killed, MortalDisk
from tests.helpers.effort import examples
from tests.helpers.format_2 import downgrade
from tests.train.runs import on_ranks, run, small_run, with_trainer, write_corpus


@pytest.mark.parametrize("shape", [SHAPE, TIED, MIXTURE], ids=["llama", "tied", "mixtral"])
def test_an_upgraded_checkpoint_is_the_same(tmp_path: Path, shape: object) -> None:
    save(MeshShape(2, tp=2), tmp_path, 5, shape=shape)  # type: ignore[arg-type]
    path = tmp_path / "step-000005"
    downgrade(path)
    (path / "tokenizer.json").write_text("{}", encoding="utf-8")
    with pytest.raises(CheckpointError, match=r"format 2, which has no checksums.*checkpoint upgrade"):
        problems_of(LocalFolder(path))
    assert upgrade(path)
    assert problems_of(LocalFolder(path)) == []
    assert (path / "tokenizer.json").read_text() == "{}"
    assert not list(path.glob("*.distcp")) + list(path.glob(".metadata")) + list(tmp_path.glob(".*"))
    assert restore(MeshShape(1, tp=2, pp=2), tmp_path, shape) == 5  # type: ignore[arg-type]
    assert not upgrade(path), "there is nothing to do"


def test_format_2_is_resumed_from_on_other_ranks(tmp_path: Path) -> None:
    """With the losses of a resume from the same checkpoint in format 3, to the last bit."""
    config = on_ranks(small_run(write_corpus(tmp_path / "corpus"), tmp_path / "run", steps=3), 2)
    run(config)
    shutil.copytree(tmp_path / "run", tmp_path / "old")
    downgrade(tmp_path / "old" / "checkpoints" / "step-000003")
    further = on_ranks(with_trainer(config, resume=True, steps=5), 3)
    assert run(with_trainer(further, run_dir=str(tmp_path / "old"))) == run(further)


@pytest.mark.exhaustive
def test_a_kill_during_an_upgrade_loses_nothing(tmp_path: Path) -> None:
    save(MeshShape(1), tmp_path / "first", 5)
    downgrade(tmp_path / "first" / "step-000005")
    counted = MortalDisk()
    shutil.copytree(tmp_path / "first", tmp_path / "whole")
    upgrade(tmp_path / "whole" / "step-000005", counted)
    renames = [n for n, operation in enumerate(counted.operations) if operation == "rename"]
    for point in sorted({0, 1, 5, *renames, *(n + 1 for n in renames), len(counted.operations) - 1}):
        folder = tmp_path / str(point)
        shutil.copytree(tmp_path / "first", folder)
        with pytest.raises(Killed):
            upgrade(folder / "step-000005", MortalDisk(point))
        save(MeshShape(1), folder, 7)  # a run goes on, and cleans up
        for name, shape in StoredTensors(folder / "step-000005").shapes().items():
            state, _, parameter = name.partition(".")
            assert torch.equal(
                StoredTensors(folder / "step-000005").read(name), whole_state(state, parameter, shape, 5)
            )


@pytest.fixture(scope="module")
def old(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("old")
    save(MeshShape(1), folder, 5)
    downgrade(folder / "step-000005")
    return folder / "step-000005"


@given(data=st.data())
@examples(10, 100)
def test_what_cannot_be_read_is_left_as_it_was(
    old: Path, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """A truncated file of format 2: one message, and the folder is untouched."""
    folder = Path(shutil.copytree(old, tmp_path_factory.mktemp("cut") / "step-000005"))
    path = data.draw(st.sampled_from([*sorted(folder.glob("*.distcp")), folder / ".metadata"]))
    path.write_bytes(path.read_bytes()[: data.draw(st.integers(0, path.stat().st_size // 2))])
    before = {file.name: file.read_bytes() for file in folder.iterdir()}
    assert main(["checkpoint", "upgrade", str(folder)]) == 1
    assert {file.name: file.read_bytes() for file in folder.iterdir()} == before
    assert [other.name for other in folder.parent.iterdir()] == ["step-000005"]


def test_upgrade_needs_room(old: Path, tmp_path: Path) -> None:
    class FullDisk(Disk):
        def free_bytes(self, folder: Path) -> int:
            return 1000

    folder = Path(shutil.copytree(old, tmp_path / "step-000005"))
    with pytest.raises(Exception, match=r"has 1000 B free, and a checkpoint takes"):
        upgrade(folder, FullDisk())
    assert replace(StoredTensors(folder).state, format=3).step == 5
