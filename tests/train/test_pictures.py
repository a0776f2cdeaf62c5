"""Fine-tuning on pictures: losses and weights are those of plain transformers with the model's own processor."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForImageTextToText, AutoProcessor

from bytescale.checkpoint.reading import CheckpointReader
from bytescale.common.errors import ConfigError, DataError
from bytescale.config.schema import Config, EvalConfig, ModelConfig, OptimizerConfig
from bytescale.data.loading.corpus import prepare_corpus
from bytescale.data.order.batches import BatchSampler
from bytescale.hf.files.export import export_checkpoint
from bytescale.hf.loop.encoded import EncodedItems
from bytescale.hf.model.encoders import Encoders
from bytescale.runtime.optimizer.sharded_optimizer import ShardedOptimizer
from bytescale.train.loop.trainer import train
from bytescale.train.parts.job import Job
from bytescale.train.run_folder import RunFolder
from tests.helpers.effort import one_of
from tests.helpers.forks import run_forked
from tests.train.runs import interrupt, metrics, on_ranks, run, small_run, with_trainer
from tests.train.test_traces import load_step_trace, of_kind
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


def summed(model: Any, given: dict[str, Any], trained: torch.Tensor) -> torch.Tensor:
    """Losses of what the assistant says in a document."""
    logits = model(**given).logits[0, :-1]
    return F.cross_entropy(logits, given["input_ids"][0, 1:], reduction="none")[trained[1:]].sum()


def newest(config: Config) -> Path:
    return max((Path(config.trainer.run_dir) / "checkpoints").glob("step-*"))


def plainly(config: Config, records: list[dict[str, Any]], frozen: str = "none") -> tuple[list[float], Any]:
    """Losses, and the model at the end, of the run's batches, document by document, in plain transformers."""
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
            own = summed(model, given, trained) / total
            own.backward()
            loss += float(own.detach())
        losses.append(loss)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if parameter.grad is not None and frozen not in name:
                    parameter -= LR * parameter.grad
                parameter.grad = None
    return losses, model


def difference(config: Config, records: list[dict[str, Any]]) -> float:
    """The largest relative difference of a loss or of a weight after the last step."""
    losses, model = plainly(config, records)
    run(config)
    found = [row["loss"] for row in metrics(Path(config.trainer.run_dir))]
    worst = max(abs(one / other - 1) for one, other in zip(found, losses, strict=True))
    stored = CheckpointReader(newest(config))
    for name, parameter in model.named_parameters():
        own = stored.read(f"master.{name}")
        worst = max(worst, float((own - parameter.detach()).abs().max()))
    return worst


RUNS = [(family, num_ranks) for family in ("llava", "qwen2_vl") for num_ranks in (1, 2, 3)]


@pytest.mark.parametrize(("family", "num_ranks"), one_of(RUNS, ("qwen2_vl", 3)))
def test_runs_equal_plain_transformers(tmp_path: Path, family: str, num_ranks: int) -> None:
    config = picture_run(tmp_path, family, num_ranks)
    assert difference(config, chats(draw(tmp_path / "pictures"))) < 1e-10


WAYS: dict[str, dict[str, Any]] = {
    "recomputed": {"checkpointing": "full"},
    "sharded": {"shard": "parameters", "domain": 2},
    "sharded and recomputed": {"shard": "parameters", "domain": 2, "checkpointing": "full"},
}


@pytest.mark.parametrize("way", one_of(list(WAYS), "sharded and recomputed"))
def test_ways_to_save_memory(tmp_path: Path, way: str) -> None:
    config = picture_run(tmp_path, "qwen2_vl", 2, **WAYS[way])
    assert difference(config, chats(draw(tmp_path / "pictures"))) < 1e-10


def _no_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(EncodedItems, "backward", lambda self: None)


def _no_positions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Encoders, "positions", lambda self, number, tokens, items: None)


def _wrong_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = EncodedItems._of_micro_batch
    monkeypatch.setattr(
        EncodedItems, "_of_micro_batch", lambda *args: [own._replace(pairs=own.pairs[::-1]) for own in plain(*args)]
    )


