"""The kernels of recurrent layers, fragment by fragment: each family's stock kernel, and what a run does to a state.

``KERNELS`` has, by the name of a function that mixers of transformers call, what is called instead. It gets the cuts
and the stock function, and returns what the latter would return for all rows, with every document alone.

A fragment of a shared sequence first runs from no state. What a state ``E`` before it adds to its outputs is linear in
``E``, and is added when ``E`` is known. Delta rules get both from one call of the stock kernel: columns of the state do
not see each other, so that values ``[v | 0]`` and a state ``[0 | I]`` before the run give outputs ``[out | q M]`` and a
state ``[S | M]`` after it, where M is the matrix that the run applies to a state. It costs at most twice the kernel.

Shape letters: T rows of the micro-batch, n of a run, H heads, K and V rows and columns of a delta rule's state, P and N
of a Mamba state, C channels of a convolution, k its width, F fragments.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bytescale.attention.copies import to_device
from bytescale.recurrence.cuts import Cuts, act

Stock = Callable[..., Any]


@dataclass(frozen=True)
class Run:
    """A run of rows, from no state.

    Attributes:
        out: ``[n, ...]``.
        effect: returns what the run does to a state: its decay and the state after it (``cuts``).
        read: what a state before the run adds to ``out``.
    """

    out: Tensor
    effect: Callable[[], tuple[Tensor, Tensor]]
    read: Callable[[Tensor], Tensor]


def carried(cuts: Cuts, run: Callable[[slice, bool], Run], *, matrix: bool = False) -> Tensor:
    """``[T, ...]`` outputs of all rows. ``run(rows, alone)`` computes a run; ``alone``: no state comes before it."""
    own = [None if rows.start == rows.stop else run(rows, opens)
           for rows, opens in zip(cuts.fragments, cuts.opens, strict=True)]  # fmt: skip
    documents = [run(rows, True) for rows in cuts.documents]
    every = [one for one in own if one is not None]
    out = torch.cat([one.out for one in every + documents])
    left = [one.effect()[1] for one in documents] if cuts.keep is not None else []
    if not own:
        if cuts.keep is not None:
            cuts.keep("recurrent", torch.stack(left))
        return out
    known = [None if one is None else one.effect() for one in own]
    decay, state = next((pair for pair in known if pair is not None), None) or documents[0].effect()
    same = torch.eye(decay.shape[-1]).to(decay).expand_as(decay) if matrix else torch.ones_like(decay)
    nothing = same, torch.zeros_like(state)  # what a fragment without rows does
    decays, states = (
        torch.stack(parts) for parts in zip(*(nothing if pair is None else pair for pair in known), strict=True)
    )
    out, entry = cuts.entry(out, decays, states, matrix=matrix)
    if cuts.keep is not None:
        cuts.keep("recurrent", torch.cat([act(decays, entry, matrix=matrix) + states, *(one[None] for one in left)]))
    rows = list(out.split([len(one.out) for one in every + documents]))
    number = 0
    for one, opens, before in zip(own, cuts.opens, entry, strict=True):
        if one is not None:
            rows[number] = rows[number] if opens else rows[number] + one.read(before).to(out.dtype)
            number += 1
    return torch.cat(rows)


def convolution(
    cuts: Cuts, stock: Stock, x: Tensor, weight: Tensor, bias: Tensor | None = None, **options: Any
) -> Tensor:
    """Depthwise causal convolution of ``x [1, C, T]`` with ``weight [C, k]``: one call, a halo before each run."""
    width = weight.shape[-1] - 1
    rows, arrived, places = cuts.halo(x[0].T, width)
    absent = len(rows) + len(arrived)
    picked: list[int] = []
    kept: list[int] = []
    ends: list[list[int]] = []
    for number, run in enumerate([*cuts.fragments, *cuts.documents]):
        before = places[number] if number < len(places) else [-1] * width
        picked += [absent if at < 0 else at for at in before] + list(range(run.start, run.stop))
        kept += range(len(picked) - (run.stop - run.start), len(picked))
        ends.append(picked[len(picked) - width :])
    index, inner = (to_device(torch.tensor(numbers), x.device) for numbers in (picked, kept))
    known = torch.cat([rows, arrived, rows.new_zeros(1, rows.shape[1])])
    if cuts.keep is not None:
        last = known[to_device(torch.tensor(ends), x.device)].transpose(1, 2)
        cuts.keep("conv", F.pad(last, (1, 0)))  # caches have one more, which the next token no longer sees
    out: Tensor = stock(known[index].T[None].contiguous(), weight, bias, **_without(options, "seq_idx"))
    return out[:, :, inner]


def delta_rule(
    cuts: Cuts, stock: Stock, query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, **options: Any
) -> tuple[Tensor, None]:
    """Gated delta rule and KDA: ``query, key [1, T, G, K]``, ``value [1, T, H, V]``, ``g [1, T, H]`` or of all keys."""
    num_heads, columns, width = value.shape[2], value.shape[3], key.shape[3]
    wide = torch.promote_types(value.dtype, torch.float32)
    identity = torch.eye(width, dtype=wide, device=value.device).expand(1, num_heads, width, width)
    options = _without(options, "initial_state", "output_final_state", "cu_seqlens")

    def run(rows: slice, alone: bool) -> Run:
        q, k, v, decay, rate = (part[:, rows] for part in (query, key, value, g, beta))
        entry = None
        if not alone:
            v, entry = F.pad(v, (0, width)), F.pad(identity, (columns, 0))
        out, after = stock(q, k, v, g=decay, beta=rate, initial_state=entry, output_final_state=True, **options)
        after = after[0].to(wide)
        if alone:
            return Run(out[0], lambda: (torch.zeros_like(identity[0]), after), torch.zeros_like)
        read = out[0, ..., columns:].to(wide)
        return Run(
            out[0, ..., :columns],
            lambda: (after[..., columns:], after[..., :columns]),
            lambda before: torch.einsum("nhk,hkv->nhv", read, before),
        )

    return carried(cuts, run, matrix=True)[None], None


def mamba2(
    cuts: Cuts, stock: Stock, x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor,
    *, dt_bias: Tensor | None = None, dt_softplus: bool = False, dt_limit: tuple[float, float] = (0.0, float("inf")),
    **options: Any,
) -> Tensor:  # fmt: skip
    """Mamba 2: ``x [1, T, H, P]``, ``dt [1, T, H]``, ``A [H]``, ``B, C [1, T, G, N]``. States are ``[H, P, N]``."""
    options = _without(options, "initial_states", "return_final_states", "seq_idx")
    wide = torch.promote_types(x.dtype, torch.float32)

    def run(rows: slice, alone: bool) -> Run:
        out, after = stock(
            x[:, rows], dt[:, rows], A, B[:, rows], C[:, rows], dt_bias=dt_bias,
            dt_softplus=dt_softplus, dt_limit=dt_limit, return_final_states=True, **options,
        )  # fmt: skip
        decays = (A * _steps(dt[0, rows], dt_bias, dt_softplus).clamp(*dt_limit)).to(wide).cumsum(0).exp()

        def read(before: Tensor) -> Tensor:
            seen = C[0, rows].to(wide).repeat_interleave(x.shape[2] // C.shape[2], dim=1)
            return torch.einsum("nhs,hps->nhp", seen, before) * decays[..., None]

        left = decays[-1, :, None, None]
        return Run(out[0], lambda: (torch.zeros_like(left) if alone else left, after[0].to(wide)), read)

    return carried(cuts, run)[None]


def mamba1(
    cuts: Cuts, stock: Stock, x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor,
    *, z: Tensor | None = None, delta_bias: Tensor | None = None, delta_softplus: bool = False, **options: Any,
) -> Tensor:  # fmt: skip
    """Mamba 1: ``x, dt, z [1, H, T]``, ``A [H, N]``, ``B, C [1, N, T]``. States are ``[H, N]``.

    The stock kernel takes no state, and mamba-ssm's gives no gradient of the one that it returns. So the state is
    summed here, for fragments alone. The gate ``z`` follows when outputs are complete.
    """
    options = _without(options, "return_last_state")
    wide = torch.promote_types(x.dtype, torch.float32)

    def run(rows: slice, alone: bool) -> Run:
        out = stock(
            x[..., rows], dt[..., rows], A, B[..., rows], C[..., rows], z=None, delta_bias=delta_bias,
            delta_softplus=delta_softplus, **options,
        )  # fmt: skip
        steps = _steps(dt[0, :, rows].T, delta_bias, delta_softplus).to(wide)
        time = steps.cumsum(0)  # [n, H]

        def effect() -> tuple[Tensor, Tensor]:
            left = (A * time[-1, :, None]).exp()
            later = (A * (time[-1] - time)[..., None]).exp()  # [n, H, N]
            state = torch.einsum("nhs,nh,ns->hs", later, steps * x[0, :, rows].T, B[0, :, rows].T.to(wide))
            return torch.zeros_like(left) if alone else left, state

        def read(before: Tensor) -> Tensor:
            return torch.einsum("nhs,hs,ns->nh", (A * time[..., None]).exp(), before, C[0, :, rows].T.to(wide))

        return Run(out[0].T, effect, read)

    out = carried(cuts, run).T[None]
    return out if z is None else out * F.silu(z)


def _steps(dt: Tensor, bias: Tensor | None, softplus: bool) -> Tensor:
    dt = dt if bias is None else dt + bias.to(dt.dtype)
    return F.softplus(dt) if softplus else dt


def _not_fused(cuts: Cuts, stock: Stock, *args: Any, **options: Any) -> None:
    """The mixer goes on with its other kernels, as it does where the fused one is not installed."""


def _without(options: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in options.items() if name not in names}


KERNELS: dict[str, Callable[..., Any]] = {
    "causal_conv1d_fn": convolution,
    "torch_chunk_gated_delta_rule": delta_rule,
    "chunk_kimi_delta_attention": delta_rule,
    "mamba2_chunk_scan": mamba2,
    "mamba2_split_conv1d_scan_combined": _not_fused,
    "mamba_selective_scan": mamba1,
    "mamba_inner_fn": _not_fused,
}
"""By the name that a mixer's module gives to the stock function."""


