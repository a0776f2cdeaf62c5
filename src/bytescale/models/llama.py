"""Llama: pre-norm decoder with RMSNorm, rotary positions, grouped-query attention and SwiGLU.

Plain mathematics on packed tokens: one row per token, no batch dimension, no padding, no rank. The attention callable,
which the caller passes in, decides which rows attend to which.

Shape letters: T tokens, C hidden size, H query heads, G key/value heads, D head width, F feed-forward width, V
vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bytescale.common.cut import Cut
from bytescale.config.architecture import Architecture
from bytescale.models.initial_values import initial_values
from bytescale.models.rope import Rotate, Rotation, apply_rope, rope_rotation, rotate

AttentionCallable = Callable[[Tensor, Tensor, Tensor], Tensor]
"""``(q [T, H, D], k [T, G, D], v [T, G, D]) -> [T, H, D]``"""
SwiGLU = Callable[[Tensor, Tensor], Tensor]
"""``(gate, up) -> silu(gate) * up``, all of one shape and dtype."""
ProjectIn = Callable[[Tensor, Sequence[nn.Linear]], Sequence[Tensor]]
"""``(rows [T, in], linears) -> [T, out]`` of each."""
ProjectOut = Callable[[Tensor, nn.Linear], Tensor]
"""``(rows [T, in], linear) -> [T, out]``"""


class Llama(nn.Module):
    """``forward`` returns the final hidden states; the loss takes them together with ``head_weight``.

    Parameters have Hugging Face's names without the ``model.`` prefix. A part of the model, for a pipeline stage, keeps
    the numbers of its layers. The first part has the embedding; the last one has the final norm and the head.
    """

    def __init__(self, shape: Architecture, layers: range | None = None) -> None:
        """``layers``: which of the model's layers, a contiguous range; None: all of them."""
        super().__init__()
        layers = range(shape.num_layers) if layers is None else layers
        self.shape = shape
        first, last = layers.start == 0, layers.stop == shape.num_layers
        self.embed_tokens = nn.Embedding(shape.vocab_size, shape.hidden_size) if first else None
        self.layers = Layers((number, Layer(shape, self.make_feed_forward())) for number in layers)
        self.norm = nn.RMSNorm(shape.hidden_size, eps=shape.norm_eps) if last else None
        has_own_head = last and not (first and shape.tie_embeddings)
        self.lm_head = nn.Linear(shape.hidden_size, shape.vocab_size, bias=False) if has_own_head else None

    def forward(self, inputs: Tensor, position_ids: Tensor, attention: AttentionCallable) -> Tensor:
        """``tokens, position_ids [T]`` int64 -> hidden states ``[T, C]`` in the parameters' dtype.

        A part without the embedding takes hidden states ``[T, C]`` instead of tokens. A part without the last layer
        returns the residual stream without the final norm.
        """
        hidden = inputs if self.embed_tokens is None else self.embed_tokens(inputs)
        rotation = rope_rotation(position_ids, self.shape, hidden.dtype)
        for layer in self.layers:
            hidden = layer(hidden, rotation, attention)
        return hidden if self.norm is None else self.norm(hidden)

    @property
    def head_weight(self) -> Tensor:
        """``[V, C]`` weight that turns hidden states into logits."""
        if self.lm_head is not None:
            return self.lm_head.weight
        if self.embed_tokens is None or self.norm is None:
            raise RuntimeError("this part of the model has no last layer, hence no head")
        return self.embed_tokens.weight

    @property
    def hidden_size(self) -> int:
        return self.shape.hidden_size

    def make_feed_forward(self) -> nn.Module:
        """The module that follows attention in each layer. Other model families override this method."""
        return FeedForward(self.shape)

    def initialise(self, seed: int) -> None:
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                parameter.copy_(initial_values(name, Cut(shape=tuple(parameter.shape)), self.shape, seed))


