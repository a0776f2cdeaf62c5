"""Models of transformers from Hugging Face folders and checkpoints, and back: every weight has its place, or an error.

Only a part of a model may be trained: low-rank adapters (LoRA, by peft), or what is left when others are frozen.
"""

from __future__ import annotations

import base64
import math
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from safetensors import torch as safetensors
from torch import nn
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES

from bytescale.common.errors import CheckpointError, ConfigError
from bytescale.hf.files.hf_folder import finite, some, stored_tensors
from bytescale.hf.model.long_rope import longest_document_of

MOST_CONSTANT_BYTES = 2**24
_REFUSALS = (ValueError, TypeError, LookupError, ArithmeticError, AttributeError, RuntimeError, AssertionError)
"""What transformers raises for a config.json that it cannot use, such as a ``KeyError`` for an unknown activation."""


def config_of(content: dict[str, Any]) -> Any:
    """transformers' configuration from the content of config.json. Raises ``ConfigError`` for an unknown family."""
    model_type = content.get("model_type", "")
    if model_type not in CONFIG_MAPPING:
        raise ConfigError(
            f"transformers {transformers.__version__} has no model of type {model_type!r}",
            so="it cannot be built (code that comes with a model is never run)",
            fix="install a version of transformers that has it",
        )
    try:
        kind = CONFIG_MAPPING[model_type]
        return kind.from_dict(kind._decode_special_floats(content))  # {"__float__": "Infinity"}
    except (*_REFUSALS, StrictDataclassError) as error:
        raise ConfigError(
            f"transformers does not take the configuration of the {model_type} model ({in_a_line(error)})",
            fix="use the config.json that belongs to the weights",
        ) from error


def sees_pictures(content: dict[str, Any]) -> bool:
    """Whether this is the config.json of a vision-language model."""
    return "vision_config" in content and content.get("model_type") in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES


def auto_class(content: dict[str, Any]) -> Any:
    """The class of transformers that makes the model of a config.json."""
    return AutoModelForImageTextToText if sees_pictures(content) else AutoModelForCausalLM


def make_model(content: dict[str, Any], dtype: torch.dtype, *, seed: int = 0) -> nn.Module:
    """A model with random weights that depend on ``seed`` alone, in ``dtype``, on the CPU."""
    with torch.random.fork_rng(devices=[]), causal_model_or_error(content):
        torch.manual_seed(seed)
        model = auto_class(content).from_config(config_of(content), dtype=dtype, trust_remote_code=False)
    return ready(model, dtype)


def empty_model(content: dict[str, Any]) -> nn.Module:
    """A model without memory for its weights. Raises ``ConfigError`` where no causal model can be made."""
    with torch.device("meta"), causal_model_or_error(content):
        model: nn.Module = auto_class(content).from_config(config_of(content), trust_remote_code=False)
        return model


def parameters_of(content: dict[str, Any]) -> dict[str, nn.Parameter]:
    """By name, without memory for them. Raises as ``empty_model``."""
    return dict(empty_model(content).named_parameters())


def require_positions(content: dict[str, Any], longest: int, *, what: str, fix: str) -> None:
    """Raise ``ConfigError`` if documents of ``longest`` tokens are longer than the model's table of positions.

    ``what``: has them; ``fix``: with the place of the table's length.
    """
    is_rotary = any("rope" in key for key in content)
    limit = None if is_rotary else longest_document_of(empty_model(content))
    if limit is not None and longest > limit:
        raise ConfigError(
            f"{what} {longest} tokens, and the model has a table of {limit} positions",
            so="a document longer than that would end in an error in the middle of a pass",
            fix=fix.format(limit),
        )


def load_model(folder: Path, content: dict[str, Any], dtype: torch.dtype) -> nn.Module:
    """``read_model``, ready to be trained: all parameters trainable and of one dtype."""
    return ready(read_model(folder, content, dtype), dtype)


