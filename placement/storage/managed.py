"""The bytes of one registered object: where they are, and how they come and go as a whole.

A holding is the unit of a move. `on_device` is its one decision: storing it commits a move, and everything after that store
is work that `make_consistent` can do again. So an interrupt leaves the holding with its bytes complete on one side, whichever side
the decision names, and `make_consistent` brings the rest in line.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence

import torch

from placement.core.errors import DeviceMemoryError, IntegrityError
from placement.core.states import State
from placement.devices.base import Device
from placement.storage import stray_references
from placement.storage.address_map import RANGES
from placement.storage.base import Storage, check_ranges
from placement.storage.gradients import Gradients
from placement.storage.object_storages import ObjectStorages
from placement.storage.offloaded.gradient_writes import NOTHING, Found
from placement.storage.range import Range
from placement.storage.transfer.chunk_pool import ChunkPool
from placement.storage.transfer.host_read_locks import HostReadLocks
from placement.storage.transfer.result import MoveResult
from placement.storage.unadopt import unadopt
from placement.tensors.owned import Adapter


def _no_calls() -> None:
    """There is nothing in the object that can be called."""


class ManagedStorage(Storage):
    """The bytes of one object: its ranges (see `ObjectStorages`), the decision on which side they count, and the moves between both."""

    on_device = False
    """The decision: whether the device's bytes are the authoritative ones. Then every range is mapped."""
    lost: str | None = None
    """Which values are lost, and since when; None while all are there. The storage then stays where it is until it leaves for good."""
    is_leaving = False
    """Whether leaving placement was begun: an interrupted `unadopt` must be called again before anything moves."""

    def __init__(self, device: Device, adapter: Adapter, name: str, readonly: bool) -> None:
        self.device = device
        self.adapter = adapter
        self.name = name
        self.readonly = readonly
        self.storages = ObjectStorages(device, adapter, name, self)
        self.refuse_calls: Callable[[], None] = _no_calls
        """Called before the decision that the bytes are on the host: from then on nobody can call what needs them."""
        self.allow_calls: Callable[[], None] = _no_calls
        """Called when everything is in line with the decision that they are on the device."""
        self.host_read_locks = HostReadLocks()
        self.offloaded_timestamp_seconds = time.time()
        """When the host copy became the authoritative one (Unix time); while on the device, the last time."""
        self._dropped: tuple[Range, ...] | None = None
        """Ranges of gradients that die with the decision of this offload; None: gradients move."""
        self.is_consistent = True
        """Whether everything is in line with the decision. False from before the first change of a move to the end of `make_consistent`."""
        self._is_vacating = False
        """Whether chunks may have been given up that no decision has taken from us yet."""
        self._is_copying = False
        """Whether copies to the device may be under way that no decision has taken over yet."""
        self._may_have_stray_references = True

    @property
    def ranges(self) -> tuple[Range, ...]:
        return self.storages.by_address.ranges

    @property
    def is_offloaded(self) -> bool:
        return not self.on_device

    @property
    def gradients(self) -> Gradients:
        return self.storages.gradients

    @property
    def is_on_host(self) -> bool:
        """Whether values are to be read from the host copy: they are no longer on the device, or are about to leave it."""
        return not self.on_device or self._is_vacating

    # --- measuring

    @property
    def num_bytes(self) -> int:
        """Device bytes that it takes to be resident, with what is to be born there."""
        return self.storages.device_bytes + self.unadopted_bytes + self.unborn_bytes

    @property
    def unborn_bytes(self) -> int:
        """Of these, for state that steps have still to create, as of the last look."""
        return self.storages.unborn_bytes

    @property
    def born_bytes(self) -> int:
        """Of these, what they have created since, in torch's own memory: not among `resident_bytes` before the next look."""
        return self.storages.born_bytes if self.on_device else 0

    @property
    def resident_bytes(self) -> int:
        """Device bytes behind its ranges, and what it owns in torch's memory."""
        return self.storages.chunk_bytes + self.unadopted_bytes

    @property
    def chunk_bytes(self) -> int:
        """Bytes of chunks behind its ranges."""
        return self.storages.chunk_bytes

    @property
    def unadopted_bytes(self) -> int:
        """Of what it owns on the device, bytes in torch's own memory, as of the last look."""
        return self.storages.unadopted_bytes if self.on_device else 0

    @property
    def host_bytes(self) -> int:
        return self.storages.host_bytes

    @property
    def host_pageable_bytes(self) -> int:
        return self.storages.host_pageable_bytes

    @property
    def kept_by_framework(self) -> tuple[tuple[str, int], ...]:
        return self.storages.kept_by_framework

    def framework_memory(self) -> Iterator[tuple[str, int]]:
        return self.adapter.kept_by_framework()

    def measure(self) -> None:
        """See whether an optimizer's steps have created state. Looks at no tensor."""
        if self.on_device:
            self.storages.measure_births()

    def measure_unadopted(self) -> None:
        self.storages.look()

    # --- checks

    def is_consistent_in(self, state: State) -> bool:
        on_device = self.on_device if state is State.SYNCING else state is not State.CPU_OFFLOADED
        return self.is_consistent and self.on_device is on_device

    def check(self, name: str, state: State) -> None:
        if state is State.CPU_OFFLOADED and self.on_device:
            raise IntegrityError(f"{name!r} is {state}, but its bytes are on the device")
        is_streaming = state is State.SYNCING and not self.on_device
        check_ranges(name, state, self.ranges, on_device=state is not State.CPU_OFFLOADED and not is_streaming)

    @property
    def leftovers(self) -> str | None:
        return f"{self.resident_bytes:,} bytes on the device" if self.resident_bytes else None

    # --- adopting

    def adopt(self) -> None:
        """Register: every storage gets its place, its bytes are in the slab, and poison is behind it.

        Raises:
            RegistrationError: a storage belongs to another handle, or has an alias that nobody named; nothing changed.
            DeviceMemoryError, HostMemoryError: no addresses, no host memory; nothing changed.
        """
        try:
            self.storages.adopt()
        except BaseException:
            self.unadopt()
            raise

    def take_in_restored(self) -> None:
        """Adopt new state that a checkpoint has put into the object. While offloaded its bytes go straight to the host copy."""
        if self.on_device:
            self.storages.look()
            return
        fresh = self.storages.take_in_to_stay()
        if fresh is not None:
            self.device.sync()
            self.is_consistent = False
            self.storages.keep((*self.ranges, fresh))
            self.make_consistent(ChunkPool(self.device))
            self.storages.align_wrappers()
            self.storages.count_uses()

    # --- moving: the steps of an `Exchange`, in their order

    def begin_move(self, chunk_pool: ChunkPool) -> None:
        """From here to the end of `make_consistent` nothing may be taken for granted.

        Raises:
            IntegrityError: values of it are lost, were written while offloaded, or were computed from poison; nothing has begun.
        """
        if self.lost is not None:
            raise IntegrityError(self.lost)
        if self.on_device:
            self.host_read_locks.wait()  # what leaves the device is written over the host copy
        if not self.on_device and self.storages.dead():
            # Before the dead are dropped, with the only good values in them.
            self.storages.new_unless_changed()
        self.is_consistent = False
        self._is_copying = not self.on_device
        if self.on_device:
            self.adapter.ready()
        if self.on_device and self.storages.state_dict_tensors:
            self.storages.state_dict_tensors.disown(owned.tensor for owned in self.adapter.owned())
        self.storages.drop(self.storages.dead(), chunk_pool)

    def take_in_new(self, *, drops: bool = False) -> tuple[tuple[Range, ...], bool]:
        """Reserve a place for what was born since the last offload and start saving it. Also: whether any of it stays for good.

        Args:
            drops: leave the gradients out; they die with the decision.
        """
        fresh, stays = self.storages.take_in_new(drops=drops)
        # Counted while the link is busy; with none now, none has to be looked for when it is not.
        self._may_have_stray_references = bool(self.storages.state_dict_tensors) or bool(self.stray_references())
        return fresh, stays

    def bring(self, r: Range, indices: Sequence[int]) -> int:
        """Start the copies to the device for chunks (ascending) that were mapped just now. Returns the bytes to copy."""
        copies = r.copies(indices)
        self.device.copy(copies, "to_device")
        return sum(copy.nbytes for copy in copies)

    def bring_share(self, r: Range, indices: Sequence[int]) -> int:
        """The same where the ranks of the group will vote on this load: what other ranks have is left to them."""
        return self.bring(r, indices)

    @property
    def is_complete(self) -> bool:
        """Whether every byte of a load is on its way, so that it can be decided."""
        return True

    def complete_alone(self) -> None:
        """Start what is missing of a load that is not complete, over the own link."""

    def complete_together(self) -> None:
        """Start what is missing of a load that is not complete; every rank of the group does this now."""

    def commit_offload(
        self, fresh: tuple[Range, ...], prints: Sequence[tuple[Range, torch.Tensor]], dropped: tuple[Range, ...] | None = None
    ) -> MoveResult:
        """Every byte is in the slabs: decide. Returns what was not as it should be.

        Args:
            dropped: ranges that were not saved, because every gradient becomes None with the decision; None: gradients moved.
        """
        before = self.ranges
        for r, now in prints:
            r.prints = now
        self.storages.relocated.save(readonly=self.readonly)
        self.storages.state_dict_tensors.point_to_host(self.storages.by_address, except_for=self.storages.moving_in)
        surplus = self.stray_references(before) if self._may_have_stray_references else {}
        self.storages.keep(before + fresh)
        self.offloaded_timestamp_seconds = time.time()
        self._dropped = dropped
        self.refuse_calls()
        self.on_device = False
        return MoveResult(
            stray_references=sum(surplus.values()),
            stray_names=", ".join([*surplus][:8]),
            brought_back=", ".join(self.storages.relocated.names[:8]),
        )

    def stray_references(self, ranges: Sequence[Range] | None = None) -> dict[str, int]:
        """By name, the references to adopted storages that others hold now."""
        return self.storages.stray_references(self.ranges if ranges is None else ranges)

    def lasting_stray_references(self) -> dict[str, int]:
        """The same, but for those that go by themselves."""
        return stray_references.that_last(self.stray_references)

    def commit_load(self) -> None:
        """Every byte is on its way, and the current stream waits for it: decide."""
        for r in self.ranges:
            if r.prints is None or (r.is_shown and not self.readonly):
                r.prints = self.storages.fingerprint(r, 0, len(r.chunk_sizes))
            r.is_shown = False
        self.on_device = True

    def make_consistent(self, chunk_pool: ChunkPool) -> None:
        """Bring everything in line with the decision. Idempotent; the second half of every move and the whole of recovery.

        What was given up and cannot be had back decides otherwise: then the rest goes to the host, too.
        """
        if self.is_consistent:
            return
        if self.on_device:
            for r in self.ranges:
                if r.claims is not None:  # saved for an offload that did not come; what was set aside for it is kept for the next
                    self.storages.set_aside(r)
            self.storages.drop([*(r for r in self.ranges if r.claims is not None), *self.storages.dead()], chunk_pool)
            chunk_pool.forget(chunk for r in self.ranges for chunk in r.chunks.values())
            if self._is_vacating and not self._have_back(chunk_pool):
                self.refuse_calls()
                self.on_device = False
            self.storages.state_dict_tensors.point_to_device(self.storages.by_address)
            self.storages.forget_gradients()
        if not self.on_device:
            if self._is_copying:
                self.device.sync()
            if self._dropped is not None:
                self.gradients.drop(zero_buffers=False)
                staying = self.gradients.zero_lasting(self._dropped)
                self.storages.drop([r for r in self._dropped if r not in staying], chunk_pool)
            for r in self.ranges:
                self.storages.vacate(r, chunk_pool)
                r.move_in()
            self.storages.bring_back()
            self.storages.state_dict_tensors.point_to_host(self.storages.by_address)
            self.storages.state_dict_tensors.note_shown(self.storages.by_address)
            if self.storages.state_dict_tensors:
                self.storages.versions_offloaded = None
            self.storages.note_gradients()
            self.storages.unadopted_bytes = 0
            self.storages.look_at_unborn()
            self.adapter.drop_caches()
            self.storages.look_at_framework_memory()
        else:
            self.allow_calls()
        self._is_copying = self._is_vacating = False
        self._dropped, self.storages.moving_in = None, frozenset()
        self.storages.relocated.forget()
        self.is_consistent = True

    def vacate(self, r: Range, first: int, last: int, chunk_pool: ChunkPool) -> None:
        """Take the memory from behind chunks `first` up to `last` (not included), whose bytes are on the host."""
        if (
            not self._is_vacating and self.storages.state_dict_tensors
        ):  # another thread may be writing a checkpoint from them: never over poison
            self.device.wait(self.device.mark("to_host"))
            self.storages.state_dict_tensors.point_to_host(self.storages.by_address, except_for=self.storages.moving_in)
        self._is_vacating = True
        r.give(range(first, last), chunk_pool)  # first, so that what is on record is mapped, whenever an interrupt comes
        self.device.unmap(r.layout.addresses, sum(r.chunk_sizes[first:last]), r.starts[first])

    def _have_back(self, chunk_pool: ChunkPool) -> bool:
        """An offload that was broken off: the chunks that it gave up come back and are filled from the slab, which has their bytes.

        Returns False where their memory is gone; then what is left was copied to the host, which has everything.
        """
        self.device.sync()
        missing = [(r, index) for r in self.ranges for index in r.missing()]
        for r, index in missing:
            self.device.unmap(r.layout.addresses, r.chunk_sizes[index], r.starts[index])
        try:
            for r, index in missing:
                (chunk,) = chunk_pool.take([r.chunk_sizes[index]])
                try:
                    self.device.map(r.layout.addresses, (chunk,), r.starts[index])
                    self.device.copy(r.copies((index,)), "to_device")
                except BaseException:
                    self.device.unmap(r.layout.addresses, r.chunk_sizes[index], r.starts[index])
                    chunk_pool.give((chunk,))
                    raise
                r.chunks[index] = chunk  # last: what is on record has its bytes
        except DeviceMemoryError:
            for r in self.ranges:
                if not r.is_shared:
                    r.prints = None
                    self.device.copy(r.copies(sorted(r.chunks)), "to_host")
            self.device.sync()
            return False
        self.device.order()
        return True

    def written(self) -> list[str]:
        """Names of what was written in place while offloaded, gradients left out, as far as version counters tell. Asks every tensor."""
        return [] if self.on_device else self.storages.written()

    def forget_writes(self) -> None:
        """What `written` has found is reported."""
        self.storages.forget_writes()

    def written_gradients(self) -> Found:
        """What was written into gradients while offloaded; for `take_gradients`, once all holdings were asked."""
        return NOTHING if self.on_device else self.storages.written_gradients()

    def take_gradients(self, found: Found) -> None:
        """Take over what was zeroed; what else was written is reported."""
        self.storages.take_gradients(found)

    # --- the host copy

    def has_place(self, tensor: torch.Tensor) -> bool:
        return self.storages.by_address.find(tensor) is not None

    def wait_for_readers(self) -> None:
        if not self.on_device:
            self.host_read_locks.wait()

    def note_written(self) -> None:
        if not self.on_device:
            for r in self.ranges:
                r.prints = None

    def over_host(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """The same tensor over the host copy; None when its storage has no place there. Meaningful while offloaded."""
        return self.storages.state_dict_tensors.readable(tensor, self.storages.by_address)

    def host_copy(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """`over_host` for somebody who may also write there; None also while the device has the values."""
        host = self.over_host(tensor) if self.is_on_host else None
        if host is not None:
            self.storages.state_dict_tensors.note_shown(self.storages.by_address, [host])
        return host

    def over_mirror(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """`over_host` after `mirror`, in either state; None for what is not in the host copy now."""
        place = self.storages.by_address.find(tensor)
        if place is None or (self.on_device and (place[0].transient or place[0].claims is not None)):
            return None
        return self.over_host(tensor)

    def hand_out(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor as a state dict may show it: readable now, and following the bytes from now on."""
        return self.storages.state_dict_tensors.hand_out(tensor, self.storages.by_address, from_host=self.is_on_host)

    def hand_out_once(self, tensor: torch.Tensor) -> torch.Tensor:
        """`hand_out` for a tensor that may have come from there: then it follows already."""
        return tensor if self.storages.state_dict_tensors.knows(tensor) else self.hand_out(tensor)

    def drifted(self) -> list[tuple[str, int]]:
        """Name and bytes of what lies neither in a range nor where an owned tensor of this moment may lie, and of what was torn apart.

        On the device new tensors may be born; of a module, what bears the name of one that has a place was put there instead of it (an
        optimizer's state is replaced whenever it is loaded).
        """
        return self.storages.drifted(on_device=self.on_device)

    def unadopt(self) -> None:
        """Give every tensor ordinary storage again, on the device while resident, else on the host, and drop the ranges."""
        if not self.ranges:
            return
        self.host_read_locks.wait()
        if self.on_device or self._is_copying:
            self.device.sync()
        if not self.on_device and self.is_consistent:  # nothing of it may leave with poison for values
            self.storages.put_back(self.storages.new_storages())
        self.is_leaving = True
        unadopt(self.device, self.adapter, self.storages, on_device=self.on_device)
        chunk_pool = ChunkPool(self.device)
        self.on_device = False
        for r in self.ranges:
            self.storages.vacate(r, chunk_pool)
            RANGES.remove(r.layout.addresses.base)
        chunk_pool.release()
        self.storages.ranges = ()
