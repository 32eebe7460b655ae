"""Guards in front of calls of somebody else's objects: of modules (`CallGuard`), and of any other
method (`MethodCall`).

`without_modes` is for placement's own calls of torch, which the modes that the caller is in would
change.

A call of a module whose bytes are on the host is refused, however the call is made.

While the bytes are away, each guarded module has a `forward` attribute of its own that raises. A
pre-hook would not be enough:

* `model.forward(x)` runs no hook, and a submodule that is called alone runs only its own hooks.
* Code compiled by `torch.compile` runs the hooks it saw when it was traced, and no later ones. But
  its guards, which cost no step of Python, check that `forward` is still the function that was
  traced. The check fails, the call is traced anew, and that trace is refused. The compiled code is
  kept and serves again once the bytes are back, so nothing is compiled twice.
* A hook costs time in every call. The guard costs nothing while the bytes are on the device,
  because then it is not installed.

A framework may replace `forward` while the guard is there (accelerate's `unwrap_model`). So a
module that was registered, and one whose `forward` was replaced before, have a pre-hook as well
while the bytes are away.

Calls that other threads have begun before are waited for (`CallGuard.wait`), and so is a
`torch.save` (`wait_for_saves`), as far as the threads' stacks show them. To count calls as they
begin and end would cost every call time, and miss submodules. A look costs only the transition that
looks: microseconds a thread. Frames of `torch.compile` have the names and arguments of what was
compiled, or parameters.

The guard does not see code that reads the weights without calling their module
(`torch.nn.functional.linear(x, model.weight)`), a bound `forward` of a module without children that
was taken while the module was on the device, or the results of `torch.jit` and `torch.export`,
which hold the tensors themselves. Give a module of one of torch's own classes (`nn.Sequential`) to
`torch.compile` before you register it, or inside a phase: while its `forward` is not torch's, the
wrapper calls it without compiling it.
"""

from __future__ import annotations

import functools
import gc
import inspect
import itertools
import operator
import os
import sys
import threading
import time
import traceback
import types
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

# `_disable_current_modes` imports these two when it is called. A manager that is collected is
# closed by a finalizer, and a collection can happen while another import is half done, this very
# one included: an import by the finalizer would then raise ImportError.
import torch._subclasses.functional_tensor
import torch._subclasses.schema_check_mode
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.utils._python_dispatch import _disable_current_modes

from placement.core.errors import PhaseError
from placement.core.interrupts import looks, reference

_FORWARD = ("forward",)
# the functions that run while a module is called
_CALLS = ("forward", "_call_impl", "_wrapped_call_impl")
# the function that calls a graph which `torch.compile` made, and its file
_COMPILED = ("_fn", "torch/_dynamo/eval_frame.py")
# the functions of `torch.save` that collect storages and then write them
_SAVES = ("_save", "_legacy_save")
_FIRST, _SECOND = operator.itemgetter(0), operator.itemgetter(1)
_IS_FRAME = functools.partial(operator.is_not, None)
_GLANCE_SECONDS = 1e-3  # how long to sleep between two looks at the threads that are waited for


# raises, called with (module or None, arguments), when the module must not be called now; its
# `refuse_copy()`, when not copied
Check = Any
CHECKS: weakref.WeakValueDictionary[str, Check] = weakref.WeakValueDictionary()
"""Every check by a number of its own, as text, for code that must not keep the check alive."""


class GuardedForward:
    """Takes the place of a module's `forward` and asks the check at each call. `before`: the
    module's own `forward` attribute (a framework's patch, a captured graph); None: the method of
    its class is called."""

    def __init__(
        self, check: Check, module: torch.nn.Module, before: Callable[..., Any] | None = None
    ) -> None:
        self.check = check
        self.before = before
        self._module = weakref.ref(module)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.check(None, args)
        return self._plain()(*args, **kwargs)

    def _plain(self) -> Callable[..., Any]:
        module = self._module()
        assert module is not None, "whoever calls its forward holds the module"
        return (
            types.MethodType(type(module).forward, module) if self.before is None else self.before
        )

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(self._plain())

    def __getattr__(self, name: str) -> Any:
        """The attribute of the module's own `forward`: frameworks follow `__wrapped__`, and bind
        `__func__` anew.

        `torch.jit.script` and `torch.export` read its code instead of calling it.
        """
        if name in ("__code__", "__globals__"):
            self.check(None, ())
        # a copy is `__reduce__`'s; fields are missing while it is made
        elif name in ("__deepcopy__", "__copy__", "_module", "before"):
            raise AttributeError(name)
        return getattr(self._plain(), name)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[torch.nn.Module | None, str]]:
        """A copied module gets the method of its class; copying is refused while the module is
        offloaded."""
        self.check.refuse_copy()
        return getattr, (self._module(), "forward")


