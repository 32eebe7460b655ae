"""Prefetch: bring pages of offloaded storages to the device while a phase computes, for a later
load. Their memory is aside until then.

`divide` cuts the room beside the phase into shares: the bytes that a handle gets at once, and those
that it gets when earlier offloads are saved. Memory is put aside for all pages at once, at the end
of a phase transition: the driver is quick while the link is idle.

The copies are started in bursts, so that the next phase transition waits for one or two bursts at
most. A thread starts them: each burst takes it a few calls, which a busy interpreter delays by
milliseconds, while the copies of the burst before keep the link busy. Where memory lacks because an
offload has left pages that are still being saved, the thread gives it to other pages as they are
saved.
"""

from __future__ import annotations

import itertools
import operator
import threading
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import NamedTuple

from placement.core.errors import DeviceMemoryError
from placement.core.interrupts import BackgroundThread
from placement.core.journal import logger
from placement.core.states import Plan
from placement.devices.base import Device
from placement.devices.memory import Mark
from placement.planning.planner import Planner
from placement.registration.handle import Handle
from placement.storage.managed import ManagedStorage
from placement.storage.pages import Behind, ChunkPool, Pages, Part, fill, runs
from placement.storage.range import Range, RangeChunk
from placement.storage.transfer.streamed import page_runs

BURST_CHUNKS = 4
"""The bytes of a burst, in full chunks: 1 GiB on CUDA, which takes 19 ms at 55 GB/s. A Python
thread that has to wait 5 ms for each of three calls (the interpreter's switch interval) keeps up
with that."""
_AHEAD = 2  # the number of bursts whose copies are started and not complete


