"""One rank's file of a checkpoint: safetensors, with a checksum of every block of every tensor in its header.

    8 bytes        length of the header
    header         JSON: dtype, shape and place of each tensor, and under ``__metadata__`` the checksums
    tensors        one behind the other, without gaps

A tensor is a rectangle of a parameter's state, ``master.layers.3.mlp.up_proj.weight@0,1376``: the state, the parameter,
and where the rectangle begins in it. Checksums are of blocks of 1 MiB, counted from the start of the tensor, so that a
part of a tensor can be read and checked without the rest. Any reader of safetensors reads the file. No torch here:
``tensor_writing`` writes the file, and ``reading`` makes tensors of its bytes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from bytescale.checkpoint.disk import checksum_of
from bytescale.checkpoint.layout import Box, flat_index
from bytescale.checkpoint.manifest import CheckpointDamage, StoredFile, damaged, hex_of, printable, unreachable
from bytescale.common.parsing import parse_json
from bytescale.storage.place import Place, read_into

BLOCK_BYTES = 2**20
METADATA = "bytescale"
_ITEM_BYTES = {"F16": 2, "BF16": 2, "F32": 4, "F64": 8}


def piece_name(state: str, parameter: str, box: Box) -> str:
    """What a rectangle of a parameter's state is called in a file."""
    return f"{state}.{parameter}@{','.join(map(str, box[0]))}"


class TensorFile:
    """A file to be read. Its header is read and checked at once; the blocks that are asked for are checked."""

    def __init__(self, folder: Place, name: str, expected: StoredFile) -> None:
        """Raises ``CheckpointDamage`` for a header that is not the one that was written."""
        self.folder = folder
        self.name = name
        self.header_bytes = expected.header_bytes
        header = bytearray(expected.header_bytes)
        if self._read(0, memoryview(header)) < len(header):
            raise self._damaged("it ends inside its header")
        if checksum_of(header) != expected.checksum:
            raise self._damaged("its header has another checksum than when it was written")
        try:
            self._parse(header, expected)
        except (ValueError, KeyError, TypeError) as error:
            raise self._damaged(f"its header is not valid ({printable(error)})") from error

    def dtype_of(self, piece: str) -> str:
        """The dtype as safetensors names it. Raises ``CheckpointDamage`` if the file has no such tensor."""
        return self._tensor(piece).dtype

    def check_shape(self, piece: str, sizes: Sequence[int]) -> None:
        """Raise ``CheckpointDamage`` unless the file has this tensor in this shape."""
        if tuple(sizes) != self._tensor(piece).sizes:
            raise self._damaged(f"{piece} has another shape than its place says")

    def byte_range(self, piece: str, low: int, high: int) -> tuple[int, int]:
        """The bytes, counted from the piece's start, of the blocks with the elements ``low`` to ``high - 1``."""
        stored = self._tensor(piece)
        size, block = _ITEM_BYTES[stored.dtype], self._block_bytes
        return low * size // block * block, min(-(-high * size // block) * block, stored.num_bytes)

    def read(self, piece: str, start: int, target: memoryview) -> None:
        """Fill ``target`` with the bytes of a piece from ``start``, the begin of a block, and check all of them."""
        offset = self.place_of(piece)[0] + start
        if self._read(offset, target) < len(target):
            raise self._damaged(f"it ends inside {piece}")
        self.check(piece, start, target)

    def read_raw(self, offset: int, target: memoryview) -> None:
        """Fill ``target`` with bytes of the file, which ``check`` has to check."""
        if self._read(offset, target) < len(target):
            raise self._damaged("it is truncated")

    def check(self, piece: str, start: int, content: memoryview) -> None:
        """Check bytes of a piece that were read from ``start``, the begin of a block, to the end of a block."""
        stored, block = self._tensor(piece), self._block_bytes
        for low in range(0, len(content), block):
            number = (start + low) // block
            told = stored.checksums[16 * number : 16 * number + 16]
            if hex_of(checksum_of(content[low : low + block])) != told:
                first = start + low
                last = min(first + block, stored.num_bytes) - 1
                raise self._damaged(f"bytes {first} to {last} of {piece} are not those that were written")

    def place_of(self, piece: str) -> tuple[int, int]:
        """Where a piece begins and ends in the file."""
        stored = self._tensor(piece)
        return stored.offset, stored.offset + stored.num_bytes

    def pieces(self) -> list[str]:
        """Names of all tensors, in the file's order."""
        return list(self._tensors)

    def _parse(self, header: bytearray, expected: StoredFile) -> None:
        if int.from_bytes(header[:8], "little") != len(header) - 8:
            raise ValueError("its length is another")
        content = parse_json(header[8:])
        ours = parse_json(content.pop("__metadata__")[METADATA])
        self._block_bytes = int(ours["block_bytes"])
        if self._block_bytes < 8 or self._block_bytes % 8:
            raise ValueError(f"blocks of {self._block_bytes} bytes")
        self._tensors: dict[str, _Stored] = {}
        end = len(header)
        for name, told in content.items():
            dtype, sizes = told["dtype"], tuple(map(int, told["shape"]))
            stored = _Stored(dtype, sizes, len(header) + int(told["data_offsets"][0]), ours["checksums"][name])
            if stored.offset != end or len(stored.checksums) != 16 * num_blocks(stored.num_bytes, self._block_bytes):
                raise ValueError(f"place of {name}")
            end += stored.num_bytes
            self._tensors[name] = stored
        if end != expected.num_bytes:
            raise ValueError(f"{end} bytes in all, and {expected.num_bytes} are expected")

    def _tensor(self, piece: str) -> _Stored:
        stored = self._tensors.get(piece)
        if stored is None:
            raise self._damaged(f"it has no {piece}")
        return stored

    def _read(self, offset: int, target: memoryview) -> int:
        try:
            return read_into(self.folder / self.name, offset, target)
        except FileNotFoundError as error:
            raise self._damaged("the file is missing") from error
        except OSError as error:
            raise unreachable(error, f"{self.folder}/{self.name}") from error

    def _damaged(self, what: str) -> CheckpointDamage:
        return damaged(self.folder, self.name, what)


@dataclass(frozen=True, slots=True)
class _Stored:
    dtype: str
    sizes: tuple[int, ...]
    offset: int
    checksums: str  # 16 hexadecimal digits a block

    @property
    def num_bytes(self) -> int:
        return math.prod(self.sizes) * _ITEM_BYTES[self.dtype]


def num_blocks(num_bytes: int, block_bytes: int) -> int:
    """Blocks, and so checksums, of a tensor."""
    return -(-num_bytes // block_bytes)


def element_range(inner: Box, outer: Box) -> tuple[int, int]:
    """First element of ``inner`` in the row-major rectangle ``outer`` around it, and one more than its last."""
    first = tuple(a - b for a, b in zip(inner[0], outer[0], strict=True))
    last = tuple(a + n - 1 for a, n in zip(first, inner[1], strict=True))
    return flat_index(first, outer[1]), flat_index(last, outer[1]) + 1
