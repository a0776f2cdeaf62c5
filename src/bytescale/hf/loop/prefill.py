"""Prefill of prompts of very different lengths: their next tokens, and KV caches from which ``generate`` goes on.

The planner spreads the prompts as it spreads documents in training, and short prompts come first, so that they do not
wait for long ones (``planner.short_first``). Keys and values stay where they were computed, and so do the states of
recurrent layers, which the rank with a prompt's last token has. ``Prefill.cache`` gathers those of one prompt on one
rank, as a cache of transformers: of all stages the layers, and of tensor-parallel ranks the heads, in the whole model's
order. What several of these ranks have alike, one of them keeps, another one for each layer. What prompts begin with,
such as a document that many questions are about, is computed and held once where that saves time
(``hf.batch.prefixes``); each prompt's cache has all of it.

What a layer's cache holds is what the layer gives it: in a pass of prefill the model has an empty cache, whose
``update`` keeps just that. So keys may be compressed (DeepSeek, Kimi Linear), and a layer may have several places
(Zamba 2).

Shape letters: P prompts, S tokens of a prompt, T rows of a micro-batch, H key/value heads, D width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from operator import itemgetter
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import DynamicCache

from bytescale.attention.copies import to_device
from bytescale.common.errors import ConfigError, DataError
from bytescale.hf.batch.documents import POSITIONS
from bytescale.hf.loop.batch_plan import BatchToPlan
from bytescale.hf.loop.micro_batch import Micro
from bytescale.hf.loop.session import Session
from bytescale.hf.model.head import cache_name, causal_model, hidden_states
from bytescale.hf.model.interface import LIGHTNING, names_in, refusal
from bytescale.planner.prefixes import cost_of_trees
from bytescale.planner.short_first import short_first
from bytescale.runtime.plain_data import all_gather_json

Prompt = Sequence[int] | Tensor | Mapping[str, Any]
"""Tokens ``[S]``, or a document with ``tokens`` and ``images``, ``videos`` or ``audios``, as ``HDP.plan`` takes it."""
Ready = Callable[[int, Tensor], None]
"""Called with the number of a prompt and the logits ``[V]`` of its next token, in fp32 or wider."""

Parts = dict[tuple[int, str, int, int], Tensor]
"""What a rank has of a prompt. By layer, ``"keys"`` or ``"values"``, the first token of a run, and which part of the
heads it is: ``[n, H, D]``, and ``"index"``, by which keys are chosen: ``[n, D]``. By layer, ``"conv"`` or
``"recurrent"``, 0 and 0: a state as caches have it, on the rank with the prompt's last token."""


