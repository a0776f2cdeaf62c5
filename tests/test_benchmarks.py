"""Benchmarks are not run by the tests, but a change of the library must not leave one that cannot even start."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

FOLDER = Path(__file__).parent.parent / "benchmarks"


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.py")), ids=lambda path: path.stem)
def test_a_benchmark_can_be_imported(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(FOLDER)
    for neighbour in FOLDER.glob("*.py"):  # an example of the same name may be there, and none of these may stay
        monkeypatch.setitem(sys.modules, neighbour.stem, ModuleType(neighbour.stem))
        monkeypatch.delitem(sys.modules, neighbour.stem)
    name = f"benchmark_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, name, module)
    spec.loader.exec_module(module)
