"""Tensor and sequence parallelism of any decoder of transformers, from its plan (``base_model_tp_plan``) as data.

With N ranks, T tokens of a micro-batch and n = ceil(T / N) rows of each rank, of which the last ranks pad some::

    residual stream, norms, routers   [n, C]     each rank its rows, all channels
    a region                          [T, C/N]   gather; all rows, each rank its heads or columns; scatter
    a mixer without a plan            [T, C]     gather; all rows, all channels, on every rank; keep own rows

A *region* is the smallest module around a part that the plan cuts by columns and one that it cuts by rows: attention, a
dense feed-forward part, all experts of a mixture, its shared experts. Whatever the plan cuts elsewhere stays whole,
which is right there, since a row is on one rank only. So every whole parameter has a partial sum of its gradient on
each rank; they are added up once a step (``Cut.replicas``). Inside a region the same holds: its output is the sum of
what ranks compute, hence all that is added to it is either cut or counted by one rank (biases of row-wise parts).

Embedding and head are cut by words where the head is plain. Otherwise both stay whole, and each rank has the loss of
its own rows (``splits_loss``).

A plan says little of a module's code. So the model runs on a few tokens, whole and cut (``cut_check``), and a type
whose results differ is refused by name.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bytescale.common.cut import Cut
from bytescale.common.errors import ConfigError
from bytescale.hf.model.beside_products import BesideProducts
from bytescale.hf.model.blind import NUM_ROWS, Blind, run_blind
from bytescale.hf.model.cut_check import difference, sample
from bytescale.hf.model.decoder import HFDecoder
from bytescale.hf.model.head import causal_model, embeddings_of
from bytescale.hf.model.probe import LayerAttention, layer_of
from bytescale.hf.model.token_rows import GatherColumns, TokenRows, gather_around
from bytescale.runtime.group import RankGroup
from bytescale.runtime.loss import PlainHead
from bytescale.runtime.token_shards import TokenShards

_COLUMNS = ("colwise", "packed_colwise", "colwise_gather_output")
_ROWS = ("rowwise", "packed_rowwise", "rowwise_split_input")
_EXPERTS, _IDENTITY = "moe_tp_experts", "moe_identity_expert"
_WHOLE = ("replicated_with_grad_allreduce", "mla_kv_a_proj", "local_params", "replicate", "all_reduce")
"""Nothing is done for these: all gradients inside of a region are partial sums anyway."""
_EMBEDDINGS = ("embedding_rowwise", "embedding_colwise")


def apply_tensor_parallelism(decoder: HFDecoder, shards: TokenShards, *, cuts_words: bool = True) -> dict[str, Cut]:
    """Reduce an attached, whole model to one rank's part. All tensor-parallel ranks call it together.

    Returns the cut of every parameter, by its name in ``decoder.model``. ``decoder.head`` is then the head to use, and
    ``decoder.splits_loss`` says whether each rank has the loss of its own rows.

    It is compared in single precision, if its weights have less: rounding would hide most faults. A model of shapes
    alone is cut and not compared. ``cuts_words``: whether embedding and head may be cut.

    Raises ``ConfigError`` with what is in the way: before anything is changed where the plan shows it, and afterwards
    where the cut model does not compute what the whole one did.
    """
    _ = decoder.spec, decoder.head, decoder.layers  # found by passes of the whole model
    plan = _Plan.of(decoder, shards.tp, cuts_words=cuts_words)
    cuts = plan.cuts()
    round_again = _widen(decoder.model)
    num_words = min(len(module.weight) for module in embeddings_of(decoder.model) if module is not None)
    is_hollow = next(decoder.model.parameters()).is_meta
    whole = {name: Cut(shape=cut.shape) for name, cut in cuts.items()}
    before = None if is_hollow else sample(decoder, shards.tp, whole, num_words)
    plan.replace_parameters(cuts)
    vars(decoder.model)["is_cut"] = True
    rows = decoder.token_rows = TokenRows(shards, splits_loss=not plan.cuts_words)
    if isinstance(decoder.head, PlainHead):
        decoder.head = PlainHead(decoder.head_weight, shards.tp.group if plan.cuts_words else None)
    plan.add_messages(rows, cuts)
    try:
        decoder.note_heads(_heads(decoder))
        after = None if is_hollow else sample(decoder, shards.tp, cuts, num_words)
    except (ConfigError, RuntimeError) as error:
        raise _refused(decoder, f"the cut model fails ({' '.join(str(error).split())})") from error
    if before is not None and after is not None and (found := difference(before, after, shards.tp)):
        raise _refused(decoder, f"as its plan cuts it, it differs in {found}")
    round_again()
    decoder.begin_training()
    return cuts


def planned_cuts(decoder: HFDecoder, num_ranks: int) -> dict[str, Cut]:
    """What the first of ``num_ranks`` ranks would have of every parameter. The model stays whole, and nothing is run.

    Raises ``ConfigError`` for what the plan of transformers shows to be impossible.
    """
    return _Plan.of(decoder, _Rank(0, num_ranks)).cuts()


class _Rank(NamedTuple):
    """A rank that is not there."""

    rank: int
    size: int


@dataclass(frozen=True)
class _Plan:
    """What is cut, and where rows are gathered."""

    decoder: HFDecoder
    tp: RankGroup | _Rank
    styles: dict[str, str]
    """Of modules and parameters inside of regions, by name."""
    regions: dict[str, bool]
    """Names of modules that get all rows, with whether their results are partial sums; otherwise they are whole."""
    cuts_words: bool

    @staticmethod
    def of(decoder: HFDecoder, tp: RankGroup | _Rank, *, cuts_words: bool = True) -> _Plan:
        model = decoder.model
        modules, root = dict(model.named_modules()), causal_model(model)
        prefix = next(name for name, module in modules.items() if module is root)
        plan = {f"{prefix}.{key}" if prefix else key: style for key, style in (root._tp_plan or {}).items()}
        lists = {re.split(r"\.\d+(?:\.|$)", name)[0] for name in decoder.structure.names}
        names = [*modules, *(name for name, _ in model.named_parameters())]
        styles = {
            name: style
            for name in names
            if any(name.startswith(own + ".") for own in lists)
            and (style := plan.get(re.sub(r"\.\d+(?=\.|$)", ".*", name))) is not None
        }
        if unknown := sorted(set(styles.values()) - {*_COLUMNS, *_ROWS, *_WHOLE, *_EMBEDDINGS, _EXPERTS, _IDENTITY}):
            raise _refused(decoder, f"its plan cuts parts in the style {unknown[0]!r}, which is not known here")
        # 1. Regions: experts, and whatever has a row-wise part, if it has a column-wise one, too.
        regions = {name for name, style in styles.items() if style == _EXPERTS}
        for name, style in styles.items():
            region = name.rpartition(".")[0]
            own = [styles.get(f"{region}.{key}") for key, _ in modules[region].named_children()] if region else []
            if style in _ROWS and region not in regions and any(other in _COLUMNS for other in own):
                regions.add(region)
        if not regions:
            has_plan = any("*" in key for key in plan)
            why = "the plan of transformers cuts none of its layers" if has_plan else "transformers has no plan for it"
            raise _refused(decoder, f"{why} (base_model_tp_plan)")
        # 2. What mixes tokens outside of them runs whole.
        found = dict.fromkeys(sorted(regions), True)
        for name in decoder.structure.names:
            if not any(_is_in(name, region) for region in regions):
                found[name] = False
        for name in found:
            if outer := next((other for other in found if other != name and _is_in(name, other)), None):
                raise _refused(decoder, f"{name} is cut inside of {outer}, which is cut or run whole itself")
        styles = {
            name: style
            for name, style in styles.items()
            for region, is_partial in found.items()
            if _is_in(name, region) and (is_partial or style == "colwise_gather_output")
        }
        for name, style in styles.items():
            if name in modules and style in (*_COLUMNS, *_ROWS) and not modules[name]._parameters:
                raise _refused(decoder, f"{name} has no weight of its own, but parts (adapters, quantised weights)")
        embedding, head = embeddings_of(model)
        words = [len(module.weight) for module in (embedding, head) if module is not None]
        cuts_words &= isinstance(decoder.head, PlainHead) and not any(number % tp.size for number in words)
        return _Plan(decoder, tp, styles, found, cuts_words and isinstance(embedding, nn.Embedding))

    def cuts(self) -> dict[str, Cut]:
        """Of every parameter. Raises ``ConfigError`` where ranks do not divide it."""
        result = {}
        words = {id(module.weight) for module in embeddings_of(self.decoder.model) if module is not None}
        for name, parameter in self.decoder.model.named_parameters():
            shape = tuple(parameter.shape)
            if id(parameter) in words and self.cuts_words:
                result[name] = Cut(shape=shape, index=self.tp.rank, count=self.tp.size)
                continue
            result[name] = self._cut(name, shape) or Cut(shape=shape, replicas=self.tp.size, replica=self.tp.rank)
        return result

    def _cut(self, name: str, shape: tuple[int, ...]) -> Cut | None:
        """None: the parameter stays whole."""
        owner, _, leaf = name.rpartition(".")
        style = self.styles.get(name) or self.styles.get(owner)
        if style not in (*_COLUMNS, *_ROWS) or (style in _ROWS and leaf == "bias"):
            return None
        dim = len(shape) - 1 if style in _ROWS else max(0, len(shape) - 2)
        packs = 2 if style.startswith("packed") and len(shape) > 1 else 1
        size, ranks = shape[dim] // packs, self.tp.size
        region = next(region for region in self.regions if _is_in(name, region))
        layer = next((layer for layer in self.decoder.structure.layers if _is_in(layer.name, region)), None)
        count = ranks
        if layer is not None and style == "colwise":
            heads = layer.num_heads
            if width := {"k_proj": layer.head_dim, "v_proj": layer.value_dim}.get(owner.rpartition(".")[2]):
                heads = size // width
                count = min(ranks, heads) if ranks % heads == 0 else ranks
            if heads % count:
                raise _refused(self.decoder, f"{name} has {heads} heads, which {ranks} ranks do not share evenly")
        if shape[dim] % packs or size % count:
            if style == "colwise_gather_output":
                return None
            raise _refused(self.decoder, f"{name} is {size} wide, which {ranks} ranks do not share evenly")
        index, replica = divmod(self.tp.rank, ranks // count)
        return Cut(
            shape=shape, dim=dim, index=index, count=count, replicas=ranks // count, replica=replica, packs=packs
        )

    def replace_parameters(self, cuts: dict[str, Cut]) -> None:
        """Put this rank's parts in the place of parameters, also where several modules share one; adjust numbers."""
        parts = {
            id(old): nn.Parameter(cuts[name].of(old.detach()).clone(), requires_grad=old.requires_grad)
            for name, old in self.decoder.model.named_parameters()
        }
        for module in self.decoder.model.modules():
            for key, old in module._parameters.items():
                if old is not None:
                    module._parameters[key] = parts[id(old)]
            if isinstance(module, nn.Linear):
                module.out_features, module.in_features = module.weight.shape
        for name, module in self.decoder.model.named_modules():
            layer = self.decoder.attentions.get(module)
            region = next((region for region in self.regions if _is_in(name, region)), None)
            if layer is not None and region is not None:
                columns = [key for key, style in self.styles.items() if style == "colwise" and _is_in(key, region)]
                if columns:
                    _divide_heads(module, layer, self.tp.size)

    def add_messages(self, rows: TokenRows, cuts: dict[str, Cut]) -> None:
        modules, tp = dict(self.decoder.model.named_modules()), rows.shards.tp
        # 1. An embedding of some words adds up over ranks.
        embedding, _ = embeddings_of(self.decoder.model)
        if self.cuts_words:
            if embedding.padding_idx is not None:  # the row of this word has no gradient
                own = embedding.padding_idx - tp.rank * len(embedding.weight)
                embedding.padding_idx = own if 0 <= own < len(embedding.weight) else None
            embedding.forward = partial(rows.embedded, embedding)
        # 2. Regions get all rows.
        for name, is_partial in self.regions.items():
            is_mixture = self.styles.get(name) == _EXPERTS
            beside = self._beside(name, rows) if is_partial and not is_mixture else None
            gather_around(modules[name], rows, is_partial=is_partial, takes_choices=is_mixture, beside=beside)
        # 3. Parts of regions.
        for name, style in self.styles.items():
            module = modules.get(name, nn.Module())
            cut = cuts.get(f"{name}.weight")
            if style == "colwise_gather_output" and cut is not None and cut.count > 1:
                module.register_forward_hook(lambda module, args, out: GatherColumns.apply(out, tp))
            elif style == "rowwise_split_input":
                module.register_forward_pre_hook(lambda module, args: (args[0].chunk(tp.size, -1)[tp.rank], *args[1:]))
            elif style == _IDENTITY:
                module.register_forward_pre_hook(lambda module, args: (args[0] / tp.size, *args[1:]))
            if style in _ROWS and getattr(module, "bias", None) is not None and tp.rank > 0:  # the first rank adds it
                module.forward = partial(_without_bias, module)

    def _beside(self, region: str, rows: TokenRows) -> BesideProducts:
        """The region's products beside which messages may travel."""
        linears: dict[str, list[nn.Linear]] = {"colwise": [], "rowwise": []}
        for key, module in self.decoder.model.get_submodule(region).named_children():
            if type(module) is nn.Linear and (style := self.styles.get(f"{region}.{key}", "")) in linears:
                linears[style].append(module)
        last = [linear for linear in linears["rowwise"] if linear.bias is None]
        return BesideProducts(rows.shards, linears["colwise"], last[0] if len(last) == 1 else None)


