"""Move several handles at once: both directions of the link are busy, and memory that one gives up goes behind the next.

A handle that leaves is copied to the host chunk by chunk. As soon as a chunk has arrived there, its memory is taken from behind the old
addresses and, if another handle comes, put behind the new ones. So a swap needs the memory of the larger side, plus `WINDOW` chunks.

The order of the steps keeps each chunk's bytes complete somewhere: a chunk is vacated after its bytes are in the slab, and a move is
committed after its last chunk. `ManagedStorage.make_consistent` repairs the rest after an error or an interrupt.

Early chunks are remapped before anything is copied: the driver remaps a chunk in 0.1 ms while the link is idle, and in 1 ms while it is
busy (H200, chunks of 128 MiB).
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

from placement.devices.base import Device
from placement.storage import nan_check
from placement.storage.managed import ManagedStorage
from placement.storage.range import Range
from placement.storage.transfer.arrivals import WINDOW, Arrivals
from placement.storage.transfer.chunk_pool import ChunkPool
from placement.storage.transfer.departures import BATCH, Departures, Leaving
from placement.storage.transfer.result import MoveResult
from placement.storage.transfer.verification import Verifier


def nothing() -> None:
    """Do nothing: the default of `while_copying`."""


class Exchange:
    """The moves of one phase transition.

    Args:
        chunk_pool: gives chunks to the handles that come, and gets those that nobody takes.
        verifier: compares the bytes that arrive with those that were sent.
        room_bytes: device bytes that may be taken from the driver before any chunk was given up.
        early_release: give chunks that nobody waits for back to the driver while the rest is still being copied. Going back after a
            failure may then have to ask the driver for memory.
        dropping: storages whose gradients are dropped when they leave, instead of saved.
        staying: device bytes of storages that leave which may stay as early chunks, so that nobody waits while they are saved.
        while_copying: called once, if any storage leaves. The link has work by then, unless early chunks have to be remapped first.
        calls_since_seconds: from when on calls of what leaves have been waited for, see `CallGuard.wait`.
    """

    def __init__(
        self,
        device: Device,
        chunk_pool: ChunkPool,
        *,
        verifier: Verifier,
        room_bytes: int,
        early_release: bool = False,
        dropping: Collection[ManagedStorage] = (),
        staying: Mapping[ManagedStorage, int] = MappingProxyType({}),
        while_copying: Callable[[], None] = nothing,
        calls_since_seconds: float,
    ) -> None:
        self._device = device
        self._staying = staying
        self._while_copying = while_copying
        self._calls_since_seconds = calls_since_seconds
        self._chunk_pool = chunk_pool
        self._verifier = verifier
        self._dropping = dropping
        self._room_bytes = room_bytes
        self._early_release = early_release
        self._arrivals = Arrivals(device, chunk_pool)
        self._departures = Departures(device, verifier, is_awaited=self._arrivals.__bool__)
        self._arrived_early: dict[ManagedStorage, int] = {}
        """Bytes that were on the device before they were waited for, by storage that comes."""

    def run(self, leaving: Sequence[ManagedStorage], coming: Sequence[ManagedStorage]) -> dict[ManagedStorage, MoveResult]:
        """Offload `leaving` and load `coming`. Storages that are on the right side already are left alone.

        Returns when the offloaded bytes are complete on the host and their memory is vacated. The loaded ones may still be on the link; the
        calling thread's current stream waits for them.

        Raises:
            DeviceMemoryError, HostMemoryError: no memory. Every storage is settled on one side or the other.
            IntegrityError: the bytes that arrived are not those that were sent. Every storage is settled, as above.
            PhaseError: another thread is in a call of what leaves, and the deadline has passed. Every storage is settled, as above.
        """
        began = time.monotonic()
        for holding in (*leaving, *coming):  # an earlier exchange of this phase transition may have left one in between
            holding.make_consistent(self._chunk_pool)
        out = [holding for holding in leaving if holding.on_device]
        into = [holding for holding in coming if not holding.on_device]
        try:
            moved = self._offload(out, into)
            moved |= self._load(into)
        except BaseException as error:
            # Storages that give up memory come first, so that those that need it back find it. A storage that cannot be made consistent now
            # is tried again at the next phase transition.
            for holding in sorted((*out, *into), key=lambda each: each.on_device):
                try:
                    holding.make_consistent(self._chunk_pool)
                except Exception as failure:
                    error.add_note(f"placement: {holding.name!r} could not go back yet: {failure}")
            raise
        seconds = time.monotonic() - began
        return {holding: replace(each, seconds=seconds) for holding, each in moved.items()}

    # --- offloading

    def _offload(self, holdings: Sequence[ManagedStorage], coming: Sequence[ManagedStorage]) -> dict[ManagedStorage, MoveResult]:
        self._begin(holdings, coming)
        leaving = [Leaving(each, dropped=self._dropped(each), early_bytes=self._early_bytes(each)) for each in holdings]
        try:
            return self._move_out(leaving, coming)
        except BaseException:
            with contextlib.suppress(Exception):  # copies to new slabs may be under way, and only `leaving` and the traceback hold these
                self._device.sync()
            raise

    def _move_out(self, leaving: Sequence[Leaving], coming: Sequence[ManagedStorage]) -> dict[ManagedStorage, MoveResult]:
        stays = any(each.early_bytes for each in leaving)
        parts = self._start(leaving, remaps_first=stays)
        # Look at every tensor only now, while the link is busy. Vacate only after that: the memory of a range may hold new tensors, which a
        # state dict gave the object, and they must be taken in first.
        for each in leaving:
            each.adopt_new()
        for holding in coming:
            self._arrivals.expect(holding, holding.storages.adopt_from_elsewhere())
        if stays:
            self._departures.let_stay(leaving)
            self._open_window()
        self._check_newborn(leaving)
        for each, rest in zip(leaving, parts, strict=True):
            for _ in rest:  # while this vacates, the device computes the next fingerprints
                self._vacate(each, waits=False)
        for each in leaving:
            self._vacate(each, waits=True)
        mark = self._device.mark("to_host")
        for each in leaving:
            each.holding.save_early()
        if leaving and (not self._staying or any(each.fresh for each in leaving)):
            self._device.wait(mark)  # the copies of new storages, which are in no batch
        return self._decide(leaving)

    def _check_newborn(self, leaving: Sequence[Leaving]) -> None:
        """Verify the new storages before any memory goes: where a state dict was loaded back, they may lie in that of a range."""
        if self._verifier.is_on and any(each.fresh for each in leaving):
            self._device.wait(self._device.mark("to_host"))
            for each in leaving:
                self._verifier.check_newborn(each.holding, each.fresh)

    def _begin(self, leaving: Sequence[ManagedStorage], coming: Sequence[ManagedStorage]) -> None:
        """Begin the moves, and map what arrived early behind the addresses of what comes."""
        for holding in leaving:  # before the device is waited for: a call starts kernels until its end
            holding.end_calls(self._calls_since_seconds)
        if leaving:
            self._device.sync()
        for holding in (*leaving, *coming):
            holding.begin_move(self._chunk_pool)
        for holding, asked in [(each, nan_check.ask(each)) for each in leaving]:
            nan_check.put_right(holding, asked)
        for holding in coming:
            self._arrivals.expect(holding, holding.ranges)
        self._limit_room(leaving, coming)
        self._arrived_early = {holding: holding.take_early() for holding in coming}

    def _start(self, leaving: Sequence[Leaving], *, remaps_first: bool) -> list[Iterator[None]]:
        """Give the link work. Returns the unfinished `enqueue` of each storage. They are finished here if anything has to be copied.

        Args:
            remaps_first: some chunks stay as early ones. Until `let_stay` has remapped them, the link gets no work.
        """
        parts = [self._departures.enqueue(each, holds_back=remaps_first) for each in leaving]
        for part in parts:
            next(part, None)
        if not leaving:  # two bursts keep the link busy while every tensor is looked at
            self._arrivals.bring_more()
            self._arrivals.bring_more()
        elif not remaps_first:
            self._open_window()
        if remaps_first or any(each.copied_bytes for each in leaving):
            for part in parts:
                deque(part, maxlen=0)
        if leaving:
            self._while_copying()
        return parts

    def _open_window(self) -> None:
        """Start the first copies to the device, into memory that the driver has free."""
        self._arrivals.fill(fresh=self._arrivals.window(self._room_bytes), longest=1)

    def _vacate(self, leaving: Leaving, *, waits: bool) -> None:
        """Take away the memory behind chunks that are on the host by now, in order, and put it behind chunks that come.

        Args:
            waits: also wait for chunks that are still being copied.
        """
        while leaving.batches and (waits or leaving.batches[0].mark is None):
            batch = leaving.batches.popleft()
            if batch.mark is not None:
                self._device.wait(batch.mark)
            self._verifier.check_host(leaving.holding, batch.cut(leaving.chosen), leaving.on_host)
            leaving.holding.vacate(batch.range, batch.first, batch.last, self._chunk_pool)
            if self._early_release and not self._arrivals:
                self._chunk_pool.release()
            self._arrivals.fill(fresh=0, longest=BATCH)

    def _dropped(self, holding: ManagedStorage) -> tuple[Range, ...] | None:
        return holding.gradients.ranges(holding.ranges) if holding in self._dropping else None

    def _early_bytes(self, holding: ManagedStorage) -> int:
        # Not where something may use the host copy at any moment, also through a view, or where what arrives there is to be compared.
        shown = holding.storages.state_dict_tensors
        return 0 if shown or shown.are_held or self._verifier.is_on else self._staying.get(holding, 0)

    def _limit_room(self, leaving: Sequence[ManagedStorage], coming: Sequence[ManagedStorage]) -> None:
        """Limit the memory that a swap takes, however much is free, to the larger side and the window, and leave the rest to others."""
        if leaving and coming:
            freed = sum(max(0, each.chunk_bytes - self._early_bytes(each)) for each in leaving)
            gain = sum(each.storages.device_bytes - each.prefetched_bytes for each in coming) - freed
            self._chunk_pool.room_bytes = min(self._chunk_pool.room_bytes, max(0, gain) + WINDOW * self._device.chunk_bytes)

    def _decide(self, leaving: Sequence[Leaving]) -> dict[ManagedStorage, MoveResult]:
        """Commit the offloads. Every byte that leaves is complete on the host."""
        moved = {}
        for each in leaving:
            found = each.holding.commit_offload(each.fresh, each.prints, each.dropped)
            each.holding.make_consistent(self._chunk_pool)
            moved[each.holding] = replace(
                found, copied_bytes=each.copied_bytes, skipped_bytes=each.skipped_bytes, rewritten_chunks=each.rewritten_chunks
            )
            each.fresh = ()  # the ranges' claims hold the storages, which would count as references below
        for each in leaving:
            each.holding.storages.count_uses()
        if any(each.is_first for each in leaving):
            self._device.trim()  # else the memory that torch freed stays in its cache, where other processes cannot use it
        return moved

    # --- loading

    def _load(self, holdings: Sequence[ManagedStorage]) -> dict[ManagedStorage, MoveResult]:
        while self._arrivals:
            self._arrivals.bring_more()
        if holdings:
            self._device.order("to_device")  # what an offload leaves to be saved goes on beside the work that follows
        complete = [holding for holding in holdings if holding.is_complete]
        for holding in complete:
            self._verifier.check_device(holding)
        for holding in complete:
            holding.commit_load()
            holding.make_consistent(self._chunk_pool)
        brought, early = self._arrivals.brought_bytes, self._arrived_early
        return {holding: MoveResult(copied_bytes=brought[holding], prefetched_bytes=early[holding]) for holding in holdings}
