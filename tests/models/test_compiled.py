"""Compiled pointwise operations: the plain model's numbers on any mesh, one graph for all lengths, clear errors.

Most tests compile without generating code (graphs run as they were traced), which takes seconds; the exhaustive ones go
through the real compiler.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters

from bytescale.attention.kernels import MathKernel
from bytescale.common.errors import ConfigError
from bytescale.config.architecture import Architecture
from bytescale.models import build_model
from bytescale.models.compiled import RowCompiler, apply_compiled
from bytescale.models.head_groups import apply_head_groups
from bytescale.plan import Plan, RankPlan
from bytescale.plan.plan import GroupSpec
from bytescale.runtime.executor import Decoder, Executor
from bytescale.runtime.group import RankGroup
from bytescale.runtime.mesh import Mesh, MeshShape
from bytescale.runtime.saved.activations import Activations
from bytescale.runtime.saved.host_pool import HostPool
from bytescale.train.loop.trainer import train
from tests.helpers.plans import random_plan
from tests.helpers.reference_attention import reference_attention
from tests.helpers.steps import make_model, random_batch, reference_step, slice_batch, small_shape, worst_relative_error
from tests.runtime.test_mesh_parity import MIXTURE, mesh_step
from tests.train.runs import losses, small_run, write_corpus

LENGTHS = [37, 1, 8, 3, 2, 21, 12]
# Formulas are written out, and sums are taken in another order than in PyTorch's own backward.
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5}


@pytest.fixture(autouse=True)
def forget_graphs() -> Iterator[None]:
    """The compiler keeps at most eight graphs of a function, and every test has dtypes and widths of its own."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


MORE_MESHES = [
    (MeshShape(pp=1, hdp=4, tp=1), {}),
    (MeshShape(pp=2, hdp=2, tp=2), {}),
    (MeshShape(pp=1, hdp=2, tp=1), {"checkpointing": "attention", "offload": True}),
    (MeshShape(pp=1, hdp=2, tp=2), {"checkpointing": "full"}),
]


