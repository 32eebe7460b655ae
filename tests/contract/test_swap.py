"""Swaps: memory changes hands chunk by chunk, within the larger side and the window, and comes back
when the phase transition fails."""

from __future__ import annotations

import copy
import itertools
import os
import random
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from placement import DeviceMemoryError, Manager
from placement.devices.base import Device
from placement.devices.memory import Addresses, Chunk, Copy, Direction, Mark
from placement.storage.transfer.exchange import WINDOW
from placement.testing import Faults, InjectedFault, SimulatedDevice, assert_nothing_resident
from tests.contract import growing
from tests.faults.harness import calls_to_fail
from tests.support.sweeps import diagonal, few
from tests.support.worker import GPU, OFF, Turns, assert_same

PAGE = 4096
CHUNK = 4 * PAGE
BEFORE, AFTER = "rollout", "eval"  # the phases between which the tests switch


class Watched(Faults):
    """Notes the most that chunks came to, how many each call mapped, and what was copied and waited
    for in which order."""

    def __init__(self, device: Device) -> None:
        super().__init__(device)
        self.peak_bytes = 0
        self.mapped: list[int] = []
        self.log: list[tuple[str, int]] = []  # ("to_host" | "to_device" | "wait" | "ask", bytes)

    def create(self, nbytes: int) -> Chunk:
        chunk = super().create(nbytes)
        self.peak_bytes = max(self.peak_bytes, self.memory().chunk_bytes)
        return chunk

    def map(self, addresses: Addresses, chunks: Sequence[Chunk], start: int = 0) -> None:
        super().map(addresses, chunks, start)
        self.mapped.append(len(chunks))

    def copy(self, copies: Sequence[Copy], direction: Direction) -> None:
        super().copy(copies, direction)
        self.log.append((direction, sum(run.nbytes for run in copies)))

    def wait(self, mark: Mark) -> None:
        super().wait(mark)
        self.log.append(("wait", 0))

    def ask(self, values: torch.Tensor) -> Callable[[], torch.Tensor]:
        self.log.append(("ask", 0))
        return super().ask(values)


