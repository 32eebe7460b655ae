"""`VllmWeightSource` gives vLLM's trainer-side engines what `weights()` publishes, by vLLM's own
protocol of either generation.

The two protocols are stand-ins. `VLLM_SOURCE` names an unpacked wheel of vLLM 0.33, whose own files
are tested as well. Its transfer engines then run on the CPU: what they import beside torch is
replaced by the few names below, and a queue takes the place of NCCL.
"""

from __future__ import annotations

import base64
import contextlib
import importlib
import logging
import os
import queue
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from placement import Lazy, PhaseError
from placement.policies import Colocated
from placement.publish import VllmWeightSource
from placement.testing import assert_nothing_resident
from tests.support.worker import assert_same, make_manager


@dataclass(frozen=True)
class ParamMeta:
    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]


class Source033(ABC):
    """`WeightSource` of 0.33.0."""

    def __init_subclass__(cls, **keywords: Any) -> None:
        super().__init_subclass__(**keywords)
        if not isinstance(cls.__dict__.get("metadata", cached_property(len)), cached_property):
            raise TypeError(f"{cls.__name__}.metadata must be a functools.cached_property")

    @property
    @abstractmethod
    def metadata(self) -> list[ParamMeta]: ...

    def owned_names(self, rank: int) -> list[str]:
        return [each.name for each in self.metadata]

    def implements_iter_full(self) -> bool:
        return type(self).iter_full is not Source033.iter_full

    def iter_full(self) -> Iterator[tuple[str, torch.Tensor]]:
        raise NotImplementedError


class Source032(ABC):
    """`WeightSource` of 0.32.0."""

    @abstractmethod
    def metadata(self) -> list[ParamMeta]: ...

    @abstractmethod
    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]: ...

    def held_names(self) -> None:
        return None


def stand_in(patch: pytest.MonkeyPatch, source: type) -> None:
    """Let `vllm.distributed.weight_transfer` be importable, with this protocol."""
    module(patch, "vllm", path=[])
    module(patch, "vllm.distributed", path=[])
    module(patch, "vllm.distributed.weight_transfer", WeightSource=source, ParamMeta=ParamMeta)


def module(
    patch: pytest.MonkeyPatch, name: str, *, path: list[str] | None = None, **members: Any
) -> None:
    made = ModuleType(name)
    made.__dict__.update(members)
    if path is not None:
        made.__path__ = path
    patch.setitem(sys.modules, name, made)


def of_vllm(patch: pytest.MonkeyPatch, folder: Path) -> Any:
    """vLLM's own package `vllm.distributed.weight_transfer`, from its files."""
    for name in (
        "vllm",
        "vllm.config",
        "vllm.distributed",
        "vllm.utils",
        "vllm.distributed.device_communicators",
    ):
        module(patch, name, path=[str(folder.joinpath(*name.split(".")))])
    for name in ("vllm.model_executor", "vllm.model_executor.model_loader"):
        module(patch, name, path=[])
    module(patch, "vllm.config.parallel", ParallelConfig=object)
    module(patch, "vllm.config.weight_transfer", WeightTransferConfig=object)
    module(patch, "vllm.logger", init_logger=logging.getLogger)
    module(patch, "vllm.utils.nccl", unpinned_nccl_env=contextlib.nullcontext)
    module(patch, "vllm.distributed.device_communicators.pynccl_wrapper", NCCL_UNIQUE_ID_BYTES=128)
    module(
        patch,
        "vllm.model_executor.model_loader.mtp_validation",
        disable_mtp_completeness_check=contextlib.nullcontext,
    )
    module(patch, "pybase64", **vars(base64))
    transfer = importlib.import_module("vllm.distributed.weight_transfer")
    engine = importlib.import_module("vllm.distributed.weight_transfer.nccl_engine")
    packing = importlib.import_module("vllm.distributed.weight_transfer.packed_tensor")
    stream = SimpleNamespace(synchronize=lambda: None, wait_event=lambda _: None)
    patch.setattr(packing, "_get_streams", lambda _, count: (stream,) * count)
    for name, given in (
        ("current_device_index", lambda: 0),
        ("current_stream", lambda: stream),
        ("synchronize", lambda: None),
    ):
        patch.setattr(torch.accelerator, name, given)
    patch.setattr(torch.cuda, "current_stream", lambda: stream)
    patch.setattr(torch.cuda, "stream", lambda _: contextlib.nullcontext())
    patch.setattr(torch, "Event", type("Event", (), {"record": lambda *_: None}))
    patch.setattr(torch.Tensor, "record_stream", lambda tensor, _: None)
    return SimpleNamespace(transfer=transfer, engine=engine)


