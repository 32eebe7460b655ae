"""`placement plan`: what a job needs on the device in each phase and what its moves cost, before it
runs. `placement explain`: where a policy puts every handle in every phase, for a worker of ordinary
size."""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from placement import forecasting
from placement.cli.workers import plain_table
from placement.core.errors import PlacementError
from placement.core.settings import Settings, parse_bytes
from placement.core.snapshot import WORDS, readable
from placement.core.states import IDLE, PHASES, ROLES, WORKER_ROLES, State
from placement.forecasting.description import CYCLES, Forecast, Layout, PhaseForecast
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
_COMMA = re.compile(r",(?![^(]*\))")  # one that is not inside the brackets of a policy's options


def add_plan(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "model",
        metavar="CONFIG",
        help="the actor's config.json of transformers, or a folder with one; nothing is downloaded",
    )
    add(
        "--roles",
        help="which models there are (default actor,ref; for "
        "the "
        "cycle "
        "ppo "
        "actor,critic,ref,reward)",
    )
    add(
        "--model-of",
        action="append",
        default=[],
        metavar="ROLE=CONFIG",
        help="another configuration for a role; may be repeated",
    )
    add(
        "--dtype",
        help="of the weights of trained models, such as bfloat16 "
        "(default: "
        "as "
        "the "
        "configuration says)",
    )
    add(
        "--optimizer",
        default="adamw",
        help="adamw, adamw-fp32, adamw-master, "
        "sgd, "
        "sgd-momentum "
        "or package.module:Class (default "
        "adamw)",
    )
    add(
        "--gradients",
        default="cleared",
        choices=("cleared", "kept"),
        help="whether gradients are None when training ends",
    )
    add(
        "--replicated",
        default="",
        metavar="ROLES",
        help="readonly models of which the ranks of a node share one host copy",
    )
    add(
        "--kv-cache",
        metavar="BYTES",
        help="the rollout engine's KV cache on a GPU; gives "
        "the "
        "job "
        "an engine that places its own "
        "memory",
    )
    add(
        "--rollout-weights",
        metavar="BYTES",
        help="the engine's weights on a GPU (default: the actor's in bfloat16, divided)",
    )
    add(
        "--rollout-tensor-parallel",
        type=int,
        default=1,
        metavar="N",
        help="GPUs that share the engine (default 1)",
    )
    add(
        "--discard-weights",
        action="store_true",
        help="the engine drops its weights when it sleeps (level 2)",
    )
    for name, text in (
        ("data-parallel", "replicas"),
        ("shards", ("ranks that share each parameter (FSDP2)")),
        ("tensor-parallel", ""),
    ):
        add(
            f"--{name}",
            type=int,
            default=1,
            metavar="N",
            help=text or "ranks that share each layer",
        )
    add(
        "--gpus-per-node",
        type=int,
        default=8,
        metavar="N",
        help="GPUs of a machine; each rank has one (default 8)",
    )
    add(
        "--cycle",
        default="grpo",
        help=f"{', '.join(CYCLES)}, or phases: rollout,log_prob[actor+ref],train (default grpo)",
    )
    add(
        "--work",
        default="",
        metavar="PHASE=SECONDS,...",
        help="the duration of each phase without moves; a prefetch needs it",
    )
    add(
        "--steps",
        default="",
        metavar="PHASE=N,...",
        help="optimizer steps in each phase, if a policy streams their state (default 1)",
    )
    add("--policy", help=_POLICY_HELP)
    add("--compare", metavar="POLICIES", help="several policies side by side: colocated,resident")
    add("--budget", metavar="BYTES", help=_BUDGET_HELP)
    add("--link", metavar="FILE", help="what `placement doctor --json` wrote")
    add("--rate", metavar="BYTES", help="instead of --link: bytes a second each way, such as 50GB")
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
    in what was given."""
    try:
        if arguments.link and arguments.rate:
            raise ValueError("give --link or --rate, not both")
        settings = Settings.from_any(arguments.settings or {})
        named = _COMMA.split(arguments.compare or arguments.policy or settings.policy)
        chosen = [each.strip() for each in named if each.strip()]
        if not chosen:
            raise ValueError(
                f"--compare names no policy; write some of {', '.join(policy_names())}, with "
                "commas between them"
            )
        job = _job(arguments, settings)
        forecasts = [forecasting.forecast(policy=policy, **job) for policy in chosen]
    except (ValueError, OSError, ImportError, PlacementError) as error:
        print(f"placement plan: {error}", file=sys.stderr)
        return 2
    if arguments.json:
        found = [each.model_dump(mode="json") for each in forecasts]
        print(json.dumps(found if arguments.compare else found[0], indent=1))
    else:
        layout: Layout = job["layout"]
        how = (
            f"shards {layout.shards}, tensor parallel {layout.tensor_parallel}, data parallel "
            f"{layout.data_parallel}"
        )
        print(f"one of {layout.ranks} ranks ({how}), {layout.ranks_per_node} a node\n")
        print(comparison(forecasts, chosen) if len(forecasts) > 1 else table(forecasts[0]))
    return int(not all(each.fits for each in forecasts))


def _job(arguments: argparse.Namespace, settings: Settings) -> dict[str, Any]:
    """The arguments of `forecast`, without the policy."""
    models: dict[str, Any] = _models(arguments)
    if arguments.kv_cache or arguments.rollout_weights:
        models["rollout"] = _engine(arguments, models)
    elif arguments.discard_weights or arguments.rollout_tensor_parallel != 1:
        option = "--discard-weights" if arguments.discard_weights else "--rollout-tensor-parallel"
        raise ValueError(
            f"{option} describes a rollout engine, and the job has none; give --kv-cache or "
            "--rollout-weights, too"
        )
    return {
        "handles": models,
        "layout": Layout(
            **{
                name: getattr(arguments, name)
                for name in ("data_parallel", "shards", "tensor_parallel", "gpus_per_node")
            }
        ),
        "cycle": arguments.cycle,
        "budget_bytes": arguments.budget or settings.budget_bytes,
        "link": float(parse_bytes(arguments.rate)) if arguments.rate else arguments.link,
        "work_seconds": _numbers(arguments.work, "--work", "seconds", float),
        "steps": _numbers(arguments.steps, "--steps", "steps", int),
        "worker_role": arguments.worker_role or settings.worker_role,
        "phases": settings.phases,
    }


def _models(arguments: argparse.Namespace) -> dict[str, Any]:
    roles = _words(arguments.roles or _DEFAULT_ROLES.get(arguments.cycle, "actor,ref"))
    others = dict(_pair(text, "--model-of", "ROLE=CONFIG") for text in arguments.model_of)
    replicated = _words(arguments.replicated)
    for option, names in (("--roles", roles), ("--model-of", others), ("--replicated", replicated)):
        if unknown := [name for name in names if name not in ROLES or (name not in roles)]:
            raise ValueError(
                f"{option}: {', '.join(unknown)} is not among the job's roles; choose from "
                f"{', '.join(ROLES)} and name them in --roles"
            )
    if trained := [role for role in replicated if role in _TRAINED or role == "rollout"]:
        raise ValueError(
            f"--replicated: {', '.join(trained)} is written to; forecasts know readonly ones "
            "alone; leave it out"
        )
    models: dict[str, Any] = {}
    for role in roles:
        is_trained = role in _TRAINED
        models[role] = forecasting.Model(
            others.get(role, arguments.model),
            role=role,
            dtype=arguments.dtype if is_trained else None,
            optimizer=arguments.optimizer if is_trained else None,
            gradients=arguments.gradients if is_trained else "cleared",
            readonly=not is_trained and role != "rollout",
            replicated=role in replicated,
        )
    return models


def _engine(arguments: argparse.Namespace, models: Mapping[str, Any]) -> Any:
    from placement.forecasting.job import weights_bytes

    if "rollout" in models:
        raise ValueError(
            "--kv-cache and --rollout-weights describe the rollout engine: leave the role rollout "
            "out of --roles"
        )
    if arguments.rollout_tensor_parallel < 1:
        raise ValueError(
            f"--rollout-tensor-parallel must be 1 or more, not {arguments.rollout_tensor_parallel}"
        )
    whole = parse_bytes(arguments.rollout_weights) if arguments.rollout_weights else None
    if whole is None:
        whole = -(-weights_bytes(arguments.model, "bfloat16") // arguments.rollout_tensor_parallel)
    return forecasting.Rollout(
        whole, arguments.kv_cache or 0, keeps_weights=not arguments.discard_weights
    )


def _numbers(text: str, option: str, what: str, kind: Callable[[str], float]) -> dict[str, Any]:
    found = {}
    for phase, number in (_pair(each, option, f"PHASE={what.upper()}") for each in _words(text)):
        try:
            found[phase] = kind(number)
        except ValueError:
            raise ValueError(
                f"{option}: {number!r} of phase {phase!r} is no number of {what}"
            ) from None
    return found


def _pair(text: str, option: str, form: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals or not name or not value:
        raise ValueError(f"{option}: {text!r} is not of the form {form}")
    return name.strip(), value.strip()


def _words(text: str) -> Sequence[str]:
    return [each.strip() for each in text.split(",") if each.strip()]


# --- a forecast as text


def table(forecast: Forecast) -> str:
    """One forecast: its phases, its handles, and the sums."""
    sizes = attrgetter("device_bytes", "loaded_bytes", "offloaded_bytes", "skipped_bytes")
    rows = [
        (
            _name(each),
            *map(readable, sizes(each)),
            _seconds(each.stall_seconds),
            _seconds(each.work_seconds),
        )
        for each in forecast.phases
    ]
    head, *lines = plain_table(
        ("phase", "device", "load", "offload", "clean", "stall s", "work s"), rows
    ).splitlines()
    shown = [f"policy {forecast.policy}, budget {_readable_budget(forecast)}", "", head]
    for each, line in zip(forecast.phases, lines, strict=True):
        shown += [line, *(f"  {text}" for text in _troubles(each))]
    handles = [
        (each.name, *map(readable, (each.num_bytes, each.host_bytes, each.node_host_bytes)))
        for each in forecast.handles
    ]
    shown += [
        *_troubles_at_first(forecast),
        "",
        plain_table(("handle", "device", "host, rank", "host, node"), handles),
    ]
    return "\n".join([*shown, "", *_sums(forecast)])


def comparison(forecasts: Sequence[Forecast], heads: Sequence[str]) -> str:
    """Several forecasts side by side: the device bytes and the stall of each phase, then the sums.
    `heads`: of the columns, such as policies with their options."""
    sums = {"peak": "peak_bytes", "loaded": "loaded_bytes", "offloaded": "offloaded_bytes"}
    sums |= {"host, this rank": "host_bytes", "host, node": "node_host_bytes"}
    columns = [["", *map(_name, forecasts[0].phases), *sums, "stall", "fits"]]
    for head, each in zip(heads, forecasts, strict=True):
        device = [
            readable(phase.device_bytes) if phase.fits else "refused" for phase in each.phases
        ]
        stalls = [_seconds(phase.stall_seconds) for phase in each.phases]
        fits = (
            "yes"
            if each.fits
            else (f"no, {readable(each.over_bytes)} over")
            if each.over_bytes
            else "no"
        )
        columns.append(
            [head, *device, *(readable(getattr(each, key)) for key in sums.values()), "", fits]
        )
        columns.append(["stall s", *stalls, *[""] * len(sums), _seconds(each.stall_seconds), ""])
    names, *rows = zip(*columns, strict=True)
    lines = [f"budget {_readable_budget(forecasts[0])}", "", plain_table(names, rows)]
    lines += [
        f"note: {note}" for note in dict.fromkeys(note for each in forecasts for note in each.notes)
    ]
    return "\n".join(lines)


def _name(phase: PhaseForecast) -> str:
    return phase.phase if phase.only is None else f"{phase.phase}[{'+'.join(phase.only)}]"


def _troubles(phase: PhaseForecast) -> list[str]:
    if phase.problem:
        return [f"no plan: {phase.problem}"]
    if phase.over_bytes:
        return [
            (
                f"does not fit: needs {readable(phase.wanted_bytes)}, {readable(phase.over_bytes)} "
                f"({phase.over_bytes:,} bytes) too many"
            )
        ]
    said = (
        [(f"{readable(phase.prefetched_bytes)} of what it loads came early")]
        if phase.prefetched_bytes
        else []
    )
    if phase.streamed_bytes:
        said.append(
            f"steps: {readable(phase.streamed_bytes)} of what it loads and offloads is streamed by "
            "optimizers"
        )
    return said + (
        [(f"gradients: {readable(phase.gradient_bytes)} in torch's own memory beside")]
        if phase.gradient_bytes
        else []
    )


def _troubles_at_first(forecast: Forecast) -> list[str]:
    """Lines about phases that fail in the first step alone, or at registration."""
    if forecast.fits or any(not each.fits for each in forecast.phases):
        return []
    troubles = [
        f"{_name(each)}: {text}"
        for each in forecast.first_phases
        if not each.fits
        for text in _troubles(each)
    ]
    return [
        "",
        ("in the first step, or at registration:"),
        *(troubles or [(f"{readable(forecast.over_bytes)} too many")]),
    ]


def _sums(forecast: Forecast) -> list[str]:
    lines = [
        (f"peak on the device    {readable(forecast.peak_bytes)} ({forecast.peak_bytes:,} bytes)")
    ]
    host = f"{readable(forecast.host_bytes)} a rank, {readable(forecast.node_host_bytes)} a node"
    lines.append(f"host memory           {host}")
    lines.append(f"of a node             {_node(forecast)}")
    per = "a step" if forecast.first_phases else "in all"
    lines.append(
        f"moved {per:<15} {readable(forecast.loaded_bytes)} loaded, "
        f"{readable(forecast.offloaded_bytes)} offloaded"
    )
    stall = forecast.stall_seconds
    lines.append(
        f"stall {per:<15} {_seconds(stall, ' s')}"
        + ((" (no link given: see placement doctor --json)") if stall is None else "")
    )
    verdict = "everything fits" if forecast.budget_bytes is not None else "no budget given"
    if not forecast.fits:
        verdict = (
            (f"it does not fit: {readable(forecast.over_bytes)} too many")
            if forecast.over_bytes
            else "it does not fit"
        )
    return [*lines, *(f"note: {note}" for note in forecast.notes), verdict]


def _node(forecast: Forecast) -> str:
    """The host memory of a node, by kind, and what of it does not fit."""
    copies, kind = forecast.node_host_bytes - forecast.node_mirror_bytes, "page-locked"
    if forecast.pageable_reason is not None:
        kind = f"pageable ({forecast.pageable_reason})"
    said = f"{readable(copies)} {kind}, {readable(forecast.node_mirror_bytes)} engines' mirrors"
    if not forecast.over_host_bytes:
        return said
    return (
        f"{said}; does not fit: {readable(forecast.over_host_bytes)} too many for its host memory"
    )


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
    """A policy's table of phases and handles for the `sample`. The status with it is 1 where a
    phase has no plan or does not fit, else 0.

    The rows follow one another as in a step that is repeated, and are those of the steady state: a
    policy may keep handles that are on the device already, and learn what comes next.
    """
    own = phases or {}
    cycle = [*_SAMPLE_CYCLE, *(name for name in own if name not in PHASES)]
    found = forecasting.forecast(
        sample(),
        policy=policy,
        cycle=cycle,
        budget_bytes=budget_bytes,
        worker_role=worker_role,
        phases=own,
    )
    refused = {
        each.phase: (f"{each.phase}: {_troubles(each)[0]}")
        for each in (*found.first_phases, *found.phases)
        if not each.fits
    }
    if not found.fits and not refused:  # registrations happen outside every phase
        refused[IDLE] = (
            f"{IDLE}: does not fit once all is registered: {readable(found.over_bytes)} too many"
        )
    user = f", own phases: {', '.join(own)}" if own else ""
    sizes = {handle.name: handle.num_bytes for handle in found.handles}
    rows = [
        ("  its size", *map(readable, sizes.values()), "", ""),
        *(_states_row(each, sizes) for each in found.phases),
    ]
    lines = [
        (
            f"policy {found.policy}, budget {readable(budget_bytes)}, worker role "
            f"{worker_role}{user}\n"
        ),
        plain_table(("phase", *sizes, "on device", "moved"), rows),
        *(
            ["", ("refused, so that everything stays as in the phase before:"), *refused.values()]
            if refused
            else []
        ),
        "",
        "  ".join(f"{mark} {state}" for state, mark in _MARKS.items())
        + (f"  {_STREAMED} from the host copy"),
        (
            "on device: bytes held in the phase; moved: bytes copied both ways since the row above "
            "(for the first, the last)"
        ),
    ]
    return int(bool(refused)), "\n".join(lines)


def sample() -> dict[str, forecasting.Model | forecasting.Rollout]:
    """One of eight ranks that train an actor and a critic of 7 billion parameters with PPO, with a
    rollout engine on the same GPU."""
    import torch

    with torch.device("meta"):
        # 7.6 billion parameters / 8
        model = torch.nn.ParameterList(
            torch.empty(19 << 19, dtype=torch.bfloat16) for _ in range(97)
        )
    trained = forecasting.Model(model, optimizer="adamw-master")
    frozen = forecasting.Model(model, readonly=True)
    engine = forecasting.Rollout(weights_bytes="14GiB", kv_cache_bytes="50GiB")
    return {"actor": trained, "ref": frozen, "critic": trained, "reward": frozen, "rollout": engine}


def _states_row(phase: PhaseForecast, sizes: Mapping[str, int]) -> tuple[str, ...]:
    marks = []
    for name, nbytes in sizes.items():
        state = phase.states[name]
        is_streamed = state in (State.SYNCING, State.TRAINING) and phase.handle_bytes[name] < nbytes
        marks.append(_STREAMED if is_streamed else _MARKS[state])
    return (
        phase.phase,
        *marks,
        readable(phase.device_bytes),
        readable(phase.loaded_bytes + phase.offloaded_bytes),
    )
