"""Attention of one micro-batch, as the layers of the attached model call it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from bytescale.attention import PackedAttention
from bytescale.attention.autocast import in_autocast
from bytescale.common.errors import ConfigError, RankFailure
from bytescale.hf.model.interface import Call, foreign_model
from bytescale.hf.model.probe import LayerAttention, ModelFacts
from bytescale.hf.model.refusal import refusal
from bytescale.recurrence import Cuts, GroupCuts


@dataclass(kw_only=True)
class AttachedModel:
    """The attached model as passes need it: attention by module, and the modules that draw random numbers."""

    layers: dict[nn.Module, LayerAttention]
    mixers: frozenset[nn.Module]
    random_modules: dict[str, nn.Module]
    num_calls: int
    plain_heads: dict[int, bool] = field(default_factory=dict)
    """By the id of a head's weight, whether ``head.has_plain_head``; filled on demand."""
    is_frozen: bool = False
    """Whether it is a second model, which runs without gradients (``attach.frozen_model``)."""

    def is_in(self, model: nn.Module) -> bool:
        """Whether ``model`` is the attached model or a module around it."""
        return self.layers.keys() | self.mixers <= set(model.modules())

    @staticmethod
    def of(model: nn.Module, facts: ModelFacts) -> AttachedModel:
        modules = {name or type(module).__name__: module for name, module in model.named_modules()}
        return AttachedModel(
            layers={modules[layer.name]: layer for layer in facts.layers},
            mixers=frozenset(modules[mixer.name] for mixer in facts.mixers),
            random_modules={name: modules[name] for name in facts.random_parts if name in modules},
            num_calls=len(facts.layers) + len(facts.mixers),
        )


class MicroBatchPass:
    """The ``Target`` (``hf.model.interface``) of one micro-batch: hands every layer's call to the ring or the pack."""

    def __init__(
        self, attention_of: Callable[[torch.dtype], PackedAttention], model: AttachedModel, *, num_rows: int,
        has_ring: bool, name: str, around: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:  # fmt: skip
        """``num_rows``: this rank's tokens; 0 in a ring: the model runs on one row that stands for none.

        ``around``: makes the context of every forward.
        """
        self.name = name
        self.has_ring = has_ring
        self.num_rows = num_rows
        self.outermost: nn.Module | None = None
        self.keep: Callable[[Tensor, Tensor], None] | None = None
        """Called for every layer, in order, with this rank's keys and values ``[T, Hkv, D]``."""
        self.model = model
        self._attention_of = attention_of
        self._around = around
        self._context = ExitStack()
        self.trained = False
        """Whether the model has run it with gradients."""
        self.bypassed = False
        """Whether, while it was the loop's, the model ran with gradients and without it."""
        self._cuts: dict[int, GroupCuts] = {}
        self._calls = 0
        self._in_forward = False
        self._backwards_to_come = 0

    def require_model(self, model: nn.Module) -> None:
        """Raise ``ConfigError`` if ``model`` is neither the attached model nor a module around it."""
        if not self.model.is_in(model):
            raise foreign_model(type(model).__name__)

    def begin(self) -> None:
        """Called when the model's forward begins. Raises ``ConfigError`` where random numbers would be drawn."""
        drawing = [name for name, module in self.model.random_modules.items() if module.training]
        if drawing:
            raise refusal(
                drawing[0],
                "it draws random numbers in training mode (dropout or jitter)",
                so="results would depend on the plan and on the number of ranks",
                fix="load the model with every dropout probability at 0 (attention_dropout=0.0, ...), or call "
                "model.eval()",
            )
        if self.model.is_frozen and torch.is_grad_enabled():
            raise refusal(
                "a second model",
                "it runs with gradients, and was attached for passes without them",
                so="other ranks would wait for its backward",
                fix="call it under torch.no_grad(), and give a model that is trained an HDP of its own",
            )
        self._calls, self._in_forward = 0, True
        self.trained |= torch.is_grad_enabled()
        self._context.enter_context(self._around())

    def end(self, completed: bool) -> None:
        """Called when forward has ended. Raises ``ConfigError`` unless all layers have called attention."""
        self._in_forward = False
        self._context.close()
        if completed and self._calls != self.model.num_calls:
            raise refusal(
                "the model",
                f"attention and recurrences were called {self._calls} times in a pass; when the model was attached, "
                f"{self.model.num_calls} times",
                so="members of a ring would wait for each other forever",
                fix="run the same layers in every pass (no layer drop), and attach again after the model has changed",
            )

    def bypass(self) -> None:
        """The attached model was called without this pass among its inputs."""
        self.bypassed |= torch.is_grad_enabled()

    def mask(self, mask_function: Callable[..., Any]) -> None:
        """No mask is made: the documents of a micro-batch are known."""

    @torch.compiler.disable
    def attend(self, call: Call) -> Tensor:
        """``[1, T, H, Dv]`` from ``[1, H, T, D]`` queries; rows in the micro-batch's order."""
        layer = self.model.layers.get(call.module)
        if layer is None:
            raise _not_attached(call.module)
        rows = max(1, self.num_rows)
        if call.query.shape[0] != 1 or {call.query.shape[2], call.key.shape[2]} != {rows} or call.mask is not None:
            raise refusal(
                layer.name,
                f"{call.query.shape[2]} queries and {call.key.shape[2]} keys in a micro-batch of {rows} rows"
                + (", and a mask" if call.mask is not None else ""),
                so="rows could not be told apart",
                fix="call the model with micro.inputs as they are; a key has to stand for one token",
            )
        q, k, v = (in_autocast(tensor[0].transpose(0, 1)) for tensor in (call.query, call.key, call.value))
        attention = self._attention_of(q.dtype)
        sinks = call.options.get("s_aux")
        if self.num_rows == 0 and self.has_ring:
            out = attention(q[:0], k[:0], v[:0], layer.rules, sinks)
            out = torch.nn.functional.pad(out, (0, 0, 0, 0, 0, 1))
        else:
            out = attention(q, k, v, layer.rules, sinks)
        if self._in_forward and self.keep is not None:
            self.keep(k[: self.num_rows], v[: self.num_rows])
        return self._counted(out)[None]

    @torch.compiler.disable
    def mix(self, mixer: nn.Module, plain: Callable[[], Any], cut: Callable[[Cuts], Any]) -> Any:
        """The output of a recurrent layer, whose documents are cut as the plan says."""
        if mixer not in self.model.mixers:
            raise _not_attached(mixer)
        attention = self._attention_of(in_autocast(next(mixer.parameters())).dtype)
        out = cut(self._cuts.setdefault(id(attention), GroupCuts(attention)))
        self._counted(out[0] if isinstance(out, tuple) else out)
        return out

    def _counted(self, out: Tensor) -> Tensor:
        if self._in_forward:
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


def _not_attached(module: nn.Module) -> ConfigError:
    return refusal(
        type(module).__name__,
        "it was not part of the model when the model was attached",
        so="where its documents begin is not known",
        fix="attach again after the model has changed",
    )
