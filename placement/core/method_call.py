"""A guard in front of one method of one object."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

from placement.core.weak import reference


class MethodCall:
    """Stands in for a method of one object and calls a guard before it. It is for methods without
    torch hooks, or whose hooks run too late.

    Hooks of an optimizer inside another one run too late: the outer one may have reduced, unscaled
    and dropped gradients by then. A copy of the object is not guarded. A method that another
    library has put on the object itself is called, and `remove` restores it. The guard gets the
    object, the positional (tuple) and the keyword arguments (dict). It raises to refuse the call,
    and returns None or other arguments for it.
    """

    def __init__(self, guard: Callable[..., Any], target: Any, name: str) -> None:
        self._guard = guard
        self._target = reference(target)
        self._name = name
        bound = _Bound(self.run, target, name, vars(target).get(name))
        # weak: it may hold the object, which the handle, our holder, must not keep alive
        self._bound = weakref.ref(bound)
        vars(target)[name] = bound

    def run(
        self,
        method: Callable[..., Any],
        target: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Called in place of the method: run the guard, then the method, with other arguments where
        the guard returns them."""
        args, kwargs = self._guard(target, args, kwargs) or (args, kwargs)
        return method(*args, **kwargs)

    def remove(self) -> None:
        target = self._target()
        bound = self._bound()
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

    def __init__(
        self,
        run: Callable[..., Any],
        target: Any,
        name: str,
        theirs: Any,
    ) -> None:
        """`theirs`: the method that another library has put on the object itself, or None."""
        functools.update_wrapper(self, getattr(type(target), name) if theirs is None else theirs)
        self.run = run
        self._target = reference(target)
        self._name = name
        self.theirs = theirs

    def _call(self, self_: Any, *args: Any, **kwargs: Any) -> Any:
        plain = self.__wrapped__  # type: ignore[attr-defined] # by `update_wrapper`
        method = functools.partial(plain, self_) if self.theirs is None else plain
        if self_ is not self._target():
            return method(*args, **kwargs)
        return self.run(method, self_, args, kwargs)

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
        if self.theirs is None:
            return getattr, (self.__self__, self._name)
        return _itself, (self.theirs,)


def _itself(method: Any) -> Any:
    return method


def _unguarded(
    method: Callable[..., Any],
    _: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    return method(*args, **kwargs)
