"""verl's FSDP engines under placement compute what they compute with verl's own offloading, bit for
bit. The real verl."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import importlib
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from placement import DeviceMemoryError, GroupError, NotResidentError, PlacementError
from placement.devices.simulated.device import SimulatedDevice
from placement.testing import Faults
from tests.integrations.verl.subject import (
    GPU,
    OFF,
    SYNC,
    TRAIN,
    Subject,
    logged,
    lora_of,
    moves_of_verl,
    pair,
)
from tests.integrations.verl.test_several_engines import lora
from tests.integrations.verl.worker import CAPACITY, batch
from tests.sharded.training import as_bytes
from tests.support.frameworks import needs
from tests.support.ranks import Ranks, on_ranks

needs("verl")
pytestmark = pytest.mark.sweep


@pytest.mark.parametrize("strategy", ["fsdp2", "fsdp"])
@on_ranks("one_rank")
def test_weights_that_are_read_given_up_or_never_asked_for(model: Path, strategy: str) -> None:
    own, placed = pair(model, strategy=strategy)

    def is_in(state: str) -> bool:
        return placed.states()["actor"] == state

    weights, _ = placed.engine.get_per_tensor_param()
    assert is_in(SYNC)
    first = next(weights)
    assert is_in(SYNC)
    rest = dict(weights)
    assert is_in(OFF)
    published = {name: as_bytes(value) for name, value in (first, *rest.items())}
    assert published == own.publish()
    placed.check()

    weights, _ = placed.engine.get_per_tensor_param()
    next(weights)
    weights.close()
    assert is_in(OFF)
    placed.check()

    weights, _ = placed.engine.get_per_tensor_param()
    del weights
    gc.collect()
    assert is_in(OFF)
    placed.check()

    weights, _ = placed.engine.get_per_tensor_param_shard()
    assert is_in(OFF if strategy == "fsdp2" else SYNC)
    theirs, _ = own.engine.get_per_tensor_param_shard()
    assert [(name, as_bytes(value)) for name, value, _ in weights] == [
        (name, as_bytes(value)) for name, value, _ in theirs
    ]
    placed.check()

    first_reader, _ = placed.engine.get_per_tensor_param()
    second_reader, _ = placed.engine.get_per_tensor_param()
    for _ in first_reader:
        pass
    assert is_in(SYNC)
    assert {name: as_bytes(value) for name, value in second_reader} == published
    placed.check()


@on_ranks("one_rank")
def test_manual_control(model: Path) -> None:
    """The states of actor and optimizer after each call of `to`, with batches in between that move
    nothing themselves."""
    _, placed = both = pair(model)

    def states() -> tuple[str, str]:
        now = placed.states()
        return now["actor"], now["actor.optimizer"]

    for subject in both:
        subject.worker.to("device")
    assert states() == (TRAIN, TRAIN)
    for subject in both:
        for seed in range(2):
            subject.seen.answers.append(_losses(subject, seed, disable_auto_offload=True))
    assert states() == (TRAIN, TRAIN)
    for subject in both:
        subject.worker.to("cpu", model=False, optimizer=True, grad=False)
    assert states() == (GPU, OFF)
    for subject in both:
        subject.seen.answers.append(
            as_bytes(
                subject.worker.infer_batch(_tagged(5, disable_auto_offload=True))[
                    "log_probs"
                ].values()
            )
        )
        subject.seen.answers.append(sorted(subject.publish_inside().items()))
    assert states() == (GPU, OFF)
    for subject in both:
        subject.worker.to("cpu")
        subject.worker.to("cpu")  # once more does nothing
        subject.check()
    assert states() == (OFF, OFF)
    with pytest.raises(NotResidentError):  # a batch that moves nothing, and the model is away
        placed.worker.infer_batch(_tagged(6, disable_auto_offload=True))
    placed.check()
    both.train(2)
    both.same()


@on_ranks("one_rank")
def test_moves_by_hand_that_verl_refuses_are_refused(model: Path) -> None:
    both = pair(model)
    gradients = "Gradient buffers must be moved to device along with model parameters"
    for arguments, said in (
        ({"device": "cuda:0"}, ""),
        ({"device": "device"}, ""),
        ({"device": "cpu", "model": False}, gradients),
    ):
        for subject in both:
            with pytest.raises(AssertionError, match=f"^{gradients}$" if said else "^$"):
                subject.engine.to(**arguments)
            subject.check()


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


@on_ranks("one_rank")
def test_errors_in_the_middle_leave_nothing_behind(model: Path, tmp_path: Path) -> None:
    """And the next calls compute what verl's own worker computes."""
    faults = Faults(SimulatedDevice(CAPACITY))
    _, placed = both = pair(model, device=faults)
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

    for subject in both:
        subject.train(0)
        subject.worker.set_loss_fn(refuse)
        fails(subject, _Refused, lambda subject=subject: subject.worker.train_batch(batch(1)))
        fails(subject, _Refused, lambda subject=subject: subject.worker.infer_batch(batch(1)))
        subject.worker.set_loss_fn(subject._watching)
        subject.train(1)
    for operation in ("create", "map", "copy"):
        for call in (
            lambda: placed.worker.train_batch(batch(2)),
            lambda: placed.worker.infer_batch(batch(2)),
            placed.publish,
        ):
            faults.fail(operation)
            fails(placed, Exception, call)
            faults.clear()
    fails(
        placed, FileNotFoundError, lambda: placed.worker.load_checkpoint(str(tmp_path / "nowhere"))
    )
    (tmp_path / "file").write_text("")
    fails(placed, OSError, lambda: placed.worker.save_checkpoint(str(tmp_path / "file" / "inside")))
    weights, _ = placed.engine.get_per_tensor_param()
    with contextlib.suppress(_Refused):
        for _ in weights:
            raise _Refused
    del weights
    placed.check()
    both.train(2)
    both.infer(3)
    both.same()
    assert DeviceMemoryError.__name__ in raised
    assert raised.count("_Refused") == 4
    assert raised.count("DeviceMemoryError") + raised.count("InjectedFault") == 9


