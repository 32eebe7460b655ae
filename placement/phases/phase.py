"""The objects that `manager.phase(...)` and its `with` statement give."""

from __future__ import annotations

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
    """A phase's name.

    Raises:
        TypeError: it is no string.
    """
    if not isinstance(name, str):
        raise TypeError(f"a phase has a string for a name, not {name!r}")
    return name


def names_of(only: Iterable[str | Handle] | None) -> tuple[str, ...] | None:
    """`only=` as a tuple of names.

    Raises:
        TypeError: a single string, whose letters would be taken for names, or what is neither a name nor a handle.
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
    """An open phase, as `with manager.phase(...) as phase` gives it.

    It does not hold the phase open. The `with` statement alone does: an interrupt can end that before a line of `__exit__` has run, and
    then the phase is left as soon as the statement is gone, although the caller's variable lives on.
    """

    def __init__(self, context: PhaseContext, name: str) -> None:
        self._weakly = weakref.ref(context)
        self._first_name = name

    def _context(self) -> PhaseContext | None:
        return self._weakly()

    @property
    def name(self) -> str:
        """The phase that is open now, after every switch; the first one before and afterwards."""
        context = self._context()
        return self._first_name if context is None or context._open is None else context._open.name

    def __repr__(self) -> str:
        context = self._context()
        return f"<phase {self.name!r}, {'open' if context is not None and context._open is not None else 'not open'}>"

    def __enter__(self) -> Phase:
        context = self._context()
        if context is None:
            raise self._entered_before()
        with context._stack.lock.attempt(begins=True):
            if context._was_entered:
                raise self._entered_before()
            context._was_entered = True
            context._stack.enter(context, *context._wanted)
        return Phase(context, self._first_name)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        with self._in_open("leave", own=True, error=error) as context:
            context._stack.leave(context, error)

    def switch(self, name: str, *, only: Iterable[str | Handle] | None = None) -> None:
        """End this phase and begin `name` in one phase transition: what both need stays, and both directions of the link are used.

        Raises:
            PhaseError: the phase is not open, or another is open inside it.
            Exception: what stopped the phase transition; this phase goes on as it was.
        """
        with self._in_open(f"switch to {name!r}") as context:
            context._stack.switch(context, checked(name), names_of(only))

    def keep(self, handle: Handle | str) -> None:
        """Leave a handle on the device at the end of this phase, for the next one.

        The next phase's plan takes it over, or it is offloaded there and counted as an expired keep.
        """
        context = self._require_open("keep a handle")
        context._stack.keep(context, handle if isinstance(handle, str) else handle.name)

    @contextmanager
    def _in_open(self, what: str, *, own: bool = False, error: BaseException | None = None) -> Iterator[PhaseContext]:
        """While one phase transition of the open phase is tried. The ranks of a group hear of whatever stops it, see
        `PhaseStack.attempt`."""
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
            f"cannot {what}: phase {self._first_name!r} is not open, it was left before. It ends when nobody holds what "
            "manager.phase() returned: a with statement does; who calls __enter__() by hand has to, until __exit__()."
        )


class PhaseContext(Phase):
    """A phase before it is entered and while it is open. Made by `Manager.phase`; entered once; left when nobody holds it any more."""

    def __init__(self, stack: PhaseStack, name: str, only: Iterable[str | Handle] | None, holder: Any, keeps_alive: object = None) -> None:
        self._open: OpenPhase | None = None
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
        return self  # also where a collection has cleared the weak references to it already

    def __del__(self) -> None:
        if self._open is not None:
            self._stack.abandon(self)
