"""Adoption on a CUDA device: storages get their place in a range, whatever knows them follows, and
memory comes and goes behind."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
import weakref
from pathlib import Path

import pytest
import torch

from placement.core.errors import RegistrationError
from placement.devices.cuda import pool as cuda_pool
from placement.devices.cuda.device import CudaDevice
from placement.devices.memory import Chunk, Copy, HostSlab
from placement.storage import layout as range_layout
from placement.storage.layout import Adoptee, RangeLayout
from tests.storage.test_adopt import claims_of

pytestmark = pytest.mark.gpu

MIB = 1 << 20


@pytest.fixture
def device() -> CudaDevice:
    gc.collect()
    made = CudaDevice(0, chunk_bytes=16 * MIB)
    made.reserve(1)  # its poison takes memory once, a little of it from torch
    return made


class PlacedStorage:
    """What a handle does with one adoption, reduced to the driver's part."""

    def __init__(self, device: CudaDevice, claims: list[Adoptee]) -> None:
        self.device = device
        self.layout: RangeLayout = range_layout.RangeLayout(device, claims)
        self.slab: HostSlab = device.host(self.layout.nbytes)
        base = self.slab.address
        on_device = [
            (c, o)
            for c, o in zip(claims, self.layout.offsets, strict=True)
            if c.storage.device == device.torch_device
        ]
        device.copy(
            [Copy(c.storage.data_ptr(), base + o, c.nbytes) for c, o in on_device], "to_host"
        )
        for claim, offset in zip(claims, self.layout.offsets, strict=True):
            if claim.storage.device != device.torch_device:
                self.slab.view(offset, claim.nbytes).copy_(
                    torch.frombuffer(bytearray(bytes_of(claim.storage)), dtype=torch.uint8)
                )
        device.sync()
        self.layout.move_in()
        self.layout.forget_adoptees()
        self.chunks: list[Chunk] = []

    def load(self) -> None:
        left = self.layout.nbytes
        while left > 0:
            self.chunks.append(self.device.create(min(left, self.device.chunk_bytes)))
            left -= self.chunks[-1].nbytes
        self.device.map(self.layout.addresses, self.chunks)
        self.device.copy(
            [Copy(self.layout.addresses.base, self.slab.address, self.layout.nbytes)], "to_device"
        )
        self.device.order()

    def offload(self) -> None:
        self.device.copy(
            [Copy(self.layout.addresses.base, self.slab.address, self.layout.nbytes)], "to_host"
        )
        self.device.sync()
        self.device.unmap(self.layout.addresses, self.layout.nbytes)
        for chunk in self.chunks:
            self.device.release(chunk)
        self.chunks = []

    def contains(self, tensor: torch.Tensor) -> bool:
        start = self.layout.addresses.base
        return (
            start <= tensor.data_ptr()
            and tensor.data_ptr() + tensor.nbytes <= start + self.layout.nbytes
        )


def bytes_of(storage: torch.UntypedStorage) -> bytes:
    flat = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(
        storage, 0, (storage.nbytes(),), (1,)
    )
    return flat.cpu().numpy().tobytes()


