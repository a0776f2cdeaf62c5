"""The oldest versions of other packages that bytescale runs with, checked where an old one would fail late."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

from bytescale.common.errors import ConfigError, problem

OLDEST_TORCH = (2, 11)
"""As in pyproject.toml. Older ones lack operators and groups that are met only in the first step."""


def require_torch(installed: str | None = None) -> None:
    """Raise ``ConfigError`` where torch is older than ``OLDEST_TORCH``, or not there. Imports nothing.

    ``installed``: the version to look at; None: that of the package which is installed.
    """
    oldest = ".".join(map(str, OLDEST_TORCH))
    if installed is None:
        try:
            installed = version("torch")
        except PackageNotFoundError:
            raise ConfigError(
                problem("torch is not installed", so="nothing can be trained", fix=f'pip install "torch>={oldest}"')
            ) from None
    numbers = installed.partition("+")[0].split(".")
    if not all(number.isdigit() for number in numbers[:2]):
        return  # a build of somebody's own, who knows what is in it
    if tuple(int(number) for number in numbers[:2]) < OLDEST_TORCH:
        raise ConfigError(
            problem(
                f"torch {installed} is installed, and bytescale needs {oldest} or later",
                so="training would stop at the first operator that this one lacks",
                fix=f'pip install "torch>={oldest}"',
            )
        )
