"""Passes of the probe: attention sees nothing and every row is a document, or recurrences are cut at random places."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from bytescale.common.errors import BytescaleError
from bytescale.hf.model.interface import KEYWORD, Call, Target, Unusable, refusal, while_set

if TYPE_CHECKING:
    from bytescale.recurrence.cuts import Cuts, OneProcessCuts

NUM_ROWS = 8
_CUT_ROWS = 23
INDEXED = frozenset(("update_indexer", "update_index"))
"""Methods of caches by which indexers ask for the keys of all earlier tokens (``selectors``)."""
CHOSEN = ("indices", "block_indices")
"""Keywords by which layers hand what an indexer chose to their attention."""
MANY = 2**14
"""More tokens than any indexer chooses."""
few_keys: ContextVar[int] = ContextVar("bytescale_few_keys", default=MANY)
"""The most keys that are chosen: fewer where a check has a few tokens."""


@dataclass
class Blind(Target):
    """A ``Target`` whose attention sees nothing, and that keeps what it was asked."""

    names: dict[nn.Module, str]
    needs_positions = False
    num_rows = NUM_ROWS
    calls: list[Call] = field(default_factory=list)
    cuts: OneProcessCuts | None = None
    """Where mixers are cut; None: at every row."""
    compares: bool = False
    """Whether mixers run a second time, as in one process."""
    selections: dict[nn.Module, Selection] | None = None
    """By layer with an indexer, how keys are chosen; None: it is not looked at."""
    mixed: list[tuple[nn.Module, float, float, list[int]]] = field(default_factory=list)
    """Mixers that were called, how far both runs are apart and how far they may be, and the fragments' numbers."""

    def attend(self, call: Call) -> Tensor:
        self.calls.append(replace(call, mask=call.mask.original) if isinstance(call.mask, UnreadMask) else call)
        batch, heads, rows, _ = call.query.shape
        return call.value.new_zeros(batch, rows, heads, call.value.shape[-1])

    def mix(self, mixer: nn.Module, plain: Callable[[], Any], cut: Callable[[Cuts], Any]) -> Any:
        from bytescale.recurrence.cuts import OneProcessCuts  # few models have mixers

        cuts = self.cuts or OneProcessCuts([0], [slice(row, row + 1) for row in range(NUM_ROWS)])
        cuts.numbers = [0, 0]
        result = cut(cuts)
        out, difference, limit = result[0] if isinstance(result, tuple) else result, 0.0, 0.0
        if self.compares:
            result = plain()
            whole = result[0] if isinstance(result, tuple) else result
            difference = float((out - whole).abs().max() / whole.abs().max())
            limit = max(1e-4, 4 * torch.finfo(whole.dtype).eps)
        self.mixed.append((mixer, difference, limit, cuts.numbers))
        return result

    def select(self, indexer: Any) -> Tensor:
        if self.selections is not None:
            self.selections[indexer.cache.layer] = indexer.selection()
        return indexer.choose_alone()

    def mask(self, mask_function: Callable[..., Any]) -> MaskFunction:
        return MaskFunction(mask_function)


class UnreadMask(Unusable):
    """The mask of a layer that only hands it to its indexer (``selectors``): it may be cut, and not be looked at."""

    def __init__(self, original: Any) -> None:
        super().__init__(TypeError("it computes with its attention mask"))
        self.original = original

    def __getitem__(self, key: Any) -> UnreadMask:
        return self


