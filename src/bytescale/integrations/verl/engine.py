"""bytescale as an engine of verl: a model of transformers under ``HDP`` behind verl's ``BaseEngine``.

A config names ``bytescale.integrations.verl.BytescaleEngineConfig``; importing this module registers the engine.
All ranks are data-parallel ranks. verl gives each its part of a mini-batch, and computes losses from the results that
``WholeBatch`` hands it. So losses and gradients are those of verl's FSDP engine on as many ranks.
"""

from __future__ import annotations

import contextlib
import itertools
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from tensordict import NonTensorData, TensorDict
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, AutoModelForTokenClassification
from verl.utils import tensordict_utils as tu
from verl.utils.device import get_device_id, get_device_name
from verl.workers.config import EngineConfig
from verl.workers.engine.base import BaseEngine, BaseEngineCtx, EngineRegistry
from verl.workers.engine.fsdp.transformer_impl import FSDPEngine
from verl.workers.engine.spec import ShardSpec
from verl.workers.engine.utils import _hf_entry_identity, detach_tree, hf_delta_export

from bytescale.attention.copies import to_device
from bytescale.common.errors import ConfigError
from bytescale.common.labels import IGNORE_INDEX
from bytescale.hf.loop.coupled import Values
from bytescale.hf.loop.hdp import HDP
from bytescale.integrations.verl.options import DTYPES, ROUTES, known_routes, refusal, require_computed, require_known
from bytescale.integrations.whole_batch import (
    ENTROPY,
    LOG_PROBS,
    Fields,
    Loss,
    WholeBatch,
    resume_schedule,
    value_columns,
    word_columns,
)

_DEVICES = ["cpu", "cuda"]
_SAFE: dict[str, Any] = {"trust_remote_code": False, "use_safetensors": True}
"""Of a folder, neither code nor pickles are read."""


@dataclass
class BytescaleEngineConfig(EngineConfig):
    """verl's ``EngineConfig`` with ``strategy`` "bytescale".

    ``max_token_len_per_gpu`` is the capacity of training, ``infer_max_token_len_per_gpu`` that of passes without
    gradients; None: the same.
    """

    strategy: str = "bytescale"
    checkpointing: str = "none"
    """``none``, ``attention`` or ``full`` (``memory.checkpointing``), in place of the model's own."""
    host_gib: float = 0.0
    """Host memory of a rank for activations."""
    tp: int = 1
    """How many consecutive ranks share the model's matrices. For verl each of them has sequences of its own."""
    pp: int = 1
    """Stages of pipelines. For verl the ranks of each stage have sequences of their own."""
    one_pass: bool = True
    """Whether losses are called on micro-batches of whole sequences, as verl's engines do, and not after a forward."""


class _Mode(BaseEngineCtx):
    """``train_mode`` and ``eval_mode``."""

    def __enter__(self) -> None:
        super().__enter__()
        self.engine.module.train(self.mode == "train")

    def __exit__(self, *error: Any) -> None:
        if self.mode == "train" and (self.zero_grad_on_exit or error[0] is not None):
            self.engine.optimizer_zero_grad()
        super().__exit__(*error)


