"""Steps of verl's own GRPO driver, with placement and with verl's own offloading: how long does one
take, and what is on the device in each phase?

The driver is what a recipe starts, `python -m verl.trainer.main_ppo`: Ray, its agent loop, vLLM or
SGLang as a server on the same GPU that sleeps and wakes, and a worker with actor, AdamW and
reference (FSDP2, `param_offload` and `optimizer_offload`). Model, tokenizer, prompts and reward are
made here. The actor has a shape of Qwen2.5 and random weights; all answers have the same length.
`--shapes` names the sizes (full: 1.5B), and `--limit` leaves the job a part of the GPU.

Seconds are verl's own, the median of the counted steps of each run; with `--turns 2` each system
runs twice, by turns. Bytes on the device are the driver's, of all processes of the first GPU. A run
that dies or takes too long is a row `error` with the phase and the line, beside its whole steps.

Without a GPU the device is simulated, the actor is tiny, and the rollout is the one of the tests:
it shows that the driver runs, that all its metrics are the same with placement, and how many bytes
placement moves. verl, Ray, TransferQueue and torchdata have to be installed, and on a GPU the
rollout's engine.
"""

from __future__ import annotations

import argparse
import contextlib
import shutil
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from bench import _rig, _timeline, _verl_job
from bench._qwen import SHAPES, write_model
from bench._results import Results
from bench._rig import Rig, used_host_bytes
from bench._timeline import Timeline
from bench._verl_job import Job
from bench._verl_process import SHARED_MEMORY
from bench.one_gpu import _take_all_but

_VENDOR = {"VERL_ENGINE_VENDOR": "placement"}
_WITHOUT_PLUGIN = {"VLLM_PLUGINS": ""}  # vLLM sleeps in its own way
_PROMPTS = 32
_LEFT = "on the device after a step, without the awake rollout"
_PARTS = ("gen", "old_log_prob", "ref", "update_actor", "update_weights")
_ROLLOUT, _ACTOR, _REF = (f"actor_rollout_ref.{part}" for part in ("rollout", "actor", "ref"))


@dataclass(frozen=True)
class System:
    """The environment that a system adds to the recipe, and the options that it changes."""

    environment: Mapping[str, str] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)


_SYSTEMS = {
    "verl": System(_WITHOUT_PLUGIN),
    # FSDP2 has weights, gradients and moments on the host, where AdamW steps
    "verl, CPUOffloadPolicy": System(
        _WITHOUT_PLUGIN, {f"{_ACTOR}.fsdp_config.offload_policy": True}
    ),
    "placement": System(_VENDOR),
    "placement, loaded sync": System({**_VENDOR, "PLACEMENT_POLICY": "colocated"}),
    # the only policy under which the rollout is a handle and the moments stay on the host
    "placement, streamed": System(
        {**_VENDOR, "PLACEMENT_POLICY": "colocated('streamed', stream_sync=True)"}
    ),
}


@dataclass(frozen=True)
class Step:
    """A step's work for models of a size, and how it is measured.

    Attributes:
        prompts: of a step and GPU, with four answers each.
        tokens: of an answer.
        micro_batch: sequences that are computed together.
        uncounted: steps at the beginning of a run that are not counted.
        steps: of a run.
        systems: the ones that are measured if none are named.
    """

    prompts: int
    tokens: int
    micro_batch: int
    uncounted: int
    steps: int
    systems: tuple[str, ...]


_SMALL = Step(_PROMPTS, 256, 8, 1, 3, ("verl", "placement", "placement, loaded sync"))
# one sequence at a time, because gradients leave little room for activations
_LARGE = Step(4, 512, 1, 2, 7, ("verl", "placement, streamed"))
_STEPS = {"tiny": _SMALL, "0.5B": _SMALL, "1.5B": _SMALL, "4B": _LARGE, "7.6B": _LARGE}


_WITHOUT_COMPILING = {
    "attention_backend": "triton",
    "sampling_backend": "pytorch",
    "grammar_backend": "none",
}
"""Options of SGLang: without them FlashInfer has to be there, and compiles its kernels for
minutes."""


