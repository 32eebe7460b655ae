"""An engine of one's own that places its memory by tags; what plans may say of it; and who leads
one that spans ranks."""

from __future__ import annotations

import contextlib
import gc
import socket
import threading
import time
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import placement
from placement import (
    BrokenHandleError,
    EngineError,
    EngineLost,
    Plan,
    PolicyError,
    RegistrationError,
    State,
)
from placement.engines import TaggedEngine
from placement.engines.http import Server
from placement.engines.sglang import SglangServer
from placement.engines.vllm import VllmServer
from placement.observe.collector import make_registry
from placement.testing import assert_nothing_resident
from tests.engines.conftest import beside, publish
from tests.engines.standin import CHUNK, Memory


class Own(TaggedEngine):
    """The few methods that an author writes."""

    def __init__(self, shared: Path, **options: Any) -> None:
        super().__init__(**options)
        self.memory = Memory(shared, ("weights", "kv_cache"))
        self.calls: list[str] = []
        self.raising: dict[str, BaseException] = {}
        self.knows: set[str] | None = None
        self.lacks: list[str] = []

    def _called(self, name: str, tags: Collection[str] = ()) -> None:
        self.calls.append(" ".join([name, *tags]))
        if name in self.raising:
            raise self.raising.pop(name)

    def drain(self) -> None:
        self._called("drain")

    def offload(self, tags: Collection[str]) -> None:
        self._called("offload", tags)
        for tag in tags:
            self.memory.give(tag)

    def load(self, tags: Collection[str]) -> None:
        self._called("load", tags)
        for tag in tags:
            self.memory.take(tag)

    def admit(self) -> None:
        self._called("admit")

    def receive(self, bucket: Sequence[tuple[str, torch.Tensor]]) -> object:
        self._called("receive", [name for name, _ in bucket])
        return None if self.knows is None else self.knows & {name for name, _ in bucket}

    def unfilled(self) -> Collection[str]:
        return self.lacks


def own(shared: Path, weights: Any = "keep", **options: Any) -> tuple[Own, Any, Any]:
    """An engine, and a manager that has it beside an actor."""
    engine = Own(shared, weights=weights)
    manager, actor, _ = beside(engine, shared, **options)
    return engine, manager, actor


@pytest.mark.parametrize("weights", ["keep", "discard"])
@pytest.mark.parametrize(
    ("knows", "lacks", "told"),
    [
        ({"weight"}, [], "it did not take bias"),
        (
            None,
            [f"draft.{at}" for at in range(6)],
            ("no published weight fills draft.0, .* and 2 more"),
        ),
    ],
)
def test_weights_that_it_says_were_not_filled_are_not_valid(
    weights: Any, knows: set[str] | None, lacks: list[str], told: str, shared: Path
) -> None:
    engine, manager, actor = own(shared, weights=weights)
    engine.knows, engine.lacks = knows, lacks
    with manager.phase("weight_sync"):
        buckets = actor.weights(bucket_bytes=1)
        engine.update_weights(next(buckets))
        with pytest.raises(EngineError, match=told):
            engine.update_weights(next(buckets))
    assert engine.needs_weights
    engine.calls.clear()
    with (
        pytest.raises(EngineError, match=told if weights == "keep" else "they were discarded"),
        manager.phase("rollout"),
    ):
        pass
    assert "admit" not in engine.calls
    engine.knows, engine.lacks = {"weight", "bias"}, []
    with manager.phase("weight_sync") as step:
        publish(actor, engine)
        step.switch("rollout")
    assert "admit" in engine.calls


def test_an_engine_of_a_lazy_moves_although_the_lazy_says_no_kind(shared: Path) -> None:
    engine = Own(shared)
    manager, _, handle = beside(placement.Lazy(lambda: engine), shared)
    with manager.phase("weight_sync") as step:
        engine.weights_filled()
        step.switch("rollout")
        assert engine.residency.resident_tags == {"weights", "kv_cache"}
    assert handle.state is State.CPU_OFFLOADED
    assert_nothing_resident(manager)


