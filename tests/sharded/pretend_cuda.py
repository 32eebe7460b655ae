"""Lets Megatron's own classes run without an accelerator: what asks for CUDA gets the CPU, and is
told that it is CUDA.

Nothing of Megatron is replaced. Its classes hard-code `device="cuda"`,
`torch.cuda.current_device()` and the names of CUDA tensor types; those alone are answered
differently, for the calling thread, while the context is open.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any
from unittest import mock

import torch
from torch.overrides import TorchFunctionMode

_CPU = torch.device("cpu")


class _Everything(TorchFunctionMode):
    """Every tensor says that it is of CUDA."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = _on_cpu(dict(kwargs or {}))
        if func is torch.Tensor.type and len(args) == 1 and not kwargs:
            return func(*args).replace("torch.", "torch.cuda.", 1)
        if func is torch.Tensor.backward:  # hooks run inside, for which the mode would be off
            with self:
                return torch.autograd.backward(args[0], kwargs.pop("gradient", None), **kwargs)
        if func in (torch.Tensor.cuda, torch.Tensor.record_stream):
            return args[0]
        if func is torch.Tensor.to:
            args = (args[0], *(_CPU if _is_cuda(each) else each for each in args[1:]))
        return func(*args, **kwargs)


class _Marked(TorchFunctionMode):
    """Those tensors say that they are of CUDA that were marked, or were made from such without
    going to the CPU."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        given = dict(kwargs or {})
        kwargs = _on_cpu(dict(given))
        if func == torch.Tensor.is_cuda.__get__:  # type: ignore[attr-defined]
            return _is_marked(args[0])
        target = str(
            given.get("device", args[1] if func is torch.Tensor.to and len(args) > 1 else "")
        )
        if func is torch.Tensor.cpu or (func is torch.Tensor.to and target == "cpu"):
            return args[0].detach().clone() if _is_marked(args[0]) else args[0]
        if func is torch.Tensor.cuda or (func is torch.Tensor.to and target.startswith("cuda")):
            return args[0] if _is_marked(args[0]) else mark(args[0].detach().clone())
        if func is torch.Tensor.pin_memory:
            return args[0]
        result = func(*args, **kwargs)
        comes_of = any(
            _is_marked(each) for each in args if isinstance(each, torch.Tensor)
        ) or target.startswith("cuda")
        if (
            comes_of
            and target != "cpu"
            and isinstance(result, torch.Tensor)
            and not any(result is each for each in args)
        ):
            mark(result)
        return result


def mark(tensor: torch.Tensor) -> torch.Tensor:
    """Let a tensor say that it is of CUDA."""
    tensor.__dict__["of_cuda"] = True
    return tensor


def _is_marked(tensor: Any) -> bool:
    return isinstance(tensor, torch.Tensor) and "of_cuda" in tensor.__dict__


def _is_cuda(device: Any) -> bool:
    """Whether an argument is a device of CUDA: by name, as an object, or a number."""
    return type(device) is int or (
        isinstance(device, (str, torch.device)) and str(device).startswith("cuda")
    )


def _on_cpu(kwargs: dict[str, Any]) -> dict[str, Any]:
    if _is_cuda(kwargs.get("device")):
        kwargs["device"] = _CPU
    kwargs.pop("pin_memory", None)
    return kwargs


_OF_TORCH_CUDA = {
    "current_device": mock.MagicMock(return_value=0),
    "stream": mock.MagicMock(return_value=contextlib.nullcontext()),
    **{
        name: mock.MagicMock()
        for name in (
            "synchronize",
            "empty_cache",
            "Stream",
            "current_stream",
            "default_stream",
            "Event",
        )
    },
}
"""What stands in for it, made once because making mocks takes milliseconds. On a CPU everything is
in order by itself."""


@contextlib.contextmanager
def pretend_cuda(*, only_marked: bool = False) -> Iterator[None]:
    """The context. Only marked tensors are of CUDA, or all of them."""
    # which DTensor imports at its first use: it must see what torch.cuda really is
    importlib.import_module("torch._dynamo")
    with contextlib.ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        # Megatron warns of TransformerEngine and Apex, which are not there
        warnings.simplefilter("ignore")
        stack.enter_context(mock.patch.multiple(torch.cuda, **_OF_TORCH_CUDA))
        stack.enter_context(_Marked() if only_marked else _Everything())
        yield


@contextlib.contextmanager
def replaced(modules: Mapping[str, Any]) -> Iterator[None]:
    """These entries of `sys.modules`; None hides a module. What is imported in the meantime stays,
    unlike with `mock.patch.dict`: torch registers operators when parts of it are imported, and
    refuses to do so again."""
    known = {name: sys.modules[name] for name in modules if name in sys.modules}
    sys.modules.update(modules)
    try:
        yield
    finally:
        for name in modules:
            del sys.modules[name]
        sys.modules.update(known)
