"""``make check-verl``: verl's worker, losses and batches on the engine bytescale, in an environment of its own.

It needs Python and the network (verl 0.9, torch and what they need: 6 GB in .verl/, once). ``PYTHON_OF_VERL`` names a
Python that has verl already.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from typing import Any

from tests.helpers.environments import ROOT, python_with

PACKAGES = ("verl==0.9.1", "uvicorn", "fastapi", "peft>=0.15")


def main() -> int:
    """The exit code of the checks."""
    environment = {**os.environ, "VERL_PLATFORM": "cpu", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    environment |= {  # a Python of PYTHON_OF_VERL need not have bytescale
        "PYTHONPATH": f"{ROOT / 'src'}:{ROOT / 'tests/verl'}:{ROOT}",
        "VERL_USE_EXTERNAL_MODULES": "cpu_platform",
    }
    python = python_with("verl", PACKAGES)
    with tempfile.TemporaryDirectory() as out:
        command = [python, "-m", "torch.distributed.run", "--standalone"]
        runs: list[Any] = [
            (2, "check.py"),
            (4, "check.py"),
            (2, "passes.py"),
            (1, "passes.py"),
            (2, "sft_trainer.py"),
            (2, "routes.py"),
        ]
        runs += [(2, "images.py"), (2, "accelerators.py"), (2, "accelerators.py", "--simulated")]
        codes = [
            subprocess.run(
                [*command, f"--nproc-per-node={ranks}", str(ROOT / "tests/verl" / name), out, *options],
                env=environment, timeout=900, check=False,
            ).returncode
            for ranks, name, *options in runs
        ]  # fmt: skip
        return int(any(codes))


if __name__ == "__main__":
    sys.exit(main())
