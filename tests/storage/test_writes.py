"""Writes into offloaded memory: every way in is an error at the next phase transition, once, and
nothing is lost."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch

from placement import IntegrityError, State
from placement.policies import Colocated
from placement.storage.watch.writes import Watch
from placement.testing import SimulatedDevice, assert_nothing_resident
from tests.support.early import Foresight
from tests.support.late_device import LateDevice
from tests.support.poison import of_an_old_kernel
from tests.support.sweeps import diagonal, few
from tests.support.worker import CAPACITY, Worker, assert_same, batch, make_manager

Tensors = dict[str, torch.Tensor]
Write = Callable[[torch.Tensor], object]


def compared() -> SimulatedDevice:
    """A device whose poison is compared by its bytes, as on a GPU."""
    return of_an_old_kernel(lambda: SimulatedDevice(CAPACITY))


class Program:
    """A model with buffers, its optimizer, and one step of training, whose gradients are kept."""

    def __init__(self, device: SimulatedDevice | None = None, **keywords: Any) -> None:
        torch.manual_seed(0)
        self.model = torch.nn.Sequential(
            torch.nn.Linear(64, 64), torch.nn.BatchNorm1d(64), torch.nn.Linear(64, 8)
        )
        self.adam = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.manager = make_manager(device=device or SimulatedDevice(CAPACITY), **keywords)
        self.actor = self.manager.register("actor", self.model, role="actor")
        self.optimizer = self.manager.register("actor.optimizer", self.adam)
        self.other = torch.nn.Linear(64, 64)
        self.manager.register("ref", self.other, role="reward")

    def tensors(self) -> Tensors:
        found = dict(self.model.named_parameters()) | dict(self.model.named_buffers())
        found |= {
            f"{name}.grad": p.grad
            for name, p in self.model.named_parameters()
            if p.grad is not None
        }
        found |= {
            f"{i}.{k}": v
            for i, s in enumerate(self.adam.state.values())
            for k, v in s.items()
            if v.dim()
        }
        return found

    def values(self) -> Tensors:
        """Copies, taken while it is on the device."""
        return {name: tensor.detach().clone() for name, tensor in self.tensors().items()}

    def learn(self) -> Tensors:
        self.adam.zero_grad()
        self.model(batch()).square().mean().backward()
        self.adam.step()
        return self.values()

    def train(self, cycles: int = 1) -> Tensors:
        """In as many phases of their own. Everything is offloaded then."""
        for _ in range(cycles):
            with self.manager.phase("train"):
                values = self.learn()
        return values


TARGETS = {
    "value": "0.weight",
    "buffer": "1.running_mean",
    "gradient": "0.weight.grad",
    "state": "0.exp_avg",
}
COUNTED: dict[str, Write] = {
    "mul_": lambda t: t.mul_(0.5),
    "out=": lambda t: torch.mul(t, 0.5, out=t),
    "copy_ of poison": lambda t: t.copy_(t.detach().clone()),
    "an element": lambda t: t.view(-1)[3].mul_(2),
}
"""NaN becomes NaN of the same bytes (float32 on a CPU). A version counter counts them."""
UNCOUNTED: dict[str, Write] = {
    "EMA through data": lambda t: t.data.mul_(0.4).add_(torch.ones_like(t), alpha=0.6)
}
VISIBLE: dict[str, Write] = {
    "fill_": lambda t: t.fill_(3),
    "copy_": lambda t: t.copy_(torch.ones_like(t)),
    "numpy of an element": lambda t: t.detach().numpy().reshape(-1).__setitem__(0, 3.0),
    "zero_ through data": lambda t: t.data.zero_(),
}


def raises() -> Any:
    return pytest.raises(
        IntegrityError,
        match=r"of 'actor.* while it was offloaded\. The written values are lost",
    )


def first_offload(program: Program, write: Callable[[], object]) -> Tensors:
    values = program.train()
    write()
    with raises(), program.manager.phase("train"):
        pass
    return values


def after_audits(program: Program, write: Callable[[], object]) -> Tensors:
    values = program.train()
    write()
    found = [program.manager.audit().findings for _ in range(2)]
    assert {finding.what for finding in found[0]} == {"wrong_write"}
    assert found[0] == found[1]
    with raises(), program.manager.phase("train"):
        pass
    return values


def at_an_exit(program: Program, write: Callable[[], object]) -> Tensors:
    values = program.train()
    with raises(), program.manager.phase("reward"):
        write()
    return values


def in_a_phase_inside(program: Program, write: Callable[[], object]) -> Tensors:
    """Leaving the inner phase brings it back."""
    with program.manager.phase("train"):
        values = program.learn()
        with raises(), program.manager.phase("reward"):
            write()
        assert_same(program.values(), values)
    return values


def at_a_switch(program: Program, write: Callable[[], object]) -> Tensors:
    values = program.train()
    with program.manager.phase("reward") as phase:
        write()
        with raises():
            phase.switch("train")
        phase.switch("train")
        assert_same(program.values(), values)
    return values


WHENS = [first_offload, after_audits, at_an_exit, in_a_phase_inside, at_a_switch]


def check(
    program: Program,
    target: str,
    write: Write,
    when: Callable[[Program, Callable[[], object]], Tensors],
) -> None:
    def written() -> None:
        with torch.no_grad():
            write(program.tensors()[TARGETS[target]])

    values = when(program, written)
    assert program.manager.snapshot().wrong_writes == 1
    assert_nothing_resident(program.manager)
    with program.manager.phase("train"):
        assert_same(program.values(), values)
    assert program.manager.snapshot().wrong_writes == 1
    assert_nothing_resident(program.manager)


WHERE: dict[str, tuple[Any, str]] = {
    **{when.__name__: (when, "value") for when in WHENS},
    **{target: (first_offload, target) for target in TARGETS if target != "value"},
}


@pytest.mark.parametrize(
    ("where", "write"), diagonal(WHERE, {"mul_": COUNTED["mul_"], **UNCOUNTED})
)
def test_a_write_is_an_error_whenever_it_was_made(where: tuple[Any, str], write: Write) -> None:
    """Once, and nothing is lost; docs/offloaded.md has a test of every way to write."""
    when, target = where
    check(Program(), target, write, when)


COUNTS: dict[str, tuple[str, int, int]] = {
    "three offloads": ("mul_", 3, 0),
    "two audits": ("mul_", 1, 2),
    **{way: (way, 1, 0) for way in COUNTED},
}


@pytest.mark.parametrize(("counts", "target"), diagonal(COUNTS, TARGETS.keys()))
def test_counters_find_writes_that_leave_the_bytes_as_they_were(
    counts: tuple[str, int, int], target: str
) -> None:
    """The simulated device shows every write, and would hide a counter that is not looked at."""
    way, offloads, audits = counts
    program = Program(compared())
    values = program.train(offloads)
    with torch.no_grad():
        COUNTED[way](program.tensors()[TARGETS[target]])
    found = [program.manager.audit().findings for _ in range(audits)]
    assert [[finding.what for finding in findings] for findings in found] == [
        ["wrong_write"]
    ] * audits
    with pytest.raises(
        IntegrityError,
        match=rf"{TARGETS[target]} of 'actor.* were written while it was offloaded",
    ):
        program.manager.phase("train").__enter__()
    for _ in range(2):
        with program.manager.phase("train"):
            assert_same(program.values(), values)
    assert program.manager.snapshot().wrong_writes == 1
    assert_nothing_resident(program.manager)


@pytest.mark.parametrize("way", few(VISIBLE, "fill_", "numpy of an element"))
def test_bytes_show_writes_without_a_counter(way: str) -> None:
    for when in WHENS:
        program = Program(compared())
        with pytest.MonkeyPatch.context() as patched:
            patched.setitem(
                globals(),
                "raises",
                lambda: pytest.raises(IntegrityError, match="The written values are lost"),
            )
            check(program, "value", VISIBLE[way], when)


@pytest.mark.parametrize(("dtype", "readonly"), [(torch.float32, True), (torch.bfloat16, False)])
def test_a_reference_synced_while_offloaded_is_an_error_each_time(
    dtype: torch.dtype, readonly: bool
) -> None:
    """TRL's SyncRefModelCallback writes `ref.data` at the end of a step, in no phase."""
    manager = make_manager()
    actor, reference = torch.nn.Linear(64, 64).to(dtype), torch.nn.Linear(64, 64).to(dtype)
    before = {name: value.clone() for name, value in reference.state_dict().items()}
    manager.register("actor", actor, role="actor")
    manager.register("ref", reference, role="ref", readonly=readonly)
    for step in range(1, 3):
        with manager.phase("log_prob"):
            pass
        for mine, other in zip(reference.parameters(), actor.parameters(), strict=True):
            mine.data.mul_(0.4).add_(other.data, alpha=0.6)
        assert not manager.audit().ok
        with (
            pytest.raises(
                IntegrityError,
                match=r"into the memory pages of weight, bias of 'ref'",
            ),
            manager.phase("log_prob"),
        ):
            pass
        assert manager.snapshot().wrong_writes == step
    with manager.phase("log_prob"):
        assert_same(dict(reference.named_parameters()), before)
    assert_nothing_resident(manager)


