"""What ranks do with one engine of verl: steps, checkpoints, publishing, errors."""

from __future__ import annotations

import contextlib
import gc
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from placement import DeviceMemoryError, NotResidentError
from placement.devices.simulated.device import SimulatedDevice
from placement.testing import Faults
from tests.integrations.verl.subject import Subject, moves_of_verl, pair, same
from tests.integrations.verl.worker import CAPACITY, batch
from tests.sharded.training import as_bytes

KINDS: dict[str, dict[str, Any]] = {
    "fsdp2": {"strategy": "fsdp2"},
    "fsdp": {"strategy": "fsdp"},
    "offload policy": {"strategy": "fsdp2", "offload_policy": True},
}
"""Who places an engine's model, by the keywords of `worker.build`: placement with either FSDP, or FSDP2 itself."""


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
    """The states of actor and optimizer after each call of `to`, with batches in between that move nothing themselves."""
    own, placed = pair(model, **keywords)
    found = []

    def states() -> tuple[str, str]:
        now = placed.states()
        return now["actor"], now["actor.optimizer"]

    for subject in (own, placed):
        subject.worker.to("device")
    found.append(states())
    for subject in (own, placed):
        for seed in range(2):
            subject.seen.answers.append(_losses(subject, seed, disable_auto_offload=True))
    found.append(states())
    for subject in (own, placed):
        subject.worker.to("cpu", model=False, optimizer=True, grad=False)
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
    with pytest.raises(NotResidentError):  # a batch that moves nothing, and the model is away
        placed.worker.infer_batch(_tagged(6, disable_auto_offload=True))
    placed.check()
    for subject in (own, placed):
        subject.train(2)
    same(own, placed)
    return found


def refused_by_hand(model: Path) -> list[tuple[str, str]]:
    own, placed = pair(model)
    raised = []
    for arguments in ({"device": "cuda:0"}, {"device": "device"}, {"device": "cpu", "model": False}):
        for subject in (own, placed):
            with pytest.raises(AssertionError) as error:
                subject.engine.to(**arguments)
            raised.append((type(subject.engine).__name__, str(error.value)))
            subject.check()
    return raised


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
        except kind as error:  # which is gone before the check
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
    with contextlib.suppress(_Refused):
        for _ in weights:
            raise _Refused
    del weights
    placed.check()
    for subject in (own, placed):
        subject.train(2)
        subject.infer(3)
    same(own, placed)
    assert DeviceMemoryError.__name__ in raised
    return raised


def reset(model: Path, keywords: dict[str, Any]) -> list[str]:
    own, placed = pair(model, **keywords)
    assert placed.manager is not None
    for subject in (own, placed):
        subject.train(0)
        subject.worker.reset()
    placed.check()
    host = sum(handle.host_bytes for handle in placed.manager.handles.values())
    placed.worker.to("device")  # a manual hold does not live longer than its model
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
