"""The assumptions of ``paper_tables.py`` where arXiv 2502.21231 is silent, the same for all rows, and its figures.

Taken from the paper (section 8): layers, heads, KV groups and hidden sizes; devices per model; 32M tokens a batch;
which models run with a pipeline; the case study's times (``cost/profiles/case-study.toml``).

Assumed, one rule each:

* Device rates and links: every model uses those of the case study, scaled by operation counts (``Profile.scaled_to``).
  A ring step takes 1.58 ms. Of these, 0.24 ms are latency, and the rest is the time of its bytes at 12.5 GB/s. The
  reason: backward moves three times the bytes of forward (K and V in bf16, dK and dV in fp32) but takes only 2.7 times
  as long. So rings of narrow slices (a large tp) are less efficient than rings of wide ones.
* The static mesh fills every pack to the last token, in the order of the stream, and cuts the document that does not
  fit. The case study counts exactly 8 micro-batches on 2 rows of 2M for 32M tokens, and communication is 97.6 % of
  their time. So no token is lost to padding, and the attention of a 2M document never decides the time of a ring step.
* Algorithm 2 runs in rounds, by the letter of section 6. In each round, the target ranks are those whose accumulated
  time lags behind the longest by more than delta, and they get sequences. The accumulated time is that of a rank's own
  micro-batches, without waiting for members of a group. The paper leaves delta open; ours is one full micro-batch of
  one rank.
* Capacity: 8K tokens per rank for every model, as in the case study. So the static mesh has CP = context / 8K.
* pp and tp are the smallest powers of two, pp first, with which the activations of 8K tokens, the weights in bf16 and
  the gradients in fp32 take at most 80 % of a device of 80 GB. tp is at most 8 (one node). pp is 1 where the paper says
  HDP + TP, and at least 2 elsewhere. This rule yields the case study's tp = 2.
* Feed-forward widths are those of LLaMA and Mistral. A token of a mixture passes two of eight experts, which count as
  one block of twice the width. Gradients of all eight experts are reduced.
* 8x22B ran on "more than 12,000" devices. We take 16,384, the number in the title, because CP = 256 divides it.
* Before offloading, the static mesh and the first step of the ablation recompute activations in backward. So backward
  repeats forward, including its rings. Offloading replaces recomputation on the same number of ranks, as in the paper's
  offload figure, where r = 1 and recomputation keep the same 27 GB. This explains the published gain of 1.26: the
  repeated forward was 1 of 3.5 parts of attention's time and 1 of 3 parts of the rest. Using fewer ranks, by the letter
  of Eq. 3, makes steps longer.
* Host memory for offloading: 64 GB per device.
* Loader: nothing hides its time before the remote loader is switched on. Its time per node follows from the last row of
  the published ablation, so the gain in that row agrees by construction.
* Batches: we use the two length distributions of the package, which satisfy what section 3.1 says about the data sets.
  Documents longer than the context are split. Batches are cut from one stream, as in training. 16 batches of github
  hold five sequences of 2M; independent draws of 32M tokens could miss them or draw too many.
* Gradient sync overlaps with the last backward and with the first forward of the next step, for all layers of a stage
  but one, as in the same company's MegaScale (Jiang et al., NSDI 2024, section 3.2).
* Pipelines run plain 1F1B. Groups of Algorithm 2 that would deadlock there are put on other ranks (``align``).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from bytescale.config.architecture import PRESETS, Architecture
from bytescale.cost import flops
from bytescale.cost.gradient_sync import GRADIENT_BYTES
from bytescale.cost.profile import Profile
from bytescale.cost.profile_file import load_profile

KIBI = 1024
BATCH_TOKENS = 32 * KIBI**2
CONTEXTS = (256 * KIBI, 512 * KIBI, 1024 * KIBI, 2048 * KIBI)
DATA_SETS = ("github", "byted")
BATCHES = 16
SEED = 0
CAPACITY_TOKENS = 8 * KIBI
GPUS_PER_NODE = 8
HOST_BYTES = 64e9
DEVICE_BYTES = 0.8 * 80e9
PARAMETER_BYTES = 2  # parameters are in bf16

STATIC_SECONDS = 520.0
ABLATION = {"dynamic communication": 1.59, "offloading": 2.01, "balance": 3.69, "remote loader": 3.89}
CASE_STUDY_NODES = 1024 // GPUS_PER_NODE
LOADER_NODE_SECONDS = STATIC_SECONDS * (1 / ABLATION["balance"] - 1 / ABLATION["remote loader"]) * CASE_STUDY_NODES

SPEED_UPS = {  # at 2M over the static mesh
    "github": {"7B": 7.89, "13B": 6.88, "30B": 6.21, "70B": 4.28, "8x7B": 4.13, "8x22B": 3.42},
    "byted": {"7B": 3.89},
}
SLOW_DOWN_PER_DOUBLING = {"static": 2.0, "naive": 1.23, "paper": 1.08}  # github; static "about"
CASE_STUDY_SECONDS = {"static": 520.0, "naive": 272.0, "paper": 157.0}


@dataclass(frozen=True, slots=True, kw_only=True)
class PaperModel:
    """One of the six models, with its cluster."""

    name: str
    active: Architecture  # for a mixture, the width that one token passes through
    num_gpus: int
    pipelined: bool
    layer_parameters: int  # all experts

    def layout(self, capacity_tokens: int) -> tuple[int, int]:
        """Return tp and pp by the rule at the top of this file."""
        shape = self.active
        activations = capacity_tokens * shape.num_layers * flops.layer_activation_bytes_per_token(shape)
        weights = shape.num_layers * self.layer_parameters + 2 * shape.vocab_size * shape.hidden_size
        state_bytes = weights * (GRADIENT_BYTES + PARAMETER_BYTES)
        layouts = [(tp, pp) for pp in ((2, 4, 8, 16) if self.pipelined else (1,)) for tp in (1, 2, 4, 8)]
        return next((tp, pp) for tp, pp in layouts if (activations + state_bytes / pp) / tp <= DEVICE_BYTES)

    def profile(self, tensor_parallel: int) -> Profile:
        """Return the profile of the case study's device with this model."""
        return load_profile("case-study").scaled_to(
            self.active, tensor_parallel=tensor_parallel, layer_parameters=self.layer_parameters
        )


