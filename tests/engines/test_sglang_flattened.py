"""`SglangInProcess` sends a bucket as one flattened tensor a dtype, in SGLang's own format.

The classes here have its protocol; tests/gpu/sglang sends to the real ones.
"""

from __future__ import annotations

import importlib.util
import pickle
import sys
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from placement import EngineError
from placement.engines.sglang import SglangInProcess
from tests.support.worker import assert_same, make_manager


@dataclass
class Metadata:
    name: str
    shape: torch.Size
    dtype: torch.dtype
    start_idx: int
    end_idx: int


class FlattenedTensorBucket:
    """sglang/srt/weight_sync/tensor_bucket.py, 0.5.23."""

    def __init__(self, named_tensors: Any = None, flattened_tensor: Any = None, metadata: Any = None) -> None:
        self.flattened_tensor, self.metadata = flattened_tensor, metadata or []
        at = 0
        for name, tensor in named_tensors or ():
            self.metadata.append(Metadata(name, tensor.shape, tensor.dtype, at, at + tensor.nbytes))
            at += tensor.nbytes
        if named_tensors:
            self.flattened_tensor = torch.cat([tensor.flatten().view(torch.uint8) for _, tensor in named_tensors])

    def get_flattened_tensor(self) -> torch.Tensor:
        return self.flattened_tensor

    def get_metadata(self) -> list[Metadata]:
        return self.metadata

    def reconstruct_tensors(self) -> list[tuple[str, torch.Tensor]]:
        of = self.flattened_tensor
        return [(each.name, of[each.start_idx : each.end_idx].view(each.dtype).reshape(each.shape)) for each in self.metadata]


class Serializer:
    """`MultiprocessingSerializer` of sglang/srt/utils/common.py, without handles to shared memory."""

    serialize = staticmethod(pickle.dumps)
    deserialize = staticmethod(pickle.loads)


class Engine:
    """An `sglang.Engine` of two ranks over one model: each reads its own payload, as SGLang's model runner does."""

    def __init__(self) -> None:
        self.server_args = SimpleNamespace(enable_memory_saver=True, enable_weights_cpu_backup=True, tp_size=2)
        self.got: dict[str, torch.Tensor] = {}
        self.formats: list[str | None] = []
        self.refusal: str | None = None

    def update_weights_from_tensor(self, named_tensors: Any, load_format: str | None = None, flush_cache: bool = True) -> tuple[bool, str]:
        assert not flush_cache
        self.formats.append(load_format)
        if load_format is None:
            self.load_weights(named_tensors)
        else:
            assert len(named_tensors) == 2
            self.load_weights(FlattenedTensorBucket(**Serializer.deserialize(named_tensors[1])).reconstruct_tensors())
        return self.refusal is None, self.refusal or ""

    def load_weights(self, pairs: Any) -> None:
        self.got |= {name: tensor.clone() for name, tensor in pairs}

    def get_model(self) -> Engine:
        return self

    def flush_cache(self) -> None: ...
    def release_memory_occupation(self, tags: Any) -> None: ...
    def resume_memory_occupation(self, tags: Any) -> None: ...


@pytest.fixture
def has_format(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let SGLang's modules be importable that know the format."""
    bucket, utils = ModuleType("sglang.srt.weight_sync.tensor_bucket"), ModuleType("sglang.srt.utils")
    bucket.FlattenedTensorBucket = FlattenedTensorBucket  # type: ignore[attr-defined]
    utils.MultiprocessingSerializer = Serializer  # type: ignore[attr-defined]
    for each in (*map(ModuleType, ("sglang", "sglang.srt", "sglang.srt.weight_sync")), bucket, utils):
        monkeypatch.setitem(sys.modules, each.__name__, each)


def model() -> torch.nn.Module:
    """Odd numbers of bytes, so that a float32 after an int8 would begin where it cannot be read; a scalar; another order in memory."""
    made = torch.nn.Sequential(torch.nn.Linear(7, 3), torch.nn.BatchNorm1d(3), torch.nn.Linear(3, 5).to(torch.bfloat16))
    made.register_buffer("code", torch.arange(7, dtype=torch.int8))
    made[0].weight = torch.nn.Parameter(torch.randn(7, 3).t())
    return made


def job(engine: Engine) -> tuple[Any, Any, Any, dict[str, torch.Tensor]]:
    manager, module = make_manager(), model()
    wanted = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    actor = manager.register("actor", module, role="actor")
    manager.module = module  # a handle keeps no model alive
    return manager, actor, manager.register("rollout", SglangInProcess(engine, verify="answer"), role="rollout").object, wanted


def send(manager: Any, actor: Any, rollout: Any, **options: Any) -> None:
    with manager.phase("weight_sync"):
        for bucket in actor.weights(**options):
            rollout.update_weights(bucket)


@pytest.mark.usefixtures("has_format")
@pytest.mark.parametrize(("bucket_bytes", "requests"), [(1 << 20, 4), (40, 6)])
def test_one_request_a_bucket_and_dtype_and_every_bit_arrives(bucket_bytes: int, requests: int) -> None:
    engine = Engine()
    *job_of, wanted = job(engine)
    send(*job_of, bucket_bytes=bucket_bytes)
    assert engine.formats == ["flattened_bucket"] * requests
    assert engine.got.keys() == wanted.keys()
    assert_same(
        {name: tensor.contiguous() for name, tensor in engine.got.items()}, {name: wanted[name].contiguous() for name in engine.got}
    )


@pytest.mark.usefixtures("has_format")
def test_a_refusal_is_told() -> None:
    engine = Engine()
    *job_of, _ = job(engine)
    engine.refusal = "shape mismatch"
    with pytest.raises(EngineError, match="refused a bucket of 6 weights: shape mismatch"):
        send(*job_of)


def test_without_the_format_it_sends_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    if importlib.util.find_spec("sglang"):
        monkeypatch.setitem(sys.modules, "sglang.srt.weight_sync.tensor_bucket", None)
    engine = Engine()
    *job_of, wanted = job(engine)
    send(*job_of)
    assert engine.formats == [None]
    assert engine.got.keys() == wanted.keys()
