"""Decoders of transformers on meshes: losses of one process, checkpoints for every mesh, refusals by name."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
from transformers import AutoModelForCausalLM

from bytescale.checkpoint.folder_of_run import complete_checkpoints
from bytescale.cli.main import main
from bytescale.common.errors import ConfigError
from bytescale.config.schema import AUTO_CAPACITY, Config, ModelConfig
from bytescale.runtime.tied import TiedHead
from bytescale.train.loop.dry_run import dry_run
from bytescale.train.loop.trainer import train
from bytescale.train.parts import large_model
from bytescale.train.parts.rank_model import RankModel
from tests.helpers.effort import REST, one_of
from tests.helpers.forks import run_forked
from tests.train.runs import interrupt, losses, run, small_run, with_trainer, write_corpus

from .test_models import hf_folder, plain_curve, run_from

FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3": {"num_hidden_layers": 4, "tie_word_embeddings": True},
    "gemma2": {"num_hidden_layers": 4, "layer_types": ["sliding_attention", "full_attention"] * 2},
    "gpt2": {"num_hidden_layers": 3, "n_layer": 3},
    "qwen3_moe": {"num_hidden_layers": 3},
    "qwen3_next": {"num_hidden_layers": 4, "layer_types": ["linear_attention", "full_attention"] * 2},
    "falcon_h1": {"num_hidden_layers": 2},
    "phi3": {"num_hidden_layers": 2},
}
"""Tied and not, with windows and caps of logits, learned positions, experts, and recurrences."""


MESHES: list[dict[str, int]] = [
    {"pp": 2, "hdp": 2},
    {"tp": 2},
    {"tp": 2, "hdp": 2},
    {"tp": 2, "hdp": 2, "domain": 2},
    {"tp": 2, "pp": 2, "hdp": 2},
]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("pipelines") / "corpus")


def on_mesh(config: Config, *, tp: int = 1, pp: int = 1, hdp: int = 1, domain: int = 1, **changes: object) -> Config:
    sharing = {"shard": "parameters", "domain": domain} if domain > 1 else {}
    sizes = {"tp": tp, "pp": pp, "ranks": tp * pp * hdp, "capacity_tokens": 256 if hdp == 1 else 128}
    return with_trainer(config, **sizes, **sharing, **changes)


@pytest.mark.exhaustive  # in `make test`, ranks that make their parts alone show it
@pytest.mark.parametrize(
    ("name", "mesh"),
    [
        (name, mesh)
        for name, mesh in [("qwen3", {"tp": 2, "pp": 2}), *product(FAMILIES, MESHES)]
        if "tp" not in mesh or name not in ("gpt2", "falcon_h1")  # transformers has no plan for them
    ],
)
def test_a_mesh_has_the_losses_of_one_process(corpus: Path, tmp_path: Path, name: str, mesh: dict[str, int]) -> None:
    """Six updates with clipping and weight decay: an update that misses any gradient shows in the next loss.

    In fp64, but for experts, whose grouped products of transformers know narrower numbers alone.
    """
    folder = hf_folder(tmp_path / name, name, **FAMILIES[name])
    narrow = name in ("qwen3_moe", "qwen3_next")
    config = run_from(folder, corpus, tmp_path / "run", 1, steps=6, dtype="fp32" if narrow else "fp64")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32 if narrow else torch.float64).train()
    curve = plain_curve(model, config)
    assert run(on_mesh(config, **mesh)) == pytest.approx(curve, rel=1e-4 if narrow else 1e-8)


@pytest.mark.parametrize(
    ("name", "mesh"),
    [
        ("qwen3", {"tp": 2, "pp": 2}),
        *(
            pytest.param(name, mesh, marks=pytest.mark.exhaustive)
            for name, mesh in product(FAMILIES, [{}, {"hdp": 2, "domain": 2}, *MESHES])
            if "tp" not in mesh or name not in ("gpt2", "falcon_h1")
        ),
    ],
)
def test_a_rank_that_makes_its_part_alone_has_the_losses_of_one_process(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, mesh: dict[str, int]
) -> None:
    """What a large model does: its first layers are compared, and no rank has the whole on its device."""
    monkeypatch.setattr(large_model, "FEW_PARAMETERS", 0)
    folder = hf_folder(tmp_path / name, name, **FAMILIES[name])
    narrow = name in ("qwen3_moe", "qwen3_next")
    config = run_from(folder, corpus, tmp_path / "run", 1, steps=3, dtype="fp32" if narrow else "fp64")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32 if narrow else torch.float64).train()
    curve = plain_curve(model, config)
    assert run(on_mesh(config, **mesh)) == pytest.approx(curve, rel=1e-4 if narrow else 1e-8)


@pytest.mark.parametrize("preset", ["tiny", pytest.param("tiny-moe", marks=pytest.mark.exhaustive)])
def test_first_values_depend_on_the_seed_alone(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, preset: str
) -> None:
    """Each rank makes the values of its own part, a layer at a time; a run on one rank makes all of them."""
    monkeypatch.setattr(large_model, "FEW_PARAMETERS", 0)
    curves = []
    for number, mesh in enumerate([{}, {"tp": 2, "pp": 2} if REST else {"tp": 2}, {"hdp": 2, "domain": 2}]):
        config = small_run(corpus, tmp_path / str(number), ranks=1, steps=2)
        if preset == "tiny-moe":
            config = replace(config, model=ModelConfig(preset=preset))
        curves.append(run(on_mesh(config, **mesh)))
    assert curves[1] == pytest.approx(curves[0], rel=1e-5)
    assert curves[2] == pytest.approx(curves[0], rel=1e-5)


def test_a_run_that_goes_on_makes_no_first_values(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A large model would take minutes on every rank; a checkpoint has all of them."""
    monkeypatch.setattr(large_model, "FEW_PARAMETERS", 0)
    expected = run(small_run(corpus, tmp_path / "alone", ranks=1, steps=4))
    config = small_run(corpus, tmp_path / "run", ranks=2, steps=4)
    config = replace(config, checkpoint=replace(config.checkpoint, every=1))
    interrupt(config, after_step=2)

    def load(*_: object) -> NoReturn:
        raise AssertionError("first values were made")

    monkeypatch.setattr(RankModel, "load", load)
    assert run(with_trainer(config, resume="auto")) == pytest.approx(expected, rel=1e-5)


