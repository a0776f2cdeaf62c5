"""What ``plan`` and ``simulate`` take and assume: the batch, the model's times and memory, and its devices.

With a config that names a corpus, the devices are those on which ``train`` would run it. Without one, they are of the
kind on which the profile was measured, or GPUs in bf16 if nothing was measured.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeVar

import numpy as np

from bytescale.cli.options import Settings, leading_path, read
from bytescale.common.arrays import FloatArray, IntArray
from bytescale.common.errors import ConfigError, DataError
from bytescale.common.limits import limits
from bytescale.common.parsing import parse_json, read_input, read_text
from bytescale.common.units import GIBI, KIBI, MOST_COUNT
from bytescale.config.description import ModelDescription
from bytescale.config.presets import PRESETS
from bytescale.config.resolve import resolve_model
from bytescale.config.schema import (
    AUTO_CAPACITY,
    Config,
    DataConfig,
    MemoryConfig,
    ModelConfig,
    ParallelConfig,
    PlannerName,
)
from bytescale.config.validate import check_mesh, check_sharing
from bytescale.cost.assumed import ASSUMED, MeshCosts, Rates
from bytescale.cost.cluster import Cluster
from bytescale.cost.memory.device_kernels import DeviceKind
from bytescale.cost.memory.device_memory import host_bytes_left
from bytescale.cost.memory.measured import MeasuredMemory, fitting_capacity
from bytescale.cost.model import CostModel
from bytescale.cost.profile import Profile
from bytescale.cost.profile_file import load_profile, warn_of_bad_fits
from bytescale.cost.spec import ModelSpec
from bytescale.plan import Plan
from bytescale.planner.verified import VerifiedPlanner
from bytescale.simulator import ClusterConfig, SimulatedStep, StepTimes, simulate

if TYPE_CHECKING:
    from bytescale.data.loading.corpus import Corpus
    from bytescale.data.order.batches import GlobalBatch

ASSUMED_GIB = 80.0  # memory of a GPU that this machine does not have
ASSUMED_HOST_GIB = 128.0  # of host memory beside it: half of 2 TiB, for eight
MOST_SEQUENCES = 2**20  # of a batch that a file gives
MOST_DRAWN_TOKENS = 2**31
_NAMES = {"cpu": "a CPU core (--trainer.device cuda: of an H100)", "cuda": "an H100"}

DEFAULTS = Config(
    model=ModelConfig(preset="7b"),
    data=DataConfig(context_length=2 * KIBI * KIBI, batch_tokens=32 * KIBI * KIBI),
    parallel=ParallelConfig(ranks=1024),
    memory=MemoryConfig(offload="off"),
)
"""The settings without a config file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchConfig:
    """The sequences: from `lengths` if set, else from `data.sources` if set, else from `distribution`."""

    lengths: Path | None = None
    """A file of sequence lengths: .npy, .json (a list), or text with numbers. Or of rollouts (.jsonl or .parquet): then
    `bytescale plan` also tells what sharing their prefixes saves."""
    distribution: Literal["github", "byted"] = "github"
    """A length distribution of the paper. data.batch_tokens are drawn from it, and documents that are longer than
    data.context_length are split."""
    seed: int = field(default=0, metadata=limits(least=0))
    """Random seed for a distribution. For the corpus of a config, the number of the step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CostOptions:
    """The options of a command that works out how long a model's step takes, and how much memory."""

    batch: BatchConfig = field(default_factory=BatchConfig)
    """The sequences."""
    rates: Rates = field(default_factory=Rates)
    """Rates of one device, from which times follow if `cost.profile` names no profile. Where none is given, a config
    that names data has those that its training assumes, and the CPU those of a core."""
    gpus_per_node: int = field(default=8, metadata=limits(least=1))
    """Devices that share a node and its fast links."""
    config: Settings
    """All settings. `parallel.ranks` counts the devices of the cluster."""


Kind = TypeVar("Kind", bound=CostOptions)


