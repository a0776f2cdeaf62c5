"""Decoders of transformers in the trainer: on any number of ranks, resumed, exported, and refused by name."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from transformers import AutoModelForCausalLM

import bytescale
from bytescale.attention import PackedAttention, select_kernel
from bytescale.cli.main import main
from bytescale.common.errors import CheckpointError, ConfigError
from bytescale.config.load import config_to_toml
from bytescale.config.overrides import optimizer_options
from bytescale.config.resolve import resolve_model
from bytescale.config.schema import Config, MemoryConfig, ModelConfig
from bytescale.config.validate import validate
from bytescale.cost.assumed import MeshCosts
from bytescale.data.loading.corpus import prepare_corpus
from bytescale.data.loading.loader import Loader
from bytescale.data.tokens.tokenizer import ByteTokenizer
from bytescale.hf.files.folder import load_model
from bytescale.hf.files.hf_folder import exact_dtype
from bytescale.hf.model.counting import LiveBytes
from bytescale.hf.model.decoder import HFDecoder
from bytescale.hf.model.measure import DOCUMENT_TOKENS
from bytescale.hf.model.probe import heads_of
from bytescale.hf.model.selectors import LowestFirst
from bytescale.parity import small_model
from bytescale.parity.thread_ranks import run_ranks
from bytescale.plan import MicroBatch
from bytescale.runtime.group import RankGroup
from bytescale.runtime.mesh import Mesh
from bytescale.runtime.optimizer.sharded_optimizer import ShardedOptimizer
from bytescale.train.loop.step import learning_rate
from bytescale.train.loop.trainer import train
from bytescale.train.parts.rank_model import RankModel, build_rank_model
from bytescale.train.parts.run_kernels import heads_of_rank
from tests.helpers.effort import one_in, one_of
from tests.hf.support import on_ranks as on_thread_ranks

from .runs import interrupt, losses, metrics, on_ranks, run, small_run, with_trainer, write_corpus

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("attached") / "corpus")


def hf_folder(folder: Path, name: str, **changes: Any) -> Path:
    """A small random model with a vocabulary of bytes, as transformers saves it, with a tokenizer's file."""
    sizes = {"vocab_size": 320, "n_positions" if name == "gpt2" else "max_position_embeddings": 512}
    model: Any = small_model(name, dtype=torch.float32, **{**sizes, **changes})
    model.save_pretrained(folder)
    (folder / "tokenizer.json").write_text(ByteTokenizer().to_json(), encoding="utf-8")
    return folder


def run_from(folder: Path, corpus: Path, run_dir: Path, num_ranks: int, **trainer: object) -> Config:
    capacity = 256 if num_ranks == 1 else 128
    config = with_trainer(on_ranks(small_run(corpus, run_dir), num_ranks, capacity), init=f"hf:{folder}", **trainer)
    return replace(config, model=ModelConfig(preset=f"hf:{folder}"))


def global_batches(config: Config) -> Iterator[list[dict[str, torch.Tensor]]]:
    """The documents of every step, in the trainer's order."""
    loader = Loader(prepare_corpus(config.data), config.data, 0)
    planner = bytescale.make_planner(num_ranks=1, capacity_tokens=256)
    with loader.open(planner, config.trainer.steps) as steps:
        for data in steps:
            documents = []
            for plan, micro in zip(data.rank_plan.micro_batches, data.micro_batches, strict=True):
                lengths = plan.local_lengths.tolist()
                tokens, labels = (torch.as_tensor(a).split(lengths) for a in (micro.tokens, micro.labels))
                documents += [{"tokens": a, "labels": b} for a, b in zip(tokens, labels, strict=True)]
            yield documents
    loader.corpus.close()


def summed_loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits, labels, reduction="sum", ignore_index=-100)


