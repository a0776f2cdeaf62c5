"""The loss of indexers, as DeepSeek-V3.2 has it (arXiv 2512.02556, section 2.1): they learn where attention looks.

For a query t, scores ``I[t, s]`` of its indexer, and probabilities of all H heads of the layer's attention::

    p[t, s] = sum over heads of the probability of s, over its sum over s      (a constant)
    loss    = coefficient * sum over layers of the mean over t of KL(p[t] || softmax(I[t]))

The mean is over ALL tokens of the global batch, those without a label, too, so that it does not depend on the plan. In
the warm-up (``dense``) attention is dense, s runs over all keys that t may see, and indexers alone are trained.
Afterwards (``sparse``) s runs over the keys that were chosen for t. An indexer learns from the layer that it lies in,
not from later ones that share its choice.

1. All inputs of an indexer are constants: it learns from this loss alone, and the model from its own loss alone.
2. All is computed in backward, which runs once whether or not a layer is computed again: the caller's one backward
   passes through ``_Learn``, which adds the gradients of the indexer's parameters, whatever the caller's loss is.
3. Scores are those that the indexer's own code gives to ``topk``. The probabilities are at hand in the backward of
   attention to chosen keys. Index keys travel once more, and their gradients home, in the dtype of sums.

Shape letters: T queries of this rank, t some of them, L keys of a path up to the last of these, H heads, K chosen keys.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from bytescale.attention.autocast import without_autocast
from bytescale.attention.earlier import EarlierRows
from bytescale.attention.kernels import lse_dtype
from bytescale.attention.rings.messages import Kind
from bytescale.attention.selected import NONE, RowForm
from bytescale.common.errors import ConfigError
from bytescale.hf.model.blind import INDEXED
from bytescale.hf.model.interface import Call, names_in, refusal
from bytescale.hf.model.probe import ModelStructure
from bytescale.hf.model.selectors import Indexer, LayerRows, as_rows, parts_of

IndexerStage = Literal["dense", "sparse"]


class HasIndexers(Protocol):
    """What is asked of an ``HFDecoder``."""

    model: nn.Module
    structure: ModelStructure


class IndexerLoss:
    """The loss over all layers that this rank holds (``runtime.BatchLoss``)."""

    def __init__(self, decoder: HasIndexers, stage: IndexerStage, coefficient: float) -> None:
        """Raises ``ConfigError`` where scores cannot be seen, or others than indexers would be trained (``dense``)."""
        self.decoder, self.is_dense, self.coefficient = decoder, stage == "dense", coefficient
        model, num_indexers = decoder.model, 0
        for layer in decoder.structure.layers:
            if layer.selection is not None and layer.selection.index_width:
                num_indexers += 1
                if not layer.selection.has_scores:
                    raise _refusal(layer.name, "its indexer does not choose single tokens by one topk of their scores")
        parts = [one for one in model.modules() if names_in(one) & INDEXED]
        own = {id(parameter) for part in parts for parameter in part.parameters() if parameter.requires_grad}
        if not num_indexers or not own:
            raise _refusal("the model", "it has no indexer" if not num_indexers else "all of its indexers are frozen")
        others = [name for name, p in model.named_parameters() if p.requires_grad and id(p) not in own]
        if self.is_dense and others:
            name = next(name for name, part in model.named_modules() if part is parts[0]).split(".")[-1]
            raise ConfigError(
                f'indexer_loss = "dense" trains indexers alone, and {others[0]} is trained',
                so="the model would be trained with dense attention",
                fix=f'freeze all others: in the trainer, model.freeze = ["!*.{name}.*"]; before HDP(...), for name, p '
                f'in model.named_parameters(): p.requires_grad_(".{name}." in name)',
            )
        self.reset(1)

    def reset(self, num_tokens: int) -> None:
        """Forget the previous step. Called before the first forward of a global batch of ``num_tokens``."""
        self.weight, self.total = self.coefficient / max(1, num_tokens), list[Tensor]()

    def sums(self) -> Tensor:
        """This rank's part of the loss, ``[1]`` fp64: to be added up over all ranks."""
        device = next(p.device for p in self.decoder.model.parameters())
        return sum(self.total, torch.zeros(1, dtype=torch.float64, device=device))

    def loss(self, total: Tensor) -> Tensor:
        """The loss, from the sum over all ranks. Its gradients are there already."""
        return total.sum()

    def lesson(self, indexer: Indexer, earlier: EarlierRows, window: int | None) -> Lesson | None:
        """What an indexer is to learn from one micro-batch; None: it is frozen, or the pass has no gradients."""
        parameters = [parameter for parameter in indexer.module.parameters() if parameter.requires_grad]
        return Lesson(self, indexer, earlier, window, parameters) if parameters and torch.is_grad_enabled() else None


