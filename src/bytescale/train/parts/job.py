"""The parts of a run (model, optimizer, kernel, planner and data order), built from the config in one place."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from typing import NamedTuple

import torch

from bytescale.attention.flash import AttentionChoice
from bytescale.checkpoint.manifest import RunState
from bytescale.config.description import ModelDescription
from bytescale.config.resolve import resolve_model
from bytescale.config.schema import Config
from bytescale.cost.assumed import MeshCosts
from bytescale.cost.calibration import Calibrator
from bytescale.cost.memory.measured import MeasuredMemory
from bytescale.cost.profile import Profile
from bytescale.cost.profile_file import load_profile, require_device, warn_of_bad_fits
from bytescale.cost.spec import ModelSpec
from bytescale.data.loading.corpus import check_vocabulary
from bytescale.data.loading.loader import Loader, StepData
from bytescale.hf.loop.pictures import PictureLoader, PicturesOfRank
from bytescale.hf.model.decoder import HFDecoder
from bytescale.planner.calibrated import CalibratedPlanner
from bytescale.planner.verified import VerifiedPlanner
from bytescale.runtime.executor import Beside, Executor
from bytescale.runtime.optimizer.sharded_optimizer import ShardedOptimizer
from bytescale.runtime.plain_data import all_gather_json
from bytescale.runtime.usable import kind_of
from bytescale.simulator import ClusterConfig, StepTimes
from bytescale.train.changing import ChangingRanks
from bytescale.train.parts.budget import MemoryBudget, memory_budget, rank_device
from bytescale.train.parts.calibration import RunCalibration
from bytescale.train.parts.devices import Devices, RankDevice
from bytescale.train.parts.rank_model import build_rank_model
from bytescale.train.profiling.peak import known_peak
from bytescale.train.ranks import Ranks
from bytescale.train.stop import StopRequest


@dataclass(frozen=True)
class Job:
    """Everything that a step needs, on one rank."""

    config: Config
    ranks: Ranks
    architecture: ModelDescription
    spec: ModelSpec
    """Counts of the model."""
    loader: Loader
    executor: Executor
    """Runs plans on this rank's part of the model."""
    optimizer: ShardedOptimizer
    kernels: AttentionChoice
    memory: MemoryBudget
    planner: VerifiedPlanner
    """With the costs that the run began with."""
    calibration: RunCalibration | None
    """Refines the planner's costs; None: they stay."""
    step_times: StepTimes
    """Tells how long steps take, from measured times, or assumed ones if the config names no profile."""
    peak_flops_per_second: float | None  # of one rank's device, for MFU; None: not known
    stop: StopRequest
    changing: ChangingRanks

    def training_flops(self, data: StepData) -> int:
        """Operations of the model's forward and backward over a step's documents, for MFU."""
        trees, squares = data.forest, self.spec.squares_of
        of_rows = squares(data.plan.lengths) if trees is None else squares(trees.lengths) - squares(trees.shared)
        return self.spec.training_flops(num_tokens=data.plan.num_tokens, sum_of_squares=of_rows)

    def encode(self, pictures: PicturesOfRank | None) -> tuple[Beside, Callable[[], None]]:
        """Encode the pictures of a batch before its text; every rank calls it. Raises as ``EncodedItems``.

        Returns what is beside text, and what follows the last message of its passes.
        """
        if pictures is None:
            return lambda _: {}, self.optimizer.after_last_message
        self.optimizer.wait_for_parameters()
        if self.executor.units is not None:
            self.executor.units.begin()
        part, mesh = self.executor.part, self.executor.mesh
        assert isinstance(part.module, HFDecoder), "the trainer has no others"
        encoded = pictures.encoded(part.module, mesh.world, keeps_graphs=part.activations.keeps_graphs)

        def after_last_message() -> None:
            encoded.backward()
            self.optimizer.after_last_message()

        return encoded.beside, after_last_message

    def state_after(self, step: int, data: StepData, best: dict[str, float]) -> RunState:
        """The state of the run that a checkpoint after this step stores, with the ``best`` evaluation so far."""
        return RunState(
            step=step,
            sampler=data.sampler_state_after,
            architecture=self.architecture.as_dict(),
            mesh=asdict(self.ranks.mesh.shape),
            best=best,
        )

    def is_due(self, every: int, step: int) -> bool:
        """Whether to do after this step what is done ``every`` so many steps (0: never) and after the last one."""
        return step == self.config.trainer.steps or (every > 0 and step % every == 0)


