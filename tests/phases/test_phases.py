"""Phases and holds: nesting, only, switch, keep, threads and tasks, and every way out."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import gc
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import placement
from placement import Handle, PhaseError, Plan, PolicyError
from placement.storage.transfer.verification import Verifier
from placement.testing import Faults, SimulatedDevice, assert_nothing_resident
from tests.support.threads import in_a_thread
from tests.support.worker import (
    CAPACITY,
    GPU,
    OFF,
    SYNC,
    TRAIN,
    Scripted,
    Worker,
    assert_same,
    everything,
    learn,
    make_manager,
    net,
)


def test_only_takes_names_handles_and_any_iterable_but_no_string(worker: Worker) -> None:
    with pytest.raises(TypeError, match=r"only=\['actor'\]"):
        worker.manager.phase("train", only="actor")
    with (
        worker.manager.phase("train") as phase,
        pytest.raises(TypeError, match=r"only=\['actor'\]"),
    ):
        phase.switch("values", only="actor")
    with worker.manager.phase("train", only=[worker.critic]) as phase:
        assert worker.on_device() == {"critic"}
        both: list[str | Handle] = ["actor", worker.critic]
        phase.switch("train", only=iter(both))
        assert worker.on_device() == {"actor", "critic"}
    with pytest.raises(TypeError, match="names or handles"):
        worker.manager.phase("train", only=[3])  # type: ignore[list-item]


def test_a_switch_to_the_open_phase_moves_nothing(worker: Worker) -> None:
    """It begins each step of a loop in one open phase, the first one included."""
    with worker.manager.phase("log_prob") as phase:
        entries = list(worker.manager.journal)
        phase.switch("log_prob")
        assert list(worker.manager.journal) == entries
        assert worker.on_device() == {"actor", "ref"}


def test_a_phase_transition_counts_for_the_phase_that_it_goes_to() -> None:
    """Its stall, its time and its journal entries; also if it fails, and for a phase that was
    garbage-collected."""
    device = Faults(SimulatedDevice(CAPACITY))
    worker = Worker(device=device)
    manager = worker.manager
    num_entries = 0
    manager.metrics()

    def counted() -> set[str]:
        """The phases that stalls count for since the last call. Journal entries are theirs, too."""
        nonlocal num_entries
        stalled = {
            name.removeprefix("placement/stall_seconds/")
            for name, seconds in manager.metrics().items()
            if name.startswith("placement/stall_seconds/") and seconds
        }
        entries = list(manager.journal)[num_entries:]
        num_entries += len(entries)
        assert {entry.phase for entry in entries} <= stalled
        return stalled

    with manager.phase("train", only=["critic"]) as phase:
        assert counted() == {"train"}
        with manager.phase("ref_log_prob"):
            assert counted() == {"ref_log_prob"}
        assert counted() == {"train"}
        assert manager.journal.phase_spans()[-1].only == ("critic",)
        phase.switch("values")
        assert counted() == {"values"}
        device.fail("copy")
        with pytest.raises(RuntimeError, match="injected fault"):
            phase.switch("log_prob")
        assert counted() == {"log_prob"}
        phase.done_with("critic")
        assert counted() == {"values"}
    assert counted() == {"idle"}
    context = manager.phase("log_prob")
    context.__enter__()
    assert counted() == {"log_prob"}
    del context
    gc.collect()
    assert counted() == {"idle"}


def test_decisions_are_counted_for_entries_and_switches_alone(worker: Worker) -> None:
    """Not for what joins or leaves an open phase."""
    assert worker.manager.snapshot().policy_decisions == {}
    with worker.manager.phase("log_prob") as phase:
        counted = worker.manager.snapshot().policy_decisions
        assert counted == {"load": 2, "keep": 3}
        phase.done_with("ref")
        late = net()
        worker.manager.register("late", late, role="reward")
    assert worker.manager.snapshot().policy_decisions == counted


def test_the_end_of_a_phase_waits_for_no_kernel_where_a_framework_moves_the_bytes() -> None:
    device = SimulatedDevice(CAPACITY)
    manager, module = make_manager(device=device), net()
    manager.register("actor", module, role="actor", external=True)
    waits = []
    device.wait_for_work = lambda: waits.append(None)  # type: ignore[method-assign]
    with manager.phase("log_prob"):
        assert manager.handles["actor"].state is GPU
    assert manager.handles["actor"].state is OFF
    assert waits == []


def test_switch_moves_no_bytes_of_what_both_phases_need(worker: Worker) -> None:
    with worker.manager.phase("log_prob") as phase:
        loaded = worker.actor.counters.loaded_bytes
        address = worker.net[0].weight.data_ptr()
        phase.switch("train")
        assert worker.states() == {
            "actor": TRAIN,
            "actor.optimizer": TRAIN,
            "ref": OFF,
            "critic": TRAIN,
            "critic.optimizer": TRAIN,
        }
        phase.switch("weight_sync")
        assert worker.states()["actor"] is SYNC
        phase.switch("train")
        assert worker.actor.counters.loaded_bytes == loaded
        assert worker.actor.counters.transitions["offload"] == 0
        assert worker.net[0].weight.data_ptr() == address
    triggers = [r.trigger for r in worker.manager.journal if r.handle == "actor"]
    assert triggers == [
        "load",
        "begin_train",
        "train_to_sync",
        "sync_to_train",
        "end_train",
        "offload",
    ]


def test_a_kept_handle_is_taken_over_by_the_next_phase_without_a_byte(worker: Worker) -> None:
    with worker.manager.phase("log_prob") as phase:
        phase.keep(worker.actor)
        phase.keep("actor")
        with pytest.raises(PolicyError, match="unknown phase 'trian'"):
            phase.switch("trian")  # a switch that fails leaves the phase as it was
    assert worker.on_device() == {"actor"}
    assert worker.states()["actor"] is GPU
    snapshot = worker.manager.snapshot()
    assert snapshot.kept_bytes == worker.actor.resident_bytes > 0
    assert snapshot.expired_keeps == 0
    assert worker.manager.audit().ok
    loaded = worker.actor.counters.loaded_bytes
    with worker.manager.phase("train"):
        assert worker.actor.counters.loaded_bytes == loaded
        assert worker.manager.snapshot().kept_bytes == 0
    assert worker.manager.snapshot().expired_keeps == 0
    assert_nothing_resident(worker.manager)


@pytest.mark.parametrize("by_switch", [False, True])
def test_a_keep_that_is_not_wanted_expires_and_is_counted(worker: Worker, by_switch: bool) -> None:
    with worker.manager.phase("log_prob") as opened:
        for name in ("actor", "ref", "critic"):  # the last is not on the device, and is not carried
            opened.keep(name)
        if by_switch:
            opened.switch("train")
            assert worker.on_device() == {"actor", "critic"}
    with contextlib.nullcontext() if by_switch else worker.manager.phase("train"):
        assert worker.on_device() == (set() if by_switch else {"actor", "critic"})
        assert worker.manager.snapshot().expired_keeps == 1
    assert worker.manager.snapshot().kept_bytes == 0
    assert_nothing_resident(worker.manager)


def test_what_was_not_entered_or_was_left_is_refused(worker: Worker) -> None:
    before = everything(worker.manager)
    context = worker.manager.phase("values")
    for use in (worker.manager.leave, lambda: worker.manager.switch("train")):
        with pytest.raises(PhaseError, match=r"enter\(\)"):
            use()
    for use in (lambda: context.__exit__(None, None, None), lambda: context.switch("values")):
        with pytest.raises(PhaseError, match="not open"):
            use()
    assert everything(worker.manager) == before
    with context as phase:
        assert repr(phase) == "<phase 'values', open>"
        foreign = make_manager().register("foreign", net(), role="actor")
        for name, message in (
            ("actro", ("no handle 'actro', did you mean 'actor'")),
            (foreign, "foreign"),
        ):
            for use in (phase.keep, phase.done_with):
                with pytest.raises(PhaseError, match=message):
                    use(name)
        with (
            worker.manager.phase("log_prob"),
            pytest.raises(PhaseError, match="is open inside phase"),
        ):
            phase.done_with("critic")
        phase.switch("train", only=["actor"])
        phase.keep("actor")
        with pytest.raises(PhaseError, match="entered before"):
            context.__enter__()
    assert worker.on_device() == {"actor"}
    with pytest.raises(PhaseError, match="entered before"):
        context.__enter__()
    assert repr(phase) == "<phase 'train', not open>"
    for use in (
        lambda: phase.switch("values"),
        lambda: phase.keep("actor"),
        lambda: phase.done_with("actor"),
        lambda: context.__exit__(None, None, None),
    ):
        with pytest.raises(PhaseError, match="phase 'train' is not open; it was left before"):
            use()


def test_two_threads_that_hold_phases_at_once(worker: Worker) -> None:
    with worker.manager.phase("train"):
        before = everything(worker.manager)
        with pytest.raises(
            PhaseError,
            match=r"thread 'helper_0' wants phase "
            r"'values' "
            r"while "
            r"thread "
            r"'MainThread' holds phase 'train'",
        ):
            in_a_thread(lambda: worker.manager.phase("values").__enter__())
        with pytest.raises(PhaseError, match="helper"):
            in_a_thread(lambda: worker.manager.enter("values"))
        assert everything(worker.manager) == before
        learn(worker.net, worker.adam)
    in_a_thread(lambda: worker.manager.enter("values"))
    assert worker.on_device() == {"critic"}


def test_an_async_body_works_and_a_cancelled_one_leaves(worker: Worker) -> None:

    async def train(forever: bool) -> None:
        with worker.manager.phase("train") as phase:
            await asyncio.sleep(0)
            learn(worker.net, worker.adam)
            phase.switch("values")
            with worker.manager.phase("log_prob"):
                await asyncio.sleep(0)
            if forever:
                await asyncio.Event().wait()

    async def main() -> None:
        await train(forever=False)
        task = asyncio.create_task(train(forever=True))
        for _ in range(5):
            await asyncio.sleep(0)
        assert worker.on_device() == {"critic"}
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
    assert_nothing_resident(worker.manager)


def steps(worker: Worker) -> Iterator[int]:
    with worker.manager.phase("train"):
        yield 1
        yield 2


@pytest.mark.parametrize("end", ["closed", "dropped", "collected in a cycle"])
def test_a_generator_that_ends_leaves_its_phase(end: str) -> None:
    """A collection has cleared every weak reference to the phase by the time the generator's `with`
    is left."""
    worker = Worker()
    generator = steps(worker)
    next(generator)
    assert worker.on_device() == {"actor", "critic"}
    cycle: list[Any] = [generator]
    if end == "closed":
        generator.close()  # type: ignore[attr-defined]
    elif end == "collected in a cycle":
        cycle.append(cycle)
    del generator, cycle
    gc.collect()  # what is raised in the meantime is a warning, and a warning fails the test
    assert worker.manager.phase_name == "idle"
    assert_nothing_resident(worker.manager)


def test_a_phase_that_its_caller_still_names_ends_with_what_holds_it_open() -> None:
    """As after an interrupt at the very beginning of `__exit__`: the with statement is gone, `step`
    is not."""
    worker = Worker()
    context = worker.manager.phase("train")
    step = context.__enter__()
    step.switch("log_prob")
    assert context.name == step.name == worker.manager.phase_name == "log_prob"
    del context
    gc.collect()
    assert worker.manager.phase_name == "idle"
    assert not step.is_open
    assert_nothing_resident(worker.manager)


def test_the_variable_of_a_phase_that_was_left_keeps_no_manager() -> None:
    worker = Worker()
    with worker.manager.phase("values") as phase:
        pass
    manager = weakref.ref(worker.manager)
    del worker
    gc.collect()
    assert manager() is None
    assert repr(phase) == "<phase 'values', not open>"


@pytest.mark.parametrize("kind", [ValueError, KeyboardInterrupt, SystemExit, GeneratorExit])
def test_an_exception_in_the_body_propagates_and_the_device_is_empty(
    worker: Worker, kind: type[BaseException]
) -> None:
    mine = kind("mine")
    with pytest.raises(kind) as caught:  # noqa: SIM117, PT012
        with worker.manager.phase("train"):
            with worker.manager.phase("log_prob"):
                raise mine
    assert caught.value is mine
    assert not hasattr(mine, "__notes__")
    assert_nothing_resident(worker.manager)
    with worker.manager.phase("train"):
        learn(worker.net, worker.adam)


@pytest.mark.parametrize("mine", [None, ValueError("mine")])
def test_a_restore_that_fails_is_raised_or_a_note_on_the_exception_on_its_way(
    mine: ValueError | None,
) -> None:
    device = Faults(SimulatedDevice(CAPACITY))
    worker = Worker(device=device)
    with pytest.raises(RuntimeError if mine is None else ValueError) as caught:  # noqa: SIM117, PT012
        with worker.manager.phase("train", only=["actor"]):
            learn(worker.net, worker.adam)
            device.fail("copy", forever=True)
            if mine is not None:
                raise mine
    notes = "".join(caught.value.__notes__)
    assert "injected fault" in (str(caught.value) if mine is None else notes)
    assert mine is not None or "while leaving phase 'train'" in notes
    assert device.fired > 1  # all together first, then each handle by itself
    device.clear()
    assert worker.manager.phase_name == "idle"
    snapshot = worker.manager.snapshot()
    assert snapshot.pairing_violations >= 1
    assert snapshot.unpaired_bytes > 0
    with worker.manager.phase("values"):
        pass
    assert_nothing_resident(worker.manager)  # the next phase transition made it good
    assert worker.manager.snapshot().unpaired_bytes == 0


def test_a_device_that_cannot_be_measured_is_a_note_on_the_users_exception(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine = ValueError("mine")
    with pytest.raises(ValueError, match="mine") as caught:  # noqa: SIM117, PT012
        with worker.manager.phase("train"):
            monkeypatch.setattr(worker.manager.device, "memory", _unmeasurable)
            raise mine
    assert caught.value is mine
    assert "the driver does not answer" in "".join(mine.__notes__)
    monkeypatch.undo()
    assert worker.manager.phase_name == "idle"
    assert_nothing_resident(worker.manager)


def _unmeasurable() -> None:
    raise RuntimeError("the driver does not answer")


def test_host_copies_that_cannot_be_fingerprinted_are_a_note_on_the_users_exception(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    worker = Worker(verify="always")
    mine = ValueError("mine")
    with pytest.raises(ValueError, match="mine") as caught:  # noqa: SIM117, PT012
        with worker.manager.phase("train"):
            monkeypatch.setattr(Verifier, "note", _unreadable)
            raise mine
    assert caught.value is mine
    assert "the host copy cannot be read" in "".join(mine.__notes__)
    monkeypatch.undo()
    assert worker.manager.phase_name == "idle"
    assert_nothing_resident(worker.manager)


def _unreadable(verifier: Verifier, holdings: object) -> None:
    raise RuntimeError("the host copy cannot be read")


@pytest.mark.parametrize("mine", [None, ValueError("mine")])
def test_a_policy_that_raises_at_the_exit_sends_everything_off_the_device(
    mine: ValueError | None,
) -> None:
    """Its error is a note on the user's exception, where there is one."""
    policy = Scripted()
    worker = Worker(policy=policy)
    with pytest.raises(PolicyError if mine is None else ValueError) as caught:  # noqa: SIM117, PT012
        with worker.manager.phase("train"):
            learn(worker.net, worker.adam)
            policy.answers["idle"] = RuntimeError("out of ideas")
            if mine is not None:
                raise mine
    assert "out of ideas" in "".join([str(caught.value), *getattr(mine, "__notes__", ())])
    assert worker.manager.phase_name == "idle"
    assert worker.on_device() == set()
    assert worker.manager.device.memory().chunk_bytes == 0
    policy.answers.clear()
    assert_nothing_resident(worker.manager)


