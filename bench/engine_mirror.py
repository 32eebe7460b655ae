"""Does a snapshot say how much host memory a process takes, with an engine in it that keeps its
weights on the host?

The kernel's figures are taken at three places of a step, as growth since before anything was
registered: `process` is what the kernel counts for this process and those that it has started
(RssAnon and RssShmem of /proc/PID/status), `machine` is by how much MemAvailable has fallen.
Page-locked memory of a driver need not be in the first; other programs are in the second. Needs a
GPU, and torch_memory_saver, vLLM or SGLang, each in a run of its own: `python -m
bench.engine_mirror --system vllm`.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

import placement
from bench import _peers, _rig
from bench._results import Results
from bench._rig import Rig, used_host_bytes
from placement.engines import TaggedEngine
from placement.engines.sglang import SglangInProcess
from placement.engines.vllm import VllmInProcess

_SCENARIO = "host memory of a step"
_STEPS = 3


class _Own(TaggedEngine):
    """What the engines here share: no requests, and weights that are one tensor of ones."""

    weights: torch.Tensor

    def drain(self) -> None:
        """Nothing is in flight."""

    def admit(self) -> None:
        """Nobody asks for anything."""

    def receive(self, bucket: Sequence[tuple[str, torch.Tensor]]) -> None:
        """Nothing is written, so that the weights can be compared."""

    def is_whole(self) -> bool:
        return bool((self.weights == 1).all())


class Copied(_Own):
    """Copies its weights to memory of torch's, as long as they are away. It runs without a GPU,
    too."""

    mirror_stays = False

    def __init__(self, rig: Rig, nbytes: int) -> None:
        super().__init__(tag_bytes={"weights": nbytes, "kv_cache": 0}, verify="answer")
        self._rig = rig
        self.weights = torch.ones(nbytes, dtype=torch.uint8, device=rig.torch_device)

    def offload(self, tags: Collection[str]) -> None:
        if "weights" in tags:
            self.weights = self.weights.cpu() if self._rig.is_cuda else self.weights.clone()
            self._rig.empty_cache()

    def load(self, tags: Collection[str]) -> None:
        if "weights" in tags:
            self.weights = self.weights.to(self._rig.torch_device)


class Saved(_Own):
    """An engine of torch_memory_saver's regions, as SGLang is with `enable_weights_cpu_backup`."""

    def __init__(self, rig: Rig, nbytes: int, *, retain: bool) -> None:
        super().__init__()
        self._saver, self.mirror_stays = _peers.torch_memory_saver(), retain
        self._saver.retain_cpu_backup = retain
        with self._saver.region(tag="weights", enable_cpu_backup=True):
            self.weights = torch.ones(nbytes, dtype=torch.uint8, device=rig.torch_device)
        with self._saver.region(tag="kv_cache"):
            self._kv_cache = torch.ones(nbytes, dtype=torch.uint8, device=rig.torch_device)

    def offload(self, tags: Collection[str]) -> None:
        for tag in tags:
            self._saver.pause(tag)

    def load(self, tags: Collection[str]) -> None:
        for tag in tags:
            self._saver.resume(tag)


