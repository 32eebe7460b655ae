"""What ranks do in the tests of checkpoints: programs with every kind of model, saved, restored and resumed in every state."""

from __future__ import annotations

import functools
import itertools
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FullyShardedDataParallel, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import placement
from placement import Handle, Manager, checkpoint
from placement.core.states import State
from placement.tensors.plain import nested_tensors
from placement.testing import SimulatedDevice, assert_nothing_resident
from tests.sharded.training import as_bytes, local_parts

CPU_OFFLOADED, GPU_RESIDENT, TRAINING = State.CPU_OFFLOADED, State.GPU_RESIDENT, State.TRAINING
WIDTH = 12
STATES = {"offloaded": None, "resident": "log_prob", "syncing": "weight_sync", "training": "train", "checkpoint": "checkpoint"}


class Net(torch.nn.Module):
    """Sizes that no number of ranks divides, a tied head, a buffer, and a parameter with one row, of which a second rank has none."""

    def __init__(self, inner: int) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(21, WIDTH)
        self.up = torch.nn.Linear(WIDTH, inner)
        self.down = torch.nn.Linear(inner, WIDTH)
        self.row = torch.nn.Parameter(torch.randn(1, WIDTH))
        self.head = torch.nn.Linear(WIDTH, 21, bias=False)
        self.register_buffer("seen", torch.zeros(3, dtype=torch.int64))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        if torch.is_grad_enabled():
            with torch.no_grad():
                self.seen += 1
        hidden = self.embed(tokens)
        return self.head(hidden + self.down(torch.relu(self.up(hidden))) * self.row)


@dataclass
class Program:
    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    manager: Manager | None = None

    @property
    def actor(self) -> Handle:
        assert self.manager is not None
        return self.manager.handles["actor"]

    @property
    def adam(self) -> Handle:
        assert self.manager is not None
        return self.manager.handles["actor.optimizer"]

    def step(self, number: int) -> bytes:
        tokens = torch.randint(0, 21, (3, 5), generator=torch.Generator().manual_seed(number))
        loss = self.model(tokens).square().mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return as_bytes(loss)

    def train(self, *numbers: int) -> list[bytes]:
        """Steps, each in a phase of its own where there is a manager."""
        losses = []
        for number in numbers:
            if self.manager is None:
                losses.append(self.step(number))
                continue
            with self.manager.phase("train"):
                losses.append(self.step(number))
            assert_nothing_resident(self.manager, allow_foreign=True)
        return losses

    def values(self) -> dict[str, bytes]:
        """Every value that a checkpoint has to bring back, as this rank's bytes, read as a user reads them."""
        model = self.model.state_dict() if self.manager is None else self.actor.state_dict()
        optimizer = self.optimizer.state_dict() if self.manager is None else self.adam.state_dict()
        found = {f"model.{name}": as_bytes(part) for name, value in model.items() for _, part in local_parts(value)}
        for number, entry in optimizer["state"].items():
            for key, value in entry.items():
                parts = local_parts(value) if isinstance(value, torch.Tensor) else [("", torch.tensor(float("nan")))]
                found |= {f"optimizer.{number}.{key}": as_bytes(part) for _, part in parts}
        groups = [{key: value for key, value in group.items() if key != "params"} for group in optimizer["param_groups"]]
        return found | {"groups": repr(groups).encode()}

    def objects(self) -> list[int]:
        """What must stay: tensor objects, addresses, optimizer keys, and which names are one tensor."""
        named = [*self.model.named_parameters(remove_duplicate=False), *self.model.named_buffers()]
        parts = [part.data_ptr() for _, value in named for _, part in local_parts(value)]
        return [*(id(value) for _, value in named), *parts, *(id(key) for key in self.optimizer.state)]


