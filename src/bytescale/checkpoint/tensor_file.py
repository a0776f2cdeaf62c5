"""One rank's file of a checkpoint: safetensors, with a checksum of every tensor in its header.

    8 bytes        length of the header
    header         JSON: dtype, shape and place of each tensor, and under ``__metadata__`` the checksums
    tensors        one behind the other, without gaps

A tensor is a rectangle of a parameter's state, ``master.layers.3.mlp.up_proj.weight@0,1376``: the state, the parameter,
and where the rectangle begins in it (``layout``). It is read and checked as a whole. No torch here.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple

from bytescale.checkpoint.layout import Box
from bytescale.checkpoint.manifest import CheckpointDamage, StoredFile, checksum_of, damaged, unreachable
from bytescale.storage.place import Place, read_into

METADATA = "bytescale"


def piece_name(state: str, parameter: str, box: Box) -> str:
    """What a rectangle of a parameter's state is called in a file."""
    return f"{state}.{parameter}@{','.join(map(str, box[0]))}"


class PlacedTensor(NamedTuple):
    """Where a tensor lies in its file, in bytes."""

    dtype: str  # as safetensors names it
    start: int
    stop: int
    checksum: str


class TensorFile:
    """A file to be read. Its header is read and checked at once, and every tensor that is asked for.

    Attributes:
        tensors: by name, in the file's order.
    """

    def __init__(self, folder: Place, name: str, expected: StoredFile) -> None:
        """Raises ``CheckpointDamage`` for a header that is not the one that was written."""
        self.folder = folder
        self.name = name
        header = bytearray(expected.header_bytes)
        self._fill(memoryview(header), 0, "its header")
        if checksum_of(header) != expected.checksum:
            raise self._damaged("its header has another checksum than when it was written")
        content = json.loads(header[8:])
        checksums = json.loads(content.pop("__metadata__")[METADATA])["checksums"]
        self.tensors: dict[str, PlacedTensor] = {}
        for name, told in content.items():
            start, stop = (len(header) + offset for offset in told["data_offsets"])
            self.tensors[name] = PlacedTensor(told["dtype"], start, stop, checksums[name])

    def spans(self, pieces: Collection[str], most_bytes: int) -> Iterator[list[str]]:
        """Join neighbours among ``pieces``, in the file's order, up to ``most_bytes``: one question to a store."""
        span: list[str] = []
        for piece in sorted(pieces, key=lambda piece: self.tensors[piece].start):
            begin, own = self.tensors[(span or [piece])[0]].start, self.tensors[piece]
            if span and (own.start > self.tensors[span[-1]].stop or own.stop > begin + most_bytes):
                yield span
                span = []
            span.append(piece)
        if span:
            yield span

    def read(self, span: Sequence[str], target: memoryview | None = None) -> Iterator[tuple[str, memoryview]]:
        """Read neighbouring pieces at once, into ``target`` if that is given, and yield each when it is checked."""
        low, high = self.tensors[span[0]].start, self.tensors[span[-1]].stop
        content = memoryview(bytearray(high - low)) if target is None else target
        self._fill(content, low, span[-1])
        for piece in span:
            stored = self.tensors[piece]
            own = content[stored.start - low : stored.stop - low]
            if checksum_of(own) != stored.checksum:
                raise self._damaged(f"{piece} is not what was written: it has another checksum")
            yield piece, own

    def _fill(self, target: memoryview, offset: int, what: str) -> None:
        try:
            count = read_into(self.folder / self.name, offset, target)
        except FileNotFoundError as error:
            raise self._damaged("the file is missing") from error
        except OSError as error:
            raise unreachable(error, f"{self.folder}/{self.name}") from error
        if count < len(target):
            raise self._damaged(f"it ends inside {what}")

    def _damaged(self, what: str) -> CheckpointDamage:
        return damaged(self.folder, self.name, what)
