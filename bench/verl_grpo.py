"""Steps of verl's own GRPO driver, with placement and with verl's own offloading: how long does one
take, and what is on the device in each phase?

The driver is what a recipe starts, `python -m verl.trainer.main_ppo`: Ray, its agent loop, vLLM or
SGLang as a server on the same GPU that sleeps and wakes, and a worker with actor, AdamW and
reference (FSDP2, `param_offload` and `optimizer_offload`). Model, tokenizer, prompts and reward are
made here. The actor has the shape of Qwen2.5-0.5B (full: 1.5B) and random weights; all answers have
the same length.

Seconds are verl's own, the median of all steps but the first of each run; with `--turns 2` each
system runs twice, by turns. Bytes on the device are the driver's, of all processes of the first
GPU.

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
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from bench import _rig, _timeline, _verl_job
from bench._results import Results
from bench._rig import Rig
from bench._timeline import Timeline
from bench._verl_job import Job
from bench._verl_process import SHARED_MEMORY

_SYSTEMS: dict[str, dict[str, str]] = {
    "verl": {},
    "placement": {"VERL_ENGINE_VENDOR": "placement"},
    "placement, loaded sync": {"VERL_ENGINE_VENDOR": "placement", "PLACEMENT_POLICY": "colocated"},
}
_VOCABULARY = 151_936
_PROMPTS = 32
_PARTS = ("gen", "old_log_prob", "ref", "update_actor", "update_weights")
_ROLLOUT, _ACTOR, _REF = (f"actor_rollout_ref.{part}" for part in ("rollout", "actor", "ref"))


def write_qwen(folder: Path, is_full: bool) -> Path:
    """A model with the shape of Qwen2.5-0.5B or 1.5B and random weights."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    small = {
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
    }
    large = {
        "hidden_size": 1536,
        "intermediate_size": 8960,
        "num_hidden_layers": 28,
        "num_attention_heads": 12,
    }
    ids = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    config = Qwen2Config(
        vocab_size=_VOCABULARY,
        num_key_value_heads=2,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        **(large if is_full else small),
        **ids,
    )
    torch.manual_seed(7)
    with torch.device("cuda"):  # to make as many random numbers on the CPU takes a minute
        model = Qwen2ForCausalLM(config)
    model.to("cpu", torch.bfloat16).save_pretrained(folder)
    del model
    torch.cuda.empty_cache()
    return folder


_WITHOUT_COMPILING = {
    "attention_backend": "triton",
    "sampling_backend": "pytorch",
    "grammar_backend": "none",
}
"""Options of SGLang: without them FlashInfer has to be there, and compiles its kernels for
minutes."""


def gpu_options(
    gpus: int, rollout: str, prompts: int = _PROMPTS, tokens: int = 256
) -> dict[str, Any]:
    """The recipe's options for so many GPUs with a rollout of this name: `prompts` a GPU, with
    answers of `tokens` tokens."""
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
        f"{_ACTOR}.ppo_micro_batch_size_per_gpu": 8,
        f"{_ACTOR}.use_torch_compile": False,
        f"{_ACTOR}.fsdp_config.use_torch_compile": False,
        f"{_REF}.fsdp_config.use_torch_compile": False,
        f"{_REF}.log_prob_micro_batch_size_per_gpu": 8,
        f"{_ROLLOUT}.log_prob_micro_batch_size_per_gpu": 8,
        f"{_ROLLOUT}.name": rollout,
        f"{_ROLLOUT}.n": 4,
        f"{_ROLLOUT}.ignore_eos": True,
        f"{_ROLLOUT}.enforce_eager": True,
        f"{_ROLLOUT}.gpu_memory_utilization": 0.4,
        f"{_ROLLOUT}.max_model_len": 512,
        "trainer.n_gpus_per_node": gpus,
        # as many as verl's actors ask for, whatever the machine has
        "ray_kwargs.ray_init.num_cpus": 64,
        "+ray_kwargs.ray_init.object_store_memory": 4 << 30,
    }


def _file_name(system: str) -> str:
    return system.replace(",", "").replace(" ", "-")


