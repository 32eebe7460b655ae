"""The page table of a range: where the memory and the newest bytes of each page are, and the few
operations that change it.

A page is a chunk-sized piece of a range. Its memory is nowhere, behind the range's own addresses
(`OWN`), or behind addresses aside (`ASIDE`). Where it is not behind the own ones, poison is.
Between two mappings, or after one that failed, a page has memory that is behind no address
(`NOWHERE` with memory). Its newest bytes are in the host copy, on the device, or on both sides.

* `put`: memory behind pages that have none. `fill`: a copy to the device where the host copy is
  newest.
* `show` and `hide`: the same memory behind the own addresses, or aside. Nothing is copied.
* `save`: a copy to the host where the device is newest.
* `vacate`: wait for copies, poison, and the memory to the `ChunkPool`, where it waits for the next
  page that takes it. `discard`: the same for memory that is aside.
* `give_up`: the same for good, of pages in which nothing lies any more.
* `settle`: from any state to one side.

Each takes page numbers, is idempotent (`put` only for pages without memory), and joins neighbours,
so that the driver gets few calls. Each can fail in a call of the device. The table is right then,
no bytes are lost, and `settle` is the only recovery. `newest` is set when a copy is started; the
page's mark tells when that is so in fact. Memory is taken away only after a wait for the mark.

The thread that holds the manager's lock may change a page: a phase transition, a streamed step, a
registration or its end, a checkpoint. So may the thread of a prefetch while a phase computes, until
`Prefetcher.pause` stops it. Other threads read the host copy, and call `wait_until_saved` before.
"""

from __future__ import annotations

import enum
import itertools
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch

from placement.core.errors import DeviceMemoryError
from placement.devices.base import Device
from placement.devices.memory import Addresses, Chunk, Copy, Direction, HostSlab, Mark


class Side(enum.Flag):
    """Where the newest bytes of a page are."""

    HOST = enum.auto()
    DEVICE = enum.auto()
    BOTH = HOST | DEVICE


class Behind(enum.Enum):
    """Where the memory of a page shows."""

    NOWHERE = enum.auto()
    OWN = enum.auto()
    ASIDE = enum.auto()


@dataclass(slots=True)
class Page:
    """A page. Its fingerprint is in `Pages.prints`."""

    memory: Chunk | None = None
    behind: Behind = Behind.NOWHERE
    newest: Side = Side.HOST
    copied: Direction | None = None  # the direction of the last copy since the page has its memory
    # tells when that copy is complete; None while it is being started, or if starting it failed
    mark: Mark | None = None

    @property
    def lacks_bytes(self) -> bool:
        """Whether it has memory behind addresses and no copy to it was started."""
        return (
            self.memory is not None
            and self.behind is not Behind.NOWHERE
            and self.newest is Side.HOST
        )


