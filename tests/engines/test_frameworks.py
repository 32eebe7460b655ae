"""`TorchEngine` around modules of every framework: on two ranks with gloo, and alone. The modules
are those of tests/sharded."""

from __future__ import annotations

import gc
import logging
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn

from placement import (
    Engine,
    EngineError,
    Lazy,
    Manager,
    NotResidentError,
    RegistrationError,
    State,
    TorchEngine,
)
from placement.frameworks.base import frameworks_of
from placement.frameworks.weights import Reader
from placement.publish.buckets import publishable
from placement.testing import assert_nothing_resident
from tests.sharded import one_of_each, test_quantized, training
from tests.support.ranks import Ranks, on_ranks
from tests.support.sweeps import few
from tests.support.worker import assert_same, batch, in_a_range, make_manager, net

# --- on ranks: an engine around a module of each framework, fed by an actor of each; tests/gpu runs
# the same with NCCL

GATHERING = {"fsdp1_original", "fsdp1_flat"}
"""Whose state dict is torch's to gather, on the device."""
EXTERNAL = {"cpu_offload"}
BUCKET_BYTES = 4096


def plain(device: str) -> training.Program:
    return one_of_each.program(one_of_each.net(device), device)


def compiled(device: str) -> training.Program:
    return one_of_each.program(torch.compile(one_of_each.net(device), backend="eager"), device)


def ddp_apart(device: str) -> training.Program:
    return one_of_each.program(nn.parallel.DistributedDataParallel(one_of_each.net(device)), device)


MADE = {each.__name__: each for each in (plain, compiled, ddp_apart)} | one_of_each.PROGRAMS


def engine_module(kind: str, device: str) -> Any:
    """A module of a kind, in inference, with other values than an actor of that kind has."""
    model = MADE[kind](device).model.requires_grad_(False).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            for _, part in training.local_parts(parameter):
                part.mul_(0.5)
    return model


def whole_weights(
    module: nn.Module, device: str, adapters: Any = "merged"
) -> dict[str, torch.Tensor]:
    reader = Reader(training.here(device))
    with torch.no_grad():
        return {
            name: weight.whole(reader, weight.dtype)
            for name, weight in publishable(module, frameworks_of(module), adapters)
        }


class Rig:
    """An actor, its optimizer and an engine that nobody but the manager holds."""

    def __init__(self, engine: str, actor: str, device: str = "cpu") -> None:
        self.kind, self.device = engine, device
        torch.manual_seed(0)
        self.program = MADE[actor](device)
        self.module = engine_module(engine, device)
        with torch.no_grad():
            self.first_answer = training.as_bytes(self.answer())
        self.manager = Manager(device=training.device_of(device))
        self.program.register(self.manager)
        self.rollout = self.manager.register("rollout", TorchEngine(self.module), role="rollout")
        self.actor = self.manager.handles["actor"]
        self.published: tuple[Any, ...] = ("base", "separate") if engine == "lora" else ("merged",)

    def answer(self) -> torch.Tensor:
        out: torch.Tensor = self.module(one_of_each.rows(5, self.device, same_data=True))
        return out

    def assert_away(self) -> None:
        """Outside the rollout: nothing of it on the device and every use refused; or its
        framework's, untouched."""
        assert_nothing_resident(self.manager, allow_foreign=True)
        training.assert_off(self.manager)
        if self.kind in EXTERNAL:
            assert self.rollout.external
            assert all(
                value.isfinite().all()
                for p in self.module.parameters()
                for _, value in training.local_parts(p)
            )
            return
        assert not self.rollout.external
        assert (self.rollout.resident_bytes, bool(self.rollout.host_bytes)) == (0, True)
        with pytest.raises(NotResidentError, match="'rollout' is CPU_OFFLOADED"):
            self.answer()

    def sync(self) -> dict[str, bytes]:
        seen: dict[str, bytes] = {}
        for adapters in self.published:
            for bucket in self.actor.weights(bucket_bytes=BUCKET_BYTES, adapters=adapters):
                seen |= {name: training.as_bytes(tensor) for name, tensor in bucket}
                self.rollout.object.update_weights(bucket)
        return seen

    def engine_weights(self) -> dict[str, bytes]:
        found = [whole_weights(self.module, self.device, adapters) for adapters in self.published]
        return {name: training.as_bytes(tensor) for each in found for name, tensor in each.items()}

    def state_dict(self) -> dict[str, bytes] | None:
        """This rank's part of the engine's state dict; None where its framework would have to
        gather it."""
        try:
            return training.bytes_of(self.rollout.state_dict())
        except NotResidentError:
            assert self.kind in GATHERING
            return None


