"""When memory goes back to the driver: at an entry once it is decided, so that going back asks
nobody; at an exit under the copies."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from contextlib import suppress
from typing import Any

import pytest
import torch.distributed as dist

from placement import DeviceMemoryError, IntegrityError
from placement.devices.base import Device
from placement.devices.memory import Addresses, Chunk, Mark
from placement.group import StoreGroup
from placement.testing import InjectedFault, assert_nothing_resident
from tests.contract.test_swap import AFTER, BEFORE, CHUNK, PAGE, Scene, Watched
from tests.support.sweeps import diagonal

BATCH = 4
"""Chunks of which the copies are waited for together."""


class Giving(Watched):
    """Notes what is behind no address and not with the driver, at its most, and what was given back
    before the last byte had left."""

    def __init__(self, device: Device) -> None:
        super().__init__(device)
        self.reset()
        self._behind: dict[tuple[int, int], Chunk] = {}

    def reset(self) -> None:
        # `early_bytes`: released by the last wait for a copy
        self.stock_bytes = self.released_bytes = self.early_bytes = 0
        self.log.clear()

    def map(self, addresses: Addresses, chunks: Sequence[Chunk], start: int = 0) -> None:
        super().map(addresses, chunks, start)
        at = start
        for chunk in chunks:
            self._behind[addresses.base, at] = chunk
            at += chunk.nbytes

    def unmap(self, addresses: Addresses, nbytes: int, start: int = 0) -> None:
        super().unmap(addresses, nbytes, start)
        gone = {(addresses.base, at) for at in range(start, start + nbytes, PAGE)}
        self._behind = {place: chunk for place, chunk in self._behind.items() if place not in gone}
        behind = sum(chunk.nbytes for chunk in self._behind.values())
        self.stock_bytes = max(self.stock_bytes, self.memory().chunk_bytes - behind)

    def release(self, *chunks: Chunk) -> None:
        super().release(*chunks)
        self.released_bytes += sum(chunk.nbytes for chunk in chunks)
        if chunks:
            self.log.append(("release", 0))

    def wait(self, mark: Mark) -> None:
        super().wait(mark)
        self.early_bytes = self.released_bytes


SIZES = {"a": 16 * CHUNK, "c": 5 * CHUNK + PAGE}


class Leaving(Scene):
    """`a` and `c` on the device, just written all over; `b` is not."""

    make_device = Giving

    def __init__(
        self,
        sizes: dict[str, int] = SIZES,
        *,
        stays: Collection[str] = (),
        readonly: Collection[str] = (),
        **options: Any,
    ) -> None:
        after = {"b": CHUNK, **{name: sizes[name] for name in stays}}
        super().__init__(sizes, after, 64 * CHUNK, readonly=readonly, **options)
        self.manager.enter(BEFORE)
        for name in sizes.keys() - {*readonly}:
            self.models[name][0].data.add_(1)
        self.note()
        self.num_bytes = sum(handle.resident_bytes for handle in self.handles.values())
        self.device.reset()

    def end(self) -> None:
        """Whatever happened, the way out and the next phase are as ever."""
        while self.manager.snapshot().phases:
            self.manager.leave()
        self.check(())
        with self.manager.phase(BEFORE):
            self.check(("a", "c"))
        assert_nothing_resident(self.manager)


def test_what_leaves_at_an_exit_is_given_back_under_the_copies() -> None:
    scene = Leaving()
    scene.manager.leave()
    assert scene.device.released_bytes == scene.num_bytes
    assert scene.device.stock_bytes <= BATCH * CHUNK
    assert scene.device.early_bytes >= scene.num_bytes - 2 * BATCH * CHUNK, (
        "only the last of them went after the last copy"
    )
    scene.check(())
    scene.end()


@pytest.mark.parametrize("num_full", [1, 3])
def test_a_short_last_page_is_given_back_with_the_page_before_it(num_full: int) -> None:
    scene = Leaving({"c": num_full * CHUNK + PAGE})
    scene.manager.leave()
    assert scene.device.early_bytes == (num_full - 1) * CHUNK


@pytest.mark.parametrize(
    ("how", "in_group"), [("enter", False), ("switch", False), ("enter", True)]
)
def test_what_only_leaves_at_an_entry_is_kept_until_the_end(how: str, in_group: bool) -> None:
    """In a group: until the others have agreed."""
    scene = Leaving(group=StoreGroup(dist.HashStore(), 0, 1, 10.0) if in_group else None)
    getattr(scene.manager, how)("values")
    assert scene.device.stock_bytes == scene.num_bytes
    assert scene.device.early_bytes == 0
    assert scene.device.released_bytes == scene.num_bytes
    scene.check(())
    scene.end()


@pytest.mark.parametrize("stays", [(), ("c",)], ids=["both leave", "one stays"])
def test_where_something_comes_nothing_goes_back_before_the_end(stays: Sequence[str]) -> None:
    scene = Leaving(stays=stays)
    scene.manager.enter(AFTER)
    assert scene.device.stock_bytes >= 14 * CHUNK
    assert scene.device.early_bytes == 0
    done = [what for what, _ in scene.device.log]
    assert "to_device" not in done[done.index("release") :]
    scene.check({"b", *stays})
    scene.end()


# --- what is complained of afterwards


def complaining(kind: str) -> tuple[Leaving, Any]:
    """A scene in which the next phase transition that offloads has to be undone, and what it is
    for."""
    if kind == "readonly":
        scene = Leaving(readonly={"c"})
        scene.models["c"][0].data[7] = 3.0
        return scene, None
    scene = Leaving(strict=True)
    return scene, scene.models["a"][0].detach()


@pytest.mark.parametrize("how", ["enter", "switch"])
@pytest.mark.parametrize("kind", ["readonly", "strict"])
def test_a_complaint_brings_everything_back_and_asks_the_driver_for_nothing(
    kind: str, how: str
) -> None:
    scene, view = complaining(kind)
    created = scene.device.calls["create"]
    with pytest.raises(
        IntegrityError, match="readonly" if kind == "readonly" else "references to storages of 'a'"
    ):
        getattr(scene.manager, how)("values")
    assert scene.device.calls["create"] == created
    assert scene.device.released_bytes == 0
    assert [*scene.manager.snapshot().phases] == [BEFORE]
    scene.check(("a", "c"))
    assert view is None or view.equal(scene.values["a"]["0"])
    del view
    scene.manager.enter("values")
    scene.check(())
    scene.end()


@pytest.mark.parametrize(
    ("operation", "kind"), diagonal(["map", "copy", "sync"], ["readonly", "strict"])
)
def test_a_device_that_fails_while_a_complaint_is_undone_loses_nothing(
    kind: str, operation: str
) -> None:
    """From each call in turn on it fails for ever, up to where it has given all."""
    for at in range(1, 200):
        scene, view = complaining(kind)
        scene.device.fail(operation, at=at, forever=True)
        with pytest.raises((IntegrityError, InjectedFault, DeviceMemoryError)) as caught:
            scene.manager.enter("values")
        fired = scene.device.fired
        scene.device.clear()
        del view
        if not fired:
            assert isinstance(caught.value, IntegrityError), (
                "what the phase transition was undone for is said first"
            )
            scene.check({"a", "c"})
        # of what was written into a readonly one, where it is still there
        with suppress(IntegrityError):
            scene.manager.enter("values")
        assert [handle.broken for handle in scene.handles.values()] == [None] * 3
        scene.end()
        if not fired:
            break
    else:
        pytest.fail("the faults never came to an end")