def test_tensors_of_one_storage_with_counters_of_their_own_are_all_watched() -> None:
    """What `.data =` has bound to a buffer does not share the buffer's counter: the largest of them
    would hide the others."""
    manager = make_manager(device=compared())
    model = torch.nn.Module()
    model.register_buffer("flat", torch.ones(128))
    model.left, model.right = torch.nn.Parameter(torch.empty(0)), torch.nn.Parameter(torch.empty(0))
    model.left.data, model.right.data = model.flat[:64], model.flat[64:]
    for _ in range(9):
        model.left.detach().add_(1)
    manager.register("actor", model, role="actor")
    model.right.detach().mul_(2)
    with pytest.raises(IntegrityError, match=r"of 'actor' were written"), manager.phase("log_prob"):
        pass
    with manager.phase("log_prob"):
        assert (model.left == 10).all()
        assert (model.right == 1).all()


@pytest.mark.parametrize("is_tied", [True, False])
@pytest.mark.parametrize("device", [lambda: SimulatedDevice(CAPACITY), compared])
def test_weights_that_are_tied_or_change_places_while_offloaded_are_replaced(
    device: Callable[[], SimulatedDevice], is_tied: bool
) -> None:
    """A write of another tensor meanwhile is told, too."""
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64))
    model[0].weight.detach().add_(1)
    manager = make_manager(device=device())
    actor = manager.register("actor", model, role="actor")
    before = {name: value.clone() for name, value in model.state_dict().items()}
    if is_tied:
        model[1].weight = model[0].weight
    else:
        model[0].weight.data, model[1].weight.data = model[1].weight.data, model[0].weight.data
    model[0].bias.detach().mul_(1)
    with pytest.raises(IntegrityError) as caught, manager.phase("log_prob"):
        pass
    written, replaced = str(caught.value).split("late collectives).")
    assert ("0.bias" in written, "1.weight" in written) == (True, False)
    assert "1.weight" in replaced
    assert manager.snapshot().wrong_writes == 1
    actor.restore()
    if is_tied:  # one parameter under two names stays one
        before["1.weight"] = before["0.weight"]
    with manager.phase("log_prob"):
        assert_same(dict(model.state_dict()), before)
    assert_nothing_resident(manager)