@pytest.mark.leaves_behind("nobody knows what the engine holds")
def test_an_interrupt_in_a_call_leaves_it_in_doubt(shared: Path) -> None:
    engine, manager, _ = own(shared)
    engine.raising["load"] = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        manager.phase("rollout").__enter__()
    with pytest.raises(
        BrokenHandleError, match="interrupted \\(KeyboardInterrupt\\) during 'load weights'"
    ):
        manager.phase("rollout").__enter__()
    with manager.phase("train"):
        pass
    engine.assume(offloaded=["weights", "kv_cache"])
    with manager.phase("weight_sync"):
        pass
    engine.calls.clear()
    # whether it takes requests, nobody knows: opened once it is filled, drained before it goes
    engine.assume(offloaded=[])
    engine.weights_filled()
    assert engine.calls == ["admit"]
    with pytest.raises(ValueError, match="has no tags lora"):
        engine.assume(offloaded=["lora"])


@pytest.mark.parametrize("weights", ["keep", "discard"])
def test_a_switch_that_fails_after_the_engine_left_brings_it_back(
    weights: Any, shared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_memory(_: int) -> Any:
        raise placement.DeviceMemoryError("none")

    engine, manager, actor = own(shared, weights=weights)
    with manager.phase("weight_sync") as step:
        publish(actor, engine)
        step.switch("rollout")
        engine.calls.clear()
        monkeypatch.setattr(manager.device, "create", no_memory)
        with pytest.raises(placement.DeviceMemoryError, match="none"):
            step.switch("log_prob")
        monkeypatch.undo()
        assert step.name == "rollout"
        last = "admit" if weights == "keep" else "drain"  # what is gone must not be generated with
        assert engine.calls == [
            "drain",
            ("offload kv_cache weights"),
            "load weights",
            "load kv_cache",
            last,
        ]
    assert_nothing_resident(manager)


def test_adapters_alone_fill_what_has_its_base_weights(shared: Path) -> None:
    """Also after a sync of adapters that stopped half-way: the base weights are whole then."""
    from placement.publish.buckets import Bucket

    def bucket(number: int) -> Bucket:
        made = Bucket(number, "separate")
        made.is_last = number == 1
        return made

    engine, manager, _ = own(shared, weights="discard")
    with manager.phase("weight_sync") as step:
        with pytest.raises(EngineError, match="the adapters alone cannot fill"):
            engine.update_weights(bucket(0))
        assert engine.needs_weights
        engine.weights_filled()
        assert not engine.needs_weights
        engine.update_weights(bucket(0))
        with pytest.raises(EngineError, match="adapters has begun and was not finished"):
            step.switch("rollout")
        for number in range(2):
            engine.update_weights(bucket(number))
        assert not engine.needs_weights
        step.switch("rollout")
        assert engine.calls[-1] == "admit"


def test_an_engine_that_refused_to_be_opened_is_opened_at_the_next_transition(shared: Path) -> None:
    engine, manager, actor = own(shared, policy="resident")
    with manager.phase("weight_sync") as step:
        engine.assume(offloaded=[])
        engine.raising["admit"] = EngineError("not yet")
        bucket = next(publishing := actor.weights())
        with pytest.raises(EngineError, match="not yet"):
            engine.update_weights(bucket)
        publishing.close()
        engine.calls.clear()
        step.switch("rollout")
        assert engine.calls == ["admit"]
        step.switch("eval")
        assert engine.calls == ["admit"]


def test_a_bucket_that_is_missing_is_found(shared: Path) -> None:
    engine, manager, actor = own(shared)
    with manager.phase("weight_sync") as step:
        buckets = actor.weights(bucket_bytes=1)
        next(buckets)
        with pytest.raises(EngineError, match="got bucket 1 of a sync, but bucket 0 is next"):
            engine.update_weights(next(buckets))
        buckets.close()
        engine.update_weights([("weight", torch.zeros(1))])  # who knows whether that is all of them
        with pytest.raises(EngineError, match="was not finished"):
            step.switch("rollout")
        engine.weights_filled()
        step.switch("rollout")


def test_bad_input(shared: Path) -> None:
    for options, message in (
        ({"deadline_seconds": 0}, "more than 0"),
        ({"tags": ("weights", "lora")}, "unknown tags 'lora'"),
        (
            {"tag_bytes": {"cuda_graph": 1}},
            ("unknown tags 'cuda_graph'; this engine has weights, kv_cache"),
        ),
        ({"tag_bytes": {"weights": "12 apples"}}, "is not a number of bytes"),
        ({"weights": "sleep"}, "'sleep' is unknown; weights is one of keep, discard"),
        ({"verify": "no"}, "'no' is unknown; verify is one of"),
        ({"deadline_seconds": float("inf")}, "more than 0 and finite"),
        ({"tag_bytes": {"weights": -1}}, "tag_bytes of 'weights' must be 0 or more"),
    ):
        with pytest.raises(ValueError, match=message):
            Own(shared, **options)
    for kind in (VllmServer, SglangServer):
        with pytest.raises(ValueError, match="'Wait' is unknown; in_flight is one of wait, abort"):
            kind("http://127.0.0.1:1", in_flight="Wait")  # type: ignore[arg-type] # any other word would cut requests off
    engine = Own(shared, weights="discard")
    manager, _, _ = beside(Own(shared), shared)
    with pytest.raises(RegistrationError, match="without external=True"):
        manager.register("external", engine, external=True)
    with pytest.raises(RegistrationError, match="cannot be readonly"):
        manager.register("readonly", engine, readonly=True)
    with pytest.raises(EngineError, match="update them inside manager"):
        manager.handles["rollout"].object.update_weights([])
    other, _, _ = beside(Own(shared.with_name("other")), shared.with_name("other"))
    with pytest.raises(EngineError, match="registered already"):
        other.register("again", manager.handles["rollout"].object)
    taken = manager.handles["rollout"].object
    manager.unregister("rollout")
    other.register("again", taken)
    assert {"again", "rollout"} <= {*other.handles}


@pytest.mark.parametrize(
    ("parts", "forgets", "message"),
    [
        ({"rollout": {"lora"}}, False, "wants lora of 'rollout', which has no such part"),
        ({"actor": {"weights"}}, False, "wants weights of 'actor', which has no such part"),
        ({"ghost": {"weights"}}, False, "names 'ghost'"),
        ({"rollout": set()}, False, "wants parts of 'rollout', but not the handle"),
        ({"rollout": {"weights"}}, True, r"it forgets .*'rollout'"),
    ],
)
def test_plans_that_are_none(parts: Any, forgets: bool, message: str, shared: Path) -> None:
    class Wrong(placement.policies.Colocated):
        def plan(self, view: placement.View) -> Plan:
            plan = super().plan(view)
            if view.phase != "eval":
                return plan
            return (
                Plan({"actor": State.GPU_RESIDENT}, parts=parts)
                if forgets
                else view.total_plan(plan.targets, parts=parts)
            )

    manager, _, _ = beside(Own(shared), shared, policy=Wrong())
    with pytest.raises(PolicyError, match=message):
        manager.phase("eval").__enter__()


def test_what_is_kept_of_an_engine_is_what_was_there(shared: Path) -> None:
    engine, manager, _ = own(shared)
    with manager.phase("weight_sync") as phase:
        phase.keep("rollout")
    assert engine.memory.tags == {"weights"}
    engine.calls.clear()
    with manager.phase("rollout"):
        assert engine.calls == ["load kv_cache", "admit"]
    assert_nothing_resident(manager)


def test_what_a_snapshot_shows(shared: Path) -> None:
    engine, manager, _ = own(shared, weights="discard")
    assert engine.needs_weights
    with manager.phase("weight_sync"):
        shown = {each.name: each for each in manager.snapshot().handles}["rollout"]
        assert (shown.resident_tags, shown.offloaded_tags) == (("weights",), ("kv_cache",))
        assert "discarded" in (shown.stale or "")
        assert manager.snapshot().model_dump_json()
        engine.raising["offload"] = EngineError("no")
        with pytest.raises(EngineError, match="no"):
            manager.phase("train").__enter__()
    assert manager.audit().ok


# --- the mirror: the copy of its weights that an engine keeps on the host


def mirrored(manager: placement.Manager) -> tuple[int, int]:
    """What the snapshot has of the engine, in all and as a mirror; the metric says the same."""
    handle = {each.name: each for each in manager.snapshot().handles}["rollout"]
    labels, metrics = {"handle": "rollout", "kind": "engine"}, make_registry(manager.snapshot)
    assert metrics.get_sample_value("placement_mirror_bytes", labels) == handle.mirror_bytes
    assert (
        metrics.get_sample_value("placement_resident_bytes", labels | {"memory": "host"})
        == handle.host_bytes
    )
    return handle.host_bytes, handle.mirror_bytes


@pytest.mark.parametrize(
    ("weights", "stays", "away", "back"),
    [
        ("keep", True, 8, 8),
        ("keep", False, 8, 0),
        ("discard", True, 0, 0),
        ("discard", False, 0, 0),
    ],
)
def test_the_mirror_of_an_engine_is_counted_as_long_as_it_is_there(
    weights: Any, stays: bool, away: int, back: int, shared: Path
) -> None:
    engine = Own(shared, weights=weights)
    engine.mirror_stays = stays
    manager, actor, _ = beside(engine, shared)
    # both tags left at once: how large the weights are is seen when they come
    assert mirrored(manager) == (0, 0)
    for _ in range(2):
        with manager.phase("weight_sync") as step:
            assert mirrored(manager) == (back * CHUNK, back * CHUNK)
            publish(actor, engine)
            step.switch("rollout")
            assert mirrored(manager) == (back * CHUNK, back * CHUNK)
        assert mirrored(manager) == (away * CHUNK, away * CHUNK)
    assert (
        sum(each.host_bytes for each in manager.snapshot().handles)
        == actor.host_bytes + away * CHUNK
    )


def test_an_engine_that_sleeps_already_has_its_mirror_unless_it_was_lost_and_restarted(
    shared: Path,
) -> None:
    engine = Own(
        shared,
        tag_bytes={"weights": 8 * CHUNK, "kv_cache": 24 * CHUNK},
        offloaded=["weights", "kv_cache"],
    )
    for tag in ("weights", "kv_cache"):
        engine.memory.give(tag)
    manager, _, _ = beside(engine, shared)
    assert mirrored(manager) == (8 * CHUNK, 8 * CHUNK)
    engine.assume(offloaded=["kv_cache"])
    assert mirrored(manager) == (0, 0)


def test_what_stays_behind_is_a_finding(shared: Path) -> None:
    engine, manager, _ = own(shared)
    with pytest.raises(EngineError, match="not today"), manager.phase("rollout"):
        engine.raising["drain"] = EngineError("not today")
    findings = manager.audit().findings
    assert [(f.handle, f.what, f.detail) for f in findings] == [
        (
            "rollout",
            "leak",
            ("its tags kv_cache, weights are on the device, although it should be off the device"),
        )
    ]
    assert manager.snapshot().unpaired_bytes == sum(engine.residency.bytes_by_tag().values())
    with manager.phase("train"):
        assert manager.audit().ok


# --- HTTP


def serve(answer: Any) -> tuple[str, threading.Thread, socket.socket]:
    listening = socket.create_server(("127.0.0.1", 0))

    def run() -> None:
        connection, _ = listening.accept()
        listening.close()
        with connection:
            connection.recv(1 << 16)
            with contextlib.suppress(OSError):
                answer(connection)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return f"http://127.0.0.1:{listening.getsockname()[1]}", thread, listening


def drip_headers(connection: socket.socket) -> None:
    connection.sendall(b"HTTP/1.1 200 OK\r\n")
    for number in range(90):
        connection.sendall(b"X-%d: 1\r\n" % number)
        time.sleep(0.02)  # no single header is late, all of them are


def go_on(connection: socket.socket) -> None:
    while True:
        connection.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
        time.sleep(0.02)  # no single one is late, and none is the last


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (drip_headers, "no answer within 0.1 s"),
        (go_on, "no answer within 0.1 s"),
        (
            lambda connection: connection.sendall(
                b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n{}"
            ),
            ("the connection broke .*IncompleteRead"),
        ),
        (
            lambda connection: connection.sendall(b"SSH-2.0-OpenSSH_9\r\n"),
            ("the connection broke .*BadStatusLine"),
        ),
        (lambda connection: None, "the connection broke .*RemoteDisconnected"),
        (
            lambda connection: connection.sendall(b"HTTP/1.1 200 OK\r\n\r\n" + b" " * (17 << 20)),
            "the answer has more than",
        ),
    ],
)
def test_answers_that_are_none(answer: Any, message: str) -> None:
    url, thread, listening = serve(answer)
    with pytest.raises(EngineLost, match=message):
        Server(url, deadline_seconds=0.1 if "0.1" in message else 5).ask("POST", "/sleep")
    listening.close()
    thread.join(5)


