"""Whether a model's recurrent layers can be cut: found by cutting them.

The model runs over a document that is cut at random places, also into an empty fragment and one of a single row. Every
mixer has to give what its own forward gives for the whole. Both are given the same rows: in a deep model, rounding may
send a token to another expert, and later layers would differ.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from bytescale.hf.model.blind import Blind, mode, run_blind
from bytescale.hf.model.refusal import refusal
from bytescale.recurrence import OneProcessCuts

_NUM_ROWS = 23


@dataclass(frozen=True, kw_only=True)
class LayerRecurrence:
    """One mixer: a recurrence with its convolution, or a convolution alone.

    Attributes:
        name: of the module, as in ``named_modules``.
        state_numbers: of what a sequence's tokens leave behind; 0 for a convolution alone.
        decay_numbers: of what a run of tokens does to a state, beside what it adds to it.
        halo_numbers: of the rows before a fragment that convolutions look at.
    """

    name: str
    state_numbers: int
    decay_numbers: int
    halo_numbers: int


def probe_mixers(model: nn.Module, names: dict[nn.Module, str]) -> tuple[LayerRecurrence, ...]:
    """Run a document that is cut at random places, and whole. Raises ``Refusal`` for a mixer that differs."""
    random = torch.Generator().manual_seed(0)
    inner = torch.randint(2, _NUM_ROWS - 1, (4,), generator=random).tolist()
    tokens = torch.randint(2, 50, (_NUM_ROWS,), generator=random)
    blind = Blind(names, cuts=OneProcessCuts(sorted([0, 1, *inner, inner[0], _NUM_ROWS])), compares=True)
    with torch.no_grad(), mode(model, training=True):
        run_blind(model, blind, torch.arange(_NUM_ROWS), tokens)
    for mixer, difference, limit, _ in blind.mixed:
        if not difference <= limit:
            raise refusal(
                f"{names[mixer]} ({type(mixer).__name__})",
                f"cut into fragments it differs from the whole by {difference:.1e} (rounding: {limit:.0e})",
                so="its results would depend on the plan",
                fix="use a model type whose recurrence takes the state before its tokens",
            )
    return tuple(LayerRecurrence(name=names[mixer], **numbers) for mixer, _, _, numbers in blind.mixed)
