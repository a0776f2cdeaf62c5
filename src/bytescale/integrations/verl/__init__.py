"""bytescale as an engine of verl: a config says ``strategy: bytescale`` and names ``BytescaleEngineConfig`` of here.

verl imports what a config names, and importing it registers the engine (docs/other_trainers.md).
"""

from bytescale.integrations.verl.engine import BytescaleEngineConfig

__all__ = ["BytescaleEngineConfig"]
