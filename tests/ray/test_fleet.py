"""A fleet of four workers on a cluster of two nodes: phases for all of them, and what is killed in between.

One job for the whole file, because a process that imports torch takes seconds to start: each test leaves the fleet outside every phase.
"""

from __future__ import annotations

import os
import pickle
import shutil
import signal
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import placement.ray
from placement.core.errors import GroupError, PhaseError, PlacementError
from placement.integrations.ray.coordinator import actor_name, find
from tests.observe.test_prometheus import Prometheus, until

WORLD = 4


@pytest.fixture(scope="module")
def job(start_job: Callable[..., Any]) -> Iterator[Any]:
    job = start_job(WORLD, range(WORLD), max_restarts=-1)
    yield job
    job.close()


def assert_outside(job: Any) -> list[dict[str, Any]]:
    """Every worker is outside every phase, whole, and holds nothing. Returns what each says of itself."""
    seen: list[dict[str, Any]] = job.all("look")
    for each in seen:
        assert each["phase"] == "idle"
        assert each["resident_bytes"] == 0
        assert set(each["states"].values()) == {"CPU_OFFLOADED"}
    return seen


def test_a_step_of_the_whole_fleet(job: Any) -> None:
    with job.fleet.phase("log_prob", only=["ref"]) as step:
        assert [each["states"]["ref"] for each in job.all("look")] == ["GPU_RESIDENT"] * WORLD
        assert [each["states"]["actor"] for each in job.all("look")] == ["CPU_OFFLOADED"] * WORLD
        step.switch("train")
        assert len(set(job.all("step"))) == 1
        with job.fleet.phase("checkpoint"):
            assert job.fleet.phase_name == "checkpoint"
        assert [status.phases for status in job.fleet.status()] == [("train",)] * WORLD
        assert all(status.resident_bytes > 0 for status in job.fleet.status())
    assert len({each["weights"] for each in assert_outside(job)}) == 1


def test_a_method_brings_its_own_phase_or_takes_the_fleets(job: Any) -> None:
    assert [phase for _, phase in job.all("judge")] == ["log_prob"] * WORLD
    assert_outside(job)
    with job.fleet.phase("log_prob"):
        assert [phase for _, phase in job.all("judge")] == ["log_prob"] * WORLD


@pytest.mark.parametrize("failing", [0, 3])
@pytest.mark.parametrize("switched", [False, True])
def test_out_of_memory_on_one_worker_is_everybodys_and_the_next_phase_succeeds(job: Any, failing: int, switched: bool) -> None:
    before = assert_outside(job)
    job.ray.get(job.workers[failing].fail.remote("create", 4 if switched else 2))
    with pytest.raises(GroupError, match=f"rank {failing}: DeviceMemoryError") as caught, job.fleet.phase("log_prob") as step:
        step.switch("train")
    assert list(caught.value.failures) == [failing]
    assert [each["weights"] for each in assert_outside(job)] == [each["weights"] for each in before]
    with job.fleet.phase("train"):
        assert len(set(job.all("step"))) == 1


def test_an_exception_in_the_driver_leaves_on_every_worker(job: Any) -> None:
    with pytest.raises(ZeroDivisionError) as caught, job.fleet.phase("train"), job.fleet.phase("checkpoint"):
        raise ZeroDivisionError
    assert not hasattr(caught.value, "__notes__")
    assert_outside(job)
    with pytest.raises(PhaseError, match="not the fleet's innermost"), job.fleet.phase("train") as outer, job.fleet.phase("checkpoint"):
        outer.switch("log_prob")
    assert_outside(job)


def test_mistakes_are_named_and_nothing_moves(job: Any) -> None:
    with pytest.raises(GroupError, match="PolicyError: unknown phase") as caught, job.fleet.phase("trian"):
        pass
    assert 0 < len(caught.value.failures) <= WORLD
    with pytest.raises(TypeError, match="only="), job.fleet.phase("train", only="actor"):
        pass
    with pytest.raises(PlacementError, match="exists already"):
        placement.ray.Fleet(job.name)
    assert_outside(job)
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


