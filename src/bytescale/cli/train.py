"""``bytescale train``: reads a config and options, starts the ranks, and writes a run folder."""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Container, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import datetime
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import ClassVar

from bytescale.cli.options import Settings, leading_path, read
from bytescale.common.environment import prepare_gpu, ranks_of_torchrun
from bytescale.common.errors import ConfigError, typed_path
from bytescale.config.load import config_to_toml
from bytescale.config.resolve import CHECKPOINT_PREFIX, HF_PREFIX, resolve_model, source_folder
from bytescale.config.schema import Config, ModelConfig
from bytescale.config.validate import hdp_ranks, may_offload, validate
from bytescale.train.origin import with_its_tokenizer, with_kept_tokenizer
from bytescale.train.stop import StopRequest, said_when_stopped


@dataclass(frozen=True, kw_only=True)
class TrainOptions:
    """Train a model: bytescale train CONFIG [options], or bytescale train --resume RUN_FOLDER [options].

    CONFIG comes first: a TOML file. Every setting in it can be changed here: --optimizer.lr 1e-3
    --data.batch-tokens 64K.
    """

    command: ClassVar[str] = "train"
    compares: ClassVar[bool] = False  # planners, after the last step

    resume: Path | None = None
    """Continue this run folder from its last checkpoint, on any number of ranks."""
    init: str | None = None
    """hf:FOLDER, hf:OWNER/NAME (a model of the Hub) or checkpoint:FOLDER: start from these weights. The shape of their
    model replaces the [model] section, and data.tokenizer = auto is their tokenizer."""
    dry_run: bool = False
    """Check everything, prepare the data, plan the first batch and print what would run, but start nothing."""
    max_restarts: int = 0
    """How many times a run is started again from its last checkpoint after a rank has died. With `parallel.elastic`:
    how many dead ranks are replaced, too, while the others go on."""
    elastic: bool = False
    """Restart on the ranks that still have a place: as many as GPUs are left."""
    config: Settings
    """All settings."""


def run(arguments: Sequence[str]) -> int:
    start_training(read_options(arguments))
    return 0


def start_training(options: TrainOptions) -> None:
    """Train with these options, in this process or in ranks that run the same command."""
    if ranks_of_torchrun() is not None:
        _start_training(options)
        return
    with said_when_stopped("before training began; what is tokenised is kept, so the same command goes on from there"):
        _start_training(options)  # what can save when it is stopped has handlers of its own


def _start_training(options: TrainOptions) -> None:
    prepare_gpu(deterministic=options.config.kernels.deterministic)  # the ranks started from here inherit it
    if os.environ.get("RANK", "0") != "0":
        os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")  # what it warns of, the first rank's says for all
    config = options.config
    validate(config, num_ranks=ranks_of_torchrun())
    if config.trainer.epochs:
        config = _with_steps_of_epochs(config)
        validate(config, num_ranks=ranks_of_torchrun())
        options = replace(options, config=config)
    if not config.trainer.resume and ranks_of_torchrun() is None:
        from bytescale.checkpoint.folder_of_run import local_folder
        from bytescale.train.run_folder import check_can_be_made, check_is_new

        check_is_new(Path(config.trainer.run_dir))
        check_can_be_made(local_folder(config.checkpoint.folder, Path(config.trainer.run_dir)))
    if options.dry_run:
        config = _checked_without_ranks(config)
        if config.trainer.resume:
            newest = _newest_checkpoint(config, Path(config.trainer.run_dir))
            print(f"resume  from {newest}" if newest else "resume  there is no checkpoint on this machine: from step 1")
        from bytescale.train.loop.dry_run import dry_run

        dry_run(config)
        return
    if ranks_of_torchrun() is not None:
        from bytescale.train.loop.trainer import train
        from bytescale.train.ranks import LAUNCHER_PID, end_with_launcher

        end_with_launcher()
        asked = StopRequest()
        train(config, stop=asked, compares=options.compares)
        if asked.early and LAUNCHER_PID in os.environ:
            raise SystemExit(128 + asked.signal)  # our launcher tells how to go on; torchrun would call it a failure
    else:
        prepare_and_start(options)


