"""A loop of one's own on batches that the loaders read: rows, fields, losses and resuming are those of one process."""

from __future__ import annotations

import os
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

from bytescale import HDP
from bytescale.cli.main import run
from bytescale.common.errors import CheckpointError, ConfigError
from bytescale.config.schema import DataConfig
from bytescale.data.loading.corpus import prepare_corpus
from bytescale.data.order.batches import BatchSampler
from bytescale.parity import small_model
from tests.data.support import read_whole, write_jsonl
from tests.helpers.forks import run_forked
from tests.hf.support import on_ranks

FIELDS = ("advantages", "old_logprobs")


def records(count: int = 30) -> list[dict[str, Any]]:
    """Rollouts: some tokens are not trained on, some labels are others than the tokens."""
    random = np.random.default_rng(0)
    made = []
    for length in random.integers(2, 90, count).tolist():
        tokens = random.integers(2, 67, length)
        labels = np.where(random.random(length) < 0.3, 68 - tokens, tokens)
        labels[random.random(length) < 0.2] = -100
        labels[1] = tokens[1]
        made.append(
            {
                "tokens": tokens.tolist(),
                "labels": labels.tolist(),
                "weights": random.normal(size=length).tolist(),
                "advantages": [float(random.normal())] * length,
                "old_logprobs": random.normal(size=length).tolist(),
            }
        )
    return made


def policy() -> nn.Module:
    """A Llama in fp64 with the ids of the byte tokenizer."""
    return small_model("llama", vocab_size=257)


def settings(tmp_path: Path, source: Path | str, **changes: Any) -> DataConfig:
    config = DataConfig(
        sources=(str(source),),
        content="tokens",
        fields=FIELDS,
        context_length=64,
        batch_tokens=300,
        cache_dir=str(tmp_path / "cache"),
    )
    return replace(config, **changes)


def objective(micro: Any, model: nn.Module) -> torch.Tensor:
    """Uses every field, as losses of reinforcement learning do."""
    logprobs = micro.logprobs(model)
    ratio = (logprobs - micro.old_logprobs).exp().clamp(max=2.0)
    return (micro.weights * (ratio * micro.advantages + logprobs)).sum()


def train(
    hdp: HDP, model: nn.Module, config: DataConfig, steps: int, state: dict | None = None
) -> tuple[list[float], dict, dict[str, list[list[float]]]]:
    """Losses, where the next step starts, and what was collected of every field in the last step."""
    losses = []
    with hdp.batches(config, state=state, stop_step=steps) as batches:
        for batch in batches:

            def loss(micro: Any, divisor: float = batch.loss_divisor) -> torch.Tensor:
                hdp.collect(micro, torch.stack([micro.advantages, micro.old_logprobs, micro.labels.float()], dim=1))
                return objective(micro, model) / divisor

            losses.append(batch.forward_backward(loss))
            seen = [rows.tolist() for rows in hdp.collected()]
            hdp.step()
        return losses, batches.state_dict(), seen


def trained(tmp_path: Path, num_ranks: int, config: DataConfig, **options: Any) -> tuple[list[float], dict, Any]:
    def work(group: dist.ProcessGroup, own: nn.Module) -> Any:
        hdp = HDP(own.train(), group, capacity_tokens=64, **options)
        hdp.adamw(lr=1e-3)
        return train(hdp, own, config, 4)

    return on_ranks(num_ranks, policy(), work)[0]


def test_every_rank_count_gives_the_same_losses_and_fields(tmp_path: Path) -> None:
    config = settings(tmp_path, write_jsonl(tmp_path / "a.jsonl", records()))
    losses, state, seen = trained(tmp_path, 1, config)
    assert len(losses) == 4
    for num_ranks, options in ((2, {}), (3, {"equal_counts": True}), (4, {"tp": 2}), (4, {"pp": 2})):
        found, where, other = trained(tmp_path, num_ranks, config, **options)
        assert found == pytest.approx(losses, rel=1e-10)
        assert where == state
        assert other == seen