def test_who_is_no_worker_cannot_join(job: Any, ray: Any) -> None:
    from tests.ray.workers import Broken, Plain

    plain = ray.remote(Plain).options(num_cpus=0).remote()
    with pytest.raises(TypeError, match="not an actor of a class that has placement"):
        job.fleet.join([plain])
    broken = ray.remote(Broken).options(num_cpus=0).remote()
    with pytest.raises(GroupError, match="no weights in this folder"):
        job.fleet.join([*job.workers, broken])
    with pytest.raises(GroupError, match="two workers have rank 1"):
        job.fleet.join([*job.workers, job.workers[1]])
    job.fleet.join(job.workers)
    with job.fleet.phase("train"):
        pass


def test_a_worker_killed_between_phases_is_part_of_the_next(job: Any) -> None:
    killed = assert_outside(job)[2]["pid"]
    os.kill(killed, signal.SIGKILL)
    with job.fleet.phase("train"):
        assert job.ray.get(job.workers[2].look.remote())["pid"] != killed
        assert [each["states"]["adam"] for each in job.all("look")] == ["TRAINING"] * WORLD
    assert_outside(job)


def test_the_board_and_a_worker_killed_between_phases(job: Any) -> None:
    """The board answers nobody before the worker that is being restarted has told it that it knows nothing."""
    os.kill(job.pid_of(job.fleet._board), signal.SIGKILL)
    os.kill(assert_outside(job)[3]["pid"], signal.SIGKILL)
    before = job.fleet.status()[3].address
    until(lambda: job.fleet.status()[3].address != before, "its successor is in the fleet", 30)
    with job.fleet.phase("log_prob"):
        assert [each["phase"] for each in job.all("look")] == ["log_prob"] * WORLD
    assert_outside(job)


def test_a_worker_killed_inside_a_phase(job: Any) -> None:
    others = [each["weights"] for each in assert_outside(job)]
    pid = assert_outside(job)[1]["pid"]
    with pytest.raises(GroupError, match="rank 1: its process died") as caught, job.fleet.phase("log_prob") as step:  # noqa: PT012
        os.kill(pid, signal.SIGKILL)
        step.switch("train")
    assert list(caught.value.failures) == [1]
    with job.fleet.phase("log_prob"):
        assert [each["phase"] for each in job.all("look")] == ["log_prob"] * WORLD
    kept = [each["weights"] for each in assert_outside(job)]
    assert [kept[rank] for rank in (0, 2, 3)] == [others[rank] for rank in (0, 2, 3)]


def test_the_coordinator_killed_inside_a_phase_is_in_nobodys_way(job: Any) -> None:
    """It comes back at the same address, and knows everything again from what the workers report."""

    def listed() -> int:
        try:
            with urllib.request.urlopen(f"{job.fleet.url}/targets", timeout=5) as answer:
                return str(answer.read()).count("/rank")
        except OSError:
            return 0

    until(lambda: listed() == WORLD, "all are listed", 30)
    pid = job.pid_of(job.fleet._coordinator)
    with job.fleet.phase("log_prob") as step:
        os.kill(pid, signal.SIGKILL)
        step.switch("train")
        assert len(job.all("step")) == WORLD
        until(lambda: listed() == WORLD, "all are listed again", 30)
        assert job.pid_of(job.fleet._coordinator) != pid
        until(lambda: [each.phases for each in job.fleet.status()] == [("train",)] * WORLD, "all have reported", 30)
        assert all(each.age_seconds < 20 for each in job.fleet.status())
    assert_outside(job)


