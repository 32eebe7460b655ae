"""A guard in front of the calls of modules.

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

The guard sees calls when they begin. It does not see a call that another thread is in already. Nor
does it see code that reads the weights without calling their module (`torch.nn.functional.linear(x,
model.weight)`). A bound `forward` of a module without children, taken while the module was on the
device, goes past it. So do the results of `torch.jit` and `torch.export`, which hold the tensors
themselves. Give a module of one of torch's own classes (`nn.Sequential`) to `torch.compile` before
you register it, or inside a phase: while its `forward` is not torch's, the wrapper calls it without
compiling it.
"""

from __future__ import annotations

import inspect
import os
import types
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch

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
        self,
        check: Check,
        module: torch.nn.Module,
        before: Callable[..., Any] | None = None,
    ) -> None:
        self.check = check
        self.before = before
        self.module = weakref.ref(module)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.check(None, args)
        return self._plain()(*args, **kwargs)

    def _plain(self) -> Callable[..., Any]:
        if self.before is not None:
            return self.before
        module = self.module()
        assert module is not None, "the caller of its forward holds the module"
        return types.MethodType(type(module).forward, module)

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
        elif name in ("__deepcopy__", "__copy__", "module", "before"):
            raise AttributeError(name)
        return getattr(self._plain(), name)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """A copied module gets the method of its class; copying is refused while the module is
        offloaded."""
        self.check.refuse_copy()
        return getattr, (self.module(), "forward")


class CallGuard:
    """Refuses the calls of modules (`roots`) and their submodules between `refuse` and `allow`.

    Of the present submodules, those that have or contain a tensor are refused.
    """

    def __init__(self, check: Check, roots: Iterable[torch.nn.Module]) -> None:
        self._check = check
        self._roots: list[GuardedForward] = []
        self._forwards: list[GuardedForward] = []
        self._hooks: list[torch.utils.hooks.RemovableHandle] = []
        roots = list(roots)
        for module in _with_tensors(roots):
            forward = GuardedForward(check, module)
            self._forwards.append(forward)
            if any(module is root for root in roots):
                self._roots.append(forward)
        _IN_USE.add(self)

    def roots(self) -> list[torch.nn.Module]:
        modules = (forward.module() for forward in self._roots)
        return [module for module in modules if module is not None]

    def refuse(self) -> None:
        """Refuse calls from now on. Called before the bytes leave, so that no call falls between.
        Idempotent."""
        for forward in self._forwards:
            module = forward.module()
            if module is None:
                continue
            fields = module.__dict__
            if forward in self._roots or "forward" in fields or fields["_forward_pre_hooks"]:
                self._refuse(module, forward)
            else:  # tens of thousands in a mixture of experts, which have no patches
                fields["forward"] = forward

    def _refuse(self, module: torch.nn.Module, forward: GuardedForward) -> None:
        """Refuse a root, or a module on which a framework has put hooks or a `forward` of its own.

        The hook runs before a framework's, which may gather all ranks' weights (FSDP2).
        """
        before = vars(module).get("forward")
        if isinstance(before, GuardedForward) and before.check is self._check:
            return
        self._hooks.append(module.register_forward_pre_hook(self._check, prepend=True))
        # A new guard around each patch, because a patch since the last time may call the previous
        # guard.
        if before is not None:
            forward = GuardedForward(self._check, module, before)
        vars(module)["forward"] = forward

    def allow(self) -> None:
        """Allow calls again. Called when the bytes are back. Idempotent."""
        while self._hooks:
            self._hooks.pop().remove()
        for forward in self._forwards:
            module = forward.module()
            if module is None:
                continue
            fields = module.__dict__
            guard = fields.get("forward")
            if guard is forward:
                del fields["forward"]
            elif isinstance(guard, GuardedForward) and guard.check is self._check:
                fields["forward"] = guard.before

    def remove(self) -> None:
        self.allow()
        self._roots = []
        self._forwards = []
        _IN_USE.discard(self)


def _with_tensors(roots: list[torch.nn.Module]) -> list[torch.nn.Module]:
    """The roots, and every submodule that has or contains a tensor. A call of any other submodule
    needs no bytes."""
    has_tensors: dict[int, bool] = {}
    for root in roots:
        _note_tensors(root, has_tensors)
    for root in roots:
        has_tensors[id(root)] = True
    modules = {id(module): module for root in roots for module in root.modules()}
    return [module for key, module in modules.items() if has_tensors[key]]


def _note_tensors(module: torch.nn.Module, has_tensors: dict[int, bool]) -> bool:
    """Note by `id` of this module, and of each submodule, whether it has or contains a tensor.
    Returns whether this one does."""
    if id(module) in has_tensors:
        return has_tensors[id(module)]
    has_tensors[id(module)] = False  # a module may be inside itself
    has_any = False
    for child in module._modules.values():
        if child is not None:
            has_any |= _note_tensors(child, has_tensors)
    for fields in (module._parameters, module._buffers, vars(module)):
        has_any = has_any or any(isinstance(value, torch.Tensor) for value in fields.values())
    has_tensors[id(module)] = has_any
    return has_any


_IN_USE: weakref.WeakSet[CallGuard] = weakref.WeakSet()


def _refuse_in_child() -> None:
    """Refuse every guarded module in a forked child, which has neither the parent's device memory
    nor its host copies."""
    for guard in list(_IN_USE):
        guard.refuse()


os.register_at_fork(after_in_child=_refuse_in_child)
