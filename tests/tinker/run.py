"""``make check-tinker``: Thinking Machines' own client against ``bytescale serve``, in an environment of its own.

It needs Python and the network (tinker, torch and what they need: 3 GB in .tinker/, once). ``PYTHON_OF_TINKER`` names a
Python that has both.
"""

from __future__ import annotations

import os
import subprocess
import sys

from tests.helpers.environments import ROOT, python_with

PACKAGES = ("tinker==0.38.0", "peft>=0.15")


def main() -> int:
    """The exit code of the checks."""
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "TINKER_TELEMETRY": "0"}
    environment["PYTHONPATH"] = str(ROOT / "src")  # a Python of PYTHON_OF_TINKER need not have bytescale
    command = [python_with("tinker", PACKAGES), str(ROOT / "tests/tinker/check.py")]
    return max(
        subprocess.run([*command, ranks], env=environment, timeout=900, check=False).returncode for ranks in ("1", "2")
    )


if __name__ == "__main__":
    sys.exit(main())
