"""The hook on SGLang's memory saver, with SGLang's own adapter and hook registry.

Their files come from the wheel of each version that `released` names; torch_memory_saver is a
stand-in on a `Card`.
"""

from __future__ import annotations

import importlib
import sys
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from placement import HostMemoryError, IntegrityError, PlacementError
from placement.engines import sglang_backend
from tests.engines.released import SGLANG, Card, CardDevice, Modules
from tests.support.sweeps import few

PAGE = 4096


class MemorySaver:
    """torch_memory_saver.py, 0.0.10: regions by tag, with a backup where one is asked for."""

    enabled = True

    def __init__(self, card: Card) -> None:
        self.card = card
        self.segments: dict[int, Any] = {}
        self.calls: list[Any] = []
        self._pool: Any = (0, 0)
        self._pools: dict[Any, Any] = {}

    @contextmanager
    def region(self, tag: str, enable_cpu_backup: bool = False) -> Iterator[None]:
        self.calls.append((tag, enable_cpu_backup))
        key = (tag, enable_cpu_backup)
        self._pool = self._pools.setdefault(key, (0, len(self._pools) + 1))
        yield
        self._pool = (0, 0)

    def allocate(self, value: torch.Tensor) -> torch.Tensor:
        address = self.card.reserve(value.nbytes)
        self.card.back(address, value.nbytes)
        self.segments[address] = {
            "address": address,
            "total_size": value.nbytes,
            "segment_pool_id": self._pool,
        }
        return self.card.blocks[address].view(0, value.nbytes).copy_(value)

    def pause(self, tag: str) -> None:
        for address, nbytes in self._of(tag):
            self.card.take(address, nbytes)

    def resume(self, tag: str) -> None:
        for address, nbytes in self._of(tag):
            self.card.back(address, nbytes)

    def _of(self, tag: str) -> list[tuple[int, int]]:
        pools = [pool for (each, _), pool in self._pools.items() if each == tag]
        return [
            (address, segment["total_size"])
            for address, segment in self.segments.items()
            if segment["segment_pool_id"] in pools
        ]


class Scheduler:
    """sglang/srt/managers/scheduler.py: what `/server_info` tells of a scheduler."""

    def get_internal_state(self, request: object) -> Any:
        return SimpleNamespace(internal_state={"last_gen_throughput": 0.0})


class Sglang:
    def __init__(self, patch: pytest.MonkeyPatch, version: str) -> None:
        self.card = Card(1 << 20)
        self.device = CardDevice(self.card)
        self.saver = MemorySaver(self.card)
        modules = Modules(patch, "sglang", version)
        for name in ("sglang", "sglang.srt", "sglang.srt.utils"):
            modules.package(name)
        modules.module("sglang.srt.utils.common", is_xpu=lambda: False)
        modules.module("torch_memory_saver", torch_memory_saver=self.saver)
        # what `sglang.srt.plugins` reads of the environment
        no = SimpleNamespace(get=lambda: "")
        modules.module(
            "sglang.srt.environ", envs=SimpleNamespace(SGLANG_PLUGINS=no, SGLANG_PLATFORM=no)
        )
        # in the process that has the weights it is imported before plug-ins are loaded
        scheduler = "sglang.srt.managers.scheduler"
        modules.module("sglang.srt.managers").__path__ = []
        self.scheduler = modules.module(scheduler, Scheduler=type("Scheduler", (Scheduler,), {}))
        modules.forget("sglang.srt.plugins", "sglang.srt.plugins.hook_registry")
        modules.forget("sglang.srt.utils.torch_memory_saver_adapter")
        patch.setattr(torch.version, "cuda", "13.0")
        patch.setattr(sglang_backend.importlib.util, "find_spec", lambda _: True)
        patch.setattr(sglang_backend, "select_device", lambda _: self.device)
        patch.setattr(sglang_backend, "_savers", [])
        patch.setattr(torch.cuda, "current_device", lambda: 0)
        patch.setattr(torch.cuda, "memory_snapshot", lambda: [*self.saver.segments.values()])

    def adapter(self, *, enable: bool = True) -> Any:
        module = importlib.import_module("sglang.srt.utils.torch_memory_saver_adapter")
        return module.TorchMemorySaverAdapter.create(enable=enable)


