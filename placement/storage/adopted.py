"""The adopted storages of one object: the bytes they take, how the host copy is read, and how new
storages get places.

`ManagedStorage` adds how the bytes come and go.
"""

from __future__ import annotations

import enum
import itertools
import threading
import time
from collections.abc import Sequence, Set
from dataclasses import dataclass
from functools import cached_property

import torch

from placement.core import interrupts
from placement.core.call_guard import NO_CALLS
from placement.core.errors import BrokenHandleError, HostMemoryError, IntegrityError
from placement.core.journal import logger
from placement.core.states import State
from placement.devices.base import Device, round_up
from placement.ownership.adapter import Adapter
from placement.storage.base import Storage
from placement.storage.layout import Adoptee, expected_bytes, form_of, over
from placement.storage.owners import RANGES
from placement.storage.pages import Behind, ChunkPool
from placement.storage.range import Range
from placement.storage.scan import (
    BORROWED,
    Relocated,
    Scan,
    StorageScanner,
    count_uses,
    stray_references,
    uncounted,
)
from placement.storage.watch.gradients import Gradients
from placement.storage.watch.state_dicts import are_only_read, was_handed_out
from placement.storage.watch.writes import Watch
from placement.tensors.alive import Unadopted, storage_use_count
from placement.tensors.plain import dense_parts, has_storage, is_plain_type

_GLANCE_SECONDS = 0.1  # how often who waits for a reader looks for a Ctrl-C


class Stage(enum.Enum):
    """How far the present move of an object has come. The comment of a stage begins with what
    `on_device`, the decision, may be then. It ends with where any thread reads the values meanwhile
    (`AdoptedStorage.is_on_host`). `make_consistent` takes every stage to `SETTLED`, on the side
    that was decided on."""

    SETTLED = enum.auto()  # Either. Nothing is under way, and everything is where `on_device` says.
    # Either. A load, an offload that has given up nothing yet, new state, a way back. Read where it
    # says.
    BEGUN = enum.auto()
    # False. A streamed step has the newest bytes of some pages on the device. Read in the host
    # copy.
    STEPPING = enum.auto()
    # True. An offload has put memory aside that it has not begun to save. Read in the host copy,
    # once it is there.
    HIDING = enum.auto()
    # True up to the commit, then False. An offload takes the memory away. Read in the host copy.
    VACATING = enum.auto()
    # True, then False. `unadopt` has begun to move tensors out, and must be called again before
    # anything else.
    LEAVING = enum.auto()


@dataclass(slots=True)
class Offload:
    """An offload under way: what it has found, and what it has still to do."""

    # the new storages (`_cdata`) that it takes in: who uses them follows
    moving_in: frozenset[int] = frozenset()
    relocated: Sequence[Relocated] = ()  # storages found away from their places, which get new ones
    may_have_stray_references: bool = True
    # gradients that it drops at its commit; None: they are saved
    dropped: tuple[Range, ...] | None = None


