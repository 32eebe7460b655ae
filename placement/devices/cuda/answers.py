"""Small results of kernels that the host waits for, written by the kernels into host memory.

A copy to the host waits behind what the copy engine has to do already, which may be gigabytes of an offload that the answer is about.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable

import torch

from placement.devices.base import HostSlab
from placement.devices.host.reserve import wait_until_ready

_PAGE = 1024
"""Words of one answer: fingerprints of 128 GiB in chunks of 128 MiB."""
_PAGES = 16
NUM_BYTES = 8 * _PAGE * _PAGES


class _Exported:
    """Host memory for torch, as memory of a device. Not the object that holds the tensor: the cycle would go through C++, unseen by any
    collection."""

    def __init__(self, slab: HostSlab) -> None:
        self._slab = slab
        self.__cuda_array_interface__ = {"shape": (slab.nbytes // 8,), "typestr": "<i8", "data": (slab.address, False), "version": 3}


class HostWords:
    """A slab as int64 words.

    Args:
        has_one_address: registered host memory has the same address for kernels as for the host.

    Attributes:
        host: for the host.
        device: for kernels, which write to the host's memory itself; None where they cannot.
    """

    def __init__(self, slab: HostSlab, device: torch.device, *, has_one_address: bool) -> None:
        wait_until_ready(slab.address, slab.nbytes)
        self.host = slab.view(0, slab.nbytes).view(torch.int64)
        self.device = torch.as_tensor(_Exported(slab), device=device) if slab.pinned and has_one_address else None


class _Answer:
    """What one page will hold. Dropped unread (a phase transition that failed), it leaves the page to the next once that is written."""

    def __init__(self, host: torch.Tensor) -> None:
        self._host = host
        self.written: torch.cuda.Event | None = None

    def __call__(self) -> torch.Tensor:
        assert self.written is not None
        self.written.synchronize()
        return self._host.clone()


class Answers:
    """Brings small int64 tensors to the host."""

    def __init__(self, words: HostWords) -> None:
        self._words = words
        self._pages: dict[int, tuple[weakref.ref[_Answer], torch.cuda.Event | None]] = {}
        """By first word, who is to read a page, and when it is written; a page without an entry was never used."""

    def ask(self, values: torch.Tensor) -> Callable[[], torch.Tensor]:
        """See `Device.ask`."""
        count = values.numel()
        if self._words.device is None or not 0 < count <= _PAGE or (start := self._free_page()) is None:
            return values.cpu
        answer = _Answer(self._words.host[start : start + count])
        me = weakref.ref(answer)
        self._pages[start] = me, None
        torch.add(values, 0, out=self._words.device[start : start + count])
        answer.written = torch.cuda.current_stream(values.device).record_event()
        self._pages[start] = me, answer.written
        return answer

    def _free_page(self) -> int | None:
        for start in range(0, self._words.host.numel(), _PAGE):
            answer, written = self._pages.get(start, (None, None))
            if answer is None or (answer() is None and written is not None and written.query()):
                return start
        return None
