"""Weights without a host copy of their own: an optimizer has float32 master weights, and the weights are their cast, bit for bit.

While the optimizer is offloaded, its host copy has the weights, too. A load casts them on the device, and who reads them on the host casts
them there. This holds as long as three things are seen to:

1. Before the masters leave the device, the fingerprints that their cast would have are computed (`note`). The offload of the weights
   compares its own with them. Where they differ, whatever the reason, the weights are saved like any others.
2. Weights whose masters are on the device are saved like any others, too. So what an offload leaves to the masters is in their host copy.
3. Before the masters' host copy changes, leaves, or is shown to somebody who may write there, the weights get a host copy of their own
   (`make_own`). So they do before the masters are loaded without them.

NaN has many bit patterns, and a cast may choose another one on the device than on the host. So weights with NaN are always saved.
"""

from __future__ import annotations

import bisect
import itertools
import threading
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from typing import NamedTuple

import torch

from placement.core.errors import RegistrationError
from placement.devices.base import Device
from placement.devices.host.disk_file import release, renew
from placement.devices.host.slab import Slab, upload
from placement.devices.memory import HostSlab
from placement.ownership.adapter import Adapter
from placement.ownership.optimizer import OptimizerAdapter
from placement.storage.layout import Adoptee, Owner, RangeLayout, byte_view
from placement.storage.managed import ManagedStorage, MoveResult
from placement.storage.pages import Behind, Pages
from placement.storage.range import Range
from placement.storage.scan import StorageScanner
from placement.storage.transfer.chunk_pool import ChunkPool
from placement.storage.transfer.fingerprint import fingerprints

STAGING_BYTES = 64 << 20
"""The bytes of masters that are on the device at a time, where weights are cast from masters that stay on the host."""
_Spans = Sequence[tuple[int, int, torch.Tensor]]
"""For weights, in order: first byte and end in their storage or range, and their masters, float32 and one-dimensional."""


class _Piece(NamedTuple):
    """A weight's bytes in its range, and where its masters lie in theirs."""

    start: int
    end: int
    masters: Range
    offset: int


class CastPages(Pages):
    """Pages that do not stay aside: nothing may copy them from or to the host copy beside a phase transition."""

    @property
    def can_be_aside(self) -> bool:
        return False

    def reserve_aside(self, stop: object) -> None:
        """Do nothing."""


