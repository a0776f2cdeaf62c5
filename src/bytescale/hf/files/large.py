"""Models that no device holds as a whole: their first layers stand for all, and values are made a block at a time.

A *block* is a layer, or a module outside of the layers that has parameters. Its initial values depend on the seed and
on its name, not on ranks: transformers' own code makes them, of one block at a time, and each rank takes what it has.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers.initialization import no_init_weights

from bytescale.common.cut import Cut
from bytescale.common.errors import ConfigError
from bytescale.hf.files.folder import auto_class, causal_model_or_error, config_of, empty_model, ready
from bytescale.hf.model.decoder import HFDecoder


class InitialValues:
    """The first values of every parameter of a model, fp32 or wider, of which one block at a time is in memory."""

    def __init__(self, content: dict[str, Any], dtype: torch.dtype, seed: int, layers: list[str]) -> None:
        """``layers``: names of the model's layers. Raises ``ConfigError`` where no causal model can be made."""
        self._model: Any = empty_model(content)
        self._wide, self._seed, self._layers = torch.promote_types(dtype, torch.float32), seed, layers
        self._held = ""

    def __call__(self, name: str, cut: Cut) -> Tensor:
        """The part of a parameter that ``cut`` says. Parameters of a block are best asked for one after the other."""
        owner = name.rpartition(".")[0]
        block = next((layer for layer in self._layers if name.startswith(f"{layer}.")), owner)
        if block != self._held:
            if self._held:
                self._model.get_submodule(self._held).to("meta")
            self._make(block)
        return cut.of(self._model.get_parameter(name).detach())

    def _make(self, block: str) -> None:
        module = self._model.get_submodule(block).to(self._wide).to_empty(device="cpu")
        digest = hashlib.blake2b(f"{self._seed}/{block}".encode(), digest_size=8).digest()
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            for parameter in module.parameters():
                parameter.fill_(torch.nan)
            torch.manual_seed(int.from_bytes(digest, "little") >> 1)
            module.apply(self._model._init_weights)
        for name, parameter in module.named_parameters():
            if parameter.isnan().any():
                raise ConfigError(
                    f"transformers gives {block}.{name} its first value while the whole model is made",
                    so="it would be a random number in a model that is made in parts",
                    fix="begin with weights (--init hf:FOLDER)",
                )
        self._held = block


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
    values = InitialValues(content, dtype, 0, [names[layer] for layer in layers])
    for name, parameter in list(twin.named_parameters()):
        give_memory(parameter, values(name, Cut(shape=tuple(parameter.shape))).clone())
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
