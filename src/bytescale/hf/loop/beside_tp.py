"""What a loop of one's own cannot do yet with tensor parallelism: refused by name, before anything is computed."""

from __future__ import annotations

from bytescale.common.errors import ConfigError

_REFUSED = {
    "equal_counts = True": ("FSDP would shard parts of weights as if they were whole", "leave equal_counts out"),
    'experts = "parallel"': ("experts would be cut twice", "leave experts out"),
    "hdp.prefill": ("a cache would have the keys of this rank's heads alone", "prefill with an HDP without tp"),
    "hdp.run": ("ranks that were given different rows would wait for each other", "call hdp.plan(batch, plan=plan)"),
    "micro.segments": ("a run of this rank's rows is not a document", "take whole ones, micro.documents(values)"),
    "layer.compile()": ("the compiler cannot follow rows that travel beside products", "leave layers as they are"),
}  # fmt: skip
"""What, the consequence, and what to do."""


def require_beside_tp(what: str, tp: int) -> None:
    """Raise ``ConfigError`` where ``tp`` ranks share a model."""
    so, fix = _REFUSED[what]
    if tp > 1:
        raise ConfigError(f"{what} with tp = {tp}", so=so, fix=f"{fix}, or leave tp at 1")
