"""The modes of torch that a caller is in, and torch without them.

`torch.device("meta")`, autocast, a `TorchFunctionMode` or `TorchDispatchMode` (`FakeTensorMode` is one) and the transforms of
`torch.func` reach into every call of torch on their thread, also into those that are made here: a fingerprint would become a meta
tensor or a fake one. So whatever computes with tensors of ours first leaves the modes, and comes back to them afterwards.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
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
    with ExitStack() as modes:
        modes.enter_context(temporarily_clear_interpreter_stack())
        modes.enter_context(_disable_current_modes())
        modes.enter_context(_function_modes_left())
        modes.enter_context(torch._C._DisableAutocast())
        yield


@contextmanager
def _function_modes_left() -> Iterator[None]:
    before = _LEFT.modes
    modes = tuple(torch._C._pop_torch_function_stack() for _ in range(_num_function_modes()))
    _LEFT.modes = modes
    try:
        yield
    finally:
        _LEFT.modes = before
        _push(modes)


@contextmanager
def callers_function_modes() -> Iterator[None]:
    """Inside `without_modes`, for code of the user's that makes tensors: the default device and the function modes of the caller again."""
    modes, _LEFT.modes = _LEFT.modes, ()
    _push(modes)
    try:
        yield
    finally:
        for _ in modes:
            torch._C._pop_torch_function_stack()
        _LEFT.modes = modes


def _push(modes: tuple[Any, ...]) -> None:
    deque(map(torch._C._push_on_torch_function_stack, reversed(modes)), maxlen=0)  # in one call of C: no interrupt falls between two
