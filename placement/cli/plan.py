"""`placement plan`: the bytes that a job needs on the device in each phase and the cost of its
moves, before it runs. `placement explain`: where a policy puts every handle in every phase, for a
worker of ordinary size."""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Literal

from placement import forecasting
from placement.cli.workers import plain_table
from placement.core.errors import PlacementError
from placement.core.settings import Settings, nearest, parse_bytes
from placement.core.snapshot import WORDS, readable
from placement.core.states import IDLE, PHASES, ROLES, WORKER_ROLES, State
from placement.forecasting.description import CYCLES, Forecast, PhaseForecast
from placement.planning.policy_lookup import policy_names

if TYPE_CHECKING:
    from placement.core.states import OwnPhases, Policy

_TRAINED = ("actor", "critic")
_DEFAULT_ROLES = {"grpo": "actor,ref", "ppo": "actor,critic,ref,reward"}
_POLICY_HELP = (
    f"{', '.join(policy_names())} or package.module:Class (default: the settings' policy)"
)
_BUDGET_HELP = "device bytes that the handles may hold together"

_SAMPLE_BUDGET_BYTES = 80 << 30
_SAMPLE_CYCLE = (
    *(
        "rollout",
        "reward",
        "log_prob",
        "ref_log_prob",
        "values",
        "train",
        "optimizer_step",
        "weight_sync",
    ),
    *("checkpoint", "eval", "restore"),
)
"""The order of a PPO step, then the phases outside it."""
_MARKS = WORDS | {State.CPU_OFFLOADED: "-"}
_STREAMED = "stream"
_LEGEND = (
    "on device: bytes held in the phase; moved: bytes copied both ways since the row above (for "
    "the first, the last)"
)
_COMMA = re.compile(r",(?![^(]*\))")  # one that is not inside the brackets of a policy's options


