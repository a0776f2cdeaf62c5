"""The encoders of images, videos and sounds that a model of transformers has, by what transformers calls them.

A model with encoders takes what they made by the keyword ``mm_encoder_outputs``, looks for the tokens that stand for it
(*placeholders*), and puts one row there for each, in order. So an encoder may run on another rank than the text:
``loop.encoded`` runs it there, and hands its rows to the micro-batches. Sounds, and types without the keyword, get
their rows as if these were pixels, and the method that would encode them gives them back. There is no list of model
types: a model is tried on a few tokens.

An *item* is an image, a video or a sound: what the model's processor returns for one of it, such as ``pixel_values``
and ``image_grid_thw``.

Shape letters: S tokens of a document, P patches of an item, n placeholders of an item, C hidden size, W = C times one
more than the layers that get rows of their own (deepstack).
"""

from __future__ import annotations

import inspect
import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers.utils import ModelOutput

from bytescale.common.errors import DataError
from bytescale.hf.model.blind import Blind, MaskFunction
from bytescale.hf.model.head import KINDS, causal_model
from bytescale.hf.model.interface import KEYWORD, Attachment, refusal, while_set
from bytescale.hf.model.probe import Noticed
from bytescale.hf.model.stage import StageEnd

Item = Mapping[str, Any]
_DOOR = "mm_encoder_outputs"
_TYPES = ("mm_token_type_ids", "token_type_ids")


class Form(NamedTuple):
    """How an encoder's output looks, beside its rows."""

    has_gradient: bool
    are_lists: Sequence[bool]
    dims: Sequence[int]
    hidden_size: int
    width: int
    dtype: str


@dataclass
class _Encoded(ModelOutput):
    """What an encoder gives, as models of transformers take it."""

    last_hidden_state: Any = None
    pooler_output: Any = None
    deepstack_features: Any = None
    attention_mask: Any = None