def _refusal(name: str, what: str) -> ConfigError:
    return refusal(
        name,
        what,
        so="it cannot be trained by indexer_loss",
        fix="leave indexer_loss out: indexers then stay as they are",
    )


class Lesson:
    """What one indexer learns from one micro-batch."""

    def __init__(
        self,
        loss: IndexerLoss,
        indexer: Indexer,
        earlier: EarlierRows,
        window: int | None,
        parameters: list[nn.Parameter],
    ) -> None:
        self.loss, self.earlier, self.window, self.parameters = loss, earlier, window, parameters
        self.probabilities: list[Tensor] = []
        """Of attention to chosen keys, summed over heads, ``[T, K]``: its backward puts them here (``selected``)."""
        self._main: tuple[RowForm, tuple[int, ...]] | None = None
        device = next(indexer.module.parameters()).device.type
        self._around: Callable[[], AbstractContextManager[object]] = nullcontext
        if torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device):
            self._around = partial(torch.autocast, device, dtype=torch.get_autocast_dtype(device))
        # Until backward, no tensor is kept here: autograd saves them, and checkpointing drops what it saves.
        leaves, self._spec = tree_flatten((indexer.args, indexer.kwargs))
        self._given = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        self._cache = LayerRows(indexer.cache.target, indexer.cache.layer, None)
        known = [self._cache if leaf is indexer.cache else leaf for leaf in leaves]
        self._leaves = [Tensor if isinstance(leaf, Tensor) else leaf for leaf in known]
        self._module = indexer.module

    def carried_by(self, rows: Tensor, *more: Tensor | None) -> Tensor:
        """``rows``, whose backward brings the gradients of the indexer's parameters.

        ``more``: the chosen keys ``[T, 1, K]``; or queries, rows and sinks of dense attention.
        """
        given, self._given = self._given, []
        out: Tensor = _Learn.apply(rows, self, (len(given), len(more)), *given, *more, *self.parameters)
        return out

    def of_dense(
        self, out: Tensor, call: Call, qkv: tuple[Tensor, Tensor, Tensor], scale: float,
        latents: tuple[Tensor, Tensor] | None,
    ) -> Tensor:  # fmt: skip
        """``out`` of dense attention, which has no other backward: nothing but indexers is trained."""
        with torch.no_grad():
            queries, rows, form, _ = as_rows(call, *qkv, scale, latents)
        self._main = form, rows.shape[1:]
        return self.carried_by(out.detach(), queries, rows.flatten(1), call.options.get("s_aux"))

    def gradients(self, given: Sequence[Tensor], more: Sequence[Tensor]) -> list[Tensor]:
        """Of the parameters. All members of a group call it together."""
        indexer = self._indexer(given)
        with torch.enable_grad(), self._around():
            own_keys = indexer.keys().flatten(0, -2)[: self._cache.target.num_rows]
        all_keys = self.earlier.fetch(own_keys.detach(), Kind.BACKWARD_KV)
        all_rows = None if self._main is None else self.earlier.fetch(more[1], Kind.BACKWARD_KV)
        device, wide = all_keys.device, lse_dtype(all_keys.dtype)
        total = torch.zeros((), dtype=torch.float64, device=device)
        of_keys = torch.zeros_like(all_keys, dtype=wide)
        sums = [torch.zeros_like(parameter, dtype=wide) for parameter in self.parameters]
        for path in self.earlier.paths:
            rows = path.on(device)
            places = torch.arange(len(all_keys), device=device)[rows]
            for some, visible in parts_of(path, self.window, device, share=4):
                before = places[: visible.shape[1]]
                keys = all_keys[before].requires_grad_()
                with torch.enable_grad(), self._around():
                    scores = indexer.scores(some, keys, visible)
                assert scores is not None, "the probe has seen them"
                if all_rows is None:
                    target, look = self._of_chosen(more[0][some, 0], some, before, len(all_keys))
                else:
                    target, look = self._of_all(more, some, all_rows[before], visible), None
                with torch.enable_grad():
                    loss = _divergence(target, scores.to(wide) if look is None else look(scores.to(wide)))
                of_seen, *found = torch.autograd.grad(loss, [keys, *self.parameters], allow_unused=True)
                of_keys.index_add_(0, before, of_seen.to(wide))
                _add(sums, found)
                total += loss.detach()
        home = self.earlier.give_back(of_keys, Kind.BACKWARD_GRADIENTS).to(own_keys.dtype)
        if own_keys.requires_grad:
            _add(sums, torch.autograd.grad(own_keys, self.parameters, home, allow_unused=True))
        self.loss.total.append(total * self.loss.weight)
        return [(own * self.loss.weight).to(p.dtype) for own, p in zip(sums, self.parameters, strict=True)]

    def _indexer(self, given: Sequence[Tensor]) -> Indexer:
        """With ``given`` tensors as constants, and with gradients, which its own forward switches off."""
        forward, tensors = partial(inspect.unwrap(type(self._module).forward), self._module), iter(given)
        leaves = [next(tensors).detach() if leaf is Tensor else leaf for leaf in self._leaves]
        args, kwargs = tree_unflatten(leaves, self._spec)
        return Indexer(self._module, forward, args, kwargs, self._cache)

    def _of_chosen(
        self, chosen: Tensor, some: slice, before: Tensor, num_places: int
    ) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
        """The target of some queries, ``[t, K]``, and what finds the scores of the ``chosen [t, K]`` keys."""
        position = torch.zeros(num_places, dtype=torch.int64, device=chosen.device)
        position[before] = torch.arange(len(before), device=chosen.device)
        found = position[chosen.clamp(min=0).long()]
        (probabilities,) = self.probabilities
        return probabilities[some], lambda scores: scores.gather(1, found).masked_fill(chosen == NONE, -torch.inf)

    def _of_all(self, more: Sequence[Tensor], some: slice, rows: Tensor, visible: Tensor) -> Tensor:
        """The target of some queries, ``[t, L]``, from all keys in ``rows [L, G * W]``."""
        assert self._main is not None, "attention is dense"
        form, (num_kv_heads, _) = self._main
        queries, sinks = more[0][some].unflatten(1, (num_kv_heads, -1)), more[2]
        keys = rows.unflatten(1, (num_kv_heads, -1))[..., form.keys]
        scores = torch.einsum("tghw,sgw->tghs", queries, keys).to(lse_dtype(rows.dtype)) * form.scale
        scores = scores.masked_fill(~visible[:, None, None], -torch.inf)
        if sinks is not None:
            column = sinks.to(scores.dtype).view(1, *scores.shape[1:3], 1).expand(len(scores), -1, -1, -1)
            scores = torch.cat([scores, column], -1)
        return scores.softmax(-1)[..., : len(rows)].sum((1, 2))


def _divergence(target: Tensor, scores: Tensor) -> Tensor:
    """Sum over queries of ``KL(target / its sum || softmax(scores))``, of ``[t, L]`` each."""
    target = target / target.sum(-1, keepdim=True)
    others = scores.log_softmax(-1).masked_fill(target == 0, 0)
    return (torch.xlogy(target, target) - target * others).sum()


def _add(sums: Sequence[Tensor], found: Iterable[Tensor | None]) -> None:
    for own, gradient in zip(sums, found, strict=True):
        if gradient is not None:
            own += gradient


class _Learn(torch.autograd.Function):
    """Rows themselves; their backward brings the gradients of an indexer's parameters."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, lesson: Lesson, counts: tuple[int, int], *tensors: Tensor) -> Tensor:
        ctx.lesson, ctx.counts = lesson, counts
        ctx.save_for_backward(*tensors[: sum(counts)])
        return rows.view_as(rows)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        saved, (num_given, _) = ctx.saved_tensors, ctx.counts
        with without_autocast(saved[0].device):
            found = ctx.lesson.gradients(saved[:num_given], saved[num_given:])
        return gradients[0], None, None, *[None] * len(saved), *found