@on_ranks("one_rank")
def test_reset_replaces_model_and_optimizer(model: Path) -> None:
    own, placed = both = pair(model, strategy="fsdp")
    for subject in both:
        subject.train(0)
        subject.worker.reset()
    placed.check()
    host = sum(handle.host_bytes for handle in placed.manager.handles.values())
    placed.worker.to("device")  # a manual hold does not live longer than its model
    placed.worker.reset()
    own.worker.reset()
    placed.check()
    assert sum(handle.host_bytes for handle in placed.manager.handles.values()) == host
    both.train(1)
    both.infer(2)
    both.same()
    assert dist.is_initialized()
    assert list(placed.manager.handles) == ["actor", "actor.optimizer"]


@pytest.mark.parametrize(
    ("strategy", "offload"),
    [("fsdp2", (True, False)), ("fsdp", (False, True))],
    ids=["parameters", "optimizer"],
)
@on_ranks("one_rank")
def test_only_one_of_the_flags(model: Path, strategy: str, offload: tuple[bool, bool]) -> None:
    _, placed = both = pair(model, offload=offload, strategy=strategy)
    for seed in range(2):
        both.infer(seed)
        both.train(seed)
        both.publish()
    both.same()
    handles = placed.manager.handles
    for name, is_moved in zip(("actor", "actor.optimizer"), offload, strict=True):
        assert (handles[name].counters.loaded_bytes > 0, handles[name].external) == (
            is_moved,
            not is_moved,
        )
    assert placed.seen.states["train"] == {"actor": TRAIN, "actor.optimizer": TRAIN}


@pytest.mark.parametrize(
    ("keywords", "reason"),
    [
        ({"offload": (False, False)}, "param_offload and optimizer_offload are off"),
        (
            {"offload": (False, True), "forward_only": True},
            ("param_offload and optimizer_offload are off"),
        ),
    ],
    ids=["no flag", "reference without param_offload"],
)
@on_ranks("one_rank")
def test_an_engine_that_stays_verls_own_says_why(
    model: Path, keywords: dict[str, Any], reason: str
) -> None:
    with logged() as records:
        _, placed = both = pair(model, **keywords)
    for subject in both:
        subject.infer(0)
        if not keywords.get("forward_only"):
            subject.train(0)
        subject.publish()
    both.same()
    assert list(placed.manager.handles) == []
    assert len(records) == 1
    assert reason in records[0]


@pytest.mark.parametrize(
    ("keywords", "expected"),
    [
        ({"strategy": "fsdp2"}, (SYNC, False)),
        ({"strategy": "fsdp"}, (GPU, True)),
        ({"strategy": "fsdp2", "lora": lora_of(merge=True)}, (GPU, True)),
    ],
    ids=["fsdp2", "fsdp", "lora"],
)
@on_ranks("one_rank")
def test_a_policy_that_publishes_from_the_host(
    model: Path, keywords: dict[str, Any], expected: tuple[str, bool]
) -> None:
    _, placed = both = pair(model, policy="colocated(stream_sync=True)", **keywords)
    both.train(0)
    both.publish()
    weights, _ = placed.engine.get_per_tensor_param()
    handle = placed.manager.handles["actor"]
    assert (handle.state.value, handle.resident_bytes > 0) == expected
    weights.close()
    placed.check()
    both.train(1)
    both.same()