@pytest.mark.exhaustive
@pytest.mark.parametrize("fault", ["add_gradient", "send_weights"])
def test_a_tied_embedding_that_is_not_kept_one_shows(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    folder = hf_folder(tmp_path / "qwen3", "qwen3", **FAMILIES["qwen3"])
    config = run_from(folder, corpus, tmp_path / "run", 1, steps=3, dtype="fp64")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64).train()
    monkeypatch.setattr(TiedHead, fault, lambda self: None)
    assert run(on_mesh(config, pp=2)) != pytest.approx(plain_curve(model, config), rel=1e-6)


@pytest.mark.parametrize("checkpointing", one_of(["none", "attention", "full"], "full"))
def test_a_run_in_stages_goes_on_without_them_and_back(corpus: Path, tmp_path: Path, checkpointing: str) -> None:
    """A tied model: two stages, killed after step 3; then one rank; the same losses, and one folder.

    In the rest, back to two stages. Any mesh reads what any other wrote (tests/checkpoint/test_format.py).
    """
    folder = hf_folder(tmp_path / "qwen3", "qwen3", **FAMILIES["qwen3"])
    alone = run_from(folder, corpus, tmp_path / "alone", 1, steps=5)
    expected = run(alone)
    config = run_from(folder, corpus, tmp_path / "run", 1, steps=5)
    staged = on_mesh(config, pp=2, checkpointing=checkpointing)
    interrupt(staged, after_step=3)
    run(with_trainer(config, resume="auto"))
    assert losses(tmp_path / "run") == pytest.approx(expected, rel=1e-4)
    newest = complete_checkpoints(tmp_path / "run" / "checkpoints")[-1]
    assert main(["convert", str(newest), str(tmp_path / "out")]) == 0
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert exported.lm_head.weight is exported.model.embed_tokens.weight
    if REST:
        run(with_trainer(staged, steps=6, resume="auto"))
        assert len(losses(tmp_path / "run")) == 6


@pytest.mark.parametrize(
    ("name", "changes", "match"),
    [
        ("zamba2", {}, "layers of several stages have it in common"),
        ("qwen3", {"num_hidden_layers": 1}, "parallel.pp = 2 exceeds the model's 1 layers"),
    ],
)
def test_a_model_that_has_no_stages_is_refused_by_name(
    corpus: Path, tmp_path: Path, name: str, changes: dict[str, Any], match: str
) -> None:
    folder = hf_folder(tmp_path / name, name, **changes)
    config = on_mesh(run_from(folder, corpus, tmp_path / "run", 2), pp=2)
    with pytest.raises(ConfigError, match=match):
        dry_run(config, print_line=lambda line: None)


@pytest.mark.parametrize(
    ("name", "mesh"),
    [
        ("qwen3", {"tp": 2, "pp": 2}),
        *(pytest.param(name, {"tp": 2}, marks=pytest.mark.exhaustive) for name in ("gemma2", "phi3")),
    ],
)
def test_a_dry_run_estimates_what_a_rank_needs(corpus: Path, tmp_path: Path, name: str, mesh: dict[str, int]) -> None:
    """The capacity that ranks find by measuring their parts, without them. Angles, which all ranks keep, weigh here."""
    folder = hf_folder(tmp_path / name, name, **FAMILIES[name])
    config = on_mesh(run_from(folder, corpus, tmp_path / "run", 2, steps=1), **mesh, device_gib=0.05)
    config = with_trainer(config, capacity_tokens=AUTO_CAPACITY)
    lines: list[str] = []
    dry_run(config, print_line=lines.append)
    run_forked(config.parallel.ranks, lambda _: str(train(config, print_line=lambda line: None)))
    estimated, measured = (
        float(re.search(r"full micro-batch of ([\d.]+)K tokens", text)[1])  # type: ignore[index]
        for text in ("\n".join(lines), (tmp_path / "run" / "log.txt").read_text(encoding="utf-8"))
    )
    assert 0.7 * measured <= estimated <= 1.2 * measured, (estimated, measured)
