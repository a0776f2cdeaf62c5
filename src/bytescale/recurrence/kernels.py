"""The kernels of recurrent layers, fragment by fragment: each family's stock kernel, and what a run does to a state.

``KERNELS`` has, by the name of a function that mixers of transformers call, what is called instead. It gets the cuts
and the stock function, and returns what the latter would return for all rows, with every document alone.

A fragment of a shared sequence first runs from no state. What a state ``E`` before it adds to its outputs is linear in
``E``, and is added when ``E`` is known. Delta rules get both from one call of the stock kernel: columns of the state do
not see each other, so that values ``[v | 0]`` and a state ``[0 | I]`` before the run give outputs ``[out | q M]`` and a
state ``[S | M]`` after it, where M is the matrix that the run applies to a state. It costs at most twice the kernel.

Kernels of packages keep the documents of a pack apart. fla's delta rules compute all documents in one call, and all
fragments in another, with ``cu_seqlens`` and a state before and after each of them. mamba-ssm's chunk scan computes all
documents in one call (``seq_idx``), and fragments one by one, because states inside of a pack have no gradient there.
Transformers' own forms, and Mamba 1, compute a run at a time. A convolution is one call, with zeros between documents.

The runs of trees are computed level by level: all roots, all runs behind them, and so on. Each begins with the state at
the end of its parent, which delta rules and Mamba 2 take from the caller. So a row costs what it costs in a document.

Shape letters: T rows of the micro-batch, n of a run, H heads, K and V rows and columns of a delta rule's state, P and N
of a Mamba state, C channels of a convolution, k its width, F fragments.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import compress
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bytescale.attention.autocast import without_autocast
from bytescale.common.errors import ConfigError
from bytescale.recurrence import STOCK_KERNELS
from bytescale.recurrence.cuts import Cuts
from bytescale.recurrence.states import act

Stock = Callable[..., Any]


def installed(stock: Stock) -> Stock | None:
    """The function of a kernel package that transformers calls in the place of its own; None: it calls its own."""
    inside = inspect.getclosurevars(stock).nonlocals if inspect.isfunction(stock) else {}
    return inside["implementation"] if inside.get("is_new_implementation") else None


def require_known_kernel(name: str, stock: Stock, layer: str) -> None:
    """Raise ``ConfigError`` for a kernel package of another version, of which transformers would say nothing.

    Transformers leaves out the arguments that a package's function does not take. ``name``: of ``KERNELS``; ``layer``:
    for the message.
    """
    function = installed(stock)
    if function is None:
        return
    missing = [word for word in _ARGUMENTS.get(name, ()) if word not in inspect.signature(function).parameters]
    if missing:
        package = function.__module__.partition(".")[0]
        version = getattr(sys.modules.get(package), "__version__", "of an unknown version")
        raise ConfigError(
            f"{layer} cannot be attached: {package} {version} is installed, whose {function.__name__} takes no "
            f"{', '.join(missing)}",
            so="documents of a pack would see each other's states",
            fix="install a version that takes it (fla-core 0.6.0 and mamba-ssm 2.3.2 do), or uninstall the package: "
            "transformers' own form computes then",
        )


@dataclass(frozen=True)
class Run:
    """A run of rows, from no state.

    Attributes:
        out: ``[n, ...]``.
        effect: returns what the run does to a state: its decay and the state after it (``cuts``). A whole document's
            decay only has the shape of one.
        read: what a state before the run adds to ``out``; of fragments.
    """

    out: Tensor
    effect: Callable[[], tuple[Tensor, Tensor]]
    read: Callable[[Tensor], Tensor]

    def after(self, state: Tensor) -> Run:
        """The run from a state ``[H, R, C]``."""
        out = self.out + self.read(state).to(self.out.dtype)

        def effect() -> tuple[Tensor, Tensor]:
            decay, own = self.effect()
            return decay, act(decay, state) + own

        return Run(out, effect, torch.zeros_like)


Runs = Callable[[list[slice], bool, Tensor | None], list[Run]]
"""Computes runs, none of them empty. True: they are whole documents, or runs of trees, before which are the states
``[N, H, R, C]``; None: no state. False: they are fragments that follow each other, and the states are not known yet."""


def carried(cuts: Cuts, runs: Runs, *, one_row: bool = False) -> Tensor:
    """``[T, ...]`` outputs of all rows. ``one_row``: caches have states without their dimension of one row."""
    has_rows = [rows.start < rows.stop for rows in cuts.fragments]
    filled = list(compress(cuts.fragments, has_rows))
    own, documents = runs(filled, False, None) if filled else [], _of_documents(cuts, runs)
    out = torch.cat([one.out for one in own + documents])
    with without_autocast(out.device):  # states are in fp32 or wider, whatever the kernels' inputs
        after = [one.effect()[1] for one in documents] if cuts.keep is not None else []
        if has_rows:
            known = [one.effect() for one in own]
            decay, state = known[0] if known else documents[0].effect()
            matrix = decay.shape[-1] == state.shape[-2]
            same = torch.ones_like(decay).triu().tril() if matrix else torch.ones_like(decay)
            nothing, following = (same, torch.zeros_like(state)), iter(known)  # what a fragment without rows does
            pairs = [next(following) if some else nothing for some in has_rows]
            decays, states = (torch.stack(parts) for parts in zip(*pairs, strict=True))
            out, entry = cuts.entry(out, decays, states)
            after = [*(act(decays, entry) + states), *after]
            pieces = list(out.split([len(one.out) for one in own + documents]))
            for number, (one, before) in enumerate(zip(own, compress(entry, has_rows), strict=True)):
                pieces[number] = pieces[number] + one.read(before).to(out.dtype)
            out = torch.cat(pieces)
        if cuts.keep is not None:
            kept = torch.stack(after)
            cuts.keep("recurrent", kept.squeeze(-2) if one_row else kept)
    return out


def _of_documents(cuts: Cuts, runs: Runs) -> list[Run]:
    """Whole documents, and the runs of trees, each behind its parent."""
    done: dict[int, Run] = {}
    for level in cuts.levels:
        parents = [cuts.parents[place] for place in level] if done else []
        states = {parent: done[parent].effect()[1] for parent in dict.fromkeys(parents)}
        before = torch.stack([states[parent] for parent in parents]) if parents else None
        done.update(zip(level, runs([cuts.documents[place] for place in level], True, before), strict=True))
    return [done[place] for place in range(len(done))]


def convolution(
    cuts: Cuts, stock: Stock, x: Tensor, weight: Tensor, bias: Tensor | None = None, **options: Any
) -> Tensor:
    """Depthwise causal convolution of ``x [1, C, T]`` with ``weight [C, k]``: one call, a halo before each run."""
    width = weight.shape[-1] - 1
    rows, arrived, places = cuts.halo(x[0].T, width)

    def table() -> list[Tensor]:
        absent = len(rows) + len(arrived)
        picked: list[int] = []
        kept: list[int] = []
        ends: list[list[int]] = []
        for run, before in zip([*cuts.fragments, *cuts.documents], places, strict=True):
            picked += [absent if at < 0 else at for at in before] + list(range(run.start, run.stop))
            kept += range(len(picked) - (run.stop - run.start), len(picked))
            ends.append(picked[len(picked) - width :])
        return [torch.tensor(numbers, dtype=torch.int64) for numbers in (picked, kept, ends)]

    index, inner, last = cuts.on_device(("convolution", width), x.device, table)
    known = torch.cat([rows, arrived, rows.new_zeros(1, rows.shape[1])])
    if cuts.keep is not None:
        cuts.keep("conv", F.pad(known[last].transpose(1, 2), (1, 0)))  # a cache's first is not seen by the next token
    out: Tensor = stock(known[index].T[None].contiguous(), weight, bias, **_without(options, "seq_idx"))
    return out[:, :, inner]


def delta_rule(
    cuts: Cuts, stock: Stock, query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, **options: Any
) -> tuple[Tensor, None]:
    """Gated delta rule and KDA: ``query, key [1, T, G, K]``, ``value [1, T, H, V]``, ``g [1, T, H]`` or of all keys."""
    num_heads, columns, width = value.shape[2], value.shape[3], key.shape[3]
    wide = torch.promote_types(value.dtype, torch.float32)
    identity = torch.eye(width, dtype=wide, device=value.device).expand(num_heads, width, width)
    options = _without(options, "initial_state", "output_final_state", "cu_seqlens")

    def together(parts: list[slice], alone: bool, entry: Tensor | None) -> list[Run]:
        lengths, rows = _extent(cuts, parts, value.device)
        q, k, v, decay, rate = (part[:, rows] for part in (query, key, value, g, beta))
        pack = {}
        if len(parts) > 1:  # with the places on the host, too, fla does not wait for the device
            pack["cu_seqlens"], pack["cu_seqlens_cpu"] = (
                _pack(cuts, parts, place)[0] for place in (v.device, torch.device("cpu"))
            )
        if not alone:
            v, entry = F.pad(v, (0, width)), F.pad(identity.expand(len(parts), *identity.shape), (columns, 0))
        out, after = stock(q, k, v, g=decay, beta=rate, initial_state=entry, output_final_state=True, **pack, **options)

        def run(own: Tensor, after: Tensor) -> Run:
            return Run(
                own[..., :columns],
                lambda: (identity if alone else after[..., columns:], after[..., :columns]),
                lambda before: torch.einsum("nhk,hkv->nhv", own[..., columns:].to(wide), before),
            )

        return [run(own, left) for own, left in zip(out[0].split(lengths), after.to(wide), strict=True)]

    def apart(parts: list[slice], alone: bool, entry: Tensor | None) -> list[Run]:
        before = [None] * len(parts) if entry is None else entry.split(1)
        return [together([rows], alone, state)[0] for rows, state in zip(parts, before, strict=True)]

    runs = together if installed(stock) else apart
    return carried(cuts, runs)[None], None


def mamba2(
    cuts: Cuts, stock: Stock, x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor,
    *, dt_bias: Tensor | None = None, dt_softplus: bool = False, dt_limit: tuple[float, float] = (0.0, float("inf")),
    **options: Any,
) -> Tensor:  # fmt: skip
    """Mamba 2: ``x [1, T, H, P]``, ``dt [1, T, H]``, ``A [H]``, ``B, C [1, T, G, N]``. States are ``[H, P, N]``."""
    options = _without(options, "initial_states", "return_final_states", "seq_idx")
    wide = torch.promote_types(x.dtype, torch.float32)

    def scan(rows: slice | Tensor, **more: Any) -> Any:
        return stock(
            x[:, rows], dt[:, rows], A, B[:, rows], C[:, rows], dt_bias=dt_bias,
            dt_softplus=dt_softplus, dt_limit=dt_limit, **more, **options,
        )  # fmt: skip

    def run(rows: slice, before: Tensor | None = None) -> Run:
        entry = {} if before is None else {"initial_states": before[None]}
        out, after = scan(rows, return_final_states=True, **entry)
        steps = _steps(dt[0, rows], dt_bias, dt_softplus).clamp(*dt_limit).to(wide)
        seen = C[0, rows].to(wide).repeat_interleave(x.shape[2] // C.shape[2], dim=1)
        return _selective(out[0], steps, A[:, None], seen, lambda: after[0].to(wide))

    def runs(parts: list[slice], alone: bool, before: Tensor | None) -> list[Run]:
        if before is not None:
            return [run(rows, state) for rows, state in zip(parts, before, strict=True)]
        if not alone or len(parts) == 1 or not installed(stock) or cuts.parents:
            return [run(rows) for rows in parts]
        lengths, rows = _extent(cuts, parts, x.device)
        out = scan(rows, seq_idx=_pack(cuts, parts, x.device)[1][None])
        # A state, which prefill keeps, costs a document a second scan.
        return [
            Run(own, partial(lambda rows: run(rows).effect(), rows), torch.zeros_like)
            for own, rows in zip(out[0].split(lengths), parts, strict=True)
        ]

    return carried(cuts, runs)[None]


def mamba1(
    cuts: Cuts, stock: Stock, x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor,
    *, z: Tensor | None = None, delta_bias: Tensor | None = None, delta_softplus: bool = False, **options: Any,
) -> Tensor:  # fmt: skip
    """Mamba 1: ``x, dt, z [1, H, T]``, ``A [H, N]``, ``B, C [1, N, T]``. States are ``[H, 1, N]``.

    The stock kernel takes no state, and mamba-ssm's gives no gradient of the one that it returns. So the state is
    summed here, for fragments alone. The gate ``z`` follows when outputs are complete.
    """
    options = _without(options, "return_last_state")
    wide = torch.promote_types(x.dtype, torch.float32)

    def run(rows: slice) -> Run:
        out = stock(
            x[..., rows], dt[..., rows], A, B[..., rows], C[..., rows], z=None, delta_bias=delta_bias,
            delta_softplus=delta_softplus, **options,
        )  # fmt: skip
        steps = _steps(dt[0, :, rows].T, delta_bias, delta_softplus).to(wide)

        def after() -> Tensor:
            left = steps.flip(0).cumsum(0).flip(0) - steps  # exact where it is short; a long time less another is not
            later = (A * left[..., None]).exp()  # [n, H, N]
            inputs = steps * x[0, :, rows].T
            return torch.einsum("nhs,nh,ns->hs", later, inputs, B[0, :, rows].T.to(wide))[:, None]

        return _selective(out[0].T[..., None], steps, A, C[0, :, rows].T.to(wide)[:, None], after)

    def runs(parts: list[slice], alone: bool, before: Tensor | None) -> list[Run]:
        done = [run(rows) for rows in parts]
        return done if before is None else [one.after(state) for one, state in zip(done, before, strict=True)]

    out = carried(cuts, runs, one_row=True)[..., 0].T[None]
    return out if z is None else out * F.silu(z)


def _selective(out: Tensor, steps: Tensor, A: Tensor, seen: Tensor, after: Callable[[], Tensor]) -> Run:
    """A run of either Mamba.

    Args:
        out: ``[n, H, P]``.
        steps: ``[n, H]``; time is their sum.
        A: ``[H, N]``, or ``[H, 1]`` where it is one number a head.
        seen: ``[n, H, N]`` what a row reads of a state; of H there may be 1.
        after: returns the state after the run, ``[H, P, N]``.
    """
    time = steps.cumsum(0)
    return Run(
        out,
        lambda: ((A * time[-1, :, None]).exp()[:, None], after()),
        lambda before: torch.einsum("nhs,hps->nhp", seen * (A * time[..., None]).exp(), before),
    )


def _steps(dt: Tensor, bias: Tensor | None, softplus: bool) -> Tensor:
    dt = dt if bias is None else dt + bias.to(dt.dtype)
    return F.softplus(dt) if softplus else dt


def _not_fused(cuts: Cuts, stock: Stock, *args: Any, **options: Any) -> None:
    """The mixer goes on with its other kernels, as it does where the fused one is not installed."""


def _extent(cuts: Cuts, parts: list[slice], device: torch.device) -> tuple[list[int], slice | Tensor]:
    """The lengths of runs, and all their rows: one slice if they follow each other."""
    lengths, whole = [rows.stop - rows.start for rows in parts], slice(parts[0].start, parts[-1].stop)
    if sum(lengths) == whole.stop - whole.start:
        return lengths, whole
    pieces = [torch.arange(rows.start, rows.stop) for rows in parts]
    return lengths, cuts.on_device(("rows", whole.start), device, lambda: [torch.cat(pieces)])[0]


def _pack(cuts: Cuts, parts: list[slice], device: torch.device) -> list[Tensor]:
    """``cu_seqlens [N + 1]`` and ``seq_idx [n]`` of runs, one behind the other."""

    def make() -> list[Tensor]:
        lengths = torch.tensor(counts := [rows.stop - rows.start for rows in parts])
        numbers = torch.arange(len(parts), dtype=torch.int32)
        return [F.pad(lengths.cumsum(0), (1, 0)), numbers.repeat_interleave(lengths, output_size=sum(counts))]

    return cuts.on_device(("pack", parts[0].start), device, make)


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
assert KERNELS.keys() == STOCK_KERNELS, "a mixer is known by the name of its kernel"
_OF_DELTA_RULES = "initial_state", "output_final_state", "use_qk_l2norm_in_kernel", "cu_seqlens"
_ARGUMENTS = {
    "torch_chunk_gated_delta_rule": _OF_DELTA_RULES,
    "chunk_kimi_delta_attention": _OF_DELTA_RULES,
    "mamba2_chunk_scan": ("dt_bias", "dt_softplus", "dt_limit", "initial_states", "return_final_states", "seq_idx"),
}
"""Without which results would be wrong, by the name of the stock function."""


def lightning_mixer(cuts: Cuts, stock: Stock, mixer: nn.Module, hidden_states: Tensor) -> tuple[Tensor, None]:
    """``MiniMaxLightningAttention.forward`` of ``hidden_states [1, T, width]``: the mixer has no kernel of its own.

    A token multiplies a head's state by ``exp(-slope)`` and adds ``k v``. So it is Mamba 2, whose kernel is ``stock``,
    with steps of 1 and states ``[H, V, K]``.
    """
    own: Any = mixer
    qkv = own.act_fn(own.qkv_proj(hidden_states)).unflatten(2, (own.num_attention_heads, -1))
    q, k, v = qkv.split(own.head_dim, dim=3)
    out = mamba2(cuts, stock, v, torch.ones_like(v[..., 0]), -own.slope_rate.flatten(), k, q, chunk_size=64)
    return own.out_proj(own.output_gate(hidden_states).sigmoid() * own.norm(out.flatten(2))), None
