"""The mirror of an engine: the host copy of blocks of device memory that the engine's own allocator
maps and unmaps.

It is one slab of exact size, page-locked once, and stays. Its fingerprints tell which blocks were
not written since they came back, so that nothing of them is copied, and whether a block that comes
back has the bytes that left.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from placement.core.interrupts import WeakIdSet
from placement.devices.base import Device
from placement.devices.memory import Addresses, Copy
from placement.storage.range import fingerprints

LIVING: WeakIdSet[Mirror] = WeakIdSet()
"""The mirrors of this process."""
WEIGHTS_DIFFER = "weights came back with other bytes than those that left"
"""In every error that says so, also in one that an engine passes on as text."""


class Block(Addresses):
    """Device memory of an engine. Its addresses belong to the engine's allocator."""

    def __init__(self, base: int, nbytes: int) -> None:
        self.base, self.nbytes = base, nbytes


@dataclass(slots=True)
class _Place:
    """The place of one block in the slab. `print` is the fingerprint of the bytes there; None while
    they mean nothing."""

    host: torch.Tensor
    print: int | None = None


class Mirror:
    """The host copy of an engine's blocks, on one device of this process.

    A save has two halves, so that the caller can do something else while the link works. Nothing
    here maps or unmaps a block. A block is mapped as long as a method works on it.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._places: dict[int, _Place] = {}
        self._saving: list[tuple[_Place, int]] = []
        self.spoilt: dict[int, int] = {}
        """Fingerprints, by address, of blocks that came back with other bytes than those that left.
        A block that still has this fingerprint is not saved: what left is in the mirror."""
        self.host_bytes = 0
        LIVING.add(self)

    def reserve(self, blocks: Sequence[Block]) -> None:
        """Have a place for each of these blocks. It is page-locked in the background.

        Where a block has none, the engine's blocks have changed. All of these get new places then,
        so that the slab is as large as they are.

        Raises:
            HostMemoryError: there is not enough host memory. The mirror is empty.
        """
        if all(self._has(block) for block in blocks):
            return
        self.release()
        slab = self._device.host(sum(block.nbytes for block in blocks))
        start = 0
        for block in blocks:
            self._places[block.base] = _Place(slab.view(start, block.nbytes))
            start += block.nbytes
        self.host_bytes = slab.nbytes
        self._fingerprints(blocks[:1])  # so that the first save does not wait for its kernel

    def _has(self, block: Block) -> bool:
        place = self._places.get(block.base)
        return place is not None and place.host.nbytes == block.nbytes

    def release(self) -> None:
        """Give the slab back. It stays as long as a tensor of `host` does."""
        self._places, self._saving, self.host_bytes = {}, [], 0

    def host(self, block: Block) -> torch.Tensor:
        """The place of a block: uint8, page-locked."""
        return self._places[block.base].host

    def is_place_of(self, block: Block, host: torch.Tensor) -> bool:
        """Whether `host` is the place of a block."""
        return self._has(block) and self.host(block).data_ptr() == host.data_ptr()

    def begin_save(self, blocks: Sequence[Block]) -> int:
        """Start copying those of these blocks whose bytes differ from their host copy. Returns the
        number of bytes.

        Raises:
            HostMemoryError: see `reserve`.
            RuntimeError: the device failed. The next save copies again.
        """
        self.reserve(blocks)
        self._saving = []
        copies = []
        for block, found in zip(blocks, self._fingerprints(blocks), strict=True):
            place = self._places[block.base]
            if found in (place.print, self.spoilt.get(block.base)):
                continue
            place.print = None
            self._saving.append((place, found))
            copies.append(Copy(block.base, place.host.data_ptr(), block.nbytes))
        self._device.copy(copies, "to_host")
        return sum(copy.nbytes for copy in copies)

    def end_save(self) -> None:
        """Wait until every byte has arrived, and everything that the device had to do is done."""
        self._device.sync()
        for place, found in self._saving:
            place.print = found
        self._saving, self.spoilt = [], {}

    def fetch(self, block: Block, source: torch.Tensor) -> None:
        """Start copying `source`, which is on the host, into a block."""
        self._device.copy([Copy(block.base, source.data_ptr(), source.nbytes)], "to_device")

    def end_fetch(self) -> None:
        """Wait until everything that was fetched has arrived."""
        self._device.wait(self._device.mark("to_device"))

    def differing(self, blocks: Sequence[Block]) -> dict[int, int]:
        """The fingerprints, by address, of those blocks that do not have the bytes that left."""
        found = zip(blocks, self._fingerprints(blocks), strict=True)
        return {block.base: each for block, each in found if each != self._places[block.base].print}

    def still_spoilt(self, blocks: Sequence[Block]) -> bool:
        """Whether one of these blocks came back wrong and was not written since."""
        suspects = [block for block in blocks if block.base in self.spoilt]
        found = zip(suspects, self._fingerprints(suspects), strict=True)
        return any(each == self.spoilt[block.base] for block, each in found)

    def _fingerprints(self, blocks: Sequence[Block]) -> list[int]:
        if not blocks:
            return []
        views = [self._device.view(block, 0, block.nbytes) for block in blocks]
        found: list[int] = torch.cat([fingerprints(each, [each.nbytes]) for each in views]).tolist()
        return found
