"""Profiles as TOML files: written by ``bytescale profile``, read by ``plan``, ``simulate`` and ``train``."""

from __future__ import annotations

import logging
from collections.abc import Set
from importlib import resources
from pathlib import Path

import numpy as np

from bytescale.common.atomic import whole_file
from bytescale.common.errors import ConfigError, typed_path
from bytescale.common.limits import check_limits
from bytescale.common.parsing import MOST_SETTINGS, parse_toml, read_text
from bytescale.config.load import config_to_toml, from_dict
from bytescale.cost.curve import relative_errors
from bytescale.cost.profile import Profile

logger = logging.getLogger(__name__)

CURVES = tuple(f"{part}_{pass_}" for part in ("attention", "rest", "head") for pass_ in ("forward", "backward"))
BAD_RESIDUAL = 0.3
"""The relative error of a fit at one of its points above which there is a warning."""


def shipped_profiles() -> list[str]:
    """Names of the profiles that come with the package."""
    folder = resources.files("bytescale.cost") / "profiles"
    return sorted(item.name.removesuffix(".toml") for item in folder.iterdir() if item.name.endswith(".toml"))


def load_profile(name: str | Path) -> Profile:
    """Read a profile. ``name`` is the name of a shipped profile, or a path.

    Raises ``ConfigError`` if there is no such file, if it lacks a number, or if one in it makes no sense.
    """
    if str(name) in shipped_profiles():
        text = (resources.files("bytescale.cost") / "profiles" / f"{name}.toml").read_text(encoding="utf-8")
    else:
        try:
            text = read_text(typed_path(name), MOST_SETTINGS)
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(
                f"profile {str(name)!r} cannot be read ({error})",
                fix="name a file written by `bytescale profile`, or a shipped one: " + ", ".join(shipped_profiles()),
            ) from error
    try:
        content = parse_toml(text)
    except ValueError as error:
        raise ConfigError(f"profile {name} is not TOML: {error}", fix="take the profile again") from error
    profile = from_dict(Profile, content, f"profile {name}")
    check_limits(profile, f"profile {name}: ")
    if not profile.spec.layers:
        raise ConfigError(f"profile {name} lacks spec.layers", fix="take the profile again")
    if not profile.ring_forward_bytes_per_token * profile.ring_backward_bytes_per_token and not profile.spec.windows:
        raise ConfigError(
            f"profile {name}: ring_forward_bytes_per_token or ring_backward_bytes_per_token is 0",
            so="what ranks send would cost nothing, although no layer has a window",
            fix="take the profile again, or use a number above 0",
        )
    return profile


def save_profile(profile: Profile, path: Path) -> None:
    """Write ``profile`` to ``path``. The file is replaced in one step: readers see the old one or the new one."""
    with whole_file(path) as temporary:
        temporary.write_text(config_to_toml(profile), encoding="utf-8")


def require_device(profile: Profile, devices: Set[str]) -> None:
    """Raise ``ConfigError`` if ``profile`` was measured on none of ``devices``, which are names with the dtype."""
    if profile.device and profile.device not in devices:
        device = ", ".join(sorted(devices))
        raise ConfigError(
            f"profile {profile.name!r} was measured on {profile.device!r}, but this run is on {device!r}",
            so="plans would be made for the times of another device",
            fix="run `bytescale profile` here, or leave cost.profile unset to count operations",
        )


def worst_residual(profile: Profile, curve: str) -> tuple[float, int] | None:
    """Return the largest relative error of a fit at its points, and the length of that point. None without points."""
    points = [point for point in profile.points if point.curve == curve]
    if not points:
        return None
    tokens = np.array([point.tokens for point in points])
    errors = relative_errors(getattr(profile, curve), tokens, [point.value for point in points])
    worst = int(np.abs(errors).argmax())
    return float(errors[worst]), int(tokens[worst])


def fit_warnings(profile: Profile) -> list[str]:
    """Return one line for each curve that misses a point by more than ``BAD_RESIDUAL``. It names the worst point."""
    warnings = []
    for name in CURVES:
        error, tokens = worst_residual(profile, name) or (0.0, 0)
        if abs(error) > BAD_RESIDUAL:
            warnings.append(
                f"{name} fits badly: {error:+.0%} at {tokens} tokens (limit: {BAD_RESIDUAL:.0%}). Take the profile "
                "again on an idle machine, or expect poor plans for lengths near that one"
            )
    return warnings


def warn_of_bad_fits(profile: Profile | None) -> None:
    """Log ``fit_warnings``, because whoever uses a profile may not have seen how well it fits."""
    if profile is not None:
        for line in fit_warnings(profile):
            logger.warning("profile %r: %s", profile.name, line)
