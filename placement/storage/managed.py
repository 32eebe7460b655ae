"""The bytes of one object that placement moves: where they are, how they come and go, and how they
are read meanwhile.

One `ManagedStorage`, which callers name `holding`, is the unit of a move. `on_device` is its one
decision: setting it commits a move. The facts about each page are in the page tables of its ranges.
After a failure the bytes are complete on the side that the decision names. `make_consistent`
settles every page there and brings the tensors in line.

Four announcements tell of a move: leaving, left, coming, came (`watch/announcements.py`).
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Iterator, Sequence, Set

import torch

from placement.core import interrupts
from placement.core.errors import (
    DeviceMemoryError,
    HostMemoryError,
    IntegrityError,
    RegistrationError,
)
from placement.core.journal import logger
from placement.core.modes import without_modes
from placement.core.states import State
from placement.devices.base import Device, round_up
from placement.ownership.adapter import Adapter
from placement.storage.adoption import Adoption
from placement.storage.base import Storage
from placement.storage.handing_back import HandingBack
from placement.storage.layout import Adoptee, expected_bytes, form_of, over
from placement.storage.move import MoveResult, Offload, Stage
from placement.storage.owners import RANGES
from placement.storage.pages import Behind, ChunkPool, Side, fill
from placement.storage.places import ObjectRanges
from placement.storage.range import Range
from placement.storage.scan import BORROWED, Scan, StorageScanner
from placement.storage.watch.announcements import Announcements
from placement.storage.watch.gradients import Gradients
from placement.storage.watch.state_dicts import StateDictTensors, are_only_read
from placement.storage.watch.strays import count_uses, stray_references, uncounted
from placement.storage.watch.writes import Watch
from placement.tensors.alive import Unadopted

_GLANCE_SECONDS = 0.1  # how often a wait for a reader looks for a Ctrl-C
# the number of pages that are saved by one copy call, and known to be saved together
_SAVED_TOGETHER = 4


class ManagedStorage(Storage):
    """The bytes of one object, which come and go, and the storages that it owns outside of its
    ranges."""

    can_prefetch = True
    # the decision: whether the bytes on the device are the authoritative ones. If so, every range
    # has memory behind it.
    on_device = False

    def __init__(
        self, device: Device, adapter: Adapter, name: str, readonly: bool, adoption: Adoption
    ) -> None:
        self.device = device
        self.adapter = adapter
        self.name = name
        self.readonly = readonly
        self.adoption = adoption
        self.object_ranges = ObjectRanges(name)
        self.state_dict_tensors = StateDictTensors(device, self.object_ranges, readonly=readonly)
        self.scanner = StorageScanner(adapter, self, self.object_ranges, self.state_dict_tensors)
        self.gradients = Gradients(adapter)
        self.watch = Watch(self.scanner)
        self.announce = Announcements(
            left=[self.state_dict_tensors.left],
            coming=[self.watch.require_whole],
            came=[self.state_dict_tensors.came],
        )
        self._host_readers: list[threading.Event] = []
        # when the host copy last became the authoritative one (Unix time)
        self.offloaded_timestamp_seconds = time.time()
        # left before the first change of a move, and set again at the end of `make_consistent`
        self.stage = Stage.SETTLED
        # cleared while an offload hides. A reader of the host copy waits for it.
        self.host_has_newest = threading.Event()
        self.host_has_newest.set()
        self._offload = Offload()  # empty while none is under way
        self._num_entries = 0  # the adapter's, as of the last look
        self._unadopted = Unadopted()  # the storages of `unadopted_bytes`

    @property
    def is_on_host(self) -> bool:
        return not self.on_device or self.stage in (Stage.HIDING, Stage.VACATING)

    @property
    def is_consistent(self) -> bool:
        """Whether no move is under way, and none was left half done."""
        return self.stage is Stage.SETTLED

    @property
    def is_handing_back(self) -> bool:
        """Whether an `unadopt` has begun and not ended. It must be called again before the object
        moves."""
        return self.stage is Stage.HANDING_BACK

    # --- measuring

    @property
    def device_bytes(self) -> int:
        """Device bytes that it takes to put memory behind every range."""
        return sum([r.pages.needed_bytes for r in self.ranges])

    def sizes(self) -> tuple[int, int, int]:
        needed_bytes = own_bytes = aside_bytes = 0
        for r in self.ranges:
            needed_bytes += r.pages.needed_bytes
            own_bytes += r.pages.own_bytes
            aside_bytes += r.pages.aside_bytes
        return (
            needed_bytes + self.unadopted_bytes + self.unborn_bytes,
            own_bytes + aside_bytes + self.unadopted_bytes,
            aside_bytes,
        )

    @property
    def chunk_bytes(self) -> int:
        return self.resident_bytes - self.unadopted_bytes

    @property
    def host_bytes(self) -> int:
        return sum(r.host.held_bytes for r in self.ranges) + self.adoption.reserved_bytes

    @property
    def disk_bytes(self) -> int:
        return sum(r.host.file_bytes for r in self.ranges) + self.adoption.reserved_file_bytes

    @property
    def host_pageable_bytes(self) -> int:
        return sum(r.host.pageable_bytes for r in self.ranges)

    def look_at_framework_memory(self, *, everywhere: bool = False) -> None:
        memory = [*self.adapter.kept_by_framework()]
        if everywhere:
            for name, tensor in self.adapter.unmoved():
                is_on_device = tensor.device == self.device.torch_device
                if is_on_device and RANGES.owner_of(tensor.data_ptr()) is None:
                    words = f"{name}, which is no part of its state and not moved,"
                    memory.append((words, tensor.untyped_storage().nbytes()))
        self.kept_by_framework = tuple(memory)

    def measure(self) -> None:
        """Update `born_bytes` and `unadopted_bytes`. Looks at parameters only where an optimizer's
        steps have created state."""
        if self._unadopted.dead:
            self.count_unadopted()
        if self.on_device and self.unborn_bytes and self.adapter.num_entries() != self._num_entries:
            self.adapter.follow_param_groups()
            self.born_bytes = max(0, self.unborn_bytes - self._measure_unborn())

    def measure_unadopted(self) -> None:
        unadopted = self.scanner.unadopted()
        if unadopted is not None:
            self._note_unadopted(unadopted)
            self._drop_dead_on_device()
            self.look_at_unborn()
            self.look_at_framework_memory()

    def _drop_dead_on_device(self) -> None:
        """Give back the memory of an optimizer's ranges whose tensors were all replaced in a
        training: it was rolled back or reset. A move would do the same, but some policies make
        none."""
        if not self.on_device or not self.is_consistent or self.adapter.kind != "optimizer":
            return
        if all(r.is_alive for r in self.ranges):
            return
        chunk_pool = ChunkPool(self.device)
        self.device.sync()  # kernels on any stream may still read it
        self.state_dict_tensors.disown_live(self.adapter)
        held = self.state_dict_tensors.held_addresses  # also by views of what a state dict had
        self.drop([r for r in self.dead() if not r.has_any(held)], chunk_pool)
        chunk_pool.release()

    def _note_unadopted(self, unadopted: Unadopted) -> None:
        self._unadopted = unadopted
        self.count_unadopted()

    def count_unadopted(self) -> None:
        self.unadopted_bytes = self._unadopted.count_bytes()

    def look_at_unborn(self) -> None:
        """Measure `unborn_bytes` anew: state that exists now, wherever it lies, must not count a
        second time."""
        self._num_entries = self.adapter.num_entries()
        self.adapter.follow_param_groups()
        self.unborn_bytes = self._measure_unborn()
        self.born_bytes = 0

    def _measure_unborn(self) -> int:
        sizes = self.adapter.unborn_sizes()
        return round_up(expected_bytes(self.device, sizes), self.device.granularity) if sizes else 0

    def follow_param_groups(self) -> bool:
        """Update `unborn_bytes` of an offloaded optimizer that steps other parameters than before.
        Returns whether it is one."""
        if self.on_device or not self.adapter.follow_param_groups():
            return False
        self.look_at_unborn()
        return True

    # --- checks

    def is_consistent_in(self, state: State) -> bool:
        return self.stage is Stage.SETTLED and (
            self.on_device is (state is not State.CPU_OFFLOADED) or self._may_stream(state)
        )

    def _may_stream(self, state: State) -> bool:  # from its host copy
        return state is State.SYNCING or (
            state is State.TRAINING and self.adapter.kind == "optimizer"
        )

    def check(self, name: str, state: State) -> None:
        """Compare the memory behind the ranges with the need of the state: every chunk on the
        device, or none."""
        if state is State.CPU_OFFLOADED and self.on_device:
            raise IntegrityError(f"{name!r} is {state}, but its bytes are on the device")
        is_needed = state is not State.CPU_OFFLOADED and (
            self.on_device or not self._may_stream(state)
        )
        for number, r in enumerate(self.ranges):
            pages = [r.pages.table[index] for index in r.pages.at(Behind.OWN)]
            sizes = tuple(page.memory.nbytes for page in pages if page.memory is not None)
            needed_sizes = r.pages.needed_sizes if is_needed else ()
            if sizes != needed_sizes:
                raise IntegrityError(
                    f"{name!r} is {state}, so range {number} of {r.nbytes} bytes needs chunks "
                    f"{needed_sizes} behind it, but has {sizes}"
                )
            if r.host.nbytes < r.nbytes:
                raise IntegrityError(
                    f"{name!r}: range {number} has {r.nbytes} bytes, but its host slab has only "
                    f"{r.host.nbytes}"
                )
            if r.moving_in is not None:
                raise IntegrityError(
                    f"{name!r}: {len(r.moving_in)} storages were never moved into range {number}"
                )

    @property
    def leftovers(self) -> str | None:
        nbytes = self.resident_bytes - self.prefetched_bytes
        return f"{nbytes:,} bytes on the device" if nbytes else None

    def stray_references(self) -> dict[str, int]:
        return stray_references(self.ranges, self.adapter.lasting_gradients())

    def count_uses(self) -> None:
        """Count once the references that each new storage has by right, and note its version
        counter. Called when placement itself holds none of them."""
        new = uncounted(self.ranges)
        if new:
            # Since the last look rebinding has given tensors another storage, which has not been
            # written yet.
            self.object_ranges.note_more_versions(self.scanner.versions_now())
            count_uses(new)

    # --- the host copy

    def has_place(self, tensor: torch.Tensor) -> bool:
        return self.object_ranges.find(tensor) is not None

    def lend_host_copy(self) -> threading.Event:
        """Lock the host copy until the event is set, by any thread: another thread reads it, such
        as the writer of a checkpoint. A step that would overwrite it or give it up waits. A load
        does not wait, because it only reads. Only the thread that moves the object lends and
        waits."""
        self._host_readers = [lock for lock in self._host_readers if not lock.is_set()]
        self._host_readers.append(threading.Event())
        return self._host_readers[-1]

    def wait_for_host_readers(self) -> None:
        """Wait until no other thread reads the host copy. If interrupted, every lock stays as it
        is."""
        for lock in self._host_readers:
            while not lock.wait(_GLANCE_SECONDS):
                interrupts.check()
        self._host_readers = []

    def wait_for_readers(self) -> None:
        if not self.on_device:
            self.wait_for_host_readers()

    def note_written(self) -> None:
        if not self.on_device:
            for r in self.ranges:
                r.note_written()

    def read_host(
        self, tensor: torch.Tensor, storages: dict[int, torch.UntypedStorage] | None = None
    ) -> torch.Tensor | None:
        is_on_host = self.is_on_host
        if is_on_host:
            place = self.state_dict_tensors.place_of(tensor)
        else:
            place = self.object_ranges.find(tensor)
        if place is None:
            return None
        r, offset = place
        # while the object is loaded, a mirror has the lasting tensors that have moved in
        if not is_on_host and (r.transient or r.moving_in is not None):
            return None
        r.pages.wait_until_saved()
        address = r.host.address + offset
        storages = {} if storages is None else storages
        if address not in storages:
            content = r.view(offset, tensor.untyped_storage().nbytes())
            storages[address] = content.untyped_storage()
        return over(storages[address], form_of(tensor))

    def show_host(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """A tensor of the same form over its bytes in the host copy, for a caller who may also
        write there, now or later: it follows all moves. None while the values are on the device,
        and for a tensor without a place."""
        if self.is_on_host and self.has_place(tensor):
            self.host_has_newest.wait()
            self.make_host_copies_own()
        return self.state_dict_tensors.lend_from_host(tensor) if self.is_on_host else None

    def make_host_copies_own(self) -> None:
        """Called before the host copy is shown to a caller who may write there."""
        if not are_only_read.get():
            for r in self.ranges:
                self.make_host_copy_own(r)

    def make_host_copy_own(self, r: Range, changed: Sequence[int] = ()) -> None:
        """Called before this process may write the host copy of a range, which other processes may
        read, too. Only those of a `ReplicatedStorage` do: it gets a copy of its own then.
        `changed`: the pages that are about to be saved; empty: a caller may write anywhere.
        Raises HostMemoryError: other processes read the host copy, and there is no memory for one
        that this process may write."""

    # --- adopting: new storages get their places

    def adopt(self) -> None:
        """Adopt the object at registration: every storage gets its place, its bytes go into the
        slab, and poison lies behind the place. After an error the caller calls `unadopt`."""
        # in a call of its own: no variable here refers to a storage when uses are counted
        was_on_device = self._adopt_all()
        self.look_at_framework_memory()
        self.scanner.align_wrappers()
        self.count_uses()
        if was_on_device:
            # else the old memory stays in torch's cache, where neither other processes nor our
            # chunks can use it
            self.device.trim()

    def _adopt_all(self) -> bool:
        """Give every storage its place. Returns whether any of them was on the device. Raises
        RegistrationError, before anything changes: a tensor cannot be moved."""
        born = self.scanner.rescan()
        self.adapter.check(itertools.chain.from_iterable(adoptee.owned for adoptee in born.new))
        if any(True for _ in self.adapter.sparse()):
            born = self.scanner.rescan(movable=True)
        self.scanner.note_places(born)
        shared, own = self.adopt_shared(born.lasting)
        fresh = self.take_in(born._replace(lasting=own))
        self.device.sync()
        self.move_in((*shared, *fresh))
        return any(adoptee.storage.device == self.device.torch_device for adoptee in born.new)

    def adopt_shared(
        self, adoptees: Sequence[Adoptee]
    ) -> tuple[Sequence[Range], Sequence[Adoptee]]:
        """Adopt, at registration, the storages that ranks share: see `ReplicatedStorage`. Returns
        their ranges, and the other storages."""
        return [], adoptees

    def take_in(self, born: Scan, *, in_parts: bool = False) -> tuple[Range, ...]:
        """Give new storages places, and start saving their bytes. Returns the ranges that they have
        still to move into. `in_parts`: see `Adoption.new_range`."""
        fresh = []
        for adoptees, transient in ((born.lasting, False), (born.transient, True)):
            if adoptees:
                # The list keeps the range alive if making the next one fails: bytes are on their
                # way to its slab.
                fresh.append(
                    self.adoption.new_range(adoptees, transient=transient, in_parts=in_parts)
                )
        if fresh:
            self.scanner.note_adopted()
        return tuple(fresh)

    def move_in(self, fresh: tuple[Range, ...]) -> None:
        """Point new storages to their places. Their bytes have arrived in the slabs."""
        self.set_ranges((*self.ranges, *fresh))
        for r in fresh:
            r.move_in()

    def set_ranges(self, ranges: tuple[Range, ...]) -> None:
        """Make these the object's ranges, also in the process's table."""
        for r in ranges:
            if r.moving_in is not None:
                self.object_ranges.add_places(r)
        self.ranges = ranges
        self.object_ranges.set(ranges)
        RANGES.note(self)

    def reserve(self, sizes: Sequence[int], num_ranges: int = 1) -> None:
        """Reserve host memory for state that is not created yet: see `Adoption.reserve`."""
        self.adoption.reserve(sizes, num_ranges)
        self.look_at_unborn()

    def take_in_leaving(
        self,
        *,
        drops_gradients: bool,
    ) -> tuple[tuple[Range, ...], bool]:
        """During an offload: give new storages places, and start saving their bytes. The commit
        moves them in. With `drops_gradients`, gradients are left out. Returns the ranges, and
        whether any of them is lasting: new state."""
        # in a call of its own: no variable here refers to a storage when uses are counted
        fresh, has_new_state = self._take_in_leaving(drops_gradients)
        # Counted here because the link is busy now. If there are none now, the commit, when the
        # link is idle, need not look again.
        if not self.state_dict_tensors and not self.stray_references():
            self._offload.may_have_stray_references = False
        return fresh, has_new_state

    def _take_in_leaving(self, drops_gradients: bool) -> tuple[tuple[Range, ...], bool]:
        """The part of `take_in_leaving` whose variables refer to storages."""
        scan = self.scanner.rescan(movable=True)
        self.scanner.note_places(scan)
        self.object_ranges.note_versions(self.scanner.versions)
        self._offload = Offload(relocated=scan.relocated)
        born = scan.with_relocated()
        if drops_gradients:
            born = born._replace(transient=self.gradients.besides(born.transient))
        self.state_dict_tensors.take_over({adoptee.storage._cdata for adoptee in born.new})
        return self.take_in(born), bool(born.lasting)

    def take_in_coming(self) -> tuple[Range, ...]:
        """Before a load: take in tensors that came on another device while offloaded (PEFT adapters
        on the CPU). Returns their ranges."""
        fresh: tuple[Range, ...] = ()
        if self.watch.has_new:
            scan = self.scanner.rescan()
            device = self.device.torch_device
            fresh = self.take_in(scan.new_beside(device))
            # new tensors that are on the device already get their places at the next offload
            storages = [adoptee.storage for adoptee in scan.new]
            self._note_unadopted(
                Unadopted([storage for storage in storages if storage.device == device])
            )
        if fresh:
            self.move_in(fresh)
            self.scanner.align_wrappers()
            # the load may fail and be tried again
            self.object_ranges.note_more_versions(self.scanner.versions_now())
        self.look_at_unborn()
        return fresh

    def take_in_created(self, besides: Set[int] = frozenset()) -> Range | None:
        """Start copying state that a streamed step has created to the host. Returns the range into
        which it has still to move. None where there is none, or where host memory lacks: then the
        state stays in torch's memory, and the next step tries again.
        `besides`: storages (`_cdata`) to leave out: those of which copies are under way, and those
        that the step has still to use."""
        new = self.scanner.rescan().lasting
        created = [adoptee for adoptee in new if adoptee.storage._cdata not in besides]
        try:
            fresh = self.take_in(Scan(created), in_parts=True)
            return fresh[0] if fresh else None
        except HostMemoryError as error:
            logger.warning(
                "%s: new optimizer state stays on the device until host memory is free: %s",
                self.name,
                str(error),
            )
            return None

    def adopt_restored(self) -> None:
        """Adopt new state that a checkpoint has put into the object. While offloaded, its bytes go
        straight into the host copy."""
        if self.on_device:
            self.measure_unadopted()
            return
        # no variable here refers to a storage when uses are counted
        fresh = self.take_in(Scan(self.scanner.rescan().lasting))
        if fresh:
            self.device.sync()
            self.stage = Stage.BEGUN
            self.set_ranges((*self.ranges, *fresh))
            self.make_consistent(ChunkPool(self.device))  # has the new storages move in
            self.scanner.align_wrappers()
            self.count_uses()

    def adopt_dropped(self) -> None:
        """Adopt state that has become the offloaded optimizer's own since its offload: modules have
        dropped it as their gradient."""
        if not self.on_device and self.is_consistent and self.adapter.lent_gradients():
            try:
                self.adopt_restored()
            except HostMemoryError:
                # it stays on the device, and the next phase transition tries again
                self.watch.expect(self.scanner.rescan())

    def dead(self) -> list[Range]:
        """The ranges without users: every adopted storage has died, and no state dict that was
        loaded back has left a tensor there."""
        dead = [r for r in self.ranges if not r.is_alive]
        if dead:
            tensors = (*(owned.tensor for owned in self.adapter.owned()), *BORROWED)
            addresses = sorted(tensor.untyped_storage().data_ptr() for tensor in tensors)
            dead = [r for r in dead if not r.has_any(addresses)]
        return dead

    def drop(self, ranges: Sequence[Range], chunk_pool: ChunkPool) -> None:
        """Drop ranges. They leave `self.ranges` last, so that a failure loses no range with memory
        behind it."""
        if not ranges:
            return
        self.state_dict_tensors.leave_ranges(ranges)
        for r in ranges:
            r.pages.discard(chunk_pool)
            r.pages.vacate(range(len(r.chunk_sizes)), chunk_pool)
        dropped = set(ranges)
        self.set_ranges(tuple(r for r in self.ranges if r not in dropped))

    # --- moving: the steps of an `Exchange`, in order

    def begin_leaving(self) -> None:
        """The first step of an offload, before the device is waited for. Calls are refused until
        the object is back. A call that another thread is in goes on, and reads poison once the
        memory has gone."""
        self.stage = Stage.BEGUN
        for listener in self.announce.leaving:
            listener()

    def begin_move(self, chunk_pool: ChunkPool) -> None:
        """Begin a move; an offload after `begin_leaving`, with the device idle. From here to the
        end of `make_consistent` the object may be in any state. If it raises because values are
        lost, or tensors were replaced while offloaded, the move has not begun."""
        if self.lost is not None:
            raise IntegrityError(self.lost)
        if self.on_device:
            self._begin_offload(chunk_pool)
            return
        dead = self.dead()
        if dead:
            self.watch.scan()  # a dead range may have the values of tensors that were replaced
        for listener in self.announce.coming:
            listener()
        self.stage = Stage.BEGUN
        for r in self.ranges:
            r.pages.discard_unusable(chunk_pool)
        self.drop(dead, chunk_pool)

    def _begin_offload(self, chunk_pool: ChunkPool) -> None:
        """Wait for readers of the host copy, and drop what need not be saved."""
        self.wait_for_host_readers()  # the offload will overwrite the host copy
        for r in self.ranges:
            r.pages.note_idle()
        self.adapter.ready()
        # inside an autocast region the cache has half-precision copies of weights, which would stay
        torch.clear_autocast_cache()
        self.state_dict_tensors.disown_live(self.adapter)
        dead = self.dead()
        # The coming offload can use the host memory of gradients that are dead.
        slabs = [r.host for r in dead if r.transient]
        self.adoption.spare = max(slabs, key=lambda slab: slab.nbytes, default=None)
        self.drop(dead, chunk_pool)

    def try_to_hide(self, r: Range, indices: Sequence[int]) -> bool:
        """Put the memory of leaving pages aside. Returns False, with no page moved, where tensors
        of a state dict were handed out meanwhile: they would read poison until `save_aside`, which
        has to follow either way. Readers of the host copy wait for it."""
        self.host_has_newest.clear()
        self.stage = Stage.HIDING
        # tensors that are handed out at this moment wait, too
        self.state_dict_tensors.num_pointings += 1
        if self.state_dict_tensors:
            return False
        r.pages.hide(indices)
        return True

    def save_aside(self) -> None:
        """Start saving the pages that stay aside. Called after all of them have moved, because the
        driver is quick only while the link is idle."""
        for r in self.ranges:
            pages = r.pages.at(Behind.ASIDE)
            unsaved = [index for index in pages if r.pages.table[index].newest is Side.DEVICE]
            for start in range(0, len(unsaved), _SAVED_TOGETHER):
                r.pages.save(unsaved[start : start + _SAVED_TOGETHER])
        if self.stage is Stage.HIDING:  # from here on, a hidden page is as good as a vacated one
            self.stage = Stage.VACATING
        self.host_has_newest.set()

    @property
    def left_bytes(self) -> int:
        """Device bytes of the pages that an offload has left aside, some of which may still be
        being saved."""
        return sum(r.pages.bytes_of(r.pages.left()) for r in self.ranges)

    def give_up_early(self, keep_bytes: int, chunk_pool: ChunkPool) -> int:
        """Give up the pages that are aside, except for the first ones, up to `keep_bytes`. Returns
        the device bytes given up."""
        # an offload that broke off: only these pages may have the bytes
        if self.on_device or not self.is_consistent:
            return 0
        nbytes = 0
        for r in self.ranges:
            staying = set[int]()
            for index in r.pages.at(Behind.ASIDE):
                keep_bytes -= r.chunk_sizes[index]
                if keep_bytes >= 0:
                    staying.add(index)
            nbytes += r.pages.discard(chunk_pool, keep=staying.__contains__)
        return nbytes

    def vacate(
        self, r: Range, indices: Sequence[int], chunk_pool: ChunkPool, *, wipes: bool
    ) -> None:
        """Take away the memory of pages (ascending) whose bytes are on the host, or on their way
        there. `wipes`: see `Pages.vacate`."""
        if self.stage is not Stage.VACATING:
            # Another thread may read these tensors, or be given some just now. It must never read
            # poison.
            self.stage = Stage.VACATING
            self._show_host_copy()
            if self.state_dict_tensors:
                self.device.sync()  # reads that have begun at the old place end
        r.pages.vacate(indices, chunk_pool, wipes=wipes)

    def _show_host_copy(self) -> None:
        """Point the tensors of state dicts to the host copy, before memory is taken away. Their
        holders may write there. Idempotent."""
        for r in self.ranges:
            if r.is_shared and self.state_dict_tensors.are_held:
                self.make_host_copy_own(r)
        self.state_dict_tensors.point_to_host()

    def commit_offload(
        self,
        fresh: tuple[Range, ...],
        prints: Sequence[tuple[Range, torch.Tensor]],
        dropped: tuple[Range, ...] | None = None,
    ) -> MoveResult:
        """Commit an offload whose bytes are all in the slabs. Returns its findings: stray
        references and relocated storages.
        `fresh`: ranges of the new storages.
        `prints`: the new fingerprints of the slabs.
        `dropped`: ranges that were not saved, because every gradient becomes None with the commit;
        None: gradients were saved."""
        for r, slab_prints in prints:
            r.pages.prints = slab_prints
        self._show_host_copy()
        surplus = self.stray_references() if self._offload.may_have_stray_references else {}
        if fresh:
            self.set_ranges((*self.ranges, *fresh))
        self.offloaded_timestamp_seconds = time.time()
        self._offload.dropped = dropped
        self.stage = Stage.VACATING  # also where nothing had memory
        self.on_device = False
        brought_back = []
        for _, entry, adoptee in self._offload.relocated:
            if adoptee.nbytes == entry.nbytes:
                brought_back.append(entry.name)
        return MoveResult(
            stray_references=sum(surplus.values()),
            stray_names=", ".join([*surplus][:8]),
            brought_back=", ".join(brought_back[:8]),
        )

    def commit_load(self) -> None:
        """Commit a load whose bytes are all on their way; the current stream waits for them."""
        for r in self.ranges:
            # also of a readonly object: values written into a state dict are its own now
            if r.pages.prints is None or r.is_shown:
                r.pages.prints = r.fingerprint(0, len(r.chunk_sizes))
            r.is_shown = False
        self.on_device = True

    def make_consistent(self, chunk_pool: ChunkPool) -> None:
        """Finish a move that was committed, or undo one that was not: bring all tensors in line
        with `on_device`. Idempotent. If an unfinished offload gave up memory that cannot be had
        back, the rest of the object is offloaded, too."""
        if self.stage is Stage.SETTLED:
            return
        if self.on_device:
            # prepared for an offload that was not committed
            pending = [r for r in self.ranges if r.moving_in is not None]
            for r in pending:
                self.adoption.reserved = r.host  # the next one can use its slab
            self.drop([*pending, *self.dead()], chunk_pool)
            self._have_back(chunk_pool)
            # any reader is shown the side that was decided on from here on
            self.stage = Stage.BEGUN
        if self.on_device:
            for listener in self.announce.came:
                listener()
        else:
            self._leave_device(chunk_pool)
        self._offload = Offload()
        self.adoption.spare = None
        self.state_dict_tensors.moving_in = frozenset()
        self.stage = Stage.SETTLED

    def _have_back(self, chunk_pool: ChunkPool) -> None:
        """Have every page on the device. Where memory for that is gone, decide that the object is
        offloaded."""
        try:
            for r in self.ranges:
                if r.moving_in is None:
                    r.pages.settle(Side.DEVICE, chunk_pool)
        except DeviceMemoryError:
            for r in self.ranges:
                self._note_unchanged(r)
            self.on_device = False

    def _note_unchanged(self, r: Range) -> None:
        """Note which pages need not be saved, because the rest of the object has to leave, too:
        those whose bytes are in the host copy, and all of a readonly object."""
        host_prints = None if r.pages.prints is None else r.pages.prints.cpu()
        keeps_host_copy = self.readonly and host_prints is not None and not r.transient
        changed = []
        for index, page in enumerate(r.pages.table):
            if page.newest is not Side.DEVICE:
                continue
            is_clean = keeps_host_copy
            if not is_clean and host_prints is not None and page.behind is Behind.OWN:
                prints = r.fingerprint(index, index + 1).cpu()
                is_clean = torch.equal(prints[0], host_prints[index])
            if is_clean:
                r.pages.note_clean((index,))
            else:
                changed.append(index)
        if changed:
            self.make_host_copy_own(r, changed)

    def _leave_device(self, chunk_pool: ChunkPool) -> None:
        """Have every page on the host, and the tensors in line: of a committed offload, a load that
        failed, or a streamed step."""
        dropped = self._offload.dropped
        if dropped is not None:
            self.gradients.drop(zero_buffers=False)
            staying = self.gradients.zero_lasting(dropped)
            for r in staying:
                r.pages.vacate(range(len(r.chunk_sizes)), chunk_pool)
            self.drop([r for r in dropped if r not in staying], chunk_pool)
        # no offload, which has waited: copies and kernels may be under way
        if self.stage is not Stage.VACATING:
            self.device.sync()
        for r in self.ranges:
            r.pages.settle(Side.HOST, chunk_pool)
        # first tensors of state dicts over storages that move to poison now
        self.state_dict_tensors.moving_in = frozenset()
        self.state_dict_tensors.point_to_host()
        for r in self.ranges:
            r.move_in()
        if self.stage is Stage.STEPPING:
            self._take_in_created()
            self.stage = Stage.BEGUN
        for r, entry, _ in self._offload.relocated:  # which have moved to new places
            r.forget(entry)
        self._offload.relocated = ()
        for listener in self.announce.left:
            listener()
        self._note_unadopted(Unadopted())
        self.look_at_unborn()
        self.adapter.drop_caches()
        self.look_at_framework_memory()

    def _take_in_created(self) -> None:
        """Give state that a streamed step has created its place, wherever the step stopped."""
        with without_modes():
            fresh = self.take_in_created()
            if fresh is not None:
                self.device.sync()
                self.move_in((fresh,))
            # state that lacks host memory stays in torch's
            self.watch.expect(self.scanner.rescan())
            # the step has written the state
            self.object_ranges.note_versions(self.scanner.versions)

    def give_back_unused(self) -> None:
        """Give back the memory of dropped gradients, page by page."""
        if not self.is_consistent:
            return
        chunk_pool = ChunkPool(self.device)
        for r in self.ranges:
            indices = r.unused_pages()
            # a state dict of state that was a gradient may have been loaded back
            if indices and not r.has_any(self.state_dict_tensors.held_addresses):
                if self.on_device:
                    self.device.sync()  # kernels on any stream may still read dropped gradients
                r.pages.give_up(indices, chunk_pool)
        chunk_pool.release()

    def immovable(self) -> Iterator[RegistrationError]:
        """Errors about tensors that an offload has left behind."""
        for name, problem in self.adapter.immovable():
            yield RegistrationError(
                f"{self.name!r}: {name!r} {problem}. The rest of the handle was offloaded; this "
                "tensor stays."
            )

    # --- loading, where `ReplicatedStorage` leaves some bytes to `complete`

    def bring(self, r: Range, indices: Sequence[int]) -> int:
        """Start copying chunks (ascending) that were mapped just now to the device. Returns the
        bytes."""
        return fill(self.device, [(r.pages, indices)])

    def complete(self) -> None:
        """Start the missing transfers of an incomplete load, once its phase transition is
        decided."""

    def restore(self) -> None:
        """See `Handle.restore`."""
        if self.lost is not None:
            raise IntegrityError(self.lost)
        self.watch.restore()
        self.count_uses()
        self.look_at_unborn()

    # --- the end

    def unadopt(self) -> None:
        """Give every tensor ordinary storage again, on the device while resident, else on the host,
        and drop the ranges. Idempotent."""
        self.scanner.discovered = frozenset()  # these may be another handle's from now on
        if not self.ranges:
            return
        self.wait_for_host_readers()
        stage_before = self.stage
        if self.on_device:
            self.begin_leaving()
        # a new tensor that cannot be moved must not keep the object's values here
        self.adapter.hands_back = True
        try:
            chunk_pool = self._ready_to_leave(is_repeated=stage_before is Stage.HANDING_BACK)
        except BaseException:
            self.adapter.hands_back = False
            if self.on_device:
                # it stays, and can be called
                if stage_before in (Stage.SETTLED, Stage.HANDING_BACK):
                    for listener in self.announce.came:
                        listener()
                self.stage = stage_before  # an offload that broke off has still to go back
            raise
        self.stage = Stage.HANDING_BACK

        def have_left(address: int) -> None:
            if self.on_device:
                self.device.wait_for_work()
                for r in self.ranges:
                    offset = address - r.layout.addresses.base
                    leaving = [index for index, start in enumerate(r.starts) if start >= offset]
                    r.pages.vacate(leaving, chunk_pool)
                chunk_pool.release()

        HandingBack(self.device, self.scanner, self.on_device, have_left).run()
        if self.on_device:
            # the kernels that copy the values out of the ranges have only been started
            self.device.wait_for_work()
        self.on_device = False
        for r in self.ranges:
            r.pages.vacate(range(len(r.chunk_sizes)), chunk_pool)
        chunk_pool.release()
        self.set_ranges(())

    def _ready_to_leave(self, *, is_repeated: bool) -> ChunkPool:
        """Bring the tensors and the bytes to where `unadopt` expects them. After a failure the
        object stays. `is_repeated`: an earlier call has taken away pages that tensors had left.
        They get no memory again, which other pages may lack."""
        chunk_pool = ChunkPool(self.device)
        if self.on_device or any(r.pages.own_bytes for r in self.ranges):
            self.device.sync()
            for r in self.ranges:
                r.pages.note_idle()
        if self.on_device and not is_repeated:
            self._have_back(chunk_pool)
        if not self.on_device:
            for r in self.ranges:  # while the object can stay as it is, because the device may fail
                r.pages.settle(Side.HOST, chunk_pool)
                r.pages.discard(chunk_pool)
        return chunk_pool