def _dense(name: str, shape: Architecture, num_gpus: int, *, pipelined: bool = False) -> PaperModel:
    return PaperModel(
        name=name,
        active=shape,
        num_gpus=num_gpus,
        pipelined=pipelined,
        layer_parameters=flops.layer_parameters(shape),
    )


def _mixture(name: str, shape: Architecture, num_gpus: int) -> PaperModel:
    """Make a mixture. ``shape`` has the width of ONE expert; two of eight are active."""
    experts = 8 * flops.feed_forward_parameters(shape)
    return PaperModel(
        name=name,
        active=replace(shape, ffn_hidden_size=2 * shape.ffn_hidden_size),
        num_gpus=num_gpus,
        pipelined=True,
        layer_parameters=flops.attention_parameters(shape) + experts,
    )


def _mistral(layers: int, heads: int, hidden: int, ffn: int) -> Architecture:
    return replace(
        PRESETS["7b"],
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=8,
        hidden_size=hidden,
        head_dim=hidden // heads,
        ffn_hidden_size=ffn,
        vocab_size=32768,
    )


MODELS = (
    _dense("7B", replace(PRESETS["7b"], ffn_hidden_size=11008), 1024),
    _dense("13B", PRESETS["13b"], 2048),
    _dense("30B", PRESETS["30b"], 4096),
    _dense("70B", PRESETS["70b"], 8192, pipelined=True),
    _mixture("8x7B", _mistral(32, 32, 4096, 14336), 8192),
    _mixture("8x22B", _mistral(56, 48, 6144, 16384), 16384),
)
