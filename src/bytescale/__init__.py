"""bytescale: hybrid data parallel (HDP) training on mixed short and very long sequences.

An implementation of ByteScale (Ge et al., SIGCOMM 2025, arXiv 2502.21231). The layers, lowest first, are
``common``; ``config`` and ``plan``; ``cost`` and ``attention``; ``planner`` and ``models``; ``simulator``, ``data`` and
``runtime``; ``checkpoint``; ``attach``; ``train`` and ``parity``; ``report``; ``cli``. A module imports lower layers
only (docs/architecture.md).

``bytescale.HDP`` attaches to a model of Hugging Face's transformers in a loop of one's own. The names in ``__all__``
are loaded when they are first used, so that planning works where torch is not installed.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bytescale.attach.hdp import HDP
    from bytescale.attach.micro_batch import Micro
    from bytescale.attach.planned_batch import PlannedBatch
    from bytescale.attach.planning import make_planner
    from bytescale.attach.rank_batch import RankBatch, cut
    from bytescale.attach.score import score
    from bytescale.plan import Plan
    from bytescale.runtime import Update

__version__ = "0.2.0"

_PLACES = {
    "HDP": "bytescale.attach.hdp",
    "PlannedBatch": "bytescale.attach.planned_batch",
    "RankBatch": "bytescale.attach.rank_batch",
    "Update": "bytescale.runtime",
    "cut": "bytescale.attach.rank_batch",
    "Micro": "bytescale.attach.micro_batch",
    "make_planner": "bytescale.attach.planning",
    "Plan": "bytescale.plan",
    "score": "bytescale.attach.score",
}

__all__ = ["HDP", "Micro", "Plan", "PlannedBatch", "RankBatch", "Update", "cut", "make_planner", "score"]


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module 'bytescale' has no attribute {name!r}")
    return getattr(importlib.import_module(_PLACES[name]), name)
