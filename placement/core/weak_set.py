"""A set of weakly held objects that may be walked while others change it."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Generic, TypeVar

T = TypeVar("T")


class WeakIdSet(Generic[T]):
    """Objects by identity, as long as someone else holds them.

    `weakref.WeakSet` raises when one is added in the middle of a walk: by a thread with a manager of its own, or by a collection, which may
    drop a manager and so give its tensors memory again. Here each change is one operation of a dictionary, and a walk is over a copy.
    No lock: an interrupt must not leave it held.
    """

    def __init__(self) -> None:
        self._references: dict[int, weakref.ref[T]] = {}

    def add(self, value: T) -> None:
        key, references = id(value), self._references
        references[key] = weakref.ref(value, lambda _: references.pop(key, None))

    def discard(self, value: T) -> None:
        self._references.pop(id(value), None)

    def clear(self) -> None:
        self._references.clear()

    def __contains__(self, value: T) -> bool:
        return id(value) in self._references

    def __iter__(self) -> Iterator[T]:
        return iter([value for reference in list(self._references.values()) if (value := reference()) is not None])