def build(kind: str, *, managed: bool = True, seed: int = 0) -> Program:
    """A program of one kind: plain, ddp, fsdp2, external (fsdp2 under CPUOffloadPolicy), tp, or lora, whose head is tied."""
    torch.manual_seed(seed)
    model: Any = Net(36 if kind == "tp" else 35)  # tensor parallelism computes with what it has
    if kind == "lora":
        from peft import LoraConfig, get_peft_model

        model.head.weight = model.embed.weight
        model = get_peft_model(model, LoraConfig(target_modules=["up", "down"], r=3, init_lora_weights=False))
    if kind == "ddp":
        model = DistributedDataParallel(model)
    if kind == "tp":
        plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        model.row.requires_grad_(False)
        parallelize_module(model, init_device_mesh("cpu", (dist.get_world_size(),)), plan)
    if kind == "external":
        policy = CPUOffloadPolicy(pin_memory=False)
        for part in (model.up, model):
            fully_shard(part, offload_policy=policy)
    if kind in ("fsdp2", "lora"):
        inner = model.base_model.model if kind == "lora" else model
        for part in (inner.up, inner.down):
            fully_shard(part)
        fully_shard(model)
    trained = [each for each in model.parameters() if each.requires_grad]
    groups = [{"params": trained[:2], "lr": 3e-2}, {"params": trained[2:], "weight_decay": 0.1}]
    steps = torch.optim.AdamW(groups, lr=1e-2, amsgrad=True)
    program = Program(model, steps)
    if managed:
        program.manager = Manager(device=SimulatedDevice(64 << 20, chunk_bytes=4096))
        program.manager.register("actor", model, role="actor")
        program.manager.register("actor.optimizer", steps)
    return program


def _in(program: Program, phase: str | None, act: Callable[[], None]) -> None:
    assert program.manager is not None
    if phase is None:
        moved = len(program.manager.journal)
        act()
        assert len(program.manager.journal) == moved
        assert_nothing_resident(program.manager, allow_foreign=True)
        return
    with program.manager.phase(phase):
        if program.actor.holding is not None and program.actor.holding.on_device:
            with torch.no_grad():  # which leaves the root unsharded
                program.model(torch.zeros(2, 3, dtype=torch.int64))
        act()
    assert_nothing_resident(program.manager, allow_foreign=True)


def resume(kind: str, root: str) -> None:
    """Save in every state, restore into every state, and go on as if nothing had been."""
    program = build(kind)
    manager = program.manager
    assert manager is not None
    program.train(1, 2)
    wanted = program.values()
    for name, phase in STATES.items():
        how = checkpoint.save if name != "training" else _save_in_the_background
        _in(program, phase, functools.partial(how, manager, os.path.join(root, name)))
    after = program.train(3, 4, 5)
    end = program.values()
    objects = program.objects()
    for name, into in zip(STATES, itertools.cycle(("training", "offloaded", "resident"))):
        _in(program, STATES[into], functools.partial(checkpoint.load, manager, os.path.join(root, name)))
        _assert_same(program.values(), wanted, f"{name} into {into}")
        assert program.objects() == objects
        with manager.phase("log_prob"):
            _assert_same(program.values(), wanted, f"{name} into {into}, loaded")
        program.train(9)  # so that the next has something to undo
    checkpoint.load(manager, os.path.join(root, "training"))
    assert program.train(3, 4, 5) == after
    _assert_same(program.values(), end, "resumed")
    for name, into in (("offloaded", None), ("training", "restore")):
        fresh = build(kind, seed=1)  # its optimizer has no state yet
        assert fresh.manager is not None
        _in(fresh, into, functools.partial(checkpoint.load, fresh.manager, os.path.join(root, name)))
        _assert_same(fresh.values(), wanted, f"into an optimizer without state, {into}")
        assert fresh.train(3, 4, 5) == after
        _assert_same(fresh.values(), end, f"resumed by an optimizer without state, {into}")


def _save_in_the_background(manager: Manager, path: str) -> None:
    checkpoint.async_save(manager, path).result()


def without_placement(kind: str, root: str) -> None:
    program = build(kind)
    assert program.manager is not None
    program.train(1, 2)
    wanted = program.values()
    checkpoint.save(program.manager, os.path.join(root, "ours"))
    after = program.train(3, 4)
    plain = build(kind, managed=False, seed=1)
    state = {"actor": get_model_state_dict(plain.model), "actor.optimizer": get_optimizer_state_dict(plain.model, plain.optimizer)}
    dcp.load(state, checkpoint_id=os.path.join(root, "ours"))
    set_model_state_dict(plain.model, state["actor"])  # type: ignore[arg-type]
    set_optimizer_state_dict(plain.model, plain.optimizer, state["actor.optimizer"])  # type: ignore[arg-type]
    _assert_same(plain.values(), wanted, "read by torch")
    state = {"actor": get_model_state_dict(plain.model), "actor.optimizer": get_optimizer_state_dict(plain.model, plain.optimizer)}
    dcp.save(state, checkpoint_id=os.path.join(root, "theirs"))
    fresh = build(kind, seed=1)
    assert fresh.manager is not None
    checkpoint.load(fresh.manager, os.path.join(root, "theirs"))
    _assert_same(fresh.values(), wanted, "written by torch")
    assert fresh.train(3, 4) == after
    assert plain.train(3, 4) == after


