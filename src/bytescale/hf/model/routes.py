"""Which experts routers choose for a token: recorded, and played back in place of their own choice.

Engines for rollouts compute with other kernels, so their routers choose other experts for a few tokens in a hundred,
and log-probabilities of such tokens have little to do with each other. Played back, an expert's weight comes from the
CURRENT logits at the chosen experts, by the router's own code, and has its gradient ("rollout routing replay",
arXiv:2510.11370): ``torch.topk``, by which routers of transformers choose, gives the wanted places.

Shape letters: T rows of a micro-batch, L routers in the model's order, K experts of a token, E experts.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from bytescale.common.errors import ConfigError, DataError
from bytescale.hf.model.interface import refusal, running_pass
from bytescale.hf.model.probe import Router

OWN = -1
"""Where a row has it, routers choose themselves: the token's routes are not known."""
_LOOKED_AT = 64
_INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


class Choices:
    """Of one micro-batch: what routers are to choose, and what they have chosen.

    Attributes:
        given: ``[T, L, K]`` on the model's device; None: routers choose themselves.
        seen: by a router's place, ``[rows, K]`` of its last forward.
    """

    def __init__(self, num_rows: int, given: Tensor | None = None) -> None:
        self.num_rows, self.given = num_rows, given
        self.seen: dict[int, Tensor] = {}


class Routers:
    """The routers of an attached model. They look at the ``Choices`` of the pass that runs, also when it runs again."""

    def __init__(self, model: nn.Module, routers: Sequence[Router], num_layers: int) -> None:
        """``num_layers``: of the model, also those without a router. Raises ``ConfigError`` for a model without any."""
        if not routers:
            raise refusal(
                "the model",
                "it has no routers that choose a token's experts by torch.topk",
                so="there is nothing to record or to play back",
                fix="leave routes out",
            )
        self.names = tuple(router.name for router in routers)
        self.num_experts, self.experts_per_token = routers[0].num_experts, routers[0].experts_per_token
        self._num_layers = num_layers
        self._layers = [int(number[1]) for name in self.names if (number := re.search(r"\.(\d+)(\.|$)", name))]
        self._hooks = []
        for place, router in enumerate(routers):
            module, open_modes = model.get_submodule(router.name), list[_Choice]()
            self._hooks += [
                module.register_forward_pre_hook(partial(_begin, place, router, open_modes)),
                module.register_forward_hook(partial(_end, open_modes), always_call=True),
            ]

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()

    def of_field(self, field: str, given: Tensor | None, here: Tensor | None) -> Tensor:
        """``[T, L, K]`` from a field ``given`` by the caller, which is ``here`` on the model's device.

        Of ``[T, all layers, K]``, as engines for rollouts have it, those of the layers with routers. Raises
        ``DataError`` for what cannot be this model's.
        """
        shape = [] if given is None else list(given.shape[1:])
        if here is not None and given is not None and shape[:1] == [self._num_layers] != [len(self.names)]:
            given, here = given[:, self._layers], here[:, self._layers]
        self._require_routes(field, given)
        assert here is not None, "it is there"
        return here

    def _require_routes(self, field: str, routes: Tensor | None) -> None:
        wanted = [len(self.names), self.experts_per_token]
        what = "" if routes is not None else "is not there, or does not have numbers"
        if routes is not None and (list(routes.shape[1:]) != wanted or routes.dtype not in _INTEGERS):
            what = f"has {list(routes.shape[1:])} {routes.dtype} a token in place of {wanted} whole numbers"
        elif routes is not None and len(routes):
            low, high = int(routes.min()), int(routes.max())
            some = routes[torch.linspace(0, len(routes) - 1, min(len(routes), _LOOKED_AT)).long()].sort(-1).values
            if low < OWN or high >= self.num_experts:
                what = f"has numbers from {low} to {high}, and there are {self.num_experts} experts"
            elif bool(((some[..., 1:] == some[..., :-1]) & (some[..., 1:] != OWN)).any()):
                what = "has an expert twice for a token"
        if what:
            raise DataError(
                f"field {field!r} {what}",
                so="tokens would go to experts that no router has chosen for them",
                fix=f"give each token's experts for the routers {self.names[0]} to {self.names[-1]} (hdp.routers names "
                f"all, in order), and {OWN} where they are not known",
            )

    def recorded(self, choices: Choices) -> Tensor:
        """``[T, L, K]`` of the last forward, in the smallest dtype. Raises ``ConfigError`` if there was none."""
        if len(choices.seen) < len(self.names):
            raise ConfigError(
                "micro.routes() was called before a forward of this micro-batch that recorded them",
                fix="call micro.record_routes() first, then run the model",
            )
        return torch.stack([choices.seen[place][: choices.num_rows] for place in range(len(self.names))], 1)


class _Choice(TorchFunctionMode):
    """Takes the place of one router's ``topk`` over all experts."""

    def __init__(self, choices: Choices, place: int, router: Router, *, is_recorded: bool) -> None:
        super().__init__()
        self.choices, self.place, self.router, self.is_recorded = choices, place, router, is_recorded

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func not in (torch.topk, Tensor.topk):
            return result
        scores, chosen = args[0], result.indices
        if (scores.shape[-1], chosen.shape[-1]) != (self.router.num_experts, self.router.experts_per_token):
            return result  # of groups of experts, before
        if self.choices.given is not None:
            chosen = self._played(chosen)
            result = torch.return_types.topk((scores.gather(-1, chosen), chosen))
        if self.is_recorded:
            dtype = torch.uint8 if self.router.num_experts <= 256 else torch.int16
            self.choices.seen[self.place] = chosen.reshape(-1, chosen.shape[-1]).to(dtype)
        return result

    def _played(self, own: Tensor) -> Tensor:
        given, rows = self.choices.given, own.reshape(-1, own.shape[-1])
        assert given is not None, "it is asked for"
        wanted = given[:, self.place].to(rows.dtype)
        known = (wanted != OWN).all(-1, keepdim=True)
        first = torch.where(known, wanted, rows[: len(wanted)])
        return torch.cat([first, rows[len(wanted) :]]).view_as(own)  # behind them are rows that pad


def _begin(place: int, router: Router, open_modes: list[_Choice], module: nn.Module, args: Any) -> None:
    target = running_pass()
    if target is None or target.choices is None:
        return
    mode = _Choice(target.choices, place, router, is_recorded=target.is_in_forward)
    mode.__enter__()
    open_modes.append(mode)


def _end(open_modes: list[_Choice], *_: Any) -> None:
    if open_modes:
        open_modes.pop().__exit__(None, None, None)