def read_options(
    arguments: Sequence[str], kind: type[TrainOptions] = TrainOptions, default: Path | None = None
) -> TrainOptions:
    """Read the config file or that of the resumed run, apply the command line to it, and choose the run folder.

    ``kind``: the options of the command. ``default``: the config if none is named.
    """
    path, rest = leading_path(arguments)
    early = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    early.add_argument("--resume", type=Path)
    resumed = early.parse_known_args(rest)[0].resume  # the defaults of all other options depend on it
    if path is not None and resumed is not None:
        raise ConfigError(
            f"both a config file ({path}) and --resume {resumed} are given",
            so="it is not clear which settings to use",
            fix=f"to continue the run, leave out {path}: the run folder has its own config.toml",
        )
    if resumed is not None and not (resumed / "config.toml").is_file():
        raise _no_run(resumed)
    for path in resumed.iterdir() if resumed is not None else ():
        if path.exists() and not (path.is_file() or path.is_dir()):
            raise ConfigError(f"{path} is no file and no folder", so="a run cannot go on with it", fix="remove it")
    path = resumed / "config.toml" if resumed is not None else path or default
    options = read(kind, [str(path), *rest] if path else rest, prog=f"bytescale {kind.command}", default=Config())
    if path is None:
        raise ConfigError(
            "no config file is given", fix="write one with `bytescale init`, try `bytescale demo`, or see --help"
        )
    if resumed is not None and options.init is not None:
        raise ConfigError(f"both --resume and --init {options.init} are given", fix="leave one of them out")
    config = _started_from(options.init, options.config)
    config = with_its_tokenizer(config) if resumed is None else with_kept_tokenizer(config, resumed / "origin")
    trainer = config.trainer
    named = {argument.partition("=")[0].replace("_", "-") for argument in rest}
    if resumed is not None:
        config = _fitted_to_ranks(_from_checkpoint(config, resumed), named)
        trainer = replace(config.trainer, run_dir=str(resumed), resume=True)
    if "--trainer.steps" in named and "--trainer.epochs" not in named:
        trainer = replace(trainer, epochs=0)  # of the file
    if not trainer.run_dir:
        if ranks_of_torchrun() is not None:
            raise ConfigError(
                "trainer.run_dir is empty, and this process is one rank of several that torchrun has started",
                so="every rank would name a run folder of its own after the time",
                fix="name one with --trainer.run-dir",
            )
        trainer = replace(trainer, run_dir=f"runs/{path.stem}-{datetime.now():%Y%m%d-%H%M%S}")
    trainer = replace(trainer, run_dir=str(typed_path(trainer.run_dir)))
    return replace(options, config=replace(config, trainer=trainer))


def _no_run(named: Path) -> ConfigError:
    known = sorted({config.parent for place in {named.parent, Path("runs")} for config in place.glob("*/config.toml")})
    shown = ", ".join(str(run) for run in known[-8:])
    return ConfigError(
        f"there is no run in {named} (it has no config.toml)",
        so="there is nothing to continue",
        fix=f"name one of the runs that are here: {shown}" if shown else "name the folder of a run: none is here",
    )


def _started_from(init: str | None, config: Config) -> Config:
    if init is None:
        return config
    if config.trainer.init not in ("", init):
        raise ConfigError(
            f"--init {init} is given, but trainer.init is {config.trainer.init}", fix="leave one of them out"
        )
    if config.model.preset not in (ModelConfig().preset, init):
        raise ConfigError(
            f"model.preset = {config.model.preset} is set, and --init {init} names another model",
            so="the setting would have no effect",
            fix=f"leave it out (`bytescale init FILE.toml --from {init}` writes a config for that model)",
        )
    return replace(config, model=replace(config.model, preset=init), trainer=replace(config.trainer, init=init))


