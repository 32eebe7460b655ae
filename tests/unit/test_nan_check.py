"""A tensor that was numbers and is NaN throughout at an offload: told once, and its handle keeps
the numbers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import placement
from placement import IntegrityError, Manager
from placement.checkpoint import async_save, save
from placement.testing import Faults, SimulatedDevice, assert_nothing_resident
from tests.support.disk import send_to_disk
from tests.support.worker import assert_same, batch, learn, make_manager, net

PHASES = {"teach": ("teacher",), "distill": ("actor", "teacher"), "large": ("actor", "critic")}


class Norm(nn.Module):
    """A model with every kind of tensor that a check must know."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.scale = (
            nn.Linear(6, 8),
            nn.BatchNorm1d(8),
            nn.Parameter(torch.ones(())),
        )
        self.narrow = nn.Parameter(torch.ones(3, 5, dtype=torch.bfloat16))
        shared = torch.arange(13.0).half()
        # two tensors of one storage, where the second begins inside a word
        self.register_buffer("one", shared[:5])
        self.register_buffer("two", shared[5:])
        self.register_buffer("turned", torch.randn(4, 6, dtype=torch.complex64).t())
        for name, dtype in (
            ("e4m3", torch.float8_e4m3fn),
            ("fnuz", torch.float8_e4m3fnuz),
            ("e5m2", torch.float8_e5m2),
        ):
            self.register_buffer(name, torch.ones(40).to(dtype))
        self.register_buffer("packed", torch.arange(32, dtype=torch.uint8))
        self.register_buffer("pairs", torch.arange(6, dtype=torch.int32))
        self.register_buffer("free", torch.full((4,), float("nan")))


class Pair:
    """A student with AdamW, and a teacher: registered and offloaded."""

    def __init__(self, make: Callable[[], nn.Module] = net, **settings: Any) -> None:
        self.student, self.teacher = make(), make()
        self.adam = torch.optim.AdamW(self.student.parameters(), lr=1e-2)
        self.manager = make_manager(phases=PHASES, **settings)
        self.actor = self.manager.register("actor", self.student, role="actor")
        self.optimizer = self.manager.register("actor.optimizer", self.adam)
        self.handle = self.manager.register("teacher", self.teacher, role="teacher")
        self.before = values(self.handle)

    def teach(self, how: Callable[[nn.Module, nn.Module], object], phase: str = "teach") -> None:
        with self.manager.phase(phase), torch.no_grad():
            how(self.teacher, self.student)

    def diverge(self) -> None:
        self.adam.zero_grad()
        (self.student(batch()).square().mean() * float("nan")).backward()
        self.adam.step()

    def is_as_before(self) -> None:
        assert_same(values(self.handle), self.before)
        with self.manager.phase("distill"):
            assert_same(
                {name: value.clone() for name, value in self.teacher.state_dict().items()},
                self.before,
            )
        assert self.manager.audit().ok
        assert_nothing_resident(self.manager)


def values(handle: placement.Handle) -> dict[str, Any]:
    return {name: value.clone() for name, value in handle.state_dict().items()}


def everything(error: Exception) -> str:
    return str(error) + "".join(getattr(error, "__notes__", ()))


def is_nan(handle: placement.Handle) -> bool:
    return any(
        bool(value.isnan().any()) for value in values(handle).values() if value.is_floating_point()
    )


def average(teacher: nn.Module, student: nn.Module) -> None:
    for mine, theirs in zip(teacher.parameters(), student.parameters(), strict=True):
        mine.mul_(0.9).add_(theirs, alpha=0.1)


def reset(teacher: nn.Module, student: nn.Module) -> None:
    for mine, theirs in zip(teacher.parameters(), student.parameters(), strict=True):
        mine.copy_(theirs)
    buffers = dict(student.named_buffers())
    for name, buffer in teacher.named_buffers():
        if name != "free":
            buffer.copy_(buffers[name])


def data(teacher: nn.Module, student: nn.Module) -> None:
    for mine, theirs in zip(teacher.parameters(), student.parameters(), strict=True):
        mine.data = 0.9 * mine.data + 0.1 * theirs.data


