"""Release driver resources when the objects that own them die. An interrupt cannot prevent that.

A signal handler may cut a weak reference's callback short, and the callback is never called again. So the callback is `deque.append`
itself, which no bytecode can interrupt. `collect` does the work: right afterwards if nothing comes in between, else at the device's
next call.
"""

from __future__ import annotations

import collections
import contextlib
import operator
import weakref
from collections.abc import Callable
from typing import Any


def uninterrupted(*calls: Callable[[], object]) -> None:
    """Make all calls in order without bytecode in between, so that no signal handler can raise between two of them."""
    collections.deque(map(operator.call, calls), maxlen=0)


class Life(weakref.ref[Any]):
    """A weak reference to an object that owns a driver resource."""

    __slots__ = ("end", "nbytes")
    end: Callable[[Life], bool]
    nbytes: int


_WAKERS: set[weakref.ref[Any]] = set()
"""One weak reference for each object, whose callback triggers `collect` at the object's death. Global, because a ledger may die before its
objects or in the same garbage collection, which would then skip callbacks of its own. (`weakref.finalize` takes ten times as long.)"""


class _Turn:
    """One call of `collect`."""


class Lives:
    """The ledger of every object that owns a driver resource, alive or dead."""

    def __init__(self) -> None:
        self.owned: dict[weakref.ref[Any], int] = {}
        """Bytes by object. `end` removes the entry in the same uninterrupted step that releases the bytes."""
        self._dead: collections.deque[Life] = collections.deque()
        self._turns: dict[Life, weakref.ref[_Turn]] = {}
        """The call that is about to end a life. Driver calls let other threads run, and a released number may soon belong to another
        resource, so no life may be ended twice. A call that was interrupted no longer holds its turn."""

    def add(self, thing: object, nbytes: int, end: Callable[[Life], bool]) -> None:
        """Own `nbytes` for as long as `thing` lives. `end` releases them, or returns False to be called again later."""
        # Callbacks run from the newest reference to the oldest: first the one that fills the list, then the one that works it off.
        _WAKERS.add(weakref.ref(thing, self._wake))
        life = Life(thing, self._dead.append)
        life.nbytes, life.end = nbytes, end
        self.owned[life] = nbytes

    def _wake(self, waker: weakref.ref[Any]) -> None:
        _WAKERS.discard(waker)
        self.collect()

    def collect(self) -> None:
        """Release the resources of dead objects. Safe to repeat after an interrupt."""
        if not self._dead:
            return
        turn = _Turn()
        mine = weakref.ref(turn)
        for life in [*self._dead]:
            held = self._turns.setdefault(life, mine)
            if held is not mine and held() is not None:
                continue
            self._turns[life] = mine
            if life not in self.owned or life.end(life):
                with contextlib.suppress(ValueError):  # a nested call has removed it already
                    self._dead.remove(life)
            self._turns.pop(life, None)