def read_model(folder: Path, content: dict[str, Any], dtype: torch.dtype) -> Any:
    """The model in a folder with its weights, in ``dtype`` as transformers has it, on the CPU. No code of it is run.

    Raises:
        ConfigError: if there are no weights that can be read, or no such model.
        CheckpointError: if weights are missing, quantised or not finite, have other shapes or no place; the message
            names them.
    """
    check_sizes(folder, content)
    with causal_model_or_error(content), quiet():
        loaded: Any = auto_class(content).from_pretrained(
            folder,
            config=config_of(content),
            dtype=dtype,
            local_files_only=True,
            use_safetensors=True,
            trust_remote_code=False,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # they are reported below
        )
    model, told = loaded
    own = dict(model.named_parameters())
    told["untied_keys"] = own.keys() - parameters_of(content).keys()
    for kind, so in (
        ("missing_keys", "these weights would be random numbers"),
        ("unexpected_keys", "without them the model would compute something else"),
        ("mismatched_keys", "they do not fit"),
        ("untied_keys", "config.json ties them to others from which they differ, and a saved model would lose them"),
    ):
        names = sorted(str(name[0] if isinstance(name, tuple) else name) for name in told[kind])
        if names:
            raise CheckpointError(
                f"{folder} has {len(names)} {kind.split('_')[0]} tensors: {some(names)}",
                so=so,
                fix="set tie_word_embeddings to false in config.json"
                if kind == "untied_keys"
                else "use the config.json that belongs to these weights, or download the model again",
            )
    for name, parameter in own.items():
        finite(parameter, name, folder)
    return model


def check_sizes(folder: Path, content: dict[str, Any]) -> None:
    """Raise ``CheckpointError`` for a config.json of a model far larger than its weights, before memory is filled."""
    stored, num_layers = stored_tensors(folder), content.get("num_hidden_layers")
    has, needs = f"{len(stored)} tensors", f"num_hidden_layers = {num_layers}"
    is_larger = isinstance(num_layers, int) and num_layers > len(stored)  # to describe thousands takes a minute
    if not is_larger:
        sizes = [
            sum(math.prod(own.shape) for own in all_of) for all_of in (stored.values(), parameters_of(content).values())
        ]
        has, needs = (f"{size} numbers" for size in sizes)
        is_larger = sizes[1] > 2 * sizes[0]
    if is_larger:
        raise CheckpointError(
            f"{folder} has weights with {has}, and the model of its config.json has {needs}",
            so="most of its weights would be random numbers",
            fix="use the config.json that belongs to these weights, or download the model again",
        )