def test_what_is_no_json_and_no_host() -> None:
    body = b"[" * 100_000
    gc.collect()  # else a collection may come where the stack is full, and finalizers fail there
    url, thread, _ = serve(
        lambda connection: connection.sendall(
            b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body)
        )
    )
    assert Server(url, deadline_seconds=5).ask("GET", "/server_info").fields == {}
    thread.join(5)
    with pytest.raises(EngineError, match="is this its address"):
        Server(f"http://{'a' * 70}.invalid", deadline_seconds=5).ask("GET", "/server_info")


def test_addresses_and_keys() -> None:
    for url in ("127.0.0.1:8000", "ftp://host", "http://", "http://host/?a=b"):
        with pytest.raises(ValueError, match="not the address of a server"):
            Server(url, deadline_seconds=1)
    url, thread, listening = serve(
        lambda connection: connection.sendall(
            b"HTTP/1.1 401 Unauthorized\r\nContent-Length: 0\r\n\r\n"
        )
    )
    server = Server(f"{url}/prefix/", deadline_seconds=5, api_key="secret")
    said = server.ask("GET", "/is_sleeping", query={"tags": ["a", "b"]})
    assert (said.status, said.fields) == (401, {})
    assert str(said) == f"GET {url}/prefix/is_sleeping?tags=a&tags=b was answered with 401 ''"
    assert "secret" not in str(said)
    listening.close()
    thread.join(5)


