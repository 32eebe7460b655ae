"""Move several handles at once: both directions of the link are busy, and memory that one handle
gives up goes behind the addresses of the next.

A handle that leaves is copied to the host page by page. As soon as a page has arrived there, its
memory is taken from behind the old addresses. If another handle comes, it is put behind the new
ones. So a swap needs the memory of the larger side, plus `WINDOW` chunks.

The order of the steps keeps each page's bytes complete somewhere: a page is vacated after its bytes
are in the host copy. A move is committed after its last page was vacated, or is aside with its copy
to the host started (`hide`, `save_aside`). `ManagedStorage.make_consistent` settles the rest after
an error. Pages that are aside are remapped before any is copied: the driver remaps a chunk of
128 MiB in 0.1 ms while the link is idle, and in 1 ms while it is busy (H200).
"""

from __future__ import annotations

import contextlib
import itertools
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch

from placement.core import interrupts
from placement.devices.base import Device
from placement.storage.managed import ManagedStorage
from placement.storage.move import MoveResult
from placement.storage.owners import RANGES
from placement.storage.pages import Behind, ChunkPool, Side
from placement.storage.range import Range
from placement.storage.transfer.verification import Verifier

# the number of chunks that a swap may create before the first one is given up. Two use 97 to 99 %
# of both directions (H200).
WINDOW = 2
# pages in the first burst of a load. Those of one range in a burst are all mapped before the first
# is copied.
FIRST_BURST = 1
_GATHERED = 2
"""The number of pages in each burst where N ranks share a host copy: each copies 1/N of a page,
which takes hardly longer than mapping it (four busy H200s: 1.7 ms of copying, 1.3 ms of creating
and mapping)."""
BURST_GROWTH = 8
"""Each later burst has this many times the pages of the one before, up to all that wait. They are
created, wiped and mapped while the earlier ones are copied: on an H100 that takes 0.43 ms for a
chunk of 256 MiB, and its copy 4.9 ms."""
BATCH = 2
"""The number of copied pages that are vacated together when none waits for their memory. While the
link is busy the driver takes 0.9 ms to put poison behind a chunk; while it is idle, 0.03 ms
(H200)."""
# a page below this is copied before the chunk ahead of it is vacated (1.1 ms for two, H100)
_SHORT_BYTES = 64 << 20
_CLEAN_BATCH = 64  # the number of pages that are vacated together when they need not be copied
# the number of pages whose fingerprints are computed first, so that the link has work while the
# others are computed
_LEAD = 2
# the least pages in the second part, if none has to be copied: computed while every tensor is
# looked at
_SECOND = 16
_PART_GROWTH = 3
"""Each later part has this many times the pages of the one before: vacating a chunk takes three
times as long as its fingerprint (0.16 ms for 256 MiB, H200)."""


class Comparison:
    """The pages of one range that leaves, compared with its host copy part by part."""

    def __init__(self, device: Device, holding: ManagedStorage, r: Range) -> None:
        self.host_prints = None if r.pages.prints is None else r.pages.prints.cpu()
        # The host copy of a readonly handle stays as it is: no page is copied, and a page that
        # differs is an error. Its gradients, which are in transient ranges, may change.
        self.keeps_host_copy = holding.readonly and self.host_prints is not None and not r.transient
        self.device_prints = torch.empty(len(r.chunk_sizes), dtype=torch.int64, device="cpu")
        self.wrong: list[int] = []  # the pages that changed although the host copy stays as it is
        self._device = device
        self._range = r
        self._num_compared = 0
        self._asked: Callable[[], torch.Tensor] | None = None
        self.num_next = _LEAD  # the number of pages to ask for next

    @property
    def num_left(self) -> int:
        return len(self.device_prints) - self._num_compared

    def ask(self) -> Callable[[], torch.Tensor]:
        """Have the device compute the fingerprints of the next pages, behind all that it has to do.
        Idempotent."""
        if self._asked is None:
            first = self._num_compared
            self._asked = self._device.ask(self._range.fingerprint(first, first + self.num_next))
        return self._asked

    def take(self) -> tuple[range, list[int]]:
        """Wait for the fingerprints of the next pages. Returns these pages, and those of them that
        differ from the host copy, or may differ, because it has no fingerprints."""
        wait_for_prints = self.ask()  # unless they were asked for ahead
        prints = wait_for_prints()
        first = self._num_compared
        last = first + len(prints)
        self._num_compared = last
        self._asked = None
        self.device_prints[first:last] = prints
        host_prints = None if self.host_prints is None else self.host_prints[first:last]
        return range(first, last), self._range.differing(host_prints, prints, first)


