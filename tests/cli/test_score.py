"""``bytescale score``: the log-probabilities of transformers, in the caller's order, whatever happens in between."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow.parquet
import pytest
import torch

from bytescale import HDP, score
from bytescale.cli.score import ScoreOptions, prepare, run, score_on_ranks
from bytescale.common.errors import ConfigError, DataError
from bytescale.config.hugging_face import read_hf_config
from bytescale.hf.files.folder import read_model
from bytescale.hf.scoring.score_file import ScoreFile, _rows
from bytescale.parity import small_model
from tests.data.chats import chat_folder, conversations
from tests.data.support import write_jsonl
from tests.helpers.effort import one_of
from tests.helpers.forks import run_forked
from tests.hf.support import on_ranks

pytest.importorskip("transformers")
LENGTHS = (5, 200, 3, 90, 2, 150, 40, 40, 7)
SHORT = (5, 100, 3, 90, 2)
"""One rank holds each."""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A small Qwen3 with a tokenizer."""
    folder = chat_folder(tmp_path / "model")
    small_model("qwen3", vocab_size=400).save_pretrained(folder)
    return folder


def options(folder: Path, source: Path, out: Path, **changes: object) -> ScoreOptions:
    values = {"content": "tokens", "batch_tokens": 256, "capacity_tokens": 128, "dtype": "fp64", "num_workers": 1}
    return ScoreOptions(
        model=str(folder), sources=(str(source),), out=out, cache_dir=str(out.parent / "cache"), **{**values, **changes}
    )  # type: ignore[arg-type]


def load_model(folder: Path, dtype: torch.dtype) -> torch.nn.Module:
    return read_model(folder, read_hf_config(folder), dtype).eval()


def token_records(lengths: tuple[int, ...] = LENGTHS) -> list[dict]:
    random = np.random.default_rng(0)
    return [{"tokens": random.integers(0, 300, length).tolist()} for length in lengths]


def plain(folder: Path, tokens: list[int]) -> list[float]:
    """Of every token behind the first, as transformers computes it for one document."""
    model = load_model(folder, torch.float64)
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([tokens])).logits[0, :-1]
    return logits.log_softmax(-1).gather(1, torch.tensor(tokens[1:])[:, None])[:, 0].tolist()


def rows_of(path: Path) -> list[dict]:
    return pyarrow.parquet.read_table(path).to_pylist()


@pytest.mark.parametrize(
    ("num_ranks", "mesh"), [*one_of([(2, {}), (3, {}), (2, {"tp": 2})], (3, {})), (4, {"tp": 2, "pp": 2})]
)
def test_scores_are_those_of_transformers(tmp_path: Path, folder: Path, num_ranks: int, mesh: dict[str, int]) -> None:
    records = token_records(SHORT if mesh else LENGTHS)
    source = write_jsonl(tmp_path / "a.jsonl", records)
    wanted = options(folder, source, tmp_path / "out.parquet", ranks=num_ranks, **mesh)
    run_forked(num_ranks, lambda _: score_on_ranks(wanted))
    rows = rows_of(wanted.out)
    assert [row["document"] for row in rows] == list(range(len(records)))
    for row, record in zip(rows, records, strict=True):
        expected = plain(folder, record["tokens"])
        assert row["logprobs"] == pytest.approx(expected, abs=1e-10)
        assert row["logprob"] == pytest.approx(sum(expected), abs=1e-8)
        assert (row["num_tokens"], row["num_targets"]) == (len(record["tokens"]), len(expected))
    assert not ScoreFile(wanted.out).parts.exists()


