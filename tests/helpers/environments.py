"""Environments with other people's packages, beside the one of the tests. It needs Python alone."""

from __future__ import annotations

import os
import subprocess
import venv
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent


def python_with(name: str, packages: Sequence[str], without_theirs: Sequence[str] = ()) -> str:
    """The Python of the folder ``.name``, which is made at the first call; or that which ``PYTHON_OF_NAME`` names.

    ``without_theirs``: packages that are installed without the packages that they ask for.
    """
    if given := os.environ.get(f"PYTHON_OF_{name.upper()}"):
        return given
    environment = ROOT / f".{name}"
    python = environment / "bin" / "python"
    if not (environment / ".ready").exists():
        venv.create(environment, with_pip=True, clear=True)
        subprocess.run([python, "-m", "pip", "install", "--quiet", *packages, "--editable", str(ROOT)], check=True)
        if without_theirs:
            subprocess.run([python, "-m", "pip", "install", "--quiet", "--no-deps", *without_theirs], check=True)
        (environment / ".ready").touch()
    return str(python)