def test_a_policy_cannot_open_a_phase() -> None:
    caught: list[PhaseError] = []

    def reenter(view: placement.View) -> Plan:
        for work in (
            lambda: worker.manager.phase("values").__enter__(),
            lambda: worker.manager.register("more", net()),
            lambda: worker.manager.enter("values"),
        ):
            with pytest.raises(PhaseError, match="inside a phase transition") as error:
                work()
            caught.append(error.value)
        return view.total_plan({})

    worker = Worker(policy=Scripted(eval=reenter))
    with worker.manager.phase("eval"):
        assert worker.manager.phase_name == "eval"
    assert len(caught) == 3
    assert list(worker.manager.handles) == [
        "actor",
        "actor.optimizer",
        "ref",
        "critic",
        "critic.optimizer",
    ]


def test_a_graph_capture_forbids_transitions() -> None:
    class Capturing(Faults):
        capturing = False

        def is_capturing(self) -> bool:
            return self.capturing

    device = Capturing(SimulatedDevice(CAPACITY))
    worker = Worker(device=device)
    with worker.manager.phase("train") as phase:
        before = worker.states()
        device.capturing = True
        for work in (
            lambda: phase.switch("values"),
            lambda: worker.manager.enter("values"),
            lambda: worker.manager.register("x", net()),
        ):
            with pytest.raises(PhaseError, match="captured"):
                work()
        assert worker.states() == before
        device.capturing = False
        learn(worker.net, worker.adam)
    assert_nothing_resident(worker.manager)


