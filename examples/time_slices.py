"""Two GRPO jobs take turns on one GPU: a third process suspends and resumes them over HTTP.

Runs anywhere in a few seconds, on a simulated device whose capacity both jobs share through a file.
It has room for one of them. At the end each job compares its losses with those of a run of its own.

    python examples/time_slices.py
"""

from __future__ import annotations

import json
import multiprocessing
import sys
import tempfile
import time
import urllib.request
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

import placement
from placement.cli.demo import make_worker
from placement.cli.grpo import Characters, Recipe
from placement.testing import SimulatedDevice

sys.path.insert(0, str(Path(__file__).parents[1]))
from examples._tiny import TinyModel

TOKEN = "from-a-secret-of-the-cluster"  # noqa: S105
STEPS = 4
SLICE_SECONDS = 0.1  # then it ends with the step
CHUNK_BYTES = 4096
CAPACITY_BYTES = 64 * CHUNK_BYTES  # a job takes 47


def train(manager: placement.Manager, seed: int) -> list[float]:
    """A job of a few steps. Returns their losses."""
    torch.manual_seed(seed)
    tokenizer = Characters()
    recipe = Recipe(steps=STEPS, prompts=8, completions=8, new_tokens=3, minibatches=2, seed=seed)
    model = TinyModel(tokenizer.vocabulary_size)
    worker = make_worker(model, tokenizer, manager.device.torch_device, recipe)
    return [result.loss for result in worker.train(manager)]


def run_job(seed: int, folder: str, connection: Connection) -> None:
    """The process of one job. It knows nothing of the other."""
    torch.set_num_threads(1)
    shared = Path(folder) / "capacity"
    device = SimulatedDevice(CAPACITY_BYTES, chunk_bytes=CHUNK_BYTES, shared_with=shared)
    manager = placement.Manager(device=device)
    server = manager.serve(control=TOKEN)
    manager.suspend()  # until its first slice
    connection.send(server.url)
    losses = train(manager, seed)
    waited = manager.snapshot().suspended_seconds
    manager.close()

    own = SimulatedDevice(CAPACITY_BYTES, chunk_bytes=CHUNK_BYTES)
    alone = train(placement.Manager(device=own), seed)
    connection.send({"losses": losses, "alone": alone, "waited": waited})


def ask(url: str, verb: str, **body: Any) -> dict[str, Any]:
    """POST to a worker. Raises OSError: it has ended, or refuses."""
    headers = {"Authorization": f"Bearer {TOKEN}"}
    data = json.dumps(body).encode()
    request = urllib.request.Request(f"{url}/{verb}", data, headers)  # noqa: S310
    with urllib.request.urlopen(request, timeout=120) as answer:  # noqa: S310
        return dict(json.loads(answer.read()))


def give_slices(urls: list[str]) -> dict[str, int]:
    """Let one job after the other have the GPU until all have ended. Returns the slices of each."""
    slices = dict.fromkeys(urls, 0)
    running = list(urls)
    while running:
        for url in list(running):
            try:
                ask(url, "resume")
                slices[url] += 1
                time.sleep(SLICE_SECONDS)
                status = ask(url, "suspend", deadline_seconds=60)
                assert status["resident_bytes"] == 0
            except OSError:  # it has closed its manager
                running.remove(url)
    return slices


def main() -> list[dict[str, Any]]:
    """Run both jobs. Returns for each its losses, those of a run alone, and how it waited."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "placement.testing"])  # imported once for both
    with tempfile.TemporaryDirectory() as folder:
        connections, jobs = [], []
        for seed in range(2):
            ours, theirs = context.Pipe()
            job = context.Process(target=run_job, args=(seed, folder, theirs), daemon=True)
            job.start()
            theirs.close()
            connections.append(ours)
            jobs.append(job)
        urls = [connection.recv() for connection in connections]
        slices = give_slices(urls)
        results = []
        for seed, (url, connection) in enumerate(zip(urls, connections, strict=True)):
            result = connection.recv() | {"slices": slices[url]}
            same = "the same" if result["losses"] == result["alone"] else "other"
            print(
                f"job {seed}: {STEPS} steps in {result['slices']} slices, waited "
                f"{result['waited']:.2f} s; {same} losses as alone",
                flush=True,
            )
            results.append(result)
        for job in jobs:
            job.join()
    return results


if __name__ == "__main__":
    main()