def one_actor(program: Program) -> list[torch.Tensor]:
    return [p.grad for p in program.model.parameters() if p.grad is not None]


ZEROINGS: dict[str, Callable[[Program], object]] = {
    "module": lambda program: program.model.zero_grad(set_to_none=False),
    "optimizer": lambda program: program.adam.zero_grad(set_to_none=False),
    "each part": lambda program: [part.zero_grad(set_to_none=False) for part in program.model],
    "twice": lambda program: [program.adam.zero_grad(set_to_none=False) for _ in range(2)],
    "none": lambda program: program.model.zero_grad(),
}


@pytest.mark.parametrize(
    ("how", "device"),
    diagonal(ZEROINGS.keys(), {"pages": SimulatedDevice, "bytes": lambda nbytes: compared()}),
)
def test_gradients_zeroed_anywhere_stay_zero_and_are_no_wrong_write(
    how: str, device: Callable[[int], SimulatedDevice]
) -> None:
    def zeroed_in(program: Program) -> None:
        assert not any(grad.any() for grad in one_actor(program)), "the old gradients came back"
        with program.manager.phase("train"):
            assert not any(grad.any() for grad in one_actor(program)), "the old gradients came back"
        assert program.manager.audit().ok
        assert program.manager.snapshot().wrong_writes == 0

    zero = ZEROINGS[how]
    program = Program(device(CAPACITY))
    program.train()
    with program.manager.phase("reward"):
        zero(program)
    with program.manager.phase("train"):
        assert not any(grad.any() for grad in one_actor(program))
    with program.manager.phase("train"):
        program.learn()
        with program.manager.phase("reward") as phase:
            zero(program)
            phase.switch("log_prob")
            zeroed_in(program)
    program.train()
    zero(program)
    program.manager.unregister("actor.optimizer")
    program.manager.unregister("actor")
    assert not any(grad.any() for grad in one_actor(program)), "leaving placement has revived them"


