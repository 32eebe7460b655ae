"""The poison of one CUDA device: two chunks mapped behind every offloaded range, and whether something wrote into them."""

from __future__ import annotations

import ctypes

import torch

from placement.memory.cuda_answers import HostWords
from placement.memory.cuda_mapping import DriverChunk, PoisonChunks


class Poison:
    """A full chunk and one of the granularity, filled with `POISON_BYTE`.

    Args:
        view: all bytes of both, on the device.
        answer: two words for the comparison's answer. No pinned tensor of torch's: one that dies in a forked child asks for the
            device there, and ends the child.
    """

    def __init__(self, full: DriverChunk, tail: DriverChunk, view: torch.Tensor, answer: HostWords) -> None:
        self.chunks = PoisonChunks(full, tail)
        self.nbytes = full.nbytes + tail.nbytes
        self._words = view.view(torch.int64)
        self._device = view.device
        self._stream = torch.cuda.Stream(self._device)
        with torch.cuda.stream(self._stream):
            # Kept for good: the comparison's own scratch memory lies in the same segment of torch's, and never has to be asked for.
            self._segment = torch.empty(2, dtype=torch.int64, device=self._device)
        self._answer = answer
        extremes = self._segment if answer.device is None else answer.device
        self._extremes = (extremes[0], extremes[1])
        self._asked, self._answered = torch.cuda.Event(), torch.cuda.Event()
        # They outlive the process: torch's destructor asks the device, which ends a forked child (torch 2.11).
        for event in (self._asked, self._answered):
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(event))
        self._is_comparing = False
        self.heal(wait=True)  # loads the kernels: at their first use that may wait for the whole device

    def heal(self, wait: bool) -> bool:
        """See `Device.heal_poison`."""
        if not wait and self._is_comparing and not self._answered.query():
            return False  # what this comparison misses, the next one finds: a damage stays until it is refilled
        self._asked.record(torch.cuda.current_stream(self._device.index))
        self._stream.wait_event(self._asked)
        if wait:
            self._compare()  # finds also what an answer that nobody has read yet has found
            self._answered.synchronize()
        is_damaged = self._is_comparing and self._answer.host.tolist() != [-1, -1]
        self._is_comparing = False
        if is_damaged:
            with torch.cuda.stream(self._stream):
                self._words.fill_(-1)
            if wait:
                self._stream.synchronize()
        if not wait:
            self._compare()
        return is_damaged

    def _compare(self) -> None:
        self._is_comparing = False
        with torch.cuda.stream(self._stream):
            torch.aminmax(self._words, out=self._extremes)
            if self._answer.device is None:
                self._answer.host.copy_(self._segment, non_blocking=True)
            self._answered.record(self._stream)
        self._is_comparing = True