@on_ranks("one_rank")
def test_a_policy_that_brings_the_optimizer_for_its_step_alone(model: Path) -> None:
    _, placed = both = pair(model, policy="colocated('optimizer_step')")
    for seed in range(2):
        both.train(seed)
    both.same()
    assert placed.seen.states["train"] == {"actor": TRAIN, "actor.optimizer": OFF}


# --- over two ranks: each phase is one decision of both

KINDS: dict[str, dict[str, Any]] = {
    "fsdp2": {"strategy": "fsdp2"},
    "fsdp": {"strategy": "fsdp"},
    "offload policy": {"strategy": "fsdp2", "offload_policy": True},
}
"""Who places an engine's model, by the keywords of `worker.build`: placement with either FSDP, or
FSDP2 itself."""


@pytest.mark.parametrize("kind", KINDS)
@on_ranks("two_ranks")
def test_steps_and_checkpoints_are_those_of_verl(model: Path, tmp_path: Path, kind: str) -> None:
    """Steps of both; then each loads the other's checkpoint and goes on."""
    own, placed = both = pair(model, **KINDS[kind])
    both.infer(10)
    both.train(0)
    both.publish()
    both.same()
    for subject, name in ((own, "own"), (placed, "placed")):
        subject.worker.save_checkpoint(str(tmp_path / name), global_step=2)
        subject.check()
        subject.train(7)  # away from what was saved
    for subject, name in ((own, "placed"), (placed, "own")):
        subject.worker.load_checkpoint(str(tmp_path / name))
        subject.check()
        subject.train(3)
        subject.infer(13)
    both.same()
    with moves_of_verl() as routines:
        placed.infer(14)
        placed.train(4)
        placed.publish()
        placed.worker.save_checkpoint(str(tmp_path / "last"), global_step=3)
        placed.worker.load_checkpoint(str(tmp_path / "last"))
    assert not any(routine.called for routine in routines)
    assert placed.seen.states == {
        "infer": {"actor": GPU, "actor.optimizer": OFF},
        "train": {"actor": TRAIN, "actor.optimizer": TRAIN},
        "publish": {"actor": SYNC, "actor.optimizer": OFF},
    }


@on_ranks("two_ranks")
def test_checkpoints_for_transformers(model: Path, tmp_path: Path) -> None:
    """verl's `hf_model`. Not FSDP1, which gathers for it what it has already freed where gloo
    gathers on a CPU, without placement too."""
    from safetensors.torch import load_file

    own, placed = pair(model, contents=("model", "optimizer", "extra", "hf_model"))
    for subject, name in ((own, "own"), (placed, "placed")):
        subject.train(0)
        subject.worker.save_checkpoint(str(tmp_path / name), global_step=1)
        subject.check()
    files = (model, tmp_path / "own" / "huggingface", tmp_path / "placed" / "huggingface")
    first, theirs, mine = (
        {name: as_bytes(value) for name, value in load_file(each / "model.safetensors").items()}
        for each in files
    )
    assert mine == theirs
    assert mine.keys() == first.keys()
    assert all(mine[name] != value for name, value in first.items())


@on_ranks("two_ranks")
def test_lora(model: Path) -> None:
    needs("peft")
    lora(model, {"strategy": "fsdp2"}, True)


@on_ranks("two_ranks")
def test_ranks_are_one_group(model: Path) -> None:
    """Memory that one rank lacks for a training and an inference is an error of both, and both can
    go on."""
    _, placed = both = pair(model)
    for call, seed in ((placed.worker.train_batch, 0), (placed.worker.infer_batch, 1)):
        lacks_memory = mock.patch.object(
            placed.manager.device, "create", side_effect=DeviceMemoryError("no bytes")
        )
        with (
            lacks_memory if dist.get_rank() == 1 else contextlib.nullcontext(),
            pytest.raises(GroupError),
        ):
            call(batch(seed))
        placed.check()
    both.train(0)
    both.infer(1)
    both.same()


# --- verl's sharded delta sync: its engine, encoder, sparse gather and SGLang loader. Only NCCL,
# ZeroMQ and cupy are left out.


class Rollout(torch.nn.Module):
    """What SGLang's model does with a weight in `load_weights`: it copies it over its own."""

    def __init__(self) -> None:
        super().__init__()
        self.weights: dict[str, torch.Tensor] = {}

    def load_weights(self, pairs: Any) -> None:
        for name, tensor in pairs:
            self.weights.setdefault(name, torch.zeros_like(tensor)).copy_(tensor)

    def values(self) -> dict[str, bytes]:
        return {name: as_bytes(value) for name, value in self.weights.items()}


