"""vLLM's `LLM` and SGLang's `Engine` in this process: the real classes where they can be imported,
else classes of their shape."""

from __future__ import annotations

import importlib.util
import pickle
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from placement import EngineError, EngineLost, State, TorchEngine
from placement.engines.sglang import SglangInProcess
from placement.engines.vllm import VllmInProcess
from placement.testing import assert_nothing_resident
from tests.engines.conftest import beside, publish
from tests.engines.standin import CHUNK, GARBAGE, TAG_BYTES, Memory
from tests.support.worker import assert_same, make_manager


class LLM:
    """vllm/entrypoints/llm.py, 0.33.0: `sleep`, `wake_up`, `release_kv_cache_memory`,
    `apply_model`, `llm_engine`."""

    def __init__(self, shared: Path) -> None:
        self.memory = Memory(shared, ("weights", "kv_cache"))
        self.model = torch.nn.Linear(64, 64)
        self.model.load_weights = self._load_weights  # type: ignore[assignment]
        self.sleeping: set[str] = set()
        self.paused = False
        self.calls: list[Any] = []
        self.unfinished = 0
        self.says = "disk"
        self.failing: dict[str, Exception] = {}
        self.llm_engine = SimpleNamespace(
            is_sleeping=lambda: self.paused or bool(self.sleeping),
            has_unfinished_requests=lambda: self.unfinished > 0,
        )

    def _load_weights(self, pairs: Any) -> set[str]:
        assert "weights" in self.memory.tags
        self.says = "actor"
        return {name for name, _ in pairs}

    def _called(self, *call: Any) -> None:
        self.calls.append(call)
        if call[0] in self.failing:
            raise self.failing.pop(call[0])

    def sleep(self, level: int = 1, mode: str = "abort") -> None:
        self._called("sleep", level)
        if mode == "wait":
            raise ValueError("'wait' mode can't be used in inproc-engine mode")
        self.paused = True
        if level:
            self.kept, self.says = (self.says if level == 1 else GARBAGE), GARBAGE
            for tag in self.memory.tags:
                self.memory.give(tag)
            self.sleeping = {"weights", "kv_cache"}

    def release_kv_cache_memory(self) -> None:
        self._called("release_kv_cache_memory")
        if not self.paused or self.sleeping:
            raise RuntimeError("release_kv_cache_memory() requires a completed pause first")
        self.memory.give("kv_cache")
        self.sleeping = {"kv_cache"}

    def wake_up(self, tags: list[str] | None = None) -> bool:
        self._called("wake_up", tags)
        assert set(tags or ()) <= self.sleeping
        for tag in tags or [*self.sleeping]:
            self.memory.take(tag)
            self.says = self.kept if tag == "weights" else self.says
        self.sleeping -= set(tags or self.sleeping)
        self.paused = bool(self.sleeping)
        return not self.sleeping

    def collective_rpc(self, method: str) -> list[Any]:
        assert method == "check_health"
        return [None]

    def apply_model(self, func: Any) -> list[Any]:
        return [func(self.model)]

    def reset_prefix_cache(
        self, reset_running_requests: bool = False, reset_connector: bool = False
    ) -> bool:
        self._called("reset_prefix_cache")
        return True


class SglEngine:
    """sglang/srt/entrypoints/engine.py, 0.5.23: release, resume, flush,
    `update_weights_from_tensor`, `server_args`."""

    def __init__(self, shared: Path, *, saver: bool = True) -> None:
        self.memory = Memory(shared, ("weights", "kv_cache"))
        self.server_args = SimpleNamespace(
            enable_memory_saver=saver, enable_weights_cpu_backup=False, tp_size=2
        )
        self.released: set[str] = set()
        self.busy = 0
        self.says = "disk"
        self.calls: list[Any] = []
        self.accepts = True
        self.got: dict[str, torch.Tensor] = {}
        self.formats: list[str | None] = []

    def release_memory_occupation(self, tags: list[str] | None = None) -> None:
        self.calls.append(("release", tags))
        assert not self.busy
        assert not self.released & set(tags or ())
        for tag in tags or ():
            self.memory.give(tag)
        self.released |= set(tags or ())
        self.says = GARBAGE

    def resume_memory_occupation(self, tags: list[str] | None = None) -> None:
        self.calls.append(("resume", tags))
        for tag in tags or ():
            self.released.remove(tag)
            self.memory.take(tag)

    def flush_cache(self) -> Any:
        assert "kv_cache" not in self.released
        self.busy -= self.busy > 0
        return SimpleNamespace(success=self.busy == 0, message="")

    def update_weights_from_tensor(
        self, named_tensors: Any, load_format: str | None = None, flush_cache: bool = True
    ) -> tuple[bool, str]:
        assert "weights" not in self.released
        assert not flush_cache
        self.says = "actor" if self.accepts else self.says
        self.formats.append(load_format)
        # each rank reads its own payload, as SGLang's model runner does
        if load_format is not None:
            assert len(named_tensors) == self.server_args.tp_size
            named_tensors = FlattenedTensorBucket(
                **pickle.loads(named_tensors[1])
            ).reconstruct_tensors()
        self.got |= {name: tensor.clone() for name, tensor in named_tensors}
        return self.accepts, "" if self.accepts else "shape mismatch"


