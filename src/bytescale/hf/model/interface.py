"""The door to transformers: an attention implementation and kernels that models call by name, and their masks.

``Attachment`` puts a model on an implementation of ours. What this does depends on the pass:

* In a pass of a plan the model is given ``hdp_attention=...`` among its inputs. Models hand unknown keywords down to
  every attention, and so each layer reaches the ``Target`` of the micro-batch. No mask is made. Recurrent layers run
  their own forward with other functions behind the names of its kernels. There is no list of model types: whatever
  calls one of ``recurrence.STOCK_KERNELS`` is a mixer, and the probe decides whether it can be cut.
* In any other pass (``generate()``, evaluation) the implementation that the model had before computes, with its mask.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from types import FunctionType, MethodType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, Cache, PreTrainedModel, masking_utils
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, find_packed_sequence_indices
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from bytescale.common.errors import ConfigError
from bytescale.recurrence import STOCK_KERNELS

if TYPE_CHECKING:
    from bytescale.recurrence.cuts import Cuts


def refusal(part: str, what: str, *, so: str, fix: str) -> ConfigError:
    """Of a model for which a plan would not give the results of one process. ``part`` names the module or its layer."""
    return ConfigError(f"{part} cannot be attached: {what}", so=so, fix=fix)


LIGHTNING = "get_linear_cache"
"""A method of the cache that MiniMax's mixer alone asks for its state: of a class of the model's own."""

_cuts: ContextVar[Cuts] = ContextVar("bytescale_cuts")


def _kernels(module: nn.Module) -> set[str]:
    """Names of the stock functions that a module's forward calls."""
    return names_in(module) & {*STOCK_KERNELS, LIGHTNING}


def names_in(module: nn.Module) -> set[str]:
    """All names in the code of a module's forward; of a forward that is no Python function none."""
    function = inspect.unwrap(type(module).forward)
    return set(function.__code__.co_names) if isinstance(function, FunctionType) else set()


def _forward(function: FunctionType, names: set[str]) -> Callable[..., Any]:
    """The mixer's forward, as a function of the mixer, so that a copy of a model computes with its own weights."""
    if names == {LIGHTNING}:
        cut_forward: Callable[..., Any] = _lightning
    else:
        from bytescale.recurrence.kernels import KERNELS  # few models have mixers

        ours = {name: partial(_carried, KERNELS[name], function.__globals__[name]) for name in names - {LIGHTNING}}
        cut_forward = FunctionType(
            function.__code__, {**function.__globals__, **ours}, function.__name__, function.__defaults__,
            function.__closure__,
        )  # fmt: skip
        cut_forward.__kwdefaults__ = function.__kwdefaults__

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        given: Target | None = kwargs.pop(KEYWORD, None)
        target = _pass.get() if given is None else given  # some layers hand no keywords down to it
        if target is not None:  # a cache of prefill, which is told what the fragments leave behind
            kwargs = {name: None if isinstance(value, Cache) else value for name, value in kwargs.items()}
        plain = partial(type(self).forward, self, *args, **kwargs)
        if target is not None:
            return target.mix(self, plain, partial(_with_cuts, partial(cut_forward, self, *args, **kwargs)))
        if torch._C._current_graph_task_id() != -1:
            raise refusal(
                type(self).__name__,
                "it is computed again in backward, and is not told for which micro-batch",
                so="documents of the micro-batch would see each other's states",
                fix="switch the model's own gradient checkpointing off, and use checkpointing='full' of HDP",
            )
        return plain()

    return forward


@torch.compiler.disable
def _with_cuts(compute: Callable[[], Any], cuts: Cuts) -> Any:
    before = _cuts.set(cuts)
    try:
        return compute()
    finally:
        _cuts.reset(before)


def _carried(kernel: Callable[..., Any], stock: Callable[..., Any], *args: Any, **options: Any) -> Any:
    return kernel(_cuts.get(), stock, *args, **options)


