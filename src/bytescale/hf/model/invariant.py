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
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from bytescale.common.errors import ConfigError
from bytescale.hf.model.head import causal_model, embeddings_of
from bytescale.hf.model.interface import refusal

if TYPE_CHECKING:
    from bytescale.hf.model.decoder import HFDecoder

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
        if operator is _aten.mm:
            return by_rows(args[0], lambda rows, out: torch.mm(rows, args[1], out=out), args[1].shape[1])
        if operator is _aten.addmm and args[0].dim() == 1:
            return by_rows(args[1], lambda rows, out: torch.addmm(args[0], rows, args[2], out=out), args[2].shape[1])
        if operator is _aten._grouped_mm and args[0].dim() == 2 and args[1].dim() == 3:
            return _grouped(*args, **kwargs)
        is_exact = operator is _aten.bmm and args[0].shape[2] == 1  # angles: one position times one frequency
        if not is_exact and operator in (_aten.bmm, _aten.baddbmm, _aten.addmm, _aten.convolution, _aten._grouped_mm):
            shapes = " and ".join(str(list(one.shape)) for one in args if isinstance(one, Tensor))
            raise ConfigError(
                f"invariant = True, and the model multiplies {shapes} by {func}",
                so="which of the rows are tokens is not known, and bits would depend on the plan",
                fix="leave invariant out, or use a model whose products are all linear layers",
            )
        if operator in _FUNCTIONS:
            return full_registers(partial(func, **kwargs), args)
        return func(*args, **kwargs)


def by_rows(rows: Tensor, product: Callable[[Tensor, Tensor], object], width: int) -> Tensor:
    """``rows [n, C]`` -> ``[n, width]``: ``product`` writes that of ``[ROWS, C]`` into ``[ROWS, width]`` each time.

    Both begin where a register may be loaded from.
    """
    count = -(-len(rows) // ROWS) * ROWS
    given = rows
    if count != len(rows) or not rows.is_contiguous() or rows.data_ptr() % 64:
        given = rows.new_zeros(count, rows.shape[1])
        given[: len(rows)] = rows
    out = rows.new_empty(count, width)
    for some, place in zip(given.split(ROWS), out.split(ROWS), strict=True):
        product(some, place)
    return out[: len(rows)]


def _grouped(rows: Tensor, weights: Tensor, ends: Tensor, *_: Any, **__: Any) -> Tensor:
    """``rows [n, C]``, of which those of expert e end at ``ends[e]``, and ``weights [E, C, O]`` -> ``[n, O]``."""
    parts, start = [], 0
    for stop, weight in zip(ends.tolist(), weights, strict=True):
        if start < stop:
            parts.append(_product(rows[start:stop], weight))
        start = stop
    return torch.cat([*parts, rows.new_zeros(len(rows) - start, weights.shape[2])])


def _product(rows: Tensor, weight: Tensor) -> Tensor:
    return by_rows(rows, lambda some, out: torch.mm(some, weight, out=out), weight.shape[1])


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


def require_invariance(decoder: HFDecoder) -> None:
    """Raise ``ConfigError`` for what cannot be invariant: by its kind, or because two micro-batches differ here."""
    from bytescale.hf.model.passes import documents_alone

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


def _refused(decoder: HFDecoder, what: str) -> Exception:
    return refusal(
        f"{type(decoder.model).__name__} with invariant = True",
        what,
        so="bits of its log-probabilities would depend on the plan",
        fix="leave invariant out: results are then equal up to rounding",
    )