def read_cost_options(kind: type[Kind], arguments: Sequence[str], *, prog: str) -> Kind:
    """Read the options of ``plan`` or ``simulate``. Raises ``ConfigError`` for a config without anything to plan."""
    options = read(kind, arguments, prog=prog, default=DEFAULTS)
    path, _ = leading_path(arguments)
    if path and not options.config.data.sources and not options.batch.lengths and not getattr(options, "plan", None):
        raise ConfigError(
            f"{path} names no data.sources",
            so="there is no batch to plan",
            fix="name them, or --batch.lengths FILE, or leave the config out",
        )
    if options.config.trainer.init and options.config.data.sources:
        from bytescale.train.origin import with_its_tokenizer

        return replace(options, config=with_its_tokenizer(options.config))
    return options


class Pictures(NamedTuple):
    """Of a batch, and of so many ranks that encode: ``memory_of_pictures`` and ``work_of_pictures``."""

    memory: Callable[..., tuple[float, float]]
    work: Callable[[int], FloatArray]


class SourceBatch(NamedTuple):
    """A batch of sequences, and where it comes from."""

    lengths: IntArray  # [S]
    origin: str
    vocab_size: int | None = None  # of the tokenizer of the corpus; None without a corpus
    trajectories: Sequence[IntArray] = ()  # their tokens
    pictures: Pictures | None = None


def read_batch(source: BatchConfig, data: DataConfig) -> SourceBatch:
    """Read or draw the batch. Raises ``DataError`` for a file that does not hold lengths."""
    if source.lengths is not None and source.lengths.suffix in (".jsonl", ".parquet"):
        from bytescale.hf.batch.rollouts import read_rollouts, tokens_of

        found = [np.array(tokens_of(one, number)) for number, one in enumerate(read_rollouts(source.lengths))]
        return SourceBatch(np.array([len(own) for own in found]), str(source.lengths), trajectories=found)
    if source.lengths is not None:
        return SourceBatch(read_lengths(source.lengths), str(source.lengths))
    if data.sources:
        corpus, (batch,) = corpus_batches(data, first=source.seed, number=1)
        origin, pictures = f"step {source.seed} of {', '.join(data.sources)}", None
        if corpus.pictures_of(batch.samples):
            from bytescale.hf.loop.pictures import memory_of_pictures, work_of_pictures

            pictures = Pictures(partial(memory_of_pictures, corpus, batch), partial(work_of_pictures, corpus, batch))
        return SourceBatch(batch.lengths, origin, corpus.metadata.vocab_size, pictures=pictures)
    from bytescale.data.length_distributions import sample_lengths

    if data.batch_tokens > MOST_DRAWN_TOKENS:
        raise ConfigError(
            f"data.batch_tokens is {data.batch_tokens}, and a batch is drawn from a distribution",
            so="it would have so many sequences that planning takes minutes",
            fix=f"use at most {MOST_DRAWN_TOKENS}",
        )
    lengths = sample_lengths(source.distribution, data.batch_tokens, source.seed, data.context_length)
    if not len(lengths):
        raise ConfigError(
            f"a batch of data.batch_tokens = {data.batch_tokens} has no document of {source.distribution}",
            so="there is nothing to plan",
            fix="raise data.batch_tokens; the distributions begin at 512 tokens a document",
        )
    return SourceBatch(lengths, f"{source.distribution}, seed {source.seed}")


def corpus_batches(data: DataConfig, *, first: int, number: int) -> tuple[Corpus, list[GlobalBatch]]:
    """Return a corpus, and its batches ``first`` to ``first + number - 1``."""
    from bytescale.data.loading.corpus import prepare_corpus
    from bytescale.data.order.batches import BatchSampler

    corpus = prepare_corpus(data, text_later=True)
    sampler = BatchSampler(corpus.index, data)
    return corpus, [sampler.next_batch() for _ in range(first + number)][first:]


