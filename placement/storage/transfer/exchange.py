"""Move several handles at once: both directions of the link are busy, and memory that one gives up
goes behind the next.

A handle that leaves is copied to the host page by page. As soon as a page has arrived there, its
memory is taken from behind the old addresses and, if another handle comes, put behind the new ones.
So a swap needs the memory of the larger side, plus `WINDOW` chunks.

The order of the steps keeps each page's bytes complete somewhere: a page is vacated after its bytes
are in the host copy. A move is committed after its last page was vacated, or is aside with its copy
to the host started (`hide`, `save_aside`). `ManagedStorage.make_consistent` settles the rest after
an error. Pages that are aside are remapped before anything is copied: the driver remaps a chunk in
0.1 ms while the link is idle, and in 1 ms while it is busy (H200, chunks of 128 MiB).
"""

from __future__ import annotations

import contextlib
import itertools
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from placement.core import interrupts
from placement.devices.base import Device
from placement.storage.managed import ManagedStorage
from placement.storage.move import MoveResult
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
        # The host copy of a readonly handle stays as it is: nothing is copied, and what differs is
        # an error. Its gradients, which are in transient ranges, may change.
        self.keeps_host_copy = holding.readonly and self.host_prints is not None and not r.transient
        self.device_prints = torch.empty(len(r.chunk_sizes), dtype=torch.int64, device="cpu")
        self.wrong: list[int] = []  # the pages that changed although the host copy stays as it is
        self._device, self._range = device, r
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
        """The pages that were asked for, and those of them that differ from the host copy or may
        differ."""
        first, found = self._num_compared, self.ask()()
        self._num_compared, self._asked = (last := first + len(found)), None
        self.device_prints[first:last] = found
        return range(first, last), self._range.differing(
            None if self.host_prints is None else self.host_prints[first:last], found, first
        )


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


class Arrivals:
    """Pages on their way to the device. They wait for memory, in order, and then their copies
    start. Pages that are shorter than a chunk, which no full chunk fits, come last. `chunk_pool`:
    gives their memory."""

    def __init__(self, device: Device, chunk_pool: ChunkPool) -> None:
        self._device = device
        self._chunk_pool = chunk_pool
        self._waiting: deque[tuple[ManagedStorage, Range, int]] = deque()
        self._burst = 0  # the number of pages in the last burst
        # bytes that this process copies to the device, by handle's storage
        self.brought_bytes: Counter[ManagedStorage] = Counter()

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def expect(self, holding: ManagedStorage, ranges: Iterable[Range]) -> None:
        """Add the pages of these ranges that have no memory."""
        pages = [
            *self._waiting,
            *((holding, r, index) for r in ranges for index in r.pages.without_memory()),
        ]
        self._waiting = deque(
            sorted(pages, key=lambda each: each[1].chunk_sizes[each[2]] < self._device.chunk_bytes)
        )

    def open_window(self, room_bytes: int) -> None:
        """Start the first copies: of the first `WINDOW` pages, as far as they fit into the room
        beside everything that leaves."""
        sizes = itertools.accumulate(
            r.chunk_sizes[index] for _, r, index in itertools.islice(self._waiting, WINDOW)
        )
        self.bring_what_fits(most_created=sum(nbytes <= room_bytes for nbytes in sizes), longest=1)

    def bring_more(self) -> None:
        """Bring the next burst: put memory from the pool or the driver behind its pages, and start
        their copies. A short first one starts the link; the longer it has work, the more may be
        mapped. A burst may cover several ranges."""
        gathers = any(r.is_shared for _, r, _ in self._waiting)
        wanted = _GATHERED if gathers else self._burst * BURST_GROWTH or FIRST_BURST
        self._burst = left = min(wanted, len(self._waiting))
        while left:
            left -= self._bring(left, longest=left)[0]

    def bring_what_fits(self, *, most_created: int, longest: int) -> None:
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
        holding, r, first = self._waiting[0]
        # The next page of a range is no neighbour where pages between the two were prefetched.
        places = enumerate(itertools.islice(self._waiting, longest), first)
        wanted = [
            place
            for place, _ in itertools.takewhile(lambda each: each[1][1:] == (r, each[0]), places)
        ]
        sizes = [r.chunk_sizes[index] for index in wanted]
        served = self._chunk_pool.count(sizes, most_created)
        if not served:
            return 0, 0
        created = served - min(served, self._chunk_pool.count(sizes, 0))
        r.pages.put(wanted[:served], self._chunk_pool)
        self.brought_bytes[holding] += holding.bring(r, wanted[:served])
        for _ in range(served):
            self._waiting.popleft()
        return served, created


