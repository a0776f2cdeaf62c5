"""Models of transformers from Hugging Face folders and checkpoints, and back: every weight has its place, or an error.

Only a part of a model may be trained: low-rank adapters (LoRA, by peft), or what is left when others are frozen.
"""

from __future__ import annotations

import base64
import math
import shutil
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
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from bytescale.checkpoint.reading import CheckpointReader
from bytescale.common.errors import CheckpointError, ConfigError, typed_path
from bytescale.common.parsing import parse_json, read_input
from bytescale.config.hugging_face import SPECIAL_TOKENS, refuse_quantised
from bytescale.config.resolve import SEEN_WEIGHTS, described_architecture, source_folder
from bytescale.config.schema import Config
from bytescale.data.tokens.tokenizer import load_tokenizer
from bytescale.hf.files.hf_folder import (
    copy_companions,
    finite,
    some,
    stored_tensors,
    weights_fingerprint,
    write_json,
)
from bytescale.hf.files.weight_stream import adapted_ties, untie
from bytescale.hf.model.long_rope import longest_document_of
from bytescale.runtime.optimizer.flat import DTYPES
from bytescale.storage.hub import local_folder
from bytescale.storage.place import Place

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
            f"transformers does not take the configuration of the {model_type} model ({_in_a_line(error)})",
            fix="use the config.json that belongs to the weights",
        ) from error


def make_model(content: dict[str, Any], dtype: torch.dtype, *, seed: int = 0) -> nn.Module:
    """A model with random weights that depend on ``seed`` alone, in ``dtype``, on the CPU."""
    with torch.random.fork_rng(devices=[]), causal_model_or_error(content):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config_of(content), dtype=dtype, trust_remote_code=False)
    return ready(model, dtype)


def empty_model(content: dict[str, Any]) -> nn.Module:
    """A model without memory for its weights. Raises ``ConfigError`` where no causal model can be made."""
    with torch.device("meta"), causal_model_or_error(content):
        model: nn.Module = AutoModelForCausalLM.from_config(config_of(content), trust_remote_code=False)
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
    refuse_quantised(content, str(folder / "config.json"))
    check_sizes(folder, content)
    with causal_model_or_error(content), _quiet():
        loaded: Any = AutoModelForCausalLM.from_pretrained(
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
def _quiet() -> Iterator[None]:
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
            f"({_in_a_line(error)})",
            so="there is nothing to run",
            fix="use a model that AutoModelForCausalLM loads, with the config.json that belongs to its weights",
        ) from error


def _in_a_line(error: Exception) -> str:
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
            raise CheckpointError(f"the constant {name} of the checkpoint is none of its model ({_in_a_line(error)})",
                                  fix="name another checkpoint") from error  # fmt: skip


_EMPTY = "there is nothing to train"


def train_a_part(model: nn.Module, trained: dict[str, Any], *, seed: int) -> nn.Module:
    """Put adapters into ``model``, in place, and freeze what is not trained (``AttachedArchitecture.trained``).

    ``seed``: of the adapters' first weights. Returns peft's wrapper if there are adapters, which saves and merges them,
    else ``model``. Raises ``ConfigError`` for parts that do not exist, and if nothing is left to train.
    """
    wrapped = _with_adapters(model, trained["lora"], seed) if "lora" in trained else model
    names = dict(model.named_parameters())
    for pattern in trained.get("freeze", ()):
        frozen = [name for name in names if fnmatchcase(name, pattern)]
        if not frozen:
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


