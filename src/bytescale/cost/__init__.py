"""Layer 2: what things cost in time, memory and traffic. Counts, models, profiles. Free of torch."""

from bytescale.cost.cluster import Cluster
from bytescale.cost.links import Links
from bytescale.cost.model import CostModel
from bytescale.cost.profile import Profile
from bytescale.cost.profile_file import load_profile, save_profile, shipped_profiles

__all__ = ["Cluster", "CostModel", "Links", "Profile", "load_profile", "save_profile", "shipped_profiles"]
