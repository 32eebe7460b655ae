"""What ranks do in the tests of verl: the same calls on a worker under placement and on one with verl's own offloading."""

from __future__ import annotations

import contextlib
import functools
import gc
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from placement import DeviceMemoryError, Manager
from placement.devices.simulated.device import SimulatedDevice
from placement.testing import Faults, assert_nothing_resident
from tests.integrations.verl import worker as workers
from tests.integrations.verl.worker import CAPACITY, batch
from tests.sharded.training import as_bytes, local_parts

OFF, GPU, SYNC, TRAIN = "CPU_OFFLOADED", "GPU_RESIDENT", "SYNCING", "TRAINING"


@dataclass
class Seen:
    """What a worker answered and what its engine holds, as bytes; and where placement had its handles meanwhile."""

    answers: list[Any] = field(default_factory=list)
    values: dict[str, bytes] = field(default_factory=dict)
    states: dict[str, dict[str, str]] = field(default_factory=dict)


class Subject:
    """One of the two workers that are compared."""

    def __init__(self, worker: Any, manager: Manager | None) -> None:
        self.worker = worker
        self.engine = worker.engine
        self.manager = manager
        self.seen = Seen()
        self._loss = worker.loss_fn
        worker.set_loss_fn(self._watching)
        self._call = "nothing"

    def _watching(self, **arguments: Any) -> Any:
        self.seen.states[self._call] = self.states()
        return self._loss(**arguments)

    def states(self) -> dict[str, str]:
        return {} if self.manager is None else {name: handle.state.value for name, handle in self.manager.handles.items()}

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
        """What it answered, and the values of model and optimizer as a checkpoint would have them."""
        found = {f"model.{name}": value for name, value in self.engine.module.state_dict().items()} if not self._gathers else {}
        if self.engine.optimizer is not None:
            for number, entry in self.engine.optimizer.state_dict()["state"].items():
                found |= {f"optimizer.{number}.{key}": value for key, value in entry.items()}
        self.seen.values = {f"{name}.{at}": as_bytes(part) for name, value in found.items() for at, part in local_parts(value)}
        return self.seen

    @property
    def _gathers(self) -> bool:
        return isinstance(self.engine.module, torch.distributed.fsdp.FullyShardedDataParallel)


def pair(model: Path, *, device: Any = None, **keywords: Any) -> tuple[Subject, Subject]:
    """verl's own worker, and the same one under placement."""
    own = Subject(workers.build(model, placed=False, **keywords), None)
    manager = workers.use_simulated(device)
    placed = Subject(workers.build(model, placed=True, **keywords), manager)
    assert type(own.engine) is not type(placed.engine)
    return own, placed


def same(own: Subject, placed: Subject) -> None:
    mine, theirs = placed.finish(), own.finish()
    assert mine.answers == theirs.answers
    assert mine.values.keys() == theirs.values.keys()
    assert [name for name, value in mine.values.items() if theirs.values[name] != value] == []


@contextmanager
def moves_of_verl() -> Iterator[list[str]]:
    """The calls of verl's own routines that offload a model, or move an optimizer, meanwhile."""
    from verl.workers.engine.fsdp import transformer_impl

    names = ("offload_fsdp_model_to_cpu", "offload_fsdp_optimizer", "load_fsdp_optimizer")
    real = {name: getattr(transformer_impl, name) for name in names}
    called: list[str] = []

    def counted(name: str) -> Any:
        return lambda *arguments, **keywords: (called.append(name), real[name](*arguments, **keywords))[1]

    for name in names:
        setattr(transformer_impl, name, counted(name))
    try:
        yield called
    finally:
        for name, routine in real.items():
            setattr(transformer_impl, name, routine)


