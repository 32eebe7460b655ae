"""The modes of torch that a caller is in, and torch without them.

`torch.device("meta")`, autocast, a `TorchFunctionMode` or `TorchDispatchMode` (`FakeTensorMode` is one) and the transforms of
`torch.func` reach into every call of torch on their thread, also into those that are made here: a fingerprint would become a meta
tensor or a fake one. So whatever computes with tensors of ours first leaves the modes, and comes back to them afterwards.
"""

from __future__ import annotations

import itertools
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.utils._python_dispatch import _disable_current_modes


class _Left(threading.local):
    modes: tuple[Any, ...] = ()
    """The function modes that this thread has left, innermost first."""


_LEFT = _Left()
_NOTHING = nullcontext()
_num_function_modes = torch._C._len_torch_function_stack
_num_dispatch_modes = torch._C._len_torch_dispatch_stack
_is_any_autocast_on = torch._C._is_any_autocast_enabled
_innermost_transform = torch._C._functorch.peek_interpreter_stack


def without_modes() -> AbstractContextManager[None]:
    """Torch as it is: no default device, no mode, no autocast, no transform. Costs a microsecond where the caller is in none.

    Gradients and inference mode are the caller's business still: what they mean differs from place to place.
    """
    if _num_function_modes() or _num_dispatch_modes() or _is_any_autocast_on() or _innermost_transform() is not None:
        return _left()
    return _NOTHING


@contextmanager
def _left() -> Iterator[None]:
    before = _LEFT.modes
    modes: list[Any] = []
    try:
        try:
            with temporarily_clear_interpreter_stack(), _disable_current_modes(), torch._C._DisableAutocast():
                modes.extend(itertools.starmap(torch._C._pop_torch_function_stack, [()] * _num_function_modes()))
                _LEFT.modes = tuple(modes)
                yield
        finally:
            _LEFT.modes = before
            _push(modes)
    finally:  # again, because an interrupt can come before the first one has done anything
        _LEFT.modes = before
        _push(modes)


@contextmanager
def callers_function_modes() -> Iterator[None]:
    """Inside `without_modes`, for code of the user's that makes tensors: the default device and the function modes of the caller again."""
    left = _LEFT.modes
    waiting = list(left)
    try:
        _LEFT.modes = ()
        _push(waiting)
        yield
    finally:
        for _ in range(len(left) - len(waiting)):
            torch._C._pop_torch_function_stack()
        _LEFT.modes = left


def _push(modes: list[Any]) -> None:
    """Empty the list, innermost mode first, onto torch's stack. In one call of C, so that no interrupt falls between two."""
    outermost_first = itertools.starmap(modes.pop, [()] * len(modes))
    deque(map(torch._C._push_on_torch_function_stack, outermost_first), maxlen=0)