@pytest.mark.parametrize("weights", ["keep", "discard"])
def test_steps_of_vllm(weights: Any, shared: Path) -> None:
    llm = LLM(shared)
    engine = VllmInProcess(llm, weights=weights)
    manager, actor, handle = beside(engine, shared)
    for _ in range(2):
        with manager.phase("weight_sync") as step:
            assert llm.memory.tags == {"weights"}
            publish(actor, engine)
            step.switch("rollout")
            assert (llm.says, llm.paused, actor.resident_bytes) == ("actor", False, 0)
            step.switch("weight_sync")
            assert llm.memory.tags == {"weights"}
            assert llm.says == "actor"  # the KV cache alone went
            step.switch("rollout")
    assert handle.state is State.CPU_OFFLOADED
    assert_nothing_resident(manager)


def test_vllm_that_fails(shared: Path) -> None:
    llm = LLM(shared)
    manager, actor, handle = beside(engine := VllmInProcess(llm), shared)
    llm.failing["wake_up"] = RuntimeError("CUDA Error: out of memory")
    with pytest.raises(
        EngineError,
        match=r"wake_up\(tags=\['weights'\]\) of vLLM failed: .*out of memory",
    ):
        manager.phase("rollout").__enter__()
    with pytest.raises(EngineError, match="so they are not valid"):
        manager.phase("rollout").__enter__()
    handle.object.residency.stale = None
    with manager.phase("rollout"):
        llm.failing["sleep"] = AssertionError("Memory usage increased after sleeping.")
        with pytest.raises(EngineLost, match="Memory usage increased"):
            manager.phase("train").__enter__()
        assert handle.broken is not None
        engine.assume(offloaded=[])
    with manager.phase("weight_sync") as step:
        publish(actor, engine)
        step.switch("rollout")
        llm.unfinished = 2
        with pytest.raises(EngineError, match="has unfinished requests"):
            step.switch("train")
        assert handle.state is State.GPU_RESIDENT
        llm.unfinished = 0
        llm.failing["release_kv_cache_memory"] = RuntimeError("an illegal memory access")
        with pytest.raises(EngineLost, match="illegal memory access"):
            step.switch("weight_sync")
        # not the open engine of before: it schedules nothing any more
        assert handle.broken is not None
        engine.assume(offloaded=[])


def test_vllm_that_was_made_without_sleep_mode(shared: Path) -> None:
    llm = LLM(shared)
    llm.llm_engine.model_config = SimpleNamespace(enable_sleep_mode=False)
    with pytest.raises(EngineError, match="made without sleep mode"):
        beside(VllmInProcess(llm), shared)
    assert llm.calls == []
    llm.llm_engine.model_config.enable_cumem_allocator = True  # then it moves all the same
    _, _, handle = beside(VllmInProcess(llm), shared)
    assert handle.state is State.CPU_OFFLOADED


def test_what_is_no_engine_of_its_kind(shared: Path) -> None:
    class Asynchronous(LLM):
        async def sleep(self, level: int = 1, mode: str = "abort") -> None:  # type: ignore[override]
            pass

    with pytest.raises(ValueError, match=r"no vllm\.LLM \(sleep, wake_up"):
        VllmInProcess(object())
    with pytest.raises(ValueError, match="its sleep is asynchronous"):
        VllmInProcess(Asynchronous(shared))
    with pytest.raises(
        ValueError,
        match=r"not an sglang\.Engine: it has no release_memory_occupation",
    ):
        SglangInProcess(object())
    with pytest.raises(
        TypeError,
        match=r"takes a torch\.nn\.Module, not a "
        r"LLM; "
        r"placement\.engines "
        r"has the engines for vLLM and "
        r"SGLang",
    ):
        TorchEngine(LLM(shared))  # type: ignore[arg-type]


