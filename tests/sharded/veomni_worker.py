"""VeOmni's shape of expert parallelism: experts and the rest sharded by FSDP2 over two meshes, each stepped by an optimizer of its own.

The optimizer that holds both is VeOmni's own class. Its package needs more than is installed here, so only the parts are imported
that the class itself needs.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard

from placement import NotResidentError, PhaseError
from placement.testing import SimulatedDevice, assert_nothing_resident
from tests.sharded import training
from tests.support.worker import make_manager

WIDTH, EXPERTS = 12, 4


def is_installed(package: str = "veomni") -> bool:
    """Whether a package is there, without importing it, and also where another test put a stub in its place."""
    try:
        importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def veomni(module: str) -> Any:
    """A module of VeOmni, without running the `__init__` of its packages, which need more than is installed."""
    root = importlib.metadata.distribution("veomni").locate_file("veomni")
    for name in ("", "distributed", "optim", "utils"):
        if (full := f"veomni.{name}".rstrip(".")) not in sys.modules:
            package = ModuleType(full)
            package.__path__ = [str(root / name)]
            sys.modules[full] = package
    return importlib.import_module(f"veomni.{module}")


class Experts(nn.Module):
    """The experts of this rank, in one tensor, as VeOmni keeps them."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(count, WIDTH, 2 * WIDTH) / WIDTH)
        self.down = nn.Parameter(torch.randn(count, 2 * WIDTH, WIDTH) / WIDTH)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = torch.einsum("bw,ewh->ebh", inputs, self.up).relu()
        return torch.einsum("ebh,ehw->bw", hidden, self.down)


class Model(nn.Module):
    """A dense layer, experts, and a part that no batch reaches: its parameters never get a gradient."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.dense = nn.Linear(WIDTH, WIDTH)
        self.experts = Experts(count)
        self.spare = nn.Linear(WIDTH, 3)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.experts(self.dense(inputs))
        return result


@functools.cache
def _meshes(expert_parallel: int, device: str) -> tuple[DeviceMesh, DeviceMesh]:
    world = dist.get_world_size()
    experts = init_device_mesh(device, (expert_parallel, world // expert_parallel), mesh_dim_names=("ep", "ep_fsdp"))
    return init_device_mesh(device, (world,), mesh_dim_names=("fsdp",)), experts["ep_fsdp"]


class Program(training.Program):
    def optimizers(self) -> list[Any]:
        return list(self.optimizer.optimizers_dict.values())


def build(expert_parallel: int, device: str = "cpu") -> Program:
    """Experts cut by expert parallelism on dimension 0 and then sharded on dimension 1, the rest on dimension 0 of another mesh."""
    everyone, among_experts = _meshes(expert_parallel, device)
    model = Model(EXPERTS // expert_parallel).to(training.here(device))
    fully_shard(model.experts, mesh=among_experts, shard_placement_fn=lambda _: Shard(1))
    fully_shard(model, mesh=everyone)
    experts = list(model.experts.parameters())
    rest = [each for name, each in model.named_parameters() if not name.startswith("experts.")]
    inner = {"ep": torch.optim.AdamW(experts, lr=1e-2), "non_extra_parallel": torch.optim.AdamW(rest, lr=1e-3)}
    return Program(
        model,
        veomni("optim.optimizer").MultiOptimizer(model, inner, list(inner)),
        lambda number: (model(batch(number, device)) - 1).square().mean(),
    )


def batch(number: int, device: str) -> torch.Tensor:
    return torch.randn(6, WIDTH, generator=torch.Generator().manual_seed(100 * dist.get_rank() + number)).to(training.here(device))


def compare(expert_parallel: int) -> training.Outcome:
    return training.compare(functools.partial(build, expert_parallel))


def state_is_never_made_up(expert_parallel: int) -> dict[str, Any]:
    """State dicts before and after the first step, inside and outside phases. Returns what a test asserts."""
    program = build(expert_parallel)
    manager = make_manager(device=SimulatedDevice(1 << 20, chunk_bytes=4096))
    program.register(manager)
    handle, optimizer = manager.handles["actor.optimizer"], program.optimizer
    experts, rest = program.optimizers()
    found: dict[str, Any] = {"owners": [owner.name for owner in handle.owners], "reserved": handle.host_bytes}

    found["before"] = sorted({name.split(".")[0] for name in handle.state_dict()})
    try:
        optimizer.state_dict()
    except (NotResidentError, PhaseError) as error:
        found["refused"] = f"{type(error).__name__}: {error} {error.__notes__}"
    found["rates"] = [group["lr"] for each in (experts, rest) for group in each.param_groups]
    found["gradients"] = [name for name, each in program.model.named_parameters() if each.grad is not None]
    found["born before"] = [len(each.state) for each in (experts, rest)]
    assert_nothing_resident(manager)

    with manager.phase("train"):
        program.learn(0)
        inside = _flat(optimizer.state_dict())
        held = optimizer.state_dict()
    assert_nothing_resident(manager)
    # The two parameters of `spare` have no gradient, so no state: looking for it must not make any (`state` is a defaultdict).
    found["born"] = [len(each.state) for each in (experts, rest)]
    found["host"] = handle.host_bytes
    found["same"] = [_flat(each) == inside for each in (optimizer.state_dict(), handle.state_dict(), held)]
    found["still born"] = [len(each.state) for each in (experts, rest)]
    for what, call in (("step", optimizer.step), ("load", lambda: optimizer.load_state_dict(held))):
        try:
            call()
        except (NotResidentError, PhaseError) as error:
            found[what] = f"{type(error).__name__}: {error}"
    with manager.phase("restore"):
        optimizer.load_state_dict(held)
    assert_nothing_resident(manager)
    found["loaded"] = _flat(optimizer.state_dict()) == inside
    manager.close()
    hooks = sum(len(each._optimizer_step_pre_hooks) for each in (experts, rest))
    found["guards left"] = hooks + len({"step", "load_state_dict"} & set(vars(optimizer)))
    return found


def _flat(state_dict: Any) -> dict[str, Any]:
    pairs: Iterator[tuple[str, Any]] = iter(state_dict.items())
    found: dict[str, Any] = {}
    for name, value in pairs:
        parts = training.local_parts(value, name) if isinstance(value, torch.Tensor) else ()
        found |= {path: training.as_bytes(part) for path, part in parts} or {name: value}
    return found
