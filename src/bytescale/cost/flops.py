"""Exact counts of parameters, floating-point operations and activation bytes of a decoder of the Llama family.

Conventions, the same for planning, simulation and MFU:

* A multiplication and an addition are two operations. Norms, rotations and softmax are left out (below 1 %).
* Causal attention of a sequence of ``s`` tokens looks at ``s^2 / 2`` pairs. The exact number is ``s (s + 1) / 2``; the
  diagonal's half is left out, as everywhere in the field. A pack costs the sum of ``s_i^2`` over its documents, never
  the square of its length.
* ``training_flops`` counts forward once and backward twice: the *model's* operations, from which MFU follows. What the
  hardware runs in addition (flash attention computes the scores again in backward: 5 products to forward's 2) is in
  ``BACKWARD_ATTENTION_RATIO`` and belongs to time, not to MFU.
"""

from __future__ import annotations

from bytescale.config import Architecture, RingGradients

BACKWARD_LINEAR_RATIO = 2.0  # gradients of inputs and of weights
BACKWARD_ATTENTION_RATIO = 2.5  # five matrix products against two


def attention_parameters(architecture: Architecture) -> int:
    """Weights of one layer's query, key, value and output projections."""
    query_width = architecture.num_heads * architecture.head_dim
    kv_width = architecture.num_kv_heads * architecture.head_dim
    return architecture.hidden_size * (2 * query_width + 2 * kv_width)


def feed_forward_parameters(architecture: Architecture) -> int:
    """Weights of one layer's SwiGLU block, or of all its experts and their router: what memory holds."""
    block = 3 * architecture.hidden_size * architecture.ffn_hidden_size
    return architecture.num_experts * (block + architecture.hidden_size) if architecture.num_experts else block


def active_feed_forward_parameters(architecture: Architecture) -> int:
    """Weights that one token is multiplied with: those of a dense block, or of the router and the chosen experts."""
    block = 3 * architecture.hidden_size * architecture.ffn_hidden_size
    if not architecture.num_experts:
        return block
    return architecture.experts_per_token * block + architecture.num_experts * architecture.hidden_size


def layer_parameters(architecture: Architecture) -> int:
    """All weights of one layer, its two RMSNorm vectors included."""
    return attention_parameters(architecture) + feed_forward_parameters(architecture) + 2 * architecture.hidden_size


def head_parameters(architecture: Architecture) -> int:
    """Weights of the output projection (shared with the embedding when tied; multiplied with either way)."""
    return architecture.vocab_size * architecture.hidden_size


def total_parameters(architecture: Architecture) -> int:
    """All weights: layers, embedding, final norm and, unless tied, the output projection."""
    matrices = 1 if architecture.tie_embeddings else 2
    return (
        architecture.num_layers * layer_parameters(architecture)
        + matrices * head_parameters(architecture)
        + architecture.hidden_size
    )


def active_parameters(architecture: Architecture) -> int:
    """``total_parameters`` less the experts that a token does not run through ("12.9B of 46.7B active")."""
    idle = feed_forward_parameters(architecture) - active_feed_forward_parameters(architecture)
    return total_parameters(architecture) - architecture.num_layers * idle


def layer_linear_flops_per_token(architecture: Architecture) -> int:
    """Forward operations per token of one layer's matrices: 2 per active weight."""
    return 2 * (attention_parameters(architecture) + active_feed_forward_parameters(architecture))


def layer_attention_flops_per_square(architecture: Architecture) -> int:
    """Forward operations of one layer's attention per ``s^2``: two products of 2 each, halved by the causal mask."""
    return 2 * architecture.num_heads * architecture.head_dim


def head_flops_per_token(architecture: Architecture) -> int:
    """Forward operations per token of the output projection."""
    return 2 * head_parameters(architecture)


