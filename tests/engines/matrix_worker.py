"""An engine around a module of each framework, fed by an actor of each, on every rank of a process group."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from placement import EngineError, Manager, NotResidentError, TorchEngine
from placement.frameworks.base import frameworks_of
from placement.frameworks.weights import Reader
from placement.publish.buckets import published
from placement.testing import assert_nothing_resident
from tests.sharded import one_of_each, training

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


def whole_weights(module: nn.Module, device: str, adapters: Any = "merged") -> dict[str, torch.Tensor]:
    reader = Reader(training.here(device))
    with torch.no_grad():
        return {name: weight.whole(reader, weight.dtype) for name, weight in published(module, frameworks_of(module), adapters)}


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
        """Outside the rollout: nothing of it on the device and every use refused; or its framework's, untouched."""
        assert_nothing_resident(self.manager, allow_foreign=True)
        training.assert_off(self.manager)
        if self.kind in EXTERNAL:
            assert self.rollout.external
            assert all(value.isfinite().all() for p in self.module.parameters() for _, value in training.local_parts(p))
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
        """This rank's part of the engine's state dict; None where its framework would have to gather it."""
        try:
            return training.bytes_of(self.rollout.state_dict())
        except NotResidentError:
            assert self.kind in GATHERING
            return None


def roll_out(engine: str, actor: str, device: str = "cpu") -> None:
    """The life of an engine: rollouts and syncs in several orders; what it holds is right in every state."""
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
            assert {name: len(value) for name, value in found.items()} == {name: len(value) for name, value in published.items()}
            assert found == published, [name for name, value in published.items() if found[name] != value]
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
            assert training.as_bytes(module(one_of_each.rows(5, device, same_data=True))) == new_answer


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