def roll_out(engine: str, actor: str, device: str = "cpu") -> None:
    """The life of an engine: rollouts and syncs in several orders; what it holds is right in every
    state."""
    rig = Rig(engine, actor, device)
    manager = rig.manager
    rig.assert_away()
    for step in range(2):
        with manager.phase("rollout"), torch.no_grad():
            answer = training.as_bytes(rig.answer())
            assert step or answer == rig.first_answer
            assert rig.rollout.resident_bytes > 0 or engine in EXTERNAL
        rig.assert_away()
        with manager.phase("train"):
            rig.program.learn(step)
        with manager.phase("rollout") as phase:
            with torch.no_grad():
                rig.answer()  # leaves a root of FSDP unsharded, which a sync must not write to
            phase.switch("weight_sync")
            published = rig.sync()
            phase.switch("rollout")
            with torch.no_grad():
                new_answer = training.as_bytes(rig.answer())
            assert new_answer != answer
        with manager.phase("weight_sync"):
            found = rig.engine_weights()
            assert {name: len(value) for name, value in found.items()} == {
                name: len(value) for name, value in published.items()
            }
            assert found == published, [
                name for name, value in published.items() if found[name] != value
            ]
            inside = rig.state_dict() if engine not in GATHERING else None
            values = training.bytes_of(dict(rig.module.named_parameters()))
        rig.assert_away()
        assert rig.state_dict() == inside
        manager.check_integrity()
    refuses_what_it_should(rig)
    module = rig.module
    manager.close()
    assert manager.device.memory().chunk_bytes == 0
    assert training.bytes_of(dict(module.named_parameters())) == values
    if device == "cpu":  # elsewhere it has been left on the host
        with torch.no_grad():
            assert (
                training.as_bytes(module(one_of_each.rows(5, device, same_data=True))) == new_answer
            )


def refuses_what_it_should(rig: Rig) -> None:
    engine = rig.manager.handles["rollout"].object
    name, value = next(iter(rig.rollout.weights_info())).name, torch.zeros(3, 1, 4)
    if rig.kind not in EXTERNAL:
        with pytest.raises(EngineError, match="'rollout' are offloaded"):
            engine.update_weights([(name, value)])
    with rig.manager.phase("weight_sync"):
        for wrong in (name, "no.such"):
            with pytest.raises(EngineError, match=f"published weight '{wrong}'"):
                engine.update_weights([(wrong, value)])


@pytest.mark.parametrize(
    "engine",
    few(
        [name for name in MADE if name not in ("plain", "compiled", "ddp")],
        *("fsdp2", "tensor_parallel"),
    ),
)
def test_an_engine_of_each_framework_is_fed_by_an_actor_of_its_own(
    two_ranks: Ranks, engine: str
) -> None:
    two_ranks.run(roll_out, engine, engine)


@on_ranks("two_ranks")
def test_modules_of_which_a_framework_places_some_are_tracked_together() -> None:
    engine = Several(engine_module("cpu_offload", "cpu"), nn.Linear(3, 3))
    manager = Manager(device=training.device_of("cpu"))
    rollout = manager.register("rollout", engine, role="rollout")
    assert rollout.external_reason is not None
    assert "FSDP2's CPUOffloadPolicy" in rollout.external_reason
    with manager.phase("rollout"):
        assert engine.parts[1](torch.ones(3)).isfinite().all()
    assert not in_a_range(engine.parts[1].weight)


# --- alone


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.ones(6), persistent=False)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        words = inputs.abs().mul(10).long().flatten().clamp(0, 10)
        out: torch.Tensor = self.head(self.embed(words) * self.scale)
        return out


