"""Exact counts of parameters, floating-point operations and activation bytes of a decoder of the Llama family.

Planning, simulation and MFU use the same conventions:

* A multiplication and an addition count as two operations. Norms, rotations and softmax are left out (below 1 %).
* Causal attention of a sequence of ``s`` tokens counts as ``s^2 / 2`` pairs, and a pack as the sum over its documents.
* ``ModelSpec.training_flops`` counts the *model's* operations, from which MFU follows: backward has twice those of
  forward. Flash attention computes the scores again in backward: ``BACKWARD_ATTENTION_RATIO`` counts in times alone.
"""

from __future__ import annotations

from bytescale.config.architecture import Architecture

BACKWARD_ATTENTION_RATIO = 2.5  # five matrix products in backward, two in forward


def attention_parameters(architecture: Architecture) -> int:
    """Weights of one layer's query, key, value and output projections."""
    query_width = architecture.num_heads * architecture.head_dim
    kv_width = architecture.num_kv_heads * architecture.head_dim
    return architecture.hidden_size * (2 * query_width + 2 * kv_width)


def feed_forward_parameters(architecture: Architecture) -> int:
    """Weights of one layer's SwiGLU block, or of all its experts and their router. Memory holds all of them."""
    block = 3 * architecture.hidden_size * architecture.ffn_hidden_size
    return architecture.num_experts * (block + architecture.hidden_size) if architecture.num_experts else block


def active_feed_forward_parameters(architecture: Architecture) -> int:
    """Weights that one token is multiplied with: a dense block's, or those of the router and the chosen experts."""
    block = 3 * architecture.hidden_size * architecture.ffn_hidden_size
    if not architecture.num_experts:
        return block
    return architecture.experts_per_token * block + architecture.num_experts * architecture.hidden_size


def layer_parameters(architecture: Architecture) -> int:
    """All weights of one layer, its two norms among them."""
    return attention_parameters(architecture) + feed_forward_parameters(architecture) + 2 * architecture.hidden_size


def head_parameters(architecture: Architecture) -> int:
    """Weights of the output projection. A tied projection shares them with the embedding."""
    return architecture.vocab_size * architecture.hidden_size


def vocabulary_matrices(architecture: Architecture, *, is_first: bool, is_last: bool) -> int:
    """How many matrices of ``head_parameters`` weights a pipeline stage has: the embedding, the output projection.

    A stage that is the first and the last one has a tied projection once.
    """
    return int(is_first) + int(is_last and not (architecture.tie_embeddings and is_first))


def total_parameters(architecture: Architecture) -> int:
    """All weights: layers, embedding, final norm and, unless tied, the output projection."""
    matrices = vocabulary_matrices(architecture, is_first=True, is_last=True)
    layers = architecture.num_layers * layer_parameters(architecture)
    return layers + matrices * head_parameters(architecture) + architecture.hidden_size


def active_parameters(architecture: Architecture) -> int:
    """``total_parameters`` without the experts that a token does not use ("12.9B of 46.7B active")."""
    idle = feed_forward_parameters(architecture) - active_feed_forward_parameters(architecture)
    return total_parameters(architecture) - architecture.num_layers * idle


def layer_linear_flops_per_token(architecture: Architecture) -> int:
    """Forward operations per token of one layer's matrices: 2 per active weight."""
    return 2 * (attention_parameters(architecture) + active_feed_forward_parameters(architecture))


def layer_attention_flops_per_square(architecture: Architecture) -> int:
    """Forward operations of one layer's attention per ``s^2``: two matrix products, halved by the causal mask."""
    return 2 * architecture.num_heads * architecture.head_dim


def kv_bytes_per_token(architecture: Architecture, *, bytes_per_element: int = 2) -> int:
    """Bytes of the keys and values of one token in one layer, which a ring step moves."""
    return 2 * architecture.num_kv_heads * architecture.head_dim * bytes_per_element


def ring_bytes_per_token(architecture: Architecture, *, bytes_per_element: int) -> tuple[int, int]:
    """Bytes that pass a member's link per token of a shared sequence, in one layer: ``(forward, backward)``.

    Forward moves K and V. Backward moves them again, and also the sums of dK and dV, in fp32 or wider. In a group of D
    members, ``(D - 1) / D`` of these bytes pass each link, because a member's own slice need not travel.
    """
    forward, gradients = (
        kv_bytes_per_token(architecture, bytes_per_element=size)
        for size in (bytes_per_element, max(4, bytes_per_element))
    )
    return forward, forward + gradients


def row_bytes_per_token(
    architecture: Architecture, *, bytes_per_element: int
) -> tuple[tuple[int, int], tuple[int, int]]:
    """Bytes that pass a member's link per token of a slice of queries, in one layer and one step of a grid's row.

    ``((there, home) in forward, (there, home) in backward)``. Forward sends the queries, and brings partial outputs and
    LSE home. Backward sends the output's gradient, the queries, LSE and delta, and brings the queries' gradient home
    (``attention.rings.grid``). LSE, delta and sums are in fp32 or wider.
    """
    heads, wide = architecture.num_heads, max(4, bytes_per_element)
    width = heads * architecture.head_dim
    rows = width * bytes_per_element
    return (rows, rows + heads * wide), (2 * rows + 2 * heads * wide, width * wide)


def layer_activation_bytes_per_token(architecture: Architecture, *, bytes_per_element: int = 2) -> int:
    """Bytes per token that one layer keeps for its backward, without checkpointing (Act(s) = a2 s in the paper).

    In elements of the compute dtype, a layer keeps the input and output of both norms (4 h), q, k and v after the
    rotation, the output of attention, and gate, up, silu(gate) and their product (4 f). In fp32 it keeps the
    log-sum-exp of attention (one number per head) and one scale per norm. ``feed_forward_saved_bytes_per_token`` has
    the numbers for experts.
    """
    query_width = architecture.num_heads * architecture.head_dim
    kv_width = architecture.num_kv_heads * architecture.head_dim
    elements = 4 * architecture.hidden_size + 2 * query_width + 2 * kv_width
    feed_forward = feed_forward_saved_bytes_per_token(architecture, bytes_per_element=bytes_per_element)
    return elements * bytes_per_element + 4 * (architecture.num_heads + 2) + feed_forward


def feed_forward_saved_bytes_per_token(architecture: Architecture, *, bytes_per_element: int = 2) -> int:
    """Bytes per token that one layer's feed-forward part keeps: gate, up, silu(gate) and their product, 4 f elements.

    With K of E experts per token, it keeps three things. Each of the K experts has a sorted copy of the token, 4 f
    elements and its output (2 h + 4 f elements in all). The router has its logits and probabilities, the K largest
    ones, their sum and the K weights, in fp32 or wider. The choice of experts and the sorting have three int64 numbers
    for each of the K experts.
    """
    if not architecture.num_experts:
        return 4 * architecture.ffn_hidden_size * bytes_per_element
    wide, chosen = max(4, bytes_per_element), architecture.experts_per_token
    rows = chosen * (2 * architecture.hidden_size + 4 * architecture.ffn_hidden_size)
    router = 2 * architecture.num_experts + 2 * chosen + 1
    return rows * bytes_per_element + router * wide + 3 * chosen * 8