HOWS = (average, reset, data)
POLICIES = ("colocated", "colocated(drop_gradients=True)", "colocated(optimizer_in='streamed')")


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("how", HOWS)
def test_a_model_computed_from_one_that_is_away_keeps_its_numbers(
    how: Callable[..., object], policy: str
) -> None:
    pair = Pair(policy=policy)
    with pytest.raises(
        IntegrityError,
        match=r"2\.weight.* of 'teacher' were numbers at its last offload",
    ):
        pair.teach(how)
    assert pair.manager.snapshot().phases == ()
    pair.is_as_before()
    pair.teach(average, "distill")  # the same in a phase that has both
    assert not is_nan(pair.handle)


def test_every_type_and_layout_is_told_and_keeps_its_bytes() -> None:
    """Also tensors of one element, of a part of a storage, and of types without NaN, whose poison
    is other numbers."""
    pair = Pair(Norm)
    with pytest.raises(IntegrityError) as told:
        pair.teach(reset)
    found = str(told.value).partition(" of 'teacher'")[0]
    count = int(found.rpartition(" and ")[2].split()[0]) + 8
    assert count == len(pair.before) - 1
    pair.is_as_before()


def test_one_tensor_alone_goes_back_and_the_others_are_new() -> None:
    pair = Pair(Norm)
    with pytest.raises(IntegrityError, match=r"^first\.bias of 'teacher'"):
        pair.teach(
            lambda teacher, _: (
                teacher.first.bias.fill_(float("nan")),
                teacher.first.weight.add_(1),
            )
        )
    assert_same(
        values(pair.handle), pair.before | {"first.weight": pair.before["first.weight"] + 1}
    )


@pytest.mark.parametrize(
    "write",
    [
        lambda teacher, _: teacher.first.weight[1:].fill_(float("nan")),
        lambda teacher, _: teacher.packed.fill_(255),
        lambda teacher, _: teacher.pairs.fill_(-1),
        lambda teacher, _: [
            setattr(p, "grad", torch.full_like(p, float("nan"))) for p in teacher.parameters()
        ],
        lambda teacher, _: teacher.register_buffer("later", torch.full((3,), float("nan"))),
    ],
    ids=["a part", "full bytes", "minus one", "gradients", "still to be filled"],
)
def test_what_may_be_meant_is_taken_over(write: Callable[[Any, Any], object]) -> None:
    pair = Pair(Norm)
    pair.teach(write)
    wanted = {name: value.clone() for name, value in pair.teacher.state_dict().items()}
    with pair.manager.phase("teach"):
        pass
    assert_same(values(pair.handle), wanted)


def test_it_can_be_turned_off() -> None:
    pair = Pair(nan_check=False)
    pair.teach(average)
    assert is_nan(pair.handle)


def test_a_switch_raises_one_error_for_all_handles_and_undoes_itself() -> None:
    pair = Pair()
    with pair.manager.phase("distill") as phase:
        with torch.no_grad():
            for parameter in (*pair.student.parameters(), *pair.teacher.parameters()):
                parameter.fill_(float("nan"))
        with pytest.raises(IntegrityError, match="were numbers") as told:
            phase.switch("values")
        assert "of 'actor' were numbers" in everything(told.value)
        assert "of 'teacher' were numbers" in everything(told.value)
        assert pair.manager.snapshot().phases == ("distill",)
        phase.switch("values")
    pair.is_as_before()


@pytest.mark.parametrize("operation", ["create", "copy"])
def test_a_transition_that_fails_for_another_reason_tells_it_at_last(operation: str) -> None:
    """What has got its numbers back on the device is told although its offload was undone."""
    faults, said = Faults(SimulatedDevice(8 << 20, chunk_bytes=1 << 16)), ""
    pair = Pair(device=faults)
    pair.manager.register("critic", net(512), role="critic")
    with pytest.raises(IntegrityError) as told:  # noqa: SIM117, PT012
        with pair.manager.phase("teach") as phase:
            with torch.no_grad():
                average(pair.teacher, pair.student)
            faults.fail(operation, at=1 if operation == "create" else 2)
            try:
                phase.switch("large")
            except Exception as error:
                said = everything(error)
            assert faults.fired
            if "were numbers" in said:
                raise IntegrityError(said)
    assert "of 'teacher' were numbers" in str(told.value)
    pair.is_as_before()


