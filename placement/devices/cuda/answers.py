"""Bring small results of kernels to the waiting host: the kernels write them into host memory.

A copy to the host would wait behind the copy engine's queue, which may hold gigabytes of the offload that the result is about.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable

import torch

from placement.core import interrupts
from placement.devices.host.reserve import wait_until_ready
from placement.devices.memory import HostSlab

_PAGE = 1024
"""The words of one answer: enough for the fingerprints of 128 GiB in chunks of 128 MiB."""
_PAGES = 16
NUM_BYTES = 8 * _PAGE * _PAGES
OUTBOX_BYTES = 16 << 20


class _Exported:
    """Presents host memory to torch as device memory. It must not be the object that holds the tensor: that cycle would run through C++,
    unseen by any garbage collection."""

    def __init__(self, slab: HostSlab) -> None:
        self._slab = slab
        self.__cuda_array_interface__ = {"shape": (slab.nbytes // 8,), "typestr": "<i8", "data": (slab.address, False), "version": 3}


class HostWords:
    """A slab viewed as int64 words.

    Args:
        has_one_address: whether registered host memory has the same address for kernels and for the host.

    Attributes:
        host: the words for the host.
        device: the same words for kernels, which write to them directly; None where they cannot.
    """

    def __init__(self, slab: HostSlab, device: torch.device, *, has_one_address: bool) -> None:
        wait_until_ready(slab.address, slab.nbytes)
        self.host = slab.view(0, slab.nbytes).view(torch.int64)
        self.device = torch.as_tensor(_Exported(slab), device=device) if slab.pinned and has_one_address else None


class _Answer:
    """A pending answer in one page. If it is dropped unread (the phase transition failed), the page is free once it is written."""

    def __init__(self, host: torch.Tensor) -> None:
        self._host = host
        self.written: torch.cuda.Event | None = None

    def __call__(self) -> torch.Tensor:
        assert self.written is not None
        self.written.synchronize()
        interrupts.check()
        return self._host.clone()


class Answers:
    """Brings small int64 tensors to the host."""

    def __init__(self, words: HostWords) -> None:
        self._words = words
        self._pages: dict[int, tuple[weakref.ref[_Answer], torch.cuda.Event | None]] = {}
        """For each page's first word: the answer that reads it, and the event of its writing. A page without an entry was never used."""

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


class _Letter:
    """A larger result. It stays in the outbox until it is read, or its place is needed."""

    def __init__(self, host: torch.Tensor, written: torch.cuda.Event) -> None:
        self._host, self._written = host, written
        self._copy: torch.Tensor | None = None
        self.is_away = False

    def take_away(self) -> None:
        if not self.is_away:
            self._written.synchronize()
            self._copy, self.is_away = self._host.clone(), True

    def __call__(self) -> torch.Tensor:
        """Called once."""
        self.take_away()
        interrupts.check()
        copy, self._copy = self._copy, None
        assert copy is not None
        return copy


class Outbox:
    """Brings larger int32 tensors to the host, one behind the other in memory that is used again when it is full."""

    def __init__(self, words: HostWords) -> None:
        self._host = words.host.view(torch.int32)
        self._device = None if words.device is None else words.device.view(torch.int32)
        self._letters: list[_Letter] = []
        self._used = 0

    def send(self, values: torch.Tensor) -> Callable[[], torch.Tensor]:
        """See `Device.send`."""
        count = values.numel()
        if self._device is None or count > len(self._host):
            return values.cpu
        if self._used + count > len(self._host):
            for letter in self._letters:
                letter.take_away()
            self._letters, self._used = [], 0
        place = slice(self._used, self._used + count)
        torch.add(values, 0, out=self._device[place])
        self._letters.append(_Letter(self._host[place], torch.cuda.current_stream(values.device).record_event()))
        self._used += count
        return self._letters[-1]