def steps(model: Path, folder: Path, keywords: dict[str, Any]) -> dict[str, Any]:
    """Steps of both; then each loads the other's checkpoint and goes on. The states in which placement computed."""
    own, placed = pair(model, **keywords)
    for seed in range(2):
        for subject in (own, placed):
            subject.infer(10 + seed)
            subject.train(seed)
        assert own.publish() == placed.publish()
    same(own, placed)
    for subject, name in ((own, "own"), (placed, "placed")):
        subject.worker.save_checkpoint(str(folder / name), global_step=2)
        subject.check()
        subject.train(7)  # away from what was saved
    for subject, name in ((own, "placed"), (placed, "own")):
        subject.worker.load_checkpoint(str(folder / name))
        subject.check()
        subject.train(3)
        subject.infer(13)
    same(own, placed)
    with moves_of_verl() as called:
        placed.infer(14)
        placed.train(4)
        placed.publish()
        placed.worker.save_checkpoint(str(folder / "last"), global_step=3)
        placed.worker.load_checkpoint(str(folder / "last"))
    assert called == []
    return placed.seen.states


def publishing(model: Path, keywords: dict[str, Any]) -> dict[str, Any]:
    """The states of the actor while its weights are read to the end, given up, and never asked for."""
    own, placed = pair(model, **keywords)
    found: dict[str, Any] = {}

    weights, _ = placed.engine.get_per_tensor_param()
    found["returned"] = placed.states()["actor"]
    first = next(weights)
    found["begun"] = placed.states()["actor"]
    rest = dict(weights)
    found["exhausted"] = placed.states()["actor"]
    published = {name: as_bytes(value) for name, value in (first, *rest.items())}
    assert published == own.publish()
    placed.check()

    weights, _ = placed.engine.get_per_tensor_param()
    next(weights)
    weights.close()
    found["closed"] = placed.states()["actor"]
    placed.check()

    weights, _ = placed.engine.get_per_tensor_param()
    del weights
    gc.collect()
    found["never started"] = placed.states()["actor"]
    placed.check()

    weights, _ = placed.engine.get_per_tensor_param_shard()
    found["shards"] = placed.states()["actor"]
    theirs, _ = own.engine.get_per_tensor_param_shard()
    assert [(name, as_bytes(value)) for name, value, _ in weights] == [(name, as_bytes(value)) for name, value, _ in theirs]
    placed.check()

    first_reader, _ = placed.engine.get_per_tensor_param()
    second_reader, _ = placed.engine.get_per_tensor_param()
    for _ in first_reader:
        pass
    found["another reader"] = placed.states()["actor"]
    assert {name: as_bytes(value) for name, value in second_reader} == published
    placed.check()
    return found


def by_hand(model: Path, keywords: dict[str, Any]) -> list[tuple[str, str]]:
    """The states of actor and optimizer after each call of `to`, with batches in between that move nothing themselves.

    `TrainingWorker.to("device")` calls the engine with the platform's name of the device, which is "cpu" here: so do the others by hand.
    """
    own, placed = pair(model, **keywords)
    found = []

    def states() -> tuple[str, str]:
        now = placed.states()
        return now["actor"], now["actor.optimizer"]

    placed.engine.to("cuda")
    found.append(states())
    for subject in (own, placed):
        for seed in range(2):
            subject.seen.answers.append(_losses(subject, seed, disable_auto_offload=True))
    found.append(states())
    placed.worker.to("cpu", model=False, optimizer=True, grad=False)
    found.append(states())
    for subject in (own, placed):
        subject.seen.answers.append(as_bytes(subject.worker.infer_batch(_tagged(5, disable_auto_offload=True))["log_probs"].values()))
        subject.seen.answers.append(sorted(subject.publish_inside().items()))
    found.append(states())
    for subject in (own, placed):
        subject.worker.to("cpu")
        subject.worker.to("cpu")  # once more does nothing
        subject.check()
    found.append(states())
    for subject in (own, placed):
        subject.train(2)
    same(own, placed)
    return found


def _tagged(seed: int, **options: Any) -> Any:
    from verl.utils import tensordict_utils as tu

    data = batch(seed)
    tu.assign_non_tensor(data, **options)
    return data


def _losses(subject: Subject, seed: int, **options: Any) -> float:
    from verl.utils import tensordict_utils as tu

    return float(tu.get(subject.worker.train_batch(_tagged(seed, **options)), "metrics")["loss"])


class _Refused(Exception):
    """The error that a test raises in the middle of a call."""