def test_a_generator_whose_phase_an_error_has_left_closes_quietly(worker: Worker) -> None:
    generator = steps(worker)
    with pytest.raises(ValueError, match="the user's"), worker.manager.phase("rollout"):  # noqa: PT012 - what its end leaves
        next(generator)
        raise ValueError("the user's")
    assert worker.manager.phase_name == "idle"
    generator.close()  # type: ignore[attr-defined]
    assert_nothing_resident(worker.manager)


def test_a_generator_that_is_closed_leaves_its_phase_and_not_that_of_its_caller(
    worker: Worker,
) -> None:

    generator: Any = steps(worker)
    next(generator)
    with worker.manager.phase("log_prob"):
        generator.close()
        assert worker.manager.phase_name == "log_prob"
    assert worker.manager.phase_name == "idle"
    assert_nothing_resident(worker.manager)


def test_a_hold_outlives_the_block_in_which_it_was_opened(worker: Worker) -> None:
    with pytest.raises(ZeroDivisionError), worker.manager.phase("train"):  # noqa: PT012 - what its end leaves
        hold = worker.manager.hold("ref_log_prob", only=["ref"])
        raise ZeroDivisionError
    assert worker.on_device() == {"ref"}
    assert worker.manager.phase_name == "ref_log_prob"
    hold.release()
    assert_nothing_resident(worker.manager)
    with pytest.raises(PhaseError, match="not open"):
        hold.switch("train")
    assert repr(hold) == "<hold 'ref_log_prob', released>"