class CountedGraphs:
    """A backend that runs graphs as they were traced, and counts them."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., object]:
        self.count += 1
        return graph.forward


def forward_and_gradients(shape: Architecture, compiler: RowCompiler | None, dtype: torch.dtype) -> list[Tensor]:
    model = make_model(shape, dtype)
    if compiler is not None:
        apply_compiled(model, compiler)
    tokens = torch.randint(shape.vocab_size, (29,), generator=torch.Generator().manual_seed(0))
    hidden = model(tokens, torch.arange(29), lambda q, k, v: reference_attention(q, k, v, [29]))
    hidden.backward(torch.linspace(-1, 1, hidden.numel(), dtype=dtype).view_as(hidden))
    return [hidden.detach(), *(parameter.grad for parameter in model.parameters() if parameter.grad is not None)]


@pytest.mark.parametrize(
    "shape",
    [
        small_shape(),
        pytest.param(small_shape(**{**MIXTURE, "router_aux_loss_weight": 0.0}), marks=pytest.mark.exhaustive),
    ],
)
def test_a_compiled_model_is_the_plain_one(shape: Architecture) -> None:
    ours = forward_and_gradients(shape, RowCompiler(CountedGraphs()), torch.float64)
    plain = forward_and_gradients(shape, None, torch.float64)
    assert len(ours) == len(plain)
    for got, wanted in zip(ours, plain, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize(
    ("mesh", "options"),
    [(MeshShape(pp=1, hdp=2, tp=1), {"checkpointing": "full", "head_groups": 2, "offload": True}), *MORE_MESHES],
)
@pytest.mark.exhaustive
def test_any_mesh_gives_one_processs_numbers(mesh: MeshShape, options: dict) -> None:
    shape = small_shape(num_layers=4, hidden_size=16, num_heads=4, num_kv_heads=2, vocab_size=64, ffn_hidden_size=32)
    batch = random_batch(LENGTHS, shape.vocab_size, seed=1)
    plan = random_plan(LENGTHS, mesh.hdp, seed=3)
    if options.get("offload"):
        plan = replace(plan, group_offload_ratio=np.full(plan.num_groups, 0.5))
    reference = reference_step(make_model(shape, torch.float64), batch)
    graphs = CountedGraphs()
    ours = mesh_step(mesh, shape, torch.float64, batch, plan, compiler=RowCompiler(graphs), **options)
    assert graphs.count > 0
    assert ours.loss == pytest.approx(reference.loss, rel=1e-10)
    assert worst_relative_error(ours.gradients, reference.gradients) <= TOLERANCE[torch.float64]


@pytest.mark.parametrize("checkpointing", [pytest.param("none", marks=pytest.mark.exhaustive), "full"])
def test_all_lengths_are_served_by_the_graphs_of_the_first(checkpointing: str) -> None:
    """A step of one sequence per length, with everything that puts hooks around a layer."""
    shape = small_shape()
    graphs = CountedGraphs()
    compiler = RowCompiler(graphs)
    model = make_model(shape, torch.float32)
    apply_compiled(model, compiler)
    for layer in model.layers:
        apply_head_groups(layer.self_attn, 2 if checkpointing != "none" else 1)
    activations = Activations(
        list(model.layers),
        checkpointing=checkpointing,  # type: ignore[arg-type]
        pool=HostPool(2**24, pinned=False),
        row_wise=[(layer, "feed_forward") for layer in model.layers],
        chunk_rows=16,
    )

    def step(length: int) -> None:
        plan = Plan.build(
            lengths=[length],
            capacity_tokens=[length],
            groups=[GroupSpec(sequences=[0], ranks=[0], offload_ratio=0.5)],
            schedule=[[[0]]],
        )
        rank_plan = RankPlan.of(plan, 0)
        batch = random_batch([length], shape.vocab_size, seed=length, masked_share=0.0)
        Executor(
            part=Decoder(module=model, activations=activations),
            kernel=MathKernel(),
            mesh=Mesh.of_hdp(RankGroup()),
        ).run(rank_plan, [slice_batch(batch, rank_plan.micro_batches[0])], num_global_targets=max(1, batch.num_targets))

    step(19)
    first = graphs.count
    for length in [1, 2, 3, 4, 15, 16, 17, 32, 33, 48, 64, 129]:
        step(length)
    assert 0 < first == graphs.count


def test_a_compiler_that_fails_is_refused_by_name() -> None:
    def broken(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., object]:
        raise RuntimeError("No working C++ compiler found\nand a page of advice")

    with pytest.raises(
        ConfigError, match=r"kernels\.compile is on.*No working C\+\+ compiler.*To fix: install a C\+\+"
    ):
        RowCompiler(broken).check(torch.device("cpu"))
    RowCompiler(CountedGraphs()).check(torch.device("cpu"))


@pytest.mark.exhaustive
def test_a_machine_without_a_compiler_is_told_so(tmp_path: Path) -> None:
    made = "from bytescale.models.compiled import RowCompiler"
    script = f"import torch; {made}; RowCompiler().check(torch.device('cpu'))"
    environment = {**os.environ, "CXX": str(tmp_path / "none"), "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache")}
    ended = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=False)
    assert ended.returncode != 0
    assert "ConfigError: kernels.compile is on, but torch.compile fails here (" in ended.stderr
    assert "To fix: install a C++ compiler (g++), or leave kernels.compile out." in ended.stderr


@pytest.mark.exhaustive
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_generated_code_computes_what_the_plain_model_does(dtype: torch.dtype) -> None:
    """Against fp64: as good as the plain model in the same dtype, or better, since sums inside a function stay wide."""
    shape = small_shape()
    exact = forward_and_gradients(shape, None, torch.float64)

    def error(tensors: list[Tensor]) -> float:
        pairs = zip(tensors, exact, strict=True)
        return max(float((got.double() - wanted).norm() / wanted.norm()) for got, wanted in pairs)

    ours = error(forward_and_gradients(shape, RowCompiler(), dtype))
    assert ours <= max(1.5 * error(forward_and_gradients(shape, None, dtype)), 1e-12)


@pytest.mark.exhaustive
def test_code_for_another_vector_width_is_not_taken_from_the_compilers_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Code for AVX2, built for AVX-512, crashes or gives wrong numbers. A second run at the same width does hit."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    hits = []
    for capability in ("default", "avx2", "avx2"):
        monkeypatch.setenv("ATEN_CPU_CAPABILITY", capability)
        torch._dynamo.reset()
        counters.clear()
        RowCompiler().check(torch.device("cpu"))
        found = (count for kind in counters.values() for name, count in kind.items() if name.endswith("cache_hit"))
        hits.append(sum(found))
    assert hits[:2] == [0, 0]
    assert hits[2] > 0


@pytest.mark.exhaustive
def test_a_compiled_run_has_the_losses_of_a_plain_one(tmp_path: Path) -> None:
    corpus = write_corpus(tmp_path / "corpus")
    for name in ("plain", "compiled"):
        train(small_run(corpus, tmp_path / name, compile=name == "compiled"), print_line=lambda line: None)
    # Eight steps of fp32 AdamW at a rate of 1e-2.
    np.testing.assert_allclose(losses(tmp_path / "compiled"), losses(tmp_path / "plain"), rtol=1e-4)
    assert "pointwise parts compiled" in (tmp_path / "compiled" / "log.txt").read_text(encoding="utf-8")


def test_parts_without_head_or_embedding_are_compiled_too() -> None:
    shape = small_shape(num_layers=3)
    graphs = CountedGraphs()
    for layers in (range(1), range(1, 2), range(2, 3)):
        apply_compiled(build_model(shape, layers), RowCompiler(graphs))
    assert graphs.count == 0  # nothing is compiled before it is called
