"""Publish only the changes since a version that the receivers have.

The values of that version are in the host copy. The offload after the publication left them there,
or the beginning of the next training (`Published.keep`). So no second snapshot is kept: of each
publication only the fingerprints of its pages are, 8 bytes a page. Where they are those of the host
copy, it has the published values. It is compared with the device, bit by bit in the published
dtype.

A weight is published whole where the fingerprints differ, because the model was trained and
offloaded since then, or the host copy was written. The same holds where the change would be larger
than the weight, and for a weight that is computed from several (merged adapters, converted names).

The old values come to the device bucket by bucket while those before them are compared
(`ReadAhead`). Pages that have not changed at all are known by their fingerprints, and do not come.
"""

from __future__ import annotations

import enum
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from placement.frameworks.weights import LocalWeight, Part, Reader, Weight
from placement.publish.ahead import ReadAhead, Wanted, plainly
from placement.storage.base import Storage
from placement.storage.managed import ManagedStorage
from placement.storage.range import Range
from placement.storage.transfer.host_refresh import refresh_host_copy

# the integer type that shows a dtype's bits, by its bytes
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def bits_of(values: torch.Tensor) -> torch.Tensor:
    """The values as integers. NaN is like itself there, -0.0 is not 0.0, and torch has indexing,
    unlike for float8_e8m0fnu or uint16."""
    return values.view(_BITS[values.itemsize])


@dataclass(frozen=True, slots=True)
class WeightChange:
    """The change of one weight, or of this rank's part of it."""

    name: str
    shape: tuple[int, ...]  # the shape of the full weight
    # where this rank's part begins in the full weight, in elements of each dimension
    offset: tuple[int, ...]
    part: tuple[int, ...]  # the shape of this rank's part
    positions: torch.Tensor | None
    """Positions in the flattened part, ascending, int32 (int64 where the part is larger). None:
    `values` are all of the part."""
    values: torch.Tensor  # the new values there, in the published dtype

    @property
    def nbytes(self) -> int:
        """Bytes to send."""
        return self.values.nbytes + (0 if self.positions is None else self.positions.nbytes)

    def write_into(self, full: torch.Tensor) -> None:
        """Write the change into a receiver's full weight, which has the values of the version
        before.

        Raises:
            ValueError: the receiver's weight has another shape or dtype.
        """
        if tuple(full.shape) != self.shape or full.dtype is not self.values.dtype:
            raise ValueError(
                f"{self.name!r} is {self.values.dtype} of shape {self.shape}, not {full.dtype} of "
                f"shape {tuple(full.shape)}"
            )
        part = full.detach()
        for dim, start in enumerate(self.offset):
            part = part.narrow(dim, start, self.part[dim])
        flat = values = self.values.to(full.device)
        if self.positions is not None:
            flat = part.contiguous().view(-1)
            positions = self.positions.to(full.device, torch.int64)
            bits_of(flat)[positions] = bits_of(values)
        if flat.data_ptr() != part.data_ptr():
            part.copy_(flat.view(self.part))


class Changes(list[WeightChange]):
    """A bucket of changes. Valid until the next iteration.

    Example:
        ::

            for changes in actor.weight_changes(since=version):
                for change in changes:
                    change.write_into(receiver[change.name])
                version = changes.version
    """

    def __init__(self, base: int | None, version: int) -> None:
        super().__init__()
        # the version that receivers must have; None: everything is whole, and they need none
        self.base = base
        self.version = version  # the version that receivers have when the last bucket is written

    @property
    def nbytes(self) -> int:
        return sum(change.nbytes for change in self)


class PublishedAs(NamedTuple):
    """How one weight is published. A receiver's values are comparable only while it stays the
    same."""

    name: str
    dtype: torch.dtype
    offset: tuple[int, ...] | None
    part: tuple[int, ...]
    place: tuple[Range, int] | None
    """The range in which this rank's part lies, and where it begins there, in bytes; None where
    that is no block of a range."""


@dataclass(frozen=True)
class Published:
    """The part of a complete publication that its handle keeps."""

    version: int
    forms: Sequence[PublishedAs]
    prints: Mapping[Range, torch.Tensor]  # fingerprints of the pages of each range, on the CPU

    def keep(self, storage: ManagedStorage) -> None:
        """Bring the host copy to this version, before training changes the values, where no offload
        has done so already. Waits for the copies."""
        for r, prints in self.prints.items():
            if r.pages.prints is None or not r.pages.prints.cpu().equal(prints):
                refresh_host_copy(storage)
                return


class Basis(enum.Enum):
    """Where the values are that the receivers have of a weight."""

    PRESENT = enum.auto()  # they are the present ones
    HOST_COPY = enum.auto()  # in the host copy, which is compared with the device
    NOWHERE = enum.auto()  # the weight is published whole


class _Planned(NamedTuple):
    """How one weight is published this time."""

    weight: Weight
    form: PublishedAs
    part: Part | None
    basis: Basis


