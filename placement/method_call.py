"""A guard in front of a method of somebody else's object."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any

from placement.adapters.tensors import reference


class MethodCall:
    """In place of a method for which torch has no hooks, or runs them too late: the guard comes before all of it.

    By the time that an optimizer inside another asks its hooks, a step may have reduced, unscaled and let go of gradients. A copy of
    the object is not guarded.

    Args:
        after: given the object and what the method returned, what to return instead; None for no change.
    """

    def __init__(self, guard: Callable[..., None], target: Any, name: str, *, after: Callable[[Any, Any], Any] | None = None) -> None:
        mine, plain = reference(target), getattr(type(target), name)

        @functools.wraps(plain)
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            if self is mine():
                guard(self, args, kwargs)
            found = plain(self, *args, **kwargs)
            shown = after(self, found) if after is not None and self is mine() else None
            return found if shown is None else shown

        self._target, self._name, self._call = mine, name, call
        target.__dict__[name] = types.MethodType(call, target)

    def remove(self) -> None:
        target = self._target()
        if target is not None and getattr(vars(target).get(self._name), "__func__", None) is self._call:
            del target.__dict__[self._name]