def test_zeroed_gradients_do_not_hide_that_others_were_clipped() -> None:
    for device in (SimulatedDevice(CAPACITY), compared()):
        program = Program(device)
        values = program.train()
        program.model[0].zero_grad(set_to_none=False)
        for grad in one_actor(program)[2:]:
            grad.mul_(0.5)
        with raises(), program.manager.phase("train"):
            pass
        values["0.weight.grad"].zero_()
        values["0.bias.grad"].zero_()
        with program.manager.phase("train"):
            assert_same(program.values(), values)
        assert program.manager.snapshot().wrong_writes == 1


@pytest.mark.parametrize("is_audited", [False, True])
def test_writes_that_were_never_raised_are_logged_at_close(
    is_audited: bool, caplog: pytest.LogCaptureFixture
) -> None:
    program = Program()
    values = program.train()
    program.model[0].weight.detach().mul_(2)
    if is_audited:
        assert not program.manager.audit().ok
    with caplog.at_level(logging.ERROR, logger="placement"):
        program.manager.close()
    assert "0.weight of 'actor' were written while it was offloaded" in caplog.text
    assert torch.equal(program.model[0].weight, values["0.weight"])


def test_a_write_while_weights_are_published_from_the_host_copy() -> None:
    program = Program(policy=Colocated(stream_sync=True))
    values = program.train()
    with raises(), program.manager.phase("weight_sync"):
        assert not program.actor.resident_bytes
        program.model[0].weight.detach().mul_(2)
        published = {
            name: tensor.clone() for bucket in program.actor.weights() for name, tensor in bucket
        }
    assert torch.equal(published["0.weight"], values["0.weight"])
    with program.manager.phase("train"):
        assert_same(program.values(), values)


def test_writes_to_a_value_and_to_a_gradient_are_one_error() -> None:
    """Where nothing is loaded, the value's is known by its memory page, and the gradient's by its
    counter alone."""
    manager, net = (
        make_manager(),
        torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.Linear(64, 8)),
    )
    net[1].weight.grad = torch.ones_like(net[1].weight)
    manager.register("ref", net, role="ref")
    with manager.phase("rollout"):
        net[1].weight.grad.mul_(0.5)
        net[0].weight.data.copy_(net[0].weight.detach().clone())
        with (
            pytest.raises(IntegrityError, match=r"1\.weight\.grad of 'ref'"),
            manager.phase("rollout"),
        ):
            pass
        assert not manager.audit().findings
    assert_nothing_resident(manager)


# --- readonly handles, and what is written into their state dicts


KEY = "0.weight"
VIEWS: dict[str, Callable[[torch.Tensor], Any]] = {
    "index": lambda tensor: tensor[0],
    "numpy": lambda tensor: tensor.numpy()[0],
    "alias": lambda tensor: tensor.data[0],  # keeps the storage alive, and not the tensor
}


