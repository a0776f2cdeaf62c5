"""Rules that tie settings together, checked before any work is done."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from bytescale.common.errors import ConfigError, visible
from bytescale.common.labels import RESERVED_FIELDS
from bytescale.common.limits import check_limits
from bytescale.config.description import check_model, check_trained
from bytescale.config.overrides import check_overrides, optimizer_options
from bytescale.config.presets import PRESETS
from bytescale.config.resolve import CHECKPOINT_PREFIX, HF_PREFIX, resolve_model
from bytescale.config.schema import (
    AUTO_CAPACITY,
    AUTO_DOMAIN,
    Config,
    CorpusConfig,
    DataConfig,
    ParallelConfig,
    TrainerConfig,
)
from bytescale.config.sharing import check_experts, check_invariant, check_stages, ranks_beside, sharing_domain


def validate(config: Config, *, num_ranks: int | None = None) -> None:
    """Raise ``ConfigError`` for the first rule that ``config`` breaks.

    Args:
        config: the resolved settings.
        num_ranks: that will really run (under torchrun); ``parallel.ranks`` when None.
    """
    check_limits(config)
    shape = resolve_model(config.model)
    check_trained(config, shape)
    check_model(shape)
    parallel, num_ranks = config.parallel, config.parallel.ranks if num_ranks is None else num_ranks
    ranks, kind, data = hdp_ranks(parallel, num_ranks), kind_of_ranks(parallel), config.data
    if config.model.preset in PRESETS:
        check_mesh(parallel, shape.content)
    if not data.sources:
        raise ConfigError("data.sources is empty", so="there is nothing to train on", fix="name a folder, file or glob")
    # A capacity that memory decides, or activations that may leave it: known only when memory is.
    known = parallel.capacity_tokens != AUTO_CAPACITY and not may_offload(config, config.trainer.device)
    if known and data.context_length > ranks * parallel.capacity_tokens:
        raise ConfigError(
            f"data.context_length = {data.context_length} exceeds {ranks} {kind} x parallel.capacity_tokens = "
            f"{parallel.capacity_tokens} (together {ranks * parallel.capacity_tokens} tokens)",
            so="a sequence of full length could not be held by the whole cluster",
            fix=f"use at least {-(-data.context_length // parallel.capacity_tokens)} {kind}, a capacity of at "
            f'least {-(-data.context_length // ranks)}, a shorter context, or memory.offload = "on"',
        )
    _check_optimizer(config)
    check_sharing(config, ranks)
    if parallel.elastic and parallel.shard == "parameters" and parallel.domain == AUTO_DOMAIN:
        raise ConfigError(
            'parallel.elastic beside parallel.shard = "parameters", where parallel.domain is not a number',
            so="whole domains go on where a rank dies, and their size would not stay",
            fix="set parallel.domain to half of the HDP ranks or less",
        )
    if (config.eval.keep_best or config.eval.patience) and not config.eval.sources:
        name = "eval.keep_best" if config.eval.keep_best else "eval.patience"
        raise ConfigError(f"{name} is set, but eval.sources is empty", so="no loss would be lower than another",
                                  fix="name the documents to evaluate on in eval.sources")  # fmt: skip
    check_content(data)
    _check_weights(data)
    losses = {f"model.router_aux_loss_weight = {shape.balance}": shape.balance > 0,
              f'model.indexer_loss = "{config.model.indexer_loss}"': shape.indexer_loss is not None}  # fmt: skip
    losses["data.share_prefixes = true"] = data.share_prefixes
    if len(found := [name for name, is_set in losses.items() if is_set]) > 1:
        raise ConfigError(f"{' and '.join(found)} do not go together",
                          so="each such loss counts all rows of the global batch, once, and there can be one",
                          fix=f"leave {' or '.join(name.partition(' ')[0] for name in found)} out")  # fmt: skip
    check_batches(data)
    _check_trainer(config.trainer, config.log.trace_steps)


def validate_for_ranks_left(config: Config, num_ranks: int) -> None:
    """``validate`` for a run that goes on with fewer ranks. Raises ``ConfigError`` that says how it can go on."""
    try:
        validate(config, num_ranks=num_ranks)
    except ConfigError as error:
        raise ConfigError(
            f"{num_ranks} of {config.parallel.ranks} ranks are left: {error}",
            so="checkpoints written before are whole",
            fix=f"or bring the others back and continue with `bytescale train --resume {config.trainer.run_dir}`",
        ) from error


def check_batches(data: DataConfig) -> None:
    """Raise ``ConfigError`` for a number outside of its limits, or if a sequence could be larger than a batch."""
    check_limits(data, "data.")
    if data.batch_tokens < data.context_length:
        raise ConfigError(
            f"data.batch_tokens = {data.batch_tokens} is smaller than data.context_length = {data.context_length}",
            so="a document of full length would fit in no global batch",
            fix=f"raise data.batch_tokens to at least {data.context_length} or shorten the context",
        )


def hdp_ranks(parallel: ParallelConfig, num_ranks: int | None = None) -> int:
    """``ranks_beside`` of ``num_ranks`` (``parallel.ranks`` when None)."""
    return ranks_beside(parallel.ranks if num_ranks is None else num_ranks, parallel.tp, parallel.pp)


def kind_of_ranks(parallel: ParallelConfig) -> str:
    """What to call those: all ranks are HDP ranks where there is nothing else."""
    return "ranks" if parallel.tp * parallel.pp == 1 else "HDP ranks"


def check_mesh(parallel: ParallelConfig, content: dict[str, Any]) -> None:
    """Raise ``ConfigError`` when heads, widths or layers do not divide as the mesh needs. Other models tell later."""
    tp, pp, num_layers = parallel.tp, parallel.pp, content["num_hidden_layers"]
    if parallel.experts == "parallel" and not content.get("num_local_experts"):
        raise ConfigError(
            'parallel.experts is "parallel", and the model has no experts',
            so="no token could travel to another rank's",
            fix="take a mixture of experts, or leave parallel.experts out",
        )
    check_stages(pp, num_layers)
    for name in ("num_attention_heads", "intermediate_size"):
        if (value := content[name]) % tp:
            raise ConfigError(
                f"the model's {name} = {value} is no multiple of parallel.tp = {tp}",
                so="the ranks could not take equal parts",
                fix=f"use a degree that divides {value}",
            )
    heads = content["num_key_value_heads"]
    if heads % tp and tp % heads:
        raise ConfigError(
            f"neither of parallel.tp = {tp} and the model's num_key_value_heads = {heads} divides the other",
            so="key and value heads could be neither shared out nor repeated evenly",
            fix=f"use a divisor or a multiple of {heads}",
        )


def _check_trainer(trainer: TrainerConfig, traced: Sequence[int]) -> None:
    never = [step for step in traced if not 1 <= step <= trainer.steps]
    if never and not trainer.epochs:  # else the number of steps is not known yet
        raise ConfigError(
            f"log.trace_steps names step {never[0]}, but the run has steps 1 to {trainer.steps}",
            so="its trace would never be written",
            fix=f"name steps from 1 to {trainer.steps}, or raise trainer.steps",
        )
    if trainer.init and not trainer.init.startswith((HF_PREFIX, CHECKPOINT_PREFIX)):
        raise ConfigError(
            f"trainer.init is {trainer.init!r}",
            so="it is not clear where the weights come from",
            fix=f"write {HF_PREFIX}FOLDER or {CHECKPOINT_PREFIX}FOLDER, or leave it empty for random weights",
        )
    if trainer.resume and not trainer.run_dir:
        raise ConfigError("trainer.resume is set but trainer.run_dir is not", fix="name the run folder to continue")
    if visible(trainer.run_dir) != trainer.run_dir:
        raise ConfigError(
            f"trainer.run_dir is {trainer.run_dir!r}, with control characters in it",
            so="nobody could type the name to continue the run",
            fix="name a folder without them",
        )


def may_offload(config: Config, device: str) -> bool:
    """Whether activations go to host memory on this kind of device ("cuda", "cpu")."""
    return config.memory.offload == "on" or (config.memory.offload == "auto" and device == "cuda")


def check_content(data: DataConfig) -> None:
    """Raise ``ConfigError`` for settings that ``data.content`` does not know, and for fields with a name of our own."""
    chat = ("chat_template", "chat_template_kwargs", "chat_template_date", "train_empty_thoughts")
    for name, content in (*((name, "messages") for name in chat), ("fields", "tokens")):
        if getattr(data, name) != getattr(CorpusConfig(), name) and data.content != content:
            raise ConfigError(
                f'data.{name} is set, but data.content is "{data.content}"',
                so="the setting would have no effect",
                fix=f'leave it out, or set data.content = "{content}"',
            )
    taken = [name for name in data.fields if name in RESERVED_FIELDS or not name.isidentifier()]
    if taken or len(set(data.fields)) < len(data.fields):
        raise ConfigError(
            f"data.fields are {', '.join(map(repr, data.fields))}",
            so=f"{taken[0]!r} could not be told from what a micro-batch has itself" if taken else "one would be lost",
            fix="give every field a name of its own, of letters, digits and _ (labels and weights need no mention)",
        )
    if data.tokenizer == "bpe" and data.content != "text":
        raise ConfigError(
            f'data.tokenizer is "bpe", but data.content is "{data.content}"',
            so="a tokenizer is trained on texts",
            fix="set data.tokenizer to the model's own",
        )


def _check_weights(data: DataConfig) -> None:
    if not data.weights:
        return
    if len(data.weights) != len(data.sources):
        raise ConfigError(
            f"data.weights has {len(data.weights)} numbers for {len(data.sources)} sources",
            so="some source would have no share",
            fix="write one weight per source, or none to shuffle everything together",
        )
    total = math.fsum(data.weights)
    if not min(data.weights) > 0 or abs(total - 1) > 1e-6:
        raise ConfigError(
            f"data.weights are {', '.join(map(str, data.weights))}, with the sum {total:.6g}",
            so="it is not clear what share of the tokens each source should give",
            fix="use numbers above 0 that sum to 1",
        )


def check_sharing(config: Config, ranks: int) -> None:
    """Raise ``ConfigError`` where ranks cannot share parameters as configured."""
    parallel = config.parallel
    check_experts(parallel.experts, parallel.shard)
    check_invariant(invariant=config.trainer.invariant, tp=parallel.tp, experts=parallel.experts)
    if parallel.experts == "parallel" and parallel.tp > 1:
        raise ConfigError(
            f'parallel.experts is "parallel" with parallel.tp = {parallel.tp}',
            so="ranks have whole experts, and none of them a part of one",
            fix="set parallel.tp to 1, or leave parallel.experts out",
        )
    domain = sharing_domain(parallel.shard, parallel.domain, ranks, ranks)
    if config.optimizer.name == "muon" and (domain > 1 or parallel.tp > 1):
        what = 'parallel.shard is "parameters"' if domain > 1 else f"parallel.tp is {parallel.tp}"
        raise ConfigError(
            f"optimizer.name is muon, and {what}",
            so="a rank would orthogonalise a part of a matrix, which is another update",
            fix='use adamw or sgd, or parallel.shard = "optimizer" and parallel.tp = 1 (stages may be any)',
        )
    if domain == 1:
        return
    if parallel.pp > 1:
        raise ConfigError(
            f'parallel.shard is "parameters", and parallel.pp is {parallel.pp}',
            so="stages would gather their layers for one micro-batch in flight after the other",
            fix='set parallel.pp to 1 (parallel.tp may be any), or parallel.shard to "optimizer"',
        )


def _check_optimizer(config: Config) -> None:
    if config.optimizer.name == "muon" and config.optimizer.offload:
        raise ConfigError("optimizer.name is muon, and optimizer.offload is true",
                          so="matrices are made orthogonal in the memory of the gradients, on the device",
                          fix="use adamw or sgd, or leave optimizer.offload out")  # fmt: skip
    optimizer_options(config.optimizer)
    check_overrides(config.optimizer.overrides)
