"""Training on conversations and weighted tokens: losses, weights and resuming are those of one plain process."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from bytescale.common.labels import IGNORE_INDEX
from bytescale.config.schema import Config, ModelConfig
from bytescale.data.loading.corpus import prepare_corpus
from bytescale.data.order.batches import BatchSampler
from bytescale.parity import small_model
from tests.data.chats import MARKED, chat_folder, conversations
from tests.data.support import read_whole, write_jsonl
from tests.helpers.effort import one_of
from tests.train.runs import interrupt, losses, metrics, on_ranks, run, small_run, with_trainer

TRANSFORMERS = pytest.importorskip("transformers")


def chat_run(tmp_path: Path, name: str, loss_per: str = "token", dtype: str = "fp64") -> Config:
    source = tmp_path / "chats.jsonl"
    if not source.exists():
        write_jsonl(source, conversations(40))
        small_model("gpt2", vocab_size=384, n_positions=256).save_pretrained(tmp_path / "tokenizer")
        chat_folder(tmp_path / "tokenizer")
    config = with_trainer(small_run(source, tmp_path / name), dtype=dtype, steps=4)
    config = from_folder(config, tmp_path / "tokenizer")
    data = replace(
        config.data,
        content="messages",
        tokenizer=str(tmp_path / "tokenizer"),
        loss_per=loss_per,
        cache_dir=str(tmp_path / "cache"),
        batch_tokens=900,
    )
    return replace(config, data=data, checkpoint=replace(config.checkpoint, every=1))


def from_folder(config: Config, folder: Path) -> Config:
    return with_trainer(replace(config, model=ModelConfig(preset=f"hf:{folder}")), init=f"hf:{folder}")


def tokens_run(tmp_path: Path, name: str, loss_per: str) -> Config:
    """Random tokens with real-valued weights, some of them zero or negative, in fp32; some labels are other ids."""
    random = np.random.default_rng(0)
    records = []
    for length in random.integers(2, 200, 40).tolist():
        weights = random.normal(size=length).astype(np.float32) * (random.random(length) < 0.6)
        weights[-1] = 0.5
        tokens = random.integers(0, 256, length)
        labels = np.where(random.random(length) < 0.3, 255 - tokens, tokens)
        records.append({"tokens": tokens.tolist(), "labels": labels.tolist(), "weights": weights.tolist()})
    config = with_trainer(small_run(write_jsonl(tmp_path / "t.jsonl", records), tmp_path / name), dtype="fp64", steps=1)
    small_model("gpt2", vocab_size=320, n_positions=256).save_pretrained(tmp_path / "model")
    data = replace(config.data, content="tokens", loss_per=loss_per, cache_dir=str(tmp_path / "cache"))
    return from_folder(replace(config, data=data), tmp_path / "model")


def plain_step(config: Config, examples: list[tuple[list[int], list[float], list[int]]]) -> tuple[float, float]:
    """Loss and gradient norm of the run's first batch, document by document with all logits at once.

    ``examples``: of every document its tokens, weights and labels, as they follow from the records and nothing else.
    """
    corpus = prepare_corpus(config.data)
    batch = BatchSampler(corpus.index, config.data).next_batch()
    folder = config.trainer.init.removeprefix("hf:")
    model = TRANSFORMERS.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    by_tokens = {tuple(tokens): (weights, labels) for tokens, weights, labels in examples}
    sums, weighed = [], []
    for sample in batch.samples.name.tolist():
        tokens = torch.as_tensor(read_whole(corpus, [sample])[0].astype(np.int64))
        found, labels = by_tokens[tuple(tokens.tolist())]
        weights = torch.tensor(found, dtype=torch.float64)[1:]
        each = F.cross_entropy(model(tokens[None]).logits[0, :-1], torch.tensor(labels[1:]), reduction="none")
        sums.append((weights * each).sum())
        weighed.append(weights)
    absolute = [float(weights.abs().sum()) for weights in weighed]
    match config.data.loss_per:
        case "token":
            loss = sum(sums) / sum(int((weights != 0).sum()) for weights in weighed)
        case "weight":
            loss = sum(sums) / sum(absolute)
        case _:
            loss = sum(total / own for total, own in zip(sums, absolute, strict=True)) / len(sums)
    loss.backward()
    norm = torch.stack([p.grad.square().sum() for p in model.parameters()]).sum().sqrt()
    return float(loss.detach()), float(norm)


def first_step(config: Config) -> tuple[float, float]:
    run(config)
    (row,) = metrics(Path(config.trainer.run_dir))
    return row["loss"], row["grad_norm"]


@pytest.mark.parametrize(
    ("loss_per", "num_ranks"), one_of([("token", 2), ("sequence", 3), ("weight", 1)], ("sequence", 3))
)
def test_conversations_as_transformers_writes_them(tmp_path: Path, loss_per: str, num_ranks: int) -> None:
    config = on_ranks(chat_run(tmp_path, "run", loss_per), num_ranks, 256 if num_ranks == 1 else 128)
    config = with_trainer(config, steps=1)
    tokenizer = TRANSFORMERS.AutoTokenizer.from_pretrained(tmp_path / "tokenizer")
    start, end = tokenizer.convert_tokens_to_ids(["<|im_start|>", "<|im_end|>"])
    role = tokenizer.encode("assistant\n", add_special_tokens=False)
    examples = []
    for record in conversations(40):
        ids = tokenizer.apply_chat_template(record["messages"], return_dict=False)
        weights, turn = [], None
        for place, token in enumerate(ids):
            if token == start:
                turn = ids[place + 1 : place + 1 + len(role)] == role
                body = place + 1 + len(role)
            weights.append(float(bool(turn) and place >= body))
            turn = None if token == end else turn
        examples.append((ids, weights, ids))
    assert first_step(config) == pytest.approx(plain_step(config, examples), rel=1e-10)
    single = with_trainer(config, dtype="fp32", run_dir=str(tmp_path / "fp32"))
    assert first_step(single) == pytest.approx(plain_step(config, examples), rel=1e-5)


@pytest.mark.parametrize(
    ("loss_per", "num_ranks"), one_of([("token", 1), ("sequence", 2), ("weight", 4)], ("weight", 4))
)
def test_real_valued_weights(tmp_path: Path, loss_per: str, num_ranks: int) -> None:
    import json

    config = on_ranks(tokens_run(tmp_path, "run", loss_per), num_ranks, 256 if num_ranks == 1 else 128)
    records = [json.loads(line) for line in (tmp_path / "t.jsonl").read_text().splitlines()]
    expected = plain_step(config, [(record["tokens"], record["weights"], record["labels"]) for record in records])
    assert first_step(config) == pytest.approx(expected, rel=1e-10)


@pytest.mark.exhaustive
def test_resuming_on_other_ranks_loses_nothing(tmp_path: Path) -> None:
    whole = on_ranks(chat_run(tmp_path, "whole", "sequence"), 2)
    expected = run(whole)
    killed = on_ranks(chat_run(tmp_path, "killed", "sequence"), 2)
    interrupt(killed, after_step=2)
    resumed = with_trainer(on_ranks(killed, 3), resume=True)
    run(resumed)
    assert losses(tmp_path / "killed") == pytest.approx(expected, rel=1e-10)


def test_a_corpus_that_is_cut_before_its_first_weight_takes_no_step(tmp_path: Path) -> None:
    records = [{"tokens": [1] * 20, "labels": [IGNORE_INDEX] * 19 + [1]}] * 4
    config = with_trainer(small_run(write_jsonl(tmp_path / "t.jsonl", records), tmp_path / "run"), steps=1)
    data = replace(
        config.data, content="tokens", context_length=8, over_length="truncate", cache_dir=str(tmp_path / "cache")
    )
    with pytest.raises(AssertionError, match="No sequence of the corpus has a token that is trained on"):
        run(replace(config, data=data))


@pytest.mark.exhaustive
@pytest.mark.parametrize("loss_per", one_of(["token", "sequence"], "sequence"))
def test_a_model_of_transformers_on_conversations(tmp_path: Path, loss_per: str) -> None:
    """Loss and gradient norm of the first batch on 3 ranks are those of transformers, its template and its mask."""
    folder = chat_folder(tmp_path / "tokenizer", MARKED)
    small_model("gemma3_text", vocab_size=384, sliding_window=16, max_position_embeddings=256).save_pretrained(folder)
    records = conversations(40)
    write_jsonl(tmp_path / "chats.jsonl", records)
    config = on_ranks(with_trainer(chat_run(tmp_path, "run", loss_per), steps=1), 3, 128)
    found = first_step(config)

    corpus = prepare_corpus(config.data)
    batch = BatchSampler(corpus.index, config.data).next_batch()
    drawn = {tuple(read_whole(corpus, [sample])[0].tolist()) for sample in batch.samples.name.tolist()}
    tokenizer = TRANSFORMERS.AutoTokenizer.from_pretrained(folder)
    model = TRANSFORMERS.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    losses_of = []
    for record in records:
        made = tokenizer.apply_chat_template(record["messages"], return_assistant_tokens_mask=True, return_dict=True)
        tokens, mask = made["input_ids"], torch.tensor(made["assistant_masks"], dtype=torch.bool)
        if tuple(tokens) in drawn:
            logits = model(input_ids=torch.tensor([tokens])).logits[0, :-1]
            each = F.cross_entropy(logits, torch.tensor(tokens[1:]), reduction="none")
            losses_of.append(each[mask[1:]])
    assert len(losses_of) == len(batch.samples)
    loss = torch.cat(losses_of).mean() if loss_per == "token" else torch.stack([own.mean() for own in losses_of]).mean()
    loss.backward()
    norm = torch.stack([p.grad.square().sum() for p in model.parameters()]).sum().sqrt()
    assert found == pytest.approx((float(loss.detach()), float(norm)), rel=1e-10)
