"""Checkpoints of sharded models: in every state, on one and two ranks, with and without placement,
resumed bit for bit."""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
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
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import placement
from placement import Manager, checkpoint
from placement.core.states import State
from placement.tensors.plain import nested_tensors
from placement.testing import Faults, InjectedFault, SimulatedDevice, assert_nothing_resident
from tests.sharded.checkpoint_worker import WIDTH, Net, Program, build
from tests.sharded.training import as_bytes, assert_same, bytes_of
from tests.support.ranks import Ranks, on_ranks
from tests.support.sweeps import few

CPU_OFFLOADED, GPU_RESIDENT, TRAINING = State.CPU_OFFLOADED, State.GPU_RESIDENT, State.TRAINING
STATES = {
    "offloaded": None,
    "resident": "log_prob",
    "syncing": "weight_sync",
    "training": "train",
    "checkpoint": "checkpoint",
}


def _in(program: Program, phase: str | None, act: Callable[[], None]) -> None:
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


@pytest.mark.parametrize("kind", few(["fsdp2", "lora"], "fsdp2"))
@on_ranks("two_ranks")
def test_resuming_is_going_on(kind: str, tmp_path: Path) -> None:
    """Save in every state, restore into every state, and go on as if nothing had been."""
    program = build(kind)
    manager = program.manager
    program.train(1, 2)
    wanted = program.values()
    for name, phase in STATES.items():
        how = (
            checkpoint.save
            if name != "training"
            else lambda *its: checkpoint.async_save(*its).result()
        )
        _in(program, phase, functools.partial(how, manager, tmp_path / name))
    after = program.train(3, 4)
    end = program.values()
    objects = program.objects()
    for name, into in zip(STATES, itertools.cycle(("training", "offloaded", "resident"))):
        _in(program, STATES[into], functools.partial(checkpoint.load, manager, tmp_path / name))
        assert_same(program.values(), wanted, f"{name} into {into}")
        assert program.objects() == objects
        with manager.phase("log_prob"):
            assert_same(program.values(), wanted, f"{name} into {into}, loaded")
        program.train(9)  # so that the next has something to undo
    checkpoint.load(manager, tmp_path / "training")
    assert program.train(3, 4) == after
    assert_same(program.values(), end, "resumed")
    for name, into in (("offloaded", None), ("training", "restore")):
        fresh = build(kind, seed=1)  # its optimizer has no state yet
        _in(fresh, into, functools.partial(checkpoint.load, fresh.manager, tmp_path / name))
        assert_same(fresh.values(), wanted, f"into an optimizer without state, {into}")
        assert fresh.train(3, 4) == after
        assert_same(fresh.values(), end, f"resumed by an optimizer without state, {into}")


@pytest.mark.parametrize("kind", few(["plain", "ddp", "fsdp2", "external", "tp", "lora"], "fsdp2"))
@on_ranks("two_ranks")
def test_torch_reads_what_we_write_and_the_other_way_round(kind: str, tmp_path: Path) -> None:
    program = build(kind)
    program.train(1, 2)
    wanted = program.values()
    checkpoint.save(program.manager, tmp_path / "ours")
    after = program.train(3, 4)
    plain = build(kind, managed=False, seed=1)
    state = {
        "actor": get_model_state_dict(plain.model),
        "actor.optimizer": get_optimizer_state_dict(plain.model, plain.optimizer),
    }
    dcp.load(state, checkpoint_id=tmp_path / "ours")
    set_model_state_dict(plain.model, state["actor"])  # type: ignore[arg-type]
    set_optimizer_state_dict(plain.model, plain.optimizer, state["actor.optimizer"])  # type: ignore[arg-type]
    assert_same(plain.values(), wanted, "read by torch")
    state = {
        "actor": get_model_state_dict(plain.model),
        "actor.optimizer": get_optimizer_state_dict(plain.model, plain.optimizer),
    }
    dcp.save(state, checkpoint_id=tmp_path / "theirs")
    fresh = build(kind, seed=1)
    checkpoint.load(fresh.manager, tmp_path / "theirs")
    assert_same(fresh.values(), wanted, "written by torch")
    assert fresh.train(3, 4) == after
    assert plain.train(3, 4) == after


