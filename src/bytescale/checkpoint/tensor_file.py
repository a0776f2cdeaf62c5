"""One rank's file of a checkpoint: safetensors, with a checksum of every tensor in its header.

    8 bytes        length of the header
    header         JSON: dtype, shape and place of each tensor, and under ``__metadata__`` the checksums
    tensors        one behind the other, without gaps

A tensor is a rectangle of a parameter's state, ``master.layers.3.mlp.up_proj.weight@0,1376``: the state, the parameter,
and where the rectangle begins in it (``layout``). It is read and checked as a whole. No torch here.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from bytescale.checkpoint.disk import checksum_of
from bytescale.checkpoint.layout import Box
from bytescale.checkpoint.manifest import CheckpointDamage, StoredFile, damaged, printable, unreachable
from bytescale.common.parsing import parse_json
from bytescale.storage.place import Place, read_into

METADATA = "bytescale"
_ITEM_BYTES = {"F16": 2, "BF16": 2, "F32": 4, "F64": 8}


def piece_name(state: str, parameter: str, box: Box) -> str:
    """What a rectangle of a parameter's state is called in a file."""
    return f"{state}.{parameter}@{','.join(map(str, box[0]))}"


class TensorFile:
    """A file to be read. Its header is read and checked at once, and every tensor that is asked for."""

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

    def spans(self, pieces: Collection[str], most_bytes: int) -> Iterator[list[str]]:
        """Join neighbours among ``pieces``, in the file's order, up to ``most_bytes``: one question to a store."""
        span: list[str] = []
        begin = 0
        for piece in sorted(pieces, key=lambda piece: self._tensor(piece).offset):
            stored = self._tensor(piece)
            if span and (stored.offset > self._tensor(span[-1]).stop or stored.stop > begin + most_bytes):
                yield span
                span = []
            begin = stored.offset if not span else begin
            span.append(piece)
        if span:
            yield span

    def read(self, span: Sequence[str], target: memoryview | None = None) -> Iterator[tuple[str, memoryview]]:
        """Read neighbouring pieces at once, into ``target`` if that is given, and yield each when it is checked."""
        low, high = self._tensor(span[0]).offset, self._tensor(span[-1]).stop
        content = memoryview(bytearray(high - low)) if target is None else target
        if self._read(low, content) < high - low:
            raise self._damaged(f"it ends inside {span[-1]}")
        for piece in span:
            stored = self._tensor(piece)
            own = content[stored.offset - low : stored.stop - low]
            if checksum_of(own) != stored.checksum:
                raise self._damaged(f"{piece} is not what was written: it has another checksum")
            yield piece, own

    def pieces(self) -> list[str]:
        return list(self._tensors)

    def _parse(self, header: bytearray, expected: StoredFile) -> None:
        if int.from_bytes(header[:8], "little") != len(header) - 8:
            raise ValueError("its length is another")
        content = parse_json(header[8:])
        ours = parse_json(content.pop("__metadata__")[METADATA])
        self._tensors: dict[str, _Stored] = {}
        end = len(header)
        for name, told in content.items():
            dtype, sizes = told["dtype"], tuple(map(int, told["shape"]))
            stored = _Stored(dtype, sizes, len(header) + int(told["data_offsets"][0]), ours["checksums"][name])
            if stored.offset != end or not isinstance(stored.checksum, str):
                raise ValueError(f"place of {name}")
            end = stored.stop
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
    checksum: str

    @property
    def stop(self) -> int:
        return self.offset + math.prod(self.sizes) * _ITEM_BYTES[self.dtype]
