"""Steps that stream their state on a real device: the ordinary step's bytes, bounded memory, both
directions at once."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import nn

import placement
from bench._sampler import sampled
from placement.policies import Colocated
from placement.testing import assert_nothing_resident
from tests.support.buckets import set_bucket_bytes
from tests.support.worker import assert_same

pytestmark = pytest.mark.gpu

MIB = 1 << 20
BUCKET_BYTES = 32 * MIB
WIDTH = 1024
LAYERS = 24

STEPPED: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "AdamW": lambda p: torch.optim.AdamW(p, lr=1e-3),
    "AdamW, for-loop": lambda p: torch.optim.AdamW(p, lr=1e-3, foreach=False),
    "AdamW, fused": lambda p: torch.optim.AdamW(p, lr=1e-3, fused=True),
    "AdamW, capturable, tensor lr": lambda p: torch.optim.AdamW(
        p, lr=torch.tensor(1e-3, device="cuda"), capturable=True
    ),
    "Adam, amsgrad": lambda p: torch.optim.Adam(p, lr=1e-3, amsgrad=True),
    "SGD, momentum": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9),
    "SGD, momentum, fused": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9, fused=True),
}


def build(layers: int = LAYERS) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(layers))).cuda()


def assert_equal_to(
    manager: placement.Manager, plain: nn.Module, optimizer: torch.optim.Optimizer
) -> None:
    def on_host(values: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {key: value.cpu() for key, value in values.items()}

    actor, adam = (manager.handles[name].state_dict() for name in ("actor", "adam"))
    assert_same(on_host(actor), on_host(plain.state_dict()))
    for index, entry in optimizer.state_dict()["state"].items():
        assert_same(on_host(adam["state"][index]), on_host(entry))
    assert_nothing_resident(manager)
    manager.close()


@pytest.mark.parametrize("name", STEPPED)
def test_five_steps_are_those_of_the_optimizer_alone(name: str) -> None:
    net = build()
    plain = copy.deepcopy(net)
    optimizers = STEPPED[name](net.parameters()), STEPPED[name](plain.parameters())
    set_bucket_bytes(BUCKET_BYTES)
    manager = placement.Manager(device="cuda:0", policy=Colocated("streamed"))
    manager.register("actor", net, role="actor")
    manager.register("adam", optimizers[0])
    for step in range(5):
        batch = torch.randn(
            8, WIDTH, device="cuda", generator=torch.Generator("cuda").manual_seed(step)
        )
        with manager.phase("train"):
            for _ in range(1 + step // 2):
                for model, optimizer in zip((net, plain), optimizers, strict=True):
                    optimizer.zero_grad()
                    model(batch).square().mean().backward()
                    optimizer.step()
                batch = batch + 1
    assert_equal_to(manager, plain, optimizers[1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", STEPPED)
def test_slices_of_a_large_parameter_are_the_whole_step(name: str, dtype: torch.dtype) -> None:
    """Its size is odd, so that kernels take other elements together in slices than in the whole."""
    from placement.devices.cuda.device import CudaDevice

    torch.manual_seed(0)
    nets = [
        nn.ParameterList(
            [
                nn.Parameter(torch.randn(size, device="cuda").to(dtype))
                for size in (37, 24_000_001, 5)
            ]
        )
    ]
    nets.append(copy.deepcopy(nets[0]))
    optimizers = [STEPPED[name](net.parameters()) for net in nets]
    device = CudaDevice(0, chunk_bytes=BUCKET_BYTES // 4)
    set_bucket_bytes(BUCKET_BYTES // 2)
    manager = placement.Manager(device=device, policy=Colocated("streamed"))
    manager.register("actor", nets[0], role="actor")
    handle = manager.register("adam", optimizers[0])
    for step in range(4):
        with manager.phase("train"):
            draw = torch.Generator("cuda").manual_seed(step)
            for ours, plain in zip(*nets, strict=True):
                gradient = torch.randn(plain.shape, generator=draw, device="cuda").to(dtype)
                ours.grad, plain.grad = gradient.clone(), gradient
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    assert handle.streamed is not None
    assert len(handle.streamed.parts_of(optimizers[0], nets[0][1])) > 2
    assert handle.window_bytes < 3 * BUCKET_BYTES
    assert_equal_to(manager, nets[1], optimizers[1])


def test_the_first_step_and_the_next_stay_within_the_window() -> None:
    """By the driver: torch counts the addresses of offloaded state as allocated where a pool of its
    allocator has them."""
    from placement.devices.cuda.device import CudaDevice

    net = build(layers=4 * LAYERS)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3, fused=True)
    device = CudaDevice(0, chunk_bytes=BUCKET_BYTES // 2)
    set_bucket_bytes(BUCKET_BYTES)
    manager = placement.Manager(device=device, policy=Colocated("streamed"))
    manager.register("actor", net, role="actor")
    handle = manager.register("adam", optimizer)
    for _ in range(3):
        with manager.phase("train"):
            net(torch.ones(8, WIDTH, device="cuda")).square().mean().backward()
            torch.cuda.synchronize()
            held_bytes = manager.device.memory().used_bytes
            with sampled(f"GPU-{torch.cuda.get_device_properties(0).uuid}") as peak:
                optimizer.step()
            assert peak.samples > 3
            # a window, what torch's allocator takes at once, and the code of the kernels
            assert peak.rise_bytes <= 5 * BUCKET_BYTES
            assert manager.device.memory().used_bytes <= held_bytes + 4 * MIB
            optimizer.zero_grad()
    assert handle.streamed is not None
    assert handle.window_bytes <= 3 * BUCKET_BYTES
    assert handle.num_bytes > 20 * BUCKET_BYTES
    manager.close()
