"""Holds: phases without a block, which end in any order."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from types import TracebackType
from typing import TypeVar

from placement.phases.phase import PhaseContext, Transitions
from placement.registration.handle import Handle

Item = TypeVar("Item")


class Hold(PhaseContext):
    """An open phase, from `manager.hold(...)`, which ends when it is released: from any thread or
    task, and in any order with other holds.

    While several holds are open, the latest that concerns a handle decides about it. A hold whose
    object is garbage-collected is released.
    """

    def __init__(
        self,
        stack: Transitions,
        name: str,
        only: Iterable[str | Handle] | None,
        keeps_alive: object,
    ) -> None:
        super().__init__(stack, name, only, None, keeps_alive, in_any_order=True)
        super().__enter__()

    def __repr__(self) -> str:
        return f"<hold {self.name!r}, {'open' if self.is_open else 'released'}>"

    def release(self, error: BaseException | None = None) -> None:
        """End the phase. Handles that no other open phase wants on the device are offloaded. Does
        nothing if it was released before.

        Handles that this hold had displaced come back at the next phase transition at which a plan
        wants them, not now: the phases that are still open may use the memory.

        Args:
            error: the exception that ended the phase, if any. Failures of leaving then become notes
                on it, instead of being raised.

        Raises:
            Exception: a handle could not be moved where it belongs. The hold is released all the
                same.
        """
        if self.is_open:
            super().__exit__(None if error is None else type(error), error, None)

    def around(self, items: Iterable[Item]) -> Iterator[Item]:
        """Give the hold to an iterator over `items`, which releases it: for a generator that is
        returned and reads the device.

        The hold ends when the iterator is exhausted, raises, is closed, or is garbage-collected,
        even if nobody has begun to iterate.

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

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
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
