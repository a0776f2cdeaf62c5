"""A decoder of transformers on our attention: all that ``HDP``, the trainer and the commands know of it.

``runtime.Executor`` runs it in the trainer. In a loop that is not ours the caller runs the model, and this object opens
the passes.

Shape letters: T rows of a micro-batch, C hidden size, V vocabulary.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from bytescale.attention import PackedAttention
from bytescale.common.errors import ConfigError
from bytescale.cost.spec import ModelSpec
from bytescale.hf.model.blind import INDEXED, NUM_ROWS, Blind, LayerRecurrence
from bytescale.hf.model.changes import Snapshot
from bytescale.hf.model.costs import experts_of, spec_of
from bytescale.hf.model.head import ModelHead, embeddings_of, has_plain_head, hidden_states, require_words, words_of
from bytescale.hf.model.interface import KEYWORD, Attachment, names_in, refusal, while_set
from bytescale.hf.model.long_rope import fix_rope, longest_document_of, require_short_enough, unfix_rope
from bytescale.hf.model.passes import MicroBatchPass
from bytescale.hf.model.probe import LayerAttention, ModelStructure, probe
from bytescale.hf.model.stage import Stage, StageEnd
from bytescale.runtime.loss import Head, PlainHead

if TYPE_CHECKING:
    from bytescale.hf.model.balance import BalanceLoss
    from bytescale.hf.model.encoders import Encoders
    from bytescale.hf.model.indexer_loss import IndexerLoss, IndexerStage
    from bytescale.hf.model.token_rows import TokenRows


class HFDecoder(nn.Module):
    """A decoder of transformers that is on our attention (``runtime.DecoderModule``).

    Attributes:
        model: of transformers, or a module around it (peft); names of parameters are its own.
        structure: every layer's attention, as the probe has found it.
        attachment: of the model to our attention.
        attentions, mixers: the layers by module.
        words: see ``head.words_of``.
        stage: which pipeline stage it is; None: the whole model.
        frozen: names of parameters that are not trained since they choose keys (``selectors``).
        is_frozen: whether it is a second model, which runs without gradients.
        is_invariant: whether log-probabilities are the same to the last bit under any plan (``invariant``).
        token_rows: which rows this rank has, where it has a part of the model (``tensor_parallel``).
        balance: the loss for even use of experts; None: there is none.
        indexer_loss: the loss of indexers; None: they are not trained. ``learned``: its stage and coefficient.
    """

    def __init__(
        self, model: nn.Module, *, longest_document: int | None = None,
        indexer_loss: tuple[IndexerStage, float] | None = None, invariant: bool = False,
    ) -> None:  # fmt: skip
        """Attach. ``longest_document``: for which rotary positions that depend on the longest one are fixed.

        ``indexer_loss``: the stage and the coefficient of the loss by which indexers are trained.

        Raises ``ConfigError`` where a plan would not give the results of one process, with the part that is in the way.
        The model is then as it was.
        """
        super().__init__()
        if any("is_cut" in vars(module) for module in model.modules()):
            raise ConfigError(
                "the model is a rank's part of itself, which HDP(..., tp=..., pp=...) has made",
                so="it has some heads, columns or layers alone, and could not be attached again",
                fix="make the model anew",
            )
        self.model = model
        self.frozen, self.words = list[str](), words_of(model)
        with ExitStack() as undo:
            self.attachment = Attachment(model)
            undo.callback(self.attachment.detach)
            if any(names_in(module) & INDEXED for module in model.modules()):
                from bytescale.hf.model.selectors import Selectors  # few models choose keys

                selectors = Selectors(model, learn=indexer_loss is not None)
                undo.callback(selectors.detach)
                self.frozen = list(selectors.frozen)
            undo.callback(unfix_rope, fix_rope(model, longest_document))
            self.longest_document = longest_document_of(model)
            self.structure: ModelStructure = probe(model)
            if any(layer.selection for layer in self.structure.layers) and not next(model.parameters()).is_meta:
                from bytescale.hf.model.same_choice import require_same_choice

                require_same_choice(model, self.structure.layers)
            self.indexer_loss: IndexerLoss | None = None
            self.learned = indexer_loss
            if indexer_loss is not None:
                from bytescale.hf.model.indexer_loss import IndexerLoss  # few models choose keys

                self.indexer_loss = IndexerLoss(model, self.structure.layers, *indexer_loss)
            self.undo = undo.pop_all()  # closed, it leaves the model as it was before
        modules = {name or type(module).__name__: module for name, module in model.named_modules()}
        self.attentions: dict[nn.Module, LayerAttention] = {modules[own.name]: own for own in self.structure.layers}
        self.mixers: dict[nn.Module, LayerRecurrence] = {modules[mixer.name]: mixer for mixer in self.structure.mixers}
        self._snapshot = Snapshot(model, self.attentions)
        self.num_calls = len(self.structure.names)
        self.stage: Stage | None = None
        self.is_frozen, self.is_invariant = False, invariant
        self.token_rows: TokenRows | None = None
        self.balance: BalanceLoss | None = None
        self._random = {name: modules.get(name, model) for name in self.structure.random_parts}
        self._plain_heads: dict[int, bool] = {}
        self._whole_sizes: dict[int, int] = {}
        if invariant:
            from bytescale.hf.model.invariant import require_invariance  # few loops ask for it

            require_invariance(self)

    def is_in(self, model: nn.Module) -> bool:
        """Whether ``model`` is the attached model or a module around it."""
        return model is self.model or self.attentions.keys() | self.mixers.keys() <= set(model.modules())

    def require_fitting(self, fields: Mapping[str, Mapping[int, Tensor]], lengths: Sequence[int]) -> None:
        """Raise ``DataError`` for words (``require_words``) or ``lengths`` of documents that the model lacks."""
        require_words(fields, self.model, self.words)
        require_short_enough(lengths, self.longest_document)

    def require_unchanged(self, *, with_training: bool) -> None:
        """Raise ``ConfigError`` if the model is not what it was (``changes``)."""
        if change := self._snapshot.change(with_training=with_training):
            raise ConfigError(
                f"the model has changed since HDP(...) or hdp.adamw(): {change}",
                so="what was found then, and what the optimizer trains, is of another model",
                fix="change, freeze and unfreeze before HDP(...) and hdp.adamw(), or make both anew",
            )

    def begin_training(self) -> None:
        """From now on, what is trained stays as it is, too."""
        self._snapshot = Snapshot(self.model, self.attentions)

    def note_heads(self, layers: Iterable[LayerAttention]) -> None:
        """The model has become a part of itself, with these heads. Its counts, parts and head stay as they were."""
        self.structure = replace(self.structure, layers=tuple(layers))
        by_name = {layer.name: module for module, layer in self.attentions.items()}
        self.attentions = {by_name[layer.name]: layer for layer in self.structure.layers}
        self.begin_training()

    @property
    def splits_loss(self) -> bool:
        """Whether this rank has the hidden states, and so the loss, of its own rows alone (``runtime.Decoder``)."""
        return self.token_rows is not None and self.token_rows.splits_loss

    def require_no_randomness(self) -> None:
        """Raise ``ConfigError`` for a model that draws random numbers in the mode that it is in."""
        for name in (name for name, module in self._random.items() if module.training):
            raise refusal(
                name,
                "it draws random numbers in training mode (dropout or jitter)",
                so="results would depend on the plan and on the number of ranks",
                fix="set every dropout probability to 0, in config.json or when the model is loaded "
                "(attention_dropout=0.0, resid_pdrop=0.0, ...), or call model.eval()",
            )

    @cached_property
    def encoders(self) -> Encoders:
        """What makes rows of images, videos and sounds."""
        from bytescale.hf.model.encoders import Encoders  # few models have them

        return Encoders(self.model, self.attachment, self.undo)

    @cached_property
    def choosers(self) -> dict[str, int]:
        """Names of the layers whose own indexers choose keys, in the model's order, and at most how many."""
        if self.indexer_loss is not None and self.indexer_loss.is_dense:
            return {}
        return {
            layer.name: layer.selection.num_keys
            for module, layer in self.attentions.items()
            if layer.selection is not None and any(names_in(part) & INDEXED for part in module.modules())
        }

    @cached_property
    def layers(self) -> list[nn.Module]:
        """The decoder's layers: of every attention and recurrence, the numbered module around it, in the model's order.

        Raises ``ConfigError`` where one of them does not lie in numbered modules.
        """
        names = set[str]()
        for name in self.structure.names:
            numbered = re.match(r"(.*?\.\d+)(\.|$)", name)
            if numbered is None:
                raise refusal(
                    name,
                    "it does not lie in a numbered list of layers",
                    so="it could not be told where a layer begins, and when its gradients are complete",
                    fix="use a model whose layers are a numbered list (nn.ModuleList)",
                )
            names.add(numbered[1])
        return [module for name, module in self.model.named_modules() if name in names]

    def kind_of(self, layer: nn.Module) -> tuple[object, ...]:
        """Layers of one kind have the same classes, sizes of parameters and rules of attention."""
        inside = list(layer.modules())
        rules = tuple(self.attentions[module].rules for module in inside if module in self.attentions)
        sizes = tuple((name, tuple(parameter.shape)) for name, parameter in layer.named_parameters())
        return tuple(map(type, inside)), sizes, rules

    @property
    def parts(self) -> list[nn.Module]:
        """Embedding, layers and head (``lockstep.Units``), an empty module in place of one that does not exist."""
        embedding, head = (module or nn.Module() for module in embeddings_of(self.model))
        return [embedding, *self.layers, head]

    @property
    def experts(self) -> list[nn.Module]:
        return experts_of(self.model)

    def require_experts(self, domain: int) -> None:
        """Raise ``ConfigError`` unless the ranks of a ``domain`` can have the experts in parallel."""
        if not self.experts:
            raise refusal(
                "the model",
                "it has no mixture of experts whose weights transformers stacks and which have no adapters",
                so="no token could travel to another rank's experts",
                fix='leave experts = "parallel" out',
            )
        from bytescale.runtime.experts import num_experts_of  # of mixtures in parallel

        for module in self.experts:
            num_experts_of(module, domain)
        _ = self.spec  # counted while the experts are here
        self._whole_sizes = {id(p): p.numel() for module in self.experts for p in module.parameters()}

    def size_of(self, parameter: Tensor) -> int:
        """Numbers of a parameter, also of experts of which this rank has a part."""
        return self._whole_sizes.get(id(parameter), parameter.numel())

    @cached_property
    def spec(self) -> ModelSpec:
        return spec_of(self.model, self.structure, stage=self.learned and self.learned[0])

    @cached_property
    def model_head(self) -> ModelHead:
        """From hidden states to logits, by the model's own code."""
        rows = torch.arange(NUM_ROWS, device=next(self.model.parameters()).device)[None] % 2
        blind = Blind({module: layer.name for module, layer in self.attentions.items()})
        with torch.no_grad():
            inputs = {"input_ids": rows, "position_ids": rows, "use_cache": False, KEYWORD: blind}
            return hidden_states(self.model, inputs)[1]

    @cached_property
    def head(self) -> Head:
        """The same as the runtime computes it fastest."""
        return self.fastest(self.model_head)

    def fastest(self, head: ModelHead) -> Head:
        """``head`` as the runtime computes it fastest: by its own kernels, if it is plain."""
        weight, key = head.weight, id(head.weight)
        if key not in self._plain_heads:
            self._plain_heads[key] = has_plain_head(head)
        if not self._plain_heads[key] or weight is None:
            return replace(head, arithmetic=self.arithmetic)
        return PlainHead(weight, arithmetic=self.arithmetic)

    @property
    def arithmetic(self) -> Callable[[], AbstractContextManager[Any]]:
        """Makes the context in which the model computes with each row."""
        if not self.is_invariant:
            return nullcontext
        from bytescale.hf.model.invariant import FixedProducts  # few loops ask for it

        return FixedProducts

    @property
    def head_weight(self) -> Tensor:
        """``[V, C]`` of a plain head."""
        weight = self.model_head.weight
        assert weight is not None, "only a plain head is asked for its weight"
        return weight

    @property
    def hidden_size(self) -> int:
        return self.model_head.hidden_size

    def late_parameters(self) -> set[str]:
        """Names of parameters whose gradients may change until the last backward ends: they are reduced after it.

        A layer's own gradients are complete when backward has left the layer, and an untied head's when it enters the
        last one. All others may be used anywhere, and a ``balance`` adds to those of routers at the end. So are
        parameters late that several layers have.
        """
        uses: dict[int, int] = {}
        for layer in self.layers:
            for parameter in layer.parameters():
                uses[id(parameter)] = uses.get(id(parameter), 0) + 1
        early = {key for key, count in uses.items() if count == 1}
        early -= set(map(id, self.balance.parameters())) if self.balance else set()
        embedding, head = (getattr(module, "weight", None) for module in embeddings_of(self.model))
        if head is not None and head is not embedding:
            early.add(id(head))
        return {name for name, parameter in self.model.named_parameters() if id(parameter) not in early}

    def keep_stage(self, stage: Stage, layers: Sequence[nn.Module]) -> None:
        """From now on this is a pipeline ``stage`` with these of the ``layers``."""
        inside = {module for layer in layers for module in layer.modules()}
        self.stage = stage
        if self.balance is not None:
            self.balance.keep(inside)
        vars(self)["layers"] = [layer for layer in self.layers if layer in inside]
        self.attentions = {module: layer for module, layer in self.attentions.items() if module in inside}
        self.mixers = {module: mixer for module, mixer in self.mixers.items() if module in inside}
        names = {layer.name for layer in self.attentions.values()} | {mixer.name for mixer in self.mixers.values()}
        calls, mixers = self.structure.layers, self.structure.mixers
        self.structure = replace(
            self.structure,
            layers=tuple(layer for layer in calls if layer.name in names),
            mixers=tuple(mixer for mixer in mixers if mixer.name in names),
        )
        self.num_calls = len(self.structure.names)
        vars(self.model)["is_cut"] = True
        self.begin_training()

    def input_of(self, tokens: Tensor) -> Tensor:
        """What ``forward`` takes for ``tokens [T]``: themselves, or zeros ``[T, C]`` from the stage before."""
        if self.stage is None or self.stage.is_first:
            return tokens
        weight = next(p for p in self.model.parameters() if p.numel())
        rows = len(tokens) if self.token_rows is None else len(self.token_rows.tokens(tokens))
        received = self.own_rows(weight.new_zeros(rows, self.hidden_size), len(tokens))
        return received.requires_grad_(torch.is_grad_enabled())

    def forward(
        self,
        inputs: Tensor,
        position_ids: Tensor,
        attention: PackedAttention,
        *,
        beside: Mapping[str, Any] | None = None,
    ) -> Tensor:
        """``tokens, position_ids [T]`` int64 -> hidden states ``[T, C]`` after the final norm.

        ``beside``: what the model is given beside these (``loop.encoded``), or in their place.

        Of a pipeline stage, the tokens or the output of the stage before, and this stage's output. Outputs between
        stages are those of this rank's rows, ``[t, C]``, and with ``splits_loss`` the last ones, too.
        """
        num_rows, received = len(position_ids), None
        if self.stage is not None and not self.stage.is_first:
            received, inputs = inputs, torch.zeros_like(position_ids)
        if not num_rows:  # transformers' models need a row; it stands for none
            inputs, position_ids = inputs.new_zeros(1), position_ids.new_zeros(1)
        if self.token_rows is not None:
            inputs = self.token_rows.tokens(inputs)
        target = MicroBatchPass(self, lambda dtype: attention, num_rows)
        given: dict[str, Any] = {"input_ids": inputs[None], "position_ids": position_ids[None], "use_cache": False}
        with self.receiving(received, len(inputs)):
            return self.output({**given, **(beside or {}), KEYWORD: target}, num_rows)

    def receiving(self, received: Tensor | None, num_inputs: int) -> AbstractContextManager[None]:
        """Makes the context of a pass on ``num_inputs`` rows, from the ``[t, C]`` of the stage before, if there is."""
        if received is not None:
            received = nn.functional.pad(received, (0, 0, 0, num_inputs - len(received)))[None]
        return while_set(filter(None, [self.stage]), "received", received)

    def output(self, inputs: dict[str, Any], num_rows: int) -> Tensor:
        """What ``forward`` returns, from the model's own inputs, in a context of ``receiving``."""
        try:
            hidden, _ = hidden_states(self.model, inputs)
        except StageEnd as end:
            inputs[KEYWORD].require_all_calls()
            return self.own_rows(end.hidden[0], num_rows)
        return hidden[0, :num_rows] if self.token_rows is None else self.token_rows.output(hidden[0], num_rows)

    def own_rows(self, rows: Tensor, num_rows: int) -> Tensor:
        """Of the rows that the model computes with, those that are this rank's of ``num_rows`` tokens: ``[t, C]``."""
        return rows[:num_rows] if self.token_rows is None else self.token_rows.own(rows, num_rows)


def require_beside_first(model: nn.Module, first: nn.Module, *, same_tokenizer: bool = False) -> None:
    """Raise ``ConfigError`` for a second model that cannot be one beside the first. Both are whole."""
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
