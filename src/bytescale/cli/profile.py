"""``bytescale profile``: measures a model's layers on this machine, for planning."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from bytescale.cli.options import Settings, read
from bytescale.common.atomic import temporary_path
from bytescale.common.environment import ranks_of_torchrun
from bytescale.common.errors import ConfigError
from bytescale.common.limits import limits
from bytescale.common.units import format_bytes, format_count, format_seconds
from bytescale.config.schema import Config, DataConfig, ParallelConfig, TrainerConfig
from bytescale.cost.profile import Profile
from bytescale.cost.profile_file import fit_warnings, save_profile
from bytescale.train.reporting.screen import console_of

DEFAULTS = Config(data=DataConfig(context_length=131072))
"""The settings without a config file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileOptions:
    """Measure this machine: bytescale profile [CONFIG.toml] [options].

    Writes a TOML file for `--cost.profile`.
    """

    out: Path = Path("profile.toml")
    """The file to write."""
    seconds: float = field(default=60.0, metadata=limits(above=0))
    """Seconds for all lengths together. Lengths that would take longer are left out."""
    config: Settings
    """All settings. Those that count are the model, trainer.device, trainer.dtype, data.context_length (the longest
    sequence to measure) and parallel.ranks: ranks on this machine that measure at the same time. The links between them
    are measured too; with one rank, links are ideal. Under torchrun, the ranks of all its nodes measure, and links
    inside and across nodes are told apart."""


def run(arguments: Sequence[str]) -> int:
    options = read(ProfileOptions, arguments, prog="bytescale profile", default=DEFAULTS)
    out, folder = options.out, options.out.parent
    is_other = out.exists() and not out.is_file()
    if is_other or not folder.is_dir() or not os.access(folder, os.W_OK):  # told before a minute of measuring
        what = "is no regular file" if is_other else f"cannot be written, because {folder} is not a writable folder"
        raise ConfigError(
            f"--out {out} {what}",
            so="the measurements would be lost",
            fix="name a file in a folder that exists and can be written",
        )
    ranks = options.config.parallel.ranks
    temporary = temporary_path(options.out)
    temporary.touch()  # what cannot be written is told now, not when all is measured
    temporary.unlink()
    if ranks > 1 and ranks_of_torchrun() is None:
        from bytescale.cli.main import run_on_ranks

        modules = ["bytescale.train.parts.describe", "bytescale.train.profiling.profiler"]
        return run_on_ranks("profile", arguments, ranks, modules=modules, go_on="begin again")
    profile_command(options)
    return 0


def profile_command(options: ProfileOptions) -> None:
    """Measure on all ranks together. The first rank writes the files."""
    import torch

    from bytescale.train.parts.describe import layers_to_measure
    from bytescale.train.parts.run_kernels import open_kernels
    from bytescale.train.profiling.measurer import Measurer
    from bytescale.train.profiling.profiler import measure_profile
    from bytescale.train.ranks import nodes_of, open_ranks

    given = options.config
    config = Config(
        model=given.model,
        parallel=ParallelConfig(ranks=given.parallel.ranks),
        trainer=TrainerConfig(device=given.trainer.device, dtype=given.trainer.dtype),
    )
    # This measures the implementation of flash attention that training will use.
    with open_ranks(config) as ranks, open_kernels(config, ranks.device, ranks.dtype, ranks.world.min_of):
        if ranks.is_first:
            print(
                f"measuring layers of up to {format_count(given.data.context_length)} tokens for about "
                f"{format_seconds(options.seconds)}, then links ...",
                flush=True,
            )
        layers, spec = layers_to_measure(given, ranks.device, ranks.dtype)
        profile = measure_profile(
            Measurer(layers, ranks.device, ranks.dtype),
            max_tokens=given.data.context_length,
            seconds=options.seconds,
            hdp=ranks.hdp,
            nodes=nodes_of(ranks.world),
        ).scaled_to(spec)
        if ranks.is_first:
            _write(options, replace(profile, model=given.model), torch.get_num_threads())


def _write(options: ProfileOptions, profile: Profile, threads: int) -> None:
    save_profile(profile, options.out)
    console = console_of()
    longest = max(point.tokens for point in profile.points)
    host = profile.links.device_to_host_bytes_per_second
    layer = float(profile.attention_forward(longest) + profile.rest_forward(longest))
    console.print(
        f"{profile.device} ({threads} threads): the forward of a layer with hidden size {profile.spec.hidden_size} "
        f"takes {layer * 1e3:.3g} ms for {format_count(longest)} tokens; copies to "
        f"the host run at {format_bytes(host)}/s"
    )
    for warning in fit_warnings(profile):
        console.print(f"warning: {warning}")
    console.print(f"wrote {options.out}; next: bytescale train CONFIG.toml --cost.profile {options.out}")
