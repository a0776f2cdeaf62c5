"""What batches, second models and ranks have to have in common with a model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from bytescale.common.errors import ConfigError, DataError
from bytescale.common.labels import IGNORE_INDEX
from bytescale.hf.model.decoder import AttachedDecoder
from bytescale.hf.model.head import embeddings_of


def require_words(fields: Mapping[str, Sequence[Tensor]], model: nn.Module) -> None:
    """Raise ``DataError`` for tokens outside of the model's embedding, and labels outside of its head.

    ``fields``: ``tokens`` and ``labels``, each a list of ``[S]`` numbers.
    """
    for name, module in zip(("tokens", "labels"), embeddings_of(model), strict=True):
        weight = getattr(module, "weight", None)
        if weight is None:
            continue
        for number, values in enumerate(fields[name]):
            wrong = (values < 0) | (values >= weight.shape[0])
            if name == "labels":
                wrong &= values != IGNORE_INDEX
            if bool(wrong.any()):
                raise DataError(
                    f"the {name} of document {number} have {int(values[wrong][0])}; the model has "
                    f"{weight.shape[0]} words",
                    so="there is no row of its matrix for it",
                    fix="use the tokenizer that belongs to the model"
                    + (f"; {IGNORE_INDEX} marks a token without a label" if name == "labels" else ""),
                )


def second_model(model: nn.Module, first: nn.Module, *, same_tokenizer: bool) -> AttachedDecoder:
    """Attach ``model`` for passes without gradients, on micro-batches of ``first``; ``HDP.attach``."""
    if set(model.modules()) & set(first.modules()):
        raise ConfigError(
            "the second model has modules of the first one",
            so="its attention would be counted as that of the first",
            fix="take a copy; a model with its adapters switched off needs no second one: "
            "with torch.no_grad(), model.disable_adapter(): micro.logprobs(model)",
        )
    words, others = (len(embeddings_of(one)[0].weight) for one in (first, model))
    if words != others and not same_tokenizer:
        raise ConfigError(
            f"the second model has {others} words, and the first one {words}",
            so="a token may stand for another word there, and its log-probability would mean nothing",
            fix="use a model with the same tokenizer; if only the padding of the matrices differs, say "
            "hdp.attach(model, same_tokenizer=True)",
        )
    decoder = AttachedDecoder(model)
    decoder.is_frozen = True
    return decoder


def weight_sums(model: nn.Module) -> list[int]:
    """Per parameter, the sum of its numbers' bits as integers, which is exact in any order.

    Parameters that are sharded already (FSDP) or have no memory yet differ between ranks and are left out.
    """
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    sums = [
        parameter.detach().contiguous().view(integers[parameter.element_size()]).sum(dtype=torch.int64)
        for parameter in model.parameters()
        if type(parameter.data) is Tensor and not parameter.is_meta
    ]
    return torch.stack(sums).tolist() if sums else []