class CallGuard:
    """Refuses the calls of modules (`roots`) and their submodules between `refuse` and `allow`.

    Of the present submodules, those that have or contain a tensor are refused. `wait` waits at most
    `deadline_seconds`.
    """

    def __init__(
        self, check: Check, roots: Iterable[torch.nn.Module], name: str, deadline_seconds: float
    ) -> None:
        self._check = check
        self._name = name
        self._deadline_seconds = deadline_seconds
        found = list(roots)
        self._roots = [weakref.ref(root) for root in found]
        parts = _with_tensors(found)
        self._parts = list(map(weakref.ref, parts))
        self._forwards = [GuardedForward(check, part) for part in parts]
        self._places = {id(part): place for place, part in enumerate(parts)}  # in these two lists
        self._hooks: list[torch.utils.hooks.RemovableHandle] = []
        _IN_USE.add(self)

    def roots(self) -> list[torch.nn.Module]:
        return [root for root in (reference() for reference in self._roots) if root is not None]

    def guards(self, module: torch.nn.Module) -> bool:
        return any(root is module for root in self.roots())

    def is_inside(self) -> bool:
        """Whether this thread runs the `forward` of one of the modules."""
        return bool(self._parts) and any(
            map(self._is_one, _called((frame for frame, _ in traceback.walk_stack(None)), _FORWARD))
        )

    def _is_one(self, each: Any) -> bool:
        """Whether a module is guarded here, or a tensor is a parameter of one that is."""
        if isinstance(each, torch.nn.Module):
            return (place := self._places.get(id(each))) is not None and self._parts[
                place
            ]() is each
        return isinstance(each, torch.nn.Parameter) and any(
            each is own for root in self.roots() for own in root.parameters()
        )

    def wait(self, since_seconds: float) -> None:
        """Wait until the calls that other threads are in now have ended. The deadline counts from
        `since_seconds` on the monotonic clock.

        Raises PhaseError: the deadline has passed; or this thread itself is inside such a call, and
        would wait for ever.
        """
        if self.is_inside():
            raise PhaseError(
                f"{self._name!r} cannot be offloaded, given back or written from inside its own "
                "forward() (a hook, or code of the model): the rest of the call needs it as it is. "
                "Change phases after the call has returned"
            )
        pending = _threads_that_call(self._is_one) if self._parts else set()
        for _ in looks(
            since_seconds + self._deadline_seconds - time.monotonic(),
            _GLANCE_SECONDS,
            _GLANCE_SECONDS,
        ):
            if pending:
                # one that was seen outside has ended the call that was meant
                pending &= _threads_that_call(self._is_one)
            # at the interpreter's exit nothing is waited for
            if not pending or not threading.main_thread().is_alive():
                return
        names = [repr(thread.name) for thread in threading.enumerate() if thread.ident in pending]
        raise PhaseError(
            f"{self._name!r} is still being called in thread {', '.join(names) or pending} after "
            f"{time.monotonic() - since_seconds:.1f} s, so it stays on the device as it is. Wait "
            "for that thread before (join(), result()). For calls that take longer, raise "
            f"call_deadline_seconds (now {self._deadline_seconds:g})"
        )

    def wait_for_saves(self, is_meant: Callable[[torch.UntypedStorage], bool]) -> None:
        """Wait until no other thread is in a `torch.save` that still has to write a storage that is
        meant. Raises PhaseError: it takes longer than the deadline."""
        for _ in looks(self._deadline_seconds, _GLANCE_SECONDS, _GLANCE_SECONDS):
            if not any(map(is_meant, _saved_by_others())) or not threading.main_thread().is_alive():
                return
        raise PhaseError(
            f"a torch.save in another thread still reads {self._name!r} on the device, so it stays "
            "there. Wait for that thread before (join(), result()), or raise call_deadline_seconds "
            f"(now {self._deadline_seconds:g})"
        )

    def refuse(self) -> None:
        """Refuse calls from now on. Called before the bytes leave, so that no call falls between.
        Idempotent."""
        for root in self.roots():
            self._refuse(root, self._forwards[self._places[id(root)]])
        for part, forward in zip(self._parts, self._forwards, strict=True):
            if (module := part()) is None:
                continue
            own = module.__dict__
            if "forward" in own or own["_forward_pre_hooks"]:
                self._refuse(module, forward)
            else:  # tens of thousands in a mixture of experts, which nobody has touched
                own["forward"] = forward

    def _refuse(self, module: torch.nn.Module, forward: GuardedForward) -> None:
        """Refuse a root, or a module on which a framework has put hooks or a `forward` of its own.

        The hook runs before a framework's, which may gather all ranks' weights (FSDP2).
        """
        before = vars(module).get("forward")
        if isinstance(before, GuardedForward) and before.check is self._check:
            return
        self._hooks.append(module.register_forward_pre_hook(self._check, prepend=True))
        # A new guard around each patch, because whoever patched `forward` since the last time may
        # call the previous guard.
        vars(module)["forward"] = (
            forward if before is None else GuardedForward(self._check, module, before)
        )

    def allow(self) -> None:
        """Allow calls again. Called when the bytes are back. Idempotent."""
        while self._hooks:
            self._hooks.pop().remove()
        for part, forward in zip(self._parts, self._forwards, strict=True):
            if (module := part()) is None:
                continue
            own = module.__dict__
            guard = own.get("forward")
            if guard is forward:
                del own["forward"]
            elif isinstance(guard, GuardedForward) and guard.check is self._check:
                own["forward"] = guard.before

    def remove(self) -> None:
        self.allow()
        self._roots, self._parts, self._forwards = [], [], []
        _IN_USE.discard(self)


