"""Handles of a simulation: where they are, how many bytes they hold, and how many a move copies. Pure numbers."""

from __future__ import annotations

import abc
import bisect
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from placement.core.states import WEIGHTS, HandleView, Plan, State

_WEIGHT_SYNC = "weight_sync"
_PIECE_BYTES = 256 << 20
"""The size in which the bytes of a `PlainHandle` arrive early: a chunk of a CUDA device."""

_WINDOW_BYTES = 3 << 29
"""The window of a streamed step, where the real one is not known: three buckets of the default size."""


@dataclass(frozen=True, slots=True)
class Moved:
    """Bytes that one handle, or several together, move in one phase transition."""

    loaded_bytes: int = 0
    offloaded_bytes: int = 0
    """Bytes copied to the host."""
    skipped_bytes: int = 0
    """Bytes that leave the device without a copy, because the host copy has them already."""
    prefetched_bytes: int = 0
    """The part of `loaded_bytes` that had arrived before, while the phase before computed."""
    saved_bytes: int = 0
    """The part of `offloaded_bytes` that is copied later, while the following phases compute."""
    late_bytes: int = 0
    """Bytes of an earlier offload that are waited for now, because there was no time to copy them before their memory is needed."""

    def __add__(self, other: Moved) -> Moved:
        return Moved(
            self.loaded_bytes + other.loaded_bytes,
            self.offloaded_bytes + other.offloaded_bytes,
            self.skipped_bytes + other.skipped_bytes,
            self.prefetched_bytes + other.prefetched_bytes,
            self.saved_bytes + other.saved_bytes,
            self.late_bytes + other.late_bytes,
        )

    @classmethod
    def total(cls, each: Iterable[Moved]) -> Moved:
        return sum(each, cls())


