"""Feed-forward parts a chunk of rows at a time: what that saves is foreseen, and gradients stay."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from bytescale.attention import PackedAttention, select_kernel
from bytescale.cost.memory.measured import MeasuredRows
from bytescale.hf.model import measure
from bytescale.hf.model.counting import LiveBytes, OnMeta
from bytescale.hf.model.decoder import HFDecoder
from bytescale.hf.model.measure import measure_rows, row_wise_parts
from bytescale.parity import small_model
from bytescale.plan import MicroBatch
from bytescale.runtime.group import RankGroup
from bytescale.runtime.optimizer.flat import FlatParameters
from bytescale.runtime.saved.activations import Activations
from bytescale.runtime.saved.host_pool import HostPool

TOKENS, CHUNK = 1024, 128
CPU = torch.device("cpu")


def passed(model: Any, mode: str, chunk: int) -> tuple[MeasuredRows, int, torch.Tensor]:
    """What was measured of a few rows; the peak of a pass over many; and the gradients of that pass."""
    decoder = HFDecoder(copy.deepcopy(model).train())
    flat, kernel = FlatParameters(list(decoder.model.named_parameters()), 1), select_kernel("math", CPU, torch.float32)
    activations = Activations(
        decoder.layers,
        checkpointing=mode,  # type: ignore[arg-type]
        device=CPU,
        row_wise=row_wise_parts(decoder),
        chunk_rows=chunk,
    )
    rows = measure_rows(decoder, kernel, activations, CPU)
    flat.zero_gradients()
    micro_batch = MicroBatch.of_documents(0, [TOKENS // 16] * 16)
    attention = PackedAttention(micro_batch, kernel, RankGroup().exchange, activations.attention_memory)
    activations.begin_step([micro_batch])
    with LiveBytes() as live:
        with activations.forward(micro_batch):
            hidden = decoder(torch.arange(TOKENS) % 61, torch.as_tensor(micro_batch.position_ids()), attention)
        hidden.square().sum().backward()
    return rows, live.peak, flat.gradients.clone()


@pytest.mark.parametrize("name", ["llama", pytest.param("gemma2", marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("mode", ["full", pytest.param("attention", marks=pytest.mark.exhaustive)])
def test_chunks_need_the_memory_that_is_foreseen(name: str, mode: str) -> None:
    """At eight chunks of rows, at most a quarter above what is needed; and all rows at once need much more."""
    model = small_model(name, dtype=torch.float32, intermediate_size=256)
    rows, peak, gradients = passed(model, mode, CHUNK)
    foreseen = rows.fixed + rows.peak_per_token * TOKENS + rows.chunked_per_token * CHUNK
    assert 0.95 < foreseen / peak < 1.25
    _, whole, expected = passed(model, mode, TOKENS)
    assert peak < 0.8 * whole
    torch.testing.assert_close(gradients, expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max()))


@pytest.mark.parametrize(("name", "number"), [("llama", 2), ("mixtral", 0), ("qwen3_next", 0), ("gpt2", 0)])
def test_only_plain_feed_forward_parts_are_taken(name: str, number: int) -> None:
    """Mixtures and GPT-2's transposed matrices are left as they are."""
    assert len(row_wise_parts(HFDecoder(small_model(name, dtype=torch.float32)))) == number


@pytest.mark.parametrize(
    ("name", "mode"),
    [("llama", "full"), *[pytest.param(name, "none", marks=pytest.mark.exhaustive) for name in ("llama", "falcon_h1")]],
)
def test_equal_layers_are_measured_by_a_few(name: str, mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the meta device, a line through two numbers of layers is what all of them give. Falcon-H1's return tuples."""

    def measured(many: int) -> MeasuredRows:
        monkeypatch.setattr(measure, "_MANY", many)
        monkeypatch.setattr(measure, "NUM_DOCUMENTS", (1, 3))  # enough for a line
        meta, kernel = torch.device("meta"), select_kernel("auto", CPU, torch.bfloat16)
        with OnMeta():
            model = small_model(name, dtype=torch.float32, num_hidden_layers=7).to(meta, torch.bfloat16)
            decoder = HFDecoder(model.train())
            activations = Activations(
                decoder.layers,
                checkpointing=mode,  # type: ignore[arg-type]
                pool=HostPool(2**28, pinned=False),
                device=meta,
                row_wise=row_wise_parts(decoder),
            )
            return measure_rows(decoder, kernel, activations, meta)

    few, all_of_them = measured(4), measured(100)
    for number in ("saved_per_token", "peak_per_token", "moved_per_token", "movable_per_token", "chunked_per_token"):
        assert getattr(few, number) == pytest.approx(getattr(all_of_them, number), rel=0.03), number