ALONE: dict[str, Callable[[], nn.Module]] = {
    "plain": net,
    "tied": Tied,
    "compiled": lambda: torch.compile(net(), backend="eager"),  # type: ignore[return-value]
    "torchao": lambda: test_quantized.torchao_model("int8"),
}


@pytest.mark.parametrize("kind", ALONE)
def test_an_engine_in_a_process_of_its_own(kind: str) -> None:
    model, inner = ALONE[kind](), ALONE[kind]()
    manager = make_manager()
    actor = manager.register("actor", model, role="actor")
    rollout = manager.register("rollout", TorchEngine(inner), role="rollout")
    for _ in range(2):
        with manager.phase("weight_sync") as phase, torch.no_grad():
            for bucket in actor.weights(bucket_bytes=2000):
                rollout.object.update_weights(bucket)
            wanted = model(batch())
            phase.switch("rollout")
            assert_same(inner(batch()), wanted)
        assert_nothing_resident(manager)
        with pytest.raises(NotResidentError, match="'rollout' is CPU_OFFLOADED"):
            inner(batch())
        with pytest.raises(NotResidentError, match="'rollout' is CPU_OFFLOADED"):
            inner.load_state_dict({})
        assert training.bytes_of(inner.state_dict()) == training.bytes_of(model.state_dict())
        manager.check_integrity()
    manager.close()
    assert_same(inner(batch()).detach(), wanted)
    assert not any(
        in_a_range(part)
        for parameter in inner.parameters()
        for _, part in training.local_parts(parameter)
    )


@pytest.mark.parametrize(("package", "kind"), test_quantized.CASES)
def test_a_quantised_engine_rolls_out_and_refuses_values_that_it_cannot_hold(
    package: str, kind: str
) -> None:
    inner = test_quantized.BUILD[package](kind)
    wanted = inner(test_quantized.batch(0)).detach()
    manager = make_manager()
    rollout = manager.register("rollout", TorchEngine(inner), role="rollout")
    for _ in range(2):
        with manager.phase("rollout"), torch.no_grad():
            assert_same(inner(test_quantized.batch(0)), wanted)
        assert_nothing_resident(manager, allow_foreign=kind == "nested")
    name, weight = next(
        (name, p) for name, p in inner.named_parameters() if type(p) is not nn.Parameter
    )
    refusal = (
        rf"published weight '{name}' cannot be written.*(quantised in the "
        r"same "
        r"way|whose "
        r"values "
        r"are not its bytes)"
    )
    with manager.phase("weight_sync"), pytest.raises(EngineError, match=refusal):
        rollout.object.update_weights([(name, torch.zeros(weight.shape))])
    with manager.phase("rollout"), torch.no_grad():
        assert_same(inner(test_quantized.batch(0)), wanted)
    manager.close()


# --- who holds an engine


@pytest.mark.parametrize("way", ["unregister", "close", "drop"])
def test_it_goes_with_its_registration(way: str, caplog: pytest.LogCaptureFixture) -> None:
    manager: Any = make_manager()
    made = Lazy(lambda: TorchEngine(net()), kind="engine") if way == "close" else TorchEngine(net())
    manager.register("rollout", made, role="rollout")
    del made
    gc.collect()
    with manager.phase("rollout"):
        assert manager.handles["rollout"].resident_bytes  # the manager holds it
    assert_nothing_resident(manager)
    engine = weakref.ref(manager.handles["rollout"].object)
    module = weakref.ref(engine().module)  # type: ignore[union-attr]
    if way == "unregister":
        manager.unregister("rollout")
    elif way == "close":
        manager.close()
    else:
        del manager
    gc.collect()
    assert engine() is None
    assert module() is None
    assert not caplog.records


