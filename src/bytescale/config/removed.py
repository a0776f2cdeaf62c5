"""Settings of 0.1.0 that are gone, and what to write in their place: for files and for options. Free of torch."""

from __future__ import annotations

from bytescale.common.errors import ConfigError

_FILTER = "leave it out, and leave such documents out of the sources"
_FIELDS = {
    "vocab_size": "vocab_size",
    "num_layers": "num_hidden_layers",
    "hidden_size": "hidden_size",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "rope_theta": "rope_theta",
    "ffn_hidden_size": "intermediate_size",
    "norm_eps": "rms_norm_eps",
    "tie_embeddings": "tie_word_embeddings",
    "init_std": "initializer_range",
    "num_experts": "num_local_experts",
    "experts_per_token": "num_experts_per_tok",
    **dict.fromkeys(("rope_scaling", "rope_scaling_factor", "rope_original_context"), "rope_scaling"),
}
REMOVED: dict[str, tuple[str, object]] = {
    "architecture": ("take the profile again: it has the counts of the model's layers now", None),
    "checkpoint.export_every": ("leave it out, and run bytescale convert on checkpoints", 0),
    "checkpoint.background": ("leave it out: checkpoints are written while training goes on", True),
    "data.answer_seconds": ('leave it out: a server of data.loader = "ray" has 120 s to answer', 120.0),
    "data.eos_token": ('name it in the tokenizer_config.json beside tokenizer.json: {"eos_token": ...}', None),
    "data.max_document_tokens": (_FILTER, None),
    "data.min_document_tokens": (_FILTER, 1),
    "data.prefetch_steps": ("leave it out: 2 steps are read ahead", 2),
    "data.ray_address": ("set the environment variable RAY_ADDRESS", ""),
    "data.read_retries": ("leave it out: a failing read is tried again 4 times", 3),
    "data.verify": ('leave it out: data is checked when it is read ("bytescale data audit" checks a run)', None),
    **{
        f"model.{ours}": (f"write model.config = {{{theirs} = ...}}: the field of config.json", None)
        for ours, theirs in _FIELDS.items()
    },
    "optimizer.beta1": ("write optimizer.options = {betas = [BETA1, BETA2]}", 0.9),
    "optimizer.beta2": ("write optimizer.options = {betas = [BETA1, BETA2]}", 0.95),
    "optimizer.eps": ("write optimizer.options = {eps = EPS}", 1e-8),
    "parallel.virtual_stages": ("leave it out: a rank has one stage of the pipeline", 1),
    "planner.balance": ('leave it out: planner.name = "adaptive" balances the ranks', None),
    "planner.grids": ("leave it out: a plan has grids where they are faster than rings", True),
    "planner.static_cp": ("leave it out: the static mesh is as wide as data.context_length needs", None),
    "planner.verify": ("leave it out: every plan is verified before it runs", None),
    "trainer.compile": ("leave it out: nothing is compiled (on CPUs it gained nothing)", False),
    "trainer.gradient_bucket_mib": ("leave it out: gradients are reduced while ranks compute", 1.0),
    "trainer.head_groups": ("leave it out: attention is computed of all heads at once", None),
    "trainer.peak_tflops": ("leave it out, and divide the FLOP/s that are shown by your device's peak", None),
    "trainer.ring_gradients": ("leave it out: gradients travel around rings in fp32", "wide"),
    "trainer.save_plans": ("leave it out: the plan of every step is written to the run folder", True),
    "trainer.tensorboard": ('write log.trackers = ["tensorboard"]', False),
    "trainer.wandb": ('write log.trackers = ["wandb"], and for a run without network set WANDB_MODE=offline', "off"),
    "trainer.wandb_project": ("leave it out, and set the variable WANDB_PROJECT of Weights & Biases", "bytescale"),
}
"""What to do now, and the value that asks for what happens anyway, with which files are read; None: there is none."""


def is_gone(name: str, where: str, value: object = None) -> bool:
    """Whether a setting is gone. Raises ``ConfigError`` then, unless ``value`` asks for what happens anyway."""
    write, was = REMOVED.get(name, ("", None))
    if write and (was is None or value != was):
        raise ConfigError(f"{where} is a setting that is gone", so="it would have no effect", fix=write)
    return bool(write)