def test_a_release_loads_nothing_into_memory_that_others_use() -> None:
    """The inner hold took the room of a handle that the idle plan would like to have: it comes back
    with the next plan, not at once."""
    worker = Worker(policy="resident", budget_bytes=48_000)  # room for two models of 20,480 bytes
    first = worker.manager.hold("ref_log_prob", only=["ref"])
    assert worker.on_device() == {"actor", "ref"}
    second = worker.manager.hold("values", only=["critic"])
    assert worker.on_device() == {"critic", "ref"}
    first.release()
    assert worker.on_device() == {"critic", "ref"}
    second.release()
    with worker.manager.phase("log_prob", only=["actor"]):
        assert "actor" in worker.on_device()


# --- around an iterator


def weights(worker: Worker) -> Iterator[str]:
    for name in ("a", "b"):
        assert worker.actor.state is SYNC
        yield name


def publishing(worker: Worker) -> Iterator[str]:
    return worker.manager.hold("weight_sync", only=["actor"]).around(weights(worker))


@pytest.mark.parametrize("begun", [False, True])
def test_an_iterator_that_is_exhausted_closed_or_dropped_is_released(begun: bool) -> None:
    worker = Worker()
    for end in ("exhaust", "close", "drop"):
        items = publishing(worker)
        if begun:
            assert next(items) == "a"
        assert worker.on_device() == {"actor"}
        if end == "close":
            items.close()  # type: ignore[attr-defined]
        elif end == "exhaust":
            assert [*items][-1] == "b"
            assert [*items] == []
            assert_nothing_resident(worker.manager)
        del items
        gc.collect()
        assert_nothing_resident(worker.manager)