def read_lengths(path: Path) -> IntArray:
    """Read ``[S]`` whole numbers of at least 1 from a .npy, .json or text file."""
    try:
        if path.suffix == ".npy":
            values = np.lib.format.read_array(io.BytesIO(read_input(path)), allow_pickle=False)
        elif path.suffix == ".json":
            values = np.array(parse_json(read_input(path)))
        else:
            values = np.array(read_text(path).replace(",", " ").split(), dtype=float)
    except (OSError, ValueError) as error:
        raise DataError(
            f"{path} cannot be read as lengths ({error})",
            fix="give a .npy file, a .json list, or a text file of numbers",
        ) from error
    if values.ndim != 1 or values.dtype.kind not in "iuf" or not len(values):
        raise DataError(f"{path} does not hold a list of numbers", fix="give one number of tokens per sequence")
    if len(values) > MOST_SEQUENCES:
        raise DataError(
            f"{path} has {len(values)} lengths",
            so="that is no batch: the plan would take minutes",
            fix=f"give those of one batch, at most {MOST_SEQUENCES}",
        )
    wrong = np.flatnonzero((values < 1) | (values > MOST_COUNT) | (values != np.floor(values)))
    if len(wrong):
        raise DataError(
            f"{path}: entry {wrong[0]} is {values[wrong[0]]}",
            so="no sequence has that many tokens",
            fix=f"use whole numbers from 1 to {MOST_COUNT}",
        )
    return values.astype(np.int64)


@dataclass(frozen=True)
class Costs:
    """The times of a step, and the memory of the devices that it runs on."""

    options: CostOptions
    cluster: ClusterConfig
    profile: Profile
    """Without what checkpointing changes in memory (``checkpointed_profile``)."""
    stages: MeasuredMemory
    """The memory of the first stage of a pipeline, with that of the others."""
    of_mesh: MeshCosts
    encoders: tuple[FloatArray, ...] = ()
    """``[R]`` seconds of each rank's encoders before the text and behind it; none: there are no pictures."""

    @property
    def config(self) -> Config:
        return self.options.config

    @cached_property
    def usable_bytes(self) -> float:
        """Bytes of a device that may be used: as training would here, or ``ASSUMED_GIB`` where it cannot run here."""
        config = self.config
        if config.memory.device_gib is None and not self._runs_here:
            return ASSUMED_GIB * GIBI
        import torch

        from bytescale.runtime.usable import usable_device_bytes

        device = torch.device(self.of_mesh.kind)
        return usable_device_bytes(device, config.parallel.ranks, config.memory.device_gib)

    @property
    def _runs_here(self) -> bool:
        return bool(self.config.data.sources) and not (self.of_mesh.kind == "cuda" and _kind_here() == "cpu")

    @cached_property
    def ranks(self) -> Cluster:
        """The ranks as planners see them, with what they may offload, as in training. Raises as ``capacity_tokens``."""
        from bytescale.train.parts.budget import usable_host_bytes, with_offload

        config, ranks = self.config, Cluster.uniform(self.cluster.num_ranks, self.capacity_tokens)
        known = self._runs_here or config.memory.host_gib is not None
        host = usable_host_bytes(config, config.parallel.ranks) if known else ASSUMED_HOST_GIB * GIBI
        host = host_bytes_left(self.memory.states, host)
        return with_offload(ranks, config, self.of_mesh.kind, self.memory, self.profile, host)

    @cached_property
    def memory(self) -> MeasuredMemory:
        """The memory of the fullest device of a rank: that of the pipeline's fullest stage."""
        return self.stages.of_run(self.config, domain=self.of_mesh.domain).fullest_stage(self.usable_bytes)

    @cached_property
    def cost_model(self) -> CostModel:
        return self.of_mesh.planner_costs(self.profile, is_measured=self.config.cost.profile is not None)

    def planner(self, name: PlannerName) -> VerifiedPlanner:
        """Return the planner of that name for the ranks of ``cluster``. Raises as ``capacity_tokens``."""
        return VerifiedPlanner(
            replace(self.config.planner, name=name),
            self.ranks,
            self.cost_model,
            num_stages=self.cluster.pp,
            domain=self.of_mesh.domain,
            context_length=0 if self.options.batch.lengths else self.config.data.context_length,
            step_times=StepTimes(profile=self.checkpointed_profile, devices=self.cluster),
        )

    def simulated(self, plan: Plan) -> SimulatedStep:
        """Its step, with encoders of pictures."""
        return simulate(plan, self.checkpointed_profile, self.cluster).with_encoders(self.encoders)

    @cached_property
    def capacity_tokens(self) -> int:
        """The capacity in tokens; for "auto" as many as fit. Raises ``ConfigError`` if none fits."""
        wanted = self.config.parallel.capacity_tokens
        if wanted != AUTO_CAPACITY and self.stages.picture_bytes:
            return min(wanted, self.memory.capacity_tokens(self.usable_bytes))
        return wanted if wanted != AUTO_CAPACITY else fitting_capacity(self.memory, wanted, self.usable_bytes)

    @cached_property
    def checkpointed_profile(self) -> Profile:
        """The profile with what a layer keeps under checkpointing. Profiles are measured without it."""
        return self.memory.with_activations(self.profile, self.config.memory.checkpointing)