@pytest.fixture(params=few(SGLANG, SGLANG[0], SGLANG[-1]))
def sglang(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Sglang:
    made = Sglang(monkeypatch, request.param)
    sglang_backend.register()
    return made


def filled(sglang: Sglang, adapter: Any, *, backup: bool) -> tuple[torch.Tensor, torch.Tensor]:
    with adapter.region("weights", enable_cpu_backup=backup):
        weights = sglang.saver.allocate(torch.arange(3 * PAGE).to(torch.uint8))
    with adapter.region("kv_cache"):
        kv_cache = sglang.saver.allocate(torch.full((PAGE,), 7, dtype=torch.uint8))
    return weights, kv_cache


def test_weights_with_a_backup_come_back_and_are_copied_once(sglang: Sglang) -> None:
    adapter = sglang.adapter()
    assert adapter is sglang.adapter()
    assert adapter.enabled
    weights, _ = filled(sglang, adapter, backup=True)
    assert sglang.saver.calls == [("weights", False), ("kv_cache", False)]
    assert adapter.mirror.host_bytes == 3 * PAGE
    before = weights.clone()
    for copied in ([3 * PAGE], []):
        sglang.device.copied.clear()
        adapter.pause("kv_cache")
        adapter.pause("weights")
        assert sglang.card.mapped == {}
        assert sglang.device.copied == copied
        adapter.resume("weights")
        assert torch.equal(weights, before)
        adapter.resume("kv_cache")
    weights[5] = 99
    adapter.pause("weights")
    adapter.resume("weights")
    assert weights[5] == 99


def test_weights_without_a_backup_are_dropped(sglang: Sglang) -> None:
    adapter = sglang.adapter()
    filled(sglang, adapter, backup=False)
    adapter.pause("weights")
    adapter.resume("weights")
    assert sglang.device.copied == []
    assert adapter.mirror is None


@pytest.mark.parametrize("backup", [True, False])
def test_the_scheduler_tells_of_the_mirror(sglang: Sglang, backup: bool) -> None:
    filled(sglang, sglang.adapter(), backup=backup)
    told = sglang.scheduler.Scheduler().get_internal_state(None).internal_state
    assert told.pop("last_gen_throughput") == 0.0
    assert told == ({"placement": {"host_bytes": 3 * PAGE, "is_spoilt": False}} if backup else {})


def test_a_process_without_a_scheduler_imports_none(
    sglang: Sglang, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "sglang.srt.managers.scheduler")
    registry = sys.modules["sglang.srt.plugins.hook_registry"].HookRegistry  # type: ignore[attr-defined]
    monkeypatch.setattr(registry, "_hooks", defaultdict(list))
    monkeypatch.setattr(registry, "_patched", set())
    sglang_backend.register()
    assert [*registry._hooks] == [sglang_backend._TARGET]


def test_a_saver_that_is_off_stays_sglangs_own(sglang: Sglang) -> None:
    adapter = sglang.adapter(enable=False)
    assert type(adapter).__name__ == "_TorchMemorySaverAdapterNoop"


def test_a_pause_that_fails_leaves_the_weights_where_they_are(
    sglang: Sglang, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(nbytes: int) -> None:
        raise HostMemoryError("host memory: none")

    adapter = sglang.adapter()
    with monkeypatch.context() as patch:
        patch.setattr(sglang.device, "host", refuse)
        weights, _ = filled(sglang, adapter, backup=True)
        before = weights.clone()
        with pytest.raises(HostMemoryError):
            adapter.pause("weights")
    assert torch.equal(weights, before)
    sglang.device.fails_in = 0
    with pytest.raises(RuntimeError):
        adapter.pause("weights")
    assert torch.equal(weights, before)
    sglang.device.fails_in = -1
    adapter.pause("weights")
    adapter.resume("weights")
    assert torch.equal(weights, before)


def test_wrong_bytes_are_found(sglang: Sglang) -> None:
    adapter = sglang.adapter()
    weights, _ = filled(sglang, adapter, backup=True)
    adapter.pause("weights")
    sglang.device.flips = {weights.data_ptr()}
    with pytest.raises(IntegrityError, match="other bytes than those that left"):
        adapter.resume("weights")


def test_a_hook_that_is_not_on_is_an_error(sglang: Sglang, monkeypatch: pytest.MonkeyPatch) -> None:
    registry = sys.modules["sglang.srt.plugins.hook_registry"].HookRegistry  # type: ignore[attr-defined]
    monkeypatch.setattr(registry, "_patched", set())
    monkeypatch.setattr(registry, "_hooks", defaultdict(list))
    monkeypatch.setattr(registry, "_apply_target", lambda *_: 1 / 0)
    with pytest.raises(PlacementError, match="no hook on"):
        sglang_backend.register()