class Prefetcher:
    """Carries out `Plan.prefetch` for one manager. Called with the manager's lock held.

    A phase transition calls `pause`, then `look_ahead` before it moves anything, and `begin` when
    everything is where it belongs. Where nothing is early (`has_any`), `pause` does nothing, and
    the other two have something to do only for a plan that prefetches or streams.
    """

    def __init__(self, device: Device, handles: Mapping[str, Handle], planner: Planner) -> None:
        self._device = device
        self._handles = handles
        self._planner = planner
        self.copies = _Copies(device)
        # whether anything may have arrived early and be unused, or is on its way
        self.has_any = False
        self._most_bytes: dict[str, int] = {}
        """The most bytes that may be early in a phase in which torch's allocator has found no
        memory before."""

    def pause(self) -> None:
        """Start no further copy until this phase transition is over, or `go_on`."""
        self.copies.pause()

    def look_ahead(
        self, name: str, plan: Plan, chunk_pool: ChunkPool
    ) -> tuple[Mapping[ManagedStorage, int], int]:
        """Give up pages aside for which the plan has no use or no room.

        Returns the device bytes of storages that leave which stay aside, and the device bytes given
        up, whose chunks are in `chunk_pool`.
        """
        shares = self._shares(plan, self._room_bytes(name, plan))
        given_bytes = 0
        for handle in self._handles.values():
            storage = handle.holding
            if storage is not None and not plan.on_device(handle.name):
                keep_bytes = shares[storage].first_bytes if storage in shares else 0
                given_bytes += storage.give_up_early(keep_bytes, chunk_pool)
        self.has_any = bool(shares) or any(
            handle.storage.prefetched_bytes for handle in self._handles.values()
        )
        staying = {}
        for storage, share in shares.items():
            if storage.on_device and share.first_bytes:
                staying[storage] = share.first_bytes
                self._reserve_aside(storage)
        return staying, given_bytes

    def give_up(self, name: str) -> None:
        """Return the memory of all pages aside to the driver. The phase gets half as much from now
        on."""
        self.pause()
        chunk_pool = ChunkPool(self._device)
        given_bytes = 0
        for handle in self._handles.values():
            if handle.holding is not None:
                given_bytes += handle.holding.give_up_early(0, chunk_pool)
        chunk_pool.release()
        self._planner.memory = self._device.memory()
        if given_bytes:
            self._most_bytes[name] = given_bytes // 2
            logger.warning(
                "out of memory in phase %s: gave up %s early bytes; it gets half as many from now "
                "on",
                name,
                f"{given_bytes:,}",
            )

    def go_on(self, name: str, plan: Plan) -> None:
        """Start copying again after `pause`, while the phase goes on."""
        chunk_pool = ChunkPool(self._device)
        try:
            self.begin(name, plan, chunk_pool)
        finally:
            chunk_pool.release()

    def begin(self, name: str, plan: Plan, chunk_pool: ChunkPool) -> None:
        """Bring the pages that the plan wants early, as far as there is room beside the phase,
        whose plan has been carried out.

        A device that fails says so at the next phase transition or step. `chunk_pool` has chunks
        that are free. Those that it leaves go back to the driver.
        """
        try:
            first_chunks = {}
            for handle in self._handles.values():
                streamed = handle.streamed
                if handle.is_streaming and streamed is not None and streamed.first_chunks:
                    first_chunks[streamed.storage] = streamed.first_chunks
            if plan.prefetch or first_chunks:
                self._bring(name, plan, first_chunks, chunk_pool)
        except Exception as error:
            self.pause()
            # as text: a log record that is kept must keep no frames
            logger.warning("nothing more comes early in phase %s: %s", name, str(error))

    def _bring(
        self,
        name: str,
        plan: Plan,
        first_chunks: Mapping[ManagedStorage, Sequence[RangeChunk]],
        chunk_pool: ChunkPool,
    ) -> None:
        memory = self._device.memory()
        early_bytes = sum(handle.storage.prefetched_bytes for handle in self._handles.values())
        spare_bytes = (
            memory.free_bytes + chunk_pool.held_bytes - self._planner.growth_bytes(name, memory)
        )
        room_bytes = min(self._room_bytes(name, plan), early_bytes + spare_bytes)
        chunk_pool.room_bytes = max(0, room_bytes - early_bytes - chunk_pool.held_bytes)
        self.has_any = True  # state that was born in the phase before has a place only now
        shares = self._shares(plan, room_bytes)
        bursts: deque[_Burst] = deque()
        for storage, chunks in first_chunks.items():
            spare_bytes -= self._put_first_aside(storage, chunks, spare_bytes, chunk_pool)
            bursts.extend(_bursts(storage))
        for storage, share in shares.items():
            try:
                self._put_aside(storage, share.first_bytes - storage.prefetched_bytes, chunk_pool)
            except DeviceMemoryError:  # others have taken it
                break
            finally:
                bursts.extend(_bursts(storage))
        bursts.extend(_successive(shares))
        self.copies.start(bursts)

    def _put_first_aside(
        self,
        storage: ManagedStorage,
        chunks: Sequence[RangeChunk],
        room_bytes: int,
        chunk_pool: ChunkPool,
    ) -> int:
        """Put memory aside for the first buckets of a streamed step, whose window the plan counts.
        Returns the bytes: all, or 0."""
        self._reserve_aside(storage)
        lacking = []
        nbytes = 0
        for r, index in chunks:
            if _can_be_aside(storage, r) and r.pages.table[index].memory is None:
                lacking.append((r, index))
                nbytes += r.chunk_sizes[index]
        if nbytes > room_bytes:
            return 0
        for r, run in page_runs(lacking):
            r.pages.put(run, chunk_pool, Behind.ASIDE)
        return nbytes

    def _put_aside(self, storage: ManagedStorage, room_bytes: int, chunk_pool: ChunkPool) -> None:
        """Put memory aside for the first pages of a storage that have none, as far as there is
        room."""
        self._reserve_aside(storage)
        for r in storage.ranges:
            if not _can_be_aside(storage, r):
                continue
            if r.pages.is_stale:
                r.pages.discard(chunk_pool)
            for run in runs(_lacking_within(r.pages, room_bytes)):
                r.pages.put(run, chunk_pool, Behind.ASIDE)
                room_bytes -= r.pages.bytes_of(run)

    def _reserve_aside(self, storage: ManagedStorage) -> None:
        """Reserve addresses aside for the ranges of a storage whose pages can be there."""
        for r in storage.ranges:
            if _is_free(storage, r):
                r.pages.reserve_aside(self.copies.pause)

    def _room_bytes(self, name: str, plan: Plan) -> int:
        room_bytes = self._planner.room_bytes(name, plan)
        return min(room_bytes, self._most_bytes.get(name, room_bytes))

    def _shares(self, plan: Plan, room_bytes: int) -> dict[ManagedStorage, Share]:
        """The storages of which bytes may be on the device early, in the plan's order, each with
        its share of the room."""
        wishes: dict[ManagedStorage, Wish] = {}
        for name, most_bytes in plan.prefetch.items():
            storage = self._handles[name].holding if name in self._handles else None
            if storage is not None and storage.can_prefetch and not plan.on_device(name):
                nbytes = storage.device_bytes
                held_bytes = nbytes if storage.on_device else storage.left_bytes
                wishes[storage] = Wish(min(most_bytes, nbytes), held_bytes)
        shares = divide(room_bytes, [*wishes.values()])
        return dict(zip(wishes, shares, strict=True))


