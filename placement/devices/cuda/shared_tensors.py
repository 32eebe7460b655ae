"""Tensors that other processes have opened by CUDA IPC, and whose memory torch keeps until somebody looks whether they dropped them.

When a shared tensor dies here while another process still has it, torch puts its memory aside. It looks through what lies there only
when another shared tensor dies, or when its allocator finds no free block. Until then the memory counts as allocated, and
`empty_cache()` cannot return it to the driver: after a weight sync in buckets, the last buckets stay for the whole next phase.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.multiprocessing import reductions


class SharedTensors:
    """Takes back what other processes have dropped, and counts its bytes.

    Args:
        is_capturing: whether the current stream is capturing a graph.
        allocated_bytes: measures the bytes that torch's allocator has given out.
    """

    def __init__(self, is_capturing: Callable[[], bool], allocated_bytes: Callable[[], int]) -> None:
        self._is_capturing = is_capturing
        self._allocated_bytes = allocated_bytes
        self.collected_bytes = 0
        """About the bytes taken back so far: another thread that frees a tensor at the same moment is counted, too."""

    def collect(self) -> None:
        """Take back what can be taken back. Never fails, waits for nothing, and does nothing while a graph is being captured.

        Costs a look at an empty list in a process that never shared a tensor. Bytes are only counted where one was shared through
        pickling, because measuring them costs more than the rest.
        """
        was_shared = bool(reductions.shared_cache)
        try:
            if self._is_capturing():
                return
            before = self._allocated_bytes() if was_shared else 0
            torch._C._cuda_ipc_collect()
            if was_shared:
                self.collected_bytes += max(0, before - self._allocated_bytes())
        except RuntimeError:  # the device reports an error of earlier work, which is not this method's to raise
            return