def test_steps_of_sglang(shared: Path) -> None:
    inner = SglEngine(shared)
    engine = SglangInProcess(inner, deadline_seconds=5)
    manager, actor, _ = beside(engine, shared)
    for _ in range(2):
        with manager.phase("weight_sync") as step:
            publish(actor, engine)
            step.switch("rollout")
            assert inner.says == "actor"
            inner.busy = 2
    assert inner.calls[:4] == [
        ("release", ["kv_cache", "weights"]),
        ("resume", ["weights"]),
        ("resume", ["kv_cache"]),
        inner.calls[0],
    ]
    assert_nothing_resident(manager)


def test_sglang_that_refuses_a_bucket_or_has_no_saver(shared: Path) -> None:
    inner = SglEngine(shared)
    engine = SglangInProcess(inner)
    manager, actor, _ = beside(engine, shared)
    inner.accepts = False
    with (
        pytest.raises(EngineError, match="refused a bucket of 1 weights: shape mismatch"),
        manager.phase("weight_sync"),
    ):
        publish(actor, engine)
    with pytest.raises(EngineError, match="mean nothing now"):
        manager.phase("rollout").__enter__()
    with pytest.raises(EngineError, match="memory saver"):
        beside(
            SglangInProcess(SglEngine(shared.with_name("other"), saver=False)),
            shared.with_name("other"),
        )


class Allocator:
    """vllm/device_allocator/cumem.py, 0.33.0: a backup tensor for each allocation that was put to
    sleep, None while it is awake."""

    def __init__(self, sizes: dict[str, int]) -> None:
        self.sizes = sizes
        self.pointer_to_data = {
            index: SimpleNamespace(cpu_backup_tensor=None) for index in range(len(sizes))
        }

    def fill(self, is_asleep: bool) -> None:
        for data, nbytes in zip(self.pointer_to_data.values(), self.sizes.values(), strict=True):
            data.cpu_backup_tensor = (
                torch.empty(nbytes, dtype=torch.uint8) if is_asleep and nbytes else None
            )


