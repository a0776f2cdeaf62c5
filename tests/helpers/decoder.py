"""A plain decoder for tests of the engine: pre-norm layers of grouped-query attention and SwiGLU, as in Llama.

It is plain mathematics on packed tokens, of one process. The attention callable decides which rows attend to which.

Shape letters: T tokens, C hidden size, H query heads, G key/value heads, D head width, F feed-forward width, V words.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

AttentionCallable = Callable[[Tensor, Tensor, Tensor], Tensor]
"""``(q [T, H, D], k [T, G, D], v [T, G, D]) -> [T, H, D]``"""
Rotation = tuple[Tensor, Tensor]
"""Cosine and sine of every token's angles, ``[T, 1, D / 2]``."""


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Of a decoder that runs in milliseconds. All layers have grouped-query attention."""

    vocab_size: int = 61
    num_layers: int = 2
    hidden_size: int = 24
    num_heads: int = 6
    num_kv_heads: int = 2
    head_dim: int = 4
    ffn_hidden_size: int = 40
    tie_embeddings: bool = False


class PlainDecoder(nn.Module):
    """``runtime.DecoderModule``. Parameters have the names of Hugging Face's Llama without the ``model.`` prefix."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.hidden_size, self.head_dim = sizes.hidden_size, sizes.head_dim
        self.embed_tokens = nn.Embedding(sizes.vocab_size, sizes.hidden_size)
        self.layers = nn.ModuleList(Layer(sizes) for _ in range(sizes.num_layers))
        self.norm = nn.RMSNorm(sizes.hidden_size, eps=1e-5)
        self.lm_head = None if sizes.tie_embeddings else nn.Linear(sizes.hidden_size, sizes.vocab_size, bias=False)

    def forward(self, inputs: Tensor, position_ids: Tensor, attention: AttentionCallable) -> Tensor:
        """``tokens, position_ids [T]`` int64 -> hidden states ``[T, C]`` after the final norm."""
        hidden = self.embed_tokens(inputs)
        rotation = rotation_of(position_ids, self.head_dim, hidden.dtype)
        for layer in self.layers:
            hidden = layer(hidden, rotation, attention)
        result: Tensor = self.norm(hidden)
        return result

    @property
    def head_weight(self) -> Tensor:
        """``[V, C]``"""
        return self.embed_tokens.weight if self.lm_head is None else self.lm_head.weight


class Layer(nn.Module):
    """Attention and feed-forward part, each behind a norm and added to the residual stream."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(sizes.hidden_size, eps=1e-5)
        self.self_attn = Attention(sizes)
        self.post_attention_layernorm = nn.RMSNorm(sizes.hidden_size, eps=1e-5)
        self.mlp = FeedForward(sizes)

    def forward(self, hidden: Tensor, rotation: Rotation, attention: AttentionCallable) -> Tensor:
        hidden = hidden + self.self_attn(self.input_layernorm(hidden), rotation, attention)
        return hidden + self.feed_forward(hidden)

    def feed_forward(self, hidden: Tensor) -> Tensor:
        """The feed-forward update of the residual stream, ``[T, C] -> [T, C]``; rows are independent."""
        result: Tensor = self.mlp(self.post_attention_layernorm(hidden))
        return result


class Attention(nn.Module):
    """The projections around attention, ``[T, C] -> [T, C]``."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.head_dim = sizes.head_dim
        query_width, key_width = sizes.num_heads * sizes.head_dim, sizes.num_kv_heads * sizes.head_dim
        self.q_proj = nn.Linear(sizes.hidden_size, query_width, bias=False)
        self.k_proj = nn.Linear(sizes.hidden_size, key_width, bias=False)
        self.v_proj = nn.Linear(sizes.hidden_size, key_width, bias=False)
        self.o_proj = nn.Linear(query_width, sizes.hidden_size, bias=False)

    def forward(self, hidden: Tensor, rotation: Rotation, attention: AttentionCallable) -> Tensor:
        q, k, v = (
            project(hidden).unflatten(-1, (-1, self.head_dim)) for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        out = attention(_Rotate.apply(q, *rotation), _Rotate.apply(k, *rotation), v)
        result: Tensor = self.o_proj(out.flatten(-2))
        return result


class FeedForward(nn.Module):
    """SwiGLU, ``[T, C] -> [T, F] -> [T, C]``."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(sizes.hidden_size, sizes.ffn_hidden_size, bias=False)
        self.up_proj = nn.Linear(sizes.hidden_size, sizes.ffn_hidden_size, bias=False)
        self.down_proj = nn.Linear(sizes.ffn_hidden_size, sizes.hidden_size, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        result: Tensor = self.down_proj(F.silu(self.gate_proj(hidden)) * self.up_proj(hidden))
        return result


def rotation_of(position_ids: Tensor, head_dim: int, dtype: torch.dtype) -> Rotation:
    """Of rotary positions with base 10,000, in fp32 (fp64 for fp64)."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float64, device=position_ids.device) / head_dim
    angles = position_ids.to(torch.float64)[:, None, None] * 10_000.0**-exponents
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    return angles.cos().to(wide), angles.sin().to(wide)


def rotated(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the pairs ``(x[i], x[i + D/2])`` of ``heads [T, H, D]``."""
    first, second = heads.to(cos.dtype).chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(heads.dtype)


class _Rotate(torch.autograd.Function):
    """Saves the angles alone; backward rotates by the opposite ones."""

    @staticmethod
    def forward(ctx: Any, heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return rotated(heads, cos, sin)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return rotated(gradients[0], cos, -sin), None, None