def _called(stack: Iterable[types.FrameType], names: tuple[str, ...] = _CALLS) -> Iterator[Any]:
    """The first argument of each function of a stack with one of these names, and the arguments of
    compiled graphs."""
    for frame in stack:
        code = frame.f_code
        if code.co_name in names and code.co_argcount:
            yield frame.f_locals.get(code.co_varnames[0])
        elif code.co_name == _COMPILED[0] and code.co_filename.endswith(_COMPILED[1]):
            yield from frame.f_locals.get("args", ())


def _threads_that_call(is_meant: Callable[[Any], bool]) -> set[int]:
    """The identities of the other threads that are in a call of something for which `is_meant` is
    true."""
    return {ident for ident, stack in _stacks_of_others() if any(map(is_meant, _called(stack)))}


def _saved_by_others() -> Iterator[torch.UntypedStorage]:
    """The storages that other threads' calls of `torch.save` have collected."""
    for _, stack in _stacks_of_others():
        for frame in stack:
            if (
                frame.f_code.co_name in _SAVES
                and frame.f_code.co_filename == torch.serialization.__file__
            ):
                found = [*frame.f_locals.get("serialized_storages", {}).values()]
                # the old format has a dtype with each
                yield from (each[0] if isinstance(each, tuple) else each for each in found)


def _stacks_of_others() -> list[tuple[int, list[types.FrameType]]]:
    """The frames of every other thread, innermost first, by the thread's identity.

    All are taken in one call of functions written in C, so that no other thread runs meanwhile: to
    follow the stack of a thread that goes on and leaves its frames has ended a process by SIGSEGV
    (CPython 3.11.7). Nor may a collection run, which could call Python code.
    """
    every = itertools.chain.from_iterable(
        map(dict.items, itertools.starmap(sys._current_frames, [()]))
    )
    is_mine = operator.methodcaller("__contains__", threading.get_ident())
    idents, tops = itertools.tee(itertools.filterfalse(is_mine, every))
    chains: Iterator[Any] = map(
        itertools.chain,
        zip(map(_SECOND, tops), strict=False),
        itertools.repeat(itertools.repeat("f_back")),
    )
    frames = map(
        itertools.takewhile,
        itertools.repeat(_IS_FRAME),
        map(itertools.accumulate, chains, itertools.repeat(getattr)),
    )
    collects = gc.isenabled()
    gc.disable()
    try:
        return list(zip(map(_FIRST, idents), map(list, frames), strict=False))
    finally:
        # they lead to this very frame: a cycle would keep it until it is collected
        del every, idents, tops, chains, frames
        if collects:
            gc.enable()


def _with_tensors(roots: list[torch.nn.Module]) -> list[torch.nn.Module]:
    """The roots, and every submodule that has or contains a tensor. A call of any other submodule
    needs no bytes."""
    seen: dict[int, bool] = {}
    for root in roots:
        _has_tensors(root, seen)
    parts = {id(part): part for root in roots for part in root.modules()}
    return [
        part for part in parts.values() if seen[id(part)] or any(part is root for root in roots)
    ]


def _has_tensors(module: torch.nn.Module, seen: dict[int, bool]) -> bool:
    if id(module) not in seen:
        seen[id(module)] = False  # a module may be inside itself
        children = [
            _has_tensors(child, seen) for child in module._modules.values() if child is not None
        ]
        own = (*module._parameters.values(), *module._buffers.values(), *vars(module).values())
        seen[id(module)] = any(children) or any(isinstance(each, torch.Tensor) for each in own)
    return seen[id(module)]


