"""Folders of Hugging Face that would run code, lose weights or hold other numbers than the model's are refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from bytescale.common.errors import CheckpointError, ConfigError
from bytescale.config.description import ModelDescription
from bytescale.config.hugging_face import read_hf_config
from bytescale.hf.files import export
from bytescale.hf.files.folder import load_model as load_for_training
from bytescale.hf.files.folder import read_model
from bytescale.parity import small_model

Change = Callable[[dict[str, Tensor]], None]


def saved(folder: Path, name: str, change: Change = lambda tensors: None, **config: object) -> Path:
    """A small model's folder, whose tensors and config.json were changed."""
    small_model(name, dtype=torch.float32).save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    described = folder / "config.json"
    described.write_text(json.dumps(json.loads(described.read_text()) | config))
    return folder


def load_for_scoring(folder: Path) -> nn.Module:
    """As ``bytescale score`` does."""
    return read_model(folder, read_hf_config(folder), torch.float32)


def load_all(folder: Path, match: str, error: type[Exception] = CheckpointError) -> None:
    """Scoring, training and converting refuse the folder, in one line."""
    readers: list[Callable[[], object]] = [
        lambda: load_for_scoring(folder),
        lambda: load_for_training(folder, read_hf_config(folder), torch.float32),
    ]
    for read in readers:
        with pytest.raises(error, match=match) as caught:
            read()
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_weights_that_are_no_numbers(tmp_path: Path, name: str) -> None:
    weight = "model.layers.1.mlp.up_proj.weight"

    def poison(tensors: dict[str, Tensor]) -> None:
        tensors[weight][3, 4] = float("nan")

    load_all(saved(tmp_path / "model", name, poison), f"{weight} of .* not finite")


@pytest.mark.parametrize("name", ["llama", "qwen3"])
@pytest.mark.parametrize(("dtype", "told"), [(torch.int8, "I8"), (torch.float8_e4m3fn, "F8_E4M3")])
def test_quantised_weights_without_a_configuration_of_it(
    tmp_path: Path, name: str, dtype: torch.dtype, told: str
) -> None:
    weight = "model.layers.1.mlp.up_proj.weight"

    def quantise(tensors: dict[str, Tensor]) -> None:
        tensors[weight] = tensors[weight].to(dtype)

    load_all(saved(tmp_path / "model", name, quantise), f"{weight} in .* has dtype {told}")


@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_a_head_that_differs_from_tied_embeddings(tmp_path: Path, name: str) -> None:
    """transformers computes with the head of the file; a saved model would have lost it."""

    def add_head(tensors: dict[str, Tensor]) -> None:
        tensors["lm_head.weight"] = torch.ones_like(tensors["model.embed_tokens.weight"])

    folder = saved(tmp_path / "model", name, add_head, tie_word_embeddings=True)
    load_all(folder, "lm_head.weight.* set tie_word_embeddings to false")
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    assert load_for_scoring(folder).lm_head.weight.shape == (67, 32)


@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_pickled_weights(tmp_path: Path, name: str) -> None:
    folder = saved(tmp_path / "model", name)
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    load_all(folder, "has its weights in pytorch_model.bin only, which is a pickle", ConfigError)


@pytest.mark.parametrize("model_type", ["qwen3", "evil", "t5"])
def test_code_in_a_folder_is_never_run(tmp_path: Path, model_type: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers asks at a prompt, which `yes |` would answer."""
    asked: list[object] = []
    monkeypatch.setattr("builtins.input", lambda *question: asked.append(question) or "y")
    folder = saved(tmp_path / "model", "qwen3")
    content = json.loads((folder / "config.json").read_text()) | {
        "model_type": model_type,
        "auto_map": {"AutoConfig": "evil.EvilConfig", "AutoModelForCausalLM": "evil.Evil"},
    }
    (folder / "config.json").write_text(json.dumps(content))
    code = f"from pathlib import Path\nPath({str(tmp_path / 'ran')!r}).touch()\n"
    (folder / "evil.py").write_text(code)
    (folder / "custom_generate").mkdir()
    (folder / "custom_generate" / "generate.py").write_text(code)
    if model_type == "qwen3":  # transformers has it, so the folder's code is not needed
        load_for_scoring(folder)
        load_for_training(folder, read_hf_config(folder), torch.float32)
    else:
        load_all(folder, "has no model of type|makes no causal decoder", ConfigError)
    assert not asked
    assert not (tmp_path / "ran").exists()


def test_a_checkpoint_with_a_head_that_its_folder_would_lose(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such checkpoints exist: folders whose head differs from tied embeddings were once taken."""
    folder = saved(tmp_path / "model", "qwen3")
    architecture = ModelDescription(content=read_hf_config(folder)).as_dict()
    held = {f"master.{name}": () for name, _ in small_model("qwen3", tie_word_embeddings=False).named_parameters()}
    stored = SimpleNamespace(state=SimpleNamespace(architecture=architecture), shapes=lambda: held, folder=tmp_path)
    monkeypatch.setattr(export, "CheckpointReader", lambda _: stored)
    checkpoint = tmp_path / "checkpoint"
    with pytest.raises(CheckpointError, match=r"has lm_head\.weight, for which its model has no place"):
        export.export_checkpoint(checkpoint, tmp_path / "back")