class Wire:
    """In place of a NCCL group of one sender and one receiver."""

    def __init__(self) -> None:
        self.sent: queue.Queue[torch.Tensor] = queue.Queue()

    def end(self, is_sender: bool) -> Any:
        def broadcast(tensor: torch.Tensor, src: int, stream: Any = None) -> None:
            if is_sender:
                self.sent.put(tensor.clone())
            else:
                tensor.copy_(self.sent.get(timeout=10))

        return SimpleNamespace(broadcast=broadcast)


class Worker:
    """vLLM's receiving engine behind the four calls of its `VLLMWeightSyncClient`, and the model
    that it fills."""

    def __init__(self, own: Any, group: Any, *, packed: bool) -> None:
        self.got: dict[str, torch.Tensor] = {}
        self.calls: list[str] = []
        self._engine = own.engine.NCCLWeightTransferEngine(
            None,
            SimpleNamespace(parallel_config=None, model_config=None),
            torch.device("cpu"),
            self,
        )
        (
            self._engine.model_update_group,
            self._engine.packed,
            self._engine.packed_buffer_size_bytes,
        ) = group, packed, 300

    def load_weights(self, weights: Any) -> None:
        self.got.update((name, value.clone()) for name, value in weights)

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None: ...

    def start_weight_update(self) -> None:
        self.calls.append("start")

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self.calls.append("update")
        self._engine.receive_weights(self._engine.parse_update_info(update_info))

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self.calls.append("finish")


# --- the tests


def net() -> torch.nn.Module:
    return torch.nn.Sequential(
        torch.nn.Linear(7, 5), torch.nn.BatchNorm1d(5), torch.nn.Linear(5, 3)
    )


