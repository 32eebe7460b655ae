"""FSDP1 (`FullyShardedDataParallel`), the real one, on CPU ranks with gloo."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import (
    CPUOffload,
    FullyShardedDataParallel,
    MixedPrecision,
    ShardingStrategy,
)

from placement import Manager, PhaseError, RegistrationError
from placement.testing import SimulatedDevice, assert_nothing_resident
from tests.sharded import one_of_each, training
from tests.support.ranks import Ranks, on_ranks
from tests.support.sweeps import few

CPU = torch.device("cpu")
HALF = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


@dataclass(frozen=True)
class Variant:
    use_orig_params: bool
    strategy: ShardingStrategy = ShardingStrategy.FULL_SHARD
    mixed_precision: MixedPrecision | None = None
    optimizer: type[torch.optim.Optimizer] = torch.optim.AdamW
    accumulates: bool = False
    """The first backward pass of a step is not reduced: whole gradients, not this rank's shard,
    cross a phase transition."""
    mesh: tuple[int, ...] = ()
    clips: bool = False
    offloads: bool = False
    frozen: bool = False

    def wrap(self, module: torch.nn.Module, **keywords: Any) -> FullyShardedDataParallel:
        mesh = dist.device_mesh.init_device_mesh("cpu", self.mesh) if self.mesh else None
        keywords = {
            "use_orig_params": self.use_orig_params,
            "sharding_strategy": self.strategy,
            "mixed_precision": self.mixed_precision,
            "device_id": CPU,
            "device_mesh": mesh,
            "cpu_offload": CPUOffload(offload_params=self.offloads),
            **keywords,
        }
        return FullyShardedDataParallel(module, **keywords)

    def model(self) -> FullyShardedDataParallel:
        """Two units in a root: shards are uneven on two ranks, one unit may be frozen, and a buffer
        lies in the root."""
        net = one_of_each.net("cpu")
        if self.frozen:
            net.blocks[0].requires_grad_(False)
        net.blocks = torch.nn.ModuleList(self.wrap(block) for block in net.blocks)
        return self.wrap(net)

    def program(self, **keywords: Any) -> Program:
        model = self.model()
        optimizer = self.optimizer((p for p in model.parameters() if p.requires_grad), lr=0.05)  # type: ignore[call-arg]

        def loss(number: int) -> torch.Tensor:
            found: torch.Tensor = (
                model(one_of_each.rows(number, "cpu", same_data=False)).float().square().mean()
            )
            return found

        return Program(
            model, optimizer, loss, accumulates=self.accumulates, clips=self.clips, **keywords
        )


def units(model: torch.nn.Module) -> Iterator[tuple[str, Any]]:
    for name, part in model.named_modules():
        if isinstance(part, FullyShardedDataParallel) and part._handle is not None:
            yield name, part._handle


@dataclass
class Program(training.Wrapped):
    """Flat parameters count as well: under original names they are hidden."""

    clips: bool = False

    def learn(self, step: int) -> torch.Tensor:
        loss = self.loss(2 * step + 1)
        loss.backward()
        if self.clips:
            self.model.clip_grad_norm_(0.1)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield from super().tensors()
        for name, handle in units(self.model):
            yield f"{name}.flat", handle.flat_param

    def values(self) -> Iterator[tuple[str, torch.Tensor]]:
        hidden = {
            f"{name}.flat.grad" for name, handle in units(self.model) if handle._use_orig_params
        }
        yield from ((name, tensor) for name, tensor in super().values() if name not in hidden)
        for name, handle in units(self.model):
            if hasattr(handle.flat_param, "_local_shard"):
                yield f"{name}.shard", handle.flat_param._local_shard


def managed(variant: Variant) -> tuple[Manager, Program]:
    program = variant.program()
    return training.managed(program), program


# --- single cases


def gathered_bytes(model: torch.nn.Module) -> dict[str, int]:
    """By unit, what it has gathered for computing."""
    fields = ("_full_param_padded", "_full_prec_full_param_padded", "_mp_shard")
    return {
        name: sum(
            getattr(handle.flat_param, field).untyped_storage().nbytes()
            for field in fields
            if hasattr(handle.flat_param, field)
        )
        for name, handle in units(model)
    }


FULL, GRAD_OP, NO, HYBRID = (
    ShardingStrategy[name] for name in ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD")
)
ORIGINAL, FLAT = Variant(True), Variant(False)

VARIANTS = {
    "original-full": Variant(True, FULL, clips=True),
    "original-no_shard": Variant(True, NO),
    "original-half": Variant(True, FULL, HALF),
    "original-accumulating": Variant(True, FULL, accumulates=True, optimizer=torch.optim.Adam),
    "original-frozen": Variant(True, FULL, frozen=True),
    "flat-full": Variant(False, FULL, clips=True),
    "flat-no_shard": Variant(False, NO, optimizer=torch.optim.Adam),
    "flat-replicated": Variant(False, HYBRID, mesh=(2, 1)),
    "flat-half": Variant(False, HYBRID, HALF, mesh=(1, 2)),
    "flat-accumulating": Variant(False, GRAD_OP, accumulates=True),
}
BOTH = pytest.mark.parametrize("variant", [ORIGINAL, FLAT], ids=["original", "flat"])


@pytest.mark.parametrize(
    "name",
    few(VARIANTS, "original-full", "flat-half"),
)
def test_training_between_offloads_is_bit_identical(two_ranks: Ranks, name: str) -> None:
    for outcome in two_ranks.run(training.compare, VARIANTS[name].program):
        assert outcome.resident_bytes["actor"] > 0
        assert outcome.offloaded_bytes["actor.optimizer"] > 0


def test_so_it_is_in_a_world_of_one_where_nothing_is_sharded(one_rank: Ranks) -> None:
    (outcome,) = one_rank.run(training.compare, VARIANTS["flat-full"].program)
    assert outcome.offloaded_bytes["actor"] > 0


@BOTH
@pytest.mark.parametrize(
    "train",
    few(
        [training.compare_dropping, training.compare_zeroing, training.compare_setting_aside],
        training.compare_setting_aside,
    ),
    ids=["dropped", "zeroed", "aside"],
)
def test_gradients(two_ranks: Ranks, variant: Variant, train: Callable[..., object]) -> None:
    """Dropped with the phase; zeroed while they are offloaded; reduced ones beside such as are not,
    which FSDP1 keeps in another field."""
    assert two_ranks.run(train, variant.program)


@BOTH
@on_ranks("two_ranks")
def test_what_was_gathered_is_given_up(variant: Variant) -> None:
    """The trap: after a forward pass without gradients the root stays gathered, under SHARD_GRAD_OP
    every unit does."""
    for strategy, kept in ((FULL, 1), (GRAD_OP, 3)):
        plain, program = (
            dataclasses.replace(variant, strategy=strategy).program() for _ in range(2)
        )
        plain.loss(0).backward()
        loss = program.loss(0)
        manager = training.managed(program)  # while the module shows what was gathered
        assert manager.handles["actor.optimizer"].owners == (manager.handles["actor"],)
        with manager.phase("train"):
            loss.backward()  # gathers again
            assert training.digest(program) == training.digest(plain)
        with manager.phase("log_prob"):
            program.evaluate(0)
            assert sum(nbytes > 0 for nbytes in gathered_bytes(program.model).values()) == kept
        assert_nothing_resident(manager)
        assert set(gathered_bytes(program.model).values()) == {0}


@BOTH
@on_ranks("two_ranks")
def test_summoned_parameters_are_not_torn_from_their_shards(variant: Variant) -> None:
    manager, program = managed(variant)

    def digest() -> dict[str, str]:
        with manager.phase("restore"):
            return training.digest(program)

    with manager.phase("train"):
        program.learn(0)
    before = digest()
    leave = r"leave FSDP\.summon_full_params before the phase ends"
    with (
        manager.phase("train") as phase,
        FullyShardedDataParallel.summon_full_params(program.model, writeback=True),
    ):
        with pytest.raises(PhaseError, match=leave):
            phase.switch("values")
        with pytest.raises(RegistrationError, match=r"outside FSDP\.summon_full_params"):
            Manager(device=SimulatedDevice(training.CAPACITY)).register("again", program.model)
    assert_nothing_resident(manager)
    assert digest() == before
    summoning = FullyShardedDataParallel.summon_full_params(program.model, writeback=True)
    with pytest.raises(PhaseError, match=leave), manager.phase("train"):
        summoning.__enter__()
    assert manager.handles["actor"].resident_bytes > 0
    summoning.__exit__(None, None, None)
    assert digest() == before
    assert_nothing_resident(manager)


@on_ranks("two_ranks")
def test_buffers_that_are_cast_at_the_first_forward_move_from_then_on() -> None:
    """They have other memory then than when they were registered."""
    manager, program = managed(
        dataclasses.replace(ORIGINAL, mixed_precision=MixedPrecision(buffer_dtype=torch.bfloat16))
    )
    with manager.phase("log_prob"):
        program.evaluate(0)
        cast = program.model.module.calls.clone()
    assert cast.dtype is torch.bfloat16
    assert_nothing_resident(manager)
    assert not manager.handles["actor"].holding.watch.drifted(on_device=False)
    with manager.phase("log_prob"):
        assert torch.equal(program.model.module.calls, cast)


@BOTH
@on_ranks("two_ranks")
def test_offloaded_parameters_are_torchs_to_place(variant: Variant) -> None:
    """Without training, for whose backward pass FSDP1 wants an accelerator. It wants pinned memory,
    which is ordinary memory here."""
    manager, program = managed(dataclasses.replace(variant, offloads=True))
    with mock.patch.object(torch.Tensor, "pin_memory", torch.Tensor.clone):
        wanted = training.as_bytes(program.evaluate(0))
        for _ in range(2):
            with manager.phase("log_prob"):
                assert training.as_bytes(program.evaluate(0)) == wanted
    with pytest.raises(PhaseError, match="TRAINING"):
        program.optimizer.step()
    assert all(
        handle.counters.offloaded_bytes == handle.host_bytes == 0
        for handle in manager.handles.values()
    )
    assert manager.audit().ok
    assert all(
        "CPUOffload keeps" in str(handle.external_reason) for handle in manager.handles.values()
    )
    net = one_of_each.net("cpu")
    net.blocks[0] = variant.wrap(net.blocks[0], cpu_offload=CPUOffload(offload_params=True))
    with pytest.raises(RegistrationError, match="wrap all units alike"):
        Manager(device=SimulatedDevice(training.CAPACITY)).register("actor", variant.wrap(net))
