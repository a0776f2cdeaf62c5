"""A torch that is too old is refused before it is used."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from bytescale.common.versions import OLDEST_TORCH, require_torch

from bytescale.common import versions
from bytescale.common.errors import ConfigError


def test_the_oldest_torch_is_the_one_that_the_package_asks_for() -> None:
    pyproject = Path(__file__).parent.parent / "pyproject.toml"
    (asked,) = re.findall(r'"torch>=([\d.]+)"', pyproject.read_text(encoding="utf-8"))
    assert asked == ".".join(map(str, OLDEST_TORCH))


@pytest.mark.parametrize("version", ["2.10.0", "2.9.1+cu130", "1.13.1", "2.0.0a0+git1234"])
def test_an_older_one_is_refused(version: str) -> None:
    with pytest.raises(ConfigError, match=rf"Torch {re.escape(version)} is installed, .* needs 2\.11 or later.*To fix"):
        require_torch(version)


@pytest.mark.parametrize("version", ["2.11.0", "2.13.0+cpu", "2.14.0a0+git1234", "3.0", torch.__version__, "nightly"])
def test_others_are_not(version: str) -> None:
    require_torch(version)
    require_torch()


def test_none_at_all_is_said_to_be_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    def nothing(name: str) -> str:
        raise versions.PackageNotFoundError(name)

    monkeypatch.setattr(versions, "version", nothing)
    with pytest.raises(ConfigError, match="Torch is not installed"):
        require_torch()
