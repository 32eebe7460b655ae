"""A trainer and a rollout process share one GPU. Neither loads before the other has left it.

Runs anywhere in a few seconds: without a GPU both use one simulated device, whose capacity they
share through a file.

    python examples/shared_gpu.py
"""

from __future__ import annotations

import multiprocessing
import tempfile
import time
from multiprocessing.synchronize import Barrier
from pathlib import Path

import torch
from torch import nn

import placement
from placement.engines import TorchEngine
from placement.testing import SimulatedDevice

STEPS = 3
WIDTH = 512
WORK_SECONDS = 0.1


def make_manager(role: str, folder: str) -> placement.Manager:
    """Make the process's manager. On a GPU `placement.Manager(device="cuda:0", turns=True)` is all
    it takes."""
    if torch.cuda.is_available():
        return placement.Manager(device="cuda:0", turns=True, worker_role=role)
    device = SimulatedDevice(capacity_bytes=6 << 20, shared_with=Path(folder) / "capacity")
    return placement.Manager(device=device, turns=folder, worker_role=role)


def rollout(folder: str, begin: Barrier) -> None:
    """The rollout process: an engine of 4 MiB on a simulated device of 6 MiB."""
    manager = make_manager("rollout", folder)
    engine = TorchEngine(
        nn.Sequential(
            nn.Linear(WIDTH, WIDTH),
            nn.Linear(WIDTH, WIDTH),
            nn.Linear(WIDTH, WIDTH),
            nn.Linear(WIDTH, WIDTH),
        )
    )
    manager.register("engine", engine, role="rollout")
    begin.wait()
    for _ in range(STEPS):
        with manager.phase("rollout"), torch.no_grad():  # waits until the trainer has left
            assert (
                engine.module(torch.ones(8, WIDTH, device=next(engine.module.parameters()).device))
                .isfinite()
                .all()
            )
            time.sleep(WORK_SECONDS)
    report("rollout", manager)


def trainer(folder: str, begin: Barrier) -> None:
    """The trainer process: an actor and its optimizer, which need 3 MiB during training."""
    manager = make_manager("trainer", folder)
    actor = nn.Linear(WIDTH, WIDTH)
    optimizer = torch.optim.AdamW(actor.parameters())
    manager.register("actor", actor, role="actor")
    manager.register("actor.optimizer", optimizer)
    begin.wait()
    for _ in range(STEPS):
        with manager.phase("train"):  # waits until the engine has left
            actor(torch.ones(8, WIDTH, device=actor.weight.device)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            time.sleep(WORK_SECONDS)
    report("trainer", manager)


def report(role: str, manager: placement.Manager) -> None:
    phase = "train" if role == "trainer" else "rollout"
    stalled = manager.snapshot().phase_stall_seconds[phase]
    print(f"{role}: {STEPS} phases, stood {stalled:.2f} s for moves and the other", flush=True)
    manager.close()


def main() -> list[int | None]:
    """Run both processes. Returns their exit codes."""
    context = multiprocessing.get_context("spawn")
    # a process that fails before the start must not keep the other waiting for ever
    begin = context.Barrier(2, timeout=300)
    with tempfile.TemporaryDirectory() as folder:
        both = [context.Process(target=work, args=(folder, begin)) for work in (trainer, rollout)]
        for process in both:
            process.start()
        for process in both:
            process.join()
    return [process.exitcode for process in both]


if __name__ == "__main__":
    main()
