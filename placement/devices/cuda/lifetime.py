"""Release driver resources when the objects that own them die."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from placement.core.interrupts import deferred

Life = weakref.ref[Any]
"""A weak reference to an object that owns a driver resource."""
End = Callable[[Life], bool]


class Lives:
    """The ledger of every object that owns a driver resource. It lives as long as they do.

    An object may die at any time: on another thread while the driver works, or here in the middle of another release, by a garbage
    collection. A number that the driver has released may soon belong to another resource. So each life is ended by exactly one call.
    """

    def __init__(self) -> None:
        self.owned: dict[Life, int] = {}
        """Bytes by object. Who removes an entry releases the bytes."""
        self._later: list[tuple[Life, End]] = []

    def add(self, thing: object, nbytes: int, end: End) -> None:
        """Own `nbytes` for as long as `thing` lives. `end` releases them, or returns False to be called again later."""
        life = weakref.ref(thing)
        self.owned[life] = nbytes
        weakref.finalize(thing, self._end, life, end).atexit = False

    def _end(self, life: Life, end: End) -> None:
        with deferred():
            if life in self.owned and not end(life):
                self._later.append((life, end))

    def collect(self) -> None:
        """Release the resources of dead objects that could not be released when they died."""
        for _ in range(len(self._later)):
            try:
                dead = self._later.pop(0)
            except IndexError:  # another thread took it
                return
            self._end(*dead)