def plain_curve(model: nn.Module, config: Config) -> list[float]:
    """Plain transformers and PyTorch in one process, document by document."""
    settings, curve = config.optimizer, []
    groups = [
        {"params": [p for p in model.parameters() if p.dim() >= 2], "weight_decay": settings.weight_decay},
        {"params": [p for p in model.parameters() if p.dim() < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, **optimizer_options(settings))
    for step, batch in enumerate(global_batches(config), start=1):
        total = sum(int((d["labels"] != -100).sum()) for d in batch)
        optimizer.zero_grad()
        curve.append(0.0)
        for document in batch:
            loss = summed_loss(model(input_ids=document["tokens"][None]).logits[0], document["labels"]) / total
            loss.backward()
            curve[-1] += float(loss.detach())
        nn.utils.clip_grad_norm_(model.parameters(), settings.clip_grad_norm)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, config.trainer.steps, settings)
        optimizer.step()
    return curve


def own_loop_curve(
    model: nn.Module, config: Config, group: dist.ProcessGroup | None,
    after: Callable[[bytescale.HDP], None] = lambda hdp: None, **options: Any,
) -> list[float]:  # fmt: skip
    """The loop of the documentation. Returns this rank's share of the losses. ``after``: is called before a step."""
    settings, curve = config.optimizer, []
    hdp = bytescale.HDP(model, group, capacity_tokens=128 if group is not None else 256, **options)
    hdp.adamw(
        settings.lr, **optimizer_options(settings), weight_decay=settings.weight_decay,
        group_options=lambda name, p: {} if p.dim() > 1 else {"weight_decay": 0.0},
    )  # fmt: skip
    for step, batch in enumerate(global_batches(config), start=1):
        total = sum(int((d["labels"] != -100).sum()) for d in batch)
        curve.append(0.0)
        for micro in hdp.plan(batch):
            loss = summed_loss(model(**micro.inputs).logits[0, : micro.num_rows], micro.labels) / total
            loss.backward()
            curve[-1] += float(loss.detach())
        after(hdp)
        hdp.step(max_grad_norm=settings.clip_grad_norm, lr=learning_rate(step, config.trainer.steps, settings))
    return curve


@pytest.mark.parametrize("steps", one_of([8, 50], 8))
def test_trainer_own_loop_and_plain_transformers_give_the_same_curve(corpus: Path, tmp_path: Path, steps: int) -> None:
    """A small Qwen3. In fp64 the three differ by rounding alone, which 50 updates enlarge a little."""
    folder = hf_folder(tmp_path / "qwen3", "qwen3")
    config = run_from(folder, corpus, tmp_path / "run", 2, steps=steps, dtype="fp64")
    by_trainer = run(config)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    plain = plain_curve(copy.deepcopy(model).train(), config)
    shares = on_thread_ranks(2, model.train(), lambda group, own: own_loop_curve(own, config, group))
    by_loop = [sum(parts) for parts in zip(*shares, strict=True)]
    assert by_trainer == pytest.approx(plain, rel=1e-8)
    assert by_loop == pytest.approx(plain, rel=1e-8)
    assert plain[-1] < 0.9 * plain[0]


NAMES = ["gemma2", "gpt_oss", "mistral", "granite", "deepseek_v3", "gpt2", "qwen3_5_text", "jamba"]
MODES = ["attention", "full", "none"]
CURVES = [("gemma2", "attention", 3)] + [
    (name, MODES[(place + num_ranks) % 3], num_ranks)
    for place, name in enumerate(NAMES)
    for num_ranks in ((2, 4), (1, 3))[place % 2]
]


@pytest.mark.exhaustive
@pytest.mark.parametrize(("name", "checkpointing", "num_ranks"), one_of(CURVES, CURVES[0]))
def test_any_number_of_ranks_gives_plain_transformers_curve(
    corpus: Path, tmp_path: Path, name: str, checkpointing: str, num_ranks: int
) -> None:
    """Windows, soft caps, sinks, heads with a scale, values of another width; with and without recomputation."""
    folder = hf_folder(tmp_path / name, name)
    config = run_from(folder, corpus, tmp_path / "run", num_ranks, steps=4, checkpointing=checkpointing)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).train()
    assert run(config) == pytest.approx(plain_curve(model, config), rel=3e-4)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["deepseek_v32", "minimax_m3_vl_text"])
def test_a_model_that_chooses_keys_trains_and_becomes_a_folder_again(corpus: Path, tmp_path: Path, name: str) -> None:
    """Its indexers stay as they are, and have to be named as frozen: checkpoints have what is trained alone."""
    folder = hf_folder(tmp_path / name, name)
    config = run_from(folder, corpus, tmp_path / "run", 2, steps=3)
    with pytest.raises(ConfigError, match=r"indexer.* chooses keys.*set model.freeze to .'\*\.indexer\.\*'"):
        train(config, print_line=lambda line: None)
    config = with_trainer(config, run_dir=str(tmp_path / "frozen"))
    config = replace(config, model=replace(config.model, freeze=("*.indexer.*",)))
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).train()
    with LowestFirst():
        assert run(config) == pytest.approx(plain_curve(model, config), rel=3e-4)
    assert main(["convert", str(tmp_path / "frozen" / "checkpoints" / "step-000003"), str(tmp_path / "out")]) == 0
    written = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    for key, value in written.named_parameters():
        torch.testing.assert_close(value, model.get_parameter(key), rtol=0, atol=1e-4, msg=key)


