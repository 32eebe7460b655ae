"""The base of every benchmark: the device, the size of the job, clocks, and memory as the driver
reports it."""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch

from bench._results import Results
from bench._sampler import Peak, sampled
from placement.devices.base import Device
from placement.testing import SimulatedDevice

SIZES = ("tiny", "quick", "full")


@dataclass
class Rig:
    """One run on one device.

    Attributes:
        device: "cuda:0" or "simulated". In a simulated run placement works in host memory and peers
            copy from CPU to CPU. That shows that a benchmark runs, but says nothing about speed.
        size: "full" as in the README; "quick" is about a third of the bytes; "tiny" is for a test.
        only: the systems to measure; none means all.
    """

    device: str
    size: str
    only: Sequence[str] = ()
    _simulated: SimulatedDevice | None = field(default=None, repr=False)

    @property
    def is_cuda(self) -> bool:
        return self.device.startswith("cuda")

    @property
    def torch_device(self) -> torch.device:
        return torch.device(self.device if self.is_cuda else "cpu")

    def wants(self, system: str) -> bool:
        """Whether to measure this system."""
        return not self.only or system in self.only

    def pick(self, tiny: int, quick: int, full: int) -> int:
        """The number for the run's size."""
        return {"tiny": tiny, "quick": quick, "full": full}[self.size]

    def placement_device(self) -> str | Device:
        """The argument for `placement.Manager(device=...)`."""
        if self.is_cuda:
            return self.device
        self._simulated = SimulatedDevice(capacity_bytes=1 << 30, chunk_bytes=1 << 16)
        return self._simulated

    def sync(self) -> None:
        if self.is_cuda:
            torch.cuda.synchronize(self.torch_device)

    def free_bytes(self) -> int:
        """Free device memory as the driver reports it; 0 without a device."""
        if self.is_cuda:
            return torch.cuda.mem_get_info(self.torch_device)[0]
        return self._simulated.memory().free_bytes if self._simulated is not None else 0

    def empty_cache(self) -> None:
        if self.is_cuda:
            torch.cuda.empty_cache()

    def pin(self, nbytes: int) -> torch.Tensor:
        """Page-locked host bytes from torch's allocator; ordinary ones without a GPU."""
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=self.is_cuda)

    def clean(self) -> None:
        """Clean up between systems: nothing of the last one stays on the device or page-locked."""
        gc.collect()
        self.sync()
        self.empty_cache()
        if self.is_cuda:
            torch._C._host_emptyCache()
        self._simulated = None

    @contextmanager
    def sampled_peak(self) -> Iterator[Peak]:
        """Watch the device's memory from another process. The `Peak` has no samples without a
        GPU."""
        if not self.is_cuda:
            yield Peak()
            return
        uuid = str(torch.cuda.get_device_properties(self.torch_device).uuid)
        with sampled(uuid if uuid.startswith("GPU-") else f"GPU-{uuid}") as peak:
            yield peak

    def seconds(self, work: Callable[[], object]) -> float:
        """The wall time of `work`, from an idle device to an idle device."""
        self.sync()
        began = time.perf_counter()
        work()
        self.sync()
        return time.perf_counter() - began


def used_host_bytes() -> int:
    """Host bytes that the machine could not give to another process.

    The total is not constant: a virtual machine may get its memory as it is used.
    """
    meminfo = dict(
        line.split(":", 1)
        for line in Path("/proc/meminfo").read_text(encoding="utf-8").splitlines()
    )
    total, available = (int(meminfo[key].split()[0]) for key in ("MemTotal", "MemAvailable"))
    return (total - available) << 10


def parse(
    description: str | None,
    arguments: Sequence[str] | None,
    own: Sequence[argparse.ArgumentParser] = (),
) -> argparse.Namespace:
    """Parse the options that every benchmark has, and those that it has of its `own`."""
    parser = argparse.ArgumentParser(description=description, parents=own)
    parser.add_argument(
        "--device",
        default="cuda:0" if torch.cuda.is_available() else "simulated",
        help='"cuda:0" or "simulated"',
    )
    parser.add_argument(
        "--size",
        choices=SIZES,
        default=None,
        help="size of the job (default: full on a GPU, else tiny)",
    )
    parser.add_argument("--out", type=Path, default=None, help="folder for the result files")
    parser.add_argument(
        "--only",
        nargs="+",
        metavar="SYSTEM",
        default=(),
        help="measure these systems alone, such as placement",
    )
    parsed = parser.parse_args(arguments)
    if parsed.size is None:
        parsed.size = "full" if parsed.device.startswith("cuda") else "tiny"
    return parsed


def run(
    name: str,
    description: str | None,
    measure: Callable[[Rig, Results], None],
    arguments: Sequence[str] | None = None,
    own: Sequence[argparse.ArgumentParser] = (),
) -> Results:
    """The common body of every benchmark's `main`; `own` parses what this one has besides."""
    parsed = parse(description, arguments, own)
    rig = Rig(parsed.device, parsed.size, parsed.only)
    if rig.is_cuda:
        torch.cuda.set_device(rig.torch_device)
    results = Results(name, rig.device, rig.size, parsed.out)
    measure(rig, results)
    rig.clean()
    results.write()
    return results