class MaskFunction(Unusable):
    """Stands for a mask in the probe: which keys a query may see, at any place. A plan makes no mask."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__(TypeError("it computes with its attention mask"))
        self.function = function

    def visible(self, query: int) -> Tensor:
        """``[query + 33]`` bool: which of the keys up to some behind the query it sees."""
        zero, keys = torch.zeros((), dtype=torch.int64), torch.arange(query + 33)
        try:
            seen = self.function(zero, zero, torch.full_like(keys, query), keys)
        except IndexError:  # it looks something up for every row of the pass: blocks of an image, for example
            seen = True
        return torch.as_tensor(seen).expand(len(keys)).to("cpu", torch.bool)


def run_blind(model: nn.Module, blind: Blind, position_ids: Tensor | None, tokens: Tensor | None = None) -> Any:
    """One pass over ``tokens [T]``; None: all alike. Raises ``ConfigError`` with the innermost part that fails."""
    device = next(model.parameters()).device
    tokens = torch.ones(1, NUM_ROWS, dtype=torch.int64, device=device) if tokens is None else tokens[None].to(device)
    if position_ids is not None:
        position_ids = position_ids.to(device).view(1, -1)
    try:
        return model(input_ids=tokens, position_ids=position_ids, use_cache=False, **{KEYWORD: blind})
    except BytescaleError:
        raise
    except Exception as error:  # whatever a model raises that is not made for our attention
        frames = (frame.f_locals.get("self") for frame, _ in traceback.walk_tb(error.__traceback__))
        inside = [blind.names[part] for part in frames if isinstance(part, nn.Module) and part in blind.names]
        raise refusal(
            inside[-1] if inside else type(model).__name__,
            f"it fails in a pass on our attention ({' '.join(str(error).split()) or type(error).__name__})",
            so="it needs what plans do not have",
            fix="use a decoder whose layers call causal self-attention and leave its mask alone",
        ) from error


def alike(first: Tensor, second: Tensor) -> bool:
    return torch.allclose(first.float(), second.float(), rtol=2e-2, atol=2e-2 * float(first.abs().max()))


@dataclass(frozen=True)
class LayerRecurrence:
    """One mixer: a recurrence with its convolution, or a convolution alone, which has no state.

    Numbers are of a state, and of what a run of tokens does to it beside what it adds.
    """

    name: str
    state_numbers: int
    decay_numbers: int


@dataclass(frozen=True)
class Selection:
    """How one layer's keys are chosen.

    Attributes:
        num_keys: the most that are chosen for a query.
        index_width: numbers of a token's index key, which travels; 0: the choice is an earlier layer's.
        index_flops: operations for each query and earlier token.
        row_width: numbers of a token that travel to be attended to: latents, or keys and values.
        pair_numbers: numbers that a query's heads and a chosen key are multiplied with.
        has_scores: whether tokens are chosen by one ``topk`` of their scores.
    """

    num_keys: int
    index_width: int = 0
    index_flops: float = 0.0
    row_width: int = 0
    pair_numbers: int = 0
    has_scores: bool = False


def choice_of(call: Call) -> Tensor | None:
    """The keys that an indexer has chosen for the queries of a call, ``[T, I, K]``; None: there is no indexer."""
    return next((call.options[name] for name in CHOSEN if call.options.get(name) is not None), None)


def probe_mixers(model: nn.Module, names: dict[nn.Module, str]) -> tuple[LayerRecurrence, ...]:
    """Run a document that is cut at random places, also into an empty fragment, and whole.

    Raises ``ConfigError`` for a mixer that differs. Its cut and its own forward are given the same rows: in a deep
    model, rounding may send a token to another expert, and later layers would differ.
    """
    from bytescale.recurrence.cuts import OneProcessCuts

    random = torch.Generator().manual_seed(0)
    inner = torch.randint(2, _CUT_ROWS - 1, (4,), generator=random).tolist()
    tokens = torch.randint(2, 50, (_CUT_ROWS,), generator=random)
    blind = Blind(
        names,
        cuts=OneProcessCuts(sorted([0, 1, *inner, inner[0], _CUT_ROWS])),
        compares=not next(model.parameters()).is_meta,
    )
    with torch.no_grad(), while_set(model.modules(), "training", True):
        run_blind(model, blind, torch.arange(_CUT_ROWS), tokens)
    for mixer, difference, limit, _ in blind.mixed:
        if not difference <= limit:
            raise refusal(
                f"{names[mixer]} ({type(mixer).__name__})",
                f"cut into fragments it differs from the whole by {difference:.1e} (rounding: {limit:.0e})",
                so="its results would depend on the plan",
                fix="use a model type whose recurrence takes the state before its tokens",
            )
    return tuple(LayerRecurrence(names[mixer], *numbers) for mixer, _, _, numbers in blind.mixed)
