"""The record of what changes in a range after a publication.

Where the host copy has the values that receivers have, an offload overwrites just what a later
publication would compare with. So the old bytes of each page come to the device, slice by slice,
before the new ones go, and are compared there in the published dtype. Positions are kept, not
values: the newest values are in the host copy or on the device when they are published. A position
whose value has come back is sent again.

The proof of a record is by fingerprints, page by page. `since` has that of the version up to which
the positions of a page are complete. An offload is recorded where the host copy has it. Where it
has another (values were written there, an offload failed, a step was mirrored unseen) the page is
forgotten, and what lies in it is published whole.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from placement.devices.base import Device
from placement.devices.host.slab import upload
from placement.devices.memory import Copy, Direction

# the integer type that shows a dtype's bits, by its bytes
BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
SLICE_BYTES = 64 << 20
"""Bytes that are compared at once. The first slice is the only one whose new bytes wait while the
link carries nothing to the host. To start one takes the host 0.9 ms, to copy it the link 1.2 ms
(H100)."""
SLICES = 4
"""The number of slices on the device: while one is compared, the next ones are on their way. Each
takes one and a half times its bytes."""
MOST = 8
"""A record of more than one in `MOST` elements is dropped: of a slice, and of a piece. In bf16 it
takes a quarter of the piece's bytes."""


def bits_of(values: torch.Tensor) -> torch.Tensor:
    """The values as integers. NaN is like itself there, -0.0 is not 0.0, and torch has indexing,
    unlike for float8_e8m0fnu or uint16."""
    return values.view(BITS[values.itemsize])


@dataclass(slots=True, eq=False)
class RecordedPiece:
    """A published tensor in a range, contiguous."""

    start: int  # in bytes, from the range's beginning
    num_elements: int
    dtype: torch.dtype
    published: torch.dtype  # the dtype in which it is compared
    found: list[tuple[torch.Tensor, int]] = field(default_factory=list)
    """Positions that have changed: int32 on the CPU, to which a number is to be added. Each tensor
    is ascending; some are in several."""
    num_found: int = 0
    is_dropped: bool = False  # whether more has changed than is recorded

    @property
    def end(self) -> int:
        return self.start + self.num_elements * self.dtype.itemsize

    def positions(self, device: torch.device) -> torch.Tensor:
        """All positions, ascending, on a device: int32, or int64 where the piece is large."""
        dtype = torch.int32 if self.num_elements < 1 << 31 else torch.int64
        parts = [positions.to(device).to(dtype) + first for positions, first in self.found]
        found = torch.cat([torch.empty(0, dtype=dtype, device=device), *parts])
        # several offloads have found some of them
        return found if bool((found[1:] > found[:-1]).all()) else found.unique()

    def add(self, positions: torch.Tensor, first: int) -> None:
        if not self.is_dropped and len(positions):
            self.found.append((positions, first))
            self.num_found += len(positions)
            if self.num_found > self.num_elements // MOST:
                self.drop()

    def drop(self) -> None:
        self.is_dropped = True
        self.found.clear()
        self.num_found = 0


_Run = list[RecordedPiece]  # neighbouring pieces that are compared alike


