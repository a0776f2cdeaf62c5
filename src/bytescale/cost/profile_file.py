"""Profiles as TOML files: written by ``bytescale profile``, read by ``plan``, ``simulate`` and ``train``."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Set
from dataclasses import fields
from functools import partial
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np

from bytescale.common.atomic import whole_file
from bytescale.common.errors import ConfigError
from bytescale.common.parsing import parse_toml
from bytescale.config import Architecture
from bytescale.cost.curve import Curve, relative_errors
from bytescale.cost.links import Links
from bytescale.cost.profile import Point, Profile

logger = logging.getLogger(__name__)
_quoted = partial(json.dumps, ensure_ascii=False)

CURVES = (
    "attention_forward",
    "attention_backward",
    "rest_forward",
    "rest_backward",
    "head_forward",
    "head_backward",
    "activation_bytes",
)
BAD_RESIDUAL = 0.3
"""The relative error of a fit at one of its points above which there is a warning."""
_SHAPE = (
    *("hidden_size", "num_heads", "num_kv_heads", "head_dim", "ffn_hidden_size"),
    *("num_experts", "experts_per_token"),
)


def shipped_profiles() -> list[str]:
    """Names of the profiles that come with the package."""
    folder = resources.files("bytescale.cost") / "profiles"
    return sorted(item.name.removesuffix(".toml") for item in folder.iterdir() if item.name.endswith(".toml"))


def load_profile(name: str | Path) -> Profile:
    """Read a profile. ``name`` is the name of a shipped profile, or a path.

    Raises ``ConfigError`` if there is no such file, if it lacks a curve, or if a number in it makes no sense.
    """
    if str(name) in shipped_profiles():
        text = (resources.files("bytescale.cost") / "profiles" / f"{name}.toml").read_text(encoding="utf-8")
    else:
        try:
            text = Path(name).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(
                f"profile {str(name)!r} cannot be read ({error})",
                fix="name a file written by `bytescale profile`, or a shipped one: " + ", ".join(shipped_profiles()),
            ) from error
    try:
        content = parse_toml(text)
    except ValueError as error:
        raise ConfigError(f"profile {name} is not TOML: {error}", fix="take the profile again") from error
    return _profile(content, str(name))


def save_profile(profile: Profile, path: Path) -> None:
    """Write ``profile`` to ``path``. The file is replaced in one step: readers see the old one or the new one."""
    with whole_file(path) as temporary:
        temporary.write_text(profile_to_toml(profile), encoding="utf-8")


def require_model(profile: Profile, architecture: Architecture) -> None:
    """Raise ``ConfigError`` unless a layer of ``architecture`` has the shape of the layer that was measured.

    The number of layers and the size of the vocabulary may differ (``Profile.of_model``).
    """
    for name in _SHAPE:
        measured, wanted = getattr(profile.architecture, name), getattr(architecture, name)
        if measured != wanted:
            raise ConfigError(
                f"profile {profile.name!r} is of another model: its {name} is {measured}, the model's {wanted}",
                so="plans would be made for the times of another model",
                fix="run `bytescale profile` with this model, or leave cost.profile unset to count operations",
            )


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


def profile_to_toml(profile: Profile) -> str:
    """Return the content of the file: header, curves with their worst residuals, traffic, links, model, raw points."""
    lines = [f"name = {_quoted(profile.name)}", f"source = {_quoted(profile.source)}"]
    lines += [f"device = {_quoted(profile.device)}", f"tensor_parallel = {profile.tensor_parallel}"]
    lines += [f"windows = {[list(window) for window in profile.windows]}"] if profile.windows else []
    lines.append("")
    for name in CURVES:
        curve = getattr(profile, name)
        lines.append(f"[curves.{name}]")
        lines += [f"{part} = {getattr(curve, part)!r}" for part in ("quadratic", "linear", "constant")]
        worst = worst_residual(profile, name)
        if worst is not None:
            lines.append(f"worst_residual = {worst[0]:.4f}  # fit over point, minus 1, at {worst[1]} tokens")
        lines.append("")
    lines += ["[traffic]"]
    lines += [f"ring_forward_bytes_per_token = {profile.ring_forward_bytes_per_token!r}"]
    lines += [f"ring_backward_bytes_per_token = {profile.ring_backward_bytes_per_token!r}"]
    lines += [f"layer_parameters = {profile.layer_parameters}", f"parameter_bytes = {profile.parameter_bytes}"]
    lines += ["", "[sequences]", f"forward_seconds = {profile.sequence_forward_seconds!r}"]
    lines += [f"backward_seconds = {profile.sequence_backward_seconds!r}"]
    lines += ["", "[links]"]
    for spec in fields(Links):
        if (value := getattr(profile.links, spec.name)) is not None:
            lines.append(f"{spec.name} = {value!r}")
    lines += ["", "[architecture]"]
    for name, value in profile.architecture.as_dict().items():
        lines.append(f"{name} = {_quoted(value) if isinstance(value, str) else str(value).lower()}")
    for point in profile.points:
        lines += ["", "[[points]]", f"curve = {_quoted(point.curve)}"]
        lines += [f"tokens = {point.tokens}", f"value = {point.value!r}"]
    return "\n".join(lines) + "\n"


def _profile(content: dict[str, Any], where: str) -> Profile:
    stored = content.get("curves", {})
    for name in CURVES:
        if name not in stored and not name.startswith("head_"):
            raise ConfigError(
                f"profile {where} lacks the curve {name}",
                so="the times of that part of a layer would be unknown",
                fix=f"take the profile again, or add [curves.{name}] with quadratic, linear and constant",
            )
    try:
        coefficients = {
            name: {part: stored[name].get(part, 0.0) for part in ("quadratic", "linear", "constant")}
            for name in CURVES
            if name in stored
        }
        curves: dict[str, Any] = {
            name: Curve(**_numbers(parts, f"{where}: curves.{name}")) for name, parts in coefficients.items()
        }
        sequences = _numbers(content.get("sequences", {}), f"{where}: sequences").items()
        curves |= {f"sequence_{name}": value for name, value in sequences}
        return Profile(
            name=content.get("name", where),
            source=content.get("source", ""),
            device=content.get("device", ""),
            tensor_parallel=content.get("tensor_parallel", 1),
            architecture=Architecture(**content["architecture"]),
            links=Links(**content.get("links", {})),
            points=tuple(Point(**point) for point in content.get("points", [])),
            windows=tuple((int(size), float(share)) for size, share in content.get("windows", [])),
            **curves,
            **_traffic(content["traffic"], f"{where}: traffic", may_be_nothing="windows" in content),
        )
    except (KeyError, TypeError) as error:
        raise ConfigError(
            f"profile {where} is incomplete or has an unknown entry: {error}", fix="take the profile again"
        ) from error


def _traffic(stored: dict[str, Any], where: str, *, may_be_nothing: bool) -> dict[str, Any]:
    """Check that everything that is sent has a size: shapes of slice groups are chosen by these sizes.

    ``may_be_nothing``: as in a model whose layers all have windows, so that nothing travels around rings.
    """
    for name, value in stored.items():
        if not (math.isfinite(value) and (value > 0 or (value == 0 and may_be_nothing))):
            raise ConfigError(
                f"{where}.{name} is {value}",
                so="what ranks send would cost nothing, or would never arrive",
                fix="take the profile again, or use a number above 0",
            )
    return stored


def _numbers(stored: dict[str, float], where: str) -> dict[str, float]:
    """The numbers of a section. Raises ``ConfigError`` for one that is below 0 or not finite."""
    numbers = {name: float(value) for name, value in stored.items()}
    for name, value in numbers.items():
        if not (math.isfinite(value) and value >= 0):
            raise ConfigError(
                f"{where}.{name} is {value}",
                so="costs would be infinite or would fall with length",
                fix="use a number of at least 0",
            )
    return numbers
