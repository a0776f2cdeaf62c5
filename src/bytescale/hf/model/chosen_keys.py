"""Which keys indexers choose for a token: recorded, and played back in place of their own choice.

A key is named by its position in the document, so that a choice holds under every plan. Indexers of two engines, or of
two dtypes, choose other keys for some tokens, and then log-probabilities of these tokens differ.

Shape letters: T rows of a micro-batch, L indexers in the model's order, I selections of an indexer (one for all heads,
or one for each key/value head), K keys, n rows that come from other ranks.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from bytescale.attention.copies import to_device
from bytescale.attention.earlier import EarlierRows
from bytescale.attention.selected import NONE
from bytescale.common.errors import ConfigError, DataError
from bytescale.hf.model.interface import refusal

_INTEGERS = (torch.int16, torch.int32, torch.int64)


class KeyChoices:
    """Of one micro-batch: which keys indexers are to choose, and which they have chosen."""

    def __init__(self, names: Sequence[str], num_keys: int) -> None:
        """``names``: of the indexers. ``num_keys``: at most so many are chosen for a query."""
        if not names:
            raise refusal(
                "the model",
                "it has no layers that choose keys",
                so="there is nothing to record or to play back",
                fix="leave chosen keys out",
            )
        self.names, self.num_keys = names, num_keys
        self._given: Tensor | None = None
        self._seen: dict[str, Tensor] = {}

    def play(self, field: str, given: Tensor | None, positions: Tensor) -> None:
        """Play back ``given [T, L, I, K]`` for rows at ``positions [T]``. Raises ``DataError`` for other numbers."""
        what = _what_is_wrong(given, len(self.names), self.num_keys, positions)
        if what:
            raise DataError(
                f"field {field!r} {what}",
                so="queries would look at keys that no indexer has chosen for them",
                fix="give positions in the document, [length, indexers, selections, keys], for the indexers "
                f"{self.names[0]} to {self.names[-1]} (hdp.indexers), and {NONE} where there is no key; a token that "
                "has none chooses by itself",
            )
        assert given is not None, "it is there"
        self._given = given

    def of_pass(self, name: str, own: Tensor, earlier: EarlierRows) -> Tensor:
        """What an indexer is to choose, which by itself has chosen ``own [T, I, K]``: places among all rows."""
        if self._given is not None:
            wanted = to_device(self._given[:, self.names.index(name)], own.device).to(own.dtype)
            known = (wanted != NONE).flatten(1).any(1)[:, None, None]
            most = max(own.shape[2], wanted.shape[2])
            wanted, own = (pad(part, (0, most - part.shape[2]), value=NONE) for part in (wanted, own))
            own = torch.where(known, _looked_up(wanted, earlier, to_places=True), own)
        self._seen[name] = _looked_up(own, earlier, to_places=False)
        return own

    def recorded(self, rows: slice) -> Tensor:
        """``[T, L, I, K]`` positions, int32, of the last forward. Raises ``ConfigError`` if there was none."""
        if len(self._seen) < len(self.names):
            raise ConfigError(
                "micro.chosen_keys() was called before a forward of this micro-batch that recorded them",
                fix="call micro.record_chosen_keys() first, then run the model",
            )
        every = [self._seen[name][rows] for name in self.names]
        return torch.stack([pad(one, (0, self.num_keys - one.shape[2]), value=NONE) for one in every], 1)


def _looked_up(chosen: Tensor, earlier: EarlierRows, *, to_places: bool) -> Tensor:
    """Positions in documents as places among the rows of ``EarlierRows.fetch``, or the reverse."""
    found = chosen.clone()
    for path in earlier.paths:
        own, rows = chosen[path.rows], path.on(chosen.device)
        places = torch.arange(earlier.num_places, dtype=torch.int32, device=chosen.device)[rows]
        table = places
        if not to_places:
            table = places.new_full((earlier.num_places,), NONE)
            table[rows] = torch.arange(len(places), dtype=torch.int32, device=chosen.device)
        found[path.rows] = torch.where(own == NONE, NONE, table[own.clamp(min=0).long()])
    return found


def _what_is_wrong(given: Tensor | None, num_indexers: int, num_keys: int, positions: Tensor) -> str:
    if given is None:
        return "is not there, or does not have numbers"
    if given.dim() != 4 or given.dtype not in _INTEGERS or given.shape[1] != num_indexers:
        return f"has {list(given.shape[1:])} {given.dtype} a token in place of {num_indexers} x selections x keys"
    if given.shape[3] > num_keys:
        return f"has {given.shape[3]} keys a token, and the model chooses at most {num_keys}"
    if bool(((given < NONE) | (given > positions[:, None, None, None])).any()):
        return "has positions below 0, or behind the token itself"
    ordered = given.sort(-1).values
    if bool(((ordered[..., 1:] == ordered[..., :-1]) & (ordered[..., 1:] != NONE)).any()):
        return "has a key twice for a token"
    return ""
