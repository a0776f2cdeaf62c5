"""All parameters of a rank in one flat buffer and all gradients in another, so that sharding is a matter of slicing.

Weights that decay (matrices) come first, the rest (norms) behind them; each starts at a multiple of 64 elements, which
keeps matrix products on aligned memory. The layout depends on the model alone, never on the number of ranks: only the
padding at the end of the buffer does. Gradients are summed over micro-batches in at least fp32.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from bytescale.common.cut import Cut

ALIGNMENT = 64


@dataclass(frozen=True)
class Entry:
    """Where one parameter, or this rank's part of it, lies in the flat buffers, in elements."""

    name: str
    cut: Cut
    start: int

    @property
    def shape(self) -> tuple[int, ...]:
        """Of what is here."""
        return self.cut.part_shape

    @property
    def stop(self) -> int:
        return self.start + int(torch.Size(self.shape).numel())


class FlatParameters:
    """Moves parameters into flat memory, in place, and gathers their gradients beside it.

    Attributes:
        values: ``[padded]`` in the parameters' dtype; every parameter is a view of it.
        gradients: ``[padded]`` in fp32 or wider; sums of all backwards since ``zero_gradients``.
        num_decayed: elements of the leading part that weight decay applies to.
    """

    def __init__(
        self,
        named_parameters: Iterable[tuple[str, nn.Parameter]],
        num_shards: int,
        cuts: Mapping[str, Cut] | None = None,
    ) -> None:
        """``cuts``: which part of the whole parameter each of them is, by name; without: they are whole."""
        parameters = [(name, p) for name, p in named_parameters if p.requires_grad]
        if not parameters:
            raise ValueError("the model has no parameter that requires a gradient: there is nothing to train")
        dtypes = {p.dtype for _, p in parameters}
        if len(dtypes) > 1:
            raise ValueError(f"parameters have several dtypes, {sorted(map(str, dtypes))}: cast the model to one")
        decayed = [(name, p) for name, p in parameters if p.dim() >= 2]
        others = [(name, p) for name, p in parameters if p.dim() < 2]
        self.entries: list[Entry] = []
        self.num_decayed = 0
        stop = 0
        for name, parameter in decayed + others:
            cut = Cut(shape=tuple(parameter.shape)) if cuts is None else cuts[name]
            self.entries.append(Entry(name, cut, stop))
            stop += -(-parameter.numel() // ALIGNMENT) * ALIGNMENT
            if parameter.dim() >= 2:
                self.num_decayed = stop
        self.shard_size = -(-stop // num_shards)

        (dtype,) = dtypes
        device = parameters[0][1].device
        padded = self.shard_size * num_shards
        self.values = torch.zeros(padded, dtype=dtype, device=device)
        self.gradients = torch.zeros(padded, dtype=_master_dtype(dtype), device=device)
        for (_, parameter), entry in zip(decayed + others, self.entries, strict=True):
            self._adopt(parameter, entry)

    @property
    def master_dtype(self) -> torch.dtype:
        """Dtype of gradients sums, master weights and optimizer states."""
        return self.gradients.dtype

    def shard(self, buffer: Tensor, index: int) -> Tensor:
        """Shard ``index`` of a ``[padded]`` buffer, a view ``[shard_size]``."""
        return buffer[index * self.shard_size : (index + 1) * self.shard_size]

    def zero_gradients(self) -> None:
        """Forget the gradients of the step before."""
        self.gradients.zero_()

    def value_of(self, entry: Entry) -> Tensor:
        """A parameter's view of ``values``."""
        return self.values[entry.start : entry.stop].view(entry.shape)

    def gradient_of(self, entry: Entry) -> Tensor:
        """A parameter's view of ``gradients``."""
        return self.gradients[entry.start : entry.stop].view(entry.shape)

    def _adopt(self, parameter: nn.Parameter, entry: Entry) -> None:
        value, gradient = self.value_of(entry), self.gradient_of(entry)
        with torch.no_grad():
            value.copy_(parameter)
        parameter.data = value
        if gradient.dtype == parameter.dtype:
            parameter.grad = gradient  # autograd adds in place
        else:
            parameter.register_post_accumulate_grad_hook(_move_gradient_to(gradient))


def _move_gradient_to(total: Tensor) -> Callable[[Tensor], None]:
    """A hook that adds a low-precision gradient to its wide sum and frees it."""

    def hook(parameter: Tensor) -> None:
        assert parameter.grad is not None, "the hook runs right after autograd has accumulated a gradient"
        total.add_(parameter.grad)
        parameter.grad = None

    return hook


def _master_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32
