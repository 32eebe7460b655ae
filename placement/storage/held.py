"""The bytes of an object that placement moves, as they are: how many there are, whether they agree, and reading the host copy.

`ManagedStorage` adds how they come and go.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import torch

from placement.core.call_guard import NO_CALLS
from placement.core.errors import BrokenHandleError, IntegrityError
from placement.core.states import State
from placement.devices.base import Device
from placement.ownership.adapter import Adapter
from placement.storage.base import Storage, check_ranges
from placement.storage.gradients import Gradients
from placement.storage.layout import RANGES
from placement.storage.object_storages import ObjectStorages
from placement.storage.range import Range
from placement.storage.state_dicts import was_handed_out
from placement.storage.transfer.host_read_locks import HostReadLocks
from placement.storage.transfer.result import NanFound
from placement.tensors.plain import has_storage, is_plain_type, parts_of
from placement.tensors.sparse import is_sparse, sparse_parts


class HeldStorage(Storage):
    """The bytes of one object: its ranges (see `ObjectStorages`) and which side is authoritative."""

    on_device = False
    """The decision: whether the bytes on the device are the authoritative ones. If so, every range has memory behind it."""
    lost: str | None = None
    """Which values are lost, and since when; None while no value is lost. A storage with lost values is not moved any more."""
    is_leaving = False
    """Whether an `unadopt` has begun. If it was interrupted, it must be called again before anything moves."""

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
        """Whether an offload that is not committed yet may have given up chunks."""
        self._is_copying = False
        """Whether a load that is not committed yet may have copies under way."""
        self.is_stepping = False
        """Whether a streamed step has begun and has not ended: see `stepping`."""
        self._may_have_stray_references = True
        self.nan_found = NanFound()

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
        storages = self.storages
        return storages.chunk_bytes + (storages.early_bytes if storages.may_have_early else 0) + self.unadopted_bytes

    @property
    def chunk_bytes(self) -> int:
        """Bytes of the chunks behind the ranges, and of those that arrived early."""
        return self.storages.chunk_bytes + self.storages.early_bytes

    @property
    def prefetched_bytes(self) -> int:
        return self.storages.early_bytes if self.storages.may_have_early else 0

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

    def _owner_of(self, tensor: torch.Tensor) -> HeldStorage:
        """The storage in whose memory a tensor of the object lies: this one, or another object's (state that is a parameter)."""
        for _, part in sparse_parts(tensor, "") if is_sparse(tensor) else parts_of(tensor, ""):
            if is_plain_type(type(part)) and has_storage(part) and self.storages.by_address.find(part) is None:
                owner = RANGES.owner_of(part.untyped_storage().data_ptr())
                if isinstance(owner, HeldStorage) and owner.lost is not None:
                    raise BrokenHandleError(f"a tensor of {self.name!r} lies in {owner.name!r}, which is broken: {owner.lost}")
                return owner if isinstance(owner, HeldStorage) else self
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