def loaded_once(**keywords: Any) -> Worker:
    worker = Worker(**keywords)
    with worker.manager.phase("log_prob"):
        pass
    return worker


def check_ref(worker: Worker, wanted: torch.Tensor) -> None:
    """Every later phase has these values and ends without an error, and a wrong write is still
    found."""
    for _ in range(3):
        assert_same(worker.ref.state_dict()[KEY], wanted)
        with worker.manager.phase("log_prob"):
            assert_same(worker.ref_net[0].weight.detach(), wanted)
    with pytest.raises(IntegrityError, match="'ref' is readonly"), worker.manager.phase("log_prob"):
        worker.ref_net[0].weight.data.fill_(3.0)
    assert_same(worker.ref.state_dict()[KEY], wanted)
    assert worker.manager.audit().ok, worker.manager.audit().report
    assert_nothing_resident(worker.manager)


@pytest.mark.parametrize(("verify", "is_held"), [("off", False), ("off", True), ("always", True)])
def test_writes_to_a_readonly_state_dict_while_offloaded_are_loaded(
    verify: str, is_held: bool
) -> None:
    worker = loaded_once(verify=verify)
    shown = worker.ref_net.state_dict()
    shown[KEY][0].fill_(7.0)
    wanted = shown[KEY].clone()
    held = [shown] if is_held else []
    del shown
    check_ref(worker, wanted)
    assert worker.ref.counters.offloaded_bytes == 0
    for each in held:
        assert_same(each[KEY], wanted)


def test_writes_to_a_readonly_state_dict_inside_a_phase_are_undone() -> None:
    worker = loaded_once()
    shown = worker.ref_net.state_dict()[KEY]
    wanted = shown.clone()
    with pytest.raises(IntegrityError, match="'ref' is readonly"), worker.manager.phase("log_prob"):
        shown.fill_(7.0)
    assert_same(shown, wanted)
    check_ref(worker, wanted)


@pytest.mark.parametrize("take", VIEWS.values(), ids=VIEWS)
@pytest.mark.parametrize(("is_kept", "phases_before"), [(False, 0), (True, 2)])
def test_writes_to_a_view_of_a_readonly_state_dict_are_loaded_from_then_on(
    take: Callable[[torch.Tensor], Any], is_kept: bool, phases_before: int
) -> None:
    worker = loaded_once()
    wanted = worker.ref_values[KEY].clone()
    wanted[0] = 7.0
    views = [take(worker.ref_net.state_dict()[KEY])]
    for _ in range(phases_before):
        with worker.manager.phase("log_prob"):
            pass
    with worker.manager.phase("log_prob"):
        views[0][:] = 7.0
        if not is_kept:
            views.clear()
        assert_same(worker.ref_net[0].weight.detach(), worker.ref_values[KEY])
    check_ref(worker, wanted)
    assert worker.ref.counters.offloaded_bytes == 0


@pytest.mark.parametrize(
    ("name", "when", "take"),
    [
        ("ref", "inside", VIEWS["alias"]),
        *(
            pytest.param("ref", "inside", take, marks=pytest.mark.sweep)
            for name, take in VIEWS.items()
            if name != "alias"
        ),
        ("ref", "dropped", VIEWS["alias"]),
        ("ref", "offloaded", VIEWS["numpy"]),
        ("actor", "offloaded", VIEWS["index"]),
    ],
)
def test_early_chunks_do_not_hide_what_is_written_to_a_view(
    name: str, when: str, take: Callable[[torch.Tensor], Any]
) -> None:
    """What is written inside a phase to a view of the actor is lost, as the page says, because the
    actor is copied back."""
    worker = loaded_once(
        device=LateDevice(CAPACITY, chunk_bytes=1 << 12), policy=Foresight(in_idle=True)
    )
    module, handle = (worker.ref_net, worker.ref) if name == "ref" else (worker.net, worker.actor)
    assert handle.prefetched_bytes
    views = [take(module.state_dict()[KEY])]
    for value in (1.0,) if when == "dropped" else (1.0, 2.0, 3.0):
        with worker.manager.phase("log_prob"):
            if when != "offloaded":
                views[0][:] = value
            if when == "dropped":
                views.clear()
        if when == "offloaded":
            views[0][:] = value
        with worker.manager.phase("log_prob"):
            assert_same(module[0].weight[0].detach(), torch.full((64,), value))
        assert_same(handle.state_dict()[KEY][0], torch.full((64,), value))
    worker.manager.close()