class _Benchmark:
    """The inputs of all runs, and the results."""

    def __init__(self, rig: Rig, results: Results, folder: Path, given: argparse.Namespace) -> None:
        from tests.integrations.verl import recipe, worker

        self._rig, self._results, self._folder = rig, results, folder
        self._inputs = folder / "inputs"
        self._environment: dict[str, str] = {}
        self._modules: list[str] = []
        if rig.is_cuda:
            write_qwen(self._inputs, is_full=rig.size == "full")
            recipe.write_inputs(self._inputs, _VOCABULARY, given.prompts * given.gpus)
            self._options: Mapping[str, Any] = gpu_options(
                given.gpus, given.rollout, given.prompts, given.tokens
            )
            self._environment = {SHARED_MEMORY: "1"} if given.shared_memory else {}
        else:
            worker.write_model(self._inputs)
            recipe.write_inputs(self._inputs, worker.VOCABULARY, prompts=4)
            self._options = recipe.tiny()
            self._modules = ["tests.integrations.verl.driver_process"]
            self._environment = {
                "OMP_NUM_THREADS": "1",
                "VERL_ENGINE_DEVICE": "cuda",
                "PLACEMENT_DEVICE": f"simulated:{worker.CAPACITY}",
            }
        self._options = {
            **self._options,
            "trainer.total_training_steps": given.steps,
            "trainer.total_epochs": given.steps,
        }
        self._seconds = given.seconds
        self._seen: dict[str, list[dict[str, float]]] = {}

    def measure(self, scenario: str, system: str, turn: int) -> Job:
        """One run of a system. Seconds are written for all of its runs together, everything else
        for the first."""
        folder = self._folder / f"{_file_name(system)}-{turn}"
        recording: contextlib.AbstractContextManager[Timeline | None] = contextlib.nullcontext()
        if self._rig.is_cuda:
            uuid = str(torch.cuda.get_device_properties(self._rig.torch_device).uuid)
            recording = _timeline.recorded(
                uuid if uuid.startswith("GPU-") else f"GPU-{uuid}", folder.with_suffix(".samples")
            )
        with recording as timeline, self._record_kept(folder):
            job = _verl_job.run(
                folder,
                self._inputs,
                self._options,
                {**self._environment, **_SYSTEMS[system]},
                self._modules,
                self._seconds,
            )
        self._seen.setdefault(system, []).extend(job.steps[1:])
        if turn:
            return job
        if timeline is not None:
            self._write_peaks(scenario, system, job, timeline)
        snapshots = [event["states"] for event in job.events if event["states"]]
        if snapshots:
            self._write_moves(
                scenario, system, snapshots[0][0], snapshots[-1][0], len(snapshots) - 1
            )
        return job

    @contextlib.contextmanager
    def _record_kept(self, folder: Path) -> Iterator[None]:
        """Keep what a run printed and wrote down, beside the results, if it fails: vLLM's own
        errors come long before the end."""
        try:
            yield
        except RuntimeError:
            self._results.path.parent.mkdir(parents=True, exist_ok=True)
            for name in ("output.txt", "steps.jsonl", "events.jsonl"):
                if (folder / name).exists():
                    shutil.copy(
                        folder / name,
                        self._results.path.with_name(
                            f"{self._results.path.stem}_{folder.name}_{name}"
                        ),
                    )
            raise

    def write_steps(self, scenario: str) -> None:
        for system, steps in self._seen.items():
            for name in ("step", *_PARTS):
                seconds = [step[f"timing_s/{name}"] for step in steps]
                self._results.add(scenario, system, name, statistics.median(seconds), "s")
                self._results.add(
                    scenario, system, f"{name}, least of {len(seconds)}", min(seconds), "s"
                )
        self._results.write()

    def _write_peaks(self, scenario: str, system: str, job: Job, timeline: Timeline) -> None:
        """The most bytes in use in each phase, and the fewest after the rollout has gone to sleep;
        of all steps but the first."""
        first = min(event["step"] for event in job.events)
        events = [event for event in job.events if event["step"] > first]
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
            self._results.add(
                scenario, system, f"{phase}, peak on the device", max(used) / 1e9, "GB"
            )
            self._results.add(
                scenario, system, f"{phase}, least on the device", min(used) / 1e9, "GB"
            )

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


def _measure(rig: Rig, results: Results, given: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory() as folder:
        benchmark = _Benchmark(rig, results, Path(folder), given)
        by = ", SGLang" if given.rollout == "sglang" else ""
        scenario = (
            f"a step of verl's GRPO driver, {given.gpus} GPU{'s' if given.gpus > 1 else ''}{by}"
        )
        jobs: dict[str, Job] = {}
        for turn in range(given.turns):
            for system in given.systems:
                with results.system(scenario, system):
                    jobs[system] = benchmark.measure(scenario, system, turn)
        benchmark.write_steps(scenario)
        if not rig.is_cuda and "verl" in jobs:  # vLLM's answers are not the same each time
            for system in jobs.keys() - {"verl"}:
                results.add(
                    scenario,
                    system,
                    "bit-exact",
                    jobs[system].computed == jobs["verl"].computed,
                    "yes=1",
                )


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
    parser.add_argument(
        "--prompts",
        type=int,
        default=_PROMPTS,
        help="prompts of a step and GPU, with four answers each",
    )
    parser.add_argument("--tokens", type=int, default=256, help="tokens of an answer")
    parser.add_argument(
        "--steps", type=int, default=3, help="steps of each run; the first one is not counted"
    )
    parser.add_argument("--systems", nargs="+", choices=list(_SYSTEMS), default=list(_SYSTEMS))
    parser.add_argument(
        "--shared-memory",
        action="store_true",
        help="send weights to vLLM through the host: for machines without CUDA IPC",
    )
    parser.add_argument("--seconds", type=float, default=600.0, help="limit for each run")
    given, _ = parser.parse_known_args(sys.argv[1:] if arguments is None else arguments)
    name = "verl_grpo" if given.gpus == 1 else "verl_grpo_two_gpus"
    _rig.run(name, __doc__, lambda rig, results: _measure(rig, results, given), arguments, [parser])


if __name__ == "__main__":
    main()