class Layers(nn.Module):
    """Layers that keep their numbers in the whole model, so that parameters of a part have the same names as there."""

    def __init__(self, numbered: Iterable[tuple[int, Layer]]) -> None:
        super().__init__()
        for number, layer in numbered:
            self.add_module(str(number), layer)

    def __iter__(self) -> Iterator[Layer]:
        return iter(self._modules.values())  # type: ignore[arg-type]

    def __len__(self) -> int:
        return len(self._modules)

    def __getitem__(self, number: int) -> Layer:
        """The layer that has this number in the whole model."""
        return self._modules[str(number)]  # type: ignore[return-value]


class Layer(nn.Module):
    """One decoder layer: attention and feed-forward, each behind a norm and added to the residual stream."""

    def __init__(self, shape: Architecture, feed_forward: nn.Module) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(shape.hidden_size, eps=shape.norm_eps)
        self.self_attn = Attention(shape)
        self.post_attention_layernorm = nn.RMSNorm(shape.hidden_size, eps=shape.norm_eps)
        self.mlp = feed_forward

    def forward(self, hidden: Tensor, rotation: Rotation, attention: AttentionCallable) -> Tensor:
        hidden = hidden + self.self_attn(self.input_layernorm(hidden), rotation, attention)
        return hidden + self.feed_forward(hidden)

    def feed_forward(self, hidden: Tensor) -> Tensor:
        """The feed-forward update of the residual stream, ``[T, C] -> [T, C]``; rows are independent."""
        return self.mlp(self.post_attention_layernorm(hidden))


class Attention(nn.Module):
    """The projections around attention, ``[T, C] -> [T, C]``.

    ``rotate``, ``project_in`` and ``project_out`` may be replaced by faster functions.
    """

    def __init__(self, shape: Architecture) -> None:
        super().__init__()
        self.rotate: Rotate = rotate
        self.project_in: ProjectIn = project_in
        self.project_out: ProjectOut = project_out
        self.head_dim = shape.head_dim
        query_width, kv_width = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
        self.q_proj = nn.Linear(shape.hidden_size, query_width, bias=False)
        self.k_proj = nn.Linear(shape.hidden_size, kv_width, bias=False)
        self.v_proj = nn.Linear(shape.hidden_size, kv_width, bias=False)
        self.o_proj = nn.Linear(query_width, shape.hidden_size, bias=False)

    def forward(self, hidden: Tensor, rotation: Rotation, attention: AttentionCallable) -> Tensor:
        projected = self.project_in(hidden, (self.q_proj, self.k_proj, self.v_proj))
        q, k, v = (rows.unflatten(-1, (-1, self.head_dim)) for rows in projected)
        out = attention(apply_rope(q, rotation, self.rotate), apply_rope(k, rotation, self.rotate), v)
        return self.project_out(out.flatten(-2), self.o_proj)


class FeedForward(nn.Module):
    """SwiGLU, ``[T, C] -> [T, F] -> [T, C]``.

    ``swiglu``, ``project_in`` and ``project_out`` may be replaced by faster functions.
    """

    def __init__(self, shape: Architecture) -> None:
        super().__init__()
        self.swiglu: SwiGLU = swiglu
        self.project_in: ProjectIn = project_in
        self.project_out: ProjectOut = project_out
        self.gate_proj = nn.Linear(shape.hidden_size, shape.ffn_hidden_size, bias=False)
        self.up_proj = nn.Linear(shape.hidden_size, shape.ffn_hidden_size, bias=False)
        self.down_proj = nn.Linear(shape.ffn_hidden_size, shape.hidden_size, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        gate, up = self.project_in(hidden, (self.gate_proj, self.up_proj))
        return self.project_out(self.swiglu(gate, up), self.down_proj)


def project_in(rows: Tensor, linears: Sequence[nn.Linear]) -> list[Tensor]:
    """The product of ``rows [T, in]`` with each of ``linears``, ``[T, out]``."""
    return [linear(rows) for linear in linears]


def project_out(rows: Tensor, linear: nn.Linear) -> Tensor:
    """The product of ``rows [T, in]`` with ``linear``, ``[T, out]``."""
    result: Tensor = linear(rows)
    return result


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """``silu(gate) * up``, both of one shape and dtype."""
    return F.silu(gate) * up
