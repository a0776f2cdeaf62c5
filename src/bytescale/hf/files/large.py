"""Models that no device holds as a whole: their first layers stand for all, and values are made a tile at a time.

A *tile* is a run of rows of one parameter. Its initial values depend on the seed, the parameter's name and the tile's
number, not on ranks, so each rank makes the tiles of its part alone. How transformers fills a parameter is seen when
its code initialises the model's shapes. Where that is not one distribution, or one number, for all of the parameter,
the module whose code does it is made as a whole.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from threading import Lock
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.initialization import TORCH_INIT_FUNCTIONS, no_init_weights

from bytescale.common.cut import Cut
from bytescale.common.errors import ConfigError
from bytescale.hf.files.folder import auto_class, causal_model_or_error, config_of, empty_model, ready
from bytescale.hf.model.decoder import HFDecoder

_TILE = 2**18
"""Elements of a tile, unless a row has more."""
_RANDOM = (torch.ops.aten.normal_.default, torch.ops.aten.uniform_.default)
_EVEN = (*_RANDOM, torch.ops.aten.zero_.default, torch.ops.aten.fill_.Scalar)
"""Operators that treat all elements alike."""
_UNSEEN = ("trunc_normal_", "orthogonal_", "sparse_", "dirac_", "eye_")
"""Functions of transformers that do nothing to a tensor without memory, or more than one thing."""
_ONE_AT_A_TIME = Lock()
"""Held while these are replaced, which all threads see."""


class InitialValues:
    """The first values of every parameter of a model, fp32 or wider, of which one tile at a time is made."""

    def __init__(self, content: dict[str, Any], dtype: torch.dtype, seed: int) -> None:
        """Raises ``ConfigError`` where no causal model can be made."""
        self._model: Any = empty_model(content)
        self._wide, self._seed = torch.promote_types(dtype, torch.float32), seed
        self._fills = _Fills(self._model)
        self._tile, self._module = ("", -1, torch.empty(0)), nn.Module()  # that were made last

    def __call__(self, name: str, cut: Cut, inside: slice = slice(None)) -> Tensor:
        """``[n]``: the range ``inside`` of the part of a parameter that ``cut`` says, as it lies in memory.

        Parameters, and ranges of one, are best asked for one after the other.
        """
        name = self._fills.tied.get(name, name)
        if name not in self._fills.even:
            values: Tensor = cut.of(self._whole(name)).flatten()[inside]
            return values
        width, of_tile = math.prod(cut.part_shape[1:]), max(1, _TILE // max(1, math.prod(cut.shape[1:])))
        start, stop, _ = inside.indices(cut.part_shape[0] * width)
        if start >= stop:
            return torch.empty(0, dtype=self._wide)
        rows = torch.arange(cut.shape[0])
        if cut.dim == 0:
            rows = replace(cut, shape=(len(rows),)).of(rows)
        first = start // width
        rows = rows[first : -(-stop // width)]
        part = torch.empty(len(rows), *cut.part_shape[1:], dtype=self._wide)
        for number in (rows // of_tile).unique().tolist():
            shape = min(of_tile, cut.shape[0] - number * of_tile), *cut.shape[1:]
            tile, are_here = self._made(name, number, shape), rows // of_tile == number
            own = tile if cut.dim == 0 else replace(cut, shape=shape).of(tile)
            part[are_here] = own[rows[are_here] - number * of_tile]
        return part.flatten()[start - first * width : stop - first * width]

    def _made(self, name: str, number: int, shape: tuple[int, ...]) -> Tensor:
        if self._tile[:2] != (name, number):
            fill, numbers = self._fills.even[name]
            seed = {"generator": torch.Generator().manual_seed(self._seed_of(f"{name}/{number}"))}
            tile = torch.empty(shape, dtype=self._wide)
            self._tile = name, number, fill(tile, *numbers, **(seed if fill in _RANDOM else {}))
        return self._tile[2]

    def _whole(self, name: str) -> Tensor:
        """A parameter that is filled in another way, from the module whose code does it."""
        module = self._fills.module_of.get(name, self._model)
        if module is self._model:
            raise ConfigError(
                f"transformers gives {name} its first value while the whole model is made",
                so="it would be a random number in a model that is made in parts",
                fix="begin with weights (--init hf:FOLDER)",
            )
        if module is not self._module:
            self._module.to("meta")
            self._module = module.to(self._wide).to_empty(device="cpu")
            with torch.no_grad(), torch.random.fork_rng(devices=[]):
                torch.manual_seed(self._seed_of(next(own for own, m in self._model.named_modules() if m is module)))
                for part in filter({*module.modules()}.__contains__, self._fills.initialisers):
                    self._fills.initialisers[part](part)
        value: Tensor = self._model.get_parameter(name).detach()
        return value

    def _seed_of(self, what: str) -> int:
        digest = hashlib.blake2b(f"{self._seed}/{what}".encode(), digest_size=8).digest()
        return int.from_bytes(digest, "little") >> 1


class _Fills(TorchDispatchMode):
    """How transformers fills the parameters of a model, seen on their shapes. Unties those that are tied.

    Attributes:
        even: by name of a parameter, the operator that fills all of it alike, and its numbers.
        module_of: by name, the module whose code was the last one to write to it.
        initialisers: the code of each module, in the order in which transformers calls it.
        tied: by each other name of a parameter, its first one.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.even: dict[str, tuple[Any, tuple[Any, ...]]] = {}
        self.module_of: dict[str, nn.Module] = {}
        self.initialisers: dict[nn.Module, Callable[[nn.Module], None]] = {}
        self._of_memory = {_memory_of(parameter): name for name, parameter in model.named_parameters()}
        self._uneven, self.tied = set[str](), dict[str, str]()
        for name, parameter in [*model.named_parameters(remove_duplicate=False)]:
            owner, _, own = name.rpartition(".")
            if (first := self._of_memory[_memory_of(parameter)]) != name:  # they are tied once they have values
                self.tied[name] = first
                setattr(model.get_submodule(owner), own, nn.Parameter(torch.empty_like(parameter)))
        self._find_initialisers(model, model._init_weights)
        unseen = patch.dict(TORCH_INIT_FUNCTIONS, dict.fromkeys(_UNSEEN, self._wrote_unevenly))
        with _ONE_AT_A_TIME, unseen, self, torch.no_grad():
            for module, initialise in self.initialisers.items():
                self._module = module
                initialise(module)
        self.even = {name: fill for name, fill in self.even.items() if name not in self._uneven}

    def _find_initialisers(self, module: nn.Module, initialise: Any) -> None:
        """Parts before the whole; a model inside a model has code of its own."""
        initialise = getattr(module, "_init_weights", initialise)
        for child in module.children():
            self._find_initialisers(child, initialise)
        self.initialisers[module] = initialise

    def _wrote_unevenly(self, tensor: Tensor, *_: Any, **__: Any) -> Tensor:
        if name := self._of_memory.get(_memory_of(tensor)):
            self.module_of[name] = self._module
            self._uneven.add(name)
        return tensor

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if args and (written := func._schema.arguments[0].alias_info) is not None and written.is_write:
            if isinstance(args[0], nn.Parameter) and args[0].dim() and func in _EVEN:
                if name := self._of_memory.get(_memory_of(args[0])):
                    self.module_of[name], self.even[name] = self._module, (func, args[1:])
            else:
                self._wrote_unevenly(args[0])
        return func(*args, **(kwargs or {}))


