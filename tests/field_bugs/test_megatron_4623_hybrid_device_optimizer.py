"""Megatron-LM 4623 and 4910: HybridDeviceOptimizer, which moves its state by itself and replaces its inner optimizers at a load.

The real class of megatron-core, on a CPU where marked tensors say that they are of CUDA (`pretend_cuda`): fractions, copies, hooks and
inner optimizers are its own.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import placement
from placement import CheckpointError, Manager, PhaseError
from placement.testing import SimulatedDevice, assert_nothing_resident
from tests.sharded.pretend_cuda import mark, pretend_cuda
from tests.sharded.training import as_bytes
from tests.support.frameworks import needs

cpu_offloading = needs("megatron.core.optimizer.cpu_offloading")

FRACTIONS = (0.0, 0.5, 1.0)


@pytest.fixture(autouse=True)
def _pretend() -> Iterator[None]:
    with pretend_cuda(only_marked=True):
        yield


class OnDeviceAdam(torch.optim.AdamW):
    """The optimizer tells devices apart by the class of the inner ones, so those for device and CPU must differ."""


class OnDeviceSGD(torch.optim.SGD):
    """See above."""


def net(dtype: torch.dtype = torch.bfloat16) -> torch.nn.Sequential:
    torch.manual_seed(0)
    linear = torch.nn.Linear
    model = torch.nn.Sequential(linear(24, 48), torch.nn.ReLU(), linear(48, 24), torch.nn.ReLU(), linear(24, 8)).to(dtype)
    for parameter in model.parameters():
        mark(parameter)
    return model


def make(model: torch.nn.Module, fraction: float = 0.5, *, overlap: bool = True, in_fp32: bool = True, sgd: bool = False) -> Any:
    cls = torch.optim.SGD if sgd else torch.optim.AdamW
    options: dict[str, Any] = {"momentum": 0.9} if sgd else {}
    return cpu_offloading.HybridDeviceOptimizer(
        list(model.parameters()),
        offload_fraction=fraction,
        cpu_optimizer_cls=cls,
        gpu_optimizer_cls=OnDeviceSGD if sgd else OnDeviceAdam,
        overlap_cpu_optimizer_d2h_h2d=overlap,
        param_update_in_fp32=in_fp32,
        pin_cpu_grads=False,
        lr=1e-2,
        **options,
    )


def learn(model: torch.nn.Module, optimizer: Any, number: int) -> bytes:
    dtype = next(model.parameters()).dtype
    loss = model(torch.randn(4, 24, generator=torch.Generator().manual_seed(number)).to(dtype)).float().square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return as_bytes(loss)


def state(model: torch.nn.Module, optimizer: Any) -> list[Any]:
    entries = [optimizer.state[parameter] for parameter in model.parameters()]
    return [{key: as_bytes(v) if isinstance(v, torch.Tensor) else v for key, v in entry.items()} for entry in entries]


@pytest.mark.parametrize("fraction", FRACTIONS)
@pytest.mark.parametrize(("overlap", "sgd", "in_fp32"), [(False, False, True), (True, False, False), (True, True, True)])
def test_the_model_moves_between_steps_and_the_optimizer_is_left_alone(fraction: float, overlap: bool, sgd: bool, in_fp32: bool) -> None:
    options = {"overlap": overlap, "sgd": sgd, "in_fp32": in_fp32}
    model = net()
    optimizer = make(model, fraction, **options)
    losses = [learn(model, optimizer, number) for number in range(6)]
    expected = [as_bytes(parameter) for parameter in model.parameters()], state(model, optimizer)

    model = net()
    optimizer = make(model, fraction, **options)
    manager = Manager(device=SimulatedDevice(8 << 20, chunk_bytes=4096))
    actor = manager.register("actor", model, role="actor")
    handle = manager.register("actor.optimizer", optimizer)
    assert (handle.external, handle.owners, actor.external) == (True, (actor,), False)
    places = {id(t): t.data_ptr() for t in (*optimizer.param_to_fp32_param.values(), *optimizer.gpu_params_map_cpu_copy.values())}
    seen = []
    for number in range(6):
        with manager.phase("train"):
            seen.append(learn(model, optimizer, number))
        assert (actor.resident_bytes, handle.host_bytes) == (0, 0)
        assert_nothing_resident(manager)
    assert seen == losses
    assert {id(t): t.data_ptr() for t in (*optimizer.param_to_fp32_param.values(), *optimizer.gpu_params_map_cpu_copy.values())} == places
    with pytest.raises(PhaseError, match=r"actor\.optimizer|actor"), manager.phase("log_prob"):
        optimizer.step()
    manager.close()
    assert ([as_bytes(parameter) for parameter in model.parameters()], state(model, optimizer)) == expected


def test_what_is_inside_is_enumerated_anew_after_a_load_and_the_step_stays_guarded() -> None:
    model = net()
    optimizer = make(model)
    manager = Manager(device=SimulatedDevice(8 << 20, chunk_bytes=4096))
    manager.register("actor", model, role="actor")
    handle = manager.register("actor.optimizer", optimizer)
    with manager.phase("train"):
        learn(model, optimizer, 0)
    saved = copy.deepcopy(optimizer.state_dict())
    assert handle.adapter is not None
    before = {id(owned.tensor) for owned in handle.adapter.owned()}
    with manager.phase("restore"):
        keep = list(handle.adapter.owned())  # so that no identity is given out a second time
        optimizer.load_state_dict(saved)
    after = list(handle.adapter.owned())
    inside = [t for sub in optimizer.sub_optimizers for entry in sub.state.values() for t in entry.values() if isinstance(t, torch.Tensor)]
    assert {id(t) for t in inside} <= {id(owned.tensor) for owned in after}
    assert not {id(t) for t in inside} & before
    assert len(after) == len({id(owned.tensor) for owned in after})
    del keep
    with pytest.raises(placement.PlacementError, match="actor"):
        optimizer.step()
    manager.register("another", torch.nn.Linear(2, 2))  # no identity of the old inner optimizers stands in the way
    with manager.phase("train"):
        learn(model, optimizer, 1)
    assert manager.audit().ok


def test_its_checkpoint_is_left_to_its_framework(tmp_path: Path) -> None:
    """Its own `load_state_dict` makes new inner optimizers, and a part of its state is in their groups."""
    model = net()
    optimizer = make(model)
    manager = Manager(device=SimulatedDevice(8 << 20, chunk_bytes=4096))
    manager.register("actor", model, role="actor")
    manager.register("actor.optimizer", optimizer)
    with manager.phase("train"):
        learn(model, optimizer, 0)
    expected = [as_bytes(parameter) for parameter in manager.handles["actor"].state_dict().values()]
    with pytest.raises(CheckpointError, match=r"actor\.optimizer.*HybridDeviceOptimizer.*framework's checkpoint.*only="):
        placement.checkpoint.save(manager, tmp_path / "all")
    placement.checkpoint.save(manager, tmp_path / "checkpoint", only=["actor"])
    with pytest.raises(CheckpointError, match=r"HybridDeviceOptimizer.*framework's checkpoint"):
        placement.checkpoint.load(manager, tmp_path / "checkpoint", only=["actor.optimizer"])
    with manager.phase("train"):
        learn(model, optimizer, 1)
    placement.checkpoint.load(manager, tmp_path / "checkpoint", only=["actor"])
    assert [as_bytes(parameter) for parameter in manager.handles["actor"].state_dict().values()] == expected
