"""The facts about a job beside its models (the phases of a step, the parallel layout, the link),
and the forecast as data.

A `Forecast` is immutable, and JSON by `model_dump_json()`.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import Field

from placement.core.settings import nearest
from placement.core.snapshot import Frozen, LinkRates, TransitionSeconds
from placement.core.states import IDLE, PHASES, OwnPhases, State

CYCLES: Mapping[str, tuple[str, ...]] = {
    "grpo": ("rollout", "log_prob", "train", "weight_sync"),
    "ppo": ("rollout", "reward", "log_prob", "values", "train", "weight_sync"),
}
"""The steps that have a name."""
_PHASE = re.compile(r"([^\[\]]+?)\s*(?:\[([^\[\]]*)\])?")


class Phase(NamedTuple):
    """One phase of a run."""

    name: str
    only: tuple[str, ...] | None = None
    """The handles for which the phase is, as in `manager.phase(name, only=...)`; None: for all."""


def cycle_of(cycle: str | Sequence[str | Phase], own: OwnPhases | None = None) -> tuple[Phase, ...]:
    """The phases of one step, in order: of a name of `CYCLES`, or as given, such as
    "log_prob[actor+ref]" for a phase with `only`.

    The phase "idle" between two others means that one is left before the next is entered, instead
    of switching. Raises ValueError: a phase is unknown, or there is none.
    """
    if isinstance(cycle, str):
        cycle = (
            CYCLES[cycle]
            if cycle in CYCLES
            else [each for each in cycle.split(",") if each.strip()]
        )
    known = (*PHASES, *(own or {}))
    phases = tuple(each if isinstance(each, Phase) else _phase(each) for each in cycle)
    for each in phases:
        if each.name not in known:
            hint = nearest(each.name, (*known, *CYCLES) if len(phases) == 1 else known)
            raise ValueError(
                f"unknown phase {each.name!r}{hint or ';'} known: {', '.join(known)}. Declare your "
                "own in Settings.phases"
            )
    while phases and phases[-1].name == IDLE:  # the step ends there anyway
        phases = phases[:-1]
    if not phases:
        raise ValueError("the cycle has no phase; give at least one")
    return phases


def _phase(text: str) -> Phase:
    match = _PHASE.fullmatch(text.strip())
    if match is None:
        raise ValueError(
            f"{text!r} is no phase; write 'train', or 'log_prob[actor+ref]' for the named handles "
            "only"
        )
    only = (
        None
        if match[2] is None
        else tuple(name.strip() for name in match[2].split("+") if name.strip())
    )
    return Phase(match[1], only)


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """How the trained models are divided among GPUs. One rank has one GPU.

    Raises:
        ValueError: a number is below 1, or the ranks do not fill their nodes.
    """

    data_parallel: int = 1
    """Replicas, each with all bytes. It changes no rank's bytes."""
    shards: int = 1
    """Ranks that share each parameter, as FSDP2 does: every one holds a part of its first
    dimension."""
    tensor_parallel: int = 1
    """Ranks that share each layer, as the model's own tensor-parallel plan says."""
    gpus_per_node: int = 8

    def __post_init__(self) -> None:
        for each in fields(self):
            value = getattr(self, each.name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"{each.name} must be a whole number from 1 on, not {value!r}")
        if self.ranks > self.gpus_per_node and self.ranks % self.gpus_per_node:
            raise ValueError(
                f"{self.ranks} ranks (data_parallel {self.data_parallel} x shards {self.shards} x "
                f"tensor_parallel {self.tensor_parallel}) do not fill nodes of "
                f"{self.gpus_per_node} GPUs; change one of them"
            )

    @property
    def ranks(self) -> int:
        return self.data_parallel * self.shards * self.tensor_parallel

    @property
    def ranks_per_node(self) -> int:
        return min(self.ranks, self.gpus_per_node)

    def part_of(
        self, name: str, shape: tuple[int, ...], split_dimension: int | None
    ) -> tuple[int, ...]:
        """The shape of the first rank's part of a parameter. No other rank's part is larger.

        Args:
            split_dimension: the dimension that tensor parallelism divides; None: it divides none.

        Raises:
            ValueError: tensor parallelism does not divide the dimension, or there is none to shard.
        """
        part = list(shape)
        if split_dimension is not None and self.tensor_parallel > 1:
            if part[split_dimension] % self.tensor_parallel:
                raise ValueError(
                    f"tensor_parallel {self.tensor_parallel} does not divide dimension "
                    f"{split_dimension} of {name!r}, of shape {shape}; choose a divisor"
                )
            part[split_dimension] //= self.tensor_parallel
        if self.shards > 1:
            if not part:
                raise ValueError(
                    f"{name!r} has no dimension, so it cannot be sharded; use shards=1"
                )
            part[0] = -(-part[0] // self.shards)
        return tuple(part)


ALONE = Layout()  # the layout of a model that every rank holds whole


class Link(Frozen):
    """The rates of the link in bytes a second, and what else `placement doctor` has measured.

    Raises:
        ValueError: a rate is not positive.
    """

    to_device_bytes_per_second: float = Field(gt=0)
    to_host_bytes_per_second: float = Field(gt=0)
    both_bytes_per_second: float | None = Field(default=None, gt=0)
    """Both directions at once, added up; None: the sum of the two."""
    free_bytes: int | None = None
    """Free bytes of the device; None: not known. So with the following."""
    chunk_bytes: int | None = None
    host_available_bytes: int | None = None
    pageable_reason: str | None = None
    """Why the machine's host memory is not page-locked; None: it is, or nobody has looked."""
    transitions: TransitionSeconds | None = None
    """The seconds that phase transitions take on top of the copies; None: none."""

    @classmethod
    def of(cls, source: Link | float | str | os.PathLike[str]) -> Link:
        """A link as it is, one with the same rate each way (bytes a second), or the one in a file
        that `placement doctor --json` wrote.

        Raises:
            OSError: the file cannot be read.
            ValueError: it is not such a file.
        """
        if isinstance(source, Link):
            return source
        if isinstance(source, (int, float)):
            return cls(to_device_bytes_per_second=source, to_host_bytes_per_second=source)
        path = Path(source)
        advice = "write one with: placement doctor --json > doctor.json"
        try:
            found: Any = json.loads(path.read_text(encoding="utf-8"))
            return cls(
                **found["link"],
                **{
                    name: found.get(name)
                    for name in cls.model_fields
                    if name not in LinkRates.model_fields
                },
            )
        except FileNotFoundError:
            raise FileNotFoundError(f"there is no file {path}; {advice}") from None
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(
                f"{path} has no link with rates; {advice} ({type(error).__name__}: {error})"
            ) from error

    def seconds_beside(self, loaded_bytes: int, offloaded_bytes: int, skipped_bytes: int) -> float:
        """The seconds that a phase transition takes beside its copies."""
        beside = self.transitions
        if beside is None:
            return 0.0
        if not (loaded_bytes or offloaded_bytes or skipped_bytes):
            return beside.alone
        loaded, offloaded = (
            loaded_bytes * beside.loaded_byte,
            offloaded_bytes * beside.offloaded_byte,
        )
        return beside.moving + loaded + offloaded + skipped_bytes * beside.skipped_byte


class HandleForecast(Frozen):
    """One handle of a forecast, in the steady state."""

    name: str
    kind: str
    role: str | None
    readonly: bool
    owners: tuple[str, ...] = ()
    num_bytes: int
    """Device bytes that it needs while it is on the device."""
    host_bytes: int
    """Host bytes of this rank's host copy."""
    node_host_bytes: int
    """Host bytes of the host copies of all ranks of a node."""
    mirror_bytes: int = 0
    """The part of `host_bytes` that is an engine's mirror: the copy of its weights that it keeps by
    itself."""


class PhaseForecast(Frozen):
    """One phase, and the phase transition at its beginning. The numbers are those of one rank."""

    phase: str
    only: tuple[str, ...] | None = None
    fits: bool
    """Whether the manager would open the phase. If not, its handles stay as they are in the phase
    before."""
    problem: str = ""
    """Why the policy gives no plan; empty if it gives one."""
    wanted_bytes: int
    """Device bytes that the plan needs."""
    over_bytes: int = 0
    """Bytes by which it misses the budget; 0 if it fits."""
    device_bytes: int
    """Device bytes that the handles hold in the phase."""
    handle_bytes: dict[str, int]
    states: dict[str, State]
    gradient_bytes: int = 0
    """Bytes of the gradients during the phase. They lie in torch's own memory, beside the
    budget."""
    loaded_bytes: int = 0
    offloaded_bytes: int = 0
    skipped_bytes: int = 0
    """Bytes that leave the device without a copy, because the host copy has them."""
    prefetched_bytes: int = 0
    """The part of `loaded_bytes` that came early: its copies began while the phase before
    computed."""
    streamed_bytes: int = 0
    """The part of `loaded_bytes` and `offloaded_bytes` together that the steps of optimizers copy
    (`optimizer_in="streamed"`)."""
    host_bytes: int
    """Host bytes of this rank's host copies."""
    stall_seconds: float | None = None
    """How long the moves take and streamed steps keep the link busy; None if the link is not
    known."""
    work_seconds: float | None = None
    """The given duration of the work itself; None if it was not given."""


class Forecast(Frozen):
    """The bytes and the seconds of a job's phases, on one rank, under one policy."""

    policy: str
    budget_bytes: int | None
    """Device bytes that the handles may hold together; None: no limit was given."""
    phases: tuple[PhaseForecast, ...]
    """One cycle in the steady state; the last entry is the phase "idle", outside all others."""
    first_phases: tuple[PhaseForecast, ...] = ()
    """The first cycle, in which optimizer state is created."""
    handles: tuple[HandleForecast, ...]
    peak_bytes: int
    """The most device bytes that the handles hold together."""
    host_bytes: int
    """The most host bytes of this rank's host copies."""
    node_host_bytes: int
    """Host bytes of the host copies of all ranks of a node, with the engines' mirrors."""
    node_mirror_bytes: int = 0
    """The part of `node_host_bytes` that is engines' mirrors."""
    pageable_reason: str | None = None
    """Why the other part is not page-locked, so that copies are slow; None: it is, or nobody has
    looked."""
    fits: bool
    """Whether every registration and every phase fits, the first cycle included."""
    over_bytes: int = 0
    """Bytes by which the largest phase misses the budget."""
    over_host_bytes: int = 0
    """Bytes by which `node_host_bytes` misses the host memory that the link's file says is
    available; 0 if it fits or is not known."""
    stall_seconds: float | None
    """How long the moves of all `phases` take together; None if the link is not known."""
    loaded_bytes: int
    offloaded_bytes: int
    skipped_bytes: int
    notes: tuple[str, ...] = ()
    """Sentences on what an operator should know besides."""

    def phase(self, name: str) -> PhaseForecast:
        """The first phase of this name.

        Raises:
            KeyError: there is none.
        """
        if (found := next((each for each in self.phases if each.phase == name), None)) is not None:
            return found
        raise KeyError(
            f"no phase {name!r}; there are "
            f"{', '.join(dict.fromkeys(each.phase for each in self.phases))}"
        )
