"""The names of SGLang 0.5.12 that verl's rollout imports, so that verl's own classes can be
imported where SGLang is not installed.

Only what verl calls in these tests does something: requests as plain data, and the sending of
weights over verl's HTTP client.
"""

from __future__ import annotations

import io
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist


@dataclass
class ServerArgs:
    model_path: str
    host: str
    port: int
    trust_remote_code: bool = False
    node_rank: int = 0


class EngineBase: ...


class ServerStatus(Enum):
    Up = "Up"


@dataclass
class MemoryRequest:
    """A `ReleaseMemoryOccupationReqInput` or `ResumeMemoryOccupationReqInput`."""

    tags: list[str]


@dataclass
class WeightsRequest:
    """An `UpdateWeightsFromTensorReqInput`."""

    serialized_named_tensors: list[bytes]
    load_format: str | None = None
    flush_cache: bool = True


async def update_weights(
    *,
    engine: Any,
    params_batch: list[tuple[str, torch.Tensor]],
    device_mesh_key: str,
    device_mesh: Any,
) -> None:
    """Gather each rank's part of a bucket on the rank that leads, which sends one request."""
    mesh = device_mesh[device_mesh_key]
    packed = io.BytesIO()
    torch.save([(name, value.detach()) for name, value in params_batch], packed)
    leads = mesh.get_local_rank() == 0
    gathered: list[Any] | None = [None] * mesh.size() if leads else None
    dist.gather_object(
        packed.getvalue(), gathered, dst=mesh.mesh.tolist()[0], group=mesh.get_group()
    )
    if gathered is not None:
        await engine.update_weights_from_tensor(WeightsRequest(gathered))


_UNUSED = object
_CONTENTS: dict[str, dict[str, Any]] = {
    "sglang": {"__version__": "0.5.12"},
    "sglang.srt": {},
    "sglang.srt.entrypoints": {},
    "sglang.srt.entrypoints.engine": {},
    "sglang.srt.entrypoints.EngineBase": {"EngineBase": EngineBase},
    "sglang.srt.entrypoints.http_server": {
        "ServerArgs": ServerArgs,
        **dict.fromkeys(("launch_server", "_GlobalState", "app", "set_global_state"), _UNUSED),
    },
    "sglang.srt.server_args": {"ServerArgs": ServerArgs},
    "sglang.srt.utils": dict.fromkeys(
        (
            "MultiprocessingSerializer",
            "assert_pkg_version",
            "is_cuda",
            "kill_process_tree",
            "set_prometheus_multiproc_dir",
            "set_ulimit",
        ),
        _UNUSED,
    ),
    "sglang.srt.weight_sync": {},
    "sglang.srt.weight_sync.utils": {
        "update_weights": update_weights,
        "_preprocess_tensor_for_update_weights": _UNUSED,
    },
    "sglang.srt.managers": {},
    "sglang.srt.managers.io_struct": {
        "ReleaseMemoryOccupationReqInput": MemoryRequest,
        "ResumeMemoryOccupationReqInput": MemoryRequest,
        "UpdateWeightsFromTensorReqInput": WeightsRequest,
        **dict.fromkeys(
            ("ContinueGenerationReqInput", "GenerateReqInput", "PauseGenerationReqInput"), _UNUSED
        ),
    },
    "sglang.srt.managers.tokenizer_manager": {"ServerStatus": ServerStatus},
}


@contextmanager
def importable() -> Iterator[None]:
    """Let `import sglang` find these names meanwhile."""
    made: dict[str, ModuleType] = {}
    for path, contents in _CONTENTS.items():
        made[path] = module = ModuleType(path)
        module.__spec__ = ModuleSpec(path, None, is_package=True)
        module.__path__ = []
        vars(module).update(contents)
        above, _, name = path.rpartition(".")
        if above:
            setattr(made[above], name, module)
    sys.modules.update(made)
    try:
        yield
    finally:
        for path in made:
            del sys.modules[path]
