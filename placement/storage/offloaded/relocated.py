"""Storages that an offload finds away from their places, because something changed their pointers while they were on the device.

`share_memory_()` and a queue to another process copy a storage into shared memory and point it there: the newest values are in that
memory, and the range has old ones. They go into the host copy, and the storage goes back to its place, so that nothing is lost and
nothing stays on the device. One that was resized has no room at its place any more; it is new state, and gets a new place.
"""

from __future__ import annotations

from collections.abc import Sequence

from placement.devices.base import Copy, Device
from placement.storage.offloaded.put_back import bring_back
from placement.storage.places import Places, Relocated
from placement.storage.range import Range
from placement.storage.range_layout import Claim
from placement.storage.scanner import byte_view


class RelocatedStorages:
    """Those of one object, from the look of one offload to its end."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._found: Sequence[Relocated] = ()

    def note(self, found: Sequence[Relocated]) -> None:
        self._found = found

    def grown(self, *, transient: bool) -> list[Claim]:
        """What was resized and has bytes: to be taken in like what is new."""
        return [each.claim for each in self._found if each.is_resized and each.transient is transient and each.claim.nbytes]

    @property
    def names(self) -> list[str]:
        """What comes home."""
        return [each.claim.name for each in self._found if not each.is_resized]

    def save(self, *, readonly: bool) -> None:
        """Write the bytes of what comes home into the host copy, where that may be written. All other copies are through."""
        for r, entry, claim, transient in self._found:
            if claim.nbytes != entry.nbytes or r.is_shared or (readonly and not transient):
                continue
            r.prints = None  # first: from here on the slab is neither the old content nor the new
            if claim.storage.device == self._device.torch_device:
                self._device.copy([Copy(claim.storage.data_ptr(), r.slab.address + entry.offset, entry.nbytes)], "to_host")
                self._device.wait(self._device.mark("to_host"))
            else:
                r.slab.view(entry.offset, entry.nbytes).copy_(byte_view(claim.storage))

    def bring_back(self, ranges: Sequence[Range], places: Places) -> None:
        """The object is offloaded: every storage goes to its place, or gives it up for its new one."""
        found = [each for each in self._found if each.range in ranges]
        bring_back(self._device, [each for each in found if not each.is_resized], places.within(ranges) if found else {})
        for each in found:
            if each.is_resized:
                each.range.forget(each.entry)

    def forget(self) -> None:
        self._found = ()
