"""The model: a decoder of transformers, described by its whole config.json. Free of torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from bytescale.common.errors import ConfigError
from bytescale.config.schema import Config, ModelConfig

_KEY = "config_json"


@dataclass(frozen=True, kw_only=True)
class ModelDescription:
    """A decoder of transformers. Two runs of equal description share checkpoints."""

    content: dict[str, Any]  # of config.json, all of it
    buffers: dict[str, str] = field(default_factory=dict)
    """Constants that belong to the weights and are not trained, such as a router's correction, as
    ``hf.files.folder.constants_of`` writes them. They are known once the model exists."""
    trained: dict[str, Any] = field(default_factory=dict)  # ``trained_of``; empty: every weight
    balance: float = 0.0
    """Weight of the loss for even use of experts (``hf.model.balance``), which is the run's, not the model's."""
    indexer_loss: tuple[Literal["dense", "sparse"], float] | None = None
    """Stage and coefficient of the loss of indexers (``hf.model.indexer_loss``), which is the run's, too."""

    @staticmethod
    def of_dict(stored: dict[str, Any]) -> ModelDescription:
        """From what ``as_dict`` has made. Raises ``KeyError`` for other contents."""
        return ModelDescription(content=stored[_KEY], buffers=stored["buffers"], trained=stored.get("trained", {}))

    def as_dict(self) -> dict[str, Any]:
        trained = {"trained": self.trained} if self.trained else {}
        return {_KEY: self.content, "buffers": self.buffers, **trained}

    @property
    def model_type(self) -> str:
        """transformers' name of the family."""
        return str(self.content.get("model_type", "unknown"))

    @property
    def vocab_size(self) -> int:
        """Rows of the embedding. Raises ``ConfigError`` where config.json does not say it."""
        size = (self.content.get("text_config") or self.content).get("vocab_size")
        if isinstance(size, int):
            return size
        raise ConfigError(
            f"config.json of the {self.model_type} model lacks vocab_size",
            fix="save the model anew with transformers: from_pretrained() and save_pretrained()",
        )


def check_model(shape: ModelDescription) -> None:
    """Raise ``ConfigError`` for a loss that would depend on the plan."""
    if shape.content.get("output_router_logits"):
        raise ConfigError(
            f"config.json of the {shape.model_type} model has output_router_logits = true",
            so="its loss for even use of experts would be that of a micro-batch, which depends on the plan",
            fix="set it to false, and model.router_aux_loss_weight to the weight of such a loss over the global batch",
        )


def trained_of(model: ModelConfig) -> dict[str, Any]:
    """What ``model`` wants trained, as checkpoints describe it; empty: every weight. Raises ``ConfigError``."""
    alpha = 2.0 * model.lora_rank if model.lora_alpha is None else model.lora_alpha
    if not model.lora_rank and (model.lora_alpha is not None or model.lora_targets):
        raise ConfigError("model.lora_alpha or model.lora_targets is set, but model.lora_rank is 0",
                    so="there would be no adapters", fix="set model.lora_rank, to 16 say")  # fmt: skip
    lora = {"rank": model.lora_rank, "alpha": alpha, "targets": list(model.lora_targets)}
    return {**({"lora": lora} if model.lora_rank else {}), **({"freeze": list(model.freeze)} if model.freeze else {})}


def check_trained(config: Config, shape: ModelDescription) -> None:
    """Raise ``ConfigError`` where weights that are not trained would be random numbers."""
    trained = shape.trained or trained_of(config.model)
    if trained and not config.trainer.init.startswith("hf:"):
        name = "model.lora_rank" if "lora" in trained else "model.freeze"
        raise ConfigError(
            f"{name} is set, but training does not begin with a Hugging Face model (trainer.init is "
            f"{config.trainer.init!r})",
            so="what is not trained would be random numbers",
            fix="use --init hf:FOLDER; `bytescale convert` makes a folder of a checkpoint, adapters merged",
        )