class _Slice(NamedTuple):
    run: _Run
    start: int
    end: int
    old: torch.Tensor
    differs: torch.Tensor  # whether each element differs, on the device
    asked: Callable[[], torch.Tensor]  # the number of those that do, once the device has it

    def inside(self) -> list[tuple[RecordedPiece, int, int]]:
        """The pieces in the slice, and the elements of the slice at which each begins and ends."""
        first, size = self.start, self.run[0].dtype.itemsize
        pieces = [piece for piece in self.run if piece.start < self.end and piece.end > first]
        return [
            (each, max(0, each.start - first) // size, (min(each.end, self.end) - first) // size)
            for each in pieces
        ]

    def found(self, first: int, last: int, count: int) -> torch.Tensor:
        """The positions in the slice of the `count` elements from `first` to `last` that differ, on
        the device. Waits for nothing."""
        return (
            torch.nonzero_static(self.differs[first:last], size=count)
            .view(-1)
            .add_(first)
            .to(torch.int32)
        )


class ChangeRecord:
    """The record of one range, whose `Pages` hold it, and which it does not hold.
    `pieces`: what was published. Pieces that overlap one before them are not recorded.
    `prints`: the fingerprints of the published version, on the CPU."""

    def __init__(
        self, device: Device, pieces: Iterable[RecordedPiece], prints: torch.Tensor
    ) -> None:
        self._device = device
        # the version up to which positions are complete, by page
        self.since: dict[int, int] = dict(enumerate(prints.tolist()))
        self._pieces: dict[int, RecordedPiece] = {}
        self._runs: list[_Run] = []
        last: RecordedPiece | None = None
        for piece in sorted(pieces, key=lambda each: each.start):
            if not piece.num_elements or (last is not None and piece.start < last.end):
                continue
            if last is None or (last.dtype, last.published) != (piece.dtype, piece.published):
                self._runs.append([])
            self._runs[-1].append(piece)
            self._pieces[piece.start] = last = piece
        # the new fingerprints of pages to compare when they are saved
        self._awaited: dict[int, int] = {}
        self._comparing: deque[_Slice] = deque()
        # slices whose positions are on their way to the host
        self._sent: deque[tuple[_Slice, Callable[[], torch.Tensor]]] = deque()
        # the new fingerprints of pages whose slices are in `_comparing` and `_sent`
        self._saved: dict[int, int] = {}
        self._free: list[torch.Tensor] = []  # device memory for old bytes
        torch_device = device.torch_device
        self._module: Any = (
            None if torch_device.type == "cpu" else torch.get_device_module(torch_device)
        )
        self._stream: Any = None if self._module is None else self._module.Stream(torch_device)

    @property
    def nbytes(self) -> int:
        return sum(4 * piece.num_found for piece in self._pieces.values())

    def piece(self, start: int, *form: object) -> RecordedPiece | None:
        """The piece that begins at this byte and has this number of elements, dtype and published
        dtype; None where none is recorded."""
        piece = self._pieces.get(start)
        return (
            None
            if piece is None
            or piece.is_dropped
            or form != (piece.num_elements, piece.dtype, piece.published)
            else piece
        )

    def has(self, pages: slice, prints: torch.Tensor) -> bool:
        """Whether the positions in these pages are complete up to the version with these
        fingerprints (of all pages, on the CPU)."""
        return all(
            self.since.get(index) == value
            for index, value in enumerate(prints[pages].tolist(), pages.start)
        )

    def expect(self, first: int, old: torch.Tensor | None, new: torch.Tensor) -> bool:
        """Pages may be saved next: those whose fingerprints differ. Returns whether any of them
        will be compared. `first`: the number of the first page.
        `old`: the fingerprints of all pages in the host copy, on the CPU; None where they are
        unknown. `new`: those of the pages from `first` on, on the device."""
        for index, value in enumerate(new.tolist(), first):
            self._awaited.pop(index, None)
            since = self.since.get(index)
            if since is None or since == value:
                continue
            if old is not None and int(old[index]) == since:
                self._awaited[index] = value
            else:
                del self.since[index]
        return bool(self._awaited)

    def save(self, pages: Any, copies: Sequence[Copy], direction: Direction) -> None:
        """`Device.copy` to the host copy of these `Pages`, which compares those of `expect`."""
        rest = list[Copy]()
        for copy in copies:
            base = copy.host_address - pages.host.address
            for start, end, run in self._cut(base, base + copy.nbytes):
                part = Copy(
                    copy.device_address + start - base,
                    copy.host_address + start - base,
                    end - start,
                )
                if run is None:
                    rest.append(part)
                    continue
                # compare first: who has waited for the copy may take the memory that was compared
                with self._unless_out_of_memory():
                    self._compare(
                        pages.on_device(part),
                        start,
                        run,
                        self._bring_old(pages.host.view(start, part.nbytes)),
                    )
                # behind the current stream, which waits for the old bytes
                self._device.copy([part], "to_host")
        self._device.copy(rest, direction)

    def _cut(self, first: int, last: int) -> Iterator[tuple[int, int, _Run | None]]:
        """Neighbouring spans of bytes: slices of one run each, and what is not compared."""
        size = self._device.chunk_bytes
        while first < last:
            page, end = first // size, min(last, (first // size + 1) * size)
            new = self._awaited.pop(page, None)
            for run in self._runs if new is not None else ():
                begin, stop = max(first, run[0].start), min(end, run[-1].end)
                if begin < stop:
                    if first < begin:
                        yield first, begin, None
                    for start in range(begin, stop, SLICE_BYTES):
                        yield start, min(stop, start + SLICE_BYTES), run
                    first = stop
            if first < end:
                yield first, end, None
            if new is not None:
                self._saved[page] = new
            first = end

    @contextmanager
    def _unless_out_of_memory(self) -> Iterator[None]:
        """The offload goes on without a record."""
        try:
            yield
        except torch.OutOfMemoryError:
            self.drop()

    def _bring_old(self, source: torch.Tensor) -> torch.Tensor:
        """The bytes of the host copy, in memory of the device. The current stream waits for
        them."""
        if len(self._comparing) == SLICES:
            self._take()
        if self._stream is None:
            return source.clone()
        current = self._module.current_stream(self._device.torch_device)
        if not self._free:
            self._free.append(
                torch.empty(SLICE_BYTES, dtype=torch.uint8, device=self._device.torch_device)
            )
            self._stream.wait_stream(current)  # for whoever had this memory before
        old = self._free.pop()
        with self._module.stream(self._stream):
            upload(old[: len(source)], source, non_blocking=True)
        current.wait_stream(self._stream)
        return old

    def _compare(self, new: torch.Tensor, start: int, run: _Run, old: torch.Tensor) -> None:
        differs = torch.ne(
            *(
                bits_of(each.view(run[0].dtype).to(run[0].published))
                for each in (new, old[: len(new)])
            )
        )
        self._comparing.append(
            _Slice(
                run, start, start + len(new), old, differs, self._device.ask(differs.sum().view(1))
            )
        )

    def _take(self) -> None:
        """Wait for the first slice that is being compared, and have what was found written to the
        host."""
        each = self._comparing.popleft()
        count = int(each.asked()[0])
        if self._stream is not None:
            self._free.append(each.old)
        if count <= len(each.differs) // MOST:
            self._send(each, each.found(0, len(each.differs), count))
            return
        for piece, first, last in each.inside():  # some pieces may have changed little
            count = int(each.differs[first:last].sum())
            if count > piece.num_elements // MOST:
                piece.drop()
            elif not piece.is_dropped:
                self._send(each, each.found(first, last, count))

    def _send(self, each: _Slice, found: torch.Tensor) -> None:
        self._sent.append((each._replace(differs=_NOTHING, old=_NOTHING), self._device.send(found)))
        if len(self._sent) > SLICES:
            self._collect()

    def _collect(self) -> None:
        """Give the positions in the first slice that was sent to the pieces there."""
        each, arrived = self._sent.popleft()
        found, inside = arrived(), each.inside()
        edges = torch.tensor(
            [(first, last) for _, first, last in inside], dtype=torch.int32, device="cpu"
        )
        for (piece, _, _), (begin, end) in zip(
            inside, torch.searchsorted(found, edges).tolist(), strict=True
        ):
            piece.add(found[begin:end], (each.start - piece.start) // piece.dtype.itemsize)

    def finish(self) -> None:
        """Wait until everything is compared, before a move is committed, and give the device memory
        back."""
        with self._unless_out_of_memory():
            while self._comparing:
                self._take()
            while self._sent:
                self._collect()
        self.since |= self._saved
        for each in (self._saved, self._awaited, self._free):
            each.clear()

    def drop(self) -> None:
        """Forget everything, and compare nothing from now on: what was published is published
        whole."""
        for piece in self._pieces.values():
            piece.drop()
        each: Any
        for each in (self._runs, self._comparing, self._sent, self._free):
            each.clear()


_NOTHING = torch.empty(0, device="cpu")