def test_one_that_was_lost_is_restarted_and_registered_anew_as_the_error_says(shared: Path) -> None:
    engine, manager, actor = own(shared)
    engine.raising["load"] = EngineLost("no answer")
    with pytest.raises(EngineLost):
        manager.phase("rollout").__enter__()
    with pytest.raises(BrokenHandleError, match="another engine is registered anew"):
        manager.phase("weight_sync").__enter__()
    manager.unregister("rollout")
    for tag in ("weights", "kv_cache"):  # restarted, it has everything on the device
        engine.memory.take(tag)
    manager.register("rollout", engine, role="rollout")
    assert engine.memory.tags == set()
    with pytest.raises(EngineError, match="mean nothing now"):
        manager.phase("rollout").__enter__()
    with manager.phase("weight_sync") as step:
        publish(actor, engine)
        step.switch("rollout")
        assert engine.calls[-1] == "admit"
    assert_nothing_resident(manager)


def test_one_that_was_lost_as_a_phase_ended_is_broken_at_once_and_generates_nothing(
    shared: Path,
) -> None:
    engine, manager, actor = own(shared)
    handle = manager.handles["rollout"]
    engine.raising["offload"] = EngineLost("no answer")
    with pytest.raises(EngineLost), manager.phase("rollout"):
        pass
    assert "no answer" in handle.broken
    assert [f.what for f in manager.audit().findings] == ["broken"]
    with pytest.raises(BrokenHandleError, match="'rollout' cannot use 'rollout': no answer"):
        manager.phase("rollout").__enter__()
    engine.assume(offloaded=[])
    with pytest.raises(EngineError, match="Publish first"):
        manager.phase("rollout").__enter__()
    with manager.phase("weight_sync") as step:
        publish(actor, engine)
        step.switch("rollout")
    assert_nothing_resident(manager)
