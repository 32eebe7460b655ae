"""vLLM's weight transfer as the trainer sees it: stand-ins of its two protocols, and its own files where their folder is named.

`VLLM_SOURCE` names an unpacked wheel of vLLM 0.33. Its transfer engines then run on the CPU: what they import beside torch is
replaced by the few names below, and a queue takes the place of NCCL.
"""

from __future__ import annotations

import base64
import contextlib
import importlib
import logging
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


def module(patch: pytest.MonkeyPatch, name: str, *, path: list[str] | None = None, **members: Any) -> None:
    made = ModuleType(name)
    made.__dict__.update(members)
    if path is not None:
        made.__path__ = path
    patch.setitem(sys.modules, name, made)


def of_vllm(patch: pytest.MonkeyPatch, folder: Path) -> Any:
    """vLLM's own package `vllm.distributed.weight_transfer`, from its files."""
    for name in ("vllm", "vllm.config", "vllm.distributed", "vllm.utils", "vllm.distributed.device_communicators"):
        module(patch, name, path=[str(folder.joinpath(*name.split(".")))])
    for name in ("vllm.model_executor", "vllm.model_executor.model_loader"):
        module(patch, name, path=[])
    module(patch, "vllm.config.parallel", ParallelConfig=object)
    module(patch, "vllm.config.weight_transfer", WeightTransferConfig=object)
    module(patch, "vllm.logger", init_logger=logging.getLogger)
    module(patch, "vllm.utils.nccl", unpinned_nccl_env=contextlib.nullcontext)
    module(patch, "vllm.distributed.device_communicators.pynccl_wrapper", NCCL_UNIQUE_ID_BYTES=128)
    module(patch, "vllm.model_executor.model_loader.mtp_validation", disable_mtp_completeness_check=contextlib.nullcontext)
    module(patch, "pybase64", **vars(base64))
    transfer = importlib.import_module("vllm.distributed.weight_transfer")
    engine = importlib.import_module("vllm.distributed.weight_transfer.nccl_engine")
    packing = importlib.import_module("vllm.distributed.weight_transfer.packed_tensor")
    stream = SimpleNamespace(synchronize=lambda: None, wait_event=lambda _: None)
    patch.setattr(packing, "_get_streams", lambda _, count: (stream,) * count)
    for name, given in (("current_device_index", lambda: 0), ("current_stream", lambda: stream), ("synchronize", lambda: None)):
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
    """vLLM's receiving engine behind the four calls of its `VLLMWeightSyncClient`, and the model that it fills."""

    def __init__(self, own: Any, group: Any, *, packed: bool) -> None:
        self.got: dict[str, torch.Tensor] = {}
        self.calls: list[str] = []
        self._engine = own.engine.NCCLWeightTransferEngine(
            None,
            SimpleNamespace(parallel_config=None, model_config=None),
            torch.device("cpu"),
            self,
        )
        self._engine.model_update_group, self._engine.packed, self._engine.packed_buffer_size_bytes = group, packed, 300

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
