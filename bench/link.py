"""How fast is the link itself: page-locked copies each way and both ways at once, in pieces of 64
MiB and of 1 GiB?"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from bench import _rig
from bench._results import Results
from bench._rig import Rig

_MIB = 1 << 20


@dataclass(frozen=True)
class Link:
    """Raw rates in GB/s (1e9 bytes). The better of both piece sizes counts, so that no share of the
    link is flattered."""

    to_device: float
    to_host: float
    both: float
    """The total rate with both directions busy at once."""


class _Pieces:
    """Two page-locked buffers and two on the device, which are copied repeatedly."""

    def __init__(self, rig: Rig, buffer_bytes: int) -> None:
        self.rig = rig
        self.host = [rig.pin(buffer_bytes) for _ in range(2)]
        self.device = [
            torch.empty(buffer_bytes, dtype=torch.uint8, device=rig.torch_device) for _ in range(2)
        ]
        self.streams = (
            [torch.cuda.Stream(rig.torch_device) for _ in range(2)] if rig.is_cuda else []
        )

    def enqueue(self, direction: int, piece_bytes: int) -> None:
        """Copy one buffer. Direction 0 is to the device, 1 is to the host."""
        host, device = self.host[direction], self.device[direction]
        pairs = zip(host.split(piece_bytes), device.split(piece_bytes), strict=True)
        for at_host, at_device in pairs:
            target, source = (at_device, at_host) if direction == 0 else (at_host, at_device)
            if self.streams:
                with torch.cuda.stream(self.streams[direction]):
                    target.copy_(source, non_blocking=True)
            else:
                target.copy_(source)

    def rate(
        self, directions: Sequence[int], piece_bytes: int, repeats: int, times: int = 5
    ) -> float:
        """The median rate of all directions together, in GB/s."""

        def work() -> None:
            for _ in range(repeats):
                for direction in directions:
                    self.enqueue(direction, piece_bytes)

        work()
        seconds = statistics.median(self.rig.seconds(work) for _ in range(times))
        return repeats * len(directions) * self.host[0].numel() / seconds / 1e9


def measure(rig: Rig, results: Results) -> Link:
    """Measure, record the rows of system `link`, and return the rates."""
    buffer_bytes = rig.pick(_MIB, 1 << 30, 1 << 30)
    pieces = _Pieces(rig, buffer_bytes)
    best: list[float] = []
    for name, directions in (
        ("host to device", (0,)),
        ("device to host", (1,)),
        ("both at once", (0, 1)),
    ):
        rates = []
        for piece_bytes in (min(64 * _MIB, buffer_bytes), buffer_bytes):
            rates.append(pieces.rate(directions, piece_bytes, repeats=2))
            results.add(
                f"link, pieces of {piece_bytes // _MIB} MiB",
                "link",
                f"{name}, rate",
                rates[-1],
                "GB/s",
            )
        best.append(max(rates))
    del pieces
    rig.clean()
    results.write()
    return Link(*best)


def main(arguments: Sequence[str] | None = None) -> None:
    def body(rig: Rig, results: Results) -> None:
        measure(rig, results)

    _rig.run("link", __doc__, body, arguments)


if __name__ == "__main__":
    main()