def errors(model: Path, folder: Path, keywords: dict[str, Any]) -> list[str]:
    """Errors in the middle of each call leave nothing on the device, and the next calls compute what verl's own worker computes."""
    faults = Faults(SimulatedDevice(CAPACITY))
    own, placed = pair(model, device=faults, **keywords)
    raised: list[str] = []

    def fails(subject: Subject, kind: type[BaseException], call: Any) -> None:
        try:
            call()
        except kind as error:
            raised.append(type(error).__name__)
        else:
            raise AssertionError(f"{call} raised nothing")
        subject.check()

    def refuse(**_: Any) -> Any:
        raise _Refused

    for subject in (own, placed):
        subject.train(0)
        subject.worker.set_loss_fn(refuse)
        fails(subject, _Refused, lambda subject=subject: subject.worker.train_batch(batch(1)))
        fails(subject, _Refused, lambda subject=subject: subject.worker.infer_batch(batch(1)))
        subject.worker.set_loss_fn(subject._watching)
        subject.train(1)
    for operation in ("create", "map", "copy"):
        for call in (lambda: placed.worker.train_batch(batch(2)), lambda: placed.worker.infer_batch(batch(2)), placed.publish):
            faults.fail(operation)
            fails(placed, Exception, call)
            faults.clear()
    fails(placed, FileNotFoundError, lambda: placed.worker.load_checkpoint(str(folder / "nowhere")))
    (folder / "file").write_text("")
    fails(placed, OSError, lambda: placed.worker.save_checkpoint(str(folder / "file" / "inside")))
    weights, _ = placed.engine.get_per_tensor_param()
    try:
        for _ in weights:
            raise _Refused
    except _Refused:
        pass
    del weights
    placed.check()
    for subject in (own, placed):
        subject.train(2)
        subject.infer(3)
    same(own, placed)
    assert DeviceMemoryError.__name__ in raised
    return raised


def reset(model: Path, keywords: dict[str, Any]) -> list[str]:
    """`TrainingWorker.reset` builds everything anew, and the handles are those of the new objects. The names of the handles."""
    own, placed = pair(model, **keywords)
    assert placed.manager is not None
    for subject in (own, placed):
        subject.train(0)
        subject.worker.reset()
    placed.check()
    host = sum(handle.host_bytes for handle in placed.manager.handles.values())
    placed.engine.to("cuda")  # a manual hold does not live longer than its model
    placed.worker.reset()
    own.worker.reset()
    placed.check()
    assert sum(handle.host_bytes for handle in placed.manager.handles.values()) == host
    for subject in (own, placed):
        subject.train(1)
        subject.infer(2)
    same(own, placed)
    assert dist.is_initialized()
    return list(placed.manager.handles)


def together(model: Path, keywords: dict[str, Any]) -> dict[str, Any]:
    """Actor, reference and critic in one process with one manager, in phases that are opened and closed in any order."""
    own = [Subject(each, None) for each in _three(model, False, keywords)]
    manager = workers.use_simulated()
    placed = [Subject(each, manager) for each in _three(model, True, keywords)]
    found: dict[str, Any] = {"handles": {name: handle.role for name, handle in manager.handles.items()}}
    for three, pinning in ((own, workers.unpinned()), (placed, contextlib.nullcontext())):
        with pinning:
            _two_steps(*three)
    found["states"] = {subject.engine._role: subject.seen.states for subject in placed}
    actor, ref, critic = placed

    def present() -> list[str]:
        return [name for name, state in actor.states().items() if state != OFF]

    orders = []
    weights, _ = actor.engine.get_per_tensor_param()
    with ref.engine.eval_mode():
        orders.append(present())
        for _ in weights:  # ends inside the other's phase, which goes on
            pass
        orders.append(present())
        entered = critic.engine.train_mode()
        entered.__enter__()
        orders.append(present())
    orders.append(present())
    with actor.engine.train_mode():
        orders.append(present())
        entered.__exit__(None, None, None)
        orders.append(present())
        with actor.engine.eval_mode():  # verl's own eval mode would take the model away from the training around it
            orders.append(present())
        orders.append(present())
    orders.append(present())
    found["orders"] = orders
    for mine, theirs in zip(placed, own, strict=True):
        with workers.unpinned():
            theirs.infer(9)
        mine.infer(9)
        same(theirs, mine)
    for mine in placed:
        mine.check()
    return found


