"""Writes the two shipped profiles, ``src/bytescale/cost/profiles/*.toml``, from figures that arXiv 2502.21231 prints.

    python benchmarks/published_profiles.py

The two profiles are for different devices or different tensor parallelism, so their numbers must not be mixed. The
``source`` of each profile says what the paper leaves open.
"""

from __future__ import annotations

from pathlib import Path

from bytescale.config.presets import PRESETS
from bytescale.config.schema import ModelConfig
from bytescale.cost.curve import Curve, fit_curve
from bytescale.cost.links import Links
from bytescale.cost.profile import Point, Profile
from bytescale.cost.profile_file import save_profile
from bytescale.train.parts.describe import spec_of_content

FOLDER = Path(__file__).parents[1] / "src/bytescale/cost/profiles"
KIBI = 1024

# The paper's 7B model has LLaMA's name and shape, but no feed-forward width is printed. This is LLaMA 7B's.
PAPER_7B = ModelConfig(preset="7b", config={"intermediate_size": 11008})
SPEC = spec_of_content(PRESETS["7b"] | PAPER_7B.config)
(LAYER,) = SPEC.layers
# Of a token and layer in bf16: the input and output of both norms, q, k and v after the rotation, the output of
# attention, and gate, up, silu(gate) and their product; in fp32, the log-sum-exp of each head and one scale per norm.
KEPT_BYTES = 2 * (4 * 4096 + 2 * 4096 + 2 * 1024 + 4 * 11008) + 4 * (32 + 2)

# Backward over forward: where compute decides the time (case study), and where traffic decides it.
ATTENTION_BACKWARD, REST_BACKWARD, RING_BACKWARD = 2.5, 2.0, 2.7

# Backward's ring moves K and V again in bf16, and dK and dV in fp32. These are three times the bytes of forward, but
# it takes only 2.7 times as long. So a part x of a ring step does not grow with its bytes: 2.7 = x + 3 (1 - x).
RING_BYTES_BACKWARD = 3.0
RING_STEP_SECONDS = 0.00158
RING_LATENCY_SECONDS = (RING_BYTES_BACKWARD - RING_BACKWARD) / (RING_BYTES_BACKWARD - 1.0) * RING_STEP_SECONDS

# Offloading at 64K (section 5.2): 30 of 32 layers move 59 - 27 GB. Compute hides r = 0.5; the rest costs
# 6.49 - 5.08 s, which gives 11.3 GB/s. Both profiles use this rate.
OFFLOADED_BYTES = (59 - 27) * 1e9
PCIE_BYTES_PER_SECOND = 0.5 * OFFLOADED_BYTES / (6.49 - 5.08)


def case_study() -> Profile:
    """Return the profile of section 8's case study: 7B, 2M, 1024 GPUs, TP 2, 8K tokens per rank."""
    tp, rank_tokens = 2, 8 * KIBI
    slice_bytes = rank_tokens * 2 * LAYER.key_numbers / tp
    rate = slice_bytes / (RING_STEP_SECONDS - RING_LATENCY_SECONDS)
    long_tokens, long_ranks, long_seconds = 312 * KIBI, 39, 0.110
    attention = Curve(long_seconds * long_ranks / long_tokens**2, 0.0, 0.0)
    rest = Curve(0.0, 0.0095 / rank_tokens, 0.0)
    head = SPEC.head / LAYER.active_weights * rest.linear
    ring_bytes = 2 * LAYER.key_numbers / tp
    return Profile(
        name="case-study",
        source=(
            "arXiv 2502.21231 section 8, case study of 7B at 2M on 1024 GPUs. Published: 110 ms of attention for 312K "
            "tokens on 39 ranks; 9-10 ms of everything else for 8K tokens; a ring step of 1.58 ms, all traffic; "
            "backward 2.5x (attention), 2x (rest), 2.7x (traffic). Our reading: TP 2, hence 17 MB a ring step; three "
            "times the bytes in backward, hence 0.24 ms of a step are latency and a device's link carries 12.5 GB/s. "
            "Open: feed-forward width 11008 (LLaMA's), head by operation count, links inside a node (taken as 10x "
            "those across), PCIe from the offload figure."
        ),
        spec=SPEC,
        model=PAPER_7B,
        tensor_parallel=tp,
        attention_forward=attention,
        attention_backward=attention.times(ATTENTION_BACKWARD),
        rest_forward=rest,
        rest_backward=rest.times(REST_BACKWARD),
        head_forward=Curve(0.0, head, 0.0),
        head_backward=Curve(0.0, head * REST_BACKWARD, 0.0),
        activation_bytes=Curve(0.0, KEPT_BYTES / tp, 0.0),
        ring_forward_bytes_per_token=ring_bytes,
        ring_backward_bytes_per_token=ring_bytes * RING_BYTES_BACKWARD,
        links=Links(
            inter_node_bytes_per_second=rate,
            intra_node_bytes_per_second=10 * rate,
            latency_seconds=RING_LATENCY_SECONDS,
            device_to_host_bytes_per_second=PCIE_BYTES_PER_SECOND,
            host_to_device_bytes_per_second=PCIE_BYTES_PER_SECOND,
        ),
        layer_parameters=LAYER.parameters,
        points=(Point(curve="rest_forward", tokens=rank_tokens, value=0.0095),),
    )


