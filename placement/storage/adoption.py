"""Adoption: new storages get places in a range, with host memory of the same layout.

Host memory is reserved for them ahead where their sizes are known, so that an offload in the middle
of a run cannot lack it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch

from placement.devices.base import Device
from placement.devices.host.slab import cut
from placement.devices.memory import Addresses, Copy, HostSlab
from placement.storage.fingerprints import used_bytes
from placement.storage.layout import ALIGNMENT, Adoptee, RangeLayout, byte_view, expected_bytes
from placement.storage.range import Range


def start_saving(
    device: Device, slab: HostSlab, pieces: Iterable[tuple[torch.UntypedStorage, int, int, int]]
) -> None:
    """Start copying pieces of new storages to a slab: (storage, offset in it, offset in the slab,
    bytes). Pieces of storages on another device have arrived when this returns."""
    copies = []
    for storage, start, offset, nbytes in pieces:
        if storage.device == device.torch_device:
            copies.append(Copy(storage.data_ptr() + start, slab.address + offset, nbytes))
        else:
            slab.view(offset, nbytes).copy_(byte_view(storage)[start : start + nbytes])
    if copies:
        device.copy(copies, "to_host")


class Adoption:
    """Makes the ranges of one object.
    `new_slab`: makes host memory of so many bytes.
    `when_unused`: see `Range`."""

    def __init__(
        self,
        device: Device,
        new_slab: Callable[[int], HostSlab],
        when_unused: Callable[[], object],
    ) -> None:
        self._device = device
        self.new_slab = new_slab
        self._when_unused = when_unused
        # host memory and addresses for storages that are not created yet
        self.reserved: HostSlab | None = None
        self._reserved_addresses: Addresses | None = None
        # memory of gradients that have died, for those of the present offload: pinning takes long
        self.spare: HostSlab | None = None

    # --- ahead

    def reserve(self, sizes: Sequence[int], num_ranges: int) -> None:
        """Reserve host memory and addresses for storages of these sizes (bytes) in at most so many
        ranges.

        Raises HostMemoryError: there is not so much.
        """
        if sizes:
            padding = (num_ranges - 1) * ALIGNMENT
            nbytes = used_bytes(expected_bytes(self._device, sizes) + padding)
            self._reserved_addresses = self._device.reserve(nbytes)
            self.reserved = self.new_slab(nbytes)

    @property
    def reserved_bytes(self) -> int:
        return 0 if self.reserved is None else self.reserved.held_bytes

    @property
    def reserved_file_bytes(self) -> int:
        return 0 if self.reserved is None else self.reserved.file_bytes

    # --- now

    def new_range(self, adoptees: Sequence[Adoptee], *, transient: bool, in_parts: bool) -> Range:
        """Make a range for new storages and start saving their bytes. They stay where they are
        until `Range.move_in`.
        `in_parts`: more will come (bucket by bucket), so only a part of what is reserved is taken.

        Raises RegistrationError: see `RangeLayout`. HostMemoryError: there is too little.
        """
        reserve = self._device.reserve if in_parts else self._addresses
        layout = RangeLayout(self._device, adoptees, reserve)
        slab = self._slab(used_bytes(layout.nbytes), transient=transient, in_parts=in_parts)
        fresh = Range(self._device, layout, slab, tuple(adoptees), transient)
        fresh.when_unused = self._when_unused
        places = zip(adoptees, layout.offsets, layout.sizes, strict=True)
        pieces = [(adoptee.storage, 0, offset, nbytes) for adoptee, offset, nbytes in places]
        start_saving(self._device, slab, pieces)
        return fresh

    def _addresses(self, nbytes: int) -> Addresses:
        reserved = self._reserved_addresses
        if reserved is None or reserved.nbytes < nbytes:
            return self._device.reserve(nbytes)
        self._reserved_addresses = None
        return reserved

    def _slab(self, nbytes: int, *, transient: bool, in_parts: bool) -> HostSlab:
        if transient:
            spare = self.spare
            self.spare = None
            if spare and nbytes <= spare.nbytes <= 2 * nbytes and not spare.has_views:
                return spare
        reserved = self.reserved
        if reserved is None or reserved.nbytes < nbytes:
            return self.new_slab(nbytes)
        if not in_parts:
            self.reserved = None
            return reserved
        part, self.reserved = cut(reserved, nbytes)
        return part