@EngineRegistry.register(model_type="language_model", backend="bytescale", device=_DEVICES)
class BytescaleEngine(BaseEngine):
    """Actor, reference and supervised fine-tuning."""

    auto_model: Any = AutoModelForCausalLM
    of_config: ClassVar[dict[str, Any]] = {}

    def __init__(
        self, model_config: Any, engine_config: Any, optimizer_config: Any, checkpoint_config: Any, **more: Any
    ) -> None:
        """Raises ``ConfigError`` for options that this engine does not have."""
        super().__init__()
        self.model_config, self.engine_config, self.optimizer_config = model_config, engine_config, optimizer_config
        self.mode: str | None = None
        self._one_pass = engine_config.one_pass
        self._saved: list[str] = []
        require_known(model_config, engine_config, optimizer_config, checkpoint_config)

    @property
    def is_param_offload_enabled(self) -> bool:
        return bool(self.engine_config.param_offload)

    @property
    def is_optimizer_offload_enabled(self) -> bool:
        return bool(self.engine_config.optimizer_offload)

    def initialize(self) -> None:
        """Load the model, attach ``HDP``, and make the optimizer and its schedule."""
        config = self.engine_config
        self.module: Any = self._with_adapters(self._load(DTYPES[config.dtype])).to(get_device_name())
        self.hdp = HDP(
            self.module,
            capacity_tokens=config.max_token_len_per_gpu,
            forward_only=config.forward_only,
            checkpointing=config.checkpointing,
            host_gib=config.host_gib,
            tp=config.tp,
            pp=config.pp,
        )
        # A loss that asks other ranks for something gets another gradient from this rank's micro-batches alone.
        self._alone = dist.new_group([dist.get_rank()], use_local_synchronization=True)
        self.rank, self.lr_scheduler = dist.get_rank(), None
        if not config.forward_only:
            wanted = self.optimizer_config
            options = {"betas": tuple(wanted.betas), "weight_decay": wanted.weight_decay}
            self.optimizer = self.hdp.adamw(wanted.lr, **options)  # verl's Tinker worker sets what it has at each step
            self.lr_scheduler = FSDPEngine._build_lr_scheduler(self, self.optimizer)
        self.to("cpu", model=self.is_param_offload_enabled, optimizer=self.is_optimizer_offload_enabled, grad=False)

    def _load(self, dtype: torch.dtype) -> torch.nn.Module:
        path, given = self.model_config.local_path, dict(self.model_config.override_config)
        config = AutoConfig.from_pretrained(path, trust_remote_code=False, **given.get("model_config", given))
        for name, value in self.of_config.items():
            setattr(config, name, value)
        torch.manual_seed(self.engine_config.seed)  # a new head is the same on every rank
        sees = self.auto_model is AutoModelForCausalLM and type(config) in AutoModelForImageTextToText._model_mapping
        auto_model = AutoModelForImageTextToText if sees else self.auto_model
        return auto_model.from_pretrained(path, dtype=dtype, config=config, **_SAFE)

    def _with_adapters(self, model: torch.nn.Module) -> torch.nn.Module:
        rank = self.model_config.lora_rank
        if not rank:
            return model
        from peft import LoraConfig, get_peft_model

        taken = ("lora_alpha", "target_modules", "target_parameters", "exclude_modules")
        lora = LoraConfig(r=rank, **{name: getattr(self.model_config, name) for name in taken})
        torch.manual_seed(self.engine_config.seed)  # every rank begins with the same adapters
        return get_peft_model(model, lora)

    def train_mode(self, **options: Any) -> Any:
        return _Mode(self, "train", **options)

    def eval_mode(self, **options: Any) -> Any:
        return _Mode(self, "eval", **options)

    def forward_backward_batch(
        self, data: TensorDict, loss_function: Callable[..., Any] | None, forward_only: bool = False
    ) -> dict[str, Any]:
        """verl's pass over this rank's part of a batch, planned with those of all ranks.

        Returns ``model_output`` (nested ``[sequences, tokens]``), ``loss`` and ``metrics``.
        """
        images = require_computed(data)
        group = self.get_data_parallel_group()
        num_tokens = data["loss_mask"].sum().to(get_device_id())
        dist.all_reduce(num_tokens, group=group)
        tu.assign_non_tensor(data, batch_num_tokens=num_tokens.item(), dp_size=self.get_data_parallel_size(), sp_size=1)
        data = data.to(get_device_id(), non_blocking=False)  # from memory that is not page-locked
        capacity = self.engine_config.infer_max_token_len_per_gpu if forward_only else None
        with torch.no_grad() if forward_only else contextlib.nullcontext():
            columns, num_trained = self._columns(data)
            records = forward_only and self._replay_mode == "R2" and ROUTES not in data.keys()  # noqa: SIM118
            batch = WholeBatch(self.hdp, _with_routes(columns) if records else columns, num_trained=num_trained)
            # Sequences that a loss looks at together may be in several micro-batches.
            apart = tu.get_non_tensor_data(data=data, key="force_group_size", default=1) == 1
            one_pass = apart and self._one_pass
            of_documents = self._loss(loss_function, data) if one_pass and loss_function is not None else None
            values, rest = batch.run(self._fields(data, images), loss=of_documents, capacity_tokens=capacity)
            output = self._model_output(values, data)
            if records:
                output[ROUTES] = _nested(rest.to(torch.int16).unflatten(1, (len(self.hdp.routers), -1)), data)
            loss, metrics = torch.ones((), device=values.device), dict[str, Any]()
            if loss_function is not None:
                loss, metrics = loss_function(model_output=output, data=data, dp_group=group)
            if not forward_only:
                loss.backward()
                ran_again = batch.finish(1.0 / self.get_data_parallel_size())  # as FSDP averages
                if ran_again and one_pass:
                    self._one_pass = False
                    _warn("the loss is not the sum of those of micro-batches, and takes two passes from now on")
        kept = forward_only or tu.get_non_tensor_data(data=data, key="return_model_output", default=False)
        return {
            "model_output": detach_tree(output) if kept else {},
            "loss": [loss.detach().item()],
            "metrics": {name: [value] for name, value in metrics.items()},
        }

    def _loss(self, loss_function: Callable[..., Any], data: TensorDict) -> Loss:
        """verl's loss of whole sequences of any ranks, as FSDP averages it."""
        nested = [name for name, value in data.items() if isinstance(value, Tensor) and value.is_nested]
        of_batch = {name: value for name, value in data.items() if isinstance(value, NonTensorData)}

        def together(name: str, rows: list[Tensor]) -> Tensor:
            if name not in nested:
                return torch.stack(rows)
            edges = to_device(torch.tensor([0, *itertools.accumulate(map(len, rows))]), rows[0].device)
            return torch.nested.nested_tensor_from_jagged(torch.cat(rows), edges)  # for which nobody waits

        def loss(documents: list[dict[str, Tensor]], values: list[Tensor]) -> Tensor:
            part = TensorDict({}, batch_size=[len(documents)], device=data.device)
            for name in documents[0].keys() & data.keys():
                part[name] = together(name, [own[name] for own in documents])
            tu.assign_non_tensor(part, **of_batch)
            output = self._model_output(torch.cat(values), part)
            try:
                total: Tensor = loss_function(model_output=output, data=part, dp_group=self._alone)[0]
            except KeyError as error:
                raise ConfigError(
                    f"the loss finds no {error} in a micro-batch",
                    so="in one pass, sequences of other ranks come with their tensors alone",
                    fix="set engine.one_pass to False if the batch has it",
                ) from error
            return total / self.get_data_parallel_size()

        return loss

    def _columns(self, data: TensorDict) -> tuple[Values, int]:
        count = 2 if tu.get_non_tensor_data(data=data, key="calculate_entropy", default=False) else 1
        columns = word_columns(self.module, None, count=count)

        def replayed(micro: Any) -> Tensor:
            micro.replay(ROUTES)
            return columns(micro)

        return (replayed if self._replays(data) else columns), count

    @property
    def _replay_mode(self) -> str:
        """ "R3": routers choose what the rollouts' did; "R2": what they did when the engine scored the rollouts."""
        return str(self.engine_config.router_replay.mode)

    def _replays(self, data: TensorDict) -> bool:
        return self._replay_mode != "disabled" and ROUTES in data.keys()  # noqa: SIM118  # no mapping

    def _fields(self, data: TensorDict, images: Sequence[dict[str, Tensor]]) -> Fields:
        """Tokens, labels, the temperature of each sequence, and all tensors of the batch."""
        tokens = list(data["input_ids"].unbind())
        labels = [torch.cat([own[1:], own.new_full((1,), IGNORE_INDEX)]) for own in tokens]
        given = data["temperature"] if "temperature" in data.keys() else 1.0  # noqa: SIM118  # no mapping
        each = torch.as_tensor(given, dtype=torch.float64).flatten().expand(len(tokens)).tolist()
        number = [torch.full((len(t),), own, dtype=torch.float64) for t, own in zip(tokens, each, strict=True)]
        # Of nested tensors with another ragged dimension, such as three places of a token, PyTorch mixes up the rows.
        rest: dict[str, list[Any]] = {
            name: list(value.unbind())
            for name, value in data.items()
            if isinstance(value, Tensor) and getattr(value, "_ragged_idx", 1) == 1
        }
        routes = rest.pop(ROUTES, [])
        if self._replays(data):
            rest[ROUTES] = [own.long() if self._replay_mode == "R2" else known_routes(own) for own in routes]
        if any(images):
            shared_out = self.hdp.engine.decoder.encoders.shared_out
            pairs = zip(tokens, images, strict=True)
            rest["images"] = [shared_out([own], given)[0] if given else [] for own, given in pairs]
        return {**rest, "tokens": tokens, "labels": labels, "number": number}

    def _model_output(self, values: Tensor, data: TensorDict) -> dict[str, Tensor]:
        output = {"log_probs": _nested(values[:, LOG_PROBS], data)}
        if tu.get_non_tensor_data(data=data, key="calculate_entropy", default=False):
            output["entropy"] = _nested(values[:, ENTROPY], data)
        return output

    def optimizer_zero_grad(self) -> None:
        self.hdp.zero_grad()

    def optimizer_step(self) -> float:
        """The norm of the gradient before it was clipped. An update with one that is not a number is left out."""
        update = self.hdp.step(max_grad_norm=self.optimizer_config.clip_grad, skip_nonfinite=True)
        if update.skipped:
            _warn(f"grad_norm is not finite: {update.grad_norm}")
        return update.grad_norm

    def lr_scheduler_step(self) -> float:
        assert self.lr_scheduler is not None, "an engine that is forward only makes no updates"
        self.lr_scheduler.step()
        return float(self.lr_scheduler.get_last_lr()[0])

    def to(self, device: str, model: bool = True, optimizer: bool = True, grad: bool = True) -> None:
        super().to(device=device, model=model, optimizer=optimizer, grad=grad)
        self.hdp.to(device, weights=model, gradients=grad, states=optimizer)

    def get_per_tensor_param(self, **options: Any) -> tuple[Iterator[tuple[str, Tensor]], None]:
        """Weights by name, adapters merged, one at a time. Nothing is gathered: every rank has them."""
        self.to(get_device_name(), model=True, optimizer=False, grad=False)
        return self.hdp.weights(), None

    def get_per_tensor_param_shard(self, **options: Any) -> tuple[Iterator[tuple[str, Tensor, ShardSpec]], None]:
        """This rank's share of every weight, flattened, in BF16 as verl's rollouts have it.

        Nothing is gathered, unless ranks share the model: columns of a matrix are no run of it, and verl takes runs.
        """
        self.to(get_device_name(), model=True, optimizer=False, grad=False)
        runs = None if self.hdp.cuts is None else lambda name, whole: [(name, whole)]
        parts, group = self.hdp.weight_parts(torch.bfloat16, convert=runs), self.get_data_parallel_group()
        return ((p.name, p.values, ShardSpec(p.shape, place=p.start, gather_group=group)) for p in parts), None

    def get_per_tensor_param_delta_shard(self, **options: Any) -> tuple[Iterator[tuple[Any, ...]], None]:
        """What has changed of these shares since the last call, or since ``prime_delta_snapshots`` of verl's base."""
        return hf_delta_export(self.get_per_tensor_param_shard()[0], self._delta_shard_snap, _hf_entry_identity), None

    def save_checkpoint(
        self,
        local_path: str,
        hdfs_path: str | None = None,
        global_step: int = 0,
        max_ckpt_to_keep: int | None = None,
        **options: Any,
    ) -> None:
        """``hdp.save`` into ``local_path/bytescale``, with the model's files in ``local_path/huggingface``."""
        if hdfs_path is not None:
            raise refusal(f"a checkpoint goes to hdfs_path = {hdfs_path}", "copy local_path there, and leave it out")
        self.to(get_device_name(), model=True, optimizer=True, grad=False)
        made = 0 if self.lr_scheduler is None else self.lr_scheduler.last_epoch
        self.hdp.save(Path(local_path) / "bytescale", {"global_step": global_step, "schedule_steps": made})
        whole = None if self.hdp.cuts is None else dict(self.hdp.weights())
        if dist.get_rank() == 0:
            self.module.save_pretrained(Path(local_path) / "huggingface", state_dict=whole)
        self._saved.append(local_path)
        for old in self._saved[:-max_ckpt_to_keep] if max_ckpt_to_keep and dist.get_rank() == 0 else ():
            shutil.rmtree(old, ignore_errors=True)
        dist.barrier()

    def load_checkpoint(
        self, local_path: str, hdfs_path: str | None = None, del_local_after_load: bool = True, **options: Any
    ) -> None:
        extra = self.hdp.load(Path(local_path) / "bytescale")
        if self.lr_scheduler is not None:
            resume_schedule(self.lr_scheduler, extra["schedule_steps"])
        dist.barrier()

    def get_data_parallel_rank(self) -> int:
        return dist.get_rank()

    def get_data_parallel_size(self) -> int:
        return dist.get_world_size()

    def get_data_parallel_group(self) -> Any:
        return dist.group.WORLD

    def is_mp_src_rank_with_outputs(self) -> bool:
        return True

    def disable_adapter(self) -> Any:
        return self.module.disable_adapter() if self.model_config.lora_rank else contextlib.nullcontext()


