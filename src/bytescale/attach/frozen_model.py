"""A second model on the micro-batches of an ``HDP``, forward only: the reference of DPO and of KL, or a teacher."""

from __future__ import annotations

import hashlib
from typing import Any

from torch import nn

from bytescale.attach.head import causal_model
from bytescale.attach.interface import Attachment
from bytescale.attach.passes import AttachedModel
from bytescale.attach.probe import probe
from bytescale.attach.weight_sums import weight_sums
from bytescale.common.errors import ConfigError


class FrozenModel:
    """A model that is on our attention for passes without gradients.

    Attributes:
        attached: what its passes need to know of it.
    """

    def __init__(self, model: nn.Module, first: nn.Module, *, same_tokenizer: bool) -> None:
        """``first``: the model that the micro-batches are made for. Raises ``ConfigError`` as ``HDP.attach``."""
        if set(model.modules()) & set(first.modules()):
            raise ConfigError(
                "the second model has modules of the first one",
                so="its attention would be counted as that of the first",
                fix="take a copy; a model with its adapters switched off needs no second one: "
                "with torch.no_grad(), model.disable_adapter(): micro.logprobs(model)",
            )
        words, others = num_words(first), num_words(model)
        if words != others and not same_tokenizer:
            raise ConfigError(
                f"the second model has {others} words, and the first one {words}",
                so="a token may stand for another word there, and its log-probability would mean nothing",
                fix="use a model with the same tokenizer; if only the padding of the matrices differs, say "
                "hdp.attach(model, same_tokenizer=True)",
            )
        self.model = model
        self._attachment = Attachment(model)
        try:
            self._facts = probe(model)
        except BaseException:
            self._attachment.detach()
            raise
        self.attached = AttachedModel.of(model, self._facts)
        self.attached.is_frozen = True

    def fingerprint(self) -> int:
        """63 bits of what has to be equal on all ranks."""
        content = repr((self._facts, weight_sums(self.model)))
        return int.from_bytes(hashlib.blake2b(content.encode(), digest_size=8).digest(), "little") >> 1

    def detach(self) -> None:
        """Give the model its own attention back."""
        self._attachment.detach()


def num_words(model: nn.Module) -> int:
    """Rows of the input embedding."""
    embedding: Any = causal_model(model).get_input_embeddings()
    return int(embedding.weight.shape[0])
