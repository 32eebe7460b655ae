"""Writes to the tensors of one offloaded object: in place, by new tensors in place of others, and to gradients.

Such values cannot be kept, because the host copy has the object's values. They are found, undone as far as possible, and reported once.
"""

from __future__ import annotations

import weakref
from dataclasses import replace
from typing import Protocol

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from placement.core.errors import IntegrityError
from placement.devices.base import Device
from placement.ownership.adapter import Adapter
from placement.storage.gradients import Gradients
from placement.storage.offloaded import changes as poisoned
from placement.storage.offloaded.changes import Changes, computed_from_poison
from placement.storage.offloaded.gradient_writes import GradientWrites
from placement.storage.offloaded.put_back import bring_back, put_back, renew_empty
from placement.storage.offloaded.state_dict_tensors import StateDictTensors
from placement.storage.range import Range, RangesByAddress
from placement.storage.scanning.places import NewStorages
from placement.storage.scanning.scanner import StorageScanner, Versions


class Storages(Protocol):
    """The storages of the object: `ObjectStorages`."""

    name: str
    state_dict_tensors: StateDictTensors
    gradients: Gradients

    @property
    def by_address(self) -> RangesByAddress: ...
    @property
    def ranges(self) -> tuple[Range, ...]: ...
    def new_storages(self) -> NewStorages: ...
    def align_wrappers(self) -> None: ...


class WritesWhileOffloaded:
    """The writes to one object's tensors since its offload, as far as version counters, poison and addresses tell.

    Args:
        storages: the object's storages, which hold this object. Referenced weakly, so that both are freed without a garbage collection.
    """

    def __init__(self, storages: Storages, device: Device, adapter: Adapter, scanner: StorageScanner) -> None:
        self._weak_storages = weakref.ref(storages)
        self._device = device
        self._adapter = adapter
        self._scanner = scanner
        self._gradients = GradientWrites(adapter)
        self._versions: Versions | None = Versions({}, {})
        """The version counters as of the offload. None where they tell nothing."""
        self._told: dict[int, StorageWeakRef] = {}
        """Storages (`_cdata`) computed from poison that have no values to put back and were raised. No other storage gets their key."""

    @property
    def _storages(self) -> Storages:
        storages = self._weak_storages()
        assert storages is not None
        return storages

    # --- writes in place

    def note(self) -> None:
        """Take the last look's version counters as those of the offload: later writes count as written while offloaded."""
        self._versions = self._scanner.versions

    def note_more(self) -> None:
        """Add the counters of storages that the last look found for the first time. Counters noted earlier stay."""
        if (noted := self._versions) is not None:
            now = self._scanner.versions
            self._versions = Versions({**now.sums, **noted.sums}, {**now.counts, **noted.counts})

    def allow(self) -> None:
        """Find no writes until the next `note`: tensors of a state dict share the counters, and their holder may write."""
        self._versions = None

    def found(self) -> list[str]:
        """Names of the storages that were written in place since the offload, without gradients, as far as version counters tell."""
        self._storages.new_storages()
        return self._found()

    def _found(self) -> list[str]:
        noted = self._versions
        return [] if noted is None else poisoned.written(noted, self._scanner.versions, self._storages.ranges)

    def forget(self) -> None:
        """Do not report again the writes that the last look has found."""
        if self._versions is not None:
            self.note()

    # --- tensors in place of others

    def new_unless_changed(self) -> NewStorages:
        """The new storages of the offloaded object. If registered tensors were changed, this is undone as far as possible, and raised.

        Raises:
            IntegrityError: registered tensors were written or changed; the message says which, and what to do. Each change is raised once.
        """
        storages = self._storages
        born = storages.new_storages()
        names = self._found()
        changes = self.put_back(born)
        if not changes and not names:
            return born
        message = changes.message(storages.name)
        self._told |= {claim.storage._cdata: StorageWeakRef(claim.storage) for claim in (*changes.added, *changes.gradients)}
        del born, changes  # so that an error that somebody keeps does not keep tensors
        storages.new_storages()  # the tensors that were put back have other storages now, which were never counted
        self.forget()
        poisoned.refuse_written(storages.name, names, message)
        raise IntegrityError(message)

    def was_told(self, tensor: torch.Tensor) -> bool:
        """Whether an error has said of a tensor already that it was computed from poison and stays so."""
        return tensor.untyped_storage()._cdata in self._told

    def put_back(self, born: NewStorages) -> Changes:
        """Undo changes to registered tensors of the offloaded object, and return them.

        Gradients are put back only together with replaced values. Gradients that changed alone come from a backward, and the earlier ones
        may have been dropped on purpose: then all gradients of this backward are dropped.
        """
        if not born:
            return Changes()
        storages = self._storages
        places = self._scanner.places.within(storages.ranges)
        bring_back(self._device, born.relocated, places)
        stay, transient = (
            [c for c in claims if c.storage._cdata not in self._told or any(owned.name in places for owned in c.owned)]
            for claims in (born.stay, born.transient)
        )
        changes = replace(computed_from_poison(stay, transient, places), moved=[each.claim for each in born.relocated])
        if changes.replaced:
            gradients = [claim for claim in changes.gradients if any(owned.name in places for owned in claim.owned)]
            if put_back(self._device, [*changes.replaced, *gradients], places, self._scanner.places.outlines()):
                changes = replace(changes, lost=next(filter(None, (each.lost_by_conversion for each in self._adapter.frameworks)), None))
            storages.align_wrappers()
            renew_empty(self._adapter.with_gradients())
            for framework in self._adapter.frameworks:
                framework.follow_parameters()
        if changes.gradients:
            storages.gradients.drop_in({claim.storage._cdata for claim in transient})
        if changes:
            storages.state_dict_tensors.point_to_host(storages.by_address)
        return changes

    # --- gradients

    def note_gradients(self) -> None:
        """Called when the object is offloaded: from now on writes into its gradients are found. Idempotent until `forget_gradients`."""
        self._gradients.note(self._storages.ranges)

    def forget_gradients(self) -> None:
        """Called when the object is on the device: its gradients may be written again."""
        self._gradients.forget()

    def take_gradients(self) -> list[str]:
        """Names of the gradients that were written since. They are not reported again."""
        return self._gradients.take(self._storages.ranges)
