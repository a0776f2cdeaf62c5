"""A trial that tells whether an optimizer may work on pieces of matrices."""

from __future__ import annotations

from typing import Any

import torch

from bytescale.common.errors import ConfigError, problem


def require_elementwise(cls: type[torch.optim.Optimizer], options: dict[str, Any]) -> None:
    """Raise ``ConfigError`` unless ``cls`` does the same to a matrix as to two halves of its numbers."""
    generator = torch.Generator().manual_seed(0)
    values = torch.rand(4, 6, generator=generator) + 0.5
    whole, halves = [values.clone()], [half.clone() for half in values.flatten().split(12)]
    try:
        optimizers = cls(whole, **options), cls(halves, **options)
        for _ in range(3):
            gradient = torch.randn(4, 6, generator=generator)
            whole[0].grad = gradient.clone()
            for half, part in zip(halves, gradient.flatten().split(12), strict=True):
                half.grad = part.clone()
            for optimizer in optimizers:
                optimizer.step()
    except (TypeError, RuntimeError, ValueError, AttributeError) as error:
        raise ConfigError(
            problem(f"{cls.__name__}({', '.join(f'{k}={v!r}' for k, v in options.items())}) does not run: {error}",
                    fix="use an elementwise optimizer with valid options, such as torch.optim.AdamW")
        ) from error  # fmt: skip
    if not torch.allclose(whole[0].flatten(), torch.cat(halves), rtol=1e-5, atol=1e-7):
        raise ConfigError(
            problem(
                f"{cls.__name__} is not elementwise: the update of a number depends on other numbers of its matrix",
                so="on this rank's shards of the parameters it would compute something else than on whole matrices",
                fix="use an elementwise optimizer, such as torch.optim.AdamW",
            )
        )
