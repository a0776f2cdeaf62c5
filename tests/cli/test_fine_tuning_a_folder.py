"""A model of the Hub and chats of one's own: the tokenizer, the settings and the export are the model's, or refused."""

from __future__ import annotations

import json
import random
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from bytescale.checkpoint.reading import CheckpointReader
from bytescale.cli.main import main
from bytescale.config.load import load_config
from bytescale.data.tokens.tokenizer import ByteTokenizer, load_tokenizer
from bytescale.hf.files.weight_stream import named_weights
from bytescale.parity import small_model
from tests.helpers.effort import one_of
from tests.train.runs import losses, write_corpus

WORDS = ["the", "ring", "moves", "keys", "around", "and", "every", "rank", "waits", "for", "none", "of", "them"]
TEMPLATE = (
    "{%- for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{%- endif %}"
)


def foreign_tokenizer() -> Any:
    """A byte-level BPE with a chat template, as transformers saves it."""
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator([" ".join(WORDS)] * 20, trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def folder_of(path: Path, **changes: Any) -> Path:
    """A small Qwen3 with tied embeddings and its tokenizer, as ``save_pretrained`` writes them."""
    sizes = {"vocab_size": 304, "max_position_embeddings": 512, "tie_word_embeddings": True}
    model: Any = small_model("qwen3", dtype=torch.float32, **{**sizes, **changes})
    model.save_pretrained(path)
    foreign_tokenizer().save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return folder_of(tmp_path_factory.mktemp("door") / "model")


@pytest.fixture(scope="module")
def chats(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path, draw = tmp_path_factory.mktemp("door") / "chats.jsonl", random.Random(0)
    with path.open("w") as file:
        for _ in range(40):
            said = [" ".join(draw.choices(WORDS, k=draw.choice([1, 4, 30]))) for _ in range(2)]
            messages = [{"role": role, "content": text} for role, text in zip(("user", "assistant"), said, strict=True)]
            file.write(json.dumps({"messages": messages}) + "\n")
    return path


def test_init_from_a_model_writes_a_config_that_trains_it(
    model: Path, chats: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every command that is suggested runs, and the tokens are those of the model's own tokenizer and template."""
    monkeypatch.chdir(tmp_path)
    assert main(["init", "my.toml", "--from", str(model), "--data", str(chats)]) == 0
    config = load_config(tmp_path / "my.toml")
    assert (config.data.content, config.data.tokenizer) == ("messages", "auto")
    assert config.optimizer.lr == 1e-5
    assert config.parallel.capacity_tokens == 0
    lengths = [len(foreign_tokenizer().apply_chat_template(json.loads(line)["messages"])["input_ids"])
               for line in chats.read_text().splitlines()]  # fmt: skip
    assert config.data.context_length == min(512, -(-max(lengths) // 1024) * 1024)
    options = ["my.toml", "--parallel.ranks", "1", "--trainer.device", "cpu", "--trainer.run-dir", "run"]
    assert main(["train", *options, "--dry-run"]) == 0
    assert main(["train", *options, "--trainer.epochs", "1"]) == 0
    printed = capsys.readouterr().out
    assert f"{sum(lengths)} tokens" in printed or f"{sum(lengths) / 1024:.3g}K tokens" in printed
    (suggested,) = [line.split() for line in printed.splitlines() if "bytescale convert" in line]
    assert main(suggested[1:]) == 0
    exported = AutoTokenizer.from_pretrained("run/model")
    assert exported.get_vocab() == foreign_tokenizer().get_vocab()
    assert exported.chat_template == TEMPLATE
    assert json.loads((tmp_path / "run/model/config.json").read_text())["tie_word_embeddings"]
    assert losses(tmp_path / "run")


def test_init_without_a_model_says_that_it_is_the_demos(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["init", str(tmp_path / "a.toml")]) == 0
    assert "the demo's config" in capsys.readouterr().out
    assert main(["init", str(tmp_path / "b.toml"), "--data", "x.jsonl"]) == 2
    assert "--from" in capsys.readouterr().err


FOREIGN = {
    "bpe": (["--data.tokenizer", "bpe"], "which trains a new one on the sources"),
    "bytes": (["--data.tokenizer", "bytes"], "in which id 0 is"),
    "another": (["--data.tokenizer", "OTHER"], "in which id"),
    "shape": (["--model.config", "intermediate_size=80"], "model.config gives the model other weights than hf:"),
    "preset": (["--model.preset", "tiny-moe"], "model.preset = tiny-moe is set, and --init"),
}


@pytest.mark.parametrize("case", FOREIGN)
def test_what_does_not_belong_to_the_weights_is_refused_before_anything_is_tokenised(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], case: str
) -> None:
    other = tokenizers.Tokenizer(tokenizers.models.BPE(vocab={"b": 0, "a": 1, "<eos>": 2}, merges=[]))
    other.save(str(tmp_path / "other.json"))
    arguments, message = FOREIGN[case]
    arguments = [str(tmp_path / "other.json") if one == "OTHER" else one for one in arguments]
    corpus, cache = write_corpus(tmp_path / "corpus"), tmp_path / "cache"
    (tmp_path / "c.toml").write_text(f'[data]\nsources = ["{corpus}"]\ncache_dir = "{cache}"\n')
    assert main(["train", str(tmp_path / "c.toml"), "--init", f"hf:{model}", *arguments]) == 2
    said = capsys.readouterr().err
    assert message in said
    assert "--data.tokenizer auto" in said or "leave it out" in said
    assert not cache.exists()


def test_a_tokenizer_with_more_ids_than_the_model_is_refused_before_anything_is_tokenised(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    corpus, cache = write_corpus(tmp_path / "corpus"), tmp_path / "cache"
    small = folder_of(tmp_path / "small", vocab_size=280)  # fewer than its tokenizer's
    (tmp_path / "c.toml").write_text(f'[data]\nsources = ["{corpus}"]\ncache_dir = "{cache}"\n')
    assert main(["train", str(tmp_path / "c.toml"), "--init", f"hf:{small}"]) == 2
    assert "has ids up to 299, but the model's vocab_size is 280" in capsys.readouterr().err
    own = ["train", str(tmp_path / "c.toml"), "--model.config", "vocab_size=300", "--data.tokenizer", "bpe"]
    assert main(own) == 2
    assert "data.bpe_vocab_size = 4096 has ids up to 4095, but the model's vocab_size is 300" in capsys.readouterr().err
    assert not cache.exists()


def test_a_copy_of_the_models_tokenizer_with_more_tokens_is_its_own(model: Path, tmp_path: Path) -> None:
    extended = foreign_tokenizer()
    extended.add_tokens(["<tool>"])
    extended.save_pretrained(tmp_path / "extended")
    corpus = write_corpus(tmp_path / "corpus")
    (tmp_path / "c.toml").write_text(f'[data]\nsources = ["{corpus}"]\ncache_dir = "{tmp_path / "cache"}"\n'
                                     "context_length = 512\nbatch_tokens = 1024\n")  # fmt: skip
    arguments = ["--data.tokenizer", str(tmp_path / "extended"), "--trainer.device", "cpu", "--dry-run"]
    assert main(["train", str(tmp_path / "c.toml"), "--init", f"hf:{model}", *arguments]) == 0


@pytest.mark.parametrize("kind", ["bytes", "bpe", "file"])
def test_a_run_from_scratch_exports_the_tokenizer_that_it_trained_with(tmp_path: Path, kind: str) -> None:
    """transformers loads it, and it gives the ids that the run was trained on."""
    corpus, named = write_corpus(tmp_path / "corpus"), kind
    if kind == "file":
        named = str(tmp_path / "tok.json")
        foreign_tokenizer().backend_tokenizer.save(named)
    (tmp_path / "c.toml").write_text(f"""
[model]
[model.config]
num_hidden_layers = 1
hidden_size = 16
num_attention_heads = 2
num_key_value_heads = 2
intermediate_size = 24
[data]
sources = ["{corpus}"]
cache_dir = "{tmp_path / "cache"}"
tokenizer = "{named}"
bpe_vocab_size = 290
context_length = 256
batch_tokens = 512
[trainer]
steps = 1
device = "cpu"
run_dir = "{tmp_path / "run"}"
""")
    assert main(["train", str(tmp_path / "c.toml")]) == 0
    if kind == "file":
        (tmp_path / "tok.json").unlink()  # the run has its own copy
    assert main(["convert", str(tmp_path / "run/checkpoints/step-000001"), str(tmp_path / "out")]) == 0
    exported = AutoTokenizer.from_pretrained(tmp_path / "out")
    kept = load_tokenizer(str(tmp_path / "run/origin"))
    text = "the ring waits for none: éß 你 \n\t x"
    (ids,) = (ByteTokenizer() if kind == "bytes" else kept).encode_batch([text])
    assert exported(text, add_special_tokens=False)["input_ids"] == ids.tolist()
    assert exported.decode(ids) == text
    assert exported.eos_token_id == kept.eos_id
    assert json.loads((tmp_path / "out/config.json").read_text())["eos_token_id"] == kept.eos_id
    assert main(["train", "--resume", str(tmp_path / "run"), "--trainer.steps", "2"]) == 0


TARGETS = ["lm_head", "embed_tokens", "q_proj lm_head", "embed_tokens lm_head", "q_proj down_proj"]


@pytest.mark.parametrize("names", one_of(TARGETS, "lm_head"))
def test_a_tied_model_exports_what_each_target_trained(model: Path, chats: Path, tmp_path: Path, names: str) -> None:
    """The merged model gives the logits of the base model with the adapter beside it, as peft runs it."""
    assert main(["init", str(tmp_path / "c.toml"), "--from", str(model), "--data", str(chats)]) == 0
    targets = names.split()
    arguments = ["--model.lora-targets", *targets]
    arguments += ["--model.lora-rank", "4", "--optimizer.lr", "0.05", "--trainer.epochs", "1", "--parallel.ranks", "1"]
    run = tmp_path / "run"
    arguments += ["--trainer.device", "cpu", "--trainer.run-dir", str(run)]
    assert main(["train", str(tmp_path / "c.toml"), *arguments]) == 0
    newest = max((run / "checkpoints").glob("step-*"))
    assert main(["convert", str(newest), str(tmp_path / "out")]) == 0
    tokens = torch.arange(20)[None] % 7
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    base = AutoModelForCausalLM.from_pretrained(model)
    adapted = PeftModel.from_pretrained(base, tmp_path / "out" / "adapter").eval()
    with torch.no_grad():
        torch.testing.assert_close(merged(tokens).logits, adapted(tokens).logits, rtol=1e-5, atol=1e-5)
        plain = AutoModelForCausalLM.from_pretrained(model)(tokens).logits
        assert (merged(tokens).logits - plain).abs().max() > 1e-2
    if {"lm_head", "embed_tokens"} & {*targets}:
        with pytest.raises(ValueError, match="which are one matrix"):
            list(named_weights(adapted, None))


def test_adapters_go_into_the_weights_that_they_were_trained_beside(
    model: Path, chats: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run of somebody else cannot have weights of this machine merged by naming them."""
    assert main(["init", str(tmp_path / "c.toml"), "--from", str(model), "--data", str(chats)]) == 0
    run = tmp_path / "run"
    arguments = ["--model.lora-rank", "4", "--trainer.epochs", "1", "--parallel.ranks", "1", "--trainer.device", "cpu"]
    assert main(["train", str(tmp_path / "c.toml"), *arguments, "--trainer.run-dir", str(run)]) == 0
    newest = max((run / "checkpoints").glob("step-*"))
    other = folder_of(tmp_path / "other")
    weights = load_file(other / "model.safetensors")
    save_file({name: value + 1 for name, value in weights.items()}, other / "model.safetensors", {"format": "pt"})
    text = (run / "config.toml").read_text()
    (run / "config.toml").write_text(text.replace(str(model), str(other)))
    assert main(["convert", str(newest), str(tmp_path / "out")]) == 1
    assert "are not those with which the run began" in capsys.readouterr().err
    assert main(["convert", str(newest), str(tmp_path / "out"), "--base", str(model)]) == 0


def test_convert_reads_the_run_folder_alone(
    model: Path, chats: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What a stranger's config.toml names is not copied into the export, and no link is followed."""
    assert main(["init", str(tmp_path / "c.toml"), "--from", str(model), "--data", str(chats)]) == 0
    run, secret = tmp_path / "run", tmp_path / "secret"
    arguments = ["--trainer.epochs", "1", "--parallel.ranks", "1", "--trainer.device", "cpu"]
    assert main(["train", str(tmp_path / "c.toml"), *arguments, "--trainer.run-dir", str(run)]) == 0
    newest = max((run / "checkpoints").glob("step-*"))
    secret.write_text("the key to everything")
    config = (run / "config.toml").read_text()
    for name in ("chat_template", "tokenizer"):
        lines = [line for line in config.splitlines() if not line.startswith(f"{name} =")]
        lines.insert(lines.index("[data]") + 1, f'{name} = "{secret}"')
        (run / "config.toml").write_text("\n".join(lines))
        assert main(["convert", str(newest), str(tmp_path / name)]) == 0
        assert not any("key to everything" in file.read_text(errors="replace") for file in (tmp_path / name).iterdir())
    (run / "origin" / "merges.txt").symlink_to(secret)
    assert main(["convert", str(newest), str(tmp_path / "linked")]) == 2
    assert "is a link to" in capsys.readouterr().err
    assert not (tmp_path / "linked").exists()
    (run / "origin").rename(tmp_path / "elsewhere")
    (run / "origin").symlink_to(tmp_path / "elsewhere")
    assert main(["convert", str(newest), str(tmp_path / "moved")]) == 2
    assert "origin is a link to" in capsys.readouterr().err
    assert CheckpointReader(newest).state.step > 0


PAGE = Path(__file__).parents[2] / "docs" / "fine_tuning.md"


@pytest.mark.exhaustive
def test_the_page_runs_as_printed(tmp_path: Path, chats: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every command of docs/fine_tuning.md, with a folder of that name in the place of the Hub's model."""
    monkeypatch.chdir(tmp_path)
    folder_of(tmp_path / "Qwen" / "Qwen3-0.6B")
    (tmp_path / "chats.jsonl").write_text(chats.read_text())
    code = run_commands(tmp_path, "chats", 6, PAGE.read_text(encoding="utf-8").partition("## 5. Pictures")[0])
    exec(compile(code, str(PAGE), "exec"), {})
    assert main(["train", "--resume", "runs/chats", "--parallel.ranks", "1"]) == 0


def run_commands(home: Path, name: str, count: int, text: str) -> str:
    """Run the commands of a part of the page, whose run has this name. Returns its Python code."""
    commands = [line for block in re.findall(r"```sh\n(.*?)```", text, re.DOTALL) for line in block.splitlines()]
    assert len(commands) == count
    for command in commands:
        last = max((path.name for path in home.glob(f"runs/{name}/checkpoints/step-*")), default="")
        assert main(shlex.split(command.replace("LAST", last))[1:]) == 0, command
    (code,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    return code


@pytest.mark.exhaustive
def test_the_pages_pictures_run_as_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from tests.train.vision import vision_folder  # takes seconds to import

    monkeypatch.chdir(tmp_path)
    vision_folder(tmp_path / "llava-hf" / "llava-interleave-qwen-0.5b-hf", "llava")
    text = PAGE.read_text(encoding="utf-8").partition("## 5. Pictures")[2]
    (code,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    exec(compile(code, str(PAGE), "exec"), {})
    run_commands(tmp_path, "pictures", 4, text)
    shown = capsys.readouterr().out
    assert "picture 1: pictures/red-ellipse.png, 16 tokens" in shown
    assert "AutoModelForImageTextToText.from_pretrained('my-seeing-model')" in shown
    assert (tmp_path / "my-seeing-model" / "processor_config.json").is_file()
