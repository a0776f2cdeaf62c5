"""The parts of a run (model, optimizer, kernel, planner and data order), built from the config in one place."""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from dataclasses import asdict, dataclass, replace
from typing import Literal

import torch

from bytescale.checkpoint.checkpointer import Checkpointer
from bytescale.checkpoint.initial_weights import load_initial_weights
from bytescale.checkpoint.manifest import RunState
from bytescale.common.units import format_si
from bytescale.config import Architecture, AttachedArchitecture, Config, resolve_model
from bytescale.config.attached import check_attached
from bytescale.config.validate import check_mesh
from bytescale.cost import CostModel, Profile, flops, load_profile
from bytescale.cost.assumed import ASSUMED, assumed_cost
from bytescale.cost.calibration import Calibrator, lag_of
from bytescale.cost.profile_file import require_device, require_model, warn_of_bad_fits
from bytescale.data.loading.corpus import check_vocabulary
from bytescale.data.loading.loader import Feed, PrefetchedSteps, StepData
from bytescale.models.head_groups import apply_head_groups
from bytescale.models.tensor_parallel import row_wise_parts
from bytescale.planner.calibrated import CalibratedPlanner
from bytescale.planner.verified import VerifiedPlanner
from bytescale.runtime import Activations, Decoder, Executor, ShardedOptimizer
from bytescale.simulator import ClusterConfig, StepTimes
from bytescale.storage.place import Place
from bytescale.train.parts.budget import MemoryBudget, memory_budget, rank_device
from bytescale.train.parts.calibration import RunCalibration
from bytescale.train.parts.devices import Devices, RankDevice
from bytescale.train.parts.own_model import OwnModel, build_own_model
from bytescale.train.parts.run_kernels import Kernels
from bytescale.train.profiling.peak import known_peak
from bytescale.train.ranks import Ranks
from bytescale.train.stop import StopRequest


@dataclass(frozen=True)
class Job:
    """Everything that a step needs, on one rank."""

    config: Config
    ranks: Ranks
    architecture: Architecture | AttachedArchitecture
    description: str
    """The model in a line for people."""
    training_flops: Callable[[StepData], int]
    """Operations of the model's forward and backward over a step's documents, for MFU."""
    feed: Feed
    executor: Executor
    """Runs plans on this rank's part of the model."""
    optimizer: ShardedOptimizer
    kernels: Kernels
    memory: MemoryBudget
    planner: VerifiedPlanner
    """With the costs that the run began with."""
    calibration: RunCalibration | None
    """Refines the planner's costs; None: they stay."""
    step_times: StepTimes | None
    """Tells how long steps take, from measured times, or assumed ones if the config names no profile.

    None for models that run on transformers' own code, which the simulator does not know."""
    peak_flops_per_second: float | None  # of one rank's device, for MFU; None: not known
    stop: StopRequest

    @property
    def current_cost(self) -> CostModel:
        """The costs by all that is known: calibrated ones, if this run calibrates."""
        return self.planner.cost if self.calibration is None else self.calibration.cost

    def forward_planner(self) -> VerifiedPlanner:
        """The planner for passes without backward."""
        cost = self.planner.cost.forward_only(self.ranks.dtype.itemsize)
        return replace(self.planner, cost=cost, step_times=None)

    def open_loader(self) -> PrefetchedSteps:
        """This rank's view of the batches, from the feed's current position on."""
        planner = self.planner if self.calibration is None else self.calibration.planner
        return self.feed.open(planner, stop_step=self.config.trainer.steps)

    def state_after(self, step: int, data: StepData, best: dict[str, float]) -> RunState:
        """The state of the run that a checkpoint after this step stores, with the ``best`` evaluation so far."""
        return RunState(
            step=step,
            sampler=data.sampler_state_after,
            architecture=self.architecture.as_dict(),
            mesh=asdict(self.ranks.mesh.shape),
            best=best,
        )

    def restore(self, checkpoints: Checkpointer, path: Place) -> RunState:
        """Continue from a checkpoint. Returns what it says of the run."""
        state = checkpoints.restore(path, self.optimizer, self.architecture.as_dict())
        self.feed.load_state_dict(state.sampler)
        return state

    def checkpoint_is_due(self, step: int) -> bool:
        """Whether to save after this step: as often as ``checkpoint`` says, and after the last step."""
        checkpoint = self.config.checkpoint
        intervals = (checkpoint.every, checkpoint.export_every)
        return step == self.config.trainer.steps or any(every > 0 and step % every == 0 for every in intervals)


