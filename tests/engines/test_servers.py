"""Servers of vLLM and SGLang: weights awake, published, actor off, KV cache awake, rollout, asleep,
with the budget never exceeded.

And what each does to who calls it wrongly, or at the wrong moment: each trap, against a stand-in
that has it.
"""

from __future__ import annotations

import threading
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from placement import BrokenHandleError, EngineError, EngineLost, IntegrityError, State
from placement.engines.vllm import VllmServer
from placement.testing import assert_nothing_resident
from tests.engines.conftest import Job, Start
from tests.engines.standin import (
    CAPACITY,
    CHUNK,
    TAG_BYTES,
    Sglang0523,
    Sglang059,
    Vllm024,
    Vllm033,
)
from tests.support.sweeps import diagonal, few

SIZES = {tag: TAG_BYTES[tag] for tag in ("weights", "kv_cache")}
every_server = pytest.mark.parametrize(
    "kind", few([Vllm033, Vllm024, Sglang0523, Sglang059], Vllm033, Sglang0523)
)
every_vllm = pytest.mark.parametrize("kind", few([Vllm033, Vllm024], Vllm033))
every_sglang = pytest.mark.parametrize("kind", few([Sglang0523, Sglang059], Sglang0523))


@every_server
@pytest.mark.parametrize("weights", ["keep", "discard"])
def test_each_transition_has_on_the_device_what_it_says(
    kind: Any, weights: str, start: Start
) -> None:
    job = start(kind, weights)
    handle, sizes = job.handle, {tag: TAG_BYTES[tag] for tag in job.engine.residency.tags}
    # measured
    assert (handle.state, handle.num_bytes) == (State.CPU_OFFLOADED, sum(sizes.values()))
    assert job.server.memory.tags == set()
    for _ in range(2):
        with job.manager.phase("weight_sync") as step:
            assert job.server.memory.tags == {"weights"}
            assert (handle.state, job.actor.state) == (State.GPU_RESIDENT, State.SYNCING)
            assert handle.resident_bytes == TAG_BYTES["weights"]
            job.publish()
            step.switch("rollout")
            assert job.server.generate() == "actor"
            assert (job.actor.resident_bytes, job.server.is_paused) == (0, False)
            step.switch("weight_sync")  # the KV cache goes, the weights stay or come back
            assert job.server.memory.tags == {"weights"}
            job.publish()
            step.switch("rollout")
            assert job.server.generate() == "actor"
            step.switch("train")
            assert job.server.memory.tags == set()
            assert job.actor.state is State.TRAINING
        assert handle.resident_bytes == 0
        assert_nothing_resident(job.manager)
    assert job.engine.residency.bytes_by_tag() == sizes
    assert job.manager.audit().ok
    if weights == "keep":  # then an evaluation needs no sync
        with job.manager.phase("eval"):
            assert job.server.generate() == "actor"


@every_server
def test_the_sum_never_exceeds_a_budget_that_holds_no_two_of_them(kind: Any, start: Start) -> None:
    """The engine whole and the actor do not fit together: the swap has to go through what is
    free."""
    budget = sum(TAG_BYTES[tag] for tag in TAG_BYTES) + 4096
    job = start(kind, tag_bytes=SIZES, manager={"budget_bytes": budget})
    for _ in range(2):
        assert job.step() == "actor"
        with job.manager.phase("train"):
            pass
    assert job.manager.snapshot().peak_bytes <= budget


@every_server
def test_requests_in_flight_are_waited_for(kind: Any, start: Start) -> None:
    job = start(kind)
    with job.rolling_out() as step:
        job.server.in_flight = 3

        def finish() -> None:
            job.server.in_flight = 0

        timer = threading.Timer(0.05, finish)
        timer.start()
        step.switch("train")
        timer.join()
    assert job.server.aborted == 0
    assert job.server.memory.tags == set()


