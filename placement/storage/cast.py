"""Weights without a host copy of their own: an optimizer has float32 master weights, and the
weights are their cast, bit for bit.

While the optimizer is offloaded, its host copy has the weights, too. A load casts them on the
device, and who reads them on the host casts them there. Three things make sure of it:

1. Before the masters leave the device, fingerprints are computed that the weights' pages have if
  they are the cast (`masters_leave`). The
   offload of the weights compares its own with these. Where any differs, or the masters stay, the
   weights are saved like any others.
2. Before the masters' host copy changes, goes, or is shown to somebody who may write there, and
  before the masters are loaded without the
   weights, these get a host copy of their own (`masters_change`).
3. NaN has many bit patterns, and a cast may choose another one on the device than on the host:
  weights with NaN are always saved.
"""

from __future__ import annotations

import bisect
import functools
import itertools
import threading
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import torch

from placement.core.errors import RegistrationError
from placement.core.journal import logger
from placement.devices.base import Device
from placement.devices.host.slab import Slab, upload
from placement.ownership.adapter import Adapter
from placement.ownership.optimizer import OptimizerAdapter
from placement.storage.fingerprints import fingerprints
from placement.storage.layout import Adoptee
from placement.storage.managed import ManagedStorage
from placement.storage.pages import Behind, ChunkPool
from placement.storage.range import Range

# the most bytes of masters on the device at a time while weights are cast from masters on the host
STAGING_BYTES = 64 << 20


class _Weight(NamedTuple):
    """A weight's bytes in its range, from `start` up to `end`, and the byte of the masters' range
    from which on its masters lie there."""

    start: int
    end: int
    masters: Range
    offset: int