def module(nbytes: int) -> nn.ParameterList:
    """One parameter of so many bytes: a range of exactly this length."""
    return nn.ParameterList([nn.Parameter(torch.randn(nbytes // 4))])


class Scene:
    """Modules by name on a tight device, and what they must hold."""

    make_device: type[Watched] = Watched

    def __init__(
        self,
        before: Mapping[str, int],
        after: Mapping[str, int],
        budget_bytes: int | None,
        *,
        capacity_bytes: int = 0,
        readonly: Collection[str] = (),
        **options: Any,
    ) -> None:
        torch.manual_seed(0)
        self.device: Any = self.make_device(
            SimulatedDevice(
                capacity_bytes or budget_bytes or 0, chunk_bytes=CHUNK, granularity=PAGE
            )
        )
        policy = Turns(**{BEFORE: before, AFTER: after})
        self.manager = Manager(
            device=self.device, policy=policy, budget_bytes=budget_bytes, **options
        )
        self.models = {name: module(nbytes) for name, nbytes in {**before, **after}.items()}
        self.handles = {
            name: self.manager.register(name, model, readonly=name in readonly)
            for name, model in self.models.items()
        }
        self.before, self.after = tuple(before), tuple(after)
        self.note()

    def note(self) -> None:
        self.values = {
            name: copy.deepcopy(dict(handle.state_dict())) for name, handle in self.handles.items()
        }

    def write(self, names: Iterable[str]) -> None:
        """Change all of it or one chunk, by turns."""
        for index, name in enumerate(names):
            parameter = self.models[name][0]
            (parameter.data if index % 2 == 0 else parameter.data[: CHUNK // 8]).add_(1)
        self.note()

    def check(self, on_device: Collection[str]) -> None:
        """These are on the device, nobody else is, and every value is what it was."""
        assert {name for name, handle in self.handles.items() if handle.state is GPU} == set(
            on_device
        )
        assert {
            name for name, handle in self.handles.items() if handle.state is OFF
        } == self.handles.keys() - set(on_device)
        assert_same(
            {name: dict(handle.state_dict()) for name, handle in self.handles.items()}, self.values
        )
        self.manager.check_integrity()


def side(sizes: Mapping[str, int]) -> int:
    return sum(-(-nbytes // PAGE) * PAGE for nbytes in sizes.values())  # whole pages


SIDES: dict[str, tuple[dict[str, int], dict[str, int]]] = {
    "equal": ({"a": 12 * CHUNK}, {"b": 12 * CHUNK}),
    "larger comes": ({"a": 5 * CHUNK}, {"b": 13 * CHUNK}),
    "smaller comes": ({"a": 13 * CHUNK}, {"b": 5 * CHUNK}),
    "less than a chunk for many": ({"a": PAGE}, {"b": 9 * CHUNK}),
    "many for less than a chunk": ({"a": 9 * CHUNK}, {"b": 100}),
    "tails": ({"a": 7 * CHUNK + 3 * PAGE - 8}, {"b": 7 * CHUNK + PAGE + 24}),
    "tails only": ({"a": PAGE, "b": 2 * PAGE}, {"c": 3 * PAGE}),
    "three for two": (
        {"a": 4 * CHUNK, "b": 3 * CHUNK + PAGE, "c": 2 * PAGE},
        {"d": 6 * CHUNK + 2 * PAGE, "e": 3 * CHUNK},
    ),
    "two for three": (
        {"d": 6 * CHUNK + 2 * PAGE, "e": 3 * CHUNK},
        {"a": 4 * CHUNK, "b": 3 * CHUNK + PAGE, "c": 2 * PAGE},
    ),
    "one stays": ({"a": 6 * CHUNK, "s": 3 * CHUNK}, {"b": 6 * CHUNK, "s": 3 * CHUNK}),
}


# --- memory


ROOMS = {
    "window": (WINDOW * CHUNK, False),
    "the device has more": (0, True),
    "and a page": (PAGE, True),
}


@pytest.mark.parametrize(("sides", "room"), diagonal(SIDES, ROOMS))
def test_the_peak_is_the_larger_side_and_the_window(
    sides: tuple[dict[str, int], dict[str, int]], room: tuple[int, bool]
) -> None:
    """Where the device has more than the budget, nothing but the count of bytes stops an
    exchange."""
    (before, after), (window, has_more) = sides, room
    budget = max(side(before), side(after)) + window
    scene = Scene(before, after, budget, capacity_bytes=8 * budget if has_more else 0)
    for _ in range(2):
        with scene.manager.phase(BEFORE) as phase:
            scene.write(scene.before)
            phase.switch(AFTER)
            scene.check(after)
            scene.write(scene.after)
            with scene.manager.phase(BEFORE):
                scene.check(before)
            scene.check(after)
            phase.switch(BEFORE)
            scene.check(before)
        scene.check(())
    assert scene.device.peak_bytes <= budget
    assert_nothing_resident(scene.manager)


def test_no_more_than_the_window_is_asked_of_the_driver_where_there_is_room() -> None:
    scene = Scene({"a": 16 * CHUNK}, {"b": 16 * CHUNK}, 64 * CHUNK)
    with scene.manager.phase(BEFORE) as phase:
        scene.write(["a"])
        created = scene.device.calls["create"]
        phase.switch(AFTER)
        assert scene.device.calls["create"] - created == WINDOW


# --- both directions at once


def swapped(scene: Scene) -> list[str]:
    """What the device was asked to do in one switch in which everything is dirty, in order, a
    letter a chunk."""
    with scene.manager.phase(BEFORE) as phase:
        scene.models["a"][0].data.add_(1)
        scene.device.log.clear()
        phase.switch(AFTER)
        letters = {"to_host": "o", "to_device": "i", "wait": "w", "ask": "?"}
        return [letters[what] * max(1, nbytes // CHUNK) for what, nbytes in scene.device.log]


def test_what_comes_is_on_the_link_while_the_rest_leaves() -> None:
    """Sixteen chunks each way, nothing free: each chunk that arrived is followed by one that
    comes."""
    scene = Scene({"a": 16 * CHUNK}, {"b": 16 * CHUNK}, 16 * CHUNK)
    assert "".join(swapped(scene)).replace("?", "") == "o" * 16 + "wi" * 16


def test_with_a_window_the_link_has_work_both_ways_from_the_start() -> None:
    scene = Scene({"a": 16 * CHUNK}, {"b": 16 * CHUNK}, 20 * CHUNK)
    order = "".join(swapped(scene))
    assert order.index("i") < order.index("w")
    # the window's memory is wiped by a kernel, which would wait for those that compare all other
    # pages
    assert "ooii?" in order
    # behind what was given up, never waiting for more than one chunk of it
    for position, letter in enumerate(order):
        if letter == "w":
            waits, came = order[:position].count("w"), order[:position].count("i")
            assert came >= min(16, WINDOW + waits)


# --- failures

FAILING = {name: SIDES[name] for name in ("tails", "three for two", "one stays")}
FAULTS = {
    **{
        f"{operation}-{window}": (operation, False, window)
        for operation in ("create", "map", "copy", "sync")
        for window in (0, WINDOW)
    },
    "create-forever": ("create", True, WINDOW),
}


@pytest.mark.parametrize(("fault", "sides"), diagonal(FAULTS, FAILING))
def test_a_fault_at_each_call_in_turn_rolls_both_sides_back(
    fault: tuple[str, bool, int], sides: tuple[dict[str, int], dict[str, int]]
) -> None:
    """For ever: the driver gives nothing more from some chunk on, as when another process was
    faster. Going back asks it for nothing."""
    (operation, forever, window), (before, after) = fault, sides
    budget = max(side(before), side(after)) + window * CHUNK
    survey = Scene(before, after, budget)
    with survey.manager.phase(BEFORE) as phase:
        survey.write(survey.before)
        points = calls_to_fail(survey.device, operation, lambda: phase.switch(AFTER))
    for at in points:
        scene = Scene(before, after, budget)
        with scene.manager.phase(BEFORE) as phase:
            scene.write(scene.before)
            scene.device.fail(operation, at=at, forever=forever)
            with suppress(DeviceMemoryError, InjectedFault):
                phase.switch(AFTER)
            assert scene.device.fired == 1
            scene.device.clear()
            # refused once, the driver is asked again after other chunks were given back
            if operation != "create" or forever:
                assert phase.name == BEFORE
            scene.check(before if phase.name == BEFORE else after)
            phase.switch(AFTER)
            scene.check(after)
        scene.check(())
        assert scene.device.peak_bytes <= budget


def test_a_first_phase_that_needs_the_headroom_goes_back_without_new_memory() -> None:
    before, after = {"a": 7 * CHUNK + PAGE}, {"b": 22 * CHUNK + 2 * PAGE}

    def scene() -> Scene:
        return Scene(before, after, None, capacity_bytes=side(after) + WINDOW * CHUNK)

    survey = scene()
    with survey.manager.phase(BEFORE) as phase:
        points = calls_to_fail(survey.device, "create", lambda: phase.switch(AFTER))
    for at in points:
        failing = scene()
        with failing.manager.phase(BEFORE) as phase:
            failing.device.fail("create", at=at, forever=True)
            with pytest.raises(DeviceMemoryError):
                phase.switch(AFTER)
            assert failing.device.fired == 1
            failing.check(before)


@pytest.mark.parametrize("operation", few(["map", "copy", "sync"], "copy"))
def test_a_link_that_stays_dead_loses_nothing(operation: str) -> None:
    """Whatever cannot go back then says so, and is whole again when the device answers."""
    for at in range(1, 100):
        scene = Scene({"a": 7 * CHUNK + PAGE}, {"b": 7 * CHUNK + 2 * PAGE}, 9 * CHUNK)
        scene.manager.enter(BEFORE)
        scene.write(["a"])
        scene.device.fail(operation, at=at, forever=True)
        with suppress(DeviceMemoryError, InjectedFault):
            scene.manager.switch(AFTER)
        fired = scene.device.fired
        scene.device.clear()
        with suppress(DeviceMemoryError, InjectedFault):
            scene.manager.leave()
        with scene.manager.phase(AFTER):
            assert {handle.broken for handle in scene.handles.values()} == {None}
            scene.check({"b"})
        if not fired:
            return
    pytest.fail("the faults never came to an end")


# --- hundreds of ranges in one phase transition: handles that are many, or that grew at every step


def mapped_by_a_load(*sizes_bytes: int) -> list[int]:
    device = Watched(SimulatedDevice(1 << 24, chunk_bytes=PAGE, granularity=PAGE))
    manager = Manager(device=device)
    modules = [nn.ParameterList([nn.Parameter(torch.randn(nbytes // 4))]) for nbytes in sizes_bytes]
    for index, module in enumerate(modules):
        manager.register(f"m{index}", module, role="actor")
    with manager.phase("log_prob"):
        found = list(device.mapped)
    assert_nothing_resident(manager)
    return found


def test_a_burst_grows_under_the_last_ones_copies_and_crosses_ranges() -> None:
    assert mapped_by_a_load(300 * PAGE) == [1, 8, 64, 227]
    assert mapped_by_a_load(*[10 * PAGE] * 5) == [1, 8, 1, 10, 10, 10, 10]


COUNTS = st.sampled_from([1, 2, 9, 17, 30])


@pytest.mark.sweep  # the sizes above, drawn
@settings(max_examples=100 if os.environ.get("SWEEP") == "all" else 5, deadline=None)
@given(
    counts=st.tuples(COUNTS, COUNTS),
    chunk_pages=st.sampled_from([1, 2, 5, 64]),
    spare_chunks=st.sampled_from([0, 1, WINDOW, 1000]),
    steps=st.integers(1, 6),
    seed=st.integers(0, 1 << 32),
)
def test_swaps_between_handles_that_grow(
    counts: tuple[int, int], chunk_pages: int, spare_chunks: int, steps: int, seed: int
) -> None:
    chance, chunk_bytes = random.Random(seed), chunk_pages * PAGE
    torch.manual_seed(seed)
    # with large chunks everything is a tail
    drawn = growing.sizes(PAGE, min(chunk_bytes, 5 * PAGE))
    names = [
        f"{side}.{index}"
        for side, count in zip(growing.SIDES, counts, strict=True)
        for index in range(count)
    ]
    device = SimulatedDevice(1 << 30, chunk_bytes=chunk_bytes, granularity=PAGE)
    trained = [name for name in names if chance.random() < 0.3]
    scene = growing.Scene(
        device, {name: chance.choices(drawn, k=chance.randint(1, 3)) for name in names}, trained
    )
    turns = itertools.cycle(growing.SIDES)
    with scene.manager.phase(side := next(turns)) as phase:
        for _ in range(steps):
            scene.check(side)
            scene.grow(side, chance, drawn)
            gone, side = side, next(turns)
            device.capacity_bytes = (
                max(scene.needs(gone), scene.needs(side)) + spare_chunks * chunk_bytes
            )
            phase.switch(side)
            scene.check(side)
    scene.leave()
