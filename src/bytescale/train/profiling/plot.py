"""Draws a profile as a PNG: the fit of every curve and its points. Needs matplotlib."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from bytescale.common.errors import BytescaleError
from bytescale.common.units import format_count
from bytescale.cost import Profile
from bytescale.cost.profile_file import CURVES


def draw_profile(profile: Profile, path: Path) -> None:
    """Draw one panel per curve on logarithmic axes, with the worst residual in its title.

    The panel of attention's forward also shows the ring blocks. Raises ``BytescaleError`` without matplotlib.
    """
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ImportError as error:
        raise BytescaleError(
            "matplotlib is not installed", so="no picture can be drawn", fix="pip install 'bytescale[plot]'"
        ) from error
    figure, axes = pyplot.subplots(2, 4, figsize=(16, 7.5), constrained_layout=True)
    for axis, name in zip(axes.flat, CURVES, strict=False):
        points = [point for point in profile.points if point.curve == name]
        tokens = np.array([point.tokens for point in points])
        values = np.array([point.value for point in points])
        scale, unit = (2.0**-20, "MiB") if name == "activation_bytes" else (1e3, "ms")
        fine = np.geomspace(tokens.min(), tokens.max(), 200)
        axis.loglog(fine, getattr(profile, name)(fine) * scale, color="tab:blue", label="fit")
        axis.loglog(tokens, values * scale, "o", color="tab:orange", label="measured")
        if name == "attention_forward":
            blocks = [point for point in profile.points if point.curve == "ring_block_forward"]
            axis.loglog([p.tokens for p in blocks], [p.value * scale for p in blocks], "x", color="tab:green")
            axis.plot([], [], "x", color="tab:green", label="ring block of equal area")
        worst = float(np.abs(getattr(profile, name)(tokens) / values - 1).max())
        axis.set_title(f"{name.replace('_', ' ')}: worst {worst:.0%}", fontsize=10)
        axis.set_xticks(tokens, [format_count(count) for count in tokens.tolist()], fontsize=8)
        axis.minorticks_off()
        axis.set_xlabel("tokens")
        axis.set_ylabel(f"{unit} per layer" if not name.startswith("head") else unit)
        axis.grid(True, which="major", alpha=0.3)
        axis.legend(fontsize=8)
    text = axes.flat[-1]
    text.axis("off")
    links = profile.links
    text.text(
        0.0,
        0.9,
        f"{profile.device}\nhidden {profile.architecture.hidden_size}, {profile.architecture.num_heads} heads, "
        f"feed-forward {profile.architecture.ffn_hidden_size}\n\nto host {links.device_to_host_bytes_per_second:.3g} "
        f"bytes/s\nfrom host {links.host_to_device_bytes_per_second:.3g} bytes/s\nring "
        f"{links.intra_node_bytes_per_second:.3g} bytes/s, {links.latency_seconds * 1e6:.0f} us, and "
        f"{links.message_seconds * 1e6:.0f} us per step that compute cannot hide",
        va="top",
    )
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
