"""`placement explain POLICY`: print where a policy puts every handle in every phase, for a worker of ordinary size.

The rows are the first step that such a worker makes. `--live` tells of a running worker instead, in the words of its policy.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from typing import TYPE_CHECKING, Any, TextIO

from placement.cli.workers import plain_table
from placement.core.errors import PlacementError
from placement.core.settings import Settings, parse_bytes
from placement.core.snapshot import readable
from placement.core.states import IDLE, PHASES, WEIGHTS, WORKER_ROLES, HandleView, OwnPhases, State
from placement.forecasting.description import Phase, PhaseForecast
from placement.observe.fleet import ask, find_targets
from placement.planning.policy_lookup import policy_names, resolve_policy

if TYPE_CHECKING:
    from placement.core.states import Policy

GIB = 1 << 30
BUDGET_BYTES = 80 * GIB

_MODEL = 1843 << 20  # 7.6 billion parameters in bfloat16, sharded over eight ranks
_OPTIMIZER = 10854 << 20  # their float32 copy and two moments
_ENGINE = 64 * GIB  # the whole model and its KV cache


def _sample(name: str, nbytes: int, **more: Any) -> HandleView:
    role, dot, _ = name.partition(".")
    kind, owners = ("optimizer", (role,)) if dot else ("module", ())
    given = {"kind": kind, "role": role, "owners": owners, "state": State.CPU_OFFLOADED, "num_bytes": nbytes}
    return HandleView(name=name, **{**given, **more})


SAMPLE = (
    _sample("actor", _MODEL),
    _sample("actor.optimizer", _OPTIMIZER),
    _sample("ref", _MODEL, readonly=True),
    _sample("critic", _MODEL),
    _sample("critic.optimizer", _OPTIMIZER),
    _sample("reward", _MODEL, readonly=True),
    _sample("rollout", _ENGINE, kind="engine", tags={WEIGHTS: _ENGINE}),
)
"""One of eight ranks that train an actor and a critic of 7 billion parameters with PPO, with a rollout engine on the same GPU."""

_STEP = (
    *("rollout", "reward", "log_prob", "ref_log_prob", "values", "train", "optimizer_step", "weight_sync"),
    *("checkpoint", "eval", "restore"),
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
    """Print a policy's table of phases and handles for `SAMPLE`. Returns 1 where a phase has no plan or its plan does not fit, else 0.

    The rows follow one another as in a step. Each phase starts from the states of the row above, because a policy may keep handles
    that are on the device already.

    Raises:
        PolicyError: the policy cannot be found or constructed.
    """
    from placement.forecasting.device import SizesDevice, objects_of
    from placement.forecasting.run import Run
    from placement.storage.layout import ALIGNMENT

    policy, own = resolve_policy(policy_spec), dict(phases or {})
    names = (*_STEP, *(name for name in own if name not in PHASES))
    device = SizesDevice(granularity=ALIGNMENT)
    sample = objects_of(device, SAMPLE, {})
    with Run(policy, device, sample, names, budget_bytes=budget_bytes, worker_role=worker_role, phases=own) as run:
        shown = [run.go(Phase(name)) for name in (IDLE, *names)]
        refused = [f"{IDLE}: {type(error).__name__}: {error}".partition("\n")[0] for error in run.asked.unfit[-1:]]
    for each in shown:
        if not each.fits:
            too_large = f"does not fit: needs {readable(each.wanted_bytes)}, {readable(each.over_bytes)} too many"
            refused.append(f"{each.phase}: {each.problem or too_large}")
    user = f", own phases: {', '.join(own)}" if own else ""
    rows = [("  its size", *(readable(handle.num_bytes) for handle in SAMPLE), "", ""), *map(_row, shown)]
    lines = [
        f"policy {policy.name}, budget {readable(budget_bytes)}, worker role {worker_role}{user}\n",
        plain_table(("phase", *(handle.name for handle in SAMPLE), "on device", "moved"), rows),
        *(["", "refused, so that everything stays as in the phase before:", *refused] if refused else []),
        "",
        "  ".join(f"{mark} {state}" for state, mark in _MARKS.items()) + f"  {_STREAMED} from the host copy",
        "on device: bytes held in the phase; moved: bytes copied both ways since the row above",
    ]
    print("\n".join(lines), file=file or sys.stdout)
    return int(bool(refused))


def _row(phase: PhaseForecast) -> tuple[str, ...]:
    marks = []
    for handle in SAMPLE:
        state = phase.states[handle.name]
        is_streamed = state in (State.SYNCING, State.TRAINING) and phase.handle_bytes[handle.name] < handle.num_bytes
        marks.append(_STREAMED if is_streamed else _MARKS[state])
    return phase.phase, *marks, readable(phase.device_bytes), readable(phase.loaded_bytes + phase.offloaded_bytes)


def add_explain(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("policy", nargs="?", help=f"{', '.join(policy_names())} or package.module:Class (default: the settings' policy)")
    add("--budget", metavar="BYTES", help=f"device bytes that the handles may hold together (default {BUDGET_BYTES // GIB}GiB)")
    add("--worker-role", choices=WORKER_ROLES, help="what the process is for (default hybrid)")
    add("--settings", metavar="FILE", help="TOML file with policy, budget_bytes, worker_role and phases")
    add("--live", metavar="URL", help="a worker's URL, one of targets, or a discovery folder: why each handle is where it is now")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print the table. Returns 0; 1 where a phase has no plan or does not fit; 2 where the settings cannot be read. Raises PlacementError:
    the worker of `--live` does not answer."""
    if arguments.live:
        return _tell_live(arguments.live)
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


def _tell_live(place: str) -> int:
    tables = []
    for target in find_targets([place]):
        page = ask(f"{target.url}/state")
        try:
            tables.append(live_table(target.name, json.loads(page)))
        except (ValueError, KeyError, TypeError) as error:
            raise PlacementError(f"{target.url}/state is not the state of a worker: {error!r}") from error
    print("\n\n".join(tables))
    return 0


def live_table(worker: str, snapshot: dict[str, Any]) -> str:
    """The handles of a running worker, and why each is where it is."""
    phases = " > ".join(snapshot["phases"]) or "idle"
    held = sum(handle["resident_bytes"] for handle in snapshot["handles"])
    head = f"{worker}: policy {snapshot['policy']}, in {phases}, {readable(held)} of {readable(snapshot['budget_bytes'])} on the device"
    rows = []
    for handle in snapshot["handles"]:
        why = [handle.get("reason") or "the policy does not say"]
        why += ["kept by phase.keep()"] if handle["kept"] else []
        why += [f"broken: {handle['broken']}"] if handle["broken"] else []
        rows.append((handle["name"], handle["state"], readable(handle["resident_bytes"]), "; ".join(why)))
    return f"{head}\n{plain_table(('handle', 'state', 'on device', 'why'), rows)}"