def test_every_bit_pattern_survives() -> None:
    class Patterns(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            every = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16)
            for dtype in (torch.bfloat16, torch.float16, torch.int16):
                self.register_buffer("every_" + str(dtype).split(".")[1], every.view(dtype).clone())
            self.register_buffer("flags", torch.tensor([True, False]))
            self.register_buffer(
                "pairs", torch.view_as_complex(torch.tensor([[float("nan"), -0.0]]))
            )

    manager, model = make_manager(), Patterns()
    values = {name: value.clone() for name, value in model.named_buffers()}
    handle = manager.register("actor", model, role="actor")
    for _ in range(2):
        assert_same(dict(handle.state_dict()), values)
        with manager.phase("log_prob"):
            assert_same(dict(model.named_buffers()), values)
            assert handle.state is State.GPU_RESIDENT


class Paged(Program):
    """A program of several pages on the device, whose copies to it are noted."""

    def __init__(self) -> None:
        device = SimulatedDevice(CAPACITY, chunk_bytes=8192)
        super().__init__(device)
        self.events = list[str]()
        copy = device.copy

        def noted(copies: Any, direction: Any) -> None:
            self.events.append(direction)
            copy(copies, direction)

        device.copy = noted  # type: ignore[method-assign]


def test_tensors_are_looked_at_while_the_first_pages_are_copied(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    program = Paged()
    program.train()
    look = Watch.look

    def noted(watch: Watch) -> Any:
        program.events.append("look")
        return look(watch)

    monkeypatch.setattr(Watch, "look", noted)
    program.events.clear()
    with program.manager.phase("reward"):
        loading = [*program.events]
    with program.manager.phase("train") as phase:
        program.learn()
        program.events.clear()
        phase.switch("reward")
        swapping = [*program.events]
    assert loading.index("to_device") < loading.index("look")
    assert swapping.index("to_host") < swapping.index("look")


def wrong_write(program: Program) -> None:
    program.model[0].weight.detach().mul_(0.5)


def wrong_data(program: Program) -> None:
    program.model[0].weight.data = torch.zeros(64, 64)


@pytest.mark.parametrize("change", [wrong_write, wrong_data])
@pytest.mark.parametrize("way_in", ["enter", "switch"])
def test_an_entry_that_finds_a_change_takes_every_handle_back(
    change: Callable[[Program], None], way_in: str
) -> None:
    program = Paged()
    values = program.train(2)
    manager = program.manager
    if way_in == "switch":
        with manager.phase("reward") as phase:
            wanted = program.other.weight.detach().clone()
            change(program)
            with pytest.raises(IntegrityError, match=r"0\.weight of 'actor'"):
                phase.switch("train")
            assert manager.handles["ref"].state is State.GPU_RESIDENT
            assert_same(program.other.weight, wanted)
    else:
        change(program)
        with pytest.raises(IntegrityError, match=r"0\.weight of 'actor'"):
            manager.enter("train")
        assert "to_device" in program.events
    assert not any(handle.counters.failures for handle in manager.handles.values())
    if change is wrong_data:
        program.actor.restore()
    assert_nothing_resident(manager)
    with manager.phase("train"):
        assert_same(program.values(), values)
    assert_nothing_resident(manager)


def test_an_entry_tells_of_an_addition_although_every_tensor_was_replaced() -> None:
    program = Paged()
    program.train()
    program.other.register_buffer("added", torch.ones(3))
    program.other.half()
    with pytest.raises(IntegrityError, match=r"added to 'ref'.* of 'ref' were replaced"):
        program.manager.enter("reward")
    program.manager.handles["ref"].restore()
    program.train()  # which does not use it
    with program.manager.phase("reward"):
        pass
