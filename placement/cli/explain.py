"""`placement explain POLICY`: print where a policy puts every handle in every phase, for a worker of ordinary size."""

from __future__ import annotations

import argparse
import os
import sys
from typing import TYPE_CHECKING, TextIO

from placement.cli.reasons import live
from placement.cli.reasons.cycle import in_a_known_cycle
from placement.core.settings import Settings, parse_bytes
from placement.core.states import IDLE, PHASES, WORKER_ROLES, HandleView, OwnPhases, State, View
from placement.planning.policy_lookup import policy_names, resolve_policy
from placement.planning.simulated_handles import Moved, PlainHandle
from placement.planning.simulation import SimulatedPhase, Simulation, Step

if TYPE_CHECKING:
    from placement.core.states import Policy

GIB = 1 << 30
BUDGET_BYTES = 80 * GIB

_MODEL = int(1.8 * GIB)  # 7.6 billion parameters in bfloat16, sharded over eight ranks
_OPTIMIZER = int(10.6 * GIB)  # their float32 copy and two moments
_WINDOW = 3 * GIB // 2  # three buckets of a streamed step
_ENGINE = 64 * GIB  # the whole model and its KV cache
SAMPLE = (
    HandleView(name="actor", kind="module", role="actor", state=State.CPU_OFFLOADED, num_bytes=_MODEL),
    HandleView(
        name="actor.optimizer",
        kind="optimizer",
        role="actor",
        state=State.CPU_OFFLOADED,
        num_bytes=_OPTIMIZER,
        owners=("actor",),
        window_bytes=_WINDOW,
    ),
    HandleView(name="ref", kind="module", role="ref", state=State.CPU_OFFLOADED, num_bytes=_MODEL, readonly=True),
    HandleView(name="critic", kind="module", role="critic", state=State.CPU_OFFLOADED, num_bytes=_MODEL),
    HandleView(
        name="critic.optimizer",
        kind="optimizer",
        role="critic",
        state=State.CPU_OFFLOADED,
        num_bytes=_OPTIMIZER,
        owners=("critic",),
        window_bytes=_WINDOW,
    ),
    HandleView(name="reward", kind="module", role="reward", state=State.CPU_OFFLOADED, num_bytes=_MODEL, readonly=True),
    HandleView(name="rollout", kind="engine", role="rollout", state=State.CPU_OFFLOADED, num_bytes=_ENGINE, can_prefetch=False),
)
"""One of eight ranks that train an actor and a critic of 7 billion parameters with PPO, with a rollout engine on the same GPU."""

_STEP = (
    *("rollout", "reward", "log_prob", "ref_log_prob", "values", "train", "optimizer_step", "weight_sync"),
    *("checkpoint", "eval", "restore", IDLE),
)
"""The order of a PPO step, then the phases outside it."""
_MARKS = {State.CPU_OFFLOADED: "-", State.GPU_RESIDENT: "gpu", State.SYNCING: "sync", State.TRAINING: "train"}
_STREAMED = "stream"


def explain(
    policy_spec: str | type[Policy] | Policy,
    file: TextIO | None = None,
    *,
    budget_bytes: int = BUDGET_BYTES,
    worker_role: str = "hybrid",
    phases: OwnPhases | None = None,
) -> int:
    """Print a policy's table of phases and handles for `SAMPLE`.

    The rows follow one another as in a step. Each phase starts from the states of the row above, because a policy may keep handles
    that are on the device already.

    Args:
        policy_spec: a policy in any form that `resolve_policy` takes.
        file: where to print; None: standard output.
        budget_bytes: device bytes that the handles may hold together.
        phases: the user's own phases, as in `Settings.phases`.

    Returns:
        0, or 1 where a phase has no plan or its plan does not fit the budget.

    Raises:
        PolicyError: the policy cannot be found or constructed.
    """
    policy = resolve_policy(policy_spec)
    own = dict(phases or {})
    simulation = Simulation(policy, [PlainHandle(facts) for facts in SAMPLE], budget_bytes, worker_role, own)
    names = (IDLE, *_STEP[:-1], *(name for name in own if name not in PHASES))
    steps = [simulation.enter(SimulatedPhase(name)) for name in names]
    print(_table(policy.name, simulation.view(SimulatedPhase(IDLE)), steps), file=file or sys.stdout)
    for line in in_a_known_cycle(policy, SAMPLE, _STEP[: _STEP.index("checkpoint")], budget_bytes, worker_role):
        print(line, file=file or sys.stdout)
    return 1 if any(step.is_refused for step in steps) else 0


def _table(name: str, view: View, steps: list[Step]) -> str:
    # "actor.optimizer" is split into two lines, so that seven handles and the sums fit into 100 columns.
    heads = [(*handle.split(".", 1), "")[:2] for handle in view.handles]
    widths = [max(len(first), len(second) + 1 if second else 0, 6) for first, second in heads]
    left = max(len(step.phase.name) for step in steps) + 2
    user = f", own phases: {', '.join(view.phases)}" if view.phases else ""

    def line(start: str, cells: list[str], *sums: str) -> str:
        return f"{start:<{left}}" + "".join(f"{c:<{w + 2}}" for c, w in zip(cells, widths, strict=True)) + "".join(f"{s:>9}" for s in sums)

    lines = [f"policy {name}, budget {_gib(view.budget_bytes)} GiB, worker role {view.worker_role}{user}", ""]
    lines.append(line("phase", [first for first, _ in heads], "device", "moved"))
    lines.append(line("", ["." + second if second else "" for _, second in heads], "GiB", "GiB"))
    lines.append(line("  size in GiB", [_gib(h.num_bytes) for h in view.handles.values()]))
    for step in steps:
        if step.plan is None:
            lines.append(f"{step.phase.name:<{left}}no plan: {step.problem}")
            continue
        marks = [_STREAMED if n in step.plan.streamed else _MARKS[step.plan[n]] for n in view.handles]
        moved = Moved.total(step.moved.values())
        lines.append(line(step.phase.name, marks, _gib(step.device_bytes), _gib(moved.loaded_bytes + moved.offloaded_bytes)))
        if step.over_bytes:
            lines.append(f"{'':<{left}}does not fit: {_gib(step.over_bytes)} GiB over the budget")
    lines += ["", "  ".join(f"{mark} {state}" for state, mark in _MARKS.items()) + f"  {_STREAMED} from the host copy"]
    lines.append("device: bytes held in the phase; moved: bytes copied both ways since the row above")
    return "\n".join(text.rstrip() for text in lines)


def _gib(nbytes: int) -> str:
    return "0" if nbytes == 0 else f"{nbytes / GIB:.1f}"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("policy", nargs="?", help=f"{', '.join(policy_names())} or package.module:Class (default: the settings' policy)")
    parser.add_argument(
        "--budget", metavar="BYTES", help=f"device bytes that the handles may hold together (default {BUDGET_BYTES // GIB}GiB)"
    )
    parser.add_argument("--worker-role", choices=WORKER_ROLES, help="what the process is for (default hybrid)")
    parser.add_argument("--settings", metavar="FILE", help="TOML file with policy, budget_bytes, worker_role and phases")
    live.add_argument(parser)


def run(arguments: argparse.Namespace) -> int:
    """Print the table. Returns 0; 1 where a phase has no plan or does not fit; 2 where the settings cannot be read.

    Raises:
        PlacementError: the worker of `--live` does not answer.
    """
    if arguments.live:
        return live.run(arguments.live)
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