@pytest.mark.parametrize("kind", ["module", "optimizer"])
def test_an_object_that_is_collected_while_registered_is_told_of(
    kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    manager, model = make_manager(), net()
    optimizer = torch.optim.SGD(model.parameters())
    manager.register("actor", model, role="actor")
    manager.register("actor.optimizer", optimizer)
    name = "actor" if kind == "module" else "actor.optimizer"
    del optimizer
    if kind == "module":
        del model
    gc.collect()
    with caplog.at_level(logging.WARNING, logger="placement"), manager.phase("log_prob"):
        assert name not in manager.handles
    told = [record.getMessage() for record in caplog.records if repr(name) in record.getMessage()]
    assert len(told) == 1
    assert f"(kind {kind}) was garbage-collected" in told[0]


# --- an engine of several modules, and one that changes


class Several(Engine):
    def __init__(self, *parts: nn.Module) -> None:
        self.parts: Sequence[nn.Module] = parts

    def modules(self) -> Sequence[nn.Module]:
        return self.parts

    def update_weights(self, bucket: Any) -> None:
        raise EngineError("not today")


def test_a_model_that_replaces_another_is_moved_and_guarded() -> None:
    engine = Several(net())
    manager = make_manager()
    rollout = manager.register("rollout", engine, role="rollout")
    with manager.phase("rollout"):
        old, new = engine.parts[0], net()
        engine.parts = (new,)
        wanted = new(batch()).detach()
    assert rollout.resident_bytes == 0
    for module in (old, new):
        with pytest.raises(NotResidentError, match="'rollout' is CPU_OFFLOADED"):
            module(batch())
    holding = rollout.holding
    assert holding is not None
    assert len(holding.announce.leaving) == 1, "the guard of the old model alone is told no more"
    assert all(tensor.isfinite().all() for tensor in new.state_dict().values())
    with manager.phase("rollout"):
        assert_same(new(batch()).detach(), wanted)
    manager.close()
    assert_same(new(batch()).detach(), wanted)


def test_a_model_that_is_added_to_one_that_stays_as_it_was_is_seen() -> None:
    """The others have not changed at all, so that nobody would look at each of their tensors."""
    engine = Several(net())
    manager = make_manager()
    rollout = manager.register("rollout", engine, role="rollout")
    for _ in range(3):
        with manager.phase("rollout"):
            pass
    with manager.phase("rollout"):
        engine.parts = (*engine.parts, net())
    assert rollout.host_bytes >= 2 * sum(p.nbytes for p in engine.parts[0].parameters())
    with pytest.raises(NotResidentError):
        engine.parts[1](batch())
    assert_nothing_resident(manager)


def test_modules_that_share_a_trunk_are_one_object() -> None:
    trunk = nn.Linear(64, 64)
    engine = Several(nn.Sequential(trunk, nn.Linear(64, 2)), nn.Sequential(trunk, nn.Linear(64, 3)))
    manager = make_manager()
    rollout = manager.register("rollout", engine, role="rollout")
    for _ in range(3):
        with manager.phase("rollout"):
            answers = [part(batch()).detach() for part in engine.parts]
        assert rollout.stray_references == 0
    assert_nothing_resident(manager)
    manager.close()
    for part, answer in zip(engine.parts, answers, strict=True):
        assert_same(part(batch()).detach(), answer)


def test_an_optimizer_of_an_engines_parameters_has_the_engine_as_its_owner() -> None:
    engine = TorchEngine(net())
    manager = make_manager()
    rollout = manager.register("rollout", engine, role="actor")
    optimizer = torch.optim.AdamW(engine.module.parameters())
    handle = manager.register("rollout.optimizer", optimizer)
    assert handle.owners == (rollout,)
    with manager.phase("train"):
        engine.module(batch()).square().mean().backward()
        optimizer.step()
    assert manager.audit().ok
    with manager.phase("rollout"):
        engine.module = net()
    with manager.phase("rollout"):
        pass
    assert any("does not have" in finding.detail for finding in manager.audit().findings)


def test_an_external_engine_is_tracked_and_never_moved() -> None:
    manager, inner = make_manager(), net()
    handle = manager.register("rollout", TorchEngine(inner), role="rollout", external=True)
    assert handle.external
    assert handle.state is State.CPU_OFFLOADED
    assert inner(batch()).isfinite().all()
    assert not in_a_range(inner[0].weight)


def test_what_cannot_be_moved_is_refused_and_leaves_nothing() -> None:
    manager, engine = make_manager(), Several(net(), nn.LazyLinear(3))
    with pytest.raises(RegistrationError, match="has no shape yet"):
        manager.register("rollout", engine)
    assert not manager.handles
    assert not any(in_a_range(parameter) for parameter in engine.parts[0].parameters())
