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

Shape letters: T queries of this rank, t some of them, L keys of a path up to the last of these, H heads, K chosen keys,
G key/value heads, W numbers of a row and head.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, Literal, get_args

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
from bytescale.hf.model.probe import LayerAttention
from bytescale.hf.model.selectors import Indexer, LayerRows, as_rows, parts_of

IndexerStage = Literal["dense", "sparse"]


class IndexerLoss:
    """The loss over all layers that this rank holds (``runtime.BatchLoss``)."""

    def __init__(
        self, model: nn.Module, layers: Iterable[LayerAttention], stage: IndexerStage, coefficient: float
    ) -> None:
        """Raises ``ConfigError`` where scores cannot be seen, or others than indexers would be trained (``dense``)."""
        self.is_dense, self.coefficient, self._model = stage == "dense", coefficient, model
        own = {layer.name: layer.selection for layer in layers if layer.selection and layer.selection.index_width}
        blind = [name for name, selection in own.items() if not selection.has_scores]
        parts = {name: part for name, part in model.named_modules() if names_in(part) & INDEXED}
        learning = {id(p) for part in parts.values() for p in part.parameters() if p.requires_grad}
        if stage not in get_args(IndexerStage):
            raise ConfigError(f"indexer_loss is {stage!r}", fix=f"use one of {', '.join(get_args(IndexerStage))}")
        what = "its indexer does not choose tokens by one topk of their scores" if blind else ""
        if what or not own or not learning:
            raise refusal(
                blind[0] if blind else "the model",
                what or ("all of its indexers are frozen" if own else "it has no indexer"),
                so="it cannot be trained by indexer_loss",
                fix="leave indexer_loss out: indexers then stay as they are",
            )
        others = [name for name, p in model.named_parameters() if p.requires_grad and id(p) not in learning]
        if self.is_dense and others:
            name = next(iter(parts)).rpartition(".")[2]
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
        device = next(self._model.parameters()).device
        return sum(self.total, torch.zeros(1, dtype=torch.float64, device=device))

    def loss(self, total: Tensor) -> Tensor:
        """The loss, from the sum over all ranks. Its gradients are there already."""
        return total.sum()

    def lesson(self, indexer: Indexer | None, earlier: EarlierRows, window: int | None) -> Lesson | None:
        """What a layer's indexer is to learn; None: there is none, it is frozen, or the pass has no gradients."""
        if indexer is None or not torch.is_grad_enabled():
            return None
        parameters = [parameter for parameter in indexer.module.parameters() if parameter.requires_grad]
        return Lesson(self, indexer, earlier, window, parameters) if parameters else None


