"""Write down the device memory in use, every other millisecond, from a separate process: `python -m
bench._timeline UUID FILE`.

The times are those of `time.monotonic`, which all processes of a machine share, so that phases of
other processes can be laid over them.
"""

from __future__ import annotations

import contextlib
import select
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from bench._sampler import _meter

_PERIOD_SECONDS = 2e-3


def main() -> None:
    used = _meter(sys.argv[1])
    with open(sys.argv[2], "w", encoding="utf-8") as file:
        print("ready", flush=True)
        while not select.select([sys.stdin], [], [], _PERIOD_SECONDS)[0]:
            file.write(f"{time.monotonic():.4f} {used()}\n")


class Timeline:
    """The samples of one GPU, read after `recorded` has ended."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._samples: list[tuple[float, int]] = []

    def between(self, began: float, ended: float) -> list[int]:
        """The bytes in use at each sample of the span."""
        if not self._samples:
            lines = (line.split() for line in self._file.read_text(encoding="utf-8").splitlines())
            # the last line may be half a one
            self._samples = [(float(line[0]), int(line[1])) for line in lines if len(line) == 2]
        return [used for at, used in self._samples if began <= at <= ended]


@contextlib.contextmanager
def recorded(uuid: str, file: Path) -> Iterator[Timeline]:
    """Watch a GPU while the body runs.

    Raises:
        RuntimeError: NVML is not available.
    """
    command = [sys.executable, "-m", "bench._timeline", uuid, str(file)]
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
            yield Timeline(file)
        finally:
            process.stdin.close()


if __name__ == "__main__":
    main()
