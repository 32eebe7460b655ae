"""How long does SGLang take to release its memory and to resume, with torch_memory_saver alone and
with placement's plug-in, by turns?

Two engines of the same model (Qwen2.5-7B's shape, 15.2 GB in bf16, dummy weights) are on one GPU,
each with `enable_weights_cpu_backup`; one at a time takes its turn. Before a release "written", the
weights of all MLPs are new; before one "unchanged", nothing is. After each turn the tokens are
compared with those before it. Needs a GPU, SGLang and torch_memory_saver, and placement installed,
so that SGLang finds the plug-in.
"""

from __future__ import annotations

import multiprocessing
import os
import statistics
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any

import torch

from bench import _rig, link
from bench._results import Results
from bench._rig import Rig
from bench.engine_mirror import family_bytes
from bench.engine_sleep import SHAPE, model_folder

_SYSTEMS = ("torch_memory_saver", "placement")
_SCENARIOS = ("first", "unchanged", "unchanged", "written", "written")
_START_SECONDS, _TURN_SECONDS = 240, 90
_ASLEEP_SECONDS = 1.0  # see bench.engine_sleep


class _Engine:
    """One SGLang, in the process that has made this."""

    def __init__(self, system: str, scale: int) -> None:
        if system != "placement":
            os.environ["SGLANG_PLUGINS"] = "none"  # no plug-in has this name
        import sglang

        self._scale = scale
        options: dict[str, Any] = {"skip_tokenizer_init": True, "load_format": "dummy"}
        options |= {"enable_memory_saver": True, "enable_weights_cpu_backup": True}
        options |= {"mem_fraction_static": 0.3, "max_total_tokens": 1 << 17}
        options |= {"context_length": 1024, "max_running_requests": 16, "dtype": "bfloat16"}
        options |= {"attention_backend": "triton", "sampling_backend": "pytorch"}
        options |= {"grammar_backend": "none"}
        # a graph for the four prompts; one of the prefill would be traced piece by piece
        options |= {"cuda_graph_bs_decode": [4], "cuda_graph_backend_prefill": "disabled"}
        options |= {"port": 30000 + 1000 * _SYSTEMS.index(system), "log_level": "warning"}
        self._engine = sglang.Engine(model_path=model_folder(scale), **options)
        self._generate()

    def mover(self) -> str:
        """What moves the weights, as the engine says it."""
        state = (self._engine.get_server_info().get("internal_states") or [{}])[0]
        return "placement" if "placement" in state else "torch_memory_saver"

    def turn(self, scenario: str) -> dict[str, float]:
        """Release and resume everything. Returns seconds, bytes, and whether all was equal."""
        if scenario == "written":
            self._write()
        before = self._generate()
        while not getattr(self._engine.flush_cache(), "success", True):
            time.sleep(0.05)
        host_bytes, free_bytes = family_bytes(), torch.cuda.mem_get_info()[0]
        seconds = {}
        began = time.monotonic()
        self._engine.release_memory_occupation(tags=["kv_cache", "weights"])
        seconds["release"] = time.monotonic() - began
        freed_bytes = torch.cuda.mem_get_info()[0] - free_bytes
        time.sleep(_ASLEEP_SECONDS)
        host_bytes = family_bytes() - host_bytes
        for tag in ("weights", "kv_cache"):
            began = time.monotonic()
            self._engine.resume_memory_occupation(tags=[tag])
            seconds[f"resume {tag}"] = time.monotonic() - began
        equal = before == self._generate()
        return seconds | {"freed": freed_bytes, "host, growth": host_bytes, "equal": equal}

    def _write(self) -> None:
        hidden, inner = SHAPE["hidden"] // self._scale, SHAPE["intermediate"] // self._scale
        shapes = {"gate_proj": (inner, hidden), "up_proj": (inner, hidden)}
        shapes["down_proj"] = (hidden, inner)
        for layer in range(SHAPE["layers"]):
            bucket = []
            for name, shape in shapes.items():
                weight = torch.empty(shape, dtype=torch.bfloat16, device="cuda").normal_(0, 0.02)
                bucket.append((f"model.layers.{layer}.mlp.{name}.weight", weight))
            self._engine.update_weights_from_tensor(bucket, flush_cache=False)
        torch.cuda.empty_cache()

    def _generate(self) -> list[list[int]]:
        prompts = [[*range(3 + n, 60 + 7 * n)] for n in range(4)]
        sampling = {"temperature": 0.0, "max_new_tokens": 16, "ignore_eos": True}
        answers = self._engine.generate(input_ids=prompts, sampling_params=sampling)
        return [[*answer["output_ids"]] for answer in answers]

    def shutdown(self) -> None:
        self._engine.shutdown()


def _serve(connection: Connection, system: str, scale: int) -> None:
    """Make the engine, and call its methods until `shutdown`."""
    torch.cuda.init()
    engine = _Engine(system, scale)
    connection.send("started")
    while True:
        method, arguments = connection.recv()
        connection.send(getattr(engine, method)(*arguments))
        if method == "shutdown":
            return


class _Process:
    """The process of one engine."""

    def __init__(self, system: str, scale: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        context.Process(target=_serve, args=(theirs, system, scale)).start()
        theirs.close()

    def answer(self, seconds: float) -> Any:
        if not self._connection.poll(seconds):
            raise TimeoutError(f"the engine's process has not answered in {seconds:.0f} s")
        return self._connection.recv()

    def call(self, method: str, *arguments: Any) -> Any:
        self._connection.send((method, arguments))
        return self.answer(_TURN_SECONDS)


def _measure(rig: Rig, results: Results) -> None:
    raw = link.measure(rig, results)
    rig.empty_cache()
    scale = rig.pick(8, 2, 1)
    engines = {system: _Process(system, scale) for system in _SYSTEMS}
    for system, engine in engines.items():
        engine.answer(_START_SECONDS)
        mover = engine.call("mover")
        if mover != system:
            raise SystemExit(f"{mover} moves the weights of the engine with {system}")
    turns: dict[tuple[str, str], list[dict[str, float]]] = {}
    for scenario in _SCENARIOS:
        for system, engine in engines.items():
            turn = engine.call("turn", scenario)
            print(scenario, system, turn, flush=True)
            turns.setdefault((scenario, system), []).append(turn)
    units = {"freed": "bytes", "host, growth": "bytes", "equal": ""}
    for (scenario, system), of_both in turns.items():
        for metric in of_both[0]:
            choose = min if metric == "equal" else statistics.median
            value = choose([turn[metric] for turn in of_both])
            results.add(scenario, system, metric, value, units.get(metric, "s"))
    results.add("link", "link", "to the host", raw.to_host, "GB/s")
    results.add("link", "link", "to the device", raw.to_device, "GB/s")
    results.write()
    for engine in engines.values():
        engine.call("shutdown")


def main(arguments: Sequence[str] | None = None) -> None:
    _rig.run("sglang_sleep", __doc__, _measure, arguments)


if __name__ == "__main__":
    main()