class CastRange(Range):
    """A range of weights that may be the cast of masters. Its slab has memory only while they have a host copy of their own."""

    is_replica = True
    can_be_cast = True
    _pages_class = CastPages
    key: str
    """See `OptimizerAdapter.masters`."""
    dtype: torch.dtype
    is_cast = False
    """Whether the values are the cast of what the masters' host copy has, and the slab does not count."""
    expected: torch.Tensor | None = None
    """The fingerprints of the cast of what the masters' host copy has, or will have when their offload is over; None if unknown."""
    pieces: Sequence[_Piece] = ()
    masters_of: weakref.ref[ManagedStorage] | None = None
    """The optimizer's storage."""

    def __init__(self, device: Device, layout: RangeLayout, slab: HostSlab, moving_in: tuple[Adoptee, ...], transient: bool) -> None:
        super().__init__(device, layout, slab, moving_in, transient)
        self._device = device
        self.lock = threading.RLock()
        """Held while bytes are cast into the slab, and from the decision of an offload that the weights are a cast to its end."""

    @property
    def slab(self) -> HostSlab:
        self.have()
        return super().slab

    def view(self, offset: int, nbytes: int, *, even_if_lost: bool = False) -> torch.Tensor:
        self.have()
        return super().view(offset, nbytes, even_if_lost=even_if_lost)

    def have(self) -> None:
        """Have a host copy of their own, from now on until an offload finds them to be a cast. Any thread may call this.

        Raises:
            HostMemoryError: there is not enough memory for it, or for masters that are on disk. Nothing changed.
            IntegrityError: values of the masters are lost.
        """
        with self.lock:
            slab = self.host
            if isinstance(slab, Slab) and slab.is_released:
                renew(slab, self._cast_to_host if self.is_cast else None)
                self.prints = self.prints if self.is_cast else None
            elif self.is_cast:
                self._cast_to_host()
            self.is_cast = False

    def _cast_to_host(self) -> bool:
        cast_into(self.host.view(0, self.nbytes), 0, self.dtype, self.spans())
        return True

    def let_go(self) -> None:
        """Give the slab's memory back if the weights are a cast."""
        if self.is_cast and isinstance(self.host, Slab) and not self.host.is_released:
            with suppress(OSError):  # the memory stays until the next offload
                release(self.host)

    @property
    def has_resting_masters(self) -> bool:
        """Whether the masters' host copy counts, and nothing is moving them."""
        optimizer = None if self.masters_of is None else self.masters_of()
        return optimizer is not None and not optimizer.on_device and optimizer.is_consistent

    def spans(self) -> _Spans:
        """The masters where their newest values are."""
        optimizer = None if self.masters_of is None else self.masters_of()
        on_device = optimizer is not None and optimizer.on_device
        values = {
            r: (self._device.view(r.layout.addresses, 0, r.nbytes) if on_device else r.view(0, r.nbytes)).view(torch.float32)
            for r in {piece.masters for piece in self.pieces}
        }
        return [(each.start, each.end, values[each.masters][each.offset // 4 :]) for each in self.pieces]

    def compute_expected(self) -> torch.Tensor | None:
        """The value for `expected` of masters that are on the device. None where there is no memory to compute it."""
        try:
            staging = torch.empty(max(self.used_sizes), dtype=torch.uint8, device=self._device.torch_device)
        except torch.OutOfMemoryError:
            return None
        spans, found = self.spans(), []
        for start, nbytes in zip(self.starts, self.used_sizes, strict=True):
            page = staging[:nbytes]
            cast_into(page, start, self.dtype, spans)
            found.append(fingerprints(page, [nbytes]) + page.view(self.dtype).isnan().any())  # with NaN: one that no page has
        return torch.cat(found)


@torch.no_grad()
def cast_into(out: torch.Tensor, start: int, dtype: torch.dtype, spans: _Spans) -> None:
    """Write the cast of masters into bytes of their weights' storage or range, and zeros where there are no weights.

    Args:
        out: uint8; the bytes from `start` on.
    """
    out.zero_()
    end = start + out.numel()
    into, values = [], []
    first = bisect.bisect_right(spans, start, key=lambda each: each[1])
    for begin, stop, masters in itertools.takewhile(lambda each: each[0] < end, itertools.islice(spans, first, None)):
        low, high = max(begin, start), min(stop, end)
        into.append(out[low - start : high - start].view(dtype))
        values.append(masters[(low - begin) // dtype.itemsize : (high - begin) // dtype.itemsize])
    if into and values[0].device == out.device:
        torch._foreach_copy_(into, values)
        return
    for whole, those in zip(into, values, strict=True):
        for target, source in zip(whole.split(STAGING_BYTES // 4), those.split(STAGING_BYTES // 4), strict=True):
            upload(target, source, non_blocking=True)


class CastScanner(StorageScanner):
    """A scanner whose first range has the weights that are the cast of an optimizer's masters at registration.

    Args:
        masters: the optimizer, until the object is adopted.
    """

    def __init__(self, device: Device, adapter: Adapter, name: str, owner: Owner, masters: OptimizerAdapter) -> None:
        super().__init__(device, adapter, name, owner)
        self._masters: OptimizerAdapter | None = masters

    def adopt_first(self, adoptees: list[Adoptee]) -> tuple[Range, ...]:
        assert self._masters is not None
        key, dtype, cast = self._find(adoptees, self._masters)
        self._masters = None
        fresh = self.adopt([each for each in adoptees if each.storage._cdata in cast], range_class=CastRange)
        assert isinstance(fresh, CastRange)
        fresh.key, fresh.dtype = key, dtype
        return fresh, *super().adopt_first([each for each in adoptees if each.storage._cdata not in cast])

    def _find(self, adoptees: Sequence[Adoptee], optimizer: OptimizerAdapter) -> tuple[str, torch.dtype, set[int]]:
        """The key and the dtype for which most weights are the cast of masters, and these weights' storages (`_cdata`)."""
        spans: dict[tuple[str, torch.dtype], dict[int, list[tuple[int, int, torch.Tensor]]]] = {}
        for key, weight, masters in optimizer.masters():
            start = weight.storage_offset() * weight.itemsize
            those = spans.setdefault((key, weight.dtype), {}).setdefault(weight.untyped_storage()._cdata, [])
            those.append((start, start + weight.nbytes, masters.detach().view(-1)))
        storages = {each.storage._cdata: each.storage for each in adoptees}
        found = {
            (key, dtype): {one for one, those in each.items() if one in storages and _is_cast(byte_view(storages[one]), dtype, sorted(those, key=_start))}
            for (key, dtype), each in spans.items()
        }
        (key, dtype), cast = max(
            found.items(), key=lambda each: sum(storages[one].nbytes() for one in each[1]), default=(("", torch.bfloat16), set[int]())
        )
        if not cast:
            raise RegistrationError(
                f"{self.name!r}: none of its weights is the cast of a float32 master weight that this process has in masters=. Needed are "
                "weights in bfloat16 or float16, and for each a float32 tensor of its shape, in the optimizer's state or stepped in its "
                "place, which casts to it bit for bit. Make the masters before you register the module (with a step, or from a "
                "checkpoint). A distributed optimizer has those of a shard on each rank, which is not supported. "
                "Else register it without masters=."
            )
        return key, dtype, cast


def _start(span: tuple[int, int, torch.Tensor]) -> int:
    return span[0]


def _is_cast(whole: torch.Tensor, dtype: torch.dtype, spans: _Spans) -> bool:
    """Whether the bytes of a storage or a range are the cast of masters, zeros where no weights are, and without NaN."""
    for start in range(0, len(whole), STAGING_BYTES):
        piece = whole[start : start + STAGING_BYTES]
        cast = torch.empty_like(piece)
        cast_into(cast, start, dtype, spans)
        if not cast.equal(piece) or bool(cast.view(dtype).isnan().any()):
            return False
    return True


class CastStorage(ManagedStorage):
    """The storage of a module with a `CastRange`."""

    def __init__(self, device: Device, adapter: Adapter, name: str, masters: OptimizerAdapter) -> None:
        super().__init__(device, adapter, name, False, CastScanner(device, adapter, name, self, masters))
        self._is_waiting = False
        """Whether pages of a load have still to be cast: see `complete`."""
        self._locked: list[CastRange] = []

    can_prefetch = False

    def _cast_ranges(self) -> Iterator[CastRange]:
        return (r for r in self.ranges if isinstance(r, CastRange))

    # --- what the masters do

    def rest_on(self, optimizer: ManagedStorage) -> None:
        """Leave the weights to the masters of an optimizer that was just registered. Both are offloaded."""
        optimizer.casts = (*optimizer.casts, self)
        for r in self._cast_ranges():
            self._note_places(r, optimizer)
            if not self.on_device and not r.host.has_views and r.pieces:
                r.is_cast = _is_cast(r.view(0, r.nbytes), r.dtype, r.spans())
                r.let_go()

    def note(self, optimizer: ManagedStorage) -> None:
        """Called when an optimizer is about to leave the device, which has been waited for."""
        is_written = bool(optimizer.state_dict_tensors) or optimizer.state_dict_tensors.are_held
        for r in self._cast_ranges():
            with r.lock:
                if not r.is_cast:
                    self._note_places(r, optimizer)
                    r.expected = r.compute_expected() if self.on_device and r.pieces and not is_written else None

    def _note_places(self, r: CastRange, optimizer: ManagedStorage) -> None:
        assert isinstance(optimizer.adapter, OptimizerAdapter)
        found = []
        for key, weight, masters in optimizer.adapter.masters() if r.moving_in is None else ():
            ours, theirs = self.by_address.find(weight), optimizer.by_address.find(masters)
            if key == r.key and ours is not None and ours[0] is r and theirs is not None:
                start = ours[1] + weight.storage_offset() * weight.itemsize
                found.append(_Piece(start, start + weight.nbytes, theirs[0], theirs[1] + masters.storage_offset() * masters.itemsize))
        r.pieces, r.masters_of = sorted(found, key=lambda piece: piece.start), weakref.ref(optimizer)

    def masters_change(self, *, is_coming: bool = False) -> None:
        """Called before the masters' host copy changes or goes, or may, and before they are loaded.

        Args:
            is_coming: the weights are loaded with them.

        Raises:
            HostMemoryError, IntegrityError: see `CastRange.have`.
        """
        for r in self._cast_ranges():
            if r.is_cast and not is_coming:
                r.have()
            r.expected = None

    # --- loading

    def bring(self, r: Range, indices: Sequence[int]) -> int:
        if not isinstance(r, CastRange) or not r.is_cast:
            return super().bring(r, indices)
        self._is_waiting = True
        r.pages.note_filling(indices)
        return 2 * r.pages.used_bytes_of(indices) if r.has_resting_masters else 0

    @property
    def is_complete(self) -> bool:
        return not self._is_waiting

    def complete(self) -> None:
        self.device.order()
        for r in self._cast_ranges():
            if r.is_cast:
                self._cast(r, range(len(r.chunk_sizes)))
        self._is_waiting = False

    def _cast(self, r: CastRange, indices: Iterable[int]) -> None:
        spans = r.spans()
        for index in indices:
            cast_into(self.device.view(r.layout.addresses, r.starts[index], r.used_sizes[index]), r.starts[index], r.dtype, spans)
        if r.has_resting_masters:
            self.device.wait_for_work()  # nothing else knows that their host copy is being read

    def commit_load(self) -> None:
        cast = [r for r in self._cast_ranges() if r.is_cast]
        for r in cast:
            r.prints = None
        super().commit_load()
        for r in cast:
            r.expected, r.is_cast = r.prints if r.has_resting_masters else None, False

    def make_consistent(self, chunk_pool: ChunkPool) -> None:
        if not self.on_device:
            self._is_waiting = False
        try:
            super().make_consistent(chunk_pool)
        finally:
            while self._locked:
                self._locked.pop().lock.release()

    def settle_on_device(self, r: Range, chunk_pool: ChunkPool) -> None:
        if isinstance(r, CastRange) and r.is_cast:  # an offload has failed, and some pages may have given their memory up
            optimizer = None if r.masters_of is None else r.masters_of()
            if optimizer is not None:
                optimizer.make_consistent(chunk_pool)
            self.device.sync()
            lacking = r.pages.without_memory()
            r.pages.put(lacking, chunk_pool.take_wiped([r.chunk_sizes[index] for index in lacking]), chunk_pool)
            self._cast(r, lacking)
            r.pages.note_changed(lacking)
            r.is_cast = False
        super().settle_on_device(r, chunk_pool)

    # --- offloading

    def pages_to_save(self, r: Range, prints: torch.Tensor, changed: Sequence[int]) -> Sequence[int]:
        if not isinstance(r, CastRange):
            return changed
        if r.expected is not None and not r.host.has_views and r.expected.cpu().equal(prints):
            r.lock.acquire()
            self._locked.append(r)
            r.is_cast = True
            return ()
        if not r.host.held_bytes:
            changed = range(len(prints))
        r.have()
        return changed

    def commit_offload(
        self, fresh: tuple[Range, ...], prints: Sequence[tuple[Range, torch.Tensor]], dropped: tuple[Range, ...] | None = None
    ) -> MoveResult:
        found = super().commit_offload(fresh, prints, dropped)
        for r in self._cast_ranges():
            r.let_go()
        return found

    def before_forced_offload(self, r: Range) -> None:
        if isinstance(r, CastRange):
            if r.is_cast:
                r.pages.note_clean(r.pages.at(Behind.OWN))
            r.have()
