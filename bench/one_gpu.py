"""How large a model does one GPU train, and how fast?

Full training of a decoder in the shape of Qwen2.5 with random weights: float32 weights and
gradients, AdamW, bf16 autocast, gradient checkpointing, and a frozen reference in bf16. A step has
the shape of GRPO: log-probabilities of the reference and of the actor, forward, backward and
`optimizer.step()` for each 4,096 tokens, and all weights in bf16 for a rollout engine. The engine
is one buffer: each weight is copied into it. In every system autocast keeps no bf16 copies of the
weights, and one sequence at a time has its logits in float32.

Each system runs in a process of its own, with all of the GPU or with 80 GB of it.

torch: everything stays on the device. TRL does the same.
FSDP2 CPUOffloadPolicy: weights, gradients and moments on the host, where the fused AdamW steps.
DeepSpeed ZeRO-Offload: weights in bf16, without autocast's float32; weights in float32 and moments
on the host, where DeepSpeed's AdamW steps.
verl: its `param_offload` and `optimizer_offload`, by the helpers of its FSDP engine.
placement: under `Colocated("streamed", stream_sync=True)`, `Cyclic(optimizer_in="streamed")` and
`Resident()`. The budget is what gradients and activations leave. The forecast is that of
`placement.forecast`, from what `placement doctor` measures on this machine before the job, and from
the seconds of the work in each phase.

On the simulated device the figures show only that everything runs, and that the losses agree.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import multiprocessing
import os
import resource
import signal
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from bench import _rig
from bench._decoder import SHAPES
from bench._results import Results
from bench._rig import Rig, used_host_bytes
from bench._trainers import TRAINERS, Placed, Trainer

_SEQUENCES = 4
"""The sequences of a micro-batch: the answers to one question."""
_PART = "part.txt"
"""The file in which a process keeps the part of the job that it is in."""


@dataclass(frozen=True)
class Job:
    """One process: a system that trains a model, with so many tokens in a step.

    Attributes:
        limit: gigabytes (1e9 bytes) of the device that it may use; None: all.
        tokens: one measurement for each, one after the other.
        steps: measured steps for each of `tokens`; one more comes before them.
        is_beside: other programs run on the machine, so that its host memory tells nothing.
    """

    size: str
    system: str
    limit: float | None
    tokens: tuple[int, ...]
    steps: tuple[int, ...]
    is_beside: bool = False

    def scenario(self, tokens: int) -> str:
        room = "the whole GPU" if self.limit is None else f"{self.limit:g} GB"
        return f"{self.work(tokens)}, {room}"

    def work(self, tokens: int) -> str:
        """The part of the scenario that says what is computed."""
        return f"{self.size}, {tokens:,} tokens"


# --- one process


class _Watch:
    """The part of the job that the process is in, and the host memory meanwhile. The part is in a
    file, too: the process may be killed."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self.first_host_bytes = self.most_host_bytes = used_host_bytes()
        self.note("building the models")

    def note(self, part: str) -> None:
        self.part = part
        self.write(part)
        self.most_host_bytes = max(self.most_host_bytes, used_host_bytes())

    def write(self, text: str) -> None:
        self._file.write_text(text, encoding="utf-8")


class _HostMemory:
    """The host memory of this process: what the kernel counts, and the page-locked memory that
    torch has from the driver where the kernel does not count it."""

    def __init__(self, rig: Rig) -> None:
        self._is_added = False
        if rig.is_cuda:
            before = _resident_bytes()
            locked = torch.empty(1 << 28, dtype=torch.uint8, pin_memory=True)
            self._is_added = _resident_bytes() - before < locked.nbytes // 2
            del locked
            torch._C._host_emptyCache()
            torch.cuda.reset_peak_host_memory_stats()

    def most_bytes(self) -> int:
        """The sum of both peaks, which may be of different times."""
        counted_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
        locked = torch.cuda.host_memory_stats() if self._is_added else {}
        return counted_bytes + int(locked.get("allocated_bytes.peak", 0))


def _resident_bytes() -> int:
    """The memory that this process has now, as the kernel counts it."""
    pages = Path("/proc/self/statm").read_text(encoding="utf-8").split()[1]
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


def _child(rig: Rig, results: Results, job: Job) -> None:
    """Measure one job, and end the process: the next one needs the memory now, and handing it back
    in order takes longer."""
    with contextlib.suppress(OSError):  # the process that goes first when host memory is full
        Path("/proc/self/oom_score_adj").write_text("1000", encoding="utf-8")
    results.write()  # makes the folder, and CUDA's context
    taken = _take_all_but(rig, job.limit)
    watch = _Watch(results.path.with_name(_PART))
    host = _HostMemory(rig)
    free_bytes = rig.free_bytes()
    try:
        trainer = TRAINERS[job.system](rig, SHAPES[job.size], watch.note)
        trainer.prepare()
        for tokens, steps in zip(job.tokens, job.steps, strict=True):
            _measure(rig, results, job, tokens, steps, trainer, watch, host, free_bytes)
            results.write()
    except Exception as error:
        traceback.print_exc()
        watch.write(_where(watch.part, error))
    del taken
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _take_all_but(rig: Rig, limit: float | None) -> Tensor | None:
    """Take what a device with so many gigabytes would not have."""
    if limit is None:
        return None
    nbytes = rig.free_bytes() - int(limit * 1e9)
    return torch.empty(max(0, nbytes), dtype=torch.uint8, device=rig.torch_device)


