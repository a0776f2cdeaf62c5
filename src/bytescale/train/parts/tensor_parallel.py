"""Tensor and sequence parallelism, applied to a plain model from outside: the model's code does not change.

With N ranks (Megatron-LM, Shoeybi et al. 2019, section 3; sequence parallelism, Korthikanti et al. 2022, section 4),
T tokens and t of them on this rank::

    residual stream and norms    [t, C]     each rank its tokens, all channels
    between gather and scatter   [T, C/N]   all tokens, each rank its heads, feed-forward columns or words

    embedding     words are cut: each rank looks up its words          scatter
    attention     gather    q, k, v: rows of heads; o: columns         scatter
    feed-forward  gather    gate, up: rows of F; down: columns         scatter
    experts       gather    the same, in every expert                  scatter
    router        every rank its tokens; logits are gathered, so that all ranks send all tokens to the same experts
    head          gather    words are cut; the loss sums over ranks

*gather* assembles all tokens from the ranks' parts; its gradient is summed over ranks and scattered. *scatter* sums the
ranks' partial results and gives each rank its tokens; its gradient is gathered. Those of attention and of dense
feed-forward parts travel beside the products with the weights. A norm or router sees each token on one rank only, so
its gradients are partial sums; they are added up once a step.

A ring connects ranks with the same heads. With fewer key/value heads than ranks, neighbouring ranks hold the same head
(``Cut.replicas``).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bytescale.common.cut import Cut
from bytescale.cost.memory.device_kernels import is_row_wise
from bytescale.models.llama import Attention, FeedForward, Llama, project_in, project_out
from bytescale.models.moe import MixtureOfExperts
from bytescale.runtime.token_shards import TokenShards


def apply_tensor_parallelism(model: Llama, shards: TokenShards) -> dict[str, Cut]:
    """Reduce ``model`` (the whole model or a stage) to one rank's part. Returns the cut of every parameter, by name.

    The model is changed in place and may be on the meta device. ``config.validate`` has checked its sizes before.
    """
    whole = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    cuts = {name: _cut(name, size, model, shards) for name, size in whole.items()}
    # 1. Parameters: every matrix becomes this rank's part.
    for name, cut in cuts.items():
        _replace(model, name, cut)
    # 2. Communication, in the order in which a forward meets it.
    if model.embed_tokens is not None:
        model.embed_tokens = VocabularyShard(model.embed_tokens, shards)  # type: ignore[assignment]
    for layer in model.layers:
        # Every layer announces its number of tokens, because a recomputation may run between other micro-batches.
        layer.self_attn.register_forward_pre_hook(lambda module, args: shards.begin(len(args[1][0])))
        _Messages(layer.self_attn, shards)
        if isinstance(layer.mlp, MixtureOfExperts):
            layer.mlp.router.register_forward_hook(lambda module, args, logits: shards.gather(logits))
            layer.mlp.experts.register_forward_pre_hook(lambda module, args: (shards.gather(args[0]), *args[1:]))
            layer.mlp.experts.register_forward_hook(lambda module, args, partial: shards.scatter(partial))
        else:
            assert isinstance(layer.mlp, FeedForward), "a layer has a feed-forward block or a mixture of them"
            _Messages(layer.mlp, shards)
    if model.norm is not None:
        model.norm.register_forward_hook(lambda module, args, hidden: shards.gather_for_loss(hidden))
    return cuts


def row_wise_parts(model: Llama, tp_size: int) -> list[tuple[nn.Module, str]]:
    """Modules with the name of a method that treats each row independently: the feed-forward parts of all layers.

    The norm before is included, unless tensor parallelism gathers rows in between. None if rows move between ranks.
    """
    if not is_row_wise(model.shape, tp_size):
        return []
    return [(layer, "feed_forward") if tp_size == 1 else (layer.mlp, "forward") for layer in model.layers]


class VocabularyShard(nn.Module):
    """An embedding of which this rank holds a part of the words: ``[T] -> [t, C]``."""

    def __init__(self, part: nn.Embedding, shards: TokenShards) -> None:
        super().__init__()
        self.weight = part.weight
        self._shards = shards

    def forward(self, tokens: Tensor) -> Tensor:
        self._shards.begin(len(tokens))
        own = tokens - self._shards.tp.rank * len(self.weight)
        here = (own >= 0) & (own < len(self.weight))
        rows = F.embedding(own.where(here, 0), self.weight) * here[:, None]
        return self._shards.scatter(rows)


class _Messages:
    """A block's gather and scatter: beside its products, or around it where its forward splits heads or rows.

    ``apply_head_groups`` and ``apply_row_chunks`` make such a forward and say so in its ``rows_at_once``.
    """

    def __init__(self, module: Attention | FeedForward, shards: TokenShards) -> None:
        self._shards = shards
        self._beside = False  # whether the products of the forward that runs communicate
        self._num_products = 0  # of them
        module.project_in, module.project_out = self._project_in, self._project_out
        module.register_forward_pre_hook(self._before)
        module.register_forward_hook(self._after, always_call=True)  # also if an exception stops a recomputation

    def _before(self, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        self._beside = self._shards.num_tokens <= getattr(module.forward, "rows_at_once", math.inf)
        self._num_products = 0
        hidden, *rest = args
        return args if self._beside else (self._shards.gather(hidden), *rest)

    def _project_in(self, rows: Tensor, linears: Sequence[nn.Linear]) -> Sequence[Tensor]:
        self._num_products += 1
        return (self._shards.gather_and_project if self._beside else project_in)(rows, linears)

    def _project_out(self, rows: Tensor, linear: nn.Linear) -> Tensor:
        self._num_products += 1
        return (self._shards.project_and_scatter if self._beside else project_out)(rows, linear)

    def _after(self, module: nn.Module, args: tuple[Any, ...], result: Tensor | None) -> Tensor | None:
        beside, self._beside = self._beside, False
        if result is None:  # stopped
            return None
        if not beside:
            return self._shards.scatter(result)
        assert self._num_products == 2, f"{type(module).__name__}: a forward without rows_at_once uses both products"
        return None


def _cut(name: str, size: tuple[int, ...], model: Llama, shards: TokenShards) -> Cut:
    if len(size) == 1 or name.endswith("router.weight"):
        return Cut(shape=size, replicas=shards.tp.size, replica=shards.tp.rank)
    if name.endswith(("k_proj.weight", "v_proj.weight")):
        count = min(shards.tp.size, model.shape.num_kv_heads)
        replicas = shards.tp.size // count
        index, replica = divmod(shards.tp.rank, replicas)
        return Cut(shape=size, dim=0, index=index, count=count, replicas=replicas, replica=replica)
    takes = name.endswith(("o_proj.weight", "down_proj.weight", "down_proj"))
    # Matrices are [out, in], experts' [expert, out, in].
    return Cut(shape=size, dim=len(size) - 1 if takes else len(size) - 2, index=shards.tp.rank, count=shards.tp.size)


def _replace(model: nn.Module, name: str, cut: Cut) -> None:
    path, _, leaf = name.rpartition(".")
    owner = model.get_submodule(path)
    with torch.no_grad():
        setattr(owner, leaf, nn.Parameter(cut.of(getattr(owner, leaf).detach()).clone()))
    if isinstance(owner, nn.Linear):
        owner.out_features, owner.in_features = owner.weight.shape
