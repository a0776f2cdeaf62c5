"""TRL's trainers over hybrid data parallelism: their losses, metrics, samplers and callbacks, our plans and updates.

::

    trainer = HDPSFTTrainer(model, args=args, capacity_tokens=8192, train_dataset=rows)
    trainer.train()

TRL's trainers ask a model for log-probabilities of padded batches, and compute everything else themselves. They get a
``WholeBatch`` in the model's place. So the results are those of TRL under DistributedDataParallel with as many ranks.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from trl.trainer.utils import FusedCausalLMOutput

import trl
from bytescale.common.errors import ConfigError
from bytescale.common.labels import IGNORE_INDEX
from bytescale.hf.loop.hdp import HDP
from bytescale.hf.loop.room import Capacity
from bytescale.hf.loop.updates import HDPOptimizer
from bytescale.hf.model.decoder import require_beside_first
from bytescale.integrations.whole_batch import (
    COMPUTED,
    ENTROPY,
    IMAGES,
    IS_TOP1,
    LOG_PROBS,
    MEAN_LOGITS,
    Loss,
    WholeBatch,
    resume_schedule,
    word_columns,
)

_TAKEN = ("use_cache", "fused_lm_head", *COMPUTED, *IMAGES)
_STATES = "hdp"


class _Planned:
    """What TRL calls in the model's place: ``model(**inputs, labels=..., fused_lm_head=True)``."""

    def __init__(self, hdp: HDP, temperature: float, loss: Loss | None, *, is_trained: bool) -> None:
        self.model, self.loss = hdp.model, loss
        self.batch = WholeBatch(hdp, word_columns(hdp.model, temperature), num_trained=2 if is_trained else 0)

    def train(self, mode: bool = True) -> _Planned:
        self.model.train(mode)
        return self

    def __call__(self, *, input_ids: Tensor, attention_mask: Tensor, labels: Tensor, **more: Any) -> Any:
        """``[B, L]`` tokens, padded on any side, and labels to results ``[B, L - 1]``, as TRL's models have them."""
        given = [name for name, value in more.items() if value is not None and value is not False]
        if unknown := [name for name in given if name not in _TAKEN]:  # videos, for example
            raise ConfigError(
                f"the model was given {', '.join(sorted(unknown))}",
                so="a plan has tokens and images alone",
                fix="train on texts and images, without balance losses of experts",
            )
        next_labels = torch.cat([labels[:, 1:], labels.new_full((len(labels), 1), IGNORE_INDEX)], dim=1)
        rows, places = attention_mask.nonzero(as_tuple=True)
        lengths = attention_mask.sum(dim=1).tolist()
        tokens, wanted = (ids[rows, places].split(lengths) for ids in (input_ids, next_labels))
        fields: dict[str, Any] = {"tokens": tokens, "labels": wanted}
        if images := {name: more[name] for name in given if name in IMAGES}:
            fields["images"] = self.batch.hdp.engine.decoder.encoders.shared_out(tokens, images)
        values, rest = self.batch.run(fields, loss=self.loss)
        columns = torch.cat([values, rest], dim=1)
        padded = columns.new_zeros(*input_ids.shape, columns.shape[1]).index_put((rows, places), columns)[:, :-1]
        return FusedCausalLMOutput(
            log_probs=padded[..., LOG_PROBS],
            entropy=padded[..., ENTROPY],
            is_top1=padded[..., IS_TOP1] > 0,
            mean_logits=padded[..., MEAN_LOGITS],
            label_mask=labels[:, 1:] != IGNORE_INDEX,
        )