class Pages:
    """The page table of one range, which has these `addresses`.
    `sizes`: bytes of each page's memory: full chunks, and a tail.
    `used_bytes`: the part of them that has bytes; the rest of the last page is neither copied nor
    fingerprinted.
    `host`: the memory of the host copy."""

    def __init__(
        self,
        device: Device,
        addresses: Addresses,
        sizes: Sequence[int],
        used_bytes: int,
        host: HostSlab,
    ) -> None:
        self._device = device
        self._addresses = addresses
        self._aside: Addresses | None = None
        self.host = host
        self.sizes = sizes
        self.used_sizes = (*sizes[:-1], used_bytes - sum(sizes[:-1]))
        self.starts = tuple(index * device.chunk_bytes for index in range(len(sizes)))
        self.table = [Page() for _ in sizes]
        self.unused: set[int] = set()  # the pages in which nothing lies. They get no memory.
        self.needed_bytes = sum(sizes)  # bytes of memory of all pages but the unused ones
        # bytes of memory behind the own addresses, or in hand between two mappings
        self.own_bytes = 0
        self.aside_bytes = 0
        self.prints: torch.Tensor | None = None
        """Fingerprints of the pages in the host copy, int64 on either device; None while the host
        copy may have other bytes."""
        # whether the host copy may have been written since the first copies to pages aside. A load
        # discards these.
        self.is_stale = False
        # whether the thread of a prefetch may put memory aside for more pages at any time
        self.is_receiving = False
        self._stop: Callable[[int], object] = lambda _: None  # see `reserve_aside`
        # the number of calls of `save`, and of those that `wait_until_saved` need not wait for
        self._num_saves = self._num_waited_for = 0

    # --- looking

    @property
    def can_be_aside(self) -> bool:
        return self._aside is not None

    def at(self, *behind: Behind) -> list[int]:
        """The pages whose memory is there, ascending."""
        return [
            index
            for index, page in enumerate(self.table)
            if page.memory is not None and page.behind in behind
        ]

    def without_memory(self) -> list[int]:
        """The pages that lack memory, ascending."""
        return [
            index
            for index, page in enumerate(self.table)
            if page.memory is None and index not in self.unused
        ]

    @property
    def needed_sizes(self) -> tuple[int, ...]:
        """Bytes of memory of each page that needs any while it is on the device."""
        return tuple([size for index, size in enumerate(self.sizes) if index not in self.unused])

    def unfilled(self) -> list[int]:
        """The pages that have memory aside and no bytes there."""
        return [index for index in self.at(Behind.ASIDE) if self.table[index].lacks_bytes]

    def left(self) -> list[int]:
        """The pages that an offload has left aside, in the order in which they are saved. No copy
        was in vain when these are given up."""
        left = []
        for index in self.at(Behind.ASIDE):
            page = self.table[index]
            if page.newest is not Side.HOST and page.copied != "to_device":
                left.append(index)
        return left

    def bytes_of(self, indices: Iterable[int]) -> int:
        return sum(map(self.sizes.__getitem__, indices))

    def used_bytes_of(self, indices: Iterable[int]) -> int:
        return sum(map(self.used_sizes.__getitem__, indices))

    def copies(self, indices: Iterable[int]) -> list[Copy]:
        """The copies between these pages (ascending), wherever their memory is, and the host copy,
        with neighbours joined."""
        copies = []
        for behind, run in self._runs(indices):
            start = self.starts[run[0]]
            address = self._of(behind).base + start
            copies.append(Copy(address, self.host.address + start, self.used_bytes_of(run)))
        return copies

    # --- memory

    def put(
        self, indices: Sequence[int], chunk_pool: ChunkPool, behind: Behind = Behind.OWN
    ) -> None:
        """Put memory behind pages (ascending) that have none.

        Any thread may read a handle's own addresses at any time. A fresh chunk has zeros or another
        handle's values, which a checkpoint or a loss would take in unnoticed. So a chunk is wiped
        before it is mapped there: it is poison until bytes arrive. Wiping goes on while earlier
        chunks are copied, and costs a load no time (12 GiB, H100). If it fails, memory behind no
        address goes to the pool.
        """
        chunks = chunk_pool.take([self.sizes[index] for index in indices])
        try:
            if behind is Behind.OWN:
                self._device.wipe([chunk for chunk in chunks if not chunk.is_wiped])
        except BaseException:
            chunk_pool.give(chunks)
            raise
        for chunk in chunks:
            chunk.is_wiped = False  # bytes are about to come
        for index, chunk in zip(indices, chunks, strict=True):
            self._set(index, chunk, Behind.NOWHERE)
        try:
            self._place(indices, behind)
        except BaseException:
            in_hand = [index for index in indices if self.table[index].behind is Behind.NOWHERE]
            self.vacate(in_hand, chunk_pool)
            raise

    def show(self, indices: Iterable[int]) -> int:
        """Put memory that is aside or in hand behind the own addresses, once its copies are
        complete. Returns the used bytes."""
        away = sorted({*indices}.intersection(self.at(Behind.ASIDE, Behind.NOWHERE)))
        self.wait(away)
        self._place(away, Behind.OWN)
        return self.used_bytes_of(away)

    def hide(self, indices: Sequence[int]) -> None:
        """Put memory that is behind the own addresses aside. `save` can copy it from there."""
        if not self.aside_bytes:
            self.is_stale = False
        self._place(indices, Behind.ASIDE)

    def vacate(self, indices: Iterable[int], chunk_pool: ChunkPool, *, wipes: bool = False) -> int:
        """Take away the memory of pages whose bytes the host copy has, or that are not needed, once
        they are copied. Returns its size in bytes.
        `wipes`: wipe it at the addresses where it is, because other pages wait for it. Else `put`
        has to map it somewhere for that, while the link is busy. A late call of another thread may
        write there before the memory is unmapped. That shows in the page that gets the memory,
        until its own bytes arrive."""
        leaving = sorted(index for index in indices if self.table[index].memory is not None)
        bytes_in_vain = 0
        for index in leaving:
            page = self.table[index]
            if page.behind is Behind.ASIDE and page.copied == "to_device":
                bytes_in_vain += self.sizes[index]
        self.wait(leaving)
        wiped = self._wipe(leaving) if wipes else set()
        self._take_off(leaving)
        for index in leaving:
            chunk = self.table[index].memory
            assert chunk is not None
            chunk.is_wiped = index in wiped
            # first: a signal's handler may raise at any line, and no memory has no bytes
            self.table[index].newest = Side.HOST
            self._set(index, None, Behind.NOWHERE)
            self.table[index] = Page()
            chunk_pool.give((chunk,))
        if bytes_in_vain:
            self._stop(bytes_in_vain)
        return self.bytes_of(leaving)

    def _wipe(self, indices: Iterable[int]) -> set[int]:
        """Poison pages (ascending) whose memory is behind addresses. Returns these. The host copy
        has their bytes, and after an error they are brought back from there."""
        wiped: set[int] = set()
        for behind, run in self._runs(indices):
            if behind is Behind.NOWHERE:
                continue
            for index in run:
                self.table[index].newest = Side.HOST
            self._device.wipe_mapped(self._of(behind), self.bytes_of(run), self.starts[run[0]])
            wiped.update(run)
        return wiped

    def give_up(self, indices: Collection[int], chunk_pool: ChunkPool) -> None:
        """Take away the memory of pages in which nothing lies any more, for good. Kernels that
        could read it have been waited for."""
        if self.aside_bytes or self.is_receiving:
            self._stop(0)
        self.unused.update(indices)
        self.needed_bytes = sum(self.needed_sizes)
        self.vacate(indices, chunk_pool)

    def need_all(self) -> None:
        """Something may lie in every page again."""
        self.unused.clear()
        self.needed_bytes = sum(self.sizes)

    # --- bytes

    def save(self, indices: Iterable[int]) -> int:
        """Start copying those of these pages (ascending) to the host copy that are newest on the
        device. Returns the bytes to copy."""
        unsaved = []
        for index in indices:
            page = self.table[index]
            if page.newest is Side.DEVICE and page.behind is not Behind.NOWHERE:
                unsaved.append(index)
        if not unsaved:
            return 0
        self.prints = None  # from here on the host copy has neither the old content nor the new
        self._num_saves += 1
        _copy(self._device, [(self, unsaved)], "to_host")
        return self.used_bytes_of(unsaved)

    def note_clean(self, indices: Iterable[int]) -> None:
        """The host copy has the same bytes as these pages on the device, or their bytes there do
        not count."""
        for index in indices:
            page = self.table[index]
            page.newest = Side.BOTH
            page.copied = page.mark = None

    def note_changed(self, indices: Iterable[int]) -> None:
        """From here on these pages may change on the device, so the bytes there count."""
        for index in indices:
            self.table[index].newest = Side.DEVICE

    def note_filling(self, indices: Iterable[int]) -> None:
        """The caller has started to bring these pages to the device, and knows when they are
        complete."""
        for index in indices:
            page = self.table[index]
            page.newest, page.copied, page.mark = Side.BOTH, "to_device", None

    def note_idle(self) -> None:
        """The device has been waited for: no copy to or from pages behind the own addresses is
        under way."""
        for page in self.table:
            if page.behind is Behind.OWN:
                page.copied = page.mark = None

    def wait(self, indices: Iterable[int]) -> None:
        """Wait until the copies to and from these pages are complete."""
        pages = [self.table[index] for index in indices]
        marks = dict.fromkeys([page.mark for page in pages if page.copied is not None])
        if None in marks:
            self._device.sync()
        else:
            for mark in filter(None, marks):
                self._device.wait(mark)

    def wait_until_saved(self) -> None:
        """Wait until the host copy has every byte that is on its way there. Any thread may call
        this."""
        num_saves = self._num_saves
        if num_saves > self._num_waited_for:
            self.wait([index for index, page in enumerate(self.table) if page.copied == "to_host"])
            self._num_waited_for = max(self._num_waited_for, num_saves)

    def settle(self, side: Side, chunk_pool: ChunkPool) -> None:
        """Bring every page to one side, from any state. Idempotent. With `DEVICE`, all memory is
        behind the own addresses, with the newest bytes. With `HOST`, poison is there, and the host
        copy has the newest bytes, or gets them. Pages that were saved from aside, or prefetched,
        keep their memory aside.
        Raises DeviceMemoryError, with `DEVICE`: there is not enough memory. `settle(HOST)` can be
        called then."""
        if side is Side.DEVICE:
            indices = range(len(self.table))
            if any(
                page.behind is not Behind.OWN or page.newest is Side.HOST
                for index, page in enumerate(self.table)
                if index not in self.unused
            ):
                self._device.sync()
                self.show(indices)
                self.put(self.without_memory(), chunk_pool)
                fill(self._device, [(self, indices)])
                self._device.order()
            self.note_changed(indices)  # an unused one has no memory to be saved from
            return
        unsaved = [index for index, page in enumerate(self.table) if page.newest is Side.DEVICE]
        if unsaved:
            self._device.sync()  # kernels on any stream
            in_hand = [index for index in unsaved if self.table[index].behind is Behind.NOWHERE]
            self._place(in_hand, Behind.OWN)
            self.save(unsaved)
        self.vacate(self.at(Behind.OWN, Behind.NOWHERE), chunk_pool)

    # --- pages that are aside

    def reserve_aside(self, stop: Callable[[int], object]) -> None:
        """Reserve addresses aside.
        `stop`: makes sure that no prefetch changes a page. It is called before pages that are aside
        are given up, with the number of bytes that were copied to the device in vain."""
        if self._aside is None:
            self._aside = self._device.reserve(sum(self.sizes))
            self._stop = stop

    def discard(
        self, chunk_pool: ChunkPool, *, keep: Callable[[int], bool] = lambda _: False
    ) -> int:
        """Give up the pages that are aside, except those to keep. Returns their device bytes."""
        nbytes = 0
        if self.aside_bytes or self.is_receiving:
            self._stop(0)
            leaving = [index for index in self.at(Behind.ASIDE) if not keep(index)]
            nbytes = self.vacate(leaving, chunk_pool)
        if not self.aside_bytes:
            self.is_stale = False
        return nbytes

    def discard_unusable(self, chunk_pool: ChunkPool) -> None:
        """Give up the pages aside that a load cannot use."""
        unfilled = {*self.unfilled()}
        if unfilled or self.is_stale:
            self.discard(chunk_pool, keep=lambda index: not self.is_stale and index not in unfilled)

    # --- the table

    def _set(self, index: int, memory: Chunk | None, behind: Behind) -> None:
        """Note the memory of a page and the addresses that it is behind: `NOWHERE` without memory.
        Nothing else changes these, `own_bytes` or `aside_bytes`."""
        page = self.table[index]
        nbytes = self.sizes[index]
        if page.memory is not None and page.behind is Behind.ASIDE:
            self.aside_bytes -= nbytes
        elif page.memory is not None:
            self.own_bytes -= nbytes
        page.memory, page.behind = memory, behind
        if memory is not None and behind is Behind.ASIDE:
            self.aside_bytes += nbytes
        elif memory is not None:
            self.own_bytes += nbytes

    def _place(self, indices: Iterable[int], behind: Behind) -> None:
        """Put the memory of pages (ascending) behind other addresses than those where it is now.
        The caller has waited for copies of them. After an error of the mapping the memory is in
        hand."""
        away = []
        for index in indices:
            page = self.table[index]
            if page.memory is not None and page.behind is not behind:
                away.append(index)
        for run in runs(away):
            self._take_off(run)
            chunks = list[Chunk]()
            # before the mapping: a Ctrl-C after it must find it here. To unmap a page that is not
            # mapped does nothing.
            for index in run:
                chunk = self.table[index].memory
                assert chunk is not None
                chunks.append(chunk)
                self._set(index, chunk, behind)
            try:
                self._device.map(self._of(behind), chunks, self.starts[run[0]])
            except Exception:
                for index in run:
                    self._set(index, self.table[index].memory, Behind.NOWHERE)
                raise

    def _take_off(self, indices: Iterable[int]) -> None:
        """Put poison behind the addresses where the memory of pages (ascending) shows. The pages
        have it in hand then."""
        for behind, run in self._runs(indices):
            try:
                self._take_run_off(run, behind)
            except BaseException as error:
                # A signal's handler has raised: SystemExit at SIGTERM, or a second Ctrl-C. The
                # table must not say that the memory is where poison may be by now.
                if not isinstance(error, Exception):
                    self._take_run_off(run, behind)
                raise

    def _take_run_off(self, run: Sequence[int], behind: Behind) -> None:
        """As `_take_off`, for neighbours whose memory shows in one place. To unmap a page that is
        not mapped does nothing."""
        if behind is not Behind.NOWHERE:
            nbytes = self.bytes_of(run)
            self._device.unmap(self._of(behind), nbytes, self.starts[run[0]])
        for index in run:
            self._set(index, self.table[index].memory, Behind.NOWHERE)

    def _of(self, behind: Behind) -> Addresses:
        addresses = self._aside if behind is Behind.ASIDE else self._addresses
        assert addresses is not None
        return addresses

    def _runs(
        self,
        indices: Iterable[int],
    ) -> Iterator[tuple[Behind, list[int]]]:
        """Runs of neighbours among pages (ascending) whose memory shows in one place, with that
        place."""
        behind = Behind.NOWHERE
        run: list[int] = []
        for index in indices:
            page = self.table[index]
            if run and (index != run[-1] + 1 or page.behind is not behind):
                yield behind, run
                run = []
            behind = page.behind
            run.append(index)
        if run:
            yield behind, run


