"""Prefill of prompts of very different lengths: their next tokens, and KV caches from which ``generate`` goes on.

The planner spreads the prompts as it spreads documents in training, and short prompts come first, so that they do not
wait for long ones (``planner.short_first``). Keys and values stay where they were computed, and so do the states of
recurrent layers, which the rank with a prompt's last token has. ``Prefill.cache`` gathers those of one prompt on one
rank, as a cache of transformers. What prompts begin with, such as a document that many questions are about, is computed
and held once where that saves time (``hf.batch.prefixes``); each prompt's cache has all of it.

Shape letters: P prompts, S tokens of a prompt, T rows of a micro-batch, H key/value heads, D width, V vocabulary, W
numbers of a token in the caches of all layers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from bytescale.common.errors import DataError
from bytescale.hf.loop.batch_plan import BatchToPlan
from bytescale.hf.loop.micro_batch import Micro
from bytescale.hf.model.head import causal_model, hidden_states
from bytescale.hf.model.interface import has_own_cache, refusal
from bytescale.planner.prefixes import cost_of_trees
from bytescale.planner.short_first import short_first
from bytescale.runtime.plain_data import all_gather_json

if TYPE_CHECKING:
    from bytescale.hf.loop.hdp import HDP

Ready = Callable[[int, Tensor], None]
"""Called with the number of a prompt and the logits ``[V]`` of its next token, in fp32 or wider."""

Parts = dict[tuple[int, str], Tensor]
"""What a rank has of a prompt. By the first token of a run and ``"rows"``: its keys and values ``[n, W]``, of each
layer the keys of all heads, and then the values. By layer and ``"conv"`` or ``"recurrent"``: a state as transformers'
caches have it, on the rank with the prompt's last token."""