class Publication:
    """One publication of changes of `weights` (name, weight and published dtype of each). `last` is
    the last complete publication, if the receivers have its version. Where the framework places the
    weights itself, every weight is published whole."""

    def __init__(
        self,
        storage: Storage,
        weights: Sequence[tuple[str, Weight, torch.dtype]],
        last: Published | None,
    ) -> None:
        self._storage = storage
        parts = [weight.part() for _, weight, _ in weights]
        forms = []
        for (name, weight, dtype), part in zip(weights, parts, strict=True):
            forms.append(_form(storage, name, weight, dtype, part))
        self.published = Published(time.time_ns(), forms, _all_prints(storage))
        self._last = last if last is not None and last.forms == forms else None
        self._planned: list[_Planned] = []
        for index, (_, weight, _) in enumerate(weights):
            form, part = forms[index], parts[index]
            basis = self._basis(form, part)
            self._planned.append(_Planned(weight, form, part, basis))

    def buckets(self, device: torch.device, bucket_bytes: int) -> Iterator[Changes]:
        """The changes in buckets of at most `bucket_bytes`, or of one larger change. Once all
        were read, the receivers have `published`."""
        needs_base = any(planned.basis is not Basis.NOWHERE for planned in self._planned)
        base = self._last.version if needs_base and self._last is not None else None
        old = Reader(device, self._storage.read_host)
        new = Reader(device, None if self._storage.on_device else self._storage.read_host)
        ahead = ReadAhead(old, self._compared(), bucket_bytes)
        bucket = Changes(base, self.published.version)
        waiting = deque(self._planned)
        try:
            while waiting:
                planned = waiting.popleft()
                with plainly():
                    if planned.basis is Basis.HOST_COPY:
                        ahead.fetch()
                    change = _change(planned, old, new)
                    if planned.part is not None and planned.basis is Basis.HOST_COPY:
                        ahead.used(planned.part.tensor.nbytes)
                if bucket and bucket.nbytes + change.nbytes > bucket_bytes:
                    yield bucket
                    bucket.clear()
                    bucket = Changes(base, self.published.version)
                bucket.append(change)
            yield bucket
        except GeneratorExit:
            # ranks that go on wait for this one's part
            for planned in waiting:
                if planned.part is None and planned.weight.is_collective:
                    with plainly():
                        planned.weight.whole(new, planned.form.dtype)
            raise
        finally:
            ahead.end()

    def _compared(self) -> list[Wanted]:
        """The parts of weights whose old values are in the host copy, as weights to read ahead."""
        compared: list[Wanted] = []
        for planned in self._planned:
            if planned.part is not None and planned.basis is Basis.HOST_COPY:
                tensor = planned.part.tensor
                compared.append((LocalWeight(tensor), tensor.dtype))
        return compared

    def _basis(self, form: PublishedAs, part: Part | None) -> Basis:
        if self._last is None or part is None or form.place is None:
            return Basis.NOWHERE
        r, start = form.place
        if r.is_shown or r not in self._last.prints or r not in self.published.prints:
            return Basis.NOWHERE
        pages = _pages_of(part.tensor, r, start)
        last_prints = self._last.prints[r][pages]
        if self.published.prints[r][pages].equal(last_prints):
            return Basis.PRESENT
        host_prints = r.pages.prints if self._storage.on_device else None
        if host_prints is not None and host_prints.cpu()[pages].equal(last_prints):
            return Basis.HOST_COPY
        return Basis.NOWHERE


def _pages_of(tensor: torch.Tensor, r: Range, start: int) -> slice:
    """The pages of a range in which a tensor lies that begins at byte `start` there."""
    page_bytes = r.chunk_sizes[0]
    last_element = 0
    for stride, count in zip(tensor.stride(), tensor.shape, strict=True):
        last_element += stride * max(0, count - 1)
    end = start + last_element * tensor.itemsize
    return slice(start // page_bytes, end // page_bytes + 1)


def _change(planned: _Planned, old: Reader, new: Reader) -> WeightChange:
    """The change of one weight, its new values read by `new`, those of the receivers by `old`."""
    weight, form, part, basis = planned
    shape = tuple(weight.shape)
    dtype = form.dtype
    if part is None:
        value = weight.whole(new, dtype)
        return WeightChange(form.name, shape, (0,) * len(shape), shape, None, value)
    positions: torch.Tensor | None = None
    if basis is Basis.PRESENT:
        positions = torch.empty(0, dtype=torch.int32, device=new.device)
        values = torch.empty(0, dtype=dtype, device=new.device)
        return WeightChange(form.name, shape, part.offset, form.part, positions, values)
    values = new.read(part.tensor, dtype).contiguous().view(-1)
    if basis is Basis.HOST_COPY:
        before = old.read(part.tensor, weight.dtype).to(dtype)
        before = before.contiguous().view(-1)
        changed = (bits_of(values) != bits_of(before)).nonzero().view(-1)
        positions = changed.to(torch.int32) if values.numel() < 1 << 31 else changed
        if positions.nbytes + changed.numel() * dtype.itemsize < values.nbytes:
            values = bits_of(values)[changed].view(dtype)
        else:
            positions = None
    return WeightChange(form.name, shape, part.offset, form.part, positions, values)


def _form(
    storage: Storage, name: str, weight: Weight, dtype: torch.dtype, part: Part | None
) -> PublishedAs:
    if part is None:
        return PublishedAs(name, dtype, None, tuple(weight.shape), None)
    tensor = part.tensor
    place = None
    if isinstance(storage, ManagedStorage):
        place = storage.object_ranges.find(tensor)
    if place is not None:
        r, start = place
        place = r, start + int(tensor.storage_offset()) * tensor.itemsize
    return PublishedAs(name, dtype, part.offset, tuple(tensor.shape), place)


def _all_prints(storage: Storage) -> dict[Range, torch.Tensor]:
    """The fingerprints of the pages of each range, on the CPU, as far as they are valid."""
    all_prints = {}
    for r in storage.ranges:
        if not r.transient and r.moving_in is None:
            prints = _prints(storage, r)
            if prints is not None:
                all_prints[r] = prints
    return all_prints


def _prints(storage: Storage, r: Range) -> torch.Tensor | None:
    """The fingerprints of the values that are valid now, on the CPU; None where they are not
    known."""
    if isinstance(storage, ManagedStorage) and storage.on_device:
        return r.fingerprint(0, len(r.chunk_sizes)).cpu()
    if r.pages.prints is None or r.is_shown:  # a holder of the shown tensors may write there
        return None
    return r.pages.prints.cpu()
