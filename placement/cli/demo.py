"""`placement demo`: a real GRPO job, small enough for two CPU cores, with a report of the handles
that were on the device."""

from __future__ import annotations

import argparse
import contextlib
import copy
import hashlib
import json
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import placement
from placement.cli import port
from placement.cli.grpo import Characters, Recipe, Worker, build_actor
from placement.cli.workers import plain_table
from placement.core.snapshot import WORDS, readable
from placement.core.states import IDLE
from placement.devices.base import Device
from placement.devices.select import select_device
from placement.engines import TorchEngine
from placement.testing import SimulatedDevice

_COPIES = 5  # times the model's bytes: actor, reference, rollout copy, and the two moments of AdamW
_TRANSITIONS = 5  # the phase transitions of a step: to rollout, log_prob, train, weight_sync, idle
_BANDWIDTH = 2 << 30  # bytes a second on the simulated device: slow enough for stalls to be seen


def add_demo(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--device",
        default="auto",
        type=_device_name,
        help="auto (CUDA if available), simulated, or cuda:N",
    )
    parser.add_argument(
        "--policy", default="colocated", help="an entry point's name or package.module:Class"
    )
    parser.add_argument("--steps", type=_positive, default=3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--serve",
        type=port,
        metavar="PORT",
        help="serve /metrics, /healthz and /state while the demo runs (0: any port)",
    )
    parser.add_argument(
        "--no-placement",
        action="store_true",
        help="run the same loop with everything resident, for comparison",
    )
    parser.add_argument(
        "--json", type=_new_file, metavar="FILE", help="write losses, rewards, phases and the audit"
    )
    parser.set_defaults(run=run)


def _device_name(text: str) -> str:
    """The name of a device; for "auto" that of CUDA if it is available, else of the simulated
    one."""
    available = torch.cuda.is_available()
    if not re.fullmatch(r"auto|simulated|cuda(:\d+)?", text):
        raise argparse.ArgumentTypeError(f"{text!r} is not auto, simulated or cuda:N")
    if text.startswith("cuda") and not available:
        raise argparse.ArgumentTypeError(
            f"torch sees no CUDA device for {text!r}; --device simulated runs anywhere"
        )
    if text != "auto":
        return text
    return "cuda:0" if available else "simulated"


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def _new_file(text: str) -> Path:
    """A file that can be written when the job is over. A mistake is told before the job runs."""
    path = Path(text)
    written = path if path.exists() else path.parent
    if path.is_dir() or not os.access(written, os.W_OK):
        raise argparse.ArgumentTypeError(f"{text!r} cannot be written")
    return path


def run(arguments: argparse.Namespace) -> int:
    """Run the job, with or without a manager. Returns 0 when it ran and the audit found nothing."""
    recipe = Recipe(steps=arguments.steps, seed=arguments.seed)
    tokenizer = Characters()
    actor = build_actor(tokenizer, arguments.seed)
    num_parameters = sum(parameter.numel() for parameter in actor.parameters())
    model_bytes = sum(parameter.nbytes for parameter in actor.parameters())
    print(f"GRPO on arithmetic: a model of {num_parameters:,} parameters, {recipe.steps} steps")
    with repeatable():
        if arguments.no_placement:
            name = "cpu" if arguments.device == "simulated" else arguments.device
            worker = make_worker(actor, tokenizer, torch.device(name), recipe)
            result = train(worker, EverythingResident(worker.device))
            result |= {
                "weights_sha256": digest_of(actor.state_dict()),
                "placement": False,
                "device": str(worker.device),
                "ok": True,
            }
        else:
            device = make_device(arguments.device, model_bytes)
            worker = make_worker(actor, tokenizer, device.torch_device, recipe)
            result = run_managed(worker, device, arguments, _COPIES * model_bytes)
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=1) + "\n")
    return int(not result["ok"])


def make_device(name: str, model_bytes: int) -> Device:
    """The device. The simulated one has room for training (actor, two moments), but not for the
    whole job."""
    if name != "simulated":
        return select_device(name)
    capacity_bytes = int(3.8 * model_bytes)
    return SimulatedDevice(capacity_bytes=capacity_bytes, bandwidth_bytes_per_second=_BANDWIDTH)


def make_worker(
    actor: nn.Module, tokenizer: Characters, device: torch.device, recipe: Recipe
) -> Worker:
    """Make the objects of the job, on the CPU. Registering them puts none of their bytes on the
    device."""
    return Worker(
        actor=actor,
        optimizer=torch.optim.AdamW(actor.parameters(), lr=recipe.learning_rate),
        reference=copy.deepcopy(actor).requires_grad_(False),
        engine=TorchEngine(copy.deepcopy(actor).requires_grad_(False)),
        tokenizer=tokenizer,
        device=device,
        recipe=recipe,
    )