def _qwen2(nbytes: int) -> str:
    """A folder with the configuration of a Qwen2 of about `nbytes`, and no weights."""
    width, layer_bytes = 2048, 2 * 2048 * (2 * 2048 + 2 * 512 + 3 * 8192)
    config: dict[str, Any] = {
        "model_type": "qwen2",
        "architectures": ["Qwen2ForCausalLM"],
        "dtype": "bfloat16",
        "vocab_size": 1024,
    }
    config |= {
        "hidden_size": width,
        "intermediate_size": 8192,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
    }
    config["num_hidden_layers"] = max(1, nbytes // layer_bytes)
    folder = tempfile.mkdtemp()
    Path(folder, "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


def _vllm(_: Rig, nbytes: int) -> TaggedEngine:
    """vLLM with its core in this process."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    from vllm import LLM

    options: dict[str, Any] = {
        "skip_tokenizer_init": True,
        "load_format": "dummy",
        "enforce_eager": True,
        "max_model_len": 1024,
    }
    options |= {
        "gpu_memory_utilization": 0.3,
        "kv_cache_memory_bytes": 1 << 30,
        "enable_sleep_mode": True,
        "dtype": "bfloat16",
    }
    return VllmInProcess(LLM(_qwen2(nbytes), **options), send=lambda _: None)


def _sglang(_: Rig, nbytes: int) -> TaggedEngine:
    """SGLang, whose scheduler has the weights in a process of its own. No kernels that are compiled
    for minutes."""
    import sglang

    options: dict[str, Any] = {
        "skip_tokenizer_init": True,
        "load_format": "dummy",
        "disable_cuda_graph": True,
        "context_length": 1024,
    }
    options |= {
        "mem_fraction_static": 0.3,
        "max_total_tokens": 4096,
        "max_running_requests": 16,
        "dtype": "bfloat16",
    }
    options |= {
        "attention_backend": "triton",
        "sampling_backend": "pytorch",
        "grammar_backend": "none",
    }
    options |= {"enable_memory_saver": True, "enable_weights_cpu_backup": True}
    return SglangInProcess(sglang.Engine(model_path=_qwen2(nbytes), **options), send=lambda _: None)


_SYSTEMS: dict[str, Callable[[Rig, int], TaggedEngine]] = {
    "copied": Copied,
    "torch_memory_saver": lambda rig, nbytes: Saved(rig, nbytes, retain=False),
    "torch_memory_saver(retain)": lambda rig, nbytes: Saved(rig, nbytes, retain=True),
    "vllm": _vllm,
    "sglang": _sglang,
}


def _kernel() -> dict[str, int]:
    return {
        "process": family_bytes(),
        "machine": used_host_bytes(),
    }


def family_bytes() -> int:
    """The memory of this process and of all that it has started, as the kernel counts it."""
    return sum(_resident(Path(f"/proc/{process}")) for process in _family(os.getpid()))


def _family(process: int) -> Iterator[int]:
    """A process and all that it has started, directly or not."""
    yield process
    for thread in Path(f"/proc/{process}/task").iterdir():
        for child in (thread / "children").read_text(encoding="utf-8").split():
            yield from _family(int(child))


def _resident(process: Path) -> int:
    status = dict(
        line.split(":", 1) for line in (process / "status").read_text(encoding="utf-8").splitlines()
    )
    return sum(int(status[name].split()[0]) << 10 for name in ("RssAnon", "RssShmem"))


def _measure(rig: Rig, results: Results, system: str) -> None:
    nbytes = rig.pick(8 << 20, 2 << 30, 8 << 30)
    engine = _SYSTEMS[system](rig, nbytes)
    actor = nn.Linear(
        1024, nbytes // 4096, bias=False, device=rig.torch_device, dtype=torch.bfloat16
    )
    rig.sync()
    before = _kernel()
    manager = placement.Manager(
        device=rig.placement_device(), budget_bytes=None if rig.is_cuda else 1 << 29
    )
    handle = manager.register("actor", actor, role="actor")
    manager.register("rollout", engine, role="rollout")

    def look(place: str, *, is_last: bool) -> None:
        rig.sync()
        snapshot, now = manager.snapshot(), _kernel()
        told = sum(each.host_bytes for each in snapshot.handles)
        if is_last:
            results.add(_SCENARIO, system, f"{place}, snapshot", told, "bytes")
            results.add(
                _SCENARIO,
                system,
                f"{place}, snapshot, the mirror",
                sum(each.mirror_bytes for each in snapshot.handles),
                "bytes",
            )
            for name, value in now.items():
                results.add(_SCENARIO, system, f"{place}, {name}", value - before[name], "bytes")
                results.add(
                    _SCENARIO,
                    system,
                    f"{place}, snapshot off by, {name}",
                    100 * abs(told / max(1, value - before[name]) - 1),
                    "%",
                )

    for step in range(_STEPS):
        with manager.phase("weight_sync") as phase:
            for bucket in handle.weights(bucket_bytes=nbytes):
                engine.update_weights(bucket)
            look("weights back", is_last=step == _STEPS - 1)
            phase.switch("rollout")
            look("all back", is_last=step == _STEPS - 1)
        look("asleep", is_last=step == _STEPS - 1)
    if isinstance(engine, _Own):
        with manager.phase("rollout"):
            results.add(_SCENARIO, system, "bit-exact", engine.is_whole(), "")
    manager.close()


def main(arguments: Sequence[str] | None = None) -> None:
    own = argparse.ArgumentParser(add_help=False)
    own.add_argument("--system", choices=list(_SYSTEMS), default="copied")
    system = own.parse_known_args(arguments)[0].system

    def measure(rig: Rig, results: Results) -> None:
        with results.system(_SCENARIO, system):
            _measure(rig, results, system)

    _rig.run(
        f"engine_mirror_{system.replace('(', '_').rstrip(')')}", __doc__, measure, arguments, [own]
    )


if __name__ == "__main__":
    main()
