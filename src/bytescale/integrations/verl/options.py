"""What verl can be asked for and the engine bytescale does not do: refused by name."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor
from verl.utils import tensordict_utils as tu

from bytescale.common.errors import ConfigError
from bytescale.integrations.whole_batch import COMPUTED, IMAGES

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32, "float64": torch.float64, "bf16": torch.bfloat16}
UNKNOWN = ("distillation_use_topk", "distillation_only", "calculate_sum_pi_squared", "enable_routing_replay")
ABSENT = object()
ROUTES = "routed_experts"
"""The field of a batch with the experts that an engine for rollouts has chosen."""


def require_known(model: Any, engine: Any, optimizer: Any, checkpoint: Any) -> None:
    """Raise ``ConfigError`` for options of verl that this engine does not have. verl sets some after it made them."""
    at = {"model": model, "engine": engine, "optim": optimizer, "checkpoint": checkpoint}
    allowed: dict[str, tuple[Any, ...]] = {
        "model.use_liger": (False,),
        "model.lora_adapter_path": (None,),
        "model.trust_remote_code": (False,),
        "model.enable_activation_offload": (False,),
        "model.tiled_mlp.enabled": (False,),
        "model.mtp.enable": (False,),
        "model.local_hf_config_path": (None, getattr(model, "local_path", None)),
        "engine.use_dynamic_bsz": (True,),
        "engine.full_determinism": (False,),
        "engine.router_replay.mode": ("disabled", "R2", "R3"),
        "engine.dtype": tuple(DTYPES),
        "optim.optimizer": ("AdamW", "adamw"),
        "optim.optimizer_impl": ("torch.optim",),
        "optim.override_optimizer_config": (None, {}),
        "optim.lr_scheduler_type": ("constant", "cosine"),
        "checkpoint.async_save": (False,),
        "checkpoint.save_lora_only": (False,),
    }
    for name, values in allowed.items():
        given: Any = at
        for part in name.split("."):
            given = given.get(part, ABSENT) if isinstance(given, Mapping) else getattr(given, part, ABSENT)
        if given is not ABSENT and given not in values:
            raise refusal(f"{name} = {given!r}", f"leave it out, or set it to {' or '.join(map(repr, values))}")
    for name in ("save_contents", "load_contents"):
        if left_out := {"model", "optimizer", "extra"} - {*getattr(checkpoint, name, ("model", "optimizer", "extra"))}:
            raise refusal(f"checkpoint.{name} is without {' and '.join(sorted(left_out))}", "name all of them")
    lora, routes = getattr(model, "lora_rank", 0), engine.router_replay.mode
    if (lora and engine.tp * engine.pp > 1) or (routes != "disabled" and engine.pp > 1):
        what = f"model.lora_rank = {lora}" if lora else f"engine.router_replay.mode = {routes!r}"
        raise refusal(f"{what} with tp = {engine.tp}, pp = {engine.pp}", f"leave {what} out, or tp and pp at 1")
    if not engine.max_token_len_per_gpu:
        raise refusal(
            f"engine.max_token_len_per_gpu = {engine.max_token_len_per_gpu}",
            "set how many tokens a micro-batch of a rank may hold; a longer sequence is shared by several ranks",
        )


def known_routes(routes: Tensor) -> Tensor:
    """``[S, layers, K]`` with -1 for the last tokens, of which the rollout says nothing: verl leaves zeros there."""
    tokens = torch.arange(len(routes), device=routes.device)
    some = (routes.flatten(1) != 0).any(1)
    last = torch.where(some, tokens, -1).max()
    return routes.long().masked_fill((tokens > last)[:, None, None], -1)


def require_computed(data: TensorDict) -> list[dict[str, Tensor]]:
    """Raise ``ConfigError`` for what a batch asks for and this engine does not compute.

    Returns what a processor has made of each sequence's images, all of them in one; empty: there are none.
    """
    for name in UNKNOWN:
        if tu.get_non_tensor_data(data=data, key=name, default=False):
            raise refusal(f"the batch asks for {name}", "leave the option out")
    given = [dict(own or {}) for own in tu.get(data, "multi_modal_inputs", None) or ()]
    images = [{k: own[k] for k in own if own[k] is not None and k not in COMPUTED} for own in given]
    if unknown := sorted({*itertools.chain(*images)} - {*IMAGES}):  # videos, for example
        raise refusal(f"multi_modal_inputs of the batch have {', '.join(unknown)}", "train on texts and images")
    if not data["input_ids"].is_nested:
        raise refusal("input_ids of the batch are padded", "give nested ones (pad_mode: no_padding)")
    return images


def refusal(what: str, fix: str) -> ConfigError:
    return ConfigError(what, so="the engine bytescale would not do as verl's engines do", fix=fix)