@dataclass
class Prefill:
    """The result of ``HDP.prefill`` on one rank. Every method is called by every rank.

    Attributes:
        prompts: ``[S]`` tokens of each prompt.
        next_tokens: ``[P]`` int64, the most probable next token of each prompt, the same on every rank.
        parts: by prompt, what this rank holds of it.
    """

    hdp: HDP
    prompts: list[Tensor]
    next_tokens: Tensor
    parts: dict[int, Parts] = field(default_factory=dict)
    _logits: dict[int, Tensor] = field(default_factory=dict)

    @property
    def is_compileable(self) -> bool:
        """What ``generate`` asks of a cache. Raises ``ConfigError``: this is none."""
        raise refusal(
            self.hdp.facts.names[0],
            "its keys, values and states are given to the model where several ranks have parts of them",
            so="generate would go on without the parts of the others",
            fix="call inputs = prefill.inputs(prompt, rank) on every rank, and model.generate(**inputs) on that one",
        )

    get_seq_length = is_compileable

    def next_logits(self, prompts: Sequence[int] | None = None) -> Tensor:
        """``[P, V]`` logits of the next tokens of all prompts, or of those with the given numbers, on every rank.

        In fp32, or fp64 for a model in fp64.
        """
        wanted = range(len(self.prompts)) if prompts is None else prompts
        group = self.hdp.group
        width = int(group.max_of([float(max(map(len, self._logits.values()), default=0))])[0])
        dtype = torch.promote_types(next(self.hdp.model.parameters()).dtype, torch.float32)
        table = torch.zeros(len(wanted), width, dtype=dtype, device=group.device)
        for row, number in enumerate(wanted):
            if number in self._logits:
                table[row] = self._logits[number]
        return group.all_reduce(table)

    def cache(self, prompt: int, rank: int = 0) -> Any:
        """The prompt's KV cache (``transformers.DynamicCache``) on ``rank``; None on the others.

        The members send what they hold. Their own parts stay, so a cache may be gathered again. Raises ``ConfigError``
        for a model whose cache holds something else (compressed keys of DeepSeek and Kimi Linear, MiniMax's states,
        layers that Zamba 2 uses several times), and for one without attention, such as Mamba.
        """
        from transformers import DynamicCache

        decoder = self.hdp.engine.decoder
        unlike = ["a layer that is used several times"] * (len(set(self._layers())) < len(decoder.facts.layers))
        unlike += [type(mixer).__name__ for mixer in decoder.mixers if has_own_cache(mixer)]
        unlike += [type(layer).__name__ for layer in decoder.attentions if hasattr(layer, "expand_kv")]
        unlike += ["a model without attention"] * (not decoder.attentions)  # generate names its cache otherwise
        for name in unlike:
            raise refusal(
                name,
                "the model's cache does not hold the keys and values, or the states, that its layers compute with",
                so="generate could not go on from what prefill gathers",
                fix="call model.generate without past_key_values; next tokens and logits are known without it",
            )
        held = self._gathered(prompt, rank)
        if held is None:
            return None
        rows = torch.cat([held.pop(key) for key in sorted(held) if key[1] == "rows"])
        cache = DynamicCache(config=causal_model(self.hdp.model).config)
        shapes = self._shapes()
        split = rows.split([math.prod(shape) for shape in shapes], dim=1)
        parts = [part.unflatten(1, shape).transpose(0, 1)[None] for part, shape in zip(split, shapes, strict=True)]
        for index, keys, values in zip(self._layers(), parts[::2], parts[1::2], strict=True):
            cache.update(keys, values, index)
        for (index, kind), state in held.items():
            update = cache.update_conv_state if kind == "conv" else cache.update_recurrent_state
            update(state[None], index)
        return cache

    def inputs(self, prompt: int, rank: int = 0) -> dict[str, Any] | None:
        """Arguments for ``model.generate`` on ``rank``: the prompt with its most probable next token, and its cache.

        ``generate`` then computes no token of the prompt again. On the other ranks None.
        """
        cache = self.cache(prompt, rank)
        if cache is None:
            return None
        parts = self.prompts[prompt], self.next_tokens[prompt, None]
        tokens = torch.cat([part.to(self.hdp.group.device) for part in parts])
        return {"input_ids": tokens[None], "attention_mask": torch.ones_like(tokens)[None], "past_key_values": cache}

    def free(self, prompt: int) -> None:
        """Forget this rank's part of a prompt's cache. What it shares with other prompts is kept as long as theirs."""
        self.parts.pop(prompt, None)

    def add(self, micro: Micro, kept: dict[tuple[int, str], Tensor], logits: dict[int, Tensor]) -> None:
        """Keep the results of a micro-batch.

        ``kept``: by layer and kind, ``"keys"`` and ``"values"`` ``[T, H, D]``, or states ``[F, ...]`` after each run of
        rows; ``logits``: ``[V]`` by prompt.
        """
        flat = [part.flatten(1) for (_, kind), part in kept.items() if kind in ("keys", "values")]
        rows = torch.cat(flat, dim=1) if flat else torch.zeros(micro.num_rows, 0)
        for prompt, start, places in micro.plan.rows_of_documents:
            for run in np.split(places, np.flatnonzero(np.diff(places) != 1) + 1):
                part = rows[run[0] : run[-1] + 1]  # prompts that share rows do so here, too
                self.parts.setdefault(prompt, {})[start, "rows"] = part if micro.plan.trees else part.clone()
                start += len(run)
        states = {key: part for key, part in kept.items() if key[1] in ("conv", "recurrent")}
        for number, (prompt, start, stop) in enumerate(micro.plan.runs if states else ()):
            if start < stop == len(self.prompts[prompt]):
                self.parts[prompt] |= {key: part[number].clone() for key, part in states.items()}
        self._logits.update(logits)

    def _gathered(self, prompt: int, rank: int) -> Parts | None:
        """All parts of a prompt on ``rank``; None on the others."""
        group, own = self.hdp.group, {**self.parts.get(prompt, {})}
        told = [[*key, list(part.shape), str(part.dtype).removeprefix("torch.")] for key, part in own.items()]
        table = all_gather_json(told, group.group, group.device)
        if not any(table):
            raise DataError(
                f"no rank has the keys and values of prompt {prompt} any more ({self.hdp.facts.names[0]})",
                so="generate could not go on from them",
                fix="call free(prompt) after cache(prompt) and inputs(prompt), on every rank",
            )
        if group.rank != rank:
            for part in own.values():
                group.exchange.start(send=part.contiguous(), to=rank, receive=None, source=rank, tag=0).wait()
            return None
        for source, line in enumerate(table):
            for place, kind, shape, dtype in line if source != rank else ():
                part = torch.empty(shape, dtype=getattr(torch, dtype), device=group.device)
                group.exchange.start(send=None, to=source, receive=part, source=source, tag=0).wait()
                own[place, kind] = part
        return own

    def _layers(self) -> list[int]:
        """The place of every attention layer among the model's layers, in the order of their calls."""
        return [layer_of(module, place) for place, module in enumerate(self.hdp.engine.decoder.attentions)]

    def _shapes(self) -> list[tuple[int, int]]:
        """``(H, D)`` of the keys and of the values of every layer, in the order of the layers."""
        layers = self.hdp.facts.layers
        return [(layer.num_kv_heads, width) for layer in layers for width in (layer.head_dim, layer.value_dim)]