def _measure(
    rig: Rig,
    results: Results,
    job: Job,
    tokens: int,
    steps: int,
    trainer: Trainer,
    watch: _Watch,
    host: _HostMemory,
    free_bytes: int,
) -> None:
    """Train so many steps, with so many tokens in each. `free_bytes` were free on the device before
    the models were made."""
    length = _length(rig)
    generator = torch.Generator().manual_seed(tokens)
    size = (1 + steps, tokens // (_SEQUENCES * length), _SEQUENCES, length)
    batches = torch.randint(trainer.shape.vocabulary, size, generator=generator)
    rig.empty_cache()
    seconds, moves, optimizer_steps, computed = [], [], [], []
    with rig.sampled_peak() as peak:
        free_at_first = rig.free_bytes()
        for number, ids in enumerate(batches.to(rig.torch_device)):
            began = time.perf_counter()
            computed.append(trainer.step(ids))
            rig.sync()
            seconds.append(time.perf_counter() - began)
            moves.append(trainer.seconds_of_moves())
            optimizer_steps.append(trainer.step_seconds)
            print(f"   step {number}: {seconds[-1]:.2f} s", flush=True)

    def add(metric: str, value: float, unit: str) -> None:
        results.add(job.scenario(tokens), job.system, metric, value, unit)

    step = statistics.median(seconds[1:])
    add("step", step, "s")
    if moves[0] is not None:
        add("of it moves", statistics.median(moves[1:]), "s")
    add("of it optimizer.step()", statistics.median(optimizer_steps[1:]), "s")
    add("first step", seconds[0], "s")
    add("rate", tokens / step, "tokens/s")
    if peak.samples:
        add("peak, seen by the driver", free_bytes - free_at_first + peak.rise_bytes, "bytes")
    add("host peak, of the process", host.most_bytes(), "bytes")
    if not job.is_beside:
        risen = watch.most_host_bytes - watch.first_host_bytes
        add("host peak, of the machine", risen, "bytes")
    for number, (loss, log_prob) in enumerate(computed):
        add(f"loss of step {number}", loss, "")
        add(f"log-probability of step {number}", log_prob, "")
    if isinstance(trainer, Placed):
        snapshot, forecast = trainer.manager.snapshot(), trainer.forecast()
        left = trainer.manager.device.memory().chunk_bytes
        add("on the device outside phases", left, "bytes")
        held = sum(handle.host_bytes for handle in trainer.manager.handles.values())
        told_of = {phase.phase: phase.stall_seconds for phase in forecast.phases}
        told_step = told_of.pop("train")  # only `optimizer.step()` moves something there
        for what, told, found, unit in (
            ("registered, peak on the device", forecast.peak_bytes, snapshot.peak_bytes, "bytes"),
            ("registered, on the host", forecast.host_bytes, held, "bytes"),
            ("moves", sum(told_of.values()), statistics.median(moves[1:]), "s"),
            ("streamed step", told_step, statistics.median(optimizer_steps[1:]), "s"),
        ):
            add(f"{what}, forecast", told, unit)
            add(what, found, unit)
            add(f"{what}, forecast off by", 100 * (told - found) / found, "%")


def _length(rig: Rig) -> int:
    """The tokens of a sequence."""
    return rig.pick(16, 1024, 1024)


def _where(part: str, error: Exception) -> str:
    """The part of the job and the innermost line of the benchmarks in which the error came."""
    here = Path(__file__).parent
    frames = traceback.extract_tb(error.__traceback__)
    frame = [frame for frame in frames if Path(frame.filename).parent == here][-1]
    sentences = (str(error) or "no message").splitlines()[0].split(". ")
    reason = ". ".join(sentences[:2])
    place = f"bench/{Path(frame.filename).name}:{frame.lineno}, {frame.line}"
    return f"{part}, {place}: {type(error).__name__}: {reason}"


# --- all processes


def _run(rig: Rig, results: Results, job: Job, seconds: float) -> None:
    """Run a job in a process of its own. What it has not measured becomes a failure that says where
    it ended."""
    with tempfile.TemporaryDirectory() as folder:
        own = Results(results.benchmark, rig.device, rig.size, Path(folder))
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["torch", "placement", "bench._rig"])
        process = context.Process(target=_child, args=(rig, own, job))
        process.start()
        process.join(seconds)
        how, is_late = "ended", process.is_alive()
        if is_late:
            process.kill()
            process.join()
            how = f"stopped after {seconds:.0f} s"
        elif process.exitcode == -signal.SIGKILL:
            how = "killed by the kernel, because host memory was full"
        if own.path.exists():
            own.read()
        part = Path(folder, _PART)
        where = part.read_text(encoding="utf-8") if part.exists() else "its first lines"
    results.rows += own.rows
    measured = {row.scenario for row in own.rows}
    for tokens in job.tokens:
        fits = job.scenario(tokens) in measured
        if fits or not is_late:
            results.add(job.scenario(tokens), job.system, "fits", fits, "yes=1")
        if not fits:
            results.failed(job.scenario(tokens), job.system, f"{how} in {where}")
        elif job.system != Trainer.name:
            _compare(results, job, tokens)
    results.write()