def whole(kind: str, root: str, act: str) -> dict[str, Any]:
    """Save after two steps, or load into a fresh program. Returns the whole values."""
    program = build(kind, seed=act == "load")
    if act == "save":
        program.train(1, 2)
        checkpoint.save(program.manager, root)
    else:
        checkpoint.load(program.manager, root)
    shown = {
        "model": checkpoint.Model(program.actor).state_dict(),
        "optimizer": checkpoint.Optimizer(program.adam).state_dict()["state"],
    }
    return {
        key: as_bytes(value.full_tensor() if hasattr(value, "full_tensor") else value)
        for key, value in nested_tensors(shown, "")
    }


@pytest.mark.parametrize("kind", few(["fsdp2", "tp"], "fsdp2"))
def test_a_checkpoint_of_two_ranks_is_loaded_by_one_and_the_other_way_round(
    kind: str, one_rank: Ranks, two_ranks: Ranks, tmp_path: Path
) -> None:
    two, one = str(tmp_path / "two"), str(tmp_path / "one")
    saved = two_ranks.run(whole, kind, two, "save")
    assert saved[0] == saved[1]
    assert one_rank.run(whole, kind, two, "load") == saved[:1]
    saved = one_rank.run(whole, kind, one, "save")
    assert two_ranks.run(whole, kind, one, "load") == saved * 2


@pytest.mark.sweep
@on_ranks("two_ranks")
def test_the_wrappers_in_a_dict_of_the_users(tmp_path: Path) -> None:
    """With torch's own save, async_save and load."""
    program = build("fsdp2")
    program.train(1, 2)
    wanted = program.values()
    state = {
        "model": checkpoint.Model(program.actor),
        "optimizer": checkpoint.Optimizer(program.adam),
        "step": 2,
    }
    dcp.save(dict(state), checkpoint_id=tmp_path / "saved")
    # training goes on, and collectives of two threads must not meet in one group
    group = dist.new_group(backend="gloo")
    writing: Any = dcp.async_save(
        dict(state), checkpoint_id=tmp_path / "async", process_group=group
    )
    program.train(3)
    writing.result()
    assert program.values() != wanted
    for name in ("saved", "async"):
        fresh = build("fsdp2", seed=1)
        found: dict[str, Any] = {
            "model": checkpoint.Model(fresh.actor),
            "optimizer": checkpoint.Optimizer(fresh.adam),
            "step": 0,
        }
        dcp.load(found, checkpoint_id=tmp_path / name, planner=checkpoint.LoadPlanner())
        assert found["step"] == 2
        assert_same(fresh.values(), wanted, name)
        fresh.train(3)
        assert_same(fresh.values(), program.values(), name)
        program.train(4)
        # in place, by torch's own planner: everything is there
        dcp.load(dict(state), checkpoint_id=tmp_path / name)
        assert_same(program.values(), wanted, f"{name}, in place")
        program.train(3)