def forward_flops(architecture: Architecture, *, num_tokens: int, sum_of_squares: int) -> int:
    """Operations of one forward pass of the whole model.

    Args:
        architecture: the model.
        num_tokens: tokens of all sequences, sum of ``s_i``.
        sum_of_squares: sum of ``s_i^2`` over the sequences (documents, not packs).
    """
    per_token = architecture.num_layers * layer_linear_flops_per_token(architecture) + head_flops_per_token(
        architecture
    )
    per_square = architecture.num_layers * layer_attention_flops_per_square(architecture)
    return per_token * num_tokens + per_square * sum_of_squares


def training_flops(architecture: Architecture, *, num_tokens: int, sum_of_squares: int) -> int:
    """Model operations of forward and backward, three times forward: the numerator of MFU."""
    return 3 * forward_flops(architecture, num_tokens=num_tokens, sum_of_squares=sum_of_squares)


def kv_bytes_per_token(architecture: Architecture, *, bytes_per_element: int = 2) -> int:
    """Keys and values of one token in one layer: what a ring step moves per token."""
    return 2 * architecture.num_kv_heads * architecture.head_dim * bytes_per_element


def ring_gradient_bytes(bytes_per_element: int, ring_gradients: RingGradients) -> int:
    """Bytes of one number of dK or dV on its way around a ring: fp32 or wider, unless bf16 is asked for."""
    return 2 if ring_gradients == "bf16" else max(4, bytes_per_element)


def ring_bytes_per_token(
    architecture: Architecture, *, bytes_per_element: int = 2, ring_gradients: RingGradients = "wide"
) -> tuple[int, int]:
    """Bytes that pass a member's link per token of a shared sequence, in one layer: ``(forward, backward)``.

    Forward moves K and V; backward moves them again, and with them the growing dK and dV (``ring_gradient_bytes``).
    A group of D members moves ``(D - 1) / D`` of it: a member's own slice stays at home.
    """
    forward = kv_bytes_per_token(architecture, bytes_per_element=bytes_per_element)
    gradient_bytes = ring_gradient_bytes(bytes_per_element, ring_gradients)
    gradients = kv_bytes_per_token(architecture, bytes_per_element=gradient_bytes)
    return forward, forward + gradients


def layer_activation_bytes_per_token(architecture: Architecture, *, bytes_per_element: int = 2) -> int:
    """What one layer's forward keeps per token for its backward, without checkpointing (the paper's Act(s) = a2 s).

    Kept, in elements: input and output of both norms (4 h); q, k and v after rotation; attention's output; gate, up,
    silu(gate) and their product (4 f). In fp32: attention's log-sum-exp (one per head), and one scale per norm.
    With experts see ``feed_forward_saved_bytes_per_token``.
    """
    query_width = architecture.num_heads * architecture.head_dim
    kv_width = architecture.num_kv_heads * architecture.head_dim
    elements = 4 * architecture.hidden_size + 2 * query_width + 2 * kv_width
    feed_forward = feed_forward_saved_bytes_per_token(architecture, bytes_per_element=bytes_per_element)
    return elements * bytes_per_element + 4 * (architecture.num_heads + 2) + feed_forward


def feed_forward_saved_bytes_per_token(architecture: Architecture, *, bytes_per_element: int = 2) -> int:
    """What gate, up, silu(gate) and their product keep per token of one layer: 4 f elements.

    With K of E experts per token: for each of the K the sorted copy of the token, 4 f, and the output (2 h + 4 f); of
    the router its logits and probabilities (fp32), the K largest, their sum and weights; three int64 per token and
    expert for the choice and the sorting.
    """
    if not architecture.num_experts:
        return 4 * architecture.ffn_hidden_size * bytes_per_element
    wide, chosen = max(4, bytes_per_element), architecture.experts_per_token
    rows = chosen * (2 * architecture.hidden_size + 4 * architecture.ffn_hidden_size)
    router = 2 * architecture.num_experts + 2 * chosen + 1
    return rows * bytes_per_element + router * wide + 3 * chosen * 8


def activation_bytes_per_token(architecture: Architecture, *, bytes_per_element: int = 2) -> int:
    """``layer_activation_bytes_per_token`` over all layers. The loss's logits are not in it: they come in chunks."""
    return architecture.num_layers * layer_activation_bytes_per_token(architecture, bytes_per_element=bytes_per_element)
