"""The whole manager on a real device: what comes back to the driver, what a loss becomes, what
compiled and captured code sees."""

from __future__ import annotations

import gc
import random
from collections.abc import Iterator

import pytest
import torch
from torch import nn

import placement
from placement.devices.cuda.device import CudaDevice
from placement.devices.memory import Copy
from placement.policies import Resident
from tests.contract.growing import SIDES, Scene, sizes
from tests.group.part_worker import little_left
from tests.sharded.training import as_bytes

pytestmark = pytest.mark.gpu

MIB, GIB = 1 << 20, 1 << 30


class Net(nn.Module):
    def __init__(self, width: int = 512, vocabulary: int = 1000) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.norm = nn.BatchNorm1d(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.embed.weight
        self.scale = torch.full((1,), 0.5)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(self.embed(ids) * self.scale)
        logits: torch.Tensor = self.head(hidden + self.down(torch.relu(self.up(hidden))))
        return logits


def build(device: str = "cuda") -> Net:
    torch.manual_seed(1)
    net = Net().to(device)
    net.scale = net.scale.to(device)
    return net


def batches(steps: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator("cuda").manual_seed(2)
    for _ in range(steps):
        ids = torch.randint(0, 1000, (64, 2), device="cuda", generator=generator)
        yield ids[:, 0], ids[:, 1]


def train_step(
    forward: nn.Module, optimizer: torch.optim.Optimizer, ids: torch.Tensor, targets: torch.Tensor
) -> float:
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(forward(ids), targets)
    loss.backward()
    optimizer.step()
    return loss.item()


def test_a_device_tells_how_long_its_work_waited_for_bytes() -> None:
    device = CudaDevice()
    nbytes = device.chunk_bytes
    addresses, chunk, slab = device.reserve(nbytes), device.create(nbytes), device.host(nbytes)
    device.map(addresses, [chunk])
    assert slab.ready.wait(60)
    for _ in range(2):
        device.copy([Copy(addresses.base, slab.address, nbytes)], "to_device")
        device.order("to_device")
        device.order()  # waits for nothing more
        device.sync()
        assert device.waited_seconds() > 0
        assert device.waited_seconds() == 0
    device.unmap(addresses, nbytes)
    device.release(chunk)


def test_offloads_give_the_driver_its_bytes_back_exactly(manager: placement.Manager) -> None:
    nets = {name: build() for name in ("actor", "ref", "critic")}
    for name, net in nets.items():
        manager.register(name, net, role=name, readonly=name == "ref")
    optimizer = torch.optim.AdamW(nets["actor"].parameters(), fused=True)
    manager.register("actor.optimizer", optimizer)
    data = next(batches(1))
    for _ in range(2):  # cuBLAS takes its workspace and the optimizer its state
        with manager.phase("train"):
            train_step(nets["actor"], optimizer, *data)

    def outside_torch() -> int:
        """Device bytes in use that torch's own allocator does not hold."""
        memory = manager.device.memory()
        return memory.used_bytes - memory.torch_reserved_bytes

    empty = outside_torch()
    for phase in ("train", "log_prob", "values") * 3:
        with manager.phase(phase):
            held = manager.device.memory().chunk_bytes
            assert held == sum(
                handle.resident_bytes - handle.holding.unadopted_bytes
                for handle in manager.handles.values()
                if handle.holding
            )
            assert held > 0
            assert outside_torch() == empty + held
            if phase == "train":
                train_step(nets["actor"], optimizer, *data)
        assert manager.device.memory().chunk_bytes == 0
        assert outside_torch() == empty


def test_registering_a_model_from_the_cpu_puts_none_of_its_bytes_on_the_device(
    manager: placement.Manager,
) -> None:
    first = build("cpu")
    manager.register("first", first, role="ref")  # the device takes its context and poison
    device = manager.device
    before = (device.memory().used_bytes, device.torch_allocated_bytes())
    net = build("cpu")
    handle = manager.register("second", net, role="critic")
    assert (device.memory().used_bytes, device.torch_allocated_bytes()) == before
    assert handle.state is placement.State.CPU_OFFLOADED
    assert handle.host_bytes >= sum(p.nbytes for p in net.parameters())


def test_registering_a_model_on_the_device_peaks_at_one_storage_more(
    manager: placement.Manager,
) -> None:
    first = build("cpu")
    manager.register("first", first, role="ref")
    net = nn.Sequential(*(nn.Linear(2048, 2048, bias=False) for _ in range(8))).cuda()
    largest = 2048 * 2048 * 4
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    before = manager.device.memory()
    torch.cuda.reset_peak_memory_stats()
    base = torch.cuda.memory_allocated()
    manager.register("actor", net, role="actor")
    assert torch.cuda.max_memory_allocated() - base <= 8 * largest + 2 * largest, (
        "pool memory counts as allocated while it is adopted"
    )
    after = manager.device.memory()
    # One weight may lie in a segment that torch keeps, beside what tests before this one have left.
    assert before.used_bytes - after.used_bytes >= 7 * largest
    assert after.chunk_bytes == 0


@pytest.mark.parametrize("end", ["close", "unregister", "collected"])
def test_handles_that_end_on_the_device_keep_their_values(end: str) -> None:
    """Copies of gigabytes take long enough to be still running when the memory that they read
    goes."""
    torch.cuda.empty_cache()
    manager = placement.Manager(device="cuda:0", policy=Resident())
    net = nn.ModuleList(nn.Linear(8192, 8192, bias=False, device="cuda") for _ in range(24))
    with torch.no_grad():
        for number, parameter in enumerate(net.parameters()):
            parameter.fill_(number)
    manager.register("actor", net, role="actor")
    with manager.phase("train"):
        pass
    assert manager.handles["actor"].state is placement.State.GPU_RESIDENT
    if end == "close":
        manager.close()
    elif end == "unregister":
        manager.unregister("actor")
    else:
        del manager
        gc.collect()
    for number, parameter in enumerate(net.parameters()):
        assert parameter.is_cuda
        assert bool((parameter == number).all())


@pytest.mark.parametrize(
    "options", [{"fused": True}, {"foreach": True}, {"capturable": True, "foreach": True}], ids=str
)
@pytest.mark.parametrize("born", ["cpu", "cuda"])
def test_losses_are_bit_identical_over_20_steps(
    manager: placement.Manager, options: dict[str, bool], born: str
) -> None:
    plain = build()
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-3, **options)
    expected = [train_step(plain, optimizer, *batch) for batch in batches(20)]

    managed = build(born)
    managed_optimizer = torch.optim.AdamW(managed.parameters(), lr=1e-3, **options)
    manager.register("actor", managed, role="actor")
    manager.register("actor.optimizer", managed_optimizer)
    losses = []
    for batch in batches(20):
        with manager.phase("train"):
            losses.append(train_step(managed, managed_optimizer, *batch))
    assert losses == expected
    with manager.phase("log_prob"):
        for mine, theirs in zip(managed.parameters(), plain.parameters(), strict=True):
            assert torch.equal(mine.view(torch.uint8), theirs.view(torch.uint8))


def test_a_graph_captured_before_a_cycle_replays_right_after_it(manager: placement.Manager) -> None:
    net = build().eval()
    manager.register("actor", net, role="actor")
    ids = next(batches(1))[0]
    with manager.phase("log_prob"), torch.no_grad():
        warm = torch.cuda.Stream()
        warm.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(warm):
            expected = net(ids).clone()
        torch.cuda.current_stream().wait_stream(warm)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            output = net(ids)
            with pytest.raises(placement.PhaseError, match="captured"):
                manager.phase("eval").__enter__()
    for _ in range(3):
        with manager.phase("log_prob"):
            output.zero_()
            graph.replay()
            assert torch.equal(output, expected)


def test_memory_that_another_holds_is_a_python_error_and_the_next_phase_succeeds(
    manager: placement.Manager,
) -> None:
    net = nn.Linear(8192, 8192, bias=False)
    expected = net.weight.detach().clone()
    handle = manager.register("actor", net, role="actor")
    with little_left(manager.device, 160 * MIB), pytest.raises(placement.DeviceMemoryError):
        manager.enter("log_prob")
    assert handle.state is placement.State.CPU_OFFLOADED
    assert manager.device.memory().chunk_bytes == 0
    with manager.phase("log_prob"):
        assert torch.equal(net.weight.cpu(), expected)


def test_many_handles_that_grow_swap_every_bit() -> None:
    torch.cuda.empty_cache()
    device = CudaDevice(0, chunk_bytes=4 * MIB)
    chance, drawn = random.Random(0), sizes(device.granularity // 8, device.chunk_bytes // 2)
    names = [f"{side}.{index}" for side in SIDES for index in range(40)]
    scene = Scene(device, {name: chance.choices(drawn, k=2) for name in names}, names[::3])
    for _ in range(3):
        with scene.manager.phase(SIDES[0]) as phase:
            scene.check(SIDES[0])
            scene.grow(SIDES[0], chance, drawn)
            phase.switch(SIDES[1])
            scene.check(SIDES[1])
            scene.grow(SIDES[1], chance, drawn)
        scene.check(None)
    assert sum(each.num_ranges for each in scene.all.values()) > 200
    scene.leave()
    assert device.memory().chunk_bytes == 0


def test_a_model_that_fits_once_is_handed_back_on_the_device(manager: placement.Manager) -> None:
    """Two thirds of what is free: there is no room for the values twice."""
    free, _ = torch.cuda.mem_get_info()
    ballast = torch.empty(free - 9 * GIB, dtype=torch.uint8, device="cuda")
    with torch.device("cuda"):
        layers = [nn.Linear(8192, 8192, bias=False, dtype=torch.bfloat16) for _ in range(48)]
    model = nn.Sequential(*layers)  # 6 GiB
    before = [as_bytes(layers[index].weight.detach().cpu()) for index in (0, 24, 47)]
    manager.register("actor", model, role="actor")
    torch.cuda.empty_cache()
    manager.unregister("actor", on_device=True)
    assert {parameter.device.type for parameter in model.parameters()} == {"cuda"}
    assert [as_bytes(layers[index].weight.detach().cpu()) for index in (0, 24, 47)] == before
    del ballast


def test_dropped_gradients_give_their_memory_back_in_the_phase() -> None:
    device = CudaDevice(0, chunk_bytes=2 * MIB)
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(1024, 1024, bias=False) for _ in range(8)]).cuda()  # 32 MiB
    optimizer = torch.optim.AdamW(model.parameters())
    manager = placement.Manager(device=device)
    actor = manager.register("actor", model, role="actor")
    manager.register("actor.optimizer", optimizer)
    for step in range(3):
        with manager.phase("train"):
            held = device.memory().chunk_bytes
            optimizer.zero_grad()
            given_back = held - device.memory().chunk_bytes
            assert given_back == (32 * MIB if step else 0)
            model(torch.randn(4, 1024, device="cuda")).square().mean().backward()
            optimizer.step()
        assert actor.resident_bytes == 0
    manager.check_integrity()
    manager.close()
