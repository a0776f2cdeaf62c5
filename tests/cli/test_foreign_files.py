"""Files that strangers made: each wrong one is one clear message, before anything is built, copied or read."""

from __future__ import annotations

import base64
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import tokenizers
import torch
from safetensors.torch import save_file

from bytescale.cli.main import main
from bytescale.common.errors import BytescaleError, ConfigError, DataError, PlanError
from bytescale.config.description import ModelDescription
from bytescale.config.foreign_config import refuse_links_out
from bytescale.config.hugging_face import read_hf_config
from bytescale.config.load import load_config
from bytescale.config.resolve import resolve_model
from bytescale.config.schema import DataConfig, ModelConfig
from bytescale.data.loading.corpus import prepare_corpus
from bytescale.data.order.batches import BatchSampler
from bytescale.data.sources import parquet, records
from bytescale.data.sources.files import expand_sources
from bytescale.data.tokens.chat import load_template
from bytescale.data.tokens.tokenizer import load_tokenizer
from bytescale.hf.files.folder import empty_model
from bytescale.hf.files.hf_folder import stored_tensors
from bytescale.plan.io import load_plan
from tests.data.support import write_jsonl

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 304, "hidden_size": 64,
    "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 512, "rms_norm_eps": 1e-6,
}  # fmt: skip
QWEN: dict[str, Any] = {**LLAMA, "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "head_dim": 16}
WRONG: list[tuple[str, Any]] = [
    ("num_attention_heads", 0), ("num_attention_heads", -4), ("num_attention_heads", "four"), ("hidden_size", "64"),
    ("hidden_size", float("nan")), ("hidden_size", 6.5), ("num_hidden_layers", 10**9), ("num_hidden_layers", 0),
    ("vocab_size", 10**15), ("vocab_size", -1), ("head_dim", 0), ("num_key_value_heads", 0), ("rms_norm_eps", "x"),
    ("rms_norm_eps", -1.0), ("hidden_act", "nope"), ("hidden_act", 3), ("rope_scaling", {"rope_type": "nope"}),
    ("rope_scaling", "x"), ("rope_scaling", {"type": "linear"}), ("rope_parameters", [1]), ("rope_theta", float("nan")),
    ("rope_parameters", {"rope_type": "default", "rope_theta": "x"}), ("_attn_implementation", "kernels/evil"),
    ("attn_implementation", "evil/x:y"), ("intermediate_size", 0), ("architectures", 3), ("architectures", []),
    ("quantization_config", 3), ("text_config", 3),
    ("query_pre_attn_scalar", -1), ("v_head_dim", 0),
    ("num_labels", 10**10), ("layer_types", ["nope", "nope"]), ("model_type", 3),
]  # fmt: skip


def in_folder(path: Path, content: dict[str, Any]) -> Path:
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(content))
    return path


@pytest.mark.parametrize("base", [LLAMA, QWEN], ids=["llama", "qwen3"])
def test_every_wrong_value_of_a_config_json_is_one_clear_error(tmp_path: Path, base: dict[str, Any]) -> None:
    for number, (name, value) in enumerate(WRONG):
        folder = in_folder(tmp_path / str(number), {**base, name: value})
        with pytest.raises(ConfigError, match="To fix"):  # noqa: PT012
            shape = resolve_model(ModelConfig(preset=f"hf:{folder}"))
            content = shape.content if isinstance(shape, ModelDescription) else read_hf_config(folder)
            empty_model(content)
            pytest.fail(f"{name} = {value!r} was taken")


@pytest.mark.parametrize("base", [LLAMA, QWEN], ids=["llama", "qwen3"])
def test_right_configs_stay_as_they_are(tmp_path: Path, base: dict[str, Any]) -> None:
    content = {**base, "time_step_limit": [0.0, float("inf")], "num_experts": 0, "head_dim": None}
    assert read_hf_config(in_folder(tmp_path / "a", content)) == content
    shown = {**content, "_attn_implementation": "flash_attention_2"}
    assert read_hf_config(in_folder(tmp_path / "b", shown)) == content, "bytescale computes attention itself"