@pytest.mark.parametrize("kind", [Vllm033, Vllm024, Sglang0523])
def test_requests_that_never_finish_end_at_the_deadline_and_the_rollout_goes_on(
    kind: Any, start: Start
) -> None:
    job = start(kind, deadline_seconds=0.2)
    with job.rolling_out() as step:
        job.server.in_flight = 1
        with pytest.raises(EngineError, match="in flight"):
            step.switch("train")
        assert step.name == "rollout"
        assert job.handle.state is State.GPU_RESIDENT
        assert not job.server.is_paused
        assert job.server.generate() == "actor"
        job.server.in_flight = 0
    assert job.server.memory.tags == set()


@pytest.mark.parametrize("kind", [Vllm033, Vllm024, Sglang0523])
def test_requests_in_flight_are_cut_off_where_that_is_wanted(kind: Any, start: Start) -> None:
    job = start(kind, in_flight="abort")
    with job.rolling_out():
        job.server.in_flight = 3
    assert job.server.aborted == 3
    assert job.server.memory.tags == set()


# --- vLLM


def test_without_sleep_mode_it_answers_200_and_nothing_moves(unregistered: Start) -> None:
    job = unregistered(
        Vllm024, deadline_seconds=0.2, tag_bytes=dict.fromkeys(("weights", "kv_cache"), 8 * CHUNK)
    )
    job.server.memory.is_moving = False
    with pytest.raises(
        EngineError,
        match=r"they hold 65,536\. vLLM moves its "
        r"memory "
        r"only "
        r"with "
        r"--enable-sleep-mode",
    ):
        job.register()
    assert "rollout" not in job.manager.handles


def test_asleep_before_it_is_registered(unregistered: Start) -> None:
    job = unregistered(Vllm033)
    job.server.sleep({"level": ["2"]}, None)  # type: ignore[attr-defined]
    with pytest.raises(
        EngineError,
        match=r"is asleep, but was made with offloaded=\[\]: wake it first",
    ):
        job.register()
    job.engine = VllmServer(
        job.server.url, send=job.send, weights="discard", offloaded=["weights", "kv_cache"]
    )
    job.register()
    assert job.server.sent == []
    assert job.step() == "actor"
    awake = unregistered(Vllm033, at="other", offloaded=["weights", "kv_cache"])
    with pytest.raises(EngineError, match="is awake, but was made with offloaded="):
        awake.register()


@every_vllm
def test_what_is_sent_to_vllm_for_one_step(kind: Any, start: Start) -> None:
    job = start(kind)
    pause, asleep = "POST /pause?mode=wait", "POST /sleep?level=2&mode=wait"
    assert job.server.sent == [pause, asleep]
    job.server.sent.clear()
    with job.manager.phase("train"):
        assert job.server.sent == []  # it sleeps already
    job.step()
    resume = ["POST /resume"] if kind is Vllm024 else []  # its wake does not end a pause
    assert job.server.sent == [
        ("POST /wake_up?tags=weights"),
        ("POST /wake_up?tags=kv_cache"),
        *resume,
        pause,
        asleep,
    ]
    # then to sleep: 0.24 takes itself for asleep already, and would keep the weights
    with job.manager.phase("weight_sync"):
        job.publish()
    assert job.server.memory.tags == set()
    assert (job.handle.state, job.handle.resident_bytes) == (State.CPU_OFFLOADED, 0)


@pytest.mark.parametrize(
    ("routes", "message"),
    [
        ({}, "VLLM_SERVER_DEV_MODE=1"),
        (
            {path: Vllm024.routes[path] for path in ("/sleep", "/wake_up", "/is_sleeping")},
            ("vLLM 0.24 or later is needed"),
        ),
    ],
)
def test_a_server_that_was_started_otherwise_or_is_too_old(
    routes: Any, message: str, unregistered: Start
) -> None:
    job = unregistered(Vllm024)
    job.server.routes = routes
    with pytest.raises(EngineError, match=message):
        job.register()
    assert "rollout" not in job.manager.handles
    assert job.server.memory.tags == {"weights", "kv_cache"}


def test_one_that_lies_on_other_devices_is_taken_at_its_word(unregistered: Start) -> None:
    job = unregistered(
        Vllm033, verify="answer", tag_bytes={"weights": "32KiB", "kv_cache": 24 * CHUNK}
    )
    job.server.memory.is_moving = False
    assert job.register().num_bytes == 32 * CHUNK
    assert job.step() == "actor"