_BLOCK = 64
"""Rows of lightning attention that are computed together."""


def lightning_mixer(cuts: Cuts, mixer: nn.Module, hidden_states: Tensor) -> tuple[Tensor, None]:
    """``MiniMaxLightningAttention.forward`` of ``hidden_states [1, T, width]``: the mixer has no kernel of its own."""
    own: Any = mixer
    qkv = own.act_fn(own.qkv_proj(hidden_states))[0].unflatten(1, (own.num_attention_heads, -1))
    q, k, v = qkv.split(own.head_dim, dim=2)
    out = lightning_attention(cuts, q, k, v, own.slope_rate.flatten())
    gated = own.output_gate(hidden_states).sigmoid() * own.norm(out.flatten(1))
    return own.out_proj(gated), None


def lightning_attention(cuts: Cuts, q: Tensor, k: Tensor, v: Tensor, slope: Tensor) -> Tensor:
    """``q, k [T, H, K]``, ``v [T, H, V]``; a token multiplies the state by ``exp(-slope)``, ``slope [H]``."""
    wide = torch.promote_types(q.dtype, torch.float32)

    def run(rows: slice, alone: bool) -> Run:
        num_rows = rows.stop - rows.start
        ages = torch.arange(1, num_rows + 1, device=q.device)
        decays = (-slope * ages[:, None]).exp().to(q.dtype)[..., None]  # [n, H, 1]
        outs, state = [], q.new_zeros(q.shape[1], q.shape[2], v.shape[2])
        for start in range(0, num_rows, _BLOCK):
            stop = min(num_rows, start + _BLOCK)
            at, size = slice(rows.start + start, rows.start + stop), stop - start
            apart = ages[:size, None] - ages[:size]
            seen = (-slope[:, None, None] * apart).exp().masked_fill(apart < 0, 0.0).to(q.dtype)
            weights = torch.einsum("nhk,mhk->hnm", q[at], k[at]) * seen
            inner = torch.einsum("hnm,mhv->nhv", weights, v[at])
            outs.append(inner + torch.einsum("nhk,hkv->nhv", q[at] * decays[:size], state))
            left = torch.cat([decays[: size - 1].flip(0), torch.ones_like(decays[:1])])  # of each row's share
            state = state * decays[size - 1][..., None] + torch.einsum("nhk,nhv->hkv", k[at] * left, v[at])
        gone = torch.zeros_like(decays[-1, :, :, None]) if alone else decays[-1, :, :, None]
        return Run(
            torch.cat(outs),
            lambda: (gone.to(wide), state.to(wide)),
            lambda before: torch.einsum("nhk,hkv->nhv", (q[rows] * decays).to(wide), before),
        )

    return carried(cuts, run)
