"""A call of a module that another thread is in when the module is to leave the device, or to be
written: it is waited for."""

from __future__ import annotations

import io
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import pytest
import torch
from torch import nn

from placement import Manager, NotResidentError, PhaseError, TorchEngine
from placement.core.call_guard import CallGuard, _stacks_of_others
from tests.support.worker import make_manager

X = torch.ones(2, 4)


class Gate:
    """Where a forward stops: it tells that it is there, and goes on once somebody waits for it (or
    `opened` is set)."""

    def __init__(self) -> None:
        self.reached, self.opened = threading.Event(), threading.Event()

    def pass_through(self) -> None:
        self.reached.set()
        assert self.opened.wait(60)


class Gated(nn.Module):
    """Uses its weights before a gate and after it."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)
        self.weight = nn.Parameter(torch.randn(4, 4))
        self.gate: Gate | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x) @ self.weight
        if self.gate is not None:
            self.gate.pass_through()
        return self.last(x) @ self.weight  # type: ignore[no-any-return]


GATES: list[Gate] = []
"""The gate of the call that was begun last."""


class InThread:
    """A call in a thread of its own, which has reached the gate when this is made."""

    def __init__(self, gated: Gated, call: Callable[[], torch.Tensor]) -> None:
        self.gate = gated.gate = Gate()
        GATES[:] = [self.gate]
        self.result: Any = None
        self._call = call
        self.thread = threading.Thread(target=self._run, name="scorer", daemon=True)
        self.thread.start()
        assert self.gate.reached.wait(60)

    def _run(self) -> None:
        try:
            self.result = self._call()
        except Exception as error:
            self.result = error

    def open_when_awaited(self) -> None:
        self.when_awaited(self.gate.opened.set)

    def when_awaited(self, do: Callable[[], object]) -> None:
        """Do something in another thread once this thread is inside `CallGuard.wait`."""
        ident, wait = threading.get_ident(), CallGuard.wait.__code__

        def watch() -> None:
            while not any(
                frame.f_code is wait
                for other, stack in _stacks_of_others()
                if other == ident
                for frame in stack
            ):
                time.sleep(1e-3)
            do()

        threading.Thread(target=watch, daemon=True).start()

    def end(self) -> Any:
        self.gate.opened.set()
        self.thread.join(60)
        return self.result


@pytest.fixture
def manager() -> Iterator[Manager]:
    with closing(make_manager()) as made:
        yield made


WAYS = {
    "call": lambda model: model,
    "forward": lambda model: model.forward,
    "wrapped": nn.Sequential,
    "compiled function": lambda model: torch.compile(lambda x: (model(x), 0)[0], backend="eager"),
}


@torch.library.custom_op("placement_tests::stop", mutates_args=())
def stop(x: torch.Tensor) -> torch.Tensor:
    for gate in GATES:
        gate.pass_through()
    return x.clone()


@stop.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


class Compilable(Gated):
    """The same, with the gate in an operation that dynamo does not look into."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = stop(self.first(x) @ self.weight)
        return self.last(x) @ self.weight  # type: ignore[no-any-return]


@pytest.mark.parametrize("end", ["leave", "unregister"])
@pytest.mark.parametrize("kind", ["module", "engine", "submodule"])
def test_the_end_of_a_phase_waits_for_the_call(manager: Manager, kind: str, end: str) -> None:
    gated, role = Gated(), "rollout" if kind == "engine" else "reward"
    outer = nn.Sequential(gated)
    expected = outer(X).detach()
    manager.register("scored", TorchEngine(outer) if kind == "engine" else outer, role=role)
    manager.enter(role)
    call = InThread(gated, lambda: (gated if kind == "submodule" else outer)(X))
    call.open_when_awaited()
    if end == "unregister":
        manager.unregister("scored")
        assert torch.equal(call.end(), expected)
    manager.leave()
    assert torch.equal(call.end(), expected)


