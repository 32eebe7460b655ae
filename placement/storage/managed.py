"""The storage of an object whose bytes placement moves: where they are, how they come and go, and how the host copy is read.

One `ManagedStorage`, which callers name `holding`, is the unit of a move. `on_device` is its one decision: setting it commits a move.
What is true of each page is in the page tables of its ranges. After a failure the bytes are complete on the side that the decision
names, and `make_consistent` settles every page there and brings the tensors in line.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass

import torch

from placement.core.call_guard import NO_CALLS
from placement.core.errors import BrokenHandleError, DeviceMemoryError, HostMemoryError, IntegrityError
from placement.core.journal import logger
from placement.core.states import State
from placement.core.torch_modes import without_modes
from placement.devices.base import Device
from placement.ownership.adapter import Adapter
from placement.storage.base import Storage, check_ranges
from placement.storage.gradients import Gradients
from placement.storage.layout import RANGES
from placement.storage.nan_check import NanCheck
from placement.storage.object_storages import ObjectStorages
from placement.storage.pages import Behind, Side, fill
from placement.storage.range import Range
from placement.storage.scan import lasting_stray_references
from placement.storage.state_dicts import handed_out, was_handed_out
from placement.storage.transfer.chunk_pool import ChunkPool
from placement.storage.transfer.host_read_locks import HostReadLocks
from placement.tensors.plain import has_storage, is_plain_type, is_sparse, parts_of, sparse_parts


@dataclass(frozen=True, slots=True)
class MoveResult:
    """The bytes that a move copied and skipped, the time it took, and what it found wrong."""

    seconds: float = 0.0
    copied_bytes: int = 0
    skipped_bytes: int = 0
    prefetched_bytes: int = 0
    """Bytes of a load that had arrived before it."""
    rewritten_chunks: int = 0
    """Chunks of a readonly object whose bytes changed on the device."""
    stray_references: int = 0
    stray_names: str = ""
    """Names of the tensors to which there are stray references."""
    brought_back: str = ""
    """Names of the relocated tensors, which the offload has given new places."""
    nan: str = ""
    """Words for tensors that were numbers before and were found to be NaN."""


_SAVED_TOGETHER = 4
"""The number of pages that are saved by one copy call, and known to be saved together."""


class ManagedStorage(Storage):
    """The bytes of one object: its ranges (see `ObjectStorages`), which side is authoritative, and the steps of its moves."""

    on_device = False
    """The decision: whether the bytes on the device are the authoritative ones. If so, every range has memory behind it."""
    lost: str | None = None
    """Which values are lost, and since when; None while no value is lost. A storage with lost values is not moved any more."""
    is_leaving = False
    """Whether an `unadopt` has begun and not ended. It must be called again before anything moves."""

    def __init__(self, device: Device, adapter: Adapter, name: str, readonly: bool) -> None:
        self.device = device
        self.adapter = adapter
        self.name = name
        self.readonly = readonly
        self.storages = ObjectStorages(device, adapter, name, self)
        self.calls = NO_CALLS
        """Refuses the object's calls before `on_device` becomes False, and allows them when all is consistent with its being True."""
        self.host_read_locks = HostReadLocks()
        self.offloaded_timestamp_seconds = time.time()
        """When the host copy last became the authoritative one (Unix time)."""
        self._dropped: tuple[Range, ...] | None = None
        """Gradient ranges that are dropped when this offload is committed; None: gradients are saved."""
        self.is_consistent = True
        """Whether everything agrees with `on_device`. False from before the first change of a move to the end of `make_consistent`."""
        self._is_vacating = False
        """Whether an offload that is not committed yet may have taken memory from behind the object's addresses."""
        self.is_stepping = False
        """Whether a streamed step has begun and has not ended: see `StreamedStep`."""
        self._may_have_stray_references = True
        self.nan_check = NanCheck(self.storages, device, adapter, readonly=readonly)

    @property
    def ranges(self) -> tuple[Range, ...]:
        return self.storages.by_address.ranges

    def end_calls(self, since_seconds: float) -> None:
        """Wait for the calls that other threads are in (see `CallGuard.wait`), and then refuse new ones until `make_consistent` is done.

        Raises:
            PhaseError: a call does not end. The object is as it was.
        """
        self.calls.wait(since_seconds)
        try:
            self.is_consistent = False
            self.calls.refuse()
            self.calls.wait(since_seconds)  # for a call that has begun between the two
        except BaseException:
            self.calls.allow()
            self.is_consistent = True
            raise

    @property
    def is_offloaded(self) -> bool:
        return not self.on_device

    @property
    def gradients(self) -> Gradients:
        return self.storages.gradients

    @property
    def is_on_host(self) -> bool:
        """Whether values must be read from the host copy, because they have left the device or are about to leave it."""
        return not self.on_device or self._is_vacating

    # --- measuring

    @property
    def num_bytes(self) -> int:
        """Device bytes that the object needs in order to be resident, including state that steps have still to create."""
        return self.storages.device_bytes + self.unadopted_bytes + self.unborn_bytes

    @property
    def unborn_bytes(self) -> int:
        """The part of `num_bytes` for state that steps have still to create, as of the last `measure_unadopted`."""
        return self.storages.unborn_bytes

    @property
    def born_bytes(self) -> int:
        """The part of `unborn_bytes` that steps have created since. It is not in `resident_bytes` before the next `measure_unadopted`."""
        return self.storages.born_bytes if self.on_device else 0

    @property
    def resident_bytes(self) -> int:
        """Bytes of the chunks behind the ranges and of those that arrived early, plus `unadopted_bytes`."""
        return self.storages.chunk_bytes + self.unadopted_bytes

    @property
    def chunk_bytes(self) -> int:
        """Bytes of the memory behind the ranges, and of that aside."""
        return self.storages.chunk_bytes

    @property
    def prefetched_bytes(self) -> int:
        return self.storages.aside_bytes

    @property
    def unadopted_bytes(self) -> int:
        """Bytes that the object owns on the device in torch's own memory, as of the last `measure_unadopted`."""
        return self.storages.unadopted_bytes if self.on_device else 0

    @property
    def host_bytes(self) -> int:
        return self.storages.host_bytes

    @property
    def disk_bytes(self) -> int:
        return self.storages.disk_bytes

    @property
    def host_pageable_bytes(self) -> int:
        return self.storages.host_pageable_bytes

    @property
    def kept_by_framework(self) -> tuple[tuple[str, int], ...]:
        return self.storages.kept_by_framework

    def framework_memory(self) -> Iterator[tuple[str, int]]:
        beside = (each for each in self.adapter.unmoved() if each[1].device == self.device.torch_device)
        loose = [(name, tensor) for name, tensor in beside if RANGES.owner_of(tensor.data_ptr()) is None]
        found = [(f"{name}, which is no part of its state and not moved,", each.untyped_storage().nbytes()) for name, each in loose]
        self.storages.kept_by_framework = (*self.adapter.kept_by_framework(), *found)
        return iter(self.storages.kept_by_framework)

    def measure(self) -> None:
        """Update `born_bytes`: see whether an optimizer's steps have created state. Looks at no tensor."""
        if self.on_device:
            self.storages.measure_births()

    def follow_groups(self) -> bool:
        """Update `unborn_bytes` if the object is an offloaded optimizer that steps other parameters than before. Returns whether it is.

        Looks at every parameter. On the device, the next `measure_unadopted` or offload does the same.
        """
        if self.on_device or not self.adapter.follow_groups():
            return False
        self.storages.look_at_unborn()
        return True

    def measure_unadopted(self) -> None:
        self.storages.look()

    # --- checks

    def is_consistent_in(self, state: State) -> bool:
        return self.is_consistent and (self._may_stream(state) or self.on_device is (state is not State.CPU_OFFLOADED))

    def _may_stream(self, state: State) -> bool:
        """Whether a handle in this state may be used from its host copy: published, or stepped by an optimizer."""
        return state is State.SYNCING or (state is State.TRAINING and self.adapter.kind == "optimizer")

    def check(self, name: str, state: State) -> None:
        if state is State.CPU_OFFLOADED and self.on_device:
            raise IntegrityError(f"{name!r} is {state}, but its bytes are on the device")
        is_streaming = self._may_stream(state) and not self.on_device
        check_ranges(name, state, self.ranges, on_device=state is not State.CPU_OFFLOADED and not is_streaming)

    @property
    def leftovers(self) -> str | None:
        left = self.resident_bytes - self.prefetched_bytes
        return f"{left:,} bytes on the device" if left else None

    # --- the host copy

    def has_place(self, tensor: torch.Tensor) -> bool:
        return self.storages.by_address.find(tensor) is not None

    def wait_for_readers(self) -> None:
        if not self.on_device:
            self.host_read_locks.wait()

    def note_written(self) -> None:
        if not self.on_device:
            for r in self.ranges:
                r.note_written()

    def over_host(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """The same tensor with its bytes in the host copy; None where the host copy has no place for it. Meaningful while offloaded."""
        return self.storages.state_dict_tensors.readable(tensor, self.storages.by_address)

    def host_copy(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """Like `over_host`, for a caller that may also write there. None while the values are on the device."""
        host = self.over_host(tensor) if self.is_on_host else None
        if host is not None:
            self.storages.state_dict_tensors.note_shown(self.storages.by_address, [host])
        return host

    def over_mirror(self, tensor: torch.Tensor, storages: dict[int, torch.UntypedStorage]) -> torch.Tensor | None:
        place = self.storages.by_address.find(tensor)
        if place is None or (self.on_device and (place[0].transient or place[0].claims is not None)):
            return None
        r, offset = place
        r.wait_until_saved()
        # Not by `over_host`: what that makes counts as a user's view, which may be written and must follow the moves.
        address = r.host.address + offset
        if address not in storages:
            storages[address] = r.view(offset, tensor.untyped_storage().nbytes()).untyped_storage()
        data = torch.empty(0, dtype=tensor.dtype, device="cpu")
        return data.set_(storages[address], tensor.storage_offset(), tensor.size(), tensor.stride())

    def hand_out(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor as a state dict may show it: readable now, and pointed to the bytes wherever they move."""
        owner = self._owner_of(tensor)
        if self.adapter.kind == "optimizer" and isinstance(tensor, torch.nn.Parameter):
            tensor = tensor.detach()  # state that is a parameter; the live one is for a module's state_dict(keep_vars=True)
        return owner.storages.state_dict_tensors.hand_out(tensor, owner.storages.by_address, from_host=owner.is_on_host)

    def hand_out_once(self, tensor: torch.Tensor) -> torch.Tensor:
        """Like `hand_out`, but returns a tensor that was handed out before as it is."""
        return tensor if was_handed_out(tensor) else self.hand_out(tensor)

    def _owner_of(self, tensor: torch.Tensor) -> ManagedStorage:
        """The storage in whose memory a tensor of the object lies: this one, or another object's (state that is a parameter)."""
        for _, part in sparse_parts(tensor, "") if is_sparse(tensor) else parts_of(tensor, ""):
            if is_plain_type(type(part)) and has_storage(part) and self.storages.by_address.find(part) is None:
                owner = RANGES.owner_of(part.untyped_storage().data_ptr())
                if isinstance(owner, ManagedStorage) and owner.lost is not None:
                    raise BrokenHandleError(f"a tensor of {self.name!r} lies in {owner.name!r}, which is broken: {owner.lost}")
                return owner if isinstance(owner, ManagedStorage) else self
        return self

    def views_left_on_host(self) -> list[str]:
        """The names of tensors that somebody has a view of which shows the host copy, although the values are on the device."""
        tensors = self.storages.state_dict_tensors
        if not self.on_device or not tensors.are_held:
            return []
        return [name for _, name in tensors.left_on_host(self.storages.by_address)]

    def drifted(self) -> list[tuple[str, int]]:
        """Name and bytes of everything that is not where it should be: relocated storages, and tensors that were replaced or torn apart.

        While the object is on the device, a new tensor is no drift. But a module's new tensor with the name of an adopted one is: it was
        put in its place. An optimizer's is not, because loading a state dict replaces its state.
        """
        return self.storages.drifted(on_device=self.on_device)

    @property
    def can_prefetch(self) -> bool:
        return True

    # --- adopting

    def adopt(self) -> None:
        """Adopt the object at registration: every storage gets its place, its bytes go into the slab, and poison lies behind the place.

        Raises:
            RegistrationError: a storage belongs to another handle, or a tensor that nobody named uses it; nothing changed.
            DeviceMemoryError, HostMemoryError: no addresses or no host memory; nothing changed.
        """
        try:
            self.storages.adopt()
        except BaseException:
            self.unadopt()
            raise

    def adopt_restored(self) -> None:
        """Adopt new state that a checkpoint has put into the object. While offloaded, its bytes go straight into the host copy."""
        if self.on_device:
            self.storages.look()
            return
        fresh = self.storages.adopt_lasting()
        if fresh is not None:
            self.device.sync()
            self.is_consistent = False
            self.storages.keep((*self.ranges, fresh))
            self.make_consistent(ChunkPool(self.device))
            self.storages.align_wrappers()
            self.storages.count_uses()

    def adopt_dropped(self) -> None:
        """Adopt state that has become the offloaded optimizer's own since its offload: modules have dropped it as their gradient."""
        if self.adapter.lent_gradients() and not self.on_device and self.is_consistent:
            with contextlib.suppress(HostMemoryError):  # it stays on the device, and the next phase transition tries again
                self.adopt_restored()

    # --- moving: the steps of an `Exchange`, in order

    def begin_move(self, chunk_pool: ChunkPool) -> None:
        """Begin a move. From here to the end of `make_consistent` the object may be in any intermediate state.

        Before an offload the device has been waited for.

        Raises:
            HostMemoryError: the host copy is on disk, and there is not enough memory for it; the move has not begun.
            IntegrityError: values are lost, were written while offloaded, or were computed from poison; the move has not begun.
        """
        if self.lost is not None:
            raise IntegrityError(self.lost)
        for r in self.ranges:
            r.claim()  # before anything changes
        if self.on_device:
            self.host_read_locks.wait()  # the offload will overwrite the host copy
            for r in self.ranges:
                r.pages.note_idle()
        if not self.on_device and self.storages.dead():
            # Before the dead ranges are dropped: they may hold the only good values of tensors that were replaced.
            self.storages.writes.new_unless_changed()
        tensors = self.storages.state_dict_tensors
        self.is_consistent = False
        for r in () if self.on_device else self.ranges:
            r.pages.discard_unusable(chunk_pool)
        if self.on_device:
            self.adapter.ready()
            torch.clear_autocast_cache()  # inside an autocast region it holds half-precision copies of weights, which would stay
        if self.on_device and (held := [each for each in handed_out() if self.adapter.kind == "optimizer" or each is tensors]):
            seen = self.adapter.unchanged()  # an optimizer's state may be a tensor that the state dict of its module has shown
            live = seen.tensors if seen else [*(owned.tensor for owned in self.adapter.owned()), *self.adapter.borrowed()]
            for each in held:
                each.disown(live)
        dead = self.storages.dead()
        if self.on_device:
            if any(not r.transient for r in dead):  # before they are dropped: they have the numbers of tensors that were replaced
                self.nan_check.look_at_new(self.storages.rescan().stay)
            self.storages.offer_slab(dead)
        self.storages.drop(dead, chunk_pool)

    def adopt_new(self, *, drops: bool = False) -> tuple[tuple[Range, ...], bool]:
        """Reserve places for the new storages and start saving them. Returns their ranges, and whether any of them is not transient.

        Args:
            drops: leave the gradients out, because they are dropped when the offload is committed.
        """
        fresh, stays = self.storages.adopt_new(drops=drops, look=self.nan_check.look_at_new)
        # Counted here because the link is busy now. If there are none now, the commit, when the link is idle, need not look again.
        self._may_have_stray_references = bool(self.storages.state_dict_tensors) or bool(self.stray_references())
        return fresh, stays

    def bring(self, r: Range, indices: Sequence[int]) -> int:
        """Start copying these chunks (ascending), which were mapped just now, to the device. Returns the bytes to copy.

        A part may be left to other ranks (see `ReplicatedStorage`): then the load is incomplete until `complete`.
        """
        return fill(self.device, [(r.pages, indices)])

    def make_host_copy_own(self, r: Range) -> None:
        """Called before chunks of a range's host copy are written: see `ReplicatedStorage`.

        Raises:
            HostMemoryError: other processes read the host copy, and there is no memory for one that this process may write.
        """

    def hide(self, r: Range, indices: Sequence[int]) -> None:
        """Put the memory of neighbouring pages that leave aside. `save_aside` saves those that differ from the host copy."""
        self._is_vacating = True
        r.pages.hide(indices)

    def save_aside(self) -> None:
        """Start saving what stays aside. Called after all of it has moved, because the driver is quick only while the link is idle."""
        for r in self.ranges:
            unsaved = [index for index in r.pages.at(Behind.ASIDE) if r.pages.table[index].newest is Side.DEVICE]
            for start in range(0, len(unsaved), _SAVED_TOGETHER):
                r.pages.save(unsaved[start : start + _SAVED_TOGETHER])

    @property
    def left_bytes(self) -> int:
        """Device bytes of the pages that an offload has left aside, some of which may still be being saved."""
        return sum(r.pages.bytes_of(r.pages.left()) for r in self.ranges)

    def show_aside(self) -> int:
        """Map what was prefetched, or left aside, behind the object's own addresses. Returns its bytes."""
        return sum(r.pages.show(r.pages.at(Behind.ASIDE)) for r in self.ranges)

    def give_up_early(self, keep_bytes: int, chunk_pool: ChunkPool) -> int:
        """Give up the pages that are aside, except for the first ones, up to `keep_bytes`. Returns the device bytes given up."""
        if self.on_device or not self.is_consistent:  # an offload that broke off: only these pages may have the bytes
            return 0
        given = 0
        for r in self.ranges:
            kept = set[int]()
            for index in r.pages.at(Behind.ASIDE):
                keep_bytes -= r.chunk_sizes[index]
                if keep_bytes >= 0:
                    kept.add(index)
            given += r.pages.discard(chunk_pool, keep=kept.__contains__)
        return given

    def complete(self) -> None:
        """Start the missing transfers of an incomplete load, once its phase transition is decided.

        Raises:
            RuntimeError: the device failed. The host copy is complete.
        """

    def commit_offload(
        self, fresh: tuple[Range, ...], prints: Sequence[tuple[Range, torch.Tensor]], dropped: tuple[Range, ...] | None = None
    ) -> MoveResult:
        """Commit an offload whose bytes are all in the slabs. Returns what was found wrong: stray references and relocated storages.

        Args:
            fresh: ranges of the new storages.
            prints: the new fingerprints of the slabs.
            dropped: ranges that were not saved, because every gradient becomes None with the commit; None: gradients were saved.
        """
        before = self.ranges
        for r, now in prints:
            r.prints = now
        self.storages.state_dict_tensors.point_to_host(self.storages.by_address, except_for=self.storages.moving_in)
        surplus = self.stray_references(before) if self._may_have_stray_references else {}
        self.storages.keep(before + fresh)
        nan = self.nan_check.take(self.offloaded_timestamp_seconds)  # it names the time of the offload before
        self.offloaded_timestamp_seconds = time.time()
        self._dropped = dropped
        self.calls.refuse()
        self._is_vacating = True  # also where nothing had memory
        self.on_device = False
        return MoveResult(
            stray_references=sum(surplus.values()),
            stray_names=", ".join([*surplus][:8]),
            brought_back=", ".join(self.storages.relocated_names[:8]),
            nan=nan,
        )

    def stray_references(self, ranges: Sequence[Range] | None = None) -> dict[str, int]:
        """The number of stray references to each adopted storage, by the storage's name. Storages without any are left out."""
        return self.storages.stray_references(self.ranges if ranges is None else ranges)

    def lasting_stray_references(self) -> dict[str, int]:
        """The stray references that remain after a short wait (see `scan.lasting_stray_references`)."""
        return lasting_stray_references(self.stray_references)

    def commit_load(self) -> None:
        """Commit a load whose bytes are all on their way; the current stream waits for them."""
        for r in self.ranges:
            if r.prints is None or r.is_shown:  # also of a readonly object: what was written into a state dict is its value from now on
                r.prints = self.storages.fingerprint(r, 0, len(r.chunk_sizes))
            r.is_shown = False
        shown = self.storages.state_dict_tensors
        shown.host_versions.raise_written(self.adapter, self.storages.by_address, are_held=shown.are_held)
        self.on_device = True

    def make_consistent(self, chunk_pool: ChunkPool) -> None:
        """Finish a move that was committed, or undo one that was not: bring everything in line with `on_device`. Idempotent.

        If an unfinished offload gave up memory that cannot be had back, the rest of the object is offloaded, too.
        """
        if self.is_consistent:
            return
        if self.on_device:
            for r in self.ranges:
                if r.claims is not None:  # prepared for an offload that was not committed; the next one can use its slab
                    self.storages.keep_slab_of(r)
            self.storages.drop([*(r for r in self.ranges if r.claims is not None), *self.storages.dead()], chunk_pool)
            self._have_back(chunk_pool)
            self.storages.state_dict_tensors.point_to_device(self.storages.by_address)
            self._distrust_host_copies_with_views()
        if self.on_device:
            self.calls.allow()
        else:
            self._leave_device(chunk_pool)
        self._is_vacating = False
        self._dropped = None
        self.storages.forget_offload()
        self.is_consistent = True

    def _have_back(self, chunk_pool: ChunkPool) -> None:
        """Have every page on the device. Where memory for that is gone, decide that the object is offloaded."""
        try:
            for r in self.ranges:
                if r.claims is None:
                    r.pages.settle(Side.DEVICE, chunk_pool)
        except DeviceMemoryError:
            for r in self.ranges:
                self.before_forced_offload(r)
            self.calls.refuse()
            self.on_device = False

    def _leave_device(self, chunk_pool: ChunkPool) -> None:
        """Have every page on the host, and the tensors in line: of a committed offload, a load that failed, or a streamed step."""
        if self._dropped is not None:
            self.gradients.drop(zero_buffers=False)
            staying = self.gradients.zero_lasting(self._dropped)
            for r in staying:
                r.pages.vacate(range(len(r.chunk_sizes)), chunk_pool)
            self.storages.drop([r for r in self._dropped if r not in staying], chunk_pool)
        if not self._is_vacating:  # no offload, which has waited: copies and kernels may be under way
            self.device.sync()
        for r in self.ranges:
            r.pages.settle(Side.HOST, chunk_pool)
            r.move_in()
        if self.is_stepping:
            self._end_step()
        self.storages.end_offload()
        self.storages.state_dict_tensors.point_to_host(self.storages.by_address)
        self.storages.state_dict_tensors.note_shown(self.storages.by_address)
        self.storages.state_dict_tensors.note_held(self.storages.by_address)
        if self.storages.state_dict_tensors:
            self.storages.writes.allow()
        self.storages.unadopted_bytes = 0
        self.storages.look_at_unborn()
        self.adapter.drop_caches()
        self.storages.look_at_framework_memory()

    def vacate(self, r: Range, indices: Sequence[int], chunk_pool: ChunkPool) -> None:
        """Take away the memory of pages (ascending) whose bytes are on the host, or on their way there."""
        if not self._is_vacating and self.storages.state_dict_tensors:
            # Another thread may be writing a checkpoint from these tensors, which must never read poison.
            self.device.wait(self.device.mark("to_host"))
            self.storages.state_dict_tensors.point_to_host(self.storages.by_address, except_for=self.storages.moving_in)
        self._is_vacating = True
        r.pages.vacate(indices, chunk_pool)

    def before_forced_offload(self, r: Range) -> None:
        """Called where pages cannot come back for lack of memory, before `settle(HOST)` saves them: see `ReplicatedStorage`."""

    # --- a streamed step, which the host copy stays authoritative over, except for pages that are newest on the device

    def adopt_created(self, besides: Set[int] = frozenset()) -> Range | None:
        """Start copying state that a step has created in torch's memory to the host. Returns the range into which it has still to move.

        None where there is none, or where host memory lacks: then the state stays in torch's memory, and the next step tries again.

        Args:
            besides: storages (`_cdata`) to leave out: those of which copies are under way, and those that the step has still to use.
        """
        try:
            return self.storages.adopt_lasting(besides, in_parts=True)
        except HostMemoryError as error:
            logger.warning("%s: new optimizer state stays on the device until host memory is free: %s", self.name, str(error))
            return None

    def _end_step(self) -> None:
        """Take in what a streamed step has created, wherever it stopped. Its pages are on the host."""
        with without_modes():
            fresh = self.adopt_created()
            if fresh is not None:
                self.device.sync()
                self.storages.keep((*self.ranges, fresh))
                fresh.move_in()
            self.storages.rescan()
            self.storages.writes.note()  # the step has written the state
        self.is_stepping = False

    def _distrust_host_copies_with_views(self) -> None:
        """Let the next offload copy every chunk of ranges whose host copy somebody may still write.

        They can through a view of a state dict's tensor. The host copy of a readonly object stays as they leave it, because nothing is
        copied back. So its ranges count as shown until the next load, which takes the fingerprints anew.
        """
        if self.storages.state_dict_tensors.are_held:
            for r, _ in self.storages.state_dict_tensors.left_on_host(self.storages.by_address):
                if self.readonly:
                    r.note_shown()
                elif not r.is_shared:
                    r.prints = None

    # --- writes while offloaded

    def written(self) -> list[str]:
        """Names of the storages that were written in place while offloaded, without gradients, as far as version counters tell.

        Looks at every tensor.
        """
        return [] if self.on_device else self.storages.writes.found()

    def forget_writes(self) -> None:
        """Do not report again what `written` has found."""
        self.storages.writes.forget()

    def take_written_gradients(self) -> list[str]:
        """Names of the gradients that were written while offloaded, otherwise than by `zero_grad()`. They are not reported again."""
        return [] if self.on_device else self.storages.writes.take_gradients()

    # --- leaving

    def _ready_to_leave(self) -> ChunkPool:
        """Bring the tensors and the bytes to where `unadopt` expects them. After a failure the object stays."""
        chunk_pool = ChunkPool(self.device)
        if self.on_device or any(r.pages.own_bytes for r in self.ranges):
            self.device.sync()
            for r in self.ranges:
                r.pages.note_idle()
        if self.on_device:
            self._have_back(chunk_pool)
        if not self.on_device and self.is_consistent:  # no tensor may leave with poison for values
            self.storages.writes.put_back(self.storages.rescan())
        if not self.on_device:
            for r in self.ranges:  # while the object can stay as it is, because the device may fail
                r.pages.settle(Side.HOST, chunk_pool)
                r.pages.discard(chunk_pool)
        return chunk_pool

    def unadopt(self) -> None:
        """Give every tensor ordinary storage again, on the device while resident, else on the host, and drop the ranges. Idempotent."""
        self.storages.give_up_discovered()
        if not self.ranges:
            return
        self.host_read_locks.wait()
        was_consistent = self.is_consistent
        if self.on_device:
            self.end_calls(time.monotonic())
        self.adapter.hands_back = True  # what the object has got and nobody can move must not keep its values here
        try:
            chunk_pool = self._ready_to_leave()
        except BaseException:
            self.adapter.hands_back = False
            if self.on_device:  # it stays, and can be called
                self.calls.allow()
                self.is_consistent = was_consistent
            raise
        self.is_leaving = True
        self.storages.unadopt(on_device=self.on_device)
        if self.on_device:
            self.device.wait_for_work()  # the kernels that copy the values out of the ranges have only been started
        self.on_device = False
        for r in self.ranges:
            r.pages.vacate(range(len(r.chunk_sizes)), chunk_pool)
            RANGES.remove(r.layout.addresses.base)
        chunk_pool.release()
        self.storages.ranges = ()