_IN_USE: weakref.WeakSet[CallGuard] = weakref.WeakSet()


NO_CALLS = CallGuard(None, (), "", 0.0)  # for an object that cannot be called


def wait_for_calls(module: torch.nn.Module) -> None:
    for each in [each for each in _IN_USE if each.guards(module)]:
        each.wait(time.monotonic())


def _refuse_in_child() -> None:
    """Refuse every guarded module in a forked child, which has neither the parent's device memory
    nor its host copies."""
    for each in list(_IN_USE):
        each.refuse()


os.register_at_fork(after_in_child=_refuse_in_child)


# --- any other method


class MethodCall:
    """Stands in for a method of one object and calls a guard before it. It is for methods without
    torch hooks, or whose hooks run too late.

    Hooks of an optimizer inside another one run too late: the outer one may have reduced, unscaled
    and dropped gradients by then. A copy of the object is not guarded. If somebody else has put a
    method on the object itself, that method is called, and `remove` restores it. The guard gets the
    object, the positional (tuple) and the keyword arguments (dict). It raises to refuse the call,
    and returns None or other arguments for it.
    """

    def __init__(self, guard: Callable[..., Any], target: Any, name: str) -> None:
        self._guard, self._target, self._name = guard, reference(target), name
        bound = _Bound(self.run, target, name, vars(target).get(name))
        # weak: it may hold the object, which the handle, our holder, must not keep alive
        self._bound = weakref.ref(bound)
        vars(target)[name] = bound

    def run(
        self, method: Callable[..., Any], target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Called in place of the method: run the guard, then the method, with other arguments where
        the guard returns them."""
        args, kwargs = self._guard(target, args, kwargs) or (args, kwargs)
        return method(*args, **kwargs)

    def remove(self) -> None:
        target, bound = self._target(), self._bound()
        if target is None or bound is None:
            return
        bound.run = _unguarded  # others may have bound it anew (a scheduler)
        if vars(target).get(self._name) is bound:
            if bound.theirs is None:
                del vars(target)[self._name]
            else:
                vars(target)[self._name] = bound.theirs


class _Bound:
    """A bound method that does not keep its object alive. An ordinary one in the object's own
    fields would, until the next collection."""

    def __init__(self, run: Callable[..., Any], target: Any, name: str, theirs: Any) -> None:
        functools.update_wrapper(self, getattr(type(target), name) if theirs is None else theirs)
        self.run, self._target, self._name, self.theirs = run, reference(target), name, theirs

    def _call(self, self_: Any, *args: Any, **kwargs: Any) -> Any:
        plain = self.__wrapped__  # type: ignore[attr-defined] # by `update_wrapper`
        method = functools.partial(plain, self_) if self.theirs is None else plain
        return (
            self.run(method, self_, args, kwargs)
            if self_ is self._target()
            else method(*args, **kwargs)
        )

    @property
    def __func__(self) -> Callable[..., Any]:
        return lambda *args, **kwargs: self._call(*args, **kwargs)  # noqa: PLW0108  # others bind it (`LRScheduler`): it must be a function

    @property
    def __self__(self) -> Any:
        return self._target()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._call(self.__self__, *args, **kwargs)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """Make it the copy's own method when it is copied or pickled with its object."""
        return (
            (getattr, (self.__self__, self._name))
            if self.theirs is None
            else (_itself, (self.theirs,))
        )


def _itself(method: Any) -> Any:
    return method


def _unguarded(method: Callable[..., Any], _: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
    return method(*args, **kwargs)


# --- calls of torch


class _Left(threading.local):
    modes: tuple[Any, ...] = ()  # the function modes that this thread has left, innermost first


_LEFT = _Left()
_NOTHING = nullcontext()
_num_function_modes = torch._C._len_torch_function_stack
_num_dispatch_modes = torch._C._len_torch_dispatch_stack
_is_any_autocast_on = torch._C._is_any_autocast_enabled
_innermost_transform = torch._C._functorch.peek_interpreter_stack


def without_modes() -> AbstractContextManager[None]:
    """Context manager in which no default device, mode, autocast or transform is active. Costs a
    microsecond where none was.

    `torch.device("meta")`, autocast, a `TorchFunctionMode` or `TorchDispatchMode` (such as
    `FakeTensorMode`) and the transforms of `torch.func` change every torch call on their thread,
    including calls made by placement. A fingerprint would become a meta or fake tensor. So code of
    placement that computes with tensors leaves these modes first and restores them afterwards.

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
    modes: list[Any] = []
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
