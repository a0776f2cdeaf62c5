"""The oldest versions of other packages that bytescale runs with. They are checked early: older ones fail late."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

from bytescale.common.errors import ConfigError

OLDEST_TORCH = (2, 11)
"""The same version as in pyproject.toml. Older ones lack operators and groups that only the first step needs."""


def require_torch(installed: str | None = None) -> None:
    """Raise ``ConfigError`` if torch is older than ``OLDEST_TORCH`` or not installed. Does not import torch.

    ``installed`` is the version to check. None checks the version of the installed package.
    """
    oldest = ".".join(map(str, OLDEST_TORCH))
    if installed is None:
        try:
            installed = version("torch")
        except PackageNotFoundError:
            raise ConfigError(
                "torch is not installed", so="nothing can be trained", fix=f'pip install "torch>={oldest}"'
            ) from None
    numbers = installed.partition("+")[0].split(".")
    if not all(number.isdigit() for number in numbers[:2]):
        return  # a custom build: its version number says nothing about its content
    if tuple(int(number) for number in numbers[:2]) < OLDEST_TORCH:
        raise ConfigError(
            f"torch {installed} is installed, and bytescale needs {oldest} or later",
            so="training would stop at the first operator that this one lacks",
            fix=f'pip install "torch>={oldest}"',
        )
