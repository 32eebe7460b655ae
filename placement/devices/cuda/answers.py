"""Bring small results of kernels to the waiting host: the kernels write them into host memory.

A copy to the host would wait behind the copy engine's queue, which may hold gigabytes of the
offload that the result is about.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from placement.core import interrupts
from placement.devices.host.slab import wait_until_ready
from placement.devices.memory import HostSlab

# the memory of answers: a thousand words are enough for the fingerprints of 128 GiB in chunks of
# 128 MiB
NUM_BYTES = 128 << 10


class Exported:
    """Presents memory to torch as device memory, uint8. A tensor over it keeps this object alive,
    and with it the owner of the memory. It must not be the object that holds the tensor: that cycle
    would run through C++, unseen by any garbage collection."""

    def __init__(self, owner: object, address: int, nbytes: int) -> None:
        self._owner = owner
        self.__cuda_array_interface__ = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }


class HostWords:
    """A slab viewed as int64 words. `has_one_address`: whether registered host memory has the same
    address for kernels and for the host."""

    def __init__(self, slab: HostSlab, device: torch.device, *, has_one_address: bool) -> None:
        wait_until_ready(slab.address, slab.nbytes)
        self.host = slab.view(0, slab.nbytes).view(torch.int64)
        # the same words for kernels, which write to them directly; None where they cannot
        self.device: torch.Tensor | None = None
        if slab.pinned and has_one_address:
            self.device = torch.as_tensor(
                Exported(slab, slab.address, slab.nbytes), device=device
            ).view(torch.int64)


class _Answer:
    """A result on its way. It stays in the memory of `Answers` until it is read, or its place is
    needed."""

    def __init__(self, host: torch.Tensor, written: torch.cuda.Event) -> None:
        self._values: torch.Tensor | None = host
        self._written: torch.cuda.Event | None = written  # None once the values are a copy

    def take_away(self) -> None:
        if self._written is not None and self._values is not None:
            self._written.synchronize()
            self._values, self._written = self._values.clone(), None

    def __call__(self) -> torch.Tensor:
        self.take_away()
        interrupts.check()
        values, self._values = self._values, None
        assert values is not None, "an answer is read once"
        return values


class Answers:
    """Brings int64 tensors to the host, one behind the other in memory that is used again when it
    is full."""

    def __init__(self, words: HostWords) -> None:
        self._host, self._device = words.host, words.device
        self._waiting: list[_Answer] = []
        self._used = 0

    def ask(self, values: torch.Tensor) -> Callable[[], torch.Tensor]:
        count = values.numel()
        if self._device is None or not 0 < count <= len(self._host):
            return values.cpu
        if self._used + count > len(self._host):
            for answer in self._waiting:
                answer.take_away()
            self._waiting, self._used = [], 0
        place = slice(self._used, self._used + count)
        torch.add(values, 0, out=self._device[place])
        self._waiting.append(
            _Answer(self._host[place], torch.cuda.current_stream(values.device).record_event())
        )
        self._used += count
        return self._waiting[-1]