class HDPTrainerMixin:
    """Goes before one of TRL's trainers in the bases of a class."""

    hdp: Any = None
    temperature: float = 1.0
    model: nn.Module
    accelerator: Any
    args: Any

    def __init__(
        self, model: Any, *, args: Any, capacity_tokens: Capacity, tp: int = 1, pp: int = 1, **options: Any
    ) -> None:
        """``capacity_tokens``, ``tp``, ``pp``: as ``HDP`` takes them. All else as TRL's trainer takes it.

        Raises ``ConfigError`` for an option of TRL that plans do not have, and for sampling or adapters with ``tp`` or
        ``pp``.
        """
        _require_known(args)
        if tp * pp > 1 and (
            isinstance(self, trl.GRPOTrainer) or options.get("peft_config") or hasattr(model, "peft_config")
        ):
            raise ConfigError(
                f"tp = {tp}, pp = {pp} with adapters or with a trainer that samples",
                so="this rank's part of the model would be saved, or sampled from, as if it were all of it",
                fix="leave tp and pp out, or train whole weights by SFT or DPO",
            )
        self._mesh: dict[str, Any] = {"capacity_tokens": capacity_tokens, "tp": tp, "pp": pp}
        self._largest_norm, args = args.max_grad_norm, copy.copy(args)
        args.max_grad_norm = 0.0  # Trainer would clip one rank's part of the gradient
        super().__init__(model, args=args, **options)  # type: ignore[call-arg]

    def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
        """Attach ``HDP``, and shard the optimizer that ``args.optim`` names."""
        # In evaluation mode accelerate moves the model and does not wrap it in DistributedDataParallel.
        self.accelerator.prepare_model(self.model, evaluation_mode=True)
        if isinstance(reference := getattr(self, "ref_model", None), nn.Module):
            require_beside_first(reference, self.model)
        self.hdp = HDP(self.model, **self._mesh)
        if isinstance(reference, nn.Module):
            given = self._mesh | {"capacity_tokens": self.hdp.capacity_tokens}
            self._reference = HDP(reference, forward_only=True, **given)
        cls, options = self.get_optimizer_cls_and_kwargs(self.args, self.model)  # type: ignore[attr-defined]
        decayed = set(self.get_decay_parameter_names(self.model))  # type: ignore[attr-defined]
        shards = self.hdp.optimizer(
            cls,
            **{"weight_decay": self.args.weight_decay, **options},
            group_options=lambda name, parameter: {} if name in decayed else {"weight_decay": 0.0},
        )
        self.optimizer = HDPOptimizer(self.hdp, shards, self._largest_norm)
        return self.optimizer

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        """TRL's own step with a ``WholeBatch`` in the model's place; then backward through the model."""
        planned = self._planned(loss=self._loss_of_documents(num_items_in_batch))
        # The reference runs on plans, too. With adapters, TRL runs each rank's own rows without them.
        reference = getattr(self, "ref_model", None)
        self.ref_model: Any = self._planned(self._reference) if isinstance(reference, nn.Module) else reference
        try:
            loss: Tensor = super().training_step(planned, inputs, num_items_in_batch)  # type: ignore[misc]
        finally:
            self.ref_model = reference
        planned.batch.finish(1.0 / self.hdp.group.size)  # as DistributedDataParallel averages
        return loss

    @property
    def _is_shared(self) -> bool:
        """Whether no rank has a whole model any more."""
        return self.hdp is not None and self.hdp.cuts is not None

    def log(self, logs: dict[str, float], *args: Any) -> None:
        """With the norm of the global gradient in place of this rank's."""
        inner = getattr(self.optimizer, "optimizer", self.optimizer)
        norm = {"grad_norm": inner.grad_norm} if "grad_norm" in logs else {}
        super().log(logs | norm, *args)  # type: ignore[misc]

    def _planned(self, hdp: HDP | None = None, loss: Loss | None = None) -> _Planned:
        return _Planned(hdp or self.hdp, self.temperature, loss, is_trained=hdp is None)

    def _loss_of_documents(self, num_items_in_batch: Any) -> Loss | None:
        """TRL's losses gather metrics of all ranks, so that they cannot be called on micro-batches."""
        return None

    def prediction_step(self, model: Any, *args: Any, **options: Any) -> Any:
        """TRL's own; ranks that share a model evaluate by plans."""
        model = self._planned() if self._is_shared else model
        return super().prediction_step(model, *args, **options)  # type: ignore[misc]

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Trainer's own; of ranks that share a model the first one saves all of it."""
        if not self._is_shared:
            super().save_model(output_dir, _internal_call)  # type: ignore[misc]
            return
        whole = dict(self.hdp.weights())
        if self.args.should_save:
            self._save(output_dir, state_dict=whole)  # type: ignore[attr-defined]

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        """Master weights and states of all ranks, by ``hdp.save``; the schedule by Trainer."""
        if self.hdp is not None and dist.is_initialized():
            self.hdp.save(Path(output_dir) / _STATES)
        if self.args.should_save:
            torch.save(self.lr_scheduler.state_dict(), Path(output_dir) / "scheduler.pt")  # type: ignore[attr-defined]

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        """Go on from ``_save_optimizer_and_scheduler``, exactly, on any number of ranks."""
        if checkpoint is not None and (Path(checkpoint) / _STATES).is_dir():
            self.hdp.load(Path(checkpoint) / _STATES)
            state = torch.load(Path(checkpoint) / "scheduler.pt", weights_only=True)
            resume_schedule(self.lr_scheduler, state["last_epoch"])  # type: ignore[attr-defined]


class HDPSFTTrainer(HDPTrainerMixin, trl.SFTTrainer):
    """``trl.SFTTrainer``. With ``loss_type="nll"`` it takes one pass."""

    def _loss_of_documents(self, num_items_in_batch: Any) -> Loss | None:
        if self.args.loss_type != "nll" or num_items_in_batch is None or self.hdp is None:
            return None
        averaged = self.accelerator.num_processes if self.args.average_tokens_across_devices else 1
        scale = averaged / max(1.0, float(num_items_in_batch)) / self.hdp.group.size

        def loss(documents: list[dict[str, Tensor]], values: list[Tensor]) -> Tensor:
            labelled = torch.cat([own["labels"] for own in documents]) != IGNORE_INDEX
            return -scale * torch.cat(values)[:, LOG_PROBS].where(labelled, 0.0).sum()

        return loss


class HDPDPOTrainer(HDPTrainerMixin, trl.DPOTrainer):
    """``trl.DPOTrainer``. A pair lies on one rank's batch, and its parts may run anywhere."""


class HDPGRPOTrainer(HDPTrainerMixin, trl.GRPOTrainer):
    """``trl.GRPOTrainer``: sampling and rewards are TRL's, all log-probabilities come from plans."""

    def _get_per_token_logps_and_entropies(self, model: Any, *args: Any, **options: Any) -> Any:
        if self.hdp is not None and not isinstance(model, _Planned):
            model = self._planned(self._reference if model is self.ref_model else None)
        return super()._get_per_token_logps_and_entropies(model, *args, **options)


def _require_known(args: Any) -> None:
    """Raise ``ConfigError`` for options whose results would not be TRL's."""
    wrong = {
        "padding_free": "documents are packed by plans",
        "packing": "documents are packed by plans",
        "use_liger_kernel": "logits are computed a few rows at a time anyway",
        "use_weighting": "it needs the sum of squared probabilities of each row",
        "activation_offloading": "HDP offloads activations itself",
        "gradient_checkpointing": "HDP computes layers again itself: it computes attention only once",
        "fsdp": "optimizer states are sharded by HDP",
        "deepspeed": "optimizer states are sharded by HDP",
    }
    for name, why in wrong.items():
        if getattr(args, name, None):
            raise ConfigError(
                f"{type(args).__name__} has {name} = {getattr(args, name)!r}: {why}",
                so="the trainer over HDP does not have it",
                fix=f"leave {name} out",
            )
