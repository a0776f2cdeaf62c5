"""Attention's twin: layers that carry a state along a sequence, on packs and on sequences that ranks share."""

STOCK_KERNELS = {
    "causal_conv1d_fn",
    "chunk_kimi_delta_attention",
    "mamba2_chunk_scan",
    "mamba2_split_conv1d_scan_combined",
    "mamba_inner_fn",
    "mamba_selective_scan",
    "torch_chunk_gated_delta_rule",
}
"""Functions by which a mixer of transformers is known; ``kernels.KERNELS`` has what is called instead of each."""
