"""The mirror of an engine: the host copy of blocks of device memory that the engine's own allocator
maps and unmaps.

It is one slab of exact size, page-locked once, and stays. Its fingerprints tell which pieces of a
block were written since they came back, so that only these are copied. They also tell whether a
block that comes back has the bytes that left.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from placement.core.journal import logger
from placement.core.snapshot import mib
from placement.devices.base import Device
from placement.devices.memory import Addresses, Copy, Mark
from placement.storage.fingerprints import differing, fingerprints

PIECE_BYTES = 32 << 20
"""The bytes of a fingerprint. Where its kernel does not run, one takes device memory of three times
as many bytes (`_by_torch`), and an engine leaves little free."""

PLACEMENT = "placement"
"""The name of the mover where a mirror keeps the bytes, and the key of a plug-in's report."""
WEIGHTS_DIFFER = "weights came back with other bytes than those that left"
"""In every error that says so, also in one that an engine passes on as text."""


class Block(Addresses):
    """Device memory of an engine. Its addresses belong to the engine's allocator."""

    def __init__(self, base: int, nbytes: int) -> None:
        self.base, self.nbytes = base, nbytes


@dataclass(slots=True)
class _Place:
    """The place of one block in the slab."""

    host: torch.Tensor
    block: torch.Tensor  # uint8, on the device
    piece_sizes: list[int]
    prints: torch.Tensor | None = None  # of its pieces; None while the bytes there mean nothing


class Mirror:
    """The host copy of an engine's blocks, on one device of this process.

    A save has two halves, so that the caller can do something else while the link works. Nothing
    here maps or unmaps a block. A block is mapped as long as a method works on it.
    """

    def __init__(self, device: Device) -> None:
        self.device = device
        self._places: dict[int, _Place] = {}
        # copies on their way, and the fingerprints of what they bring, by address
        self._saving: dict[int, tuple[Mark, torch.Tensor]] = {}
        self.spoilt: dict[int, torch.Tensor] = {}
        """Fingerprints, by address, of blocks that came back with other bytes than those that left.
        A block that still has them is not saved: the mirror has the bytes that left."""
        self.host_bytes = 0

    def report(self) -> dict[str, Any]:
        """The report that an engine's plug-in gives of its mirror (see `PluggedEngine`)."""
        return {PLACEMENT: {"host_bytes": self.host_bytes, "is_spoilt": bool(self.spoilt)}}

    def reserve(self, blocks: Sequence[Block]) -> None:
        """Have a place for each of these blocks. It is page-locked in the background.

        Where a block has none, the engine's blocks have changed. All of these get new places then,
        so that the slab is as large as they are.

        Raises:
            HostMemoryError: there is not enough host memory. The mirror is empty.
        """
        if all(self.has(block) for block in blocks):
            return
        self.release()
        slab = self.device.host(sum(block.nbytes for block in blocks))
        start = 0
        for block in blocks:
            data = self.device.view(block, 0, block.nbytes)
            sizes = [piece.nbytes for piece in data.split(PIECE_BYTES)]
            self._places[block.base] = _Place(slab.view(start, block.nbytes), data, sizes)
            start += block.nbytes
        self.host_bytes = slab.nbytes
        self._fingerprints(blocks[:1])  # so that the first save does not wait for its kernel

    def has(self, block: Block) -> bool:
        """Whether a block has a place."""
        place = self._places.get(block.base)
        return place is not None and place.host.nbytes == block.nbytes

    def release(self) -> None:
        """Give the slab back. It stays as long as a tensor of `host` does."""
        self._places, self._saving, self.host_bytes = {}, {}, 0

    def host(self, block: Block) -> torch.Tensor:
        """The place of a block: uint8, page-locked."""
        return self._places[block.base].host

    def begin_save(self, blocks: Sequence[Block]) -> int:
        """Wait until the device is idle, and start copying the pieces of these blocks that differ
        from the host copy. Returns the number of bytes. See `end_save`.

        Raises:
            HostMemoryError: see `reserve`.
            RuntimeError: the device failed. The next save copies again.
        """
        self.reserve(blocks)
        self.device.sync()
        for base in self.spoilt.keys() - {block.base for block in blocks}:
            del self.spoilt[base]  # discarded
        self._saving = {}
        copied_bytes = 0
        for block, prints in zip(blocks, self._fingerprints(blocks), strict=True):
            place = self._places[block.base]
            pieces = differing(place.prints, prints)
            if not pieces or self._is_spoilt(block, prints):
                continue
            place.prints = None  # until all of the copies have arrived
            copies = []
            for piece in pieces:
                start = piece * PIECE_BYTES
                nbytes = place.piece_sizes[piece]
                copies.append(Copy(block.base + start, place.host.data_ptr() + start, nbytes))
            self.device.copy(copies, "to_host")
            copied_bytes += sum(copy.nbytes for copy in copies)
            self._saving[block.base] = self.device.mark("to_host"), prints
        return copied_bytes

    def end_save(self, block: Block) -> None:
        """Wait until a block of `begin_save` has arrived. To be called for each, in their order."""
        if block.base in self._saving:
            copies, prints = self._saving.pop(block.base)
            self.device.wait(copies)
            self._places[block.base].prints = prints
        self.spoilt.pop(block.base, None)

    def fetch(self, block: Block, source: torch.Tensor) -> None:
        """Start copying `source`, which is on the host, into a block."""
        self.device.copy([Copy(block.base, source.data_ptr(), source.nbytes)], "to_device")

    def end_fetch(self) -> None:
        """Wait until everything that was fetched has arrived."""
        self.device.wait(self.device.mark("to_device"))

    def differing(self, fetched: Mapping[Block, object]) -> dict[int, torch.Tensor]:
        """The fingerprints, by address, of those blocks that do not have the bytes that left. Only
        blocks are compared whose source is their place."""
        blocks = [block for block, source in fetched.items() if self._is_place(block, source)]
        wrong = {}
        for block, prints in zip(blocks, self._fingerprints(blocks), strict=True):
            if differing(self._places[block.base].prints, prints):
                wrong[block.base] = prints
        return wrong

    def still_spoilt(self, blocks: Sequence[Block]) -> bool:
        """Whether one of these blocks came back wrong and was not written since."""
        suspects = [block for block in blocks if block.base in self.spoilt and self.has(block)]
        return any(map(self._is_spoilt, suspects, self._fingerprints(suspects)))

    def _is_place(self, block: Block, source: object) -> bool:
        return self.has(block) and self.host(block) is source

    def _is_spoilt(self, block: Block, prints: torch.Tensor) -> bool:
        return block.base in self.spoilt and torch.equal(self.spoilt[block.base], prints)

    def _fingerprints(self, blocks: Sequence[Block]) -> list[torch.Tensor]:
        """The fingerprints of each block's pieces, int64 on the CPU."""
        if not blocks:
            return []
        places = [self._places[block.base] for block in blocks]
        prints = [fingerprints(place.block, place.piece_sizes) for place in places]
        # to the CPU together: each transfer is a wait for the device
        on_cpu = torch.cat(prints).cpu()
        return list(on_cpu.split([len(of_block) for of_block in prints]))


def log_move(event: str, copied_bytes: int, began: float) -> None:
    """Log how much was copied since `began` (`time.monotonic`)."""
    logger.info("%s, %s copied in %.3f s", event, mib(copied_bytes), time.monotonic() - began)
