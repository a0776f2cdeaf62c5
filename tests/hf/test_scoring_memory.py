"""A large vocabulary costs the memory of a chunk of logits, however many rows are scored."""

from __future__ import annotations

import torch

from bytescale import HDP
from bytescale.hf.scoring.score_file import score_batch
from bytescale.parity import small_model
from tests.helpers.live_bytes import LiveBytes

VOCABULARY = 100_000


def test_a_vocabulary_of_100k_words() -> None:
    model = small_model("llama", dtype=torch.float32, vocab_size=VOCABULARY, num_hidden_layers=1).eval()
    hdp = HDP(model, capacity_tokens=2048, forward_only=True)
    peaks = []
    for length in (256, 2048):
        with LiveBytes() as live:
            score_batch(hdp, [{"tokens": torch.ones(length, dtype=torch.int64)}])
        peaks.append(live.peak)
    assert peaks[1] < 1.2 * peaks[0]
    assert peaks[1] < 0.3 * 2048 * VOCABULARY * 4  # all logits at once