def gpu_options(
    gpus: int,
    rollout: str,
    prompts: int = _PROMPTS,
    tokens: int = 256,
    micro_batch: int = 8,
    rollout_share: float = 0.4,
) -> dict[str, Any]:
    """The recipe's options for so many GPUs with a rollout of this name.

    Args:
        prompts: of a step and GPU, with four answers each.
        tokens: of an answer.
        micro_batch: sequences that are computed together.
        rollout_share: the share of the whole GPU's memory that the awake rollout takes.
    """
    batch = prompts * gpus
    engine = {
        f"+{_ROLLOUT}.engine_kwargs.sglang.{name}": value
        for name, value in _WITHOUT_COMPILING.items()
    }
    return {
        **(engine if rollout == "sglang" else {}),
        "data.train_batch_size": batch,
        "data.max_prompt_length": 128,
        "data.max_response_length": tokens,
        "+actor_rollout_ref.model.override_config.attn_implementation": "sdpa",
        f"{_ACTOR}.ppo_mini_batch_size": batch,
        f"{_ACTOR}.ppo_micro_batch_size_per_gpu": micro_batch,
        f"{_ACTOR}.use_torch_compile": False,
        f"{_ACTOR}.fsdp_config.use_torch_compile": False,
        f"{_REF}.fsdp_config.use_torch_compile": False,
        f"{_REF}.log_prob_micro_batch_size_per_gpu": micro_batch,
        f"{_ROLLOUT}.log_prob_micro_batch_size_per_gpu": micro_batch,
        f"{_ROLLOUT}.name": rollout,
        f"{_ROLLOUT}.n": 4,
        f"{_ROLLOUT}.ignore_eos": True,
        f"{_ROLLOUT}.enforce_eager": True,
        f"{_ROLLOUT}.gpu_memory_utilization": rollout_share,
        f"{_ROLLOUT}.max_model_len": max(512, 128 + tokens),
        "trainer.n_gpus_per_node": gpus,
        # as many as verl's actors ask for, whatever the machine has
        "ray_kwargs.ray_init.num_cpus": 64,
        "+ray_kwargs.ray_init.object_store_memory": 4 << 30,
    }


_OF_LARGE_MODELS = {
    # verl makes the reference in float32, as the actor: in bf16 its copy on the host is half
    f"{_REF}.fsdp_config.model_dtype": "bf16",
    # weights cross in float32, and the embedding of 7.6B (2.18 GB) has no room in verl's 2 GiB
    f"{_ROLLOUT}.checkpoint_engine.update_weights_bucket_megabytes": 2304,
}
"""What models of 4B and more need beside `param_offload` and `optimizer_offload`. Gradient
checkpointing and `free_cache_engine` are verl's defaults, with weights of vLLM that are discarded
and not copied to the host. `layered_summon` is for LoRA alone."""


def _file_name(system: str) -> str:
    return system.replace(",", "").replace(" ", "-")