def build_job(config: Config, ranks: Ranks, kernels: Kernels, feed: Feed, stop: StopRequest) -> Job:
    """Build the parts in the order in which they depend on each other. Kernels and data exist already."""
    architecture = resolve_model(config.model, tokenizer_vocab_size=feed.metadata.vocab_size)
    check_vocabulary(feed.metadata, architecture.vocab_size)
    if isinstance(architecture, AttachedArchitecture):
        check_attached(config, architecture)
        return _attached_job(config, ranks, kernels, feed, stop, architecture)

    # 1. Model: this rank's part of it, with initial weights that depend on the seed alone.
    check_mesh(config.parallel, architecture, ranks.world.size)
    model, optimizer = _own_model(config, ranks, architecture)

    # 2. Speed: the peak is for MFU alone; planning uses only numbers that are the same on all ranks.
    peak = known_peak(ranks.device, ranks.dtype, config.trainer.peak_tflops)
    devices = devices_of_all(config, ranks)
    profile = measured_profile(config, architecture, {device.name for device in devices.of_ranks})
    if ranks.is_first:
        warn_of_bad_fits(profile)
    cost = planning_cost(
        config, profile, architecture, ranks.device, ranks.dtype, ranks_per_node=ranks.hdp_ranks_per_node()
    )

    # 3. Memory: capacity, offloading, and the limits of every plan, from the devices of all ranks.
    memory = memory_budget(
        config, architecture, device=ranks.device, dtype=ranks.dtype, devices=devices, profile=profile
    )
    predicting = predicting_profile(config, profile, architecture, ranks.device, ranks.dtype)
    times = step_times(config, predicting, ranks.mesh.hdp.size, ranks_per_node=ranks.hdp_ranks_per_node())
    planner = verified_planner(config, memory, cost, ranks.mesh.hdp.size, times)
    return Job(
        config=config,
        ranks=ranks,
        architecture=architecture,
        description=describe_model(architecture),
        training_flops=lambda data: flops.training_flops(
            architecture, num_tokens=data.summary.num_tokens, sum_of_squares=data.summary.sum_of_squares
        ),
        feed=feed,
        executor=_executor(config, ranks, _own_parts(config, ranks, model, kernels, memory), kernels),
        optimizer=optimizer,
        kernels=kernels,
        memory=memory,
        planner=planner,
        calibration=run_calibration(config, planner, ranks, architecture),
        step_times=times,
        peak_flops_per_second=peak,
        stop=stop,
    )


def _attached_job(
    config: Config, ranks: Ranks, kernels: Kernels, feed: Feed, stop: StopRequest, architecture: AttachedArchitecture
) -> Job:
    """The same for a decoder that runs on transformers' own code."""
    from bytescale.train.parts.attached_model import build_attached_model  # imports transformers

    model = build_attached_model(
        config,
        architecture,
        kernels.attention,
        device=ranks.device,
        dtype=ranks.dtype,
        num_shards=ranks.mesh.hdp.size,
        rank=ranks.mesh.hdp.rank,
    )
    memory = model.memory(config, ranks.device, ranks.world.size, ranks.smallest)
    cost = replace(model.cost(ranks.device), ranks_per_node=ranks.hdp_ranks_per_node())
    return Job(
        config=config,
        ranks=ranks,
        architecture=model.architecture,
        description=model.describe(),
        training_flops=lambda data: 0 if data.plan is None else model.training_flops(data.plan.lengths),
        feed=feed,
        executor=_executor(config, ranks, [model.decoder], kernels),
        optimizer=model.optimizer(config, ranks),
        kernels=kernels,
        memory=memory,
        planner=verified_planner(config, memory, cost, ranks.mesh.hdp.size),
        calibration=None,  # what a rank computes is not counted in windows
        step_times=None,
        peak_flops_per_second=known_peak(ranks.device, ranks.dtype, config.trainer.peak_tflops),
        stop=stop,
    )


