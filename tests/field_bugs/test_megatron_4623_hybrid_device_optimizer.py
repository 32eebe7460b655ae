"""Megatron-LM 4623 and 4910: HybridDeviceOptimizer, its state in checkpoints, and DTensors.

The real class of megatron-core, on a CPU where marked tensors say that they are of CUDA
(`pretend_cuda`): fractions, copies, hooks and inner optimizers are its own. With DTensors it cannot
be built in 0.16.1 (`pin_memory` of a DTensor fails); for those its shape is used.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import placement
from placement import Manager, PhaseError
from placement.frameworks.megatron import HybridState
from placement.testing import SimulatedDevice, assert_nothing_resident
from tests.sharded.pretend_cuda import mark, pretend_cuda
from tests.sharded.training import as_bytes, bytes_of
from tests.support.frameworks import needs
from tests.support.ranks import no_collectives, on_ranks

cpu_offloading = needs("megatron.core.optimizer.cpu_offloading")


@pytest.fixture(autouse=True)
def _pretend() -> Iterator[None]:
    with pretend_cuda(only_marked=True):
        yield


class OnDeviceAdam(torch.optim.AdamW):
    """The optimizer tells devices apart by the class of the inner ones, so those for device and CPU
    must differ."""


class OnDeviceSGD(torch.optim.SGD):
    """See above."""


def net(dtype: torch.dtype = torch.bfloat16) -> torch.nn.Sequential:
    torch.manual_seed(0)
    linear = torch.nn.Linear
    model = torch.nn.Sequential(
        linear(24, 48), torch.nn.ReLU(), linear(48, 24), torch.nn.ReLU(), linear(24, 8)
    ).to(dtype)
    for parameter in model.parameters():
        mark(parameter)
    return model


def make(
    model: torch.nn.Module,
    fraction: float = 0.5,
    *,
    overlap: bool = True,
    in_fp32: bool = True,
    sgd: bool = False,
) -> Any:
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


def learn(model: torch.nn.Module, optimizer: Any, number: int, *, skip: int | None = None) -> bytes:
    """A training step; parameter `skip` gets no gradient."""
    dtype = next(model.parameters()).dtype
    loss = (
        model(torch.randn(4, 24, generator=torch.Generator().manual_seed(number)).to(dtype))
        .float()
        .square()
        .mean()
    )
    loss.backward()
    if skip is not None:
        list(model.parameters())[skip].grad = None
    optimizer.step()
    optimizer.zero_grad()
    return as_bytes(loss)


def state(optimizer: Any) -> list[Any]:
    entries = HybridState(optimizer).exported().values()
    return [
        {key: as_bytes(v) if isinstance(v, torch.Tensor) else v for key, v in entry.items()}
        for entry in entries
    ]


@pytest.mark.parametrize(
    ("fraction", "overlap", "sgd", "in_fp32"),
    [
        pytest.param(0.0, False, False, True, marks=pytest.mark.sweep),
        (0.5, True, True, True),
        pytest.param(0.5, False, False, True, marks=pytest.mark.sweep),
        (1.0, True, False, False),
    ],
)
def test_the_model_moves_between_steps_and_the_optimizer_is_left_alone(
    fraction: float, overlap: bool, sgd: bool, in_fp32: bool
) -> None:
    options = {"overlap": overlap, "sgd": sgd, "in_fp32": in_fp32}
    model = net()
    optimizer = make(model, fraction, **options)
    losses = [learn(model, optimizer, number) for number in range(6)]
    expected = [as_bytes(parameter) for parameter in model.parameters()], state(optimizer)

    model = net()
    optimizer = make(model, fraction, **options)
    manager = Manager(device=SimulatedDevice(8 << 20, chunk_bytes=4096))
    actor = manager.register("actor", model, role="actor")
    handle = manager.register("actor.optimizer", optimizer)
    assert (handle.external, handle.owners, actor.external) == (True, (actor,), False)
    places = {
        id(t): t.data_ptr()
        for t in (
            *optimizer.param_to_fp32_param.values(),
            *optimizer.gpu_params_map_cpu_copy.values(),
        )
    }
    seen = []
    for number in range(6):
        with manager.phase("train"):
            seen.append(learn(model, optimizer, number))
        assert (actor.resident_bytes, handle.host_bytes) == (0, 0)
        assert_nothing_resident(manager)
    assert seen == losses
    assert {
        id(t): t.data_ptr()
        for t in (
            *optimizer.param_to_fp32_param.values(),
            *optimizer.gpu_params_map_cpu_copy.values(),
        )
    } == places
    with pytest.raises(PhaseError, match=r"actor\.optimizer|actor"), manager.phase("log_prob"):
        optimizer.step()
    manager.close()
    assert ([as_bytes(parameter) for parameter in model.parameters()], state(optimizer)) == expected


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
    inside = [
        t
        for sub in optimizer.sub_optimizers
        for entry in sub.state.values()
        for t in entry.values()
        if isinstance(t, torch.Tensor)
    ]
    assert {id(t) for t in inside} <= {id(owned.tensor) for owned in after}
    assert not {id(t) for t in inside} & before
    assert len(after) == len({id(owned.tensor) for owned in after})
    del keep
    with pytest.raises(placement.PlacementError, match="actor"):
        optimizer.step()
    # no identity of the old inner optimizers stands in the way
    manager.register("another", torch.nn.Linear(2, 2))
    with manager.phase("train"):
        learn(model, optimizer, 1)
    assert manager.audit().ok


def test_the_order_is_that_of_the_parameters_and_no_state_says_so() -> None:
    """Its own state comes in the order of the inner optimizers: what is stepped on the CPU
    first."""
    model = net()
    optimizer = make(model, 0.5)
    assert [len(entry) for entry in HybridState(optimizer).exported().values()] == [0] * 6
    assert not optimizer.state, "asking created entries"
    learn(model, optimizer, 0, skip=2)
    exported = HybridState(optimizer).exported()
    parameters = list(model.parameters())
    assert [id(each) for each in exported] == [id(each) for each in parameters]
    assert [bool(entry) for entry in exported.values()] == [True, True, False, True, True, True]
    other = make(net(), 1.0)
    assert [id(each) for each in HybridState(other).exported()] == [
        id(each) for group in other.param_groups for each in group["params"]
    ]


@pytest.mark.parametrize(
    ("fraction", "in_fp32", "steps", "skip"),
    [
        (0.0, True, 3, None),
        (0.0, False, 3, 2),
        (0.5, False, 0, None),
        (0.5, True, 3, 2),
        (1.0, True, 0, None),
        (1.0, False, 3, None),
    ],
)
def test_what_was_exported_resumes_bit_for_bit(
    fraction: float, in_fp32: bool, steps: int, skip: int | None
) -> None:
    """From before the first step, and with a parameter that never had a gradient: its own load
    raises KeyError for both."""
    model = net()
    optimizer = make(model, fraction, in_fp32=in_fp32)
    for number in range(steps):
        learn(model, optimizer, number, skip=skip)
    weights = copy.deepcopy(model.state_dict())
    saved = [copy.deepcopy(entry) for entry in HybridState(optimizer).exported().values()]
    groups = [
        copy.deepcopy(HybridState(optimizer).settings(group)) for group in optimizer.param_groups
    ]
    expected = [learn(model, optimizer, number, skip=skip) for number in range(steps, steps + 4)]

    fresh = net()
    with torch.no_grad():
        for parameter in fresh.parameters():
            parameter.mul_(3.0)
    resumed = make(fresh, fraction, in_fp32=in_fp32)
    learn(fresh, resumed, 99)  # other state is there, which has to go
    inner = [id(each) for each in (*resumed.sub_optimizers, *resumed.param_to_inner_param.values())]
    fresh.load_state_dict(weights)
    HybridState(resumed).restore(dict(zip(fresh.parameters(), saved, strict=True)), groups)
    assert [
        id(each) for each in (*resumed.sub_optimizers, *resumed.param_to_inner_param.values())
    ] == inner
    assert [
        learn(fresh, resumed, number, skip=skip) for number in range(steps, steps + 4)
    ] == expected
    assert state(resumed) == state(optimizer)


def test_a_step_that_is_counted_by_group_is_state_and_a_stale_one_goes() -> None:
    """FusedAdam of TransformerEngine counts in its groups. A stale count breaks the bias
    correction: loss 0.31 becomes 10 (SkyRL 1403)."""
    model = net()
    optimizer = make(model, 0.0)
    learn(model, optimizer, 0)
    (inner,) = optimizer.sub_optimizers
    inner.param_groups[0]["step"] = 17
    for entry in inner.state.values():
        del entry["step"]
    exported = HybridState(optimizer).exported()
    assert {entry["step"] for entry in exported.values()} == {17}
    inner.__class__ = type("FusedAdam", (OnDeviceAdam,), {"step": lambda self, closure=None: None})
    optimizer.param_groups[0]["step"] = 3
    inner.param_groups[0]["step"] = 0
    HybridState(optimizer).restore(
        exported, [HybridState(optimizer).settings(group) for group in optimizer.param_groups]
    )
    optimizer._sync_hdo_param_groups_to_sub_optimizers()
    assert inner.param_groups[0]["step"] == 17
    assert all("step" not in entry for entry in inner.state.values())


def test_settings_hold_no_classes() -> None:
    """They leak into its groups, and `torch.load(weights_only=True)` refuses the file."""
    optimizer = make(net())
    assert any(isinstance(value, type) for value in optimizer.param_groups[0].values())
    assert not any(
        isinstance(value, type)
        for value in HybridState(optimizer).settings(optimizer.param_groups[0]).values()
    )
    assert HybridState(optimizer).settings(optimizer.param_groups[0])["lr"] == 1e-2


def test_a_checkpoint_of_placement_resumes_it(tmp_path: Path) -> None:
    def start() -> tuple[torch.nn.Module, Any, Manager]:
        model = net()
        optimizer = make(model)
        manager = Manager(device=SimulatedDevice(8 << 20, chunk_bytes=4096))
        manager.register("actor", model, role="actor")
        manager.register("actor.optimizer", optimizer)
        return model, optimizer, manager

    model, optimizer, manager = start()
    for number in range(3):
        with manager.phase("train"):
            learn(model, optimizer, number, skip=2)
    placement.checkpoint.save(manager, tmp_path / "checkpoint")
    expected = []
    for number in range(3, 6):
        with manager.phase("train"):
            expected.append(learn(model, optimizer, number, skip=2))
    resumed, other, another = start()
    with another.phase("restore"):
        placement.checkpoint.load(another, tmp_path / "checkpoint")
    seen = []
    for number in range(3, 6):
        with another.phase("train"):
            seen.append(learn(resumed, other, number, skip=2))
    assert seen == expected
    assert state(other) == state(optimizer)


class Hybrid(torch.optim.Optimizer):
    """The shape of a HybridDeviceOptimizer over DTensors, as in the pull request: inner copies and
    state are plain local tensors."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 1e-2})
        self.param_to_inner_param = {
            p: p._local_tensor.detach().clone().float()
            for group in self.param_groups
            for p in group["params"]
        }
        self.inner_param_to_orig_param = {
            inner: p for p, inner in self.param_to_inner_param.items()
        }
        self.param_to_fp32_param, self.gpu_params_map_cpu_copy = self.param_to_inner_param, {}
        self.cpu_copy_map_grad: dict[torch.Tensor, torch.Tensor] = {}
        self.sub_optimizers = [
            torch.optim.AdamW(
                [inner for inner in self.param_to_inner_param.values() if inner.numel()], lr=1e-2
            )
        ]

    def step(self, closure: Any = None) -> None:
        for parameter, inner in self.param_to_inner_param.items():
            inner.grad = None if parameter.grad is None else parameter.grad._local_tensor.float()
        self.sub_optimizers[0].step()
        for parameter, inner in self.param_to_inner_param.items():
            parameter._local_tensor.data.copy_(inner.data)
        self._sync_sub_optimizers_state_to_hdo()

    def _sync_sub_optimizers_state_to_hdo(self) -> None:
        self.state.clear()
        for inner, entry in self.sub_optimizers[0].state.items():
            self.state[self.inner_param_to_orig_param[inner]] = entry
            entry["master_param"] = inner


