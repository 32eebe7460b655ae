"""The sleep-mode backend with vLLM's allocator on a GPU, and SGLang's hook with torch_memory_saver.

Of vLLM its `device_allocator` and the C extension are enough. Memory that comes back has poison
before its bytes, so that neither zeros nor what was there before can pass for them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from placement.core.errors import DeviceMemoryError
from placement.devices.cuda.answers import Exported

pytestmark = pytest.mark.gpu

MIB = 1 << 20


class Engine:
    """Weights and a KV cache in vLLM's allocator, and a captured graph that reads both."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        torch.zeros(1, device="cuda")
        cumem = pytest.importorskip("vllm.device_allocator.cumem")
        from placement.engines.vllm_backend import PlacementBackend

        map_block = PlacementBackend._map

        def map_poison(backend: PlacementBackend, data: Any) -> None:
            map_block(backend, data)
            memory = Exported(None, data.handle[2], data.handle[1])
            torch.as_tensor(memory, device="cuda").fill_(0xFF)
            torch.cuda.synchronize()

        self.backend: Any = PlacementBackend()
        self.allocator: Any = cumem.CuMemAllocator.get_instance()
        with self.allocator.use_memory_pool(tag="weights"):
            self.weights = [torch.randn(n * MIB, device="cuda") for n in (40, 1, 9)]
        with self.allocator.use_memory_pool(tag="kv_cache"):
            self.kv_cache = torch.zeros(64 * MIB, device="cuda")
        self._graph, self._sums = torch.cuda.CUDAGraph(), torch.zeros(3, device="cuda")
        self._sum()
        torch.cuda.synchronize()
        with torch.cuda.graph(self._graph):
            self._sum()
        monkeypatch.setattr(PlacementBackend, "_map", map_poison)

    def _sum(self) -> None:
        for place, weight in enumerate(self.weights):
            torch.sum(weight, 0, out=self._sums[place])

    def answer(self) -> list[float]:
        """The sums of the weights, by the graph."""
        self._sums.zero_()
        self._graph.replay()
        found: list[float] = self._sums.tolist()
        return found


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Engine]:
    made = Engine(monkeypatch)
    yield made
    # The pools go before the next engine makes new ones: torch aborts where a pool outlives its
    # allocator, as it does if vLLM replaces both.
    made.weights.clear()
    del made.kv_cache, made._graph
    made.allocator.release_pools()


def free_bytes() -> int:
    torch.cuda.synchronize()
    return torch.cuda.mem_get_info()[0]


def test_a_captured_graph_reads_what_came_back(engine: Engine) -> None:
    before, values, free = engine.answer(), [w.clone() for w in engine.weights], free_bytes()
    engine.backend.reserve()
    for written in (True, False, True):
        if written:
            engine.weights[1][7] += 1
            values[1][7] += 1
            before = engine.answer()
        engine.backend.suspend(1)
        assert free_bytes() - free >= 4 * (50 + 64) * MIB
        engine.backend.resume(["weights"])
        assert engine.answer() == before
        engine.backend.resume(["kv_cache"])
        assert all(map(torch.equal, engine.weights, values))
        assert bool(engine.kv_cache.isnan().all())
    assert engine.backend.copied_bytes == 0 or engine.backend.mirror.host_bytes >= 4 * 50 * MIB


def test_a_wake_without_memory_can_be_repeated(engine: Engine) -> None:
    before = engine.answer()
    engine.backend.suspend(1)
    free = free_bytes()
    taken = torch.empty(free - 100 * MIB, dtype=torch.uint8, device="cuda")
    left = free_bytes()
    for _ in range(2):
        with pytest.raises(DeviceMemoryError, match="out of memory"):
            engine.backend.resume()
        assert free_bytes() == left
    del taken
    engine.backend.resume()
    assert engine.answer() == before


def test_two_hundred_cycles_are_flat(engine: Engine) -> None:
    used = []
    for cycle in range(200):
        engine.weights[cycle % 3][cycle] += 1
        engine.backend.suspend(1)
        engine.backend.resume()
        used.append(free_bytes())
    assert used[-1] >= used[0] - 2 * MIB


class Adapter:
    """SGLang's adapter: torch_memory_saver's own methods."""

    def __init__(self, saver: Any) -> None:
        self._saver = saver

    @contextmanager
    def region(self, tag: str, enable_cpu_backup: bool = False) -> Iterator[None]:
        with self._saver.region(tag=tag, enable_cpu_backup=enable_cpu_backup):
            yield

    def pause(self, tag: str) -> None:
        self._saver.pause(tag=tag)

    def resume(self, tag: str) -> None:
        self._saver.resume(tag=tag)


def test_sglangs_weights_come_back_through_our_host_copy() -> None:
    saver = pytest.importorskip("torch_memory_saver").torch_memory_saver
    if saver._impl is None:
        saver.hook_mode = "torch"  # needs no LD_PRELOAD
    from placement.engines.sglang_backend import MirroredSaver

    adapter = MirroredSaver(Adapter(saver))
    with adapter.region("weights", enable_cpu_backup=True):
        weights = [torch.randn(n * MIB, device="cuda") for n in (40, 1, 9)]
    assert adapter.mirror is not None
    assert adapter.mirror.host_bytes >= 4 * 50 * MIB
    for written in (True, False):
        weights[1][3] += written
        values = [weight.clone() for weight in weights]
        free = free_bytes()
        adapter.pause("weights")
        assert free_bytes() - free >= 4 * 50 * MIB
        adapter.resume("weights")
        assert all(map(torch.equal, weights, values))