def _from_checkpoint(config: Config, run: Path) -> Config:
    """Take shape and weights from the run's newest checkpoint. The folder that it began with may be gone."""
    if not config.model.preset.startswith((HF_PREFIX, CHECKPOINT_PREFIX)) and not config.trainer.init:
        return config
    if config.model.lora_rank or config.model.freeze:
        return config  # checkpoints have what is trained alone
    newest = _newest_checkpoint(config, run)
    if newest is None:
        return config
    model = config.model
    if model.preset.startswith((HF_PREFIX, CHECKPOINT_PREFIX)):
        model = replace(model, preset=f"{CHECKPOINT_PREFIX}{newest}")
    return replace(config, model=model, trainer=replace(config.trainer, init=""))


def _fitted_to_ranks(config: Config, named: Container[str]) -> Config:
    """A resumed run on other ranks: fewer of them hold more tokens each, and domains divide them.

    What the command line says stays as it is.
    """
    parallel, ranks = config.parallel, hdp_ranks(config.parallel)
    if ranks % max(1, parallel.domain) and "--parallel.domain" not in named:
        domain = math.gcd(ranks, parallel.domain)
        print(f"resume  {domain} instead of {parallel.domain} ranks share parameters, which divides {ranks} ranks")
        parallel = replace(parallel, domain=domain)
    needed, is_given = -(-config.data.context_length // ranks), "--parallel.capacity-tokens" in named
    if not is_given and 0 < parallel.capacity_tokens < needed and not may_offload(config, config.trainer.device):
        print(
            f"resume  a rank holds {needed} tokens instead of {parallel.capacity_tokens}, so that {ranks} can hold a "
            f"sequence of {config.data.context_length}"
        )
        parallel = replace(parallel, capacity_tokens=needed)
    return replace(config, parallel=parallel)


def _newest_checkpoint(config: Config, run: Path) -> Path | None:
    from bytescale.checkpoint.folder_of_run import complete_checkpoints, local_folder

    complete = complete_checkpoints(local_folder(config.checkpoint.folder, run / "checkpoints"))
    return complete[-1] if complete else None


def prepare_and_start(options: TrainOptions) -> None:
    """Check the devices, the run folder and the data, prepare the data, then start the ranks.

    Whatever can fail without ranks fails here, before any rank is started.
    """
    from bytescale.train.launch.forked import prepare_for_copies
    from bytescale.train.launch.supervise import supervise
    from bytescale.train.launch.torchrun import ranks_there

    if options.config.parallel.ranks > 1:
        prepare_for_copies()
    config = _checked_without_ranks(options.config)
    _prepare_data(config)
    with _ray_if_needed(config):
        if config.parallel.ranks == 1 and not options.max_restarts:
            from bytescale.train.loop.trainer import train

            asked = StopRequest(tells=True)
            train(config, stop=asked, compares=options.compares)
            if asked.early:
                print(f"stopped by {asked.signal.name}; {_how_to_go_on(config)}")
                raise SystemExit(128 + asked.signal)
            return
        supervise(
            config,
            partial(_start_ranks, command=options.command, replacements=options.max_restarts),
            max_restarts=options.max_restarts,
            ranks_there=ranks_there if options.elastic else None,
        )


def _checked_without_ranks(config: Config) -> Config:
    """The config as it runs on this machine's GPUs. Raises what can be told without data and before a rank starts."""
    from bytescale.train.parts.budget import check_room
    from bytescale.train.parts.describe import check_host_room, check_positions
    from bytescale.train.parts.devices import fit_to_gpus
    from bytescale.train.reporting.trackers import check_trackers

    check_trackers(config.log)
    config = fit_to_gpus(config)
    validate(config)
    check_room(config.parallel.ranks)
    check_host_room(config)
    check_positions(config, resolve_model(config.model))
    _check_initial_weights(config)
    return config


def _how_to_go_on(config: Config) -> str:
    """What to do after a run was stopped or has failed, for messages."""
    run = Path(config.trainer.run_dir)
    again = f"bytescale train --resume {run}"
    if _newest_checkpoint(config, run) is not None:
        return f"continue with `{again}`"
    if (run / "config.toml").is_file():
        return f"begin again with `{again}` (it has no checkpoint yet)"
    return "begin again with the same command (there is no run folder yet)"


def _check_initial_weights(config: Config) -> None:
    """Raise what loading would raise, from the files' headers alone; nothing to do for random weights."""
    source, shape = config.trainer.init, resolve_model(config.model)
    if source.startswith(CHECKPOINT_PREFIX):
        from bytescale.checkpoint.reading import CheckpointReader, check_same_model

        place = source.removeprefix(CHECKPOINT_PREFIX)
        check_same_model(place, CheckpointReader(place).state.architecture, shape.as_dict())
    elif source.startswith(HF_PREFIX):
        from bytescale.hf.files.folder import check_sizes, parameters_of

        check_sizes(source_folder(source), shape.content)
        own = resolve_model(replace(config.model, config={})).content if config.model.config else shape.content
        there, here = ({name: p.shape for name, p in parameters_of(one).items()} for one in (own, shape.content))
        if changed := sorted(name for name, _ in there.items() ^ here.items()):
            raise ConfigError(
                f"model.config gives the model other weights than {source} has, such as {changed[0]}",
                so="they could not be read",
                fix="leave it out, or change what has no weights, such as rope_theta",
            )
    if config.model.lora_rank or config.model.freeze:
        from bytescale.hf.files.folder import empty_model, train_a_part

        train_a_part(empty_model(shape.content), shape.trained, seed=0)


def _prepare_data(config: Config) -> None:
    """Tokenise what the first batch of a new run needs. Ranks that resume and Ray's servers tokenise by themselves."""
    from bytescale.data.loading.corpus import plan_shards, prepare_corpus
    from bytescale.data.order.batches import BatchSampler
    from bytescale.data.tokens.progress import progress_bar

    with progress_bar() as progress:
        if config.data.loader == "local":
            corpus = prepare_corpus(config.data, progress, text_later=True)
            if not config.trainer.resume:
                BatchSampler(corpus.index, config.data)
        else:
            plan_shards(config.data, progress)


def _with_steps_of_epochs(config: Config) -> Config:
    """Tokenise all text, and put the number of batches of so many epochs in the place of ``trainer.steps``."""
    from bytescale.data.loading.corpus import prepare_corpus
    from bytescale.data.order.batches import batches_of_epochs
    from bytescale.data.tokens.progress import progress_bar

    with progress_bar() as progress:
        steps = batches_of_epochs(prepare_corpus(config.data, progress).index, config.data, config.trainer.epochs)
    print(f"epochs  {config.trainer.epochs} of the data are {steps} steps")
    return replace(config, trainer=replace(config.trainer, steps=steps, epochs=0))


@contextmanager
def _ray_if_needed(config: Config) -> Iterator[None]:
    """Provide a Ray cluster for servers while the ranks run, if the config needs one."""
    if config.data.loader == "local" or config.parallel.ranks == 1:
        yield
        return
    from bytescale.data.remote.ray_cluster import ray_cluster

    with ray_cluster(config.parallel.ranks) as address:
        before = os.environ.get("RAY_ADDRESS", "")
        os.environ["RAY_ADDRESS"] = address  # the ranks inherit it
        try:
            yield
        finally:
            os.environ["RAY_ADDRESS"] = before  # empty: none


def _start_ranks(config: Config, command: str, replacements: int) -> None:
    from bytescale.cli.main import main
    from bytescale.train.launch.torchrun import launch_ranks

    print(f"starting {config.parallel.ranks} ranks ...", flush=True)
    with TemporaryDirectory(prefix="bytescale-config-", ignore_cleanup_errors=True) as folder:
        resolved = Path(folder) / "config.toml"
        resolved.write_text(config_to_toml(config), encoding="utf-8")
        launch_ranks(
            config.parallel.ranks,
            [command, str(resolved)],
            main=main,
            modules=["bytescale.train.loop.trainer", "transformers.models.llama.modeling_llama"],
            again=partial(_how_to_go_on, config),
            stop_seconds=config.parallel.stop_seconds,
            silent_seconds=config.parallel.timeout_seconds,
            replacements=replacements if config.parallel.elastic else None,
        )