def _early_reductions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients of encoders come after the reduction of all."""
    plain = ShardedOptimizer.after_last_message

    def reduce_all(self: ShardedOptimizer) -> None:
        plain(self)
        assert self.overlap is not None
        self.overlap.collectives.reduce_from(0)

    def encoded(self: Job, *args: Any) -> tuple[Any, Any]:
        beside, after = encode(self, *args)
        return beside, lambda: (reduce_all(self.optimizer), after())

    encode = Job.encode
    monkeypatch.setattr(Job, "encode", encoded)


FAULTS = [_no_backward, _no_positions, _wrong_rows, _early_reductions]


@pytest.mark.parametrize("fault", one_of(FAULTS, _early_reductions))
def test_planted_faults_are_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: Any) -> None:
    fault(monkeypatch)
    config = picture_run(tmp_path, "qwen2_vl", 2)
    assert difference(config, chats(draw(tmp_path / "pictures"))) > 1e-6


@pytest.mark.exhaustive
def test_a_run_goes_on_where_it_was(tmp_path: Path) -> None:
    config = with_trainer(picture_run(tmp_path, "llava", 2), steps=4)
    whole = run(with_trainer(config, trace_steps=(2,)))
    trace = load_step_trace(RunFolder(Path(config.trainer.run_dir)).trace(2))
    for track in of_kind(trace, "measured"):  # encoders run before text and behind it
        spans = {span.name: span for span in track.spans}
        first = min(span.start for span in track.spans if span.category == "forward")
        last = max(span.end for span in track.spans if span.category == "backward")
        assert spans["encode"].end <= first < last <= spans["encode: backward"].start
    for track in of_kind(trace, "predicted"):
        assert [span.name for span in track.spans if span.category == "encode"] == ["encode", "encode: backward"]
    line = metrics(Path(config.trainer.run_dir))[1]
    assert 0 < line["encode_seconds"] < line["step_seconds"]
    stopped = with_trainer(config, run_dir=str(tmp_path / "stopped"))
    interrupt(stopped, after_step=2)
    assert run(with_trainer(on_ranks(stopped, 3, 48), resume=True)) == pytest.approx(whole, rel=1e-12)


def test_frozen_encoders_and_evaluation(tmp_path: Path) -> None:
    """What is not named is trained; the loss of an evaluation is that of the training step after it."""
    config = picture_run(tmp_path, "llava", 2)
    config = replace(config, model=replace(config.model, freeze=("model.vision_tower.*",)))
    config = replace(config, eval=EvalConfig(sources=config.data.sources, every=1))
    records = chats(draw(tmp_path / "pictures"))
    losses, model = plainly(config, records, frozen="vision_tower")
    found = run(config)
    assert found == pytest.approx(losses, rel=1e-10)
    stored = CheckpointReader(newest(config))
    assert not any("vision_tower" in name for name in stored.shapes())
    for name, parameter in model.named_parameters():
        if "vision_tower" not in name:
            torch.testing.assert_close(stored.read(f"master.{name}"), parameter.detach(), rtol=0, atol=1e-10)
    lines = (Path(config.trainer.run_dir) / "evaluations.jsonl").read_text().splitlines()
    documents = [plain_document(Path(config.data.tokenizer), tmp_path, record) for record in records]
    with torch.no_grad():
        expected = sum(float(summed(model, *document)) for document in documents)
    total = sum(int(trained.sum()) for _, trained in documents)
    assert json.loads(lines[-1])["loss"] == pytest.approx(expected / total, rel=1e-10)
    folder = tmp_path / "exported"
    export_checkpoint(str(newest(config)), folder, dtype="fp64", origin=Path(config.trainer.run_dir) / "origin",
                      run_config=config)  # fmt: skip
    AutoModelForImageTextToText.from_pretrained(folder)
    assert type(AutoProcessor.from_pretrained(folder)).__name__ == "LlavaProcessor"


@pytest.mark.exhaustive
def test_adapters(tmp_path: Path) -> None:
    """Of the text alone, beside a model that sees."""
    config = picture_run(tmp_path, "llava", 1)
    config = replace(
        config, model=replace(config.model, lora_rank=2, lora_targets=("q_proj",), freeze=("*vision_tower*",))
    )
    alone = run(config)
    both = with_trainer(on_ranks(config, 2, 48), run_dir=str(tmp_path / "both"))
    assert run(both) == pytest.approx(alone, rel=1e-10)
    held = [name for name in CheckpointReader(newest(config)).shapes() if name.startswith("master.")]
    assert held
    assert all("lora" in name and "language_model" in name for name in held)


def said_of(config: Config) -> list[str]:
    """What ranks say that refuse to train."""

    def work(_: int) -> str:
        try:
            train(config, print_line=lambda line: None)
        except (ConfigError, DataError) as error:
            return str(error)
        return ""

    return run_forked(config.parallel.ranks, work, timeout_seconds=60)


def test_a_picture_that_is_damaged_behind_its_header(tmp_path: Path) -> None:
    """It is found when its rank reads it. All ranks end with the same message."""
    config = picture_run(tmp_path, "llava", 2)
    content = (tmp_path / "pictures" / "4.png").read_bytes()
    (tmp_path / "pictures" / "4.png").write_bytes(content[:60])
    first, second = said_of(config)
    assert first == second
    assert re.search(r"chats.jsonl:[56]: Picture pictures/4.png cannot be read \(.*truncated", first)


PP = [(family, num_ranks, tp) for family in ("llava", "qwen2_vl") for num_ranks, tp in ((2, 1), (4, 1), (4, 2))]


@pytest.mark.parametrize(("family", "num_ranks", "tp"), one_of(PP, ("qwen2_vl", 2, 1)))
def test_pipelines(tmp_path: Path, family: str, num_ranks: int, tp: int) -> None:
    """The first stage's ranks read pictures and encode them."""
    config = with_trainer(picture_run(tmp_path, family, num_ranks), capacity_tokens=100, tp=tp, pp=2)
    config = replace(config, eval=EvalConfig(sources=config.data.sources, every=1))
    assert difference(config, chats(draw(tmp_path / "pictures"))) < 1e-10


TP = [(family, num_ranks, tp) for family in ("llava", "qwen2_vl") for num_ranks, tp in ((2, 2), (4, 2))]


@pytest.mark.parametrize(("family", "num_ranks", "tp"), one_of(TP, ("qwen2_vl", 2, 2)))
def test_tensor_parallelism(tmp_path: Path, family: str, num_ranks: int, tp: int) -> None:
    config = with_trainer(picture_run(tmp_path, family, num_ranks), capacity_tokens=100, tp=tp)
    assert difference(config, chats(draw(tmp_path / "pictures"))) < 1e-10
