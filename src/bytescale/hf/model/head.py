"""Losses and log-probabilities of labels, a few rows at a time, through the head that the model has.

Heads differ: a bias, a scale of the logits (Granite, Cohere), a soft cap (Gemma 2). So the model's own forward computes
the logits of a chunk: its decoder is replaced, for that call, by one that returns the chunk of hidden states.

Shape letters: T rows, n rows of a chunk, C hidden size, V vocabulary.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, is_dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from bytescale.attention.autocast import without_autocast
from bytescale.common.errors import DataError
from bytescale.common.labels import IGNORE_INDEX
from bytescale.cost.memory.device_kernels import loss_chunk_tokens
from bytescale.hf.model.interface import KEYWORD, refusal, while_set
from bytescale.runtime.loss import AT_ONCE

KINDS = ("image", "video", "audio")
"""What towers of models of transformers take beside words."""


def has_plain_head(head: ModelHead) -> bool:
    """Whether logits are ``hidden @ weight.T`` and nothing else: no bias, scale, soft cap or adapter.

    Tried with hidden states that give large logits, which a soft cap would change, and with zeros, which a bias would.
    """
    weight, hidden_size = head.weight, head.hidden_size
    if weight is None or weight.dim() != 2 or weight.shape[1] != hidden_size:
        return False
    if any(parameter is not weight for parameter in head.parameters()):  # zero at first, as a LoRA's product is
        return False
    if weight.is_meta:  # a few words with values stand for all
        few = nn.Parameter(torch.randn(64, hidden_size, generator=torch.Generator().manual_seed(1)))
        own = embeddings_of(head.model)[1]
        with while_set([own], "_parameters", {**own._parameters, "weight": few}):
            return has_plain_head(head)
    generator = torch.Generator().manual_seed(0)
    direction = torch.randn(4, hidden_size, generator=generator).to(weight)
    with torch.no_grad(), without_autocast(weight.device):
        factor = 200.0 / (direction @ weight.T).abs().max().clamp(min=1e-6)
        hidden = torch.cat([direction * factor, torch.zeros_like(direction)])
        expected, logits = hidden @ weight.T, head(hidden)
    if logits.shape != expected.shape:
        return False
    tolerance = 200.0 * 4 * torch.finfo(weight.dtype).eps * hidden_size**0.5
    same = bool((logits.to(expected) - expected).abs().max() <= tolerance)
    return same and not bool(logits[4:].any())


def _wide(logits: Tensor) -> Tensor:
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


@dataclass(frozen=True)
class ModelHead:
    """From hidden states ``[n, C]`` to logits ``[n, V]``: the model, its decoder replaced (``runtime.loss.Head``)."""

    model: nn.Module
    decoder: nn.Module
    output: Any
    """What the decoder returned; its hidden states are exchanged."""
    arithmetic: Callable[[], AbstractContextManager[Any]] = nullcontext
    """Makes the context in which logits are computed (``invariant.FixedProducts``)."""
    group = None

    @property
    def weight(self) -> nn.Parameter | None:
        """``[V, C]`` of the output embedding, where the model has one."""
        return getattr(embeddings_of(self.model)[1], "weight", None)

    @property
    def hidden_size(self) -> int:
        """C."""
        return int(self.output[0].shape[-1])

    @property
    def num_words(self) -> int:
        """V, or a guess where the model has no output embedding."""
        return 2**15 if self.weight is None else len(self.weight)

    def parameters(self) -> list[nn.Parameter]:
        """The head's parameters that are trained: those that are not the decoder's, and a tied embedding."""
        inside = {id(parameter) for parameter in self.decoder.parameters()}
        own = {id(p): p for p in self.model.parameters() if id(p) not in inside}
        if self.weight is not None:
            own[id(self.weight)] = self.weight
        return [parameter for parameter in own.values() if parameter.requires_grad]

    def add_loss(
        self, rows: Tensor, targets: Tensor, factor: Tensor | None, z_loss: float, sums: Sequence[Tensor | None] | None
    ) -> tuple[Tensor, Tensor | None]:
        with torch.enable_grad(), while_set(filter(None, embeddings_of(self.model)[1:]), AT_ONCE, True):
            chunk, parameters = rows.detach().requires_grad_(), self.parameters()
            logits = _wide(self(chunk))
            losses = F.cross_entropy(logits, targets, reduction="none")
            if z_loss:
                losses = losses + z_loss * logits.logsumexp(dim=1).square()
            loss = (losses if factor is None else losses * factor).sum()
            if sums is None:
                return loss.detach(), None
            d_chunk, *gradients = torch.autograd.grad(loss, [chunk, *parameters], allow_unused=True)
        for total, gradient in zip(sums, gradients, strict=True):
            if total is not None and gradient is not None:
                total += gradient
        return loss.detach(), d_chunk

    def losses(self, rows: Tensor, labels: Tensor) -> Tensor:
        if not len(rows):  # some models need a row
            return _wide(rows).sum(dim=1)
        return F.cross_entropy(_wide(self(rows)), labels, reduction="none", ignore_index=IGNORE_INDEX)

    def __call__(self, hidden: Tensor) -> Tensor:
        if isinstance(self.output, tuple):
            output = (hidden[None], *self.output[1:])
        else:
            output = replace(self.output, last_hidden_state=hidden[None])
        with while_set([self.decoder], "forward", lambda *args, **kwargs: output), self.arithmetic():
            position = torch.zeros(1, len(hidden), dtype=torch.int64, device=hidden.device)
            result = self.model(input_ids=position, position_ids=position, use_cache=False)
        logits: Tensor = result[0] if isinstance(result, tuple) else result.logits
        return logits[0]


def hidden_states(model: nn.Module, inputs: dict[str, Any]) -> tuple[Tensor, ModelHead]:
    """Run the model and keep what its decoder returns ``[1, T, C]``. Its head sees a single row, where it can."""
    if not hasattr(model, "get_decoder") and not hasattr(model, "get_base_model"):
        model = causal_model(model)  # without what a wrapper adds, such as a value head
    root = causal_model(model)
    decoder = root.get_decoder() if hasattr(root, "get_decoder") else None
    if decoder is root or isinstance(
        decoder, nn.Linear
    ):  # Llama 4 for text, ModernBERT: what they name is another part
        decoder = next((part for part in root.children() if isinstance(part, PreTrainedModel)), root)
    if not isinstance(decoder, nn.Module) or decoder is root:
        raise refusal(
            type(root).__name__,
            "it has no decoder below its head (get_decoder())",
            so="its logits could not be computed a few rows at a time",
            fix="compute the loss from model(**micro.inputs).logits",
        )
    # With towers, or an embedding of its own, the head is behind what is around the decoder, if the model calls that.
    parts = [part for part in root.children() if isinstance(part, PreTrainedModel) and part is not decoder]
    around = [part for part in parts if part.get_decoder() is decoder]
    kept: dict[nn.Module, Any] = {}
    keeps = "logits_to_keep" in inspect.signature(root.forward).parameters
    with ExitStack() as hooks:
        for part in dict.fromkeys([decoder, *around]):
            hooks.enter_context(part.register_forward_hook(lambda module, _, output: kept.update({module: output})))
        model(**inputs, **({"logits_to_keep": 1} if keeps else {}))
    decoder, output = [*kept.items()][-1]  # the outermost one ends last
    if not isinstance(output, tuple) and not is_dataclass(output):
        raise refusal(
            type(decoder).__name__,
            f"it returns a {type(output).__name__}",
            so="its hidden states are not known",
            fix="compute the loss from model(**micro.inputs).logits",
        )
    hidden: Tensor = output[0]  # type: ignore[index]
    return hidden, ModelHead(model, decoder, output, getattr(inputs.get(KEYWORD), "arithmetic", nullcontext))


def causal_model(model: Any) -> Any:
    """The model of transformers inside a module of peft, or inside a wrapper of the caller's."""
    while hasattr(model, "get_base_model"):
        model = model.get_base_model()
    if hasattr(model, "get_decoder"):
        return model
    return next((part for part in model.modules() if isinstance(part, PreTrainedModel)), model)


