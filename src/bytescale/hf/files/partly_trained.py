"""Models of which only a part is trained: low-rank adapters (LoRA, by peft), or what is left when others are frozen."""

from __future__ import annotations

import warnings
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn

from bytescale.common.errors import ConfigError

_EMPTY = "there is nothing to train"


def train_a_part(model: nn.Module, trained: dict[str, Any], *, seed: int) -> nn.Module:
    """Put adapters into ``model``, in place, and freeze what is not trained.

    Args:
        model: with all parameters trainable.
        trained: ``AttachedArchitecture.trained``.
        seed: of the adapters' first weights; they are the same on all ranks, and change nothing before the first step.

    Returns peft's wrapper if there are adapters, which saves and merges them, else ``model``.

    Raises ``ConfigError`` for modules and parameters that do not exist, and if nothing is left to train.
    """
    wrapped = _with_adapters(model, trained["lora"], seed) if "lora" in trained else model
    names = dict(model.named_parameters())
    for pattern in trained.get("freeze", ()):
        frozen = [name for name in names if fnmatchcase(name, pattern)]
        if not frozen:
            raise ConfigError(
                f"model.freeze has {pattern!r}, which no parameter of the {type(model).__name__} matches",
                so="nothing would be frozen by it",
                fix=f"use patterns of names such as {next(iter(names))}; * stands for anything",
            )
        for name in frozen:
            names[name].requires_grad = False
    if not any(parameter.requires_grad for parameter in names.values()):
        raise ConfigError("model.freeze matches every parameter", so=_EMPTY, fix="freeze less")
    return wrapped


def _with_adapters(model: nn.Module, lora: dict[str, Any], seed: int) -> nn.Module:
    try:
        from peft import LoraConfig, get_peft_model
    except ImportError as error:
        raise ConfigError("model.lora_rank is set, but peft is not installed", fix="pip install peft") from error
    config = LoraConfig(
        r=lora["rank"],
        lora_alpha=lora["alpha"],
        target_modules=lora["targets"] or "all-linear",
        lora_dropout=0.0,  # dropout depends on how sequences lie on ranks
        task_type="CAUSAL_LM",
    )
    try:
        with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # peft 0.21 reads what transformers 5 has renamed
            torch.manual_seed(seed)
            wrapped: nn.Module = get_peft_model(model, config, autocast_adapter_dtype=False)
            return wrapped
    except ValueError as error:
        linear = sorted(
            {name.rpartition(".")[2] for name, part in model.named_modules() if isinstance(part, nn.Linear)}
        )
        raise ConfigError(
            f"peft cannot put adapters into {', '.join(lora['targets']) or 'the linear modules'} of the "
            f"{type(model).__name__} ({str(error).partition('.')[0]})",
            so=_EMPTY,
            fix=f"set model.lora_targets to some of {', '.join(linear) or 'its linear modules, but it has none'}",
        ) from error
