"""Checkpoints: whatever mesh wrote them, every other restores them bit for bit from a few bytes."""

from __future__ import annotations

import json
import math
import threading
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open

from bytescale.checkpoint import tensor_file, writing
from bytescale.checkpoint.layout import Layout, LayoutEntry, boxes_of, intersection
from bytescale.checkpoint.manifest import layout_from_json, layout_to_json, read_manifest
from bytescale.checkpoint.reading import CheckpointReader, wanted_by
from bytescale.checkpoint.verify import problems_of
from bytescale.runtime.mesh import MeshShape
from bytescale.storage.place import read_into
from tests.checkpoint.meshes import (
    MIXTURE,
    SHAPE,
    STATES,
    TIED,
    Family,
    cuts_of,
    make_optimizer,
    restore,
    save,
    whole_state,
)
from tests.helpers.effort import examples, one_of
from tests.helpers.ranks import run_mesh

MESHES = [MeshShape(1), MeshShape(3), MeshShape(1, tp=2, pp=2), MeshShape(2, tp=4), MeshShape(2, pp=2)]


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces that are smaller than tensors."""
    of = writing.layout_of
    monkeypatch.setattr(writing, "layout_of", lambda *given: replace(of(*given), most_elements=64))


@pytest.mark.parametrize("shape", one_of([SHAPE, TIED, MIXTURE], SHAPE), ids=["llama", "tied", "mixtral"])
def test_every_mesh_restores_what_any_other_wrote(tmp_path: Path, shape: Family) -> None:
    """A circle through all meshes; in the rest of the tests, every pair of them (`make test-rest`)."""
    for writer, reader in zip(MESHES, MESHES[1:] + MESHES[:1], strict=True):
        folder = tmp_path / f"{writer}"
        save(writer, folder, 5, shape=shape)
        assert problems_of(folder / "step-000005") == []
        assert restore(reader, folder, shape) == 5


@pytest.mark.exhaustive
@pytest.mark.parametrize("writer", MESHES, ids=str)
@pytest.mark.parametrize("reader", MESHES, ids=str)
def test_every_pair_of_meshes(tmp_path: Path, writer: MeshShape, reader: MeshShape) -> None:
    for number, shape in enumerate((SHAPE, TIED, MIXTURE)):
        save(writer, tmp_path / str(number), 5, shape=shape)
        assert restore(reader, tmp_path / str(number), shape) == 5


def test_any_reader_of_safetensors_reads_the_files(tmp_path: Path) -> None:
    """The independent twin: the library's own reader finds the same tensors."""
    save(MeshShape(2, tp=2), tmp_path, 3)
    folder = tmp_path / "step-000003"
    stored = CheckpointReader(folder)
    seen: dict[str, int] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            for key in file.keys():  # noqa: SIM118, it is no dictionary
                name, _, place = key.rpartition("@")
                offsets = [int(number) for number in place.split(",")]
                tensor, whole = file.get_tensor(key), stored.read(name)
                inside = tuple(slice(a, a + n) for a, n in zip(offsets, tensor.shape, strict=True))
                assert torch.equal(tensor, whole[inside])
                seen[name] = seen.get(name, 0) + tensor.numel()
    assert seen == {name: math.prod(shape) for name, shape in stored.shapes().items()}
    for name, shape in stored.shapes().items():
        state, _, parameter = name.partition(".")
        assert torch.equal(stored.read(name), whole_state(state, parameter, shape, 3))