def _widen(model: nn.Module) -> Callable[[], None]:
    """Make numbers of half precision fp32. Returns a function that undoes it, which loses nothing."""
    half = {
        name: value.dtype
        for name, value in (*model.named_parameters(), *model.named_buffers())
        if value.dtype in (torch.bfloat16, torch.float16)
    }
    model._apply(lambda value: value.float() if value.dtype in half.values() else value)

    def undo() -> None:
        for name, value in (*model.named_parameters(), *model.named_buffers()):
            value.data = value.data.to(half.get(name, value.dtype))

    return undo


def _without_bias(module: nn.Linear, rows: Tensor) -> Tensor:
    return F.linear(rows, module.weight)


def _is_in(name: str, region: str) -> bool:
    return name == region or name.startswith(region + ".")


def _divide_heads(module: nn.Module, layer: LayerAttention, num_ranks: int) -> None:
    """Numbers of heads that the code of an attention reads from itself."""
    for key, value in vars(module).items():
        is_number = type(value) is int and "head" in key and not re.search("dim|size|group|per", key)
        if is_number and value in (layer.num_heads, layer.num_kv_heads):
            setattr(module, key, max(1, value // num_ranks))


def _heads(decoder: HFDecoder) -> Iterator[LayerAttention]:
    """Every layer's attention as this rank computes it."""
    assert decoder.token_rows is not None, "it has been cut"
    blind = Blind({module: layer.name for module, layer in decoder.attentions.items()})
    device = next(decoder.model.parameters()).device
    tokens = decoder.token_rows.tokens(torch.ones(NUM_ROWS, dtype=torch.int64, device=device))
    with torch.no_grad():
        run_blind(decoder.model, blind, torch.arange(NUM_ROWS, device=device), tokens)
    before = [decoder.attentions[call.module] for call in blind.calls]
    found = (layer_of(call, layer.name) for call, layer in zip(blind.calls, before, strict=True))
    return (
        replace(own, selection=layer.selection, parts=layer.num_kv_heads // own.num_kv_heads)
        for own, layer in zip(found, before, strict=True)
    )


def _refused(decoder: HFDecoder, what: str) -> ConfigError:
    return ConfigError(
        f"{type(causal_model(decoder.model)).__name__} cannot be cut for tensor parallelism: {what}",
        so="its results would not be those of one process, or ranks would have unequal parts",
        fix='leave parallel.tp at 1, or use another number of ranks; shard = "parameters" cuts any model',
    )
