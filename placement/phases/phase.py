"""Phases as the user sees them: `manager.phase(...)` returns a `PhaseContext`, and its `with` statement gives a `Phase`.

A `Hold` is a phase without a block. Holds end in any order.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

from placement.core.errors import PhaseError
from placement.phases.open_phases import OpenPhase
from placement.phases.stack import PhaseStack

if TYPE_CHECKING:
    from placement.registration.handle import Handle

Item = TypeVar("Item")


def checked(name: str) -> str:
    """Return a phase's name. Raises TypeError if it is not a string."""
    if not isinstance(name, str):
        raise TypeError(f"a phase has a string for a name, not {name!r}")
    return name


def names_of(only: Iterable[str | Handle] | None) -> tuple[str, ...] | None:
    """`only=` as a tuple of names. Raises TypeError: it is one string, whose letters would be taken for names, or has anything else."""
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

    def __init__(self, stack: PhaseStack, opened: OpenPhase) -> None:
        self._stack = stack
        self.phase = opened

    @property
    def name(self) -> str:
        """The name of the phase, which `switch` changes."""
        return self.phase.name

    @property
    def is_open(self) -> bool:
        """Whether the phase is open."""
        return self.phase in self._stack.phases.all and not self.phase.is_abandoned

    def __repr__(self) -> str:
        return f"<phase {self.name!r}, {'open' if self.is_open else 'not open'}>"

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
        with self._stack.lock.attempt():
            self._stack.switch(self.phase, checked(name), names_of(only))

    def keep(self, handle: Handle | str) -> None:
        """Keep a handle on the device when this phase ends, so that the next phase finds it there.

        If the next phase's plan does not want the handle on the device, it is offloaded then and counted as an expired keep.

        Args:
            handle: the handle or its name.

        Raises:
            PhaseError: this phase is not open, or no handle has this name.
        """
        self._stack.phases.require_open(self.phase, "keep a handle")
        self.phase.kept.add(self._stack.known(handle).name)

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
        self._stack.done_with(self.phase, handle)


class PhaseContext(Phase):
    """The object that `Manager.phase` returns, for a `with` statement. It can be entered once. The phase is left if it is collected."""

    _is_finalizing = staticmethod(sys.is_finalizing)
    """Whether the interpreter is exiting: nothing is left to move then, and the names of modules may be gone, so the class has its own."""
    _was_entered = False

    def __init__(
        self,
        stack: PhaseStack,
        name: str,
        only: Iterable[str | Handle] | None,
        holder: Any,
        keeps_alive: object = None,
        in_any_order: bool = False,
    ) -> None:
        self._manager = keeps_alive
        try:
            super().__init__(stack, OpenPhase(checked(name), names_of(only), holder, in_any_order))
        except Exception:
            with stack.lock.attempt(begins=True):  # so that the other ranks hear of it
                raise

    def __enter__(self) -> Phase:
        try:
            with self._stack.lock.attempt(begins=True):
                if self._was_entered:
                    raise PhaseError(f"phase {self.name!r} was entered before; call manager.phase() again")
                self._was_entered = True
                self._stack.enter(self.phase)
        except (KeyboardInterrupt, SystemExit):  # an interrupt may come after the phase was entered
            self.abandon()
            raise
        return Phase(self._stack, self.phase)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._is_finalizing():
            return
        if isinstance(error, GeneratorExit) and self._was_entered and self.phase not in self._stack.phases.all:
            return  # an error that passed through a phase around it has left it
        with self._stack.lock.attempt(own=True, error=error):
            self._stack.leave(self.phase, error)

    def abandon(self) -> None:
        """Leave the phase, if it is open, where nothing may be raised (in `__del__`): now, or in the next phase transition."""
        if self._was_entered and not self._is_finalizing():
            self._stack.abandon(self.phase)

    def __del__(self) -> None:
        self.abandon()


class Hold(PhaseContext):
    """An open phase, from `manager.hold(...)`, which ends when it is released: from any thread or task, and in any order with other holds.

    While several holds are open, the latest that concerns a handle decides about it. A hold whose object is garbage-collected is released.
    """

    def __init__(self, stack: PhaseStack, name: str, only: Iterable[str | Handle] | None, keeps_alive: object) -> None:
        super().__init__(stack, name, only, None, keeps_alive, in_any_order=True)
        super().__enter__()

    def __repr__(self) -> str:
        return f"<hold {self.name!r}, {'open' if self.is_open else 'released'}>"

    def release(self, error: BaseException | None = None) -> None:
        """End the phase. Handles that no other open phase wants on the device are offloaded. Does nothing if it was released before.

        Handles that this hold had displaced come back at the next phase transition at which a plan wants them, not now: the phases that
        are still open may use the memory.

        Args:
            error: the exception that ended the phase, if any. Failures of leaving then become notes on it, instead of being raised.

        Raises:
            Exception: a handle could not be moved where it belongs. The hold is released all the same.
        """
        if self.is_open:
            super().__exit__(None if error is None else type(error), error, None)

    def around(self, items: Iterable[Item]) -> Iterator[Item]:
        """Give the hold to an iterator over `items`, which releases it: for a generator that is returned and reads the device.

        The hold ends when the iterator is exhausted, raises, is closed, or is garbage-collected, even if nobody has begun to iterate.

        Raises:
            TypeError: `items` is not iterable. The hold is released.
        """
        try:
            return Around(self, iter(items))
        except BaseException as error:
            self.release(error)
            raise

    def __enter__(self) -> Hold:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.release(error)


class Around(Iterator[Item]):
    """The iterator that `Hold.around` returns."""

    def __init__(self, hold: Hold, items: Iterator[Item]) -> None:
        self.hold = hold
        self._items = items

    def __next__(self) -> Item:
        try:
            return next(self._items)
        except StopIteration:
            self.hold.release()
            raise
        except BaseException as error:
            self.hold.release(error)
            raise

    def close(self) -> None:
        """Close the iterator inside, and release the hold. Idempotent."""
        try:
            self.close_items()
        finally:
            self.hold.release()

    def close_items(self) -> None:
        if (close := getattr(self._items, "close", None)) is not None:
            close()

    def __del__(self) -> None:
        try:
            self.close_items()  # first: it may refer to memory that the end of the hold offloads
        finally:
            self.hold.abandon()
