"""A step in the shape of GRPO, over and over: how long does the computation still stall when bytes
move under it, and at which budget?

The models and the computation are those of `grpo_step`: a 7B actor in bf16 with one of eight shards
of its Adam state, and a 7B reference. The budget is a part of the bytes of all handles together.
"colocated" moves everything at the borders of phases. "cyclic" knows the cycle: it keeps what is
needed soonest, lets what comes next arrive early, and saves what has left while the next phase
computes. At 65 % the optimizer's step has hardly more than it needs (actor and state are 64 %);
`streamed_adam` measures a step that needs less.

The steps follow one another without a pause, as in a run: the bytes of one step may still move
under the work of the next. The stall is the mean time of a step less that of the computation alone,
measured in the same way.

The lower bound is the time that the link needs for the bytes of "cyclic", less the time of the
work: what no order of moves can hide.
"""

from __future__ import annotations

import gc
from collections.abc import Sequence
from functools import partial

import placement
from bench import _rig, link
from bench._compute import Products
from bench._models import module_tensors, moments, nbytes_of
from bench._results import Results
from bench._rig import Rig
from bench.grpo_step import Job
from placement.policies import Colocated, Cyclic

_SHARES = (100, 75, 65)
"""Budgets in percent of the bytes of all handles."""
_BUCKET_BYTES = 512 << 20
_CYCLE = ("old_log_prob", "ref_log_prob", "train", "optimizer_step", "weight_sync")
_PHASES = {"old_log_prob": ("actor",)}
"""The log-probabilities of the actor alone. With `only` under "log_prob", the policy would not know
that the reference is needed later."""


class Worker:
    """One manager over a job's models, with one phase open all the time."""

    def __init__(self, job: Job, policy: placement.Policy, budget_bytes: int) -> None:
        self.job = job
        device = job.rig.placement_device()
        self.manager = placement.Manager(
            device=device, policy=policy, budget_bytes=budget_bytes, phases=_PHASES
        )
        self.actor = self.manager.register("actor", job.actor, role="actor")
        self.manager.register("ref", job.ref, role="ref", readonly=True)
        self.manager.register("actor.optimizer", job.adam)
        self.phase = self.manager.phase("checkpoint")
        self.phase.__enter__()
        self.begin("old_log_prob")

    def begin(self, name: str) -> None:
        self.phase.switch(name)

    def step(self) -> None:
        """One step. Ends at the beginning of the next, so that its last border counts, too."""
        job = self.job
        job.compute(job.actor)
        self.begin("ref_log_prob")
        job.compute(job.ref)
        self.begin("train")
        job.compute(job.actor, 2)
        self.begin("optimizer_step")
        job.step()
        self.begin("weight_sync")
        for bucket in self.actor.weights(bucket_bytes=_BUCKET_BYTES):
            job.publish([tensor for _, tensor in bucket])
        self.begin("old_log_prob")

    def snapshot(self) -> placement.Snapshot:
        return self.manager.snapshot()

    def close(self) -> None:
        self.phase.__exit__(None, None, None)
        del self.job
        gc.collect()
        self.manager.close()


def _policies() -> dict[str, placement.Policy]:
    return {
        "colocated": Colocated("optimizer_step"),
        "cyclic": Cyclic(_CYCLE, optimizer_in="optimizer_step", idle="empty"),
    }


def _measure(
    rig: Rig,
    results: Results,
    products: Products,
    raw: link.Link,
    share: int,
    name: str,
    policy: placement.Policy,
) -> None:
    job = Job(rig, products)
    times = rig.pick(2, 3, 6)
    rig.seconds(job.alone)
    alone = rig.seconds(lambda: [job.alone() for _ in range(times)]) / times
    before = job.print()
    held = (
        nbytes_of(module_tensors(job.actor))
        + nbytes_of(module_tensors(job.ref))
        + nbytes_of(moments(job.adam))
    )
    rig.empty_cache()
    add = partial(results.add, f"budget of {share} %", name)
    worker = Worker(job, policy, held * share // 100)
    # every step negates all values: an even number of steps restores them
    for _ in range(2 if times % 2 == 0 else 3):
        worker.step()
    rig.empty_cache()
    rig.sync()
    worker.manager.metrics()
    with rig.sampled_peak() as peak:
        step = rig.seconds(lambda: [worker.step() for _ in range(times)]) / times
    figures = worker.manager.metrics()
    loaded, offloaded = (
        figures[f"placement/to_{side}_gb"] * 1e9 / times for side in ("device", "host")
    )
    add("computation alone", alone, "s")
    add("step", step, "s")
    add("stalled", step - alone, "s")
    add("waited in phase transitions", figures["placement/stall_seconds"] / times, "s")
    add("bytes to the device", loaded, "bytes")
    add("of them early", figures.get("placement/prefetch_used_gb", 0.0) * 1e9 / times, "bytes")
    add("early in vain", figures.get("placement/prefetch_discarded_gb", 0.0) * 1e9 / times, "bytes")
    add("bytes to the host", offloaded, "bytes")
    add(
        "lower bound of the stall",
        max(0.0, max(loaded / raw.to_device, offloaded / raw.to_host) / 1e9 - alone),
        "s",
    )
    add("budget", held * share // 100, "bytes")
    add("peak of what is registered", worker.snapshot().peak_bytes, "bytes")
    if peak.samples:
        add("peak, seen by the driver", peak.rise_bytes, "bytes")
    # brings all that is compared: a digest of 23 GB on the host takes 20 s
    worker.begin("optimizer_step")
    add("bit-exact", job.print() == before, "yes=1")
    worker.close()


def measure(rig: Rig, results: Results) -> None:
    products, raw = Products(rig), link.measure(rig, results)
    for share in _SHARES:
        for name, policy in _policies().items():
            with results.system(f"budget of {share} %", name):
                _measure(rig, results, products, raw, share, name, policy)
            rig.clean()


def main(arguments: Sequence[str] | None = None) -> None:
    _rig.run("foresight", __doc__, measure, arguments)


if __name__ == "__main__":
    main()
