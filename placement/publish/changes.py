"""Publish only what has changed since a version that the receivers have.

The values of that version are in the host copy, where they were left when the model was offloaded after it had been published, or when
training began again (`Published.keep`). So no second snapshot is kept: of each publication only the fingerprints of its pages are, 8
bytes a page. Where they are those of the host copy, it has the values that were published, and is compared with the device, bit by bit in
the published dtype. Where they are not, because the model was trained on before it was offloaded, or offloaded before it was published, a
weight is published whole. So it is where more would be sent otherwise, and where a weight is computed from several (merged adapters,
converted names).

The old values come to the device bucket by bucket while those before them are compared (`Ahead`). Pages that have not changed at all are
known by their fingerprints, and do not come.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from placement.frameworks.weights import Part, Reader, Weight
from placement.publish.ahead import Ahead, plainly
from placement.storage.base import Storage
from placement.storage.managed import ManagedStorage
from placement.storage.range import Range
from placement.storage.transfer.verification import mirror


@dataclass(frozen=True, slots=True)
class WeightChange:
    """The change of one weight, or of this rank's part of it."""

    name: str
    shape: tuple[int, ...]
    """The shape of the full weight."""
    offset: tuple[int, ...]
    """Where this rank's part begins in the full weight, in elements of each dimension."""
    part: tuple[int, ...]
    """The shape of this rank's part."""
    positions: torch.Tensor | None
    """Positions in the flattened part, ascending, int32 (int64 where the part is larger). None: `values` are all of the part."""
    values: torch.Tensor
    """The new values there, in the published dtype."""

    @property
    def nbytes(self) -> int:
        """Bytes to send."""
        return self.values.nbytes + (0 if self.positions is None else self.positions.nbytes)

    def write_into(self, full: torch.Tensor) -> None:
        """Write the change into a receiver's full weight, which has the values of the version before.

        Raises:
            ValueError: the receiver's weight has another shape or dtype.
        """
        if tuple(full.shape) != self.shape or full.dtype is not self.values.dtype:
            raise ValueError(f"{self.name!r} is {self.values.dtype} of shape {self.shape}, not {full.dtype} of shape {tuple(full.shape)}")
        mine = full
        for dim, (start, length) in enumerate(zip(self.offset, self.part, strict=True)):
            mine = mine.narrow(dim, start, length)
        values = self.values.to(full.device)
        if self.positions is None:
            mine.copy_(values.view(self.part))
            return
        flat = mine.contiguous().view(-1)
        flat[self.positions.to(full.device, torch.int64)] = values
        if flat.data_ptr() != mine.data_ptr():
            mine.copy_(flat.view(self.part))


class Changes(list[WeightChange]):
    """A bucket of changes. Valid until the next iteration."""

    def __init__(self, base: int | None, version: int) -> None:
        super().__init__()
        self.base = base
        """The version that receivers must have; None: everything is whole, and they need none."""
        self.version = version
        """The version that receivers have when the last bucket is written."""

    @property
    def nbytes(self) -> int:
        return sum(each.nbytes for each in self)


class Form(NamedTuple):
    """How one weight is published. A receiver's values are comparable only while it stays the same."""

    name: str
    dtype: torch.dtype
    offset: tuple[int, ...] | None
    part: tuple[int, ...]


@dataclass(frozen=True)
class Published:
    """The part of a complete publication that its handle keeps."""

    version: int
    forms: Sequence[Form]
    prints: Mapping[Range, torch.Tensor]
    """Fingerprints of the pages of each range, on the CPU."""

    def keep(self, storage: ManagedStorage) -> None:
        """Copy to the host copy what it lacks of this version, before training changes the values. Waits for the copies.

        An offload after the publication has done so already. This is for a model that stays on the device.
        """
        if not all(r.prints is not None and r.prints.cpu().equal(prints) for r, prints in self.prints.items()):
            mirror(storage)


