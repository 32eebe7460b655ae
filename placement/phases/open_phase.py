"""The phases that are open: who holds each, what it asked for, and how they nest.

A phase belongs to the thread or asyncio task that opened it. `Manager.enter` opens one that belongs to nobody, for frameworks
whose hooks run in different threads.
"""

from __future__ import annotations

import asyncio
import threading
from dataclasses import dataclass, field
from typing import Any, Protocol

from placement.core.errors import PhaseError
from placement.core.states import Plan


def here() -> Any:
    """The asyncio task that runs now, or the thread where there is none."""
    try:
        task = asyncio.current_task()
    except RuntimeError:
        task = None
    return task if task is not None else threading.current_thread()


def describe(holder: Any) -> str:
    if holder is None:
        return "enter()"
    return f"task {holder.get_name()!r}" if isinstance(holder, asyncio.Task) else f"thread {holder.name!r}"


@dataclass(eq=False, slots=True)
class OpenPhase:
    """One open phase. Replaced as a whole by a switch, so that the stack changes by single stores."""

    name: str
    only: tuple[str, ...] | None
    plan: Plan
    holder: Any
    kept: set[str] = field(default_factory=set)
    torch_reserved_bytes: int = 0
    """What torch's allocator had at the entry."""
    is_abandoned: bool = False
    """Its `PhaseContext` was dropped while phases were open inside; it closes when they do."""


class Opener(Protocol):
    """What opens a phase and closes it: a `PhaseContext`."""

    _open: OpenPhase | None

    @property
    def name(self) -> str: ...


def innermost(stack: tuple[OpenPhase, ...]) -> str | None:
    """The name of the phase that encloses what lies above these; None outside every phase."""
    return stack[-1].name if stack else None


def check_holder(stack: tuple[OpenPhase, ...], name: str) -> None:
    """Phases nest in one thread or task; a task also in what the thread that runs its loop had opened before.

    Raises:
        PhaseError: another thread or task holds a phase.
    """
    me = here()
    for each in stack:
        if each.holder is not None and each.holder is not me and each.holder is not threading.current_thread():
            raise PhaseError(
                f"{describe(me)} wants phase {name!r} while {describe(each.holder)} holds phase {each.name!r}: one manager is in one phase "
                "at a time. Use enter() and leave() if one phase is meant to span threads."
            )
