"""Plans and profiles for the simulator's tests."""

from collections.abc import Sequence
from dataclasses import replace

from bytescale.cost.curve import Curve
from bytescale.cost.links import Links
from bytescale.cost.profile import Profile
from bytescale.cost.spec import LayerSpec, ModelSpec
from bytescale.plan import Plan
from bytescale.plan.plan import GroupSpec


def profile(*, num_layers: int = 4, quadratic: float = 0.0, ring_bytes: float = 0.0, rate: float = 1.0) -> Profile:
    """A layer takes 1 s a token forward and 2 s backward, ``quadratic`` s^2 more for attention; ideal links unless
    ``ring_bytes`` travel per token at ``rate`` bytes a second."""
    layer = LayerSpec(parameters=100, active_weights=100.0, trained_weights=100.0, pair_numbers=ring_bytes or 1.0)
    layer = replace(layer, num_heads=1) if ring_bytes else layer
    links = Links(intra_node_bytes_per_second=rate, inter_node_bytes_per_second=rate) if ring_bytes else Links()
    return Profile(
        name="test",
        spec=ModelSpec(
            layers=(replace(layer, count=num_layers),), vocab_size=1, hidden_size=1, outside=1, head=1, is_tied=True
        ),
        attention_forward=Curve(quadratic, 0.0, 0.0),
        attention_backward=Curve(2 * quadratic, 0.0, 0.0),
        rest_forward=Curve(0.0, 1.0, 0.0),
        rest_backward=Curve(0.0, 2.0, 0.0),
        activation_bytes=Curve(0.0, 10.0, 0.0),
        ring_forward_bytes_per_token=ring_bytes,
        ring_backward_bytes_per_token=2 * ring_bytes,
        links=links,
        layer_parameters=0,
    )


def hybrid(model: Profile, state_numbers: float) -> Profile:
    """The profile with three recurrent layers in the place of three of four, and states of so many numbers."""
    (layer,) = model.spec.layers
    mixers = replace(layer, count=3, pair_numbers=0.0, num_heads=0, mixers=1, state_numbers=state_numbers)
    return replace(model, spec=replace(model.spec, layers=(mixers, replace(layer, count=1))))


def local_plan(per_rank: Sequence[Sequence[int]], capacity: int = 1000) -> Plan:
    """Every rank runs its own sequences, one micro-batch each."""
    lengths = [length for rank in per_rank for length in rank]
    groups = [
        GroupSpec(sequences=[index], ranks=[rank])
        for index, rank in enumerate(rank for rank, items in enumerate(per_rank) for _ in items)
    ]
    numbers = iter(range(len(lengths)))
    schedule = [[[next(numbers)] for _ in items] for items in per_rank]
    return Plan.build(lengths=lengths, capacity_tokens=[capacity] * len(per_rank), groups=groups, schedule=schedule)


def aligned_plan() -> Plan:
    """Two shared groups, each at one place in both ranks' orders, with a local micro-batch between them."""
    ranks = ([0, 1], [0], [1], [0, 1])
    groups = [GroupSpec(sequences=[number], ranks=own) for number, own in enumerate(ranks)]
    return Plan.build(
        lengths=[4, 2, 2, 4], capacity_tokens=[8, 8], groups=groups, schedule=[[[0], [1], [3]], [[0], [2], [3]]]
    )


def deadlocking_plan() -> Plan:
    """The example of architecture.md: rank 0 runs [g1, g2], rank 1 [g1, y, y', g2]."""
    groups = [
        GroupSpec(sequences=[0], ranks=[0, 1]),
        GroupSpec(sequences=[1], ranks=[1]),
        GroupSpec(sequences=[2], ranks=[1]),
        GroupSpec(sequences=[3], ranks=[0, 1]),
    ]
    return Plan.build(
        lengths=[4, 2, 2, 4], capacity_tokens=[8, 8], groups=groups, schedule=[[[0], [3]], [[0], [1], [2], [3]]]
    )