def cache_name(module: nn.Module) -> str:
    """What the forward of a model or a layer calls the cache that it is given: transformers 5.24 has renamed it."""
    takes = inspect.signature(type(module).forward).parameters
    for name in ("cache", "past_key_values", "cache_params"):
        if name in takes:
            return name
    raise refusal(
        type(module).__name__, "its forward takes no cache by a name that is known here", so="keys could not be kept",
        fix="use a version of transformers with which this version of bytescale was tested",
    )  # fmt: skip


def embeddings_of(model: Any) -> tuple[Any, Any]:
    """The model's embedding and its output projection; None where it has none."""
    root = causal_model(model)
    given, output = (getattr(root, f"get_{kind}_embeddings", lambda: None)() for kind in ("input", "output"))
    return given, output


def words_of(model: nn.Module) -> list[int | None]:
    """Words of the whole model's embedding and of its head; None where it has none."""
    weights = [getattr(module, "weight", None) for module in embeddings_of(model)]
    return [None if weight is None else len(weight) for weight in weights]


def require_words(fields: Mapping[str, Mapping[int, Tensor]], model: nn.Module, num_words: list[int | None]) -> None:
    """Raise ``DataError`` for tokens outside of the model's embedding, and labels outside of its head.

    ``fields``: ``tokens`` and ``labels``, each ``[S]`` by the number of the document. A token that stands for an image
    is refused, too: towers take no part. ``num_words``: ``words_of`` the whole model.
    """
    root = causal_model(model)
    towers = [name for name, _ in root.named_modules() if re.search("vis(ion|ual)|audio", name.rpartition(".")[2])]
    for kind in KINDS if towers and "placeholders" not in fields else ():
        placeholder = getattr(getattr(root, "config", None), f"{kind}_token_id", None)
        found = None if placeholder is None else _first(fields["tokens"], partial(torch.eq, other=placeholder))
        if found is not None:
            raise DataError(
                f"document {found[0]} has a token of an {kind} ({placeholder}), and there is no {kind} in the batch",
                so="the model would see a word without meaning in its place",
                fix="give the images with their document (images=[...]), or train on text alone",
            )
    for name, words in zip(("tokens", "labels"), num_words, strict=True):
        if words is None:
            continue
        ignored = IGNORE_INDEX if name == "labels" else 0

        def wrong(values: Tensor, words: int = words, ignored: int = ignored) -> Tensor:
            return ((values < 0) | (values >= words)) & (values != ignored)

        if (found := _first(fields[name], wrong)) is not None:
            raise DataError(
                f"the {name} of document {found[0]} have {found[1]}; the model has {words} words",
                so="there is no row of its matrix for it",
                fix="use the tokenizer that belongs to the model"
                + (f"; {IGNORE_INDEX} marks a token without a label" if name == "labels" else ""),
            )


