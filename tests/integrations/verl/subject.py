"""A worker of verl that is watched while it works, and the comparison of two: under placement, and
with verl's own offloading."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch

from placement import Manager
from placement.testing import assert_nothing_resident
from tests.integrations.verl import worker as workers
from tests.integrations.verl.worker import batch
from tests.sharded.training import as_bytes, bytes_of

OFF, GPU, SYNC, TRAIN = "CPU_OFFLOADED", "GPU_RESIDENT", "SYNCING", "TRAINING"


@dataclass
class Seen:
    """What a worker answered and what its engine holds, as bytes; and where placement had its
    handles meanwhile."""

    answers: list[Any] = field(default_factory=list)
    values: dict[str, bytes] = field(default_factory=dict)
    states: dict[str, dict[str, str]] = field(default_factory=dict)


class Subject:
    def __init__(self, worker: Any, manager: Manager | None) -> None:
        self.worker = worker
        self.engine = worker.engine
        self.manager: Any = manager
        self.seen = Seen()
        self._loss = worker.loss_fn
        worker.set_loss_fn(self._watching)
        self._call = "nothing"

    def _watching(self, **arguments: Any) -> Any:
        self.seen.states[self._call] = self.states()
        return self._loss(**arguments)

    def states(self) -> dict[str, str]:
        return (
            {}
            if self.manager is None
            else {name: handle.state.value for name, handle in self.manager.handles.items()}
        )

    def check(self) -> None:
        """Outside every phase nothing of it is on the device, and verl has it in no mode."""
        assert self.engine.mode is None
        if self.manager is not None:
            assert self.manager.phase_name == "idle"
            assert_nothing_resident(self.manager)

    def infer(self, seed: int) -> None:
        self._call = "infer"
        output = self.worker.infer_batch(batch(seed))
        for key in ("log_probs", "values"):
            if key in output.keys():  # noqa: SIM118 - a TensorDict iterates over its rows
                self.seen.answers.append(as_bytes(output[key].values()))
        self.check()

    def train(self, seed: int) -> None:
        from verl.utils import tensordict_utils as tu

        self._call = "train"
        metrics = tu.get(self.worker.train_batch(batch(seed)), "metrics")
        self.seen.answers.append((metrics["loss"], metrics["grad_norm"], metrics["lr"]))
        self.check()

    def publish(self, **arguments: Any) -> dict[str, bytes]:
        published = self.publish_inside(**arguments)
        self.check()
        return published

    def publish_inside(self, **arguments: Any) -> dict[str, bytes]:
        """The weights, for a moment at which something else may hold the model."""
        weights, _ = self.engine.get_per_tensor_param(**arguments)
        self.seen.states["publish"] = self.states()
        published = dict(weights)  # kept beyond the end of the phase
        return {name: as_bytes(value) for name, value in published.items()}

    def finish(self) -> Seen:
        """What it answered, and the values of model and optimizer as a checkpoint would have
        them."""
        found = {} if self._gathers else {"model": self.engine.module.state_dict()}
        if self.engine.optimizer is not None:
            found["optimizer"] = self.engine.optimizer.state_dict()["state"]
        self.seen.values = bytes_of(found)
        return self.seen

    @property
    def _gathers(self) -> bool:
        return isinstance(self.engine.module, torch.distributed.fsdp.FullyShardedDataParallel)


class Pair(NamedTuple):
    """The same worker with verl's own offloading, and under placement."""

    own: Subject
    placed: Subject

    def train(self, seed: int) -> None:
        for subject in self:
            subject.train(seed)

    def infer(self, seed: int) -> None:
        for subject in self:
            subject.infer(seed)

    def publish(self, **arguments: Any) -> dict[str, bytes]:
        """What both publish."""
        own, placed = (subject.publish(**arguments) for subject in self)
        assert own == placed
        return placed

    def same(self) -> None:
        """Both have answered the same, and have the same values."""
        theirs, mine = (subject.finish() for subject in self)
        assert mine.answers == theirs.answers
        assert mine.values.keys() == theirs.values.keys()
        assert [name for name, value in mine.values.items() if theirs.values[name] != value] == []


def lora_of(*, merge: bool) -> dict[str, Any]:
    """The keyword of `worker.build` for adapters."""
    return {
        "lora_rank": 4,
        "lora_alpha": 8,
        "target_modules": "all-linear",
        "lora": {"merge": merge},
    }


def pair(model: Path, *, device: Any = None, policy: str = "colocated", **keywords: Any) -> Pair:
    own = Subject(workers.build(model, placed=False, **keywords), None)
    manager = workers.use_simulated(device, policy)
    placed = Subject(workers.build(model, placed=True, **keywords), manager)
    assert type(own.engine) is not type(placed.engine)
    return Pair(own, placed)


@contextmanager
def moves_of_verl() -> Iterator[list[mock.Mock]]:
    """verl's own routines that offload a model, or move an optimizer; each knows whether it was
    called meanwhile."""
    from verl.workers.engine.fsdp import transformer_impl

    names = ("offload_fsdp_model_to_cpu", "offload_fsdp_optimizer", "load_fsdp_optimizer")
    with ExitStack() as patched:
        routines = {name: getattr(transformer_impl, name) for name in names}
        yield [
            patched.enter_context(mock.patch.object(transformer_impl, name, wraps=own))
            for name, own in routines.items()
        ]


@contextmanager
def logged() -> Iterator[list[str]]:
    records: list[str] = []
    handler = logging.Handler(logging.INFO)
    handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("placement.integrations.verl")
    logger.addHandler(handler)
    try:
        yield records
    finally:
        logger.removeHandler(handler)