def test_an_iterator_that_raises_is_released_and_its_error_comes_out(worker: Worker) -> None:
    def broken() -> Iterator[int]:
        yield 1
        raise ZeroDivisionError

    items = worker.manager.hold("weight_sync", only=["actor"]).around(broken())
    assert next(items) == 1
    with pytest.raises(ZeroDivisionError):
        next(items)
    assert_nothing_resident(worker.manager)
    with pytest.raises(TypeError, match="not iterable"):
        worker.manager.hold("weight_sync", only=["actor"]).around(3)  # type: ignore[arg-type]
    assert_nothing_resident(worker.manager)


@pytest.mark.parametrize("policy", ["resident", "cyclic"])
@pytest.mark.parametrize("how", ["rolled back", "reset"])
def test_state_that_was_replaced_leaves_a_device_on_which_the_handle_stays(
    policy: str, how: str
) -> None:
    """Two copies of the state would not fit."""
    device = SimulatedDevice(300 << 10, chunk_bytes=4096)
    manager = placement.Manager(device=device, policy=policy)
    model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(4)))
    plain = copy.deepcopy(model)
    adam = torch.optim.AdamW(model.parameters())
    other = torch.optim.AdamW(plain.parameters())
    manager.register("actor", model, role="actor")
    handle = manager.register("adam", adam)
    for step in range(6):
        with manager.phase("train"):
            for net, optimizer in ((model, adam), (plain, other)):
                net(torch.ones(2, 64) * step).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        if step == 1:
            saved = copy.deepcopy(other.state_dict())
        if step == 3:
            with manager.phase("restore"):
                for optimizer in (adam, other):
                    if how == "reset":
                        optimizer.state.clear()
                    else:
                        optimizer.load_state_dict(copy.deepcopy(saved))
        state_bytes = sum(value.nbytes for entry in adam.state.values() for value in entry.values())
        assert handle.resident_bytes <= state_bytes + 2 * 4096
    assert manager.audit().ok
    assert_same(dict(model.state_dict()), dict(plain.state_dict()))
    assert_same(adam.state_dict(), other.state_dict())


def test_a_view_of_a_state_dict_outlives_the_state_that_was_reset() -> None:
    worker = Worker(policy="resident")
    for _ in range(2):
        with worker.manager.phase("train"):
            learn(worker.net, worker.adam)
    worker.manager.suspend()
    state_dict = worker.adam.state_dict()
    worker.manager.resume()
    with worker.manager.phase("train"):
        pass
    first = next(iter(state_dict["state"].values()))["exp_avg"].view(-1)[:3]
    values = first.clone()
    worker.adam.state.clear()
    for _ in range(2):
        with worker.manager.phase("train"):
            learn(worker.net, worker.adam)
    assert_same(first, values)
    assert values.isfinite().all()
