"""One file of a corpus: where it is, what it holds, and by what a change of it is noticed."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from bytescale.common.errors import ConfigError, problem
from bytescale.storage.place import Place

FileFormat = Literal["text", "python", "jsonl", "parquet", "bin"]
"""python: source code that is cut into definitions (``data.sources.readers``). Only ``python:functions`` has it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceFile:
    """One file of the corpus as it was when the sources were listed."""

    path: Place
    format: FileFormat
    num_bytes: int
    mtime_ns: int
    named: bool = False
    """Whether a source names this very file, not a folder or a glob. Such a file is an error if it is not text; other
    files are skipped."""
    source: int = 0
    """Place in ``data.sources`` of the first source that found this file."""


def local_path(file: SourceFile) -> Path:
    """Return the path of a file on this machine. Raises ``ConfigError`` for a file that lies elsewhere."""
    if isinstance(file.path, Path):
        return file.path
    raise ConfigError(
        problem(
            f"{file.path} lies elsewhere and has to be mapped into memory",
            so="it cannot be used in place",
            fix="copy the .bin/.idx pair here first (training and `data tokenize` do so by themselves)",
        )
    )


def fingerprint_files(files: Iterable[SourceFile]) -> str:
    """16 hex digits that change when a file is added, removed, moved, resized or touched."""
    content = hashlib.blake2b(digest_size=8)
    for file in files:
        line = f"{file.path}\0{file.format}\0{file.num_bytes}\0{file.mtime_ns}\n"
        content.update(line.encode(errors="surrogateescape"))
    return content.hexdigest()