def _memory_of(tensor: Tensor) -> int:
    """The same for views of one tensor, also where it has no memory."""
    return tensor.untyped_storage()._cdata


def hollow_model(content: dict[str, Any], dtype: torch.dtype) -> nn.Module:
    """A model whose parameters have no memory, and whose constants have their values, on the CPU.

    Raises ``ConfigError`` where no causal model can be made.
    """
    with causal_model_or_error(content), no_init_weights(), _parameters_on_meta():
        model = auto_class(content).from_config(config_of(content), dtype=dtype, trust_remote_code=False)
    return ready(model, dtype)


def twin_of(decoder: HFDecoder, content: dict[str, Any], dtype: torch.dtype, *, least: int = 1) -> nn.Module:
    """The first layers of the decoder's model, so many that there is one of each kind, with initial values.

    A kind has the same classes, sizes of parameters and rules of attention. ``least``: layers to have at least.
    """
    model, layers = decoder.model, decoder.layers
    names = {module: name for name, module in model.named_modules()}
    kinds = [decoder.kind_of(layer) for layer in layers]
    lists = {names[layer].rpartition(".")[0] for layer in layers}
    count = max(least, 1 + max(kinds.index(kind) for kind in kinds))
    twin = hollow_model(content, torch.promote_types(dtype, torch.float32))
    if len(lists) == 1 and count < len(layers):
        (place,) = lists
        number = 1 + int(names[layers[count - 1]].rpartition(".")[2])  # there may be layers without any mixer between
        stack: Any = twin.get_submodule(place)
        del stack[number:]
        config: Any = twin.config
        config.get_text_config().num_hidden_layers = number
    values = InitialValues(content, dtype, 0)
    for name, parameter in list(twin.named_parameters()):
        give_memory(parameter, values(name, Cut(shape=tuple(parameter.shape))).view(parameter.shape))
    return twin


def give_memory(parameter: Tensor, value: Tensor) -> None:
    """Put ``value`` in the place of a parameter's shape alone. Whoever holds the parameter still holds it."""
    torch.utils.swap_tensors(parameter, nn.Parameter(value, requires_grad=parameter.requires_grad))


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """While active, parameters of modules that are made lose their memory at once."""
    register = nn.Module.register_parameter

    def on_meta(self: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        register(self, name, parameter)
        if parameter is not None:
            self._parameters[name] = nn.Parameter(parameter.to("meta"), requires_grad=parameter.requires_grad)

    nn.Module.register_parameter = on_meta  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]
