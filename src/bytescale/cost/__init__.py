"""Floor 2: what things cost in time, memory and traffic. Counts, models, profiles. Free of torch."""

from bytescale.cost.cluster import Cluster
from bytescale.cost.model import CostModel

__all__ = ["Cluster", "CostModel"]
