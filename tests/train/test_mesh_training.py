"""Whole runs on meshes of tensor and pipeline parallelism: the same losses, and checkpoints that fit every mesh."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
import pytest

from bytescale.checkpoint.folder_of_run import complete_checkpoints
from bytescale.common.errors import ConfigError
from bytescale.config.schema import Config
from bytescale.config.validate import validate
from bytescale.hf.files.export import export_checkpoint
from tests.helpers.effort import REST, one_of
from tests.train.runs import interrupt, losses, metrics, run, small_run, with_shape, with_trainer, write_corpus

STEPS = 3
# Fewer than ten steps: the order of fp32 sums is amplified less than in a hundred (tests/train/test_training.py).
SAME_LOSSES = 1e-4


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("data") / "corpus")


def deep_run(corpus: Path, run_dir: Path, **model: object) -> Config:
    """Four layers, so that there may be four stages."""
    config = small_run(corpus, run_dir, steps=STEPS)
    preset = "tiny-moe" if "num_local_experts" in model else "tiny"
    config = replace(config, model=replace(config.model, preset=preset))
    return with_shape(config, **{"num_hidden_layers": 4, "intermediate_size": 64, **model})


def on_mesh(config: Config, *, tp: int = 1, pp: int = 1, hdp: int = 1, domain: int = 1, experts: str = "") -> Config:
    """Where there is nothing to choose, the cheapest planner: the usual one tries many plans of a pipeline.

    Experts are in parallel wherever they can be.
    """
    parallel = replace(
        config.parallel,
        ranks=tp * pp * hdp,
        tp=tp,
        pp=pp,
        capacity_tokens=256 if hdp == 1 else 128,
        shard="parameters" if domain > 1 else "optimizer",
        domain=0 if domain == 1 else domain,
        experts=experts or ("parallel" if domain > 1 and tp == 1 and "moe" in config.model.preset else "gathered"),  # type: ignore[arg-type]
    )
    return replace(config, parallel=parallel, planner=replace(config.planner, name="greedy" if hdp > 1 else "naive"))


FAMILIES = {
    "llama": {},
    "tied": {"tie_word_embeddings": True},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
}
IN_STAGES = ["llama", "mixtral"]


MESHES = [
    {"tp": 2},
    {"pp": 2},
    {"tp": 2, "hdp": 2},
]
FOUR_STAGES = {"pp": 4}
EIGHT = {"tp": 2, "pp": 2, "hdp": 2}


@pytest.fixture(scope="module")
def family(request: pytest.FixtureRequest, corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple:
    """Settings of a model family, and its losses in one process."""
    settings = FAMILIES[request.param]
    config = deep_run(corpus, tmp_path_factory.mktemp(request.param) / "alone", **settings)
    return settings, run(on_mesh(config))


@pytest.mark.exhaustive  # in `make test`, runs that move from mesh to mesh show it
@pytest.mark.parametrize(
    ("family", "mesh"),
    [
        *(case for case in product(FAMILIES, MESHES) if case[0] != "tied" or "pp" not in case[1]),
        *product(IN_STAGES, (FOUR_STAGES, EIGHT)),
    ],
    indirect=["family"],
    ids=str,
)
def test_every_mesh_has_the_losses_of_one_process(corpus: Path, tmp_path: Path, family: tuple, mesh: dict) -> None:
    settings, alone = family
    ours = run(on_mesh(deep_run(corpus, tmp_path / "run", **settings), **mesh))
    np.testing.assert_allclose(ours, alone, rtol=SAME_LOSSES)


@pytest.mark.parametrize("family", one_of(IN_STAGES, "llama"), indirect=True)
@pytest.mark.parametrize("first", one_of([{"pp": 2}, {"tp": 2, "pp": 2}, EIGHT], {"pp": 2}), ids=str)
def test_a_checkpoint_moves_between_meshes(corpus: Path, tmp_path: Path, family: tuple, first: dict) -> None:
    """From the first mesh, killed after a step, in the rest to four stages, too, and then to (tp, hdp) = (2, 2)."""
    settings, alone = family
    config = with_trainer(deep_run(corpus, tmp_path / "run", **settings), resume=True)
    config = replace(config, checkpoint=replace(config.checkpoint, every=1))
    interrupt(with_trainer(on_mesh(config, **first), resume=False), after_step=1)
    if REST:
        interrupt(on_mesh(config, **FOUR_STAGES), after_step=2)
    np.testing.assert_allclose(run(on_mesh(config, tp=2, hdp=2)), alone, rtol=SAME_LOSSES)


@pytest.mark.parametrize("family", one_of(list(FAMILIES), "mixtral"), indirect=True)
def test_ranks_that_share_layers_continue_what_others_have_begun(corpus: Path, tmp_path: Path, family: tuple) -> None:
    """From (tp, hdp) = (2, 2) in one domain, with the optimizer in host memory, to two ranks of none.

    In the rest, to two domains of two between them.
    """
    settings, alone = family
    config = with_trainer(deep_run(corpus, tmp_path / "run", **settings), resume=True)
    config = replace(config, checkpoint=replace(config.checkpoint, every=1))
    on_host = replace(config, optimizer=replace(config.optimizer, offload=True))
    interrupt(with_trainer(on_mesh(on_host, tp=2, hdp=2, domain=2), resume=False), after_step=1)
    if REST:
        interrupt(on_mesh(config, hdp=4, domain=2), after_step=2)
    np.testing.assert_allclose(run(on_mesh(config, hdp=2)), alone, rtol=SAME_LOSSES)


@pytest.mark.exhaustive
@pytest.mark.parametrize("mesh", one_of([{"pp": 2}, {"tp": 2, "pp": 2}], {"pp": 2}), ids=str)
def test_a_resume_on_the_same_mesh_is_exact(corpus: Path, tmp_path: Path, mesh: dict) -> None:
    whole = run(on_mesh(deep_run(corpus, tmp_path / "whole"), **mesh))
    parts = on_mesh(deep_run(corpus, tmp_path / "parts"), **mesh)
    parts = replace(parts, checkpoint=replace(parts.checkpoint, every=1))
    interrupt(parts, after_step=2)
    assert run(with_trainer(parts, resume=True)) == whole


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("family", "mesh"),
    [
        *product(IN_STAGES, [{"tp": 2, "pp": 2}]),
        *product(FAMILIES, [{"tp": 2, "hdp": 2, "domain": 2}, {"hdp": 4, "domain": 4}]),
    ],
    indirect=["family"],
    ids=str,
)
def test_weights_from_hugging_face_go_to_the_ranks_that_need_them(
    corpus: Path, tmp_path: Path, family: tuple, mesh: dict
) -> None:
    """Trained in one process, exported, and started from on a mesh: the losses of starting from it in one process."""
    settings, _ = family
    run(on_mesh(deep_run(corpus, tmp_path / "first", **settings)))
    export_checkpoint(complete_checkpoints(tmp_path / "first" / "checkpoints")[-1], tmp_path / "hf")
    started = with_trainer(deep_run(corpus, tmp_path / "alone", **settings), init=f"hf:{tmp_path / 'hf'}")
    alone = run(on_mesh(started))
    ours = run(on_mesh(with_trainer(started, run_dir=str(tmp_path / "mesh")), **mesh))
    np.testing.assert_allclose(ours, alone, rtol=SAME_LOSSES)


@pytest.mark.exhaustive
def test_a_run_on_a_mesh_counts_every_token_once(corpus: Path, tmp_path: Path) -> None:
    run(on_mesh(deep_run(corpus, tmp_path / "alone")))
    run(on_mesh(deep_run(corpus, tmp_path / "mesh"), **EIGHT))
    ours, alone = metrics(tmp_path / "mesh"), metrics(tmp_path / "alone")
    for key in ("num_tokens", "num_sequences"):
        assert [line[key] for line in ours] == [line[key] for line in alone]
    np.testing.assert_allclose(
        [line["grad_norm"] for line in ours], [line["grad_norm"] for line in alone], rtol=SAME_LOSSES
    )
    assert len(losses(tmp_path / "mesh")) == STEPS


@pytest.mark.parametrize(
    ("mesh", "model", "message"),
    [
        ({"pp": 2, "hdp": 2, "domain": 2}, {}, "shard is .parameters., and parallel.pp is 2"),
        ({"hdp": 2, "domain": 2, "experts": "parallel"}, {}, "the model has no experts"),
        (
            {"tp": 2, "hdp": 2, "domain": 2, "experts": "parallel"},
            {"num_local_experts": 4, "num_experts_per_tok": 2},
            "is .parallel. with parallel.tp = 2",
        ),
        ({"tp": 3}, {}, "num_attention_heads = 4 is no multiple of parallel.tp = 3"),
        ({"pp": 5}, {}, "parallel.pp = 5 exceeds the model's 4 layers"),
        (
            {"tp": 4},
            {"num_attention_heads": 12, "num_key_value_heads": 6, "head_dim": 4},
            "either of parallel.tp = 4 and",
        ),
        ({"tp": 2}, {"intermediate_size": 33}, "intermediate_size = 33 is no multiple"),
    ],
)
def test_meshes_that_do_not_divide_are_refused(
    corpus: Path, tmp_path: Path, mesh: dict, model: dict, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        validate(on_mesh(deep_run(corpus, tmp_path / "run", **model), **mesh))


def test_ranks_that_make_no_mesh_are_refused(corpus: Path, tmp_path: Path) -> None:
    config = on_mesh(deep_run(corpus, tmp_path / "run"), tp=2, pp=2)
    with pytest.raises(ConfigError, match="6 ranks are no multiple of tp = 2 x pp = 2"):
        validate(config, num_ranks=6)


def test_a_context_that_no_pipeline_can_hold_is_refused(corpus: Path, tmp_path: Path) -> None:
    config = on_mesh(deep_run(corpus, tmp_path / "run"), pp=2)
    config = replace(config, parallel=replace(config.parallel, capacity_tokens=100))
    with pytest.raises(ConfigError, match=r"exceeds 1 HDP ranks x parallel.capacity_tokens = 100"):
        validate(config)
