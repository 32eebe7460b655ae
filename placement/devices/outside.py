"""Device memory that neither torch's allocator nor a chunk holds, followed from one phase transition to the next."""

from __future__ import annotations

from collections.abc import Iterable

from placement.devices.base import Device
from placement.devices.memory import Communicator, DeviceMemory

_OWNERS = "the driver's context and its kernels, libraries that allocate by themselves, communicators"


class Outside:
    """The memory outside torch and placement, as of the last measurement, and who of this process is known to hold it.

    Not every library says how much its communicators hold. So the growth of this memory is noted whenever communicators have appeared
    since the measurement before. That is an upper bound: kernels that were loaded meanwhile are in it, and other processes' growth.
    """

    def __init__(self, device: Device, memory: DeviceMemory) -> None:
        self._device = device
        self.nbytes = memory.unaccounted_bytes
        self.communicators: tuple[Communicator, ...] = tuple(device.communicators())
        self.grown_bytes = 0
        """The growth of `nbytes` between measurements in which communicators appeared."""

    def measure(self, memory: DeviceMemory) -> None:
        """Look again, on the thread of a phase transition."""
        known = {each.name for each in self.communicators}
        self.communicators = tuple(self._device.communicators())
        before, self.nbytes = self.nbytes, memory.unaccounted_bytes
        if any(each.name not in known for each in self.communicators):
            self.grown_bytes += max(0, self.nbytes - before)

    @property
    def communicator_bytes(self) -> int | None:
        """Device bytes of all communicators; None if one of them does not say how many it holds."""
        known = [each.nbytes for each in self.communicators if each.nbytes is not None]
        return sum(known) if len(known) == len(self.communicators) else None

    def report(self, others_bytes: int | None) -> Iterable[str]:
        """Lines for people; none where there is nothing to say.

        Args:
            others_bytes: the device bytes of other processes; None while unknown.
        """
        if self.nbytes <= 0 and not self.communicators:
            return
        others = "and other processes" if others_bytes is None else f"and other processes ({others_bytes:,} bytes)"
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
