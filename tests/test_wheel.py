"""The wheel, as a user gets it from the package index, in a fresh environment and an empty folder."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def command(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """``bytescale`` of a fresh environment that has the wheel, and this environment's other packages beside it."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    leave = shutil.ignore_patterns("__pycache__", "*.egg-info")
    shutil.copytree(ROOT / "src", source / "src", ignore=leave)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    build = ["wheel", "--no-deps", "--no-build-isolation", "--no-index", "--wheel-dir", str(folder), str(source)]
    run([*pip, *build], folder)
    (wheel,) = folder.glob("bytescale-*.whl")

    environment = folder / "environment"
    venv.create(environment, with_pip=False, symlinks=True)
    python = environment / "bin/python"
    run([*pip, "--python", str(python), "install", "--no-deps", "--no-index", "--no-compile", str(wheel)], folder)
    (packages,) = (environment / "lib").glob("python*/site-packages")
    (packages / "other-packages.pth").write_text(sysconfig.get_path("purelib") + "\n", encoding="utf-8")
    return environment / "bin/bytescale"


def run(arguments: list[str], folder: Path) -> str:
    """What the command prints. It must succeed, and sees no source tree."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(arguments, cwd=folder, env=environment, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.exhaustive
@pytest.mark.timeout(900)
def test_the_first_run_keeps_its_promises(command: Path, tmp_path: Path) -> None:
    """`bytescale demo` as a person types it: no token lost, whole and shared sequences, adaptive planning ahead."""
    output = run([str(command), "demo", "--trainer.device", "cpu"], tmp_path)
    (data,) = re.findall(r"^data .*", output, re.MULTILINE)
    assert "split" in data
    assert not re.search("lost|dropped|truncated|left out", data)
    first, last = map(float, re.findall(r"loss (\d+\.\d+) -> (\d+\.\d+)", output)[0])
    assert last < first - 1.5
    rows = re.findall(r"^\d+/\d+ .*", output, re.MULTILINE)
    assert len(rows) >= 10
    assert max(map(len, rows)) <= 110
    assert any(re.search(r" [3-8]x\d", row) for row in rows)
    assert all(re.search(r" 1x\d", row) for row in rows)
    (faster,) = re.findall(r"adaptive is (\S+) times as fast as static", output)
    assert float(faster) > 1
    assert (next((tmp_path / "runs").iterdir()) / "512-gpus.png").exists()

    assert "bytescale train bytescale.toml" in run([str(command), "init"], tmp_path)
    output = run([str(command), "train", "bytescale.toml", "--dry-run"], tmp_path)
    assert re.search(r"^plan +\d+ sequences", output, re.MULTILINE)