@torch.no_grad()
def prefill(hdp: HDP, prompts: Sequence[Sequence[int] | Tensor], ready: Ready | None = None) -> Prefill:
    """Run the prompts forward; see ``HDP.prefill``."""
    root = causal_model(hdp.model)
    can_generate = getattr(root, "can_generate", None)
    if not callable(can_generate) or not can_generate():
        raise refusal(
            type(root).__name__,
            "it cannot generate (can_generate() is not true)",
            so="nothing could go on from its KV caches",
            fix="load it with AutoModelForCausalLM; to score documents, use bytescale.score",
        )
    flat = (torch.as_tensor(prompt, device="cpu") for prompt in prompts)  # tokenizers return one as [1, S]
    rows = [{"tokens": tokens[0] if tokens.dim() == 2 and len(tokens) == 1 else tokens} for tokens in flat]
    # A branch of a recurrence would have to begin with the state at the end of its prefix.
    given = BatchToPlan.of(hdp, rows, shift_labels=False, per_document=None if hdp.engine.decoder.mixers else ())
    lengths, device = given.documents.lengths, hdp.group.device
    result = Prefill(hdp, given.documents.fields["tokens"], torch.zeros(len(prompts), dtype=torch.int64))
    next_tokens = torch.zeros(len(prompts), dtype=torch.int64, device=device)
    plan, forest = given.plan()
    if hdp.domain == 1:  # counts that are equal, backwards, would not meet at equal places
        plan = short_first(plan, cost_of_trees(hdp.cost, forest))
    for micro in given.part(plan, forest):
        kept: dict[tuple[int, str], Tensor] = {}
        micro.target.keep = partial(_keep, kept)
        runs = micro.plan.rows_of_documents
        ends = {prompt: int(own[-1]) for prompt, start, own in runs if start + len(own) == lengths[prompt]}
        hidden, head = hidden_states(hdp.model, micro.inputs)
        logits = head(hidden[0, list(ends.values())]) if ends else hidden.new_zeros(0, 0)
        values_of = dict(zip(ends, logits.to(torch.promote_types(logits.dtype, torch.float32)), strict=True))
        result.add(micro, kept, values_of)
        for prompt, values in values_of.items():
            next_tokens[prompt] = values.argmax()
            if ready is not None:
                ready(prompt, values)
    result.next_tokens = hdp.group.all_reduce(next_tokens)
    return result


def _keep(kept: dict[tuple[int, str], Tensor], module: nn.Module, kind: str, part: Tensor) -> None:
    key = layer_of(module, len(kept) // 2), kind
    if key in kept and kind in ("conv", "recurrent"):
        raise refusal(
            type(module).__name__,
            f"it has several states of one kind ({kind})",
            so="a cache could not be made of them",
            fix="call model.generate without prefill",
        )
    kept[key] = part


def layer_of(module: nn.Module, place: int) -> int:
    """The layer whose cache an attention or recurrence of transformers uses; ``place`` where it does not tell."""
    layer = getattr(module, "layer_idx", None)
    return place if layer is None else int(layer)