@pytest.mark.parametrize(("is_apart", "releases"), [(False, False), (False, True), (True, False)])
def test_the_mirror_of_vllm_is_what_its_allocator_has(
    is_apart: bool, releases: bool, shared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`releases`: whether torch gives the memory back that no tensor uses."""
    allocator = Allocator({"layers": 3 * CHUNK, "head": 2 * CHUNK + 1, "kv_cache": 0})
    module = SimpleNamespace(CuMemAllocator=SimpleNamespace(instance=allocator))
    monkeypatch.setitem(sys.modules, "vllm.device_allocator.cumem", module)  # type: ignore[arg-type]
    cached = 0 if releases else 5 * CHUNK + 1
    told = {"allocated_bytes.current": 9 * CHUNK + cached, "active_bytes.current": 9 * CHUNK}
    monkeypatch.setattr(torch.cuda, "host_memory_stats", lambda: told)
    # a variable that no released vLLM reads
    monkeypatch.setenv("VLLM_SLEEP_MODE_RELEASE_HOST_MEMORY", str(int(not releases)))
    llm = LLM(shared)
    sleep, wake_up = llm.sleep, llm.wake_up
    llm.sleep = lambda **how: (sleep(**how), allocator.fill(is_asleep=True))  # type: ignore[assignment, method-assign, func-returns-value]
    llm.wake_up = lambda tags: (wake_up(tags), allocator.fill(is_asleep=False))  # type: ignore[assignment, method-assign, func-returns-value]
    if not is_apart:
        llm.llm_engine.model_executor = None
    manager, actor, rollout = beside(VllmInProcess(llm), shared)
    known = 0 if is_apart else 5 * CHUNK + 1
    assert rollout.host_bytes == known
    with manager.phase("weight_sync"):
        publish(actor, rollout.object)
        assert rollout.host_bytes == (
            TAG_BYTES["weights"] if is_apart else 0 if releases else known
        )
    assert rollout.host_bytes == (TAG_BYTES["weights"] if is_apart else known)


@pytest.mark.parametrize(("keeps", "retains"), [(True, False), (True, True), (False, True)])
def test_the_mirror_of_sglang_is_as_large_as_its_weights(
    keeps: bool, retains: bool, shared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMS_RETAIN_CPU_BACKUP", str(int(retains)))
    inner = SglEngine(shared)
    inner.server_args.enable_weights_cpu_backup = keeps
    manager, actor, rollout = beside(
        SglangInProcess(inner, tag_bytes={tag: TAG_BYTES[tag] for tag in inner.memory.tags}), shared
    )
    assert rollout.host_bytes == (TAG_BYTES["weights"] if keeps else 0)
    with manager.phase("weight_sync"):
        publish(actor, rollout.object)
        assert rollout.host_bytes == (TAG_BYTES["weights"] if keeps and retains else 0)


# --- one flattened tensor a dtype, in SGLang's own format; tests/gpu/sglang sends to the real
# classes


@dataclass
class Metadata:
    name: str
    shape: torch.Size
    dtype: torch.dtype
    start_idx: int
    end_idx: int


class FlattenedTensorBucket:
    """sglang/srt/weight_sync/tensor_bucket.py, 0.5.23."""

    def __init__(
        self, named_tensors: Any = None, flattened_tensor: Any = None, metadata: Any = None
    ) -> None:
        self.flattened_tensor, self.metadata = flattened_tensor, metadata or []
        at = 0
        for name, tensor in named_tensors or ():
            self.metadata.append(Metadata(name, tensor.shape, tensor.dtype, at, at + tensor.nbytes))
            at += tensor.nbytes
        if named_tensors:
            self.flattened_tensor = torch.cat(
                [tensor.flatten().view(torch.uint8) for _, tensor in named_tensors]
            )

    def get_flattened_tensor(self) -> torch.Tensor:
        return self.flattened_tensor

    def get_metadata(self) -> list[Metadata]:
        return self.metadata

    def reconstruct_tensors(self) -> list[tuple[str, torch.Tensor]]:
        of = self.flattened_tensor
        return [
            (each.name, of[each.start_idx : each.end_idx].view(each.dtype).reshape(each.shape))
            for each in self.metadata
        ]


@pytest.fixture
def has_format(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let SGLang's modules be importable that know the format, without handles to shared memory."""
    bucket, utils = (
        ModuleType("sglang.srt.weight_sync.tensor_bucket"),
        ModuleType("sglang.srt.utils"),
    )
    bucket.FlattenedTensorBucket = FlattenedTensorBucket  # type: ignore[attr-defined]
    utils.MultiprocessingSerializer = SimpleNamespace(serialize=pickle.dumps)  # type: ignore[attr-defined]
    for each in (
        *map(ModuleType, ("sglang", "sglang.srt", "sglang.srt.weight_sync")),
        bucket,
        utils,
    ):
        monkeypatch.setitem(sys.modules, each.__name__, each)


def sent(engine: SglEngine, **options: Any) -> dict[str, torch.Tensor]:
    """Publish odd numbers of bytes, so that a float32 after an int8 would begin where it cannot be
    read; a scalar; another order in memory.
    Returns them."""
    model = torch.nn.Sequential(
        torch.nn.Linear(7, 3), torch.nn.BatchNorm1d(3), torch.nn.Linear(3, 5).to(torch.bfloat16)
    )
    model.register_buffer("code", torch.arange(7, dtype=torch.int8))
    model[0].weight = torch.nn.Parameter(torch.randn(7, 3).t())
    wanted = {name: tensor.clone().contiguous() for name, tensor in model.state_dict().items()}
    manager = make_manager()
    actor = manager.register("actor", model, role="actor")
    rollout = manager.register(
        "rollout", SglangInProcess(engine, verify="answer"), role="rollout"
    ).object
    with manager.phase("weight_sync"):
        for bucket in actor.weights(**options):
            rollout.update_weights(bucket)
    return wanted


@pytest.mark.usefixtures("has_format")
@pytest.mark.parametrize(("bucket_bytes", "requests"), [(1 << 20, 4), (40, 6)])
def test_one_request_a_bucket_and_dtype_and_every_bit_arrives(
    bucket_bytes: int, requests: int, shared: Path
) -> None:
    engine = SglEngine(shared)
    wanted = sent(engine, bucket_bytes=bucket_bytes)
    assert engine.formats == ["flattened_bucket"] * requests
    assert engine.got.keys() == wanted.keys()
    assert_same(engine.got, {name: wanted[name] for name in engine.got})


def test_without_the_format_it_sends_tensors(shared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if importlib.util.find_spec("sglang"):
        monkeypatch.setitem(sys.modules, "sglang.srt.weight_sync.tensor_bucket", None)
    engine = SglEngine(shared)
    wanted = sent(engine)
    assert engine.formats == [None]
    assert engine.got.keys() == wanted.keys()
