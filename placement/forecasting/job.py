"""Forecast a job: `placement.forecast`."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence

import torch

from placement.core.states import OwnPhases, Policy
from placement.forecasting.description import Forecast, Link, cycle_of
from placement.forecasting.device import SizesDevice
from placement.forecasting.run import Run
from placement.forecasting.stand_ins import size_of
from placement.planning.planner import HEADROOM
from placement.planning.policy_lookup import resolve_policy
from placement.storage.layout import Sizing


@torch.inference_mode(mode=False)
def forecast(
    register: Callable[[Run], object],
    *,
    policy: str | type[Policy] | Policy = "colocated",
    cycle: str | Sequence[str] = "grpo",
    budget_bytes: int | str | None = None,
    link: Link | float | str | os.PathLike[str] | None = None,
    work_seconds: Mapping[str, float] | None = None,
    shards: int = 1,
    worker_role: str = "hybrid",
    phases: OwnPhases | None = None,
    device: Sizing | None = None,
) -> Forecast:
    """Tell the bytes that a job needs in each phase and the cost of its moves, before it runs.

    Args:
        register: the worker's own function that registers its objects, with the models on the meta
            device. It is called with a `Run`, whose `register` takes the place of the manager's.
        policy: in any form that `Manager` takes.
        cycle: the phases of a step: "grpo", "ppo", or their names in order; "log_prob[ref]" for a
            phase with `only=["ref"]`. Between them the worker switches; where it leaves one phase
            before it enters the next, write "idle" in between.
        budget_bytes: device bytes that the handles may hold together. None: with a link that was
            measured, 80 % of the free memory, as in a manager without a budget at first; else no
            limit.
        link: the file of `placement doctor --json`, a `Link`, or one rate for each way in bytes a
            second. None: no seconds are told.
        work_seconds: the duration of each phase without its moves. Needed only to tell the gain of
            a prefetch.
        shards: the ranks that share each parameter, as FSDP2 does: every one holds a part of its
            first dimension.
        worker_role: see `Manager`.
        phases: the user's own phases, see `Settings.phases`.
        device: whose chunks the bytes are counted in: a `Device`. None: a CUDA device.

    Raises:
        ValueError: nothing is registered, or an object, the cycle, a role or a number is wrong.
        TypeError: a registered object is none that a forecast knows, or a number of bytes is none.
        OSError: the link's file cannot be read.
        PolicyError: the policy cannot be found or constructed.
        PhaseError: a phase's `only` names a handle that there is not.
        RegistrationError: as `Manager.register`.

    Example:
        ::

            def register(manager):
                manager.register("actor", model, role="actor")
                manager.register("actor.optimizer", torch.optim.AdamW(model.parameters()))

            assert placement.forecast(register, shards=8, budget_bytes="70GiB").fits
    """
    measured = None if link is None else Link.of(link)
    entered = cycle_of(cycle, phases)
    _check_work(work_seconds or {}, [phase.name for phase in entered])
    if shards < 1:
        raise ValueError(f"shards must be a whole number from 1 on, not {shards!r}")
    budget = None if budget_bytes is None else size_of("budget_bytes", budget_bytes)
    notes = []
    if budget is None and measured is not None and measured.free_bytes is not None:
        budget = int(measured.free_bytes * (1 - HEADROOM))
        notes.append(
            f"no budget was given: 80 % of the {measured.free_bytes:,} free bytes of the device "
            "is used"
        )
    run = Run(
        resolve_policy(policy),
        SizesDevice(measured, device),
        shards=shards,
        budget_bytes=budget,
        work_seconds=work_seconds,
        worker_role=worker_role,
        phases=dict(phases or {}),
    )
    with run:
        register(run)
        return run.in_the_steady_state(entered, notes)


def _check_work(work_seconds: Mapping[str, float], phases: Sequence[str]) -> None:
    for phase, seconds in work_seconds.items():
        if phase not in phases:
            raise ValueError(
                f"the work seconds of {phase!r}, which the cycle does not have, cannot be used"
            )
        if not 0 <= seconds < math.inf:
            raise ValueError(
                f"the work seconds of phase {phase!r} must be 0 or more, not {seconds}"
            )