class Publication:
    """One publication of changes.

    Args:
        storage: has the weights. Where the framework places them itself, every weight is published whole.
        weights: name, weight and published dtype of everything to publish.
        last: the last complete publication, if the receivers have its version.
    """

    def __init__(self, storage: Storage, weights: Sequence[tuple[str, Weight, torch.dtype]], last: Published | None) -> None:
        self._storage = storage
        self._weights = weights
        self._parts = [weight.part() for _, weight, _ in weights]
        forms = [
            Form(name, dtype, None if part is None else part.offset, tuple(weight.shape if part is None else part.tensor.shape))
            for (name, weight, dtype), part in zip(weights, self._parts, strict=True)
        ]
        found = {r: _prints(storage, r) for r in storage.ranges if not r.transient and r.moving_in is None}
        self.published = Published(time.time_ns(), forms, {r: prints for r, prints in found.items() if prints is not None})
        self._last = last if last is not None and last.forms == forms and storage.on_device else None
        self._kinds = [self._kind(part) for part in self._parts]

    def buckets(self, device: torch.device, bucket_bytes: int) -> Iterator[Changes]:
        """The changes in buckets of at most `bucket_bytes`, or of one change where that is larger."""
        base = None if self._last is None or all(kind == "whole" for kind in self._kinds) else self._last.version
        storages: dict[int, torch.UntypedStorage] = {}
        old = Reader(device, lambda tensor: self._storage.over_mirror(tensor, storages))
        new = Reader(device, None if self._storage.on_device else self._storage.over_host)
        waiting = deque(zip(self._weights, self.published.forms, self._parts, self._kinds, strict=True))
        ahead = Ahead(old, [(weight, weight.dtype) for (_, weight, _), _, _, kind in waiting if kind == "compared"], bucket_bytes)
        bucket = Changes(base, self.published.version)
        try:
            while waiting:
                (_, weight, _), form, part, kind = waiting.popleft()
                with plainly():
                    if kind == "compared":
                        ahead.fetch()
                    change = _change(form, weight, part, kind, old, new)
                    if kind == "compared":
                        ahead.used(weight.shape.numel() * weight.dtype.itemsize)
                if bucket and bucket.nbytes + change.nbytes > bucket_bytes:
                    yield bucket
                    bucket.clear()
                    bucket = Changes(base, self.published.version)
                bucket.append(change)
            yield bucket
        except GeneratorExit:
            for (_, weight, dtype), _, part, _ in waiting:  # ranks that go on wait for this one's part
                if part is None and weight.is_collective:
                    with plainly():
                        weight.whole(new, dtype)
            raise
        finally:
            ahead.end()

    def _kind(self, part: Part | None) -> str:
        """How a weight is published: "whole"; "compared" with the host copy; or "same": none of its pages has changed."""
        storage, last = self._storage, self._last
        place = storage.by_address.find(part.tensor) if part is not None and last and isinstance(storage, ManagedStorage) else None
        if part is None or last is None or place is None:
            return "whole"
        r, offset = place
        if r.prints is None or r.is_shown or r not in last.prints or r not in self.published.prints:
            return "whole"
        size = r.chunk_sizes[0]
        pages = slice(offset // size, (offset + max(1, part.tensor.untyped_storage().nbytes()) - 1) // size + 1)
        host = r.prints[pages].cpu()
        if not host.equal(last.prints[r][pages]):
            return "whole"
        return "same" if host.equal(self.published.prints[r][pages]) else "compared"


def _change(form: Form, weight: Weight, part: Part | None, kind: str, old: Reader, new: Reader) -> WeightChange:
    shape, dtype = tuple(weight.shape), form.dtype
    if part is None:
        return WeightChange(form.name, shape, (0,) * len(shape), shape, None, weight.whole(new, dtype))
    if kind == "same":
        nothing = torch.empty(0, dtype=torch.int32, device=new.device)
        return WeightChange(form.name, shape, part.offset, form.part, nothing, nothing.to(dtype))
    values = new.read(part.tensor, dtype).contiguous().view(-1)
    if kind == "compared":
        before = old.read(part.tensor, weight.dtype).to(dtype).contiguous().view(-1)
        bits = _BITS[dtype.itemsize]  # NaN is like itself, and -0.0 is not 0.0
        differs = (values.view(bits) != before.view(bits)).nonzero().view(-1)
        positions = differs.to(torch.int32) if values.numel() < 1 << 31 else differs
        if positions.nbytes + differs.numel() * dtype.itemsize < values.nbytes:
            return WeightChange(form.name, shape, part.offset, form.part, positions, values[differs])
    return WeightChange(form.name, shape, part.offset, form.part, None, values)


_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _prints(storage: Storage, r: Range) -> torch.Tensor | None:
    """The fingerprints of the values that are valid now, on the CPU; None where they are not known."""
    if isinstance(storage, ManagedStorage) and storage.on_device:
        return storage.fingerprint(r, 0, len(r.chunk_sizes)).cpu()
    return None if r.prints is None else r.prints.cpu()
