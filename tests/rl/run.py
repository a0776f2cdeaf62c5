"""``make check-rl``: code of other projects for reinforcement learning on ours, each in an environment of its own.

It needs Python and the network (5 GB in .cookbook/, .skyrl/ and .areal/, once). ``PYTHON_OF_SKYRL``, for example,
names a Python that has the packages already. ``python -m tests.rl.run cookbook`` runs one of them.

prime-rl and slime are not on PyPI: they run where ``PRIME_RL`` and ``SLIME`` name folders with their sources.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.helpers.environments import ROOT, python_with

ENVIRONMENTS: dict[str, tuple[str, ...]] = {
    "cookbook": ("tinker-cookbook>=0.5.8", "peft>=0.15"),
    "skyrl": (
        "skyrl==0.3.0", "sqlmodel", "ray==2.56.0", "loguru", "omegaconf", "hydra-core==1.3.2", "tensordict",
        "jaxtyping", "accelerate", "skyrl-gym==0.4.0", "tqdm", "func_timeout", "beartype", "wandb",
        "prime-pydantic-config",
    ),
    "areal": (
        "torchdata", "transformers>=5.0.0,<=5.3.0", "peft<=0.18.1", "datasets", "omegaconf==2.4.0.dev2",
        "hydra-core==1.4.0.dev1", "aiohttp", "aiofiles", "einops", "colorlog", "ray[default]", "fastapi", "uvicorn",
        "uvloop", "flask", "tenacity", "nvidia-ml-py", "numba", "pandas", "pybase64", "setproctitle", "wandb", "lark",
        "tensorboardx", "pillow", "pebble", "zstandard", "msgspec", "openai", "swanlab", "trackio", "networkx==3.3",
        "tabulate", "orjson", "psutil", "pyzmq",
    ),
}  # fmt: skip
WITHOUT_THEIRS = {"areal": ("areal==1.0.4",)}
"""Packages that are installed without what they ask for: AReaL 1.0.4 asks for a torch below 2.11, and we for 2.11."""
SOURCES = {"prime_rl": ("PRIME_RL", ("src", "packages/prime-rl-configs/src")), "slime": ("SLIME", (".",))}
"""The variable that names a folder, and what of it is imported."""


def main() -> int:
    """The exit code of the checks."""
    environment = {
        **os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "TINKER_TELEMETRY": "0",
        "TINKER_API_KEY": "tml-of-this-test",
    }  # fmt: skip
    there = [name for name, (variable, _) in SOURCES.items() if variable in os.environ]
    failed = 0
    for name in sys.argv[1:] or [*ENVIRONMENTS, *there]:
        variable, parts = SOURCES.get(name, ("", ()))
        paths = [str(Path(os.environ[variable]) / part) for part in parts]
        environment["PYTHONPATH"] = os.pathsep.join([str(ROOT / "src"), str(ROOT), *paths])
        made_for = name if name in ENVIRONMENTS else "skyrl"
        python = python_with(made_for, ENVIRONMENTS[made_for], WITHOUT_THEIRS.get(made_for, ()))
        for ranks in ("1", "2"):
            print(f"{name} on {ranks} rank(s)", flush=True)
            command = [python, "-m", f"tests.rl.{name}", ranks]
            failed += subprocess.run(command, env=environment, cwd=ROOT, timeout=900, check=False).returncode != 0
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
