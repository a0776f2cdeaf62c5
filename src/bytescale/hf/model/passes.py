"""One pass of an attached decoder over a micro-batch: every layer's call reaches the ring or the pack.

Shape letters: T rows of a micro-batch, H heads, D, Dv widths.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn

from bytescale.attention import PackedAttention, select_kernel
from bytescale.attention.autocast import in_autocast
from bytescale.common.errors import ConfigError, RankFailure
from bytescale.common.units import format_bytes
from bytescale.hf.model.blind import LayerRecurrence, UnreadMask
from bytescale.hf.model.head import ModelHead
from bytescale.hf.model.interface import Call, Target, refusal
from bytescale.hf.model.probe import LayerAttention, scale_of
from bytescale.plan import MicroBatch
from bytescale.runtime.group import RankGroup
from bytescale.runtime.loss import Head

if TYPE_CHECKING:
    from bytescale.attention.earlier import EarlierRows
    from bytescale.hf.model.indexer_loss import IndexerLoss
    from bytescale.recurrence.cuts import Cuts, GroupCuts


class Attached(Protocol):
    """What a pass has to know of the decoder that runs it (``decoder.HFDecoder``)."""

    num_calls: int
    is_frozen: bool
    indexer_loss: IndexerLoss | None
    is_invariant: bool

    @property
    def attentions(self) -> Mapping[nn.Module, LayerAttention]: ...
    @property
    def mixers(self) -> Mapping[nn.Module, LayerRecurrence]: ...
    @property
    def choosers(self) -> Mapping[str, int]: ...
    @property
    def arithmetic(self) -> Callable[[], AbstractContextManager[Any]]: ...
    def require_no_randomness(self) -> None: ...
    def is_in(self, model: nn.Module) -> bool: ...
    def fastest(self, head: ModelHead) -> Head: ...


class MicroBatchPass(Target):
    """Hands every layer's call to the ring or the pack. No mask is made: the documents of a micro-batch are known."""

    def __init__(
        self, decoder: Attached, attention_of: Callable[[torch.dtype], PackedAttention], num_rows: int, *,
        has_ring: bool = True, name: str = "a micro-batch",
        around: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:  # fmt: skip
        """``num_rows``: this rank's tokens; 0 in a ring: the model runs on one row that stands for none.

        ``around``: makes the context of every forward.
        """
        self.decoder, self.num_rows, self.has_ring, self.name = decoder, num_rows, has_ring, name
        self.keep: Callable[[nn.Module, str, Tensor], None] | None = None
        """Called by every recurrence with what it leaves behind (``GroupCuts.keep``)."""
        self._attention_of, self._around, self._context = attention_of, around, ExitStack()
        self.arithmetic = decoder.arithmetic
        self.trained = False
        """Whether the model has run it with gradients."""
        self._cuts: dict[int, GroupCuts] = {}
        self._earlier_rows: dict[int, EarlierRows] = {}
        self._calls = self._backwards_to_come = 0
        self.is_in_forward = False

    def begin(self) -> None:
        """Called when the model's forward begins. Raises ``ConfigError`` where random numbers would be drawn."""
        self.decoder.require_no_randomness()
        if self.decoder.is_frozen and torch.is_grad_enabled():
            raise refusal(
                "a second model",
                "it runs with gradients, and was attached for passes without them",
                so="other ranks would wait for its backward",
                fix="call it under torch.no_grad(), and give a model that is trained an HDP of its own",
            )
        self._calls, self.is_in_forward = 0, True
        self.trained |= torch.is_grad_enabled()
        self._context.enter_context(self._around())
        self._context.enter_context(self.arithmetic())

    def end(self, completed: bool) -> None:
        """Called when forward has ended."""
        self.is_in_forward = False
        self._context.close()
        if completed:
            self.require_all_calls()

    def require_all_calls(self) -> None:
        """Raise ``ConfigError`` unless all layers have called attention, once each."""
        if self._calls != self.decoder.num_calls:
            raise refusal(
                "the model",
                f"attention and recurrences were called {self._calls} times in a pass; when the model was attached, "
                f"{self.decoder.num_calls} times",
                so="members of a ring would wait for each other forever",
                fix="run the same layers in every pass (no layer drop), and attach again after the model has changed",
            )

    @torch.compiler.disable
    def attend(self, call: Call) -> Tensor:
        """``[1, T, H, Dv]`` from ``[1, H, T, D]`` queries; rows in the micro-batch's order."""
        layer = self.decoder.attentions.get(call.module)
        if layer is None:
            raise _not_attached(call.module)
        rows, mask = max(1, self.num_rows), call.mask.original if isinstance(call.mask, UnreadMask) else call.mask
        if call.query.shape[0] != 1 or {call.query.shape[2], call.key.shape[2]} != {rows} or mask is not None:
            raise refusal(
                layer.name,
                f"{call.query.shape[2]} queries and {call.key.shape[2]} keys in a micro-batch of {rows} rows"
                + (", and a mask" if mask is not None else ""),
                so="rows could not be told apart",
                fix="call the model with micro.inputs as they are; a key has to stand for one token",
            )
        if call.options.get("dropout") or scale_of(call) != layer.rules.scale:
            raise refusal(
                layer.name,
                f"it attends with dropout {call.options.get('dropout')} and scale {call.options.get('scaling')}; when "
                f"it was attached, with {layer.rules.scale or 'the usual scale'} and without dropout",
                so="the pass would compute with what was found then",
                fix="change the model before HDP(...)",
            )
        q, k, v = in_autocast(call.query), in_autocast(call.key), in_autocast(call.value)
        attention = self._attention_of(q.dtype)
        if layer.selection is not None:
            return self._counted(self._attend_to_chosen(call, _rows_of(q, k, v), layer, attention))[None]
        sinks, forward = call.options.get("s_aux"), None
        if self.decoder.is_invariant:
            from bytescale.attention import fixed_tiles  # few loops ask for it

            forward = partial(fixed_tiles.forward, self._earlier(attention))
        if self.num_rows == 0 and self.has_ring:
            q, k, v = (rows[:0] for rows in _rows_of(q, k, v))
            out = torch.nn.functional.pad(attention(q, k, v, layer.rules, sinks, forward=forward), (0, 0, 0, 0, 0, 1))
            return self._counted(out)[None]
        return self._counted(attention(q, k, v, layer.rules, sinks, forward=forward))

    def _attend_to_chosen(
        self, call: Call, qkv: tuple[Tensor, Tensor, Tensor], layer: LayerAttention, attention: PackedAttention
    ) -> Tensor:
        from bytescale.hf.model.selectors import attend_to_chosen  # few models choose keys

        q, k, v = (rows[: self.num_rows] for rows in qkv)
        kept, earlier, loss = self.layer_rows.pop(call.module), self._earlier(attention), self.decoder.indexer_loss
        lesson = None if loss is None else loss.lesson(kept.indexer, earlier, layer.rules.window)
        kept.indexer = None  # which knows ``kept``, too: a circle would keep the layer's input
        scale = layer.rules.scale_of(q)
        if loss is not None and loss.is_dense:
            q, k, v = (q, k, v) if self.has_ring else qkv
            out = attention(q, k, v, layer.rules, call.options.get("s_aux"))
            if lesson is not None:
                out = lesson.of_dense(out, call, (q, k, v), scale, kept.latents)
        else:
            out = attend_to_chosen(call, (q, k, v), scale, kept.latents, earlier, lesson)
        return out if len(out) else torch.nn.functional.pad(out, (0, 0, 0, 0, 0, 1))

    @torch.compiler.disable
    def select(self, indexer: Any) -> Tensor:
        """``[T, I, K]`` places of keys among the rows of ``_earlier``. A layer that runs again recalls its choice."""
        from bytescale.attention.rings.messages import Kind

        layer = self.decoder.attentions.get(indexer.cache.layer)
        if layer is None:
            raise _not_attached(indexer.cache.layer)
        if self.decoder.indexer_loss is not None and self.decoder.indexer_loss.is_dense:
            if indexer.cache.given is not None:  # it is told the index keys
                indexer.keys()
            return indexer.choose_alone()  # a choice that nobody looks at
        attention = self._attention_of(in_autocast(next(indexer.cache.layer.parameters())).dtype)
        earlier = self._earlier(attention)

        def choose() -> tuple[Tensor]:
            keys = indexer.keys().flatten(0, -2)[: self.num_rows]
            chosen = indexer.choose(earlier, earlier.fetch(keys, Kind.INDEX_KEYS), layer.rules.window)
            return (chosen if self.key_choices is None else self.key_choices.of_pass(layer.name, chosen, earlier),)

        with torch.no_grad():
            (chosen,) = attention.remembered(choose)
        return chosen

    def _earlier(self, attention: PackedAttention) -> EarlierRows:
        from bytescale.attention.earlier import EarlierRows  # few models choose keys

        return self._earlier_rows.get(id(attention)) or self._earlier_rows.setdefault(
            id(attention), EarlierRows(attention)
        )

    @torch.compiler.disable
    def mix(self, mixer: nn.Module, plain: Callable[[], Any], cut: Callable[[Cuts], Any]) -> Any:
        """The output of a recurrent layer, whose documents are cut as the plan says."""
        if mixer not in self.decoder.mixers:
            raise _not_attached(mixer)
        from bytescale.recurrence.cuts import GroupCuts  # few models have mixers

        attention = self._attention_of(in_autocast(next(mixer.parameters())).dtype)
        cuts = self._cuts.get(id(attention)) or self._cuts.setdefault(id(attention), GroupCuts(attention))
        cuts.keep = None if self.keep is None else partial(self.keep, mixer)
        try:
            out = cut(cuts)
        except torch.OutOfMemoryError as error:
            layer = self.decoder.mixers[mixer]
            numbers = len(cuts.fragments) * (2 * layer.state_numbers + layer.decay_numbers)
            raise ConfigError(
                f"{layer.name} ran out of memory, where the {len(cuts.fragments)} segments of documents that ranks "
                f"share need {format_bytes(4 * numbers)} for the states before and after them, and what they do to one",
                so="the pass cannot go on",
                fix="lower capacity_tokens, so that fewer documents are in a micro-batch, or use checkpointing='full'",
            ) from error
        self._counted(out[0] if isinstance(out, tuple) else out)
        return out

    def _counted(self, out: Tensor) -> Tensor:
        if self.is_in_forward:
            self._calls += 1
            if out.requires_grad:
                self._backwards_to_come += 1
                out.register_hook(self._one_backward_less)
        return out

    def require_finished(self) -> None:
        """Raise ``RankFailure`` if other members of the ring wait for a backward that has not come."""
        if self.has_ring and self.backward_is_missing:
            raise RankFailure(
                f"{self.name}: its backward has not run, and the next micro-batch was asked for",
                so="the other ranks that hold parts of its documents wait for this one",
                fix="call backward on every micro-batch's loss before you ask for the next one; a pass without "
                "backward belongs under torch.no_grad()",
            )

    @property
    def backward_is_missing(self) -> bool:
        """Whether forward kept a graph whose backward has not run."""
        return self._backwards_to_come > 0

    def _one_backward_less(self, gradient: Tensor) -> None:
        self._backwards_to_come -= 1


def _rows_of(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """``[T, H, D]`` of each ``[1, H, T, D]``."""
    return q.squeeze(0).transpose(0, 1), k.squeeze(0).transpose(0, 1), v.squeeze(0).transpose(0, 1)


def documents_alone(lengths: Sequence[int], like: Tensor) -> tuple[Tensor, PackedAttention]:
    """Positions ``[T]``, and slow attention of whole documents on this rank alone; dtype and device as ``like``."""
    micro_batch = MicroBatch.of_documents(0, lengths)
    kernel, exchange = select_kernel("math", like.device, like.dtype), RankGroup(device=like.device).exchange
    positions = torch.as_tensor(micro_batch.position_ids()).to(like.device)
    return positions, PackedAttention(micro_batch, kernel, exchange)


def _not_attached(module: nn.Module) -> ConfigError:
    return refusal(
        type(module).__name__,
        "it was not part of the model when the model was attached",
        so="where its documents begin is not known",
        fix="attach again after the model has changed",
    )
