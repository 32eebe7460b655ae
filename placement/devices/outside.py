"""Device memory that neither torch's allocator nor a chunk holds, followed from one phase transition to the next."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterable
from typing import Protocol

from placement.devices.base import Device
from placement.devices.memory import Communicator, DeviceMemory

_OWNERS = "the driver's context and its kernels, libraries that allocate by themselves, communicators"


class OtherProcesses(Protocol):
    """Measures how many device bytes other processes hold."""

    @property
    def nbytes(self) -> int | None:
        """The last measurement; None while unknown."""

    def ask(self, then: Callable[[int | None], None]) -> None:
        """Measure soon, on another thread, and call `then` there with the bytes."""


class Outside:
    """The memory outside torch and placement, as of the last measurement, and who is known to hold it.

    Not every library says how much its communicators hold. So the growth of this memory is noted whenever communicators have appeared
    since the measurement before. That is an upper bound: kernels that were loaded meanwhile are in it, and other processes' growth.
    """

    def __init__(self, device: Device, memory: DeviceMemory) -> None:
        self._device = device
        self.nbytes = memory.unaccounted_bytes
        self.communicators: tuple[Communicator, ...] = tuple(device.communicators())
        self.grown_bytes = 0
        """The growth of `nbytes` between measurements in which communicators appeared."""
        self._others: OtherProcesses | None = None
        self._own_bytes: int | None = None
        self._told = threading.Event()

    @property
    def is_watched(self) -> bool:
        """Whether somebody measures other processes."""
        return self._others is not None

    def watch(self, others: OtherProcesses) -> None:
        """From now on `others` tells what other processes hold."""
        self._others = others
        self._ask()

    def measure(self, memory: DeviceMemory) -> None:
        """Look again, on the thread of a phase transition. Others are measured on their own thread, milliseconds later."""
        known = {each.name for each in self.communicators}
        self.communicators = tuple(self._device.communicators())
        before, self.nbytes = self.nbytes, memory.unaccounted_bytes
        if any(each.name not in known for each in self.communicators):
            self.grown_bytes += max(0, self.nbytes - before)
        self._ask()

    def wait_for_others(self, seconds: float) -> None:
        """Wait until others were measured after the last measurement, if they are known at all."""
        if self.others_bytes is not None:
            self._told.wait(seconds)

    def _ask(self) -> None:
        if self._others is not None:
            self._told.clear()
            self._others.ask(functools.partial(self._tell, self.nbytes))

    def _tell(self, nbytes: int, others_bytes: int | None) -> None:
        self._own_bytes = None if others_bytes is None else nbytes - others_bytes
        self._told.set()

    @property
    def others_bytes(self) -> int | None:
        """Device bytes of other processes; None while unknown, or not subtracted from `own_bytes` yet."""
        return None if self._others is None or self._own_bytes is None else self._others.nbytes

    @property
    def own_bytes(self) -> int | None:
        """`nbytes` without other processes; None while these are unknown.

        Only measurements that belong together are subtracted, because an engine in another process may have gone to sleep since: this is
        of the last measurement after which others were measured too.
        """
        return None if self.others_bytes is None else self._own_bytes

    @property
    def communicator_bytes(self) -> int | None:
        """Device bytes of all communicators; None if one of them does not say how many it holds."""
        known = [each.nbytes for each in self.communicators if each.nbytes is not None]
        return sum(known) if len(known) == len(self.communicators) else None

    def report(self) -> Iterable[str]:
        """Lines for people; none where there is nothing to say."""
        if self.nbytes <= 0 and not self.communicators:
            return
        others = "and other processes" if self.others_bytes is None else f"and other processes ({self.others_bytes:,} bytes)"
        yield f"outside: {self.nbytes:,} bytes are neither torch's nor placement's: {_OWNERS}, {others}"
        for each in self.communicators:
            yield f"outside: communicator {each.name!r} of {_ranks(each.ranks)}: {_size(each)}"
        if self.communicator_bytes is None and self.grown_bytes:
            yield f"outside: grew by {self.grown_bytes:,} bytes while communicators appeared, which hold at most that"


def _ranks(ranks: tuple[int, ...]) -> str:
    if len(ranks) > 2 and ranks[-1] - ranks[0] == len(ranks) - 1:
        return f"ranks {ranks[0]} to {ranks[-1]}"
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {', '.join(map(str, ranks))}"


def _size(communicator: Communicator) -> str:
    if communicator.nbytes is None:
        return f"size unknown ({communicator.unknown_because})"
    suspendable = f", {communicator.suspendable_bytes:,} of them could be suspended" if communicator.suspendable_bytes else ""
    return f"{communicator.nbytes:,} bytes{suspendable}"
