"""Fine-tuning on pictures: losses and weights are those of plain transformers with the model's own processor."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForImageTextToText

from bytescale.checkpoint.reading import CheckpointReader
from bytescale.config.schema import Config, ModelConfig, OptimizerConfig
from bytescale.data.loading.corpus import prepare_corpus
from bytescale.data.order.batches import BatchSampler
from tests.train.runs import metrics, on_ranks, run, small_run, with_trainer
from tests.train.vision import chats, draw, plain_document, vision_folder, write_chats

LR, STEPS = 0.05, 2


def picture_run(home: Path, family: str, num_ranks: int, **trainer: Any) -> Config:
    """Chats in ``home``, with a model of ``family``; plain SGD, so that weights tell of every gradient."""
    folder, source = home / family, home / "chats.jsonl"
    if not source.exists():
        write_chats(source, chats(draw(home / "pictures")))
    if not folder.exists():
        vision_folder(folder, family)
    config = with_trainer(small_run(source, home / f"run-{family}-{num_ranks}"), dtype="fp64", steps=STEPS, **trainer)
    config = with_trainer(replace(config, model=ModelConfig(preset=f"hf:{folder}")), init=f"hf:{folder}")
    data = replace(
        config.data,
        content="messages",
        tokenizer=str(folder),
        cache_dir=str(home / "cache"),
        batch_tokens=300,
        context_length=90,
    )
    optimizer = OptimizerConfig(
        name="sgd", options={"momentum": 0.0}, lr=LR, schedule="constant", warmup_steps=0, weight_decay=0.0,
        clip_grad_norm=0.0,
    )  # fmt: skip
    config = on_ranks(replace(config, data=data, optimizer=optimizer), num_ranks, 256 if num_ranks == 1 else 48)
    return replace(config, checkpoint=replace(config.checkpoint, every=1))


def plainly(config: Config, records: list[dict[str, Any]]) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses and last weights of the run's batches, document by document, in plain transformers."""
    folder, home = Path(config.data.tokenizer), Path(config.data.sources[0]).parent
    corpus = prepare_corpus(config.data)
    sampler = BatchSampler(corpus.index, config.data)
    model: Any = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float64)
    losses = []
    for _ in range(config.trainer.steps):
        documents = [
            plain_document(folder, home, records[number]) for number in sampler.next_batch().samples.document.tolist()
        ]
        total, loss = sum(int(trained.sum()) for _, trained in documents), 0.0
        for given, trained in documents:
            logits = model(**given).logits[0, :-1]
            each = F.cross_entropy(logits, given["input_ids"][0, 1:], reduction="none")
            own = each[trained[1:]].sum() / total
            own.backward()
            loss += float(own.detach())
        losses.append(loss)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.grad is not None and parameter.requires_grad:
                    parameter -= LR * parameter.grad
                parameter.grad = None
    return losses, dict(model.named_parameters())


def difference(config: Config, records: list[dict[str, Any]]) -> float:
    """The largest relative difference of a loss or of a weight after the last step."""
    losses, weights = plainly(config, records)
    run(config)
    found = [row["loss"] for row in metrics(Path(config.trainer.run_dir))]
    worst = max(abs(one / other - 1) for one, other in zip(found, losses, strict=True))
    stored = CheckpointReader(max((Path(config.trainer.run_dir) / "checkpoints").glob("step-*")))
    for name, parameter in weights.items():
        own = stored.read(f"master.{name}")
        worst = max(worst, float((own - parameter).abs().max()))
    return worst


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
@pytest.mark.parametrize("family", ["llava", "qwen2_vl"])
def test_runs_equal_plain_transformers(tmp_path: Path, family: str, num_ranks: int) -> None:
    config = picture_run(tmp_path, family, num_ranks)
    assert difference(config, chats(draw(tmp_path / "pictures"))) < 1e-10
