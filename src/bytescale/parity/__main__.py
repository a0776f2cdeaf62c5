"""``python -m bytescale.parity MODEL``: compares a model under ``HDP`` with itself in one process."""

from __future__ import annotations

import argparse
import sys

import torch

from bytescale.common.errors import BytescaleError
from bytescale.parity.compare import Setup, compare
from bytescale.parity.families import FAMILIES, small_model
from bytescale.runtime.optimizer.flat import DTYPES

TOLERANCE = {"fp64": 1e-10, "fp32": 1e-5}
"""The largest relative difference that sums in another order explain."""


def main(arguments: list[str] | None = None) -> int:
    """Returns 0 if all comparisons are within the tolerance, 1 if not, 2 if the model is refused."""
    parser = argparse.ArgumentParser(prog="python -m bytescale.parity", description=__doc__)
    parser.add_argument(
        "model", help=f"a folder, a model of the hub, a model type ({', '.join(FAMILIES)}, ...), or all"
    )
    parser.add_argument("--dtype", choices=sorted(TOLERANCE), default="fp64")
    parser.add_argument("--plans", type=int, default=3, help="random plans, on 1, 2, 3, ... ranks")
    parser.add_argument("--tolerance", type=float, help="largest relative difference; 1e-10 for fp64, 1e-5 for fp32")
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)
    return max(
        _one_model(name, given.dtype, given.plans, given.tolerance or TOLERANCE[given.dtype])
        for name in (FAMILIES if given.model == "all" else [given.model])
    )


def _one_model(name: str, dtype: str, plans: int, tolerance: float) -> int:
    try:
        model = small_model(name, dtype=DTYPES[dtype])
        results = [compare(model, Setup(num_ranks=1 + seed % 4, seed=seed)) for seed in range(plans)]
    except BytescaleError as error:
        print(f"{name:20} refused: {error}")
        return 2
    loss, logprobs = max(result.loss for result in results), max(result.logprobs for result in results)
    gradient, where = max((value, key) for result in results for key, value in result.gradients.items())
    equal = max(result.worst for result in results) <= tolerance
    print(
        f"{name:20} {'equal' if equal else 'DIFFERS'}: loss {loss:.1e}, log-probabilities {logprobs:.1e}, "
        f"gradients {gradient:.1e} ({where}); {plans} plans, {dtype}, tolerance {tolerance:.0e}"
    )
    return 0 if equal else 1


if __name__ == "__main__":
    sys.exit(main())
