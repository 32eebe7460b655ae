"""Small results of kernels that the host waits for, written by the kernels into host memory.

A copy to the host waits behind what the copy engine has to do already, which may be gigabytes of an offload that the answer is about.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from placement.memory.base import HostSlab

_PAGE = 1024
"""Words of one answer: fingerprints of 128 GiB in chunks of 128 MiB."""
_PAGES = 16
NUM_BYTES = 8 * _PAGE * _PAGES


class HostWords:
    """A slab as int64 words: `device` for kernels, `host` for the host."""

    def __init__(self, slab: HostSlab, device: torch.device) -> None:
        slab.ready.wait()
        self.host = slab.view(0, slab.nbytes).view(torch.int64)
        self.is_shared = slab.pinned
        """Whether kernels write to the host's memory itself; otherwise `bring` copies."""
        # The driver gives registered host memory one address for both sides.
        self.__cuda_array_interface__ = {"shape": (slab.nbytes // 8,), "typestr": "<i8", "data": (slab.address, False), "version": 3}
        self.device = torch.as_tensor(self, device=device) if self.is_shared else torch.empty_like(self.host, device=device)

    def bring(self) -> None:
        """Enqueue what brings to the host what kernels wrote."""
        if not self.is_shared:
            self.host.copy_(self.device, non_blocking=True)


class Answers:
    """Brings small int64 tensors to the host. A page that is never read (an interrupt) is not used again."""

    def __init__(self, words: HostWords) -> None:
        self._words = words
        self._free = list(range(0, words.host.numel() - _PAGE + 1, _PAGE))

    def ask(self, values: torch.Tensor) -> Callable[[], torch.Tensor]:
        """See `Device.ask`."""
        count = values.numel()
        if not self._words.is_shared or not 0 < count <= _PAGE or not self._free:
            return values.cpu
        start = self._free.pop()
        torch.add(values, 0, out=self._words.device[start : start + count])
        written = torch.cuda.current_stream(values.device).record_event()

        def read() -> torch.Tensor:
            written.synchronize()
            answer = self._words.host[start : start + count].clone()
            self._free.append(start)
            return answer

        return read