@on_ranks("two_ranks")
def test_sharded_state_is_sharded_as_its_parameter_without_a_collective() -> None:
    """A rank without elements has an empty entry of the same name in the same place. Same shape:
    see the module's docstring."""
    from torch.distributed.tensor import DTensor, Shard, distribute_tensor, init_device_mesh

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    torch.manual_seed(0)
    # Of the second one rank has nothing: 1 row for two ranks.
    parameters = [
        torch.nn.Parameter(distribute_tensor(torch.randn(rows, 6), mesh, [Shard(0)]))
        for rows in (5, 1)
    ]
    optimizer: Any = Hybrid(parameters)
    for parameter in parameters:
        ones = torch.ones_like(parameter._local_tensor)
        form = {"shape": parameter.shape, "stride": parameter.stride()}
        parameter.grad = DTensor.from_local(ones, mesh, [Shard(0)], run_check=False, **form)
    optimizer.step()
    with no_collectives():
        first, second = exported = [*HybridState(optimizer).exported().values()]
    assert sorted(first) == ["exp_avg", "exp_avg_sq", "master_param", "step"]
    for name in ("exp_avg", "exp_avg_sq"):
        assert isinstance(first[name], DTensor)
        assert first[name].shape == (5, 6)
    assert len(second) == (4 if dist.get_rank() == 0 else 0)
    before = bytes_of([*optimizer.param_to_inner_param.values()])
    saved = copy.deepcopy(exported)
    optimizer.step()
    settings = [HybridState(optimizer).settings(group) for group in optimizer.param_groups]
    HybridState(optimizer).restore(dict(zip(parameters, saved, strict=True)), settings)
    assert bytes_of([*optimizer.param_to_inner_param.values()]) == before
    (inner,) = optimizer.sub_optimizers
    for found, wanted in zip(inner.state.values(), filter(None, saved), strict=True):
        for name in ("exp_avg", "exp_avg_sq"):
            assert as_bytes(found[name]) == as_bytes(wanted[name]._local_tensor)