class SimulatedHandle(abc.ABC):
    """One handle of a simulation: its facts, and the bytes that its moves copy. A subclass knows how the bytes are made up.

    Args:
        facts: the handle's name, kind, role, owners and flags. Its state and its bytes are overwritten.
    """

    moves_apart = False
    """Whether it moves before and after all others, as an engine that places its own memory does, instead of beside them."""

    def __init__(self, facts: HandleView) -> None:
        self.facts = facts
        self.state = State.CPU_OFFLOADED
        self.on_device = False
        self._num_early = 0
        """The chunks that have memory behind them early, from the first on."""
        self._arrived_bytes = 0
        """The bytes of them that have been copied."""
        self.left_bytes = 0
        """Device bytes of them that the last offload has left."""
        self._unsaved_bytes = 0
        """The bytes of these that have still to be copied to the host."""

    @property
    def name(self) -> str:
        return self.facts.name

    @property
    @abc.abstractmethod
    def num_bytes(self) -> int:
        """See `HandleView.num_bytes`."""

    @property
    @abc.abstractmethod
    def resident_bytes(self) -> int:
        """Device bytes that the handle holds now."""

    @property
    def host_bytes(self) -> int:
        """Bytes of this process's host memory that are reserved for the host copy."""
        return 0

    @property
    def is_reserved(self) -> bool:
        """Whether the host copy is only reserved, for state that a step has still to create."""
        return False

    @property
    def is_born(self) -> bool:
        """Whether the values exist. Those of an optimizer's state are created by its first step."""
        return True

    @property
    def state_bytes(self) -> int:
        """Bytes that a step copies each way if it streams them."""
        return 0

    @property
    def is_shared(self) -> bool:
        """Whether the ranks of a node share the host copy."""
        return False

    @property
    def host_bytes_of_all(self) -> int:
        """Bytes of the host copy that the ranks of a node have together, where they share it; else `host_bytes`."""
        return self.host_bytes

    @property
    def resident_tags(self) -> frozenset[str]:
        """The parts that are on the device, for an engine that can be there in part."""
        return frozenset()

    @abc.abstractmethod
    def load(self) -> Moved:
        """Load everything."""

    @abc.abstractmethod
    def offload(self, *, drops: bool) -> Moved:
        """Offload everything.

        Args:
            drops: set gradients to None instead of saving them.
        """

    def end_training(self, *, drops: bool) -> None:
        """Called when the handle leaves TRAINING and stays on the device."""

    def used(self, phase: str) -> None:
        """Note what the work of a phase has done to the handle, when that phase ends."""

    def move_tags(self, wanted: frozenset[str]) -> Moved:
        """Have these parts on the device, and no others."""
        return Moved()

    @property
    def chunks(self) -> Sequence[tuple[int, int]]:
        """Device bytes and used bytes of each chunk that can arrive early, in order; empty if none can."""
        return ()

    @property
    def early_bytes(self) -> int:
        """Device bytes that `Plan.prefetch` has taken for the handle."""
        return sum(device for device, _ in self.chunks[: self._num_early])

    def view(self) -> HandleView:
        """The handle as a policy sees it."""
        return replace(
            self.facts,
            state=self.state,
            num_bytes=self.num_bytes,
            resident_bytes=self.resident_bytes + self.early_bytes,
            prefetched_bytes=self.early_bytes,
            can_prefetch=self.facts.can_prefetch and not self.facts.tags and not self.facts.external,
            resident_tags=self.resident_tags,
            streaming=self.state in (State.SYNCING, State.TRAINING) and not self.on_device,
            window_bytes=self.facts.window_bytes or (min(self.num_bytes, _WINDOW_BYTES) if self.facts.kind == "optimizer" else 0),
        )

    def prefetch(self, most_bytes: int) -> None:
        """Take memory for chunks that arrive early, or give it up, up to `most_bytes`."""
        ends = list(itertools.accumulate(device for device, _ in self.chunks))
        self._num_early = 0 if self.on_device else bisect.bisect_right(ends, most_bytes)
        self._arrived_bytes = min(self._arrived_bytes, sum(used for _, used in self.chunks[: self._num_early]))
        self.left_bytes = min(self.left_bytes, self.early_bytes)

    def arrive(self, nbytes: int) -> int:
        """Copy up to `nbytes` of what arrives early. Returns the bytes copied."""
        missing = sum(used for _, used in self.chunks[: self._num_early]) - self._arrived_bytes
        copied = min(missing, nbytes)
        self._arrived_bytes += copied
        return copied

    def save(self, nbytes: int) -> int:
        """Copy up to `nbytes` of what the last offload has left to the host. Returns the bytes copied."""
        copied = min(self._unsaved_bytes, nbytes)
        self._unsaved_bytes -= copied
        return copied

    def leaves(self, plan: Plan) -> bool:
        """Whether a plan takes it off the device, and placement moves its bytes."""
        return self.on_device and not plan.on_device(self.name) and not self.facts.external and not self.facts.tags

    def go(self, plan: Plan, staying_bytes: int = 0, *, waits: bool = False) -> Moved:
        """Move to where a plan wants the handle. Returns the bytes that this copies.

        Args:
            staying_bytes: device bytes that may stay early if the handle is offloaded, or is it already.
            waits: whether the phase transition waits for what is still to be saved, because something leaves.
        """
        wanted, comes = plan[self.name], plan.on_device(self.name)
        ends_training = self.state is State.TRAINING and wanted is not State.TRAINING
        drops = ends_training and self.name in plan.dropped
        moved, late_bytes = Moved(), 0
        if waits or comes or staying_bytes < self.left_bytes:
            late_bytes, self._unsaved_bytes = self._unsaved_bytes, 0
        if self.facts.external:
            comes = wanted is not State.CPU_OFFLOADED
        elif self.facts.tags:
            moved = self.move_tags(plan.parts.get(self.name, frozenset(self.facts.tags)) if comes else frozenset())
        elif self.on_device and not comes:
            moved = self.offload(drops=drops)
            self._num_early = bisect.bisect_right([*itertools.accumulate(device for device, _ in self.chunks)], staying_bytes)
            self._arrived_bytes = sum(used for _, used in self.chunks[: self._num_early])
            self.left_bytes = self.early_bytes
            self._unsaved_bytes = min(moved.offloaded_bytes, self._arrived_bytes)
            moved = replace(moved, saved_bytes=self._unsaved_bytes)
        elif comes and not self.on_device:
            moved = replace(self.load(), prefetched_bytes=self._arrived_bytes)
            self._num_early = self._arrived_bytes = self.left_bytes = 0
        elif comes and ends_training:
            self.end_training(drops=drops)
        self.state, self.on_device = wanted, comes
        return replace(moved, late_bytes=late_bytes)


