"""The README.md of an exported model: what it was trained on, and how."""

from __future__ import annotations

from bytescale.config import Config

_SHOWN_SOURCES = 20


def model_card(config: Config, step: int) -> str:
    """Markdown with the front matter that the Hugging Face Hub reads. ``step``: how many updates were made."""
    data, model, optimizer = config.data, config.model, config.optimizer
    base = config.trainer.init
    how = "fine-tuned" if base else "trained from random weights"
    part = ", low-rank adapters that are merged into it" if model.lora_rank else ""
    shown = [f"- `{source}`" for source in data.sources[:_SHOWN_SOURCES]]
    if len(data.sources) > _SHOWN_SOURCES:
        shown.append(f"- and {len(data.sources) - _SHOWN_SOURCES} more")
    lines = [
        "---",
        "library_name: transformers",
        "pipeline_tag: text-generation",
        "tags: [bytescale]",
        "---",
        "",
        "# Model card",
        "",
        f"This model was {how} by bytescale" + (f" from `{base.rpartition(':')[2]}`{part}." if base else "."),
        "",
        f"It has seen {step} global batches of at most {data.batch_tokens} tokens, in sequences of at most "
        f"{data.context_length} tokens, of:",
        "",
        *shown,
        "",
        f"Loss: cross-entropy per {data.loss_per}"
        + (", of what the assistant says" if data.content == "messages" else "")
        + (", of the completions" if data.content == "prompt" else "")
        + ". It has not been evaluated for safety or bias.",
        "",
        f"Optimizer: {optimizer.name}, peak learning rate {optimizer.lr:g}, {optimizer.schedule} schedule, "
        f"weight decay {optimizer.weight_decay:g}.",
        "",
    ]
    return "\n".join(lines)
