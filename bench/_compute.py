"""Work for the compute stream: as many matrix products as take a given time."""

from __future__ import annotations

import torch

from bench._rig import Rig


class Products:
    """Products of square bf16 matrices, enqueued on the current stream."""

    def __init__(self, rig: Rig) -> None:
        self._rig = rig
        size = rig.pick(32, 8192, 8192)
        shape = (size, size)
        self._factors = [
            torch.empty(shape, dtype=torch.bfloat16, device=rig.torch_device).normal_()
            for _ in range(2)
        ]
        self._out = torch.empty(shape, dtype=torch.bfloat16, device=rig.torch_device)
        self.enqueue(10)
        self.seconds_each = rig.seconds(lambda: self.enqueue(50)) / 50

    def count_for(self, seconds: float) -> int:
        """The number of products that take about this long; a few without a GPU."""
        return max(1, round(seconds / self.seconds_each)) if self._rig.is_cuda else 3

    def enqueue(self, count: int) -> None:
        for _ in range(count):
            torch.mm(*self._factors, out=self._out)

    def timed(self, count: int) -> tuple[torch.cuda.Event, torch.cuda.Event] | None:
        """Enqueue products between two events. Returns the events; None without a GPU."""
        if not self._rig.is_cuda:
            self.enqueue(count)
            return None
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        self.enqueue(count)
        end.record()
        return begin, end
