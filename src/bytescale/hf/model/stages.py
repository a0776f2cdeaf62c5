"""A pipeline stage of any decoder of transformers: some layers, and what runs before the first or behind the last.

The model's own loop runs on every stage. Layers of earlier stages hand on what they are given, and the first own layer
is given the hidden states of the stage before instead. The first layer of a later stage ends the pass. So a stage needs
no code of its own for any family. That later layers read nothing but hidden states is tried, not believed: a stage has
to give what the whole model gives. Absent parameters stay where they are, without memory, so all names stay.

Shape letters: T rows of a micro-batch, C hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from bytescale.common.errors import ConfigError
from bytescale.cost.profile import stages_of
from bytescale.hf.model.costs import layers_of
from bytescale.hf.model.decoder import HFDecoder
from bytescale.hf.model.head import causal_model, embeddings_of
from bytescale.hf.model.interface import refusal, running_pass
from bytescale.hf.model.passes import documents_alone
from bytescale.hf.model.stage import Stage, StageEnd

_LENGTHS = [5, 1, 2]
"""Documents on which a stage is compared with the whole model."""


@dataclass
class _Pass:
    """What a pass of the whole model has shown.

    Attributes:
        given: to each layer, in the order of the calls: ``[1, T, C]``.
        parts: of what each returns, 0: it is no tuple.
        before, behind: modules outside of the layers that have parameters, by whether a layer had been called.
        made: what those before have returned.
        result: hidden states after the final norm, ``[T, C]``.
    """

    given: dict[nn.Module, Tensor] = field(default_factory=dict)
    parts: dict[nn.Module, int] = field(default_factory=dict)
    before: dict[nn.Module, Tensor] = field(default_factory=dict)
    behind: set[nn.Module] = field(default_factory=set)
    result: Tensor = field(default_factory=lambda: torch.empty(0))


def cut_to_stage(decoder: HFDecoder, number: int, count: int) -> Stage:
    """Reduce ``decoder`` to stage ``number`` of ``count``, in place: parameters of other stages lose their memory.

    Every tensor-parallel rank calls it. Raises ``ConfigError`` where the model has fewer layers than stages, or where a
    stage would not give what the whole model gives.
    """
    _ = decoder.head, decoder.spec, decoder.hidden_size  # known of the whole model alone
    layers = layers_of(decoder.model, decoder.structure.names)
    with torch.no_grad():
        seen = _whole_pass(decoder, layers)
        stage = Stage(number=number, count=count)
        numbers = [sum(layer.count for layer in own) for own in stages_of(decoder.spec, count)]
        first = sum(numbers[:number])
        own = layers[first : first + numbers[number]]
        absent = _absent(decoder, layers, own, seen, stage)
        _cut(decoder, layers, own, absent, seen, stage)
        if not seen.result.is_meta:
            _require_equal(decoder, layers, own, seen, stage)
    return stage


def _whole_pass(decoder: HFDecoder, layers: Sequence[nn.Module]) -> _Pass:
    seen = _Pass()
    names = {module: name or type(module).__name__ for name, module in decoder.model.named_modules()}
    inside = {module for layer in layers for module in layer.modules()}

    def of_layer(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        if layer in seen.given:
            raise _refusal(names[layer], "it runs several times in a pass")
        if not isinstance(given := _stream(args, kwargs), Tensor):
            raise _refusal(names[layer], "it is not given hidden states")
        seen.given[layer] = given
        seen.parts[layer] = parts_of(out)

    def of_rest(module: nn.Module, args: tuple[Any, ...], out: Any) -> None:
        if seen.given:
            seen.behind.add(module)
        elif isinstance(out, Tensor):
            seen.before[module] = out
        else:
            raise _refusal(names[module], "it returns more than one tensor before the first layer")

    with ExitStack() as hooks:
        for layer in layers:
            hooks.enter_context(layer.register_forward_hook(of_layer, with_kwargs=True))
        for module in decoder.model.modules():
            if module not in inside and module._parameters and not any(child in inside for child in module.modules()):
                hooks.enter_context(module.register_forward_hook(of_rest))
        seen.result = _run(decoder)
    if missing := [layer for layer in layers if layer not in seen.given]:
        raise _refusal(names[missing[0]], "it does not run in every pass")
    if list(seen.given) != list(layers):
        raise _refusal(names[layers[0]], "the layers do not run in the order of their numbers")
    for module in seen.before.keys() & seen.behind:
        raise _refusal(names[module], "it runs before the layers and behind them")
    width, dtype = decoder.hidden_size, next(decoder.model.parameters()).dtype
    if any(given.shape != (1, len(given[0]), width) or given.dtype != dtype for given in seen.given.values()):
        raise _refusal(names[layers[0]], "what layers hand on is not one row of hidden states for each token")
    return seen


def _absent(
    decoder: HFDecoder, layers: Sequence[nn.Module], own: Sequence[nn.Module], seen: _Pass, stage: Stage
) -> list[nn.Parameter]:
    """The parameters of other stages. Sets ``stage.names``.

    Those that no pass uses belong to the first stage; those of a module around the model, for the loss, to the last.
    """
    embedding, head = (getattr(module, "weight", None) for module in embeddings_of(decoder.model))
    tied = embedding if embedding is head else None
    kept = {id(p) for layer in own for p in layer.parameters()}
    others = {id(p): name for layer in layers if layer not in own for name, p in layer.named_parameters()}
    if shared := kept & others.keys():
        raise _refusal(others[shared.pop()], "layers of several stages have it in common")
    behind = {id(p) for module in seen.behind for p in module.parameters()}
    behind |= set(map(id, decoder.model.parameters())) - set(map(id, causal_model(decoder.model).parameters()))
    ends: set[int] = set()  # not on this stage
    for parameter in decoder.model.parameters():
        key = id(parameter)
        if key in others or ((key in behind or parameter is head) and parameter is not tied):
            is_here = key not in others and stage.is_last
        else:
            is_here = stage.is_first
        if key not in kept and not is_here:
            ends.add(key)
    if tied is not None and stage.count > 1 and (stage.is_first or stage.is_last):
        stage.tied = tied
    named = dict(decoder.model.named_parameters())
    stage.names = frozenset(name for name, parameter in named.items() if id(parameter) not in ends)
    return [parameter for parameter in named.values() if id(parameter) in ends and parameter is not stage.tied]


def _cut(
    decoder: HFDecoder,
    layers: Sequence[nn.Module],
    own: Sequence[nn.Module],
    absent: Sequence[nn.Parameter],
    seen: _Pass,
    stage: Stage,
) -> None:
    first, last = layers.index(own[0]), layers.index(own[-1])
    for layer in layers[:first]:
        layer.forward = partial(hand_on, seen.parts[layer])
    for layer in layers[last + 1 :]:
        layer.forward = _end
    if not stage.is_first:
        for module, made in seen.before.items():
            module.forward = partial(_nothing, made.dtype, tuple(made.shape))
        own[0].register_forward_pre_hook(partial(_receive, stage), with_kwargs=True)
    for parameter in absent:
        parameter.requires_grad = False
        parameter.data = parameter.data.new_empty(0)
    decoder.keep_stage(stage, own)


def _require_equal(
    decoder: HFDecoder, layers: Sequence[nn.Module], own: Sequence[nn.Module], seen: _Pass, stage: Stage
) -> None:
    num_rows = sum(_LENGTHS)
    following = None if stage.is_last else seen.given[layers[layers.index(own[-1]) + 1]][0]
    expected = seen.result if following is None else decoder.own_rows(following, num_rows)
    try:
        out = _run(decoder, None if stage.is_first else decoder.own_rows(seen.given[own[0]][0], num_rows))
    except (RuntimeError, AttributeError, TypeError, IndexError, ValueError) as error:
        raise _refusal("the model", f"a stage fails without the layers of the others ({error})") from error
    if not torch.allclose(out, expected, rtol=1e-4, atol=1e-5 * float(expected.abs().max())):
        raise _refusal("the model", "later layers read something else than what earlier ones hand on")


def _run(decoder: HFDecoder, received: Tensor | None = None) -> Tensor:
    """What the decoder gives for a few documents. ``received``: from the stage before."""
    weight = next(p for p in decoder.model.parameters() if p.numel())
    positions, attention = documents_alone(_LENGTHS, weight)
    tokens = (7 * torch.arange(sum(_LENGTHS), device=weight.device) + 2) % 61
    return decoder(tokens if received is None else received, positions, attention)


def _stream(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The hidden states among a layer's inputs."""
    return args[0] if args else kwargs.get("hidden_states")


