"""Engines after a checkpoint was loaded, or after a sync that was cut off: they generate only once
all weights are published to them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from placement import Engine, EngineError, Manager, TorchEngine, checkpoint
from placement.engines import Follower
from placement.publish.buckets import Bucket
from placement.testing import assert_nothing_resident
from tests.support.sweeps import diagonal
from tests.support.worker import Worker, assert_same, make_manager, net, trained


class Own(Engine):
    """An engine that knows nothing of checkpoints."""

    def __init__(self, module: torch.nn.Module) -> None:
        self.module = module

    def modules(self) -> Sequence[torch.nn.Module]:
        return (self.module,)

    def update_weights(self, bucket: Sequence[tuple[str, torch.Tensor]]) -> None:
        with torch.no_grad():
            for name, value in bucket:
                self.module.get_parameter(name).copy_(value)


ENGINES: dict[str, Callable[[], Any]] = {
    "torch": lambda: TorchEngine(net()),
    "own": lambda: Own(net()),
    "tagged": lambda: Follower(weights="keep"),
}


def worker(engine: Any, path: Path, **keywords: Any) -> Worker:
    """A worker with an engine, and a checkpoint that another one has saved."""
    checkpoint.save(trained().manager, path)
    found = Worker()
    found.manager.register("rollout", engine, **keywords)
    return found


def publish(worker: Worker, engine: Any) -> None:
    with worker.manager.phase("weight_sync"):
        for bucket in worker.actor.weights(bucket_bytes=4096):
            engine.update_weights(bucket)


def needing(manager: Manager) -> list[str | None]:
    return [f.handle for f in manager.audit().findings if f.what == "needs_weights"]


def assert_refused(worker: Worker, engine: Any) -> None:
    assert engine.needs_weights
    assert needing(worker.manager) == ["rollout"]
    assert not worker.manager.audit().ok
    shown = {each.name: each.stale for each in worker.manager.snapshot().handles}
    assert "loaded from a checkpoint" in (shown.pop("rollout") or "")
    assert set(shown.values()) == {None}
    for phase in ("rollout", "eval"):
        with (
            pytest.raises(EngineError, match=r"'rollout' mean nothing now.*not been published"),
            worker.manager.phase(phase),
        ):
            pytest.fail("the phase was entered")
    with worker.manager.phase("train"):  # which uses no engine
        pass
    assert_nothing_resident(worker.manager)


def assert_served(worker: Worker, engine: Any) -> None:
    assert not engine.needs_weights
    assert worker.manager.audit().ok
    with worker.manager.phase("rollout"):
        if engine.modules():
            found = dict(engine.modules()[0].state_dict())
            assert_same(copy.deepcopy(found), dict(worker.actor.state_dict()))


@pytest.mark.parametrize(("how", "kind"), diagonal(["load", "part", "in a phase"], ENGINES.keys()))
def test_an_engine_generates_only_with_the_weights_of_the_checkpoint(
    how: str, kind: str, tmp_path: Path
) -> None:
    engine = ENGINES[kind]()
    found = worker(engine, tmp_path / "a")
    if how == "part":
        found.manager.close()
        source = trained()
        found = Worker()
        found.manager.register("rollout", engine)
        values = copy.deepcopy(dict(source.actor.state_dict()))
        checkpoint.Model(found.actor).load_state_dict(values)
    elif how == "load":
        checkpoint.load(found.manager, tmp_path / "a")
    else:
        with found.manager.phase("rollout"):
            checkpoint.load(found.manager, tmp_path / "a", only=["actor"])
    assert_refused(found, engine)
    publish(found, engine)
    assert_served(found, engine)


@pytest.mark.parametrize("kind", ["torch", "own"])
def test_a_publication_that_was_cut_off_or_left_the_engine_out_does_not_count(
    kind: str, tmp_path: Path
) -> None:
    engine = ENGINES[kind]()
    found = worker(engine, tmp_path / "a")
    checkpoint.load(found.manager, tmp_path / "a")
    with found.manager.phase("weight_sync"):
        for bucket in found.actor.weights(bucket_bytes=4096):
            engine.update_weights(bucket)
            break
    assert_refused(found, engine)
    with found.manager.phase("weight_sync", only=["actor"]):
        assert [*found.actor.weights()]  # to receivers elsewhere
    assert_refused(found, engine)
    publish(found, engine)
    assert_served(found, engine)


def test_a_module_with_a_part_of_the_new_weights_generates_nothing() -> None:
    found, engine = Worker(), TorchEngine(net())
    found.manager.register("rollout", engine)
    publish(found, engine)
    with found.manager.phase("weight_sync"):
        engine.update_weights(next(found.actor.weights(bucket_bytes=4096)))
    assert engine.needs_weights
    with (
        pytest.raises(EngineError, match="a sync has begun and was not finished"),
        found.manager.phase("rollout"),
    ):
        pytest.fail("the phase was entered")
    publish(found, engine)
    assert_served(found, engine)


def test_adapters_alone_do_not_fill_the_base_of_a_checkpoint(tmp_path: Path) -> None:
    """Not even after a sync of adapters that was cut off before the load."""
    engine = TorchEngine(net())
    found = worker(engine, tmp_path / "a")
    weights = [(name, value.clone()) for name, value in engine.module.named_parameters()]

    def adapters(number: int) -> Bucket:
        bucket = Bucket(number, "separate")
        bucket.extend(weights)
        bucket.is_last = number == 1
        return bucket

    with found.manager.phase("weight_sync"):
        engine.update_weights(adapters(0))
        assert engine.needs_weights
        engine.update_weights(adapters(1))
        assert not engine.needs_weights
        engine.update_weights(adapters(0))
    checkpoint.load(found.manager, tmp_path / "a")
    with found.manager.phase("weight_sync"):
        for number in range(2):
            engine.update_weights(adapters(number))
    assert_refused(found, engine)
    publish(found, engine)
    assert_served(found, engine)


def test_changes_and_weights_that_came_another_way_count(tmp_path: Path) -> None:
    engine = TorchEngine(net())
    found = worker(engine, tmp_path / "a")
    weights = dict(engine.module.named_parameters())
    for how in ("changes", "filled"):
        checkpoint.load(found.manager, tmp_path / "a")
        assert_refused(found, engine)
        with found.manager.phase("weight_sync"):
            if how == "changes":
                for changes in found.actor.weight_changes(since=None):
                    for change in changes:
                        change.write_into(weights[change.name])
            else:
                engine.module.load_state_dict(found.net.state_dict())
                engine.weights_filled()
        assert_served(found, engine)


@pytest.mark.parametrize("only", [["critic", "critic.optimizer"], ["actor.optimizer"]])
def test_a_load_of_others_changes_nothing_for_an_engine(only: list[str], tmp_path: Path) -> None:
    engine = TorchEngine(net())
    found = worker(engine, tmp_path / "a")
    publish(found, engine)
    checkpoint.load(found.manager, tmp_path / "a", only=only)
    assert_served(found, engine)


def test_a_load_that_does_not_fit_changes_nothing_for_an_engine(tmp_path: Path) -> None:
    engine = TorchEngine(net(32))
    model = net(32)
    manager = make_manager()
    manager.register("actor", model, role="actor")
    manager.register("rollout", engine)
    checkpoint.save(trained().manager, tmp_path / "a")
    with pytest.raises(checkpoint.files.CheckpointError):
        checkpoint.load(manager, tmp_path / "a")
    assert not engine.needs_weights


def test_an_engine_for_something_else_or_with_the_actors_own_tensors_needs_nothing(
    tmp_path: Path,
) -> None:
    checkpoint.save(trained().manager, tmp_path / "a", only=["actor"])
    manager, model = make_manager(), net()
    manager.register("actor", model, role="actor", external=True)
    same = TorchEngine(torch.nn.ModuleList([model]))
    manager.register("rollout", same, external=True)
    judge = TorchEngine(net())
    manager.register("judge", judge, role="reward")
    checkpoint.load(manager, tmp_path / "a")
    assert not same.needs_weights
    assert not judge.needs_weights
    assert manager.audit().ok


def test_an_engine_that_is_registered_after_the_load_needs_nothing(tmp_path: Path) -> None:
    checkpoint.save(trained().manager, tmp_path / "a")
    found = Worker()
    checkpoint.load(found.manager, tmp_path / "a")
    with found.manager.phase("log_prob"):
        engine = TorchEngine(copy.deepcopy(found.net))
    found.manager.register("rollout", engine)
    assert_served(found, engine)
