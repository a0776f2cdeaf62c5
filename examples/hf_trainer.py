"""transformers' Trainer with its logging, callbacks and learning-rate schedule; batches, attention and updates by HDP.

Three methods of Trainer are overridden. A batch of the data loader is a global batch, the same on every rank. Gradients
are clipped by HDP, after they have been summed over ranks. Trainer's checkpoints would hold one rank's part of the
optimizer, so it writes models only (``save_only_model``); ``hdp.save`` and ``hdp.load`` keep the rest.

    torchrun --nproc-per-node 2 examples/hf_trainer.py [FOLDER]
"""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader
from transformers import PreTrainedModel, Trainer, TrainingArguments

import bytescale
from bytescale.hf.loop.updates import HDPOptimizer
from own_loop import batches, load_model


class HDPTrainer(Trainer):
    """A Trainer whose batches are global batches: lists of documents, the same on every rank."""

    def __init__(
        self, model: PreTrainedModel, args: TrainingArguments, *, capacity_tokens: int, **options: Any
    ) -> None:
        self.capacity_tokens = capacity_tokens
        # Trainer itself would clip what this rank's tokens have given, before the sum over ranks.
        self.max_grad_norm, args.max_grad_norm = args.max_grad_norm, 0.0
        assert args.gradient_accumulation_steps == 1, "a batch is a global batch; HDP cuts it into micro-batches"
        super().__init__(model, args, **options)

    def get_train_dataloader(self) -> DataLoader:
        """Not prepared by accelerate, which would give every rank other batches."""
        return DataLoader(self.train_dataset, batch_size=None)

    def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
        # accelerate moves the model before HDP takes its parameters over. In evaluation mode it does not wrap it in
        # DistributedDataParallel, which expects equally many passes on all ranks.
        self.accelerator.prepare_model(self.model, evaluation_mode=True)
        self.hdp = bytescale.HDP(self.model, capacity_tokens=self.capacity_tokens)
        shards = self.hdp.adamw(
            lr=self.args.learning_rate,
            betas=(self.args.adam_beta1, self.args.adam_beta2),
            eps=self.args.adam_epsilon,
            weight_decay=self.args.weight_decay,
        )
        self.optimizer = HDPOptimizer(self.hdp, shards, self.max_grad_norm)
        return self.optimizer

    def training_step(self, model: Any, inputs: list[dict[str, Any]], num_items_in_batch: Any = None) -> torch.Tensor:
        """The loop of examples/own_loop.py. Returns the loss of the global batch."""
        total = sum(float(d["weights"].sum()) for d in inputs)
        loss_sum = torch.zeros((), device=self.args.device)
        for micro in self.hdp.plan(inputs):
            loss = micro.loss_sum(self.model) / total
            loss.backward()
            loss_sum += loss.detach()
        if dist.is_initialized():
            dist.all_reduce(loss_sum)
        return loss_sum

    def log(self, logs: dict[str, float], *args: Any) -> None:
        """With the norm of the global gradient in place of this rank's."""
        norm = {"grad_norm": self.optimizer.optimizer.grad_norm} if "grad_norm" in logs else {}
        super().log(logs | norm, *args)


def main(
    folder: str = "", steps: int = 10, lr: float = 1e-3, capacity_tokens: int = 128, bf16: bool = False
) -> list[float]:
    """Train, and return the loss of every step. Every rank calls it."""
    args = TrainingArguments(
        output_dir="hf-trainer", max_steps=steps, learning_rate=lr, lr_scheduler_type="constant", logging_steps=1,
        save_strategy="no", save_only_model=True, report_to=[], disable_tqdm=True,
        bf16=bf16, use_cpu=not torch.cuda.is_available(),
    )  # fmt: skip
    data: Any = list(batches(steps))
    trainer = HDPTrainer(load_model(folder), args, capacity_tokens=capacity_tokens, train_dataset=data)
    trainer.train()
    return [row["loss"] for row in trainer.state.log_history if "loss" in row]


if __name__ == "__main__":
    main(*sys.argv[1:2])