@dataclass(eq=False)
class Exchange:
    """The moves of one phase transition, made at its beginning and dropped at its end."""

    device: Device
    chunk_pool: ChunkPool  # gives chunks to the handles that come, and gets those that nobody takes
    # compares the bytes that arrive with those that were sent; None: nothing is compared
    verifier: Verifier | None
    # handles' storages whose gradients are dropped when they leave TRAINING
    dropping: Collection[ManagedStorage] = ()
    staying: Mapping[ManagedStorage, int] = field(default_factory=dict)
    """Device bytes that may stay aside, by handle's storage that leaves, so that nobody waits for
    their saves."""
    while_copying: Callable[[], object] = lambda: None
    """Called once a run, if any storage leaves. The link has work by then, unless memory is put
    aside first."""
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
        `releases_at_once`: give chunks that nobody waits for back while the rest is copied. Going
        back may then ask the driver."""
        began = time.monotonic()
        self._arrivals, self._releases_at_once = (
            Arrivals(self.device, self.chunk_pool),
            releases_at_once,
        )
        self._room_bytes = (
            min(self.device.memory().free_bytes, self.chunk_pool.room_bytes)
            if leaving and coming
            else 0
        )
        # an earlier exchange of this phase transition may have left one in between
        for holding in (*leaving, *coming):
            holding.make_consistent(self.chunk_pool)
        out = [holding for holding in leaving if holding.on_device]
        into = [holding for holding in coming if not holding.on_device]
        if any(each.state_dict_tensors.are_held for each in into):
            # a write into a state dict may be queued on the current stream, and loads wait for no
            # stream
            self.device.wait_for_work()
        try:
            early = self._begin(out, into)
            dropped = {
                each: each.gradients.ranges(each.ranges) for each in out if each in self.dropping
            }
            departures = [
                Departure(each, aside_bytes=self._aside_bytes(each), dropped=dropped.get(each))
                for each in out
            ]
            self._puts_aside = any(each.aside_bytes for each in departures)
            if departures:
                self._enqueue_first(departures)
            else:
                for _ in range(2):  # two bursts keep the link busy while every tensor is looked at
                    self._arrivals.bring_more()
            # Look at every tensor only now, while the link is busy. Vacate only after that: the
            # memory of a range may hold new tensors, which a state dict gave the object, and they
            # must be taken in first.
            for each in departures:
                each.fresh, each.has_new_state = each.holding.take_in_leaving(
                    drops=each.dropped is not None
                )
                each.copied_bytes += sum(
                    adoptee.nbytes for r in each.fresh for adoptee in r.moving_in or ()
                )
            for holding in into:
                self._arrivals.expect(holding, holding.take_in_coming())
            if self._puts_aside:
                self._let_stay(departures)
                self._arrivals.open_window(self._room_bytes)
            self._move_out(departures)
            moved = self._commit_offloads(departures) | self._load(into, early)
        except BaseException as error:
            self._go_back(out, into, error)
            raise
        seconds = time.monotonic() - began
        return {holding: replace(each, seconds=seconds) for holding, each in moved.items()}

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
        for holding in sorted((*out, *into), key=lambda each: each.on_device):
            try:
                holding.make_consistent(self.chunk_pool)
            except Exception as failure:
                error.add_note(f"placement: {holding.name!r} could not go back yet: {failure}")
            finally:
                holding.host_has_newest.set()  # nobody waits any longer

    def _move_out(self, departures: Sequence[Departure]) -> None:
        """Take away the memory of what leaves, as it arrives on the host, and put it behind what
        comes."""
        if self.verifier is not None and any(each.fresh for each in departures):
            # Before any memory goes: where a state dict was loaded back, new storages may lie in
            # that of a range.
            self.device.wait(self.device.mark("to_host"))
            for each in departures:
                self.verifier.check_newborn(each.holding, each.fresh)
        for each in departures:
            self._enqueue_rest(each)
        for each in departures:
            self._vacate(each, waits=True)
        mark = self.device.mark("to_host")
        for each in departures:
            each.holding.save_aside()
        interrupts.check()
        if any(each.fresh for each in departures):
            self.device.wait(mark)  # the copies of new storages, which are in no batch

    def _begin(
        self, leaving: Sequence[ManagedStorage], coming: Sequence[ManagedStorage]
    ) -> dict[ManagedStorage, int]:
        """Begin each move, with the device idle if anything leaves, and show what was prefetched.
        Returns the bytes of that, by storage."""
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
        return {
            each: sum(r.pages.show(r.pages.at(Behind.ASIDE)) for r in each.ranges)
            for each in coming
        }

    def _enqueue_first(self, departures: Sequence[Departure]) -> None:
        """Enqueue the first pages of each storage, so that the link has work. If any of these is
        copied, enqueue all others, too."""
        for each in departures:
            dropped = {*(each.dropped or ())}
            each.waiting.extend([r for r in each.holding.ranges if r not in dropped])
            if each.waiting:
                self._enqueue_part(each)
        if not self._puts_aside:
            self._arrivals.open_window(self._room_bytes)
        for each in departures:  # not before: the kernel that wipes the window's memory would wait
            each.ask_more()
        if self._puts_aside or any(each.copied_bytes for each in departures):
            for each in departures:
                while each.waiting:
                    self._enqueue_part(each)
        self.while_copying()

    def _enqueue_rest(self, departure: Departure) -> None:
        """Enqueue the pages that `_enqueue_first` has left, once every tensor has been looked at
        and memory may go."""
        while departure.waiting:
            self._enqueue_part(departure)
            departure.ask_more()  # computed while this part is vacated
            # another's host copy, which readers see from here on, may lack what comes next
            if departure.holding.readonly:
                self._vacate(departure, waits=False)

    def _vacate(self, departure: Departure, *, waits: bool) -> None:
        """Take away the memory of pages that are on the host (or wait for them), in order, and put
        it behind pages that come."""
        while departure.batches and (
            waits or departure.batches[0][0].pages.table[departure.batches[0][1][0]].copied is None
        ):
            r, indices = departure.batches.popleft()
            if self.verifier is not None:
                r.pages.wait(indices)
                found = departure.comparisons[r]
                coming = (
                    found.host_prints
                    if found.keeps_host_copy and found.host_prints is not None
                    else found.device_prints
                )
                chunks = range(indices[0], indices[-1] + 1)
                self.verifier.check_host(departure.holding, r, chunks, coming)
            departure.holding.vacate(r, indices, self.chunk_pool)
            if self._releases_at_once and not self._arrivals:
                self.chunk_pool.release()
            self._arrivals.bring_what_fits(most_created=0, longest=BATCH)
            interrupts.check()

    def _aside_bytes(self, holding: ManagedStorage) -> int:
        # Not where something may use the host copy at any moment, also through a view, or where
        # what arrives there is to be compared.
        if self.verifier is not None or holding.state_dict_tensors.are_held:
            return 0
        return self.staying.get(holding, 0)

    def _enqueue_part(self, departure: Departure) -> None:
        """Compare the next pages, enqueue the copies of those that changed, and cut all into
        batches; where memory is to stay aside, `_let_stay` does both."""
        holding, r = departure.holding, departure.waiting[0]
        if (comparison := departure.comparisons.get(r)) is None:
            comparison = departure.comparisons[r] = Comparison(self.device, holding, r)
        indices, changed = comparison.take()
        if not comparison.num_left:
            departure.waiting.popleft()
        comparison.wrong += changed if comparison.keeps_host_copy else ()
        dirty = () if comparison.keeps_host_copy else changed
        r.pages.note_clean(indices)
        r.pages.note_changed(dirty)
        comparison.num_next = (
            comparison.num_left if dirty else max(_SECOND, _PART_GROWTH * len(indices))
        )
        if dirty and r.is_shared:
            holding.make_host_copy_own(r, dirty)
        if dirty:
            r.pages.prints = None
        if not self._puts_aside:
            departure.batches.extend(self._copy_out(r, indices))
        departure.copied_bytes += r.pages.used_bytes_of(dirty)
        departure.skipped_bytes += r.pages.used_bytes_of(indices) - r.pages.used_bytes_of(dirty)

    def _copy_out(self, r: Range, indices: range) -> Iterator[tuple[Range, list[int]]]:
        """Enqueue the copies of the dirty pages. Batches are short where coming pages wait for
        their memory."""
        is_awaited = bool(self._arrivals)
        for newest, run in itertools.groupby(
            indices, key=lambda index: r.pages.table[index].newest
        ):
            those, is_dirty = [*run], newest is Side.DEVICE
            step = _CLEAN_BATCH if not is_dirty else 1 if is_awaited else BATCH
            # The last page of a range is vacated separately, once the link is idle: copying takes
            # longer than vacating. A short one goes with the page before it, whose memory would be
            # given back no sooner.
            is_last = is_dirty and not is_awaited and those[-1] + 1 == len(r.chunk_sizes)
            num_last = 0
            if is_last:
                num_last = 2 if r.chunk_sizes[-1] < _SHORT_BYTES else 1
            num_first = max(0, len(those) - num_last)
            batches = [
                those[start : min(start + step, num_first)] for start in range(0, num_first, step)
            ]
            if num_first < len(those):
                batches.append(those[num_first:])
            for batch in batches:
                r.pages.save(batch)
                yield r, batch

    def _let_stay(self, departures: Sequence[Departure]) -> None:
        """Put the memory that stays aside: of each range the first pages, as far as there is room
        and none is wrong. Only then enqueue the copies of the other pages."""
        leaving: list[tuple[Departure, Range, range]] = []
        for each in departures:
            for r, comparison in each.comparisons.items():
                sizes, num = r.chunk_sizes, 0
                while (
                    r.pages.can_be_aside
                    and num < len(sizes)
                    and sizes[num] <= each.aside_bytes
                    and num not in comparison.wrong
                ):
                    each.aside_bytes -= sizes[num]
                    num += 1
                is_hidden = num and each.holding.hide(r, range(num))
                leaving.append((each, r, range(num if is_hidden else 0, len(sizes))))
        for each, r, indices in leaving:
            each.batches.extend(self._copy_out(r, indices))

    def _limit_room(
        self, leaving: Sequence[ManagedStorage], coming: Sequence[ManagedStorage]
    ) -> None:
        """Limit the memory that a swap takes, however much is free, to the larger side and the
        window, and leave the rest to others."""
        if leaving and coming:
            freed = sum(max(0, each.chunk_bytes - self._aside_bytes(each)) for each in leaving)
            gain = sum(each.device_bytes - each.prefetched_bytes for each in coming) - freed
            self.chunk_pool.room_bytes = min(
                self.chunk_pool.room_bytes, max(0, gain) + WINDOW * self.device.chunk_bytes
            )

    def _commit_offloads(self, departures: Sequence[Departure]) -> dict[ManagedStorage, MoveResult]:
        moved = {}
        for each in departures:
            prints = [
                (r, compared.device_prints)
                for r, compared in each.comparisons.items()
                if not compared.keeps_host_copy
            ]
            found = each.holding.commit_offload(each.fresh, prints, each.dropped)
            each.holding.make_consistent(self.chunk_pool)
            num_wrong = sum(len(compared.wrong) for compared in each.comparisons.values())
            moved[each.holding] = replace(
                found,
                copied_bytes=each.copied_bytes,
                skipped_bytes=each.skipped_bytes,
                rewritten_chunks=num_wrong,
            )
            # what moves into the ranges holds the storages, which would count as references below
            each.fresh = ()
        for each in departures:
            each.holding.count_uses()
        if any(each.has_new_state for each in departures):
            # else the memory that torch freed stays in its cache, where other processes cannot use
            # it
            self.device.trim()
        return moved

    def _load(
        self, holdings: Sequence[ManagedStorage], early: Mapping[ManagedStorage, int]
    ) -> dict[ManagedStorage, MoveResult]:
        while self._arrivals:
            self._arrivals.bring_more()
            interrupts.check()
        if holdings:
            # what an offload leaves to be saved goes on beside the work that follows
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
