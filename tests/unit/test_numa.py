"""Host memory on the NUMA node of a GPU."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch

from placement.devices.host import slab as numa
from placement.devices.host.shared_slab import MappedSlab, new_file
from placement.devices.host.slab import PAGE, Slab

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
def on_node_0(tmp_path: Path) -> numa.Place:
    """Places memory on node 0, which every machine has, as on one with two."""
    place = numa.placing("cuda:0", GPU, machine(tmp_path, 2, "0"))
    assert place is not None
    if not Path("/proc/self/numa_maps").exists():
        pytest.skip("this kernel is built without NUMA")
    return place


def test_the_node_of_the_gpu_is_preferred(on_node_0: numa.Place) -> None:
    slab = Slab(8 * MIB, place=on_node_0)
    assert policy_of(slab.address) == "prefer:0"
    slab.view(0, 8 * MIB).fill_(7)
    assert int(slab.view(8 * MIB - 1, 1)) == 7
    elsewhere = Slab(8 * MIB)
    assert policy_of(elsewhere.address) in ("default", "none")  # it may have joined another mapping


def test_each_process_places_its_share_of_a_shared_copy(on_node_0: numa.Place) -> None:
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
        assert numa.placing("cuda:0", GPU, machine(tmp_path, nodes, node_of_gpu)) is None
    assert said in caplog.text


def test_a_node_that_is_not_there_is_refused_and_the_memory_can_be_used() -> None:
    reasons: list[object] = []
    slab = Slab(PAGE, place=lambda address, nbytes: reasons.append(numa.prefer(address, nbytes, 1000)))
    assert reasons
    assert isinstance(reasons[0], str)
    assert torch.equal(slab.view(0, PAGE), torch.zeros(PAGE, dtype=torch.uint8))