@pytest.mark.parametrize("way", WAYS)
@torch.no_grad()
def test_however_it_is_called(manager: Manager, way: str) -> None:
    torch._dynamo.reset()
    model = Compilable() if "compiled" in way else Gated()
    GATES.clear()
    expected = model(X).detach()
    manager.register("scored", model, role="reward")
    with manager.phase("reward") as phase:
        made = WAYS[way](model)
        assert torch.equal(made(X), expected)
        call = InThread(model, lambda: made(X))
        call.open_when_awaited()
        phase.done_with("scored")
        assert torch.equal(call.end(), expected)
        with pytest.raises(NotResidentError):
            made(X)


def test_a_call_that_does_not_end_stops_the_transition_and_loses_nothing() -> None:
    with closing(make_manager(call_deadline_seconds=0.05)) as manager:
        gated, other = Gated(), Gated(1)
        expected = gated(X).detach()
        scored = manager.register("scored", gated, role="reward")
        manager.register("other", other, role="reward")
        manager.enter("reward")
        call = InThread(gated, lambda: gated(X))
        message = (
            r"'scored' is still being called in thread 'scorer' after 0\.\d s, so "
            r"it "
            r"stays "
            r"on the "
            r"device.* call_deadline_seconds"
        )
        with pytest.raises(PhaseError, match=message):
            manager.switch("train")
        # all or nothing
        assert (bool(scored.resident_bytes), scored.phase_now()) == (True, "reward")
        assert torch.equal(other(X), Gated(1)(X))
        with pytest.raises(PhaseError, match=message):
            manager.unregister("scored")
        with pytest.raises(PhaseError, match=message):
            manager.leave()
        # as far as possible
        assert (bool(scored.resident_bytes), manager.handles["other"].resident_bytes) == (True, 0)
        assert torch.equal(call.end(), expected)
        with manager.phase("reward"):
            gated.gate = None
            assert torch.equal(gated(X), expected)
        assert not scored.resident_bytes


def test_ctrl_c_ends_the_wait_for_a_call(manager: Manager) -> None:
    gated = Gated()
    expected = gated(X).detach()
    scored = manager.register("scored", gated, role="reward")
    manager.enter("reward")
    call = InThread(gated, lambda: gated(X).detach())
    call.when_awaited(lambda: os.kill(os.getpid(), signal.SIGINT))
    with pytest.raises(KeyboardInterrupt) as caught:
        manager.switch("train")
    assert not isinstance(caught.value.__context__, PhaseError), "it came when the wait was over"
    assert (bool(scored.resident_bytes), scored.phase_now()) == (True, "reward")
    assert torch.equal(call.end(), expected)
    manager.leave()
    assert not scored.resident_bytes


def test_a_call_that_begins_just_before_calls_are_refused_runs_to_its_end(
    manager: Manager, monkeypatch: pytest.MonkeyPatch
) -> None:
    gated = Gated()
    expected = gated(X).detach()
    manager.register("scored", gated, role="reward")
    calls: list[InThread] = []
    refuse = CallGuard.refuse

    def late(guard: CallGuard) -> None:
        if not calls:
            # its last layer is called when calls are refused
            calls.append(InThread(gated, lambda: gated(X).detach()))
            calls[0].open_when_awaited()
        refuse(guard)

    with manager.phase("reward"):
        monkeypatch.setattr(CallGuard, "refuse", late)
    assert torch.equal(calls[0].end(), expected)


def test_weights_are_not_taken_in_the_middle_of_a_call(manager: Manager) -> None:
    actor, generating = Gated(1), Gated(2)
    before, after = generating(X).detach(), actor(X).detach()
    engine = TorchEngine(generating)
    published = manager.register("actor", actor, role="actor")
    manager.register("rollout", engine, role="rollout")
    with manager.phase("rollout") as phase:
        call = InThread(generating, lambda: generating(X))
        phase.switch("weight_sync")
        for bucket in published.weights():
            call.open_when_awaited()
            engine.update_weights(bucket)
        assert torch.equal(call.end(), before)
        generating.gate = None
        assert torch.equal(generating(X), after)


