"""Models under FSDP2 and under tensor parallelism, for the ranks of the tests beside."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from placement import Handle, Manager
from placement.testing import SimulatedDevice
from tests.sharded import one_of_each
from tests.sharded.training import CAPACITY, CHUNK_BYTES, Program

WIDTH = 21
WORDS = 13
"""Neither can be divided by two: shards are uneven, and the second rank's are padded."""


class LoRA(torch.nn.Module):
    def __init__(self, base: torch.nn.Linear, rank: int = 3) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = torch.nn.Linear(base.in_features, rank, bias=False)
        self.up = torch.nn.Linear(rank, base.out_features, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.up(self.down(x))


class Block(torch.nn.Module):
    """Two layers, a buffer that every forward writes, and a layer with one output: on the second
    rank nothing of it is left."""

    def __init__(self, make: Callable[[torch.nn.Linear], torch.nn.Module]) -> None:
        super().__init__()
        self.inner = make(torch.nn.Linear(WIDTH, 2 * WIDTH + 1))
        self.outer = torch.nn.Linear(2 * WIDTH + 1, WIDTH)
        self.gate = torch.nn.Linear(WIDTH, 1)
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return x + self.gate(x) * self.outer(self.inner(x).tanh())


class Model(torch.nn.Module):
    def __init__(
        self,
        blocks: int = 2,
        make: Callable[[torch.nn.Linear], torch.nn.Module] = lambda layer: layer,
    ) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(WORDS, WIDTH)
        self.blocks = torch.nn.ModuleList(Block(make) for _ in range(blocks))
        self.head = torch.nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        x = self.embed(words)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def loss_of(model: torch.nn.Module, number: int, rank: int | None = None) -> torch.Tensor:
    seed = 7 * number + (dist.get_rank() if rank is None else rank)
    words = torch.randint(0, WORDS, (3, 5), generator=torch.Generator().manual_seed(seed))
    return torch.nn.functional.cross_entropy(
        model(words).float().flatten(0, 1), words.roll(1, 1).flatten()
    )


def sharded(model: Model, **options: Any) -> Model:
    for block in model.blocks:
        fully_shard(block, **options)
    return fully_shard(model, **options)


def worker(
    model: torch.nn.Module, optimizer: Any, **keywords: Any
) -> tuple[Manager, Handle, Handle]:
    manager = Manager(device=SimulatedDevice(CAPACITY, chunk_bytes=CHUNK_BYTES), **keywords)
    return (
        manager,
        manager.register("actor", model, role="actor"),
        manager.register("actor.optimizer", optimizer),
    )


# --- programs


def plain_fsdp2(
    phases: Sequence[tuple[str, str]] = (
        ("log_prob", "evaluate"),
        ("train", "backward"),
        ("train", "learn"),
    ),
) -> Program:
    """Uneven shards, one rank without any of a parameter, tied weights, adapters added before
    sharding, frozen layers, prefetching."""
    model = sharded(Model(make=LoRA))
    model.set_modules_to_forward_prefetch([model.blocks[0]])
    model.blocks[0].set_modules_to_forward_prefetch([model.blocks[1]])
    optimizer = torch.optim.AdamW(
        [p for p in model.parameters() if p.requires_grad], lr=1e-2, foreach=True
    )
    return Program(model, optimizer, functools.partial(loss_of, model), phases=phases)


def lend(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    """A step's hook that makes the parameter, and its gradient, state of the optimizer."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            optimizer.state[parameter].update(anchor=parameter.detach(), previous=parameter.grad)


def fsdp2_with_lent_state() -> Program:
    """The same with parameters and gradients that are also the optimizer's state."""
    program = plain_fsdp2()
    program.optimizer.register_step_post_hook(lend)
    return program


class Waiting(Program):
    """Gradients that wait for a reduction are values too, though no parameter has them."""

    def values(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield from super().values()
        part: Any
        for path, part in self.model.named_modules():
            for group in (
                part._get_fsdp_state()._fsdp_param_groups if isinstance(part, FSDPModule) else ()
            ):
                waiting = [("partial", group._partial_reduce_output)]
                for index, each in enumerate(group.fsdp_params):
                    unsharded = getattr(each, "_unsharded_param", None)
                    waiting.append((f"{index}.accumulated", each.unsharded_accumulated_grad))
                    waiting.append(
                        (f"{index}.unsharded", None if unsharded is None else unsharded.grad)
                    )
                yield from (
                    (f"{path}.{name}", tensor) for name, tensor in waiting if tensor is not None
                )


@dataclass
class Accumulating(Waiting):
    """The first backward communicates nothing: its gradients wait, whole, on every rank."""

    kept: str = "unsharded"

    def backward(self, step: int) -> torch.Tensor:
        self.model.set_requires_gradient_sync(False)
        loss = super().backward(step)
        self.model.set_requires_gradient_sync(True)
        assert {name.split(".")[-1] for name, _ in Waiting.values(self)} >= {self.kept}, (
            "the gradients do not wait where they should"
        )
        return loss


def accumulating_fsdp2(param_dtype: torch.dtype | None) -> Program:
    """Mixed precision, so that they wait in another type; blocks that stay unsharded after a
    forward."""
    policy = MixedPrecisionPolicy(
        param_dtype=param_dtype, reduce_dtype=torch.float32, cast_forward_inputs=False
    )
    model = sharded(Model(blocks=1), mp_policy=policy, reshard_after_forward=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=3e-2, momentum=0.9)
    phases, kept = (
        (("train", "backward"), ("train", "learn")),
        "unsharded" if param_dtype is None else "accumulated",
    )
    return Accumulating(
        model, optimizer, functools.partial(loss_of, model), phases=phases, kept=kept
    )


@dataclass
class Hybrid(Waiting):
    """The first backward reduces within the shards only: what it gave waits for the all-reduce, in
    no gradient of a parameter."""

    def backward(self, step: int) -> torch.Tensor:
        self.model.set_requires_all_reduce(False)
        loss = super().backward(step)
        self.model.set_requires_all_reduce(True)
        assert any(name.endswith("partial") for name, _ in self.values())
        return loss


def hybrid_fsdp2() -> Program:
    """A mesh of two dimensions: replicas of shards."""
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    model = sharded(Model(blocks=1), mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    return Hybrid(
        model,
        optimizer,
        functools.partial(loss_of, model),
        phases=(("train", "backward"), ("train", "learn")),
    )


def several_meshes() -> Program:
    """Parameters of one module on two meshes, so that it has two groups (torch 2.13 on)."""
    from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo, ShardPlacementResult
    from torch.distributed.tensor import Shard

    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("fsdp",))
    group: Any = dist.new_group([0, 1])
    other = FSDPMeshInfo(
        DeviceMesh.from_group(group, "cpu", mesh_dim_names=("experts",)), shard_mesh_dim=0
    )
    model = Model(blocks=1)
    experts = {id(parameter) for parameter in model.blocks[0].inner.parameters()}

    def place(parameter: torch.nn.Parameter) -> Any:
        return ShardPlacementResult(Shard(0), other) if id(parameter) in experts else None

    fully_shard(model.blocks[0], mesh=mesh, shard_placement_fn=place)
    fully_shard(model, mesh=mesh)
    block: Any = model.blocks[0]
    assert len(block._get_fsdp_state()._fsdp_param_groups) == 2
    optimizer = torch.optim.AdamW([{"params": [p]} for p in model.parameters()], lr=1e-2)
    return Program(
        model,
        optimizer,
        functools.partial(loss_of, model),
        phases=(("log_prob", "evaluate"), ("train", "learn")),
    )


def tensor_parallel(mesh: DeviceMesh) -> torch.nn.Sequential:
    model = torch.nn.Sequential(one_of_each.Block(16), one_of_each.Block(16))
    for part in model:
        parallelize_module(part, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return model


def loss_of_numbers(model: torch.nn.Module, number: int) -> torch.Tensor:
    return (
        model(torch.randn(4, 16, generator=torch.Generator().manual_seed(number))).square().mean()
    )


def tensor_parallel_program(optimizer: str, **options: Any) -> Program:
    model = tensor_parallel(init_device_mesh("cpu", (dist.get_world_size(),)))
    kind = getattr(torch.optim, optimizer)
    # Layer norms stay plain: DTensors and plain tensors cannot be stepped in one foreach.
    groups = [
        {"params": [p for n, p in model.named_parameters() if ("norm" in n) is plain]}
        for plain in (True, False)
    ]
    phases = (("log_prob", "evaluate"), ("train", "backward"), ("train", "learn"))
    return Program(
        model,
        kind(groups, lr=1e-2, **options),
        functools.partial(loss_of_numbers, model),
        phases=phases,
    )


def both_program(data: int, tensor: int) -> Program:
    mesh = init_device_mesh("cpu", (data, tensor), mesh_dim_names=("data", "tensor"))
    model = tensor_parallel(mesh["tensor"])
    for part in model:
        fully_shard(part, mesh=mesh["data"])
    fully_shard(model, mesh=mesh["data"])
    groups = [
        {"params": [p for n, p in model.named_parameters() if ("norm" in n) is plain]}
        for plain in (True, False)
    ]
    phases = (("log_prob", "evaluate"), ("train", "learn"))
    return Program(
        model,
        torch.optim.AdamW(groups, lr=1e-2),
        functools.partial(loss_of_numbers, model),
        phases=phases,
    )