@pytest.mark.parametrize(("writer", "reader"), [(MESHES[3], MESHES[1]), (MESHES[1], MESHES[3]), (MESHES[3], MESHES[3])])
def test_a_rank_reads_the_pieces_of_its_own_parts_and_no_more(
    tmp_path: Path, writer: MeshShape, reader: MeshShape, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every piece that shares an element with the rank's parts, found the slow way, piece by piece."""
    save(writer, tmp_path, 5)
    folder = tmp_path / "step-000005"
    manifest = read_manifest(folder)
    assert max(math.prod(piece.box[1]) for piece in manifest.layouts[0].pieces(0)) == 64

    def needed_bytes(parts: list) -> int:
        pieces = {
            (part.state, file, piece.entry.name, piece.box)
            for layout in manifest.layouts
            for file in layout.files
            for piece in layout.pieces(file)
            for part in (parts if piece.entry.written else ())
            if part.parameter == piece.entry.name and intersection(piece.box, part.box) is not None
        }
        return sum(4 * math.prod(box[1]) for *_, box in pieces)

    def work(mesh: object) -> None:
        parts = wanted_by(make_optimizer(mesh))  # type: ignore[arg-type]
        before = num_bytes[threading.get_ident()]
        CheckpointReader(folder).fill(parts)
        own_bytes = num_bytes[threading.get_ident()] - before
        assert own_bytes == needed_bytes(parts)
        if writer == reader:
            assert own_bytes == 4 * sum(part.target.numel() for part in parts)
        assert own_bytes < folder_bytes / 2

    folder_bytes = sum(file.num_bytes for file in manifest.files)
    num_bytes: Counter[int] = Counter()  # by the thread of a rank

    def counted(file: Path, offset: int, target: memoryview) -> int:
        num_bytes[threading.get_ident()] += len(target) if offset else 0  # without headers
        return read_into(file, offset, target)

    monkeypatch.setattr(tensor_file, "read_into", counted)
    cuts_of(SHAPE, reader.tp, reader.pp)
    run_mesh(reader, work)


def layouts() -> st.SearchStrategy[Layout]:
    @st.composite
    def make(draw: st.DrawFn) -> Layout:
        num_shards = draw(st.integers(1, 4))
        entries, start = [], 0
        for number in range(draw(st.integers(1, 4))):
            shape = tuple(draw(st.lists(st.integers(1, 5), min_size=1, max_size=3)))
            entries.append(LayoutEntry(str(number), shape, (0,) * len(shape), shape, start, written=True))
            start = entries[-1].stop + draw(st.integers(0, 3))
        bounds = [0]
        while bounds[-1] < start:
            bounds.append(bounds[-1] + num_shards * draw(st.integers(1, 20)))
        files = draw(st.permutations(range(6)))[:num_shards]
        return Layout(tuple(entries), tuple(bounds), tuple(files), draw(st.integers(1, 30)))

    return make()


@given(layouts(), st.data())
@examples(60, 1000)
def test_overlapping_finds_what_all_pieces_share(layout: Layout, data: st.DataObject) -> None:
    """The slow twin looks through every piece of every shard."""
    entry = data.draw(st.sampled_from(layout.entries))
    low = tuple(data.draw(st.integers(0, n - 1)) for n in entry.shape)
    wanted = (low, tuple(data.draw(st.integers(1, n - a)) for a, n in zip(low, entry.shape, strict=True)))
    slow = [
        (file, piece.box, shared)
        for file in layout.files
        for piece in layout.pieces(file)
        if piece.entry is entry and (shared := intersection(piece.box, wanted)) is not None
    ]
    assert sorted(layout.overlapping(entry, wanted)) == sorted(slow)
    assert sum(math.prod(shared[1]) for *_, shared in slow) == math.prod(wanted[1])
    assert all(math.prod(box[1]) <= layout.most_elements for _, box, _ in slow)
    again = layout_from_json(json.loads(json.dumps(layout_to_json(layout))))
    assert again == layout


@pytest.mark.parametrize("shape", [(7,), (3, 4), (2, 3, 5)])
def test_boxes_cover_a_flat_range_in_order(shape: tuple[int, ...]) -> None:
    numbers = torch.arange(torch.Size(shape).numel())
    for low in range(len(numbers) + 1):
        for high in range(low, len(numbers) + 1):
            boxes = list(boxes_of(shape, low, high))
            assert len(boxes) <= 2 * len(shape) - 1
            pieces = [
                numbers.view(shape)[tuple(slice(a, a + n) for a, n in zip(offsets, sizes, strict=True))].flatten()
                for offsets, sizes in boxes
            ]
            assert torch.equal(torch.cat(pieces or [numbers[:0]]), numbers[low:high])


def test_states_of_a_checkpoint_are_named(tmp_path: Path) -> None:
    save(MeshShape(1), tmp_path, 1)
    manifest = read_manifest(tmp_path / "step-000001")
    assert tuple(manifest.states) == STATES
