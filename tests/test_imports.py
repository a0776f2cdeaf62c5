"""The door is light, and no files import each other in a circle."""

from __future__ import annotations

import ast
import subprocess
import sys
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import bytescale

ROOT = Path(bytescale.__file__).parent

MOST_FILES_OF_HDP = 90
"""Files of bytescale that ``from bytescale import HDP`` loads: readers of data, checkpoints, planners, optimizers, the
measurement of memory and the kernels of recurrent layers come when they are used."""

SCRIPT = """
import sys
from bytescale import HDP
print(*sorted(name for name in sys.modules if name.partition(".")[0] == "bytescale"))
"""


@pytest.mark.exhaustive
def test_the_door_loads_few_files() -> None:
    finished = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True)
    loaded = finished.stdout.split()
    assert "bytescale.hf.loop.hdp" in loaded
    assert len(loaded) <= MOST_FILES_OF_HDP, "\n".join(loaded)


@pytest.mark.parametrize("name", bytescale.__all__)
def test_every_public_name_is_there(name: str) -> None:
    assert getattr(bytescale, name).__name__ == name


def name_of(path: Path) -> str:
    parts = path.relative_to(ROOT.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported(text: str) -> set[str]:
    """What a file imports, for types alone and inside of functions too: modules, and names that may be modules."""
    found = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            found |= {one.name for one in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, "imports name their module in full"
            found |= {f"{node.module}.{one.name}" for one in node.names} | {str(node.module)}
    return found


def circle(texts: dict[str, str]) -> list[str]:
    """Files that import each other, from the first around to it again; none: there is no circle."""
    try:
        TopologicalSorter({name: imported(text) & texts.keys() - {name} for name, text in texts.items()}).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def test_no_files_import_each_other_in_a_circle() -> None:
    texts = {name_of(path): path.read_text() for path in sorted(ROOT.rglob("*.py"))}
    assert len(texts) > 300
    assert circle(texts) == []


@pytest.mark.parametrize(
    "back",
    [
        "from p.a import A",
        "import p.a",
        "from p import a",
        "if TYPE_CHECKING:\n    from p.a import A",
        "def f():\n    from p.a import A",
    ],
)
def test_a_circle_is_found(back: str) -> None:
    texts = {"p": "", "p.a": "from p.b import B", "p.b": back, "p.c": "from p import a"}
    assert set(circle(texts)) == {"p.a", "p.b"}
    assert circle({**texts, "p.b": "from p.d import D", "p.d": ""}) == []
