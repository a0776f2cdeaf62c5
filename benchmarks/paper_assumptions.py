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
from functools import cached_property
from typing import Any

from bytescale.config.presets import PRESETS
from bytescale.cost.curve import Curve
from bytescale.cost.gradient_sync import GRADIENT_BYTES
from bytescale.cost.profile import Profile
from bytescale.cost.profile_file import load_profile
from bytescale.cost.spec import ModelSpec
from bytescale.train.parts.describe import spec_of_content

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


@dataclass(frozen=True, kw_only=True)
class PaperModel:
    """One of the six models, with its cluster."""

    name: str
    active: dict[str, Any]  # config.json; for a mixture, with the width that one token passes through
    num_gpus: int
    pipelined: bool
    experts: int = 1

    @cached_property
    def spec(self) -> ModelSpec:
        return spec_of_content(self.active)

    @property
    def layer_parameters(self) -> float:
        """Of all experts, without norms and routers."""
        blocks = 3 * self.active["hidden_size"] * self.active["intermediate_size"]
        more = (self.experts / 2 - 1) * blocks - 2 * self.active["hidden_size"] if self.experts > 1 else 0
        return self.spec.mean("parameters") + more

    def layout(self, capacity_tokens: int) -> tuple[int, int]:
        """Return tp and pp by the rule at the top of this file."""
        activations = capacity_tokens * self.spec.num_layers * kept_bytes_per_token(self.active)
        weights = self.spec.num_layers * self.layer_parameters + self.spec.outside + self.spec.head
        state_bytes = weights * (GRADIENT_BYTES + PARAMETER_BYTES)
        layouts = [(tp, pp) for pp in ((2, 4, 8, 16) if self.pipelined else (1,)) for tp in (1, 2, 4, 8)]
        return next((tp, pp) for tp, pp in layouts if (activations + state_bytes / pp) / tp <= DEVICE_BYTES)

    def profile(self, tensor_parallel: int) -> Profile:
        """Return the profile of the case study's device with this model."""
        profile = load_profile("case-study").scaled_to(self.spec, tensor_parallel=tensor_parallel)
        kept = Curve(0.0, kept_bytes_per_token(self.active) / tensor_parallel, 0.0)
        return replace(profile, activation_bytes=kept, layer_parameters=self.layer_parameters)


def kept_bytes_per_token(content: dict[str, Any]) -> int:
    """Bytes in bf16 that a layer keeps of a token for its backward (Act(s) = a2 s in the paper).

    The input and output of both norms, q, k and v after the rotation, the output of attention, and gate, up, silu(gate)
    and their product; in fp32, the log-sum-exp of each head and one scale per norm.
    """
    heads = content["num_attention_heads"], content["num_key_value_heads"]
    widths = 4 * (content["hidden_size"] + content["intermediate_size"]) + 2 * sum(heads) * content["head_dim"]
    return int(2 * widths + 4 * (heads[0] + 2))


def _dense(name: str, preset: str, num_gpus: int, *, pipelined: bool = False, **fields: int) -> PaperModel:
    return PaperModel(name=name, active=PRESETS[preset] | fields, num_gpus=num_gpus, pipelined=pipelined)


def _mixture(name: str, num_gpus: int, *, layers: int, heads: int, hidden: int, ffn: int) -> PaperModel:
    """Make a mixture with Mistral's widths. ``ffn`` is the width of ONE expert; two of eight are active."""
    fields = {"num_hidden_layers": layers, "num_attention_heads": heads, "hidden_size": hidden, "vocab_size": 32768}
    active = PRESETS["7b"] | fields | {"head_dim": hidden // heads, "intermediate_size": 2 * ffn}
    return PaperModel(name=name, active=active, num_gpus=num_gpus, pipelined=True, experts=8)


MODELS = (
    _dense("7B", "7b", 1024, intermediate_size=11008),
    _dense("13B", "13b", 2048),
    _dense("30B", "30b", 4096),
    _dense("70B", "70b", 8192, pipelined=True),
    _mixture("8x7B", 8192, layers=32, heads=32, hidden=4096, ffn=14336),
    _mixture("8x22B", 16384, layers=56, heads=48, hidden=6144, ffn=16384),
)