@dataclass
class Prefill:
    """The result of ``HDP.prefill`` on one rank. Every method is called by every rank.

    Attributes:
        prompts: ``[S]`` tokens of each prompt.
        next_tokens: ``[P]`` int64, the most probable next token of each prompt, the same on every rank.
        positions: by prompt, where its tokens are in three dimensions, where items are among the prompts: ``[S, 3]``.
        parts: by prompt, what this rank holds of it.
    """

    hdp: Session
    prompts: list[Tensor]
    next_tokens: Tensor
    positions: Mapping[int, Tensor]
    parts: dict[int, Parts] = field(default_factory=dict)
    _logits: dict[int, Tensor] = field(default_factory=dict)

    @property
    def is_compileable(self) -> bool:
        """What ``generate`` asks of a cache. Raises ``ConfigError``: this is none."""
        raise refusal(
            self.hdp.structure.names[0],
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
        """The prompt's cache on ``rank``, of the class that its model makes; None on the others.

        The members send what they hold. Their own parts stay, so a cache may be gathered again. Raises ``ConfigError``
        for a model that leaves a part of its cache empty.
        """
        held = self._gathered(prompt, rank)
        if held is None:
            return None
        cache = _empty_cache(self.hdp)

        def rows_of(layer: int, kind: str) -> Tensor:
            keys = sorted(key for key in held if key[:2] == (layer, kind))
            runs = [[held.pop(key) for key in run] for _, run in groupby(keys, key=itemgetter(2))]
            return torch.cat([torch.cat(heads, dim=1) for heads in runs])

        for layer in sorted({key[0] for key in held if key[1] == "keys"}):
            cache.update(*(rows_of(layer, kind).transpose(0, 1)[None] for kind in ("keys", "values")), layer)
            if any(key[:2] == (layer, "index") for key in held):
                place, index_keys = cache.layers[layer], rows_of(layer, "index")[None]
                if hasattr(place, "update_index"):  # MiniMax M3
                    place.update_index(index_keys[None])
                else:
                    place.update_indexer(index_keys)
        for (layer, kind, *_), state in held.items():
            if hasattr(cache, "set_linear_cache"):
                cache.set_linear_cache(layer, state.mT[None])  # keys before values
            elif kind == "conv":
                cache.update_conv_state(state[None], layer)
            else:
                cache.update_recurrent_state(state[None], layer)
        for number, place in enumerate(cache.layers if type(cache) is DynamicCache else ()):
            states = getattr(place, "has_previous_state", {})
            if not all(states.values()) or not getattr(place, "is_initialized", True):
                raise refusal(
                    f"layer {number}",
                    f"its {type(place).__name__} has parts that no attention and no recurrence of it gave to prefill",
                    so="generate could not go on from what prefill gathers",
                    fix="call model.generate without a cache; next tokens and logits are known without it",
                )
        return cache

    def inputs(self, prompt: int, rank: int = 0) -> dict[str, Any] | None:
        """Arguments for ``model.generate`` on ``rank``: the prompt with its most probable next token, and its cache.

        ``generate`` then computes no token of the prompt again. Where the cache does not tell how many tokens it has
        seen (Mamba's, MiniMax's), the prompt is left out: it would be. On the other ranks None. With tp or pp no rank
        has a whole model: ``generate`` is then that of one which the caller has loaded beside it.
        """
        cache = self.cache(prompt, rank)
        if cache is None:
            return None
        parts = self.prompts[prompt], self.next_tokens[prompt, None]
        tokens = torch.cat([part.to(self.hdp.group.device) for part in parts])[None]
        mask = torch.ones_like(tokens)
        if all(getattr(layer, "keys", None) is None for layer in cache.layers):  # rows are multiplied by their mask
            tokens, mask = tokens[:, -1:], mask[:, -1:]
        elif cache.get_seq_length() == 0:
            tokens = tokens[:, -1:]
        given = {"input_ids": tokens, "attention_mask": mask, cache_name(causal_model(self.hdp.model)): cache}
        if (own := self.positions.get(prompt)) is not None:  # else the model counts on from what it has seen last
            own = torch.cat([own, (own.max() + 1).expand(1, 3)])
            own = torch.cat([torch.arange(len(own))[:, None], own], dim=1)
            given["position_ids"] = own.T[:, None].to(tokens.device)
        return given

    def free(self, prompt: int) -> None:
        """Forget this rank's part of a prompt's cache. What it shares with other prompts is kept as long as theirs."""
        self.parts.pop(prompt, None)

    def begin(self, micro: Micro) -> None:
        """Let the model's pass over a micro-batch keep what its layers give their caches."""
        is_shared = bool(micro.plan.trees)  # rows of several prompts, whose memory they share here, too
        spans: list[tuple[int, int, slice]] = []
        for prompt, start, places in micro.plan.rows_of_documents:
            for run in np.split(places, np.flatnonzero(np.diff(places) != 1) + 1) if len(places) else ():
                spans.append((prompt, start, slice(run[0], run[-1] + 1)))
                start += len(run)

        def keep(layer: int, kind: str, rows: Tensor, place: int) -> None:
            for prompt, start, span in spans:
                own = rows[span] if is_shared else rows[span].clone()
                self.parts.setdefault(prompt, {})[layer, kind, start, place] = own

        def keep_rows(keys: Tensor, values: Tensor, layer: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
            """``keys, values [1, H, T, D]`` are all that the layer sees of this rank."""
            place, is_kept = self._share(layer, keys, values)
            for kind, part in (("keys", keys), ("values", values)) if is_kept else ():
                keep(layer, kind, part[0].transpose(0, 1), place)
            return keys, values

        def keep_index(keys: Tensor, layer: int) -> None:
            """``keys [..., T, D]`` by which indexers choose."""
            if self._is_mine(layer):
                keep(layer, "index", keys.flatten(0, -2), 0)

        def keep_states(module: nn.Module, kind: str, states: Tensor) -> None:
            """``[F, ...]`` after each run of rows."""
            key = int(module.layer_idx), kind, 0, 0  # type: ignore[arg-type]
            by_heads = kind == "recurrent" and type(module).__name__ == "ZambaMambaMixer"  # calls of their own
            for number, (prompt, start, stop) in enumerate(micro.plan.runs) if self._is_mine(key[0]) else ():
                if start < stop == len(self.prompts[prompt]):
                    parts, state = self.parts.setdefault(prompt, {}), states[number].clone()
                    if by_heads:
                        state = torch.cat([*([parts.pop(key)] if key in parts else []), state[None]])
                    assert key not in parts, f"{type(module).__name__} has several {kind} states, and caches have one"
                    parts[key] = state

        micro.target.keep = keep_states
        cache = _empty_cache(self.hdp)
        cache.update, cache.update_indexer = keep_rows, keep_index
        micro.inputs |= {cache_name(causal_model(self.hdp.model)): cache, "use_cache": True}

    def _is_mine(self, layer: int, replicas: int | None = None) -> bool:
        """Whether this rank is the one that keeps what so many tensor-parallel ranks (None: all) have alike."""
        tp = self.hdp.mesh.tp
        return (tp.rank - layer) % (replicas or tp.size) == 0

    def _share(self, layer: int, keys: Tensor, values: Tensor) -> tuple[int, bool]:
        """Which part of the heads a layer has given its cache, and whether this rank keeps it."""
        tp = self.hdp.mesh.tp
        if tp.size == 1:
            return 0, True
        attentions = self.hdp.engine.decoder.attentions.items()
        own = next((own for module, own in attentions if getattr(module, "layer_idx", None) == layer), None)
        if own is not None and own.parts > 1:
            is_heads = (keys.shape[3], values.shape[3]) == (own.head_dim, own.value_dim)
            if keys.shape[1] == own.num_kv_heads and is_heads:
                replicas = tp.size // own.parts
                return tp.rank // replicas, self._is_mine(layer, replicas)
            if is_heads or keys.shape[1] > 1:
                own = None
        if own is None:
            raise ConfigError(
                f"layer {layer} gives its cache {keys.shape[1]} heads that are not those of its attention",
                so=f"which of all heads the {tp.size} tensor-parallel ranks have would not be known",
                fix="prefill with an HDP without tp",
            )
        return 0, self._is_mine(layer)

    def _gathered(self, prompt: int, rank: int) -> Parts | None:
        """All parts of a prompt on ``rank``; None on the others."""
        group, own = self.hdp.group, {**self.parts.get(prompt, {})}
        told = [[*key, list(part.shape), str(part.dtype).removeprefix("torch.")] for key, part in own.items()]
        table = all_gather_json(told, group.group, group.device)
        if not any(table):
            raise DataError(
                f"no rank has the keys and values of prompt {prompt} any more ({self.hdp.structure.names[0]})",
                so="generate could not go on from them",
                fix="call free(prompt) after cache(prompt) and inputs(prompt), on every rank",
            )
        if group.rank != rank:
            for part in own.values():
                group.exchange.start(send=part.contiguous(), to=rank, receive=None, source=rank, tag=0).wait()
            return None
        for source, line in enumerate(table):
            for *key, shape, dtype in line if source != rank else ():
                part = torch.empty(shape, dtype=getattr(torch, dtype), device=group.device)
                group.exchange.start(send=None, to=source, receive=part, source=source, tag=0).wait()
                own[tuple(key)] = part
        return own


@torch.no_grad()
def prefill(hdp: Session, prompts: Sequence[Prompt], ready: Ready | None = None) -> Prefill:
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
    rows = [{**prompt} if isinstance(prompt, Mapping) else {"tokens": prompt} for prompt in prompts]
    for own in rows:
        tokens = torch.as_tensor(own["tokens"], device="cpu")
        own["tokens"] = tokens[0] if tokens.dim() == 2 and len(tokens) == 1 else tokens  # tokenizers return [1, S]
    # Recurrences tell what they leave behind by run of rows; in a tree, which of them end a prompt is not looked up.
    given = BatchToPlan.of(
        hdp, rows, shift_labels=False, per_document=None if hdp.engine.decoder.attachment.mixers else (), whole=True
    )
    lengths, device = given.lengths, hdp.group.device
    fields = given.all_documents.fields
    result = Prefill(
        hdp, [*fields["tokens"].values()], torch.zeros(len(prompts), dtype=torch.int64), fields.get(POSITIONS, {})
    )
    next_tokens = torch.zeros(len(prompts), dtype=torch.int64, device=device)
    plan, forest = given.plan()
    if hdp.domain == 1:  # counts that are equal, backwards, would not meet at equal places
        plan = short_first(plan, cost_of_trees(hdp.cost, forest))
    if hdp.mesh.shape.pp > 1:  # or stages could wait for each other
        hdp.planner.check(plan)

    def end(micro: Micro) -> None:
        runs, own = micro.plan.rows_of_documents, range(micro.rows.start, micro.rows.stop)
        ends = {prompt: int(rows[-1]) for prompt, start, rows in runs if start + len(rows) == lengths[prompt]}
        ends = {prompt: row - own.start for prompt, row in ends.items() if row in own}
        hidden, head = hidden_states(hdp.model, micro.inputs)
        last_rows = to_device(torch.tensor([*ends.values()]), device)
        logits = head(hidden[0, last_rows]) if ends else hidden.new_zeros(0, 0)
        values_of = dict(zip(ends, logits.to(torch.promote_types(logits.dtype, torch.float32)), strict=True))
        result._logits.update(values_of)
        for prompt, values in values_of.items():
            next_tokens[prompt] = values.argmax()
            if ready is not None:
                ready(prompt, values)

    given.part(plan, forest).forward_backward(end, prepare=result.begin)
    result.next_tokens = hdp.group.all_reduce(next_tokens)
    return result


def _empty_cache(hdp: Session) -> Any:
    """As ``generate`` makes it. MiniMax alone has a class of its own."""
    if any(LIGHTNING in names_in(mixer) for mixer in hdp.engine.decoder.attachment.mixers):
        from transformers.models.minimax.modeling_minimax import MiniMaxCache

        return MiniMaxCache()
    return DynamicCache(config=causal_model(hdp.model).config)
