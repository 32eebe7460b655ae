"""How engines fail at sleep and wake, and what is looked at: the table of docs/engines.md.

Behind vLLM's server and its `LLM` is vLLM 0.33's own worker with its allocator on a `Card`, and
placement's backend. Each cell looks at the bytes that the card has mapped, at every byte of the
weights, and at whose words the model says.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from placement import EngineError, State
from placement.core.errors import PlacementError
from placement.engines.mirror import WEIGHTS_DIFFER
from placement.engines.sglang import SglangServer
from placement.engines.vllm import VllmInProcess, VllmServer
from placement.observe.collector import make_registry
from tests.engines.conftest import Start, beside, publish
from tests.engines.released import Vllm
from tests.engines.standin import (
    GARBAGE,
    TAG_BYTES,
    Reply,
    Routes,
    Sglang0523,
    Vllm024,
    Vllm033,
    _error,
)
from tests.engines.test_in_process import LLM
from tests.engines.test_vllm_backend import poison, seed
from tests.support.sweeps import diagonal

PAGE = 4096
ALL = {"weights", "kv_cache"}


class Core:
    """The core of a vLLM: a worker, weights of a linear layer, a KV cache in two blocks, and a
    block that vLLM keeps at every level."""

    def __init__(self, vllm: Vllm, **config: Any) -> None:
        self.vllm, self.card = vllm, vllm.card
        self.disk = {
            "weight": torch.randn(64, 64, generator=seed(1)),
            "bias": torch.randn(64, generator=seed(2)),
        }
        blocks = vllm.allocate("weights", *self.disk.values())
        self.weights = dict(zip(self.disk, blocks, strict=True))
        self.caches = vllm.allocate("kv_cache", *torch.zeros(2, 3 * PAGE, dtype=torch.uint8))
        (self.runtime,) = vllm.allocate("runtime", torch.full((PAGE,), 9, dtype=torch.uint8))
        self.actor: Callable[[], dict[str, torch.Tensor]] = dict
        self.worker = vllm.wrapped(vllm.worker(**{"sleep_mode_backend": "placement", **config}))
        self.worker.init_device()
        self.worker.compile_or_warm_up_model()

    @property
    def backend(self) -> Any:
        return self.worker.sleep_mode_backend

    def bytes_of(self, *tags: str) -> int:
        every = self.vllm.allocator.pointer_to_data.values()
        return sum(data.handle[1] for data in every if data.tag in tags)

    def take(self, bucket: Any) -> None:
        """What a sync does in the engine."""
        for name, value in bucket:
            self.card.check(self.weights[name].data_ptr(), value.nbytes)
            self.weights[name].copy_(value)

    def says(self) -> str:
        """A forward: it reads every weight, and needs all of the KV cache."""
        for tensor in (*self.weights.values(), *self.caches, self.runtime):
            self.card.check(tensor.data_ptr(), tensor.nbytes)
        assert bool((self.runtime == 9).all())
        known = {"disk": self.disk, "actor": self.actor()}
        for whose, values in known.items():
            if all(torch.equal(self.weights[name], value) for name, value in values.items()):
                return whose
        return GARBAGE


class InProcess(LLM):
    def __init__(self, shared: Path, core: Core) -> None:
        super().__init__(shared)
        self.core = core

    def sleep(self, level: int = 1, mode: str = "abort") -> None:
        if level:
            self.core.worker.sleep(level)
        super().sleep(level, mode)

    def wake_up(self, tags: list[str] | None = None) -> bool:
        self.core.worker.wake_up(tags)
        return super().wake_up(tags)

    def release_kv_cache_memory(self) -> None:
        self.core.worker.discard(("kv_cache",))
        super().release_kv_cache_memory()

    def collective_rpc(self, method: str) -> list[Any]:
        return [getattr(self.core.worker, method)()]

    @property
    def is_closed(self) -> bool:
        return self.paused


class Server(Vllm033):
    def __init__(self, shared: Path, core: Core) -> None:
        super().__init__(shared)
        self.core = core

    def executor_sleep(self, level: int) -> None:
        self.core.worker.sleep(level)
        super().executor_sleep(level)

    def wake_up(self, query: dict[str, list[str]], body: Any) -> Reply:
        try:
            self.core.worker.wake_up(query.get("tags"))
        except (RuntimeError, PlacementError) as error:
            return _error(500, f"Call to wake_up method failed: {error}")
        return super().wake_up(query, body)

    def release_kv_cache_memory(self, query: dict[str, list[str]], body: Any) -> Reply:
        self.core.worker.discard(("kv_cache",))
        return super().release_kv_cache_memory(query, body)

    def workers(self, method: str) -> list[Any]:
        return [getattr(self.core.worker, method)()]

    routes: ClassVar[Routes] = Vllm033.routes | {
        "/wake_up": wake_up,
        "/release_kv_cache_memory": release_kv_cache_memory,
    }

    @property
    def is_closed(self) -> bool:
        return self.is_paused


class Run:
    """A trainer beside an engine, which is registered, and so asleep."""

    def __init__(self, door: Any, weights: Any, core: Core, shared: Path) -> None:
        self.core, self.door = core, door
        options = {"send": core.take, "weights": weights}
        self.engine = (
            VllmInProcess(door, **options)
            if isinstance(door, InProcess)
            else VllmServer(door.url, deadline_seconds=5.0, **options)
        )
        self.mapped_awake = sum(core.card.mapped.values())
        self.manager, self.actor, self.handle = beside(self.engine, shared)
        core.actor = self.actor.state_dict

    def expect(self, *, asleep: set[str]) -> None:
        """The record, the allocator and the card agree on what is asleep."""
        gone = self.core.bytes_of(*asleep, *({"runtime"} if asleep == ALL else ()))
        assert sum(self.core.card.mapped.values()) == self.mapped_awake - gone
        assert self.core.vllm.tags_asleep() - {"runtime"} == asleep
        shown = self.shown
        assert {*shown.offloaded_tags} == asleep
        assert shown.mirror_bytes == shown.host_bytes == self.core.backend.mirror.host_bytes
        assert self.door.is_closed is bool(asleep)

    @property
    def shown(self) -> Any:
        return {each.name: each for each in self.manager.snapshot().handles}["rollout"]


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> Vllm:
    made = Vllm(monkeypatch, "0.33.0", 1 << 20)
    made.load_plugin()
    return made


Begin = Callable[..., Run]


@pytest.fixture(params=[InProcess, Server], ids=["in process", "server"])
def begin(request: pytest.FixtureRequest, vllm: Vllm, shared: Path) -> Iterator[Begin]:
    doors: list[Any] = []

    def run(weights: str, **config: Any) -> Run:
        core = Core(vllm, **config)
        doors.append(request.param(shared, core))
        return Run(doors[-1], weights, core, shared)

    yield run
    for door in doors:
        if isinstance(door, Server):
            door.close()
            assert door.accidents == []


# --- each way of leaving × each way in which it goes


def leave_and_come(run: Run, leaves: str, between: Callable[[set[str]], None]) -> str:
    """Have the engine leave and come back, and say what it generates then. `between` is called when
    it has left, with the tags that are asleep."""
    first = "weight_sync" if leaves != "level 1" else "rollout"
    with run.manager.phase(first) as step:
        if leaves != "level 1":
            publish(run.actor, run.engine)
            step.switch("rollout")
        before = run.core.says()
        step.switch("weight_sync" if leaves == "KV alone" else "train")
        between({"kv_cache"} if leaves == "KV alone" else ALL)
        if leaves == "level 2":
            step.switch("weight_sync")
            run.expect(asleep={"kv_cache"})
            assert run.core.backend.copied_bytes == run.core.bytes_of("runtime")
            assert torch.equal(run.core.weights["bias"].view(torch.uint8), poison(256))
            publish(run.actor, run.engine)
        step.switch("rollout")
        run.expect(asleep=set())
        # nothing of before can be read where nothing was brought back
        assert all(torch.equal(cache, poison(3 * PAGE)) for cache in run.core.caches)
        assert run.core.says() == before
    run.expect(asleep=ALL)
    return before


LEAVES = ("level 1", "level 2", "KV alone")


@pytest.mark.parametrize(("how", "leaves"), diagonal(["cold", "failed", "twice", "staged"], LEAVES))
def test_what_left_comes_back(leaves: str, how: str, begin: Begin) -> None:
    run = begin("discard" if leaves == "level 2" else "keep")
    run.expect(asleep=ALL)
    level = 2 if leaves == "level 2" else 1
    says = "disk" if leaves == "level 1" else "actor"
    card = run.core.card

    def cold(asleep: set[str]) -> None:
        run.expect(asleep=asleep)

    def twice(asleep: set[str]) -> None:
        """Another sleep reaches vLLM, although it sleeps: the executor of a rank may have missed
        the first one. And the plan of the trainer is carried out again."""
        if asleep == ALL:
            run.core.worker.sleep(level)
        with run.manager.phase(run.manager.snapshot().phases[-1]):
            run.expect(asleep=asleep)

    def staged(asleep: set[str]) -> None:
        """The weights come alone, and go again."""
        if asleep == ALL:
            with run.manager.phase("weight_sync"):
                run.expect(asleep={"kv_cache"})
            run.expect(asleep=ALL)

    def failed(asleep: set[str]) -> None:
        """There is room for less than what is wanted. Nothing stays mapped of what was."""
        stays = sum(card.mapped.values())
        capacity, card.capacity_bytes = card.capacity_bytes, stays + PAGE
        wanted = "weight_sync" if leaves == "level 2" else "rollout"
        for _ in range(2):
            with pytest.raises(EngineError, match="out of memory"):
                run.manager.phase(wanted).__enter__()
            assert sum(card.mapped.values()) == stays
            assert run.handle.broken is None
        card.capacity_bytes = capacity
        run.expect(asleep=asleep)

    between = {"cold": cold, "twice": twice, "staged": staged, "failed": failed}[how]
    hosts = set()
    for _ in range(1 if how == "cold" else 2):
        assert leave_and_come(run, leaves, between) == says
        hosts.add(run.shown.host_bytes)
    assert len(hosts) == 1


# --- contents


@pytest.mark.parametrize("written", [False, True], ids=["kept", "filled"])
def test_weights_that_come_back_wrong_generate_nothing_before_they_are_filled(
    written: bool, begin: Begin
) -> None:
    run = begin("keep")
    device = run.core.vllm.device
    device.flips = {run.core.weights["bias"].data_ptr()}
    with run.manager.phase("weight_sync") as step:
        assert run.engine.stale == WEIGHTS_DIFFER
        assert run.core.vllm.tags_asleep() == {"kv_cache"}
        if written:
            publish(run.actor, run.engine)
            step.switch("rollout")
            assert run.core.says() == "actor"
        else:
            with pytest.raises(EngineError, match=WEIGHTS_DIFFER):
                step.switch("rollout")
    device.flips = set()
    run.expect(asleep=ALL)
    if not written:  # the mirror has the bytes that left
        with pytest.raises(EngineError, match=WEIGHTS_DIFFER):
            run.manager.phase("rollout").__enter__()
    with run.manager.phase("weight_sync") as step:
        publish(run.actor, run.engine)
        step.switch("rollout")
        assert run.core.says() == "actor"


# --- who moves the bytes, and what they take on the host


def test_placement_moves_them_and_its_mirror_is_counted_once(
    begin: Begin, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, logger="placement"):
        run = begin("keep")
        with run.manager.phase("rollout"):
            pass
    told = [line for line in caplog.messages if "are moved by" in line]
    assert told == [f"the bytes of {run.engine!r} are moved by placement"]
    shown, actor = run.shown, run.manager.handles["actor"]
    assert shown.moved_by == "placement"
    mirror_bytes = run.core.bytes_of("weights", "runtime")
    labels, metrics = {"handle": "rollout", "kind": "engine"}, make_registry(run.manager.snapshot)
    assert metrics.get_sample_value("placement_mirror_bytes", labels) == mirror_bytes
    host = metrics.get_sample_value("placement_resident_bytes", labels | {"memory": "host"})
    assert host == mirror_bytes
    snapshot = run.manager.snapshot()
    assert sum(each.host_bytes for each in snapshot.handles) == actor.host_bytes + mirror_bytes


def test_what_vllm_keeps_of_an_engine_that_discards_its_weights_is_counted(begin: Begin) -> None:
    run = begin("discard")
    assert run.shown.host_bytes == run.shown.mirror_bytes == run.core.bytes_of("runtime")


def test_a_mirror_that_is_reserved_while_everything_is_on_the_device_is_counted(
    vllm: Vllm, shared: Path
) -> None:
    core = Core(vllm)
    engine = VllmInProcess(InProcess(shared, core), send=core.take)
    manager, _, handle = beside(engine, shared, policy="resident")
    assert handle.state is State.GPU_RESIDENT
    assert handle.host_bytes == core.bytes_of("weights", "runtime")
    manager.close()


def test_without_the_plug_in_vllms_own_allocator_moves_them(begin: Begin) -> None:
    run = begin("keep", sleep_mode_backend="cumem")
    assert run.shown.moved_by == "cumem"


@pytest.mark.parametrize("kind", [Vllm033, Vllm024])
def test_a_server_without_the_plug_in_is_asked_nothing_else(kind: Any, start: Start) -> None:
    job = start(kind, "keep")
    asked: list[str] = []
    workers = job.server.workers  # type: ignore[attr-defined]
    job.server.workers = lambda method: (asked.append(method), workers(method))[1]  # type: ignore[attr-defined, func-returns-value]
    assert job.step() == "actor"
    assert job.manager.snapshot().handles[-1].moved_by == "cumem"
    assert asked == []


@pytest.mark.parametrize(
    ("told", "moved_by", "host_bytes"),
    [
        ({"placement": {"host_bytes": 5 * PAGE, "is_spoilt": False}}, "placement", 5 * PAGE),
        ({}, "torch_memory_saver", 0),
    ],
)
def test_an_sglang_server_says_who_moves_its_weights(
    told: Any, moved_by: str, host_bytes: int, shared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    info = Sglang0523.info

    def with_states(self: Any, query: Any, body: Any) -> Reply:
        status, fields = info(self, query, body)
        return status, fields | {"internal_states": [told]}

    monkeypatch.setitem(Sglang0523.routes, "/server_info", with_states)
    server = Sglang0523(shared, keeps_weights=True)
    sizes = {tag: TAG_BYTES[tag] for tag in ALL}
    engine = SglangServer(server.url, tag_bytes=sizes, send=lambda bucket: None)
    manager, actor, handle = beside(engine, shared)
    assert manager.snapshot().handles[-1].moved_by == moved_by
    asleep = host_bytes or TAG_BYTES["weights"]
    assert handle.host_bytes == asleep
    with manager.phase("weight_sync") as step:
        assert handle.host_bytes == host_bytes  # torch_memory_saver frees its own at the resume
        publish(actor, engine)
        step.switch("rollout")
    assert handle.host_bytes == asleep
    server.close()
