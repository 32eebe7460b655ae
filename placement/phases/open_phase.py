"""Open phases: their holder, arguments and plan, and the check that they nest.

A phase belongs to the thread or asyncio task that opened it. `Manager.enter` opens a phase that belongs to none, for frameworks
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
    """The asyncio task that runs now; outside asyncio the current thread."""
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
    """One open phase. A switch replaces the whole object, so that an interrupt never finds a half-changed phase."""

    name: str
    only: tuple[str, ...] | None
    plan: Plan
    holder: Any
    kept: set[str] = field(default_factory=set)
    torch_reserved_bytes: int = 0
    """Device bytes that torch's allocator had reserved when the phase was entered."""
    in_any_order: bool = False
    """Whether the phase may be left while others are open inside it: it is a hold."""
    is_abandoned: bool = False
    """Whether its `PhaseContext` was garbage-collected. The phase is left as soon as no other phase is open inside it."""


class Opener(Protocol):
    """The interface of `PhaseContext`, which opens and closes a phase."""

    _open: OpenPhase | None
    in_any_order: bool

    @property
    def name(self) -> str: ...


def innermost(stack: tuple[OpenPhase, ...]) -> str | None:
    """The name of the innermost of these phases; None if there is none."""
    return stack[-1].name if stack else None


def check_holder(stack: tuple[OpenPhase, ...], name: str) -> None:
    """Refuse to open phase `name` unless all open phases belong to this task, to this thread, or to nobody.

    Raises:
        PhaseError: another thread or task holds a phase.
    """
    me = here()
    for each in stack:
        if each.holder is not None and each.holder is not me and each.holder is not threading.current_thread():
            raise PhaseError(
                f"{describe(me)} wants phase {name!r} while {describe(each.holder)} holds phase {each.name!r}: one manager is in one phase "
                "at a time. Use enter() and leave() for a phase that spans threads."
            )
