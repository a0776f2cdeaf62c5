"""What a model does with attention, found by running it on a few tokens.

The probe runs the model with an attention that sees nothing: it returns zeros. Every call tells its layer. No row may
depend on another row, and on its position only as ``position_ids`` say. Random numbers are noticed, with the part that
draws them. Recurrent layers run on documents cut at random places, which has to reproduce the whole documents. All of
it is the same on every rank, since it depends on the model's code and configuration alone.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from bytescale.attention import AttentionRules
from bytescale.attention.flash import Heads
from bytescale.hf.model.blind import (
    CHOSEN,
    NUM_ROWS,
    Blind,
    LayerRecurrence,
    MaskFunction,
    Selection,
    alike,
    choice_of,
    probe_mixers,
    run_blind,
)  # fmt: skip
from bytescale.hf.model.head import embeddings_of
from bytescale.hf.model.interface import Call, refusal, while_set

_HARMLESS = frozenset(
    ("scaling", "dropout", "sliding_window", "softcap", "s_aux", "is_causal", "position_ids", "use_cache",
     "cache_position", "output_router_logits", "num_items_in_batch", "logits_to_keep", "return_dict",
     "output_hidden_states", "past_key_values", "cache", "position_embeddings", "layer_idx", *CHOSEN)
)  # fmt: skip
"""Keywords that are understood here, or that no attention function uses."""
WIDEST_FLASH_HEAD = 256
"""Of FlashAttention 2, 3 and 4, and of PyTorch's own."""


@dataclass(frozen=True, kw_only=True)
class LayerAttention:
    """One layer's attention."""

    name: str
    num_heads: int
    num_kv_heads: int
    head_dim: int
    value_dim: int
    rules: AttentionRules
    selection: Selection | None = None
    """How the keys of each query are chosen; None: it sees all that ``rules`` show."""
    parts: int = 1
    """Parts of all key/value heads, one of which this is; where fewer than tensor-parallel ranks, several have one."""


@dataclass(frozen=True, kw_only=True)
class Router:
    """A module that chooses the largest of a row's scores, one score for each expert."""

    name: str
    num_experts: int
    experts_per_token: int


@dataclass(frozen=True, kw_only=True)
class ModelStructure:
    """What the probe found, in the order of the calls. ``random_parts`` draw random numbers in training mode."""

    layers: tuple[LayerAttention, ...]
    random_parts: tuple[str, ...]
    mixers: tuple[LayerRecurrence, ...] = ()
    routers: tuple[Router, ...] = ()

    @property
    def names(self) -> list[str]:
        """Names of all attentions and recurrences."""
        return [layer.name for layer in self.layers] + [mixer.name for mixer in self.mixers]


def probe(model: nn.Module) -> ModelStructure:
    """Run an attached model. Raises ``ConfigError`` where a plan would change its results.

    A model on the meta device has shapes alone, and nothing is compared.
    """
    has_values = not next(model.parameters()).is_meta
    names = {module: name or type(module).__name__ for name, module in model.named_modules()}
    again = [module for module in model.modules() if getattr(module, "gradient_checkpointing", False)]
    # Layers that run again in backward would be counted twice.
    with while_set(again, "gradient_checkpointing", False):
        with while_set(model.modules(), "training", True):
            blind, random_parts, routers = _calls_and_choices(model, names)
        if has_values:
            with while_set(model.modules(), "training", not random_parts):
                _require_rows_alone(model, names)
    if not blind.calls and not blind.mixed:
        raise refusal(
            type(model).__name__,
            "its forward calls neither attention nor a recurrence that can be cut",
            so="documents of a micro-batch would see each other",
            fix="use a model type whose attention goes through transformers' AttentionInterface",
        )
    if has_values:
        _require_positions_are_followed(model, names)
    layers = [layer_of(call, names[call.module]) for call in blind.calls]
    if blind.selections:
        layers = _with_selections(layers, blind)
    mixers = probe_mixers(model, names) if blind.mixed else ()
    return ModelStructure(layers=tuple(layers), random_parts=random_parts, mixers=mixers, routers=routers)


