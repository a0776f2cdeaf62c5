"""What ``plan`` and ``simulate`` assume of a model and its devices: one set of options, one way to the costs."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Annotated

import tyro

from bytescale.cli.attached import PlannedModel, planned_model
from bytescale.cli.batch_source import DEFAULT_MODEL, CostSource, read_profile
from bytescale.cli.devices import AssumedDevices, devices_of
from bytescale.common.errors import ConfigError, problem
from bytescale.config import Config, ModelConfig, ParallelConfig, TrainerConfig
from bytescale.cost import Profile
from bytescale.cost.memory import Checkpointing, ModelShare
from bytescale.simulator import ClusterConfig


@dataclass(slots=True, kw_only=True)
class CostOptions:
    """The options of a command that works out how long a model's step takes, and how much memory."""

    capacity_tokens: int = 8192
    """Tokens that one micro-batch of a rank may hold. auto: as many as fit on its devices beside the model."""
    device_gib: float | None = None
    """GiB of a device that may be used. Unset: what training with the config would use here, or 80."""
    checkpointing: Checkpointing = "none"
    """Which activations backward computes again. It counts for memory, not for times. A config brings its own."""
    cost: CostSource = field(default_factory=CostSource)
    """Where the times come from."""
    model: Annotated[ModelConfig, tyro.conf.arg(name="model")] = field(default_factory=lambda: replace(DEFAULT_MODEL))
    """The model, if times come from counted operations."""

    def __post_init__(self) -> None:
        if self.device_gib is not None and self.device_gib <= 0:
            raise ConfigError(problem(f"device_gib is {self.device_gib}", fix="use a number above 0"))


@dataclass(frozen=True)
class Costs:
    """The times of a step, and the devices that it runs on."""

    options: CostOptions
    config: Config | None
    cluster: ClusterConfig
    profile: Profile
    """Without what checkpointing changes in memory (``AssumedDevices.kept_by``)."""
    attached: PlannedModel | None
    """A model of another library; None if it is our own Llama or Mixtral."""

    @cached_property
    def devices(self) -> AssumedDevices:
        """The devices. Without a config they are chosen only when somebody asks, because that may import torch."""
        if self.attached is not None:
            return self.attached.devices(self.cluster.num_ranks, self.options.device_gib)
        return devices_of(
            self.config,
            self.profile,
            ModelShare(
                architecture=self.profile.architecture,
                tensor_parallel=self.profile.tensor_parallel,
                num_stages=self.cluster.pp,
                virtual_stages=self.cluster.virtual_stages,
            ),
            num_ranks=self.cluster.num_ranks,
            checkpointing=self.options.checkpointing,
            capacity_tokens=self.options.capacity_tokens,
            device_gib=self.options.device_gib,
        )


def costs_of(
    options: CostOptions, config: Config | None, cluster: ClusterConfig, *, longest: int, vocab_size: int | None = None
) -> Costs:
    """Return the costs of a model on ``cluster``.

    Args:
        options, config: as the command has them.
        cluster: the devices and their layout.
        longest: tokens of the longest sequence.
        vocab_size: the vocabulary size of the tokenizer, if it is known.

    Raises ``ConfigError`` if the model cannot be attached, or its layers cannot be cut into the stages of ``cluster``.
    """
    attached = planned_model(
        options.model,
        config,
        parallel=ParallelConfig(tp=cluster.tp, pp=cluster.pp, virtual_stages=cluster.virtual_stages),
        checkpointing=options.checkpointing,
        cost_profile=options.cost.profile,
        longest=longest,
    )
    if attached is not None:
        profile = attached.profile(options.cost.rates)
    else:
        profile = read_profile(
            options.cost,
            options.model,
            tensor_parallel=cluster.tp,
            model_is_given=config is not None or options.model != DEFAULT_MODEL,
            vocab_size=vocab_size,
            ring_gradients=(config.trainer if config is not None else TrainerConfig()).ring_gradients,
        )
    cluster.check_layers(profile.architecture.num_layers)
    return Costs(options=options, config=config, cluster=cluster, profile=profile, attached=attached)