def build_job(
    config: Config, ranks: Ranks, kernels: AttentionChoice, loader: Loader, stop: StopRequest, changing: ChangingRanks
) -> tuple[Job, Callable[[], None]]:
    """Build the parts in the order in which they depend on each other. Kernels and data exist already.

    Returns what gives the model its initial weights, too, for a run that is not restored.
    """
    architecture = resolve_model(config.model, tokenizer_vocab_size=loader.metadata.vocab_size)
    check_vocabulary(loader.metadata, architecture.vocab_size)

    # 1. Model: this rank's part of it, and the optimizer.
    model = build_rank_model(
        config, architecture, kernels.kernel, device=ranks.device, dtype=ranks.dtype,
        smallest=ranks.mesh.smallest_of_stage, mesh=ranks.mesh,
    )  # fmt: skip
    optimizer = ShardedOptimizer.of_config(
        model.parameters, config.optimizer, ranks.mesh, more=model.more, units=model.units
    )
    if model.units is None:
        optimizer.zeros[0].overlap_with(model.layers)

    # 2. Plans: from numbers that are the same on all ranks.
    spec, memory = model.spec, model.memory(kind_of(ranks.device), ranks.mesh.hdp.size, ranks)
    if isinstance(loader, PictureLoader):
        loader.memory = memory.rows, model.activations.keeps_graphs
    own = rank_device(config, ranks.device, ranks.dtype, ranks.world.size)
    everyone = [RankDevice(**told) for told in all_gather_json(asdict(own), ranks.checkpoint_group)]
    planning = plan_of_run(
        config, spec, memory, Devices.of_mesh(everyone, ranks.mesh.shape), device=ranks.device, dtype=ranks.dtype,
        ranks_per_node=ranks.hdp_ranks_per_node(),
    )  # fmt: skip
    if ranks.is_first:
        warn_of_bad_fits(planning.measured)
    job = Job(
        config=config,
        ranks=ranks,
        architecture=model.architecture,
        spec=spec,
        loader=loader,
        executor=Executor(
            part=model.decoder(optimizer, ranks.mesh),
            kernel=kernels.kernel,
            mesh=ranks.mesh,
            z_loss=config.optimizer.z_loss,
            units=model.units,
        ),
        optimizer=optimizer,
        kernels=kernels,
        memory=planning.memory,
        planner=planning.planner,
        calibration=run_calibration(config, planning.planner, ranks),
        step_times=planning.times,
        peak_flops_per_second=known_peak(ranks.device, ranks.dtype),
        stop=stop,
        changing=changing,
    )
    return job, partial(model.load, config, optimizer, ranks)


class Planning(NamedTuple):
    measured: Profile | None  # that the config names
    times: StepTimes
    memory: MemoryBudget
    planner: VerifiedPlanner


def plan_of_run(
    config: Config,
    spec: ModelSpec,
    memory: MeasuredMemory,
    devices: Devices,
    *,
    device: torch.device,
    dtype: torch.dtype,
    ranks_per_node: int,
) -> Planning:
    """Times, capacity, limits and the planner, from the devices of all HDP ranks. Arguments as in ``memory_budget``.

    ``ranks_per_node``: consecutive HDP ranks with the links of one node between them. Raises ``ConfigError`` if the
    profile that the config names is of another model, or of a device that no rank has.
    """
    mesh, hdp, measured = config.parallel, len(devices.of_ranks), None
    if config.cost.profile is not None:
        measured = load_profile(config.cost.profile)
        require_device(measured, {device.name for device in devices.of_ranks})
    costs = MeshCosts.of_run(config, kind_of(device), dtype.itemsize, num_ranks=hdp, ranks_per_node=ranks_per_node)
    profile, domain = costs.times(spec, measured), costs.domain
    cluster = ClusterConfig.of_run(config, hdp * mesh.tp * mesh.pp, ranks_per_node * mesh.tp)
    budget = memory_budget(config, memory, device=device, devices=devices, profile=profile, domain=domain)
    kept = budget.model.with_activations(profile, config.memory.checkpointing)
    times = StepTimes(profile=kept, devices=cluster)
    planner = VerifiedPlanner(
        config.planner,
        budget.cluster,
        costs.planner_costs(profile, is_measured=measured is not None),
        budget.limits,
        num_stages=mesh.pp,
        domain=domain,
        context_length=config.data.context_length,
        step_times=times,
    )
    return Planning(measured, times, budget, planner)


def run_calibration(config: Config, planner: VerifiedPlanner, ranks: Ranks) -> RunCalibration | None:
    """The calibration of this run; None if it is switched off, or if no rank could be compared with another one.

    With tensor or pipeline parallelism, and where ranks gather parameters in every pass, the times of a rank are not
    those of one model on one device, so costs stay. So they do for trees of documents, whose pairs are not counted.
    """
    shape = ranks.mesh.shape
    one_model = shape.tp * shape.pp == 1 and planner.domain == 1
    if not config.cost.calibrate or config.data.share_prefixes or shape.hdp == 1 or not one_model:
        return None
    speeds = () if planner.cluster.is_uniform else tuple(planner.cluster.speeds.tolist())
    calibrator = Calibrator(first=planner.cost, first_speeds=speeds)
    return RunCalibration(CalibratedPlanner(planner, calibrator), ranks.mesh)