def parts_of(result: Any) -> int:
    """How many parts a layer has returned. 0: it was a tensor."""
    return len(result) if isinstance(result, tuple) else 0


def hand_on(parts: int, *args: Any, **kwargs: Any) -> Any:
    """What an absent layer returns that returns so many parts (0: a tensor): the hidden states that it was given."""
    hidden = _stream(args, kwargs)
    return (hidden, *[None] * (parts - 1)) if parts else hidden


def _end(*args: Any, **kwargs: Any) -> Any:
    if running_pass() is None:
        raise _not_a_pass()
    raise StageEnd(_stream(args, kwargs))


def _not_a_pass() -> ConfigError:
    return ConfigError(
        "a model that is cut to a pipeline stage was run outside of a plan, or twice for one micro-batch",
        so="the layers of other stages would be missing",
        fix="run it once in the loss of hdp.plan(batch).forward_backward(loss), and a second time in another such call",
    )


def _nothing(dtype: torch.dtype, shape: tuple[int, ...], *args: Any, **kwargs: Any) -> Tensor:
    """Zeros in place of an embedding's rows, for as many rows as there are."""
    given = [own for own in (*args, *kwargs.values()) if isinstance(own, Tensor)]
    rows = max((own.shape[1] for own in given if own.dim() > 1), default=shape[1])
    return torch.zeros(shape[0], rows, *shape[2:], dtype=dtype, device=given[0].device if given else None)


def _receive(stage: Stage, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    received, stage.received = stage.received, None
    if received is None:
        raise _not_a_pass()
    if args:
        return (received, *args[1:]), kwargs
    return args, {**kwargs, "hidden_states": received}


def _refusal(name: str, what: str) -> ConfigError:
    so = "pipeline stages would not give the results of one process"
    return refusal(name, what, so=so, fix="set pp (parallel.pp) to 1")
