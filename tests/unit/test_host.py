"""Host slabs: exact size, the life of their last view, pinning, refusal before the machine runs out."""

from __future__ import annotations

import ctypes
import os
import signal
from pathlib import Path

import pytest
import torch

from placement.core.errors import HostMemoryError
from placement.devices.host import slab as host
from placement.devices.host.slab import PAGE, Slab, cut, free_huge_bytes, left_in_cgroups
from tests.support.programs import Programs


def mapped(address: int) -> bool:
    spans = (line.split()[0].split("-") for line in Path("/proc/self/maps").read_text().splitlines())
    return any(int(start, 16) <= address < int(end, 16) for start, end in spans)


def test_memory_is_there_before_it_is_touched() -> None:
    pages = (1 << 20) // PAGE
    slab = Slab(1 << 20)
    present = (ctypes.c_ubyte * pages)()
    assert host.libc.mincore(ctypes.c_void_p(slab.address), ctypes.c_size_t(1 << 20), present) == 0
    assert sum(byte & 1 for byte in present) == pages


def test_a_kernel_without_populate_is_served_by_touching(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "MADV_POPULATE_WRITE", 12345)  # no such advice: the kernel answers EINVAL, as an old one does
    assert (Slab(100_000).view(0, 100_000) == 0).all()


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16])
def test_uploads_are_whole(dtype: torch.dtype) -> None:
    slab = Slab(40_000)
    source = slab.view(0, 40_000).copy_(torch.arange(40_000) % 2).view(dtype)
    for part in (source, source[5:].reshape(5, -1) if source[5:].numel() % 5 == 0 else source[5:], source[::3], source[:0], source[1]):
        target = torch.zeros_like(part, memory_format=torch.contiguous_format)
        assert host.upload(target, part) is target
        assert torch.equal(target.view(-1).view(torch.uint8), part.contiguous().view(-1).view(torch.uint8))
    assert torch.equal(host.upload(torch.zeros(source.numel(), dtype=torch.float32), source), source.float())


def test_views_stay_within_the_slab() -> None:
    slab = Slab(100)
    assert slab.view(100, 0).numel() == 0
    for offset, nbytes in [(-1, 2), (0, 101), (100, 1), (0, -1)]:
        with pytest.raises(ValueError, match="not within 100 bytes"):
            slab.view(offset, nbytes)
    with pytest.raises(ValueError, match="a slab cannot have -1 bytes"):
        Slab(-1)


def test_more_than_the_machine_has_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(HostMemoryError, match=rf"asked for {1 << 50:,} bytes, [\d,]+ available"):
        Slab(1 << 50)
    monkeypatch.setattr(host, "available_bytes", lambda: 1 << 62)
    with pytest.raises(HostMemoryError, match="Cannot allocate memory"):
        Slab(1 << 60)


@pytest.mark.parametrize(
    ("membership", "files", "left"),
    [
        ("0::/job/rank\n", {"job/memory.max": "1000", "job/memory.current": "300", "job/rank/memory.max": "max"}, [700]),
        ("0::/\n", {"memory.max": "1000", "memory.current": "900", "memory.stat": "anon 5\nactive_file 100\ninactive_file 50\n"}, [250]),
        (
            "4:cpu:/a\n3:memory:/job\n",
            {
                "memory/job/memory.limit_in_bytes": "500",
                "memory/job/memory.usage_in_bytes": "100",
                "memory/job/memory.stat": "inactive_file 1\ntotal_inactive_file 7\n",
                "memory/memory.limit_in_bytes": "9000",
                "memory/memory.usage_in_bytes": "100",
            },
            [407, 8900],
        ),
        ("3:memory:/\n", {"memory/memory.limit_in_bytes": "9223372036854771712", "memory/memory.usage_in_bytes": "100"}, []),
        ("0::/not/visible\n", {}, []),
    ],
)
def test_control_groups_of_both_versions(tmp_path: Path, membership: str, files: dict[str, str], left: list[int]) -> None:
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(content)
    (tmp_path / "membership").write_text(membership)
    assert list(left_in_cgroups(tmp_path / "membership", tmp_path, below=1 << 40)) == left


def test_free_huge_pages_are_counted_over_all_zones(tmp_path: Path) -> None:
    row = "Node 0, zone {:>8} " + " ".join(["{}"] * 11) + "\n"
    text = row.format("DMA", *[9] * 9, 0, 0) + row.format("Normal", *[9] * 9, 3, 2)
    (tmp_path / "buddyinfo").write_text(text)
    assert free_huge_bytes(tmp_path / "buddyinfo") == (3 * 512 + 2 * 1024) * PAGE
    assert free_huge_bytes(tmp_path / "hidden") == 0


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_child_that_reads_a_slab_dies() -> None:
    view = Slab(PAGE).view(0, PAGE)
    pid = os.fork()
    if pid == 0:
        signal.signal(signal.SIGSEGV, signal.SIG_DFL)
        view[0].item()
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGSEGV
    assert (view == 0).all()


def test_the_interpreter_exits_in_peace_with_live_memory(programs: Programs) -> None:
    program = """
import torch
from placement.devices.host.slab import Slab, cut
from placement.testing import SimulatedDevice
device = SimulatedDevice(1 << 20)
addresses, chunk = device.reserve(1 << 18), device.create(1 << 18)
device.map(addresses, [chunk])
torch.kept = [device.view(addresses, 0, 1 << 18), device.host(100).view(0, 100), Slab(10, lambda *a: None, lambda a: print("driver call"))]
assert torch.kept[2].ready.wait(60) and torch.kept[2].pinned
raise SystemExit(7)
"""
    assert programs.run(program) == (7, "", "")


def test_parts_of_a_slab_are_apart_and_keep_it_alive() -> None:
    whole = Slab(1000)
    address = whole.address
    part, rest = cut(whole, 100)
    assert rest is not None
    assert (part.address, part.nbytes) == (address, 100)
    assert (rest.address, rest.nbytes) == (address + 128, 872)
    last, none = cut(rest, 872)
    assert none is None
    del whole, rest
    part.view(0, 100).fill_(1)
    last.view(0, 872).fill_(2)
    assert part.view(90, 10).tolist() == [1] * 10
    assert (part.pinned, part.pageable_bytes, part.pageable_reason, part.held_bytes) == (False, 0, None, 100)
    with pytest.raises(ValueError, match="not within"):
        part.view(96, 8)
    with pytest.raises(ValueError, match="not within"):
        cut(last, 1000)