@EngineRegistry.register(model_type="value_model", backend="bytescale", device=_DEVICES)
class BytescaleValueEngine(BytescaleEngine):
    """The critic: a model for token classification that gives each token one number."""

    auto_model = AutoModelForTokenClassification
    of_config: ClassVar[dict[str, Any]] = {"num_labels": 1, "classifier_dropout": 0.0, "hidden_dropout": 0.0}

    def _columns(self, data: TensorDict) -> tuple[Values, int]:
        return value_columns(self.module), 1

    def _model_output(self, values: Tensor, data: TensorDict) -> dict[str, Tensor]:
        return {"values": _nested(values[:, 0], data)}


def _with_routes(columns: Values) -> Values:
    """``columns [T, D]`` with the choices of routers behind them: ``[T, D + L K]``, L routers, K experts of a row."""

    def both(micro: Any) -> Tensor:
        micro.record_routes()
        found = columns(micro)
        return torch.cat([found, micro.routes().flatten(1).to(found)], dim=1)

    return both


def _warn(what: str) -> None:
    if dist.get_rank() == 0:
        print(f"WARN: {what}")


def _nested(flat: Tensor, data: TensorDict) -> Tensor:
    return torch.nested.nested_tensor_from_jagged(flat.contiguous(), data["input_ids"].offsets())
