"""Publish only what has changed since a version that the receivers have.

The values of that version are in the host copy, where they were left when the model was offloaded
after it had been published, or when training began again (`Published.keep`). So no second snapshot
is kept: of each publication only the fingerprints of its pages are, 8 bytes a page. Where they are
those of the host copy, it has the values that were published, and is compared with the device, bit
by bit in the published dtype. Where they are not, because the model was trained and offloaded since
then, or the host copy was written, a weight is published whole. So it is where more would be sent
otherwise, and where a weight is computed from several (merged adapters, converted names).

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
from placement.publish.ahead import ReadAhead, plainly
from placement.storage.base import Storage
from placement.storage.managed import ManagedStorage
from placement.storage.range import Range
from placement.storage.transfer.mirror import mirror

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
        mine = full.detach()
        for dim, (start, length) in enumerate(zip(self.offset, self.part, strict=True)):
            mine = mine.narrow(dim, start, length)
        flat = values = self.values.to(full.device)
        if self.positions is not None:
            flat = mine.contiguous().view(-1)
            bits_of(flat)[self.positions.to(full.device, torch.int64)] = bits_of(values)
        if flat.data_ptr() != mine.data_ptr():
            mine.copy_(flat.view(self.part))


class Changes(list[WeightChange]):
    """A bucket of changes. Valid until the next iteration."""

    def __init__(self, base: int | None, version: int) -> None:
        super().__init__()
        # the version that receivers must have; None: everything is whole, and they need none
        self.base = base
        self.version = version  # the version that receivers have when the last bucket is written

    @property
    def nbytes(self) -> int:
        return sum(each.nbytes for each in self)


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
        """Copy to the host copy what it lacks of this version, before training changes the values,
        where no offload has done so already. Waits for the copies."""
        if not all(
            r.pages.prints is not None and r.pages.prints.cpu().equal(prints)
            for r, prints in self.prints.items()
        ):
            mirror(storage)


class Publication:
    """One publication of changes of `weights` (name, weight and published dtype of everything to
    publish) since `last`, the last complete publication, if the receivers have its version. Where
    the framework places the weights itself, every weight is published whole."""

    def __init__(
        self,
        storage: Storage,
        weights: Sequence[tuple[str, Weight, torch.dtype]],
        last: Published | None,
    ) -> None:
        self._storage = storage
        self._weights = weights
        self._parts = [weight.part() for _, weight, _ in weights]
        forms = [
            _form(storage, name, weight, dtype, part)
            for (name, weight, dtype), part in zip(weights, self._parts, strict=True)
        ]
        found = {
            r: _prints(storage, r)
            for r in storage.ranges
            if not r.transient and r.moving_in is None
        }
        self.published = Published(
            time.time_ns(), forms, {r: prints for r, prints in found.items() if prints is not None}
        )
        self._last = last if last is not None and last.forms == forms else None
        self._bases = [
            self._basis(form, part) for form, part in zip(forms, self._parts, strict=True)
        ]

    def buckets(self, device: torch.device, bucket_bytes: int) -> Iterator[Changes]:
        """The changes in buckets of at most `bucket_bytes`, or of one larger change. Once all
        were read, the receivers have `published`."""
        base = (
            None
            if self._last is None or all(basis is Basis.NOWHERE for basis in self._bases)
            else self._last.version
        )
        old = Reader(device, self._storage.read_host)
        new = Reader(device, None if self._storage.on_device else self._storage.read_host)
        waiting = deque(
            zip(self._weights, self.published.forms, self._parts, self._bases, strict=True)
        )
        compared = [
            part.tensor
            for _, _, part, basis in waiting
            if part is not None and basis is Basis.HOST_COPY
        ]
        ahead = ReadAhead(old, [(LocalWeight(each), each.dtype) for each in compared], bucket_bytes)
        bucket = Changes(base, self.published.version)
        try:
            while waiting:
                (_, weight, _), form, part, basis = waiting.popleft()
                with plainly():
                    if basis is Basis.HOST_COPY:
                        ahead.fetch()
                    change = self._change(form, weight, part, basis, old, new)
                    if part is not None and basis is Basis.HOST_COPY:
                        ahead.used(part.tensor.nbytes)
                if bucket and bucket.nbytes + change.nbytes > bucket_bytes:
                    yield bucket
                    bucket.clear()
                    bucket = Changes(base, self.published.version)
                bucket.append(change)
            yield bucket
        except GeneratorExit:
            # ranks that go on wait for this one's part
            for (_, weight, dtype), _, part, _ in waiting:
                if part is None and weight.is_collective:
                    with plainly():
                        weight.whole(new, dtype)
            raise
        finally:
            ahead.end()

    def _basis(self, form: PublishedAs, part: Part | None) -> Basis:
        if self._last is None or part is None or form.place is None:
            return Basis.NOWHERE
        r, start = form.place
        if r.is_shown or r not in self._last.prints or r not in self.published.prints:
            return Basis.NOWHERE
        size = r.chunk_sizes[0]
        last_element = sum(
            stride * max(0, count - 1)
            for stride, count in zip(part.tensor.stride(), part.tensor.shape, strict=True)
        )
        pages = slice(start // size, (start + last_element * part.tensor.itemsize) // size + 1)
        last, now = self._last.prints[r][pages], self.published.prints[r][pages]
        if now.equal(last):
            return Basis.PRESENT
        host = r.pages.prints if self._storage.on_device else None
        if host is not None and host.cpu()[pages].equal(last):
            return Basis.HOST_COPY
        return Basis.NOWHERE

    def _change(
        self,
        form: PublishedAs,
        weight: Weight,
        part: Part | None,
        basis: Basis,
        old: Reader,
        new: Reader,
    ) -> WeightChange:
        shape, dtype = tuple(weight.shape), form.dtype
        if part is None:
            return WeightChange(
                form.name, shape, (0,) * len(shape), shape, None, weight.whole(new, dtype)
            )
        if basis is Basis.PRESENT:
            positions = torch.empty(0, dtype=torch.int32, device=new.device)
            values = torch.empty(0, dtype=dtype, device=new.device)
            return WeightChange(form.name, shape, part.offset, form.part, positions, values)
        values = new.read(part.tensor, dtype).contiguous().view(-1)
        if basis is Basis.HOST_COPY:
            before = old.read(part.tensor, weight.dtype).to(dtype).contiguous().view(-1)
            found = (bits_of(values) != bits_of(before)).nonzero().view(-1)
            positions = found.to(torch.int32) if values.numel() < 1 << 31 else found
            if positions.nbytes + found.numel() * dtype.itemsize < values.nbytes:
                changed = bits_of(values)[found].view(dtype)
                return WeightChange(form.name, shape, part.offset, form.part, positions, changed)
        return WeightChange(form.name, shape, part.offset, form.part, None, values)


class Basis(enum.Enum):
    """Where the values are that the receivers have of a weight."""

    PRESENT = enum.auto()  # they are the present ones
    HOST_COPY = enum.auto()  # in the host copy, which is compared with the device
    NOWHERE = enum.auto()  # the weight is published whole


def _form(
    storage: Storage, name: str, weight: Weight, dtype: torch.dtype, part: Part | None
) -> PublishedAs:
    if part is None:
        return PublishedAs(name, dtype, None, tuple(weight.shape), None)
    found = storage.object_ranges.find(part.tensor) if isinstance(storage, ManagedStorage) else None
    place = (
        None
        if found is None
        else (found[0], found[1] + int(part.tensor.storage_offset()) * part.tensor.itemsize)
    )
    return PublishedAs(name, dtype, part.offset, tuple(part.tensor.shape), place)


def _prints(storage: Storage, r: Range) -> torch.Tensor | None:
    """The fingerprints of the values that are valid now, on the CPU; None where they are not
    known."""
    if isinstance(storage, ManagedStorage) and storage.on_device:
        return r.fingerprint(0, len(r.chunk_sizes)).cpu()
    # whoever was shown the host copy may have written there
    return None if r.pages.prints is None or r.is_shown else r.pages.prints.cpu()
