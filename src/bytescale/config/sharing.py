"""Which ranks share the layers' parameters, what becomes of experts there, and what cannot be had beside it."""

from __future__ import annotations

from typing import get_args

from bytescale.common.errors import ConfigError
from bytescale.config.schema import Experts, Shard

REFUSED_WITH_TP = {
    "equal_counts = True": ("FSDP would shard parts of weights as if they were whole", "leave equal_counts out"),
    'experts = "parallel"': ("experts would be cut twice", "leave experts out"),
    "hdp.run": ("ranks that were given different rows would wait for each other", "call hdp.plan(batch, plan=plan)"),
    "micro.segments": ("a run of this rank's rows is not a document", "take whole ones, micro.documents(values)"),
    "layer.compile()": ("the compiler cannot follow rows that travel beside products", "leave layers as they are"),
    "indexer_loss": ("a rank would see the probabilities of its own heads alone", "train indexers without tp"),
}  # fmt: skip
"""What a loop of one's own cannot do yet with tensor parallelism, the consequence, and what to do."""
REFUSED_WITH_PP = {
    "a loop over micro-batches": (
        "a stage has no output before the one in front of it has run, and no gradient before the one behind it",
        "give the body of the loop as a function: hdp.plan(batch).forward_backward(loss)"),
    'shard = "parameters"': ("stages would gather layers for each micro-batch in flight", "leave shard out"),
    "equal_counts = True": ("FSDP would shard the layers that a stage lacks", "leave equal_counts out"),
    "hdp.attach": ("the second model would need stages of its own", "score with it in an HDP of its own"),
    "hdp.weights() of adapters": ("a stage lacks those of the others", "take weights and adapters from hdp.state()"),
    "hdp.run": ("a plan from elsewhere may let stages wait for each other", "call hdp.plan(batch, plan=plan)"),
    "routes and chosen keys": ("the loss sees the last stage's layers alone", "record and replay without pp"),
    "torch.autocast": ("messages between stages have the weights' dtype", "load the model in bf16"),
    "layer.compile()": ("the compiler cannot follow where a stage ends", "leave layers as they are"),
}  # fmt: skip
"""The same with pipelines."""


def ranks_beside(num_ranks: int, tp: int, pp: int) -> int:
    """The HDP ranks that ``tp`` and ``pp`` leave. Raises ``ConfigError`` where some ranks would have no place."""
    if min(tp, pp) < 1 or num_ranks % (tp * pp):
        raise ConfigError(
            f"{num_ranks} ranks are no multiple of tp = {tp} x pp = {pp}",
            so="some would have no place in the mesh",
            fix="let tp x pp divide the number of ranks",
        )
    return num_ranks // (tp * pp)


def check_stages(pp: int, num_layers: int) -> None:
    """Raise ``ConfigError`` where a stage would have no layer."""
    if not 1 <= pp <= num_layers:
        raise ConfigError(
            f"parallel.pp = {pp} exceeds the model's {num_layers} layers",
            so="a stage would have no layer",
            fix=f"use at most {num_layers} stages",
        )


def sharing_domain(shard: str, domain: int, num_ranks: int, ranks_per_node: int) -> int:
    """How many consecutive HDP ranks share the layers' parameters (``runtime.optimizer.units``).

    ``domain``: as it was asked for; 0: the ranks of a node, or all where a node has room for more. Raises
    ``ConfigError`` where that is not possible.
    """
    if shard not in get_args(Shard):
        raise ConfigError(f"shard is {shard!r}", fix=f"use one of {', '.join(get_args(Shard))}")
    if shard == "optimizer":
        if domain > 1:
            raise ConfigError(f'domain is {domain}, but shard is "optimizer"', so="ranks would share no parameters",
                              fix='set shard to "parameters", or leave domain out')  # fmt: skip
        return 1
    found = domain or min(ranks_per_node, num_ranks)
    if found < 1 or num_ranks % found:
        chosen = f"a domain of {found} ranks" if domain else f"the {found} ranks of a node, which are the domain,"
        raise ConfigError(
            f"{chosen} that share parameters {'does' if domain else 'do'} not divide {num_ranks} ranks",
            so="some ranks would have no others to gather parameters with",
            fix="set domain to a divisor of the number of ranks",
        )
    return found


def check_experts(experts: str, shard: str) -> None:
    """Raise ``ConfigError`` where experts cannot be computed as it was asked for, whatever the model."""
    if experts not in get_args(Experts):
        raise ConfigError(f"experts is {experts!r}", fix=f"use one of {', '.join(get_args(Experts))}")
    if experts == "parallel" and shard == "optimizer":
        raise ConfigError(
            'experts is "parallel", but shard is "optimizer"',
            so="every rank would keep all experts, and tokens had no reason to travel",
            fix='set shard to "parameters", or leave experts out',
        )


def check_invariant(*, invariant: bool, tp: int, experts: str) -> None:
    """Raise ``ConfigError`` where log-probabilities cannot be independent of the plan, whatever the model."""
    if invariant and (tp > 1 or experts == "parallel"):
        raise ConfigError(
            f'invariant = true with {f"tp = {tp}" if tp > 1 else "experts in parallel"}',
            so="products would be cut as the ranks lie, and bits would depend on them", fix="leave one of them out",
        )  # fmt: skip


def require_beside(what: str, tp: int, pp: int = 1) -> None:
    """Raise ``ConfigError`` where ``tp`` ranks share matrices, or ``pp`` stages the layers, and ``what`` needs all."""
    for name, size, refused in (("tp", tp, REFUSED_WITH_TP), ("pp", pp, REFUSED_WITH_PP)):
        if size > 1 and what in refused:
            so, fix = refused[what]
            raise ConfigError(f"{what} with {name} = {size}", so=so, fix=f"{fix}, or leave {name} at 1")
