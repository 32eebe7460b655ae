"""The step that torch makes to create an optimizer's state when it is asked for the state dict of an optimizer without state.

`torch.distributed.checkpoint.state_dict` makes this step, and so does code built on it (VeOmni's `MultiOptimizer`). It gives every
parameter a gradient of zeros, sets every learning rate to 0, steps, and sets the rates back. Adam's step counters are 1 afterwards, so
training goes on otherwise than without the state dict. If a guard refuses the step, the rates stay at 0.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_MODULE, _NAME = "torch.distributed.checkpoint.state_dict", "_init_optim_state"


def undo_initial_step() -> bool:
    """Put back the learning rates and drop the gradients if the step that is being refused is such a step. Returns whether it is."""
    code = getattr(getattr(sys.modules.get(_MODULE), _NAME, None), "__code__", None)
    frame = sys._getframe()
    while code is not None and frame.f_back is not None:
        frame = frame.f_back
        if frame.f_code is code:
            optimizer, rates = frame.f_locals["optim"], list(frame.f_locals["lrs"])
            for group in optimizer.param_groups:
                if "lr" in group:
                    group["lr"] = rates.pop(0)
            optimizer.zero_grad(set_to_none=True)
            return True
    return False


@contextmanager
def no_initial_step() -> Iterator[None]:
    """Keep torch from making the step. A state dict that is made inside shows the state that exists, and none where there is none."""
    module: Any = sys.modules.get(_MODULE)
    plain = getattr(module, _NAME, None)
    if plain is None:
        yield
        return
    setattr(module, _NAME, lambda _: None)
    try:
        yield
    finally:
        setattr(module, _NAME, plain)
