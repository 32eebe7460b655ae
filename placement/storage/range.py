"""One range of a handle: addresses for life, a host slab of the same layout, and the storages that lie in it."""

from __future__ import annotations

import bisect
import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from placement.devices.base import Chunk, Copy, Device, HostSlab
from placement.storage.range_layout import Claim, RangeLayout
from placement.storage.transfer.chunk_pool import ChunkPool

storage_use_count: Callable[[int], int] = torch._C._storage_Use_Count
"""References to a storage (`_cdata`) from tensors, its Python object and C++ together; 0 for one that only weak ones keep."""


def used_bytes(nbytes: int) -> int:
    """What a range of `nbytes` uses: whole words, which is what fingerprints are made of."""
    return -(-nbytes // 8) * 8


@dataclass(slots=True)
class PlacedStorage:
    """One adopted storage. Weak: a range never keeps a tensor alive."""

    name: str
    ref: StorageWeakRef
    offset: int
    nbytes: int
    use_count: int = 0
    """References right after adoption but for the tensors that adapters know of (0: not counted yet); more at an offload are stray
    references."""

    def storage(self) -> torch.UntypedStorage | None:
        """The storage while a tensor uses it."""
        if self.ref.expired():
            return None
        return torch.UntypedStorage._new_with_weak_ptr(self.ref.cdata)

    def uses(self) -> int:
        """References to it now; 0 when it is dead. Its Python object counts too and stays once it is made: made here, if never before."""
        return 0 if self.storage() is None else storage_use_count(self.ref.cdata)


class RangesByAddress:
    """Finds the range that an address lies in, by the device addresses of some ranges and by their slabs."""

    def __init__(self, ranges: tuple[Range, ...]) -> None:
        self.ranges = ranges
        places = sorted(((base, r) for r in ranges for base in (r.layout.addresses.base, r.slab.address)), key=operator.itemgetter(0))
        self._bases = [base for base, _ in places]
        self._ranges = [r for _, r in places]

    def find(self, tensor: torch.Tensor) -> tuple[Range, int] | None:
        """The range that a tensor's storage lies in, and the storage's offset there."""
        address = tensor.untyped_storage().data_ptr()
        index = bisect.bisect_right(self._bases, address) - 1
        if index < 0 or address - self._bases[index] >= self._ranges[index].nbytes:
            return None
        return self._ranges[index], address - self._bases[index]


class Range:
    """Addresses, the slab that mirrors them byte for byte, and what is behind them now.

    `chunks` holds what is behind the addresses, by index; where it has none there is poison. A load enters chunks before the driver
    is asked to map them, and going back unmaps them all. An offload takes them out before they are unmapped, so that what is still
    on record has its bytes; going back unmaps what is missing before it maps anything. So an interrupt is made good either way.
    """

    is_shared = False
    """Whether other processes read the slab, too: then it is never written again."""

    def __init__(self, device: Device, layout: RangeLayout, slab: HostSlab, claims: tuple[Claim, ...], transient: bool) -> None:
        self.layout = layout
        self.nbytes = used_bytes(layout.nbytes)
        """Used length. What lies behind it in the last chunk is nobody's: neither copied nor fingerprinted."""
        self.slab = slab
        whole, rest = divmod(layout.nbytes, device.chunk_bytes)
        tail = -(-rest // device.granularity) * device.granularity
        self.chunk_sizes: tuple[int, ...] = (device.chunk_bytes,) * whole + ((tail,) if tail else ())
        """Full chunks and a tail at the granularity: what is behind the range while it is loaded."""
        self.device_bytes = sum(self.chunk_sizes)
        self.used_sizes = (*self.chunk_sizes[:-1], self.nbytes - sum(self.chunk_sizes[:-1]))
        """Of each chunk, the bytes that are used."""
        self.transient = transient
        self.claims: tuple[Claim, ...] | None = claims
        """What still has to move in; None once every storage has its place."""
        self.placed: tuple[PlacedStorage, ...] = ()
        self._by_storage: dict[int, PlacedStorage] | None = None
        self.counted: tuple[list[int], list[int]] | None = None
        """Of `placed`, the storages (`_cdata`) and their `use_count`, once all have been counted."""
        self.without_stray_references: tuple[tuple[list[int], list[int]], list[dict[int, int]], list[int]] | None = None
        """What was looked at when stray references were looked for last and there were none: `counted`, the tables of aliases,
        references."""
        self.starts: tuple[int, ...] = tuple(index * device.chunk_bytes for index in range(len(self.chunk_sizes)))
        """Of each chunk, bytes from the first address."""
        self.chunks: dict[int, Chunk] = {}
        self.prints: torch.Tensor | None = None
        """Fingerprints of the slab's chunks, int64 on either device; None while the slab may differ from what was fingerprinted."""
        self.homes: dict[int, torch.UntypedStorage] = {}
        """For `adopt.unadopt`: what its storages, by address, are being given for memory as they leave for good."""
        self.is_shown = False
        """Whether a state dict has shown the slab, so that its holder may have written there: `prints` are of the time before."""

    def move_in(self) -> None:
        """Give every storage its place. Their bytes are in the slab. Idempotent, and safe to repeat after an interrupt."""
        if self.claims is None:
            return
        for index in range(len(self.claims)):
            self.layout.move_in(index)
        placed = []
        for claim, offset in zip(self.claims, self.layout.offsets, strict=True):
            ref = StorageWeakRef(claim.aliases[0].untyped_storage())  # rebinding gives the aliases another storage object
            placed.append(PlacedStorage(claim.name, ref, offset, claim.nbytes))
        self.placed, self.claims, self._by_storage = tuple(placed), None, None
        self.layout.forget_claims()

    def forget(self, entry: PlacedStorage) -> None:
        """A storage has left for good. Its place stays empty."""
        self.counted = self._by_storage = None
        self.placed = tuple(each for each in self.placed if each is not entry)

    def replace(self, entry: PlacedStorage, home: torch.UntypedStorage) -> None:
        """Another storage lies at a place from now on."""
        self.counted = self._by_storage = None  # before the old storage may be freed, whose address is in there
        entry.ref, entry.use_count = StorageWeakRef(home), 0

    def place_of(self, storage: torch.UntypedStorage) -> PlacedStorage | None:
        """Where a storage belongs, wherever it lies now; None where it has no place here."""
        if self._by_storage is None:
            self._by_storage = {entry.ref.cdata: entry for entry in self.placed}
        return self._by_storage.get(storage._cdata)

    def has_any(self, addresses: Sequence[int]) -> bool:
        """Whether one of these addresses, which ascend, lies in it or in its slab."""
        bases = (self.layout.addresses.base, self.slab.address)
        return any(bisect.bisect_left(addresses, base) < bisect.bisect_left(addresses, base + self.nbytes) for base in bases)

    @property
    def is_alive(self) -> bool:
        """Whether any tensor still lies in it, or is about to."""
        return self.claims is not None or any(not placed.ref.expired() for placed in self.placed)

    @property
    def resident_bytes(self) -> int:
        if len(self.chunks) == len(self.chunk_sizes):
            return self.device_bytes
        return sum(self.chunk_sizes[index] for index in self.chunks)

    def missing(self) -> list[int]:
        """The chunks that are not there."""
        return [index for index in range(len(self.chunk_sizes)) if index not in self.chunks]

    def give(self, indices: Iterable[int], chunk_pool: ChunkPool) -> None:
        """Hand unmapped chunks to the stock. They are in both for a moment rather than in neither: `make_consistent` counts them once."""
        held = [index for index in indices if index in self.chunks]
        chunk_pool.give([self.chunks[index] for index in held])
        for index in held:
            del self.chunks[index]

    def copies(self, wanted: Iterable[int] | None = None) -> list[Copy]:
        """The runs to copy for these chunks (ascending; None: all), neighbours joined and cut to the used length."""
        runs: list[Copy] = []
        for index in range(len(self.chunk_sizes)) if wanted is None else wanted:
            start, nbytes = self.starts[index], self.used_sizes[index]
            if runs and runs[-1].device_address + runs[-1].nbytes == self.layout.addresses.base + start:
                last = runs.pop()
                runs.append(Copy(last.device_address, last.host_address, last.nbytes + nbytes))
            else:
                runs.append(Copy(self.layout.addresses.base + start, self.slab.address + start, nbytes))
        return runs

    def outside(self) -> list[PlacedStorage]:
        """Adopted storages that are alive and no longer at their place: somebody moved them behind our back."""
        found = []
        for entry in self.placed:
            storage = entry.storage()
            if storage is not None and storage.data_ptr() != self.layout.addresses.base + entry.offset:
                found.append(entry)
        return found
