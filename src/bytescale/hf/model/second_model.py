"""A second model on the micro-batches of an ``HDP``, forward only: the reference of DPO and of KL, or a teacher."""

from __future__ import annotations

from typing import Any

from torch import nn

from bytescale.common.errors import ConfigError
from bytescale.hf.model.decoder import AttachedDecoder
from bytescale.hf.model.head import causal_model


def second_model(model: nn.Module, first: nn.Module, *, same_tokenizer: bool) -> AttachedDecoder:
    """Attach ``model`` for passes without gradients. ``first``: the model that the micro-batches are made for.

    Raises ``ConfigError`` as ``HDP.attach``.
    """
    if set(model.modules()) & set(first.modules()):
        raise ConfigError(
            "the second model has modules of the first one",
            so="its attention would be counted as that of the first",
            fix="take a copy; a model with its adapters switched off needs no second one: "
            "with torch.no_grad(), model.disable_adapter(): micro.logprobs(model)",
        )
    words, others = _num_words(first), _num_words(model)
    if words != others and not same_tokenizer:
        raise ConfigError(
            f"the second model has {others} words, and the first one {words}",
            so="a token may stand for another word there, and its log-probability would mean nothing",
            fix="use a model with the same tokenizer; if only the padding of the matrices differs, say "
            "hdp.attach(model, same_tokenizer=True)",
        )
    decoder = AttachedDecoder(model)
    decoder.forbid_gradients()
    return decoder


def _num_words(model: nn.Module) -> int:
    embedding: Any = causal_model(model).get_input_embeddings()
    return int(embedding.weight.shape[0])