def _two_steps(actor: Subject, ref: Subject, critic: Subject) -> None:
    for seed in range(2):
        actor.infer(seed)
        ref.infer(seed)
        critic.infer(seed)
        critic.train(seed)
        actor.train(seed)
        actor.publish()


def _three(model: Path, placed: bool, keywords: dict[str, Any]) -> list[Any]:
    build = functools.partial(workers.build, model, placed=placed, **keywords)
    return [build(), build(forward_only=True), build(model_type="value_model")]


def lora(model: Path, keywords: dict[str, Any], merge: bool) -> dict[str, Any]:
    """Steps with LoRA, and what is published of it: merged, or the base once and the adapters alone."""
    options = {"lora_rank": 4, "lora_alpha": 8, "target_modules": "all-linear", "lora": {"merge": merge}}
    own, placed = pair(model, lora=options, **keywords)
    assert placed.manager is not None
    for seed in range(2):
        for subject in (own, placed):
            subject.train(seed)
            subject.infer(seed)
        if not merge and not seed:
            assert own.publish(base_sync_done=False) == placed.publish(base_sync_done=False)
        assert own.publish(base_sync_done=True) == placed.publish(base_sync_done=True)
        if not merge:
            layered = {"base_sync_done": True, "layered_summon": True}
            assert own.publish(**layered) == placed.publish(**layered)
        if merge:  # given up half-way: what was merged is undone before the model leaves
            for subject in (own, placed):
                weights, _ = subject.engine.get_per_tensor_param()
                next(weights)
                weights.close()
            placed.check()
    same(own, placed)
    return {"names": len(placed.publish(base_sync_done=True)), "states": placed.seen.states}


def partial(model: Path, keywords: dict[str, Any], offload: tuple[bool, bool]) -> dict[str, Any]:
    """Only one of the two flags. The states in training and in inference, and the bytes that were moved."""
    own, placed = pair(model, offload=offload, **keywords)
    assert placed.manager is not None
    for seed in range(2):
        for subject in (own, placed):
            subject.infer(seed)
            subject.train(seed)
        assert own.publish() == placed.publish()
    same(own, placed)
    handles = placed.manager.handles
    moved = {name: handle.counters.loaded_bytes > 0 for name, handle in handles.items()}
    return {"moved": moved, "external": {name: handle.external for name, handle in handles.items()}, "states": placed.seen.states}


def left_alone(model: Path, keywords: dict[str, Any]) -> tuple[list[str], list[str]]:
    """An engine that stays verl's own: the handles, and what the log says."""
    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("placement.integrations.verl")
    logger.addHandler(handler)
    try:
        own, placed = pair(model, **keywords)
    finally:
        logger.removeHandler(handler)
    assert placed.manager is not None
    for subject in (own, placed):
        subject.infer(0)
        if not keywords.get("forward_only"):
            subject.train(0)
        subject.publish()
    same(own, placed)
    return list(placed.manager.handles), records


def no_memory_on_one_rank(model: Path) -> list[str]:
    """The errors of a training and of an inference for which the second rank has no memory. Both are repeated afterwards."""
    own, placed = pair(model)
    assert placed.manager is not None
    raised = []
    for call, seed in ((placed.worker.train_batch, 0), (placed.worker.infer_batch, 1)):
        device = placed.manager.device
        create = device.create
        if dist.get_rank() == 1:

            def refuse(nbytes: int) -> Any:
                raise DeviceMemoryError(f"no {nbytes} bytes")

            device.create = refuse  # type: ignore[method-assign]
        try:
            call(batch(seed))
        except Exception as error:
            raised.append(type(error).__name__)
        finally:
            device.create = create  # type: ignore[method-assign]
        placed.check()
    for subject in (own, placed):
        subject.train(0)
        subject.infer(1)
    same(own, placed)
    return raised
