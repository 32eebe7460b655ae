"""How long does vLLM's sleep mode take, with its own backend and with placement's, by turns in one
process?

Systems: `allocator` is vLLM's allocator alone, with weights of Qwen2.5-7B's shape (15.2 GB in bf16)
and a KV cache of 40 GiB in it; `vllm` is a whole `LLM` of that shape with dummy weights and CUDA
graphs. Both need a GPU and vLLM 0.25 or later; of vLLM itself the first needs `device_allocator`
and the C extension only: `python -m bench.engine_sleep --system allocator`.

A first sleep takes the host memory. Before each later one all weights are written, or none is. A
wake comes a second after its sleep. After it the weights are compared (`allocator`), or the tokens
(`vllm`).
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from bench import _rig, link
from bench._results import Results
from bench._rig import Rig

_SHAPE = {"hidden": 3584, "intermediate": 18944, "layers": 28, "vocabulary": 152064}
_ROUNDS = 4
# The driver clears memory that was freed, with the engines that copy: right after a sleep of 62 GB
# a copy to the device takes 0.43 s instead of 0.29 (15.3 GB, H200). A real engine sleeps longer.
_ASLEEP_SECONDS = 1.0


class _Allocator:
    """vLLM's allocator alone, and a captured graph that reads each weight."""

    def __init__(self, scale: int) -> None:
        from vllm.device_allocator import cumem

        from placement.engines.vllm_backend import PlacementBackend

        self.ours = PlacementBackend()

        hidden, inner = _SHAPE["hidden"] // scale, _SHAPE["intermediate"] // scale
        shapes: list[tuple[int, ...]] = [(_SHAPE["vocabulary"] // scale, hidden)] * 2
        for _ in range(_SHAPE["layers"]):
            shapes += [(hidden + 1024, hidden), (hidden, hidden), (2 * inner, hidden)]
            shapes += [(hidden, inner), (hidden,)]
        self.allocator = cumem.CuMemAllocator.get_instance()
        self._shapes = shapes
        with self.allocator.use_memory_pool(tag="weights"):
            self.weights = [torch.empty(s, dtype=torch.bfloat16, device="cuda") for s in shapes]
        with self.allocator.use_memory_pool(tag="kv_cache"):
            self._kv_cache = [
                torch.zeros((2 << 30) // scale**2, dtype=torch.uint8, device="cuda")
                for _ in range(20)
            ]
        _fill(self.weights)
        self._sums = torch.empty(len(shapes), device="cuda")
        self._graph = torch.cuda.CUDAGraph()
        self.answer()  # compiled and warm
        with torch.cuda.graph(self._graph):
            self._sum()

    def use(self, backend: Any) -> None:
        self._backend = backend

    def sleep(self, level: int) -> None:
        self._backend.suspend(level)

    def wake(self, tags: list[str] | None = None) -> None:
        self._backend.resume(tags)

    def _sum(self) -> None:
        for place, weight in enumerate(self.weights):
            torch.sum(weight.view(-1), 0, dtype=torch.float32, out=self._sums[place])

    def answer(self) -> Any:
        self._sum()
        eager = self._sums.tolist()
        bits = [weight.view(torch.int16).sum(dtype=torch.int64).item() for weight in self.weights]
        return bits, eager

    def answer_of_graph(self) -> Any:
        self._sums.zero_()
        self._graph.replay()
        return self._sums.tolist()


class _Llm:
    """A whole vLLM, its core in this process, with CUDA graphs."""

    def __init__(self, scale: int) -> None:
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        from vllm import LLM

        from placement.engines import vllm_plugin

        vllm_plugin.register()  # as vLLM does where placement is installed

        config: dict[str, Any] = {
            "model_type": "qwen2",
            "architectures": ["Qwen2ForCausalLM"],
            "dtype": "bfloat16",
            "vocab_size": _SHAPE["vocabulary"] // scale,
            "hidden_size": _SHAPE["hidden"] // scale,
            "intermediate_size": _SHAPE["intermediate"] // scale,
            "num_hidden_layers": _SHAPE["layers"],
            "num_attention_heads": 28,
            "num_key_value_heads": 4,
            "tie_word_embeddings": False,
        }
        folder = Path(tempfile.mkdtemp())
        (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
        options: dict[str, Any] = {"skip_tokenizer_init": True, "load_format": "dummy"}
        options |= {"max_model_len": 1024, "max_num_seqs": 16, "enable_sleep_mode": True}
        options |= {"gpu_memory_utilization": 0.5, "dtype": "bfloat16"}
        # graphs without torch.compile, which takes minutes
        options["compilation_config"] = {
            "mode": 0,
            "cudagraph_mode": "FULL_DECODE_ONLY",
            "cudagraph_capture_sizes": [1, 2, 4],
        }
        self.llm = LLM(str(folder), **options)
        self._worker = self.llm.llm_engine.model_executor.driver_worker.worker
        self.allocator = importlib.import_module(
            "vllm.device_allocator.cumem"
        ).CuMemAllocator.get_instance()
        self.ours = self._worker._sleep_mode_backend  # made by the plug-in
        self.weights = [*self._worker.model_runner.model.parameters()]
        _fill(self.weights)

    def use(self, backend: Any) -> None:
        self._worker._sleep_mode_backend = backend

    def sleep(self, level: int) -> None:
        self.llm.sleep(level=level)

    def wake(self, tags: list[str] | None = None) -> None:
        self.llm.wake_up(tags=tags)

    def answer(self) -> Any:
        from vllm import SamplingParams

        prompts = [{"prompt_token_ids": [*range(3 + n, 60 + 7 * n)]} for n in range(4)]
        wanted = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, detokenize=False)
        self.llm.reset_prefix_cache()
        found = self.llm.generate(prompts, wanted, use_tqdm=False)
        return [list(each.outputs[0].token_ids) for each in found]

    def answer_of_graph(self) -> Any:
        return None  # its tokens come from its graphs


def _fill(weights: Sequence[torch.Tensor]) -> None:
    """Give weights the same values each time; those of norms are about 1."""
    with torch.no_grad():
        for seed, weight in enumerate(weights):
            generator = torch.Generator(weight.device).manual_seed(seed)
            mean = 1.0 if weight.dim() == 1 else 0.0
            weight.data.normal_(mean, 0.02, generator=generator)


_SYSTEMS: dict[str, Callable[[int], Any]] = {"allocator": _Allocator, "vllm": _Llm}


class _Turns:
    """Both backends move the memory of one subject, by turns."""

    def __init__(self, rig: Rig, results: Results, system: str) -> None:
        from vllm.device_allocator.sleep_mode_backend import CuMemBackend

        self._rig, self._results = rig, results
        self._subject = _SYSTEMS[system](rig.pick(8, 2, 1))
        self._backends = {"cumem": CuMemBackend(), "placement": self._subject.ours}
        blocks = [
            each.handle[1]
            for each in self._subject.allocator.pointer_to_data.values()
            if each.tag == "weights"
        ]
        self._nbytes = sum(blocks)
        results.add("weights", system, "bytes", self._nbytes, "bytes")
        results.add("weights", system, "blocks", len(blocks), "blocks")

    def _write(self, *places: int) -> None:
        """Change every value of these weights, or of all."""
        weights = self._subject.weights
        with torch.no_grad():
            for place in places or range(len(weights)):
                weights[place].data.view(torch.int16).add_(1)

    def _turn(self, name: str, level: int = 1, tags: Sequence[str] = ()) -> dict[str, float]:
        """Sleep and wake with one backend. Returns seconds, bytes, and whether all was equal."""
        rig, subject, backend = self._rig, self._subject, self._backends[name]
        subject.use(backend)
        if level == 2:
            _fill(subject.weights)
        before = subject.answer(), subject.answer_of_graph()
        free = rig.free_bytes()
        found = {"sleep": rig.seconds(lambda: subject.sleep(level))}
        found["copied"] = getattr(backend, "copied_bytes", self._nbytes if level == 1 else 0)
        found["freed"] = rig.free_bytes() - free
        time.sleep(_ASLEEP_SECONDS)
        for tag in tags:
            found[f"wake {tag}"] = rig.seconds(lambda tag=tag: subject.wake([tag]))
        if not tags:
            found["wake"] = rig.seconds(subject.wake)
        if level == 2:
            _fill(subject.weights)
        found["equal"] = before == (subject.answer(), subject.answer_of_graph())
        return found

    def _add(self, scenario: str, name: str, turns: Sequence[dict[str, float]]) -> None:
        units = {"copied": "bytes", "freed": "bytes", "equal": ""}
        for what in turns[0]:
            choose = min if what == "equal" else statistics.median
            value = choose([each[what] for each in turns])
            self._results.add(scenario, name, what, value, units.get(what, "s"))

    def first(self) -> None:
        for name, backend in self._backends.items():
            host = _process_bytes()
            if name == "placement":
                seconds = self._rig.seconds(backend.reserve)
                self._results.add("first sleep", name, "reserve", seconds, "s")
            self._add("first sleep", name, [self._turn(name)])
            taken = _process_bytes() - host  # it stays: torch keeps what cumem took
            self._results.add("first sleep", name, "host of weights", taken / self._nbytes, "times")
        self._results.write()

    def later(self, raw: link.Link) -> None:
        scenarios: dict[str, dict[str, Any]] = {
            "written": {},
            "unchanged": {},
            "by tags": {"tags": ("weights", "kv_cache")},
            "level 2": {"level": 2},
        }
        for scenario, options in scenarios.items():
            turns: dict[str, list[dict[str, float]]] = {name: [] for name in self._backends}
            for _ in range(_ROUNDS):
                for name in self._backends:
                    if scenario == "written":
                        self._write()
                    turns[name].append(self._turn(name, **options))
            for name, found in turns.items():
                found.pop(0)  # what was written before this backend's own last sleep
                self._add(scenario, name, found)
                if scenario == "written":
                    self._rates(name, found, raw)
            self._results.write()

    def _rates(self, name: str, turns: Sequence[dict[str, float]], raw: link.Link) -> None:
        for what, rate in (("sleep", raw.to_host), ("wake", raw.to_device)):
            seconds = statistics.median(each[what] for each in turns)
            self._results.rate("written", name, what, self._nbytes, seconds, rate)

    def cycles(self) -> None:
        """Many cycles, in each of which one weight is written."""
        subject = self._subject
        subject.use(self._backends["placement"])
        device, host = [], []
        for cycle in range(self._rig.pick(3, 20, 200)):
            self._write(cycle % len(subject.weights))
            subject.sleep(1)
            subject.wake()
            self._rig.sync()
            device.append(self._rig.free_bytes())
            host.append(_process_bytes())
        for what, used in (("device", [-free for free in device]), ("host", host)):
            growth, slope = used[-1] - used[0], _slope(used)
            self._results.add("cycles", "placement", f"{what}, growth", growth, "bytes")
            self._results.add("cycles", "placement", f"{what}, slope", slope, "bytes a cycle")


def _process_bytes() -> int:
    """Memory of this process, as the kernel counts it."""
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    return int(dict(line.split(":", 1) for line in status.splitlines())["VmRSS"].split()[0]) << 10


def _slope(values: Sequence[int]) -> float:
    return statistics.linear_regression(range(len(values)), values).slope


def main(arguments: Sequence[str] | None = None) -> None:
    own = argparse.ArgumentParser(add_help=False)
    own.add_argument("--system", choices=list(_SYSTEMS), default="allocator")
    system = own.parse_known_args(arguments)[0].system

    def measure(rig: Rig, results: Results) -> None:
        with results.system("sleep", system):
            raw = link.measure(rig, results)
            turns = _Turns(rig, results, system)
            turns.first()
            turns.later(raw)
            turns.cycles()

    _rig.run(f"engine_sleep_{system}", __doc__, measure, arguments, [own])


if __name__ == "__main__":
    main()