def test_the_board_killed_inside_a_phase(job: Any) -> None:
    """The ranks tell the restarted one what they know, and the open step goes on."""
    pid = job.pid_of(job.fleet._board)
    with job.fleet.phase("log_prob") as step:
        os.kill(pid, signal.SIGKILL)
        step.switch("train")
        assert len(set(job.all("step"))) >= 1
    assert_outside(job)
    assert job.pid_of(job.fleet._board) != pid


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("prometheus") is None, reason="prometheus (Debian: prometheus) is not installed")
def test_prometheus_finds_the_workers_by_the_coordinator(job: Any, tmp_path: Path) -> None:
    """One URL for the whole run. Killed workers come back under the same name, on another port."""
    prometheus = Prometheus(tmp_path, {"http_sd_configs": [{"url": f"{job.fleet.url}/targets", "refresh_interval": "1s"}]})
    try:
        until(prometheus.is_ready, "Prometheus is ready", 30)
        node = job.fleet.status()[0].labels["node"]
        everybody = {f"{node}/rank{rank}": "up" for rank in range(WORLD)}
        until(lambda: prometheus.targets() == everybody, "all targets are up", 30)
        os.kill(assert_outside(job)[3]["pid"], signal.SIGKILL)
        until(lambda: prometheus.targets() == everybody | {f"{node}/rank3": "down"}, "the killed worker is seen to be down", 30)
        until(lambda: prometheus.targets() == everybody, "the restarted one is up", 60)
        (series,) = prometheus.ask(f'placement_worker_info{{instance="{node}/rank3"}}')
        assert series["metric"]["run"] == job.name
    finally:
        prometheus.close()
    with job.fleet.phase("train"):
        seen = [each["phase"] for each in job.all("look")]
    assert seen == ["train"] * WORLD


def test_a_worker_that_cannot_be_asked_once_reports_again(job: Any) -> None:
    def last() -> float:
        return float({each.rank: each for each in job.fleet.status()}[2].taken_timestamp_seconds)

    before = last()
    job.ray.get(job.workers[2].snapshot_fails_once.remote())
    until(lambda: last() > before, "it reports again", 30)


@pytest.mark.parametrize("where", ["enter", "switch", "leave"])
def test_a_driver_that_is_interrupted_leaves_no_worker_behind(job: Any, monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    """Ctrl-C in a notebook, while the driver waits for the workers."""

    def interrupt(*_: Any, **__: Any) -> Any:
        monkeypatch.undo()
        raise KeyboardInterrupt

    def step() -> None:
        if where == "enter":
            monkeypatch.setattr(job.ray, "wait", interrupt)
        with job.fleet.phase("train") as phase:
            if where == "switch":
                monkeypatch.setattr(job.ray, "wait", interrupt)
                phase.switch("log_prob")
            monkeypatch.setattr(job.ray, "wait", interrupt)

    with pytest.raises(KeyboardInterrupt):
        step()
    assert job.fleet.phase_name == "idle"
    assert_outside(job)
    with job.fleet.phase("train"):
        job.all("step")
    assert_outside(job)


@pytest.mark.parametrize("what", ["leave", "switch"])
def test_a_phase_that_a_method_entered_and_never_left(job: Any, what: str) -> None:
    def step() -> None:
        with job.fleet.phase("train") as phase:
            job.all("enter", "checkpoint")
            if what == "switch":
                phase.switch("log_prob")

    with pytest.raises(GroupError, match="rank 1: PhaseError: a method of this worker entered phase 'checkpoint'"):
        step()
    assert_outside(job)
    with job.fleet.phase("train"):
        job.all("step")
    assert_outside(job)


@pytest.mark.parametrize("what", ["leave", "switch"])
def test_a_method_that_leaves_the_fleets_phase(job: Any, what: str) -> None:
    def step() -> None:
        with job.fleet.phase("train") as phase:
            job.all("leave")
            if what == "switch":
                phase.switch("log_prob")

    with pytest.raises(GroupError, match="rank 1: PhaseError: a method of this worker left phase 'train', which only the fleet may leave"):
        step()
    assert_outside(job)
    with job.fleet.phase("train"):
        job.all("step")
    assert_outside(job)


def test_a_worker_that_leaves_its_fleet_is_known_no_longer(job: Any) -> None:
    """The last test of the file, because the worker reports no more."""
    coordinator = find(actor_name(job.name), job.name)

    def known() -> set[str]:
        return {target.labels["rank"] for target in job.ray.get(coordinator.targets.remote())}

    until(lambda: known() == {str(rank) for rank in range(WORLD)}, "every worker is known", 30.0)
    for _ in range(2):
        job.ray.get(job.workers[2].leave_fleet.remote())
        assert known() == {"0", "1", "3"}
    time.sleep(1.5)  # longer than the pause between two reports; a report that does not come gives nothing to wait for
    assert known() == {"0", "1", "3"}
    with job.fleet.phase("train"):
        assert len(job.all("step")) == WORLD
