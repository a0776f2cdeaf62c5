"""Muon on shards against torch.optim.Muon on whole matrices, and in whole runs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.optim import _muon

from bytescale.common.cut import Cut
from bytescale.common.errors import ConfigError
from bytescale.config.schema import ModelConfig, OptimizerConfig
from bytescale.config.validate import validate
from bytescale.runtime.group import RankGroup
from bytescale.runtime.mesh import Mesh
from bytescale.runtime.optimizer.flat import Entry, FlatParameters
from bytescale.runtime.optimizer.muon import deal, is_hidden_matrix, orthogonalised
from bytescale.runtime.optimizer.sharded_optimizer import ShardedOptimizer
from tests.helpers.decoder import Sizes
from tests.helpers.effort import one_of
from tests.helpers.ranks import run_ranks
from tests.helpers.steps import make_model
from tests.train.runs import interrupt, on_ranks, run, small_run, with_trainer, write_corpus
from tests.train.test_models import hf_folder

from .test_zero import STEPS, gradients_of

CONFIG = OptimizerConfig(name="muon", lr=1e-2, weight_decay=0.2, clip_grad_norm=0.5, options={"momentum": 0.9})


@pytest.mark.parametrize("shape", [(24, 40), (40, 24), (16, 16), (1, 8)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_a_matrix_becomes_orthogonal(shape: tuple[int, int], dtype: torch.dtype) -> None:
    """In BF16 to the last bit as torch has it; in FP64 with singular values near 1 and the same singular vectors."""
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    ours = orthogonalised(matrix, dtype)
    if dtype == torch.bfloat16:
        assert torch.equal(ours, _muon._zeropower_via_newtonschulz(matrix, (3.4445, -4.7750, 2.0315), 5, 1e-7))
        return
    left, _, right = torch.linalg.svd(matrix, full_matrices=False)
    values = left.T @ ours @ right.T
    assert (values - values.diag().diag()).abs().max() < 1e-9
    assert 0.6 < values.diag().min() <= values.diag().max() < 1.3


def reference_parameters(num_ranks: int, monkeypatch: pytest.MonkeyPatch) -> dict[str, torch.Tensor]:
    """torch.optim.Muon and AdamW on whole parameters. Torch would orthogonalise in BF16; here it is FP64, as ours."""
    monkeypatch.setattr(_muon, "_zeropower_via_newtonschulz", lambda grad, *_: orthogonalised(grad, torch.float64))
    model = make_model(Sizes(), torch.float64)
    named = dict(model.named_parameters())
    muon = torch.optim.Muon(
        [p for name, p in named.items() if is_hidden_matrix(name, p)],
        lr=CONFIG.lr, weight_decay=CONFIG.weight_decay, momentum=0.9, adjust_lr_fn="match_rms_adamw",
    )  # fmt: skip
    others = [p for name, p in named.items() if not is_hidden_matrix(name, p)]
    adam = torch.optim.AdamW(
        [
            {"params": [p for p in others if p.dim() >= 2], "weight_decay": CONFIG.weight_decay},
            {"params": [p for p in others if p.dim() < 2], "weight_decay": 0.0},
        ],
        lr=CONFIG.lr, betas=(0.9, 0.95), eps=1e-8,
    )  # fmt: skip
    for step in range(STEPS):
        shares = zip(*(gradients_of(model, step, rank) for rank in range(num_ranks)), strict=True)
        for parameter, share in zip(model.parameters(), shares, strict=True):
            parameter.grad = sum(share)
        torch.nn.utils.clip_grad_norm_(model.parameters(), CONFIG.clip_grad_norm)
        muon.step()
        adam.step()
    return {name: p.detach().clone() for name, p in named.items()}


@pytest.mark.parametrize(("num_ranks", "bucket_bytes"), one_of([(1, 0), (2, 0), (3, 4096), (5, 20_000)], (3, 4096)))
def test_sharded_updates_equal_torchs_muon(num_ranks: int, bucket_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def one_rank(hdp: RankGroup) -> dict[str, torch.Tensor]:
        model = make_model(Sizes(), torch.float64)
        flat = FlatParameters(model.named_parameters(), hdp.size, bucket_bytes=bucket_bytes)
        optimizer = ShardedOptimizer.of_config(flat, CONFIG, Mesh.of_hdp(hdp))
        for step in range(STEPS):
            flat.zero_gradients()
            for parameter, gradient in zip(model.parameters(), gradients_of(model, step, hdp.rank), strict=True):
                parameter.grad.add_(gradient)
            share = optimizer.reduce_gradients()
            norm = sum(row[0] for row in hdp.share([share])) ** 0.5
            optimizer.update(norm, CONFIG.clip_grad_norm)
        return {name: p.detach().clone() for name, p in model.named_parameters()}

    found = run_ranks(num_ranks, one_rank)
    reference = reference_parameters(num_ranks, monkeypatch)
    assert sum(is_hidden_matrix(name, value) for name, value in reference.items()) >= 14
    for parameters in found:
        for name, expected in reference.items():
            torch.testing.assert_close(parameters[name], expected, rtol=1e-10, atol=1e-12)


def test_matrices_are_dealt_by_their_operations() -> None:
    shapes = [(64, 64)] * 8 + [(8, 64, 64), (32, 256), (256, 32)]
    entries = [Entry(f"layers.{n}.weight", Cut(shape=shape), 0) for n, shape in enumerate(shapes)]
    owners = deal(entries, 3)
    loads = [0, 0, 0]
    for entry, owner in owners.items():
        loads[owner] += entry.stop * min(entry.shape[-2:])
    assert max(loads) == 8 * 64**3, "the stack of eight experts alone"
    assert min(loads) > 0.5 * max(loads)


@pytest.mark.parametrize("preset", one_of(["dense", "experts", "pipeline"], "dense"))
def test_a_run_is_the_same_on_any_ranks(tmp_path: Path, preset: str) -> None:
    """Killed on 2 ranks, and resumed on 3 (4 with two stages), in FP64 where the model can."""
    config = small_run(write_corpus(tmp_path / "corpus"), tmp_path / "one", steps=6, dtype="fp64")
    config = replace(config, optimizer=replace(config.optimizer, name="muon"))
    if preset == "experts":  # whose grouped products transformers has for narrower numbers alone
        folder = hf_folder(tmp_path / "qwen3_moe", "qwen3_moe")
        config = replace(config, model=ModelConfig(preset=f"hf:{folder}"))
        config = with_trainer(config, init=f"hf:{folder}", dtype="fp32")
    stages = 2 if preset == "pipeline" else 1
    config = replace(config, parallel=replace(config.parallel, pp=stages))
    whole = run(on_ranks(config, stages, 256))
    parts = on_ranks(with_trainer(config, run_dir=str(tmp_path / "parts")), 2 * stages, 128)
    interrupt(parts, after_step=4)
    resumed = run(with_trainer(on_ranks(parts, 3 if stages == 1 else 4, 128), resume=True))
    assert resumed == pytest.approx(whole, rel=1e-9 if preset != "experts" else 1e-4)
    assert whole[-1] < whole[0] - 0.1


def test_muon_with_tensor_parallelism_is_refused(tmp_path: Path) -> None:
    config = small_run(write_corpus(tmp_path / "corpus"), tmp_path / "run")
    config = replace(
        config, optimizer=replace(config.optimizer, name="muon"), parallel=replace(config.parallel, ranks=2, tp=2)
    )
    with pytest.raises(ConfigError, match=r"optimizer.name is muon, and parallel.tp is 2"):
        validate(config)
