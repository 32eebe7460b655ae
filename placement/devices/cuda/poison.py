"""The poison of one CUDA device: two chunks that are mapped behind every offloaded range, and the
check for writes into them."""

from __future__ import annotations

import ctypes
import weakref

import torch

from placement.devices.base import POISON_WORD
from placement.devices.cuda.answers import HostWords
from placement.devices.cuda.driver import Driver
from placement.devices.cuda.mapping import DriverChunk, PoisonChunks
from placement.devices.cuda.streams import own_stream

_WORD = int.from_bytes(POISON_WORD, "little", signed=True)


class Poison:
    """A large chunk and a small one of the granularity, filled with `POISON_WORD` before they are
    mapped anywhere. They are compared at every phase transition, by a CUDA graph captured once: its
    replay costs a third of calling torch (H200). `view`: all bytes of both chunks, on the device.
    `answer`: two words for the result. Not torch's pinned memory, which kills a forked child that
    drops it."""

    def __init__(
        self,
        driver: Driver,
        large: DriverChunk,
        small: DriverChunk,
        view: torch.Tensor,
        answer: HostWords,
    ) -> None:
        self.chunks = PoisonChunks(large, small)
        self.nbytes = large.nbytes + small.nbytes
        self._words = view.view(torch.int64)
        self._device = view.device
        self._stream = own_stream(self._device.index, "poison")
        self._answer = answer
        with torch.cuda.stream(self._stream):
            self._words.fill_(_WORD)
            self._extremes = (
                torch.empty(2, dtype=torch.int64, device=self._device)
                if answer.device is None
                else answer.device
            )
            self._compare()  # loads the kernels, whose first use may wait for the whole device
        self._stream.synchronize()
        self._comparison = torch.cuda.CUDAGraph()
        self._asked, self._answered = torch.cuda.Event(), torch.cuda.Event()
        # Kept until the process ends: torch's destructors call the device, which kills a forked
        # child (torch 2.11).
        for handle in (self._comparison, self._asked, self._answered):
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(handle))
        weakref.finalize(self, _reset, self._comparison, driver).atexit = False
        with torch.cuda.stream(self._stream):
            self._comparison.capture_begin(capture_error_mode="thread_local")
            try:
                self._compare()
            finally:
                self._comparison.capture_end()
        self._is_comparing = False
        # whether the comparison in progress was begun for the next `heal` that waits
        self._is_ahead = False
        self.heal(wait=True)

    def begin(self) -> None:
        self._launch(self._follow())
        self._is_ahead = True

    def heal(self, wait: bool) -> bool:
        if not wait and self._is_comparing and not self._answered.query():
            # damage missed here is found next time, because it stays until it is refilled
            return False
        current = self._follow()
        if wait:
            if not self._is_ahead:
                self._launch(current)  # this comparison also finds what an unread answer has found
            self._answered.synchronize()
        is_damaged = self._is_comparing and self._answer.host.tolist() != [_WORD, _WORD]
        self._is_comparing = self._is_ahead = False
        if is_damaged:
            with torch.cuda.stream(self._stream):
                self._words.fill_(_WORD)
            if wait:
                self._stream.synchronize()
        if not wait:
            self._launch(current)
        return is_damaged

    def _follow(self) -> torch.cuda.Stream:
        """Make the comparison wait for all work of the current stream. Returns that stream."""
        current = torch.cuda.current_stream(self._device.index)
        self._asked.record(current)
        self._stream.wait_event(self._asked)
        return current

    def _launch(self, current: torch.cuda.Stream) -> None:
        self._is_comparing = False
        callers = torch.cuda.current_stream()  # may be the stream of another device
        try:
            torch.cuda.set_stream(self._stream)  # the context manager costs seven times as much
            self._comparison.replay()
            if self._answer.device is None:
                self._answer.host.copy_(self._extremes, non_blocking=True)
        finally:
            torch.cuda.set_stream(current)
            torch.cuda.set_stream(callers)
        self._answered.record(self._stream)
        self._is_comparing = True

    def _compare(self) -> None:
        least, most = self._extremes[0], self._extremes[1]
        torch.aminmax(self._words, out=(least, most))


def _reset(comparison: torch.cuda.CUDAGraph, driver: Driver) -> None:
    if driver.usable:
        comparison.reset()
