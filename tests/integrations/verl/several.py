"""What ranks do with several engines of verl, and with engines that are configured otherwise."""

from __future__ import annotations

import contextlib
import functools
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from placement import DeviceMemoryError
from tests.integrations.verl import worker as workers
from tests.integrations.verl.subject import OFF, Subject, logged, pair, same
from tests.integrations.verl.worker import batch
from tests.sharded.training import as_bytes, local_parts


def together(model: Path, keywords: dict[str, Any]) -> dict[str, Any]:
    """Actor, reference and critic in one process with one manager, in phases that are opened and closed in any order."""
    own = [Subject(each, None) for each in _three(model, False, keywords)]
    manager = workers.use_simulated()
    placed = [Subject(each, manager) for each in _three(model, True, keywords)]
    found: dict[str, Any] = {"handles": {name: (handle.role, handle.external) for name, handle in manager.handles.items()}}
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
    with logged() as records:
        own, placed = pair(model, **keywords)
    assert placed.manager is not None
    for subject in (own, placed):
        subject.infer(0)
        if not keywords.get("forward_only"):
            subject.train(0)
        subject.publish()
    same(own, placed)
    return list(placed.manager.handles), records


def left_to_fsdp2(model: Path, keywords: dict[str, Any]) -> dict[str, Any]:
    """FSDP2's CPUOffloadPolicy places the model. What placement says of it in every state, and that nothing of it has moved or changed."""
    with logged() as records:
        own, placed = pair(model, offload_policy=True, **keywords)
    assert placed.manager is not None
    handles = placed.manager.handles
    name = placed.engine._role
    handle, found = handles[name], {"external": {each.name: each.external_reason for each in handles.values()}, "log": records}
    places = _places(placed)
    infos = handle.weights_info()
    for seed in range(2):
        for subject in (own, placed):
            subject.infer(seed)
            if not keywords.get("forward_only"):
                subject.train(seed)
        assert own.publish() == placed.publish()
    placed.worker.to("device")  # verl's own `to` fails on a GPU here
    found["by hand"] = placed.states()
    placed.worker.to("cpu")
    placed.check()
    for phase in (None, "log_prob", "train", "weight_sync"):
        with contextlib.nullcontext() if phase is None else placed.manager.phase(phase, only=[handle]):
            assert handle.weights_info() == infos
            values = handle.state_dict()
            assert _bytes_of(values) == _bytes_of(own.engine.module.state_dict())
            if phase == "weight_sync" and name == "actor":
                published = {label: as_bytes(value) for bucket in handle.weights() for label, value in bucket}
                assert published == own.publish()
                assert published.keys() == {info.name for info in infos}
    assert _places(placed) == places
    assert all(each.counters.loaded_bytes == each.host_bytes == 0 for each in handles.values())
    assert placed.manager.audit().ok
    same(own, placed)
    found["states"] = placed.seen.states
    return found


def _places(subject: Subject) -> dict[str, tuple[torch.device, int]]:
    values = {name: part for name, value in subject.engine.module.named_parameters() for _, part in local_parts(value)}
    return {name: (part.device, part.data_ptr()) for name, part in values.items()}


def _bytes_of(values: dict[str, Any]) -> dict[str, bytes]:
    return {f"{name}{at}": as_bytes(part) for name, value in values.items() for at, part in local_parts(value)}


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


def base_sync_through_the_host(model: Path) -> int:
    """verl publishes a LoRA base from the CPU. On an accelerator both ways replace the memory of the model, and so they do here."""
    own, placed = pair(model, lora={"lora_rank": 4, "lora_alpha": 8, "target_modules": "all-linear", "lora": {"merge": False}})
    moves = torch.nn.Module.to
    published = []
    for subject in (own, placed):
        subject.train(0)
        torch.nn.Module.to = lambda module, *_, **__: module._apply(torch.clone)  # type: ignore[method-assign, assignment, misc]
        try:
            published.append(subject.publish(base_sync_done=False))
        finally:
            torch.nn.Module.to = moves  # type: ignore[method-assign]
        subject.train(1)
        subject.infer(2)
    assert published[0] == published[1]
    same(own, placed)
    return len(published[1])


def published_from_the_host(model: Path, keywords: dict[str, Any]) -> tuple[str, bool]:
    """A policy that publishes from the host copy. The state of the actor meanwhile, and whether it was on the device."""
    own, placed = pair(model, policy="colocated(stream_sync=True)", **keywords)
    assert placed.manager is not None
    for subject in (own, placed):
        subject.train(0)
    assert own.publish() == placed.publish()
    weights, _ = placed.engine.get_per_tensor_param()
    handle = placed.manager.handles["actor"]
    found = handle.state.value, handle.resident_bytes > 0
    weights.close()
    placed.check()
    for subject in (own, placed):
        subject.train(1)
    same(own, placed)
    return found


def optimizer_in_its_step_alone(model: Path, keywords: dict[str, Any]) -> dict[str, dict[str, str]]:
    own, placed = pair(model, policy="colocated('optimizer_step')", **keywords)
    for subject in (own, placed):
        for seed in range(2):
            subject.train(seed)
    same(own, placed)
    return placed.seen.states


def saved_for_transformers(model: Path, folder: Path, keywords: dict[str, Any]) -> bool:
    """verl's `hf_model` among the contents of a checkpoint: whether the files of both have the same weights, and were trained."""
    from safetensors.torch import load_file

    own, placed = pair(model, contents=("model", "optimizer", "extra", "hf_model"), **keywords)
    for subject, name in ((own, "own"), (placed, "placed")):
        subject.train(0)
        subject.worker.save_checkpoint(str(folder / name), global_step=1)
        subject.check()
    files = (model, folder / "own" / "huggingface", folder / "placed" / "huggingface")
    first, theirs, mine = ({name: as_bytes(value) for name, value in load_file(each / "model.safetensors").items()} for each in files)
    return mine == theirs and mine.keys() == first.keys() and all(mine[name] != value for name, value in first.items())