@dataclass(slots=True)
class Departure:
    """One handle's storage that goes to the host."""

    holding: ManagedStorage
    fresh: tuple[Range, ...] = ()
    # whether new storages that are not transient were taken in. Torch caches their old memory now.
    has_new_state: bool = False
    # neighbours that are vacated together, once saved
    batches: deque[tuple[Range, list[int]]] = field(default_factory=deque)
    # the ranges of which pages have still to be compared. The first may be begun.
    waiting: deque[Range] = field(default_factory=deque)
    # the comparisons of the ranges that are begun
    comparisons: dict[Range, Comparison] = field(default_factory=dict)
    copied_bytes: int = 0
    skipped_bytes: int = 0
    dropped: tuple[Range, ...] | None = None  # see `ManagedStorage.commit_offload`
    aside_bytes: int = 0  # device bytes of pages that may stay aside, beside those that do already

    def ask_more(self) -> None:
        """Have the device compute the fingerprints of the pages behind those that are enqueued,
        whose copies would wait for it."""
        if self.waiting and self.waiting[0] in self.comparisons:
            self.comparisons[self.waiting[0]].ask()


class ArrivingPage(NamedTuple):
    """A page that waits for memory on the device."""

    holding: ManagedStorage
    range: Range
    number: int
    nbytes: int


class Arrivals:
    """Pages on their way to the device. They wait for memory, in order, and then their copies
    start. Pages that are shorter than a chunk, which no full chunk fits, come last.
    `chunk_pool`: gives their memory."""

    def __init__(self, device: Device, chunk_pool: ChunkPool) -> None:
        self._device = device
        self._chunk_pool = chunk_pool
        self._waiting: deque[ArrivingPage] = deque()
        self._burst = 0  # the number of pages in the last burst
        # bytes that this process copies to the device, by handle's storage
        self.brought_bytes: Counter[ManagedStorage] = Counter()

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def expect(self, holding: ManagedStorage, ranges: Iterable[Range]) -> None:
        """Add the pages of these ranges that have no memory."""
        pages = [*self._waiting]
        for r in ranges:
            for index in r.pages.without_memory():
                pages.append(ArrivingPage(holding, r, index, r.chunk_sizes[index]))
        pages.sort(key=lambda page: page.nbytes < self._device.chunk_bytes)
        self._waiting = deque(pages)

    def open_window(self, room_bytes: int) -> None:
        """Start the first copies: of the first `WINDOW` pages, as far as they fit into the room
        beside all pages that leave."""
        num_fitting = 0
        for page in itertools.islice(self._waiting, WINDOW):
            room_bytes -= page.nbytes
            num_fitting += room_bytes >= 0
        self.bring_while_memory_lasts(most_created=num_fitting, longest=1)

    def bring_more(self) -> None:
        """Bring the next burst: put memory from the pool or the driver behind its pages, and start
        their copies. A short first one starts the link; the longer it has work, the more may be
        mapped. A burst may cover several ranges."""
        burst = self._burst * BURST_GROWTH or FIRST_BURST
        if any(page.range.is_shared for page in self._waiting):
            burst = _GATHERED
        self._burst = min(burst, len(self._waiting))
        num_lacking = self._burst
        while num_lacking:
            num_lacking -= self._bring(num_lacking, longest=num_lacking)[0]

    def bring_while_memory_lasts(self, *, most_created: int, longest: int) -> None:
        """Bring the next pages, at most `longest` together, until memory lacks: `most_created`
        chunks may come from the driver."""
        while self:
            served, created = self._bring(most_created, longest=longest)
            if not served:
                return
            most_created -= created

    def _bring(self, most_created: int, *, longest: int) -> tuple[int, int]:
        """Bring the next neighbouring pages of one range. Returns their number (0: memory lacks),
        and how many of them the driver gave."""
        holding, r, first, _ = self._waiting[0]
        run = list[int]()
        for index, page in enumerate(itertools.islice(self._waiting, longest), first):
            # the next page of a range is no neighbour where pages between the two were prefetched
            if page.range is not r or page.number != index:
                break
            run.append(index)
        sizes = [r.chunk_sizes[index] for index in run]
        served = self._chunk_pool.count(sizes, most_created)
        if not served:
            return 0, 0
        created = served - min(served, self._chunk_pool.count(sizes, 0))
        r.pages.put(run[:served], self._chunk_pool)
        self.brought_bytes[holding] += holding.bring(r, run[:served])
        for _ in range(served):
            self._waiting.popleft()
        return served, created


