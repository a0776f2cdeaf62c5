"""Writes one rank's file of a checkpoint, as ``tensor_file`` describes it."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bytescale.checkpoint.disk import Disk, checksum_of
from bytescale.checkpoint.manifest import StoredFile, hex_of
from bytescale.checkpoint.tensor_file import BLOCK_BYTES, METADATA, num_blocks

DTYPES = {"F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32, "F64": torch.float64}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True, slots=True)
class NewTensor:
    """A tensor that is about to be written; ``read`` gives it when its turn has come."""

    name: str
    dtype: torch.dtype
    sizes: tuple[int, ...]
    read: Callable[[], Tensor]

    @property
    def num_bytes(self) -> int:
        return math.prod(self.sizes) * self.dtype.itemsize


def write_tensors(
    disk: Disk, path: Path, tensors: Sequence[NewTensor], *, step: int, block_bytes: int = BLOCK_BYTES
) -> StoredFile:
    """Write a file and wait until it is on disk. Raises ``OSError``.

    The header is written twice: first to take up its place, and when all checksums are known.
    """
    blank = _header(tensors, [[0] * num_blocks(tensor.num_bytes, block_bytes) for tensor in tensors], step, block_bytes)
    checksums: list[list[int]] = []
    with disk.create(path) as file:
        disk.write(file, blank)
        for tensor in tensors:
            content = bytes_of(tensor.read().to(tensor.dtype).contiguous())
            assert len(content) == tensor.num_bytes, f"{tensor.name} is not what was announced"
            checksums.append([])
            for start in range(0, len(content), block_bytes):
                block = content[start : start + block_bytes]
                checksums[-1].append(checksum_of(block))
                disk.write(file, block)
        header = _header(tensors, checksums, step, block_bytes)
        assert len(header) == len(blank), "checksums have a fixed width"
        file.seek(0)
        disk.write(file, header)
        disk.sync(file)
    total = len(header) + sum(tensor.num_bytes for tensor in tensors)
    return StoredFile(num_bytes=total, header_bytes=len(header), checksum=checksum_of(header))


def bytes_of(tensor: Tensor) -> memoryview:
    """The memory of a contiguous tensor on the CPU."""
    content: Any = tensor.flatten().view(torch.uint8).numpy()
    return memoryview(content)


def _header(tensors: Sequence[NewTensor], checksums: Sequence[Sequence[int]], step: int, block_bytes: int) -> bytes:
    sums = {tensor.name: "".join(map(hex_of, own)) for tensor, own in zip(tensors, checksums, strict=True)}
    ours = {"step": step, "block_bytes": block_bytes, "checksums": sums}
    content: dict[str, Any] = {"__metadata__": {METADATA: json.dumps(ours)}}
    end = 0
    for tensor in tensors:
        place = [end, end + tensor.num_bytes]
        content[tensor.name] = {"dtype": _NAMES[tensor.dtype], "shape": list(tensor.sizes), "data_offsets": place}
        end = place[1]
    text = json.dumps(content, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text