def costs_of(
    options: CostOptions, *, longest: int, vocab_size: int | None = None, pictures: Pictures | None = None
) -> Costs:
    """Return the costs of a model for sequences of at most ``longest`` tokens.

    A profile has a model of its own. If ``options`` name a model as well, its layers must have the same shape.
    ``vocab_size``: that of the tokenizer, if it is known. ``pictures``: of the batch, which leave less room.

    Raises ``ConfigError`` if the model cannot be attached, does not fit into this machine or lacks what is asked for,
    if its layers cannot be cut into so many stages, or if there is no room for pictures.
    """
    config, parallel = options.config, options.config.parallel
    cluster = ClusterConfig.of_run(config, parallel.ranks, options.gpus_per_node)
    measured = load_profile(config.cost.profile) if config.cost.profile is not None else None
    warn_of_bad_fits(measured)
    kind = _kind_of_device(config, "" if measured is None else measured.device)
    if measured is not None and not config.data.sources and config.model == DEFAULTS.model:
        config = replace(config, model=measured.model)
    known = replace(config, data=replace(config.data, context_length=longest))  # rotary positions may depend on it
    shape = resolve_model(config.model, tokenizer_vocab_size=vocab_size)
    if config.model.preset in PRESETS:
        check_mesh(parallel, shape.content)
    spec, memory = _described(known, shape, kind, num_ranks=cluster.num_ranks)
    rates, named = options.rates, "the rates of --rates"
    if rates == Rates():
        named = f"the assumed rates of {_NAMES[kind]}"
        rates = ASSUMED[kind] if config.data.sources or kind == "cpu" else rates
    check_sharing(config, cluster.num_ranks)
    element, num_ranks, per_node = memory.states.element_bytes, cluster.num_ranks, cluster.ranks_per_node
    of_mesh = MeshCosts.of_run(config, kind, element, num_ranks=num_ranks, ranks_per_node=per_node)
    profile = of_mesh.times(spec, measured, rates)
    profile = profile if measured else replace(profile, name=named)
    costs = Costs(options, cluster, profile, memory, of_mesh)
    if pictures is not None:
        keeps_graphs = config.memory.checkpointing == "none"
        rows, size = memory.rows, parallel.ranks // parallel.pp
        waiting, alone = pictures.memory(rows, size, keeps_graphs=keeps_graphs)
        costs.memory.limits(device_bytes=costs.usable_bytes).beside(waiting, alone)
        encoders = rows.encoder_seconds(pictures.work(size), costs.profile)
        costs = replace(costs, stages=replace(memory, picture_bytes=waiting), encoders=encoders)
    return costs


def _described(
    config: Config, shape: ModelDescription, kind: DeviceKind, *, num_ranks: int
) -> tuple[ModelSpec, MeasuredMemory]:
    """What a model's times and its memory follow from."""
    import torch

    from bytescale.attention import select_kernel
    from bytescale.train.parts.describe import describe_model
    from bytescale.train.ranks import choose_dtype

    cpu, dtype = torch.device("cpu"), choose_dtype(config.trainer.dtype, torch.device(kind))
    settings = replace(config, trainer=replace(config.trainer, init=""))
    kernel = select_kernel("auto", cpu, dtype)
    return describe_model(settings, shape, kernel, cpu, dtype, num_ranks=num_ranks, kind=kind)


def _kind_of_device(config: Config, measured_on: str) -> DeviceKind:
    """``measured_on``: the device of the profile (``Profile.device``); empty without a measured one."""
    kind = config.trainer.device
    if kind == "auto" and measured_on:
        kind = "cpu" if measured_on.partition(",")[0] == "cpu" else "cuda"
    elif kind == "auto":
        kind = _kind_here() if config.data.sources else "cuda"
    return kind


def _kind_here() -> DeviceKind:
    """Return the kind of device that training would choose here."""
    from bytescale.runtime.usable import kind_of
    from bytescale.train.ranks import choose_device

    return kind_of(choose_device("auto", 0, 1))
