"""The chunked cross-entropy against all logits at once."""

from __future__ import annotations

import pytest
import torch

from bytescale.cost.memory.device_kernels import HEAD_NUMBERS_PER_CHUNK, LOGITS_PER_CHUNK
from bytescale.runtime.group import RankGroup
from bytescale.runtime.loss import IGNORE_INDEX, TorchRows
from tests.helpers.ranks import run_ranks
from tests.helpers.reference_loss import linear_cross_entropy, reference_cross_entropy


def inputs(dtype: torch.dtype, tokens: int = 50, width: int = 12, vocab: int = 37) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(tokens, width, generator=generator, dtype=torch.float64).to(dtype)
    weight = torch.randn(vocab, width, generator=generator, dtype=torch.float64).to(dtype)
    labels = torch.randint(vocab, (tokens,), generator=generator)
    labels[::3] = IGNORE_INDEX
    return hidden.requires_grad_(), weight.requires_grad_(), labels


def gradients(
    function, hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, **options: object
) -> list[torch.Tensor]:
    value = function(hidden, weight, labels, **options)
    return [value.detach(), *torch.autograd.grad(value * 0.25, (hidden, weight))]


# fp64 differs in the order of sums only; bf16 rounds each logit's gradient to 8 bits in both.
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 0.05)]
)
@pytest.mark.parametrize("chunk_logits", [1, 37 * 7, 2**22])
@pytest.mark.parametrize("z_loss", [0.0, 1e-2])
def test_loss_and_gradients(
    dtype: torch.dtype, tolerance: float, chunk_logits: int, z_loss: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(LOGITS_PER_CHUNK, "cpu", chunk_logits)
    hidden, weight, labels = inputs(dtype)
    ours = gradients(linear_cross_entropy, hidden, weight, labels, z_loss=z_loss)
    reference = gradients(reference_cross_entropy, hidden, weight, labels, z_loss=z_loss)
    for got, expected in zip(ours, reference, strict=True):
        torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("value", [float("inf"), float("nan"), -1e300])
def test_a_token_of_weight_0_is_left_out(value: float) -> None:
    """Its loss is no number, and reaches neither the sum nor a gradient."""
    hidden, weight, labels = inputs(torch.float64)
    weights = torch.rand(len(labels), dtype=torch.float64) + 0.1
    weights[::5] = 0
    kept = weights != 0
    wanted = gradients(linear_cross_entropy, hidden[kept], weight, labels[kept], token_weights=weights[kept])
    with torch.no_grad():
        hidden[::5] = value
    loss, d_hidden, d_weight = gradients(
        linear_cross_entropy, hidden, weight, labels, z_loss=0.0, token_weights=weights
    )
    torch.testing.assert_close(loss, wanted[0])
    torch.testing.assert_close(d_weight, wanted[2])
    assert not d_hidden[::5].any()


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
def test_weights_of_tokens(dtype: torch.dtype, tolerance: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Real-valued weights, some negative and some zero; weights of 1 change no bit."""
    monkeypatch.setitem(LOGITS_PER_CHUNK, "cpu", 37 * 7)
    hidden, weight, labels = inputs(dtype)
    weights = torch.randn(len(labels), generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    weights[::5] = 0
    ours = gradients(linear_cross_entropy, hidden, weight, labels, z_loss=1e-2, token_weights=weights)
    reference = gradients(reference_cross_entropy, hidden, weight, labels, z_loss=1e-2, token_weights=weights)
    for got, expected in zip(ours, reference, strict=True):
        torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance)
    ones = gradients(linear_cross_entropy, hidden, weight, labels, token_weights=torch.ones_like(weights))
    for got, expected in zip(ones, gradients(linear_cross_entropy, hidden, weight, labels), strict=True):
        assert torch.equal(got, expected)


@pytest.mark.parametrize("numbers", [1, 12 * 5, 12 * 36 + 1])
def test_a_heads_gradient_in_pieces_has_the_same_bits(numbers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In BF16, whose sums are converted piece by piece, into their own memory."""
    monkeypatch.setitem(LOGITS_PER_CHUNK, "cpu", 37 * 7)
    hidden, weight, labels = inputs(torch.bfloat16)
    at_once = gradients(linear_cross_entropy, hidden, weight, labels)
    monkeypatch.setitem(HEAD_NUMBERS_PER_CHUNK, "cpu", numbers)
    for got, expected in zip(gradients(linear_cross_entropy, hidden, weight, labels), at_once, strict=True):
        assert torch.equal(got, expected)


@pytest.mark.parametrize("tokens", [0, 5])
def test_no_valid_target_gives_zero_loss_and_zero_gradients(tokens: int) -> None:
    hidden, weight, labels = inputs(torch.float32, tokens=tokens)
    labels.fill_(IGNORE_INDEX)
    value, d_hidden, d_weight = gradients(linear_cross_entropy, hidden, weight, labels)
    assert value == 0
    assert not d_hidden.any()
    assert not d_weight.any()


def test_without_gradients_only_the_loss_is_made() -> None:
    hidden, weight, labels = inputs(torch.float32)
    with torch.no_grad():
        ours = linear_cross_entropy(hidden, weight, labels)
    torch.testing.assert_close(ours, reference_cross_entropy(hidden, weight, labels).detach())


# Against fp64 at the vocabulary of Llama 3: fp32 sums 131072 exponentials, bf16 rounds inputs and gradients to 8 bits.
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-6), (torch.bfloat16, 1e-2)])
def test_a_vocabulary_of_128k_against_fp64(dtype: torch.dtype, tolerance: float) -> None:
    hidden, weight, labels = inputs(torch.float64, tokens=40, width=16, vocab=2**17)
    ours = gradients(linear_cross_entropy, *(t.detach().to(dtype).requires_grad_() for t in (hidden, weight)), labels)
    rounded = [t.detach().to(dtype).double().requires_grad_() for t in (hidden, weight)]
    for got, expected in zip(ours, gradients(reference_cross_entropy, *rounded, labels), strict=True):
        assert float((got.double() - expected).norm() / expected.norm()) <= tolerance


