"""Settings that are gone, and what to write in their place: one table for files and for options. Free of torch."""

from __future__ import annotations

from bytescale.common.errors import ConfigError

_ENVIRONMENT = "leave it out, and set the variable {} of Weights & Biases"
REMOVED: dict[str, tuple[str, object]] = {
    "data.verify": ('leave it out: data is checked when it is read ("bytescale data audit" checks a run)', None),
    "log.save_plans": ("leave it out: the plan of every step is written to the run folder", True),
    "log.track_every": ("leave it out: trackers are given every step", 1),
    "log.wandb_entity": (_ENVIRONMENT.format("WANDB_ENTITY"), ""),
    "log.wandb_group": (_ENVIRONMENT.format("WANDB_RUN_GROUP"), ""),
    "log.wandb_name": (_ENVIRONMENT.format("WANDB_NAME"), ""),
    "log.wandb_project": (_ENVIRONMENT.format("WANDB_PROJECT"), None),
    "log.wandb_tags": (_ENVIRONMENT.format("WANDB_TAGS"), []),
    "memory.head_groups": ("leave it out: the memory model chooses the groups of heads", None),
    "optimizer.decay_share": ("leave it out: with wsd the rate falls over the last 0.2 of the steps", 0.2),
    "planner.balance": ('leave it out: planner.name = "adaptive" balances the ranks', None),
    "planner.verify": ("leave it out: every plan is verified before it runs", None),
}
"""What to do now, and the value that asks for what happens anyway, with which files are read; None: there is none."""


def is_ignored(name: str, value: object) -> bool:
    """Whether ``name`` is gone and ``value`` asks for what happens anyway."""
    return value is not None and name in REMOVED and REMOVED[name][1] == value


def refuse_removed(name: str, where: str) -> None:
    """Raise ``ConfigError`` if the setting ``name`` is gone."""
    if name in REMOVED:
        raise ConfigError(f"{where} is a setting that is gone", so="it would have no effect", fix=REMOVED[name][0])
