"""Stand-ins for kernel packages: the same arguments and results, computed token by token (``reference``).

They keep documents apart by ``cu_seqlens`` or ``seq_idx`` as the packages do, and give a gradient where those do. No
dtype is converted. ``as_installed`` puts one of them where transformers looks for its package.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from types import ModuleType
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.integrations.hub_kernels import use_kernel_func_from_hub_with_fallback

from .reference import gated_delta_rule, selective_scan

CALLS: list[tuple[str, int]] = []
"""Names of the functions that were called, and how many documents or fragments each call had."""


def delta_rule_of_fla(
    name: str, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, scale: float | None,
    initial_state: Tensor | None, output_final_state: bool, use_qk_l2norm_in_kernel: bool, cu_seqlens: Tensor | None,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """What fla's functions have in common. It repeats heads of q and k where v has more of them."""
    assert q.shape[0] == 1
    if cu_seqlens is None:
        cu_seqlens = torch.tensor([0, q.shape[1]])
    assert cu_seqlens.dtype == torch.int64
    assert bool((cu_seqlens.diff() > 0).all()), "fla's kernels were not tried with empty sequences"
    assert int(cu_seqlens[-1]) == q.shape[1]
    CALLS.append((name, len(cu_seqlens) - 1))
    if use_qk_l2norm_in_kernel:
        q, k = (rows * (rows.square().sum(-1, keepdim=True) + 1e-6).rsqrt() for rows in (q, k))
    repeats = v.shape[2] // q.shape[2]
    q, k = (rows.repeat_interleave(repeats, dim=2) for rows in (q * (scale or q.shape[3] ** -0.5), k))
    if initial_state is None:
        initial_state = v.new_zeros(len(cu_seqlens) - 1, v.shape[2], k.shape[3], v.shape[3])
    assert initial_state.shape == (len(cu_seqlens) - 1, v.shape[2], k.shape[3], v.shape[3])
    given = (q, k, v, g, beta)
    done = [
        gated_delta_rule(*(rows[0, start:stop] for rows in given), state.to(v))
        for state, (start, stop) in zip(initial_state, pairwise(cu_seqlens.tolist()), strict=True)
    ]
    after = torch.stack([state for _, state in done]) if output_final_state else None
    return torch.cat([out for out, _ in done])[None], after


def chunk_gated_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, scale: float | None = None,
    initial_state: Tensor | None = None, output_final_state: bool = False, use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None, **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """``fla.ops.gated_delta_rule`` 0.6.0, as far as it is used."""
    assert g.shape == v.shape[:3]
    return delta_rule_of_fla(
        "chunk_gated_delta_rule", q, k, v, g, beta, scale, initial_state, output_final_state, use_qk_l2norm_in_kernel,
        cu_seqlens,
    )  # fmt: skip


def chunk_kda(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, scale: float | None = None,
    initial_state: Tensor | None = None, output_final_state: bool = False, use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None, **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """``fla.ops.kda`` 0.6.0, as far as it is used."""
    assert g.shape == (*v.shape[:3], k.shape[3])
    return delta_rule_of_fla(
        "chunk_kda", q, k, v, g, beta, scale, initial_state, output_final_state, use_qk_l2norm_in_kernel, cu_seqlens
    )


def mamba_chunk_scan_combined(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, chunk_size: int, D: Tensor | None = None,
    z: Tensor | None = None, dt_bias: Tensor | None = None, initial_states: Tensor | None = None,
    seq_idx: Tensor | None = None, dt_softplus: bool = False, dt_limit: tuple[float, float] = (0.0, float("inf")),
    return_final_states: bool = False,
) -> Any:  # fmt: skip
    """``mamba_ssm.ops.triton.ssd_combined`` 2.3.2, as far as it is used. The state that it returns is the last's."""
    assert z is None
    assert initial_states is None or seq_idx is None, "states inside of a pack have no gradient"
    if seq_idx is None:
        seq_idx = torch.zeros(1, x.shape[1], dtype=torch.int32)
    assert seq_idx.dtype == torch.int32
    assert seq_idx.shape == (1, x.shape[1])
    edges = [0, *(seq_idx[0].diff().nonzero()[:, 0] + 1).tolist(), x.shape[1]]
    CALLS.append(("mamba_chunk_scan_combined", len(edges) - 1))
    steps = dt if dt_bias is None else dt + dt_bias
    steps = (F.softplus(steps) if dt_softplus else steps).clamp(*dt_limit)[0]
    b, c = (rows[0].repeat_interleave(x.shape[2] // rows.shape[2], dim=1) for rows in (B, C))
    shape = (x.shape[2], x.shape[3], B.shape[3])
    before = x.new_zeros(shape) if initial_states is None else initial_states.view(shape)
    done = [
        selective_scan(*(rows[start:stop] for rows in (x[0], steps)), A[:, None], b[start:stop], c[start:stop], before)
        for start, stop in pairwise(edges)
    ]
    out = torch.cat([rows for rows, _ in done])[None]
    out = out if D is None else out + D[:, None] * x
    return (out, done[-1][1][None]) if return_final_states else out


PLACES = {
    "chunk_gated_delta_rule": ("fla", "ops.gated_delta_rule"),
    "chunk_kda": ("fla", "ops.kda"),
    "mamba_chunk_scan_combined": ("mamba_ssm", "ops.triton.ssd_combined"),
}


def as_installed(function: Callable[..., Any], plain: Callable[..., Any], version: str = "9.9") -> Callable[..., Any]:
    """What transformers makes of its function ``plain`` where a package has ``function``."""
    package, folder = PLACES[function.__name__]
    modules = {package: ModuleType(package)}
    modules[package].__version__ = version  # type: ignore[attr-defined]
    path = package
    for part in folder.split("."):
        inner = ModuleType(f"{path}.{part}")
        setattr(modules[path], part, inner)
        path = f"{path}.{part}"
        modules[path] = inner
    setattr(modules[path], function.__name__, function)
    plain = getattr(plain, "__wrapped__", plain)
    with patch.dict(sys.modules, modules):
        return use_kernel_func_from_hub_with_fallback(function.__name__, package)(plain)


@contextmanager
def installed_in(module: Any, name: str, function: Callable[..., Any]) -> Iterator[list[tuple[str, int]]]:
    """A model's module in whose environment the package is installed. Yields the calls."""
    CALLS.clear()
    with patch.object(module, name, as_installed(function, getattr(module, name))):
        yield CALLS
