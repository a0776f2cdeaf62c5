"""LoRA and frozen parts in the trainer: the curves of peft and PyTorch in one process, on any number of ranks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModelForCausalLM

from bytescale.cli.main import main
from bytescale.cli.train import TrainOptions, start_training
from bytescale.common.errors import ConfigError
from bytescale.config.load import config_to_toml
from bytescale.config.schema import Config
from tests.helpers.effort import one_of

from .runs import interrupt, losses, on_ranks, run, with_trainer, write_corpus
from .test_models import hf_folder, plain_curve, run_from

LORA: dict[str, Any] = {"lora_rank": 4, "lora_alpha": 8.0, "lora_targets": ("q_proj", "down_proj")}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("partly") / "corpus")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return hf_folder(tmp_path_factory.mktemp("partly") / "qwen3", "qwen3")


def partly(config: Config, **changes: Any) -> Config:
    """``config`` with other settings of the model, and a rate at which adapters learn."""
    return replace(
        config, model=replace(config.model, **changes), optimizer=replace(config.optimizer, lr=3e-2, min_lr_ratio=0.5)
    )


def plain_model(folder: Path, dtype: torch.dtype = torch.float64) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).train()


def with_peft(model: nn.Module) -> Any:
    torch.manual_seed(0)
    config = LoraConfig(r=4, lora_alpha=8.0, target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM")
    return get_peft_model(model, config, autocast_adapter_dtype=False)


CASES = [(ranks, mode) for ranks in (1, 2, 4) for mode in ("none", "attention", "full")]


@pytest.mark.exhaustive
@pytest.mark.parametrize(("num_ranks", "checkpointing"), one_of(CASES, (2, "full")))
def test_lora_gives_the_curve_of_peft(
    corpus: Path, folder: Path, tmp_path: Path, num_ranks: int, checkpointing: str
) -> None:
    config = run_from(folder, corpus, tmp_path / "run", num_ranks, steps=5, dtype="fp64", checkpointing=checkpointing)
    config = partly(config, **LORA)
    curve = plain_curve(with_peft(plain_model(folder)), config)
    assert run(config) == pytest.approx(curve, rel=1e-9)
    assert curve[-1] < curve[0] - 0.03, "adapters learn"


FROZEN = [["model.embed_tokens.*"], ["model.layers.0.*", "*norm*"], ["model.layers.*"]]


@pytest.mark.parametrize("freeze", one_of(FROZEN, FROZEN[1]))
def test_frozen_parts_stay_and_the_others_learn(corpus: Path, folder: Path, tmp_path: Path, freeze: list[str]) -> None:
    config = partly(run_from(folder, corpus, tmp_path / "run", 3, steps=4, dtype="fp64"), freeze=tuple(freeze))
    model = plain_model(folder)
    for name, parameter in model.named_parameters():
        parameter.requires_grad = not any(Path(name).match(pattern) for pattern in freeze)
    assert run(config) == pytest.approx(plain_curve(model, config), rel=1e-9)
    source = str(tmp_path / "run" / "checkpoints" / "step-000004")
    assert main(["convert", source, str(tmp_path / "out"), "--dtype", "fp64"]) == 0
    ours, before = load_file(tmp_path / "out" / "model.safetensors"), load_file(folder / "model.safetensors")
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(ours[name], parameter.detach(), rtol=1e-6, atol=1e-7)
        assert parameter.requires_grad != torch.equal(ours[name], before[name].double())


def test_adapters_go_on_on_other_ranks_and_become_folders(corpus: Path, folder: Path, tmp_path: Path) -> None:
    """Killed on 2 ranks and resumed on 3 by the command; then exported, merged and as an adapter that peft loads."""
    whole = partly(run_from(folder, corpus, tmp_path / "whole", 1, steps=4), **LORA)
    run(whole)
    config = partly(run_from(folder, corpus, tmp_path / "run", 2, steps=4), **LORA)
    config = replace(config, checkpoint=replace(config.checkpoint, every=2))
    interrupt(config, after_step=3)
    run(with_trainer(on_ranks(config, 3, 128), resume=True))
    assert losses(tmp_path / "run") == pytest.approx(losses(tmp_path / "whole"), rel=1e-5)
    newest = tmp_path / "run" / "checkpoints" / "step-000004"
    assert sum(file.stat().st_size for file in newest.glob("*")) < (folder / "model.safetensors").stat().st_size

    assert main(["convert", str(newest), str(tmp_path / "merged")]) == 0
    tokens = torch.arange(20)[None] % 7
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    adapted = PeftModel.from_pretrained(plain_model(folder, torch.float32), tmp_path / "merged" / "adapter").eval()
    with torch.no_grad():
        first, second, base = (
            m(input_ids=tokens).logits for m in (merged, adapted, plain_model(folder, torch.float32))
        )
    torch.testing.assert_close(first, second, rtol=1e-4, atol=1e-5)
    assert (first - base).abs().max() > 1e-2


def test_the_command_trains_adapters(
    corpus: Path, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = run_from(folder, corpus, tmp_path / "run", 1, steps=2)
    config = replace(config, data=replace(config.data, tokenizer="bytes"))
    (tmp_path / "config.toml").write_text(config_to_toml(with_trainer(config, init="")), encoding="utf-8")
    arguments = ["train", str(tmp_path / "config.toml"), "--init", f"hf:{folder}", "--model.lora-rank", "8"]
    assert main([*arguments, "--dry-run"]) == 0
    assert "trained), qwen3" in capsys.readouterr().out
    assert main(arguments) == 0
    assert main(["train", "--resume", str(tmp_path / "run"), "--trainer.steps", "3"]) == 0
    assert len(losses(tmp_path / "run")) == 3


@pytest.mark.parametrize(
    ("changes", "init", "said"),
    [
        ({"lora_rank": 4}, "", "What is not trained would be random numbers.*--init hf:FOLDER"),
        ({"freeze": ("*",)}, None, "matches every parameter.*freeze less"),
        ({"freeze": ("model.wrong.*",)}, None, "'model.wrong.\\*', which no parameter.*model.embed_tokens.weight"),
        ({"lora_rank": 4, "lora_targets": ("qkv",)}, None, "adapters into qkv of the Qwen3.*q_proj"),
        ({"lora_rank": -1}, None, "model.lora_rank is -1"),
        ({"lora_targets": ("q_proj",)}, None, "model.lora_rank is 0"),
    ],
)
def test_bad_settings(
    corpus: Path, folder: Path, tmp_path: Path, changes: dict[str, Any], init: str | None, said: str
) -> None:
    config = partly(run_from(folder, corpus, tmp_path / "run", 1, steps=2), **changes)
    """Before data is read and ranks are started, from config.json alone."""
    config = config if init is None else with_trainer(config, init=init)
    with pytest.raises(ConfigError, match=f"(?s){said}"):
        start_training(TrainOptions(config=config))