def test_a_server_that_is_gone(shared: Path) -> None:
    """While it is asleep. One that goes in a rollout: see below."""
    job = Job(Vllm033(shared), shared)
    job.register()
    job.server.close()
    with pytest.raises(EngineError, match="nobody answers there"):
        job.manager.phase("weight_sync").__enter__()
    with job.manager.phase("train"):
        pass
    assert_nothing_resident(job.manager)


@every_vllm
@pytest.mark.parametrize("tag", ["weights", "kv_cache"])
def test_out_of_memory_in_a_wake(kind: Any, tag: str, start: Start) -> None:
    """It keeps part of the memory, drops host copies of blocks that are back, and would call a
    second attempt a success."""
    job = start(kind, "keep", manager={"budget_bytes": CAPACITY})  # which others take from, unseen
    job.step()
    held = [job.device.create(CHUNK) for _ in range(60 if tag == "weights" else 48)]
    with pytest.raises(
        EngineError,
        match=r"POST http.*/wake_up\?tags=.* was "
        r"answered "
        r"with "
        r"500 "
        r".*out of memory at",
    ):
        job.manager.phase("eval").__enter__()
    # One with one flag cannot sleep again before its KV cache has been awake, so its weights stay
    # until there is memory for that.
    stays = {"weights"} if tag == "kv_cache" and kind is not Vllm033 else set()
    assert job.handle.state is (State.GPU_RESIDENT if stays else State.CPU_OFFLOADED)
    assert job.server.memory.tags == stays
    assert job.manager.snapshot().unpaired_bytes == (TAG_BYTES["weights"] if stays else 0)
    for chunk in held:
        job.device.release(chunk)
    if tag == "weights":
        with pytest.raises(EngineError, match="failed half-way, so they are not valid"):
            job.manager.phase("eval").__enter__()
        assert job.step() == "actor"
    with job.manager.phase("eval"):
        assert job.server.generate() == "actor"
    assert job.server.memory.tags == set()


@every_vllm
def test_a_sleep_that_fails_half_way(kind: Any, start: Start) -> None:
    """Part of the memory is free and vLLM takes itself for awake: a second sleep would free it
    twice."""
    job = start(kind)
    with job.rolling_out() as step:
        job.server.failing["/sleep"] = (
            500,
            {
                "error": {
                    "message": (
                        "Call to sleep method failed: Memory usage increased after sleeping."
                    )
                }
            },
        )
        with pytest.raises(
            EngineLost,
            match=r"/sleep\?level=2&mode=wait was "
            r"answered "
            r"with "
            r"500 "
            r".*Memory usage increased",
        ):
            step.switch("train")
        assert job.handle.broken is not None
        del job.server.failing["/sleep"]
        sent = [*job.server.sent]
        with pytest.raises(BrokenHandleError, match="Restart the engine"):
            step.switch("train")
        with pytest.raises(EngineError, match="takes no weights any more"):
            job.engine.update_weights([])
        assert job.server.sent == sent
        assert [f.what for f in job.manager.audit().findings] == ["broken"]
        job.engine.assume(offloaded=[])
        step.switch("train")
        assert job.handle.broken is None
    assert job.step() == "actor"


@every_vllm
def test_a_wake_after_one_that_failed_half_way(kind: Any, start: Start) -> None:
    """What the first one brought back cannot be mapped a second time."""
    job = start(kind)
    said = (
        "Call to wake_up method failed: CUDA Error: invalid argument at "
        "/csrc/cumem_allocator.cpp:138"
    )
    job.server.failing["/wake_up"] = 500, {"error": {"message": said}}
    with pytest.raises(EngineLost, match="vLLM cannot bring back the rest"):
        job.manager.phase("weight_sync").__enter__()
    assert job.handle.broken is not None
    with job.manager.phase("train"):
        assert job.actor.state is State.TRAINING
    job.engine.assume(offloaded=["weights", "kv_cache"])


