"""Settings that are gone, and what to write in their place: one table for files and for options. Free of torch."""

from __future__ import annotations

from bytescale.common.errors import ConfigError

_ENVIRONMENT = "leave it out, and set the variable {} of Weights & Biases"
REMOVED: dict[str, tuple[str, object]] = {
    "data.verify": ('leave it out: data is checked when it is read ("bytescale data audit" checks a run)', None),
    "kernels.compile": ("leave it out: nothing is compiled (on CPUs it gained nothing)", False),
    "log.save_plans": ("leave it out: the plan of every step is written to the run folder", True),
    "log.track_every": ("leave it out: trackers are given every step", 1),
    "log.wandb_entity": (_ENVIRONMENT.format("WANDB_ENTITY"), ""),
    "log.wandb_group": (_ENVIRONMENT.format("WANDB_RUN_GROUP"), ""),
    "log.wandb_name": (_ENVIRONMENT.format("WANDB_NAME"), ""),
    "log.wandb_project": (_ENVIRONMENT.format("WANDB_PROJECT"), None),
    "log.wandb_tags": (_ENVIRONMENT.format("WANDB_TAGS"), []),
    "memory.head_groups": ("leave it out: attention is computed of all heads at once", None),
    "optimizer.decay_share": ("leave it out: with wsd the rate falls over the last 0.2 of the steps", 0.2),
    "planner.balance": ('leave it out: planner.name = "adaptive" balances the ranks', None),
    "planner.verify": ("leave it out: every plan is verified before it runs", None),
}
"""What to do now, and the value that asks for what happens anyway, with which files are read; None: there is none."""


def is_gone(name: str, where: str, value: object = None) -> bool:
    """Whether a setting is gone. Raises ``ConfigError`` then, unless ``value`` asks for what happens anyway."""
    write, was = REMOVED.get(name, ("", None))
    if write and (was is None or value != was):
        raise ConfigError(f"{where} is a setting that is gone", so="it would have no effect", fix=write)
    return bool(write)