def _compare(results: Results, job: Job, tokens: int) -> None:
    """Say whether the losses are those of torch, which may have run with another limit."""
    of_torch = _losses(results, Trainer.name, job.work(tokens))
    if of_torch:
        is_same = _losses(results, job.system, job.scenario(tokens)) == of_torch
        results.add(job.scenario(tokens), job.system, "losses as torch's", is_same, "yes=1")


def _losses(results: Results, system: str, scenario: str) -> dict[str, float]:
    """Losses and log-probabilities by step, of scenarios that begin in this way."""
    losses = {}
    for row in results.rows:
        if row.system == system and row.scenario.startswith(scenario) and row.unit == "":
            losses[row.metric] = row.value
    return losses


def _forget(results: Results, job: Job) -> None:
    """Remove what was measured of a job before."""
    scenarios = [job.scenario(tokens) for tokens in job.tokens]
    results.rows = [
        row for row in results.rows if row.system != job.system or row.scenario not in scenarios
    ]
    results.errors = [
        error
        for error in results.errors
        if error["system"] != job.system or error["scenario"] not in scenarios
    ]


def measure(rig: Rig, results: Results, options: argparse.Namespace) -> None:
    if options.keep and results.path.exists():
        results.read()
    sizes = {"tiny": ["tiny"], "quick": ["1.5B"], "full": ["1.5B", "4B", "7.6B"]}[rig.size]
    tokens = options.tokens or ((64, 128) if rig.size == "tiny" else (4096, 65536))
    steps = options.steps * len(tokens) if len(options.steps) == 1 else options.steps
    if len(steps) != len(tokens):
        raise SystemExit("--steps: write one number, or one for each of --tokens")
    micro_batch = _SEQUENCES * _length(rig)
    if any(count < 1 or count % micro_batch for count in tokens):
        raise SystemExit(f"--tokens: write multiples of {micro_batch}, the tokens of a micro-batch")
    for size in options.sizes or sizes:
        for name in filter(rig.wants, TRAINERS):
            if TRAINERS[name].needs_gpu and not rig.is_cuda and not rig.only:
                continue
            for limit in options.limits if rig.is_cuda else [None]:
                job = Job(size, name, limit, tuple(tokens), tuple(steps), is_beside=options.beside)
                _forget(results, job)
                print(f"== {size}, {name}, limit {limit}", flush=True)
                began = time.perf_counter()
                package = TRAINERS[name].needs_package
                if importlib.util.find_spec(package) is None:
                    absent = f"ModuleNotFoundError: No module named {package!r}"
                    results.failed(job.scenario(job.tokens[0]), name, absent)
                else:
                    _run(rig, results, job, options.seconds)
                print(f"== took {time.perf_counter() - began:.0f} s", flush=True)


def _gigabytes(text: str) -> float | None:
    return None if text == "none" else float(text)


def main(arguments: Sequence[str] | None = None) -> None:
    own = argparse.ArgumentParser(add_help=False)
    own.add_argument("--sizes", nargs="+", choices=[*SHAPES], help="default: 1.5B 4B 7.6B")
    own.add_argument(
        "--limits",
        nargs="+",
        type=_gigabytes,
        default=[80.0, None],
        help='GB of the device that a system may use, or "none"; default: 80 none',
    )
    own.add_argument("--tokens", nargs="+", type=int, help="in a step; default: 4096 65536")
    own.add_argument(
        "--steps",
        nargs="+",
        type=int,
        default=[3],
        help="one number, or one for each of --tokens; one more step comes before these",
    )
    own.add_argument("--seconds", type=float, default=150.0, help="limit for each process")
    own.add_argument(
        "--beside",
        action="store_true",
        help="other programs run on this machine: its host memory is not measured",
    )
    own.add_argument(
        "--keep",
        action="store_true",
        help="keep what the file has from other runs, with the same --tokens and --steps",
    )
    options = own.parse_known_args(arguments)[0]
    _rig.run(
        "one_gpu",
        __doc__,
        lambda rig, results: measure(rig, results, options),
        arguments,
        [own],
    )


if __name__ == "__main__":
    main()