def test_nothing_outside_of_a_folder_is_read(tmp_path: Path) -> None:
    folder, secret = in_folder(tmp_path / "model", LLAMA), tmp_path / "secret"
    secret.write_text("x")
    save_file({"a": torch.zeros(1)}, tmp_path / "outside.safetensors")
    for named in ("../outside.safetensors", str(tmp_path / "outside.safetensors"), 3, "", ".."):
        index = {"metadata": {}, "weight_map": {"a": named}}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
        with pytest.raises(ConfigError, match="which is no file of that folder"):
            stored_tensors(folder)
    (folder / "merges.txt").symlink_to(secret)
    with pytest.raises(ConfigError, match=r"is a link to .*outside of its folder"):
        read_hf_config(folder)
    (folder / "merges.txt").unlink()
    (folder / "inside.txt").write_text("y")
    (folder / "vocab.json").symlink_to(folder / "inside.txt")
    refuse_links_out(folder)


def test_an_adapter_is_no_model(tmp_path: Path) -> None:
    """transformers would take the weights of the model that it names, wherever they lie."""
    folder = in_folder(tmp_path / "adapter", LLAMA)
    (folder / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "/somewhere/else"}))
    with pytest.raises(ConfigError, match=r"holds an adapter .*merge_and_unload"):
        read_hf_config(folder)


def test_the_hubs_cache_is_links_by_design(tmp_path: Path) -> None:
    snapshot, blobs = tmp_path / "models--a--b" / "snapshots" / "c0ffee", tmp_path / "models--a--b" / "blobs"
    for folder in (snapshot, blobs):
        folder.mkdir(parents=True)
    (blobs / "1").write_text(json.dumps(LLAMA))
    (snapshot / "config.json").symlink_to("../../blobs/1")
    assert read_hf_config(snapshot) == LLAMA
    (snapshot / "merges.txt").symlink_to("../../../secret")
    with pytest.raises(ConfigError, match="is a link to"):
        read_hf_config(snapshot)


PANICS: list[dict[str, Any]] = [
    {"normalizer": {"type": "Precompiled",
                    "precompiled_charsmap": base64.b64encode(b"\x04\0\0\0abcd").decode()}},
    {"normalizer": {"type": "Precompiled", "precompiled_charsmap": ""}},
    {"model": {"type": "BPE", "vocab": {"a": 1, "b": 2}, "merges": [["a", "b"]]}},
    {"pre_tokenizer": {"type": "FixedLength", "length": 0}},
    {"model": {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "zz"}},
]  # fmt: skip


@pytest.mark.parametrize("number", range(len(PANICS)))
def test_a_tokenizer_at_which_the_library_panics(tmp_path: Path, number: int) -> None:
    """A panic is no Exception, so it would get past every handler."""
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.add_special_tokens(["<eos>"])
    (tmp_path / "tokenizer.json").write_text(json.dumps({**json.loads(made.to_str()), **PANICS[number]}))
    write_jsonl(tmp_path / "a.jsonl", [{"text": "hello wörld 你"}])
    data = DataConfig(sources=(str(tmp_path / "a.jsonl"),), tokenizer=str(tmp_path), cache_dir=str(tmp_path / "cache"))
    with pytest.raises(DataError, match="To fix"):  # noqa: PT012
        load_tokenizer(data.tokenizer)
        prepare_corpus(data)


def small_tokenizer() -> dict[str, Any]:
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.add_special_tokens(["<eos>"])
    return dict(json.loads(made.to_str()))


def test_padding_of_a_tokenizer_is_left_out(tmp_path: Path) -> None:
    """Padding to so many tokens would end the process: no memory has room for them."""
    padding = {"strategy": {"Fixed": 10**12}, "direction": "Right", "pad_to_multiple_of": None, "pad_id": 0,
               "pad_type_id": 0, "pad_token": "<eos>"}  # fmt: skip
    (tmp_path / "tokenizer.json").write_text(json.dumps({**small_tokenizer(), "padding": padding}))
    assert load_tokenizer(str(tmp_path), bos="auto").eos_id == 0


@pytest.mark.parametrize("template", [3, ["a"], [{"name": "default"}], {"default": 3}, [{"template": "x"}]])
def test_a_chat_template_that_is_none(tmp_path: Path, template: Any) -> None:
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    with pytest.raises(ConfigError, match="has no chat template"):
        load_template(DataConfig(tokenizer=str(tmp_path)))


def test_links_in_a_circle(tmp_path: Path) -> None:
    (tmp_path / "config.json").symlink_to("config.json")
    with pytest.raises(ConfigError, match="To fix"):
        read_hf_config(tmp_path)


def test_times_that_no_calendar_has(tmp_path: Path) -> None:
    times = pyarrow.array([2**62], pyarrow.timestamp("us"))
    pyarrow.parquet.write_table(pyarrow.table({"text": times}), tmp_path / "a.parquet")
    with pytest.raises(DataError, match="cannot be read near row 1"):
        prepare_corpus(DataConfig(sources=(str(tmp_path),), cache_dir=str(tmp_path / "cache")))