def _calls_and_choices(
    model: nn.Module, names: dict[nn.Module, str]
) -> tuple[Blind, tuple[str, ...], tuple[Router, ...]]:
    """What calls attention, what draws random numbers, and what chooses experts, in training mode."""
    blind, noticed = Blind(names, selections={}), Noticed()

    def leave(*_: Any) -> None:
        del noticed.stack[-1:]  # a hook in front of ours may have refused the call

    with ExitStack() as hooks:
        for module, name in names.items():
            enter = module.register_forward_pre_hook(lambda *_, name=name: noticed.stack.append(name))
            hooks.enter_context(enter)
            hooks.enter_context(module.register_forward_hook(leave, always_call=True))
        with torch.random.fork_rng(devices=[]), torch.no_grad(), noticed:
            run_blind(model, blind, torch.arange(NUM_ROWS))
    dropping = [names[call.module] for call in blind.calls if call.options.get("dropout")]
    chosen, experts = expert_numbers(model)
    routers = [Router(name=name, num_experts=of, experts_per_token=some)
               for name, (some, of) in noticed.choices.items() if some in chosen and of in experts]  # fmt: skip
    return blind, tuple(dict.fromkeys([*dropping, *noticed.parts])), tuple(routers)


def _require_rows_alone(model: nn.Module, names: dict[nn.Module, str]) -> None:
    """No row may depend on the first one, on its way to attention, which sees nothing here, or to the logits.

    Gradients say so of any model. Values that stay as they are where the first row becomes large say it of what passes
    gradients on as they are, or passes none: scales and means over all rows, as quantisers of tensors have them.
    """
    inputs: list[Tensor] = []

    def keep(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        inputs.append(output.detach().requires_grad_())
        return inputs[-1].clone()  # some models change it in place

    def enlarge(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        rows = output.clone()
        rows[0, 0] = 0
        rows[0, 0, 0] = 1000 * output.abs().max()
        return rows

    def later_rows(hook: Callable[..., Tensor]) -> list[tuple[str, Tensor]]:
        blind = Blind(names)
        with embeddings_of(model)[0].register_forward_hook(hook):
            output = run_blind(model, blind, torch.arange(NUM_ROWS))
        logits = output.logits if not isinstance(output, tuple) and "logits" in output else output[0]
        found = [(names[call.module], rows) for call in blind.calls for rows in (call.query, call.key, call.value)]
        return [(name, rows[..., 1:, :]) for name, rows in [*found, (type(model).__name__, logits)]]

    with torch.enable_grad(), ExitStack() as after:
        # Parameters stay out of the graph, which remembers their shapes: parts of them take their place later.
        for parameter in [own for own in model.parameters() if own.requires_grad]:
            after.callback(parameter.requires_grad_, True)
            parameter.requires_grad_(False)
        usual = later_rows(keep)
        sums = [(rows.float().flatten() * torch.arange(rows.numel()).to(rows.device).cos()).sum() for _, rows in usual]
        (gradient,) = torch.autograd.grad(torch.stack(sums).sum(), inputs[:1], allow_unused=True)
    with torch.no_grad():
        other = later_rows(enlarge)
    place = "" if gradient is None or not gradient[0, 0].any() else type(model).__name__
    # Experts have other rows to compute with, so that sums may be rounded otherwise, and later routers may differ.
    has_experts = any(re.search("expert|moe|router", f"{name} {type(own)}".lower()) for own, name in names.items())
    for (name, rows), (_, others) in zip(usual, other, strict=True):
        if not torch.equal(rows, others):
            difference = (rows - others)[rows != others].abs().sum() / rows.abs().nan_to_num(posinf=0).sum()
            is_rounding = difference <= max(1e-6, torch.finfo(rows.dtype).eps / 16) * (16 if has_experts else 1)
            place = place or ("" if is_rounding else name)
            break
    if place:
        raise refusal(
            type(model).__name__,
            f"a part other than attention mixes tokens on the way to {place} (a recurrence, a convolution, a shift, or "
            "a scale or mean over all rows)",
            so="results would depend on which documents are in a micro-batch",
            fix="use a model whose tokens meet in attention alone; quantise each token by itself",
        )


def _require_positions_are_followed(model: nn.Module, names: dict[nn.Module, str]) -> None:
    """Rows of equal tokens and equal ``position_ids`` have to be equal, wherever they lie."""
    rows = torch.arange(NUM_ROWS, device=next(model.parameters()).device)[None]
    halves, given, chosen = Blind(names), Blind(names), Blind(names)
    with torch.no_grad(), while_set(model.modules(), "training", False):
        for blind, position_ids in ((halves, rows % (NUM_ROWS // 2)), (given, rows), (chosen, None)):
            run_blind(model, blind, position_ids)
    for call, known, own in zip(halves.calls, given.calls, chosen.calls, strict=True):
        for of_halves, of_given, of_chosen in ((call.query, known.query, own.query), (call.key, known.key, own.key)):
            follows = alike(*of_halves.split(NUM_ROWS // 2, dim=2))
            if not follows or not alike(of_given, of_chosen):
                raise refusal(
                    names[call.module],
                    "its queries and keys "
                    + ("are not at positions 0, 1, 2 and so on" if follows else "do not follow position_ids"),
                    so="a token in a micro-batch would be at a wrong position",
                    fix="use a model type whose forward takes position_ids, and counts them from 0 itself",
                )


def expert_numbers(model: nn.Module) -> list[list[int]]:
    """How many experts a token is sent to, and of how many, by all names that a configuration has for them."""
    config = getattr(model, "config", None)
    some = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "top_k_experts")
    many = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
    found = ((getattr(config, name, None) for name in names) for names in (some, many))
    return [[number for number in one if type(number) is int and number > 0] for one in found]


def layer_of(call: Call, name: str) -> LayerAttention:
    options = call.options
    unknown = sorted(
        key for key, value in options.items() if key not in _HARMLESS and value is not None and value is not False
    )
    checks = (
        (call.query.shape[0] != 1, f"it attends to {call.query.shape[0]} sequences at once", "rows would be mixed up"),
        (call.query.shape[2] != NUM_ROWS, f"its queries are {call.query.shape[2]} rows for {NUM_ROWS} tokens",
         "rows could not be told apart"),
        (call.key.shape[2] != call.query.shape[2], "its keys are not those of its own tokens (cross attention)",
         "keys of other tokens have no place in a plan"),
        (options.get("is_causal", getattr(call.module, "is_causal", True)) is False, "it is not causal",
         "tokens would have to see later ones"),
        (bool(unknown), f"it is called with {', '.join(unknown)}, which our attention does not know",
         "results would differ"),
    )  # fmt: skip
    for broken, what, so in checks:
        if broken:
            raise refusal(name, what, so=so, fix="use a decoder whose attention is causal self-attention")
    return LayerAttention(
        name=name,
        num_heads=call.query.shape[1],
        num_kv_heads=call.key.shape[1],
        head_dim=call.query.shape[3],
        value_dim=call.value.shape[3],
        rules=AttentionRules(
            scale=scale_of(call),
            window=_window(call, name),
            soft_cap=None if not options.get("softcap") else float(options["softcap"]),
        ),
    )


def _with_selections(layers: Sequence[LayerAttention], blind: Blind) -> list[LayerAttention]:
    """``layers`` of the calls that ``blind`` has seen, each with how its keys are chosen."""
    found, last = [], Selection(num_keys=0)
    for layer, call in zip(layers, blind.calls, strict=True):
        assert blind.selections is not None, "they were looked at"
        last = blind.selections.get(call.module) or Selection(num_keys=last.num_keys)  # an earlier layer's choice
        latents = blind.layer_rows[call.module].latents if call.module in blind.layer_rows else None
        first, second = (layer.head_dim, layer.value_dim) if latents is None else (part.shape[-1] for part in latents)
        width, of_values = first + second, layer.value_dim if latents is None else first
        of_pair = layer.num_heads * (layer.head_dim if latents is None else width)
        selection = replace(
            last,
            row_width=width * (layer.num_kv_heads if latents is None else 1),
            pair_numbers=of_pair + layer.num_heads * of_values,
        )
        found.append(layer if choice_of(call) is None else replace(layer, selection=selection))
    return found


def scale_of(call: Call) -> float | None:
    """None where it is the usual one, so that layers with plain rules are recognised as plain."""
    scaling, usual = call.options.get("scaling"), call.query.shape[3] ** -0.5
    return None if scaling is None or abs(float(scaling) - usual) <= 1e-12 * usual else float(scaling)


def _window(call: Call, name: str) -> int | None:
    """How many keys a query sees, from the mask that transformers would have made; None: all before it.

    The keyword ``sliding_window`` is for kernels that take no mask. It counts only where the model makes none.
    """
    asked = call.options.get("sliding_window")
    if call.mask is None:
        return None if asked is None else int(asked)
    if not isinstance(call.mask, MaskFunction):
        raise refusal(
            name,
            f"it is given a mask that the model has made or changed itself ({type(call.mask).__name__})",
            so="what the mask says would be lost",
            fix="use a model type whose masks come from transformers.masking_utils",
        )
    far = 4 * max([64, *_window_sizes(call.module), int(asked or 0)]) + 5
    window = int(call.mask.visible(far).sum())
    for query in (0, 1, 5, far // 3, far // 2 + 1, *(at for at in (window - 1, window, window + 1) if at < far), far):
        keys = torch.arange(query + 33)
        expected = (keys <= query) & (keys > query - window)
        if not torch.equal(call.mask.visible(query), expected):
            raise refusal(
                name,
                "its mask is neither causal nor a causal sliding window (chunks, or tokens that see later ones)",
                so="a mask of another kind would be lost",
                fix="use a model whose layers see all earlier tokens, or the last so many of them",
            )
    return None if window > far else window


def _window_sizes(module: nn.Module) -> list[int]:
    """Numbers of the configuration that may be windows or chunks."""
    content = getattr(getattr(module, "config", None), "__dict__", {})
    sizes = [value for key, value in content.items() if re.search("window|chunk|block", key)]
    return [value for value in sizes if isinstance(value, int) and value < 2**22]


class Noticed(TorchDispatchMode):
    """Notes in which module an operation draws random numbers, or chooses some of many."""

    def __init__(self) -> None:
        super().__init__()
        self.stack: list[str] = []
        """The modules that run, the innermost last."""
        self.parts: list[str] = []
        self.choices: dict[str, tuple[int, int]] = {}
        """By module, how many of how many its last choice takes."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.nondeterministic_seeded in func.tags:
            given = dict(zip((own.name for own in func._schema.arguments), args, strict=False)) | (kwargs or {})
            if "attention" not in str(func) or given.get("dropout_p"):
                self.parts.append(self.stack[-1] if self.stack else "the model")
        if func is torch.ops.aten.topk.default and self.stack:
            self.choices[self.stack[-1]] = (args[1], args[0].shape[-1])
        return func(*args, **(kwargs or {}))


def heads_of(structure: ModelStructure) -> Heads | None:
    """For which flash attention is tried: those of the widest layer; None: a model without attention."""
    if not structure.layers:
        return None
    widest = max(structure.layers, key=lambda layer: layer.head_dim)
    windowed = any(layer.rules.window is not None for layer in structure.layers)
    return Heads(widest.num_heads, widest.num_kv_heads, widest.head_dim, windowed=windowed)


def check_widths(structure: ModelStructure, *, cuda_flash: bool) -> None:
    """Raise ``ConfigError`` for a layer whose heads the kernel does not have.

    ``cuda_flash``: whether flash attention computes on a GPU. Layers with a soft cap have a kernel of their own.
    """
    for layer in structure.layers if cuda_flash else ():
        width = max(layer.head_dim, layer.value_dim)
        if width > WIDEST_FLASH_HEAD and layer.rules.soft_cap is None:
            raise refusal(
                layer.name,
                f"its heads are {width} wide, and flash attention on a GPU ends at {WIDEST_FLASH_HEAD}",
                so="its first pass would fail",
                fix='use the math kernel for short documents (HDP(kernel="math"), kernels.attention = "math")',
            )
