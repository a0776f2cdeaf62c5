"""Layer 1: the settings. Dataclasses, presets, TOML in and out, and every check that needs no data and no torch."""

from bytescale.config.architecture import PRESETS, Architecture
from bytescale.config.attached import AttachedArchitecture
from bytescale.config.load import config_to_toml, load_config
from bytescale.config.resolve import CHECKPOINT_PREFIX, HF_PREFIX, resolve_model
from bytescale.config.schema import (
    AUTO_CAPACITY,
    CheckpointConfig,
    Config,
    CostConfig,
    DataConfig,
    EvalConfig,
    Experts,
    KernelsConfig,
    LogConfig,
    MemoryConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    PlannerConfig,
    PlannerName,
    Shard,
    TrainerConfig,
)
from bytescale.config.validate import sharing_domain, validate

__all__ = [
    "AUTO_CAPACITY",
    "CHECKPOINT_PREFIX",
    "HF_PREFIX",
    "PRESETS",
    "Architecture",
    "AttachedArchitecture",
    "CheckpointConfig",
    "Config",
    "CostConfig",
    "DataConfig",
    "EvalConfig",
    "Experts",
    "KernelsConfig",
    "LogConfig",
    "MemoryConfig",
    "ModelConfig",
    "OptimizerConfig",
    "ParallelConfig",
    "PlannerConfig",
    "PlannerName",
    "Shard",
    "TrainerConfig",
    "config_to_toml",
    "load_config",
    "resolve_model",
    "sharing_domain",
    "validate",
]
