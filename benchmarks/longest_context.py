"""The longest document that 8 GPUs of 80 GB hold for an attached decoder of Qwen3-8B's shape, by the memory model.

::

    PYTHONPATH=src:. python benchmarks/longest_context.py

Nothing runs at full size. What a layer keeps of a token is measured on the CPU, in BF16, at an eighth of the widths and
with three and six layers: bytes are linear in both. States, logits and rings are counted for the whole model.
"""

from __future__ import annotations

import tempfile
from dataclasses import replace
from typing import Any

import torch

from bytescale.attention import select_kernel
from bytescale.config.resolve import resolve_model
from bytescale.config.schema import Checkpointing, Config, ModelConfig
from bytescale.cost.memory.device_kernels import nccl_reserve_bytes
from bytescale.cost.memory.device_memory import States
from bytescale.cost.memory.measured import MeasuredMemory, MeasuredRows
from bytescale.hf.model.measure import kernel_bytes_per_token, ring_widths
from bytescale.parity import small_model
from bytescale.train.parts.rank_model import RankModel, build_rank_model

LAYERS, HIDDEN, HEADS, KV_HEADS, FEED_FORWARD, VOCABULARY = 36, 4096, 32, 8, 12288, 151936
PARAMETERS = 8_190_735_360
NUM_RANKS, USABLE_BYTES = 8, 0.92 * 79.1 * 2**30  # of an H100 with 80 GB
SCALE = 8
CPU = torch.device("cpu")


def built(num_layers: int, checkpointing: Checkpointing) -> RankModel:
    """A model of an eighth of the widths, measured with and without offloading."""
    with tempfile.TemporaryDirectory() as folder:
        model: Any = small_model(
            "qwen3",
            dtype=torch.bfloat16,
            vocab_size=320,
            num_hidden_layers=num_layers,
            hidden_size=HIDDEN // SCALE,
            num_attention_heads=HEADS // SCALE,
            num_key_value_heads=KV_HEADS // SCALE,
            head_dim=128,
            intermediate_size=FEED_FORWARD // SCALE,
        )
        model.save_pretrained(folder)
        config = Config(model=ModelConfig(preset=f"hf:{folder}"))
        config = replace(
            config,
            trainer=replace(config.trainer, init=f"hf:{folder}", device="cpu", dtype="bf16"),
            memory=replace(config.memory, offload="on", host_gib=1.0, checkpointing=checkpointing),
            data=replace(config.data, context_length=32),
        )
        architecture: Any = resolve_model(config.model)
        kernel = select_kernel("auto", CPU, torch.bfloat16)
        return build_rank_model(config, architecture, kernel, device=CPU, dtype=torch.bfloat16, num_shards=1)


def memory_of(checkpointing: Checkpointing) -> MeasuredMemory:
    """The memory of the whole model on one of the GPUs."""
    few, many = (built(number, checkpointing) for number in (3, 6))
    layer = SCALE * (many.rows.saved_per_token - few.rows.saved_per_token) / 3
    movable = SCALE * (many.rows.movable_per_token - few.rows.movable_per_token) / 3
    saved = SCALE * few.rows.saved_per_token + (LAYERS - 3) * layer
    rows = MeasuredRows(
        saved_per_token=saved,
        peak_per_token=saved + SCALE * (many.rows.peak_per_token - many.rows.saved_per_token),
        fixed=0.0,
        movable_per_token=(LAYERS - 2) * movable,
        moved_per_token=(LAYERS - 2) * movable,
    )
    heads = (replace(many.part.structure.layers[0], num_heads=HEADS, num_kv_heads=KV_HEADS),)
    return MeasuredMemory(
        states=States(num_parameters=PARAMETERS, element_bytes=2, num_ranks=NUM_RANKS),
        rows=rows,
        rings=ring_widths(heads, 2),
        vocab_size=VOCABULARY,
        head_numbers=VOCABULARY * HIDDEN,
        hidden_size=HIDDEN,
        kind="cuda",
        plain_head=True,
        kernel_bytes_per_token=kernel_bytes_per_token(heads, "cuda", 2),
        nccl_bytes=nccl_reserve_bytes(NUM_RANKS, 1, 1),
    )


def main() -> None:
    modes: tuple[Checkpointing, ...] = ("none", "attention", "full")
    for mode in modes:
        memory = memory_of(mode)
        plain, offloaded = memory.capacity_tokens(USABLE_BYTES), memory.capacity_tokens(USABLE_BYTES, 1.0)
        rows, phase = memory.rows, memory.limits().worst_phase(offloaded, offloaded)
        stays = memory.saved_bytes_per_token - memory.movable_bytes_per_token
        host = offloaded * memory.movable_bytes_per_token / 2**30
        print(
            f"{mode:9}: {NUM_RANKS * plain / 1000:.0f}K tokens without, {NUM_RANKS * offloaded / 1000:.0f}K with "
            f"offloading ({host:.0f} GiB of host memory a rank); then a token has {stays / 1000:.0f} KB that stay and "
            f"{(rows.peak_per_token - rows.saved_per_token) / 1000:.0f} KB in a layer's backward; the {phase.name} "
            f"needs {float(phase.bytes(offloaded, offloaded)) / 2**30:.1f} GiB at the peak"
        )


if __name__ == "__main__":
    main()