class PlainHandle(SimulatedHandle):
    """A handle of which only sizes are known.

    Args:
        facts: with its real `num_bytes`.
        used_bytes: bytes that a load copies; None: `num_bytes`.
        changed_bytes: the part of them that an offload copies once the values have changed; None: all.
        host_bytes: see `SimulatedHandle.host_bytes`.
        is_born: whether the values exist already. If not, training creates them, and before that a load copies nothing.
    """

    def __init__(
        self,
        facts: HandleView,
        *,
        used_bytes: int | None = None,
        changed_bytes: int | None = None,
        host_bytes: int = 0,
        is_born: bool = True,
    ) -> None:
        super().__init__(facts)
        self._used_bytes = facts.num_bytes if used_bytes is None else used_bytes
        self._changed_bytes = self._used_bytes if changed_bytes is None else min(changed_bytes, self._used_bytes)
        self._host_bytes = host_bytes
        self._is_born = is_born
        self._is_changed = False

    @property
    def num_bytes(self) -> int:
        return self.facts.num_bytes

    @property
    def resident_bytes(self) -> int:
        return self.num_bytes if self.on_device else 0

    @property
    def host_bytes(self) -> int:
        return self._host_bytes

    @property
    def is_born(self) -> bool:
        return self._is_born

    @property
    def state_bytes(self) -> int:
        return self._used_bytes

    @property
    def chunks(self) -> Sequence[tuple[int, int]]:
        full, rest = divmod(self.num_bytes, _PIECE_BYTES)
        pieces = [_PIECE_BYTES] * full + [rest] * bool(rest)
        share = self._used_bytes / self.num_bytes if self.facts.can_prefetch and self.num_bytes else 0
        return [(piece, int(piece * share)) for piece in pieces] if share else []

    def load(self) -> Moved:
        return Moved(loaded_bytes=self._used_bytes if self._is_born else 0)

    def offload(self, *, drops: bool) -> Moved:
        copied = self._changed_bytes if self._is_changed else 0
        self._is_changed = False
        return Moved(offloaded_bytes=copied, skipped_bytes=self._used_bytes - copied if self._is_born else 0)

    def used(self, phase: str) -> None:
        self._is_changed = self._is_changed or is_written(self, phase)
        self._is_born = self._is_born or self._is_changed


class EngineHandle(SimulatedHandle):
    """A rollout engine that places its own memory, part by part: vLLM, SGLang.

    Args:
        facts: with `tags`, the bytes of each part.
        keeps_weights: whether an offload copies the weights to the host, and a load back. Otherwise they are dropped, and the next
            weight sync fills them. Other parts are never copied.
    """

    moves_apart = True

    def __init__(self, facts: HandleView, *, keeps_weights: bool = True) -> None:
        super().__init__(replace(facts, num_bytes=sum(facts.tags.values())))
        self.keeps_weights = keeps_weights
        self._resident: frozenset[str] = frozenset()

    @property
    def num_bytes(self) -> int:
        return self.facts.num_bytes

    @property
    def resident_bytes(self) -> int:
        return sum(self.facts.tags[tag] for tag in self._resident)

    @property
    def resident_tags(self) -> frozenset[str]:
        return self._resident

    def move_tags(self, wanted: frozenset[str]) -> Moved:
        leaving, coming, self._resident = self._resident - wanted, wanted - self._resident, wanted
        copied = self.facts.tags.get(WEIGHTS, 0) if self.keeps_weights else 0
        return Moved(copied * (WEIGHTS in coming), copied * (WEIGHTS in leaving))

    def load(self) -> Moved:
        return self.move_tags(frozenset(self.facts.tags))

    def offload(self, *, drops: bool) -> Moved:
        return self.move_tags(frozenset())


def is_written(handle: SimulatedHandle, phase: str) -> bool:
    """Whether the work of a phase changes a handle's values on the device: training does, and a weight sync those of the rollout model."""
    if handle.state is State.TRAINING:
        return True
    generates = handle.facts.kind == "engine" or (handle.facts.kind == "module" and handle.facts.role == "rollout")
    return phase == _WEIGHT_SYNC and generates and handle.on_device and not handle.facts.readonly
