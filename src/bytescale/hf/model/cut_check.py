"""Does a model that is cut for tensor parallelism compute what it computed when it was whole?

It runs forward and backward on a few tokens, before and after. Hidden states, loss and the gradient of every parameter
have to agree: of a gradient its product with fixed numbers, so that no two gradients exist at a time, and the sum over
ranks is that of the whole one, however it is cut. So whatever is counted twice, or by no rank, is found by name.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from bytescale.common.cut import Cut
from bytescale.hf.model.blind import few_keys
from bytescale.hf.model.decoder import HFDecoder
from bytescale.hf.model.head import ModelHead
from bytescale.hf.model.passes import documents_alone
from bytescale.runtime.group import RankGroup
from bytescale.runtime.loss import loss_sum
from bytescale.runtime.token_shards import own_rows

_LENGTHS = (7, 1, 5)
_TOLERANCES = {torch.float64: 1e-4, torch.float32: 1e-3}
"""Norms and routers of fp64 models compute in fp32."""


@dataclass(frozen=True)
class Sample:
    """What a model computes for a few tokens."""

    hidden: Tensor
    """``[T, C]``, all rows."""
    loss: float
    gradients: dict[str, tuple[float, float]]
    """Of every parameter: its product with fixed numbers, summed over ranks, and its norm (of this rank's part)."""


def sample(decoder: HFDecoder, tp: RankGroup, cuts: dict[str, Cut], num_words: int) -> Sample:
    """Run the model forward and backward, whole on every rank or cut. Leaves no gradient.

    ``num_words``: of the whole model; tokens are of all of its parts.
    """
    weight = next(decoder.model.parameters())
    positions, attention = documents_alone(_LENGTHS, weight)
    tokens = torch.arange(1, 2 * len(positions), 2) * num_words // (2 * len(positions))
    tokens = tokens[torch.randperm(len(tokens), generator=torch.Generator().manual_seed(0))]
    products: dict[str, Tensor] = {}
    norms: dict[str, float] = {}

    def note(name: str, parameter: Tensor) -> None:
        assert parameter.grad is not None, "called when a gradient has been accumulated"
        gradient, parameter.grad = parameter.grad.double(), None
        norms[name] = norms.get(name, 0.0) + float(gradient.norm())
        product = gradient
        for dim in reversed(range(gradient.dim())):
            cut = cuts[name]
            numbers = torch.arange(cut.shape[dim], dtype=torch.float64, device=weight.device).add(1 + dim).cos()
            product = product @ (replace(cut, shape=(len(numbers),), dim=0).of(numbers) if dim == cut.dim else numbers)
        products[name] = products.get(name, 0.0) + product

    trained = {name: p for name, p in decoder.model.named_parameters() if p.requires_grad}
    with torch.enable_grad(), ExitStack() as after:
        after.callback(few_keys.reset, few_keys.set(1))
        for name, parameter in trained.items():
            after.enter_context(parameter.register_post_accumulate_grad_hook(partial(note, name)))
        hidden = decoder(tokens.to(weight.device), positions, attention)
        own = own_rows(len(tokens), tp) if decoder.splits_loss else range(len(tokens))
        if isinstance(decoder.head, ModelHead) and decoder.head.weight is None:  # its outputs are no words
            loss = decoder.head(hidden).square().sum()
        else:
            loss = loss_sum(decoder.head, hidden, tokens.roll(-1)[own.start : own.stop])
        if trained:
            loss.backward()
    sums = torch.tensor([float(products.get(name, 0.0)) for name in trained], dtype=torch.float64)
    if decoder.token_rows is not None and trained:
        sums = tp.all_reduce(sums.to(weight.device)).cpu()
    total, states = loss.detach().double(), hidden.detach()
    if decoder.token_rows is not None and decoder.splits_loss:
        total, states = tp.all_reduce(total), decoder.token_rows.shards.gather(states)
    gradients = {name: (float(one), norms.get(name, 0.0)) for name, one in zip(trained, sums, strict=True)}
    return Sample(states, float(total), gradients)


def difference(whole: Sample, cut: Sample, tp: RankGroup) -> str | None:
    """What the cut model computes otherwise, in words, the same on every rank; None: nothing."""
    tolerance = _TOLERANCES[whole.hidden.dtype]
    rows = (whole.hidden - cut.hidden).double().norm(dim=1) / whole.hidden.double().norm(dim=1).clamp(min=1e-30)
    found = {"its hidden states": float(rows.max()), "its loss": abs(whole.loss - cut.loss) / abs(whole.loss)}
    largest = max((norm for _, norm in whole.gradients.values()), default=0.0)
    for name, (product, norm) in whole.gradients.items():
        apart = abs(product - cut.gradients[name][0])
        found[f"the gradient of {name}"] = apart / (norm + 1e-3 * largest) if apart else 0.0
    for what, worst in zip(found, tp.max_of(list(found.values())), strict=True):
        if not worst <= tolerance:
            return f"{what}: by {worst:.1e}, where rounding would give {tolerance:.0e} at most"
    return None
