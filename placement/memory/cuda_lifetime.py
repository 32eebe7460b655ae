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

    __slots__ = ("end", "nbytes", "worker")
    end: Callable[[Life], bool]
    nbytes: int
    worker: weakref.ref[Any]
    """A second reference, whose callback has the work done. `weakref.finalize` takes ten times as long, a hundred times a load."""


class Lives:
    """The ledger: every object of ours for which the driver holds something, alive or dead."""

    def __init__(self) -> None:
        self.owned: dict[weakref.ref[Any], int] = {}
        """Bytes by object. `end` takes the entry out in the same uninterrupted step that gives the bytes back."""
        self._dead: collections.deque[Life] = collections.deque()

    def add(self, thing: object, nbytes: int, end: Callable[[Life], bool]) -> None:
        """Own `nbytes` for as long as `thing` lives. `end` gives them back, or returns False to be called again later."""
        # Callbacks run from the newest reference to the oldest: the list first, then whoever works it off.
        worker = weakref.ref(thing, self._work_off)
        life = Life(thing, self._dead.append)
        life.nbytes, life.end, life.worker = nbytes, end, worker
        self.owned[life] = nbytes

    def _work_off(self, _: weakref.ref[Any]) -> None:
        self.collect()

    def collect(self) -> None:
        """Give back what belonged to objects that are dead. Repeating it after an interrupt is safe."""
        for life in list(self._dead):
            if life not in self.owned or life.end(life):
                with contextlib.suppress(ValueError):  # a nested call was faster
                    self._dead.remove(life)
