"""Weights into and out of a run: ``train --init hf:FOLDER``, ``bytescale convert``, and errors about bad folders."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from bytescale.cli.main import main
from bytescale.cli.train import _check_initial_weights, read_options
from bytescale.common.errors import CheckpointError, ConfigError
from bytescale.config.load import config_to_toml
from bytescale.config.resolve import resolve_model
from bytescale.config.schema import Config, ModelConfig
from bytescale.data.tokens.tokenizer import ByteTokenizer
from bytescale.parity import small_model
from bytescale.train.loop.trainer import train
from tests.helpers.forks import run_forked
from tests.train.runs import losses, on_ranks, small_run, with_shape, with_trainer, write_corpus


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("convert") / "corpus")


def hf_folder(folder: Path, name: str = "llama", **changes: object) -> Path:
    """A small random model with a vocabulary of bytes, a tokenizer's file and generation settings."""
    sizes = {"vocab_size": 320, "max_position_embeddings": 512, "pad_token_id": ...}
    model: Any = small_model(name, dtype=torch.float32, **sizes, **changes)
    model.save_pretrained(folder, max_shard_size="40KB")
    (folder / "generation_config.json").write_text('{"temperature": 0.7}', encoding="utf-8")
    (folder / "tokenizer.json").write_text(ByteTokenizer().to_json(), encoding="utf-8")
    return folder


def run_from(folder: Path, corpus: Path, run_dir: Path, num_ranks: int, **trainer: object) -> Config:
    config = with_trainer(on_ranks(small_run(corpus, run_dir), num_ranks), init=f"hf:{folder}", **trainer)
    return replace(config, model=ModelConfig(preset=f"hf:{folder}"))


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(file).items()}


def train_on(config: Config) -> None:
    run_forked(config.parallel.ranks, lambda _: str(train(config, print_line=lambda line: None)))


@pytest.mark.parametrize(
    ("num_ranks", "dtype", "changes"),
    [(1, "fp32", {"name": "qwen3", "tie_word_embeddings": True}), (3, "bf16", {"name": "qwen3_moe"})],
    ids=["tied", "mixture"],
)
def test_weights_go_through_a_checkpoint_bit_for_bit(
    corpus: Path, tmp_path: Path, num_ranks: int, dtype: str, changes: dict[str, Any]
) -> None:
    """With a learning rate of nearly 0 the checkpoint has what the folder had: fp32, though bf16 trains."""
    source = hf_folder(tmp_path / "source", **changes)
    settings = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(settings | {"eos_token_id": 256}), encoding="utf-8")
    config = run_from(source, corpus, tmp_path / "run", num_ranks, steps=1, dtype=dtype)
    train_on(replace(config, optimizer=replace(config.optimizer, lr=1e-30, weight_decay=0.0)))
    target = tmp_path / "target"
    checkpoint = tmp_path / "run" / "checkpoints" / "step-000001"
    assert main(["convert", str(checkpoint), str(target), "--shard-bytes", "40000"]) == 0
    before, after = tensors_of(source), tensors_of(target)
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        assert torch.equal(tensor, after[name]), name
    assert json.loads((target / "generation_config.json").read_text()) == {"temperature": 0.7}
    assert (target / "tokenizer.json").read_text() == ByteTokenizer().to_json()
    written, original = (json.loads((folder / "config.json").read_text()) for folder in (target, source))
    assert written == original
    assert not list(tmp_path.glob(".*"))


def test_a_trained_mixture_runs_in_transformers(corpus: Path, tmp_path: Path) -> None:
    source = hf_folder(tmp_path / "source", "mixtral")
    config = run_from(source, corpus, tmp_path / "run", 2, steps=6)
    train_on(config)
    curve = losses(tmp_path / "run")
    assert curve[-1] < curve[0]
    alone = run_from(source, corpus, tmp_path / "alone", 1, steps=6)
    train_on(alone)
    assert losses(tmp_path / "alone") == pytest.approx(curve, rel=1e-4)
    checkpoint = tmp_path / "run" / "checkpoints" / "step-000006"
    assert main(["convert", str(checkpoint), str(tmp_path / "out"), "--dtype", "bf16"]) == 0
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")
    assert model.dtype == torch.bfloat16
    tokens = torch.tensor([list(b"the ring moves keys around and every rank waits for none of them")])
    with torch.no_grad():
        assert float(model(tokens, labels=tokens).loss) < curve[0]


def test_init_on_the_command_line_takes_the_shape_too(corpus: Path, tmp_path: Path) -> None:
    source = hf_folder(tmp_path / "source", "mixtral")
    config = tmp_path / "config.toml"
    run = small_run(corpus, tmp_path / "run")
    config.write_text(config_to_toml(replace(run, model=ModelConfig())), encoding="utf-8")
    options = read_options([str(config), "--init", f"hf:{source}"])
    shape = resolve_model(options.config.model, tokenizer_vocab_size=9999)
    assert [shape.content[name] for name in ("num_local_experts", "vocab_size", "hidden_size")] == [4, 320, 32]
    assert options.config.trainer.init == f"hf:{source}"
    _check_initial_weights(options.config)
    asked = read_options(
        [str(config), "--init", f"hf:{source}", "--model.config", 'rope_parameters={"rope_theta": 5e5}']
    ).config
    assert resolve_model(asked.model).content == {**shape.content, "rope_parameters": {"rope_theta": 5e5}}
    _check_initial_weights(asked)


