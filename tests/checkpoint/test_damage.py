"""Checkpoints that rot: whatever changes in their files is noticed, or changes nothing that is read."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bytescale.checkpoint.manifest import CheckpointDamage, read_manifest
from bytescale.checkpoint.reading import CheckpointReader
from bytescale.checkpoint.verify import problems_of
from bytescale.cli.main import main
from bytescale.common.errors import CheckpointError
from bytescale.runtime.mesh import MeshShape
from tests.checkpoint.meshes import SHAPE, restore, save, whole_state, with_checkpointer
from tests.helpers.effort import examples

STEPS = (3, 6)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two checkpoints of a run on two ranks."""
    folder = tmp_path_factory.mktemp("whole") / "checkpoints"
    save(MeshShape(2), folder, *STEPS)
    return folder


@pytest.fixture
def copy(whole: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "checkpoints"))


def read_all(folder: Path, step: int) -> None:
    """Every tensor, compared bit for bit."""
    stored = CheckpointReader(folder)
    assert stored.state.step == step
    assert stored.state.sampler == {"place": step * 7}
    names = stored.shapes()
    assert len(names) == 3 * 21
    for name, shape in names.items():
        state, _, parameter = name.partition(".")
        assert torch.equal(stored.read(name), whole_state(state, parameter, shape, step)), name


def refusal(folder: Path, step: int) -> str:
    """Why the checkpoint cannot be read; empty if every tensor of it is right."""
    try:
        read_all(folder, step)
    except CheckpointError as error:
        return str(error)
    return ""


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def flip(folder: Path, draw: Callable) -> None:
    path = draw(st.sampled_from(sorted(folder.glob("step-*/*"))))
    content = bytearray(path.read_bytes())
    # Headers and manifests are small beside tensors: half of the flips go to the first bytes.
    place = draw(st.integers(0, min(4000, len(content) - 1)) | st.integers(0, len(content) - 1))
    content[place] ^= 1 << draw(st.integers(0, 7))
    path.write_bytes(content)


def cut(folder: Path, draw: Callable) -> None:
    path = draw(st.sampled_from(sorted(folder.glob("step-*/*"))))
    content = path.read_bytes()
    path.write_bytes(content[: draw(st.integers(0, len(content) - 1))])


def lengthen(folder: Path, draw: Callable) -> None:
    path = draw(st.sampled_from(sorted(folder.glob("step-*/*"))))
    path.write_bytes(path.read_bytes() + draw(st.binary(min_size=1, max_size=9)))


def lose(folder: Path, draw: Callable) -> None:
    draw(st.sampled_from(sorted(folder.glob("step-*/*")))).unlink()


def exchange_files(folder: Path, draw: Callable) -> None:
    """Between the two checkpoints, or inside one."""
    one, other = draw(st.lists(st.sampled_from(sorted(folder.glob("step-*/*"))), min_size=2, max_size=2, unique=True))
    content = one.read_bytes()
    one.write_bytes(other.read_bytes())
    other.write_bytes(content)


def exchange_folders(folder: Path, draw: Callable) -> None:
    (folder / "step-000003").rename(folder / "x")
    (folder / "step-000006").rename(folder / "step-000003")
    (folder / "x").rename(folder / "step-000006")


def exchange_tensors(folder: Path, draw: Callable, *, names: bool = False) -> None:
    """Two tensors of one shape change places in a file, or only their names do."""
    path = draw(st.sampled_from(sorted(folder.glob("step-*/*.safetensors"))))
    content = bytearray(path.read_bytes())
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    stored = {name: told for name, told in header.items() if name != "__metadata__"}
    one = draw(st.sampled_from(sorted(stored)))
    alike = [name for name in sorted(stored) if stored[name]["shape"] == stored[one]["shape"] and name != one]
    if not alike:
        return
    other = draw(st.sampled_from(alike))
    (a, b), (c, d) = ([8 + length + n for n in stored[name]["data_offsets"]] for name in (one, other))
    if names:
        text = bytes(content[8 : 8 + length])
        swapped = text.replace(f'"{one}"'.encode(), b'"?"').replace(f'"{other}"'.encode(), f'"{one}"'.encode())
        swapped = swapped.replace(b'"?"', f'"{other}"'.encode())
        content[8 : 8 + length] = swapped
    else:
        content[a:b], content[c:d] = content[c:d], content[a:b]
    path.write_bytes(content)


def exchange_names(folder: Path, draw: Callable) -> None:
    exchange_tensors(folder, draw, names=True)


