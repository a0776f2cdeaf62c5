"""Floor 4: executes a plan and never decides. Shapes and partners of every message come from the plan.

Works with any ``nn.Module`` that fits ``executor.TrainableModel``; it never imports ``models``.
"""

from bytescale.runtime.activations import Activations
from bytescale.runtime.auxiliary import HasBatchLoss
from bytescale.runtime.executor import StepResult, TrainableModel, run_rank_plan
from bytescale.runtime.flat import FlatParameters
from bytescale.runtime.hdp import HdpGroup
from bytescale.runtime.host_pool import HostMemoryError, HostPool
from bytescale.runtime.loss import IGNORE_INDEX, linear_cross_entropy
from bytescale.runtime.zero import ShardedAdamW

__all__ = [
    "IGNORE_INDEX",
    "Activations",
    "FlatParameters",
    "HasBatchLoss",
    "HdpGroup",
    "HostMemoryError",
    "HostPool",
    "ShardedAdamW",
    "StepResult",
    "TrainableModel",
    "linear_cross_entropy",
    "run_rank_plan",
]
