"""``make check-rl``: code of other projects for reinforcement learning on what is ours, each in an environment of its own.

It needs Python and the network (5 GB in .cookbook/, .skyrl/ and .areal/, once). ``PYTHON_OF_COOKBOOK``, for example,
names a Python that has the packages already. ``python -m tests.rl.run cookbook`` runs one of them. prime-rl and slime are
not on PyPI: they run where ``PRIME_RL`` and ``SLIME`` name folders with their sources.
"""

from __future__ import annotations

import os
import subprocess
import sys

from tests.helpers.environments import ROOT, python_with

PACKAGES = {
    "cookbook": ("tinker-cookbook>=0.5.8", "peft>=0.15"),
}
SOURCES: dict[str, str] = {}


def main() -> int:
    """The exit code of the checks."""
    environment = {
        **os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "TINKER_TELEMETRY": "0",
        "TINKER_API_KEY": "tml-of-this-test", "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}",
    }  # fmt: skip
    failed = 0
    for name in sys.argv[1:] or PACKAGES:
        script, python = str(ROOT / "tests/rl" / f"{name}.py"), python_with(name, PACKAGES[name])
        for ranks in ("1", "2"):
            command = [python, script, ranks]
            failed += subprocess.run(command, env=environment, timeout=900, check=False).returncode != 0
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
