"""Weak references to objects by identity, safe against a garbage collection at any moment."""

from __future__ import annotations

import functools
import itertools
import operator
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Generic, TypeVar

_T = TypeVar("_T")

_ALIVE: Any = weakref.ref.__call__
_IS_GONE = functools.partial(operator.is_, None)


def reference(obj: Any) -> Callable[[], Any]:
    """A weak reference, so that the holder does not keep the object alive; a strong one where the
    class allows no weak references."""
    try:
        return weakref.ref(obj)
    except TypeError:
        return lambda: obj


class WeakIdSet(Generic[_T]):
    """A set of objects by identity. It does not keep them alive.

    `weakref.WeakSet` raises when an object is added during an iteration. Another thread's manager
    may add one, and so may a garbage collection that drops a manager, whose tensors then get
    ordinary memory. Here each change is one dictionary operation, and an iteration walks a copy. A
    lock would not help: the collection may come on the thread that holds it.
    """

    def __init__(self) -> None:
        self._references: dict[int, weakref.ref[_T]] = {}

    def add(self, value: _T) -> None:
        key, references = id(value), self._references
        references[key] = weakref.ref(value, lambda _: references.pop(key, None))

    def update(self, values: Iterable[_T]) -> None:
        for value in values:
            self.add(value)

    def discard(self, value: _T) -> None:
        self._references.pop(id(value), None)

    def clear(self) -> None:
        self._references.clear()

    def __contains__(self, value: _T) -> bool:
        return id(value) in self._references

    def __bool__(self) -> bool:
        return bool(self._references)

    def __iter__(self) -> Iterator[_T]:
        # there may be tens of thousands, so C does the work
        alive = map(_ALIVE, list(self._references.values()))
        return iter(list(itertools.filterfalse(_IS_GONE, alive)))
