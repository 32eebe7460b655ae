"""A fleet of two workers: phases for all of them, what fails in between, and the demo on Ray.

One job for the whole file, because a process that imports torch takes seconds to start: each test
leaves the fleet outside every phase.
"""

from __future__ import annotations

import os
import pickle
import signal
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

import placement.ray
from placement.core.errors import GroupError, PhaseError

WORLD = 2


pytestmark = pytest.mark.sweep
"""A cluster takes longer to start than most folders of tests take: CI starts it once, for all."""


@pytest.fixture(scope="module")
def job(ray: Any) -> Iterator[Any]:
    from tests.ray.workers import FleetTrainer

    actor = ray.remote(FleetTrainer).options(num_cpus=1, max_restarts=-1)
    workers = [actor.remote() for _ in range(WORLD)]
    fleet = placement.ray.Fleet(workers, deadline_seconds=30.0)

    def on_all(method: str, *arguments: Any) -> list[Any]:
        results: list[Any] = ray.get(
            [getattr(worker, method).remote(*arguments) for worker in workers]
        )
        return results

    yield SimpleNamespace(ray=ray, fleet=fleet, workers=workers, all=on_all)
    for worker in workers:
        ray.kill(worker, no_restart=True)


def assert_outside(job: Any) -> list[dict[str, Any]]:
    """Every worker is outside every phase, whole, and holds nothing. Returns what each says of
    itself."""
    seen: list[dict[str, Any]] = job.all("look")
    for each in seen:
        assert each["phase"] == "idle"
        assert each["resident_bytes"] == 0
        assert set(each["states"].values()) == {"CPU_OFFLOADED"}
    return seen


def assert_goes_on(job: Any) -> None:
    assert_outside(job)
    with job.fleet.phase("train"):
        assert len(set(job.all("step"))) == 1
    assert_outside(job)


def test_a_step_of_the_whole_fleet(job: Any) -> None:
    with job.fleet.phase("log_prob", only=["ref"]) as step:
        assert [each["states"]["ref"] for each in job.all("look")] == ["GPU_RESIDENT"] * WORLD
        assert [each["states"]["actor"] for each in job.all("look")] == ["CPU_OFFLOADED"] * WORLD
        step.switch("train")
        assert len(set(job.all("step"))) == 1
        with job.fleet.phase("checkpoint"):
            assert [each["phase"] for each in job.all("look")] == ["checkpoint"] * WORLD
        assert [each["phase"] for each in job.all("look")] == ["train"] * WORLD
    assert len({each["weights"] for each in assert_outside(job)}) == 1


@pytest.mark.parametrize(("failing", "switched"), [(0, False), (1, True)])
def test_out_of_memory_on_one_worker_is_everybodys_and_the_next_phase_succeeds(
    job: Any, failing: int, switched: bool
) -> None:
    before = assert_outside(job)
    job.ray.get(job.workers[failing].fail.remote("create", 4 if switched else 2))
    with (
        pytest.raises(GroupError, match=f"rank {failing}: DeviceMemoryError") as caught,
        job.fleet.phase("log_prob") as step,
    ):
        step.switch("train")
    assert set(caught.value.failures) == set(range(WORLD))
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)
    assert [each["weights"] for each in assert_outside(job)] == [each["weights"] for each in before]
    assert_goes_on(job)


def test_an_exception_in_the_driver_leaves_on_every_worker(job: Any) -> None:
    with (
        pytest.raises(ZeroDivisionError) as caught,
        job.fleet.phase("train"),
        job.fleet.phase("checkpoint"),
    ):
        raise ZeroDivisionError
    assert not hasattr(caught.value, "__notes__")
    assert_outside(job)
    with (
        pytest.raises(PhaseError, match="not the fleet's innermost"),
        job.fleet.phase("train") as outer,
        job.fleet.phase("checkpoint"),
    ):
        outer.switch("log_prob")
    assert_outside(job)


def test_mistakes_are_named_and_nothing_moves(job: Any, ray: Any) -> None:
    class Plain: ...

    class Broken(placement.ray.Worker):
        def __init__(self) -> None:
            raise RuntimeError("no weights in this folder")

    plain, broken = (ray.remote(each).options(num_cpus=0).remote() for each in (Plain, Broken))
    with pytest.raises(GroupError, match="PolicyError: unknown phase"), job.fleet.phase("trian"):
        pass
    with pytest.raises(TypeError, match="only="), job.fleet.phase("train", only="actor"):
        pass
    with pytest.raises(TypeError, match="not an actor of a class that has placement"):
        placement.ray.Fleet([plain])
    with pytest.raises(GroupError, match="no weights in this folder"):
        placement.ray.Fleet([broken])
    with pytest.raises(PhaseError, match="a phase is open"), job.fleet.phase("log_prob"):
        job.fleet.join()
    assert_goes_on(job)


def test_a_worker_that_was_killed_begins_anew_with_the_others(job: Any) -> None:
    killed = assert_outside(job)[1]["pid"]
    # the others wait so long for it at the switch, and when they leave
    job.fleet._deadline_seconds = 2.0
    job.fleet.join()

    def step() -> None:
        with job.fleet.phase("log_prob") as phase:
            os.kill(killed, signal.SIGKILL)
            phase.switch("train")

    with pytest.raises(GroupError, match="rank 1"):
        step()
    job.fleet._deadline_seconds = 30.0
    job.fleet.join()
    assert assert_outside(job)[1]["pid"] != killed
    with job.fleet.phase("train"):
        job.all("step")  # the restarted worker has the weights that its constructor gave it
    assert_outside(job)


@pytest.mark.parametrize("where", ["enter", "switch", "leave"])
def test_a_driver_that_is_interrupted_leaves_no_worker_behind(
    job: Any, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """Ctrl-C in a notebook, while the driver waits for the workers."""

    def interrupt(*_: Any, **__: Any) -> Any:
        monkeypatch.undo()
        raise KeyboardInterrupt

    def step() -> None:
        if where == "enter":
            monkeypatch.setattr(job.ray, "get", interrupt)
        with job.fleet.phase("train") as phase:
            if where == "switch":
                monkeypatch.setattr(job.ray, "get", interrupt)
                phase.switch("log_prob")
            monkeypatch.setattr(job.ray, "get", interrupt)

    with pytest.raises(KeyboardInterrupt):
        step()
    assert_outside(job)
    with job.fleet.phase("train"):
        job.all("step")
    assert_outside(job)


def test_a_method_that_leaves_the_fleets_phase(job: Any) -> None:
    with (
        pytest.raises(GroupError, match="rank 1: PhaseError: cannot leave"),
        job.fleet.phase("train"),
    ):
        job.all("leave")
    assert_outside(job)


def test_the_loop_on_ray(ray: Any) -> None:
    from examples.ray_grpo import main

    weights = main(world_size=2, steps=2)
    assert [len(set(step)) for step in weights] == [1, 1]  # all workers have the same
    assert weights[0] != weights[1]