# --- the room


class Wish(NamedTuple):
    """The bytes of one handle that a plan wants to have early."""

    wanted_bytes: int
    held_bytes: int = 0
    """Device bytes that the handle has now and that may have to be saved before others can have
    their memory: those of a handle that leaves the device, and those that an earlier offload has
    left."""


class Share(NamedTuple):
    """The device bytes of one handle that may be aside at first, and in the end: when what earlier
    offloads have left is saved."""

    first_bytes: int
    last_bytes: int


def divide(room_bytes: int, wishes: Sequence[Wish]) -> list[Share]:
    """Divide the room. The wishes are in the order of the plan, soonest needed first; the shares
    are in the same order.

    In the end, the first handles have all the bytes that they want. At first, each handle keeps the
    wanted bytes that it holds, and the first handles have the room beside these.
    """
    last_room = max(0, room_bytes)
    first_room = last_room
    kept_bytes = []
    for wish in wishes:
        kept = min(wish.held_bytes, wish.wanted_bytes, first_room)
        kept_bytes.append(kept)
        first_room -= kept
    shares = []
    for wish, kept in zip(wishes, kept_bytes, strict=True):
        last = min(wish.wanted_bytes, last_room)
        added = min(max(0, last - kept), first_room)
        shares.append(Share(kept + added, last))
        first_room -= added
        last_room -= last
    return shares


# --- the pages


class _Burst(NamedTuple):
    parts: list[Part]
    # the pages that give their memory to this burst's once they are saved; empty if it has memory
    sources: Sequence[Part] = ()


def _bursts(storage: ManagedStorage) -> Iterator[_Burst]:
    """The copies to pages that have their memory, cut into bursts."""
    missing = []
    for r in storage.ranges:
        missing += [(r.pages, index) for index in r.pages.unfilled()]
    for start in range(0, len(missing), BURST_CHUNKS):
        yield _Burst(_by_table(missing[start : start + BURST_CHUNKS]))


def _successive(shares: Mapping[ManagedStorage, Share]) -> Iterator[_Burst]:
    """The copies to pages that get their memory from pages that are being saved, cut into
    bursts."""
    sources = _surplus_pages(shares)
    for storage, share in shares.items():
        room_bytes = share.last_bytes - storage.prefetched_bytes
        for r in storage.ranges:
            if not _can_be_aside(storage, r):
                continue
            lacking = _lacking_within(r.pages, room_bytes)
            for size, of_size in itertools.groupby(lacking, key=r.chunk_sizes.__getitem__):
                indices = [*itertools.islice(of_size, len(sources[size]))]
                room_bytes -= size * len(indices)
                for start in range(0, len(indices), BURST_CHUNKS):
                    receiving = indices[start : start + BURST_CHUNKS]
                    giving = [sources[size].popleft() for _ in receiving]
                    yield _Burst([(r.pages, receiving)], _by_table(giving))


def _surplus_pages(
    shares: Mapping[ManagedStorage, Share],
) -> defaultdict[int, deque[tuple[Pages, int]]]:
    """The pages of earlier offloads beyond the shares, by their bytes. They give their memory to
    others once they are saved."""
    pages: defaultdict[int, deque[tuple[Pages, int]]] = defaultdict(deque)
    for storage, share in shares.items():
        surplus = storage.prefetched_bytes - share.last_bytes
        for r in storage.ranges:
            for index in r.pages.left():
                size = r.chunk_sizes[index]
                if size <= surplus:
                    pages[size].append((r.pages, index))
                    surplus -= size
    return pages