@pytest.mark.exhaustive
@pytest.mark.parametrize(("stage", "pp"), [("sparse", 1), ("sparse", 2), ("dense", 1)])
def test_indexers_learn_as_in_a_loop_of_ones_own(corpus: Path, tmp_path: Path, stage: Any, pp: int) -> None:
    """Both losses over three steps, which tests/hf/test_indexer_loss.py compares with plain transformers'."""
    folder = hf_folder(tmp_path / "model", "deepseek_v32", first_k_dense_replace=2)  # experts have no fp64
    freeze = ("!*.indexer.*",) if stage == "dense" else ()
    config = run_from(folder, corpus, tmp_path / "run", 2 * pp, steps=3, dtype="fp64")
    config = replace(config, parallel=replace(config.parallel, pp=pp))
    config = replace(config, model=replace(config.model, freeze=freeze, indexer_loss=stage))
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64).train()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not freeze or ".indexer." in name)
    wanted: list[float] = []
    curve = own_loop_curve(model, config, None, after=lambda hdp: wanted.append(hdp.indexer_loss()), indexer_loss=stage)
    assert run(config) == pytest.approx(curve, rel=1e-6)
    of_indexers = [line["batch_loss"] for line in metrics(tmp_path / "run")]
    assert of_indexers == pytest.approx(wanted, rel=1e-6)
    assert stage == "sparse" or of_indexers[-1] < of_indexers[0]  # the model, and with it the target, moves


def test_a_run_goes_on_exactly_and_becomes_a_folder_again(corpus: Path, tmp_path: Path) -> None:
    """Killed on 2 ranks, resumed on 3 without the folder it began with; then converted, with the whole config.json."""
    folder = hf_folder(tmp_path / "source", "gemma2")
    content = json.loads((folder / "config.json").read_text(encoding="utf-8")) | {"a_key_of_its_own": [1, 2]}
    (folder / "config.json").write_text(json.dumps(content), encoding="utf-8")
    whole = run_from(folder, corpus, tmp_path / "whole", 1, steps=4)
    run(whole)
    config = run_from(folder, corpus, tmp_path / "run", 2, steps=4)
    config = replace(config, checkpoint=replace(config.checkpoint, every=2))
    interrupt(config, after_step=3)
    folder.rename(tmp_path / "moved")
    resumed = with_trainer(
        replace(
            on_ranks(config, 3, 128),
            model=ModelConfig(preset=f"checkpoint:{tmp_path / 'run' / 'checkpoints' / 'step-000002'}"),
        ),
        init="",
        resume=True,
    )
    assert run(resumed) == pytest.approx(losses(tmp_path / "whole"), rel=3e-5)

    last = tmp_path / "run" / "checkpoints" / "step-000004"
    assert main(["convert", str(last), str(tmp_path / "out")]) == 0
    written = json.loads((tmp_path / "out" / "config.json").read_text(encoding="utf-8"))
    assert {key: value for key, value in written.items() if key != "dtype"} == {
        key: value for key, value in content.items() if key != "dtype"
    }
    assert (tmp_path / "out" / "tokenizer.json").is_file()
    again = run_from(tmp_path / "out", corpus, tmp_path / "again", 1, steps=1)
    from_checkpoint = with_trainer(
        replace(again, model=ModelConfig(preset=f"checkpoint:{last}")),
        init=f"checkpoint:{last}",
        run_dir=str(tmp_path / "other"),
    )
    assert run(again) == run(from_checkpoint)