@functools.cache
def module_of_verl() -> Any:
    cupy = ModuleType("cupy")
    cupy.ndarray = torch.Tensor  # type: ignore[attr-defined] # in an annotation
    with mock.patch.dict(sys.modules, cupy=cupy):
        return importlib.import_module("verl.checkpoint_engine.delta_checkpoint_engine")


def delta_engine(rollout: Rollout) -> Any:
    """verl's `DeltaShardedCheckpointEngine`, whose flushes go to verl's loader for SGLang instead
    of a NCCL group."""
    apply = importlib.import_module("verl.workers.rollout.sglang_rollout.delta_loader").apply_delta
    encode: Any = importlib.import_module("verl.checkpoint_engine.delta_sync.encode")

    class Engine(module_of_verl().DeltaShardedCheckpointEngine):  # type: ignore[misc, name-defined] # verl has no types
        def _send(
            self, encoding: str, params: Any, checksum: int, positions: Any, values: torch.Tensor
        ) -> None:
            spec = json.dumps(
                {
                    "encoding": encoding,
                    "params": [vars(each) for each in params],
                    "checksum": checksum,
                }
            ).encode()
            content = {
                "__delta_spec__": torch.frombuffer(bytearray(spec), dtype=torch.uint8),
                "__values__": values,
            }
            apply(
                rollout,
                (content | ({} if positions is None else {"__positions__": positions})).items(),
            )

        def _publish_flush(self, flush: Any, first: bool, is_last: bool) -> None:
            self._send(
                flush.encoding, flush.params, flush.checksum, flush.positions_cpu, flush.values_gpu
            )

        def _publish_values_flush(
            self, params: Any, values: torch.Tensor, is_last: bool, verify: bool = False
        ) -> None:
            empty = torch.empty(0, dtype=torch.uint8)
            self._send("dense", params, encode.checksum(empty, values), None, values)

        def _publish_terminal(self, first: bool) -> None: ...
        def _release_staging_pool(self, phase: str) -> None: ...

    engine = Engine(bucket_size=4096, rollout_dtype=torch.bfloat16)
    engine.is_master, engine.rank = dist.get_rank() == 0, 0 if dist.get_rank() == 0 else -1
    return engine


def syncs(model: Path, lr: float) -> dict[str, Any]:
    """A seed and three delta syncs of both; the third has two steps.

    Returns what placement loaded for the delta syncs, and the shares that changed.
    """
    subjects: tuple[Subject, Subject] = pair(model, lr=lr)
    rollouts = Rollout(), Rollout()
    engines = [delta_engine(rollout) for rollout in rollouts]
    handle = subjects[1].manager.handles["actor"]  # type: ignore[union-attr]
    found: dict[str, Any] = {"loaded": 0, "own": [], "ours": []}
    for step in range(4):
        for subject in subjects:
            for seed in range(step and 1 + (step == 3)):
                subject.train(seed + step)
        before = handle.counters.loaded_bytes
        told = [
            asyncio.run(engine.send_weights(subject.engine, step))
            for engine, subject in zip(engines, subjects, strict=True)
        ]
        found["loaded"] += handle.counters.loaded_bytes - before if step else 0
        assert rollouts[0].values() == rollouts[1].values()
        for kind, each in zip(("own", "ours"), told, strict=True):
            found[kind].append(each and each["checkpoint_engine/changed_ratio"])
        for subject in subjects:
            subject.check()
    if dist.get_rank() == 0:
        assert len(rollouts[0].weights) == 27
    return found


@pytest.mark.parametrize("lr", [1e-6, 1e-2])
def test_delta_syncs_of_verl_send_what_changed(two_ranks: Ranks, model: Path, lr: float) -> None:
    """What arrives is what arrives from verl's own offloading, bit for bit. No delta sync loads the
    actor."""
    first, second = two_ranks.run(syncs, model, lr)
    assert first["loaded"] == second["loaded"] == 0
    assert second["own"] == second["ours"] == [None] * 4  # only the first rank sends
    assert first["own"][0] == 1.0 > max(first["own"][1:]) > 0
    assert first["ours"] == first["own"]


@on_ranks("two_ranks")
def test_a_model_that_is_trained_in_the_middle_of_a_delta_sync(model: Path) -> None:
    _, placed = pair(model)
    weights, _ = placed.engine.get_per_tensor_param_shard()
    next(weights)
    placed.worker.train_batch(batch(1))
    with pytest.raises(
        PlacementError,
        match="'actor' was loaded while its shards "
        "were "
        "read "
        "from "
        "the host copy: begin this sync again",
    ):
        next(weights)
    placed.check()
