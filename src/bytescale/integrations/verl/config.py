"""The configuration of the engine, as verl's Hydra configs name it."""

from __future__ import annotations

from dataclasses import dataclass

from verl.workers.config import EngineConfig

from bytescale.common.errors import ConfigError


@dataclass
class BytescaleEngineConfig(EngineConfig):
    """verl's ``EngineConfig`` with ``strategy`` "bytescale".

    ``max_token_len_per_gpu`` is the capacity of training, ``infer_max_token_len_per_gpu`` that of passes without
    gradients; None: the same.
    """

    strategy: str = "bytescale"
    checkpointing: str = "none"
    """``none``, ``attention`` or ``full`` (``memory.checkpointing``), in place of the model's own."""
    host_gib: float = 0.0
    """Host memory of a rank for activations."""

    def __post_init__(self) -> None:
        super().__post_init__()
        from bytescale.integrations.verl import engine  # noqa: F401  # registers

        for name, wrong in (("use_dynamic_bsz", False), ("full_determinism", True)):
            if getattr(self, name) == wrong:
                raise ConfigError(
                    f"engine.{name} = {wrong}",
                    so="plans are always of the lengths of a batch, and say nothing of kernels",
                    fix=f"set it to {not wrong}",
                )
        if not self.max_token_len_per_gpu:
            raise ConfigError(
                f"engine.max_token_len_per_gpu = {self.max_token_len_per_gpu}",
                so="how many tokens a micro-batch of a rank may hold is not known",
                fix="set it; a longer sequence is shared by several ranks",
            )
