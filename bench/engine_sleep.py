"""How long does vLLM's sleep mode take, with its own backend and with placement's, by turns in one
process?

Systems: `allocator` is vLLM's allocator alone, with weights of Qwen2.5-7B's shape (15.2 GB in bf16)
and a KV cache of 40 GiB in it; `vllm` is a whole `LLM` of that shape with dummy weights and CUDA
graphs, with `--ranks 2` on two GPUs. Both need a GPU and vLLM 0.25 or later; of vLLM itself the
first needs `device_allocator` and the C extension only:
`python -m bench.engine_sleep --system allocator`. Bytes and rates are one rank's; the host memory
is that of all ranks' processes.

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

SHAPE = {"hidden": 3584, "intermediate": 18944, "layers": 28, "vocabulary": 152064}
_ROUNDS = 9  # sleeps scatter: the driver frees 73 GB in 28 to 68 ms (H200)
PLACEMENT = "placement"
_BACKENDS = ("cumem", PLACEMENT)
# The driver clears memory that was freed, with the engines that copy: right after a sleep of 62 GB
# a copy to the device takes 0.43 s instead of 0.29 (15.3 GB, H200). A real engine sleeps longer.
_ASLEEP_SECONDS = 1.0


def model_folder(scale: int) -> str:
    """A new folder with the configuration of a Qwen2 of that shape, and no weights."""
    config: dict[str, Any] = {
        "model_type": "qwen2",
        "architectures": ["Qwen2ForCausalLM"],
        "dtype": "bfloat16",
        "vocab_size": SHAPE["vocabulary"] // scale,
        "hidden_size": SHAPE["hidden"] // scale,
        "intermediate_size": SHAPE["intermediate"] // scale,
        "num_hidden_layers": SHAPE["layers"],
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "tie_word_embeddings": False,
    }
    folder = tempfile.mkdtemp()
    Path(folder, "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


class _Allocator:
    """vLLM's allocator alone, and a captured graph that reads each weight."""

    def __init__(self, scale: int, ranks: int) -> None:
        from vllm.device_allocator import cumem
        from vllm.device_allocator.sleep_mode_backend import CuMemBackend

        from placement.engines.vllm_backend import PlacementBackend

        if ranks != 1:
            raise SystemExit("--ranks is for --system vllm")
        self._backends = {"cumem": CuMemBackend(), PLACEMENT: PlacementBackend()}
        hidden, inner = SHAPE["hidden"] // scale, SHAPE["intermediate"] // scale
        shapes: list[tuple[int, ...]] = [(SHAPE["vocabulary"] // scale, hidden)] * 2
        for _ in range(SHAPE["layers"]):
            shapes += [(hidden + 1024, hidden), (hidden, hidden), (2 * inner, hidden)]
            shapes += [(hidden, inner), (hidden,)]
        allocator = cumem.CuMemAllocator.get_instance()
        with allocator.use_memory_pool(tag="weights"):
            self._weights = [torch.empty(s, dtype=torch.bfloat16, device="cuda") for s in shapes]
        with allocator.use_memory_pool(tag="kv_cache"):
            self._kv_cache = [
                torch.zeros((2 << 30) // scale**2, dtype=torch.uint8, device="cuda")
                for _ in range(20)
            ]
        self.fill()
        self._sums = torch.empty(len(shapes), device="cuda")
        self._graph = torch.cuda.CUDAGraph()
        self.answer()  # compiled and warm
        with torch.cuda.graph(self._graph):
            self._sum()

    def use(self, name: str) -> None:
        self._backend: Any = self._backends[name]

    def reserve(self) -> None:
        self._backend.reserve()

    def sleep(self, level: int) -> None:
        self._backend.suspend(level)

    def wake(self, tags: list[str] | None = None) -> None:
        self._backend.resume(tags)

    def copied_bytes(self) -> int | None:
        return getattr(self._backend, "copied_bytes", None)

    def weight_blocks(self) -> list[int]:
        return _weight_blocks()

    def host_bytes(self) -> int:
        return _process_bytes()

    def slab_bytes(self) -> int:
        return int(self._backends[PLACEMENT].mirror.report()[PLACEMENT]["host_bytes"])

    def fill(self) -> None:
        _fill(self._weights)

    def write(self, places: Sequence[int]) -> None:
        _write(self._weights, places)

    def _sum(self) -> None:
        for place, weight in enumerate(self._weights):
            torch.sum(weight.view(-1), 0, dtype=torch.float32, out=self._sums[place])

    def answer(self) -> Any:
        self._sum()
        eager = self._sums.tolist()
        bits = [weight.view(torch.int16).sum(dtype=torch.int64).item() for weight in self._weights]
        return bits, eager

    def answer_of_graph(self) -> Any:
        self._sums.zero_()
        self._graph.replay()
        return self._sums.tolist()


class _Llm:
    """A whole vLLM with CUDA graphs. With one rank all of it is in this process; otherwise each
    rank's worker has a process of its own."""

    def __init__(self, scale: int, ranks: int) -> None:
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        from vllm import LLM

        from placement.engines import vllm_plugin

        vllm_plugin.register()  # as vLLM does in each process where placement is installed

        options: dict[str, Any] = {"skip_tokenizer_init": True, "load_format": "dummy"}
        options |= {"max_model_len": 1024, "max_num_seqs": 16, "enable_sleep_mode": True}
        options |= {"gpu_memory_utilization": 0.5, "dtype": "bfloat16"}
        # without vLLM's own all-reduce, which needs CUDA IPC of captured graphs
        options |= {"tensor_parallel_size": ranks, "disable_custom_all_reduce": ranks > 1}
        # graphs without torch.compile, which takes minutes
        options["compilation_config"] = {
            "mode": 0,
            "cudagraph_mode": "FULL_DECODE_ONLY",
            "cudagraph_capture_sizes": [1, 2, 4],
        }
        self._llm = LLM(model_folder(scale), **options)
        self.fill()

    def _on_ranks(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        return self._llm.collective_rpc(function, args=arguments)

    def use(self, name: str) -> None:
        self._on_ranks(_use, name)

    def reserve(self) -> None:
        self._on_ranks(_reserve)

    def sleep(self, level: int) -> None:
        self._llm.sleep(level=level)

    def wake(self, tags: list[str] | None = None) -> None:
        self._llm.wake_up(tags=tags)

    def copied_bytes(self) -> int | None:
        return self._on_ranks(_copied_bytes)[0]

    def weight_blocks(self) -> list[int]:
        return self._on_ranks(_blocks_of_rank)[0]

    def host_bytes(self) -> int:
        return sum(self._on_ranks(_host_bytes_of_rank))

    def slab_bytes(self) -> int:
        return self._on_ranks(_slab_bytes)[0]

    def fill(self) -> None:
        self._on_ranks(_fill_rank)

    def write(self, places: Sequence[int]) -> None:
        self._on_ranks(_write_rank, tuple(places))

    def answer(self) -> Any:
        from vllm import SamplingParams

        prompts = [{"prompt_token_ids": [*range(3 + n, 60 + 7 * n)]} for n in range(4)]
        sampling = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, detokenize=False)
        self._llm.reset_prefix_cache()
        requests = self._llm.generate(prompts, sampling, use_tqdm=False)
        return [list(request.outputs[0].token_ids) for request in requests]

    def answer_of_graph(self) -> Any:
        return None  # its tokens come from its graphs


# --- on a rank of vLLM; the first argument is the wrapper of its worker


def _use(rank: Any, name: str) -> None:
    from vllm.device_allocator.sleep_mode_backend import CuMemBackend

    worker = rank.worker
    if not hasattr(worker, "placements_backend"):
        worker.placements_backend = worker._sleep_mode_backend  # made by the plug-in
        assert type(worker.placements_backend).__name__ == "PlacementBackend"
    is_ours = name == PLACEMENT
    worker._sleep_mode_backend = worker.placements_backend if is_ours else CuMemBackend()


def _reserve(rank: Any) -> None:
    rank.worker._sleep_mode_backend.reserve()


def _copied_bytes(rank: Any) -> int | None:
    return getattr(rank.worker._sleep_mode_backend, "copied_bytes", None)


def _slab_bytes(rank: Any) -> int:
    return int(rank.worker.placements_backend.mirror.report()[PLACEMENT]["host_bytes"])


def _blocks_of_rank(_: Any) -> list[int]:
    return _weight_blocks()


def _host_bytes_of_rank(_: Any) -> int:
    return _process_bytes()


def _fill_rank(rank: Any) -> None:
    _fill([*rank.worker.model_runner.model.parameters()])
    torch.cuda.synchronize()


def _write_rank(rank: Any, places: Sequence[int]) -> None:
    _write([*rank.worker.model_runner.model.parameters()], places)
    torch.cuda.synchronize()


# --- in the process that has the weights


def _weight_blocks() -> list[int]:
    """The bytes of each of the allocator's blocks with weights."""
    allocator = importlib.import_module("vllm.device_allocator.cumem").CuMemAllocator.get_instance()
    blocks = []
    for data in allocator.pointer_to_data.values():
        if data.tag == "weights":
            blocks.append(data.handle[1])
    return blocks


def _fill(weights: Sequence[torch.Tensor]) -> None:
    """Give weights the same values each time; those of norms are about 1."""
    with torch.no_grad():
        for seed, weight in enumerate(weights):
            generator = torch.Generator(weight.device).manual_seed(seed)
            mean = 1.0 if weight.dim() == 1 else 0.0
            weight.data.normal_(mean, 0.02, generator=generator)


def _write(weights: Sequence[torch.Tensor], places: Sequence[int]) -> None:
    """Change every value of these weights, or of all."""
    with torch.no_grad():
        for place in places or range(len(weights)):
            weights[place % len(weights)].data.view(torch.int16).add_(1)


_SYSTEMS: dict[str, Callable[[int, int], Any]] = {"allocator": _Allocator, "vllm": _Llm}


class _Turns:
    """Both backends move the memory of one subject, by turns."""

    def __init__(self, rig: Rig, results: Results, system: str, ranks: int) -> None:
        self._rig, self._results = rig, results
        self._subject = _SYSTEMS[system](rig.pick(8, 2, 1), ranks)
        blocks = self._subject.weight_blocks()
        self._nbytes = sum(blocks)
        results.add("weights", system, "bytes", self._nbytes, "bytes")
        results.add("weights", system, "blocks", len(blocks), "blocks")

    def _turn(self, name: str, level: int = 1, tags: Sequence[str] = ()) -> dict[str, float]:
        """Sleep and wake with one backend. Returns seconds, bytes, and whether all was equal."""
        rig, subject = self._rig, self._subject
        subject.use(name)
        if level == 2:
            subject.fill()
        before = subject.answer(), subject.answer_of_graph()
        free = rig.free_bytes()
        turn = {"sleep": rig.seconds(lambda: subject.sleep(level))}
        copied = subject.copied_bytes()
        if copied is None:  # vLLM's own copies every block with weights, or none
            copied = self._nbytes if level == 1 else 0
        turn["copied"] = copied
        turn["freed"] = rig.free_bytes() - free
        time.sleep(_ASLEEP_SECONDS)
        for tag in tags:
            turn[f"wake {tag}"] = rig.seconds(lambda tag=tag: subject.wake([tag]))
        if not tags:
            turn["wake"] = rig.seconds(subject.wake)
        if level == 2:
            subject.fill()
        turn["equal"] = before == (subject.answer(), subject.answer_of_graph())
        return turn

    def _add(self, scenario: str, name: str, turns: Sequence[dict[str, float]]) -> None:
        units = {"copied": "bytes", "freed": "bytes", "equal": ""}
        for metric in turns[0]:
            choose = min if metric == "equal" else statistics.median
            value = choose([turn[metric] for turn in turns])
            self._results.add(scenario, name, metric, value, units.get(metric, "s"))

    def first(self) -> None:
        for name in _BACKENDS:
            host = self._subject.host_bytes()
            if name == PLACEMENT:
                self._subject.use(name)
                seconds = self._rig.seconds(self._subject.reserve)
                self._results.add("first sleep", name, "reserve", seconds, "s")
            self._add("first sleep", name, [self._turn(name)])
            taken = self._subject.host_bytes() - host  # it stays: torch keeps what cumem took
            self._results.add("first sleep", name, "host memory taken", taken, "bytes")
        # with a whole vLLM the plug-in has reserved it before
        slab = self._subject.slab_bytes() / self._nbytes
        self._results.add("first sleep", PLACEMENT, "slab, of the weights", slab, "times")
        self._results.write()

    def later(self, raw: link.Link) -> None:
        scenarios: dict[str, dict[str, Any]] = {
            "written": {},
            "unchanged": {},
            "by tags": {"tags": ("weights", "kv_cache")},
            "level 2": {"level": 2},
        }
        for scenario, options in scenarios.items():
            turns: dict[str, list[dict[str, float]]] = {name: [] for name in _BACKENDS}
            for _ in range(_ROUNDS):
                for name in _BACKENDS:
                    if scenario == "written":
                        self._subject.write(())
                    turns[name].append(self._turn(name, **options))
            for name, own in turns.items():
                own.pop(0)  # what was written before this backend's own last sleep
                self._add(scenario, name, own)
                if scenario == "written":
                    self._rates(name, own, raw)
            self._results.write()

    def _rates(self, name: str, turns: Sequence[dict[str, float]], raw: link.Link) -> None:
        for direction, rate in (("sleep", raw.to_host), ("wake", raw.to_device)):
            seconds = statistics.median(turn[direction] for turn in turns)
            self._results.rate("written", name, direction, self._nbytes, seconds, rate)

    def cycles(self, count: int) -> None:
        """Many cycles, in each of which one weight is written."""
        subject = self._subject
        subject.use(PLACEMENT)
        device, host, seconds = [], [], []
        for cycle in range(count):
            subject.write([cycle])
            seconds.append(self._rig.seconds(lambda: subject.sleep(1)))
            subject.wake()
            self._rig.sync()
            device.append(-self._rig.free_bytes())
            host.append(subject.host_bytes())
        self._results.add("cycles", PLACEMENT, "sleep", statistics.median(seconds), "s")
        for memory, used in (("device", device), ("host", host)):
            growth, slope = used[-1] - used[0], _slope(used)
            self._results.add("cycles", PLACEMENT, f"{memory}, growth", growth, "bytes")
            self._results.add("cycles", PLACEMENT, f"{memory}, slope", slope, "bytes a cycle")


def _process_bytes() -> int:
    """Memory of this process, as the kernel counts it."""
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    return int(dict(line.split(":", 1) for line in status.splitlines())["VmRSS"].split()[0]) << 10


def _slope(values: Sequence[int]) -> float:
    return statistics.linear_regression(range(len(values)), values).slope


def main(arguments: Sequence[str] | None = None) -> None:
    own = argparse.ArgumentParser(add_help=False)
    own.add_argument("--system", choices=list(_SYSTEMS), default="allocator")
    own.add_argument("--ranks", type=int, default=1, help="tensor parallelism of vllm")
    own.add_argument("--cycles", type=int, help="sleeps in a row at the end; default: 200")
    options = own.parse_known_args(arguments)[0]
    name = f"engine_sleep_{options.system}" + ("" if options.ranks == 1 else f"_{options.ranks}")

    def measure(rig: Rig, results: Results) -> None:
        with results.system("sleep", options.system):
            raw = link.measure(rig, results)
            turns = _Turns(rig, results, options.system, options.ranks)
            turns.first()
            turns.later(raw)
            turns.cycles(options.cycles or rig.pick(3, 20, 200))

    _rig.run(name, __doc__, measure, arguments, [own])


if __name__ == "__main__":
    main()
