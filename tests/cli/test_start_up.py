"""Commands that need no torch do not wait for it: importing it takes seconds of a CPU."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from bytescale.runtime.mesh import MeshShape
from tests.checkpoint.meshes import save

PROGRAM = """
import sys
from bytescale.cli.main import main
try:
    code = main(sys.argv[1:])
except SystemExit as end:
    code = end.code
print("exit code", code, "imported", *sorted({"torch", "numpy", "tyro", "pyarrow"} & set(sys.modules)))
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run folder with a whole checkpoint."""
    folder = tmp_path_factory.mktemp("run")
    save(MeshShape(1), folder / "checkpoints", 3)
    (folder / "config.toml").write_text('[data]\nsources = ["corpus"]\n')
    return folder


@pytest.mark.parametrize(
    ("command", "output", "imported"),
    [
        ("--help", "commands:", []),
        ("checkpoint list RUN", "hdp 1  whole", ["tyro"]),
        ("checkpoint verify RUN", "every byte is what was written", ["tyro"]),
        ("init --help", "usage: bytescale init", ["tyro"]),
        pytest.param("report --help", "usage: bytescale report", ["tyro"], marks=pytest.mark.exhaustive),
        pytest.param("plan --help", "usage: bytescale plan", ["numpy", "tyro"], marks=pytest.mark.exhaustive),
        ("simulate --help", "usage: bytescale simulate", ["numpy", "tyro"]),
        ("data stats --help", "usage: bytescale data stats", ["numpy", "tyro"]),
    ],
)
def test_a_command_imports_what_it_needs_only(run: Path, command: str, output: str, imported: list[str]) -> None:
    arguments = [str(run) if argument == "RUN" else argument for argument in command.split()]
    process = [sys.executable, "-c", PROGRAM, *arguments]
    finished = subprocess.run(process, capture_output=True, text=True, check=False, timeout=120)
    assert output in finished.stdout, finished.stdout + finished.stderr
    assert finished.stdout.splitlines()[-1].split() == ["exit", "code", "0", "imported", *imported]
