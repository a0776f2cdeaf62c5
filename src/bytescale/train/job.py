"""What a run is made of: model, optimizer, kernel, planner and data order, built from the config in one place."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from bytescale.attention import AttentionKernel, select_kernel
from bytescale.config import Architecture, Config, resolve_architecture
from bytescale.cost import Cluster, CostModel
from bytescale.data import BatchSampler, Corpus, LocalLoader, StepData, check_vocabulary, prepare_corpus
from bytescale.data.batches import SamplerState
from bytescale.models import Llama
from bytescale.plan import Plan
from bytescale.plan.verify import verify
from bytescale.planner import make_planner
from bytescale.runtime import FlatParameters, ShardedAdamW
from bytescale.train.checkpoint import Checkpointer, RunState
from bytescale.train.peak import peak_flops_per_second
from bytescale.train.ranks import Ranks

Planner = Callable[[np.ndarray], Plan]


@dataclass(frozen=True)
class Job:
    """Everything that a step needs, on one rank."""

    config: Config
    ranks: Ranks
    architecture: Architecture
    corpus: Corpus
    model: Llama
    parameters: FlatParameters
    optimizer: ShardedAdamW
    kernel: AttentionKernel
    sampler: BatchSampler
    planner: Planner
    peak_flops_per_second: float  # of one rank's device

    def open_loader(self) -> LocalLoader:
        """This rank's view of the batches from where the sampler stands."""
        return LocalLoader(
            self.corpus,
            self.sampler,
            self.planner,
            rank=self.ranks.hdp.rank,
            prefetch_steps=self.config.data.prefetch_steps,
            stop_step=self.config.trainer.steps,
        )

    def state_after(self, step: int, data: StepData) -> RunState:
        """What a checkpoint after this step has to say."""
        return self._state(step, data.sampler_state_after)

    def restore(self, checkpoints: Checkpointer, path: Path) -> int:
        """Continue from a checkpoint; returns the number of steps that it has done."""
        state = checkpoints.restore(path, self.optimizer, expected=self._state(0, self.sampler.state_dict()))
        self.sampler.load_state_dict(state.sampler)
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


def build_job(config: Config, ranks: Ranks) -> Job:
    """Read or make the corpus, then build the parts in the order in which they depend on each other."""
    # 1. Data: the tokenised corpus (made by the first rank to get there, then shared) and its order.
    corpus = prepare_corpus(config.data)
    sampler = BatchSampler(corpus, config.data.batch_tokens, config.data.shuffle_seed)

    # 2. Model: the same initial weights on every rank; parameters move into flat buffers.
    architecture = resolve_architecture(config.model, tokenizer_vocab_size=corpus.vocab_size)
    check_vocabulary(corpus, architecture.vocab_size)
    model = Llama(architecture)
    model.initialise(config.trainer.seed)
    model.to(device=ranks.device, dtype=ranks.dtype)
    parameters = FlatParameters(model, num_shards=ranks.hdp.size)
    optimizer = ShardedAdamW(parameters, config.optimizer, ranks.hdp)

    # 3. Speed: the device's peak, from which the planner's cost model follows until a profile is given.
    peak = peak_flops_per_second(ranks.device, ranks.dtype, config.trainer.peak_tflops)
    cluster = Cluster.uniform(ranks.hdp.size, config.parallel.capacity_tokens)
    return Job(
        config=config,
        ranks=ranks,
        architecture=architecture,
        corpus=corpus,
        model=model,
        parameters=parameters,
        optimizer=optimizer,
        kernel=select_kernel(config.trainer.attention, ranks.device, ranks.dtype),
        sampler=sampler,
        planner=verified_planner(config, cluster, planning_cost(architecture, ranks.dtype.itemsize)),
        peak_flops_per_second=peak,
    )


def verified_planner(config: Config, cluster: Cluster, cost: CostModel) -> Planner:
    """The configured planner, every plan of which is checked as ``planner.verify`` says before anybody runs it."""
    planner = make_planner(config.planner, cluster, cost)
    level = config.planner.verify
    if level == "off":
        return planner

    def plan_and_verify(lengths: np.ndarray) -> Plan:
        plan = planner(lengths)
        verify(plan, level=level)
        return plan

    return plan_and_verify


def planning_cost(architecture: Architecture, element_bytes: int) -> CostModel:
    """What planning believes of speed until a profile is given: a FLOP count, and links that are never the limit.

    Every rank plans for itself and all must come to the same plan, so nothing measured on one rank enters: the rate is
    a round number, and only the ratio of attention to the rest matters.
    """
    return CostModel.from_architecture(architecture, flops_per_second=1e12, bytes_per_element=element_bytes)
