"""The storage of a handle: where its bytes are, how many there are, and the questions of a phase
transition.

Every handle has one `Storage` from registration to its end, of one of four kinds. (A storage
without more words is one of torch's.)

* `ManagedStorage`: placement moves the bytes between the device and a host copy.
* `Residency` (in `engines`): a rollout engine moves its own bytes, tag by tag, when it is told to.
* `ExternalStorage`: the object's framework places the bytes; placement measures and guards them and
  never moves them.
* `NotBuilt`: there is no object yet (the factory of a `Lazy` was not called), or the object is
  gone.

The defaults are the answers of a storage without host copy, ranges and tags.
"""

from __future__ import annotations

import abc
from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch

from placement.core.states import NO_TAGS, State
from placement.ownership.adapter import Adapter

if TYPE_CHECKING:
    from placement.storage.range import Range


class Storage(abc.ABC):
    """Where the bytes of one handle are. Any thread may read it; changing it needs the manager's
    lock."""

    lost: str | None = None
    """Which values are lost, and since when; None while no value is lost. A storage with lost
    values is not moved any more."""
    kept_by_framework: tuple[tuple[str, int], ...] = ()
    """Name and bytes of device memory that a framework keeps for the object in every state, as of
    the last offload or audit."""

    # --- where the bytes are

    @property
    @abc.abstractmethod
    def on_device(self) -> bool:
        """Whether the bytes on the device are the authoritative ones; for an engine, whether any of
        its tags is on the device."""

    @property
    def is_on_host(self) -> bool:
        """Whether values must be read from the host copy, because they have left the device or are
        about to leave it."""
        return False

    # --- bytes

    # the part of `resident_bytes` in torch's own memory, which gets a place in a range at the next
    # offload: as of the last measurement
    unadopted_bytes = 0

    def count_unadopted(self) -> None:
        """Update `unadopted_bytes`, less storages that have died since the last measurement."""

    @abc.abstractmethod
    def sizes(self) -> tuple[int, int, int]:
        """`num_bytes`, `resident_bytes` and `prefetched_bytes` as of the last measurement: every
        phase transition asks every handle for them several times."""

    @property
    def num_bytes(self) -> int:
        """Device bytes that the handle needs in order to be resident."""
        self.count_unadopted()
        return self.sizes()[0]

    @property
    def resident_bytes(self) -> int:
        """Device bytes that the handle holds now."""
        self.count_unadopted()
        return self.sizes()[1]

    @property
    def prefetched_bytes(self) -> int:
        """Device bytes of an offloaded handle's pages that are aside: prefetched, or left there by
        its offload."""
        return self.sizes()[2]

    @property
    def chunk_bytes(self) -> int:
        """The part of `resident_bytes` that is in chunks: behind the ranges, or aside."""
        return 0

    @property
    def host_bytes(self) -> int:
        """Bytes of the host copy in host memory, and of host memory reserved for state that is not
        created yet; an engine's own copy."""
        return 0

    @property
    def mirror_bytes(self) -> int:
        """Host bytes of a rollout engine's mirror, its own copy of the weights, when it has one;
        `host_bytes` has them only then."""
        return 0

    @property
    def disk_bytes(self) -> int:
        """Bytes of the host copy, with the part that is reserved for state that is not created yet,
        in files (`Settings.disk_directory`)."""
        return 0

    @property
    def host_pageable_bytes(self) -> int:
        """Bytes of the host copy that the operating system did not allow to be pinned."""
        return 0

    # whether bytes may arrive early: placement moves them, from a host copy of this process alone
    can_prefetch = False
    # the part of `num_bytes` for optimizer state that steps have still to create, as of the last
    # measurement
    unborn_bytes = 0
    # the part of `unborn_bytes` that steps have created since that measurement, in torch's own
    # memory
    born_bytes = 0

    def look_at_framework_memory(self, *, everywhere: bool = False) -> None:
        """Update `kept_by_framework`.
        `everywhere`: also with memory that only a search of the whole object finds, for an
        audit."""

    def measure(self) -> None:
        """Update the figures that change without placement. It is called at every phase transition,
        so it has to be cheap."""

    def measure_unadopted(self) -> None:
        """Update `unadopted_bytes` and `unborn_bytes`. Looks at every tensor of the object."""

    # --- tags, for engines that place their own memory

    tags: tuple[str, ...] = ()  # the parts that can be loaded and offloaded independently
    resident_tags: frozenset[str] = frozenset()  # those that are on the device now
    moved_by: str | None = None  # see `HandleSnapshot.moved_by`

    @property
    def offloaded_tags(self) -> frozenset[str]:
        return frozenset(self.tags) - self.resident_tags

    def bytes_by_tag(self) -> Mapping[str, int]:
        """Device bytes of each tag; 0 while the figure is not known."""
        return NO_TAGS

    # --- the host copy

    ranges: tuple[Range, ...] = ()  # the address ranges in which the object's tensors lie

    # whether every load is complete: none waits for the ranks of a group to finish it
    is_complete = True

    def has_place(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor lies in one of the ranges or in the host copy."""
        return False

    def read_host(
        self, tensor: torch.Tensor, storages: dict[int, torch.UntypedStorage] | None = None
    ) -> torch.Tensor | None:
        """A tensor of the same form over its bytes in the host copy. The caller only reads it,
        before it changes or under a lock of `lend_host_copy`. None for a tensor that the host copy
        does not have now. While the object is loaded, it is right after `refresh_host_copy`.
        `storages`: the storages that were made for the same reader, by address. Tensors that shared
        a storage share one again."""
        return None

    def wait_for_readers(self) -> None:
        """Wait until no other thread reads the host copy (the writer of a checkpoint does)."""

    def note_written(self) -> None:
        """Forget the fingerprints of the host copy: a permitted write has changed it."""

    def adopt_restored(self) -> None:
        """Adopt new state that a checkpoint has put into the object."""

    # --- checks

    def is_consistent_in(self, state: State) -> bool:
        """Whether a handle in this state needs no repair: no interrupted move is left half done."""
        return True

    def check(self, name: str, state: State) -> None:
        """Raise IntegrityError, with the numbers, if the declared and the measured figures
        disagree."""

    @property
    def leftovers(self) -> str | None:
        """Words for the bytes that a handle has on the device although it should have none; None
        where there are none."""
        return None

    # --- the end

    def unadopt(self) -> None:
        """Give every tensor ordinary memory again: on the device while resident, else on the host.
        Idempotent."""

    def detach(self) -> None:
        """Called when the manager gives the object back, which stays as it is now."""


class NotBuilt(Storage):
    """The storage of a handle without an object, with which nothing can disagree."""

    on_device = False

    def sizes(self) -> tuple[int, int, int]:
        return 0, 0, 0


class ExternalStorage(Storage):
    """The bytes of an object whose framework places them (FSDP2's `CPUOffloadPolicy`, DeepSpeed,
    Megatron's hybrid optimizer).
    `adapter`: finds the object's tensors; `adapter.external` says which feature of the framework
    places them."""

    # always true: the framework places the bytes. The handle's states say how the object may be
    # used, not where the bytes are.
    on_device = True

    def __init__(self, adapter: Adapter) -> None:
        self._adapter = adapter
        # bytes of the object's tensors on the device, as of the last `measure`
        self._measured_bytes = 0

    def sizes(self) -> tuple[int, int, int]:
        # it needs none, because placement does not have to free memory for the object
        return 0, self._measured_bytes, 0

    def measure(self) -> None:
        sizes = dict[int, int]()  # by storage, because tensors may share one
        for owned in self._adapter.owned():
            storage = owned.tensor.untyped_storage()
            if storage.device.type != "cpu":
                sizes[storage._cdata] = storage.nbytes()
        self._measured_bytes = sum(sizes.values())
