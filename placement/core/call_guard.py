"""Calls of a module whose bytes are on the host are refused, however they are made.

While the bytes are away, `forward` of the module and of each submodule with tensors is an attribute of the object itself, which
refuses. A pre-hook would not do:

* `model.forward(x)` runs no hook, and a submodule that is called alone runs only its own.
* Code that `torch.compile` made runs the hooks that it has seen, and is never told of new ones. But it does check, without a step
  of Python, that `forward` is still what it was traced with. It finds that it is not, so the call is traced anew, and that trace is
  refused. The code stays, and serves again once the bytes are back: nothing is compiled twice.
* A hook costs time in every call. This costs nothing while the bytes are on the device: then nothing of it is there.

Not seen is what reads the weights without calling a module that has them (`torch.nn.functional.linear(x, model.weight)`), a bound
`forward` of a module without children that was taken while it was on the device, and what `torch.jit` and `torch.export` made: they
hold the tensors. A module of one of torch's own classes (`nn.Sequential`) should be given to `torch.compile` before it is registered,
or in a phase: while its `forward` is not torch's, the wrapper calls it without compiling it.
"""

from __future__ import annotations

import inspect
import os
import types
import weakref
from collections.abc import Callable, Iterable
from typing import Any, Protocol

import torch


class Check(Protocol):
    """Raises where the module must not be called now."""

    def __call__(self, module: torch.nn.Module | None, args: Any) -> None: ...

    def refuse_copy(self) -> None:
        """Raise where the module must not be copied now."""


CHECKS: weakref.WeakValueDictionary[str, Check] = weakref.WeakValueDictionary()
"""By name, for whoever cannot hold the object."""


class GuardedForward:
    """In place of a module's `forward`. It asks at each call, so one that an interrupt left behind does no harm.

    Args:
        before: what the object had as its own `forward` (a framework's patch, a captured graph); None: its class's is meant.
    """

    def __init__(self, check: Check, module: torch.nn.Module, before: Callable[..., Any] | None = None) -> None:
        self.check = check
        self.before = before
        self._module = weakref.ref(module)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.check(None, args)
        return self._plain()(*args, **kwargs)

    def _plain(self) -> Callable[..., Any]:
        module = self._module()
        assert module is not None, "whoever calls its forward holds the module"
        return types.MethodType(type(module).forward, module) if self.before is None else self.before

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(self._plain())

    @property
    def __code__(self) -> types.CodeType:
        """For `torch.jit.script` and `torch.export`, which want the code instead of calling it."""
        self.check(None, ())
        code: types.CodeType = self._plain().__code__
        return code

    @property
    def __globals__(self) -> dict[str, Any]:
        self.check(None, ())
        found: dict[str, Any] = self._plain().__globals__
        return found

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[torch.nn.Module | None, str]]:
        """A copy of the module has the method of its class, and while offloaded there is no copy."""
        self.check.refuse_copy()
        return getattr, (self._module(), "forward")


class CallGuard:
    """Refuses the calls of modules and of their submodules while it is told to.

    Args:
        roots: refused themselves, whatever they own; a submodule only if it, or one in it, has tensors. Those that they have now.
    """

    def __init__(self, check: Check, roots: Iterable[torch.nn.Module]) -> None:
        self._check = check
        found = list(roots)
        self._roots = [weakref.ref(root) for root in found]
        self._forwards = [(weakref.ref(part), GuardedForward(check, part)) for part in _with_tensors(found)]
        self._hooks: list[torch.utils.hooks.RemovableHandle] = []
        _IN_USE.add(self)

    def roots(self) -> list[torch.nn.Module]:
        """Those that are still there."""
        return [root for root in (reference() for reference in self._roots) if root is not None]

    def guards(self, module: torch.nn.Module) -> bool:
        """Whether a module is one of the roots."""
        return any(root is module for root in self.roots())

    def refuse(self) -> None:
        """Called before the bytes go, so that there is no moment in which they are away and can be called. Idempotent."""
        for reference, forward in self._forwards:  # of experts there are tens of thousands: few steps for each
            module = reference()
            if module is None:
                continue
            fields = module.__dict__
            if "forward" in fields or fields["_forward_pre_hooks"]:
                self._refuse(module, forward)
            else:
                fields["forward"] = forward

    def _refuse(self, module: torch.nn.Module, forward: GuardedForward) -> None:
        """The same where a framework has put something of its own in front of the class's `forward`."""
        before = vars(module).get("forward")
        if isinstance(before, GuardedForward) and before.check is self._check:
            return
        if module._forward_pre_hooks:  # one may gather the weights of all ranks (FSDP2): the refusal comes first
            self._hooks.append(module.register_forward_pre_hook(self._check, prepend=True))
        # Another one around each patch: whoever patched it since the last time may call the last one.
        vars(module)["forward"] = forward if before is None else GuardedForward(self._check, module, before)

    def allow(self) -> None:
        """Called when the bytes are back. Idempotent."""
        while self._hooks:
            self._hooks.pop().remove()
        for reference, forward in self._forwards:
            module = reference()
            if module is None:
                continue
            fields = module.__dict__
            found = fields.get("forward")
            if found is forward:
                del fields["forward"]
            elif isinstance(found, GuardedForward) and found.check is self._check:
                fields["forward"] = found.before

    def remove(self) -> None:
        """The modules are as before, for good."""
        self.allow()
        self._forwards = []
        _IN_USE.discard(self)


def _with_tensors(roots: list[torch.nn.Module]) -> list[torch.nn.Module]:
    """The roots, and of their submodules those in which there is a tensor; a call of the others needs no bytes."""
    seen: dict[int, bool] = {}
    for root in roots:
        _has_tensors(root, seen)
    parts = {id(part): part for root in roots for part in root.modules()}
    return [part for part in parts.values() if seen[id(part)] or any(part is root for root in roots)]


def _has_tensors(module: torch.nn.Module, seen: dict[int, bool]) -> bool:
    if id(module) not in seen:
        seen[id(module)] = False  # a module may be inside itself
        children = [_has_tensors(child, seen) for child in module._modules.values() if child is not None]
        own = (*vars(module).values(), *module._parameters.values(), *module._buffers.values())
        seen[id(module)] = any(children) or any(isinstance(each, torch.Tensor) for each in own)
    return seen[id(module)]


_IN_USE: weakref.WeakSet[CallGuard] = weakref.WeakSet()


def _refuse_in_child() -> None:
    """A forked child has neither the device's memory nor the host copies, whatever was resident in its parent."""
    for each in list(_IN_USE):
        each.refuse()


os.register_at_fork(after_in_child=_refuse_in_child)