def export_attached(
    checkpoint: str | Place,
    target: Path,
    *,
    dtype: str = "fp32",
    shard_bytes: int = 5 * 2**30,
    run_config: Config | None = None,
    origin: Path | None = None,
    base: str = "",
) -> None:
    """Write ``target`` with config.json, safetensors shards, and the tokenizer's files that the run has kept.

    The process holds the whole model once. ``target`` appears when it is complete. config.json is the one that the run
    began with, with the dtype of the weights that are written. What was not trained is read from ``base``, or the
    folder that the run began with. Adapters are merged; as they are, they lie in ``adapter/``. An adapter on a matrix
    that is embedding and head at once is for one of them alone, so they are two matrices then.

    Raises ``ConfigError`` if ``target`` exists; ``CheckpointError`` if ``checkpoint`` is none, or is incomplete.
    """
    stored, target_dtype = CheckpointReader(checkpoint), DTYPES[dtype]
    architecture = described_architecture(stored.state.architecture, str(stored.folder))
    if base and not architecture.trained:
        raise ConfigError(f"--base is {base!r}, and this run trained all weights", fix="leave --base out")
    if architecture.trained:
        model = load_model(_base_of(run_config, origin, base), architecture.content, torch.float32)
        wrapped: Any = train_a_part(model, architecture.trained, seed=0)
    else:
        held = {name.removeprefix("master.") for name in stored.shapes() if name.startswith("master.")}
        if lost := sorted(held - parameters_of(architecture.content).keys()):
            raise CheckpointError(
                f"{checkpoint} has {lost[0]}, for which its model has no place",
                so="it would be lost",
                fix="set tie_word_embeddings to false in the model's config.json, and train it anew",
            )
        model = make_model(architecture.content, target_dtype)
        set_constants(model, architecture.buffers)
    content, name = dict(architecture.content), str(target_dtype).removeprefix("torch.")
    with torch.no_grad(), appearing(target) as hidden:
        for name_of, parameter in model.named_parameters():
            if parameter.requires_grad:
                _fill(parameter, stored.read(f"master.{name_of}"), name_of)
        if "lora" in architecture.trained:
            wrapped.save_pretrained(hidden / "adapter")
            if adapted_ties(model):
                untie(model)
                content["tie_word_embeddings"] = False
            model = wrapped.merge_and_unload()
        if architecture.trained:
            model = model.to(target_dtype)
        with _quiet():
            model.save_pretrained(hidden, max_shard_size=shard_bytes)  # type: ignore[operator]
        written = {key: name for key in ("dtype", "torch_dtype") if key in content} or {"dtype": name}
        new = _known_of_run(content, run_config, origin)
        write_json(hidden / "config.json", content | written | new)
        if "eos_token_id" in new:
            write_json(hidden / "generation_config.json", {"eos_token_id": new["eos_token_id"]})
        if origin is not None:
            copy_companions(origin, hidden)


def _known_of_run(content: dict[str, Any], run_config: Config | None, origin: Path | None) -> dict[str, Any]:
    """What config.json of a model that began with random weights lacks: its context, and what ends a document."""
    if run_config is None or not {*SPECIAL_TOKENS, "max_position_embeddings"} <= content.keys():
        return {}
    if run_config.model.preset.startswith(("hf:", "checkpoint:")) or run_config.trainer.init:
        return {}
    context = max(run_config.data.context_length, int(content["max_position_embeddings"]))
    has_tokenizer = origin is not None and (origin / "tokenizer.json").is_file()
    end = {"eos_token_id": load_tokenizer(str(origin)).eos_id} if has_tokenizer else {}
    return {"max_position_embeddings": context, **end}


@contextmanager
def appearing(target: Path) -> Iterator[Path]:
    """A hidden folder that becomes ``target`` when the block has ended. Raises ``ConfigError`` if that exists."""
    if target.exists():
        raise ConfigError(f"{target} exists", so="it would be overwritten", fix="name a new folder")
    hidden = target.with_name(f".{target.name}.tmp")
    shutil.rmtree(hidden, ignore_errors=True)
    hidden.mkdir(parents=True)
    try:
        yield hidden
        hidden.replace(target)
    finally:
        shutil.rmtree(hidden, ignore_errors=True)


def _fill(parameter: nn.Parameter, value: torch.Tensor, name: str) -> None:
    if parameter.shape != value.shape:
        raise CheckpointError(
            f"{name} is {list(value.shape)} in the checkpoint, and {list(parameter.shape)} in its model",
            so="the checkpoint contradicts itself",
            fix="name another checkpoint",
        )
    parameter.copy_(value)


def _base_of(run_config: Config | None, origin: Path | None, given: str) -> Path:
    """The folder with the weights that were not trained: the ``given`` one, or the one that the run began with.

    Raises ``CheckpointError`` if it is not there, or its weights are others than those that the run has seen.
    """
    if given:
        return typed_path(local_folder(given))
    base = source_folder("" if run_config is None else run_config.model.preset)
    remedy = "name the folder of the model that the run began with: --base FOLDER"
    if not (base / "config.json").is_file():
        raise CheckpointError(
            f"the checkpoint has what was trained alone, and the model that it belongs to is not there ({base})",
            so="there is nothing to put it into",
            fix=remedy,
        )
    try:
        seen = str(parse_json(read_input((origin or base) / SEEN_WEIGHTS))["fingerprint"])
    except (OSError, ValueError, KeyError, TypeError):
        seen = "not known"
    if seen != weights_fingerprint(base):
        raise CheckpointError(
            f"the weights of {base} are not those with which the run began",
            so="what was trained would be put into another model",
            fix=remedy,
        )
    return base
