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
        # see `layout.chunk_sizes`
        self.chunk_sizes: tuple[int, ...] = chunk_sizes(device, layout.nbytes)
        self.pages = Pages(device, layout.addresses, self.chunk_sizes, self.nbytes, slab)
        self.used_sizes, self.starts = self.pages.used_sizes, self.pages.starts
        self.transient = transient
        # the storages that have still to move in; None once all have
        self.moving_in: tuple[Adoptee, ...] | None = moving_in
        self.placed: tuple[PlacedStorage, ...] = ()
        self._by_storage: dict[int, PlacedStorage] | None = None
        # the storages (`_cdata`) of `placed` and their `use_count`, once counted
        self.counted: tuple[list[int], list[int]] | None = None
        self.without_stray_references: (
            tuple[tuple[list[int], list[int]], list[dict[int, int]], list[int]] | None
        ) = None
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
        """The slab, some bytes of which may still be on their way. Who reads or writes it asks for
        a `view`."""
        return self.pages.host

    def move_in(self) -> None:
        """Give every storage its place. The slab has their bytes already. Idempotent."""
        if self.moving_in is None:
            return
        layout, placed = self.layout, []
        layout.move_in()
        places = zip(self.moving_in, layout.offsets, layout.sizes, strict=True)
        for adoptee, offset, nbytes in places:
            # not adoptee.storage: rebinding has given the aliases another one
            ref = StorageWeakRef(adoptee.aliases[0].untyped_storage())
            placed.append(PlacedStorage(adoptee.name, ref, offset, nbytes))
        self.placed, self.moving_in, self._by_storage = tuple(placed), None, None
        self.layout.forget_adoptees()
        self._watch()

    def forget(self, entry: PlacedStorage) -> None:
        """Remove a storage that has left for good. Its place stays empty."""
        self.counted = self._by_storage = None
        self.placed = tuple(each for each in self.placed if each is not entry)
        self._watch()

    def replace(self, entry: PlacedStorage, home: torch.UntypedStorage) -> None:
        # first: they have the address of the old storage, which may be freed now
        self.counted = self._by_storage = None
        entry.ref, entry.use_count = StorageWeakRef(home), 0
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
            coming = zip(self.moving_in or (), self.layout.offsets, strict=False)
            places = [
                PlacedStorage(each.name, StorageWeakRef(each.storage), offset, each.nbytes)
                for each, offset in coming
            ]
            self._by_storage = {entry.ref.cdata: entry for entry in (*self.placed, *places)}
        return self._by_storage.get(storage._cdata)

    def has_any(self, addresses: Sequence[int]) -> bool:
        """Whether one of these addresses (ascending) lies in the range or in its slab."""
        bases = (self.layout.addresses.base, self.host.address)
        return any(
            bisect.bisect_left(addresses, base) < bisect.bisect_left(addresses, base + self.nbytes)
            for base in bases
        )

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
        known = self._device.known_fingerprints(self.layout.addresses, self.starts[first], sizes)
        return (
            fingerprints(self.on_device(self.starts[first], sum(sizes)), sizes)
            if known is None
            else known
        )

    def on_device(self, offset: int, nbytes: int) -> torch.Tensor:
        """A tensor over a part of the range, with what is behind its addresses: the bytes on the
        device, or poison."""
        return self._device.view(self.layout.addresses, offset, nbytes)

    def note_written(self) -> None:
        """The slab has changed, or is about to: forget its fingerprints, and do not use what was
        prefetched."""
        self.pages.prints = None
        self.pages.is_stale = True

    def note_shown(self) -> None:
        """The slab is shown to a caller who may write there as long as the range is offloaded: do
        not use what was prefetched."""
        self.is_shown = True
        self.pages.is_stale = True

    def outside(self) -> list[PlacedStorage]:
        """The relocated storages: alive, but not at their place, because somebody changed their
        pointer."""
        base, alive = (
            self.layout.addresses.base,
            [(entry, entry.storage()) for entry in self.placed],
        )
        return [
            entry
            for entry, storage in alive
            if storage is not None and storage.data_ptr() != base + entry.offset
        ]

    def differing(
        self, known: torch.Tensor | None, found: torch.Tensor, first: int = 0
    ) -> list[int]:
        """The pages, without unused ones, whose bytes differ: see `differing`."""
        return [i for i in differing(known, found, first) if i not in self.pages.unused]


RangeChunk = tuple[Range, int]  # a chunk of a range, by its index
