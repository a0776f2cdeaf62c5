"""What a run is made of: model, optimizer, kernel, planner and data order, built from the config in one place."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from bytescale.attention import AttentionKernel, select_kernel
from bytescale.config import Architecture, Config, resolve_architecture
from bytescale.cost import Cluster, CostModel
from bytescale.cost.assumed import assumed_cost
from bytescale.data import Feed, StepData, check_vocabulary
from bytescale.data.batches import SamplerState
from bytescale.data.loader import Loader
from bytescale.models import Llama
from bytescale.plan import Plan
from bytescale.planner.verified import VerifiedPlanner
from bytescale.runtime import FlatParameters, ShardedAdamW
from bytescale.train.checkpoint import Checkpointer, RunState
from bytescale.train.peak import peak_flops_per_second
from bytescale.train.ranks import Ranks
from bytescale.train.stop import StopRequest

Planner = Callable[[np.ndarray], Plan]


@dataclass(frozen=True)
class Job:
    """Everything that a step needs, on one rank."""

    config: Config
    ranks: Ranks
    architecture: Architecture
    feed: Feed
    model: Llama
    parameters: FlatParameters
    optimizer: ShardedAdamW
    kernel: AttentionKernel
    planner: Planner
    peak_flops_per_second: float  # of one rank's device
    stop: StopRequest

    def open_loader(self) -> Loader:
        """This rank's view of the batches from where the feed stands."""
        return self.feed.open(self.planner, stop_step=self.config.trainer.steps)

    def state_after(self, step: int, data: StepData) -> RunState:
        """What a checkpoint after this step has to say."""
        return self._state(step, data.sampler_state_after)

    def restore(self, checkpoints: Checkpointer, path: Path) -> int:
        """Continue from a checkpoint; returns the number of steps that it has done."""
        state = checkpoints.restore(path, self.optimizer, expected=self._state(0, self.feed.state_dict()))
        self.feed.load_state_dict(state.sampler)
        return state.step

    def checkpoint_is_due(self, step: int) -> bool:
        """After every ``checkpoint.every`` steps and after the last."""
        every = self.config.checkpoint.every
        return step == self.config.trainer.steps or (every > 0 and step % every == 0)

    def _state(self, step: int, sampler: SamplerState) -> RunState:
        return RunState(
            step=step,
            sampler=sampler,
            architecture=self.architecture.as_dict(),
            layout=self.parameters.layout(),
            num_ranks=self.ranks.hdp.size,
        )


def build_job(config: Config, ranks: Ranks, feed: Feed, stop: StopRequest) -> Job:
    """Build the parts in the order in which they depend on each other; the data is there already."""
    # 1. Model: the same initial weights on every rank; parameters move into flat buffers.
    architecture = resolve_architecture(config.model, tokenizer_vocab_size=feed.facts.vocab_size)
    check_vocabulary(feed.facts, architecture.vocab_size)
    model = Llama(architecture)
    model.initialise(config.trainer.seed)
    model.to(device=ranks.device, dtype=ranks.dtype)
    parameters = FlatParameters(model, num_shards=ranks.hdp.size)
    optimizer = ShardedAdamW(parameters, config.optimizer, ranks.hdp)

    # 2. Speed: the peak is for MFU; planning takes only what all ranks know alike.
    peak = peak_flops_per_second(ranks.device, ranks.dtype, config.trainer.peak_tflops)
    cluster = Cluster.uniform(ranks.hdp.size, config.parallel.capacity_tokens)
    cost = assumed_cost(
        architecture,
        device="cuda" if ranks.device.type == "cuda" else "cpu",
        bytes_per_element=ranks.dtype.itemsize,
    )
    return Job(
        config=config,
        ranks=ranks,
        architecture=architecture,
        feed=feed,
        model=model,
        parameters=parameters,
        optimizer=optimizer,
        kernel=select_kernel(config.trainer.attention, ranks.device, ranks.dtype),
        planner=verified_planner(config, cluster, cost),
        peak_flops_per_second=peak,
        stop=stop,
    )


def verified_planner(config: Config, cluster: Cluster, cost: CostModel) -> Planner:
    """The configured planner, every plan of which is checked as ``planner.verify`` says before anybody runs it."""
    return VerifiedPlanner(config.planner, cluster, cost)