def test_a_run_that_was_killed_continues_on_other_ranks(tmp_path: Path, folder: Path) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", token_records())
    whole, killed = (
        options(folder, source, tmp_path / f"{name}.parquet", ranks=2, dtype="fp32", invariant=True)
        for name in ("whole", "killed")
    )
    run_forked(2, lambda _: score_on_ranks(whole))

    def die_at_the_second(rank: int) -> None:
        write = ScoreFile.write

        def dying(self: ScoreFile, number: int, rows: dict) -> None:
            if number == 2:
                os._exit(9)
            write(self, number, rows)

        ScoreFile.write = dying  # type: ignore[method-assign]
        score_on_ranks(killed)

    with pytest.raises(AssertionError, match="died without an answer"):
        run_forked(2, die_at_the_second, kill_with_first=True)
    assert sorted(path.name for path in ScoreFile(killed.out).parts.glob("*.parquet")) == [
        "000000.parquet",
        "000001.parquet",
    ]
    with pytest.raises(AssertionError, match="was begun with batch_tokens = 256, and now it is 300"):
        run_forked(2, lambda _: score_on_ranks(replace(killed, batch_tokens=300)))
    run_forked(3, lambda _: score_on_ranks(replace(killed, ranks=3)))
    assert rows_of(killed.out) == rows_of(whole.out)


