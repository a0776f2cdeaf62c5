"""Runs with ``data.share_prefixes``: the losses, audits and order of data of runs without, for fewer rows."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from torch import Tensor

import bytescale
from bytescale.common.errors import ConfigError
from bytescale.config.schema import Config, DataConfig, EvalConfig, ModelConfig
from bytescale.config.validate import validate
from bytescale.data.loading.assemble import MicroBatchData
from bytescale.data.loading.corpus import prepare_corpus
from bytescale.data.loading.record import check_record
from bytescale.parity import small_model
from bytescale.plan import RankPlan
from bytescale.plan.trees import Forest
from bytescale.runtime.executor import Executor
from bytescale.train.loop import evaluation
from bytescale.train.parts.job import Job
from tests.helpers.effort import one_of
from tests.helpers.llama import spec_of_llama
from tests.train.runs import WORDS, interrupt, losses, metrics, on_ranks, run, small_run, with_trainer
from tests.train.test_models import hf_folder

STEPS = 3


def write_samples(folder: Path) -> Path:
    """Prompts that begin alike, with answers of which some weigh nothing in the loss, and documents of their own."""
    random = np.random.default_rng(0)
    folder.mkdir()

    def words(count: int) -> str:
        return " ".join(random.choice(WORDS, count))

    system, records = words(12), []
    for _ in range(8):
        prompt = f"{system} {words(8)} "
        records += [{"prompt": prompt, "completion": words(int(random.integers(1, 12)))} for _ in range(4)]
    records += [{"prompt": words(5), "completion": words(20)} for _ in range(8)]
    (folder / "samples.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return folder


def pair(tmp_path: Path, ranks: int, **data: object) -> tuple[Config, Config]:
    corpus = write_samples(tmp_path / "corpus")
    config = on_ranks(small_run(corpus, tmp_path / "apart", steps=STEPS), ranks, 256)
    own = replace(config.data, content="prompt", batch_tokens=2048, record=True, **data)
    config = with_trainer(replace(config, data=own), dtype="fp64")
    shared = with_trainer(replace(config, data=replace(own, share_prefixes=True)), run_dir=str(tmp_path / "shared"))
    return config, shared


@pytest.mark.parametrize("ranks", one_of([1, 2, 3], quick=2))
@pytest.mark.parametrize("loss_per", one_of(["token", "sequence"], quick="sequence"))
def test_a_run_has_the_losses_of_documents_apart(
    tmp_path: Path, ranks: int, loss_per: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For two thirds of the rows, with the same record of the corpus, the same evaluation, through an interruption."""
    monkeypatch.setattr(evaluation, "BUCKET_EDGES", np.array([130, 160, 1000]))
    count_evaluated_rows(monkeypatch, tmp_path / "evaluated")
    config, shared = (
        replace(one, eval=EvalConfig(sources=one.data.sources, every=STEPS))
        for one in pair(tmp_path, ranks, loss_per=loss_per)
    )
    wanted = run(config)
    if ranks == 3:
        interrupt(shared, after_step=2)
        shared = with_trainer(shared, resume=True)
    np.testing.assert_allclose(run(shared), wanted, rtol=1e-8)
    rows, tokens = ([line["num_tokens"] for line in metrics(Path(one.trainer.run_dir))] for one in (shared, config))
    assert sum(rows) < 0.7 * sum(tokens)
    corpus = prepare_corpus(config.data)
    found = [check_record(Path(one.trainer.run_dir) / "data", STEPS, corpus, one.data) for one in (config, shared)]
    compare_evaluations([config, shared])
    evaluated = sum(map(int, (tmp_path / "evaluated").read_text().split()))
    assert evaluated < 1.7 * corpus.samples.num_tokens  # both runs'
    assert found[0].num_tokens == found[1].num_tokens == sum(tokens)


def count_evaluated_rows(monkeypatch: pytest.MonkeyPatch, file: Path) -> None:
    whole = Executor.evaluate

    def evaluate(self: Executor, rank_plan: RankPlan, data: Sequence[MicroBatchData], *more: Any) -> list[Tensor]:
        with file.open("a") as lines:
            lines.write("".join(f"{len(own.tokens)}\n" for own in data))
        return whole(self, rank_plan, data, *more)

    monkeypatch.setattr(Executor, "evaluate", evaluate)


def compare_evaluations(configs: Sequence[Config]) -> None:
    """They are equal by length of documents, too, where documents of several lengths share prefixes."""
    apart, shared = (
        json.loads((Path(one.trainer.run_dir) / "evaluations.jsonl").read_text().splitlines()[-1]) for one in configs
    )
    assert shared["num_targets"] == apart["num_targets"]
    assert shared["loss"] == pytest.approx(apart["loss"], rel=1e-8)
    assert len(apart["buckets"]) == 3
    for ours, wanted in zip(shared["buckets"], apart["buckets"], strict=True):
        assert ours == pytest.approx(wanted, rel=1e-8)