class _Benchmark:
    """The inputs of all runs, and the results."""

    def __init__(
        self, rig: Rig, results: Results, folder: Path, shape: str, given: argparse.Namespace
    ) -> None:
        from tests.integrations.verl import recipe, worker

        self._rig, self._results, self._folder = rig, results, folder
        self._inputs = folder / "inputs"
        self._environment: dict[str, str] = {}
        self._modules: list[str] = []
        self._taken_bytes = 0
        self.step = step = _STEPS[shape]
        prompts, tokens = given.prompts or step.prompts, given.tokens or step.tokens
        if rig.is_cuda:
            vocabulary = SHAPES[shape].vocabulary
            write_model(self._inputs, SHAPES[shape], rig.torch_device)
            rig.empty_cache()
            recipe.write_inputs(self._inputs, vocabulary, prompts * given.gpus)
            # The process of the benchmark lives as long as the runs.
            self._taken = _take_all_but(rig, given.limit)
            total_bytes = torch.cuda.mem_get_info(rig.torch_device)[1]
            share = 0.4
            if self._taken is not None:
                self._taken_bytes = self._taken.nbytes
                share *= given.limit * 1e9 / total_bytes
            options = gpu_options(
                given.gpus, given.rollout, prompts, tokens, step.micro_batch, share
            )
            if step is _LARGE:
                options |= _OF_LARGE_MODELS
            self._environment = {SHARED_MEMORY: "1"} if given.shared_memory else {}
        else:
            worker.write_model(self._inputs)
            recipe.write_inputs(self._inputs, worker.VOCABULARY, prompts=4)
            options = recipe.tiny()
            self._modules = ["tests.integrations.verl.driver_process"]
            capacity = worker.CAPACITY if given.limit is None else int(given.limit * 1e9)
            self._environment = {
                "OMP_NUM_THREADS": "1",
                "VERL_ENGINE_DEVICE": "cuda",
                "PLACEMENT_DEVICE": f"simulated:{capacity}",
            }
        steps = given.steps or step.steps
        self._uncounted = min(step.uncounted, steps - 1)
        self._options: Mapping[str, Any] = {
            **options,
            "trainer.total_training_steps": steps,
            "trainer.total_epochs": steps,
        }
        self._given_options = dict(given.options)
        self._shape = shape
        self._seconds = given.seconds
        self._seen: dict[str, list[dict[str, float]]] = {}

    def measure(self, scenario: str, system: str, turn: int) -> Job:
        """One run of a system. Seconds are written for all of its runs together, everything else
        for the first. Of a run that failed its whole steps are written.

        Raises:
            RuntimeError: the run failed.
        """
        folder = self._folder / f"{self._shape}-{_file_name(system)}-{turn}"
        recording: contextlib.AbstractContextManager[Timeline | None] = contextlib.nullcontext()
        if self._rig.is_cuda:
            uuid = str(torch.cuda.get_device_properties(self._rig.torch_device).uuid)
            recording = _timeline.recorded(
                uuid if uuid.startswith("GPU-") else f"GPU-{uuid}", folder.with_suffix(".samples")
            )
        first_host_bytes = used_host_bytes()
        with recording as timeline:
            job = _verl_job.run(
                folder,
                self._inputs,
                {**self._options, **_SYSTEMS[system].options, **self._given_options},
                {**self._environment, **_SYSTEMS[system].environment},
                self._modules,
                self._seconds,
            )
        if len(job.steps) > self._uncounted:
            self._seen.setdefault(system, []).extend(job.steps[self._uncounted :])
            self._write_seconds(scenario, system)
            if not turn:
                self._write_memory(scenario, system, job, timeline, first_host_bytes)
        if job.failure is not None:
            self._keep_record(folder)
            raise job.failure
        return job

    def _write_memory(
        self,
        scenario: str,
        system: str,
        job: Job,
        timeline: Timeline | None,
        first_host_bytes: int,
    ) -> None:
        most = max(event["used_host_bytes"] for event in job.events)
        self._results.add(
            scenario, system, "host peak, of the machine", (most - first_host_bytes) / 1e9, "GB"
        )
        if timeline is not None:
            self._write_peaks(scenario, system, job, timeline)
        snapshots = [event["states"] for event in job.events if event["states"]]
        if len(snapshots) > 1:
            self._write_moves(
                scenario, system, snapshots[0][0], snapshots[-1][0], len(snapshots) - 1
            )

    def _keep_record(self, folder: Path) -> None:
        """Keep what a run that failed has printed and written down, beside the results: vLLM's own
        errors come long before the end."""
        results = self._results.path
        results.parent.mkdir(parents=True, exist_ok=True)
        for name in ("output.txt", "steps.jsonl", "events.jsonl"):
            if (folder / name).exists():
                kept = results.with_name(f"{results.stem}_{folder.name}_{name}")
                shutil.copy(folder / name, kept)

    def _write_seconds(self, scenario: str, system: str) -> None:
        """Write the seconds of all of a system's runs, in place of those of the runs before."""
        steps = self._seen[system]
        parts = ("step", *_PARTS)
        before = (scenario, system)
        self._results.rows = [
            row
            for row in self._results.rows
            if (row.scenario, row.system) != before or row.metric.split(",")[0] not in parts
        ]
        for name in parts:
            seconds = [step[f"timing_s/{name}"] for step in steps]
            self._results.add(scenario, system, name, statistics.median(seconds), "s")
            self._results.add(
                scenario, system, f"{name}, least of {len(seconds)}", min(seconds), "s"
            )

    def _write_peaks(self, scenario: str, system: str, job: Job, timeline: Timeline) -> None:
        """The most bytes in use in each phase, and the fewest after the rollout has gone to sleep;
        of the counted steps. The bytes that a limit has taken are in no row."""
        first = min(event["step"] for event in job.events) + self._uncounted
        events = [event for event in job.events if event["step"] >= first]
        begins = {
            event["step"]: event["began"]
            for event in events
            if event["phase"] == "rollout to train"
        }
        spans = [
            (event["phase"], event["began"], event["ended"])
            for event in events
            if event["phase"] not in ("rollout to train", "sleep")
        ]
        spans += [
            ("rollout", begins[event["step"]], event["began"])
            for event in events
            if event["phase"] == "sleep"
        ]
        for phase in ("rollout", "log_prob", "ref_log_prob", "train", "weight_sync"):
            used = [
                each
                for name, began, ended in spans
                if name == phase
                for each in timeline.between(began, ended)
            ]
            most, least = max(used) - self._taken_bytes, min(used) - self._taken_bytes
            self._results.add(scenario, system, f"{phase}, peak on the device", most / 1e9, "GB")
            self._results.add(scenario, system, f"{phase}, least on the device", least / 1e9, "GB")

    def _write_moves(
        self, scenario: str, system: str, first: dict[str, Any], last: dict[str, Any], steps: int
    ) -> None:
        """What placement counted in the first worker between the end of the first step and that of
        the last."""

        def moved(snapshot: dict[str, Any], what: str) -> int:
            return sum(handle[what] for handle in snapshot["handles"])

        for metric, what in (
            ("to the device", "loaded_bytes"),
            ("to the host", "offloaded_bytes"),
            ("proved clean", "skipped_bytes"),
        ):
            self._results.add(
                scenario,
                system,
                f"{metric}, a step",
                (moved(last, what) - moved(first, what)) / steps / 1e6,
                "MB",
            )
        for phase, seconds in last["phase_stall_seconds"].items():
            waited = (seconds - first["phase_stall_seconds"].get(phase, 0.0)) / steps
            self._results.add(scenario, system, f"{phase}, waited for moves", waited, "s")
        self._results.add(
            scenario, system, "peak of placement's memory", last["peak_bytes"] / 1e6, "MB"
        )
        placed = [handle for handle in last["handles"] if handle["role"] != "rollout"]
        copied = sum(handle["host_bytes"] for handle in placed)
        self._results.add(scenario, system, "host copies", copied / 1e9, "GB")
        left = sum(handle["resident_bytes"] for handle in placed)
        self._results.add(scenario, system, _LEFT, left, "bytes")


