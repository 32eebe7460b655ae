"""What the driver holds on account of our objects: it goes when the object dies, and an interrupt cannot make it stay.

A weak reference's callback may be cut short by a signal handler, and is never called again. So the callback that counts is
`deque.append` itself, which no bytecode can interrupt; the work is done by `collect`, right after if nothing comes in between,
else at the next call of the device.
"""

from __future__ import annotations

import collections
import contextlib
import operator
import weakref
from collections.abc import Callable
from typing import Any


def uninterrupted(*calls: Callable[[], object]) -> None:
    """Call all in order without bytecode in between, so that no signal handler can raise between two of them."""
    collections.deque(map(operator.call, calls), maxlen=0)


class Life(weakref.ref[Any]):
    """One object that the driver holds something for."""

    __slots__ = ("end", "nbytes")
    end: Callable[[Life], bool]
    nbytes: int


_WAKERS: set[weakref.ref[Any]] = set()
"""One for each object, whose callback has the work done at its death. Here, because a ledger may die before what it is about, or with it
in one collection, which then calls no callback of the ledger's own. (`weakref.finalize` does the same and takes ten times as long.)"""


class _Turn:
    """One call of `collect`."""


class Lives:
    """The ledger: every object of ours for which the driver holds something, alive or dead."""

    def __init__(self) -> None:
        self.owned: dict[weakref.ref[Any], int] = {}
        """Bytes by object. `end` takes the entry out in the same uninterrupted step that gives the bytes back."""
        self._dead: collections.deque[Life] = collections.deque()
        self._turns: dict[Life, weakref.ref[_Turn]] = {}
        """Which call is about to end which life: driver calls give other threads a turn, and a number of the driver's that was given
        back may be somebody else's by then. A call that an interrupt has ended holds none."""

    def add(self, thing: object, nbytes: int, end: Callable[[Life], bool]) -> None:
        """Own `nbytes` for as long as `thing` lives. `end` gives them back, or returns False to be called again later."""
        # Callbacks run from the newest reference to the oldest: the list first, then whoever works it off.
        _WAKERS.add(weakref.ref(thing, self._wake))
        life = Life(thing, self._dead.append)
        life.nbytes, life.end = nbytes, end
        self.owned[life] = nbytes

    def _wake(self, waker: weakref.ref[Any]) -> None:
        _WAKERS.discard(waker)
        self.collect()

    def collect(self) -> None:
        """Give back what belonged to objects that are dead. Repeating it after an interrupt is safe."""
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
                with contextlib.suppress(ValueError):  # a nested call was faster
                    self._dead.remove(life)
            self._turns.pop(life, None)
