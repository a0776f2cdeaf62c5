"""bytescale: hybrid data parallel (HDP) training on mixed short and very long sequences.

An implementation of ByteScale (Ge et al., SIGCOMM 2025, arXiv 2502.21231). The layers, lowest first, are
``common``; ``config`` and ``plan``; ``cost`` and ``attention``; ``planner`` and ``models``; ``simulator``, ``data`` and
``runtime``; ``checkpoint``; ``hf``; ``train`` and ``parity``; ``report``; ``cli``. A module imports lower layers
only (docs/architecture.md).

``bytescale.HDP`` attaches to a model of Hugging Face's transformers in a loop of one's own. The names in ``__all__``
are loaded when they are first used, so that planning works where torch is not installed.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bytescale.common.errors import RanksLost
    from bytescale.hf.batch.documents import RankBatch, cut
    from bytescale.hf.batch.planning import make_planner
    from bytescale.hf.files.weight_parts import SentWeights, WeightPart, fp8_blocks
    from bytescale.hf.loop.hdp import HDP
    from bytescale.hf.loop.micro_batch import Micro
    from bytescale.hf.loop.planned_batch import PlannedBatch
    from bytescale.hf.loop.recovery import join
    from bytescale.hf.scoring.score_file import score
    from bytescale.plan import Plan
    from bytescale.runtime.optimizer.sharded_optimizer import Update

__version__ = "0.2.0"

_PLACES = {
    "HDP": "bytescale.hf.loop.hdp",
    "RanksLost": "bytescale.common.errors",
    "PlannedBatch": "bytescale.hf.loop.planned_batch",
    "RankBatch": "bytescale.hf.batch.documents",
    "SentWeights": "bytescale.hf.files.weight_parts",
    "WeightPart": "bytescale.hf.files.weight_parts",
    "fp8_blocks": "bytescale.hf.files.weight_parts",
    "Update": "bytescale.runtime.optimizer.sharded_optimizer",
    "cut": "bytescale.hf.batch.documents",
    "Micro": "bytescale.hf.loop.micro_batch",
    "join": "bytescale.hf.loop.recovery",
    "make_planner": "bytescale.hf.batch.planning",
    "Plan": "bytescale.plan",
    "score": "bytescale.hf.scoring.score_file",
}

__all__ = [
    "HDP", "Micro", "Plan", "PlannedBatch", "RankBatch", "RanksLost", "SentWeights", "Update", "WeightPart", "cut",
    "fp8_blocks", "join", "make_planner", "score",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module 'bytescale' has no attribute {name!r}")
    return getattr(importlib.import_module(_PLACES[name]), name)
