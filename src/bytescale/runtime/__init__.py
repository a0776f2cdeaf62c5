"""Layer 4: executes a plan and never decides. The plan gives the shape and the partner of every message.

The runtime works with any ``nn.Module`` that fits ``executor.DecoderModule``; it never imports ``models``.
"""

from bytescale.runtime.executor import BatchLoss, Decoder, DecoderModule, Executor, StepResult
from bytescale.runtime.group import RankGroup
from bytescale.runtime.loss import IGNORE_INDEX
from bytescale.runtime.mesh import Mesh, MeshShape
from bytescale.runtime.optimizer.flat import DTYPES, FlatParameters, Range, values_of
from bytescale.runtime.optimizer.sharded_optimizer import ShardedOptimizer, Update
from bytescale.runtime.saved.activations import Activations
from bytescale.runtime.saved.host_pool import HostMemoryError, HostPool
from bytescale.runtime.token_shards import TokenShards

__all__ = [
    "DTYPES",
    "IGNORE_INDEX",
    "Activations",
    "BatchLoss",
    "Decoder",
    "DecoderModule",
    "Executor",
    "FlatParameters",
    "HostMemoryError",
    "HostPool",
    "Mesh",
    "MeshShape",
    "Range",
    "RankGroup",
    "ShardedOptimizer",
    "StepResult",
    "TokenShards",
    "Update",
    "values_of",
]