class Lesson:
    """What one indexer learns from one micro-batch."""

    def __init__(
        self, loss: IndexerLoss, indexer: Indexer, earlier: EarlierRows, window: int | None, parameters: list[Any]
    ) -> None:
        self._loss, self._earlier, self._window, self._parameters = loss, earlier, window, parameters
        self.heard: list[Tensor] = []
        """Probabilities of chosen keys: the backward of attention puts them here (``selected_attention``)."""
        self._main: tuple[RowForm, int] | None = None
        self._around: Callable[[], AbstractContextManager[object]] = nullcontext
        device = parameters[0].device.type
        if torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device):
            self._around = partial(torch.autocast, device, dtype=torch.get_autocast_dtype(device))
        # Until backward, no tensor is kept here: autograd saves them, and checkpointing drops what it saves.
        leaves, self._spec = tree_flatten((indexer.args, indexer.kwargs))
        self._inputs = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        self._module, self._cache = indexer.module, LayerRows(indexer.cache.target, indexer.cache.layer, None)
        known = [self._cache if leaf is indexer.cache else leaf for leaf in leaves]
        self._leaves = [Tensor if isinstance(leaf, Tensor) else leaf for leaf in known]

    def carried_by(self, rows: Tensor, *more: Tensor | None) -> Tensor:
        """``rows``, whose backward brings the gradients of the indexer's parameters.

        ``more``: the chosen keys ``[T, 1, K]``; or of dense attention queries ``[T, H, W]``, rows ``[T, G * W]`` and
        sinks.
        """
        inputs, self._inputs = self._inputs, []
        out: Tensor = _Learn.apply(rows, self, len(inputs), len(more), *inputs, *more, *self._parameters)
        return out

    def of_dense(
        self, out: Tensor, call: Call, qkv: tuple[Tensor, Tensor, Tensor], scale: float, latents: Any
    ) -> Tensor:
        """``out`` of dense attention, which has no other backward: nothing but indexers is trained."""
        with torch.no_grad():
            queries, rows, form, _ = as_rows(call, *qkv, scale, latents)
        self._main = form, rows.shape[1]
        return self.carried_by(out.detach(), queries, rows.flatten(1), call.options.get("s_aux"))

    def gradients(self, inputs: Sequence[Tensor], more: Sequence[Tensor]) -> list[Tensor]:
        """Of the parameters. All members of a group call it together."""
        indexer = self._indexer(inputs)
        with torch.enable_grad(), self._around():
            own_keys = indexer.keys().flatten(0, -2)[: self._cache.target.num_rows]
        all_keys = self._earlier.fetch(own_keys.detach(), Kind.BACKWARD_KV)
        all_rows = None if self._main is None else self._earlier.fetch(more[1], Kind.BACKWARD_KV)
        device, wide = all_keys.device, lse_dtype(all_keys.dtype)
        total, of_keys = all_keys.new_zeros((), dtype=torch.float64), torch.zeros_like(all_keys, dtype=wide)
        sums = [torch.zeros_like(parameter, dtype=wide) for parameter in self._parameters]
        for path in self._earlier.paths if len(own_keys) else ():  # a row may stand for no token
            places = torch.arange(len(all_keys), device=device)[path.on(device)]
            for some, visible in parts_of(path, self._window, device, share=4):
                before = places[: visible.shape[1]]
                keys = all_keys[before].requires_grad_()
                with torch.enable_grad(), self._around():
                    scores = indexer.scores(some, keys, visible)
                assert scores is not None, "the probe has seen them"
                if all_rows is None:
                    target, chosen = self.heard[0][some], more[0][some, 0]
                    at = torch.zeros(len(all_keys), dtype=torch.int64, device=device)
                    at[before] = torch.arange(len(before), device=device)
                    with torch.enable_grad():
                        scores = scores.gather(1, at[chosen.clamp(min=0).long()])
                        scores = scores.masked_fill(chosen == NONE, -torch.inf)
                else:
                    target = self._over_heads(more[0][some], all_rows[before], more[2], visible)
                with torch.enable_grad():
                    loss = _divergence(target, scores.to(wide))
                of_some, *found = torch.autograd.grad(loss, [keys, *self._parameters], allow_unused=True)
                of_keys.index_add_(0, before, of_some.to(wide))
                _add(sums, found)
                total += loss.detach()
        home = self._earlier.give_back(of_keys, Kind.BACKWARD_GRADIENTS).to(own_keys.dtype)
        if own_keys.requires_grad:
            _add(sums, torch.autograd.grad(own_keys, self._parameters, home, allow_unused=True))
        self._loss.total.append(total * self._loss.weight)
        return [(own * self._loss.weight).to(p.dtype) for own, p in zip(sums, self._parameters, strict=True)]

    def _indexer(self, inputs: Sequence[Tensor]) -> Indexer:
        """With ``inputs`` as constants, and with gradients, which its own forward switches off."""
        forward, tensors = partial(inspect.unwrap(type(self._module).forward), self._module), iter(inputs)
        leaves = [next(tensors).detach() if leaf is Tensor else leaf for leaf in self._leaves]
        args, kwargs = tree_unflatten(leaves, self._spec)
        return Indexer(self._module, forward, args, kwargs, self._cache)

    def _over_heads(self, queries: Tensor, rows: Tensor, sinks: Tensor | None, visible: Tensor) -> Tensor:
        """The probabilities of dense attention, ``[t, L]``, from ``queries [t, H, W]`` and ``rows [L, G * W]``."""
        assert self._main is not None, "attention is dense"
        form, num_kv_heads = self._main
        keys = rows.unflatten(1, (num_kv_heads, -1))[..., form.keys]
        scores = torch.einsum("tghw,sgw->tghs", queries.unflatten(1, (num_kv_heads, -1)), keys)
        scores = (scores.to(lse_dtype(rows.dtype)) * form.scale).masked_fill(~visible[:, None, None], -torch.inf)
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
    def forward(ctx: Any, rows: Tensor, lesson: Lesson, num_inputs: int, num_more: int, *tensors: Tensor) -> Tensor:
        ctx.lesson, ctx.num_inputs = lesson, num_inputs
        ctx.save_for_backward(*tensors[: num_inputs + num_more])
        return rows.view_as(rows)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors
        with without_autocast(saved[0].device):
            found = ctx.lesson.gradients(saved[: ctx.num_inputs], saved[ctx.num_inputs :])
        return gradients[0], None, None, None, *[None] * len(saved), *found