def _measure(rig: Rig, results: Results, given: argparse.Namespace) -> None:
    default = {"tiny": "tiny", "quick": "0.5B", "full": "1.5B"}[rig.size]
    by = ", SGLang" if given.rollout == "sglang" else ""
    gpus = f"{given.gpus} GPU{'s' if given.gpus > 1 else ''}{by}"
    room = "" if given.limit is None else f", {given.limit:g} GB"
    for shape in given.shapes or [default]:
        if rig.is_cuda == (shape == "tiny"):
            raise SystemExit("--shapes: the simulated device takes tiny, and a GPU the others")
        scenario = f"a step of verl's GRPO driver, {gpus}, {shape}{room}"
        with tempfile.TemporaryDirectory() as folder:
            benchmark = _Benchmark(rig, results, Path(folder), shape, given)
            _measure_systems(rig, results, benchmark, scenario, given)
            del benchmark  # the next one takes its bytes of the device anew


def _measure_systems(
    rig: Rig, results: Results, benchmark: _Benchmark, scenario: str, given: argparse.Namespace
) -> None:
    jobs: dict[str, Job] = {}
    for turn in range(given.turns):
        for system in given.systems or benchmark.step.systems:
            with results.system(scenario, system):
                jobs[system] = benchmark.measure(scenario, system, turn)
    if not rig.is_cuda and "verl" in jobs:  # vLLM's answers are not the same each time
        for system in jobs.keys() - {"verl"}:
            is_same = jobs[system].computed == jobs["verl"].computed
            results.add(scenario, system, "bit-exact", is_same, "yes=1")


def _option(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals:
        raise argparse.ArgumentTypeError(f"write {text!r} as NAME=VALUE")
    return name, value


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument(
        "--gpus",
        type=int,
        choices=(1, 2),
        default=1,
        help="GPUs of the worker group, each with its own rollout",
    )
    parser.add_argument(
        "--rollout",
        choices=("vllm", "sglang"),
        default="vllm",
        help="the rollout's engine on a GPU",
    )
    parser.add_argument("--turns", type=int, default=1, help="runs of each system, by turns")
    parser.add_argument("--shapes", nargs="+", choices=list(_STEPS), help="sizes of the actor")
    parser.add_argument(
        "--limit",
        type=float,
        metavar="GB",
        help="gigabytes (1e9 bytes) of the one GPU that the job may use; the rest is taken",
    )
    parser.add_argument("--prompts", type=int, help="of a step and GPU, with four answers each")
    parser.add_argument("--tokens", type=int, help="of an answer")
    parser.add_argument(
        "--steps",
        type=int,
        help="of each run; the first one is not counted, and the first two from 4B on",
    )
    parser.add_argument("--systems", nargs="+", choices=list(_SYSTEMS))
    parser.add_argument(
        "--options",
        nargs="+",
        type=_option,
        default=[],
        metavar="NAME=VALUE",
        help="verl's options, in place of the recipe's",
    )
    parser.add_argument(
        "--shared-memory",
        action="store_true",
        help="send weights to vLLM through the host: for machines without CUDA IPC",
    )
    parser.add_argument("--seconds", type=float, default=600.0, help="limit for each run")
    given, _ = parser.parse_known_args(sys.argv[1:] if arguments is None else arguments)
    if given.limit is not None and given.gpus > 1:
        parser.error("--limit is for one GPU")
    name = "verl_grpo" if given.gpus == 1 else "verl_grpo_two_gpus"
    _rig.run(name, __doc__, lambda rig, results: _measure(rig, results, given), arguments, [parser])


if __name__ == "__main__":
    main()
