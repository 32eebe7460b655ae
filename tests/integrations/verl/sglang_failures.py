"""What one rank does when SGLang refuses to wake, or dies, and the weights that reach it."""

from __future__ import annotations

import asyncio
import hashlib
from pathlib import Path
from typing import Any

import pytest

from placement import PlacementError
from tests.integrations.verl.colocated import Job
from tests.integrations.verl.worker import batch
from tests.sharded.training import as_bytes


def weights_sent(model: Path, file: Path) -> tuple[str, str]:
    """Digests of the weights that the server has after a sync, and of those that the actor publishes."""
    job = Job("sglang", model, file)
    job.sync()
    weights, _ = job.actor.engine.get_per_tensor_param()
    digest = hashlib.sha256()
    for name, value in weights:
        digest.update(name.encode() + as_bytes(value))
    return job.replica.server.weights, digest.hexdigest()


def refused(model: Path, file: Path) -> dict[str, Any]:
    """A server that refuses to wake its KV cache once: the error, the calls, the state after it, and the calls of the next step."""
    job = Job("sglang", model, file)
    asyncio.run(job.adapter.resume(["weights"]))
    job.replica.refuse(True)
    with pytest.raises(PlacementError) as error:
        asyncio.run(job.adapter.resume(["kv_cache"]))
    found = {"error": str(error.value), "calls": list(job.replica.calls)}
    found |= {"state": job.states()["rollout"], "phase": job.manager.phase_name}
    found["held"] = sorted(job.replica.server.memory.tags)
    job.replica.refuse(False)
    job.actor.train_batch(batch(0))
    job.sync()
    return found | {"later": job.replica.calls[len(found["calls"]) :], "accidents": job.replica.server.accidents}


def killed(model: Path, file: Path) -> dict[str, Any]:
    """A server that dies while it is awake: the state in which the actor trains on, and the errors of the next two syncs."""
    job = Job("sglang", model, file)
    job.sync()
    job.replica.die(job.adapter)
    job.actor.train_batch(batch(0))
    found: dict[str, Any] = {"state": job.states()["rollout"], "errors": []}
    for _ in range(2):
        with pytest.raises(PlacementError) as error:
            job.sync()
        found["errors"].append(f"{type(error.value).__name__}: {error.value}")
    job.actor.train_batch(batch(1))
    return found | {"after": job.states(), "calls": job.replica.calls}
