"""`placement explain POLICY`: print where a policy puts every handle in every phase, for a worker of ordinary size."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, TextIO

from placement import forecasting
from placement.cli.workers import plain_table
from placement.core.settings import Settings, parse_bytes
from placement.core.snapshot import readable
from placement.core.states import IDLE, PHASES, WORKER_ROLES, OwnPhases, State
from placement.forecasting.description import Phase, PhaseForecast
from placement.planning.policy_lookup import policy_names

if TYPE_CHECKING:
    from placement.core.states import Policy

GIB = 1 << 30
BUDGET_BYTES = 80 * GIB

_STEP = (
    *("rollout", "reward", "log_prob", "ref_log_prob", "values", "train", "optimizer_step", "weight_sync"),
    *("checkpoint", "eval", "restore"),
)
"""The order of a PPO step, then the phases outside it."""
_MARKS = {State.CPU_OFFLOADED: "-", State.GPU_RESIDENT: "gpu", State.SYNCING: "sync", State.TRAINING: "train"}
_STREAMED = "stream"


def sample() -> dict[str, forecasting.Model | forecasting.Rollout]:
    """One of eight ranks that train an actor and a critic of 7 billion parameters with PPO, with a rollout engine on the same GPU."""
    import torch

    with torch.device("meta"):
        model = torch.nn.ParameterList(torch.empty(19 << 19, dtype=torch.bfloat16) for _ in range(97))  # 7.6 billion parameters / 8
    trained = forecasting.Model(model, optimizer="adamw-master")
    frozen = forecasting.Model(model, readonly=True)
    engine = forecasting.Rollout(weights_bytes="14GiB", kv_cache_bytes="50GiB")
    return {"actor": trained, "ref": frozen, "critic": trained, "reward": frozen, "rollout": engine}


def explain(
    policy_spec: str | type[Policy] | Policy,
    file: TextIO | None = None,
    *,
    budget_bytes: int = BUDGET_BYTES,
    worker_role: str = "hybrid",
    phases: OwnPhases | None = None,
) -> int:
    """Print a policy's table of phases and handles for the `sample`. Returns 1 where a phase has no plan or its plan does not fit, else 0.

    The rows follow one another as in a step that is repeated, and are those of the steady state: a policy may keep handles that are on
    the device already, and learn what comes next.

    Raises:
        PolicyError: the policy cannot be found or constructed.
    """
    own = dict(phases or {})
    cycle = [Phase(name) for name in (*_STEP, *(name for name in own if name not in PHASES))]
    found = forecasting.forecast(
        sample(), policy=policy_spec, cycle=cycle, budget_bytes=budget_bytes, worker_role=worker_role, phases=own or None
    )
    refused: dict[str, str] = {}
    for each in (*found.first_phases, *found.phases):
        if not each.fits:
            too_large = f"does not fit: needs {readable(each.wanted_bytes)}, {readable(each.over_bytes)} too many"
            refused[each.phase] = f"{each.phase}: {each.problem or too_large}"
    if not found.fits and not refused:  # registrations happen outside every phase
        refused[IDLE] = f"{IDLE}: does not fit once all is registered: {readable(found.over_bytes)} too many"
    user = f", own phases: {', '.join(own)}" if own else ""
    sizes = {handle.name: handle.num_bytes for handle in found.handles}
    rows = [("  its size", *map(readable, sizes.values()), "", ""), *(_row(each, sizes) for each in found.phases)]
    lines = [
        f"policy {found.policy}, budget {readable(budget_bytes)}, worker role {worker_role}{user}\n",
        plain_table(("phase", *sizes, "on device", "moved"), rows),
        *(["", "refused, so that everything stays as in the phase before:", *refused.values()] if refused else []),
        "",
        "  ".join(f"{mark} {state}" for state, mark in _MARKS.items()) + f"  {_STREAMED} from the host copy",
        "on device: bytes held in the phase; moved: bytes copied both ways since the row above (for the first, the last)",
    ]
    print("\n".join(lines), file=file or sys.stdout)
    return int(bool(refused))


def _row(phase: PhaseForecast, sizes: Mapping[str, int]) -> tuple[str, ...]:
    marks = []
    for name, nbytes in sizes.items():
        state = phase.states[name]
        is_streamed = state in (State.SYNCING, State.TRAINING) and phase.handle_bytes[name] < nbytes
        marks.append(_STREAMED if is_streamed else _MARKS[state])
    return phase.phase, *marks, readable(phase.device_bytes), readable(phase.loaded_bytes + phase.offloaded_bytes)


def add_explain(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("policy", nargs="?", help=f"{', '.join(policy_names())} or package.module:Class (default: the settings' policy)")
    add("--budget", metavar="BYTES", help=f"device bytes that the handles may hold together (default {BUDGET_BYTES // GIB}GiB)")
    add("--worker-role", choices=WORKER_ROLES, help="what the process is for (default hybrid)")
    add("--settings", metavar="FILE", help="TOML file with policy, budget_bytes, worker_role and phases")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print the table. Returns 0; 1 where a phase has no plan or does not fit; 2 where the settings cannot be read."""
    try:
        settings = Settings.from_any(arguments.settings or {})
        budget_bytes = parse_bytes(arguments.budget) if arguments.budget else settings.budget_bytes
    except (ValueError, OSError) as exc:
        print(f"placement explain: {exc}", file=sys.stderr)
        return 2
    policy = arguments.policy or settings.policy
    if ":" in policy and os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # a console script does not search the working directory for modules
    return explain(
        policy,
        budget_bytes=BUDGET_BYTES if budget_bytes is None else budget_bytes,
        worker_role=arguments.worker_role or settings.worker_role,
        phases=settings.phases,
    )
