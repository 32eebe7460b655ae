"""Host copies that somebody reads in another thread, such as a checkpoint's writer.

What would overwrite or give up a host copy waits until it has been given back. A load only reads it, so that training can begin
while a checkpoint is being written.
"""

from __future__ import annotations

import threading


class HostReadLocks:
    """The loans of one object's host copy. Lent and waited for by the thread that moves the object, given back by any."""

    def __init__(self) -> None:
        self._open: tuple[HostReadLock, ...] = ()

    def lend(self) -> HostReadLock:
        """The host copy will be read until the loan is given back."""
        loan = HostReadLock()
        self._open = (*(each for each in self._open if not each.is_over), loan)
        return loan

    def wait(self) -> None:
        """Return when nobody reads the host copy any more. Interruptible; what was lent stays lent then."""
        for loan in self._open:
            loan.wait()
        self._open = ()


class HostReadLock:
    """The right to read one host copy."""

    def __init__(self) -> None:
        self._over = threading.Event()

    @property
    def is_over(self) -> bool:
        return self._over.is_set()

    def give_back(self) -> None:
        """Done reading. Idempotent, from any thread."""
        self._over.set()

    def wait(self) -> None:
        self._over.wait()