Part = tuple[Pages, Sequence[int]]  # pages of one range, ascending


def fill(device: Device, parts: Sequence[Part]) -> int:
    """Start copying those of these pages to the device that have memory and lack the bytes, by one
    call. Returns their bytes."""
    lacking = list[Part]()
    nbytes = 0
    for pages, indices in parts:
        unfilled = [index for index in indices if pages.table[index].lacks_bytes]
        if unfilled:
            lacking.append((pages, unfilled))
            nbytes += pages.used_bytes_of(unfilled)
    _copy(device, lacking, "to_device")
    return nbytes


def _copy(device: Device, parts: Sequence[Part], direction: Direction) -> None:
    """Start copying pages that have memory. Both sides count as newest from now on, and the mark
    tells when they are."""
    if not parts:
        return
    moving = list[Page]()
    copies = list[Copy]()
    for pages, indices in parts:
        moving += [pages.table[index] for index in indices]
        copies += pages.copies(indices)
    for page in moving:
        page.copied, page.mark = direction, None
    device.copy(copies, direction)
    mark = device.mark(direction)
    for page in moving:
        page.newest, page.mark = Side.BOTH, mark


def runs(indices: Iterable[int]) -> Iterator[list[int]]:
    """Runs of neighbours among ascending indices."""
    run: list[int] = []
    for index in indices:
        if run and index != run[-1] + 1:
            yield run
            run = []
        run.append(index)
    if run:
        yield run