@pytest.mark.parametrize("num_ranks", [2, 3])
@pytest.mark.parametrize("masked", [False, True])
def test_a_vocabulary_sharded_over_ranks(num_ranks: int, masked: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every rank gets the whole loss, the whole gradient of the hidden states, and its own words' of the weight."""
    monkeypatch.setitem(LOGITS_PER_CHUNK, "cpu", 60)
    hidden, weight, labels = inputs(torch.float64, vocab=36)
    if masked:
        labels.fill_(IGNORE_INDEX)
    reference = gradients(reference_cross_entropy, hidden, weight, labels, z_loss=1e-2)

    def one_rank(hdp: RankGroup) -> list[torch.Tensor]:
        shard = weight.detach().chunk(num_ranks)[hdp.rank].clone().requires_grad_()
        own = hidden.detach().clone().requires_grad_()
        return gradients(linear_cross_entropy, own, shard, labels, z_loss=1e-2, group=hdp.group)

    results = run_ranks(num_ranks, one_rank)
    for value, d_hidden, _ in results:
        torch.testing.assert_close(value, reference[0], rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(d_hidden, reference[1], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(torch.cat([row[2] for row in results]), reference[2], rtol=1e-12, atol=1e-12)


def test_backward_runs_once() -> None:
    hidden, weight, labels = inputs(torch.float32)
    value = linear_cross_entropy(hidden, weight, labels)
    value.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="a second backward"):
        value.backward()


@pytest.mark.gpu
@pytest.mark.parametrize("vocab", [37, 8192, 131072])
@pytest.mark.parametrize("z_loss", [0.0, 1e-3])
def test_triton_rows_equal_torch_rows(vocab: int, z_loss: float) -> None:
    from bytescale.runtime.loss_kernel import TritonRows

    generator = torch.Generator(device="cuda").manual_seed(0)
    logits = (torch.randn(9, vocab, generator=generator, device="cuda") * 3).bfloat16()
    targets = torch.randint(vocab, (9,), generator=generator, device="cuda")
    targets[0], targets[1] = -3, vocab + 2  # another rank's words
    wide = logits.double()
    lse, picked = TritonRows().statistics(logits, targets)
    rows = TorchRows()
    expected_lse, expected_picked = rows.statistics(wide, targets)
    torch.testing.assert_close(lse.double(), expected_lse, rtol=1e-6, atol=1e-5)
    torch.testing.assert_close(picked.double(), expected_picked, rtol=0, atol=0)
    expected = rows.gradient(wide, targets, expected_lse, z_loss)
    # bf16 keeps 8 bits: half a unit in the last place of a gradient of at most 1 is 2^-9 of it.
    torch.testing.assert_close(
        TritonRows().gradient(logits, targets, lse, z_loss).double(), expected, rtol=2**-8, atol=1e-9
    )


@pytest.mark.gpu
def test_on_a_gpu_in_bf16() -> None:
    hidden, weight, labels = inputs(torch.float64, tokens=300, width=64, vocab=1000)
    rounded = [t.detach().bfloat16() for t in (hidden, weight)]
    ours = gradients(linear_cross_entropy, *(t.cuda().requires_grad_() for t in rounded), labels.cuda())
    expected = gradients(reference_cross_entropy, *(t.double().requires_grad_() for t in rounded), labels)
    for got, exact in zip(ours, expected, strict=True):
        assert float((got.cpu().double() - exact).norm() / exact.norm()) <= 1e-2
