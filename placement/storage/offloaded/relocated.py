"""Relocated storages: an offload finds them away from their places, because something changed their pointers on the device.

`share_memory_()` and a queue to another process copy a storage into shared memory and point it there. Then the newest values are in
that memory and the range has old ones. The offload saves the newest values into the host copy and points the storage to its place
again, so that nothing is lost and nothing stays on the device. A storage that was resized does not fit its place any more: it is
treated as a new storage and gets a new place.
"""

from __future__ import annotations

from collections.abc import Sequence

from placement.devices.base import Device
from placement.devices.memory import Copy
from placement.storage.offloaded.put_back import bring_back
from placement.storage.range import Range
from placement.storage.range_layout import Claim, byte_view
from placement.storage.scanning.places import Places, Relocated


class RelocatedStorages:
    """The relocated storages of one object, during one offload."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._found: Sequence[Relocated] = ()

    def note(self, found: Sequence[Relocated]) -> None:
        self._found = found

    def grown(self, *, transient: bool) -> list[Claim]:
        """Claims of the storages that were resized and are not empty. They are taken in like new storages."""
        return [each.claim for each in self._found if each.is_resized and each.transient is transient and each.claim.nbytes]

    @property
    def ranges(self) -> set[Range]:
        """The ranges whose host copies `save` is to write, unless the object is readonly."""
        return {each.range for each in self._found if not each.is_resized}

    @property
    def names(self) -> list[str]:
        """Names of the storages that go back to their places."""
        return [each.claim.name for each in self._found if not each.is_resized]

    def save(self, *, readonly: bool) -> None:
        """Write the storages that go back to their places into the host copy, where it may be written. All other copies have completed."""
        for r, entry, claim, transient in self._found:
            if claim.nbytes != entry.nbytes or (readonly and not transient):
                continue
            r.note_written()  # first: from here on the slab has neither the old content nor the new
            if claim.storage.device == self._device.torch_device:
                self._device.copy([Copy(claim.storage.data_ptr(), r.slab.address + entry.offset, entry.nbytes)], "to_host")
                self._device.wait(self._device.mark("to_host"))
            else:
                r.view(entry.offset, entry.nbytes).copy_(byte_view(claim.storage))

    def bring_back(self, ranges: Sequence[Range], places: Places) -> None:
        """Called when the object is offloaded: point every storage to its place, or drop its place if it was resized."""
        found = [each for each in self._found if each.range in ranges]
        bring_back(self._device, [each for each in found if not each.is_resized], places.within(ranges) if found else {})
        for each in found:
            if each.is_resized:
                each.range.forget(each.entry)

    def forget(self) -> None:
        self._found = ()