def _own_model(config: Config, ranks: Ranks, architecture: Architecture) -> tuple[OwnModel, ShardedOptimizer]:
    """Make this rank's part of the model, with its initial weights, and the optimizer of it."""
    bucket_mib = config.trainer.gradient_bucket_mib
    model = build_own_model(
        architecture,
        ranks.mesh,
        virtual_stages=config.parallel.virtual_stages,
        dtype=ranks.dtype,
        seed=config.trainer.seed,
        bucket_bytes=int(bucket_mib * 2**20),
    )
    optimizer = ShardedOptimizer.of_config(model.parameters, config.optimizer, ranks.mesh, model.tied_head)
    if bucket_mib:
        optimizer.overlap_with([(chunk, list(chunk.layers)) for chunk in model.chunks])
    if config.trainer.init:
        load_initial_weights(config.trainer.init, architecture, model.parameters, optimizer, ranks.checkpoint_group)
    return model, optimizer


def _own_parts(config: Config, ranks: Ranks, model: OwnModel, kernels: Kernels, memory: MemoryBudget) -> list[Decoder]:
    """Apply kernels, head groups, checkpointing and offloading to the model."""
    checkpointing, tp = config.trainer.checkpointing, ranks.mesh.tp
    pool = memory.host_pool(ranks.device)
    parts = []
    for chunk in model.chunks:
        kernels.apply(chunk, checkpointing=checkpointing, tp_size=tp.size)
        for layer in chunk.layers:
            apply_head_groups(layer.self_attn, memory.model.head_groups)
        activations = Activations(
            list(chunk.layers),
            checkpointing=checkpointing,
            pool=pool,
            device=ranks.device,
            tp=tp,
            row_wise=row_wise_parts(chunk, tp.size),
        )
        parts.append(Decoder(module=chunk, activations=activations))
    return parts


def _executor(config: Config, ranks: Ranks, parts: Sequence[Decoder], kernels: Kernels) -> Executor:
    """What runs plans on this rank's parts of the model."""
    return Executor(
        parts=parts,
        kernel=kernels.attention,
        mesh=ranks.mesh,
        z_loss=config.optimizer.z_loss,
        ring_gradients=torch.bfloat16 if config.trainer.ring_gradients == "bf16" else None,
    )


def devices_of_all(config: Config, ranks: Ranks) -> Devices:
    """The devices of the HDP ranks. Every rank calls it. Raises as ``Devices.of_mesh``."""
    own = rank_device(config, ranks.device, ranks.dtype, ranks.world.size)
    everyone = [RankDevice(**told) for told in ranks.everyone(asdict(own))]
    return Devices.of_mesh(everyone, ranks.mesh.shape)


def measured_profile(config: Config, architecture: Architecture, devices: Set[str]) -> Profile | None:
    """The profile that the config names, at the run's tp; None if the config names none.

    A profile measured at another tp is scaled by operation counts. Raises ``ConfigError`` if the profile is of another
    model, or of a device that is not one of ``devices`` (names with the dtype).
    """
    if config.cost.profile is None:
        return None
    profile = load_profile(config.cost.profile)
    require_model(profile, architecture)
    require_device(profile, devices)
    tp = config.parallel.tp
    if tp != profile.tensor_parallel:
        profile = profile.scaled_to(profile.architecture, tensor_parallel=tp)
    return profile.with_ring_gradients(config.trainer.ring_gradients)


