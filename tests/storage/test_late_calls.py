"""A call that another thread is in when its phase ends: nothing waits for it. It reads NaN, its
next call is refused, and the handle keeps its values."""

from __future__ import annotations

import io
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import pytest
import torch
from torch import nn

from placement import Manager, NotResidentError, TorchEngine
from tests.support.worker import assert_same, make_manager

X = torch.ones(2, 4)


class Gate:
    """Where a thread stops until `opened` is set. `reached` tells that it is there."""

    def __init__(self) -> None:
        self.reached, self.opened = threading.Event(), threading.Event()

    def pass_through(self) -> None:
        self.reached.set()
        assert self.opened.wait(60)


class Gated(nn.Module):
    """Uses its weight, and after a gate its weight or its layer."""

    def __init__(self, then: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weight, self.layer = nn.Parameter(torch.randn(4, 4)), nn.Linear(4, 4)
        self.then = then
        self.gate: Gate | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x @ self.weight
        if self.gate is not None:
            self.gate.pass_through()
        return self.layer(x) if self.then == "calls" else x @ self.weight  # type: ignore[no-any-return]


class InThread:
    """Work in a thread of its own, which has reached the gate when this is made."""

    def __init__(self, gate: Gate, work: Callable[[], Any]) -> None:
        self._gate, self._work = gate, work
        self._result: Any = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        assert gate.reached.wait(60)

    def _run(self) -> None:
        try:
            self._result = self._work()
        except Exception as error:
            self._result = error

    def end(self) -> Any:
        self._gate.opened.set()
        self._thread.join(60)
        return self._result


@pytest.fixture
def manager() -> Iterator[Manager]:
    with closing(make_manager()) as made:
        yield made


@pytest.mark.parametrize("then", ["reads", "calls"])
@pytest.mark.parametrize("kind", ["module", "forward", "submodule", "engine"])
@pytest.mark.parametrize("end", ["leave", "switch", "done_with"])
def test_the_end_of_a_phase_does_not_wait(manager: Manager, end: str, kind: str, then: str) -> None:
    gated, role = Gated(then), "rollout" if kind == "engine" else "reward"
    outer = nn.Sequential(gated)
    expected = outer(X).detach()
    target = TorchEngine(outer) if kind == "engine" else outer
    scored = manager.register("scored", target, role=role)
    called = {"submodule": gated, "forward": outer.forward}.get(kind, outer)
    with manager.phase(role) as phase:
        gated.gate = Gate()
        call = InThread(gated.gate, lambda: called(X))
        if end == "switch":
            phase.switch("train")
        elif end == "done_with":
            phase.done_with("scored")
    assert not scored.resident_bytes
    late = call.end()
    if then == "calls":
        assert isinstance(late, NotResidentError)
    else:
        assert late.isnan().all()
    assert manager.audit().ok
    with manager.phase(role):
        assert_same(outer(X).detach(), expected)


def test_what_is_unregistered_keeps_its_values(manager: Manager) -> None:
    gated = Gated("calls")
    expected = gated(X).detach()
    manager.register("scored", gated, role="reward")
    with manager.phase("reward"):
        gated.gate = Gate()
        call = InThread(gated.gate, lambda: gated(X))
        manager.unregister("scored")
    call.end()
    assert_same(gated(X).detach(), expected)


def test_weights_are_published_beside_a_call(manager: Manager) -> None:
    actor, generating = Gated("calls"), Gated("reads")
    nn.init.ones_(actor.weight)
    engine = TorchEngine(generating)
    published = manager.register("actor", actor, role="actor")
    manager.register("rollout", engine, role="rollout")
    with manager.phase("rollout") as phase:
        generating.gate = Gate()
        call = InThread(generating.gate, lambda: generating(X))
        phase.switch("weight_sync")
        for bucket in published.weights():
            engine.update_weights(bucket)
        assert isinstance(call.end(), torch.Tensor)
        assert_same(dict(engine.state_dict()), dict(actor.state_dict()))


def test_a_call_that_ends_its_own_phase(manager: Manager) -> None:
    """The rest of the call is refused. A hook of the module itself runs when nothing is left."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    scored = manager.register("scored", model, role="reward")
    for module in (model[0], model):
        manager.enter("reward")
        hook = module.register_forward_hook(lambda *_: manager.leave())
        if module is model:
            assert torch.isfinite(model(X)).all()
        else:
            with pytest.raises(NotResidentError):
                model(X)
        hook.remove()
        assert not scored.resident_bytes


class SlowFile(io.BytesIO):
    """Stops a save before the first of the big tensors is written."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = Gate()

    def write(self, data: Any) -> int:
        if len(data) >= 4096:
            self.gate.pass_through()
        return super().write(data)


def test_a_save_that_is_late_writes_nan(manager: Manager) -> None:
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    manager.register("scored", model, role="reward")
    file = SlowFile()
    with manager.phase("reward"):
        saving = InThread(file.gate, lambda: torch.save(model.state_dict(), file))
    saving.end()
    file.seek(0)
    assert torch.load(file)["1.weight"].isnan().all()
    assert manager.audit().ok
    assert_same(dict(model.state_dict()), expected)
