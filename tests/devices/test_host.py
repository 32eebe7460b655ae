"""Host slabs: exact size, the life of their last view, pinning, refusal before the machine runs
out."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch

from placement.core.errors import HostMemoryError
from placement.devices.host import slab as host
from placement.devices.host.shared_slab import MappedSlab, new_file
from placement.devices.host.slab import PAGE, Slab, cut, free_huge_bytes, left_in_cgroups
from placement.devices.inspection import placing, prefer
from tests.support.programs import Programs


def mapped(address: int) -> bool:
    spans = (
        line.split()[0].split("-") for line in Path("/proc/self/maps").read_text().splitlines()
    )
    return any(int(start, 16) <= address < int(end, 16) for start, end in spans)


def test_a_kernel_without_populate_is_served_by_touching(monkeypatch: pytest.MonkeyPatch) -> None:
    # no such advice: the kernel answers EINVAL, as an old one does
    monkeypatch.setattr(host, "MADV_POPULATE_WRITE", 12345)
    assert (Slab(100_000).view(0, 100_000) == 0).all()


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16])
def test_uploads_are_whole(dtype: torch.dtype) -> None:
    slab = Slab(40_000)
    source = slab.view(0, 40_000).copy_(torch.arange(40_000) % 2).view(dtype)
    for part in (
        source,
        source[5:].reshape(5, -1) if source[5:].numel() % 5 == 0 else source[5:],
        source[::3],
        source[:0],
        source[1],
    ):
        target = torch.zeros_like(part, memory_format=torch.contiguous_format)
        assert host.upload(target, part) is target
        assert torch.equal(
            target.view(-1).view(torch.uint8), part.contiguous().view(-1).view(torch.uint8)
        )
    assert torch.equal(
        host.upload(torch.zeros(source.numel(), dtype=torch.float32), source), source.float()
    )


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
        (
            "0::/job/rank\n",
            {"job/memory.max": "1000", "job/memory.current": "300", "job/rank/memory.max": "max"},
            [700],
        ),
        (
            "0::/\n",
            {
                "memory.max": "1000",
                "memory.current": "900",
                "memory.stat": ("anon 5\nactive_file 100\ninactive_file 50\n"),
            },
            [250],
        ),
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
        (
            "3:memory:/\n",
            {
                "memory/memory.limit_in_bytes": "9223372036854771712",
                "memory/memory.usage_in_bytes": "100",
            },
            [],
        ),
        ("0::/not/visible\n", {}, []),
    ],
)
def test_control_groups_of_both_versions(
    tmp_path: Path, membership: str, files: dict[str, str], left: list[int]
) -> None:
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


def test_the_interpreter_exits_in_peace_with_live_memory(programs: Programs) -> None:
    program = """
import torch
from placement.devices.host.slab import Slab, cut
from placement.testing import SimulatedDevice
device = SimulatedDevice(1 << 20)
addresses, chunk = device.reserve(1 << 18), device.create(1 << 18)
device.map(addresses, [chunk])
slab = Slab(10, lambda *a: None, lambda a: print("driver call"))
torch.kept = [device.view(addresses, 0, 1 << 18), device.host(100).view(0, 100), slab]
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
    assert (part.pinned, part.pageable_bytes, part.pageable_reason, part.held_bytes) == (
        False,
        0,
        None,
        100,
    )
    with pytest.raises(ValueError, match="not within"):
        part.view(96, 8)
    with pytest.raises(ValueError, match="not within"):
        cut(last, 1000)


# --- NUMA nodes

MIB = 1 << 20
GPU = "0000:3B:00.0"


def machine(root: Path, nodes: int, node_of_gpu: str | None) -> Path:
    """A folder like the kernel's, of a machine with some nodes and one GPU."""
    for node in range(nodes):
        (root / f"devices/system/node/node{node}").mkdir(parents=True)
    if node_of_gpu is not None:
        gpu = root / "bus/pci/devices" / GPU.lower()
        gpu.mkdir(parents=True)
        (gpu / "numa_node").write_text(f"{node_of_gpu}\n")
    return root


def policy_of(address: int) -> str:
    """The kernel's word on where the memory of the mapping that begins here is allocated."""
    lines = Path("/proc/self/numa_maps").read_text().splitlines()
    return next((line.split()[1] for line in lines if line.startswith(f"{address:x} ")), "none")


@pytest.fixture
def on_node_0(tmp_path: Path) -> host.Place:
    """Places memory on node 0, which every machine has, as on one with two."""
    place = placing("cuda:0", GPU, machine(tmp_path, 2, "0"))
    assert place is not None
    if not Path("/proc/self/numa_maps").exists():
        pytest.skip("this kernel is built without NUMA")
    return place


def test_the_node_of_the_gpu_is_preferred(on_node_0: host.Place) -> None:
    slab = Slab(8 * MIB, place=on_node_0)
    assert policy_of(slab.address) == "prefer:0"
    slab.view(0, 8 * MIB).fill_(7)
    assert int(slab.view(8 * MIB - 1, 1)) == 7
    elsewhere = Slab(8 * MIB)
    assert policy_of(elsewhere.address) in ("default", "none")  # it may have joined another mapping


def test_each_process_places_its_share_of_a_shared_copy(on_node_0: host.Place) -> None:
    placed: list[tuple[int, int]] = []

    def place(address: int, nbytes: int) -> None:
        placed.append((address, nbytes))
        assert on_node_0(address, nbytes) is None

    with new_file(4 * MIB) as (file, _):
        slab = MappedSlab(file, 4 * MIB, [(MIB, 2 * MIB)], 0, place=place)
    assert placed == [(slab.address + MIB, 2 * MIB)]
    assert policy_of(slab.address + MIB) == "prefer:0"


@pytest.mark.parametrize(
    ("nodes", "node_of_gpu", "said"),
    [
        (1, "0", "one NUMA node"),
        (2, "-1", "does not say on which of 2 NUMA nodes"),
        (2, None, "does not say on which of 2 NUMA nodes"),
        (2, "one", "does not say on which of 2 NUMA nodes"),
    ],
)
def test_without_a_choice_nothing_is_placed_and_the_log_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, nodes: int, node_of_gpu: str | None, said: str
) -> None:
    with caplog.at_level(logging.INFO, logger="placement"):
        assert placing("cuda:0", GPU, machine(tmp_path, nodes, node_of_gpu)) is None
    assert said in caplog.text


def test_a_node_that_is_not_there_is_refused_and_the_memory_can_be_used() -> None:
    reasons: list[object] = []
    slab = Slab(PAGE, place=lambda address, nbytes: reasons.append(prefer(address, nbytes, 1000)))
    assert reasons
    assert isinstance(reasons[0], str)
    assert torch.equal(slab.view(0, PAGE), torch.zeros(PAGE, dtype=torch.uint8))
