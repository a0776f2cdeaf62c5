"""Random valid plans, those that users' parity runs use too."""

from bytescale.parity.compare import random_plan

__all__ = ["random_plan"]
