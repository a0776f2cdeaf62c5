"""What every rank of ``bytescale serve`` does for clients of Tinker: models that train, and copies that sample.

A client's model is the folder's model with adapters and an ``HDP`` of its own; all share the weights that are not
trained. With rank 0 of LoRA it is a copy, all of whose weights are trained. Losses are sums over tokens, as Tinker's.

Samples are prefilled together by plan, ranks generate them in turn, and a plan scores what came. So their
log-probabilities are those of training, and not those of decoding, whatever temperature and cuts drew them.
"""

from __future__ import annotations

import bisect
import copy
import functools
import json
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoTokenizer, GenerationConfig

from bytescale.common.errors import CheckpointError, ConfigError, DataError
from bytescale.config.hugging_face import read_hf_config
from bytescale.hf.files.folder import read_model, ready, train_a_part
from bytescale.hf.loop.hdp import HDP
from bytescale.hf.loop.micro_batch import Micro
from bytescale.hf.model.head import causal_model
from bytescale.runtime.group import RankGroup
from bytescale.runtime.plain_data import all_gather_json, broadcast_json

ALPHA = 32.0
"""Tinker's: what adapters give is multiplied by this over their rank."""
MOST_SAMPLERS = 2


@dataclass
class Tenant:
    """A client's model and its optimizer. ``lora``: rank, seed and which parts have adapters; None: none have."""

    hdp: HDP
    module: Any
    optimizer: torch.optim.Optimizer
    lora: dict[str, Any] | None


