"""Sample the device memory in use from a separate process, a thousand times a second.

A thread would share Python's lock with the code that it watches. The process imports neither torch
nor other modules of the benchmarks, and makes no CUDA context. It asks NVML, which counts every
process and every chunk.
"""

from __future__ import annotations

import ctypes
import select
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import IO

_PERIOD_SECONDS = 1e-3


class _Memory(ctypes.Structure):
    _fields_ = [
        ("total", ctypes.c_ulonglong),
        ("free", ctypes.c_ulonglong),
        ("used", ctypes.c_ulonglong),
    ]


def _meter(uuid: str) -> Callable[[], int]:
    """Return a function that gives the bytes in use on the GPU with this UUID."""
    nvml = ctypes.CDLL("libnvidia-ml.so.1")
    device = ctypes.c_void_p()
    for code in (
        nvml.nvmlInit_v2(),
        nvml.nvmlDeviceGetHandleByUUID(uuid.encode(), ctypes.byref(device)),
    ):
        if code != 0:
            raise RuntimeError(f"NVML error {code} for GPU {uuid!r}")
    memory = _Memory()

    def used() -> int:
        code = nvml.nvmlDeviceGetMemoryInfo(device, ctypes.byref(memory))
        if code != 0:
            raise RuntimeError(f"NVML error {code}")
        return int(memory.used)

    return used


def _sample(used: Callable[[], int], stop: IO[str]) -> str:
    """Sample until a line arrives. Returns the bytes at the beginning, at the peak, and the number
    of samples."""
    first = peak = used()
    samples = 1
    while not select.select([stop], [], [], _PERIOD_SECONDS)[0]:
        peak = max(peak, used())
        samples += 1
    stop.readline()
    return f"{first} {peak} {samples}"


def main() -> None:
    """Run `python -m bench._sampler UUID`. One line starts sampling, the next ends it and is
    answered; the end of input ends all."""
    used = _meter(sys.argv[1])
    print("ready", flush=True)
    while sys.stdin.readline():
        print("begun", flush=True)
        print(_sample(used, sys.stdin), flush=True)


@dataclass
class Peak:
    """The samples between the beginning and the end of `sampled`."""

    first_bytes: int = 0
    peak_bytes: int = 0
    samples: int = 0
    seconds: float = 0.0

    @property
    def rise_bytes(self) -> int:
        return self.peak_bytes - self.first_bytes


@contextmanager
def sampled(uuid: str) -> Iterator[Peak]:
    """Watch a GPU while the body runs. The `Peak` is filled at the end.

    Raises:
        RuntimeError: NVML is not available.
    """
    peak = Peak()
    command = [sys.executable, "-m", "bench._sampler", uuid]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            if process.stdout.readline() != "ready\n":
                raise RuntimeError(
                    "the sampler did not start; check that libnvidia-ml.so.1 is installed"
                )
            began = time.perf_counter()
            process.stdin.write("begin\n")
            process.stdin.flush()
            process.stdout.readline()
            yield peak
            peak.seconds = time.perf_counter() - began
            process.stdin.write("end\n")
            process.stdin.flush()
            peak.first_bytes, peak.peak_bytes, peak.samples = (
                int(word) for word in process.stdout.readline().split()
            )
        finally:
            process.stdin.close()


if __name__ == "__main__":
    main()
