"""Fine-tuning data through readers, pairs and loaders: every label has the weight that its record gives it."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from bytescale.cli.main import run
from bytescale.common.errors import ConfigError, DataError
from bytescale.common.labels import IGNORE_INDEX
from bytescale.config.schema import DataConfig
from bytescale.data.loading.corpus import Corpus, prepare_corpus
from bytescale.data.loading.loader import Loader
from bytescale.data.order.batches import batches_once
from bytescale.data.tokens.indexed import IndexedDataset
from tests.data.chats import chat_folder, conversations
from tests.data.http_server import http_server
from tests.data.support import config, read, read_whole, steps_of, write_jsonl
from tests.data.test_loader import plan_on_one_rank, random_planner

RECORDS = [
    {"tokens": [5, 6, 7, 8], "labels": [-100, 6, -100, 8], "weights": [9.0, 0.5, 3.0, 2.0]},
    {"tokens": [1, 2], "weights": [0.25, -1.5]},
    {"input_ids": list(range(50, 80)), "labels": [-100] * 10 + list(range(60, 80))},
]
EXPECTED = [[0, 0.5, 0, 2.0], [0.25, -1.5], [0.0] * 10 + [1.0] * 20]


def tokens_config(tmp_path: Path, *sources: object, **settings: Any) -> DataConfig:
    return config(tmp_path, *sources, **{"content": "tokens", "context_length": 8, **settings})


def weights_by_label(corpus: Corpus) -> list[list[float]]:
    """Of every sample, the weights of its labels."""
    samples = corpus.samples
    found = read(corpus, samples.name, np.zeros_like(samples.length), samples.length, ["weights"])[2]["weights"]
    parts = np.split(found, np.cumsum(samples.length)[:-1])
    return [part[:count].tolist() for part, count in zip(parts, samples.num_targets, strict=True)]


def pair_of(tmp_path: Path, source: Path) -> Path:
    """The same records as a pair, with their weights in a second pair."""
    assert run("data tokenize", [str(source), "--content", "tokens", "--output", str(tmp_path / "pair" / "all")]) == 0
    return tmp_path / "pair"


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "bin"])
def test_labels_and_weights(tmp_path: Path, kind: str) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", RECORDS)
    if kind == "parquet":
        rows = [
            {"tokens": r.get("tokens") or r["input_ids"], **{k: r.get(k) for k in ("labels", "weights")}}
            for r in RECORDS
        ]
        source = tmp_path / "a.parquet"
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), source)
    elif kind == "bin":
        source = pair_of(tmp_path, source)
        assert sorted(path.name for path in source.iterdir()) == [
            "all.bin", "all.idx", "all.meta.json", "all.weights.bin", "all.weights.idx",
        ]  # fmt: skip
    corpus = prepare_corpus(tokens_config(tmp_path, source, over_length="truncate"))
    assert weights_by_label(corpus) == [EXPECTED[0][1:], EXPECTED[1][1:], [0.0] * 7]
    split = prepare_corpus(tokens_config(tmp_path, source))
    assert weights_by_label(split) == [
        EXPECTED[0][1:], EXPECTED[1][1:], [0.0] * 8, [0.0] + [1.0] * 7, [1.0] * 8, [1.0] * 5,
    ]  # fmt: skip
    assert split.samples.num_trained.tolist() == [2, 1, 0, 7, 8, 5]
    assert split.samples.weight_sums.tolist() == [2.5, 1.5, 0.0, 7.0, 8.0, 5.0]


@pytest.mark.parametrize(("loss_per", "divisor"), [("token", 23.0), ("weight", 24.0), ("sequence", 5.0)])
def test_the_loaders_data_is_that_of_the_records(tmp_path: Path, loss_per: str, divisor: float) -> None:
    """All ranks together hold every label once, with its weight; the divisor is that of the global batch."""
    source = write_jsonl(tmp_path / "a.jsonl", RECORDS)
    corpus = prepare_corpus(tokens_config(tmp_path, source))
    total, labels = 0.0, 0
    for rank in range(3):
        settings = {"context_length": 36, "batch_tokens": 36, "shuffle_seed": 1, "loss_per": loss_per}
        (step,) = steps_of(corpus, random_planner(3, 5), rank, stop_step=1, **settings)
        assert (step.num_targets, step.loss_divisor) == (23, divisor)
        for data in step.micro_batches:
            assert data.weights is not None
            assert ((data.labels != IGNORE_INDEX) == (data.weights != 0)).all()
            total += float(np.abs(data.weights).sum())
            labels += int((data.labels != IGNORE_INDEX).sum())
    assert labels == 23
    assert total == pytest.approx({"token": 24.0, "weight": 24.0, "sequence": 5.0}[loss_per])


def test_pairs_and_records_give_the_same_steps_to_the_last_bit(tmp_path: Path) -> None:
    folder = chat_folder(tmp_path / "model")
    source = write_jsonl(tmp_path / "a.jsonl", conversations(40))
    output = str(tmp_path / "pair" / "all")
    options = ["--content", "messages", "--tokenizer", str(folder)]
    assert run("data tokenize", [str(source), *options, "--output", output]) == 0
    steps = []
    for name in (source, f"{output}.bin"):
        settings = config(
            tmp_path, name, content="messages", tokenizer=str(folder), context_length=50, batch_tokens=300,
            loss_per="sequence",
        )  # fmt: skip
        corpus = prepare_corpus(settings)
        steps.append(list(Loader(corpus, settings, 0).steps(plan_on_one_rank, 4)))
    for ours, theirs in zip(*steps, strict=True):
        assert (ours.num_targets, ours.loss_divisor) == (theirs.num_targets, theirs.loss_divisor)
        for a, b in zip(ours.micro_batches, theirs.micro_batches, strict=True):
            assert a.tokens.tolist() == b.tokens.tolist()
            assert a.labels.tolist() == b.labels.tolist()
            assert a.weights.tolist() == b.weights.tolist()


def test_prompt_and_completion(tmp_path: Path) -> None:
    source = write_jsonl(
        tmp_path / "a.jsonl", [{"prompt": "1+1=", "completion": "2"}, {"prompt": "", "completion": "x"}]
    )
    corpus = prepare_corpus(config(tmp_path, source, content="prompt"))
    assert [read_whole(corpus, [sample])[0].tolist() for sample in corpus.samples.name.tolist()] == [
        [*b"1+1=", *b"2", 256],
        [*b"x", 256],
    ]
    assert weights_by_label(corpus) == [[0, 0, 0, 1, 1], [1]]


@pytest.mark.parametrize("kind", ["jsonl", "bin"])
def test_labels_that_are_not_the_tokens(tmp_path: Path, kind: str) -> None:
    """What is predicted at the place of a token is its label, also where a sample ends; weights count as before."""
    records = [
        {"tokens": [1, 2, 3, 4, 5], "labels": [1, 200, -100, 4, 50], "weights": [1, 2, 3, 4, 5]},
        {"tokens": [6, 7, 8], "labels": [-100, 7, 8]},
    ]
    source = write_jsonl(tmp_path / "a.jsonl", records)
    if kind == "bin":
        source = pair_of(tmp_path, source)
        assert np.fromfile(source / "all.labels.bin", "<i4").tolist() == [1, 200, 3, 4, 50, 6, 7, 8]
    corpus = prepare_corpus(tokens_config(tmp_path, source, context_length=3))
    samples = corpus.samples.name
    tokens, labels = read_whole(corpus, samples)
    assert tokens.tolist() == [1, 2, 3, 4, 5, 6, 7, 8]
    assert labels.tolist() == [200, 3, 4, 50, IGNORE_INDEX, 7, 8, IGNORE_INDEX]
    assert weights_by_label(corpus) == [[2, 0, 4], [5], [1, 1]]
    (batch,) = batches_once(corpus.index, 100)
    assert [document["labels"].tolist() for document in corpus.documents(batch.samples)] == [
        [200, 3, 4], [50, IGNORE_INDEX], [7, 8, IGNORE_INDEX],
    ]  # fmt: skip


def test_labels_of_mixed_sources_and_of_another_program(tmp_path: Path) -> None:
    """A pair with labels and one without become one; ids that the model does not have are known beforehand."""
    first = write_jsonl(tmp_path / "a.jsonl", [{"tokens": [1, 2, 3], "labels": [1, 9, 3]}])
    second = write_jsonl(tmp_path / "b.jsonl", [{"tokens": [4, 5]}])
    for path in (first, second):
        prefix = str(tmp_path / "parts" / path.stem)
        assert run("data tokenize", [str(path), "--content", "tokens", "--output", prefix]) == 0
    assert run("data tokenize", [str(tmp_path / "parts"), "--output", str(tmp_path / "whole" / "all")]) == 0
    assert np.fromfile(tmp_path / "whole" / "all.labels.bin", "<i4").tolist() == [1, 9, 3, 4, 5]
    alone = tmp_path / "whole" / "all.meta.json"
    alone.unlink()
    labels = np.array([1, 70_000, 3, 4, 5], "<i4")
    labels.tofile(tmp_path / "whole" / "all.labels.bin")
    assert prepare_corpus(config(tmp_path, tmp_path / "whole")).metadata.vocab_size == 70_001
    labels[1] = -100
    labels.tofile(tmp_path / "whole" / "all.labels.bin")
    with pytest.raises(DataError, match=r"labels holds -100"):
        prepare_corpus(config(tmp_path, tmp_path / "whole"))
    assert (
        run(
            "data tokenize",
            [str(second), "--content", "tokens", "--output", str(tmp_path / "whole" / "all"), "--overwrite"],
        )
        == 0
    )
    assert not (tmp_path / "whole" / "all.labels.idx").exists()


def test_further_fields_of_pairs_in_a_folder(tmp_path: Path) -> None:
    """Their pairs are no sources of their own; a copy of a pair keeps them."""
    records = [{"tokens": [1, 2, 3], "advantages": [0, 0.5, -2]}, {"tokens": [4, 5], "advantages": [7, 8]}]
    source, again = write_jsonl(tmp_path / "a.jsonl", records), str(tmp_path / "again" / "all")
    options = ["--content", "tokens", "--fields", "advantages"]
    assert run("data tokenize", [str(source), *options, "--output", str(tmp_path / "pair" / "all")]) == 0
    assert run("data tokenize", [str(tmp_path / "pair"), *options, "--output", again]) == 0
    for place in (source, tmp_path / "pair", f"{again}.bin"):
        corpus = prepare_corpus(tokens_config(tmp_path, place, fields=("advantages",)))
        assert read(corpus, corpus.samples.name, [0, 0], [3, 2], ["advantages"])[2]["advantages"].tolist() == [
            0.5,
            -2,
            0,
            8,
            0,
        ]
    with pytest.raises(DataError, match=r"all\.bin has no field 'rewards', which data\.fields names"):
        run(
            "data tokenize",
            [
                str(tmp_path / "pair/all.bin"),
                "--content",
                "tokens",
                "--fields",
                "rewards",
                "--output",
                f"{again}2",
            ],
        )


def test_further_fields(tmp_path: Path) -> None:
    records = [{"tokens": [1, 2, 3], "advantages": [0, 0.5, -2]}, {"tokens": [4, 5], "advantages": [7, 8]}]
    settings = tokens_config(tmp_path, write_jsonl(tmp_path / "a.jsonl", records), fields=("advantages",))
    corpus = prepare_corpus(settings)
    samples = corpus.samples.name
    found = read(corpus, samples, [0, 0], [3, 2], ["advantages", "weights"])[2]
    assert found["advantages"].tolist() == [0.5, -2, 0, 8, 0]
    assert found["weights"].tolist() == [1, 1, 0, 1, 0]
    (batch,) = batches_once(corpus.index, 100)
    documents = corpus.documents(batch.samples, ["weights", "advantages"])
    assert [document["tokens"].tolist() for document in documents] == [[1, 2, 3], [4, 5]]
    assert [document["labels"].tolist() for document in documents] == [[2, 3, IGNORE_INDEX], [5, IGNORE_INDEX]]
    assert [document["advantages"].tolist() for document in documents] == [[0.5, -2, 0], [8, 0]]
    without = write_jsonl(tmp_path / "b.jsonl", [*records, {"tokens": [1, 2]}])
    with pytest.raises(DataError, match=r"b\.jsonl:3 has no key 'advantages', which data\.fields names"):
        prepare_corpus(tokens_config(tmp_path, without, fields=("advantages",)))
    missing = tokens_config(tmp_path, pair_of(tmp_path, tmp_path / "a.jsonl"), fields=("advantages",))
    with pytest.raises(DataError, match=r"all\.bin has no field 'advantages', which data\.fields names"):
        prepare_corpus(missing)


def test_weights_in_pairs_of_another_program(tmp_path: Path) -> None:
    """A pair without .meta.json; its weights may be whole numbers. Weights that go away are noticed."""
    pair = pair_of(tmp_path, write_jsonl(tmp_path / "a.jsonl", RECORDS))
    with_facts = weights_by_label(prepare_corpus(config(tmp_path, pair)))
    (pair / "all.meta.json").rename(tmp_path / "kept")
    assert weights_by_label(prepare_corpus(config(tmp_path, pair / "all.bin"))) == with_facts
    (tmp_path / "kept").rename(pair / "all.meta.json")
    (pair / "all.weights.idx").unlink()
    with pytest.raises(DataError, match=r"all\.bin was made with weights, which do not lie beside it"):
        prepare_corpus(config(tmp_path, pair / "all.bin"))


def test_weights_of_a_pair_behind_a_url(tmp_path: Path) -> None:
    """They are fetched with the tokens; a pair without weights is read in place as before."""
    pytest.importorskip("aiohttp", reason="fsspec reads http:// with aiohttp")
    pair = pair_of(tmp_path, write_jsonl(tmp_path / "a.jsonl", RECORDS))
    here = weights_by_label(prepare_corpus(config(tmp_path, pair / "all.bin")))
    with http_server() as served:
        served.contents.update({f"/{path.name}": path.read_bytes() for path in pair.iterdir()})
        there = prepare_corpus(config(tmp_path, f"{served.url}/all.bin", cache_dir=str(tmp_path / "other")))
        assert there.index.has_weights
        assert weights_by_label(there) == here


def test_weights_of_other_documents(tmp_path: Path) -> None:
    pair = pair_of(tmp_path, write_jsonl(tmp_path / "a.jsonl", RECORDS))
    write_jsonl(tmp_path / "b.jsonl", RECORDS[:2])
    assert (
        run("data tokenize", [str(tmp_path / "b.jsonl"), "--content", "tokens", "--output", str(tmp_path / "b")]) == 0
    )
    for ending in ("bin", "idx"):
        (tmp_path / f"b.weights.{ending}").rename(pair / f"all.weights.{ending}")
    with pytest.raises(DataError, match="describes 2 documents with 6 numbers, for 3 documents with 36 tokens"):
        IndexedDataset.open(pair / "all.bin")


def test_not_a_number_in_a_second_pair(tmp_path: Path) -> None:
    pair = pair_of(tmp_path, write_jsonl(tmp_path / "a.jsonl", RECORDS))
    weights = np.fromfile(pair / "all.weights.bin", "<f4")
    weights[3] = np.nan
    weights.tofile(pair / "all.weights.bin")
    with pytest.raises(DataError, match=r"all\.weights\.bin: the weight of token 3 is nan"):
        prepare_corpus(config(tmp_path, pair / "all.bin"))


@pytest.mark.parametrize(
    ("content", "record", "message"),
    [
        ("tokens", {"tokens": [1, 2], "labels": [1]}, "'labels' has 1 numbers for 2 tokens"),
        ("tokens", {"tokens": [1, 2], "weights": [1, 1, 1]}, "'weights' has 3 numbers for 2 tokens"),
        ("tokens", {"tokens": [1, 2], "weights": [1, math.inf]}, r"Weights\[1\] is inf"),
        ("tokens", {"tokens": [1, 2], "weights": [1, math.nan]}, r"Weights\[1\] is nan"),
        ("tokens", {"tokens": [1, 2], "weights": [1, 1e60]}, r"Weights\[1\] is 1e\+60"),
        ("tokens", {"tokens": [1, 2], "labels": [1, 999]}, r"Labels\[1\] is 999, but tokenizer 'bytes' has the ids 0"),
        ("tokens", {"tokens": [1, 2], "labels": [1, -1]}, r"Labels\[1\] is -1"),
        ("tokens", {"tokens": [1, 2, 3], "labels": [2, 3, -100]}, r"are the next tokens: labels\[0\] is token 1"),
        ("tokens", {"tokens": [1, 2.5]}, "'tokens' is not a list of whole numbers"),
        ("tokens", {"tokens": "text"}, "'tokens' is not a list of whole numbers"),
        ("tokens", {"tokens": []}, "'tokens' is empty"),
        ("tokens", {"tokens": [1, 999]}, r"holds id 999, but tokenizer 'bytes' has the ids 0 to 256"),
        ("tokens", {"tokens": [1, 2], "labels": [-100, -100]}, "there is nothing to train on"),
        ("tokens", {"tokens": [1]}, "there is nothing to train on"),
        ("tokens", {"text": "x"}, r"has no key 'tokens' or 'input_ids', which data\.content = 'tokens' needs"),
        ("tokens", {"tokens": [1], "input_ids": [1]}, "which of them holds its tokens cannot be told"),
        ("prompt", {"prompt": "x"}, "has no key 'completion'"),
        ("prompt", {"prompt": [1], "completion": "x"}, "'prompt' is a list, not a string"),
        ("prompt", {"prompt": "x", "completion": ""}, "the completion is empty"),
        ("messages", {"messages": []}, "'messages' is not a list of messages"),
        ("messages", {"messages": [{"content": "x"}]}, "message 0 has no role"),
        ("messages", {"messages": [{"role": "user"}]}, r"message 0 \(user\) has no content"),
        ("messages", {"messages": [{"role": "user", "content": "x"}]}, "there is nothing to train on"),
        (
            "messages",
            {"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y", "weight": "z"}]},
            "the weight of message 1 is 'z'",
        ),
        ("messages", {"messages": [{"role": "user", "content": "\ud800"}]}, "half a surrogate pair"),
    ],
)  # fmt: skip
def test_bad_records_are_named_with_file_and_line(
    tmp_path: Path, content: str, record: dict[str, Any], message: str
) -> None:
    good: dict[str, Any] = {
        "tokens": {"tokens": [1, 2]},
        "prompt": {"prompt": "a", "completion": "b"},
        "messages": conversations(1)[0],
    }[content]
    source = write_jsonl(tmp_path / "a.jsonl", [good, record, good])
    tokenizer = str(chat_folder(tmp_path / "model")) if content == "messages" else "bytes"
    settings = config(tmp_path, source, content=content, tokenizer=tokenizer)
    with pytest.raises(DataError, match=f"(?i)a.jsonl:2.*{message}"):
        prepare_corpus(settings)
    corpus = prepare_corpus(replace(settings, max_corrupt_records=1))
    assert corpus.metadata.counts.num_documents == 2


def test_bad_parquet_rows_are_named_too(tmp_path: Path) -> None:
    rows = pyarrow.Table.from_pylist([{"tokens": [1, 2]}, {"tokens": [3]}])
    pyarrow.parquet.write_table(rows, tmp_path / "a.parquet")
    with pytest.raises(DataError, match=r"a\.parquet, row 2: There is nothing to train on"):
        prepare_corpus(tokens_config(tmp_path, tmp_path / "a.parquet"))
    pyarrow.parquet.write_table(rows.rename_columns(["token"]), tmp_path / "b.parquet")
    with pytest.raises(DataError, match=r"b\.parquet has no column 'tokens' or 'input_ids'.*did you mean 'token'"):
        prepare_corpus(tokens_config(tmp_path, tmp_path / "b.parquet"))


def test_settings_that_do_not_go_together(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("text")
    source = write_jsonl(tmp_path / "a.jsonl", RECORDS)
    for settings, message in [
        (config(tmp_path, tmp_path / "a.txt", content="tokens"), r"a\.txt is text, but data\.content is 'tokens'"),
        (config(tmp_path, source, content="tokens", tokenizer="bpe"), "a tokenizer is trained on texts"),
        (config(tmp_path, source, content="tokens", chat_template="x"), r"data\.chat_template is set"),
        (config(tmp_path, source, content="prompt", fields=("x",)), r"data\.fields is set"),
        (config(tmp_path, source, fields=("x",)), r'data\.fields is set, but data\.content is "text"'),
        (config(tmp_path, source, content="tokens", fields=("labels",)), r"'labels' could not be told from"),
        (config(tmp_path, source, content="tokens", fields=("x", "x")), "one would be lost"),
    ]:
        with pytest.raises(ConfigError, match=f"(?i){message}"):
            prepare_corpus(settings)
    with pytest.raises(DataError, match=r"has no key 'text'.*set data\.content = 'tokens'"):
        prepare_corpus(config(tmp_path, write_jsonl(tmp_path / "b.jsonl", [{"tokens": [1]}])))


def test_data_show_prints_labels_that_are_not_the_tokens(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", [{"tokens": [*b"abcd"], "labels": [-100, *b"bxd"]}])
    options = ["--content", "tokens", "--cache-dir", str(tmp_path)]
    assert run("data show", [str(source), *options, "--json"]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(row["text"], row["predicted"], row["weight"]) for row in rows] == [
        ("a", "", 0), ("b", "", 1), ("c", "x", 1), ("d", "", 1),
    ]  # fmt: skip
    assert run("data show", [str(source), *options]) == 0
    assert "'c' -> 'x'" in capsys.readouterr().out


def test_data_show_prints_what_is_trained_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = write_jsonl(
        tmp_path / "a.jsonl", [{"prompt": "1+1=", "completion": "2"}, {"prompt": "a", "completion": "b"}]
    )
    assert run("data show", [str(source), "--content", "prompt", "--cache-dir", str(tmp_path), "--documents", "1"]) == 0
    shown = capsys.readouterr().out
    assert "'1+1='" in shown
    assert "2 of 6 tokens" in shown
    assert "'2<eos>'" in shown, "whether the end is trained on is what people look for"
    assert run("data show", [str(source), "--content", "prompt", "--cache-dir", str(tmp_path), "--json"]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(row["document"], row["start"], row["stop"], row["weight"]) for row in rows] == [
        (0, 0, 4, 0.0), (0, 4, 6, 1.0), (1, 0, 1, 0.0), (1, 1, 3, 1.0),
    ]  # fmt: skip
