"""Layer 1: the plan, the one data structure in which planner, loader, runtime and simulator meet."""

from bytescale.plan.layout import member_tokens, segment_bounds
from bytescale.plan.plan import Plan, Planner
from bytescale.plan.rank_plan import MicroBatch, RankPlan, SharedGroup

__all__ = ["MicroBatch", "Plan", "Planner", "RankPlan", "SharedGroup", "member_tokens", "segment_bounds"]