def verified_planner(
    config: Config, memory: MemoryBudget, cost: CostModel, num_hdp_ranks: int, times: StepTimes | None = None
) -> VerifiedPlanner:
    """The planner of a run, with the limits that its plans are checked against.

    ``times``: None for models that the simulator does not know. Then plans are compared by their makespans.
    """
    return VerifiedPlanner(
        config.planner,
        memory.cluster(num_hdp_ranks),
        cost,
        memory.limits,
        num_stages=config.parallel.pp,
        num_chunks=config.parallel.virtual_stages,
        context_length=config.data.context_length,
        step_times=times,
    )


def step_times(config: Config, profile: Profile, num_hdp_ranks: int, *, ranks_per_node: int) -> StepTimes:
    """The simulator on the ranks of this run, of which so many consecutive HDP ranks share a node."""
    mesh = config.parallel
    devices = ClusterConfig(
        num_gpus=num_hdp_ranks * mesh.tp * mesh.pp,
        gpus_per_node=ranks_per_node * mesh.tp,
        tp=mesh.tp,
        pp=mesh.pp,
        virtual_stages=mesh.virtual_stages,
        gradient_bucket_mib=config.trainer.gradient_bucket_mib,
    )
    return StepTimes(profile=profile, devices=devices, recompute=config.trainer.checkpointing == "full")


def run_calibration(
    config: Config, planner: VerifiedPlanner, ranks: Ranks, architecture: Architecture
) -> RunCalibration | None:
    """The calibration of this run; None if it is switched off, or if no rank could be compared with another one.

    With tensor or pipeline parallelism, the times of a rank are not those of one model on one device, so costs stay.
    """
    shape = ranks.mesh.shape
    if not config.cost.calibrate or shape.hdp == 1 or shape.tp * shape.pp > 1:
        return None
    speeds = () if planner.cluster.is_uniform else tuple(planner.cluster.speeds.tolist())
    calibrator = Calibrator(first=planner.cost, num_layers=architecture.num_layers, first_speeds=speeds)
    lag = lag_of(config.data.prefetch_steps)
    return RunCalibration(CalibratedPlanner(planner, calibrator, lag), ranks.mesh)


def planning_cost(
    config: Config,
    profile: Profile | None,
    architecture: Architecture,
    device: torch.device,
    dtype: torch.dtype,
    *,
    ranks_per_node: int,
) -> CostModel:
    """The cost model for planning: from the profile's times for the model's layers, or from assumed round numbers.

    ``ranks_per_node``: consecutive HDP ranks with the links of one node between them.
    """
    if profile is None:
        assumed = assumed_cost(
            architecture,
            device=_kind(device),
            bytes_per_element=dtype.itemsize,
            ring_gradients=config.trainer.ring_gradients,
        )
        return replace(assumed, ranks_per_node=ranks_per_node)
    own = profile.of_model(architecture)
    return own.cost_model(ranks_per_node=ranks_per_node, pipeline_parallel=config.parallel.pp)


def predicting_profile(
    config: Config, profile: Profile | None, architecture: Architecture, device: torch.device, dtype: torch.dtype
) -> Profile:
    """The times that the simulator predicts steps of this run from, at the run's tp: those of ``planning_cost``."""
    if profile is not None:
        return profile.of_model(architecture)
    assumed = ASSUMED[_kind(device)].profile(architecture, bytes_per_element=dtype.itemsize)
    tp = config.parallel.tp
    scaled = assumed if tp == 1 else assumed.scaled_to(architecture, tensor_parallel=tp)
    return scaled.with_ring_gradients(config.trainer.ring_gradients)


def _kind(device: torch.device) -> Literal["cpu", "cuda"]:
    return "cuda" if device.type == "cuda" else "cpu"


def describe_model(shape: Architecture) -> str:
    """Our own model in a line for people."""
    active = ""
    if shape.num_experts:
        count = format_si(flops.active_parameters(shape))
        active = f" ({count} active: {shape.experts_per_token} of {shape.num_experts} experts)"
    return (
        f"{format_si(flops.total_parameters(shape))} parameters{active}, {shape.num_layers} layers, hidden "
        f"{shape.hidden_size}, {shape.num_heads} heads over {shape.num_kv_heads}, vocabulary {shape.vocab_size}"
    )