MISHAPS = [flip, cut, lengthen, lose, exchange_files, exchange_folders, exchange_tensors, exchange_names]


@pytest.mark.parametrize("mishap", MISHAPS)
@given(data=st.data())
@examples(6, 100)
def test_rot_is_noticed_or_harmless(whole: Path, mishap: Callable, data: st.DataObject) -> None:
    with tempfile.TemporaryDirectory() as base:
        folder = Path(shutil.copytree(whole, Path(base) / "checkpoints"))
        mishap(folder, data.draw)
        for step in STEPS:
            path, original = folder / f"step-{step:06d}", whole / f"step-{step:06d}"
            same = contents(path) == contents(original)
            try:
                found = problems_of(path)
            except CheckpointError as error:
                found = [str(error)]
            noticed = refusal(path, step)
            assert not noticed or str(path) in noticed
            assert not (same and (noticed or found)), found
            if not found:
                assert not noticed, "what is read is checked no less when a checkpoint is verified"


def test_the_message_names_file_tensor_and_remedy(copy: Path) -> None:
    """One flipped bit in the newest checkpoint; the older one stays readable."""
    path = copy / "step-000006" / "tensors-00001.safetensors"
    content = bytearray(path.read_bytes())
    content[-3] ^= 4
    path.write_bytes(content)
    for mesh in (MeshShape(2), MeshShape(1)):
        with pytest.raises(AssertionError) as caught:
            restore(mesh, copy)
        said = str(caught.value)
        assert f"The checkpoint {copy}/step-000006 is damaged: tensors-00001.safetensors: exp_avg_sq." in said
        assert "To fix: use an older checkpoint of the run (`bytescale checkpoint verify` says which are whole)" in said
    assert restore(MeshShape(1), copy, name="step-000003") == 3


def test_all_ranks_get_the_error_of_the_one_that_met_it(copy: Path) -> None:
    (copy / "step-000006" / "tensors-00001.safetensors").unlink()

    def work(checkpoints: object, optimizer: object) -> str:
        with pytest.raises(CheckpointDamage) as caught:
            checkpoints.restore(copy / "step-000006", optimizer, SHAPE.as_dict())  # type: ignore[attr-defined]
        return str(caught.value)

    said = with_checkpointer(MeshShape(2), copy, work)
    assert said[0] == said[1]
    assert "tensors-00001.safetensors: the file is missing" in said[0]


def test_commands(copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["checkpoint", "list", str(copy)]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == ["step-000003", "step-000006"]
    assert main(["checkpoint", "verify", str(copy)]) == 0
    assert capsys.readouterr().out.count("every byte is what was written") == 2
    (copy / "step-000003" / "notes.txt").write_text("mine", encoding="utf-8")
    (copy / "step-000006" / "tensors-00000.safetensors").unlink()
    assert main(["checkpoint", "list", str(copy)]) == 1
    said = capsys.readouterr().out
    assert "notes.txt: the file does not belong to the checkpoint" in said
    assert "tensors-00000.safetensors: the file is missing" in said
    assert main(["checkpoint", "verify", str(copy / "step-000006")]) == 1
    assert "the file is missing" in capsys.readouterr().out
    assert main(["checkpoint", "verify", str(copy / "nothing")]) == 1
    assert "cannot be reached" in capsys.readouterr().err
    assert main(["checkpoint", "list", str(copy / "step-000003")]) == 1
    assert capsys.readouterr().out.startswith("step-000003 ")


def test_bad_folders(tmp_path: Path) -> None:
    for content, message in (
        (None, "is not a checkpoint of bytescale: it has no run_state.json"),
        (b"\x00\xff", "is not a checkpoint of bytescale"),
        (b"[]", "is no JSON object"),
        (b'{"format": 6}', "it has format 6, and this version reads 5; a newer version of bytescale wrote it"),
        (b'{"format": "\\u001b[2J"}', r"it has format \x1b[2J, and"),
        (b'{"format": 4}', "it has format 4, and this version reads 5"),
        (b'{"format": 2}', "it has format 2, and this version reads 5"),
        (b'{"epoch": 1}', "it has format 1, and this version reads 5"),
        (b'{"format": 5, "step": 1}', "its content has another checksum"),
    ):
        if content is not None:
            (tmp_path / "run_state.json").write_bytes(content)
        with pytest.raises(CheckpointError) as caught:
            read_manifest(tmp_path)
        assert message in str(caught.value)