class CastRange(Range):
    """A range of 16-bit weights that may be the cast of masters. Its slab has memory only while
    they have a host copy of their own."""

    # as with a replica, all pages are compared before any is saved, and the host copy never leaves
    # for a disk
    is_replica = True
    can_be_cast = True
    # whether the values are the cast of what the masters' host copy has, and not those in the slab
    is_cast = False
    expected: torch.Tensor | None = None
    """The fingerprints of the cast of what the masters' host copy has, or will have at the end of
    their offload; None if unknown."""
    key = ""  # see `OptimizerAdapter.masters`
    weights: Sequence[_Weight] = ()
    optimizer: ManagedStorage  # the storage of the masters. Set as long as `weights` are.
    dtype: torch.dtype
    is_told = False  # whether the log has told that it can be no cast any more

    def __init__(self, *its: Any) -> None:
        super().__init__(*its)
        # held during a cast into the slab, and from an offload's decision that they are a cast up
        # to its end
        self.lock = threading.RLock()

    def lacks(self) -> str | None:
        """Words for weights that are not at their places, or have no masters: the range is no cast
        for good. None if all are there."""
        places = sorted(self.layout.offsets)
        num = len(places) - len({bisect.bisect(places, each.start) for each in self.weights})
        reason = (
            "of its weights have got other memory since they were registered (.data =), or their "
            "masters are gone"
        )
        return (
            (
                f"{num} {reason}, so masters= saves nothing: unregister it and the optimizer, and "
                "register both anew"
            )
            if num
            else None
        )

    def view(self, offset: int, nbytes: int, *, even_if_lost: bool = False) -> torch.Tensor:
        self.have()
        return super().view(offset, nbytes, even_if_lost=even_if_lost)

    def have(self) -> None:
        """From now on have a host copy, until an offload finds the weights to be a cast. Any
        thread. If it raises, no value is lost."""
        with self.lock:
            if isinstance(self.host, Slab) and self.host.is_released:
                self.host.renew()
            if self.is_cast:
                self.cast_into(self.host.view(0, self.nbytes))
            self.is_cast = False

    @torch.no_grad()
    def cast_into(self, out: torch.Tensor, start: int = 0) -> None:
        """Write the cast of the masters, wherever they are, into the bytes (uint8) from `start` on;
        zeros where no weight is."""

        @functools.cache
        def masters_in(r: Range) -> torch.Tensor:
            return (
                r.view(0, r.nbytes) if self.optimizer.is_on_host else r.on_device(0, r.nbytes)
            ).view(torch.float32)

        out.zero_()
        into, values, end = [], [], start + out.numel()
        first = bisect.bisect_right(self.weights, start, key=lambda each: each.end)
        for each in itertools.takewhile(
            lambda each: each.start < end, itertools.islice(self.weights, first, None)
        ):
            low, high = max(each.start, start), min(each.end, end)
            into.append(out[low - start : high - start].view(self.dtype))
            values.append(
                masters_in(each.masters)[each.offset // 4 :][
                    (low - each.start) // 2 : (high - each.start) // 2
                ]
            )
        if into and values[0].device == out.device:
            torch._foreach_copy_(into, values)
            return
        for weight, masters in zip(into, values, strict=True):
            for target, source in zip(
                weight.split(STAGING_BYTES // 4), masters.split(STAGING_BYTES // 4), strict=True
            ):
                upload(target, source, non_blocking=True)

    def cast_to_device(self, indices: Iterable[int]) -> None:
        """Cast into pages that have memory, on the current stream. Waits where masters are read on
        the host: nothing else knows of it."""
        for index in indices:
            self.cast_into(
                self.on_device(self.starts[index], self.used_sizes[index]), self.starts[index]
            )
        if self.optimizer.is_on_host:
            self._device.wait_for_work()

    def fingerprints_of_cast(self, device: torch.device) -> torch.Tensor | None:
        """The fingerprints of pages with the cast of the masters, which are on `device`; None where
        memory to compute them lacks there."""
        try:
            staging = torch.empty(max(self.used_sizes), dtype=torch.uint8, device=device)
        except torch.OutOfMemoryError:
            return None
        found = []
        for start, nbytes in zip(self.starts, self.used_sizes, strict=True):
            self.cast_into(staging[:nbytes], start)
            # no page equals one with NaN
            found.append(
                fingerprints(staging, [nbytes]) + staging[:nbytes].view(self.dtype).isnan().any()
            )
        return torch.cat(found)


class CastStorage(ManagedStorage):
    """The storage of a module with a `CastRange`. Raises RegistrationError: the optimizer has no
    tensors that could be masters."""

    can_prefetch = False

    def __init__(
        self, device: Device, adapter: Adapter, name: str, readonly: bool, masters: Any
    ) -> None:
        super().__init__(device, adapter, name, readonly)
        self._masters = OptimizerAdapter(masters, name=name, compute_device=device.torch_device)
        dtypes = {
            weight.untyped_storage()._cdata: weight.dtype
            for _, weight, _ in self._masters.masters()
            if weight.nbytes
        }
        dtype = next(iter(dtypes.values()), None)
        if dtype is None or self._masters.external is not None:
            raise RegistrationError(
                f"{name!r}: masters= has no float32 tensor that placement moves for any bfloat16 "
                "or float16 weight as a whole. Make the masters first (by a step, or from a "
                "checkpoint). Those of shards (Megatron's distributed optimizer on several ranks) "
                "do not do."
            )
        # storages (`_cdata`), of use at registration only
        self._weights = {key for key, each in dtypes.items() if each is dtype}
        self._locked: list[CastRange] = []

    def _cast_ranges(self) -> Iterator[CastRange]:
        return (r for r in self.ranges if isinstance(r, CastRange))

    def adopt_apart(self, adoptees: list[Adoptee]) -> tuple[list[Range], list[Adoptee]]:
        r = self.scanner.adopt(
            [each for each in adoptees if each.storage._cdata in self._weights], kind=CastRange
        )
        return [] if r is None else [r], [
            each for each in adoptees if each.storage._cdata not in self._weights
        ]

    def rest_on(self, optimizer: ManagedStorage) -> None:
        """Leave the weights to the masters of an optimizer that was just registered, and is
        offloaded, if it has them. Raises RegistrationError: they are not the cast of these."""
        if not any(optimizer.has_place(masters) for _, _, masters in self._masters.masters()):
            return
        for r in self._cast_ranges():
            prints = fingerprints(
                r.on_device(0, r.nbytes).cpu() if self.on_device else r.view(0, r.nbytes),
                r.used_sizes,
            )
            for r.key in dict.fromkeys(key for key, _, _ in self._masters.masters()):
                self._find_weights(r, optimizer)
                cast = r.fingerprints_of_cast(prints.device)
                if cast is not None and cast.equal(prints):
                    break
            else:
                differ = (
                    f"its weights are not the cast of float32 masters in {optimizer.name!r}, bit "
                    "for bit. Make the masters from the weights that it has now, or register it "
                    "without masters="
                )
                raise RegistrationError(f"{self.name!r}: {r.lacks() or differ}")
            r.expected = prints
            if not self.on_device and not r.host.has_views:
                r.pages.prints, r.is_cast = prints, True
        self.make_consistent(ChunkPool(self.device))
        optimizer.casts.add(self)

    def masters_leave(self, optimizer: ManagedStorage) -> None:
        """Called when the optimizer is about to leave the device, which has been waited for."""
        is_written = bool(optimizer.state_dict_tensors) or optimizer.state_dict_tensors.are_held
        for r in self._cast_ranges():
            with r.lock:  # nobody reads the masters' host copy
                self._find_weights(r, optimizer)
                if not r.is_told and (reason := r.lacks()):
                    r.is_told = True
                    logger.warning("%s: %s", self.name, reason)
                r.expected = (
                    None if is_written else r.fingerprints_of_cast(self.device.torch_device)
                )

    def _find_weights(self, r: CastRange, optimizer: ManagedStorage) -> None:
        found = []
        for key, weight, masters in self._masters.masters():
            ours, theirs = self.object_ranges.find(weight), optimizer.object_ranges.find(masters)
            if key == r.key and ours is not None and ours[0] is r and theirs is not None:
                start, r.dtype = ours[1] + 2 * int(weight.storage_offset()), weight.dtype
                found.append(
                    _Weight(
                        start,
                        start + weight.nbytes,
                        theirs[0],
                        theirs[1] + 4 * int(masters.storage_offset()),
                    )
                )
        r.weights, r.optimizer = sorted(found, key=lambda each: each.start), optimizer

    def masters_change(self, coming: Collection[object]) -> None:
        """Called before the masters' host copy changes or goes, or may, and before they are loaded
        together with `coming`."""
        if self not in coming and not self.is_complete:
            self.complete()  # they are being loaded, and could not be cast on the device later
            self.is_complete = False  # the load is not decided yet
        for r in self._cast_ranges():
            r.expected = None
            if self not in coming:
                if r.is_cast:
                    r.have()
                r.weights = ()
                # or the range would keep the storage and its host copy
                vars(r).pop("optimizer", None)

    def bring(self, r: Range, indices: Sequence[int]) -> int:
        if not isinstance(r, CastRange) or not r.is_cast:
            return super().bring(r, indices)
        self.is_complete = False
        r.pages.note_filling(indices)
        return (
            0
            if r.optimizer.on_device or not r.optimizer.is_consistent
            else 2 * r.pages.used_bytes_of(indices)
        )

    def complete(self) -> None:
        self.device.order()
        for r in (each for each in self._cast_ranges() if each.is_cast):
            # of a load that is under way not all pages have memory
            r.cast_to_device(r.pages.at(Behind.OWN))
        self.is_complete = True

    def make_consistent(self, chunk_pool: ChunkPool) -> None:
        try:
            super().make_consistent(chunk_pool)
            for r in self._cast_ranges():
                with r.lock:
                    # not before: until every page is there, readers are shown the host copy
                    if self.on_device and r.is_cast:
                        r.pages.prints, r.is_cast = None, False
            if not self.on_device:
                self.is_complete = True
                for r in self._cast_ranges():
                    if (
                        r.is_cast
                        and isinstance(r.host, Slab)
                        and not r.host.is_released
                        and not r.host.has_views
                    ):
                        with suppress(OSError):  # the memory stays until the next offload
                            r.host.release()
        finally:
            while self._locked:
                self._locked.pop().lock.release()

    def settle_on_device(self, r: Range, chunk_pool: ChunkPool) -> None:
        # loaded just now, or an offload has failed and pages may have lost their memory
        if isinstance(r, CastRange) and r.is_cast:
            r.optimizer.make_consistent(chunk_pool)
        if isinstance(r, CastRange) and r.is_cast:  # the masters are still there
            lacking = r.pages.without_memory()
            r.pages.put(lacking, chunk_pool)
            r.cast_to_device(lacking)
            r.pages.note_changed(lacking)
        super().settle_on_device(r, chunk_pool)

    def pages_to_save(
        self, r: Range, prints: torch.Tensor, changed: Sequence[int]
    ) -> Sequence[int]:
        if not isinstance(r, CastRange):
            return changed
        if r.expected is not None and r.expected.cpu().equal(prints):
            r.lock.acquire()
            self._locked.append(r)
            r.is_cast = not r.host.has_views
            if r.is_cast:
                return ()
        r.have()
        return changed

    def make_host_copy_own(self, r: Range) -> None:
        if isinstance(r, CastRange):
            r.have()

    before_forced_offload = make_host_copy_own
