"""A run that was, read from a trace of placement's own, and simulated anew under another policy or budget."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from placement.core.errors import PlacementError
from placement.core.states import WEIGHTS, HandleView, OwnPhases, Policy, State, Trigger
from placement.forecasting.description import Forecast, Link, Phase
from placement.forecasting.device import Seen, SizesDevice, objects_of
from placement.forecasting.run import Moved, Run, summed_up
from placement.observe.trace import MANAGER_EVENT, Event, read_trace
from placement.planning.policy_lookup import resolve_policy
from placement.storage.layout import ALIGNMENT


class _Span(NamedTuple):
    """A move of one handle, or the moves of one phase transition, which overlap in time."""

    begin_seconds: float
    end_seconds: float
    moved: Moved
    handle: str = ""
    trigger: str = ""


@dataclass(frozen=True)
class Recording:
    """One worker's run as its trace has it. See `read`."""

    worker: str
    policy: str
    worker_role: str
    budget_bytes: int | None
    phases: tuple[tuple[Phase, float], ...]
    """The phases in order, each with the seconds of its work: its duration without its moves."""
    moved: Moved
    """Bytes that moved in the whole run."""
    stall_seconds: float
    """How long the moves of the whole run took."""
    link: Link | None
    """The fastest rates that the run's moves have reached; None where none was seen in a direction."""
    handles: tuple[HandleView, ...]
    seen: Mapping[str, Seen]

    @classmethod
    def read(cls, path: str | os.PathLike[str], worker: str | None = None) -> Recording:
        """Read a trace that `placement.trace` or `placement trace` wrote.

        Args:
            worker: the worker's name, in a trace of several.

        Raises:
            OSError: the file cannot be read.
            PlacementError: it is no trace of placement's, does not have the worker, has no phase, or was written after the manager was
                closed.
        """
        try:
            _, events = read_trace(Path(path))
            pid, name, about = _chosen(events, path, worker)
            own = [event for event in events if event.get("pid") == pid]
            tracks = {event["tid"]: str(event["args"]["name"]) for event in own if event.get("name") == "thread_name"}
            spans = [event for event in own if event.get("ph") == "X"]
            moves = sorted((_move(each, tracks) for each in spans if each.get("cat") == "move"), key=lambda move: move.end_seconds)
            bursts = _bursts(moves)
            phases = sorted((each for each in spans if each.get("cat") == "phase"), key=lambda each: each["ts"])
            if not phases:
                raise PlacementError(
                    f"{path} has no phase of the worker {name}: write the trace after a step, before the manager is closed"
                )
            return cls(
                worker=name,
                policy=str(about["policy"]),
                worker_role=str(about["worker_role"]),
                budget_bytes=about.get("budget_bytes"),
                phases=tuple(_phase(each, bursts) for each in phases),
                moved=Moved.total(move.moved for move in moves),
                stall_seconds=sum(each.end_seconds - each.begin_seconds for each in bursts),
                link=_link(bursts),
                handles=tuple(map(_view, about["handles"])),
                seen={facts["name"]: _seen(facts, moves) for facts in about["handles"]},
            )
        except (KeyError, TypeError, AttributeError) as error:
            raise PlacementError(
                f"{path} is no trace that this version of placement wrote, or it was changed: {type(error).__name__}: {error}"
            ) from error

    @torch.inference_mode(mode=False)
    def forecast(
        self,
        policy: str | type[Policy] | Policy | None = None,
        *,
        budget_bytes: int | None = None,
        link: Link | float | str | os.PathLike[str] | None = None,
        phases: OwnPhases | None = None,
    ) -> Forecast:
        """Simulate the same phases with the same work.

        Args:
            policy: None: the run's own.
            budget_bytes: None: the run's own.
            link: None: the fastest rates that the run's moves have reached.
            phases: the user's own phases, see `Settings.phases`.

        Raises:
            PolicyError: the policy cannot be found or constructed.
            PhaseError: a phase's `only` names a handle that is registered no longer.
        """
        notes, known = [], self.link if link is None else Link.of(link)
        if link is None and known is not None:
            to_device, to_host = known.to_device_bytes_per_second / 1e9, known.to_host_bytes_per_second / 1e9
            rates = f"{to_device:.3g} GB/s to the device, {to_host:.3g} to the host"
            notes.append(f"the link's rates are the best of the run's own moves ({rates}); give a measured link for better ones")
        device = SizesDevice(known, granularity=ALIGNMENT)
        chosen = resolve_policy(self.policy if policy is None else policy)
        budget, names = self.budget_bytes if budget_bytes is None else budget_bytes, [phase.name for phase, _ in self.phases]
        settings: dict[str, Any] = {"worker_role": self.worker_role, "phases": dict(phases or {})}
        with Run(chosen, device, objects_of(device, self.handles, self.seen), names, budget_bytes=budget, **settings) as run:
            return summed_up(run, [tuple([run.go(phase, seconds) for phase, seconds in self.phases])], notes)


