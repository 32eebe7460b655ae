"""The threads of placement's own that a phase transition may wait for."""

from __future__ import annotations

import threading
from collections.abc import Callable


class BackgroundThread(threading.Thread):
    """A daemon thread that phase transitions may wait for: what a garbage collection drops on it must not begin one there."""

    def __init__(self, name: str, target: Callable[[], object]) -> None:
        super().__init__(name=name, target=target, daemon=True)


def is_background() -> bool:
    """Whether the calling thread is one of these."""
    return isinstance(threading.current_thread(), BackgroundThread)
