from __future__ import annotations

import os
import socket
import struct
from pathlib import Path

import numpy as np
import pytest

from bytescale.common.errors import DataError
from bytescale.data.tokens.indexed import IndexedDataset, read_index, token_dtype
from bytescale.data.tokens.pairs import IndexedWriter
from tests.data.support import write_pair

DOCUMENTS = [[5, 6, 7], [8], [], [9, 10, 11, 12]]


def megatron_idx(
    lengths: list[int], bounds: list[int], *, code: int = 8, itemsize: int = 2, version: int = 1, magic: bytes = b""
) -> bytes:
    """An ``.idx`` as megatron/core/datasets/indexed_dataset.py lays it out, written field by field."""
    content = magic or b"MMIDIDX\x00\x00"
    content += struct.pack("<Q", version)
    content += struct.pack("<B", code)
    content += struct.pack("<Q", len(lengths))
    content += struct.pack("<Q", len(bounds))
    content += b"".join(struct.pack("<i", length) for length in lengths)
    pointer = 0
    for length in lengths:
        content += struct.pack("<q", pointer)
        pointer += length * itemsize
    content += b"".join(struct.pack("<q", bound) for bound in bounds)
    return content


def test_writes_what_megatron_writes(tmp_path: Path) -> None:
    write_pair(tmp_path / "a", DOCUMENTS)
    assert (tmp_path / "a.idx").read_bytes() == megatron_idx([3, 1, 0, 4], [0, 1, 2, 3, 4])
    assert (tmp_path / "a.bin").read_bytes() == struct.pack("<8H", *range(5, 13))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.bin", "a.idx"]


@pytest.mark.parametrize(("code", "letter"), [(1, "B"), (2, "b"), (3, "h"), (4, "i"), (5, "q"), (8, "H")])
def test_reads_what_megatron_writes_in_every_integer_type(tmp_path: Path, code: int, letter: str) -> None:
    # Documents of several sequences: [1 2 3 | 4], none, [5 6].
    itemsize = struct.calcsize(letter)
    (tmp_path / "m.idx").write_bytes(megatron_idx([3, 1, 2], [0, 2, 2, 3], code=code, itemsize=itemsize))
    (tmp_path / "m.bin").write_bytes(struct.pack(f"<6{letter}", *range(1, 7)))
    dataset = IndexedDataset.open(tmp_path / "m.bin")
    assert dataset.index.document_lengths.tolist() == [4, 0, 2]
    assert dataset.tokens[:].tolist() == [1, 2, 3, 4, 5, 6]
    assert dataset.index.pointers.tolist() == [0, 4 * itemsize, 4 * itemsize]
    assert (dataset.index.num_documents, dataset.index.num_tokens) == (3, 6)


def test_tokens_are_a_view_into_the_file(tmp_path: Path) -> None:
    write_pair(tmp_path / "a", DOCUMENTS)
    dataset = IndexedDataset.open(tmp_path / "a.bin")
    assert isinstance(dataset.tokens, np.memmap)
    assert np.shares_memory(dataset.tokens[4:8], dataset.tokens)


def test_an_empty_pair(tmp_path: Path) -> None:
    write_pair(tmp_path / "a.v1", [])
    assert (tmp_path / "a.v1.bin").stat().st_size == 0
    assert IndexedDataset.open(tmp_path / "a.v1.bin").index.num_documents == 0


@pytest.mark.parametrize(("vocab_size", "kind"), [(257, "<u2"), (65499, "<u2"), (65500, "<i4"), (200_000, "<i4")])
def test_the_type_is_the_one_megatron_takes(vocab_size: int, kind: str) -> None:
    assert token_dtype(vocab_size) == np.dtype(kind)


def test_a_bin_of_another_size(tmp_path: Path) -> None:
    write_pair(tmp_path / "a", DOCUMENTS)
    with (tmp_path / "a.bin").open("ab") as file:
        file.write(b"\0\0")
    with pytest.raises(DataError, match=r"a.idx describes 8 tokens of 2 bytes = 16 bytes, but .*a.bin has 18"):
        IndexedDataset.open(tmp_path / "a.bin")


def test_one_of_the_two_is_missing(tmp_path: Path) -> None:
    write_pair(tmp_path / "a", DOCUMENTS)
    (tmp_path / "a.idx").rename(tmp_path / "b.idx")
    with pytest.raises(DataError, match=r"a.idx cannot be read \(No such file.*restore the .idx"):
        IndexedDataset.open(tmp_path / "a.bin")
    with pytest.raises(DataError, match=r"b.bin does not exist"):
        IndexedDataset.open(tmp_path / "b.bin")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", r"a.idx is not a Megatron index"),
        (megatron_idx([1], [0, 1], magic=b"TNTIDX\x00\x00\x00"), r"a.idx is not a Megatron index .*TNTIDX"),
        (megatron_idx([1], [0, 1], version=2), r"a.idx has version 2, not 1"),
        (megatron_idx([1], [0, 1], code=7), r"a.idx holds values of type code 7, which are not token ids"),
        (megatron_idx([1, 2], [0, 1, 2])[:-1], r"a.idx is broken: .*2 sequences and 2 documents, .* 82 bytes.* has 81"),
        (megatron_idx([1, 2], [0, 1, 2], itemsize=4), r"a.idx is broken: its sequences do not follow"),
        (megatron_idx([-1], [0, 1]), r"a.idx is broken: its sequences do not follow"),
        (megatron_idx([1, 2], [0, 2, 1]), r"a.idx is broken: its documents do not divide its 2 sequences"),
        (megatron_idx([1, 2], [1, 2]), r"a.idx is broken: its documents do not divide"),
        (megatron_idx([], []), r"a.idx is broken: .*0 sequences and -1 documents"),
    ],
)
def test_a_broken_idx(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "a.idx").write_bytes(content)
    with pytest.raises(DataError, match=message):
        read_index(tmp_path / "a.idx")


def test_leaving_without_commit_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError), IndexedWriter(tmp_path / "a.bin", np.dtype("<u2")) as writer:  # noqa: PT012
        writer.add_documents(np.array([1, 2]), np.array([2]))
        assert not (tmp_path / "a.bin").exists()
        raise RuntimeError("in the middle")
    assert list(tmp_path.iterdir()) == []


def test_commit_replaces_an_older_pair_and_removes_what_dead_processes_left(tmp_path: Path) -> None:
    host = socket.gethostname().split(".")[0]
    stale = tmp_path / f".a.bin.{host}.7.4194305.tmp"  # above the largest process id of Linux
    ours = tmp_path / f".a.idx.{host}.7.{os.getppid()}.tmp"
    elsewhere = tmp_path / ".a.bin.anotherhost.7.4194305.tmp"
    for path in (stale, ours, elsewhere):
        path.write_bytes(b"half")
    write_pair(tmp_path / "a", [[1]])
    write_pair(tmp_path / "a", DOCUMENTS)
    assert not stale.exists()
    assert ours.exists()
    assert elsewhere.exists()
    assert IndexedDataset.open(tmp_path / "a.bin").index.num_documents == 4


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match=r"a.bin cannot be written"):
        IndexedWriter(tmp_path / "file/a.bin", np.dtype("<u2"))