def test_a_panic_anywhere_is_one_message(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    panic = type("PanicException", (BaseException,), {"__module__": "pyo3_runtime"})

    def run(command: str, arguments: list[str]) -> int:
        raise panic("index out of bounds")

    monkeypatch.setattr("bytescale.cli.main.run", run)
    assert main(["init"]) == 1
    assert "index out of bounds" in capsys.readouterr().err


def test_rows_of_parquet_are_read_by_their_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parquet, "_BATCH_BYTES", 2**20)
    table = pyarrow.table({"text": ["x" * 2**17] * 40})
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    sizes: list[int] = []
    iter_batches = pyarrow.parquet.ParquetFile.iter_batches

    def counted(self: Any, rows: int, **options: Any) -> Any:
        sizes.append(rows)
        return iter_batches(self, rows, **options)

    monkeypatch.setattr(pyarrow.parquet.ParquetFile, "iter_batches", counted)
    kind = records.kind_of(DataConfig())
    (unit,) = records.plan_units(expand_sources([str(tmp_path)]), kind)
    assert len(list(records.iter_records(unit, kind, records.ReadCounts()))) == 40
    assert max(sizes) <= 8


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.json.zst", "folder/a.jsonl.xz"])
def test_compressed_records_are_named(tmp_path: Path, name: str) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / name).write_bytes(b"\x1f\x8b")
    source = tmp_path / "folder" if "/" in name else tmp_path / name
    with pytest.raises(ConfigError, match=r"is compressed.*To fix: decompress it"):
        expand_sources([str(source)])


def test_negative_ids_of_a_bin(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "a.jsonl", [{"tokens": [1, 2, 3, 70_000]}])
    options = ["--content", "tokens", "--tokenizer", "bytes"]
    assert main(["data", "tokenize", str(tmp_path / "a.jsonl"), "--output", str(tmp_path / "x"), *options]) == 2
    write_jsonl(tmp_path / "a.jsonl", [{"tokens": [1, 2, 3, 4]}])
    assert main(["data", "tokenize", str(tmp_path / "a.jsonl"), "--output", str(tmp_path / "x"), *options]) == 0
    (tmp_path / "x.meta.json").unlink()
    index = bytearray((tmp_path / "x.idx").read_bytes())
    index[17] = 4  # int32 in the place of uint16
    (tmp_path / "x.idx").write_bytes(bytes(index))
    np.array([1, -7, 3, 4], "<i4").tofile(tmp_path / "x.bin")
    with pytest.raises(BytescaleError):
        prepare_corpus(DataConfig(sources=(str(tmp_path / "x.bin"),), cache_dir=str(tmp_path / "cache")))


def test_an_empty_plan_and_a_config_with_a_byte_order_mark(tmp_path: Path) -> None:
    for content in (b"", b"PK", b"\x93NUMPY"):
        (tmp_path / "plan.npz").write_bytes(content)
        with pytest.raises(PlanError, match="is not a plan"):
            load_plan(tmp_path / "plan.npz")
    (tmp_path / "c.toml").write_bytes(b"\xef\xbb\xbf[trainer]\nsteps = 3\n")
    assert load_config(tmp_path / "c.toml").trainer.steps == 3


def test_batches_without_a_target_take_no_step(tmp_path: Path) -> None:
    """Truncation can leave conversations without an answer; they are counted, and no batch consists of them alone."""
    write_jsonl(
        tmp_path / "a.jsonl",
        [{"prompt": "q" * (100 if number % 3 else 2), "completion": "answer"} for number in range(30)],
    )
    data = DataConfig(
        sources=(str(tmp_path / "a.jsonl"),), content="prompt", context_length=16, over_length="truncate",
        batch_tokens=16, cache_dir=str(tmp_path / "cache"),
    )  # fmt: skip
    corpus = prepare_corpus(data)
    assert corpus.metadata.counts.num_untrained == 20
    sampler = BatchSampler(corpus.index, data)
    batches = [sampler.next_batch() for _ in range(10)]
    assert all(batch.total_targets == 7 for batch in batches)
    assert [batch.step for batch in batches] == list(range(10))
    write_jsonl(tmp_path / "a.jsonl", [{"prompt": "q" * 100, "completion": "answer"}] * 3)
    os.utime(tmp_path / "a.jsonl", (1, 1))
    with pytest.raises(DataError, match="has a token that is trained on"):
        BatchSampler(prepare_corpus(data).index, data).next_batch()
