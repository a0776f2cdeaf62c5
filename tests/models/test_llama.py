"""The model as mathematics: sizes, positions, packing."""

from __future__ import annotations

import pytest
import torch

from bytescale.config.architecture import PRESETS
from bytescale.cost import flops
from bytescale.models import build_model
from bytescale.models.rope import apply_rope, rope_frequencies, rope_rotation
from tests.helpers.reference_attention import reference_attention
from tests.helpers.steps import make_model, small_shape


@pytest.mark.parametrize("preset", sorted(PRESETS))
def test_parameter_counts_are_exact(preset: str) -> None:
    with torch.device("meta"):
        model = build_model(PRESETS[preset])
    assert sum(p.numel() for p in model.parameters()) == flops.total_parameters(PRESETS[preset])


@pytest.mark.parametrize("tied", [True, False])
def test_a_pack_gives_what_each_document_gives_alone(tied: bool) -> None:
    model = make_model(small_shape(tie_embeddings=tied), torch.float64)
    lengths = [7, 1, 12]
    tokens = torch.randint(61, (sum(lengths),), generator=torch.Generator().manual_seed(0))
    positions = torch.cat([torch.arange(length) for length in lengths])
    packed = model(tokens, positions, lambda q, k, v: reference_attention(q, k, v, lengths))
    alone = [
        model(piece, torch.arange(len(piece)), lambda q, k, v: reference_attention(q, k, v, [len(q)]))
        for piece in tokens.split(lengths)
    ]
    torch.testing.assert_close(packed, torch.cat(alone), rtol=1e-12, atol=1e-12)


def test_initial_weights_depend_on_the_seed_alone() -> None:
    first, same, other = (make_model(small_shape(), torch.float32, seed) for seed in (3, 3, 4))
    assert torch.equal(first.head_weight, same.head_weight)
    assert not torch.equal(first.head_weight, other.head_weight)


def test_rotary_scores_depend_on_distance_alone() -> None:
    shape = small_shape(head_dim=16)
    q, k = torch.randn(1, 1, 16, dtype=torch.float64), torch.randn(1, 1, 16, dtype=torch.float64)

    def score(query_position: int, key_position: int) -> float:
        rotated = [
            apply_rope(rows, rope_rotation(torch.tensor([position]), shape, torch.float64))
            for rows, position in ((q, query_position), (k, key_position))
        ]
        return float((rotated[0] * rotated[1]).sum())

    # At two million tokens fp32 angles would be off by 0.1; fp64 angles keep the score to 9 digits.
    assert score(2_000_003, 2_000_000) == pytest.approx(score(3, 0), rel=1e-7, abs=1e-9)


def test_linear_rope_scaling_stretches_every_wavelength() -> None:
    plain = rope_frequencies(small_shape(head_dim=8), torch.device("cpu"))
    shape = small_shape(head_dim=8, rope_scaling="linear", rope_scaling_factor=4.0)
    torch.testing.assert_close(rope_frequencies(shape, torch.device("cpu")), plain / 4)


def test_llama3_rope_scaling_keeps_short_wavelengths_and_stretches_long_ones() -> None:
    numbers = {"head_dim": 64, "rope_theta": 500_000.0, "rope_original_context": 8192}
    plain = rope_frequencies(small_shape(**numbers), torch.device("cpu"))
    scaled = rope_frequencies(
        small_shape(**numbers, rope_scaling="llama3", rope_scaling_factor=8.0), torch.device("cpu")
    )
    wavelengths = 2 * torch.pi / plain
    short, long = wavelengths < 8192 / 4, wavelengths > 8192
    torch.testing.assert_close(scaled[short], plain[short])
    torch.testing.assert_close(scaled[long], plain[long] / 8)
    between = ~(short | long)
    assert between.any()
    assert ((scaled[between] < plain[between]) & (scaled[between] > plain[between] / 8)).all()
