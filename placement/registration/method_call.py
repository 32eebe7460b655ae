"""A guard in front of a method of somebody else's object.

torch steps an optimizer without state to create its state, when it is asked for the optimizer's state dict.
`torch.distributed.checkpoint.state_dict` makes this step, and so does code built on it (VeOmni's `MultiOptimizer`). It gives every
parameter a gradient of zeros, sets every learning rate to 0, steps, and sets the rates back. Adam's step counters are 1 afterwards, so
training goes on otherwise than without the state dict. If a guard refuses the step, the rates stay at 0.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from placement.tensors.plain import reference


class MethodCall:
    """Stands in for a method of one object and calls a guard before it. It is for methods without torch hooks, or whose hooks run too late.

    Hooks of an optimizer inside another one run too late: the outer one may have reduced, unscaled and dropped gradients by then. A copy of
    the object is not guarded. If somebody else has put a method on the object itself, that method is called, and `remove` restores it.

    Args:
        guard: called with the object, the positional arguments (tuple) and the keyword arguments (dict); it raises to refuse the call,
            and returns None or other arguments for it.
        target: the object.
        name: the method's name.
    """

    def __init__(self, guard: Callable[..., Any], target: Any, name: str) -> None:
        self._guard, self._target, self._name = guard, reference(target), name
        theirs = vars(target).get(name)
        plain = getattr(type(target), name) if theirs is None else theirs

        def call(self_: Any, *args: Any, **kwargs: Any) -> Any:
            method = functools.partial(plain, self_) if theirs is None else plain
            return self.run(method, self_, args, kwargs) if self_ is self._target() else method(*args, **kwargs)

        bound = _Bound(call, plain, target, name, theirs)
        self._bound = weakref.ref(bound)  # weak: it may hold the object, which the handle, our holder, must not keep alive
        vars(target)[name] = bound

    def run(self, method: Callable[..., Any], target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Called in place of the method: run the guard, then the method, with other arguments where the guard returns them."""
        changed = self._guard(target, args, kwargs)
        if changed is not None:
            args, kwargs = changed
        return method(*args, **kwargs)

    def remove(self) -> None:
        target, bound = self._target(), self._bound()
        if target is None or bound is None or vars(target).get(self._name) is not bound:
            return
        if bound.theirs is None:
            del vars(target)[self._name]
        else:
            vars(target)[self._name] = bound.theirs


class _Bound:
    """A bound method that does not keep its object alive. An ordinary one in the object's own fields would, until the next collection."""

    def __init__(self, function: Callable[..., Any], plain: Callable[..., Any], target: Any, name: str, theirs: Any) -> None:
        functools.update_wrapper(self, plain)
        self.__func__ = function
        self._target, self._name, self.theirs = reference(target), name, theirs

    @property
    def __self__(self) -> Any:
        return self._target()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.__func__(self.__self__, *args, **kwargs)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """Make it the copy's own method when it is copied or pickled with its object."""
        return (getattr, (self.__self__, self._name)) if self.theirs is None else (_itself, (self.theirs,))


def _itself(method: Any) -> Any:
    return method


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
