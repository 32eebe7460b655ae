"""The facts about a job beside its models: the phases of a step, the parallel layout, and the link between host and device."""

from __future__ import annotations

import difflib
import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, NamedTuple

from placement.core.states import IDLE, PHASES, OwnPhases

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
    """The phases of one step, in order.

    Args:
        cycle: a name of `CYCLES`, or the phases: "log_prob", or "log_prob[actor+ref]" for a phase with `only`. The phase "idle" between
            two others means that one is left before the next is entered, instead of switching.
        own: the user's own phases, as in `Settings.phases`.

    Raises:
        ValueError: a phase is unknown, or there is none.
    """
    if isinstance(cycle, str):
        if cycle not in CYCLES:
            raise ValueError(f"no cycle {cycle!r}; known: {', '.join(CYCLES)}; or give the phases")
        cycle = CYCLES[cycle]
    known = (*PHASES, *(own or {}))
    phases = tuple(each if isinstance(each, Phase) else _phase(each) for each in cycle)
    for each in phases:
        if each.name not in known:
            near = difflib.get_close_matches(each.name.lower(), (*known, *CYCLES) if len(phases) == 1 else known, n=1)
            hint = f", did you mean {near[0]!r}?" if near else ";"
            raise ValueError(f"unknown phase {each.name!r}{hint} known: {', '.join(known)}. Declare your own in Settings.phases")
    while phases and phases[-1].name == IDLE:  # the step ends there anyway
        phases = phases[:-1]
    if not phases:
        raise ValueError("the cycle has no phase; give at least one")
    return phases


def _phase(text: str) -> Phase:
    match = _PHASE.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"{text!r} is no phase; write 'train', or 'log_prob[actor+ref]' for the named handles only")
    only = None if match[2] is None else tuple(name.strip() for name in match[2].split("+") if name.strip())
    return Phase(match[1], only)


def listed(text: str) -> tuple[str, ...] | str:
    """A cycle from a command line: a name, or phases separated by commas."""
    names = tuple(each.strip() for each in text.split(",") if each.strip())
    return names[0] if len(names) == 1 and names[0] in CYCLES else names


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """How the trained models are divided among GPUs. One rank has one GPU.

    Raises:
        ValueError: a number is below 1, or the ranks do not fill their nodes.
    """

    data_parallel: int = 1
    """Replicas, each with all bytes. It changes no rank's bytes."""
    shards: int = 1
    """Ranks that share each parameter, as FSDP2 does: every one holds a part of its first dimension."""
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
                f"{self.ranks} ranks (data_parallel {self.data_parallel} x shards {self.shards} x tensor_parallel {self.tensor_parallel}) "
                f"do not fill nodes of {self.gpus_per_node} GPUs; change one of them"
            )

    @property
    def ranks(self) -> int:
        return self.data_parallel * self.shards * self.tensor_parallel

    @property
    def ranks_per_node(self) -> int:
        return min(self.ranks, self.gpus_per_node)

    def part_of(self, name: str, shape: tuple[int, ...], split_dimension: int | None) -> tuple[int, ...]:
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
                    f"tensor_parallel {self.tensor_parallel} does not divide dimension {split_dimension} of {name!r}, of shape {shape}; "
                    "choose a divisor"
                )
            part[split_dimension] //= self.tensor_parallel
        if self.shards > 1:
            if not part:
                raise ValueError(f"{name!r} has no dimension, so it cannot be sharded; use shards=1")
            part[0] = -(-part[0] // self.shards)
        return tuple(part)


ALONE = Layout()
"""The layout of a model that every rank holds whole."""


_BESIDE = {
    "transition_seconds": "alone",
    "moving_seconds": "moving",
    "loaded_byte_seconds": "loaded_byte",
    "offloaded_byte_seconds": "offloaded_byte",
    "skipped_byte_seconds": "skipped_byte",
}
"""The seconds that phase transitions take beside the copies, with their names in the doctor's file."""
_RATES = ("to_device_bytes_per_second", "to_host_bytes_per_second", "both_bytes_per_second")


@dataclass(frozen=True, kw_only=True, slots=True)
class Link:
    """The rates of the link in bytes a second, and what else `placement doctor` has measured.

    Raises:
        ValueError: a rate is not positive.
    """

    to_device_bytes_per_second: float
    to_host_bytes_per_second: float
    both_bytes_per_second: float | None = None
    """Both directions at once, added up; None: the sum of the two."""
    free_bytes: int | None = None
    """Free bytes of the device; None: not known. So with the following."""
    chunk_bytes: int | None = None
    host_available_bytes: int | None = None
    transition_seconds: float = 0.0
    """The seconds of a phase transition that moves nothing. This and the following come on top of the copies."""
    moving_seconds: float = 0.0
    """The seconds of one that moves something, besides what comes for each byte."""
    loaded_byte_seconds: float = 0.0
    """For each byte that is loaded: memory is mapped behind addresses."""
    offloaded_byte_seconds: float = 0.0
    """For each byte that is copied to the host: fingerprints are computed, and memory goes back to the driver."""
    skipped_byte_seconds: float = 0.0
    """For each byte that leaves without a copy: the same."""

    def __post_init__(self) -> None:
        for name in _RATES:
            rate = getattr(self, name)
            if rate is not None and not rate > 0:
                raise ValueError(f"{name} must be more than 0, not {rate}")
        for name in _BESIDE:
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name} must be 0 or more, not {getattr(self, name)}")

    @classmethod
    def of(cls, source: Link | float | str | os.PathLike[str]) -> Link:
        """A link as it is, one with the same rate each way (bytes a second), or the one in a file that `placement doctor --json` wrote.

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
        except FileNotFoundError:
            raise FileNotFoundError(f"there is no file {path}; {advice}") from None
        except ValueError as error:
            raise ValueError(f"{path} is not JSON ({error}); {advice}") from error
        rates = found.get("link") if isinstance(found, Mapping) else None
        if not isinstance(rates, Mapping) or any(not isinstance(rates.get(name), (int, float)) for name in _RATES):
            raise ValueError(f"{path} has no link with {', '.join(_RATES)}; {advice}")
        to_device, to_host, both = (float(rates[name]) for name in _RATES)
        beside = found.get("transitions") or {}  # an earlier version did not measure them
        if not isinstance(beside, Mapping) or any(not isinstance(beside.get(name, 0.0), (int, float)) for name in _BESIDE.values()):
            raise ValueError(f"{path} has transitions that are not {', '.join(_BESIDE.values())} in seconds; {advice}")
        return cls(
            to_device_bytes_per_second=to_device,
            to_host_bytes_per_second=to_host,
            both_bytes_per_second=both,
            free_bytes=found.get("free_bytes"),
            chunk_bytes=found.get("chunk_bytes"),
            host_available_bytes=found.get("host_available_bytes"),
            **{name: float(beside.get(theirs, 0.0)) for name, theirs in _BESIDE.items()},
        )

    def seconds_beside(self, loaded_bytes: int, offloaded_bytes: int, skipped_bytes: int) -> float:
        """The seconds that a phase transition takes beside its copies."""
        if not (loaded_bytes or offloaded_bytes or skipped_bytes):
            return self.transition_seconds
        loaded, offloaded = loaded_bytes * self.loaded_byte_seconds, offloaded_bytes * self.offloaded_byte_seconds
        return self.moving_seconds + loaded + offloaded + skipped_bytes * self.skipped_byte_seconds
