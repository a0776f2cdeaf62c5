"""What the simulator predicts for a step of this run."""

from __future__ import annotations

from bytescale.plan import Plan
from bytescale.simulator import ClusterConfig, SimulatedStep, simulate
from bytescale.train.parts.job import Job


def predicted_step(job: Job, plan: Plan) -> SimulatedStep:
    """Simulate ``plan`` on the ranks of this run, with the costs that it was planned with. The data costs no time."""
    shape, config = job.ranks.mesh.shape, job.config
    assert job.profile is not None, "trainer.trace_steps is refused for models that the simulator does not know"
    # The planner's costs are sums over all layers, of which the stages of a pipeline have parts.
    profile = job.profile.with_costs(job.current_cost) if shape.pp == 1 else job.profile
    cluster = ClusterConfig(
        num_gpus=shape.size,
        gpus_per_node=job.planner.cost.ranks_per_node * shape.tp,
        tp=shape.tp,
        pp=shape.pp,
        virtual_stages=config.parallel.virtual_stages,
        gradient_bucket_mib=config.trainer.gradient_bucket_mib,
    )
    return simulate(plan, profile, cluster, recompute=config.trainer.checkpointing == "full")