@pytest.mark.parametrize(
    ("name", "writer", "reader", "trainer"),
    [
        pytest.param("qwen3", (2, 2), (3, 1), {}, marks=pytest.mark.exhaustive),
        pytest.param("qwen3_moe", (4, 4), (2, 1), {}, marks=pytest.mark.exhaustive),
        pytest.param(
            "gpt_oss", (4, 4), (4, 2), {"experts": "parallel", "checkpointing": "full"}, marks=pytest.mark.exhaustive
        ),
        pytest.param("qwen3_moe", (4, 2), (2, 1), {"experts": "parallel"}, marks=pytest.mark.exhaustive),
        pytest.param(
            "qwen3_moe", (2, 1), (4, 4), {"dtype": "bf16", "experts": "parallel"}, marks=pytest.mark.exhaustive
        ),
        pytest.param("gemma2", (4, 2), (3, 3), {"checkpointing": "full"}, marks=pytest.mark.exhaustive),
        pytest.param("qwen3", (2, 1), (4, 2), {"dtype": "bf16"}, marks=pytest.mark.exhaustive),
    ],
)
def test_ranks_that_share_parameters_train_and_go_on_in_any_other_number(
    corpus: Path, tmp_path: Path, name: str, writer: tuple[int, int], reader: tuple[int, int], trainer: dict[str, Any]
) -> None:
    """Killed with one domain and resumed with another, in lockstep plans with evaluations, as one rank trains."""
    folder = hf_folder(tmp_path / "source", name)

    def config_of(run_dir: str, ranks: int, domain: int) -> Config:
        given = trainer if domain > 1 else {key: value for key, value in trainer.items() if key != "experts"}
        config = run_from(folder, corpus, tmp_path / run_dir, ranks, steps=5, **{"dtype": "fp64", **given})
        config = replace(
            config,
            checkpoint=replace(config.checkpoint, every=2),
            eval=replace(config.eval, sources=(str(corpus),), every=2),
        )
        return with_trainer(config, shard="parameters", domain=domain) if domain > 1 else config

    wanted = run(config_of("whole", 1, 1))
    config = config_of("run", *writer)
    interrupt(config, after_step=3)
    assert list((tmp_path / "run" / "checkpoints").glob("step-000002/*-00001.safetensors"))
    resumed = with_trainer(config_of("run", *reader), resume=True)
    tolerance = 2e-2 if trainer.get("dtype") == "bf16" else 1e-8
    assert run(resumed) == pytest.approx(wanted, rel=tolerance)
    rows = [json.loads(line) for line in (tmp_path / "run" / "evaluations.jsonl").read_text().splitlines()]
    whole = [json.loads(line) for line in (tmp_path / "whole" / "evaluations.jsonl").read_text().splitlines()]
    assert [row["loss"] for row in rows] == pytest.approx([row["loss"] for row in whole], rel=tolerance)


def test_weights_go_through_a_checkpoint_bit_for_bit(corpus: Path, tmp_path: Path) -> None:
    """Experts are stored one by one in files and together in memory; a router's correction is a constant."""
    folder = hf_folder(tmp_path / "source", "deepseek_v3")
    config = run_from(folder, corpus, tmp_path / "run", 1, steps=1)
    run(replace(config, optimizer=replace(config.optimizer, lr=1e-30, weight_decay=0.0)))
    checkpoint = tmp_path / "run" / "checkpoints" / "step-000001"
    assert main(["convert", str(checkpoint), str(tmp_path / "back")]) == 0
    before, after = (AutoModelForCausalLM.from_pretrained(path).state_dict() for path in (folder, tmp_path / "back"))
    assert before.keys() == after.keys()
    assert all(torch.equal(value, after[name]) for name, value in before.items())


@pytest.mark.parametrize(
    ("section", "changes", "message"),
    [
        ("parallel", {"tp": 2, "ranks": 3}, "3 ranks are no multiple of tp = 2"),
        ("model", {"config": {"num_layers": 3}}, "model.config has num_layers.* did you mean num_hidden_layers"),
        ("parallel", {"shard": "parameters", "domain": 3, "ranks": 4}, "domain of 3 ranks .* does not divide 4 ranks"),
        ("parallel", {"experts": "parallel", "ranks": 2}, "xperts is .parallel., but shard is .optimizer."),
        ("parallel", {"domain": 2, "ranks": 2}, "omain is 2, but shard is .optimizer."),
    ],
)
def test_settings_that_cannot_be_are_refused_by_name(
    corpus: Path, tmp_path: Path, section: str, changes: dict[str, Any], message: str
) -> None:
    config = run_from(hf_folder(tmp_path / "qwen3", "qwen3"), corpus, tmp_path / "run", 1)
    config = replace(config, **{section: replace(getattr(config, section), **changes)})
    with pytest.raises(ConfigError, match=message):
        validate(config)


