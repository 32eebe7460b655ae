"""The threads of placement's own that a phase transition may wait for."""

from __future__ import annotations

import threading
from collections.abc import Callable


class BackgroundThread(threading.Thread):
    """A daemon thread that does a part of the work of phase transitions. A garbage collection can happen on it. What is collected there
    must not begin a phase transition on it, which may wait for this very thread."""

    def __init__(self, name: str, target: Callable[[], object]) -> None:
        super().__init__(name=name, target=target, daemon=True)


def is_background() -> bool:
    """Whether the calling thread is one of these."""
    return isinstance(threading.current_thread(), BackgroundThread)