def whole(kind: str, root: str, act: str) -> dict[str, Any]:
    """Save after two steps, or load into a fresh program. Returns the whole values."""
    program = build(kind, seed=act == "load")
    assert program.manager is not None
    if act == "save":
        program.train(1, 2)
        checkpoint.save(program.manager, root)
    else:
        checkpoint.load(program.manager, root)
    shown = {"model": checkpoint.Model(program.actor).state_dict(), "optimizer": checkpoint.Optimizer(program.adam).state_dict()["state"]}
    return {key: as_bytes(value.full_tensor() if hasattr(value, "full_tensor") else value) for key, value in _flat(shown, "")}


def _flat(values: Any, path: str) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(values, dict):
        for key, value in values.items():
            yield from _flat(value, f"{path}.{key}")
    elif isinstance(values, torch.Tensor):
        yield path, values


def stateful(kind: str, root: str) -> None:
    """The wrappers in a user's own dict, with torch's own save, async_save and load."""
    program = build(kind)
    assert program.manager is not None
    program.train(1, 2)
    wanted = program.values()
    state = {"model": checkpoint.Model(program.actor), "optimizer": checkpoint.Optimizer(program.adam), "step": 2}
    dcp.save(dict(state), checkpoint_id=os.path.join(root, "saved"))
    group = dist.new_group(backend="gloo")  # training goes on, and collectives of two threads must not meet in one group
    writing: Any = dcp.async_save(dict(state), checkpoint_id=os.path.join(root, "async"), process_group=group)
    program.train(3)
    writing.result()
    assert program.values() != wanted
    for name in ("saved", "async"):
        fresh = build(kind, seed=1)
        found: dict[str, Any] = {"model": checkpoint.Model(fresh.actor), "optimizer": checkpoint.Optimizer(fresh.adam), "step": 0}
        dcp.load(found, checkpoint_id=os.path.join(root, name), planner=checkpoint.LoadPlanner())
        assert found["step"] == 2
        _assert_same(fresh.values(), wanted, name)
        fresh.train(3)
        _assert_same(fresh.values(), program.values(), name)
        program.train(4)
        dcp.load(dict(state), checkpoint_id=os.path.join(root, name))  # in place, by torch's own planner: everything is there
        _assert_same(program.values(), wanted, f"{name}, in place")
        program.train(3)


def one_rank_that_cannot(root: str) -> tuple[str, str, bool]:
    program = build("plain")
    assert program.manager is not None
    program.train(1)
    checkpoint.save(program.manager, os.path.join(root, "fine"))
    program.train(2)
    before = program.values()
    if dist.get_rank() == 1:
        program.manager.unregister("actor.optimizer")
        program.manager.unregister("actor")
        program.model.row = torch.nn.Parameter(torch.randn(1, WIDTH + 1))
        program.manager.register("actor", program.model, role="actor")
    told = ["", ""]
    for index, only in enumerate((["actor"], ["actor", "no such handle" if dist.get_rank() == 1 else "actor.optimizer"])):
        try:
            checkpoint.load(program.manager, os.path.join(root, "fine"), only=only)
        except placement.PlacementError as error:
            told[index] = str(error)
    dist.barrier()  # nobody is left behind in a collective
    return told[0], told[1], dist.get_rank() == 1 or program.values() == before