def test_the_loss_is_that_of_plain_records(tmp_path: Path) -> None:
    """The first batch of whole documents, record by record with all logits at once."""
    config = settings(tmp_path, write_jsonl(tmp_path / "a.jsonl", records()), context_length=90, loss_per="weight")
    (found, *_), _, _ = trained(tmp_path, 2, config)
    model = policy()
    sums = divisor = 0.0
    corpus = prepare_corpus(config)
    batch = BatchSampler(corpus.index, config).next_batch()
    drawn = {tuple(read_whole(corpus, [sample])[0].tolist()) for sample in batch.samples.name.tolist()}
    for record in records():
        if tuple(record["tokens"]) not in drawn:
            continue
        columns = {name: torch.tensor(values)[1:] for name, values in record.items()}
        logits = model(input_ids=torch.tensor([record["tokens"]])).logits[0, :-1].detach()
        has_label = columns["labels"] != -100
        labels = columns["labels"].where(has_label, 0)
        logprobs = logits.log_softmax(-1).gather(1, labels[:, None])[:, 0]
        weights = columns["weights"].float() * has_label
        ratio = (logprobs - columns["old_logprobs"].float()).exp().clamp(max=2.0)
        sums += float((weights * (ratio * columns["advantages"].float() + logprobs)).sum())
        divisor += float(weights.abs().double().sum())
    assert found == pytest.approx(sums / divisor, rel=1e-9)


def test_pairs_give_the_bits_of_records(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", records())
    output = str(tmp_path / "pair" / "all")
    assert run("data tokenize", [str(source), "--content", "tokens", "--fields", *FIELDS, "--output", output]) == 0
    ours = trained(tmp_path, 2, settings(tmp_path, source))
    theirs = trained(tmp_path, 2, settings(tmp_path, tmp_path / "pair"))
    assert (ours[0], ours[2]) == (theirs[0], theirs[2])


def killed_and_resumed(folder: Path, config: DataConfig) -> tuple[list[float], Any]:
    """Kill two ranks behind their second checkpoint; go on with three. Losses of all steps, and what was collected."""

    def run_steps(rank: int, die: bool) -> Any:
        torch.set_num_threads(1)
        dist.init_process_group("gloo", timeout=timedelta(seconds=60))
        model = policy().train()
        hdp = HDP(model, capacity_tokens=64)
        hdp.adamw(lr=1e-3)
        if not die:
            return train(hdp, model, config, 4, hdp.load(folder)["data"])
        with hdp.batches(config) as batches:  # without an end: steps that were read ahead are lost with the process
            for batch in batches:
                for micro in batch:
                    (objective(micro, model) / batch.loss_divisor).backward()
                if hdp.step().num_updates == 3:
                    os._exit(9)
                hdp.save(folder, {"data": batches.state_dict()})
        return None

    with pytest.raises(AssertionError, match="died without an answer"):
        run_forked(2, lambda rank: run_steps(rank, die=True), kill_with_first=True)
    assert sorted(path.name for path in folder.iterdir()) == ["step-000001", "step-000002"]
    losses, _, seen = run_forked(3, lambda rank: run_steps(rank, die=False))[0]
    return losses, seen


def test_resuming_on_other_ranks_after_kill(tmp_path: Path) -> None:
    config = settings(tmp_path, write_jsonl(tmp_path / "a.jsonl", records()))
    losses, _, seen = trained(tmp_path, 2, config)
    found, other = killed_and_resumed(tmp_path / "saved", config)
    assert found == pytest.approx(losses[2:], rel=1e-10)
    assert other == seen


def test_what_cannot_be_loaded(tmp_path: Path) -> None:
    config = settings(tmp_path, write_jsonl(tmp_path / "a.jsonl", records()))
    with (
        pytest.raises(ConfigError, match=r"has ids up to 256, but the model's vocab_size is 67"),
        HDP(small_model("llama"), capacity_tokens=64).batches(config),
    ):
        pass
    hdp = HDP(policy(), capacity_tokens=64)
    with hdp.batches(config) as batches:
        state = batches.state_dict()
    other = replace(config, context_length=32)
    with pytest.raises(CheckpointError, match="restore the"), hdp.batches(other, state=state):
        pass