class AdoptedStorage(Storage):
    """The adopted storages of one object, which lie in its ranges, and what the object owns outside
    of these."""

    can_prefetch = True
    # the decision: whether the bytes on the device are the authoritative ones. If so, every range
    # has memory behind it.
    on_device = False

    def __init__(
        self,
        device: Device,
        adapter: Adapter,
        name: str,
        readonly: bool,
    ) -> None:
        self.device = device
        self.adapter = adapter
        self.name = name
        self.readonly = readonly
        self.scanner = StorageScanner(device, adapter, name, self)
        self.object_ranges = self.scanner.ranges
        self.state_dict_tensors = self.scanner.state_dict_tensors
        # refuses the object's calls before `on_device` becomes False, and allows them when all is
        # consistent
        self.calls = NO_CALLS
        self._host_readers: list[threading.Event] = []
        # when the host copy last became the authoritative one (Unix time)
        self.offloaded_timestamp_seconds = time.time()
        # left before the first change of a move, and set again at the end of `make_consistent`
        self.stage = Stage.SETTLED
        # cleared while an offload hides. Who is to be shown the host copy waits for it.
        self.host_has_newest = threading.Event()
        self.host_has_newest.set()
        self._offload = Offload()  # empty while none is under way
        self._num_entries = 0  # the adapter's, as of the last look

    @cached_property
    def gradients(self) -> Gradients:
        return Gradients(self.adapter)

    @cached_property
    def watch(self) -> Watch:
        return Watch(self.scanner)

    @property
    def ranges(self) -> tuple[Range, ...]:
        return self.object_ranges.all

    @property
    def is_on_host(self) -> bool:
        return not self.on_device or self.stage in (Stage.HIDING, Stage.VACATING)

    @property
    def is_consistent(self) -> bool:
        """Whether no move is under way, and none was left half done."""
        return self.stage is Stage.SETTLED

    @property
    def is_leaving(self) -> bool:
        """Whether an `unadopt` has begun and not ended. It must be called again before anything
        moves."""
        return self.stage is Stage.LEAVING

    # --- measuring

    @property
    def device_bytes(self) -> int:
        """Device bytes that it takes to put memory behind every range."""
        return sum([r.pages.needed_bytes for r in self.object_ranges.all])

    def sizes(self) -> tuple[int, int, int]:
        device_bytes = own_bytes = aside_bytes = 0
        for r in self.object_ranges.all:
            device_bytes += r.pages.needed_bytes
            own_bytes += r.pages.own_bytes
            aside_bytes += r.pages.aside_bytes
        # as `unadopted_bytes`, without its calls: every phase transition asks several times
        storages, sizes, _ = self.unadopted
        unadopted_bytes = sum(itertools.compress(sizes, map(storage_use_count, storages)))
        return (
            device_bytes + unadopted_bytes + self.unborn_bytes,
            own_bytes + aside_bytes + unadopted_bytes,
            aside_bytes,
        )

    @property
    def chunk_bytes(self) -> int:
        return self.resident_bytes - self.unadopted_bytes

    @property
    def host_bytes(self) -> int:
        return sum(r.host.held_bytes for r in self.ranges) + self.scanner.reserved_bytes

    @property
    def disk_bytes(self) -> int:
        return sum(r.host.file_bytes for r in self.ranges) + self.scanner.reserved_file_bytes

    @property
    def host_pageable_bytes(self) -> int:
        return sum(r.host.pageable_bytes for r in self.ranges)

    def look_at_framework_memory(self, *, everywhere: bool = False) -> None:
        found = [*self.adapter.kept_by_framework()]
        for name, tensor in self.adapter.unmoved() if everywhere else ():
            if (
                tensor.device == self.device.torch_device
                and RANGES.owner_of(tensor.data_ptr()) is None
            ):
                found.append(
                    (
                        (f"{name}, which is no part of its state and not moved,"),
                        tensor.untyped_storage().nbytes(),
                    )
                )
        self.kept_by_framework = tuple(found)

    def measure(self) -> None:
        """Update `born_bytes`. Looks at parameters only where an optimizer's steps have created
        state."""
        if self.on_device and self.unborn_bytes and self.adapter.num_entries() != self._num_entries:
            self.adapter.follow_param_groups()
            self.born_bytes = max(0, self.unborn_bytes - self._measure_unborn())

    def measure_unadopted(self) -> None:
        if (unadopted := self.scanner.unadopted()) is not None:
            self.unadopted = unadopted
            self.look_at_unborn()
            self.look_at_framework_memory()

    def look_at_unborn(self) -> None:
        """Measure `unborn_bytes` anew: state that exists now, wherever it lies, must not count a
        second time."""
        self._num_entries = self.adapter.num_entries()
        self.adapter.follow_param_groups()
        self.unborn_bytes, self.born_bytes = self._measure_unborn(), 0

    def _measure_unborn(self) -> int:
        sizes = self.adapter.unborn_sizes()
        return round_up(expected_bytes(self.device, sizes), self.device.granularity) if sizes else 0

    def follow_param_groups(self) -> bool:
        """Update `unborn_bytes` of an offloaded optimizer that steps other parameters than before.
        Returns whether it is one."""
        if is_changed := not self.on_device and self.adapter.follow_param_groups():
            self.look_at_unborn()
        return is_changed

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
        """Compare the memory behind the ranges with what the state needs: every chunk on the
        device, or none."""
        if state is State.CPU_OFFLOADED and self.on_device:
            raise IntegrityError(f"{name!r} is {state}, but its bytes are on the device")
        is_needed = state is not State.CPU_OFFLOADED and (
            self.on_device or not self._may_stream(state)
        )
        for number, r in enumerate(self.ranges):
            sizes = tuple(
                chunk.nbytes
                for index in r.pages.at(Behind.OWN)
                if (chunk := r.pages.table[index].memory) is not None
            )
            wanted = r.pages.needed_sizes if is_needed else ()
            if sizes != wanted:
                raise IntegrityError(
                    f"{name!r} is {state}, so range {number} of {r.nbytes} bytes needs chunks "
                    f"{wanted} behind it, but has {sizes}"
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
        left = self.resident_bytes - self.prefetched_bytes
        return f"{left:,} bytes on the device" if left else None

    def drifted(self) -> list[tuple[str, int]]:
        """Name and bytes of everything that is not where it should be: relocated storages, and
        tensors that were replaced or torn apart. On the device, only a module's new tensor with the
        name of an adopted one is drift: loading replaces an optimizer's state."""
        found = [(entry.name, entry.nbytes) for r in self.ranges for entry in r.outside()]
        found += [each for framework in self.adapter.frameworks for each in framework.replaced()]
        # relocated storages are in `found` already, by their addresses
        born = self.scanner.rescan()
        if not self.on_device:
            found += [
                (adoptee.name, adoptee.nbytes) for adoptee in (*born.lasting, *born.transient)
            ]
            places, names = self.object_ranges.named_places(), {name for name, _ in found}
            return found + [
                (name, places[name].entry.nbytes)
                for name in self.watch.replaced
                if name not in names and name in places
            ]
        if self.adapter.kind == "optimizer":
            return found
        replaced = {entry.name for r in self.ranges if not r.transient for entry in r.placed}
        return found + [
            (adoptee.name, adoptee.nbytes) for adoptee in born.lasting if adoptee.name in replaced
        ]

    def stray_references(self) -> dict[str, int]:
        return stray_references(self.ranges, self.adapter.lasting_gradients())

    def count_uses(self) -> None:
        """Count once the references that each storage has by right. Called when placement itself
        holds none of them."""
        if uncounted(self.ranges):
            # Since the last look rebinding has given tensors another storage, which has not been
            # written yet.
            self.object_ranges.note_more_versions(self.scanner.versions_now())
        count_uses(self.ranges)

    # --- the host copy

    def has_place(self, tensor: torch.Tensor) -> bool:
        return self.object_ranges.find(tensor) is not None

    def lend_host_copy(self) -> threading.Event:
        """Lock the host copy until the event is set, by any thread: another thread reads it, such
        as the writer of a checkpoint. What would overwrite it or give it up waits; a load does not,
        because it only reads. Only the thread that moves the object lends and waits."""
        lock = threading.Event()
        self._host_readers = [*(each for each in self._host_readers if not each.is_set()), lock]
        return lock

    def wait_for_host_readers(self) -> None:
        """Wait until nobody reads the host copy any more. If interrupted, every lock stays as it
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
        place = (
            self.state_dict_tensors.place_of(tensor)
            if is_on_host
            else self.object_ranges.find(tensor)
        )
        if place is None or (
            not is_on_host and (place[0].transient or place[0].moving_in is not None)
        ):
            return None
        r, offset = place
        r.pages.wait_until_saved()
        address, known = r.host.address + offset, {} if storages is None else storages
        if address not in known:
            known[address] = r.view(offset, tensor.untyped_storage().nbytes()).untyped_storage()
        return over(known[address], form_of(tensor))

    def show_host(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """A tensor of the same form over its bytes in the host copy, for somebody who may also
        write there, now or later: it follows all moves. None while the values are on the device,
        and for a tensor without a place."""
        if self.is_on_host and self.has_place(tensor):
            self.host_has_newest.wait()
            self._make_host_copies_own()
        return self.state_dict_tensors.show(tensor) if self.is_on_host else None

    def _make_host_copies_own(self) -> None:
        """Called before the host copy is shown to a caller who may write there."""
        if not are_only_read.get():
            for r in self.ranges:
                self.make_host_copy_own(r)

    def make_host_copy_own(self, r: Range, changed: Sequence[int] = ()) -> None:
        """Called before this process may write the host copy of a range: see `ReplicatedStorage`.
        `changed`: the pages that are about to be saved; empty: a caller may write anywhere.
        Raises HostMemoryError: other processes read the host copy, and there is no memory for one
        that this process may write."""

    def hand_out(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor as a state dict may show it: readable now, and pointed to the bytes wherever
        they move, also in another thread."""
        owner = self._owner_of(tensor)
        if self.adapter.kind == "optimizer" and isinstance(tensor, torch.nn.Parameter):
            tensor = tensor.detach()  # the live one is for a module's state_dict(keep_vars=True)
        shown, num_pointings = owner.state_dict_tensors, -1
        while num_pointings != shown.num_pointings:
            num_pointings = shown.num_pointings
            if from_host := owner.is_on_host:
                owner.host_has_newest.wait()
                owner._make_host_copies_own()
            found = shown.hand_out(tensor, from_host=from_host)
        return found

    def hand_out_once(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor if was_handed_out(tensor) else self.hand_out(tensor)

    def _owner_of(self, tensor: torch.Tensor) -> AdoptedStorage:
        """The storage in whose memory a tensor of the object lies: this one, or another object's
        (state that is a parameter)."""
        for _, part in dense_parts(tensor):
            if is_plain_type(type(part)) and has_storage(part) and not self.has_place(part):
                owner = RANGES.owner_of(part.untyped_storage().data_ptr())
                if not isinstance(owner, AdoptedStorage):
                    return self
                if owner.lost is not None:
                    raise BrokenHandleError(
                        f"a tensor of {self.name!r} lies in {owner.name!r}, which is broken: "
                        f"{owner.lost}"
                    )
                return owner
        return self

    def views_left_on_host(self) -> list[str]:
        """The names of tensors that somebody has a view of which shows the host copy, although the
        values are on the device."""
        return (
            [name for _, name in self.state_dict_tensors.left_on_host()] if self.on_device else []
        )

    # --- adopting

    def adopt(self) -> None:
        """Adopt the object at registration: every storage gets its place, its bytes go into the
        slab, and poison lies behind the place."""
        try:
            # in a call of its own: no variable here refers to a storage when uses are counted
            was_on_device = self._adopt_all()
            self.look_at_framework_memory()
            self.scanner.align_wrappers()
            self.count_uses()
            self.object_ranges.note_versions(self.scanner.versions)
            if was_on_device:
                # else the old memory stays in torch's cache, where neither other processes nor our
                # chunks can use it
                self.device.trim()
        except BaseException:
            self.unadopt()
            raise

    def _first_look(self) -> Scan:
        """Look at the object, at its registration. Raises RegistrationError, before anything
        changes: some of it cannot be moved."""
        born = self.scanner.rescan()
        self.adapter.check(
            owned for adoptee in (*born.lasting, *born.transient) for owned in adoptee.owned
        )
        return born

    def reserve(self, sizes: Sequence[int], parts: int = 1) -> None:
        self.scanner.reserve(sizes, parts)
        self.look_at_unborn()

    def set_ranges(self, ranges: tuple[Range, ...]) -> None:
        """Make these the object's ranges, also in the process's table."""
        for r in ranges:
            if r.moving_in is not None:
                self.object_ranges.add_places(r)
        self.object_ranges.set(ranges)
        RANGES.note(self)

    def _adopt_all(self) -> bool:
        """Give every storage its place. Returns whether any of them was on the device."""
        born = self._first_look()
        if any(True for _ in self.adapter.sparse()):
            born = self.scanner.rescan(movable=True)
        self.scanner.note_places(born)
        fresh, own = self.adopt_shared(born.lasting)
        for adoptees, transient in ((own, False), (born.transient, True)):
            if (r := self.scanner.adopt(adoptees, transient=transient)) is not None:
                # here its slab, to which bytes are on their way, outlives a failure of the next
                fresh.append(r)
        self.device.sync()
        self.set_ranges(tuple(fresh))
        for new in self.ranges:
            new.move_in()
        return any(
            adoptee.storage.device == self.device.torch_device
            for adoptee in (*born.lasting, *born.transient)
        )

    def adopt_shared(self, adoptees: list[Adoptee]) -> tuple[list[Range], list[Adoptee]]:
        """Adopt, at registration, what ranks share: see `ReplicatedStorage`. Returns its ranges,
        and the storages that are left."""
        return [], adoptees

    def adopt_new(self, *, drops: bool = False) -> tuple[tuple[Range, ...], bool]:
        """Reserve places for new storages (`drops`: not for gradients), start saving them. Returns
        ranges, and if any is not transient."""
        # in a call of its own: no variable here refers to a storage when uses are counted
        fresh, any_lasts = self._adopt_leaving(drops)
        # Counted here because the link is busy now. If there are none now, the commit, when the
        # link is idle, need not look again.
        self._offload.may_have_stray_references = bool(self.state_dict_tensors) or bool(
            self.stray_references()
        )
        return fresh, any_lasts

    def _adopt_leaving(self, drops: bool) -> tuple[tuple[Range, ...], bool]:
        born = self.scanner.rescan(movable=True)
        self.scanner.note_places(born)
        lasting = born.lasting + [
            each.adoptee
            for each in born.relocated
            if each.adoptee.nbytes and not each.adoptee.owned[0].transient
        ]
        transient = born.transient + [
            each.adoptee
            for each in born.relocated
            if each.adoptee.nbytes and each.adoptee.owned[0].transient
        ]
        self.object_ranges.note_versions(self.scanner.versions)
        if drops:
            transient = self.gradients.besides(transient)
        self._offload = Offload(
            frozenset(adoptee.storage._cdata for adoptee in (*lasting, *transient)), born.relocated
        )
        self.state_dict_tensors.take_over(self._offload.moving_in)
        # by name: its slab, to which bytes are on their way, outlives a failure of the second
        first = self.scanner.adopt(lasting)
        second = self.scanner.adopt(transient, transient=True)
        return tuple(r for r in (first, second) if r is not None), bool(lasting)

    def adopt_from_elsewhere(self) -> tuple[Range, ...]:
        """Before a load: adopt tensors that came on another device while offloaded (PEFT adapters
        on the CPU). Returns their ranges."""
        before, here = self.ranges, list[Adoptee]()
        born = self.scanner.rescan() if self.watch.has_new else Scan([], [], [])
        for transient, adoptees in ((False, born.lasting), (True, born.transient)):
            here += [each for each in adoptees if each.storage.device == self.device.torch_device]
            away = [each for each in adoptees if each.storage.device != self.device.torch_device]
            if (fresh := self.scanner.adopt(away, transient=transient)) is not None:
                self.set_ranges((*self.ranges, fresh))
                fresh.move_in()
        if len(self.ranges) > len(before):
            self.scanner.align_wrappers()
            # the load may fail and be tried again
            self.object_ranges.note_more_versions(self.scanner.versions_now())
        self.unadopted = Unadopted.of([each.storage for each in here])
        self.look_at_unborn()
        return self.ranges[len(before) :]

    def adopt_created(self, besides: Set[int] = frozenset()) -> Range | None:
        """Start copying state that a streamed step has created to the host. Returns the range into
        which it has still to move. None where there is none, or where host memory lacks: then the
        state stays in torch's memory, and the next step tries again.
        `besides`: storages (`_cdata`) to leave out: those of which copies are under way, and those
        that the step has still to use."""
        try:
            adoptees = [
                adoptee
                for adoptee in self.scanner.rescan().lasting
                if adoptee.storage._cdata not in besides
            ]
            return self.scanner.adopt(adoptees, in_parts=True)
        except HostMemoryError as error:
            logger.warning(
                "%s: new optimizer state stays on the device until host memory is free: %s",
                self.name,
                str(error),
            )
            return None

    def dead(self) -> list[Range]:
        """The ranges that nobody uses: every adopted storage has died, and no state dict that was
        loaded back has left a tensor there."""
        if dead := [r for r in self.ranges if not r.is_alive]:
            tensors = (*(owned.tensor for owned in self.adapter.owned()), *BORROWED)
            used = sorted(tensor.untyped_storage().data_ptr() for tensor in tensors)
            dead = [r for r in dead if not r.has_any(used)]
        return dead

    def drop(self, gone: Sequence[Range], chunk_pool: ChunkPool) -> None:
        """Drop ranges. They leave `ranges` last, so that a failure loses no range with memory
        behind it."""
        if not gone:
            return
        self.state_dict_tensors.leave_ranges(gone)
        for r in gone:
            r.pages.discard(chunk_pool)
            r.pages.vacate(range(len(r.chunk_sizes)), chunk_pool)
        out = set(gone)
        self.set_ranges(tuple(r for r in self.ranges if r not in out))