def figure_6() -> Profile:
    """Return the profile of figure 6, which has forward times per layer over length, for attention and MLP."""
    tokens = [4 * KIBI, 8 * KIBI, 16 * KIBI, 32 * KIBI, 64 * KIBI, 128 * KIBI]
    attention_ms = [0.8, 1.8, 4.8, 14.1, 48.2, 175.5]
    rest_ms = [0.9, 1.8, 3.6, 7.5, 15.1, 28.2]
    attention = fit_curve(tokens, [ms / 1e3 for ms in attention_ms])
    rest = fit_curve(tokens, [ms / 1e3 for ms in rest_ms], quadratic=False)
    head = SPEC.head / LAYER.active_weights * rest.linear
    tp = 8
    ring_bytes = 2 * LAYER.key_numbers / tp
    points = [
        Point(curve="attention_forward", tokens=n, value=ms / 1e3) for n, ms in zip(tokens, attention_ms, strict=True)
    ]
    points += [Point(curve="rest_forward", tokens=n, value=ms / 1e3) for n, ms in zip(tokens, rest_ms, strict=True)]
    return Profile(
        name="figure-6",
        source=(
            "arXiv 2502.21231 figure 6 (forward times per layer of 7B) and its offload figure at 64K (activations, "
            "PCIe). Open: TP 8, which explains both the times and 16.3 KB of activations per token and layer; "
            "backward by the case study's ratios; links of one 400 Gb/s adapter a device and NVLink, at 80 %."
        ),
        spec=SPEC,
        model=PAPER_7B,
        tensor_parallel=tp,
        attention_forward=attention,
        attention_backward=attention.times(ATTENTION_BACKWARD),
        rest_forward=rest,
        rest_backward=rest.times(REST_BACKWARD),
        head_forward=Curve(0.0, head, 0.0),
        head_backward=Curve(0.0, head * REST_BACKWARD, 0.0),
        activation_bytes=Curve(0.0, OFFLOADED_BYTES / 30 / (64 * KIBI), 0.0),
        ring_forward_bytes_per_token=ring_bytes,
        ring_backward_bytes_per_token=ring_bytes * RING_BACKWARD,
        links=Links(
            inter_node_bytes_per_second=40e9,
            intra_node_bytes_per_second=160e9,
            latency_seconds=5e-6,
            device_to_host_bytes_per_second=PCIE_BYTES_PER_SECOND,
            host_to_device_bytes_per_second=PCIE_BYTES_PER_SECOND,
        ),
        layer_parameters=LAYER.parameters,
        points=tuple(points),
    )


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    for profile in (case_study(), figure_6()):
        path = FOLDER / f"{profile.name}.toml"
        save_profile(profile, path)
        print(path)


if __name__ == "__main__":
    main()