@on_ranks("two_ranks")
def test_what_fits_on_one_rank_only_changes_nothing_on_any(tmp_path: Path) -> None:
    """On rank 1 the copy to the host fails, and a parameter has another shape."""
    program = build("plain")
    program.train(1)
    checkpoint.save(program.manager, tmp_path / "fine")
    with program.manager.phase("train"):
        program.step(2)
        if dist.get_rank() == 1:
            program.manager.device.fail("copy", at=1)
        # or the others' offload waits for ever
        with pytest.raises((placement.CheckpointError, InjectedFault), match="injected fault"):
            checkpoint.async_save(program.manager, tmp_path / "half")
    before = program.values()
    if dist.get_rank() == 1:
        program.manager.unregister("actor.optimizer")
        program.manager.unregister("actor")
        program.model.row = torch.nn.Parameter(torch.randn(1, WIDTH + 1))
        program.manager.register("actor", program.model, role="actor")
    chosen = ["actor", "no such handle" if dist.get_rank() == 1 else "actor.optimizer"]
    for only, said in (
        (
            ["actor"],
            (
                r"'actor': row has shape \(1, 12\) in the "
                r"checkpoint, "
                r"but "
                r"\(1, "
                r"13\) here"
            ),
        ),
        (chosen, "no such handle"),
    ):
        with pytest.raises(placement.PlacementError, match=said):
            checkpoint.load(program.manager, tmp_path / "fine", only=only)
    dist.barrier()  # nobody is left behind in a collective
    assert dist.get_rank() == 1 or program.values() == before


def _save_in_a_thread(manager: Manager, path: Path) -> None:
    checkpoint.async_save(manager, path).result()


@pytest.mark.parametrize("save", few([checkpoint.save, _save_in_a_thread], checkpoint.save))
@on_ranks("two_ranks")
def test_a_save_that_fails_on_one_rank_leaves_no_mixture_of_two_checkpoints(
    save: Callable[[Manager, Path], None], tmp_path: Path
) -> None:
    program = build("fsdp2")
    program.train(1)
    checkpoint.save(program.manager, tmp_path)
    program.train(2)
    before = program.values()
    own, aside = tmp_path / "__1_0.distcp", tmp_path / "aside"
    if dist.get_rank() == 1:
        own.rename(aside)
        own.mkdir()  # so that its own file cannot be written
    dist.barrier()
    with pytest.raises(placement.CheckpointError, match="Is a directory"):
        save(program.manager, tmp_path)
    if dist.get_rank() == 1:
        own.rmdir()
        aside.rename(own)
    dist.barrier()
    with pytest.raises(placement.CheckpointError, match="no complete checkpoint"):
        checkpoint.load(program.manager, tmp_path)
    assert program.values() == before
    checkpoint.save(program.manager, tmp_path)
    program.train(3)
    checkpoint.load(program.manager, tmp_path)
    assert program.values() == before