def test_a_call_ends_its_own_phase(manager: Manager) -> None:
    """From inside forward() that is an error at once; a hook that runs after it may."""
    gated = Gated()
    scored = manager.register("scored", gated, role="reward")
    manager.enter("reward")
    hook = gated.first.register_forward_hook(lambda *_: manager.switch("train"))
    with pytest.raises(
        PhaseError,
        match=r"'scored' cannot be offloaded.* from inside its own forward\(\)",
    ):
        gated(X)
    hook.remove()
    assert scored.resident_bytes
    hook = gated.register_forward_hook(lambda *_: manager.switch("train"))
    assert torch.isfinite(gated(X)).all()
    hook.remove()
    assert not scored.resident_bytes
    manager.leave()


class SlowFile(io.BytesIO):
    """Stops a save when the first of the big tensors is written, until something waits for it or
    `opened` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = Gate()

    def write(self, data: Any) -> int:
        if len(data) >= 4096:
            self.gate.pass_through()
        return super().write(data)


@pytest.mark.parametrize("of", ["actor", "actor.optimizer"])
@pytest.mark.parametrize("zipped", [True, False])
def test_a_file_that_another_thread_is_saving_gets_all_values(of: str, zipped: bool) -> None:
    """`torch.save` takes the storages of a state dict in the beginning, and reads them until its
    end."""
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
    optimizer = torch.optim.Adam(model.parameters())
    with closing(make_manager()) as manager:
        manager.register("actor", model, role="actor")
        manager.register("actor.optimizer", optimizer)
        file = SlowFile()
        with manager.phase("train"):
            model(torch.ones(1, 32)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            saved: Any = model.state_dict() if of == "actor" else optimizer.state_dict()
            thread = threading.Thread(
                target=lambda: torch.save(saved, file, _use_new_zipfile_serialization=zipped)
            )
            thread.start()
            assert file.gate.reached.wait(60)
            threading.Timer(0.1, file.gate.opened.set).start()
        thread.join()
        file.seek(0)
        torch.testing.assert_close(torch.load(file), dict(saved), rtol=0, atol=0)
        assert manager.audit().ok


def test_a_save_that_does_not_end_stops_the_transition_and_loses_nothing() -> None:
    model, file = nn.Linear(32, 32), SlowFile()
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    with closing(make_manager(call_deadline_seconds=0.05)) as manager:
        scored = manager.register("scored", model, role="reward")
        manager.enter("reward")
        thread = threading.Thread(target=lambda: torch.save(model.state_dict(), file))
        thread.start()
        assert file.gate.reached.wait(60)
        with pytest.raises(
            PhaseError,
            match=r"torch.save in another thread "
            r"still "
            r"reads "
            r"'scored'.*call_deadline_seconds",
        ):
            manager.leave()
        file.gate.opened.set()
        thread.join()
        file.seek(0)
        torch.testing.assert_close(torch.load(file), expected, rtol=0, atol=0)
        with manager.phase("reward"):
            torch.testing.assert_close(dict(model.state_dict()), expected, rtol=0, atol=0)
        assert not scored.resident_bytes
        assert manager.audit().ok


def test_other_calls_are_not_waited_for() -> None:
    """Of a module that stays, of one that is not registered, and of one whose forward has ended in
    an error."""
    with closing(make_manager(call_deadline_seconds=0)) as manager:
        leaving, staying, stranger = Gated(), Gated(), Gated()
        manager.register("leaving", leaving, role="reward")
        manager.register("staying", staying, role="reward")
        with manager.phase("reward") as phase:
            calls = [InThread(each, lambda each=each: each(X)) for each in (staying, stranger)]  # type: ignore[misc]
            with pytest.raises(RuntimeError):
                leaving(torch.ones(3, 3))
            phase.done_with("leaving")
            assert all(isinstance(call.end(), torch.Tensor) for call in calls)


def test_a_call_that_ends_in_the_last_pause_before_the_deadline_is_not_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen = iter([{1}, set[int]()])
    monkeypatch.setattr("placement.core.call_guard._threads_that_call", lambda _: next(seen))
    CallGuard(lambda *_: None, [nn.Linear(1, 1)], "net", 0.0).wait(time.monotonic())
    assert not [*seen]