class Encoders:
    """The encoders of one attached model.

    Attributes:
        kinds: which of ``KINDS`` it has, each with the word that stands for it in a text.
    """

    def __init__(self, model: nn.Module, attachment: Attachment, undo: ExitStack) -> None:
        """``undo``: learns what leaves the modules as they were."""
        self.root, self._attachment = causal_model(model), attachment
        self._names = inspect.signature(self.root.forward).parameters
        config = getattr(self.root, "config", None)
        names = "compute_3d_position_ids", "get_rope_index"  # with the second alone, items are an error
        rotary = (own for name in names for own in self.root.modules() if hasattr(type(own), name))
        self._rotary: Any = next(rotary, None)
        self.kinds, self._calls = dict[str, int](), dict[str, list[Callable[..., Any]]]()  # from the outside inwards
        for kind, name in ((kind, f"get_{kind}_features") for kind in KINDS):
            owners = [own for own in self.root.modules() if hasattr(type(own), name)]
            if owners and (word := getattr(config, f"{kind}_token_id", None)) is not None:
                calls = [own.args[0] if isinstance(own, partial) else own for own in (getattr(o, name) for o in owners)]
                self.kinds[kind], self._calls[kind] = word, calls  # partial: of another HDP
                for own, call in zip(owners, calls, strict=True):
                    setattr(own, name, partial(_given_or, call))
                    undo.callback(_leave, own, name, vars(own)[name])
        self.tried = set[str]()  # kinds whose rows the model is known to take
        self._settled = set[tuple[str, int]]()  # kinds that draw no random numbers in a mode
        self.by_frames = dict[str, bool]()  # whether frames are encoded by themselves, of kinds that were tried

    def _call(self, kind: str) -> Callable[..., Any]:
        """The outermost method that encodes such items and has names for their parts."""
        named = (call for call in self._calls[kind] if "args" not in inspect.signature(call).parameters)
        return next(named, self._calls[kind][-1])

    def kinds_of(self, tokens: Tensor) -> Tensor:
        """``[S]``: of each token 1 + the place of its kind in ``KINDS``, and 0 for words."""
        found = torch.zeros_like(tokens)
        for kind, word in self.kinds.items():
            found = found.masked_fill(tokens == word, 1 + KINDS.index(kind))
        return found

    def counts(self, tokens: Tensor) -> dict[str, int]:
        """How many tokens stand for items of each kind."""
        return {kind: int((tokens == word).sum()) for kind, word in self.kinds.items()}

    def positions(self, number: int, tokens: Tensor, items: Mapping[str, Sequence[Item]]) -> Tensor | None:
        """``[S, 3]`` rotary positions of a document: time, height, width; None: the model counts tokens."""
        if self._rotary is None:
            return None
        counted = torch.arange(len(tokens))[:, None].expand(-1, 3)
        if not any(items.values()):
            return counted
        given: dict[str, Any] = dict.fromkeys(_TYPES, self.kinds_of(tokens)[None].to(torch.int32))
        given |= {"input_ids": tokens[None], "attention_mask": torch.ones_like(tokens[None])}
        wanted = inspect.signature(self._rotary.compute_3d_position_ids).parameters
        for own in items.values():
            for name in own[0].keys() & {*wanted, "feature_attention_mask"} if own else ():
                values = [torch.as_tensor(item[name]) for item in own]
                given[name] = torch.cat([value.reshape(1) if value.dim() == 0 else value for value in values])
                if name == "feature_attention_mask":
                    given["audio_feature_lengths"] = given[name].sum(dim=1)
        try:
            with while_set([self._rotary], "rope_deltas", None):
                found = self._rotary.compute_3d_position_ids(**{name: given.get(name) for name in wanted})
        except (ValueError, RuntimeError, IndexError, StopIteration, TypeError) as error:
            raise DataError(
                f"document {number}: {type(self._rotary).__name__} finds no positions for its tokens ({error!r})",
                so="its images could not be told apart",
                fix="give the tokens and the items that the model's own processor makes of one text",
            ) from error
        return counted if found is None else found[:, 0].T

    def work(self, kind: str, item: Item) -> list[float]:
        """Of each frame of an item (``work_of``)."""
        even = even_frame(getattr(self.root, "config", None), kind)
        return [work_of([patches], even) for patches in frames_of(item)]

    def sample(self, kind: str, number: int) -> Item | None:
        """Ones that the encoder of images or videos takes, of so many equal parts. None: no form of them."""
        dtype = next(self.root.parameters()).dtype
        names = list(inspect.signature(self._call(kind)).parameters) if kind in self.kinds else []
        config, pixels = getattr(self.root.config, "vision_config", None), [name for name in names if "pixel" in name]
        if config is None or not pixels:
            return None
        if grid := [name for name in names if name.endswith("grid_thw")]:
            side = 4 * getattr(config, "spatial_merge_size", 1)
            forms = [(number * side * side, config.in_channels * config.temporal_patch_size * config.patch_size**2)]
            beside = {grid[0]: torch.tensor([[1, number * side, side]])}
        else:
            size = [config.image_size] * 2 if isinstance(config.image_size, int) else config.image_size
            forms = [(number, 3, *size), (number, 2, 3, *size), (1, number, 3, *size)]  # an image may be several tiles
            beside = {"image_sizes": torch.tensor([list(size)] * number)} if "image_sizes" in names else {}
        for form in forms:
            item = {pixels[0]: torch.ones(form, dtype=dtype), **beside}
            try:
                with torch.no_grad():
                    self.encode(kind, item)
            except DataError:
                continue
            return item
        return None

    def takes_frames(self, kind: str, item: Item) -> bool:
        """Whether the encoder makes of an item's frames what it makes of each by itself. It runs on two small ones.

        ``item``: rows of patches, ``[P, W]``, and their grid. All ranks get the same answer.
        """
        if kind not in self.by_frames:
            name, pixels = next((name, torch.as_tensor(value)) for name, value in item.items() if "pixel" in name)
            grid = next((name for name in item if name.endswith("grid_thw")), None)
            if grid is None or len(torch.as_tensor(item[grid])) > 1 or pixels.dim() != 2:
                return False
            config = getattr(self.root.config, "vision_config", None)
            side: int = 2 * getattr(config, "spatial_merge_size", 1)
            numbers = torch.Generator().manual_seed(0)
            small = torch.randn(2 * side * side, pixels.shape[1], generator=numbers).to(pixels.dtype)
            second = {**item, name: small[side * side :], grid: torch.tensor([[1, side, side]])}
            both = {**item, name: small.requires_grad_(), grid: torch.tensor([[2, side, side]])}
            self.by_frames[kind] = False
            try:
                with torch.enable_grad():
                    rows, alone = self.encode(kind, both)[0], self.encode(kind, second)[0].detach()
                    (seen,) = torch.autograd.grad(rows[: len(alone)].float().square().sum(), small)
            except DataError:  # it takes several frames alone
                return False
            apart = (rows[len(alone) :].detach() - alone).abs().max() if len(rows) == 2 * len(alone) else torch.inf
            is_near = bool(apart <= torch.finfo(rows.dtype).eps ** 0.5 * alone.abs().max())
            self.by_frames[kind] = is_near and not bool(seen[side * side :].any())
        return self.by_frames[kind]

    def shared_out(self, documents: Sequence[Tensor], images: Mapping[str, Tensor]) -> list[list[Item]]:
        """The images of each document, from what a processor makes of those of all of them together.

        ``documents``: tokens ``[S]`` of each. Raises ``DataError`` where runs of tokens do not tell images apart.
        """
        stands = [own == self.kinds.get("image", -1) for own in documents]
        runs = [int(own[:1].sum() + (own[1:] & ~own[:-1]).sum()) for own in stands]
        parts: dict[str, Sequence[Tensor]] = {name: value.split(1) for name, value in images.items()}
        if (grid := images.get("image_grid_thw")) is not None:
            parts["pixel_values"] = images["pixel_values"].split(grid.prod(dim=1).tolist())
        if wrong := [name for name, own in parts.items() if len(own) != sum(runs)]:
            raise DataError(
                f"{sum(runs)} runs of tokens stand for images, and {wrong[0]} is {list(images[wrong[0]].shape)}",
                so="it would not be known which image belongs to which document",
                fix="take a model in which one run of equal tokens stands for an image (Qwen-VL, LLaVA)",
            )
        items: list[Item] = [dict(zip(parts, own, strict=True)) for own in zip(*parts.values(), strict=True)]
        ends = list(itertools.accumulate(runs))
        return [items[end - count : end] for count, end in zip(runs, ends, strict=True)]

    def encode(self, kind: str, item: Item) -> tuple[Tensor, Form]:
        """Rows ``[n, W]`` of an item. Raises ``DataError`` for what the encoder does not take."""
        function, device = self._call(kind), next(self.root.parameters()).device
        noticed, mode = Noticed(), (kind, sum(module.training for module in self.root.modules()))
        names = {name for call in self._calls[kind] for name in inspect.signature(call).parameters}  # or of positions
        given = {name: torch.as_tensor(value).to(device) for name, value in item.items() if name in names}
        with ExitStack() as undo:
            for part, name in self._attachment.before:
                undo.enter_context(while_set([part.config], "_attn_implementation_internal", name))
            undo.enter_context(nullcontext() if mode in self._settled else noticed)
            try:
                output = function(**given, return_dict=True)
            except (ValueError, RuntimeError, TypeError, IndexError) as error:
                if isinstance(error, torch.OutOfMemoryError):
                    raise
                raise DataError(
                    f"the encoder of {kind} items does not take one of "
                    f"{ {name: list(value.shape) for name, value in given.items()} }: {error}",
                    so="nothing could stand in its place",
                    fix="give each item what the model's processor returns for it alone",
                ) from error
        if noticed.parts:
            raise DataError(
                f"the encoder of {kind} items draws random numbers in training mode (dropout, or layers left out)",
                so="results would depend on the plan, and backward would compute other rows",
                fix="set its probabilities to 0 (drop_path_rate=0.0, ...), or call eval() of the encoder",
            )
        self._settled.add(mode)
        pooled = output.last_hidden_state if output.pooler_output is None else output.pooler_output
        if (mask := getattr(output, "attention_mask", None)) is not None:
            pooled = pooled[mask.bool()]
        parts = [pooled, *(getattr(output, "deepstack_features", None) or ())]
        rows = [torch.cat([*part]) if isinstance(part, list | tuple) else part for part in parts]
        dims, rows = [part.dim() for part in rows], [part.flatten(0, -2) for part in rows]
        together = torch.cat(rows, dim=1)
        form = Form(
            has_gradient=together.requires_grad,
            are_lists=[isinstance(part, list | tuple) for part in parts],
            dims=dims,
            hidden_size=rows[0].shape[1],
            width=together.shape[1],
            dtype=str(together.dtype).removeprefix("torch."),
        )
        return together, form

    def inputs(self, tokens: Tensor, rows: Mapping[str, Tensor], forms: Mapping[str, Form]) -> dict[str, Any]:
        """What the model takes beside ``tokens [T]``: of each kind the rows ``[n, W]`` for its placeholders."""
        given = dict[str, Any]()
        for kind, own in rows.items():
            form = forms[kind]
            split = zip(own.split(form.hidden_size, dim=1), form.are_lists, form.dims, strict=True)
            shaped = ((part[(None,) * (dims - 2)], is_list) for part, is_list, dims in split)
            pooled, *deeper = ([part] if is_list else part for part, is_list in shaped)
            output = _Encoded(pooled, pooled, deeper, torch.ones(len(own), dtype=torch.bool, device=own.device))
            if _DOOR in self._names and kind != "audio":
                given.setdefault(_DOOR, {})[kind] = output
            else:
                name = next(iter(inspect.signature(self._call(kind)).parameters))
                given |= dict.fromkeys({name, "input_features_mask"} & self._names.keys(), output)
        types = self.kinds_of(tokens)[None].to(torch.int32)
        return given | {name: types for name in _TYPES if name in self._names}

    def problem(self, model: nn.Module, forms: Mapping[str, Form], own: Callable[[Tensor], Tensor]) -> str:
        """Why the model cannot use such rows; empty: it can. It runs on a few tokens for kinds that were not tried.

        ``own``: of tokens ``[T]``, those that a rank's model is given.
        """
        found = [self._problem(model, *one, own) for one in sorted(forms.items()) if one[0] not in self.tried]
        so, fix = "results would not be those of one process", "train it on text, or take another model"
        return next((str(refusal(type(self.root).__name__, why, so=so, fix=fix)) for why in found if why), "")

    def _problem(self, model: nn.Module, kind: str, form: Form, own: Callable[[Tensor], Tensor]) -> str:
        word, look, device = self.kinds[kind], Blind({}), next(self.root.parameters()).device
        tokens = own(torch.tensor([0, 0, word, word, word, word, 0, 0], device=device))
        places, row = (
            torch.arange(8, device=device),
            torch.randn(form.width, generator=torch.Generator().manual_seed(0)),
        )
        given: dict[str, Any] = {"input_ids": tokens[None], "position_ids": places[None], "use_cache": False}

        def output(part: int) -> Tensor:
            """With zeros in this part of all rows, of which there are none at -1."""
            rows = row.repeat(int((tokens == word).sum()), 1).to(device, getattr(torch, form.dtype))
            rows[:, part * form.hidden_size : (part + 1) * form.hidden_size] = 0
            try:
                return model(**given, **self.inputs(tokens, {kind: rows}, {kind: form}), **{KEYWORD: look})[0][0]
            except StageEnd as end:
                return end.hidden[0]

        try:
            with torch.no_grad():
                whole, *others = map(output, range(-1, form.width // form.hidden_size))
        except (AttributeError, KeyError, TypeError, ValueError, RuntimeError, IndexError) as error:
            return f"it needs more than the rows of {kind} items ({error!r})"
        if any(not torch.equal((whole != other).any(dim=1), tokens == word) for other in others):
            return f"it, or its first stage, does not put all rows of {kind} items where their tokens are"
        zero, query, key = (torch.tensor(place, device=device) for place in (0, 2, 3))
        masks = [call.mask.function for call in look.calls if isinstance(call.mask, MaskFunction)]
        if any(bool(torch.as_tensor(function(zero, zero, query, key)).any()) for function in masks):
            return f"the tokens of {kind} items see each other in both directions, and a plan knows earlier ones alone"
        return ""


def _given_or(plain: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """What a method that encodes items returns: rows, where it is given them in the items' place."""
    given = (one for one in (*args, *kwargs.values()) if isinstance(one, _Encoded))
    return next(given, None) or plain(*args, **kwargs)


def _leave(owner: nn.Module, name: str, method: Any) -> None:
    if vars(owner).get(name) is method:  # otherwise it is another HDP's
        delattr(owner, name)


def frames_of(item: Item) -> list[int]:
    """Patches of each frame of an item: of what an encoder's attention sees at once."""
    for name, value in item.items():
        if name.endswith("grid_thw"):
            return [height * width for time, height, width in torch.as_tensor(value).tolist() for _ in range(time)]
    frames = list[int]()
    for name, value in item.items():
        if name.startswith(("pixel", "input_feat")):
            shape = torch.as_tensor(value).shape  # rows of patches, or tiles of pixels, which are taken as 14 x 14
            tiles, patches = (1, shape[0]) if len(shape) < 3 else (math.prod(shape[:-3]), math.prod(shape[-3:]) // 588)
            frames += [max(1, patches)] * tiles
    return frames or [1]


def some_frames(item: Item, first: int, end: int) -> Item:
    """The frames ``first`` to ``end`` of a video that has rows of patches and a grid."""
    ends, of_frames = [0, *itertools.accumulate(frames_of(item))], dict(item)
    for name, value in item.items():
        if name.startswith("pixel"):
            of_frames[name] = torch.as_tensor(value)[ends[first] : ends[end]]
        elif name.endswith("grid_thw"):
            _, height, width = torch.as_tensor(value)[0].tolist()
            of_frames[name] = torch.tensor([[end - first, height, width]])
    return of_frames


def even_frame(config: Any, kind: str) -> float:
    """So many patches has a frame on whose attention an encoder spends as much as on all else.

    Counted from the encoder's part of a model's ``config``; infinity where that does not tell.
    """
    own = getattr(config, "audio_config" if kind == "audio" else "vision_config", None)
    width = getattr(own, "embed_dim", None) or getattr(own, "hidden_size", None)
    layers = getattr(own, "depth", None) or getattr(own, "num_hidden_layers", None)
    if not isinstance(width, int) or not isinstance(layers, int):
        return math.inf
    inner = getattr(own, "intermediate_size", None) or width * getattr(own, "mlp_ratio", 4)
    whole = getattr(own, "fullatt_block_indexes", None)  # the other layers see windows of a frame
    return (2.0 * width + inner) * layers / (len(whole) if whole else layers)


def work_of(frames: Iterable[float], even: float) -> float:
    """An encoder's work on frames with so many patches, in patches of a small frame. ``even``: ``even_frame``."""
    return sum(patches * (1 + patches / even) for patches in frames)