def test_models_that_cannot_be_trained_are_refused_before_the_first_step(corpus: Path, tmp_path: Path) -> None:
    """Dropout, an unknown family, and weights that are missing or have another shape."""
    dropping = hf_folder(tmp_path / "dropout", "qwen3", attention_dropout=0.1)
    with pytest.raises(ConfigError, match=r"self_attn cannot be attached: it draws random numbers.*config.json"):
        train(run_from(dropping, corpus, tmp_path / "a", 1), print_line=lambda line: None)
    other = hf_folder(tmp_path / "other", "qwen3")
    content = json.loads((other / "config.json").read_text(encoding="utf-8"))
    (other / "config.json").write_text(json.dumps(content | {"intermediate_size": 56}), encoding="utf-8")
    with pytest.raises(CheckpointError, match=r"mismatched tensors: model\.layers\.0\.mlp"):
        train(run_from(other, corpus, tmp_path / "b", 1), print_line=lambda line: None)
    (other / "config.json").write_text(json.dumps(content | {"num_hidden_layers": 3}), encoding="utf-8")
    with pytest.raises(ConfigError, match=r"the configuration of the qwen3 model.*layer_types"):
        train(run_from(other, corpus, tmp_path / "e", 1), print_line=lambda line: None)
    longer = content | {"num_hidden_layers": 3, "layer_types": ["full_attention"] * 3}
    (other / "config.json").write_text(json.dumps(longer), encoding="utf-8")
    with pytest.raises(CheckpointError, match=r"missing tensors: model\.layers\.2"):
        train(run_from(other, corpus, tmp_path / "c", 1), print_line=lambda line: None)
    (other / "config.json").write_text(json.dumps(content | {"model_type": "nonsense"}), encoding="utf-8")
    with pytest.raises(ConfigError, match="no model of type 'nonsense'"):
        train(run_from(other, corpus, tmp_path / "d", 1), print_line=lambda line: None)