def _seen(facts: Mapping[str, Any], moves: Sequence[_Span]) -> Seen:
    own = [each for each in moves if each.handle == facts["name"]]
    loads = [each.moved.loaded_bytes for each in own if each.trigger == Trigger.LOAD]
    return Seen(
        loaded_bytes=max(loads, default=0),
        changed_bytes=max((each.moved.offloaded_bytes for each in own if each.trigger == Trigger.OFFLOAD), default=0),
        is_born=bool(loads and loads[0]),
        keeps_weights=not loads or not facts["tags"].get(WEIGHTS) or any(loads),
    )


def _view(facts: Mapping[str, Any]) -> HandleView:
    keys = ("name", "kind", "role", "readonly", "external", "built", "gathers", "can_prefetch", "num_bytes", "tags")
    return HandleView(state=State.CPU_OFFLOADED, owners=tuple(facts["owners"]), **{key: facts[key] for key in keys})


def _chosen(events: Sequence[Event], path: str | os.PathLike[str], worker: str | None) -> tuple[object, str, Mapping[str, Any]]:
    """The process of a worker, its name, and the facts about its manager."""
    names = {event["pid"]: str(event["args"]["name"]) for event in events if event.get("name") == "process_name"}
    ours = {event["pid"]: event["args"] for event in events if event.get("name") == MANAGER_EVENT}
    if not ours:
        raise PlacementError(
            f"{path} has no facts about a manager: write it with placement.trace(manager.journal, ...), or placement trace"
        )
    chosen = [pid for pid in ours if worker in (None, names.get(pid))]
    if len(chosen) != 1 and (worker is None or not chosen):
        said = f"has no worker {worker!r}" if worker is not None else "has several workers: choose one"
        raise PlacementError(f"{path} {said}; it has {', '.join(names.get(pid, str(pid)) for pid in ours)}")
    if not ours[chosen[0]].get("handles"):
        raise PlacementError(f"{path} names no handles: write the trace before the manager is closed")
    return chosen[0], names.get(chosen[0], str(chosen[0])), ours[chosen[0]]


def _move(event: Event, tracks: Mapping[int, str]) -> _Span:
    args, begin = event["args"], event["ts"] / 1e6
    nbytes, early = int(args["bytes"]), int(args.get("prefetched_bytes", 0))
    loads = event["name"] == Trigger.LOAD
    moved = Moved(nbytes + early, prefetched_bytes=early) if loads else Moved(0, nbytes, int(args["skipped_bytes"]))
    return _Span(begin, begin + event["dur"] / 1e6, moved, tracks[event["tid"]], str(event["name"]))


def _phase(event: Event, bursts: Iterable[_Span]) -> tuple[Phase, float]:
    begin, end, only = event["ts"] / 1e6, (event["ts"] + event["dur"]) / 1e6, event.get("args", {}).get("only")
    moving = sum(max(0.0, min(each.end_seconds, end) - max(each.begin_seconds, begin)) for each in bursts)
    return Phase(event["name"], None if only is None else tuple(only)), max(0.0, end - begin - moving)


def _bursts(moves: Iterable[_Span]) -> list[_Span]:
    found: list[_Span] = []
    for move in sorted(moves, key=lambda each: each.begin_seconds):
        if not found or move.begin_seconds >= found[-1].end_seconds:
            found.append(move)
        else:
            last = found.pop()
            found.append(_Span(last.begin_seconds, max(last.end_seconds, move.end_seconds), Moved.total((last.moved, move.moved))))
    return found


def _link(bursts: Sequence[_Span]) -> Link | None:
    timed = [(each.moved, each.end_seconds - each.begin_seconds) for each in bursts if each.end_seconds > each.begin_seconds]
    to_device = max((moved.loaded_bytes - moved.prefetched_bytes) / seconds for moved, seconds in timed) if timed else 0
    to_host = max(moved.offloaded_bytes / seconds for moved, seconds in timed) if timed else 0
    rates = [rate for rate in (to_device, to_host) if rate]
    if not rates:
        return None
    return Link(to_device_bytes_per_second=to_device or rates[0], to_host_bytes_per_second=to_host or rates[0])
