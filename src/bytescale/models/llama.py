"""Llama: pre-norm decoder with RMSNorm, rotary positions, grouped-query attention and SwiGLU.

Plain mathematics on packed tokens: one row per token, no batch dimension, no padding, no rank. Which rows attend to
which is the business of the attention callable that the caller passes in.

Shape letters: T tokens, C hidden size, H query heads, G key/value heads, D head width, F feed-forward width, V
vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bytescale.config import Architecture
from bytescale.models.rope import apply_rope, rope_rotation

AttentionCallable = Callable[[Tensor, Tensor, Tensor], Tensor]
"""``(q [T, H, D], k [T, G, D], v [T, G, D]) -> [T, H, D]``"""


class Llama(nn.Module):
    """``forward`` gives the final hidden states; the loss takes them together with ``head_weight``.

    Parameters carry Hugging Face's names, less the ``model.`` prefix.
    """

    def __init__(self, shape: Architecture) -> None:
        super().__init__()
        self.shape = shape
        self.embed_tokens = nn.Embedding(shape.vocab_size, shape.hidden_size)
        self.layers = nn.ModuleList(Layer(shape, self.make_feed_forward()) for _ in range(shape.num_layers))
        self.norm = nn.RMSNorm(shape.hidden_size, eps=shape.norm_eps)
        self.lm_head = None if shape.tie_embeddings else nn.Linear(shape.hidden_size, shape.vocab_size, bias=False)

    def forward(self, tokens: Tensor, position_ids: Tensor, attention: AttentionCallable) -> Tensor:
        """``tokens, position_ids [T]`` int64 -> hidden states ``[T, C]`` in the parameters' dtype."""
        hidden = self.embed_tokens(tokens)
        rotation = rope_rotation(position_ids, self.shape, hidden.dtype)
        for layer in self.layers:
            hidden = layer(hidden, rotation, attention)
        return self.norm(hidden)

    @property
    def head_weight(self) -> Tensor:
        """``[V, C]`` weight that turns hidden states into logits."""
        return self.embed_tokens.weight if self.lm_head is None else self.lm_head.weight

    def make_feed_forward(self) -> nn.Module:
        """What each layer has behind its attention; families that differ there replace it."""
        return FeedForward(self.shape)

    def initialise(self, seed: int) -> None:
        """Fill every parameter, the same values for the same seed whatever the number of ranks.

        Matrices are normal with ``init_std``; those that write to the residual stream are scaled down by
        ``sqrt(2 * layers)``, so that its variance does not grow with depth (GPT-2). Norms are ones.
        """
        generator = torch.Generator().manual_seed(seed)
        residual_std = self.shape.init_std / (2 * self.shape.num_layers) ** 0.5
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                if parameter.dim() == 1:
                    parameter.fill_(1.0)
                    continue
                residual = name.endswith(("o_proj.weight", "down_proj.weight", "down_proj"))  # the last: of experts
                std = residual_std if residual else self.shape.init_std
                parameter.copy_(torch.empty(parameter.shape).normal_(0.0, std, generator=generator))


class Layer(nn.Module):
    """One decoder layer: attention and feed-forward, each behind a norm and added to the residual stream."""

    def __init__(self, shape: Architecture, feed_forward: nn.Module) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(shape.hidden_size, eps=shape.norm_eps)
        self.self_attn = Attention(shape)
        self.post_attention_layernorm = nn.RMSNorm(shape.hidden_size, eps=shape.norm_eps)
        self.mlp = feed_forward

    def forward(self, hidden: Tensor, rotation: tuple[Tensor, Tensor], attention: AttentionCallable) -> Tensor:
        hidden = hidden + self.self_attn(self.input_layernorm(hidden), rotation, attention)
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


class Attention(nn.Module):
    """The projections around attention, ``[T, C] -> [T, C]``."""

    def __init__(self, shape: Architecture) -> None:
        super().__init__()
        self.head_dim = shape.head_dim
        query_width, kv_width = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
        self.q_proj = nn.Linear(shape.hidden_size, query_width, bias=False)
        self.k_proj = nn.Linear(shape.hidden_size, kv_width, bias=False)
        self.v_proj = nn.Linear(shape.hidden_size, kv_width, bias=False)
        self.o_proj = nn.Linear(query_width, shape.hidden_size, bias=False)

    def forward(self, hidden: Tensor, rotation: tuple[Tensor, Tensor], attention: AttentionCallable) -> Tensor:
        q, k, v = (
            projection(hidden).unflatten(-1, (-1, self.head_dim))
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        out = attention(apply_rope(q, rotation), apply_rope(k, rotation), v)
        return self.o_proj(out.flatten(-2))


class FeedForward(nn.Module):
    """SwiGLU, ``[T, C] -> [T, F] -> [T, C]``."""

    def __init__(self, shape: Architecture) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden_size, shape.ffn_hidden_size, bias=False)
        self.up_proj = nn.Linear(shape.hidden_size, shape.ffn_hidden_size, bias=False)
        self.down_proj = nn.Linear(shape.ffn_hidden_size, shape.hidden_size, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(hidden)) * self.up_proj(hidden))
