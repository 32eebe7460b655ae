"""The step that torch makes to create an optimizer's state, when the state dict is asked for of one that has none yet.

`torch.distributed.checkpoint.state_dict` does it, and whatever is built on that (VeOmni's `MultiOptimizer`): it gives every parameter a
gradient of zeros, sets every learning rate to 0, steps, and sets the rates back. The counters of Adam are 1 afterwards, so training
goes on otherwise than without. A step that is refused would leave the rates at 0.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_MODULE, _NAME = "torch.distributed.checkpoint.state_dict", "_init_optim_state"


def undo_initial_step() -> bool:
    """Called where a step is refused: if it was such a step, put back the learning rates and drop the gradients. Whether it was."""
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
    """State dicts asked for inside show the state that there is, and none where there is none."""
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
