"""Placement's own calls of torch leave the modes that the caller is in, which would change them."""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, ParamSpec, TypeVar

import torch

# `_disable_current_modes` imports these two when it is called. A manager that is collected is
# closed by a finalizer, and a collection can happen while another import is half done, this very
# one included: an import by the finalizer would then raise ImportError.
import torch._subclasses.functional_tensor
import torch._subclasses.schema_check_mode
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.utils._python_dispatch import _disable_current_modes

P = ParamSpec("P")
T = TypeVar("T")


class _Left(threading.local):
    modes: tuple[Any, ...] = ()  # the function modes that this thread has left, innermost first


_LEFT = _Left()
_NOTHING = nullcontext()
_num_function_modes = torch._C._len_torch_function_stack
_num_dispatch_modes = torch._C._len_torch_dispatch_stack
_is_any_autocast_on = torch._C._is_any_autocast_enabled
_innermost_transform = torch._C._functorch.peek_interpreter_stack


def uncompiled(method: Callable[P, T]) -> Callable[P, T]:
    """Have torch.compile leave a method, and all that it calls, alone: the graph ends before the
    call. As `torch.compiler.disable`, but dynamo is not imported (1.6 s) where nobody compiles."""
    uncompiled_method: Callable[P, T] | None = None

    @functools.wraps(method)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        nonlocal uncompiled_method
        if uncompiled_method is None:
            # not there yet while dynamo is imported, in which objects may be collected
            disable = getattr(sys.modules.get("torch._dynamo"), "disable", None)
            if disable is None:
                return method(*args, **kwargs)
            uncompiled_method = disable(method)
        return uncompiled_method(*args, **kwargs)

    call._torchdynamo_disable = True  # type: ignore[attr-defined]  # dynamo does not trace it
    return call


def without_modes() -> AbstractContextManager[None]:
    """Context manager in which no default device, mode, autocast or transform is active. Costs a
    microsecond where none was.

    Some modes change every torch call on their thread, including calls of placement:
    `torch.device("meta")`, autocast, a `TorchFunctionMode` or `TorchDispatchMode` (such as
    `FakeTensorMode`), the transforms of `torch.func`. A fingerprint would become a meta or fake
    tensor. So code of placement that computes with tensors leaves these modes first and restores
    them afterwards.

    Gradient mode and inference mode stay as the caller set them, because what they should be
    differs from place to place.
    """
    if (
        _num_function_modes()
        or _num_dispatch_modes()
        or _is_any_autocast_on()
        or _innermost_transform() is not None
    ):
        return _left()
    return _NOTHING


@contextmanager
def _left() -> Iterator[None]:
    before = _LEFT.modes
    modes = []
    try:
        with (
            temporarily_clear_interpreter_stack(),
            _disable_current_modes(),
            torch._C._DisableAutocast(),
        ):
            while _num_function_modes():
                modes.append(torch._C._pop_torch_function_stack())
            _LEFT.modes = tuple(modes)
            yield
    finally:
        _LEFT.modes = before
        _push(modes)


@contextmanager
def callers_function_modes() -> Iterator[None]:
    """Inside `without_modes`: the caller's default device and function modes again, for user code
    that makes tensors."""
    left = _LEFT.modes
    _LEFT.modes = ()
    _push(left)
    try:
        yield
    finally:
        for _ in left:
            torch._C._pop_torch_function_stack()
        _LEFT.modes = left


def _push(modes: Sequence[Any]) -> None:
    for mode in reversed(modes):
        torch._C._push_on_torch_function_stack(mode)
