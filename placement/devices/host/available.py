"""The machine's memory that is left for this process: in all, and in huge pages."""

from __future__ import annotations

import mmap
import sys
from collections.abc import Iterator
from pathlib import Path

_HUGE_ORDER = 9
"""Free blocks of this order and above are whole huge pages: 2**9 pages, which are 2 MiB with pages of 4 KiB."""


def available_bytes() -> int:
    """Bytes that this process can still allocate: the machine's available memory, or what its control groups leave if that is less."""
    meminfo = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    total, available = (int(meminfo[name].split()[0]) << 10 for name in ("MemTotal", "MemAvailable"))
    return max(0, min([available, *left_in_cgroups(below=total)]))


def left_in_cgroups(
    membership: Path = Path("/proc/self/cgroup"), root: Path = Path("/sys/fs/cgroup"), below: int = sys.maxsize
) -> Iterator[int]:
    """The bytes left by each control group of this process (versions 1 and 2). Limits of at least `below` bytes are no limits."""
    if not membership.exists():
        return
    for line in membership.read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            base, limit, usage = root, "memory.max", "memory.current"
        elif "memory" in controllers.split(","):
            base, limit, usage = root / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes"
        else:
            continue
        group = base / path.lstrip("/")
        for folder in (group, *group.parents):
            value = _read(folder / limit)
            if value.isdigit() and int(value) < below:  # without a limit the value is "max", or a large number in version 1
                yield int(value) - int(_read(folder / usage) or 0) + _reclaimable(folder)
            if folder == base:
                break


def free_huge_bytes(buddyinfo: Path = Path("/proc/buddyinfo")) -> int:
    """Bytes that the kernel has free in blocks of whole huge pages; 0 where it does not report them."""
    total = 0
    for line in _read(buddyinfo).splitlines():  # Node 0, zone   Normal   4   1   0 ...: free blocks of each order
        counts = line.partition("zone")[2].split()[1:]
        total += sum(int(count) << order for order, count in enumerate(counts) if order >= _HUGE_ORDER)
    return total * mmap.PAGESIZE


def _reclaimable(group: Path) -> int:
    """Bytes of cached files. They count as used, but are dropped when memory is needed."""
    stat = dict(line.split() for line in _read(group / "memory.stat").splitlines())
    names = ("active_file", "inactive_file")
    return sum(int(stat.get(f"total_{name}", stat.get(name, 0))) for name in names)  # version 1: `total_` includes child groups


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:  # absent in this version of control groups, or hidden inside a container
        return ""
