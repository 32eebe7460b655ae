"""The storage of a handle: where its bytes are, how many they are, and what a phase transition may ask of them.

Every handle has one storage from registration to its end, of one of four kinds:

* `ManagedStorage`: placement moves the bytes between the device and a host copy.
* `Residency` (in `engines`): a rollout engine moves its own bytes, tag by tag, when it is told to.
* `ExternalStorage`: the object's framework places the bytes; placement measures and guards them and never moves them.
* `NotBuilt`: there is no object yet (a `Lazy` before its factory was called), or none any more.

Callers ask this contract. The defaults are the answers of a storage that has no host copy, no ranges and no tags.
"""

from __future__ import annotations

import abc
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import torch

from placement.core.errors import IntegrityError
from placement.core.states import State
from placement.tensors.owned import Adapter

if TYPE_CHECKING:
    from placement.storage.range import Range


class Storage(abc.ABC):
    """Where the bytes of one handle are. Read from any thread, changed with the manager's lock held."""

    # --- where the bytes are

    @property
    @abc.abstractmethod
    def on_device(self) -> bool:
        """Whether the bytes on the device are the authoritative ones; of an engine, whether any of its tags is there."""

    @property
    def is_offloaded(self) -> bool:
        """Whether the host copy is authoritative and the object's tensors read poison."""
        return False

    @property
    def is_on_host(self) -> bool:
        """Whether values are to be read from the host copy: they are offloaded, or about to be."""
        return False

    @property
    def external_reason(self) -> str | None:
        """The framework feature that places the bytes, for messages; None where placement or the engine does."""
        return None

    @property
    def lost(self) -> str | None:
        """Which values are lost, and since when; None while all are there."""
        return None

    @property
    def is_leaving(self) -> bool:
        """Whether leaving placement was begun and interrupted; `unadopt` must be called again."""
        return False

    # --- bytes

    @property
    @abc.abstractmethod
    def num_bytes(self) -> int:
        """Device bytes that it takes to be resident."""

    @property
    @abc.abstractmethod
    def resident_bytes(self) -> int:
        """Device bytes that it holds now."""

    @property
    def chunk_bytes(self) -> int:
        """Of the resident bytes, those in chunks behind its ranges."""
        return 0

    @property
    def unadopted_bytes(self) -> int:
        """Of the resident bytes, those in torch's own memory: they get a place in a range at the next offload."""
        return 0

    @property
    def unborn_bytes(self) -> int:
        """Of `num_bytes`, those of optimizer state that steps have still to create, as of the last measurement."""
        return 0

    @property
    def born_bytes(self) -> int:
        """Of `unborn_bytes`, those that steps have created since, in torch's own memory."""
        return 0

    @property
    def host_bytes(self) -> int:
        """Bytes of the host copy, and of host memory reserved for state that is not born yet."""
        return 0

    @property
    def host_pageable_bytes(self) -> int:
        """Of the host copy, bytes that the operating system did not let us pin."""
        return 0

    @property
    def kept_by_framework(self) -> tuple[tuple[str, int], ...]:
        """Name and bytes of device memory that a framework keeps for the object in every state, as of the last offload."""
        return ()

    def framework_memory(self) -> Iterator[tuple[str, int]]:
        """The same, asked now."""
        return iter(())

    def measure(self) -> None:
        """Bring up to date what changes without us. Called at every phase transition that moved something: cheap."""

    def measure_unadopted(self) -> None:
        """Bring `unadopted_bytes` and `unborn_bytes` up to date. Enumerates the object's tensors."""

    # --- tags: of engines that place their own memory

    @property
    def tags(self) -> tuple[str, ...]:
        """The parts that can be on the device apart from one another."""
        return ()

    @property
    def resident_tags(self) -> frozenset[str]:
        """The tags that are on the device now."""
        return frozenset()

    @property
    def offloaded_tags(self) -> frozenset[str]:
        """The tags that are not."""
        return frozenset()

    def bytes_by_tag(self) -> Mapping[str, int]:
        """Device bytes of each tag; 0 while not known."""
        return {}

    @property
    def keeps_weights(self) -> bool:
        """Whether the weights survive an offload."""
        return True

    @property
    def stale(self) -> str | None:
        """Why the weights mean nothing until they are published again; None while they are valid."""
        return None

    # --- the host copy

    @property
    def ranges(self) -> tuple[Range, ...]:
        """The address ranges in which its tensors lie."""
        return ()

    @property
    def is_complete(self) -> bool:
        """Whether no load waits for the decision of other ranks."""
        return True

    def has_place(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor lies in one of the ranges or in the host copy."""
        return False

    def over_host(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """The same tensor over the host copy; None where it has no place there. Meaningful while offloaded."""
        return None

    def over_mirror(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """`over_host` after `mirror`, in either state; None for what the host copy does not have now."""
        return None

    def wait_for_readers(self) -> None:
        """Wait until nobody reads the host copy in another thread (a checkpoint's writer)."""

    def note_written(self) -> None:
        """The host copy was written by right: what was known of its bytes is no longer known."""

    def take_in_restored(self) -> None:
        """Adopt new state that a checkpoint has put into the object."""

    # --- checks

    @abc.abstractmethod
    def is_consistent_in(self, state: State) -> bool:
        """Whether nothing has to be made good before a handle in this state may rest: an interrupted move left nothing half done."""

    @abc.abstractmethod
    def check(self, name: str, state: State) -> None:
        """Compare what is declared with what is measured.

        Raises:
            IntegrityError: they disagree; the message has the numbers.
        """

    @property
    def leftovers(self) -> str | None:
        """What is on the device now, in words, for a handle that belongs off it; None where that is nothing."""
        return None

    # --- the end

    def unadopt(self) -> None:
        """Give every tensor ordinary memory again, on the device while resident, else on the host. Idempotent."""

    def detach(self) -> None:
        """The manager gives the object back as it is now."""


class NotBuilt(Storage):
    """The storage of a handle without an object."""

    on_device = False
    num_bytes = 0
    resident_bytes = 0

    def is_consistent_in(self, state: State) -> bool:
        return True

    def check(self, name: str, state: State) -> None:
        """Nothing can disagree."""


class ExternalStorage(Storage):
    """The bytes of an object whose framework places them (FSDP2's `CPUOffloadPolicy`, DeepSpeed, Megatron's hybrid optimizer).

    Args:
        adapter: finds the object's tensors; `adapter.external` says which feature of the framework places them.
    """

    on_device = True
    """The framework answers for that: the states of the handle mean what the user may do, not where bytes are."""
    num_bytes = 0
    """Nothing has to be made free for it."""

    def __init__(self, adapter: Adapter) -> None:
        self._adapter = adapter
        self._resident_bytes = 0

    @property
    def resident_bytes(self) -> int:
        """Device bytes that the object's tensors had there when they were measured last."""
        return self._resident_bytes

    @property
    def external_reason(self) -> str | None:
        return self._adapter.external

    def measure(self) -> None:
        """Count what the object has on an accelerator now, each torch storage once."""
        storages = (owned.tensor.untyped_storage() for owned in self._adapter.owned())
        self._resident_bytes = sum({each._cdata: each.nbytes() for each in storages if each.device.type != "cpu"}.values())

    def is_consistent_in(self, state: State) -> bool:
        return True

    def check(self, name: str, state: State) -> None:
        """The framework's own affair."""


def check_ranges(name: str, state: State, ranges: Sequence[Range], *, on_device: bool) -> None:
    """Compare the memory behind ranges with what a state wants there: every chunk, or none.

    Raises:
        IntegrityError: a range has other chunks, a host copy that is too short, or storages that never moved in.
    """
    for index, r in enumerate(ranges):
        sizes = tuple(r.chunks[position].nbytes for position in sorted(r.chunks))
        wanted = r.chunk_sizes if on_device else ()
        if sizes != wanted:
            raise IntegrityError(
                f"{name!r} is {state}, so range {index} of {r.nbytes} bytes needs chunks {wanted} behind it, but has {sizes}"
            )
        if r.slab.nbytes < r.nbytes:
            raise IntegrityError(f"{name!r}: range {index} has {r.nbytes} bytes, its host slab only {r.slab.nbytes}")
        if r.claims is not None:
            raise IntegrityError(f"{name!r}: {len(r.claims)} storages were never moved into range {index}")