def _lightning(mixer: nn.Module, hidden_states: Any, *_: Any, **__: Any) -> Any:
    from transformers.models.mamba2.modeling_mamba2 import mamba2_chunk_scan

    from bytescale.recurrence.kernels import lightning_mixer  # of MiniMax

    return lightning_mixer(_cuts.get(), mamba2_chunk_scan, mixer, hidden_states)


KEYWORD = "hdp_attention"
PREFIX = "hdp_over_"


@dataclass(frozen=True, kw_only=True)
class Call:
    """One layer's call of attention. B: sequences (always 1), H, G: heads, T: rows, D, Dv: widths.

    Attributes:
        query, key, value: ``[B, H, T, D]``, ``[B, G, T, D]``, ``[B, G, T, Dv]``.
        mask: what the model made of the target's ``mask()``, or a mask of its own.
        options: all keywords, such as ``scaling``, ``dropout``, ``sliding_window``.
    """

    module: nn.Module
    query: Tensor
    key: Tensor
    value: Tensor
    mask: Any
    options: dict[str, Any]


class Target:
    """The attention that the layers call during one pass, and where their recurrences are cut."""

    num_rows: int
    """This pass's tokens; 0: the model runs on one row that stands for none."""
    outermost: nn.Module | None = None
    is_in_forward = False
    """Whether the model's forward runs; not: a layer is computed again."""
    layer_rows: Any = None
    """By layer, ``selectors.LayerRows``."""
    choices: Any = None
    """What routers are to choose (``routes.Choices``); None: they are left alone."""
    key_choices: Any = None
    """What indexers are to choose (``chosen_keys.KeyChoices``); None: they are left alone."""
    arithmetic: Callable[[], AbstractContextManager[Any]] = nullcontext
    """Makes the context in which the model computes with each row (``invariant.FixedProducts``)."""
    needs_positions = True
    """Whether rows are of several documents, whose positions a model cannot count itself."""

    def attend(self, call: Call) -> Tensor:
        """``[B, T, H, Dv]``."""
        raise NotImplementedError

    def mix(self, mixer: nn.Module, plain: Callable[[], Any], cut: Callable[[Cuts], Any]) -> Any:
        """A recurrent layer's output: what ``plain`` returns, as in one process, or ``cut`` for given cuts."""
        raise NotImplementedError

    def select(self, indexer: Any) -> Tensor:
        """The keys that a ``selectors.Indexer`` chooses for this pass's rows."""
        raise NotImplementedError

    def mask(self, mask_function: Callable[..., Any]) -> Any:
        """What layers are given as their mask. ``mask_function(batch, head, query, key)`` tells what may be seen."""

    def begin(self) -> None:
        """Called when the model's forward begins."""

    def end(self, completed: bool) -> None:
        """Called when it has ended; ``completed``: without an error."""


@contextmanager
def while_set(modules: Iterable[Any], name: str, value: Any) -> Iterator[None]:
    """Give modules an attribute of their own for a while."""
    missing = object()
    before = [(vars(module), vars(module).get(name, missing)) for module in modules]
    for attributes, _ in before:
        attributes[name] = value
    try:
        yield
    finally:
        for attributes, was in before:
            attributes[name] = was
            if was is missing:
                del attributes[name]


# Masks are made by functions of transformers that get none of the model's keywords, so the pass is noted here. The
# note lasts for one forward of one thread.
_pass: ContextVar[Target | None] = ContextVar("bytescale_pass", default=None)


def _packed_sequences(position_ids: Tensor) -> Tensor | None:
    """Outside of plans what transformers finds. In a plan documents are known: looking would make a GPU's host wait."""
    return find_packed_sequence_indices(position_ids) if _pass.get() is None else None


def running_pass() -> Target | None:
    """The pass that runs, also where a layer is computed again (``runtime.saved.checkpointing``)."""
    return _pass.get()