def test_a_training_that_diverges_keeps_weights_and_state() -> None:
    pair = Pair()
    with pair.manager.phase("train"):
        learn(pair.student, pair.adam)
    weights, state = values(pair.actor), values_of_state(pair)
    with (
        pytest.raises(IntegrityError, match="the training diverged: load a checkpoint") as told,
        pair.manager.phase("train"),
    ):
        pair.diverge()
    assert "'actor'" in everything(told.value)
    assert "'actor.optimizer'" in everything(told.value)
    assert_same(values(pair.actor), weights)
    steps = {key: value for key, value in values_of_state(pair).items() if key.endswith("step")}
    assert_same(values_of_state(pair), state | steps)
    with pair.manager.phase("train"):
        assert bool(learn(pair.student, pair.adam).isfinite())
    assert not is_nan(pair.actor)


def values_of_state(pair: Pair) -> dict[str, Any]:
    state = pair.optimizer.state_dict()["state"]
    return {
        f"{index}.{key}": value.clone()
        for index, entry in state.items()
        for key, value in entry.items()
    }


def test_a_streamed_step_of_nan_gradients_steps_nothing() -> None:
    pair = Pair(policy="colocated(optimizer_in='streamed')")
    with pair.manager.phase("train"):
        learn(pair.student, pair.adam)
    weights, state = values(pair.actor), values_of_state(pair)
    with pair.manager.phase("train"):
        with pytest.raises(
            IntegrityError,
            match=r"2 gradients of "
            r".*'actor.optimizer' "
            r"steps "
            r"are "
            r"NaN throughout.*Nothing was stepped",
        ):
            pair.diverge()
        assert_same(
            {name: value.clone() for name, value in pair.student.state_dict().items()}, weights
        )
        learn(pair.student, pair.adam)
    assert not is_nan(pair.actor)
    assert all(bool(value.isfinite().all()) for value in values_of_state(pair).values())
    assert state.keys() == values_of_state(pair).keys()


@pytest.mark.parametrize(
    "write", [save, lambda *arguments: async_save(*arguments).result()], ids=["save", "async_save"]
)
def test_a_checkpoint_of_lost_numbers_is_refused(
    write: Callable[[Manager, Path], object], tmp_path: Path
) -> None:
    pair = Pair()
    with pytest.raises(IntegrityError, match="at its last offload"), pair.manager.phase("teach"):  # noqa: PT012
        with torch.no_grad():
            average(pair.teacher, pair.student)
        with pytest.raises(
            IntegrityError,
            match=r"'teacher' were numbers and "
            r"are "
            r"NaN "
            r"throughout\. "
            r"No checkpoint was written",
        ):
            write(pair.manager, tmp_path / "first")
    write(pair.manager, tmp_path / "second")
    pair.is_as_before()


def test_a_readonly_handle_gets_its_registered_values() -> None:
    manager = make_manager()
    model = net()
    ref = manager.register("ref", model, role="ref", readonly=True)
    before = values(ref)
    with (
        pytest.raises(IntegrityError, match="'ref' were numbers"),
        manager.phase("ref_log_prob"),
        torch.no_grad(),
    ):
        model[0].weight.data = model[0].weight.data * float("nan")
    assert_same(values(ref), before)


def test_a_host_copy_that_was_dropped_has_no_values_to_give_back(tmp_path: Path) -> None:
    """It is told once. The disk tier drops what the device has and the next offload copies
    whole."""
    pair = Pair(host_limit_bytes=1 << 20, disk_directory=tmp_path)

    def drop_and_average(teacher: nn.Module, student: nn.Module) -> None:
        for r in pair.handle.holding.ranges:  # type: ignore[union-attr]
            r.pages.prints = None
        send_to_disk(pair.manager, "teacher")
        average(teacher, student)

    with pytest.raises(
        IntegrityError,
        match=r"of 'teacher' are NaN throughout, and there are no earlier values",
    ):
        pair.teach(drop_and_average)
    with pair.manager.phase("teach"):
        pass
    assert pair.manager.audit().ok