@pytest.fixture(params=["0.33", "0.32"])
def version(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    stand_in(monkeypatch, Source033 if request.param == "0.33" else Source032)
    return str(request.param)


@pytest.fixture(params=[False, True], ids=["resident", "streamed"])
def manager(request: pytest.FixtureRequest) -> Any:
    return make_manager(policy=Colocated(stream_sync=request.param))


def read(source: Any, version: str) -> tuple[list[Any], Any]:
    """A source's description, and a function that begins a pass over its values."""
    return (
        (source.metadata, source.iter_full)
        if version == "0.33"
        else (source.metadata(), lambda: iter(source))
    )


def test_both_channels_agree_with_what_is_published_and_each_pass_is_fresh(
    version: str, manager: Any
) -> None:
    model = net()
    sgd = torch.optim.SGD(model.parameters())
    actor = manager.register("actor", model, role="actor")
    manager.register("sgd", sgd)
    source: Any = VllmWeightSource(actor, names="module", dtype="bfloat16")
    described, values = read(source, version)  # while it is offloaded
    with manager.phase("weight_sync"):
        wanted = [
            (name, tensor.clone())
            for bucket in actor.weights(dtype="bfloat16")
            for name, tensor in bucket
        ]
        found = list(values())  # kept together, as vLLM keeps them until it has packed a buffer
    assert [name for name, _ in found] == [name for name, _ in wanted]
    assert_same(dict(found), dict(wanted))
    assert [(each.name, each.dtype, each.shape) for each in described] == [
        (n, t.dtype, tuple(t.shape)) for n, t in found
    ]
    with torch.no_grad(), manager.phase("train"):
        sgd.param_groups[0]["params"][0].fill_(3)
    with manager.phase("weight_sync"):
        assert set(dict(values())["0.weight"].flatten().tolist()) == {3.0}
        next(values())  # given up half-way
    if version == "0.33":
        assert source.implements_iter_full()
        assert source.owned_names(1) == [each.name for each in described]
    else:
        assert source.held_names() is None
    assert isinstance(source, VllmWeightSource)
    assert_nothing_resident(manager)


class Stream:
    """Notes what is made on it, and which streams have waited for another."""

    current: Stream

    def __init__(self) -> None:
        self.waited_for: list[Stream] = []

    def __enter__(self) -> None:
        self._before, Stream.current = Stream.current, self

    def __exit__(self, *_: object) -> None:
        Stream.current = self._before

    def wait_stream(self, other: Stream) -> None:
        self.waited_for.append(other)


def test_weights_are_made_on_one_stream_and_used_on_those_that_ask(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As vLLM asks that packs every other buffer on another stream."""
    stand_in(monkeypatch, Source033)
    manager = make_manager()
    model = net()
    actor = manager.register("actor", model, role="actor")
    made: list[Stream] = []
    used: list[Stream] = []

    def convert(_: str, tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.is_meta:
            made.append(Stream.current)
        return tensor

    source: Any = VllmWeightSource(actor, names="module", convert=convert)
    Stream.current, second = first, _ = Stream(), Stream()
    accelerator = {
        "is_available": lambda: True,
        "synchronize": lambda: None,
        "current_stream": lambda: Stream.current,
    }
    with manager.phase("weight_sync"):
        for name, given in accelerator.items():
            monkeypatch.setattr(torch.accelerator, name, given)
        monkeypatch.setattr(
            torch.Tensor, "record_stream", lambda tensor, stream: used.append(stream)
        )
        values = source.iter_full()
        for stream in (first, second, first, second):
            with stream:
                next(values)
        values.close()
        monkeypatch.undo()
    assert used == [first, second, first, second]
    assert set(made) == {first}
    assert second.waited_for == [first, first]


def test_what_cannot_be_read_says_so(version: str) -> None:
    manager = make_manager()
    model = net()
    actor = manager.register("actor", model, role="actor")
    with pytest.raises(PhaseError, match=r"CPU_OFFLOADED in phase 'idle'.*weight_sync"):
        read(VllmWeightSource(actor, names="module"), version)[1]()
    with pytest.raises(
        ValueError, match="names='checkpoint' is for models of transformers, not for Sequential"
    ):
        read(VllmWeightSource(actor), version)
    late = manager.register("late", Lazy(net), role="actor")
    with pytest.raises(PhaseError, match="'late' publishes no weights: it is not built yet"):
        read(VllmWeightSource(late, names="module"), version)


def test_without_vllm_it_says_what_is_missing() -> None:
    if importlib.util.find_spec("vllm"):
        pytest.skip("vLLM is installed")
    with pytest.raises(ImportError, match=r"needs vLLM 0.26 or later"):
        VllmWeightSource(None)  # type: ignore[arg-type]


@pytest.mark.parametrize("packed", [False, True], ids=["one_by_one", "packed"])
def test_vllms_own_engines_carry_it(
    packed: bool, manager: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sender and the receiver of vLLM's NCCL transfer, from vLLM's files. Packed: buffers of
    300 bytes, over several weights."""
    folder = os.environ.get("VLLM_SOURCE")
    if not folder:
        pytest.skip("VLLM_SOURCE names no unpacked wheel of vLLM")
    own = of_vllm(monkeypatch, Path(folder))
    model = net()
    wanted = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    actor = manager.register("actor", model, role="actor")
    source: Any = VllmWeightSource(actor, names="module")
    assert isinstance(source, own.transfer.WeightSource)
    wire = Wire()
    worker = Worker(own, wire.end(is_sender=False), packed=packed)
    engine = own.engine.NCCLTrainerWeightTransferEngine(
        client=worker, source=source, packed=packed, packed_buffer_size_bytes=300
    )
    engine.model_update_group = wire.end(is_sender=True)
    for _ in range(2):  # the second time vLLM sends no description
        with manager.phase("weight_sync"):
            engine.send_weights()
        assert worker.got.keys() == wanted.keys()
        assert_same(worker.got, {name: wanted[name] for name in worker.got})
        assert worker.calls == ["start", "update", "finish"]
        worker.got.clear()
        worker.calls.clear()
    others = own.engine.NCCLTrainerWeightTransferEngine(
        client=worker, source=source, is_sender=False
    )
    with manager.phase("weight_sync"):
        others.send_weights()  # gathers, and sends nothing
    assert worker.calls == []
    assert_nothing_resident(manager)
