"""Files, JSON and TOML of others. Text that Python's parsers find nested too deeply is a ``ValueError``, too."""

from __future__ import annotations

import errno
import json
import os
import re
import stat
import tomllib
from pathlib import Path
from typing import Any

MOST_BYTES = 2**26
"""Of a file that is read as a whole: twice the largest tokenizer.json. Python's objects take up to 20 times as much."""
MOST_SETTINGS = 2**20
"""Of a file of settings: Python's parser of TOML is slow, and so are models with 100,000 entries."""
_LONG_KEY = re.compile(r"""(?<![\w"'-])(?:[\w"'-]++[ \t]*+\.[ \t]*+){100}""")  # takes time that grows with the square
_PIPES = ("/dev/fd/", "/dev/stdin", "/proc/self/fd/")


def read_input(path: Path, most_bytes: int = MOST_BYTES) -> bytes:
    """The content of a file that a person or a stranger's file names.

    A shell's pipe (``<(...)``, ``/dev/stdin``) is read, too. Raises ``OSError``, also for what else is no regular file,
    such as a device or a FIFO, which may never end, and for what is larger than ``most_bytes``.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # a FIFO without a writer would block
    mode, *_, size, _, _, _ = os.fstat(descriptor)
    if not (stat.S_ISREG(mode) or (stat.S_ISFIFO(mode) and str(path).startswith(_PIPES))):
        os.close(descriptor)
        number = errno.EISDIR if stat.S_ISDIR(mode) else errno.ENXIO
        raise OSError(number, "it is a folder" if stat.S_ISDIR(mode) else "it is no regular file", str(path))
    os.set_blocking(descriptor, stat.S_ISFIFO(mode))
    with open(descriptor, "rb") as file:
        try:
            content = file.read(most_bytes + 1 if size <= most_bytes else 0) or b""
        except OSError as error:  # which does not name the file
            raise OSError(error.errno, error.strerror, str(path)) from error
    if max(len(content), size) > most_bytes:
        raise OSError(errno.EFBIG, f"it has more than {most_bytes} bytes", str(path))
    return content


def read_text(path: Path, most_bytes: int = MOST_BYTES) -> str:
    """The same as text. Raises ``OSError``, and ``UnicodeDecodeError`` for what is not UTF-8. A BOM is left out."""
    return read_input(path, most_bytes).decode("utf-8-sig")  # editors may begin a file with one


def parse_json(text: str | bytes | bytearray) -> Any:
    """``json.loads``. Raises ``ValueError``."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def parse_toml(text: str) -> dict[str, Any]:
    """``tomllib.loads``. Raises ``ValueError``."""
    try:
        if _LONG_KEY.search(text):
            raise ValueError("a key has more than 100 parts")
        return tomllib.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
