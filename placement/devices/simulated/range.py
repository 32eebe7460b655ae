"""Address ranges and chunks of a simulated device, and the places of the chunks."""

from __future__ import annotations

import mmap
import weakref

from placement.devices.host.mapping import MAP_NORESERVE, NO_ACCESS, PAGE, map_for_life, round_up
from placement.devices.host.slab import check_span
from placement.devices.memory import Addresses, Chunk


class SimulatedRange(Addresses):
    def __init__(self, nbytes: int, granularity: int) -> None:
        self.nbytes = nbytes
        self.base = 0
        self.chunks: dict[int, SimulatedChunk] = {}
        """The mapped chunks by offset. Replaced as a whole. Keeps memory under living tensors alive when everything else is dropped."""
        if nbytes:
            flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE
            self.base = round_up(map_for_life(self, nbytes + granularity - PAGE, NO_ACCESS, flags), granularity)
        self._vacant: tuple[dict[int, SimulatedChunk], list[tuple[int, int]]] | None = None
        """The `chunks` at the last call of `vacant`, and its answer then."""

    def vacant(self) -> list[tuple[int, int]]:
        """The addresses without a chunk behind them, as ascending [start, end)."""
        if self._vacant is None or self._vacant[0] is not self.chunks:
            chunks, spans, end = self.chunks, [], 0
            for offset in sorted(chunks):
                spans.append((end, offset))
                end = offset + chunks[offset].nbytes
            spans.append((end, self.nbytes))
            self._vacant = chunks, [(start, end) for start, end in spans if start < end]
        return self._vacant[1]


class SimulatedChunk(Chunk):
    def __init__(self, nbytes: int, file_offset: int) -> None:
        self.nbytes = nbytes
        self.file_offset = file_offset
        self.place: tuple[weakref.ref[SimulatedRange], int] | None = None
        """The range and offset where the chunk was mapped last."""

    def is_mapped(self) -> bool:
        addresses = self.place and self.place[0]()
        return self.place is not None and addresses is not None and addresses.chunks.get(self.place[1]) is self


def around(target: SimulatedRange, start: int, end: int) -> dict[int, SimulatedChunk]:
    """The chunks mapped outside of [start, end). Raises ValueError if the end would split a chunk."""
    check_span(start, end - start, target.nbytes)
    found = {offset: chunk for offset, chunk in target.chunks.items() if not start <= offset < end}
    for offset, chunk in target.chunks.items():
        if offset < end < offset + chunk.nbytes:
            raise ValueError(f"[{start}, {end}) cuts the chunk at {offset} in two")
    return found


def runs(placed: dict[int, SimulatedChunk]) -> list[tuple[int, int, int]]:
    """(offset, bytes, file offset) of runs that one call can map: chunks that are neighbours in the file need one mapping together."""
    joined: list[tuple[int, int, int]] = []
    for offset, chunk in placed.items():
        start, nbytes, file_offset = joined[-1] if joined else (0, 0, -1)
        if chunk.file_offset == file_offset + nbytes:
            joined[-1] = (start, nbytes + chunk.nbytes, file_offset)
        else:
            joined.append((offset, chunk.nbytes, chunk.file_offset))
    return joined