def ready(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """All parameters trainable and of one dtype. Constants keep theirs, as the angles of rotary positions in fp32."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
        parameter.requires_grad = True
    if dtype == torch.float64 and model._can_set_experts_implementation():  # type: ignore[operator]
        model.set_experts_implementation("eager")  # type: ignore[operator]  # grouped products have no fp64
    return model


@contextmanager
def quiet() -> Iterator[None]:
    """Without progress bars, and without transformers' report, which has names of tensors as they are in a file."""
    told = transformers.utils.logging
    shown, level = told.is_progress_bar_enabled(), told.get_verbosity()
    told.disable_progress_bar()
    told.set_verbosity_error()
    try:
        yield
    finally:
        told.set_verbosity(level)
        if shown:
            told.enable_progress_bar()


@contextmanager
def causal_model_or_error(content: dict[str, Any]) -> Iterator[None]:
    try:
        yield
    except (ConfigError, CheckpointError):
        raise
    except _REFUSALS as error:
        raise ConfigError(
            f"transformers makes no causal decoder from the config.json of the {content.get('model_type')} model "
            f"({in_a_line(error)})",
            so="there is nothing to run",
            fix="use a model that AutoModelForCausalLM loads, with the config.json that belongs to its weights",
        ) from error


def in_a_line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


def constants_of(model: nn.Module) -> dict[str, str]:
    """Buffers that are stored with weights and are not trained, each as a safetensors file in base64.

    Raises ``ConfigError`` if they are too large to be part of a checkpoint's description.
    """
    stored = {name: value for name, value in model.state_dict().items() if name in dict(model.named_buffers())}
    total = sum(value.nbytes for value in stored.values())
    if total > MOST_CONSTANT_BYTES:
        raise ConfigError(
            f"{type(model).__name__} has {total} bytes of buffers that belong to its weights",
            so="checkpoints have room for small ones only",
            fix="train it in a loop of your own with bytescale.HDP",
        )
    return {
        name: base64.b64encode(safetensors.save({name: value.contiguous()})).decode() for name, value in stored.items()
    }


def set_constants(model: nn.Module, constants: dict[str, str]) -> None:
    """Put back what ``constants_of`` gave. Raises ``CheckpointError`` for what is no constant of this model."""
    buffers = dict(model.named_buffers())
    for name, kept in constants.items():
        try:
            buffers[name].copy_(safetensors.load(base64.b64decode(kept))[name])
        except (ValueError, KeyError, TypeError, RuntimeError, SafetensorError) as error:
            raise CheckpointError(f"the constant {name} of the checkpoint is none of its model ({in_a_line(error)})",
                                  fix="name another checkpoint") from error  # fmt: skip


_EMPTY = "there is nothing to train"


def train_a_part(model: nn.Module, trained: dict[str, Any], *, seed: int) -> nn.Module:
    """Put adapters into ``model``, in place, and freeze what is not trained (``ModelDescription.trained``).

    ``seed``: of the adapters' first weights. Returns peft's wrapper if there are adapters, which saves and merges them,
    else ``model``. Raises ``ConfigError`` for parts that do not exist, and if nothing is left to train.
    """
    wrapped = _with_adapters(model, trained["lora"], seed) if "lora" in trained else model
    names = dict(model.named_parameters())
    for pattern in trained.get("freeze", ()):
        matched = {name for name in names if fnmatchcase(name, pattern.removeprefix("!"))}
        frozen = names.keys() - matched if pattern.startswith("!") else matched
        if not matched:
            raise ConfigError(
                f"model.freeze has {pattern!r}, which no parameter of the {type(model).__name__} matches",
                so="nothing would be frozen by it",
                fix=f"use patterns of names such as {next(iter(names))}; * stands for anything",
            )
        for name in frozen:
            names[name].requires_grad = False
    if not any(parameter.requires_grad for parameter in names.values()):
        raise ConfigError("model.freeze matches every parameter", so=_EMPTY, fix="freeze less")
    return wrapped


def _with_adapters(model: nn.Module, lora: dict[str, Any], seed: int) -> nn.Module:
    try:
        from peft import LoraConfig, get_peft_model
    except ImportError as error:
        raise ConfigError("model.lora_rank is set, but peft is not installed", fix="pip install peft") from error
    config = LoraConfig(
        r=lora["rank"],
        lora_alpha=lora["alpha"],
        target_modules=lora["targets"] or "all-linear",
        lora_dropout=0.0,  # dropout depends on how sequences lie on ranks
        task_type="CAUSAL_LM",
    )
    try:
        with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # peft 0.21 reads what transformers 5 has renamed
            torch.manual_seed(seed)
            wrapped: nn.Module = get_peft_model(model, config, autocast_adapter_dtype=False)
            return wrapped
    except ValueError as error:
        linear = sorted(
            {name.rpartition(".")[2] for name, part in model.named_modules() if isinstance(part, nn.Linear)}
        )
        raise ConfigError(
            f"peft cannot put adapters into {', '.join(lora['targets']) or 'the linear modules'} of the "
            f"{type(model).__name__} ({str(error).partition('.')[0]})",
            so=_EMPTY,
            fix=f"set model.lora_targets to some of {', '.join(linear) or 'its linear modules, but it has none'}",
        ) from error
