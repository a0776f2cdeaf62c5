"""``bytescale profile``: measures a model's layers on this machine, for planning."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro
from rich.console import Console

from bytescale.cli.options import leading_path, parse
from bytescale.common.errors import ConfigError
from bytescale.common.limits import limits
from bytescale.common.units import format_bytes, format_count
from bytescale.config import (
    AttachedArchitecture,
    Config,
    ModelConfig,
    ParallelConfig,
    TrainerConfig,
    load_config,
    resolve_architecture,
    resolve_model,
)
from bytescale.cost import Profile, save_profile
from bytescale.cost.profile_file import fit_warnings

if TYPE_CHECKING:
    from bytescale.train.ranks import Ranks


@dataclass(slots=True, kw_only=True)
class ProfileOptions:
    """Measure this machine: bytescale profile [CONFIG.toml] [options].

    Writes a TOML file for `--cost.profile`, and a picture of the fits beside it.
    """

    out: Path = Path("profile.toml")
    """The file to write. The picture gets the same name with the ending .png."""
    max_tokens: int = field(default=131072, metadata=limits(least=1))
    """The longest sequence to measure, in tokens."""
    seconds: float = field(default=60.0, metadata=limits(above=0))
    """Seconds for all lengths together. Lengths that would take longer are left out."""
    ranks: int = field(default=1, metadata=limits(least=1))
    """Ranks on this machine that measure at the same time. The links between them are measured too. 1: ideal links.
    Under torchrun, the ranks of all its nodes measure, and links inside and across nodes are told apart."""
    device: Literal["auto", "cuda", "cpu"] = "auto"
    """The kind of device to measure."""
    dtype: Literal["auto", "bf16", "fp32", "fp64"] = "auto"
    """The dtype of the model. auto: bf16 on a GPU, fp32 on a CPU."""
    model: Annotated[ModelConfig, tyro.conf.arg(name="model")] = field(default_factory=ModelConfig)
    """The model whose layers are measured."""


def run(arguments: Sequence[str]) -> int:
    """Run ``bytescale profile``. Returns the exit code."""
    path, rest = leading_path(arguments)
    default = _defaults(load_config(path)) if path else ProfileOptions()
    options = parse(ProfileOptions, rest, prog="bytescale profile", default=default)
    _check_out(options.out)
    _check_model(options.model)
    from bytescale.train.ranks import under_torchrun

    if options.ranks > 1 and not under_torchrun():
        from bytescale.train.launch.torchrun import launch_ranks

        launch_ranks(options.ranks, ["profile", *arguments], run_dir=str(options.out), stop_seconds=10.0)
        return 0
    return profile_command(options)


def _check_model(model: ModelConfig) -> None:
    """Raise ``ConfigError`` for a model that runs on transformers' own code."""
    architecture = resolve_model(model)
    if isinstance(architecture, AttachedArchitecture):
        raise ConfigError(
            f"{model.preset} is a model of type {architecture.model_type}, which runs on transformers' own code",
            so="bytescale profile measures the layers of our own Llama and Mixtral only",
            fix="plan and simulate it without a profile: its operations are counted, and its memory is measured",
        )


def _check_out(out: Path) -> None:
    """Raise ``ConfigError`` if nothing could be written. It is called before a minute is spent on measuring."""
    if out.suffix == ".png":
        raise ConfigError(
            f"--out {out} ends in .png",
            so="the picture would get the same name and overwrite the profile",
            fix=f"use {out.with_suffix('.toml')}",
        )
    folder = out.parent
    if out.is_dir() or not folder.is_dir() or not os.access(folder, os.W_OK):
        raise ConfigError(
            f"--out {out} "
            + ("is a folder" if out.is_dir() else f"cannot be written, because {folder} is not a writable folder"),
            so="the measurements would be lost",
            fix="name a file in a folder that exists and can be written",
        )


def profile_command(options: ProfileOptions) -> int:
    """Measure on all ranks together. The first rank writes the files."""
    import torch

    from bytescale.train.parts.run_kernels import open_kernels
    from bytescale.train.ranks import open_ranks

    config = Config(
        model=options.model,
        parallel=ParallelConfig(ranks=options.ranks),
        trainer=TrainerConfig(device=options.device, dtype=options.dtype),
    )
    # This measures the implementation of flash attention that training will use.
    with open_ranks(config) as ranks, open_kernels(config, ranks.device, ranks.dtype, ranks.smallest):
        profile = _measure(options, ranks)
        if ranks.is_first:
            _write(options, profile, torch.get_num_threads())
    return 0


def _measure(options: ProfileOptions, ranks: Ranks) -> Profile:
    from rich.progress import BarColumn, Progress, TextColumn

    from bytescale.train.profiling.measurer import Measurer
    from bytescale.train.profiling.profiler import measure_profile

    console = Console(stderr=True, quiet=not ranks.is_first)
    with Progress(TextColumn("{task.description}"), BarColumn(), console=console, transient=True) as bar:
        task = bar.add_task("measuring", total=1.0)

        def show(tokens: int, share: float) -> None:
            bar.update(task, completed=share, description=f"measuring {format_count(tokens)} tokens")

        return measure_profile(
            Measurer(resolve_architecture(options.model), ranks.device, ranks.dtype),
            max_tokens=options.max_tokens,
            seconds=options.seconds,
            hdp=ranks.hdp,
            nodes=ranks.nodes(),
            progress=show,
        )


def _write(options: ProfileOptions, profile: Profile, threads: int) -> None:
    from bytescale.train.profiling.plot import draw_profile

    save_profile(profile, options.out)
    picture = options.out.with_suffix(".png")
    draw_profile(profile, picture)
    console = Console(soft_wrap=True, highlight=False)
    longest = max(point.tokens for point in profile.points)
    shape, host = profile.architecture, profile.links.device_to_host_bytes_per_second
    layer = float(profile.attention_forward(longest) + profile.rest_forward(longest))
    kept = format_bytes(float(profile.activation_bytes(1.0)))
    console.print(
        f"{profile.device} ({threads} threads): the forward of a layer with hidden size {shape.hidden_size} takes "
        f"{layer * 1e3:.3g} ms for {format_count(longest)} tokens and keeps {kept} per token; copies to "
        f"the host run at {format_bytes(host)}/s"
    )
    for warning in fit_warnings(profile):
        console.print(f"warning: {warning}")
    console.print(f"wrote {options.out} and {picture}")
    console.print(f"next: bytescale train CONFIG.toml --cost.profile {options.out}")


def _defaults(config: Config) -> ProfileOptions:
    return ProfileOptions(
        model=config.model,
        ranks=config.parallel.ranks,
        device=config.trainer.device,
        dtype=config.trainer.dtype,
        max_tokens=config.data.context_length,
    )
