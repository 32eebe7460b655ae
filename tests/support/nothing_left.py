"""A check at the end of every test: what its managers declare is so, and nothing lies on the device
that does not belong there.

The managers that a test makes are known because it makes them under `watched`. The last few of them
are held to the end of the test, with what they registered: the locals of a test are gone by the
time anybody else could look. A test file that imports gc or weakref looks at what is collected, so
nothing of it is held, and what is still alive at the end is checked.
"""

from __future__ import annotations

import functools
import gc
import weakref
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from placement import Manager
from placement.testing import Faults, assert_nothing_resident

MOST_HELD = 8
"""A sweep makes thousands."""


class Watched:
    """The managers that were made meanwhile."""

    def __init__(self, holds: bool) -> None:
        self._holds = holds
        self._made: deque[weakref.ref[Manager]] = deque(maxlen=MOST_HELD)
        self._held: deque[Any] = deque(maxlen=MOST_HELD)
        self._targets: weakref.WeakKeyDictionary[Manager, list[Any]] = weakref.WeakKeyDictionary()

    def note_made(self, manager: Manager) -> None:
        self._made.append(weakref.ref(manager))
        if self._holds:
            targets: list[Any] = []
            self._targets[manager] = targets
            self._held.append((manager, targets))

    def note_registered(self, manager: Manager, target: Any) -> None:
        if (targets := self._targets.get(manager)) is not None:
            targets.append(target)

    def managers(self) -> Iterator[Manager]:
        """Those that live, made last first."""
        if not self._holds and any(each() is not None for each in self._made):
            gc.collect()  # what only garbage holds has lost a part of its objects
        for each in reversed(self._made):
            if (manager := each()) is not None:
                yield manager

    def clear(self) -> None:
        self._held.clear()


@contextmanager
def watched(holds: bool) -> Iterator[Watched]:
    """Know every manager that is made inside."""
    seen = Watched(holds)
    made, registered = Manager.__init__, Manager.register

    @functools.wraps(made)
    def make(self: Manager, *arguments: Any, **keywords: Any) -> None:
        made(self, *arguments, **keywords)
        seen.note_made(self)

    @functools.wraps(registered)
    def register(self: Manager, name: str, target: Any, **keywords: Any) -> Any:
        handle = registered(self, name, target, **keywords)
        seen.note_registered(self, target)
        return handle

    Manager.__init__, Manager.register = make, register  # type: ignore[method-assign]
    try:
        yield seen
    finally:
        Manager.__init__, Manager.register = made, registered  # type: ignore[method-assign]
        seen.clear()


def check(manager: Manager) -> None:
    """Outside every phase: nothing disagrees, and every handle is where the idle plan wants it.

    A manager that is closed, has a phase open or a broken handle is left alone.

    Raises:
        IntegrityError, AssertionError: what is not as it should be.
    """
    handles = manager.handles
    if (
        not handles
        or manager.snapshot().phases
        or any(handle.broken for handle in handles.values())
    ):
        return
    if isinstance(manager.device, Faults):
        manager.device.clear()  # what the test wanted to fail has failed
    manager.check_integrity()
    plan = manager._stack.phases.base_plan()
    assert_nothing_resident(
        manager, except_for=[name for name in handles if plan.on_device(name)], allow_foreign=True
    )
    places = {
        name: (handle.state, plan[name])
        for name, handle in handles.items()
        if handle.is_built and not handle.external
    }
    assert {name: place for name, place in places.items() if place[0] is not place[1]} == {}
