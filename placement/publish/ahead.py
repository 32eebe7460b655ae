"""Bring weights from the host copy while those before them are used.

In a streamed sync the host copy has the valid values. This rank's parts of the next weights are
copied to the device on a stream of their own, in groups of about a bucket. Each bucket waits for
its own groups alone. The collectives that gather it run on the caller's stream while the next
bucket is copied.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from placement.core.modes import without_modes
from placement.frameworks.weights import Reader, Weight

Wanted = tuple[Weight, torch.dtype]  # a weight, and the dtype in which it is published
# a tensor of the module, and memory on the device for its value
_Target = tuple[torch.Tensor, torch.Tensor]


@contextlib.contextmanager
def plainly() -> Iterator[None]:
    """Read values as they are, outside the caller's modes."""
    with without_modes(), torch.inference_mode(False), torch.no_grad():
        yield


class ReadAhead:
    """Copies the weights of one publishing to the device (into `Reader.fetched`), in the order of
    publishing. A group has at most `bucket_bytes` published bytes, or one larger weight.

    Memory is taken on the caller's stream. The copies wait for the work that this stream has
    already, which may use the same memory.
    """

    def __init__(self, reader: Reader, wanted: Iterable[Wanted], bucket_bytes: int) -> None:
        self._reader = reader
        self._wanted = deque(wanted)
        self._bucket_bytes = bucket_bytes
        self._groups: deque[int] = deque()  # the published bytes of each group that is not used up
        self._seen: set[int] = set()
        self._device: Any = None
        self._stream: Any = None
        if self._wanted and reader.device.type != "cpu":
            self._device = torch.get_device_module(reader.device)
            self._stream = self._device.Stream(reader.device)

    def fetch(self) -> None:
        """Start the copies of the coming bucket, unless they were started, and of the bucket after
        it. Called before a bucket is filled."""
        while self._wanted and len(self._groups) < 2:
            self._start(self._take_group())

    def used(self, nbytes: int) -> None:
        """Note that so many published bytes are in a bucket now."""
        while self._groups and nbytes:
            part = min(nbytes, self._groups[0])
            nbytes -= part
            self._groups[0] -= part
            if not self._groups[0]:
                self._groups.popleft()

    def _take_group(self) -> list[_Target]:
        group = []
        nbytes = 0
        while self._wanted:
            weight, dtype = self._wanted[0]
            size = weight.shape.numel() * dtype.itemsize
            if nbytes and nbytes + size > self._bucket_bytes:
                break
            self._wanted.popleft()
            nbytes += size
            for source, take in weight.targets(self._reader, dtype):
                if id(source) not in self._seen:
                    self._seen.add(id(source))
                    group.append((source, take()))
        self._groups.append(nbytes)
        return group

    def _start(self, group: list[_Target]) -> None:
        arrived = None
        if self._stream is None:
            self._fill(group)
        else:
            self._stream.wait_stream(self._device.current_stream(self._reader.device))
            with self._device.stream(self._stream):
                self._fill(group)
                arrived = self._stream.record_event()
        for source, target in group:
            self._reader.fetched[id(source)] = source, target, arrived

    def _fill(self, group: list[_Target]) -> None:
        for source, target in group:
            self._reader.fill(target, source.detach(), non_blocking=True)

    def end(self) -> None:
        """Wait for copies that were not used, after the last weight or an early end. Idempotent."""
        if self._stream is not None and self._reader.fetched:
            self._stream.synchronize()
        self._reader.fetched.clear()
        self._wanted.clear()
