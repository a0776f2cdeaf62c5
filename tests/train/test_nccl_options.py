"""Environment variables of NCCL and of CUDA's allocator: which ones we set, and which values are refused."""

from __future__ import annotations

from pathlib import Path

import torch

from bytescale.common.environment import prepare_gpu
from bytescale.common.errors import ConfigError
from bytescale.config.schema import Config, ModelConfig, ParallelConfig
from bytescale.cost.memory.device_kernels import NCCL_BYTES_PER_NEIGHBOUR, nccl_reserve_bytes
from bytescale.runtime.group import RankGroup
from bytescale.train.loop.trainer import train
from bytescale.train.ranks import check_same_nccl_options
from tests.helpers.ranks import run_ranks
from tests.train.runs import described, losses, small_run, write_corpus


def test_libraries_of_cuda_are_told_unless_the_user_has_said_anything() -> None:
    environment: dict[str, str] = {}
    prepare_gpu(environment)
    assert environment == {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True", "NCCL_NVLS_ENABLE": "0"}
    for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        own = {name: "max_split_size_mb:512", "NCCL_NVLS_ENABLE": "1", "CUBLAS_WORKSPACE_CONFIG": ":16:8"}
        given = dict(own)
        prepare_gpu(given, deterministic=True)
        assert given == own
    prepare_gpu(environment, deterministic=True)
    assert environment["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"


def test_a_deterministic_run_asks_pytorch_for_it_until_it_ends(tmp_path: Path) -> None:
    """PyTorch's flash attention, FlashAttention 3 and 4, embeddings and sums by index look at this one switch.

    With it PyTorch fills new memory by NaN, so that what is read before it is written would show.
    """
    during, corpus = set[bool](), write_corpus(tmp_path / "corpus")
    for wanted in (True, False):
        config = small_run(corpus, tmp_path / str(wanted), steps=2, deterministic=wanted)
        train(config, print_line=lambda line: during.add(torch.are_deterministic_algorithms_enabled()))
        assert wanted in during
        assert not torch.are_deterministic_algorithms_enabled()
        during.clear()
    assert losses(tmp_path / "True") == losses(tmp_path / "False")


def test_ranks_with_different_options_are_refused_on_every_rank() -> None:
    def one_rank(world: RankGroup) -> str:
        check_same_nccl_options(world, {"NCCL_BUFFSIZE": "4194304"})
        try:
            check_same_nccl_options(world, {"NCCL_MAX_P2P_NCHANNELS": "8"} if world.rank == 1 else {})
        except ConfigError as error:
            return str(error)
        return ""

    for message in run_ranks(3, one_rank):
        assert "NCCL_MAX_P2P_NCHANNELS is unset and 8 on different ranks" in message


def test_the_memory_model_counts_what_nccl_holds() -> None:
    """One rank nothing; eight in a node their seven neighbours, in two communicators; CPUs nothing."""
    assert nccl_reserve_bytes(1, 1, 1) == 0
    assert nccl_reserve_bytes(8, 1, 1) == 9 * NCCL_BYTES_PER_NEIGHBOUR
    assert nccl_reserve_bytes(512, 1, 1) == 9 * NCCL_BYTES_PER_NEIGHBOUR
    assert nccl_reserve_bytes(8, 8, 4) > nccl_reserve_bytes(8, 8, 1) > nccl_reserve_bytes(8, 1, 1)
    models = {
        kind: described(Config(model=ModelConfig(preset="tiny"), parallel=ParallelConfig(ranks=8)), kind=kind)[1]  # type: ignore[arg-type]
        for kind in ("cpu", "cuda")
    }
    peaks = {kind: float(model.limits().device_peak(0, 0, 0)) for kind, model in models.items()}
    phases = {kind: float(max(p.bytes(0, 0) for p in model.phases())) for kind, model in models.items()}
    assert peaks["cuda"] - models["cuda"].states.device_bytes - phases["cuda"] == 9 * NCCL_BYTES_PER_NEIGHBOUR
    assert peaks["cpu"] - models["cpu"].states.device_bytes - phases["cpu"] == 0