class Trainers:
    """All models of the server. Every rank makes one and calls the same methods with the same arguments.

    Methods return what JSON can hold, and raise a ``BytescaleError`` on all ranks alike. ``out``: the folder of
    checkpoints, which all ranks see; ``options``: of ``HDP``.
    """

    def __init__(self, folder: Path, out: Path, group: RankGroup, dtype: torch.dtype, **options: Any) -> None:
        self.out, self.group, self.dtype, self.options = out, group, dtype, options
        self.tokenizer = functools.cache(lambda: AutoTokenizer.from_pretrained(folder, trust_remote_code=False))
        self.base = self._read(folder)
        self.tenants: dict[str, Tenant] = {}
        self.samplers: dict[str, tuple[HDP, Any]] = {}

    def create(self, model_id: str, lora: dict[str, Any] | None) -> dict[str, Any]:
        if lora is None:
            module = ready(copy.deepcopy(self.base), self.dtype)
        else:
            adapters = {"rank": lora["rank"], "alpha": ALPHA, "targets": _targets(self.base, lora)}
            module = train_a_part(_sharing(self.base), {"lora": adapters}, seed=lora["seed"])
        hdp = HDP(module, **self.options)
        self.tenants[model_id] = Tenant(hdp, module, hdp.adamw(lr=0.0), lora)
        return {"model_id": model_id, "type": "create_model", "lora": lora}

    def unload(self, model_id: str) -> dict[str, Any]:
        self._tenant(model_id).hdp.detach()
        del self.tenants[model_id]
        return {"model_id": model_id, "type": "unload_model"}

    def run(
        self, model_id: str, data: list[dict[str, Any]], loss_fn: str, config: dict[str, float], backward: bool
    ) -> dict[str, Any]:
        """A batch, whose gradients are added to those that are there. ``data``: fields of documents, as lists."""
        tenant, total = self._tenant(model_id), 0.0
        dtypes = {"tokens": torch.int64, "labels": torch.int64}
        precise = torch.promote_types(self.dtype, torch.float32)
        batch = [{key: torch.tensor(own, dtype=dtypes.get(key, precise)) for key, own in d.items()} for d in data]
        with nullcontext() if backward else torch.no_grad():
            for micro in tenant.hdp.plan(batch):
                logprobs = micro.logprobs(tenant.module)
                loss = -(micro.weights * objective(loss_fn, micro, logprobs, config))[micro.weights != 0].sum()
                if backward:
                    loss.backward()
                total += float(loss.detach())
                tenant.hdp.collect(micro, logprobs.detach())
        rows = [row.tolist() for row in tenant.hdp.collected()]
        outputs = [{"logprobs": {"data": row, "dtype": "float32", "shape": [len(row)]}} for row in rows]
        metrics = {"loss:sum": self.group.sum_of([total])[0]}
        return {"loss_fn_output_type": "ArrayRecord", "loss_fn_outputs": outputs, "metrics": metrics}

    def update(self, model_id: str, adam: dict[str, float]) -> dict[str, Any]:
        """An update by AdamW; ``adam`` has Tinker's names."""
        tenant = self._tenant(model_id)
        betas = adam["beta1"], adam["beta2"]
        for group in tenant.optimizer.param_groups:
            group.update(lr=adam["learning_rate"], betas=betas, eps=adam["eps"], weight_decay=adam["weight_decay"])
        update = tenant.hdp.step(max_grad_norm=adam["grad_clip_norm"])
        return {"metrics": {"grad_norm": update.grad_norm}}

    def save(self, model_id: str, name: str) -> dict[str, Any]:
        tenant, folder = self._tenant(model_id), self.out / model_id / "weights" / name
        self.told(lambda: folder.mkdir(parents=True))
        tenant.hdp.save(folder / "state")
        self.told(lambda: _write_about(folder, tenant))
        return {"path": f"tinker://{model_id}/weights/{name}", "type": "save_weights"}

    def load(self, model_id: str, source: str, name: str, optimizer: bool, create: bool) -> dict[str, Any]:
        """Go on from a checkpoint; without ``optimizer``, its states begin anew. ``create``: make the model first."""
        folder = self.out / source / "weights" / name
        lora = self.told(lambda: saved_lora(folder))
        if create:
            self.create(model_id, lora)
        hdp = self._tenant(model_id).hdp
        hdp.load(folder / "state")
        if not optimizer and hdp.num_updates:
            state = hdp.state()
            for states in state["tensors"].values():
                states.update({key: torch.zeros_like(own) for key, own in states.items() if key != "master"})
            hdp.load_state(state | {"numbers": dict.fromkeys(state["numbers"], 0.0)})
        return {"path": f"tinker://{source}/weights/{name}", "model_id": model_id, "type": "load_weights", "lora": lora}

    def snapshot(self, model_id: str, name: str, sampler: str | None) -> dict[str, Any]:
        """Write weights for sampling: adapters as peft has them, or the whole model as transformers has it."""
        tenant, folder = self._tenant(model_id), self.out / model_id / "sampler_weights" / name
        options = {} if tenant.lora is None else {"save_embedding_layers": False}

        def write() -> None:
            folder.mkdir(parents=True)
            tenant.module.save_pretrained(folder, **options)
            _write_about(folder, tenant)

        self.told(write)
        made = {"sampling_session_id": sampler} if sampler else {"path": f"tinker://{model_id}/sampler_weights/{name}"}
        return made | {"type": "save_weights_for_sampler"}

    @torch.no_grad()
    def sample(self, path: str, requests: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Samples from the weights of a path of Tinker's; an empty one: those of the folder."""
        words = len(self.base.get_input_embeddings().weight)
        if wrong := [own for request in requests for own in request["prompt"] if not 0 <= own < words]:
            raise DataError(f"a prompt has the token {wrong[0]}", fix=f"use those from 0 to {words - 1}")
        hdp, module = self._sampler(path)
        end = self.base.generation_config.eos_token_id
        own_ends = end if isinstance(end, list) else [] if end is None else [end]
        given = _inputs(hdp, [own["prompt"] for own in requests])
        own = [
            [number, _drawn(module, requests[number], inputs, own_ends, self.tokenizer)]
            for number, inputs in given.items()
        ]
        drawn = dict(pair for told in all_gather_json(own, self.group.group, self.group.device) for pair in told)
        pairs = [(number, row, reason) for number in range(len(requests)) for row, reason in drawn[number]]
        documents = [{"tokens": torch.tensor(requests[number]["prompt"] + row)} for number, row, _ in pairs]
        for micro in hdp.plan(documents, share_prefixes=True):
            hdp.collect(micro, micro.logprobs(module))
        results: list[dict[str, Any]] = [{"type": "sample", "sequences": [], "prompt_logprobs": None} for _ in requests]
        for (number, row, reason), scores in zip(pairs, hdp.collected(), strict=True):
            size, request = len(requests[number]["prompt"]), requests[number]
            logprobs = scores[size - 1 : -1].tolist()  # a row's label is the next token
            results[number]["sequences"].append({"tokens": row, "logprobs": logprobs, "stop_reason": reason})
            if request["prompt_logprobs"]:
                results[number]["prompt_logprobs"] = [None, *scores[: size - 1].tolist()]
        return results

    def _sampler(self, path: str) -> tuple[HDP, Any]:
        if path not in self.samplers:
            if not path:
                module = _sharing(self.base)
            else:
                source, _, name = path.removeprefix("tinker://").split("/")
                folder = self.out / source / "sampler_weights" / name
                if self.told(lambda: saved_lora(folder)) is None:
                    module = self._read(folder)
                else:
                    from peft import PeftModel

                    module = PeftModel.from_pretrained(_sharing(self.base), folder, autocast_adapter_dtype=False)
            causal_model(module).generation_config = GenerationConfig()  # it would say what requests leave open
            self.samplers[path] = HDP(module, forward_only=True, **self.options), module
            for old in list(self.samplers)[:-MOST_SAMPLERS]:
                self.samplers.pop(old)[0].detach()
        return self.samplers[path]

    def _read(self, folder: Path) -> Any:
        model = read_model(folder, read_hf_config(folder), self.dtype).eval().to(self.group.device)
        return model.requires_grad_(False)

    def _tenant(self, model_id: str) -> Tenant:
        if model_id not in self.tenants:
            raise ConfigError(f"the model {model_id} is not there", so="it was unloaded or not made", fix="make one")
        return self.tenants[model_id]

    def told(self, work: Callable[[], Any]) -> Any:
        """What rank 0 finds. Raises ``CheckpointError`` on all ranks for what the system refuses it."""
        told: Any = None
        if self.group.rank == 0:
            try:
                told = [work(), None]
            except (OSError, ValueError) as error:
                told = [None, getattr(error, "strerror", None) or str(error)]
        found, refused = broadcast_json(told, self.group.group, device=self.group.device)
        if refused is not None:
            raise CheckpointError(
                f"the server cannot read or write what was named ({refused})", fix="use another name, or make room"
            )
        return found


def objective(name: str, micro: Micro, logprobs: Tensor, config: dict[str, float]) -> Tensor:
    """``[T]`` what is maximised: Tinker's losses without their sign. ``logprobs [T]`` of the targets."""
    if name == "cross_entropy":
        return logprobs
    ratio = (logprobs - micro.sampled).exp()
    if name == "importance_sampling":
        return ratio * micro.advantages
    clipped = ratio.clamp(config.get("clip_low_threshold", 0.8), config.get("clip_high_threshold", 1.2))
    return torch.minimum(ratio * micro.advantages, clipped * micro.advantages)  # ppo


def saved_lora(folder: Path) -> dict[str, Any] | None:
    """Of a checkpoint or snapshot. Raises ``OSError`` where there is none, and ``ValueError``."""
    return json.loads((folder / "tinker.json").read_text(encoding="utf-8"))


def _write_about(folder: Path, tenant: Tenant) -> None:
    """Written last, so that what has it is whole."""
    (folder / "tinker.json").write_text(json.dumps(tenant.lora), encoding="utf-8")


def _sharing(base: nn.Module) -> Any:
    """A copy of the model on the same weights."""
    return copy.deepcopy(base, {id(own): own for own in (*base.parameters(), *base.buffers())})


def _targets(base: Any, lora: dict[str, Any]) -> list[str]:
    """Full names of the linear modules that get adapters. Raises ``ConfigError`` where there are none, or experts."""
    head, targets = base.get_output_embeddings(), []
    for name, module in base.named_modules():
        if isinstance(module, nn.Linear):
            mixes = any(word in name for word in ("attn", "attention", "mixer", "mamba", "conv"))
            kind = "train_unembed" if module is head else "train_attn" if mixes else "train_mlp"
            targets += [name] if lora[kind] else []
    stacked = any(own.dim() == 3 and "experts" in name for name, own in base.named_parameters())
    if not targets or (stacked and lora["train_mlp"]):
        raise ConfigError(
            "the parts that are to be trained are no linear modules", so="peft has no adapters for them here",
            fix="train_mlp=False where experts are stacked, or rank=0, which trains all weights",
        )  # fmt: skip
    return targets


def _inputs(hdp: HDP, prompts: list[list[int]]) -> dict[int, dict[str, Any]]:
    """By number, what this rank gives to ``generate``: prompts, with caches of all but their last tokens."""
    group, found = hdp.group, {}
    longer = [number for number, prompt in enumerate(prompts) if len(prompt) > 1]
    prefill = hdp.prefill([prompts[number][:-1] for number in longer]) if longer else None
    for number, prompt in enumerate(prompts):
        rank = number % group.size
        given: dict[str, Any] | None = {"input_ids": torch.tensor([prompt], device=group.device)}
        if prefill is not None and number in longer:
            given = prefill.inputs(longer.index(number), rank)  # they end with the likeliest next token
            prefill.free(longer.index(number))
        if group.rank == rank and given is not None:
            given["input_ids"][0, -1] = prompt[-1]
            found[number] = given
    return found


def _drawn(
    module: Any, request: dict[str, Any], given: dict[str, Any], own_ends: list[int], tokenizer: Callable[[], Any]
) -> list[tuple[list[int], str]]:
    """Tokens of each sample, with those that end it, and why it ends. ``own_ends``: the model's ends of a text."""
    count, size = request["num_samples"], given["input_ids"].shape[1]
    for name, value in given.items():
        if isinstance(value, Tensor):
            given[name] = value.repeat(count, 1)
        elif count > 1:
            value.batch_repeat_interleave(count)
    options = {key: request[key] for key in ("temperature", "top_k", "top_p")} if request["temperature"] else {}
    stop = own_ends if request["stop"] is None else request["stop"]
    texts = [own for own in stop if isinstance(own, str)]
    ends, words = own_ends if texts else stop, tokenizer() if texts else None

    def ended(row: list[int], last: int) -> bool:
        part = row[: last + 1]
        return any(own in part for own in ends) or (words is not None and any(t in words.decode(part) for t in texts))

    config = GenerationConfig(
        max_new_tokens=request["max_tokens"], do_sample=bool(options), eos_token_id=ends or None, pad_token_id=0,
        **options,
    )  # fmt: skip
    device = given["input_ids"].device

    def each_ended(ids: Tensor, *_: Any, **__: Any) -> Tensor:
        return torch.tensor([ended(row, len(row)) for row in ids[:, size:].tolist()], device=device)

    criteria = [each_ended] if texts else None
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(request["seed"])
        rows = causal_model(module).generate(**given, generation_config=config, stopping_criteria=criteria)[:, size:]
    found = []
    for row in rows.tolist():  # others of the batch went on
        last = bisect.bisect_left(range(len(row)), True, key=functools.partial(ended, row))
        found.append((row[: last + 1], "stop" if last < len(row) else "length"))
    return found