@every_vllm
def test_woken_or_restarted_by_somebody_else(kind: Any, start: Start) -> None:
    job = start(kind)
    job.server.wake_up({}, None)  # type: ignore[attr-defined]
    with pytest.raises(EngineLost, match="is awake, although it was put to sleep"):
        job.manager.phase("weight_sync").__enter__()
    job.engine.assume(offloaded=[])
    assert job.step() == "actor"


def test_what_was_cached_under_the_old_weights_is_forgotten(start: Start) -> None:
    job = start(Vllm033, manager={"policy": "resident"})
    with job.manager.phase("rollout") as step:
        job.server.prefix_cache = "old"  # type: ignore[attr-defined]
        step.switch("weight_sync")
        assert job.server.memory.tags == {"weights", "kv_cache"}
        job.publish()
        assert job.server.prefix_cache == ""  # type: ignore[attr-defined]


def test_a_release_of_the_kv_cache_that_is_refused(start: Start) -> None:
    job = start(Vllm033)
    with job.rolling_out() as step:
        job.server.failing["/release_kv_cache_memory"] = (
            500,
            {"error": {"message": ("requires a completed pause first")}},
        )
        with pytest.raises(EngineLost, match="requires a completed pause first"):
            step.switch("weight_sync")
        job.engine.assume(offloaded=[])


@pytest.mark.parametrize("weights", ["keep", "discard"])
def test_what_cannot_be_woken_again_after_the_kv_cache_left_is_asleep_in_the_book_too(
    weights: str, start: Start
) -> None:
    """A server with one flag sleeps as a whole; a wake that fails then leaves all of it asleep,
    although only a part was to go."""
    job = start(Vllm024, weights, tag_bytes=SIZES)
    with (  # noqa: PT012
        pytest.raises(EngineError, match=r"wake_up.* answered with 500"),
        job.manager.phase("weight_sync") as step,
    ):
        job.publish()
        step.switch("rollout")
        job.server.failing["/wake_up"] = 500, {"error": {"message": "out of memory"}}
        step.switch("weight_sync")
    assert job.server.memory.tags == set()
    assert (job.handle.state, job.handle.resident_bytes, job.handle.broken) == (
        State.CPU_OFFLOADED,
        0,
        None,
    )
    # at the registration, and once now
    assert (
        job.server.sent.count(f"POST /sleep?level={1 if weights == 'keep' else 2}&mode=wait") == 2
    )
    job.server.failing.clear()
    with pytest.raises(EngineError, match="mean nothing now"):
        job.manager.phase("eval").__enter__()
    assert job.step() == "actor"


def test_a_kv_cache_that_was_woken_for_a_sleep_that_is_refused_is_in_the_book(start: Start) -> None:
    job = start(Vllm024, tag_bytes=SIZES)
    with pytest.raises(EngineError, match="nothing was done"), job.manager.phase("weight_sync"):  # noqa: PT012
        job.publish()
        job.server.failing["/sleep"] = 400, {"error": {"message": "bad"}}
    assert job.server.memory.tags == {"weights", "kv_cache"}
    assert job.handle.resident_bytes == sum(SIZES.values())
    job.server.failing.clear()
    with job.manager.phase("train"):
        assert job.server.memory.tags == set()


# --- SGLang

ALL = {"weights", "kv_cache", "cuda_graph"}


@every_sglang
def test_what_is_sent_to_sglang_for_one_step(kind: Any, start: Start) -> None:
    job = start(kind)
    pause = 'POST /pause_generation {"mode": "abort"}'
    release = 'POST /release_memory_occupation {"tags": ["cuda_graph", "kv_cache", "weights"]}'
    assert job.server.sent == [pause, release]
    job.server.sent.clear()
    job.step()
    assert job.server.sent == [
        'POST /resume_memory_occupation {"tags": ["weights"]}',
        'POST /resume_memory_occupation {"tags": ["kv_cache"]}',
        'POST /resume_memory_occupation {"tags": ["cuda_graph"]}',
        "POST /continue_generation {}",
        pause,
        release,
    ]
    with job.manager.phase("weight_sync"):
        job.publish()
        # until every tag is back: a prefill in between would touch memory that was given away
        # (sglang#24123)
        assert job.server.is_paused
    assert job.server.sent[-1] == 'POST /release_memory_occupation {"tags": ["weights"]}'