class Unusable:
    """Stands where a model expects its mask. Whoever looks into it gets an error."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "to":  # `to` is for tensors that are moved to the model's device
            raise AttributeError(name)
        raise self._error

    def __getitem__(self, key: Any) -> Any:
        raise self._error


class OnlyAttached(Unusable):
    """The mask in ``micro.inputs``: an attached model drops it, and any other stumbles over it."""


class Attachment:
    """A model that is on our attention. ``detach`` undoes it."""

    def __init__(self, model: nn.Module) -> None:
        """Raises ``ConfigError`` where a part of the model does not use ``AttentionInterface``."""
        self.parts = [module for module in model.modules() if isinstance(module, PreTrainedModel)]
        if not self.parts:
            raise refusal(
                type(model).__name__,
                "it has no part that is a PreTrainedModel of transformers",
                so="its attention could not be reached",
                fix="attach a model of transformers, or build the loop from bytescale.attention and bytescale.plan",
            )
        if fixed := [part for part in self.parts if not part._can_set_attn_implementation()]:
            raise refusal(
                type(fixed[0]).__name__,
                "its attention does not go through transformers' AttentionInterface",
                so="it would attend to other documents' tokens",
                fix="use another implementation of the model, or a newer version of transformers",
            )
        mixers = {module: name for name, module in model.named_modules() if _kernels(module)}
        for mixer, name in mixers.items():
            from bytescale.recurrence.kernels import require_known_kernel  # few models have mixers

            called = inspect.unwrap(type(mixer).forward).__globals__
            for kernel in sorted(_kernels(mixer) & STOCK_KERNELS):
                require_known_kernel(kernel, called[kernel], f"{name} ({type(mixer).__name__})")
        self.mixers = list(mixers)
        self._is_detached = False
        self.ran_plain_backward = False
        """Whether a backward came from a pass outside of plans, since somebody has set this to False."""
        masking_utils.find_packed_sequence_indices = _packed_sequences
        self.before = [(part, part.config._attn_implementation) for part in self.parts]
        for part, name in self.before:
            original = (name or "sdpa").removeprefix(PREFIX)  # computes outside of plans
            if PREFIX + original not in ALL_ATTENTION_FUNCTIONS:
                AttentionInterface.register(PREFIX + original, partial(_attention, original))
                AttentionMaskInterface.register(PREFIX + original, partial(_mask, original))
            part.config._attn_implementation_internal = PREFIX + original
        for mixer in self.mixers:
            mixer.forward = MethodType(_forward(inspect.unwrap(type(mixer).forward), _kernels(mixer)), mixer)
        self._hooks = []
        for module in dict.fromkeys([model, *self.parts]):
            self._hooks.append(module.register_forward_pre_hook(_begin, with_kwargs=True))
            self._hooks.append(module.register_forward_hook(_end, with_kwargs=True, always_call=True))
            self._hooks.append(module.register_forward_hook(self._note_plain, with_kwargs=True))

    def require_attached(self) -> None:
        """Raise ``ConfigError`` after ``detach``."""
        if self._is_detached:
            raise ConfigError(
                "this HDP was detached from its model",
                so="documents of a micro-batch would see each other",
                fix="attach again: bytescale.HDP(model, ...)",
            )

    def _note_plain(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        is_head_alone = any("forward" in vars(part) for part in self.parts)  # ``head.ModelHead``
        if KEYWORD in kwargs or _pass.get() is not None or is_head_alone or not torch.is_grad_enabled():
            return

        def note(_: Tensor) -> None:
            self.ran_plain_backward = True

        for value in output.values() if isinstance(output, dict) else output if isinstance(output, tuple) else [output]:
            if isinstance(value, Tensor) and value.requires_grad:
                value.register_hook(note)

    def require_no_plain_backward(self) -> None:
        """Raise ``ConfigError`` if gradients of a pass outside of plans are among those that ranks add up."""
        if self.ran_plain_backward:
            raise ConfigError(
                "the model was run forward and backward outside of a plan since the last step()",
                so="its gradients would be added up over ranks with those of the plan, once for each rank that ran it",
                fix="call model(**micro.inputs) with all that is in it; hdp.zero_grad() forgets such gradients",
            )

    def detach(self) -> None:
        self._is_detached = True
        for part, name in self.before:
            part.config._attn_implementation_internal = name
        for mixer in self.mixers:
            vars(mixer).pop("forward", None)
        for hook in self._hooks:
            hook.remove()


def _attention(
    original: str, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any = None,
    **options: Any,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    target: Target | None = options.pop(KEYWORD, None)
    if target is not None:
        call = Call(module=module, query=query, key=key, value=value, mask=attention_mask, options=options)
        return target.attend(call), None
    if _pass.get() is not None:
        raise refusal(
            type(module).__name__,
            f"the model does not hand the keyword {KEYWORD!r} down to its attention",
            so="attention could not tell the documents of a micro-batch apart",
            fix="use a model type whose forward passes **kwargs to its layers",
        )
    usual: Any = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
    function = ALL_ATTENTION_FUNCTIONS.get_interface(original, usual)
    assert function is not None, f"{type(module).__name__} ran with {original!r} before it was attached"
    result: tuple[Tensor, Tensor | None] = function(module, query, key, value, attention_mask, **options)
    return result


def _mask(original: str, *args: Any, mask_function: Callable[..., Any], **options: Any) -> Any:
    target = _pass.get()
    if target is not None:
        return target.mask(mask_function)
    return ALL_MASK_ATTENTION_FUNCTIONS[original](*args, mask_function=mask_function, **options)


def _begin(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    target = kwargs.get(KEYWORD)
    if isinstance(kwargs.get("attention_mask"), OnlyAttached):
        kwargs = {name: value for name, value in kwargs.items() if name != "attention_mask"}
    if target is not None:
        _refuse_other_results(target, module, kwargs)
    if target is not None and _pass.get() is None:
        target.begin()
        target.outermost = module
        _pass.set(target)
    return args, kwargs


def _refuse_other_results(target: Target, module: nn.Module, kwargs: dict[str, Any]) -> None:
    """Raise ``ConfigError`` for what would make a pass of a plan give other results than one process."""
    refused = partial(refusal, type(module).__name__)
    if kwargs.get("labels") is not None:
        raise refused(
            "it is given labels together with micro.inputs",
            so="its own loss would shift them across documents, and be the mean of one micro-batch",
            fix="leave labels out, and compute the loss from logits and micro.labels, or by micro.loss_sum(model)",
        )
    if target.needs_positions and kwargs.get("position_ids") is None and _pass.get() is None:
        raise refused(
            "it is given no position_ids",
            so="it would count the rows of all documents of the micro-batch as those of one",
            fix="call model(**micro.inputs) with all that is in it",
        )
    asked = kwargs.get("output_router_logits")
    if getattr(getattr(module, "config", None), "output_router_logits", False) if asked is None else asked:
        raise refused(
            "output_router_logits is True, so that its output has a loss for even use of experts",
            so="that loss would be one micro-batch's, which depends on the plan",
            fix="set output_router_logits to False: the experts are then trained by your own loss alone",
        )
    for name in kwargs:
        if name.startswith(("pixel_values", "input_features")) and isinstance(kwargs[name], Tensor):
            raise refused(
                f"it is given {name} together with micro.inputs",
                so="towers for images and sounds take no part in a plan",
                fix=f"train on documents of text alone, and leave {name} out",
            )


def _end(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
    target = kwargs.get(KEYWORD)
    if target is not None and target.outermost is module:
        target.outermost = None
        _pass.set(None)
        target.end(completed=output is not None)  # an error on its way out needs no second one
