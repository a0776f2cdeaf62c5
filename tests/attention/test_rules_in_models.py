"""Rules where models use them: under checkpointing, on some heads at a time, and as transformers understands them."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from bytescale.attention import AttentionRules, PackedAttention, select_kernel
from bytescale.attention.kernels import AttentionKernel, MathKernel
from bytescale.common.errors import ConfigError
from bytescale.plan import Plan, RankPlan
from bytescale.plan.plan import GroupSpec
from bytescale.runtime.group import RankGroup
from bytescale.runtime.saved.activations import Activations
from tests.helpers.ranks import run_ranks
from tests.helpers.reference_attention import reference_attention

LENGTH = 41
RULES = AttentionRules(scale=0.4, window=7, soft_cap=2.0)


def shared_by(num_ranks: int) -> Plan:
    groups = [GroupSpec(sequences=[0], ranks=range(num_ranks))]
    return Plan.build(
        lengths=[LENGTH], capacity_tokens=[LENGTH] * num_ranks, groups=groups, schedule=[[[0]]] * num_ranks
    )


class SinkLayer(nn.Module):
    """A layer with sinks, a window and a cap, for 4 query heads and 2 key/value heads of width 8."""

    def __init__(self) -> None:
        super().__init__()
        self.inside = nn.Linear(16, 64, bias=False, dtype=torch.float64)
        self.outside = nn.Linear(32, 16, bias=False, dtype=torch.float64)
        self.sinks = nn.Parameter(torch.randn(4, dtype=torch.float64))

    def forward(self, hidden: Tensor, attention: PackedAttention) -> Tensor:
        q, k, v = self.inside(hidden).unflatten(1, (8, 8)).split([4, 2, 2], dim=1)
        return hidden + self.outside(attention(q, k, v, RULES, self.sinks).flatten(1))


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_checkpointing_changes_no_bit(num_ranks: int) -> None:
    """``attention`` keeps output and LSE with the sinks in them, and sends each message once."""
    plan = shared_by(num_ranks)
    torch.manual_seed(0)
    weights = [SinkLayer().state_dict() for _ in range(2)]  # here, since threads share the random numbers
    rows = torch.randn(LENGTH, 16, dtype=torch.float64)

    def one_rank(hdp: RankGroup) -> dict[str, tuple[list[Tensor], int]]:
        (micro_batch,) = RankPlan.of(plan, hdp.rank).micro_batches
        found, sent = {}, 0
        for mode in ("none", "full", "attention"):
            layers = [SinkLayer(), SinkLayer()]
            for layer, values in zip(layers, weights, strict=True):
                layer.load_state_dict(values)
            memory = Activations(layers, checkpointing=mode).attention_memory  # type: ignore[arg-type]
            kernel = select_kernel("auto", torch.device("cpu"), torch.float64)
            attention = PackedAttention(micro_batch, kernel, hdp.exchange, memory)
            hidden = rows[torch.as_tensor(micro_batch.position_ids())].requires_grad_()
            out = hidden
            for layer in layers:
                out = layer(out, attention)
            out.square().sum().backward()
            gradients = [parameter.grad for layer in layers for parameter in layer.parameters()]
            found[mode] = [out.detach(), hidden.grad, *gradients], hdp.exchange.bytes_sent - sent
            sent = hdp.exchange.bytes_sent
        return found  # type: ignore[return-value]

    for found in run_ranks(num_ranks, one_rank):
        plain, sent = found["none"]
        for mode, share in (("full", 4 / 3), ("attention", 1)):
            results, bytes_sent = found[mode]
            assert all(torch.equal(ours, theirs) for ours, theirs in zip(results, plain, strict=True))
            assert bytes_sent == sent * share  # fp64: keys forward, keys backward and gradients are of one size


def transformers_attention(q: Tensor, k: Tensor, v: Tensor, rules: AttentionRules, sinks: Tensor | None) -> Tensor:
    """The eager attention of gpt-oss (with sinks) or Gemma 2, with transformers' own mask of a sliding layer."""
    masks = pytest.importorskip("transformers.masking_utils")
    from transformers.models.gemma2.modeling_gemma2 import eager_attention_forward as gemma
    from transformers.models.gpt_oss.modeling_gpt_oss import eager_attention_forward as gpt_oss

    sees = masks.causal_mask_function
    if rules.window is not None:
        sees = masks.sliding_window_causal_mask_function(rules.window)
    rows = torch.arange(len(q))
    visible = torch.tensor([[bool(sees(0, 0, i, j)) for j in rows] for i in rows])
    mask = torch.zeros(len(q), len(q), dtype=q.dtype).masked_fill(~visible, float("-inf"))[None, None]
    module = SimpleNamespace(num_key_value_groups=q.shape[1] // k.shape[1], sinks=sinks, training=False)
    tensors = [rows.transpose(0, 1)[None] for rows in (q, k, v)]
    scaling = rules.scale_of(q)
    if sinks is not None:
        out, _ = gpt_oss(module, *tensors, mask, scaling)
    else:
        out, _ = gemma(module, *tensors, mask, scaling=scaling, softcap=rules.soft_cap)
    return out[0]


@pytest.mark.parametrize(
    ("rules", "with_sinks"),
    [
        (AttentionRules(window=1), False),
        (AttentionRules(window=5), True),
        (AttentionRules(window=5, scale=0.2), False),
        (AttentionRules(soft_cap=1.5), False),
        (AttentionRules(window=40, soft_cap=1.5), False),
        (AttentionRules(), True),
    ],
    ids=str,
)
def test_rules_mean_what_transformers_means(rules: AttentionRules, with_sinks: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(12, 4, 8, generator=generator, dtype=torch.float64)
    k, v = (torch.randn(12, 2, 8, generator=generator, dtype=torch.float64) for _ in range(2))
    sinks = torch.randn(4, generator=generator, dtype=torch.float64) if with_sinks else None
    theirs = transformers_attention(q, k, v, rules, sinks)
    ours = reference_attention(q, k, v, [12], rules, sinks)
    tolerance = 1e-12 if with_sinks else 1e-6  # Gemma's softmax is in fp32
    torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        ({"window": 0}, "rule window = 0. A query would see no key"),
        ({"window": 2.5}, "rule window = 2.5"),
        ({"window": True}, "rule window = True"),
        ({"soft_cap": 0.0}, "rule soft_cap = 0.0"),
        ({"soft_cap": -30.0}, "rule soft_cap = -30.0"),
        ({"scale": float("nan")}, "rule scale = nan"),
    ],
)
def test_rules_that_no_attention_has_are_refused(rules: dict[str, float], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        AttentionRules(**rules)  # type: ignore[arg-type]


def test_sinks_of_another_number_of_heads_are_refused() -> None:
    (micro_batch,) = RankPlan.of(shared_by(1), 0).micro_batches
    q, kv = torch.zeros(LENGTH, 4, 8), torch.zeros(LENGTH, 2, 8)
    attention = PackedAttention(micro_batch, MathKernel(), RankGroup().exchange)
    with pytest.raises(ConfigError, match=r"sinks of shape \[2\] for 4 query heads"):
        attention(q, kv, kv, AttentionRules(), torch.zeros(2))


def test_a_kernel_that_knows_no_rules_is_refused_by_name() -> None:
    class Theirs:
        forward, backward = MathKernel.forward, MathKernel.backward

    (micro_batch,) = RankPlan.of(shared_by(1), 0).micro_batches
    q, kv = torch.zeros(LENGTH, 4, 8), torch.zeros(LENGTH, 2, 8)
    kernel: AttentionKernel = Theirs()  # type: ignore[assignment]
    with pytest.raises(ConfigError, match="Theirs has no method with_rules"):
        PackedAttention(micro_batch, kernel, RankGroup().exchange)(q, kv, kv, AttentionRules(window=3))
