"""Every kernel, cut anywhere, equals its recurrence token by token; so do transformers' own kernels for the whole."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from transformers.models.jamba import modeling_jamba as jamba
from transformers.models.kimi_linear import modeling_kimi_linear as kimi
from transformers.models.nemotron_h import modeling_nemotron_h as nemotron
from transformers.models.qwen3_next import modeling_qwen3_next as qwen

from bytescale.common.errors import ConfigError
from bytescale.parity.compare import WideCasts
from bytescale.plan.plan import offsets_of
from bytescale.plan.trees import Forest
from bytescale.recurrence.cuts import Cuts, OneProcessCuts
from bytescale.recurrence.kernels import KERNELS, mamba2, require_known_kernel
from tests.attention.test_trees import forest_of, random_tree
from tests.helpers.effort import examples

from . import packages
from .reference import gated_delta_rule, lightning_attention, selective_scan

Case = tuple[dict[str, Tensor], Callable[[Cuts | None, dict[str, Tensor]], Tensor], Callable[..., Tensor]]
"""Inputs whose first dimension is tokens, our kernel (None: transformers' for the whole) and the slow twin."""

H, K, V, N = 3, 4, 5, 2


def stock_of(module: Any, name: str, package: Callable[..., Any] | None) -> Callable[..., Any]:
    """What a mixer calls by this name, without the kernel package or with it."""
    stock: Callable[..., Any] = getattr(module, name)
    return stock if package is None else packages.as_installed(package, stock)


def delta(function: str, module: Any, *decays: int, package: Callable[..., Any] | None = None) -> Case:
    shapes = {"q": (2 * H, K), "k": (2 * H, K), "v": (2 * H, V), "g": (2 * H, *decays), "beta": (2 * H,)}

    def ours(cuts: Cuts | None, given: dict[str, Tensor]) -> Tensor:
        stock = stock_of(module, function, package)
        q, k, v, g, beta = (given[name][None] for name in shapes)
        options = {"g": -g.square(), "beta": beta.sigmoid(), "use_qk_l2norm_in_kernel": True}
        out, _ = stock(q, k, v, **options) if cuts is None else KERNELS[function](cuts, stock, q, k, v, **options)
        return out[0]

    def twin(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
        q, k = (rows * (rows.square().sum(-1, keepdim=True) + 1e-6).rsqrt() for rows in (q, k))
        return gated_delta_rule(q * K**-0.5, k, v, -g.square(), beta.sigmoid(), q.new_zeros(2 * H, K, V))[0]

    return shapes, ours, twin  # type: ignore[return-value]


def mamba_2(package: Callable[..., Any] | None = None) -> Case:
    shapes = {"x": (2 * H, V), "dt": (2 * H,), "b": (2, N), "c": (2, N)}
    a, bias, d = -torch.arange(1.0, 2 * H + 1).double(), torch.linspace(-1, 1, 2 * H).double(), torch.ones(2 * H)

    def ours(cuts: Cuts | None, given: dict[str, Tensor]) -> Tensor:
        stock = stock_of(nemotron, "mamba2_chunk_scan", package)
        x, dt, b, c = (given[name][None] for name in shapes)
        options = {"chunk_size": 4, "D": d.double(), "dt_bias": bias, "dt_softplus": True, "dt_limit": (0.1, 2.0)}
        if cuts is None:
            return stock(x, dt, a, b, c, **options)[0]
        return KERNELS["mamba2_chunk_scan"](cuts, stock, x, dt, a, b, c, **options)[0]

    def twin(x: Tensor, dt: Tensor, b: Tensor, c: Tensor) -> Tensor:
        b, c = (rows.repeat_interleave(H, dim=1) for rows in (b, c))
        steps = F.softplus(dt + bias).clamp(0.1, 2.0)
        return selective_scan(x, steps, a[:, None], b, c, x.new_zeros(2 * H, V, N))[0] + x

    return shapes, ours, twin  # type: ignore[return-value]


def mamba_1() -> Case:
    shapes = {"x": (H,), "dt": (H,), "b": (N,), "c": (N,), "z": (H,)}
    a, bias, d = -torch.arange(1.0, H * N + 1).double().view(H, N), torch.linspace(-1, 1, H).double(), torch.ones(H)

    def ours(cuts: Cuts | None, given: dict[str, Tensor]) -> Tensor:
        stock = jamba.mamba_selective_scan
        x, dt, b, c, z = (given[name].T[None] for name in shapes)
        options = {"D": d.double(), "z": z, "delta_bias": bias, "delta_softplus": True}
        if cuts is None:
            return stock(x, dt, a, b, c, **options)[0].T
        return KERNELS["mamba_selective_scan"](cuts, stock, x, dt, a, b, c, **options)[0].T

    def twin(x: Tensor, dt: Tensor, b: Tensor, c: Tensor, z: Tensor) -> Tensor:
        b, c = (rows[:, None].expand(-1, H, -1) for rows in (b, c))
        out, _ = selective_scan(x[..., None], F.softplus(dt + bias), a, b, c, x.new_zeros(H, 1, N))
        return (out[..., 0] + x) * F.silu(z)

    return shapes, ours, twin  # type: ignore[return-value]


def lightning() -> Case:
    """It is computed as Mamba 2."""
    shapes, slope = {"q": (H, K), "k": (H, K), "v": (H, V)}, torch.tensor([0.1, 0.5, 2.0]).double()

    def ours(cuts: Cuts | None, given: dict[str, Tensor]) -> Tensor:
        whole = OneProcessCuts([0], [slice(0, len(given["q"]))])
        q, k, v = (given[name][None] for name in shapes)
        steps, stock = torch.ones_like(v[..., 0]), nemotron.mamba2_chunk_scan
        return mamba2(whole if cuts is None else cuts, stock, v, steps, -slope, k, q, chunk_size=64)[0]

    def twin(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return lightning_attention(q, k, v, (-slope).exp(), q.new_zeros(H, K, V))[0]

    return shapes, ours, twin  # type: ignore[return-value]


def short_convolution() -> Case:
    weight, bias = torch.linspace(-1, 1, 4 * H).double().view(H, 4), torch.ones(H).double()

    def ours(cuts: Cuts | None, given: dict[str, Tensor]) -> Tensor:
        stock, x = qwen.causal_conv1d_fn, given["x"].T[None]
        if cuts is None:
            return stock(x, weight, bias, activation="silu")[0].T
        return KERNELS["causal_conv1d_fn"](cuts, stock, x, weight, bias, activation="silu")[0].T

    def twin(x: Tensor) -> Tensor:
        before = torch.cat([x.new_zeros(3, H), x])
        return F.silu(torch.stack([(before[t : t + 4] * weight.T).sum(0) for t in range(len(x))]) + bias)

    return {"x": (H,)}, ours, twin  # type: ignore[dict-item]


CASES = {
    "gated delta rule": delta("torch_chunk_gated_delta_rule", qwen),
    "kimi delta attention": delta("chunk_kimi_delta_attention", kimi, K),
    "gated delta rule of fla": delta("torch_chunk_gated_delta_rule", qwen, package=packages.chunk_gated_delta_rule),
    "kimi delta attention of fla": delta("chunk_kimi_delta_attention", kimi, K, package=packages.chunk_kda),
    "mamba 2": mamba_2(),
    "mamba 2 of mamba-ssm": mamba_2(packages.mamba_chunk_scan_combined),
    "mamba 1": mamba_1(),
    "lightning": lightning(),
    "convolution": short_convolution(),
}


@pytest.mark.parametrize("name", CASES)
@examples(6, 12)
@given(
    edges=st.lists(st.integers(0, 20), max_size=5),
    tail=st.lists(st.integers(1, 4), max_size=2),
    seed=st.integers(0, 99),
)
def test_a_kernel_cut_anywhere_is_its_recurrence(name: str, edges: list[int], tail: list[int], seed: int) -> None:
    """A document of 20 tokens in fragments, and whole ones behind it. fp64 with wide casts: sums in other orders."""
    shapes, ours, twin = CASES[name]
    random, lengths = torch.Generator().manual_seed(seed), [20, *tail]
    given_ = {key: torch.randn(sum(lengths), *shape, generator=random).double() for key, shape in shapes.items()}
    weights = torch.randn(sum(lengths), generator=random).double()
    ends = [sum(lengths[: number + 1]) for number in range(len(lengths))]
    cuts = OneProcessCuts(sorted([0, *edges, 20]), [slice(a, b) for a, b in pairwise(ends)])

    def results(compute: Callable[[dict[str, Tensor]], Tensor]) -> list[Tensor]:
        leaves = {key: rows.clone().requires_grad_() for key, rows in given_.items()}
        with WideCasts():
            out = compute(leaves)
            gradients = torch.autograd.grad((out.flatten(1).sin().sum(1) * weights).sum(), list(leaves.values()))
        return [out, *gradients]

    def by_document(one: Callable[[dict[str, Tensor]], Tensor]) -> Callable[[dict[str, Tensor]], Tensor]:
        return lambda leaves: torch.cat(
            [one({k: v[stop - n : stop] for k, v in leaves.items()}) for n, stop in zip(lengths, ends, strict=True)]
        )

    expected = results(by_document(lambda leaves: twin(**leaves)))
    for found in (results(lambda leaves: ours(cuts, leaves)), results(by_document(lambda leaves: ours(None, leaves)))):
        for a, b in zip(found, expected, strict=True):
            assert float((a - b).detach().abs().max()) <= 1e-10 * max(1.0, float(b.abs().max()))


def cuts_of(forest: Forest) -> OneProcessCuts:
    starts, parents = forest.runs()
    ends = [*starts.tolist(), int(forest.sequence_lengths.sum())]
    return OneProcessCuts([0], [slice(*pair) for pair in pairwise(ends)], parents.tolist())


def compare_paths(name: str, forest: Forest, cuts: OneProcessCuts, seed: int) -> float:
    """How far a kernel's outputs and gradients are from those of the documents' paths one by one, by the slow twin."""
    shapes, ours, twin = CASES[name]
    random, first = torch.Generator().manual_seed(seed), offsets_of(forest.sequence_lengths)
    given_ = {key: torch.randn(int(first[-1]), *shape, generator=random).double() for key, shape in shapes.items()}
    paths = [path + first[at] for path, at in zip(forest.paths, forest.sequence_of, strict=True)]
    weights = [torch.randn(len(path), generator=random).double() for path in paths]

    def results(compute: Callable[[dict[str, Tensor]], list[Tensor]]) -> list[Tensor]:
        leaves = {key: rows.clone().requires_grad_() for key, rows in given_.items()}
        with WideCasts():
            outs = [out.flatten(1).sin().sum(1) * own for out, own in zip(compute(leaves), weights, strict=True)]
            return [torch.cat(outs), *torch.autograd.grad(torch.cat(outs).sum(), list(leaves.values()))]

    def in_tree(leaves: dict[str, Tensor]) -> list[Tensor]:
        out = ours(cuts, leaves)
        return [out[path] for path in paths]

    expected = results(lambda leaves: [twin(**{key: rows[path] for key, rows in leaves.items()}) for path in paths])
    pairs = zip(results(in_tree), expected, strict=True)
    return max(float((a - b).detach().abs().max()) / max(1.0, float(b.abs().max())) for a, b in pairs)


@pytest.mark.parametrize("name", CASES)
@examples(2, 60)
@given(seed=st.integers(0, 10**6))
def test_a_branch_begins_with_the_state_at_the_end_of_its_prefix(name: str, seed: int) -> None:
    """Random trees, depth 1 to 6 and fan-out 1 to 16, with empty branches, equal documents and ones of one token."""
    forest = forest_of(random_tree(np.random.default_rng(seed), most=8), 10**6)
    assert compare_paths(name, forest, cuts_of(forest), seed) <= 1e-10


@pytest.mark.parametrize("name", CASES)
def test_a_state_of_a_sibling_would_show(name: str) -> None:
    """And so would its last rows, for a convolution: they are those before in depth-first order."""
    forest = forest_of([[1, 1, 2, 2, 2], [1, 1, 1, 2], [1, 1, 1, 1, 1], [2, 1]], 10**6)
    assert compare_paths(name, forest, cuts_of(forest), 0) <= 1e-10
    cuts = cuts_of(forest)
    assert cuts.parents == [-1, 0, 0, 2, 2, -1]
    cuts.parents[2] = 1
    assert compare_paths(name, forest, cuts, 0) > 1e-3


@pytest.mark.parametrize("name", [name for name in CASES if " of " in name])
def test_a_package_computes_all_documents_in_one_call(name: str) -> None:
    """fla all fragments, too; one that has no rows is left out. mamba-ssm: states inside of a pack have no gradient."""
    shapes, ours, _ = CASES[name]
    given_ = {key: torch.randn(20, *shape).double() for key, shape in shapes.items()}
    packages.CALLS.clear()
    ours(OneProcessCuts([0, 3, 3, 9, 11], [slice(11, 12), slice(12, 16), slice(16, 20)]), given_)
    assert [count for _, count in packages.CALLS] == ([1, 1, 1, 3] if "mamba" in name else [3, 3])
    packages.CALLS.clear()
    tree = [slice(*pair) for pair in pairwise([0, 4, 6, 9, 11, 15, 20])]  # two roots, three branches, and one of theirs
    ours(OneProcessCuts([0], tree, [-1, 0, 1, 0, -1, 4]), given_)
    assert [count for _, count in packages.CALLS] == ([1] * 6 if "mamba" in name else [2, 3, 1])


def test_the_arguments_of_a_package_are_looked_at() -> None:
    """Transformers drops what a package's function does not take: the documents of a pack would become one."""

    def chunk_gated_delta_rule(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, offsets: Any = None) -> None:
        """As before fla 0.2."""

    name = "torch_chunk_gated_delta_rule"
    old = packages.as_installed(chunk_gated_delta_rule, qwen.torch_chunk_gated_delta_rule)
    with pytest.raises(
        ConfigError, match=r"A layer .*takes no initial_state, output_final_state, use_qk.*, cu_seqlens"
    ):
        require_known_kernel(name, old, "a layer")
    new = packages.as_installed(packages.chunk_gated_delta_rule, qwen.torch_chunk_gated_delta_rule)
    require_known_kernel(name, new, "a layer")
    require_known_kernel(name, qwen.torch_chunk_gated_delta_rule, "a layer")


def test_states_are_exact_under_autocast_and_after_many_tokens() -> None:
    """What fragments do to each other is in fp32: here what 8192 tokens leave to two more, under autocast to BF16."""
    tokens = 8192
    generator = torch.Generator().manual_seed(0)
    x, dt, b, c = (torch.randn(1, rows, tokens, generator=generator).double() for rows in (H, H, N, N))
    dt -= 3  # steps as trained models have them
    a = -8 * torch.arange(1.0, N + 1).double().expand(H, N)

    def after(kind: torch.dtype) -> Tensor:
        """Two rows, which a state reaches."""
        cuts, given = OneProcessCuts([0, tokens - 2, tokens]), [part.to(kind) for part in (x, dt, a, b, c)]
        found: Tensor = KERNELS["mamba_selective_scan"](cuts, no_rows, *given, delta_softplus=True)
        return found[..., -2:].double()

    def no_rows(x: Tensor, *_: Any, **__: Any) -> Tensor:
        return torch.zeros_like(x)

    exact = after(torch.float64)
    with torch.autocast("cpu", torch.bfloat16):
        found = after(torch.float32)
    assert (found - exact).abs().max() <= 2e-6 * exact.abs().max()