class Net(torch.nn.Module):
    """Sizes on both sides of each threshold of torch's allocator, tied weights, a view of one
    storage, an integer buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(512, 3000)  # 6 MiB
        self.second = torch.nn.Linear(3000, 3000)  # 36 MiB
        self.last = torch.nn.Linear(3000, 512, bias=False)
        # another tensor over the same storage
        self.last.weight = torch.nn.Parameter(self.first.weight.data.t())
        self.tied = self.second
        flat = torch.randn(300_000)  # 1.2 MiB
        self.scale = torch.nn.Parameter(flat[7:3007])
        self.shift = torch.nn.Parameter(flat[5000:8000].clone())
        self.register_buffer("steps", torch.arange(11))
        self.blocks = torch.nn.ParameterList(
            torch.randn(n) for n in (1, 100, 70_000, 200_000, 262_144, 262_145, 260_000, 3)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.first(x)) * self.scale + self.shift
        return self.last(torch.tanh(self.tied(self.second(hidden)))) * self.blocks[0]

    def tensors(self) -> dict[str, torch.Tensor]:
        return dict((*self.named_parameters(), *self.named_buffers()))


def net() -> Net:
    torch.manual_seed(0)
    made = Net()
    # Moved by storage, as a checkpoint loader would, so that aliases stay aliases.
    moved: dict[int, torch.UntypedStorage] = {}
    for tensor in made.tensors().values():
        old = tensor.untyped_storage()
        home = moved.setdefault(old._cdata, old.cuda())
        data = torch.empty(0, dtype=tensor.dtype, device="cuda")
        tensor.data = data.set_(home, tensor.storage_offset(), tensor.size(), tensor.stride())
    return made


def test_everything_follows_the_storage_and_every_byte_survives_cycles(device: CudaDevice) -> None:
    model = net()
    x = torch.randn(8, 512, device="cuda")
    loss = model(x).square().sum()
    reference = torch.autograd.grad(
        loss, list(model.parameters()), retain_graph=True, allow_unused=True
    )
    pinned_view = model.second.weight.detach()[10:20]  # nobody names it
    expected = {name: bytes_of(t.untyped_storage()) for name, t in model.tensors().items()}
    values = {name: t.detach().cpu().clone() for name, t in model.tensors().items()}
    ids = [id(p) for p in model.parameters()]

    placed = PlacedStorage(device, claims_of(model.tensors()))
    assert "rebind" not in placed.layout.ways
    assert placed.layout.nbytes <= range_layout.expected_bytes(
        device, [len(b) for b in expected.values()]
    )
    for tensor in (*model.tensors().values(), pinned_view):
        assert placed.contains(tensor)
    for _ in range(3):
        assert all(bool(t.isnan().all()) for t in model.parameters())
        assert bool((model.steps < 0).all())
        placed.load()
        for name, tensor in model.tensors().items():
            assert bytes_of(tensor.untyped_storage()) == expected[name]
            assert torch.equal(tensor.cpu(), values[name])
        assert torch.equal(pinned_view.cpu(), values["second.weight"][10:20])
        placed.offload()
    placed.load()
    # the graph recorded before adoption
    again = torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)
    for before, after in zip(reference, again, strict=True):
        assert (before is None) == (after is None)
        assert before is None or torch.equal(before, after)
    assert ids == [id(p) for p in model.parameters()]
    assert model.last.weight.untyped_storage()._cdata == model.first.weight.untyped_storage()._cdata


def test_a_storage_that_dies_before_another_moves_in_changes_no_place(device: CudaDevice) -> None:
    if hasattr(torch.UntypedStorage, "_swap_data_ptr_"):
        pytest.skip("this torch swaps storages and needs no pool")
    size = 800_000
    addresses = device.reserve(32 * MIB)
    device.unmap(addresses, 32 * MIB)
    owner = object.__new__(type("Owner", (), {"__slots__": ("__weakref__",)}))
    pool = cuda_pool.PoolRange(device.torch_device, addresses, [size] * 8, owner)
    storages = [torch.UntypedStorage(size, device="cuda") for _ in range(8)]
    for index in (0, 2, 1):
        pool.take(index, storages[index])
    # gaps below every place that is still to be taken
    storages[0], storages[1], storages[2] = None, None, None
    for index in (7, 3, 5, 4, 6):
        pool.take(index, storages[index])
    assert [s.data_ptr() - addresses.base for s in storages[3:]] == [
        pool.offsets[i] for i in range(3, 8)
    ]


def test_adoption_while_other_threads_allocate_and_free(device: CudaDevice) -> None:
    stop = threading.Event()
    made = [0, 0]

    def churn(slot: int) -> None:
        sizes = (1000, 3 * MIB, 300_000)
        while not stop.is_set():
            kept = [torch.empty(n, device="cuda") for n in sizes]
            del kept  # frees with the interpreter lock held
            made[slot] += 1

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)  # the interpreter lock changes hands wherever it can
    threads = [threading.Thread(target=churn, args=(slot,)) for slot in range(2)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(10):
            tensors = {
                f"t{i}": torch.randn(n, device="cuda")
                for i, n in enumerate([MIB, 4 * MIB, 10] + [5000] * 200)
            }
            expected = {name: t.cpu() for name, t in tensors.items()}
            placed = PlacedStorage(device, claims_of(tensors))
            placed.load()
            assert all(torch.equal(t.cpu(), expected[name]) for name, t in tensors.items())
            placed.offload()
            assert all(placed.contains(t) for t in tensors.values())
    finally:
        sys.setswitchinterval(interval)
        stop.set()
        for thread in threads:
            thread.join()
    assert min(made) > 0


def test_a_range_is_given_back_when_its_storages_are_dead(device: CudaDevice) -> None:
    allocated = device.torch_allocated_bytes()
    ranges = len(cuda_pool._ranges)
    tensors = {f"t{i}": torch.randn(MIB, device="cuda") for i in range(4)}
    placed = PlacedStorage(device, claims_of(tensors))
    placed.load()
    view = tensors["t2"][5:10]
    addresses = weakref.ref(placed.layout.addresses)
    base = placed.layout.addresses.base
    del placed, tensors
    gc.collect()
    assert device.memory().chunk_bytes > 0
    assert addresses() is not None  # one view keeps the storage, and the storage the range
    assert view.data_ptr() >= base
    assert bool(view.isfinite().all())
    del view
    after = device.memory()
    assert addresses() is None
    assert len(cuda_pool._ranges) == ranges
    assert (after.chunk_bytes, device.torch_allocated_bytes()) == (0, allocated)


@pytest.mark.parametrize("born", ["cuda", "cpu"])
@pytest.mark.parametrize("target", ["cuda", "cpu"])
def test_leaving_gives_the_same_tensors_ordinary_memory(
    device: CudaDevice, born: str, target: str
) -> None:
    tensors = {f"t{i}": torch.randn(n, device=born) for i, n in enumerate((3 * MIB, 1000))}
    tensors["view"] = tensors["t0"][100:200]
    expected = {name: t.cpu().clone() for name, t in tensors.items()}
    placed = PlacedStorage(device, claims_of(tensors))
    placed.load()
    where = torch.device("cuda", 0) if target == "cuda" else torch.device("cpu")
    for claim in claims_of(tensors):
        offset = claim.storage.data_ptr() - placed.layout.addresses.base
        source = placed.slab.view(offset, claim.nbytes)
        range_layout.move_out(device, claim.storage, claim.aliases, where, source, {})
    del claim
    addresses = weakref.ref(placed.layout.addresses)
    assert not any(placed.contains(t) for t in tensors.values())
    placed.offload()
    del placed
    gc.collect()
    device.memory()
    assert addresses() is None
    assert all(
        t.device.type == target and torch.equal(t.cpu(), expected[name])
        for name, t in tensors.items()
    )
    assert tensors["view"].untyped_storage()._cdata == tensors["t0"].untyped_storage()._cdata


def test_what_a_captured_graph_owns_is_refused(device: CudaDevice) -> None:
    static = torch.ones(1000, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made = static * 2
    with pytest.raises(RegistrationError, match="'made' lies in a private memory pool"):
        range_layout.RangeLayout(device, claims_of({"static": static, "made": made}))
    graph.replay()
    assert float(made.sum()) == 2000.0


def test_a_range_that_dies_during_a_capture_does_not_spoil_it(device: CudaDevice) -> None:
    tensor = torch.ones(1000)
    # rebound, so that the range dies with the tensor
    placed = PlacedStorage(device, claims_of({"tensor": tensor}))
    x = torch.full((8,), 3.0, device="cuda")
    ranges = len(device._ranges.owned)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = x * 2
        del tensor, placed
        assert len(device._ranges.owned) == ranges
    graph.replay()
    assert y.tolist() == [6.0] * 8
    gc.collect()
    device.memory()
    assert len(device._ranges.owned) == ranges - 1


def test_closing_gives_everything_back() -> None:
    # torch keeps two words for the random numbers of the first graph that a process captures
    first = CudaDevice(0, chunk_bytes=16 * MIB)
    first.unmap(first.reserve(16 * MIB), 16 * MIB)
    first.close()
    device = CudaDevice(0, chunk_bytes=16 * MIB)
    torch.cuda.synchronize()
    before, allocated = device.memory(), device.torch_allocated_bytes()
    addresses = device.reserve(40 * MIB)
    device.unmap(addresses, 40 * MIB)
    chunks = [device.create(16 * MIB), device.create(16 * MIB), device.create(8 * MIB)]
    device.map(addresses, chunks)
    assert (device.memory().chunk_bytes, device.memory().poison_bytes) == (
        40 * MIB,
        16 * MIB + device.granularity,
    )
    device.close()
    assert device.memory().poison_bytes > 0  # a range still lives
    del addresses, chunks
    device.close()
    after = device.memory()
    assert (device.torch_allocated_bytes(), after.chunk_bytes, after.poison_bytes) == (
        allocated,
        0,
        0,
    )
    # what watched over the poison
    cached = after.torch_reserved_bytes - before.torch_reserved_bytes
    assert after.free_bytes == before.free_bytes - cached


def test_nccl_hook_is_refused(device: CudaDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    if hasattr(torch.UntypedStorage, "_swap_data_ptr_"):
        pytest.skip("this torch swaps storages and needs no pool")
    monkeypatch.setenv("TORCH_NCCL_USE_TENSOR_REGISTER_ALLOCATOR_HOOK", "1")
    tensor = torch.ones(5, device="cuda")
    with pytest.raises(RegistrationError, match="ALLOCATOR_HOOK"):
        range_layout.RangeLayout(device, claims_of({"t": tensor}))
    assert tensor.tolist() == [1.0] * 5


SCRIPT = """
import os, sys
import torch
from placement.devices.cuda.device import CudaDevice
from placement.storage import layout as range_layout
device = CudaDevice(0)
kept = torch.full((3_000_000,), 7.0, device="cuda")
adoptee = range_layout.Adoptee("kept", kept.untyped_storage(), (kept,))
layout = range_layout.RangeLayout(device, [adoptee])
slab = device.host(layout.nbytes)
layout.move_in()
assert bool(kept.isnan().all())
chunk = device.create(layout.nbytes)
device.map(layout.addresses, [chunk])
kept.fill_(3.0)
if "fork" in sys.argv:
    child = os.fork()
    if child == 0:
        del kept, layout, slab, chunk, device
        import gc; gc.collect()
        sys.exit(7)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    assert float(kept.sum()) == 9_000_000.0
sys.exit(5)
"""


@pytest.mark.parametrize("argument", ["exit", "fork"])
@pytest.mark.parametrize("settings", ["", "expandable_segments:True"])
def test_the_exit_code_of_a_program_is_its_own(argument: str, settings: str) -> None:
    search = os.pathsep.join(
        [str(Path(__file__).parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])]
    )
    environment = {**os.environ, "PYTORCH_ALLOC_CONF": settings, "PYTHONPATH": search}
    if not settings:
        del environment["PYTORCH_ALLOC_CONF"]
    command = [sys.executable, "-X", "dev", "-c", SCRIPT, argument]
    result = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=100, check=False
    )
    assert result.returncode == 5, result.stderr
    assert "Exception ignored" not in result.stderr