def add_plan(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    config = "the config.json of transformers of every model, or a folder with one"
    add("model", metavar="CONFIG", help=f"{config}; nothing is downloaded")
    add("--roles", help="the models (default actor,ref; with --cycle ppo: with critic and reward)")
    add("--dtype", help="of trained weights, such as bfloat16 (default: as CONFIG says)")
    optimizers = "adamw, adamw-fp32, adamw-master, sgd or sgd-momentum (default adamw)"
    add("--optimizer", default="adamw", help=optimizers)
    add("--shards", type=int, default=1, metavar="N", help="ranks that share each parameter")
    add("--kv-cache", metavar="BYTES", help="of a rollout engine that places its own memory")
    weights = "the engine's on a GPU (default: the actor's in bfloat16)"
    add("--rollout-weights", metavar="BYTES", help=weights)
    dropped = "the engine drops its weights when it sleeps (level 2)"
    add("--discard-weights", action="store_true", help=dropped)
    cycle = f"{', '.join(CYCLES)}, or phases: rollout,log_prob[actor+ref],train (default grpo)"
    add("--cycle", default="grpo", help=cycle)
    work = "the duration of each phase without moves; a prefetch needs it"
    add("--work", default="", metavar="PHASE=SECONDS,...", help=work)
    add("--policy", help=f"{_POLICY_HELP}; several, with commas: side by side")
    add("--budget", metavar="BYTES", help=_BUDGET_HELP)
    link = "what `placement doctor --json` wrote, or bytes a second each way, such as 50GB"
    add("--link", metavar="FILE", help=link)
    _add_settings(parser)
    add("--json", action="store_true", help="print everything as JSON, for scripts")
    parser.set_defaults(run=run_plan)


def _add_settings(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--worker-role", choices=WORKER_ROLES, help="what the process is for (default hybrid)"
    )
    parser.add_argument(
        "--settings",
        metavar="FILE",
        help="TOML file with policy, budget_bytes, worker_role and phases",
    )


def run_plan(arguments: argparse.Namespace) -> int:
    """Print the forecast. Returns 0; 1 where a phase does not fit or has no plan; 2 for a mistake
    in the arguments or the settings."""
    try:
        settings = Settings.from_any(arguments.settings or {})
        named = _COMMA.split(arguments.policy or settings.policy)
        policies = [policy.strip() for policy in named if policy.strip()]
        if not policies:
            raise ValueError(f"--policy names no policy; write some of {', '.join(policy_names())}")
        forecasts = [_forecast(policy, arguments, settings) for policy in policies]
    except (ValueError, OSError, ImportError, PlacementError) as error:
        print(f"placement plan: {error}", file=sys.stderr)
        return 2
    if arguments.json:
        dumped = [forecast.model_dump(mode="json") for forecast in forecasts]
        print(json.dumps(dumped if len(dumped) > 1 else dumped[0], indent=1))
    elif len(forecasts) > 1:
        print(comparison(forecasts, policies))
    else:
        print(table(forecasts[0]))
    return int(not all(forecast.fits for forecast in forecasts))


def _forecast(policy: str, arguments: argparse.Namespace, settings: Settings) -> Forecast:
    return forecasting.forecast(
        _register_function(arguments),
        policy=policy,
        cycle=arguments.cycle,
        budget_bytes=arguments.budget or settings.budget_bytes,
        link=arguments.link,
        work_seconds=_seconds_of(arguments.work),
        shards=arguments.shards,
        worker_role=arguments.worker_role or settings.worker_role,
        phases=settings.phases,
    )


def _register_function(arguments: argparse.Namespace) -> Callable[[forecasting.Run], None]:
    """The function that registers the objects of the arguments."""
    from placement.forecasting.config import OPTIMIZERS, module_of
    from placement.tensors.plain import dtype_of

    roles = _words(arguments.roles or _DEFAULT_ROLES.get(arguments.cycle, "actor,ref"))
    unknown = [role for role in roles if role not in ROLES]
    if unknown:
        raise ValueError(
            f"--roles: {', '.join(unknown)} is not among the job's roles; choose from "
            f"{', '.join(ROLES)}"
        )
    if arguments.optimizer not in OPTIMIZERS:
        raise ValueError(
            f"--optimizer: unknown {arguments.optimizer!r}"
            f"{nearest(arguments.optimizer, OPTIMIZERS)}; known: {', '.join(OPTIMIZERS)}"
        )
    engine = _engine(arguments, roles)
    dtype = dtype_of(arguments.dtype)

    def register(run: forecasting.Run) -> None:
        for role in roles:
            is_trained = role in _TRAINED
            head: Literal["value", "lm"] = "value" if role in ("critic", "reward") else "lm"
            model = module_of(arguments.model, dtype if is_trained else None, head)
            run.register(role, model, role=role, readonly=not is_trained and role != "rollout")
            if is_trained:
                optimizer = OPTIMIZERS[arguments.optimizer](model.parameters())
                run.register(f"{role}.optimizer", optimizer)
        if engine is not None:
            run.register("rollout", engine, role="rollout")

    return register


def _engine(arguments: argparse.Namespace, roles: Sequence[str]) -> forecasting.Rollout | None:
    from placement.forecasting.config import module_of
    from placement.forecasting.stand_ins import parts_of
    from placement.tensors.plain import dtype_of

    if not arguments.kv_cache and not arguments.rollout_weights:
        if arguments.discard_weights:
            raise ValueError(
                "--discard-weights describes a rollout engine, and the job has none; give "
                "--kv-cache or --rollout-weights, too"
            )
        return None
    if "rollout" in roles:
        raise ValueError(
            "--kv-cache and --rollout-weights describe the rollout engine: leave the role rollout "
            "out of --roles"
        )
    weights_bytes = arguments.rollout_weights
    if not weights_bytes:
        parts = parts_of(module_of(arguments.model, dtype_of("bfloat16")))
        weights_bytes = sum(part.nbytes for part in parts)
    return forecasting.Rollout(
        weights_bytes, arguments.kv_cache or 0, keeps_weights=not arguments.discard_weights
    )


def _seconds_of(text: str) -> dict[str, float]:
    seconds = {}
    for word in _words(text):
        phase, _, number = word.partition("=")
        try:
            seconds[phase.strip()] = float(number)
        except ValueError:
            raise ValueError(f"--work: {word!r} is not of the form PHASE=SECONDS") from None
    return seconds


def _words(text: str) -> Sequence[str]:
    return [word.strip() for word in text.split(",") if word.strip()]


# --- a forecast as text


def table(forecast: Forecast) -> str:
    """One forecast: its phases, its handles, and the sums."""
    rows = []
    for phase in forecast.phases:
        rows.append(
            (
                _name(phase),
                readable(phase.device_bytes),
                readable(phase.loaded_bytes),
                readable(phase.offloaded_bytes),
                readable(phase.skipped_bytes),
                _seconds(phase.stall_seconds),
                _seconds(phase.work_seconds),
            )
        )
    columns = ("phase", "device", "load", "offload", "clean", "stall s", "work s")
    head, *body = plain_table(columns, rows).splitlines()
    lines = [f"policy {forecast.policy}, budget {_readable_budget(forecast)}", "", head]
    for phase, line in zip(forecast.phases, body, strict=True):
        lines += [line, *(f"  {remark}" for remark in _remarks(phase))]
    handles = []
    for handle in forecast.handles:
        sizes = readable(handle.num_bytes), readable(handle.host_bytes)
        handles.append((handle.name, *sizes))
    lines += _troubles_at_first(forecast)
    lines += ["", plain_table(("handle", "device", "host"), handles), ""]
    lines += _sums(forecast)
    return "\n".join(lines)


def comparison(forecasts: Sequence[Forecast], heads: Sequence[str]) -> str:
    """Several forecasts side by side: the device bytes and the stall of each phase, then the sums.
    `heads`: of the columns, such as policies with their options."""
    first_column = [*map(_name, forecasts[0].phases), "peak", "loaded", "offloaded", "host"]
    columns = [["", *first_column, "stall", "fits"]]
    for head, forecast in zip(heads, forecasts, strict=True):
        sizes = [
            readable(phase.device_bytes) if phase.fits else "refused" for phase in forecast.phases
        ]
        sizes += map(readable, (forecast.peak_bytes, forecast.loaded_bytes))
        sizes += map(readable, (forecast.offloaded_bytes, forecast.host_bytes))
        fits = "yes"
        if not forecast.fits:
            over = forecast.over_bytes
            fits = f"no, {readable(over)} over" if over else "no"
        columns.append([head, *sizes, "", fits])
        stalls = [_seconds(phase.stall_seconds) for phase in forecast.phases]
        stalls += ["", "", "", "", _seconds(forecast.stall_seconds), ""]
        columns.append(["stall s", *stalls])
    names, *rows = zip(*columns, strict=True)
    lines = [f"budget {_readable_budget(forecasts[0])}", "", plain_table(names, rows)]
    notes = dict.fromkeys(note for forecast in forecasts for note in forecast.notes)
    return "\n".join([*lines, *(f"note: {note}" for note in notes)])


def _name(phase: PhaseForecast) -> str:
    return phase.phase if phase.only is None else f"{phase.phase}[{'+'.join(phase.only)}]"


def _trouble(phase: PhaseForecast) -> str:
    """Why a phase has no plan or does not fit; empty where it does."""
    if phase.problem:
        return f"no plan: {phase.problem}"
    if not phase.over_bytes:
        return ""
    return (
        f"does not fit: needs {readable(phase.wanted_bytes)}, {readable(phase.over_bytes)} "
        f"({phase.over_bytes:,} bytes) too many"
    )


def _remarks(phase: PhaseForecast) -> list[str]:
    trouble = _trouble(phase)
    if trouble:
        return [trouble]
    remarks = []
    if phase.prefetched_bytes:
        remarks.append(f"{readable(phase.prefetched_bytes)} of what it loads came early")
    if phase.streamed_bytes:
        remarks.append(
            f"steps: {readable(phase.streamed_bytes)} of what it loads and offloads is streamed by "
            "optimizers"
        )
    if phase.gradient_bytes:
        remarks.append(f"gradients: {readable(phase.gradient_bytes)} in torch's own memory beside")
    return remarks


def _troubles_at_first(forecast: Forecast) -> list[str]:
    """Lines about phases that fail in the first step alone, or at registration."""
    if forecast.fits or any(not phase.fits for phase in forecast.phases):
        return []
    troubles = []
    for phase in forecast.first_phases:
        if not phase.fits:
            troubles.append(f"{_name(phase)}: {_trouble(phase)}")
    if not troubles:
        troubles = [f"{readable(forecast.over_bytes)} too many"]
    return ["", "in the first step, or at registration:", *troubles]


def _sums(forecast: Forecast) -> list[str]:
    loaded, offloaded = readable(forecast.loaded_bytes), readable(forecast.offloaded_bytes)
    stall = _seconds(forecast.stall_seconds, " s")
    if forecast.stall_seconds is None:
        stall += " (no link given: see placement doctor --json)"
    verdict = "everything fits" if forecast.budget_bytes is not None else "no budget given"
    if not forecast.fits:
        over = forecast.over_bytes
        verdict = f"it does not fit: {readable(over)} too many" if over else "it does not fit"
    return [
        f"peak on the device    {readable(forecast.peak_bytes)} ({forecast.peak_bytes:,} bytes)",
        f"host memory           {readable(forecast.host_bytes)} a rank",
        f"moved a step          {loaded} loaded, {offloaded} offloaded",
        f"stall a step          {stall}",
        *(f"note: {note}" for note in forecast.notes),
        verdict,
    ]


def _seconds(seconds: float | None, unit: str = "") -> str:
    return "-" if seconds is None else f"{seconds:.3f}{unit}"


def _readable_budget(forecast: Forecast) -> str:
    return "none" if forecast.budget_bytes is None else readable(forecast.budget_bytes)


# --- placement explain


def add_explain(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("policy", nargs="?", help=_POLICY_HELP)
    parser.add_argument("--budget", metavar="BYTES", help=f"{_BUDGET_HELP} (default 80GiB)")
    _add_settings(parser)
    parser.set_defaults(run=run_explain)


def run_explain(arguments: argparse.Namespace) -> int:
    """Print the table. Returns 0; 1 where a phase has no plan or does not fit; 2 where the settings
    cannot be read."""
    try:
        settings = Settings.from_any(arguments.settings or {})
        budget_bytes = parse_bytes(arguments.budget) if arguments.budget else settings.budget_bytes
    except (ValueError, OSError) as error:
        print(f"placement explain: {error}", file=sys.stderr)
        return 2
    status, text = explain(
        arguments.policy or settings.policy,
        budget_bytes=_SAMPLE_BUDGET_BYTES if budget_bytes is None else budget_bytes,
        worker_role=arguments.worker_role or settings.worker_role,
        phases=settings.phases,
    )
    print(text)
    return status


def explain(
    policy: str | type[Policy] | Policy,
    *,
    budget_bytes: int = _SAMPLE_BUDGET_BYTES,
    worker_role: str = "hybrid",
    phases: OwnPhases | None = None,
) -> tuple[int, str]:
    """A policy's table of phases and handles for the worker of `register_sample`. The status with
    it is 1 where a phase has no plan or does not fit, else 0.

    The rows follow one another as in a step that is repeated, and are those of the steady state: a
    policy may keep handles that are on the device already, and learn the phases that come next.
    """
    own = phases or {}
    cycle = [*_SAMPLE_CYCLE, *(name for name in own if name not in PHASES)]
    forecast = forecasting.forecast(
        register_sample,
        policy=policy,
        cycle=cycle,
        budget_bytes=budget_bytes,
        worker_role=worker_role,
        phases=own,
    )
    refused = _refused(forecast)
    own_names = f", own phases: {', '.join(own)}" if own else ""
    sizes = {handle.name: handle.num_bytes for handle in forecast.handles}
    rows = [("  its size", *map(readable, sizes.values()), "", "")]
    rows += [_states_row(phase, sizes) for phase in forecast.phases]
    budget = readable(budget_bytes)
    lines = [
        f"policy {forecast.policy}, budget {budget}, worker role {worker_role}{own_names}\n",
        plain_table(("phase", *sizes, "on device", "moved"), rows),
    ]
    if refused:
        lines += ["", "refused, so that everything stays as in the phase before:", *refused]
    marks = [f"{mark} {state}" for state, mark in _MARKS.items()]
    lines += [
        "",
        "  ".join([*marks, f"{_STREAMED} from the host copy"]),
        _LEGEND,
    ]
    return int(bool(refused)), "\n".join(lines)


def _refused(forecast: Forecast) -> list[str]:
    """A line for each phase that has no plan or does not fit."""
    lines = {}
    for phase in (*forecast.first_phases, *forecast.phases):
        if not phase.fits:
            lines[phase.phase] = f"{phase.phase}: {_trouble(phase)}"
    if not forecast.fits and not lines:  # registrations happen outside every phase
        over = readable(forecast.over_bytes)
        lines[IDLE] = f"{IDLE}: does not fit once all is registered: {over} too many"
    return list(lines.values())


def register_sample(run: forecasting.Run) -> None:
    """One of eight ranks that train an actor and a critic of 7 billion parameters with PPO, with a
    rollout engine on the same GPU."""
    import torch

    from placement.forecasting.config import OPTIMIZERS

    for role in ("actor", "ref", "critic", "reward"):
        with torch.device("meta"):
            # 7.6 billion parameters / 8
            model = torch.nn.ParameterList(
                torch.empty(19 << 19, dtype=torch.bfloat16) for _ in range(97)
            )
        run.register(role, model, role=role, readonly=role not in _TRAINED)
        if role in _TRAINED:
            run.register(f"{role}.optimizer", OPTIMIZERS["adamw-master"](model.parameters()))
    engine = forecasting.Rollout(weights_bytes="14GiB", kv_cache_bytes="50GiB")
    run.register("rollout", engine, role="rollout")


def _states_row(phase: PhaseForecast, sizes: Mapping[str, int]) -> tuple[str, ...]:
    marks = []
    for name, nbytes in sizes.items():
        state = phase.states[name]
        is_used = state in (State.SYNCING, State.TRAINING)
        is_streamed = is_used and phase.handle_bytes[name] < nbytes
        marks.append(_STREAMED if is_streamed else _MARKS[state])
    return (
        phase.phase,
        *marks,
        readable(phase.device_bytes),
        readable(phase.loaded_bytes + phase.offloaded_bytes),
    )
