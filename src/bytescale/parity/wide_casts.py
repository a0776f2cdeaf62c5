"""Models that convert to fp32 whatever their dtype, computed in fp64 throughout."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Variable
from torch.overrides import TorchFunctionMode


class WideCasts(TorchFunctionMode):
    """Within it, a conversion of fp64 numbers to fp32 leaves them in fp64.

    Many norms, routers and recurrences compute in fp32. Sums in another order then differ by 1e-6, and a mistake of
    that size would not show. A mode holds for one thread, hence for one rank of ``thread_ranks``. ``backward`` within
    it is for losses, which are single numbers.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call ``func`` with fp64 for fp32, if a number that it is given is fp64."""
        kwargs = kwargs or {}
        if func is Tensor.backward:
            # Layers may be computed again, for which the mode has to hold. Functions that it is asked about run
            # without it, hence the engine's own, which it is not asked about.
            with self:
                return Variable._execution_engine.run_backward(
                    (args[0],), (torch.ones_like(args[0]),), False, False, (), True, accumulate_grad=True
                )
        if any(isinstance(given, Tensor) and given.dtype == torch.float64 for given in (*args, *kwargs.values())):
            if func is Tensor.float:
                return args[0]
            args = [torch.float64 if given is torch.float32 else given for given in args]
            kwargs = {name: torch.float64 if given is torch.float32 else given for name, given in kwargs.items()}
        return func(*args, **kwargs)
