"""A range: addresses that last for a handle's life, with a host slab of the same layout and the
storages that have a place there."""

from __future__ import annotations

import bisect
from collections.abc import Callable, Sequence

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from placement.devices.base import Device
from placement.devices.memory import HostSlab
from placement.storage.fingerprints import differing, fingerprints, used_bytes
from placement.storage.layout import Adoptee, RangeLayout, chunk_sizes
from placement.storage.pages import Pages
from placement.tensors.alive import PlacedStorage, UnusedPages


class Range:
    """Addresses of one handle with their page table, and the storages that have a place there. The
    host copy has the same layout."""

    is_shared = False  # whether other processes read the slab, too. If so, it is not written.

    def __init__(
        self,
        device: Device,
        layout: RangeLayout,
        slab: HostSlab,
        moving_in: tuple[Adoptee, ...],
        transient: bool,
    ) -> None:
        self._device = device
        self.layout = layout
        # used length. The rest of the last chunk is neither copied nor fingerprinted.
        self.nbytes = used_bytes(layout.nbytes)
        # full chunks, and a tail
        self.chunk_sizes: tuple[int, ...] = chunk_sizes(device, layout.nbytes)
        self.pages = Pages(device, layout.addresses, self.chunk_sizes, self.nbytes, slab)
        self.used_sizes = self.pages.used_sizes
        self.starts = self.pages.starts
        self.transient = transient  # whether its tensors come and go (gradients): see `Owned`
        # the storages that have still to move in; None once all have
        self.moving_in: tuple[Adoptee, ...] | None = moving_in
        self.placed: tuple[PlacedStorage, ...] = ()
        self._by_storage: dict[int, PlacedStorage] | None = None  # see `place_of`
        # the storages (`_cdata`) of `placed` and their `use_count`, once counted
        self.counted: tuple[list[int], list[int]] | None = None
        self.without_stray_references: tuple[object, ...] | None = None
        """The last search for stray references, if it found none: `counted`, the tables of aliases,
        and the reference counts of then."""
        self._unused: UnusedPages | None = None  # None where it is not transient
        # called, in any thread, when a page of it has become unused
        self.when_unused: Callable[[], object] = lambda: None
        # whether a state dict has shown the slab. Its holder may have written there, so `prints`
        # may be out of date.
        self.is_shown = False

    @property
    def host(self) -> HostSlab:
        """The slab, some bytes of which may still be on their way. A reader or writer asks for a
        `view`."""
        return self.pages.host

    def move_in(self) -> None:
        """Give every storage its place. The slab has their bytes already. Idempotent."""
        if self.moving_in is None:
            return
        layout = self.layout
        layout.move_in()
        placed = []
        places = zip(self.moving_in, layout.offsets, layout.sizes, strict=True)
        for adoptee, offset, nbytes in places:
            # not adoptee.storage: rebinding has given the aliases another one
            ref = StorageWeakRef(adoptee.aliases[0].untyped_storage())
            placed.append(PlacedStorage(adoptee.name, ref, offset, nbytes))
        self.placed = tuple(placed)
        self.moving_in = self._by_storage = None
        layout.forget_adoptees()
        self._watch()

    def forget(self, entry: PlacedStorage) -> None:
        """Remove a storage that has left for good. Its place stays empty."""
        self.counted = self._by_storage = None
        self.placed = tuple(other for other in self.placed if other is not entry)
        self._watch()

    def replace(self, entry: PlacedStorage, home: torch.UntypedStorage) -> None:
        """Have another storage at the place of this one, which is gone."""
        # first: they have the address of the old storage, which may be freed now
        self.counted = self._by_storage = None
        entry.ref = StorageWeakRef(home)
        entry.use_count = 0
        self._watch()

    def _watch(self) -> None:
        self.pages.need_all()
        if self.transient:
            self._unused = UnusedPages(
                self.placed, self._device.chunk_bytes, len(self.chunk_sizes), self.when_unused
            )

    def unused_pages(self) -> set[int]:
        """The pages that have become unused since memory was last given up."""
        return set() if self._unused is None else self._unused.found - self.pages.unused

    def place_of(self, storage: torch.UntypedStorage) -> PlacedStorage | None:
        """The place to which a storage belongs, wherever it lies now; None where it has no place in
        this range."""
        if self._by_storage is None:
            places = {entry.ref.cdata: entry for entry in self.placed}
            for adoptee, offset in zip(self.moving_in or (), self.layout.offsets, strict=False):
                ref = StorageWeakRef(adoptee.storage)
                places[ref.cdata] = PlacedStorage(adoptee.name, ref, offset, adoptee.nbytes)
            self._by_storage = places
        return self._by_storage.get(storage._cdata)

    def has_any(self, addresses: Sequence[int]) -> bool:
        """Whether one of these addresses (ascending) lies in the range or in its slab."""
        for base in (self.layout.addresses.base, self.host.address):
            first = bisect.bisect_left(addresses, base)
            if first < bisect.bisect_left(addresses, base + self.nbytes):
                return True
        return False

    @property
    def is_alive(self) -> bool:
        """Whether any tensor still lies in the range, or is about to move in."""
        return self.moving_in is not None or any(not placed.ref.expired() for placed in self.placed)

    def view(self, offset: int, nbytes: int) -> torch.Tensor:
        """A tensor over a part of the complete host copy, which stays as long as the tensor lives.
        Waits for bytes on their way there."""
        self.pages.wait_until_saved()
        return self.host.view(offset, nbytes)

    def fingerprint(self, first: int, last: int) -> torch.Tensor:
        """Fingerprints of chunks `first` up to `last` (not included), computed from the device;
        int64, enqueued on the current stream."""
        sizes = self.used_sizes[first:last]
        if not sizes:
            return torch.empty(0, dtype=torch.int64, device="cpu")
        start = self.starts[first]
        prints = self._device.known_fingerprints(self.layout.addresses, start, sizes)
        if prints is None:
            prints = fingerprints(self.on_device(start, sum(sizes)), sizes)
        return prints

    def on_device(self, offset: int, nbytes: int) -> torch.Tensor:
        """A tensor over a part of the range: over the bytes on the device, or over poison."""
        return self._device.view(self.layout.addresses, offset, nbytes)

    def note_written(self) -> None:
        """The slab has changed, or is about to: forget its fingerprints, and do not use prefetched
        pages."""
        self.pages.prints = None
        self.pages.is_stale = True

    def note_shown(self) -> None:
        """The slab is shown to a caller who may write there: do not use prefetched pages, and take
        the fingerprints anew at the next load."""
        self.is_shown = True
        self.pages.is_stale = True

    def relocated(self) -> list[PlacedStorage]:
        """The storages that are alive, but not at their place, because their pointer was changed.
        An audit reports them. An offload finds them by a scan, with their tensors."""
        relocated = []
        for entry in self.placed:
            storage = entry.storage()
            place = self.layout.addresses.base + entry.offset
            if storage is not None and storage.data_ptr() != place:
                relocated.append(entry)
        return relocated

    def differing(
        self, earlier: torch.Tensor | None, prints: torch.Tensor, first: int = 0
    ) -> list[int]:
        """The pages, without unused ones, whose bytes differ: see `differing`."""
        pages = differing(earlier, prints, first)
        return [index for index in pages if index not in self.pages.unused]


RangeChunk = tuple[Range, int]  # a chunk of a range, by its index
