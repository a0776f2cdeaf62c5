"""What clients of Tinker ask, checked: from JSON to arguments of ``Trainers``, or a refusal that names its cause."""

from __future__ import annotations

import re
import secrets
from typing import Any

import numpy as np

from bytescale.common.errors import DataError

Body = dict[str, Any]
LOSSES = {"cross_entropy": {"target_tokens": "labels"}}
LOSSES |= dict.fromkeys(
    ("importance_sampling", "ppo"), LOSSES["cross_entropy"] | {"logprobs": "sampled", "advantages": "advantages"}
)
"""By loss, the fields of a document that inputs become; ``weights`` may be there besides."""
_ADAM = {"learning_rate": 1e-4, "beta1": 0.9, "beta2": 0.95, "eps": 1e-12, "weight_decay": 0.0, "grad_clip_norm": 0.0}
_NOT_HERE = (
    "topk_prompt_logprobs", "topk_sample_logprobs", "target_prompt_logprobs", "prompt_alt_tokens_k",
    "prompt_logprobs_last_n", "record_stability_info", "weights_access_token", "overwrite",
    "optimizer_params", "model_role",
)  # fmt: skip
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.:-]{0,127}")


class RequestRefused(DataError):
    """The answer to a request that is not served, with the status of HTTP."""

    def __init__(self, what: str, *, so: str = "nothing was done", fix: str, status: int = 400) -> None:
        super().__init__(what, so=so, fix=fix)
        self.status = status


def refuse_options(body: Body) -> None:
    """Raise for what this server does not do."""
    for key in _NOT_HERE:
        if body.get(key):
            raise RequestRefused(f"{key} was sent, which this server does not know", fix="leave it out")


def name_of(value: Any) -> str:
    """A name of a folder, which cannot lead out of the one that it is in."""
    if isinstance(value, str) and _NAME.fullmatch(value):
        return value
    raise RequestRefused(f"the name {str(value)[:150]!r} cannot be used", fix="use letters, digits, and . _ : -")


def path_of(value: Any, kind: str) -> tuple[str, str]:
    """Model and name of ``tinker://MODEL/<kind>/NAME``."""
    parts = str(value).split("/")
    if len(parts) != 5 or parts[:2] != ["tinker:", ""] or parts[3] != kind:
        raise RequestRefused(f"the path is {str(value)[:150]!r}", fix=f"use tinker://MODEL/{kind}/NAME")
    return name_of(parts[2]), name_of(parts[4])


def number_of(given: Body, key: str, default: Any, least: float, most: float) -> Any:
    """A number within limits, whole where the default is."""
    value = default if given.get(key) is None else given[key]
    kinds = int if isinstance(default, int) else (int, float)
    if not isinstance(value, kinds) or isinstance(value, bool) or not least <= value <= most:
        raise RequestRefused(f"the number {key} is {str(value)[:50]}", fix=f"use a number from {least:g} to {most:g}")
    return value


def section_of(given: Any, key: str) -> Body:
    if isinstance(given, dict) and isinstance(given.get(key), dict):
        return given[key]
    raise RequestRefused(f"the request has no object {key!r}", fix="send what a client of Tinker sends")


def numbers_of(value: Any, what: str, kinds: str) -> list[Any]:
    """A list of finite numbers, of NumPy's ``kinds``."""
    try:
        row = np.array(value if isinstance(value, list) and value else None)
    except ValueError:
        row = np.array(None)
    if row.ndim != 1 or row.dtype.kind not in kinds or not np.isfinite(row).all():
        raise RequestRefused(f"in {what} there is no list of such numbers as are needed", fix="send one for each token")
    return row.tolist()


def lora_of(body: Body) -> Body | None:
    """Adapters of a new model; None: rank 0, all weights are trained."""
    if (kind := (body.get("optimizer_config") or {}).get("type", "adamw")) != "adamw":
        raise RequestRefused(f"the optimizer is {str(kind)[:50]!r}", fix="use adamw")
    given = section_of(body, "lora_config")
    parts = {key: given.get(key) is not False for key in ("train_attn", "train_mlp", "train_unembed")}
    seed = number_of(given, "seed", secrets.randbits(31), 0, 2**63 - 1)
    rank = number_of(given, "rank", 32, 0, 4096)
    return {"rank": rank, "seed": seed, **parts} if rank else None


