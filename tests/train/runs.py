"""Small training runs for the tests: a corpus with a heavy tail, a model that steps in milliseconds."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

from bytescale.attention import select_kernel
from bytescale.checkpoint.checkpointer import Checkpointer
from bytescale.config.resolve import resolve_model
from bytescale.config.schema import (
    CheckpointConfig,
    Config,
    CostConfig,
    DataConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    PlannerConfig,
    TrainerConfig,
)
from bytescale.config.validate import hdp_ranks
from bytescale.cost.memory.device_kernels import DeviceKind
from bytescale.cost.memory.measured import MeasuredMemory
from bytescale.cost.spec import ModelSpec
from bytescale.hf.files.folder import make_model
from bytescale.train.loop.trainer import train
from bytescale.train.parts.describe import describe_model
from tests.helpers.forks import run_forked

WORDS = ("the", "ring", "moves", "keys", "around", "and", "every", "rank", "waits", "for", "none", "of", "them")


SHAPE = {
    "num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 48,
}  # fmt: skip


def write_corpus(folder: Path, num_documents: int = 60, seed: int = 0) -> Path:
    """Documents of a few to some hundred bytes, most of them short; learnable text."""
    random = np.random.default_rng(seed)
    folder.mkdir(parents=True, exist_ok=True)
    lengths = np.minimum(random.lognormal(2.0, 1.3, num_documents).astype(int) + 1, 90)
    for number, length in enumerate(lengths):
        (folder / f"{number:03d}.txt").write_text(" ".join(random.choice(WORDS, length)), encoding="utf-8")
    return folder


def small_run(corpus: Path, run_dir: Path, **trainer: object) -> Config:
    """Byte tokenizer, context 256 on ranks of 128 tokens at least (256 for one rank)."""
    config = Config(
        model=ModelConfig(preset="tiny", config=SHAPE),
        data=DataConfig(
            sources=(str(corpus),), context_length=256, batch_tokens=640, cache_dir=str(corpus.parent / "cache")
        ),
        parallel=ParallelConfig(capacity_tokens=256, timeout_seconds=100.0),
        planner=PlannerConfig(name="greedy"),  # groups of all sizes; the usual one takes a third of a short run
        cost=CostConfig(calibrate=False),  # so that runs are equal to the last bit; test_calibrated_runs has others
        optimizer=OptimizerConfig(lr=1e-2, warmup_steps=2),
        trainer=TrainerConfig(steps=8, dtype="fp32", run_dir=str(run_dir), device="cpu"),
        checkpoint=CheckpointConfig(every=3, keep=2),
    )
    return with_trainer(config, **trainer)


def with_shape(config: Config, **fields: object) -> Config:
    """The config with other fields of the model's config.json."""
    return replace(config, model=replace(config.model, config={**config.model.config, **fields}))


def on_ranks(config: Config, num_ranks: int, capacity_tokens: int = 256) -> Config:
    return replace(config, parallel=replace(config.parallel, ranks=num_ranks, capacity_tokens=capacity_tokens))


def with_trainer(config: Config, **changes: object) -> Config:
    """The config with other settings of the trainer, or of how it computes and what it logs."""
    for name in ("trainer", "memory", "kernels", "parallel", "log"):
        section = getattr(config, name)
        own = {key: changes.pop(key) for key in list(changes) if hasattr(section, key)}
        config = replace(config, **{name: replace(section, **own)})
    assert not changes, f"there are no settings {', '.join(changes)}"
    return config


def run(config: Config) -> list[float]:
    """Train in forked ranks; the losses in metrics.jsonl, in order."""
    run_forked(config.parallel.ranks, lambda _: str(train(config, print_line=lambda line: None)))
    return losses(Path(config.trainer.run_dir))


def metrics(run_dir: Path) -> list[dict]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]


def losses(run_dir: Path) -> list[float]:
    return [line["loss"] for line in metrics(run_dir)]


def interrupt(config: Config, *, after_step: int) -> None:
    """Train until the first rank dies without a word after a step, as by kill -9; checkpoints are written at once."""
    save = Checkpointer.save

    def save_now(checkpoints: Checkpointer, *state: Any) -> None:
        save(checkpoints, *state)
        checkpoints._settle()

    def die_at(line: str) -> None:
        if line.startswith(f"{after_step}/"):
            os._exit(9)

    with (
        mock.patch.object(Checkpointer, "save", save_now),
        pytest.raises(AssertionError, match="rank 0: died without an answer"),
    ):
        run_forked(config.parallel.ranks, lambda _: str(train(config, print_line=die_at)), kill_with_first=True)


def described(
    config: Config, *, kind: DeviceKind = "cpu", dtype: torch.dtype = torch.float32
) -> tuple[ModelSpec, MeasuredMemory]:
    """Counts and memory of a run's model, on a corpus of bytes."""
    cpu, shape = torch.device("cpu"), resolve_model(config.model, tokenizer_vocab_size=257)
    kernel, ranks = select_kernel("auto", cpu, dtype), hdp_ranks(config.parallel)
    return describe_model(config, shape, kernel, cpu, dtype, num_ranks=ranks, kind=kind)


def first_model(config: Config, vocab_size: int = 257) -> Any:
    """The model of transformers with which a run in fp64 begins."""
    content = resolve_model(config.model, tokenizer_vocab_size=vocab_size).content
    return make_model(content, torch.float64, seed=config.trainer.seed)
