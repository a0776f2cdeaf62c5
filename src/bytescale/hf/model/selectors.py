"""Layers that choose the keys of each query: indexers of transformers, run on all earlier tokens of a document.

An indexer keeps the keys that it scores in the cache, and chooses the best by ``topk``. So its own code chooses under
any plan: in place of the cache it is given the index keys of all earlier tokens, wherever they are (``earlier``), in
the order of positions, and in place of the mask what some queries at a time may see. There is no list of model types:
whatever asks its cache for one of ``blind.INDEXED`` is an indexer, and what it chose has to give the layer's own output
(``same_choice``).

**Ties.** Scores are sums of ReLUs, so many are equal, at 0 above all, and ``topk`` of different devices and lengths
takes different ones of them. Here the lowest position wins (``LowestFirst``), under every plan and on every device.

The layer around the indexer hands the latents of its keys and values to the cache before it expands them. They are
what travels (``attend_to_chosen``). Outside of plans the layer chooses as it did before it was attached.

Shape letters: T rows of a micro-batch, L tokens of a path, H heads, I selections, K chosen keys, R numbers of latents.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from torch.overrides import TorchFunctionMode

from bytescale.attention.earlier import EarlierRows, Path
from bytescale.attention.selected import NONE, RowForm, selected_attention
from bytescale.hf.model.blind import INDEXED, MANY, Selection, UnreadMask, choice_of, few_keys
from bytescale.hf.model.counting import LiveBytes
from bytescale.hf.model.head import cache_name
from bytescale.hf.model.interface import KEYWORD, PREFIX, Call, Target, names_in, refusal

_NUMBERS = 2**20
"""Scores of one head that are computed at a time."""


class LowestFirst(TorchFunctionMode):
    """Within it, ``topk`` takes of equal scores those at the lowest places, and returns the largest scores first."""

    def __init__(self, seen: list[Tensor] | None = None) -> None:
        """``seen`` gets what ``topk`` is given."""
        super().__init__()
        self._seen = seen

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in (torch.topk, Tensor.topk):
            return func(*args, **(kwargs or {}))
        if self._seen is not None:
            self._seen.append(args[0])
        return _topk(*args, **(kwargs or {}))


def _topk(input: Tensor, k: int, dim: int = -1, largest: bool = True, sorted: bool = True) -> Any:
    values, places = input.sort(dim=dim, descending=largest, stable=True)
    k = min(k, few_keys.get())
    return torch.return_types.topk((values.narrow(dim, 0, k), places.narrow(dim, 0, k)))


class Selectors:
    """The indexers of an attached model and the layers around them. ``detach`` undoes it.

    A choice has no gradient, so that the indexers' parameters are frozen: weight decay would change them otherwise.
    With ``learn`` they have a loss of their own (``indexer_loss``), and stay as they are.
    """

    def __init__(self, model: nn.Module, *, learn: bool = False) -> None:
        self._indexers = [module for module in model.modules() if names_in(module) & INDEXED]
        classes = {type(one) for one in model.modules() if any(part in self._indexers for part in one.children())}
        own = {id(parameter) for indexer in self._indexers for parameter in indexer.parameters()}
        own = set() if learn else own
        self.frozen = {name: p for name, p in model.named_parameters() if p.requires_grad and id(p) in own}
        """What was trained until now."""
        for parameter in self.frozen.values():
            parameter.requires_grad = False
        self._hooks = []
        for layer in (one for one in model.modules() if type(one) in classes):
            around = _Around(layer)
            self._hooks.append(layer.register_forward_pre_hook(around.enter, with_kwargs=True))
            self._hooks.append(layer.register_forward_hook(around.leave, always_call=True))
        for indexer in self._indexers:
            indexer.forward = MethodType(_forward, indexer)

    def detach(self) -> None:
        for hook in self._hooks:
            hook.remove()
        for indexer in self._indexers:
            vars(indexer).pop("forward", None)
        for parameter in self.frozen.values():
            parameter.requires_grad = True


class _Around:
    """Around a layer: outside of plans it has its own attention, and in a plan ``LayerRows`` in place of its cache."""

    def __init__(self, layer: nn.Module) -> None:
        self._config: Any = layer.config
        self._cache = cache_name(layer)
        self._ours = ""

    def enter(self, layer: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        target: Target | None = kwargs.get(KEYWORD)
        if target is None:
            self._ours = self._config._attn_implementation
            self._config._attn_implementation_internal = self._ours.removeprefix(PREFIX)
            return args, kwargs
        target.layer_rows = target.layer_rows or {}
        rows = target.layer_rows[layer] = LayerRows(target, layer, kwargs.get(self._cache))
        mask = UnreadMask(kwargs.get("attention_mask"))
        return args, {**kwargs, self._cache: rows, "attention_mask": mask}

    def leave(self, *_: Any) -> None:
        if self._ours:
            self._config._attn_implementation_internal, self._ours = self._ours, ""


class LayerRows:
    """In place of a layer's cache: takes its latents, and hands out the index keys of all earlier tokens.

    ``given``: the cache that the model was given, which is told of both (``loop.prefill``); None: there is none.
    """

    def __init__(self, target: Target, layer: nn.Module, given: Any) -> None:
        self.target, self.layer, self.given = target, layer, given
        self.latents: tuple[Tensor, Tensor] | None = None
        """Of which the layer makes keys and values; None: it has none."""
        self.index_keys: Tensor | None = None
        """Handed out from here on; None: those that come are taken."""
        self.indexer: Indexer | None = None
        """The layer's own; None: it takes an earlier layer's choice."""

    @property
    def layers(self) -> dict[int, LayerRows]:
        return defaultdict(lambda: self)

    def update(self, first: Tensor, second: Tensor, layer: int, **_: Any) -> tuple[Tensor, Tensor]:
        self.latents = (first, second) if hasattr(self.layer, "expand_kv") else None
        if self.given is not None:
            self.given.update(first, second, layer)
        return first, second

    def update_indexer(self, keys: Tensor, *_: Any) -> Tensor:
        if self.index_keys is not None:
            return self.index_keys
        if self.given is not None:
            self.given.update_indexer(keys, self.layer.layer_idx)
        raise _IndexKeys(keys)

    update_index = update_indexer


class _IndexKeys(Exception):
    """Carries index keys ``[..., T, D]`` out of an indexer."""

    def __init__(self, keys: Tensor) -> None:
        super().__init__()
        self.keys = keys


def _forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    plain = partial(type(self).forward, self)
    cache = next((one for one in (*args, *kwargs.values()) if isinstance(one, LayerRows)), None)
    if cache is None:
        return plain(*args, **kwargs)
    cache.indexer = Indexer(self, plain, args, kwargs, cache)
    return cache.target.select(cache.indexer)


@dataclass
class Indexer:
    """One call of an indexer. What it is given has a row for each of ``num_rows`` queries."""

    module: nn.Module
    forward: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    cache: LayerRows

    def keys(self) -> Tensor:
        """The index keys of the own rows, ``[..., T, D]``."""
        self.cache.index_keys = None
        try:
            self._run(slice(None), torch.empty(0))
        except _IndexKeys as taken:
            return taken.keys
        raise refusal(
            type(self.module).__name__,
            "it keeps no keys in its cache in every pass",
            so="it would choose among the tokens of one rank",
            fix="use a model whose indexer keeps the keys of all tokens",
        )

    def choose_alone(self) -> Tensor:
        """The same where every row is a document of its own, as in the probe."""
        return torch.arange(self.num_rows, dtype=torch.int32, device=self._rows.device)[:, None, None]

    def choose(self, earlier: EarlierRows, all_keys: Tensor, window: int | None) -> Tensor:
        """``[T, I, K]`` places among the rows of ``all_keys [T + n, D]`` or ``NONE``, int32.

        ``window``: how many keys up to its own a query may see.
        """
        found = [self._of_path(path, all_keys, window) for path in earlier.paths]
        parts = [part for parts in found for part in parts]
        most = max((part.shape[2] for part in parts), default=1)
        if not parts:
            return torch.full((0, 1, 1), NONE, dtype=torch.int32, device=all_keys.device)
        return torch.cat([pad(part, (0, most - part.shape[2]), value=NONE) for part in parts])

    def _of_path(self, path: Path, all_keys: Tensor, window: int | None) -> Iterable[Tensor]:
        rows, device = path.on(all_keys.device), all_keys.device
        keys, places = all_keys[rows], torch.arange(len(all_keys), dtype=torch.int32, device=device)[rows]
        for some, visible in parts_of(path, window, device):
            num_keys = visible.shape[1]
            chosen = self._chosen(some, keys[:num_keys], visible[None])
            held = chosen.clamp(0, num_keys - 1)
            is_seen = visible.gather(1, held.flatten(1)).view_as(held) & (held == chosen)
            yield torch.where(is_seen, places[held], NONE)

    def scores(self, some: slice, keys: Tensor, visible: Tensor) -> Tensor | None:
        """``[t, L]`` of ``some`` queries, of which the best are chosen; None: these are no scores of tokens."""
        seen: list[Tensor] = []
        self._chosen(some, keys, visible[None], seen)
        return seen[0][0] if len(seen) == 1 and seen[0].shape == (1, *visible.shape) else None

    def _chosen(self, some: slice, keys: Tensor, visible: Tensor, seen: list[Tensor] | None = None) -> Tensor:
        """``[t, I, K]`` positions of ``some`` queries, int64; a few of them may not be visible."""
        leading = (1, 1) if "update_index" in names_in(self.module) else (1,)
        self.cache.index_keys = keys.view(*leading, *keys.shape)
        with LowestFirst(seen):
            chosen = self._run(some, visible)
        positions: Tensor = chosen.transpose(1, 2)[0] if chosen.dim() == 4 else chosen[0][:, None]
        block: int | None = getattr(self.module, "block_size", None)
        if block is None:
            return positions.long()
        tokens = positions.long()[..., None] * block + torch.arange(block, device=keys.device)
        return torch.where(positions[..., None] < 0, NONE, tokens).flatten(2)

    @property
    def _rows(self) -> Tensor:
        """Hidden states ``[1, T, C]``, which come first."""
        return next(one for one in (*self.args, *self.kwargs.values()) if isinstance(one, Tensor))

    @property
    def num_rows(self) -> int:
        return self._rows.shape[1]

    def _run(self, some: slice, visible: Tensor) -> Any:
        given = partial(_given, some, self.num_rows, visible)
        return self.forward(*map(given, self.args), **{name: given(one) for name, one in self.kwargs.items()})

    def selection(self) -> Selection:
        """What it does, from its shapes: it chooses for one query of very many tokens."""
        keys = self.keys()
        of_many = []
        for many in (MANY // 2, MANY):
            visible = torch.ones(1, 1, many, dtype=torch.bool, device=keys.device)
            with LiveBytes() as counter:
                chosen = self._chosen(slice(0, 1), keys.flatten(0, -2)[:1].expand(many, -1), visible)
            of_many.append((chosen.shape[2], counter.products))
        (_, less), (num_keys, more) = of_many
        is_seen = self.scores(slice(0, 1), keys.flatten(0, -2)[:1].expand(many, -1), visible[0]) is not None
        flops = (more - less) / (MANY // 2)
        return Selection(num_keys=num_keys, index_width=keys.shape[-1], index_flops=flops, has_scores=is_seen)


def parts_of(path: Path, window: int | None, device: torch.device, share: int = 1) -> Iterator[tuple[slice, Tensor]]:
    """Some queries of a path at a time: which, and whether they may see the first keys of the path, ``[t, L]``.

    ``share``: a part of the usual number.
    """
    step = max(1, _NUMBERS // share // max(1, path.num_before + path.rows.stop - path.rows.start))
    for first in range(path.rows.start, path.rows.stop, step):
        some = slice(first, min(first + step, path.rows.stop))
        own = torch.arange(some.start, some.stop, device=device)[:, None] - path.rows.start + path.num_before
        at = torch.arange(path.num_before + some.stop - path.rows.start, device=device)
        yield some, at <= own if window is None else (at <= own) & (at > own - window)


def _given(some: slice, num_rows: int, visible: Tensor, one: Any) -> Any:
    """An argument for ``some`` of ``num_rows`` queries."""
    if isinstance(one, UnreadMask):
        return visible
    if isinstance(one, tuple):
        return tuple(_given(some, num_rows, visible, part) for part in one)
    return one[:, some] if isinstance(one, Tensor) and one.dim() > 1 and one.shape[1] == num_rows else one


def attend_to_chosen(
    call: Call, qkv: tuple[Tensor, Tensor, Tensor], scale: float, latents: tuple[Tensor, Tensor] | None,
    earlier: EarlierRows, lesson: Any = None,
) -> Tensor:  # fmt: skip
    """``q [T, H, D]``, ``k [T, G, D]``, ``v [T, G, Dv]`` -> ``[T, H, Dv]``. ``lesson``: ``indexer_loss.Lesson``."""
    chosen, sinks = choice_of(call), call.options.get("s_aux")
    assert chosen is not None, "it is asked for"
    queries, rows, form, values = as_rows(call, *qkv, scale, latents)
    if lesson is not None:  # its backward comes after that of attention
        queries = lesson.carried_by(queries, chosen)
    out = selected_attention(queries, rows, chosen, form, earlier, sinks, None if lesson is None else lesson.heard)
    return out if values is None else torch.einsum("thr,hrd->thd", out, values)


def as_rows(
    call: Call, q: Tensor, k: Tensor, v: Tensor, scale: float, latents: tuple[Tensor, Tensor] | None
) -> tuple[Tensor, Tensor, RowForm, Tensor | None]:
    """Queries ``[T, H, D]``, rows ``[T, G, W]`` of what is attended to, and what takes results ``[H, R, Dv]`` to heads.

    Of latents the layer expands none.
    """
    if latents is None:
        return q, torch.cat([k, v], -1), RowForm(slice(0, k.shape[2]), slice(k.shape[2], None), scale), None
    # Keys and values are linear in the latents: what the layer makes of unit vectors takes queries to latents.
    first, second = (part.reshape(-1, part.shape[-1]) for part in latents)
    units = torch.eye(first.shape[1] + second.shape[1], dtype=first.dtype, device=first.device)[None, None]
    expand_kv: Any = call.module.expand_kv
    keys, values = expand_kv(units[..., : first.shape[1]], units[..., first.shape[1] :])
    queries = torch.einsum("thd,hrd->thr", q, keys[0].to(q.dtype))
    rows = torch.cat([first, second], -1)[: len(q), None].to(q.dtype)
    form = RowForm(slice(0, rows.shape[2]), slice(0, first.shape[1]), scale)
    return queries, rows, form, values[0, :, : first.shape[1]].to(q.dtype)