def test_without_its_memory_saver(unregistered: Start) -> None:
    job = unregistered(partial(Sglang0523, has_saver=False))
    with pytest.raises(EngineError, match="--enable-memory-saver"):
        job.register()
    assert job.server.sent == []


def test_a_server_that_was_restarted_has_released_nothing(start: Start) -> None:
    job = start(Sglang0523)
    job.server.restart()  # type: ignore[attr-defined]
    sent = [*job.server.sent]
    with pytest.raises(EngineLost, match="was restarted since it was registered"):
        job.manager.phase("weight_sync").__enter__()
    assert job.server.sent == sent
    assert job.handle.broken is not None
    job.engine.assume(offloaded=[])
    assert job.step() == "actor"
    assert job.server.memory.tags == set()


def test_the_trainer_goes_on_without_a_server_that_has_ended(start: Start) -> None:
    """What it held is free, and nobody can be asked. Its memory is as the user says."""
    job = start(Sglang0523)
    with job.rolling_out() as step:
        job.server.is_dead = True
        with pytest.raises(EngineLost):
            step.switch("train")
        assert job.handle.broken is not None
        job.engine.assume(offloaded=ALL)
        step.switch("train")
        assert job.handle.state is State.CPU_OFFLOADED
    with pytest.raises(EngineError, match=r"nobody answers there|connection broke"):
        job.manager.phase("weight_sync").__enter__()
    job.server.is_dead = False
    job.server.restart()  # type: ignore[attr-defined]
    with pytest.raises(EngineLost, match="was restarted since it was registered"):
        job.manager.phase("weight_sync").__enter__()
    job.engine.assume(offloaded=ALL)
    job.manager.unregister("rollout")
    with job.manager.phase("log_prob"):
        assert job.manager.handles["actor"].state is State.GPU_RESIDENT
    assert_nothing_resident(job.manager)


@pytest.mark.parametrize(
    ("trap", "route"),
    diagonal(["500", "hang"], ["/release_memory_occupation", "/resume_memory_occupation"]),
)
def test_no_answer_that_tells_what_happened(route: str, trap: str, start: Start) -> None:
    job = start(Sglang0523, deadline_seconds=1.0)
    with job.manager.phase("weight_sync") as step:
        job.publish()
        is_release = route.startswith("/release")
        if is_release:
            step.switch("rollout")
        if trap == "hang":
            job.server.hanging.add(route)
        else:
            job.server.failing[route] = 500, "Internal Server Error"
        with pytest.raises(EngineLost, match="is not known"):
            step.switch("train" if is_release else "rollout")
        job.server.hanging.clear()
        job.server.failing.clear()
        sent = [*job.server.sent]
        with pytest.raises(Exception, match="broken"):
            step.switch("reward")
        # it is never told anything again, until somebody knows what is the case
        assert job.server.sent == sent
        assert job.handle.broken is not None
        job.engine.assume(offloaded=sorted(ALL - job.server.memory.tags))
    assert_nothing_resident(job.manager)
    assert job.server.memory.tags == set()


def test_a_refusal_changes_nothing(start: Start) -> None:
    job = start(Sglang0523)
    with job.rolling_out() as step:
        job.server.failing["/release_memory_occupation"] = 400, {"error": {"message": "no"}}
        with pytest.raises(EngineError, match=r"answered with 400 .*'no'|answered with 400"):
            step.switch("train")
        assert (job.handle.state, job.handle.broken) == (State.GPU_RESIDENT, None)
        assert not job.server.is_paused
        del job.server.failing["/release_memory_occupation"]
        step.switch("train")
    assert job.server.memory.tags == set()


def test_an_entry_that_finds_a_change_does_not_send_it_to_sleep(start: Start) -> None:
    """It would discard its weights, and they cannot come back."""
    job = start(Vllm033, weights="discard")
    with job.rolling_out() as step:
        sent = [*job.server.sent]
        job.module.register_buffer("added", torch.ones(3))
        with pytest.raises(IntegrityError, match="added to 'actor'"):
            step.switch("train")
        assert job.server.sent == sent
        assert job.server.generate() == "actor"
        step.switch("train")