def test_the_command_trains_and_only_checks(corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = hf_folder(tmp_path / "gpt_oss", "gpt_oss")
    config = run_from(folder, corpus, tmp_path / "run", 1, steps=2)
    plain = replace(config, model=ModelConfig(), trainer=replace(config.trainer, init=""))
    plain = replace(plain, data=replace(plain.data, tokenizer="bytes"))
    (tmp_path / "config.toml").write_text(config_to_toml(plain), encoding="utf-8")
    arguments = ["train", str(tmp_path / "config.toml"), "--init", f"hf:{folder}"]
    assert main([*arguments, "--dry-run"]) == 0
    assert "gpt_oss, 2 layers (50 % of attention in windows of 5)" in capsys.readouterr().out
    assert not (tmp_path / "run").exists()
    assert main(arguments) == 0
    assert len(losses(tmp_path / "run")) == 2


@pytest.mark.parametrize("name", ["qwen3", "gemma2"])
@pytest.mark.parametrize("checkpointing", one_of(["none", "full", "attention"], "none"))
def test_measured_memory_is_that_of_a_larger_micro_batch(
    corpus: Path, tmp_path: Path, name: str, checkpointing: str
) -> None:
    """Saved bytes and the peak of a micro-batch that is much larger than the measured ones, to 5 %."""
    config = run_from(hf_folder(tmp_path / name, name), corpus, tmp_path / "run", 1, checkpointing=checkpointing)
    architecture: Any = resolve_model(config.model)
    kernel = select_kernel("auto", CPU, torch.float32)
    model = build_rank_model(config, architecture, kernel, device=CPU, dtype=torch.float32, num_shards=1)
    micro_batch = MicroBatch.of_documents(0, [DOCUMENT_TOKENS] * 40 + [150, 70])
    memory = model.activations.attention_memory
    attention = PackedAttention(micro_batch, kernel, RankGroup(device=CPU).exchange, memory)
    rows, positions = micro_batch.num_tokens, torch.as_tensor(micro_batch.position_ids())
    with LiveBytes() as live:
        hidden = model.part(torch.arange(rows) % 300, positions, attention)
        saved = live.now
        hidden.backward(torch.ones_like(hidden))
    ring = next(phase for phase in model.memory("cpu", 4).phases() if phase.name == "ring")
    assert ring.bytes_per_row_token > ring.bytes_per_grid_token > 0, "groups may be grids, within limits"
    assert saved == pytest.approx(model.rows.saved_per_token * rows, rel=0.05)
    in_chunk = min(rows, model.activations.row_chunk.rows)
    foreseen = model.rows.fixed + model.rows.peak_per_token * rows + model.rows.chunked_per_token * in_chunk
    assert live.peak == pytest.approx(foreseen, rel=0.05)


def built_with_offload(folder: Path, corpus: Path, name: str, num_layers: int, checkpointing: str) -> RankModel:
    folder = hf_folder(folder, name, **{"n_layer" if name == "gpt2" else "num_hidden_layers": num_layers})
    config = run_from(folder, corpus, folder / "run", 1, checkpointing=checkpointing)
    config = replace(config, memory=MemoryConfig(offload="on", host_gib=0.25))
    architecture: Any = resolve_model(config.model)
    kernel = select_kernel("auto", CPU, torch.float32)
    return build_rank_model(config, architecture, kernel, device=CPU, dtype=torch.float32, num_shards=1)


@pytest.mark.parametrize(
    ("name", "checkpointing"),
    one_in(5, list(product(["qwen3", "gpt2", "gpt_oss", "phi3"], ["none", "attention", "full"]))),
)
def test_all_that_movable_layers_keep_leaves_the_device_and_no_bit_changes(
    corpus: Path, tmp_path: Path, name: str, checkpointing: str
) -> None:
    """Also where heads come before tokens, and where one projection makes queries, keys and values."""
    fewer, model = (built_with_offload(tmp_path / f"{n}", corpus, name, n, checkpointing) for n in (4, 5))
    of_layer = model.rows.saved_per_token - fewer.rows.saved_per_token
    assert model.rows.movable_per_token == pytest.approx(3 * of_layer, rel=0.01)
    assert model.rows.moved_per_token == pytest.approx(3 * of_layer, rel=0.01)

    micro_batch = MicroBatch.of_documents(0, [70, 1, 40])
    kernel, offload = select_kernel("auto", CPU, torch.float32), model.activations.offload
    assert offload is not None
    tokens, positions = torch.arange(111) % 300, torch.as_tensor(micro_batch.position_ids())

    def gradients(ratio: float) -> tuple[torch.Tensor, int]:
        planned, before = replace(micro_batch, offload_ratios=((111, ratio),)), offload.bytes_moved
        model.parameters.zero_gradients()
        model.activations.begin_step([planned])
        memory = model.activations.attention_memory
        with model.activations.forward(planned):
            hidden = model.part(tokens, positions, PackedAttention(planned, kernel, RankGroup().exchange, memory))
        hidden.square().sum().backward()
        assert offload.pool.bytes_in_use == 0
        return model.parameters.gradients.clone(), offload.bytes_moved - before

    plain, nothing = gradients(0.0)
    assert nothing == 0
    for ratio in (0.4, 1.0):
        offloaded, moved = gradients(ratio)
        assert torch.equal(offloaded, plain)
        assert moved == pytest.approx(model.rows.moved_per_token * int(ratio * 111), rel=0.01)


@pytest.mark.exhaustive
def test_a_rank_holds_longer_documents_by_offloading(corpus: Path, tmp_path: Path) -> None:
    """With a capacity of 176, one rank holds documents of 256 tokens only by offloading."""
    folder = hf_folder(tmp_path / "qwen3", "qwen3", num_hidden_layers=6)

    def curve(capacity_tokens: int, **memory: Any) -> list[float]:
        config = run_from(folder, corpus, tmp_path / str(capacity_tokens), 1, steps=3)
        config = replace(config, memory=MemoryConfig(**memory))
        return run(replace(config, parallel=replace(config.parallel, capacity_tokens=capacity_tokens)))

    assert curve(176, offload="on", host_gib=0.25) == pytest.approx(curve(256, offload="off"), rel=1e-5)
    with pytest.raises(AssertionError, match=r"context_length = 256 .*memory.offload"):
        curve(175, offload="off")


def test_a_rank_keeps_the_exact_weights_of_its_shard_alone(corpus: Path, tmp_path: Path) -> None:
    """BF16 parameters of a model in FP32: no second copy of all weights, and those of all ranks are all weights."""
    config = run_from(hf_folder(tmp_path / "a", "qwen3"), corpus, tmp_path / "run", 1)
    architecture: Any = resolve_model(config.model)
    kernel = select_kernel("auto", CPU, torch.bfloat16)

    def build(dtype: torch.dtype) -> RankModel:
        return build_rank_model(config, architecture, kernel, device=CPU, dtype=dtype, num_shards=3)

    whole = build(torch.float32)
    assert whole.initial is None
    models = [build(torch.bfloat16) for _ in range(3)]

    def of_rank(group: dist.ProcessGroup) -> None:
        mesh, model = Mesh.of_hdp(RankGroup(group)), models[group.rank()]
        optimizer = ShardedOptimizer.of_config(model.parameters, config.optimizer, mesh)
        model.load(config, optimizer, SimpleNamespace(mesh=mesh))  # type: ignore[arg-type]
        assert torch.equal(model.parameters.values, whole.parameters.values.bfloat16())
        for place, shard in zip(model.parameters.shards(group.rank()), optimizer.zeros[0].shards, strict=True):
            assert shard.master.untyped_storage().nbytes() == 4 * (place.stop - place.start)
            assert torch.equal(shard.master, whole.parameters.values[place])

    run_ranks(3, of_rank, timeout_seconds=120)


@pytest.mark.parametrize("stored", one_of([torch.bfloat16, torch.float32], torch.bfloat16))
def test_ranks_map_the_weights_of_a_folder_into_memory(tmp_path: Path, stored: torch.dtype) -> None:
    """A model of 21 MB or 42 MB costs a rank no memory of its own until its parameters are in flat buffers."""
    folder = tmp_path / "a"
    small_model("qwen3", dtype=stored, hidden_size=512, vocab_size=20_000).save_pretrained(folder)
    content = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    read_as = exact_dtype(folder, torch.bfloat16)
    assert read_as == stored

    def own_bytes() -> int:
        (line,) = (line for line in Path("/proc/self/smaps_rollup").read_text().splitlines() if "Anonymous" in line)
        return 1024 * int(line.split()[1])

    load_model(folder, content, read_as)  # imports the family's code
    before = own_bytes()
    model = load_model(folder, content, read_as)
    total = sum(parameter.nbytes for parameter in model.parameters())
    assert total > 2e7
    assert own_bytes() - before < 0.1 * total


@pytest.mark.parametrize("name", ["falcon_mamba", "mamba2"])
def test_models_without_attention_train(name: str, corpus: Path, tmp_path: Path) -> None:
    """They have no heads, and norms with a gate or a constant in the place of a weight."""
    folder = hf_folder(tmp_path / name, name)
    one, two = (run(run_from(folder, corpus, tmp_path / f"{ranks}", ranks, steps=2)) for ranks in (1, 2))
    assert two == pytest.approx(one, rel=1e-5)


@pytest.mark.parametrize("name", ["gpt2", "deepseek_v3", "gemma2", "llama", "mamba2"])
def test_flash_attention_is_tried_for_the_heads_that_the_probe_sees(name: str) -> None:
    """As own loops try it. What config.json says of them is not what layers have, in some families."""
    model = small_model(name)
    seen = heads_of(HFDecoder(model).structure)
    assert heads_of_rank(model.config.to_dict(), torch.bfloat16, 1) == seen
    half = heads_of_rank(model.config.to_dict(), torch.bfloat16, 2)
    assert half == (seen and replace(seen, queries=seen.queries // 2, keys=seen.keys // 2))


def test_windows_make_attention_cheaper_for_planners(corpus: Path, tmp_path: Path) -> None:
    """q(s) is twice the pairs that are seen; a window makes a long document cost less, and a short one the same."""
    config = run_from(hf_folder(tmp_path / "a", "gemma2", sliding_window=16), corpus, tmp_path / "run", 1)
    kernel = select_kernel("auto", CPU, torch.float32)
    architecture: Any = resolve_model(config.model)
    model = build_rank_model(config, architecture, kernel, device=CPU, dtype=torch.float32, num_shards=1)
    cost = MeshCosts(kind="cpu", bytes_per_element=4).assumed(model.spec)
    assert cost.windows == ((16, 0.5),)
    pairs = [sum(min(query + 0.5, 16) for query in range(s)) for s in (8, 16, 200)]
    halves = [(s * s + 2 * seen) / 2 for s, seen in zip((8, 16, 200), pairs, strict=True)]
    assert cost.squares_of([8, 16, 200]).tolist() == pytest.approx(halves, rel=0.01)
    assert cost.squares_of([8, 16]).tolist() == [64.0, 256.0]