def in_two_dimensions(root: str, unlike: bool) -> tuple[str, bool]:
    """FSDP2 along one dimension of a mesh and tensor parallelism along the other, for some layers
    only: the rest are replicas.

    Args:
        unlike: a replica has lost its likeness by one element, on the last rank.

    Returns:
        What the save said, and whether a load of ours and one of torch's bring the saved values
            back.
    """
    mesh = init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("dp", "tp"))
    model: Any = Net(36)
    parallelize_module(model, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    fully_shard(model, mesh=mesh["dp"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
    program = Program(model, optimizer, Manager(device=SimulatedDevice(8 << 20, chunk_bytes=4096)))
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
    model_values = {
        name: value for name, value in program.values().items() if name.startswith("model.")
    }
    return "saved", is_ours and all(wanted[name] == value for name, value in model_values.items())


@pytest.mark.sweep
def test_replicas_on_two_meshes_are_saved_and_loaded_while_they_are_alike(tmp_path: Path) -> None:
    with contextlib.closing(Ranks(4)) as four_ranks:
        assert (
            four_ranks.run(in_two_dimensions, str(tmp_path / "alike"), False)
            == [("saved", True)] * 4
        )
        for said, is_unchanged in four_ranks.run(in_two_dimensions, str(tmp_path / "unlike"), True):
            assert said.startswith(
                "actor.head.weight is sharded over ranks (0, 2) and over (1, 3), with other values"
            )
            assert is_unchanged


@pytest.mark.parametrize("broadcasts", [False, True])
@on_ranks("two_ranks")
def test_a_full_state_dict_for_what_is_offloaded_is_refused_and_nothing_is_written(
    broadcasts: bool,
) -> None:
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=broadcasts)
    program = build("fsdp2")
    program.train(1)
    model, adam = program.model, program.optimizer
    wanted = program.values()
    with program.manager.phase("train"):
        full = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
        moments: Any = get_optimizer_state_dict(
            model, adam, options=StateDictOptions(full_state_dict=True, cpu_offload=True)
        )
    has_all = dist.get_rank() == 0 or not broadcasts
    given = {name: value + 1 for name, value in full.items()} if has_all else {}
    refusal = "is CPU_OFFLOADED in phase 'idle' and cannot be given a state"
    with pytest.raises(placement.NotResidentError, match=f"'actor' {refusal} dict") as caught:
        set_model_state_dict(model, dict(given), options=options)
    assert (
        ("The values that torch wrote before this error are lost") in str(caught.value)
    ) is broadcasts
    if broadcasts:
        if moments:
            moments["state"] = {
                name: {key: value + 1 for key, value in entry.items()}
                for name, entry in moments["state"].items()
            }
        with pytest.raises(placement.NotResidentError, match=rf"'actor\.optimizer' {refusal}"):
            set_optimizer_state_dict(model, adam, moments, options=options)
    assert program.values() == wanted
    program.train(1)  # the next phase transitions find nothing amiss
    assert program.manager.audit().ok, program.manager.audit()
    with program.manager.phase("restore"):
        set_model_state_dict(model, dict(given), options=options)
    with program.manager.phase("log_prob"):
        now = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    assert all(torch.equal(now[name], value) for name, value in given.items())


@pytest.mark.parametrize("use_orig_params", few([True, False], True))
@on_ranks("two_ranks")
def test_fsdp1_is_saved_in_the_phase_for_it_and_loaded_by_torch(
    use_orig_params: bool, tmp_path: Path
) -> None:
    """It gathers for a state dict."""
    keywords: dict[str, Any] = {
        "device_id": torch.device("cpu"),
        "use_orig_params": use_orig_params,
    }
    inner = FullyShardedDataParallel(torch.nn.Linear(5, 3), **keywords)
    model: Any = FullyShardedDataParallel(
        torch.nn.Sequential(torch.nn.Linear(6, 5), inner), **keywords
    )
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
            found = {
                name: tensor
                for name, tensor in nested_tensors(list(shown), "")
                if not isinstance(tensor, ShardedTensor)
            }
            sharded = [
                (name, tensor)
                for name, tensor in nested_tensors(list(shown), "")
                if isinstance(tensor, ShardedTensor)
            ]
            found |= {
                f"{name}.{index}": shard.tensor
                for name, each in sharded
                for index, shard in enumerate(each.local_shards())
            }
            return {name: as_bytes(tensor) for name, tensor in found.items()}

    # it would take a step to give birth to it
    unborn = "'actor.optimizer' steps parameters whose state is not born yet"
    with manager.phase("checkpoint"), pytest.raises(placement.CheckpointError, match=unborn):
        checkpoint.save(manager, tmp_path, only=["actor.optimizer"])
    train()
    wanted = values()
    refused = (
        r"(?s)'actor' is CPU_OFFLOADED in phase 'idle' and cannot be asked "
        r"for "
        r"a "
        r"state "
        r"dict.*manager\.phase\('checkpoint'\)"
    )
    for ask in (actor.state_dict, inner.state_dict):
        with pytest.raises(placement.NotResidentError, match=refused):
            ask()
    with pytest.raises(
        placement.CheckpointError, match=r"save it inside manager\.phase\('checkpoint'\)"
    ):
        checkpoint.save(manager, tmp_path)
    with pytest.raises(placement.CheckpointError, match=r"use save\(\)"):
        checkpoint.async_save(manager, tmp_path)
    with manager.phase("checkpoint"):
        assert (actor.state, adam.state, critic.state) == (
            GPU_RESIDENT,
            GPU_RESIDENT,
            CPU_OFFLOADED,
        )
        checkpoint.save(manager, tmp_path)
    by_torch = (
        r"(?s)Inside manager\.phase\('restore'\): state = "
        r"{'actor': "
        r"get_model_state_dict\(\.\.\.\)}.*set_model_state_dict"
    )
    with pytest.raises(placement.CheckpointError, match=by_torch):
        checkpoint.load(manager, tmp_path)
    assert_nothing_resident(manager)
    train()
    assert values() != wanted
    beside.state_dict()["weight"].zero_()
    checkpoint.load(manager, tmp_path, only=["critic"])
    assert beside.state_dict()["weight"].any()
    with manager.phase("restore"):
        state = {
            "actor": get_model_state_dict(model),
            "actor.optimizer": get_optimizer_state_dict(model, optimizer),
        }
        dcp.load(state, checkpoint_id=tmp_path)
        set_model_state_dict(model, state["actor"])
        set_optimizer_state_dict(model, optimizer, state["actor.optimizer"])
    assert values() == wanted
    with manager.phase("train"), manager.phase("checkpoint"):
        assert actor.state is TRAINING, "what is on the device stays in its state"


class Export(torch.nn.Module):
    """It shows its weights in another type, and takes them back; one rank of it may refuse."""

    refuses = False

    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(WIDTH, 7)
        self._register_state_dict_hook(
            lambda _, found, *__: found.update(
                {name: value.to(torch.float64) for name, value in found.items()}
            )
        )
        self.register_load_state_dict_pre_hook(self._take)

    def _take(self, _: Any, given: dict[str, Any], *__: Any) -> None:
        if self.refuses:
            raise ValueError("not on this rank")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.inner(x)
        return found


@pytest.mark.parametrize(("phase", "refused_by"), [(None, None), ("restore", 0), (None, 1)])
@on_ranks("two_ranks")
def test_what_shows_copies_is_loaded_by_its_own_code_and_a_failure_reaches_every_rank(
    phase: str | None, refused_by: int | None, tmp_path: Path
) -> None:
    model: Any = Export()
    fully_shard(model)
    manager = Manager(device=SimulatedDevice(8 << 20, chunk_bytes=4096))
    handle = manager.register("actor", model, role="actor")
    beside = torch.nn.Linear(3, 3)
    other = manager.register("critic", beside, role="critic")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    manager.register("actor.optimizer", optimizer)

    def values() -> list[dict[str, bytes]]:
        return [bytes_of(each.state_dict()) for each in (handle, other)]

    saved = values()
    checkpoint.save(manager, tmp_path)
    with manager.phase("train"), torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2)
    other.state_dict()["weight"].zero_()
    changed = values()
    assert changed != saved
    model.refuses = refused_by == dist.get_rank()
    from_which = "" if refused_by == dist.get_rank() else f"^rank {refused_by}: .*"
    told = pytest.raises(
        placement.CheckpointError, match=f"{from_which}'actor' was being loaded by its own code"
    )
    with (
        nullcontext() if refused_by is None else told,
        nullcontext() if phase is None else manager.phase(phase),
    ):
        checkpoint.load(manager, tmp_path)
    assert values() == saved if refused_by is None else values()[1] == changed[1]


@on_ranks("two_ranks")
def test_a_rank_without_room_for_the_restore_keeps_no_other_waiting(tmp_path: Path) -> None:
    device = Faults(SimulatedDevice(8 << 20, chunk_bytes=4096))
    manager = Manager(device=device)
    model = Export()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    handle = manager.register("actor", model, role="actor")
    manager.register("actor.optimizer", optimizer)
    checkpoint.save(manager, tmp_path)
    if dist.get_rank() == 1:
        device.fail("create")
    told = "^rank 1: " if dist.get_rank() == 0 else "injected fault"
    with pytest.raises(placement.PlacementError, match=told):
        checkpoint.load(manager, tmp_path)
    assert_nothing_resident(manager)
    saved = bytes_of(handle.state_dict())
    checkpoint.load(manager, tmp_path)
    assert bytes_of(handle.state_dict()) == saved