def adam_of(body: Body) -> Body:
    given = section_of(body, "adam_params")
    return {
        key: float(number_of(given, key, own, 0.0, 0.9999999 if "beta" in key else 1e9)) for key, own in _ADAM.items()
    }


def tokens_of(given: Body) -> list[int]:
    """Of a ModelInput. Raises for pictures and other chunks, by name."""
    found: list[int] = []
    for chunk in given.get("chunks") or ():
        if (kind := chunk.get("type", "encoded_text")) != "encoded_text":
            raise RequestRefused(f"the input has a chunk of {str(kind)[:50]}", fix="send tokens alone")
        found += numbers_of(chunk.get("tokens"), "tokens", "iu")
    return found


def batch_of(given: Body) -> Body:
    """Data, loss and its settings of a ForwardBackwardInput."""
    loss, config = str(given.get("loss_fn")), given.get("loss_fn_config") or {}
    if loss not in LOSSES:
        raise RequestRefused(f"loss_fn is {loss[:50]!r}", fix=f"use {', '.join(LOSSES)} or forward_backward_custom")
    if unknown := config.keys() - ({"clip_low_threshold", "clip_high_threshold"} if loss == "ppo" else ()):
        raise RequestRefused(f"loss_fn_config of {loss} has {sorted(unknown)}", fix="leave it out")
    data = [_document(datum, LOSSES[loss]) for datum in given.get("data") or ()]
    if not data:
        raise RequestRefused("there are no data", fix="send one datum or more")
    return {"data": data, "loss_fn": loss, "config": {key: number_of(config, key, 1.0, 0.0, 1e9) for key in config}}


def _document(datum: Body, names: dict[str, str]) -> Body:
    """Fields of a document, each with a number for every token."""
    inputs = section_of(datum, "loss_fn_inputs")
    tokens = tokens_of(section_of(datum, "model_input"))
    document = {"tokens": tokens, "weights": [1.0] * len(tokens)}
    for key, field in (names | ({"weights": "weights"} if "weights" in inputs else {})).items():
        tensor = section_of(inputs, key)
        own = numbers_of(tensor.get("data"), f"{key} (sparse ones are not known)", "iu" if field == "labels" else "iuf")
        if len(own) != len(tokens) or (tensor.get("shape") or [len(own)]) != [len(tokens)]:
            raise RequestRefused(f"{key} has {len(own)} numbers for {len(tokens)} tokens", fix="send one for each")
        document[field] = own if field == "labels" else [float(value) for value in own]
    return document


def sampling_of(body: Body, longest: int, *, has_tokenizer: bool) -> Body:
    """Arguments of one request for samples; ``longest``: tokens of prompt and sample that fit."""
    given, prompt = section_of(body, "sampling_params"), tokens_of(section_of(body, "prompt"))
    room = longest - len(prompt)
    if not prompt or room < 1:
        raise RequestRefused(f"the prompt has {len(prompt)} tokens", fix=f"use 1 to {longest - 1}")
    return {
        "prompt": prompt,
        "stop": _stop_of(given.get("stop"), has_tokenizer),
        "num_samples": number_of(body, "num_samples", 1, 1, 1024),
        "max_tokens": number_of(given, "max_tokens", room, 1, room),
        "temperature": float(number_of(given, "temperature", 1.0, 0.0, 100.0)),
        "top_k": max(0, number_of(given, "top_k", -1, -1, 2**31)),
        "top_p": float(number_of(given, "top_p", 1.0, 1e-9, 1.0)),
        "seed": number_of(given, "seed", secrets.randbits(31), 0, 2**63 - 1),
        "prompt_logprobs": bool(body.get("prompt_logprobs")),
    }


def _stop_of(stop: Any, has_tokenizer: bool) -> list[Any] | None:
    """What ends a sample: texts, or tokens; None: the model's own ends."""
    texts = [stop] if isinstance(stop, str) else stop
    if not texts or not isinstance(texts, list) or not all(isinstance(own, str) and own for own in texts):
        return stop if stop is None or stop == [] else numbers_of(stop, "stop", "iu")
    if has_tokenizer:
        return texts
    raise RequestRefused("stop has texts, and the model's folder no tokenizer.json", fix="send tokens")