def run_managed(
    worker: Worker, device: Device, arguments: argparse.Namespace, needed_bytes: int
) -> dict[str, Any]:
    memory = device.memory()
    total_bytes = memory.total_bytes - memory.poison_bytes
    verdict = "would not fit" if needed_bytes > total_bytes else "would fit"
    print(
        f"device {device.name} has {readable(total_bytes)}; the whole job, "
        f"{readable(needed_bytes)}, {verdict}"
    )

    manager = placement.Manager(device=device, policy=arguments.policy)
    with contextlib.closing(manager):  # and with it the server
        if arguments.serve is not None:
            print(f"metrics at {manager.serve(port=arguments.serve).url}/metrics")
        recorder = Recorder(manager)
        results = train(worker, recorder, lambda: print(phase_table(recorder.rows[-_TRANSITIONS:])))
        audit = manager.audit()
        print(f"\naudit: {audit.resident_bytes} bytes left on the device")
        if not audit.ok:
            print(audit.report)
        digest = digest_of(manager.handles["actor"].state_dict())
    left = device.memory().chunk_bytes if arguments.policy == "colocated" else 0
    return {
        **results,
        "weights_sha256": digest,
        "placement": True,
        "device": device.name,
        "policy": arguments.policy,
        "phases": recorder.rows,
        "resident_bytes": audit.resident_bytes,
        "ok": audit.ok and left == 0,
    }


def train(
    worker: Worker, manager: Any, after_step: Callable[[], None] | None = None
) -> dict[str, Any]:
    """Run the loop and print each step. Returns the results, which are equal with and without
    placement."""
    results = []
    for number, result in enumerate(worker.train(manager), start=1):
        results.append(result)
        print(
            "\n"
            f"step {number}: loss {result.loss:+.4f}   reward {result.reward:.3f}   kl "
            f"{result.kl:.4f}   right {result.correct:.1%}"
        )
        if after_step is not None:
            after_step()
        sys.stdout.flush()
    return {
        "losses": [result.loss for result in results],
        "rewards": [result.reward for result in results],
    }


class EverythingResident:
    """Replaces the manager, its phases and its handles in a job without placement: everything is on
    the device, and nothing moves."""

    def __init__(self, device: torch.device, module: Any = None) -> None:
        self._device = device
        self._module = module

    def register(
        self,
        _name: str,
        obj: Any,
        /,
        *,
        role: str | None = None,
        readonly: bool = False,
    ) -> EverythingResident:
        module = getattr(obj, "module", obj)
        if not isinstance(module, nn.Module):
            return EverythingResident(self._device)
        return EverythingResident(self._device, module.to(self._device))

    @contextlib.contextmanager
    def phase(
        self, _name: str, /, *, only: Sequence[str] | None = None
    ) -> Iterator[EverythingResident]:
        yield self

    def switch(
        self,
        _name: str,
        /,
        *,
        only: Sequence[str] | None = None,
    ) -> None:
        """Nothing: no phase needs anything else."""

    def weights(self, *, bucket_bytes: int) -> Iterator[list[tuple[str, Tensor]]]:
        for name, parameter in self._module.named_parameters():
            yield [(name, parameter.detach())]


class Recorder:
    """Wraps a manager and an open phase, and records each phase transition: the bytes that have
    moved, and those that are on the device afterwards."""

    def __init__(self, manager: placement.Manager) -> None:
        self.register = manager.register
        self.rows: list[tuple[str, dict[str, Any]]] = []
        """The phases, each with the states of the handles and the measurements of the phase
        transition at its beginning."""
        self._manager = manager

    @contextlib.contextmanager
    def phase(
        self,
        name: str,
        /,
        *,
        only: Sequence[str] | None = None,
    ) -> Iterator[Recorder]:
        self._manager.metrics()
        with self._manager.phase(name, only=only) as self._open:
            self._record(name)
            yield self
        self._record(IDLE)

    def switch(
        self,
        name: str,
        /,
        *,
        only: Sequence[str] | None = None,
    ) -> None:
        self._open.switch(name, only=only)
        self._record(name)

    def _record(self, phase: str) -> None:
        figures = self._manager.metrics()
        handles = self._manager.handles.values()
        row: dict[str, Any] = {name: figures[f"placement/{name}"] for name in _FIGURES}
        row["states"] = {handle.name: handle.state for handle in handles}
        row["device_bytes"] = self._manager.device.memory().chunk_bytes
        self.rows.append((phase, row))


_FIGURES = ("to_device_gb", "to_host_gb", "skipped_gb", "stall_seconds")


def phase_table(rows: Sequence[tuple[str, Mapping[str, Any]]]) -> str:
    _, first = rows[0]
    names = list(first["states"])
    cells = []
    for phase, row in rows:
        moved = [round(row[name] * 1e9) for name in _FIGURES[:3]]
        sizes = [readable(nbytes) for nbytes in (row["device_bytes"], *moved)]
        states = [WORDS[row["states"][name]] for name in names]
        cells.append((phase, *states, *sizes, f"{row['stall_seconds'] * 1e3:.1f} ms"))
    columns = ("phase", *names, "on device", "loaded", "offloaded", "skipped", "stall")
    return plain_table(columns, cells)


@contextlib.contextmanager
def repeatable() -> Iterator[None]:
    """Make two runs with one seed compute the same bits. cuBLAS reads its setting from the
    environment, before its first use."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


def digest_of(state_dict: Mapping[str, Tensor]) -> str:
    """One hash over the names and bytes of a state dict."""
    digest = hashlib.sha256()
    for name, tensor in state_dict.items():
        digest.update(name.encode())
        elements = tensor.detach().cpu().contiguous().reshape(-1)
        digest.update(elements.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