@dataclass(eq=False)
class Exchange:
    """The moves of one phase transition, made at its beginning and dropped at its end."""

    device: Device
    # gives chunks to the handles that come, and gets those that no handle takes
    chunk_pool: ChunkPool
    # compares the bytes that arrive with those that were sent; None: nothing is compared
    verifier: Verifier | None
    # handles' storages whose gradients are dropped when they leave TRAINING
    dropping: Collection[ManagedStorage] = ()
    staying: Mapping[ManagedStorage, int] = field(default_factory=dict)
    """Device bytes that may stay aside, by handle's storage that leaves, so that no thread waits
    for their saves."""
    while_copying: Callable[[], object] = lambda: None
    """Called once a run. The link has work by then, unless memory is put aside first. An error ends
    the exchange."""
    _arrivals: Arrivals = field(init=False)  # this and the next three are those of one `run`
    _releases_at_once: bool = field(init=False)
    # device bytes that may be taken from the driver before any chunk was given up
    _room_bytes: int = field(init=False)
    # whether memory is to stay aside. The link gets no work before `_let_stay` has put it there.
    _puts_aside: bool = field(init=False)

    def run(
        self,
        leaving: Sequence[ManagedStorage],
        coming: Sequence[ManagedStorage],
        *,
        releases_at_once: bool = False,
    ) -> dict[ManagedStorage, MoveResult]:
        """Offload `leaving` and load `coming`, storages of handles. One that is on the right side
        already is left alone. Returns when the offloaded bytes are complete on the host and their
        memory is vacated. The loaded ones may still be on the link; the calling thread's current
        stream waits for them. After an error every handle's storage is settled on one side or the
        other.
        `releases_at_once`: give chunks that no page waits for back while the rest is copied. Going
        back may then ask the driver."""
        began = time.monotonic()
        self._arrivals = Arrivals(self.device, self.chunk_pool)
        self._releases_at_once = releases_at_once
        self._room_bytes = 0
        if leaving and coming:
            self._room_bytes = min(self.device.memory().free_bytes, self.chunk_pool.room_bytes)
        # an earlier exchange of this phase transition may have left one in between
        for holding in (*leaving, *coming):
            holding.make_consistent(self.chunk_pool)
        out = [holding for holding in leaving if holding.on_device]
        into = [holding for holding in coming if not holding.on_device]
        if any(holding.state_dict_tensors.are_held for holding in into):
            # a write into a state dict may be queued on the current stream, and loads wait for no
            # stream
            self.device.wait_for_work()
        try:
            early = self._begin(out, into)
            departures = [self._departure_of(holding) for holding in out]
            self._puts_aside = any(departure.aside_bytes for departure in departures)
            if departures:
                self._enqueue_first(departures)
            else:
                for _ in range(2):  # two bursts keep the link busy while every tensor is looked at
                    self._arrivals.bring_more()
            self.while_copying()
            # Look at every tensor only now, while the link is busy. Vacate only after that: the
            # memory of a range may hold new tensors, which a state dict gave the object, and they
            # must be taken in first.
            self._take_in_new(departures, into)
            if self._puts_aside:
                self._let_stay(departures)
                self._arrivals.open_window(self._room_bytes)
            self._move_out(departures)
            results = self._commit_offloads(departures) | self._load(into, early)
        except BaseException as error:
            self._go_back(out, into, error)
            raise
        seconds = time.monotonic() - began
        return {holding: replace(result, seconds=seconds) for holding, result in results.items()}

    def _departure_of(self, holding: ManagedStorage) -> Departure:
        departure = Departure(holding, aside_bytes=self._aside_bytes(holding))
        if holding in self.dropping:
            departure.dropped = holding.gradients.ranges(holding.ranges)
        return departure

    def _take_in_new(self, departures: Sequence[Departure], into: Sequence[ManagedStorage]) -> None:
        """Give the storages that have come since the last look places, and wait until the bytes of
        those that leave are on the host."""
        for departure in departures:
            departure.fresh, departure.has_new_state = departure.holding.take_in_leaving(
                drops_gradients=departure.dropped is not None
            )
            departure.copied_bytes += sum(sum(r.layout.sizes) for r in departure.fresh)
        for holding in into:
            self._arrivals.expect(holding, holding.take_in_coming())
        self._wait_for_new_storages(departures)

    def _go_back(
        self, out: Sequence[ManagedStorage], into: Sequence[ManagedStorage], error: BaseException
    ) -> None:
        """Settle every storage after an error. One that cannot be made consistent now is tried
        again at the next phase transition."""
        # copies to new slabs may be under way: frames of the traceback hold these
        if any(holding.on_device for holding in out):
            with contextlib.suppress(Exception):
                self.device.sync()
        # Storages that give up memory come first, so that those that need it back find it.
        for holding in sorted((*out, *into), key=lambda holding: holding.on_device):
            try:
                holding.make_consistent(self.chunk_pool)
            except Exception as failure:
                error.add_note(f"placement: {holding.name!r} could not go back yet: {failure}")
            finally:
                holding.host_has_newest.set()  # no reader waits any longer

    def _wait_for_new_storages(self, departures: Sequence[Departure]) -> None:
        """Wait until new storages that lie in a range are on the host, because its memory goes from
        here on: where a state dict was loaded back, they do. A verifier compares all new
        storages."""
        addresses = []
        for departure in departures:
            for r in departure.fresh:
                addresses += [adoptee.storage.data_ptr() for adoptee in r.moving_in or ()]
        lie_in_ranges = any(owner is not None for owner in RANGES.owners_of(addresses))
        if lie_in_ranges or (addresses and self.verifier is not None):
            self.device.wait(self.device.mark("to_host"))
        if self.verifier is not None:
            for departure in departures:
                self.verifier.check_newborn(departure.holding, departure.fresh)

    def _move_out(self, departures: Sequence[Departure]) -> None:
        """Take away the memory of pages that leave, as they arrive on the host, and put it behind
        pages that come."""
        for departure in departures:
            self._enqueue_rest(departure)
        for departure in departures:
            self._vacate(departure, waits=True)
        mark = self.device.mark("to_host")
        for departure in departures:
            departure.holding.save_aside()
        interrupts.check()
        if any(departure.fresh for departure in departures):
            self.device.wait(mark)  # the copies of new storages, which are in no batch

    def _begin(
        self, leaving: Sequence[ManagedStorage], coming: Sequence[ManagedStorage]
    ) -> dict[ManagedStorage, int]:
        """Begin each move, with the device idle if a storage leaves, and show prefetched pages.
        Returns the bytes of these, by storage."""
        # before the device is waited for: a call that begins now would start kernels
        for holding in leaving:
            holding.begin_leaving()
        if leaving:
            self.device.sync()
        for holding in (*leaving, *coming):
            holding.begin_move(self.chunk_pool)
        for holding in coming:
            self._arrivals.expect(holding, holding.ranges)
        self._limit_room(leaving, coming)
        early = dict[ManagedStorage, int]()
        for holding in coming:
            early[holding] = 0
            for r in holding.ranges:
                early[holding] += r.pages.show(r.pages.at(Behind.ASIDE))
        return early

    def _enqueue_first(self, departures: Sequence[Departure]) -> None:
        """Enqueue the first pages of each storage, so that the link has work. If any of these is
        copied, enqueue all others, too."""
        for departure in departures:
            dropped = {*(departure.dropped or ())}
            departure.waiting.extend([r for r in departure.holding.ranges if r not in dropped])
            if departure.waiting:
                self._enqueue_part(departure)
        if not self._puts_aside:
            self._arrivals.open_window(self._room_bytes)
        # not before: the kernel that wipes the window's memory would wait
        for departure in departures:
            departure.ask_more()
        if self._puts_aside or any(departure.copied_bytes for departure in departures):
            for departure in departures:
                while departure.waiting:
                    self._enqueue_part(departure)

    def _enqueue_rest(self, departure: Departure) -> None:
        """Enqueue the pages that `_enqueue_first` has left, once every tensor has been looked at
        and memory may go."""
        while departure.waiting:
            self._enqueue_part(departure)
            departure.ask_more()  # computed while this part is vacated
            # another handle's host copy, which readers see from here on, may lack the next pages
            if departure.holding.readonly:
                self._vacate(departure, waits=False)

    def _vacate(self, departure: Departure, *, waits: bool) -> None:
        """Take away the memory of pages that are on the host, in order, and put it behind pages
        that come. `waits`: also of those whose copies are under way, once these are complete;
        otherwise stop at the first of them."""
        while departure.batches:
            r, indices = departure.batches[0]
            # `save` alone has set it since `note_idle`: a copy may be under way
            if not waits and r.pages.table[indices[0]].copied is not None:
                return
            departure.batches.popleft()
            if self.verifier is not None:
                r.pages.wait(indices)
                comparison = departure.comparisons[r]
                prints = comparison.device_prints
                if comparison.keeps_host_copy and comparison.host_prints is not None:
                    prints = comparison.host_prints
                chunks = range(indices[0], indices[-1] + 1)
                self.verifier.check_host(departure.holding, r, chunks, prints)
            departure.holding.vacate(r, indices, self.chunk_pool, wipes=bool(self._arrivals))
            if self._releases_at_once and not self._arrivals:
                self.chunk_pool.release()
            self._arrivals.bring_while_memory_lasts(most_created=0, longest=BATCH)
            interrupts.check()

    def _aside_bytes(self, holding: ManagedStorage) -> int:
        # Not where a reader may use the host copy at any moment, also through a view, or where
        # arriving bytes are to be compared.
        if self.verifier is not None or holding.state_dict_tensors.are_held:
            return 0
        return self.staying.get(holding, 0)

    def _enqueue_part(self, departure: Departure) -> None:
        """Compare the next pages, enqueue the copies of those that changed, and cut all into
        batches; where memory is to stay aside, `_let_stay` does both."""
        holding = departure.holding
        r = departure.waiting[0]
        if r not in departure.comparisons:
            departure.comparisons[r] = Comparison(self.device, holding, r)
        comparison = departure.comparisons[r]
        indices, changed = comparison.take()
        if not comparison.num_left:
            departure.waiting.popleft()
        dirty = changed
        if comparison.keeps_host_copy:
            comparison.wrong += changed
            dirty = []
        r.pages.note_clean(indices)
        r.pages.note_changed(dirty)
        comparison.num_next = max(_SECOND, _PART_GROWTH * len(indices))
        if dirty:
            comparison.num_next = comparison.num_left
            if r.is_shared:
                holding.make_host_copy_own(r, dirty)
            r.pages.prints = None
        if not self._puts_aside:
            self._enqueue_copies(departure, r, indices)
        dirty_bytes = r.pages.used_bytes_of(dirty)
        departure.copied_bytes += dirty_bytes
        departure.skipped_bytes += r.pages.used_bytes_of(indices) - dirty_bytes

    def _enqueue_copies(self, departure: Departure, r: Range, indices: range) -> None:
        """Enqueue the copies to the host of the dirty pages among these. Add all of these pages, in
        batches, to those that `_vacate` takes away."""
        for batch in _batches_of(r, indices, is_awaited=bool(self._arrivals)):
            r.pages.save(batch)  # copies nothing of clean pages
            departure.batches.append((r, batch))

    def _let_stay(self, departures: Sequence[Departure]) -> None:
        """Put the memory that stays aside: of each range the first pages, as far as there is room
        and none is wrong. Only then enqueue the copies of the other pages. Every page has been
        compared before. A range stays behind its own addresses where a state dict shows it."""
        leaving: list[tuple[Departure, Range, range]] = []
        for departure in departures:
            for r, comparison in departure.comparisons.items():
                sizes = r.chunk_sizes
                num_staying = 0
                while (
                    r.pages.can_be_aside
                    and num_staying < len(sizes)
                    and sizes[num_staying] <= departure.aside_bytes
                    and num_staying not in comparison.wrong
                ):
                    departure.aside_bytes -= sizes[num_staying]
                    num_staying += 1
                if num_staying and not departure.holding.try_to_hide(r, range(num_staying)):
                    num_staying = 0
                leaving.append((departure, r, range(num_staying, len(sizes))))
        for departure, r, indices in leaving:
            self._enqueue_copies(departure, r, indices)

    def _limit_room(
        self, leaving: Sequence[ManagedStorage], coming: Sequence[ManagedStorage]
    ) -> None:
        """Let a swap take from the driver only the memory that the coming storages need beyond
        that of the leaving ones, and the window. The rest, however much is free, is for others."""
        if not leaving or not coming:
            return
        growth_bytes = 0
        for holding in coming:
            growth_bytes += holding.device_bytes - holding.prefetched_bytes
        for holding in leaving:
            growth_bytes -= max(0, holding.chunk_bytes - self._aside_bytes(holding))
        room_bytes = max(0, growth_bytes) + WINDOW * self.device.chunk_bytes
        self.chunk_pool.room_bytes = min(self.chunk_pool.room_bytes, room_bytes)

    def _commit_offloads(self, departures: Sequence[Departure]) -> dict[ManagedStorage, MoveResult]:
        """Commit the offloads, whose bytes are all on the host or aside. Returns their results."""
        results = {}
        for departure in departures:
            holding = departure.holding
            prints = []
            num_wrong = 0
            for r, comparison in departure.comparisons.items():
                num_wrong += len(comparison.wrong)
                if not comparison.keeps_host_copy:
                    prints.append((r, comparison.device_prints))
            result = holding.commit_offload(departure.fresh, prints, departure.dropped)
            holding.make_consistent(self.chunk_pool)
            results[holding] = replace(
                result,
                copied_bytes=departure.copied_bytes,
                skipped_bytes=departure.skipped_bytes,
                rewritten_chunks=num_wrong,
            )
            # the adoptees of new ranges hold storages, which would count as references below
            departure.fresh = ()
        for departure in departures:
            departure.holding.count_uses()
        if any(departure.has_new_state for departure in departures):
            # else the memory that torch freed stays in its cache, where other processes cannot use
            # it
            self.device.trim()
        return results

    def _load(
        self, holdings: Sequence[ManagedStorage], early: Mapping[ManagedStorage, int]
    ) -> dict[ManagedStorage, MoveResult]:
        """Bring all pages that still wait, and commit the loads that do not wait for the group.
        Returns the results. `early`: the bytes that had come before."""
        while self._arrivals:
            self._arrivals.bring_more()
            interrupts.check()
        if holdings:
            # the saves that an offload has left go on beside the work that follows
            self.device.order("to_device")
        complete = [holding for holding in holdings if holding.is_complete]
        if self.verifier is not None:
            for holding in complete:
                self.verifier.check_device(holding)
        for holding in complete:
            holding.commit_load()
            holding.make_consistent(self.chunk_pool)
        brought = self._arrivals.brought_bytes
        return {
            holding: MoveResult(copied_bytes=brought[holding], prefetched_bytes=early[holding])
            for holding in holdings
        }


def _batches_of(r: Range, indices: range, *, is_awaited: bool) -> list[list[int]]:
    """Cut pages of a range that leaves into batches to be vacated together, clean pages apart from
    dirty ones, which are newest on the device. `is_awaited`: whether coming pages wait for the
    memory, so that dirty pages are vacated one by one."""
    batches = list[list[int]]()
    for newest, run in itertools.groupby(indices, key=lambda index: r.pages.table[index].newest):
        pages = [*run]
        num_first = len(pages)
        size = _CLEAN_BATCH
        if newest is Side.DEVICE:
            size = 1 if is_awaited else BATCH
            # The last page of a range is vacated separately, once the link is idle: copying takes
            # longer than vacating. A short one is copied before the page ahead of it is vacated, so
            # the two go together.
            if not is_awaited and pages[-1] + 1 == len(r.chunk_sizes):
                num_last = 2 if r.chunk_sizes[-1] < _SHORT_BYTES else 1
                num_first = max(0, num_first - num_last)
        first_pages, last_pages = pages[:num_first], pages[num_first:]
        for start in range(0, num_first, size):
            batches.append(first_pages[start : start + size])
        if last_pages:
            batches.append(last_pages)
    return batches