def _by_table(pages: Iterable[tuple[Pages, int]]) -> list[Part]:
    """Pages that follow one another in a table, as one part."""
    parts: list[Part] = []
    for table, of_table in itertools.groupby(pages, key=operator.itemgetter(0)):
        parts.append((table, [index for _, index in of_table]))
    return parts


def _can_be_aside(storage: ManagedStorage, r: Range) -> bool:
    return r.pages.can_be_aside and _is_free(storage, r)


def _is_free(storage: ManagedStorage, r: Range) -> bool:
    """Whether the host copy is this process's alone, and no caller may write there."""
    is_exposed = r.is_shown and storage.state_dict_tensors.are_held
    return not (r.is_shared or is_exposed or r.moving_in is not None)


def _lacking_within(pages: Pages, room_bytes: int) -> list[int]:
    """The first pages without memory, as many as fit into `room_bytes`."""
    lacking = []
    for index in pages.without_memory():
        room_bytes -= pages.sizes[index]
        if room_bytes < 0:
            break
        lacking.append(index)
    return lacking


class _Copies:
    """The copies to pages that are aside, started burst by burst. The pages keep this alive, and it
    keeps no handle alive."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._lock = threading.RLock()  # reentrant: a collection on the thread may end the manager
        """Held while a burst is taken and started."""
        self._bursts: deque[_Burst] = deque()
        """The bursts still to be started. Each `start` has its own, so that the thread of an
        earlier one ends."""
        # the page tables that get memory while the phase computes
        self._receivers: list[Pages] = []
        self.discarded_bytes = 0  # device bytes that arrived early and were given up unused, so far

    def pause(self, discarded_bytes: int = 0) -> None:
        """Return once it is certain that no further copy is started before the next `start`. Waits
        while the thread starts one burst.

        `discarded_bytes`: bytes that were copied in vain, to be counted.
        """
        self.discarded_bytes += discarded_bytes
        self._bursts = deque()  # first: the thread may have the lock again before this has it
        with self._lock:
            while self._receivers:
                self._receivers.pop().is_receiving = False

    def start(self, bursts: deque[_Burst]) -> None:
        """Start the first bursts here, as far as they have memory, and the rest in a thread. Call
        `pause` before."""
        self._bursts = bursts
        for burst in bursts:
            if burst.sources:
                for pages, _ in burst.parts:
                    self._receivers.append(pages)
                    pages.is_receiving = True
        started: deque[Mark] = deque()
        while bursts and not bursts[0].sources and len(started) < _AHEAD:
            self._start(bursts.popleft(), started)
        if bursts:
            BackgroundThread(
                "placement-prefetch", partial(self._start_rest, bursts, started)
            ).start()

    def _start_rest(self, bursts: deque[_Burst], started: deque[Mark]) -> None:
        try:
            while bursts and bursts is self._bursts:
                self._wait_for(bursts[0], started)
                with self._lock:
                    if bursts is self._bursts:
                        self._start(bursts.popleft(), started)
        # the device failed: the next phase transition meets the same, and says so
        except Exception as error:
            logger.warning("prefetch stopped: %s", str(error))
        finally:
            bursts.clear()

    def _wait_for(self, burst: _Burst, started: deque[Mark]) -> None:
        """Wait until the link has done with an earlier burst, and the memory of the next one is
        saved."""
        if len(started) >= _AHEAD:
            self._device.wait(started.popleft())
        for pages, indices in burst.sources:
            pages.wait(indices)

    def _start(self, burst: _Burst, started: deque[Mark]) -> None:
        chunk_pool = ChunkPool(self._device)
        for pages, indices in burst.sources:
            pages.vacate(indices, chunk_pool)
        if burst.sources:
            for pages, indices in burst.parts:
                pages.put(indices, chunk_pool, Behind.ASIDE)
        fill(self._device, burst.parts)
        pages, indices = burst.parts[0]
        mark = pages.table[indices[0]].mark
        if mark is not None:
            started.append(mark)