def _first(documents: Mapping[int, Tensor], is_wrong: Callable[[Tensor], Tensor]) -> tuple[int, int] | None:
    """The first document with a wrong number, and that number. All are looked at together first."""
    if bool(is_wrong(torch.cat([*documents.values()])).any()):
        for number, values in documents.items():
            if bool((wrong := is_wrong(values)).any()):
                return number, int(values[wrong][0])
    return None


class RowScores(NamedTuple):
    """Results of the rows of a micro-batch, in fp32 (fp64 for fp64). What was not asked for is None."""

    logprobs: Tensor
    """``[T]`` log-probability of each row's label; 0 where the label is -100."""
    entropy: Tensor | None
    """``[T]`` entropy of each row's distribution, in nats."""
    top_logprobs: Tensor | None
    """``[T, K]`` log-probabilities of each row's likeliest words, falling."""
    top_words: Tensor | None
    """``[T, K]`` int64: those words."""
    word_logprobs: Tensor | None
    """``[T, K]`` log-probabilities of the words that were asked for."""
    mean_logits: Tensor | None
    """``[T]`` mean of each row's logits."""
    hidden: Tensor
    """``[T, C]`` hidden states after the final norm, for a head of one's own."""


def row_scores(
    model: nn.Module, inputs: dict[str, Any], labels: Tensor, *, temperature: float | Tensor = 1.0,
    rows_at_a_time: int | None = None, entropy: bool = False, top: int = 0, words: Tensor | None = None,
    mean_logits: bool = False,
) -> RowScores:  # fmt: skip
    """Run the model, and score its rows ``labels [T]``; ``Micro.logprobs``."""
    if not isinstance(temperature, Tensor) and not temperature > 0:
        raise DataError(
            f"the temperature is {temperature}",
            so="logits cannot be divided by it",
            fix="give a number above 0, or one for each row",
        )
    states, head = hidden_states(model, inputs)
    hidden = states[0, : len(labels)]
    chunk_rows = rows_at_a_time or loss_chunk_tokens(head.num_words, hidden.device.type)

    def scores(rows: Tensor, labels: Tensor, divisor: Any, asked: Tensor | None) -> list[Tensor | None]:
        logits = _wide(head(rows))
        if isinstance(divisor, Tensor):
            logits = logits / divisor.to(logits)[:, None]
        elif divisor != 1:
            logits = logits / divisor
        lse = logits.logsumexp(dim=1)
        counted = labels != IGNORE_INDEX
        chosen = logits.gather(1, labels.where(counted, 0)[:, None])[:, 0] - lse
        values, best = logits.topk(top, dim=1) if top else (None, None)
        return _used_rows(
            logits,
            chosen.where(counted, 0),
            lse - (logits.softmax(dim=1) * logits).sum(dim=1) if entropy else None,
            None if values is None else values - lse[:, None],
            best,
            None if asked is None else logits.gather(1, asked) - lse[:, None],
            logits.mean(dim=1) if mean_logits else None,
        )

    targets = labels.split(chunk_rows)
    columns = [
        values.split(chunk_rows) if isinstance(values, Tensor) else [values] * len(targets)
        for values in (temperature, words)
    ]
    parts = [
        checkpoint(scores, *own, use_reentrant=False, preserve_rng_state=False) if torch.is_grad_enabled()
        else scores(*own)
        for own in zip(hidden.split(chunk_rows), targets, *columns, strict=True)
    ]  # fmt: skip
    joined = [None if column[0] is None else torch.cat(column) for column in zip(*parts, strict=True)]
    return RowScores(*joined, hidden)  # type: ignore[call-arg, arg-type]


def _used_rows(logits: Tensor, *results: Tensor | None) -> list[Tensor | None]:
    """``results [n, ...]``. A row of which a loss uses none gives exactly 0 to its logits, which may be infinite."""
    used = torch.zeros(len(logits), dtype=torch.bool, device=logits.device)

    def note(gradient: Tensor) -> None:
        used.logical_or_(gradient[..., None].flatten(1).any(1))

    for result in results:
        if result is not None and result.requires_grad:
            result.register_hook(note)
    if logits.requires_grad:
        logits.register_hook(lambda gradient: gradient.where(used[:, None], 0))
    return list(results)