def test_the_command_scores_conversations(tmp_path: Path, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    records = conversations(6)
    source = write_jsonl(tmp_path / "a.jsonl", records)
    out = tmp_path / "out.parquet"
    arguments = [str(folder), str(source), "--content", "messages", "--out", str(out), "--dtype", "fp64"]
    assert run([*arguments, "--cache-dir", str(tmp_path / "cache")]) == 0
    assert "6 documents" in capsys.readouterr().out
    for row in rows_of(out):
        weights, found = np.array(row["weights"]), np.array(row["logprobs"])
        assert set(weights) == {0.0, 1.0}
        assert row["num_targets"] == weights.sum()
        assert row["logprob"] == pytest.approx(float((weights * found).sum()))
    with pytest.raises(ConfigError, match=r"out\.parquet exists"):
        run(arguments)


def test_labels_of_other_ids_and_weights_that_sum_to_zero(tmp_path: Path, folder: Path) -> None:
    """Scores are of labels; weights are those of rewards that are centred."""
    (record,) = token_records((9,))
    labels = [7, -100, 8, *record["tokens"][3:]]
    weights = [0.0, 1.0, 1.0, -1.0, 2.0, -2.0, 0.0, 0.0, 0.0]
    source = write_jsonl(tmp_path / "a.jsonl", [{**record, "labels": labels, "weights": weights}])
    wanted = options(folder, source, tmp_path / "out.parquet")
    run_forked(1, lambda _: score_on_ranks(wanted))
    (row,) = rows_of(wanted.out)
    model = load_model(folder, torch.float64)
    with torch.no_grad():
        logprobs = model(input_ids=torch.tensor([record["tokens"]])).logits[0, :-1].log_softmax(-1)
    targets = [record["tokens"][1], *labels[2:]]
    expected = [float(values[target]) for values, target in zip(logprobs, targets, strict=True)]
    assert row["logprobs"] == pytest.approx(expected, abs=1e-10)
    assert row["weights"] == [0.0, *weights[2:]]  # a label of -100 has weight 0
    assert row["num_targets"] == 4
    assert row["logprob"] == pytest.approx(sum(w * x for w, x in zip(row["weights"], expected, strict=True)), abs=1e-10)


def test_a_token_of_weight_0_is_left_out_of_the_sum() -> None:
    document = {
        "tokens": np.arange(3),
        "labels": np.array([1, 2, -100]),
        "weights": np.array([0.0, 0.5, 0.0], np.float32),
    }
    rows = _rows(0, [document], [np.array([-np.inf, -4.0, 0.0])], has_weights=True)
    assert (rows["logprob"].tolist(), rows["num_targets"].tolist()) == ([-2.0], [1])
    assert rows["logprobs"][0].tolist() == [-np.inf, -4.0]


def test_an_output_that_cannot_be_written(tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A path below a file is refused beforehand. A full disk costs the part that is being written."""
    source = write_jsonl(tmp_path / "a.jsonl", token_records())
    with pytest.raises(ConfigError, match=r"out\.parquet cannot be written \(.*a\.jsonl is no folder"):
        run([str(folder), str(source), "--out", str(source / "out.parquet")])
    output = ScoreFile(tmp_path / "out.parquet")
    output.begin({})
    output.write(0, {"document": [0]})

    def full(*arguments: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(pyarrow.parquet, "write_table", full)
    with pytest.raises(DataError, match=r"000001\.parquet cannot be written .*No space left.* continues behind them"):
        output.write(1, {"document": [1]})
    assert sorted(path.name for path in output.parts.iterdir()) == ["000000.parquet", "settings.json"]
    assert output.begin({}) == 1


def test_scores_in_python(folder: Path) -> None:
    """Streamed: documents are taken from an iterator, batch by batch, and unequal numbers per rank are fine."""
    records = token_records((90, 3, 3, 3, 70, 2))

    def work(group: torch.distributed.ProcessGroup, model: torch.nn.Module) -> list[torch.Tensor]:
        hdp = HDP(model.eval(), group, capacity_tokens=64, forward_only=True)
        taken = []

        def documents():
            for record in records:
                taken.append(record)
                yield record

        scores = score(hdp, documents(), batch_tokens=100)
        first = next(scores)
        assert len(taken) == 5  # the first batch, and the document that no longer fits
        return [first, *scores]

    for scores in on_ranks(2, load_model(folder, torch.float64), work):
        for found, record in zip(scores, records, strict=True):
            assert found[:-1].tolist() == pytest.approx(plain(folder, record["tokens"]), abs=1e-10)


def test_a_config_that_names_its_architecture_alone(tmp_path: Path) -> None:
    """As training takes it: one place reads the config.json of a folder."""
    folder = chat_folder(tmp_path / "model")
    small_model("llama", vocab_size=400).save_pretrained(folder)
    content = json.loads((folder / "config.json").read_text())
    assert content.pop("model_type") == "llama"
    (folder / "config.json").write_text(json.dumps(content))
    out = tmp_path / "out.parquet"
    records = write_jsonl(tmp_path / "a.jsonl", token_records((5,)))
    assert run([str(folder), str(records), "--content", "tokens", "--out", str(out), "--dtype", "fp64"]) == 0
    assert rows_of(out)[0]["logprobs"] == pytest.approx(plain(folder, token_records((5,))[0]["tokens"]))


def test_what_cannot_be_scored(tmp_path: Path, folder: Path) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", [*token_records((5,)), *token_records((300,))])
    out = tmp_path / "out.parquet"
    too_long = "the document has 300 tokens, but 1 ranks of 128 tokens hold 128"
    with pytest.raises(DataError, match=f"a.jsonl:2: {too_long}"):
        score_on_ranks(options(folder, source, out))
    long_text = write_jsonl(tmp_path / "l.jsonl", [{"text": "x"}, {"text": "y " * 400}])
    with pytest.raises(DataError, match=r"l.jsonl:2: the document has"):
        score_on_ranks(options(folder, long_text, out, content="text"))
    texts = write_jsonl(tmp_path / "t.jsonl", [{"text": "x"}, {"text": ""}])
    with pytest.raises(DataError, match="1 documents are empty"):
        score_on_ranks(options(folder, texts, out, content="text"))
    named: list[tuple[str, str]] = [
        (str(tmp_path), "config.json cannot be read .*bytescale convert"),
        ("", "(?i)no model is named"),
    ]
    for model, why in named:
        with pytest.raises(ConfigError, match=why):
            run(["--model", model, str(source), "--out", str(out)])
    with pytest.raises(
        ConfigError, match=r"(?i)ids would stand for other tokens than those that the weights have learned"
    ):
        prepare(options(folder, source, out, tokenizer="bytes"))
    with pytest.raises(ConfigError, match="3 ranks are no multiple of tp = 2 x pp = 1"):
        prepare(options(folder, source, out, ranks=3, tp=2))
    with pytest.raises(ConfigError, match="--capacity_tokens is 0"):
        run([str(folder), str(source), "--out", str(out), "--capacity-tokens", "0"])
    small_model("gpt2", vocab_size=400).save_pretrained(folder)
    with pytest.raises(ConfigError, match=r"(?i)a document has 300 tokens, and the model has a table of 128 positions"):
        prepare(options(folder, source, out, capacity_tokens=400))
    (folder / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match="does not say its model_type"):
        load_model(folder, torch.float32)
    assert not out.exists()
