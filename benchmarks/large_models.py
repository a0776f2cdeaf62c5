"""The longest document that 8 GPUs of 80 GB hold for large models, by the memory model.

::

    PYTHONPATH=src python benchmarks/large_models.py

In BF16, with full checkpointing and as much offloading as there is, whatever the host's memory; the table says how much
that is. Nothing runs.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, get_args

import torch

from bytescale.attention import select_kernel
from bytescale.config.description import ModelDescription
from bytescale.config.presets import PRESETS
from bytescale.config.schema import AUTO_CAPACITY, Config, Experts
from bytescale.cost.memory.measured import MeasuredMemory
from bytescale.train.parts.describe import describe_model

GIB = 2**30
NUM_GPUS, USABLE_BYTES = 8, 0.92 * 79.1 * GIB  # of an H100 with 80 GB
SHAPES: dict[str, dict[str, Any]] = {
    "8B": PRESETS["7b"],
    "32B": PRESETS["7b"] | {
        "num_hidden_layers": 64, "hidden_size": 5120, "num_attention_heads": 64, "intermediate_size": 25600,
        "vocab_size": 151936,
    },
    "30B-A3B": PRESETS["mixtral-8x7b"] | {
        "num_hidden_layers": 48, "hidden_size": 2048, "num_key_value_heads": 4, "intermediate_size": 768,
        "vocab_size": 151936, "rope_theta": 500_000.0, "num_local_experts": 128, "num_experts_per_tok": 8,
        "router_aux_loss_coef": 0.0,
    },
    "70B": PRESETS["70b"],
}  # fmt: skip
"""Llama 3's 8B and 70B, and decoders of the sizes of Qwen3-32B and Qwen3-30B-A3B."""
MODES = ((1, 1, False), (1, 1, True), (1, 8, False), (1, 8, True), (2, 4, True), (4, 2, True), (8, 1, True))
"""Tensor parallelism, ranks that share layers, and whether the optimizer is in host memory."""
MIXTURES = {
    "30B-A3B": SHAPES["30B-A3B"],
    "235B-A22B": SHAPES["30B-A3B"] | {
        "num_hidden_layers": 94, "hidden_size": 4096, "num_attention_heads": 64, "intermediate_size": 1536,
    },
    "671B-A37B": SHAPES["30B-A3B"] | {
        "num_hidden_layers": 61, "hidden_size": 7168, "num_attention_heads": 128, "num_key_value_heads": 8,
        "intermediate_size": 2048, "vocab_size": 129280, "num_local_experts": 256,
    },
}  # fmt: skip
"""Mixtures of the sizes of Qwen3's two and DeepSeek-V3, without its latent attention and its shared expert."""


def memory_of(shape: dict[str, Any], config: Config, num_ranks: int, domain: int) -> MeasuredMemory:
    """Measured on the meta device, in BF16."""
    cpu, dtype = torch.device("cpu"), torch.bfloat16
    kernel, architecture = select_kernel("auto", cpu, dtype), ModelDescription(content=shape)
    _, memory = describe_model(config, architecture, kernel, cpu, dtype, num_ranks=num_ranks, kind="cuda")
    return memory.of_run(config, domain=domain)


def line(name: str, tp: int, domain: int, on_host: bool) -> str:
    """One row of the table."""
    config = Config()
    config = replace(
        config,
        memory=replace(config.memory, checkpointing="full", offload="on"),
        optimizer=replace(config.optimizer, offload=on_host),
        parallel=replace(config.parallel, tp=tp, capacity_tokens=AUTO_CAPACITY),
    )
    num_ranks = NUM_GPUS // tp
    memory = memory_of(SHAPES[name], config, num_ranks, domain)
    offloaded, plain = memory.capacity_tokens(USABLE_BYTES, 1.0), memory.capacity_tokens(USABLE_BYTES)
    host = memory.states.host_bytes / GIB, offloaded * memory.movable_bytes_per_token / GIB
    return (
        f"{name:8} tp {tp}, domain {domain}, optimizer {'on the host' if on_host else 'on the GPU '}: "
        f"{memory.states.device_bytes / GIB:5.1f} GiB of states a GPU; {num_ranks * offloaded / 1000:5.0f}K tokens "
        f"({num_ranks * plain / 1000:.0f}K without offloading), host memory a GPU {host[0]:.0f} + {host[1]:.0f} GiB"
    )


def of_mixture(name: str, num_ranks: int, experts: Experts) -> str:
    """A mixture on domains of all ranks, with the optimizer in host memory."""
    config = Config()
    config = replace(
        config,
        memory=replace(config.memory, checkpointing="full", offload="on"),
        optimizer=replace(config.optimizer, offload=True),
        parallel=replace(config.parallel, shard="parameters", experts=experts, capacity_tokens=AUTO_CAPACITY),
    )
    memory = memory_of(MIXTURES[name], config, num_ranks, num_ranks)
    states = memory.states
    room = [max(0, memory.capacity_tokens(USABLE_BYTES, moved)) for moved in (1.0, 0.0)]
    return (
        f"{name:9} {num_ranks:3} GPUs, experts {experts:8}: {states.device_bytes / GIB:6.1f} GiB of states a GPU, "
        f"{states.host_bytes / GIB:4.0f} GiB on the host; a rank holds {room[0] / 1000:.0f}K tokens "
        f"({room[1] / 1000:.0f}K without offloading)"
    )


def main() -> None:
    for name in SHAPES:
        for mode in MODES:
            print(line(name, *mode))
    for name in MIXTURES:
        for num_ranks in (8, 16, 32, 64, 128):
            for experts in get_args(Experts):
                print(of_mixture(name, num_ranks, experts))


if __name__ == "__main__":
    main()
