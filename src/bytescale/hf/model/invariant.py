"""Log-probabilities whose bits do not depend on the plan: what treats each row alone, and what is refused.

Two things make a row's last bits depend on the rows beside it. A product's kernel is chosen by the number of rows, so
products are computed ``ROWS`` rows at a time, the last of them zeros where there are fewer. And the last numbers of a
tensor, or of a thread's part, that fill no register are computed by scalar code, which rounds sigmoids and the like
differently, so such functions get full registers alone. Attention has fixed tiles (``attention.fixed_tiles``). Norms,
softmax and sums go row by row already, and adding, multiplying and dividing round in one way.

``FixedProducts`` stands between PyTorch's operators and their kernels, below autograd: backward is the usual one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from bytescale.common.errors import ConfigError
from bytescale.hf.model.head import causal_model, embeddings_of
from bytescale.hf.model.interface import refusal
from bytescale.hf.model.passes import documents_alone

ROWS = 64
_REGISTERS, _GRAIN = 128, 2**15
"""Numbers that a turn of a loop over registers takes at most, and those of which PyTorch makes no two threads' work."""

_aten = torch.ops.aten
_FUNCTIONS = frozenset(
    getattr(_aten, name)
    for name in (
        "silu", "gelu", "sigmoid", "tanh", "softplus", "mish", "elu", "hardsigmoid", "hardswish", "rsqrt", "reciprocal",
        "exp", "exp2", "expm1", "log", "log2", "log1p", "erf", "cos", "sin", "pow", "logaddexp",
    )
)  # fmt: skip


_PRODUCTS = (_aten.mm, _aten.addmm, _aten._grouped_mm, _aten.bmm, _aten.baddbmm, _aten.convolution)


class FixedProducts(TorchDispatchMode):
    """Within it, a row's result of any of the model's operators has the same bits, wherever the row stands."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call ``func``. Raises ``ConfigError`` for products in which rows cannot be told from the rest."""
        operator, kwargs = func.overloadpacket, kwargs or {}
        if torch.is_inference_mode_enabled():  # operators made of others come here as a whole
            with self:
                result = func.decompose(*args, **kwargs)
            if result is not NotImplemented:
                return result
        if operator in _FUNCTIONS:
            return full_registers(partial(func, **kwargs), args)
        shapes = [one.shape for one in args if isinstance(one, Tensor)]
        if operator not in _PRODUCTS or (operator is _aten.bmm and shapes[0][2] == 1):  # no sum, as of angles
            return func(*args, **kwargs)
        if operator is _aten.mm:
            return by_rows(*args)
        if operator is _aten.addmm and len(shapes[0]) == 1 and not kwargs:
            return by_rows(args[1], args[2], args[0])
        if operator is _aten._grouped_mm and [len(shape) for shape in shapes] == [2, 3, 1]:
            return _grouped(*args[:3])
        told = " and ".join(str(list(shape)) for shape in shapes)
        raise ConfigError(
            f"invariant = True, and the model multiplies {told} by {func}",
            so="which of the rows are tokens is not known, and bits would depend on the plan",
            fix="leave invariant out, or use a model whose products are all linear layers",
        )


def by_rows(rows: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``rows [n, C] @ weight [C, O] + bias [O]``, in products of ``ROWS`` rows that begin at aligned addresses."""
    count, given = -(-len(rows) // ROWS) * ROWS, rows
    if count != len(rows) or not rows.is_contiguous() or rows.data_ptr() % 64:
        given = rows.new_zeros(count, rows.shape[1])
        given[: len(rows)] = rows
    out = rows.new_empty(count, weight.shape[1])
    for some, place in zip(given.split(ROWS), out.split(ROWS), strict=True):
        if bias is None:
            torch.mm(some, weight, out=place)
        else:
            torch.addmm(bias, some, weight, out=place)
    return out[: len(rows)]


def _grouped(rows: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    """``rows [n, C]``, of which those of expert e end at ``ends[e]``, and ``weights [E, C, O]`` -> ``[n, O]``."""
    stops = ends.tolist()
    pairs = zip([0, *stops], stops, weights, strict=False)
    parts = [by_rows(rows[start:stop], weight) for start, stop, weight in pairs if start < stop]
    return torch.cat([*parts, rows.new_zeros(len(rows) - stops[-1], weights.shape[2])])


def full_registers(function: Callable[..., Tensor], args: Sequence[Any]) -> Tensor:
    """``function`` of tensors of one shape, of which no number is left over for scalar code, in any thread."""
    shape = torch.broadcast_shapes(*(one.shape for one in args if isinstance(one, Tensor)))
    numbers = shape.numel()
    left = -numbers % (_REGISTERS if numbers <= _GRAIN else _GRAIN * torch.get_num_threads())

    def padded(one: Any) -> Any:
        if not isinstance(one, Tensor):
            return one
        flat = one.expand(shape).reshape(-1)
        return torch.cat([flat, flat.new_ones(left)]) if left else flat

    return function(*map(padded, args))[:numbers].view(shape)


def require_invariance(decoder: Any) -> None:
    """Raise ``ConfigError`` where an ``HFDecoder`` cannot be invariant; it is detached then.

    By its kind, or because documents have other bits beside others.
    """
    parameter = next(decoder.parameters())
    if decoder.mixers or any(layer.selection for layer in decoder.structure.layers):
        what = "it has recurrent layers" if decoder.mixers else "its queries choose their keys"
        raise _refused(decoder, f"{what}, whose kernels take the rows as the plan cuts them")
    if parameter.device.type == "cuda":
        raise _refused(decoder, "it is on a GPU, whose kernels nobody has compared bit by bit here (docs/gpu.md)")
    if parameter.is_meta:
        return
    words = min(len(part.weight) for part in embeddings_of(decoder.model) if part is not None)
    longest = getattr(causal_model(decoder.model).config, "max_position_embeddings", None) or 97
    random = torch.Generator().manual_seed(0)
    documents = [torch.randint(2, words, (min(length, longest),), generator=random) for length in (37, 70, 1, 97)]

    def losses(order: Sequence[int]) -> dict[int, Tensor]:
        tokens = torch.cat([documents[number] for number in order])
        lengths = [len(documents[number]) for number in order]
        hidden = decoder(tokens, *documents_alone(lengths, parameter.detach()))
        results = decoder.fastest(decoder.model_head).losses(hidden, tokens)
        return dict(zip(order, results.split(lengths), strict=True))

    with torch.no_grad():
        whole = losses([0, 1, 2, 3])
        for order in ([3, 2, 0, 1], [0], [1], [2], [3]):
            for number, values in losses(order).items():
                if not torch.equal(values, whole[number]):
                    raise _refused(decoder, f"a document of {len(values)} tokens has other bits beside other documents")


def _refused(decoder: Any, what: str) -> ConfigError:
    decoder.undo.close()
    return refusal(
        f"{type(decoder.model).__name__} with invariant = True",
        what,
        so="bits of its log-probabilities would depend on the plan",
        fix="leave invariant out: results are then equal up to rounding",
    )