def in_two_dimensions(root: str, unlike: bool) -> tuple[str, bool]:
    """FSDP2 along one dimension of a mesh and tensor parallelism along the other, for some layers only: the rest are replicas.

    Args:
        unlike: a replica has lost its likeness by one element, on the last rank.

    Returns:
        What the save said, and whether a load of ours and one of torch's bring the saved values back.
    """
    mesh = init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("dp", "tp"))
    model: Any = Net(36)
    parallelize_module(model, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    fully_shard(model, mesh=mesh["dp"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
    program = Program(model, optimizer, Manager(device=SimulatedDevice(8 << 20, chunk_bytes=4096)))
    assert program.manager is not None
    program.manager.register("actor", model, role="actor")
    program.manager.register("actor.optimizer", optimizer)
    program.train(1, 2)
    if unlike and dist.get_rank() == dist.get_world_size() - 1:
        program.actor.state_dict()["head.weight"].to_local().view(-1)[:1].add_(1.0)
    wanted = program.values()
    try:
        checkpoint.save(program.manager, root)
    except placement.CheckpointError as error:
        return str(error), program.values() == wanted
    program.train(3)
    assert program.values() != wanted
    checkpoint.load(program.manager, root)
    is_ours = program.values() == wanted
    program.train(4)
    with program.manager.phase("restore"):
        state = {"actor": get_model_state_dict(model)}
        dcp.load(state, checkpoint_id=root)
        set_model_state_dict(model, state["actor"])
    model_values = {name: value for name, value in program.values().items() if name.startswith("model.")}
    return "saved", is_ours and all(wanted[name] == value for name, value in model_values.items())


def broadcast(options: dict[str, bool]) -> list[str]:
    """A full state dict for an offloaded FSDP2 module, as torch's `set_model_state_dict` takes it: refused, and nothing is written."""
    program = build("fsdp2")
    assert program.manager is not None
    wanted = program.values()
    with program.manager.phase("log_prob"):
        full = get_model_state_dict(program.model, options=StateDictOptions(full_state_dict=True))
    has_all = dist.get_rank() == 0 or "broadcast_from_rank0" not in options
    given = {name: value + 1 for name, value in full.items()} if has_all else {}
    said = []
    try:
        set_model_state_dict(program.model, dict(given), options=StateDictOptions(**options))
    except placement.NotResidentError as error:
        said.append(str(error))
    assert program.values() == wanted
    program.train(1)  # the next phase transitions find nothing amiss
    assert program.manager.audit().ok, program.manager.audit()
    with program.manager.phase("restore"):
        set_model_state_dict(program.model, dict(given), options=StateDictOptions(**options))
    with program.manager.phase("log_prob"):
        now = get_model_state_dict(program.model, options=StateDictOptions(full_state_dict=True))
    assert all(torch.equal(now[name], value) for name, value in given.items())
    return said


def broadcast_to_optimizer(options: dict[str, bool]) -> str:
    """A full state dict for an offloaded optimizer of FSDP2: refused before torch writes a part of it."""
    program = build("fsdp2")
    assert program.manager is not None
    program.train(1)
    model, adam = program.model, program.optimizer
    with program.manager.phase("train"):
        full = get_optimizer_state_dict(model, adam, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    wanted = program.values()
    given = {**full, "state": {name: {key: value + 1 for key, value in entry.items()} for name, entry in full.get("state", {}).items()}}
    with pytest.raises(placement.NotResidentError) as caught:
        set_optimizer_state_dict(model, adam, given if given["state"] else {}, options=StateDictOptions(**options))
    assert program.values() == wanted
    program.train(1)
    return str(caught.value)


def fsdp1(root: str, use_orig_params: bool) -> list[str]:
    """FSDP1 gathers for a state dict: saved in the phase for it, and loaded by torch from the same files. Returns what was refused."""
    keywords: dict[str, Any] = {"device_id": torch.device("cpu"), "use_orig_params": use_orig_params}
    inner = FullyShardedDataParallel(torch.nn.Linear(5, 3), **keywords)
    model: Any = FullyShardedDataParallel(torch.nn.Sequential(torch.nn.Linear(6, 5), inner), **keywords)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    manager = Manager(device=SimulatedDevice(1 << 20, chunk_bytes=4096))
    actor = manager.register("actor", model, role="actor")
    adam = manager.register("actor.optimizer", optimizer)
    beside = torch.nn.Linear(4, 4)
    critic = manager.register("critic", beside, role="critic")

    def train() -> None:
        with manager.phase("train"):
            model(torch.ones(2, 6)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    def values() -> dict[str, bytes]:
        with manager.phase("checkpoint"):
            shown = get_model_state_dict(model), get_optimizer_state_dict(model, optimizer)["state"]
            found = {name: tensor for name, tensor in nested_tensors(list(shown), "") if not isinstance(tensor, ShardedTensor)}
            sharded = [(name, tensor) for name, tensor in nested_tensors(list(shown), "") if isinstance(tensor, ShardedTensor)]
            found |= {f"{name}.{index}": shard.tensor for name, each in sharded for index, shard in enumerate(each.local_shards())}
            return {name: as_bytes(tensor) for name, tensor in found.items()}

    said = []
    with manager.phase("checkpoint"):
        try:
            checkpoint.save(manager, root, only=["actor.optimizer"])  # it would take a step to give birth to its state
        except placement.CheckpointError as error:
            said.append(str(error))
    train()
    wanted = values()
    for act in (checkpoint.save, checkpoint.async_save, checkpoint.load):
        if act is checkpoint.load:
            with manager.phase("checkpoint"):
                assert (actor.state, adam.state, critic.state) == (GPU_RESIDENT, GPU_RESIDENT, CPU_OFFLOADED)
                checkpoint.save(manager, root)
        try:
            act(manager, root)
        except placement.CheckpointError as error:
            said.append(str(error))
    assert_nothing_resident(manager)
    train()
    assert values() != wanted
    beside.state_dict()["weight"].zero_()
    checkpoint.load(manager, root, only=["critic"])
    assert beside.state_dict()["weight"].any()
    with manager.phase("restore"):
        state = {"actor": get_model_state_dict(model), "actor.optimizer": get_optimizer_state_dict(model, optimizer)}
        dcp.load(state, checkpoint_id=root)
        set_model_state_dict(model, state["actor"])
        set_optimizer_state_dict(model, optimizer, state["actor.optimizer"])
    assert values() == wanted
    with manager.phase("train"), manager.phase("checkpoint"):
        assert actor.state is TRAINING, "what is on the device stays in its state"
    return said


class Export(torch.nn.Module):
    """It shows its weights in another type, and takes them back; one rank of it may refuse."""

    refuses = False

    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(WIDTH, 7)
        self._register_state_dict_hook(lambda _, found, *__: found.update({name: value.to(torch.float64) for name, value in found.items()}))
        self.register_load_state_dict_pre_hook(self._take)

    def _take(self, _: Any, given: dict[str, Any], *__: Any) -> None:
        if self.refuses:
            raise ValueError("not on this rank")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.inner(x)
        return found


def taken_over(root: str, phase: str | None, refused_by: int | None) -> tuple[str, bool]:
    """A sharded module that shows copies, beside one that does not. Returns what was said, and whether the values are right."""
    model: Any = Export()
    fully_shard(model)
    manager = Manager(device=SimulatedDevice(8 << 20, chunk_bytes=4096))
    handle = manager.register("actor", model, role="actor")
    beside = torch.nn.Linear(3, 3)
    other = manager.register("critic", beside, role="critic")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    manager.register("actor.optimizer", optimizer)

    def values() -> list[dict[str, bytes]]:
        shown = handle.state_dict(), other.state_dict()
        return [{name: as_bytes(part) for name, value in found.items() for _, part in local_parts(value)} for found in shown]

    saved = values()
    checkpoint.save(manager, root)
    with manager.phase("train"), torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2)
    other.state_dict()["weight"].zero_()
    changed = values()
    assert changed != saved
    model.refuses = refused_by == dist.get_rank()
    said = ""
    try:
        if phase is None:
            checkpoint.load(manager, root)
        else:
            with manager.phase(phase):
                checkpoint.load(manager, root)
    except placement.CheckpointError as error:
        said = str(error)
    return said, values() == saved if refused_by is None else values()[1] == changed[1]


def _assert_same(found: dict[str, bytes], wanted: dict[str, bytes], where: str) -> None:
    assert list(found) == list(wanted), f"{where}: {sorted({*found} ^ {*wanted})}"
    different = [name for name in wanted if found[name] != wanted[name]]
    assert not different, f"{where}: {different}"
