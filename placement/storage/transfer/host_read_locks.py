"""Locks on host copies that another thread reads, such as the writer of a checkpoint.

An operation that would overwrite or give up a host copy waits until every lock on it has been given back. A load does not wait, because
it only reads the host copy. So training can begin while a checkpoint is being written.
"""

from __future__ import annotations

import threading


class HostReadLocks:
    """The read locks of one object's host copy. The thread that moves the object lends them and waits; any thread gives them back."""

    def __init__(self) -> None:
        self._open: tuple[HostReadLock, ...] = ()

    def lend(self) -> HostReadLock:
        """Lock the host copy for reading until the returned lock is given back."""
        loan = HostReadLock()
        self._open = (*(each for each in self._open if not each.is_over), loan)
        return loan

    def wait(self) -> None:
        """Wait until nobody reads the host copy any more. If interrupted, every lock stays as it is."""
        for loan in self._open:
            loan.wait()
        self._open = ()


class HostReadLock:
    """The right to read one host copy until `give_back`."""

    def __init__(self) -> None:
        self._over = threading.Event()

    @property
    def is_over(self) -> bool:
        return self._over.is_set()

    def give_back(self) -> None:
        """End the right to read. Idempotent; any thread may call it."""
        self._over.set()

    def wait(self) -> None:
        self._over.wait()
