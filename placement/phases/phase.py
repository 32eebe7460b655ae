"""Phases as the user sees them: `manager.phase(...)` returns a `PhaseContext`, and its `with` statement gives a `Phase`."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import TYPE_CHECKING, Any

from placement.core.errors import PhaseError
from placement.phases.open_phase import OpenPhase
from placement.phases.stack import PhaseStack

if TYPE_CHECKING:
    from placement.registration.handle import Handle


def checked(name: str) -> str:
    """Return a phase's name.

    Raises:
        TypeError: it is not a string.
    """
    if not isinstance(name, str):
        raise TypeError(f"a phase has a string for a name, not {name!r}")
    return name


def names_of(only: Iterable[str | Handle] | None) -> tuple[str, ...] | None:
    """Return `only=` as a tuple of names.

    Raises:
        TypeError: `only` is a single string (its letters would be taken for names), or contains neither names nor handles.
    """
    if isinstance(only, str):
        raise TypeError(f"only= takes a list of names: only=[{only!r}]")
    if only is None:
        return None
    names: tuple[Any, ...] = tuple(getattr(each, "name", each) for each in only)
    for name in names:
        if not isinstance(name, str):
            raise TypeError(f"only= takes names or handles, not {name!r}")
    return names


class Phase:
    """An open phase, from `with manager.phase(...) as phase`.

    This object does not keep the phase open, only the `with` statement does. The reason: an interrupt can end the statement before a
    line of `__exit__` has run. The phase is then left although the variable `phase` still exists.
    """

    _is_finalizing = staticmethod(sys.is_finalizing)
    """Whether the interpreter is exiting: nothing is left to move then, and the names of modules may be gone, so the class has its own."""

    def __init__(self, context: PhaseContext, name: str) -> None:
        self._weakly = weakref.ref(context)
        self._first_name = name

    def _context(self) -> PhaseContext | None:
        return self._weakly()

    @property
    def name(self) -> str:
        """The name of the phase, which `switch` changes. Before it is entered and after it is left: the first name."""
        context = self._context()
        return self._first_name if context is None or context._open is None else context._open.name

    def __repr__(self) -> str:
        context = self._context()
        return f"<phase {self.name!r}, {'open' if context is not None and context._open is not None else 'not open'}>"

    def __enter__(self) -> Phase:
        context = self._context()
        if context is None:
            raise self._entered_before()
        try:
            with context._stack.lock.attempt(begins=True):
                if context._was_entered:
                    raise self._entered_before()
                context._was_entered = True
                context._stack.enter(context, *context._wanted)
        except KeyboardInterrupt:  # it may come after the phase was entered
            context.abandon()
            raise
        return Phase(context, self._first_name)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._is_finalizing():
            return
        with self._in_open("leave", own=True, error=error) as context:
            context._stack.leave(context, error)

    def switch(self, name: str, *, only: Iterable[str | Handle] | None = None) -> None:
        """End this phase and begin phase `name` in its place, in one phase transition.

        Handles that both phases need stay on the device; the others are offloaded and loaded at the same time. If this fails, the phase
        stays open as it was.

        Args:
            name: one of `placement.PHASES`, or a key of `Settings.phases`.
            only: handles or their names that the new phase concerns, see `Manager.phase`.

        Raises:
            PhaseError: this phase is not open, or another phase is open inside it.
            PolicyError: the policy gave no valid plan for the new phase.
            DeviceMemoryError: the plan does not fit the budget.
            Exception: another error stopped the phase transition.
        """
        with self._in_open(f"switch to {name!r}") as context:
            context._stack.switch(context, checked(name), names_of(only))

    def keep(self, handle: Handle | str) -> None:
        """Keep a handle on the device when this phase ends, so that the next phase finds it there.

        If the next phase's plan does not want the handle on the device, it is offloaded then and counted as an expired keep.

        Args:
            handle: the handle or its name.

        Raises:
            PhaseError: this phase is not open, or no handle has this name.
        """
        context = self._require_open("keep a handle")
        context._stack.keep(context, handle if isinstance(handle, str) else handle.name)

    def done_with(self, handle: Handle | str) -> None:
        """Offload a handle now, because the rest of this phase needs it no more. Its memory is used for what the plan prefetches.

        An optimizer that steps the handle stays. Using the handle before the next phase that loads it raises `NotResidentError`. In a
        group each rank calls this for itself, or does not. Does nothing if the handle is off the device.

        Args:
            handle: the handle or its name.

        Raises:
            PhaseError: this phase is not open, another phase is open inside it, or no handle has this name.
            Exception: the handle could not be offloaded. It stays on the device.
        """
        context = self._require_open("be done with a handle")
        context._stack.done_with(context, handle if isinstance(handle, str) else handle.name)

    @contextmanager
    def _in_open(self, what: str, *, own: bool = False, error: BaseException | None = None) -> Iterator[PhaseContext]:
        """Try a phase transition of this open phase in the block. A failure is told to the group, see `TransitionLock.attempt`."""
        context = self._context()
        if context is None:
            raise self._was_over(what)
        with context._stack.lock.attempt(own=own, error=error):
            yield self._require_open(what)

    def _require_open(self, what: str) -> PhaseContext:
        context = self._context()
        if context is None:
            raise self._was_over(what)
        if context._open is None:
            raise PhaseError(f"cannot {what}: phase {self._first_name!r} is not open; it was left before or never entered")
        return context

    def _entered_before(self) -> PhaseError:
        return PhaseError(f"phase {self.name!r} was entered before; call manager.phase() again")

    def _was_over(self, what: str) -> PhaseError:
        return PhaseError(
            f"cannot {what}: phase {self._first_name!r} is not open, it was left before. A phase is left when the object that "
            "manager.phase() returned is garbage-collected: use a with statement, or keep that object until you call its __exit__()."
        )


class PhaseContext(Phase):
    """The object that `Manager.phase` returns, for a `with` statement. It can be entered once. The phase is left if it is collected."""

    _open: OpenPhase | None = None  # of the class, for `__del__` after an interrupt at the beginning of `__init__`

    def __init__(
        self,
        stack: PhaseStack,
        name: str,
        only: Iterable[str | Handle] | None,
        holder: Any,
        keeps_alive: object = None,
        in_any_order: bool = False,
    ) -> None:
        self.in_any_order = in_any_order
        super().__init__(self, name)
        self._manager = keeps_alive
        self._stack = stack
        try:
            self._wanted = (checked(name), names_of(only), holder)
        except Exception:
            with stack.lock.attempt(begins=True):
                raise
        self._was_entered = False

    def _context(self) -> PhaseContext:
        return self  # not through the weak reference, which a garbage collection may have cleared before it calls __del__

    @property
    def is_open(self) -> bool:
        """Whether the phase is open. The stack is asked too, because an interrupt can come before `_open` is cleared."""
        opened = self._open
        return opened is not None and not opened.is_abandoned and opened in self._stack.open_phases

    def abandon(self) -> None:
        """Leave the phase, if it is open, where nothing may be raised: see `PhaseStack.abandon`."""
        if self._open is not None and not self._is_finalizing():
            self._stack.abandon(self)

    def __del__(self) -> None:
        self.abandon()