class ChunkPool:
    """The chunk pool of one phase transition. No chunk goes back to the driver before `release`, so
    a phase transition that fails asks the driver for nothing. There is one exception: for a size
    that the pool does not have, chunks of other sizes make room. Going back frees the chunk that
    took their room first.
    `room_bytes`: device bytes that the driver may be asked for before any chunk goes back to it.
    The budget leaves so much.
    `left_by`: the pool that the phase transition before has left, with chunks that were given up
    since. This pool takes over its chunks."""

    def __init__(
        self, device: Device, room_bytes: int = 0, left_by: ChunkPool | None = None
    ) -> None:
        self._device = device
        self._chunks: dict[int, deque[Chunk]] = {} if left_by is None else left_by._chunks
        """The chunks by size, oldest first. A handle of hundreds of ranges gives up as many
        tails."""
        self.room_bytes = room_bytes

    def __iter__(self) -> Iterator[Chunk]:
        return itertools.chain.from_iterable(self._chunks.values())

    def __bool__(self) -> bool:
        return any(self._chunks.values())

    @property
    def held_bytes(self) -> int:
        return sum([chunk.nbytes for chunk in self])

    def give(self, chunks: Iterable[Chunk]) -> None:
        """Add chunks that are behind no address any more."""
        for chunk in chunks:
            self._chunks.setdefault(chunk.nbytes, deque()).append(chunk)

    def count(self, sizes: Sequence[int], most_created: int) -> int:
        """How many of these sizes, from the first on, can be served with at most `most_created`
        chunks from the driver."""
        num_chunks = dict[int, int]()
        for size in sizes:
            num_chunks[size] = len(self._chunks.get(size, ()))
        for served, size in enumerate(sizes):
            if num_chunks[size]:
                num_chunks[size] -= 1
            elif most_created:
                most_created -= 1
            else:
                return served
        return len(sizes)

    def take(self, sizes: Sequence[int]) -> tuple[Chunk, ...]:
        """Chunks of exactly these sizes, from the pool where it has them, else from the driver.
        Takes all or none."""
        chunks: list[Chunk] = []
        try:
            for size in sizes:
                chunks.append(self._take_one(size))
        except BaseException:
            self.give(chunks)
            raise
        return tuple(chunks)

    def stock(self, sizes: Sequence[int]) -> None:
        """Have the pool hold chunks of all these sizes, so that `take` needs none of the driver."""
        self.give(self.take(sizes))

    def _take_one(self, size: int) -> Chunk:
        """A chunk from the pool, else from the driver. Where `room_bytes` or the device's memory is
        used up, the driver gets back chunks of other sizes first. Raises DeviceMemoryError: there
        is no memory even then."""
        chunks = self._chunks.get(size)
        if chunks:
            return chunks.popleft()
        while self and self.room_bytes < size:
            self._make_way()
        try:
            chunk = self._device.create(size)
        except DeviceMemoryError:
            if not self or self._device.memory().free_bytes >= size:
                raise
            while self and self._device.memory().free_bytes < size:
                self._make_way()
            chunk = self._device.create(size)
        self.room_bytes -= size
        return chunk

    def release(self) -> None:
        """Return all chunks to the driver: nothing goes back to what they held."""
        chunks = list(self)
        if chunks:
            # out of the pool first: a released chunk must never be handed out again
            self._chunks = {}
            self.room_bytes += sum([chunk.nbytes for chunk in chunks])
            self._device.release(*chunks)

    def _make_way(self) -> None:
        """Return one chunk of the most frequent size to the driver. Tails are single, and needed
        for going back."""
        chunk = max(self._chunks.values(), key=len).popleft()
        self.room_bytes += chunk.nbytes
        self._device.release(chunk)