@pytest.mark.exhaustive
def test_documents_that_weigh_shared_tokens_otherwise(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Training adds weights up; an evaluation keeps rows apart whose documents weigh them otherwise, here by length."""
    monkeypatch.setattr(evaluation, "BUCKET_EDGES", np.array([100, 130, 1000]))
    config, shared = pair(tmp_path, 2, loss_per="weight")
    random, lines = np.random.default_rng(1), []
    for number in range(6):
        prompt = random.integers(5, 250, 90).tolist()
        for length in (5, 30, 60):
            tokens = prompt + random.integers(5, 250, length).tolist()
            weight = 0.5 if number % 2 else length / 10
            lines.append(json.dumps({"tokens": tokens, "weights": [weight] * 50 + [1.0] * (len(tokens) - 50)}))
    (tmp_path / "weighted.jsonl").write_text("\n".join(lines), encoding="utf-8")
    for one in (config, shared):
        data = replace(one.data, content="tokens", sources=(str(tmp_path / "weighted.jsonl"),), record=False)
        run(replace(one, data=data, eval=EvalConfig(sources=data.sources, every=STEPS)))
    np.testing.assert_allclose(*(losses(Path(one.trainer.run_dir)) for one in (shared, config)), rtol=1e-8)
    rows, tokens = (sum(row["num_tokens"] for row in metrics(Path(one.trainer.run_dir))) for one in (shared, config))
    assert rows < 0.9 * tokens
    compare_evaluations([config, shared])


@pytest.mark.exhaustive
@pytest.mark.parametrize("degrees", [{"tp": 2}, {"pp": 2}, {"tp": 2, "pp": 2}])
def test_tensor_and_pipeline_parallelism(tmp_path: Path, degrees: dict[str, int]) -> None:
    """Two HDP ranks of so many devices have the losses and evaluations of documents apart in one process."""
    config, shared = (replace(one, eval=EvalConfig(sources=one.data.sources, every=STEPS)) for one in pair(tmp_path, 1))
    parallel = replace(shared.parallel, ranks=2 * int(np.prod(list(degrees.values()))), capacity_tokens=128, **degrees)
    shared = replace(shared, parallel=parallel)
    np.testing.assert_allclose(run(shared), run(config), rtol=1e-8)
    rows, tokens = ([line["num_tokens"] for line in metrics(Path(one.trainer.run_dir))] for one in (shared, config))
    assert sum(rows) < 0.7 * sum(tokens)
    ours, wanted = (
        json.loads((Path(one.trainer.run_dir) / "evaluations.jsonl").read_text()) for one in (shared, config)
    )
    assert ours["loss"] == pytest.approx(wanted["loss"], rel=1e-8)
    corpus = prepare_corpus(config.data)
    found = check_record(Path(shared.trainer.run_dir) / "data", STEPS, corpus, shared.data)
    assert found.num_tokens == sum(tokens)


@pytest.mark.exhaustive
@pytest.mark.parametrize(("family", "changes"), [("qwen3", {}), ("gemma2", {"sliding_window": 60}), ("lfm2", {})])
def test_models_of_transformers(tmp_path: Path, family: str, changes: dict[str, int]) -> None:
    """Documents are longer than gemma's window; LFM2 has convolutions. Norms are computed in fp32, in both runs."""
    folder = hf_folder(tmp_path / "model", family, **changes)
    config, shared = (
        replace(with_trainer(one, init=f"hf:{folder}"), model=ModelConfig(preset=f"hf:{folder}"))
        for one in pair(tmp_path, 2)
    )
    np.testing.assert_allclose(run(shared), run(config), rtol=1e-6)
    rows, tokens = ([line["num_tokens"] for line in metrics(Path(one.trainer.run_dir))] for one in (shared, config))
    assert sum(rows) < 0.7 * sum(tokens)


def test_without_common_prefixes_a_run_stays_as_it_is(tmp_path: Path) -> None:
    config, shared = pair(tmp_path, 1)
    for one in (tmp_path / "corpus").iterdir():
        one.unlink()
    lines = [{"prompt": f"{number} {word}", "completion": " ".join(WORDS)} for number, word in enumerate(WORDS)]
    (tmp_path / "corpus" / "apart.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert run(shared) == pytest.approx(run(config), rel=1e-8)
    assert losses(Path(shared.trainer.run_dir))


def test_a_balance_loss_is_refused(tmp_path: Path) -> None:
    _, shared = pair(tmp_path, 1)
    shared = replace(shared, model=replace(shared.model, preset="tiny-moe"))
    with pytest.raises(ConfigError, match=r"router_aux_loss_weight = 0.02 and data.share_prefixes"):
        validate(shared)


def test_loops_of_ones_own_do_not_ignore_the_setting() -> None:
    hdp = bytescale.HDP(small_model("llama"), capacity_tokens=256)
    with (
        pytest.raises(ConfigError, match=r"hdp\.batches does not know data\.share_prefixes"),
        hdp.batches(DataConfig(share_prefixes=True)),
    ):
        pass


def test_operations_of_shared_rows_under_a_window() -> None:
    """Each row once, with the keys of its own document that its window reaches; a tree is no document."""
    whole = spec_of_llama("tiny")
    spec: Any = replace(whole, layers=tuple(replace(layer, window=16) for layer in whole.layers))
    forest = Forest(
        documents=np.array([0, 1]), lengths=np.array([10, 32]), shared=np.array([0, 5]), offsets=np.array([0, 2])
    )
    plan = SimpleNamespace(lengths=forest.sequence_lengths, num_tokens=37)
    data: Any = SimpleNamespace(forest=forest, plan=plan)
    twice_the_pairs = sum(2 * min(position + 0.5, 16) for position in forest.positions().tolist())
    found = Job.training_flops(SimpleNamespace(spec=spec), data)  # type: ignore[arg-type]
    assert found == spec.training_flops(num_tokens=37, sum_of_squares=twice_the_pairs)
    assert spec.squares_of(forest.sequence_lengths) != twice_the_pairs
