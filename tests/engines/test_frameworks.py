"""`TorchEngine` around modules of every framework: on two ranks with gloo, and alone. The modules are those of tests/sharded."""

from __future__ import annotations

import gc
import logging
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn

from placement import Engine, EngineError, Lazy, Manager, NotResidentError, RegistrationError, State, TorchEngine
from placement.testing import assert_nothing_resident
from tests.engines import matrix_worker as worker
from tests.sharded import test_quantized, training
from tests.support.ranks import Ranks, on_ranks
from tests.support.worker import assert_same, batch, in_a_range, make_manager, net

CPU = torch.device("cpu")


# --- on ranks


@pytest.mark.parametrize("engine", [name for name in worker.MADE if name not in ("plain", "compiled", "ddp")])
def test_an_engine_of_each_framework_is_fed_by_an_actor_of_its_own(two_ranks: Ranks, engine: str) -> None:
    two_ranks.run(worker.roll_out, engine, engine)


@on_ranks("two_ranks")
def test_modules_of_which_a_framework_places_some_are_tracked_together() -> None:
    engine = Several(worker.engine_module("cpu_offload", "cpu"), nn.Linear(3, 3))
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
    assert not any(in_a_range(part) for parameter in inner.parameters() for _, part in training.local_parts(parameter))


@pytest.mark.parametrize(("package", "kind"), test_quantized.CASES)
def test_a_quantised_engine_rolls_out_and_refuses_values_that_it_cannot_hold(package: str, kind: str) -> None:
    inner = test_quantized.BUILD[package](kind)
    wanted = inner(test_quantized.batch(0)).detach()
    manager = make_manager()
    rollout = manager.register("rollout", TorchEngine(inner), role="rollout")
    for _ in range(2):
        with manager.phase("rollout"), torch.no_grad():
            assert_same(inner(test_quantized.batch(0)), wanted)
        assert_nothing_resident(manager, allow_foreign=kind == "nested")
    name, weight = next((name, p) for name, p in inner.named_parameters() if type(p) is not nn.Parameter)
    refusal = rf"published weight '{name}' cannot be written.*(quantised in the same way|whose values are not its bytes)"
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
def test_an_object_that_is_collected_while_registered_is_told_of(kind: str, caplog: pytest.LogCaptureFixture) -> None:
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
    engine.module = net()
    with manager.phase("rollout"):
        pass
    assert any("no longer has" in finding.detail for finding in manager.audit().findings)


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
