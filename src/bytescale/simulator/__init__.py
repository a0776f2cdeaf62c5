"""Layer 4: event-driven execution of a plan on a modelled cluster. Nothing here imports torch."""

from bytescale.simulator.cluster_config import ClusterConfig
from bytescale.simulator.result import SimulatedStep, Traffic
from bytescale.simulator.simulate import StepTimes, simulate, step_seconds

__all__ = ["ClusterConfig", "SimulatedStep", "StepTimes", "Traffic", "simulate", "step_seconds"]
