"""Operations that wait for a GPU, found without one."""

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class NothingIsReadBack(TorchDispatchMode):
    """Fails at an operation whose result Python needs, or whose shape the values decide: on a GPU it waits for all work
    that was begun there. A new tensor with a value from Python is a copy, which waits too. A copy to the CPU is not
    seen: on a CPU it is none."""

    n_operations = 0
    """Operations so far; those of a backward pass too, as far as it runs in this thread, as on a CPU it does."""
    WAITS = ("_local_scalar_dense", "nonzero", "masked_select", "unique", "lift_fresh")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name().partition("::")[2].partition(".")[0]
        self.n_operations += 1
        by_mask = name == "index" and any(i is not None and i.dtype == torch.bool for i in args[1])
        assert name not in self.WAITS and not by_mask, f"{name} waits for a GPU"
        return func(*args, **(kwargs or {}))