def test_bad_folders_are_refused_before_ranks_start(
    corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = hf_folder(tmp_path / "source")
    config = tmp_path / "config.toml"
    run = replace(small_run(corpus, tmp_path / "run"), model=ModelConfig())
    config.write_text(config_to_toml(run), encoding="utf-8")
    arguments = ["train", str(config), "--init", f"hf:{source}"]
    first = sorted(source.glob("*.safetensors"))[0]
    kept = load_file(first)
    save_file({name: tensor[:1].clone() for name, tensor in kept.items()}, first)
    assert main(arguments) == 1
    assert "model.embed_tokens.weight. They do not fit" in capsys.readouterr().err
    (source / "config.json").write_text('{"architectures": ["FalconForCausalLM"]}', encoding="utf-8")
    assert main(arguments) == 2
    assert "LlamaForCausalLM, MixtralForCausalLM" in capsys.readouterr().err
    assert main(["train", str(config), "--init", "somewhere"]) == 2
    assert "hf:FOLDER" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


@pytest.mark.exhaustive
def test_weights_of_another_run_on_another_mesh(corpus: Path, tmp_path: Path) -> None:
    """A new run from the weights that an old one ended with, on other ranks."""
    train_on(on_ranks(small_run(corpus, tmp_path / "old", steps=6), 2))
    init = f"checkpoint:{tmp_path / 'old' / 'checkpoints' / 'step-000006'}"
    train_on(with_trainer(small_run(corpus, tmp_path / "new", steps=2), init=init))
    old, new = losses(tmp_path / "old"), losses(tmp_path / "new")
    assert new[0] < old[0] - 0.3
    other = with_trainer(small_run(corpus, tmp_path / "other"), init=init)
    with pytest.raises(CheckpointError, match="num_hidden_layers 2 there, 3 here"):
        _check_initial_weights(with_shape(other, num_hidden_layers=3, vocab_size=320))


def test_convert_refuses_what_it_cannot_convert(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["convert", str(tmp_path), str(tmp_path / "out")]) == 1
    assert "is not a checkpoint of bytescale" in capsys.readouterr().err


def test_the_shape_of_a_checkpoint_behind_a_url() -> None:
    stored = json.dumps({"architecture": resolve_model(ModelConfig()).as_dict()}).encode()
    fsspec.filesystem("memory").pipe_file("/shapes/step-000001/run_state.json", stored)
    assert (
        resolve_model(ModelConfig(preset="checkpoint:memory://shapes/step-000001")).content
        == resolve_model(ModelConfig()).content
    )
    with pytest.raises(ConfigError, match=r"step-000002 is not a checkpoint of bytescale: .*no such file"):
        resolve_model(ModelConfig(preset="checkpoint:memory://shapes/step-000002"))
    with pytest.raises(ConfigError, match=r"has no file system .*To fix: use a protocol that fsspec knows\.$"):
        resolve_model(ModelConfig(preset="checkpoint:nosuch://shapes/step-000001"))


def test_the_vocabulary_of_a_folder_is_kept(tmp_path: Path) -> None:
    source = hf_folder(tmp_path / "source")
    assert resolve_model(ModelConfig(preset=f"hf:{source}"), tokenizer_vocab_size=257).vocab_size == 320


def test_a_run_outlives_the_folder_that_it_began_with(corpus: Path, tmp_path: Path) -> None:
    """Converting, resuming, and a second run from the first run's checkpoint need the folder no more."""
    source = hf_folder(tmp_path / "source", "qwen3")
    settings = json.loads((source / "config.json").read_text()) | {"eos_token_id": 7, "max_position_embeddings": 4321}
    (source / "config.json").write_text(json.dumps(settings), encoding="utf-8")
    train_on(run_from(source, corpus, tmp_path / "run", 1, steps=1))
    source.rename(tmp_path / "moved")
    checkpoint = tmp_path / "run" / "checkpoints" / "step-000001"

    def config_of_export(name: str, of: Path) -> dict[str, object]:
        assert main(["convert", str(of), str(tmp_path / name)]) == 0
        assert (tmp_path / name / "tokenizer.json").read_text() == ByteTokenizer().to_json()
        return json.loads((tmp_path / name / "config.json").read_text())

    assert config_of_export("out", checkpoint) == settings
    options = read_options(["--resume", str(tmp_path / "run"), "--trainer.steps", "2"])
    train_on(options.config)
    assert len(losses(tmp_path / "run")) == 2
    second = with_trainer(small_run(corpus, tmp_path / "second"), init=f"checkpoint:{checkpoint}", steps=1)
    train_on(replace(second, model=ModelConfig(preset=f"checkpoint:{checkpoint}")))
    assert config_of_export("again", tmp_path / "second" / "checkpoints" / "step-000001") == settings
