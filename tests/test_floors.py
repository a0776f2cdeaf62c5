"""The floors of planner, simulator and loader can be imported without torch, for use on a laptop."""

from __future__ import annotations

import subprocess
import sys

import pytest

FLOORS_WITHOUT_TORCH = (
    "common",
    "config",
    "plan",
    "cost",
    "planner",
    "simulator",
    "data",
    "cli.plan",
    "cli.simulate",
    "report",
    "cli.report",
)

SCRIPT = """
import importlib, importlib.abc, pkgutil, sys

class NoTorch(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "ray"):
            raise ModuleNotFoundError(f"{name} is not installed here", name=name)

sys.meta_path.insert(0, NoTorch())
package = importlib.import_module("bytescale." + sys.argv[1])
modules = [package.__name__]
if hasattr(package, "__path__"):
    found = pkgutil.walk_packages(package.__path__, package.__name__ + ".")
    modules += [module.name for module in found if ".remote" not in module.name]
for name in modules:
    importlib.import_module(name)
print(len(modules))
"""


@pytest.mark.parametrize("floor", FLOORS_WITHOUT_TORCH)
def test_floor_imports_without_torch(floor: str) -> None:
    finished = subprocess.run([sys.executable, "-c", SCRIPT, floor], capture_output=True, text=True, check=False)
    assert finished.returncode == 0, finished.stderr
    assert int(finished.stdout) >= 1
