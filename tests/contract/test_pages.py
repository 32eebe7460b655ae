"""Every operation on every state of a range's pages, with every call of the device in it failing
once: nothing lost, nothing left over."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import pytest
import torch

from placement.core.errors import DeviceMemoryError
from placement.devices.base import poison_bytes
from placement.devices.memory import Chunk, Direction
from placement.storage.pages import Behind, ChunkPool, Page, Pages, Side, fill
from placement.testing import InjectedFault
from tests.support.late_device import LateDevice
from tests.support.sweeps import diagonal

CHUNK, TAIL, USED_TAIL = 8192, 4096, 4088
SIZES = (CHUNK, TAIL)
USED = (CHUNK, USED_TAIL)
FAILING = ("create", "map", "copy", "sync")


class Found(NamedTuple):
    """The state of a page before an operation; `behind` is None without memory."""

    behind: Behind | None = None
    newest: Side = Side.HOST
    copied: Direction | None = None


STATES = {
    "away": Found(),
    "resident, changed": Found(Behind.OWN, Side.DEVICE),
    "resident, loaded": Found(Behind.OWN, Side.BOTH, "to_device"),
    "resident, saved": Found(Behind.OWN, Side.BOTH, "to_host"),
    "resident, its copy failed": Found(Behind.OWN, Side.HOST, "to_device"),
    "aside, prefetched": Found(Behind.ASIDE, Side.BOTH, "to_device"),
    "aside, empty": Found(Behind.ASIDE),
    "aside, left": Found(Behind.ASIDE, Side.DEVICE),
    "aside, saved": Found(Behind.ASIDE, Side.BOTH, "to_host"),
    "in hand, changed": Found(Behind.NOWHERE, Side.DEVICE),
    "in hand, clean": Found(Behind.NOWHERE, Side.BOTH),
    "in hand, empty": Found(Behind.NOWHERE),
}
ALL = range(len(SIZES))


def vacate_saved(pages: Pages, pool: ChunkPool, *, wipes: bool = False) -> None:
    """As its caller must: only what the host copy has."""
    saved = [index for index in ALL if pages.table[index].newest is not Side.DEVICE]
    pages.vacate(saved, pool, wipes=wipes)


def load(pages: Pages, pool: ChunkPool, indices: Sequence[int] = ALL) -> None:
    pages.show(indices)
    bring(pages, pool, Behind.OWN, indices)


def bring(pages: Pages, pool: ChunkPool, behind: Behind, indices: Sequence[int] = ALL) -> None:
    lacking = [index for index in pages.without_memory() if index in indices]
    pages.put(lacking, pool, behind)
    fill(pages._device, [(pages, indices)])


OPERATIONS: dict[str, Callable[[Pages, ChunkPool], object]] = {
    "load": load,
    "prefetch": lambda pages, pool: bring(pages, pool, Behind.ASIDE),
    "show": lambda pages, pool: pages.show(ALL),
    "hide": lambda pages, pool: pages.hide(ALL),
    "save": lambda pages, pool: pages.save(ALL),
    "vacate and wipe": lambda pages, pool: vacate_saved(pages, pool, wipes=True),
    "vacate": vacate_saved,
    "settle on the host": lambda pages, pool: pages.settle(Side.HOST, pool),
    "settle on the device": lambda pages, pool: pages.settle(Side.DEVICE, pool),
}


class Scene:
    """One range of two pages, put into any state again and again."""

    def __init__(self) -> None:
        self.device = LateDevice(1 << 20, chunk_bytes=CHUNK)
        self.addresses = self.device.reserve(CHUNK + TAIL)
        self.device.unmap(self.addresses, CHUNK + TAIL)  # poison is there
        self.host = self.device.host(CHUNK + USED_TAIL)
        generator = torch.Generator().manual_seed(0)
        self.values = [
            torch.randint(0, 256, (used,), dtype=torch.uint8, generator=generator) for used in USED
        ]
        self.pool = ChunkPool(self.device)

    def make(self, states: tuple[Found, ...]) -> Pages:
        pages = Pages(self.device, self.addresses, SIZES, CHUNK + USED_TAIL, self.host)
        pages.reserve_aside(lambda _: None)
        self.pool = ChunkPool(self.device)
        for index, state in enumerate(states):
            if state.behind is not None:
                pages.put([index], self.pool)
                on_device = self.device.view(self.addresses, pages.starts[index], USED[index])
                on_device.copy_(
                    self.values[index]
                    if Side.DEVICE in state.newest
                    else torch.full_like(on_device, 1)
                )
                on_host = self.host.view(pages.starts[index], USED[index])
                on_host.copy_(
                    self.values[index] if Side.HOST in state.newest else torch.full_like(on_host, 2)
                )
                if state.behind is Behind.ASIDE:
                    pages.hide([index])
                elif state.behind is Behind.NOWHERE:
                    self.device.unmap(self.addresses, SIZES[index], pages.starts[index])
                    pages._set(index, pages.table[index].memory, Behind.NOWHERE)
                page = pages.table[index]
                page.newest, page.copied = state.newest, state.copied
                page.mark = (
                    None
                    if state.copied is None or state.newest is Side.HOST
                    else self.device.mark(state.copied)
                )
            else:
                self.host.view(pages.starts[index], USED[index]).copy_(self.values[index])
        return pages

    def check(self, pages: Pages, side: Side) -> None:
        """Everything is on one side, with its values, and no memory is anywhere but where the table
        says."""
        pages.wait_until_saved()
        self.device.order()
        shown = [
            self.device.view(self.addresses, pages.starts[index], USED[index]) for index in ALL
        ]
        for index, page in enumerate(pages.table):
            if side is Side.DEVICE:
                assert (page.behind, page.newest) == (Behind.OWN, Side.DEVICE)
                assert shown[index].equal(self.values[index])
            else:
                assert page.behind is (Behind.NOWHERE if page.memory is None else Behind.ASIDE)
                assert page.newest in Side.BOTH
                assert page.newest is not Side.DEVICE
                assert bytes(shown[index].numpy()) == poison_bytes(pages.starts[index], USED[index])
                assert self.host.view(pages.starts[index], USED[index]).equal(self.values[index])
        held = sum(page.memory.nbytes for page in pages.table if page.memory is not None)
        assert held == pages.own_bytes + pages.aside_bytes
        assert self.device.memory().chunk_bytes == held + self.pool.held_bytes

    def content(self, chunk: Chunk) -> torch.Tensor:
        """A copy of the bytes of a chunk that is behind no address."""
        self.device.map(self.addresses, (chunk,))
        content = self.device.view(self.addresses, 0, chunk.nbytes).clone()
        self.device.unmap(self.addresses, chunk.nbytes)
        return content

    def end(self, pages: Pages) -> None:
        pages.settle(Side.HOST, self.pool)
        pages.discard(self.pool)
        assert all(page == Page() for page in pages.table)
        for chunk in self.pool:
            assert not chunk.is_wiped or self.content(chunk).eq(0xFF).all()
        self.pool.release()
        assert self.device.memory().chunk_bytes == 0


def failures(device: LateDevice, run: Callable[[], object]) -> Iterator[tuple[str, int]]:
    """The calls of the device that an operation makes."""
    before = dict(device.calls)
    run()
    for operation in FAILING:
        for at in range(device.calls[operation] - before[operation]):
            yield operation, at + 1


@pytest.mark.parametrize(
    ("name", "side"),
    diagonal(OPERATIONS.keys(), {"host": Side.HOST, "device": Side.DEVICE}),
)
def test_every_state_can_be_settled_after_an_operation_of_which_each_call_failed(
    name: str, side: Side, counted: Callable[[str], None]
) -> None:
    scene, operation = Scene(), OPERATIONS[name]
    cases = failed = 0
    for states in itertools.product(STATES.values(), repeat=len(SIZES)):
        pages = scene.make(states)
        points = [*failures(scene.device, lambda pages=pages: operation(pages, scene.pool))]  # type: ignore[misc]
        for point in (None, *points):
            if point is not None:
                pages = scene.make(states)
                scene.device.fail(point[0], at=point[1])
                fired = scene.device.fired
                with pytest.raises((DeviceMemoryError, InjectedFault)):
                    operation(pages, scene.pool)
                scene.device.clear()
                failed += scene.device.fired - fired
            cases += 1
            pages.settle(side, scene.pool)
            scene.check(pages, side)
            pages.settle(side, scene.pool)  # idempotent
            scene.check(pages, side)
            scene.end(pages)
    counted(
        f"pages: {name} in {len(STATES) ** len(SIZES)} states, {cases} cases, {failed} calls "
        "failed once: 0 lost, 0 left over"
    )


@pytest.mark.parametrize("name", OPERATIONS)
def test_an_operation_that_is_repeated_changes_nothing_more(name: str) -> None:
    scene, operation = Scene(), OPERATIONS[name]
    for states in itertools.product(STATES.values(), repeat=len(SIZES)):
        pages = scene.make(states)
        operation(pages, scene.pool)
        table = [(page.memory, page.behind, page.newest) for page in pages.table]
        calls = {kind: scene.device.calls[kind] for kind in ("create", "map", "copy")}
        operation(pages, scene.pool)
        assert [(page.memory, page.behind, page.newest) for page in pages.table] == table
        assert {kind: scene.device.calls[kind] for kind in calls} == calls
        scene.end(pages)


def test_a_page_is_waited_for_alone() -> None:
    scene = Scene()
    pages = scene.make((Found(), Found()))
    load(pages, scene.pool, [0])
    load(pages, scene.pool, [1])
    pages.wait([0])
    first, second = (
        scene.device.view(scene.addresses, pages.starts[index], USED[index]) for index in ALL
    )
    assert first.equal(scene.values[0])
    assert not second.equal(scene.values[1])
    pages.wait([1])
    assert second.equal(scene.values[1])
    scene.end(pages)


def test_the_bytes_of_a_page_whose_vacating_is_cut_short_are_those_on_the_host(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By the handler of a signal, as the table notes that its memory is gone."""
    scene = Scene()
    pages = scene.make((STATES["resident, saved"],) * 2)
    noting = Pages._set

    def cut_short(pages: Pages, index: int, memory: Chunk | None, behind: Behind) -> None:
        noting(pages, index, memory, behind)
        if memory is None:
            raise SystemExit

    with monkeypatch.context() as patched:
        patched.setattr(Pages, "_set", cut_short)
        with pytest.raises(SystemExit):
            pages.vacate(ALL, scene.pool)
    pages.settle(Side.DEVICE, scene.pool)
    scene.check(pages, Side.DEVICE)
