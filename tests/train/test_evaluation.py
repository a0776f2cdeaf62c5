"""Evaluation gives the loss of the weights at that step, and changes nothing of the training."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from bytescale.common.errors import ConfigError
from bytescale.config.schema import Config, EvalConfig, ModelConfig, ParallelConfig
from bytescale.config.validate import validate
from bytescale.data.loading.corpus import prepare_corpus
from bytescale.data.order.batches import batches_once
from bytescale.parity import small_model
from bytescale.runtime.loss import PlainHead, token_losses
from bytescale.train.loop.evaluation import BestEvaluation
from tests.data.support import memory_corpus, read_whole, write_jsonl
from tests.helpers.effort import one_of
from tests.train.runs import interrupt, losses, on_ranks, run, small_run, with_trainer, write_corpus
from tests.train.test_models import hf_folder, run_from


def evaluations(run_dir: Path) -> list[dict]:
    return [json.loads(line) for line in (run_dir / "evaluations.jsonl").read_text(encoding="utf-8").splitlines()]


def with_evaluation(config: Config, source: Path, every: int = 2) -> Config:
    return replace(config, eval=EvalConfig(sources=(str(source),), every=every))


@pytest.fixture
def corpora(tmp_path: Path) -> tuple[Path, Path]:
    records = [{"text": "the ring waits for none " * n} for n in (1, 2, 9, 40)]  # the last one is split
    return write_corpus(tmp_path / "corpus"), write_jsonl(tmp_path / "eval.jsonl", records)


@pytest.mark.exhaustive
@pytest.mark.parametrize("shape", one_of(["2 ranks", "4 tp", "2 pp", "4 pp", "4 tp pp"], "2 pp"))
def test_losses_of_a_run_are_the_same_to_the_last_bit(tmp_path: Path, corpora: tuple[Path, Path], shape: str) -> None:
    degrees = {name: 2 for name in ("tp", "pp") if name in shape}
    parallel = {"ranks": int(shape[0]), **degrees}
    config = small_run(corpora[0], tmp_path / "without", steps=3)
    config = replace(config, parallel=ParallelConfig(capacity_tokens=256, timeout_seconds=100.0, **parallel))
    without = run(config)
    evaluated = with_evaluation(with_trainer(config, run_dir=str(tmp_path / "with")), corpora[1])
    assert run(evaluated) == without
    assert [row["step"] for row in evaluations(tmp_path / "with")] == [2, 3]


def test_the_loss_is_that_of_plain_documents(tmp_path: Path, corpora: tuple[Path, Path]) -> None:
    """Of the weights after one step that changes none of them. GPT-2 computes nothing in fp32."""
    folder = hf_folder(tmp_path / "gpt2", "gpt2")
    config = run_from(folder, corpora[0], tmp_path / "run", 3, steps=1, dtype="fp64")
    config = with_evaluation(replace(config, optimizer=replace(config.optimizer, lr=1e-30)), corpora[1])
    run(config)
    corpus = prepare_corpus(replace(config.data, sources=config.eval.sources))
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    sums, counts = {}, {}
    samples = corpus.samples
    for sample, start, count in zip(
        samples.name.tolist(), samples.start.tolist(), samples.num_targets.tolist(), strict=True
    ):
        tokens = read_whole(corpus, [sample])[0]
        whole = corpus.parts[0][start : start + count + 1].astype(np.int64)
        logits = model(torch.as_tensor(tokens.astype(np.int64))[None]).logits[0, :count]
        loss = torch.nn.functional.cross_entropy(logits, torch.as_tensor(whole[1:]), reduction="sum")
        edge = 512  # the context of 256 tokens lies in the first bucket
        sums[edge] = sums.get(edge, 0.0) + float(loss.detach())
        counts[edge] = counts.get(edge, 0) + count
    (found,) = evaluations(tmp_path / "run")
    assert found["num_targets"] == counts[512]
    assert found["loss"] == pytest.approx(sums[512] / counts[512], rel=1e-10)
    assert found["perplexity"] == pytest.approx(math.exp(found["loss"]))
    assert [(b["longest_tokens"], b["num_targets"]) for b in found["buckets"]] == [(512, counts[512])]


def test_tokens_without_weight_are_not_evaluated(tmp_path: Path) -> None:
    """Weights of 0, also of a whole rank's rows and of most of a document; others count as they are."""
    drawn = np.random.default_rng(3)
    records = []
    for number, length in enumerate((200, 150, 30, 12, 180)):
        weights = [(0.0, 0.0, 1.0, 0.5)[place % 4] if place < length // 3 else 0.0 for place in range(length)]
        weights[-1] = float(number == 2)
        records.append({"tokens": drawn.integers(0, 256, length).tolist(), "weights": weights})
    source = write_jsonl(tmp_path / "tokens.jsonl", records)
    folder = hf_folder(tmp_path / "gpt2", "gpt2")
    config = run_from(folder, source, tmp_path / "run", 2, steps=1, dtype="fp64")
    config = replace(config, data=replace(config.data, content="tokens"))
    config = with_evaluation(replace(config, optimizer=replace(config.optimizer, lr=1e-30)), source)
    run(config)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    loss = weight = count = 0.0
    for record in records:
        tokens, weights = torch.tensor(record["tokens"]), torch.tensor(record["weights"], dtype=torch.float64)[1:]
        own = torch.nn.functional.cross_entropy(model(tokens[None]).logits[0, :-1], tokens[1:], reduction="none")
        loss, weight = loss + float((own * weights).sum().detach()), weight + float(weights.sum())
        count += int((weights != 0).sum())
    (found,) = evaluations(tmp_path / "run")
    assert found["loss"] == pytest.approx(loss / weight, rel=1e-10)
    assert found["num_targets"] == count


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", one_of(["gemma2", "qwen3", "gpt_oss"], "gemma2"))
def test_evaluations_of_a_decoder_of_transformers(tmp_path: Path, corpora: tuple[Path, Path], name: str) -> None:
    """Heads with and without a cap, windows and sinks: losses stay to the last bit, and values are transformers'."""
    folder = tmp_path / name
    small_model(name, dtype=torch.float32, vocab_size=320, max_position_embeddings=512).save_pretrained(folder)
    config = with_trainer(on_ranks(small_run(corpora[0], tmp_path / "without", steps=2), 2, 128), init=f"hf:{folder}")
    config = replace(config, model=ModelConfig(preset=f"hf:{folder}"), optimizer=replace(config.optimizer, lr=1e-3))
    without = run(config)
    evaluated = with_evaluation(with_trainer(config, run_dir=str(tmp_path / "with")), corpora[1], every=1)
    assert run(evaluated) == without

    still = with_trainer(evaluated, run_dir=str(tmp_path / "still"), steps=1)
    run(replace(still, optimizer=replace(config.optimizer, lr=1e-30)))
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    corpus = prepare_corpus(replace(config.data, sources=evaluated.eval.sources))
    total = count = 0.0
    samples = corpus.samples
    for sample, start, number in zip(
        samples.name.tolist(), samples.start.tolist(), samples.num_targets.tolist(), strict=True
    ):
        targets = torch.as_tensor(corpus.parts[0][start + 1 : start + number + 1].astype(np.int64))
        tokens = torch.as_tensor(read_whole(corpus, [sample])[0])
        with torch.no_grad():
            logits = model(tokens[None]).logits[0, :number].double()
        total += float(torch.nn.functional.cross_entropy(logits, targets, reduction="sum"))
        count += number
    (found,) = evaluations(tmp_path / "still")
    assert found["num_targets"] == count
    assert found["loss"] == pytest.approx(total / count, rel=1e-6)
    assert evaluations(tmp_path / "with")[1]["loss"] != found["loss"]  # the weights had changed


@pytest.mark.exhaustive
def test_a_run_that_was_killed_evaluates_what_it_repeats_once(tmp_path: Path, corpora: tuple[Path, Path]) -> None:
    config = with_evaluation(small_run(corpora[0], tmp_path / "whole"), corpora[1], every=1)
    run(config)
    killed = with_trainer(config, run_dir=str(tmp_path / "killed"))
    interrupt(killed, after_step=5)  # the last checkpoint is that of step 3
    run(with_trainer(killed, resume=True))
    assert evaluations(tmp_path / "killed") == evaluations(tmp_path / "whole")
    assert losses(tmp_path / "killed") == losses(tmp_path / "whole")


def test_every_sample_is_in_one_batch() -> None:
    corpus = memory_corpus([5, 30, 1, 1, 8, 12, 29], 12, num_parts=3)
    batches = list(batches_once(corpus.index, 20))
    assert np.concatenate([batch.samples.name for batch in batches]).tolist() == corpus.samples.name.tolist()
    assert all(batch.num_tokens <= 20 for batch in batches)


def test_losses_of_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(23, 12, generator=generator, dtype=torch.float64)
    weight = torch.randn(37, 12, generator=generator, dtype=torch.float64)
    labels = torch.randint(37, (23,), generator=generator)
    labels[::4] = -100
    expected = torch.nn.functional.cross_entropy(hidden @ weight.T, labels, reduction="none", ignore_index=-100)
    torch.testing.assert_close(token_losses(PlainHead(weight), hidden, labels), expected, rtol=1e-12, atol=1e-12)


def test_a_run_ends_when_losses_fall_no_more_and_keeps_the_best(tmp_path: Path, corpora: tuple[Path, Path]) -> None:
    """With weights that do not change, no evaluation is better than the first. Killed on the way, and resumed."""
    config = with_trainer(small_run(corpora[0], tmp_path / "run"), steps=12)
    config = replace(
        config,
        optimizer=replace(config.optimizer, lr=1e-30),
        eval=EvalConfig(sources=(str(corpora[1]),), every=2, patience=2, keep_best=True),
        checkpoint=replace(config.checkpoint, every=4, keep=1),
    )
    config = on_ranks(config, 2, 128)
    interrupt(config, after_step=5)
    run(with_trainer(config, resume=True))
    assert [row["step"] for row in evaluations(tmp_path / "run")] == [2, 4, 6]
    assert sorted(path.name for path in (tmp_path / "run" / "checkpoints").glob("step-*")) == [
        "step-000002",
        "step-000006",
    ]
    log = (tmp_path / "run" / "log.txt").read_text(encoding="utf-8")
    assert "2 evaluations in a row had no lower loss than" in log
    assert "that of step 2 (eval.patience = 2)" in log


def test_the_best_of_losses_that_rise_and_fall() -> None:
    best = BestEvaluation.of(EvalConfig(keep_best=True, patience=3), {})
    seen = []
    for step, loss in enumerate([5.0, 4.0, float("nan"), 4.5, 3.0, 3.0, 3.5, 3.1], start=1):
        best = BestEvaluation.of(best.settings, best.after(step, loss).as_dict())
        seen.append((best.step, best.num_worse, best.is_saved_at(step), best.is_final))
    assert seen == [
        (1, 0, True, False), (2, 0, True, False), (2, 1, False, False), (2, 2, False, False),
        (5, 0, True, False), (5, 1, False, False), (5, 2, False, False), (5, 3, False, True),
    ]  # fmt: skip
    assert not BestEvaluation.of(EvalConfig(), best.as_dict()).is_final, "patience = 0"


def test_patience_without_evaluations_is_refused(tmp_path: Path, corpora: tuple[Path, Path]) -> None:
    config = replace(small_run(corpora[0], tmp_path / "run"), eval=EvalConfig(patience=2))
    with pytest.raises(ConfigError, match=r"eval.patience is set, but eval.sources is empty"):
        validate(config)
