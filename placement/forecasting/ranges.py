"""Handles whose bytes placement moves, simulated range by range: the same layout, chunks and clean bytes as the real ones.

A handle has one range for what stays (weights, buffers, optimizer state), and one for gradients that were alive at its last offload.
What is created while it is on the device lies in torch's own memory until then.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from placement.core.states import HandleView, State
from placement.devices.host.mapping import round_up
from placement.planning.simulated_handles import Moved, SimulatedHandle, is_written
from placement.storage.layout import Sizing, chunk_sizes, expected_bytes, packed
from placement.storage.range import used_bytes
from placement.storage.replicated import Shares, chunk_spans


@dataclass(frozen=True, slots=True)
class StorageSize:
    """One storage of a handle on one rank."""

    nbytes: int
    is_stepped: bool = True
    """Whether an optimizer changes it."""
    is_published: bool = True
    """Whether a weight sync changes it, in a model that weights are published to: a parameter, not a buffer."""


@dataclass(frozen=True, slots=True)
class RangeSizes:
    """The sizes of one range, as `storage.range.Range` has them."""

    used: int
    """Bytes that are copied by a load, and host bytes of the slab."""
    device: int
    """Bytes of the chunks behind it while it is loaded."""
    chunks: tuple[tuple[int, int], ...]
    """Device bytes and used bytes of each chunk."""
    stepped: int
    """Bytes of the chunks that hold anything that an optimizer changes."""
    published: int
    """Bytes of the chunks that hold anything that a weight sync changes."""

    @classmethod
    def of(cls, sizing: Sizing, storages: Sequence[StorageSize]) -> RangeSizes:
        sizes = [each.nbytes for each in storages]
        length = expected_bytes(sizing, sizes)
        used, chunks = used_bytes(length), chunk_sizes(sizing, length)
        used_sizes = [*chunks[:-1], used - sum(chunks[:-1])] if chunks else []
        offsets = packed(sizes)[0]

        def touched(chosen: Sequence[bool]) -> int:
            spans = [(start, start + size) for start, size, is_chosen in zip(offsets, sizes, chosen, strict=True) if is_chosen and size]
            hit = {i for start, end in spans for i in range(start // sizing.chunk_bytes, -(-end // sizing.chunk_bytes)) if i < len(chunks)}
            return sum(used_sizes[i] for i in hit)

        whole = tuple(zip(chunks, used_sizes, strict=True))
        return cls(
            used, sum(chunks), whole, touched([each.is_stepped for each in storages]), touched([each.is_published for each in storages])
        )


class RangedHandle(SimulatedHandle):
    """A module, an in-process engine or an optimizer whose bytes placement moves.

    Args:
        sizing: the device's sizes.
        storages: what exists at registration.
        unborn: bytes of the storages that the first steps create (optimizer state).
        gradients: bytes of each gradient of a module that is trained.
        keeps_gradients: whether they are alive when training ends.
        shared_by: the ranks of the node that share the host copy of a replicated handle.
    """

    def __init__(
        self,
        facts: HandleView,
        sizing: Sizing,
        storages: Sequence[StorageSize] = (),
        *,
        unborn: Sequence[int] = (),
        gradients: Sequence[int] = (),
        keeps_gradients: bool = False,
        shared_by: int = 1,
    ) -> None:
        super().__init__(facts)
        self._sizing = sizing
        self._ranges = [RangeSizes.of(sizing, storages)] if storages else []
        self._unborn = tuple(size for size in unborn if size)
        self._gradients = tuple(size for size in gradients if size)
        self._keeps_gradients = keeps_gradients
        self._gradient_range: RangeSizes | None = None
        self._shares = Shares(0, shared_by)
        self._unadopted = 0
        """Bytes in torch's own memory, as of the manager's last look."""
        self._is_stepped = self._is_published = False
        """Whether training, or a weight sync, has changed values since the last load."""
        self._has_new_gradients = False
        """Whether gradients are alive that the gradient range does not hold."""
        self._is_born = False
        """Whether the optimizer state exists."""
        self._gradients_are_dead = False

    # --- facts

    @property
    def _all_ranges(self) -> list[RangeSizes]:
        return self._ranges if self._gradient_range is None else [*self._ranges, self._gradient_range]

    @property
    def _expected(self) -> int:
        """Device bytes for state that has no range yet and that the manager has not looked at yet."""
        if not self._unborn or self._ranges or self._unadopted:
            return 0
        return round_up(expected_bytes(self._sizing, self._unborn), self._sizing.granularity)

    @property
    def num_bytes(self) -> int:
        return sum(each.device for each in self._all_ranges) + self._unadopted + self._expected

    @property
    def resident_bytes(self) -> int:
        return sum(each.device for each in self._all_ranges) + self._unadopted if self.on_device else 0

    @property
    def host_bytes(self) -> int:
        reserved = used_bytes(expected_bytes(self._sizing, self._unborn)) if self._unborn and not self._ranges else 0
        return (
            sum(self._own_host_bytes(each) for each in self._ranges) + reserved + (self._gradient_range.used if self._gradient_range else 0)
        )

    @property
    def is_reserved(self) -> bool:
        return bool(self._unborn) and not self._ranges and (self.on_device or not self._is_born)  # a streamed step creates it on the host

    @property
    def is_born(self) -> bool:
        return self._is_born or not self._unborn

    @property
    def state_bytes(self) -> int:
        return sum(each.used for each in self._ranges) or used_bytes(expected_bytes(self._sizing, self._unborn))

    @property
    def is_shared(self) -> bool:
        return self._shares.world_size > 1

    @property
    def host_bytes_of_all(self) -> int:
        return sum(each.used for each in self._ranges) if self.is_shared else self.host_bytes

    @property
    def training_bytes(self) -> int:
        """Bytes of the gradients, which lie in torch's own memory during training."""
        return sum(self._gradients)

    @property
    def chunks(self) -> Sequence[tuple[int, int]]:
        return [] if self.is_shared else [chunk for each in self._all_ranges for chunk in each.chunks]

    # --- moves

    def load(self) -> Moved:
        self._is_stepped = self._is_published = False
        own = sum(self._loaded_bytes(each) for each in self._ranges)
        return Moved(loaded_bytes=own + (self._gradient_range.used if self._gradient_range else 0))

    def offload(self, *, drops: bool) -> Moved:
        if self._gradients_are_dead or drops:
            self._gradient_range = None
        copied = skipped = 0
        for each in self._all_ranges:
            changed = each.stepped if self._is_stepped else each.published if self._is_published else 0
            if each is self._gradient_range:
                changed = 0  # gradients that training has not replaced
            copied, skipped = copied + changed, skipped + each.used - changed
        if self._has_new_gradients and not drops:
            self._gradient_range = RangeSizes.of(self._sizing, [StorageSize(size) for size in self._gradients])
            copied += sum(self._gradients)
        if self._is_born and not self._ranges:
            self._ranges = [RangeSizes.of(self._sizing, [StorageSize(size) for size in self._unborn])]
            copied += sum(self._unborn)
        self._unadopted = 0
        self._is_stepped = self._is_published = self._has_new_gradients = self._gradients_are_dead = False
        return Moved(0, copied, skipped)

    def end_training(self, *, drops: bool) -> None:
        if drops and (self._gradients or self._gradient_range):
            self._has_new_gradients, self._gradients_are_dead = False, self._gradient_range is not None
        born = sum(self._unborn) if self._is_born and not self._ranges else 0
        self._unadopted = born + (sum(self._gradients) if self._has_new_gradients else 0)

    def used(self, phase: str) -> None:
        if not is_written(self, phase):
            return
        if self.state is not State.TRAINING:
            self._is_published = True
            return
        self._is_stepped = True
        self._is_born = self._is_born or bool(self._unborn)
        if self._gradients and self._keeps_gradients:
            self._has_new_gradients, self._gradients_are_dead = True, self._gradient_range is not None

    # --- replicated

    def _parts(self, each: RangeSizes) -> list[int]:
        """Bytes of each rank's part of each chunk of a shared range."""
        return [self._shares.part_bytes(nbytes) for _, nbytes in chunk_spans(each.used, self._sizing.chunk_bytes)]

    def _loaded_bytes(self, each: RangeSizes) -> int:
        """Bytes that come over this rank's own link: its part of each chunk, and the rest that is not divided."""
        if not self.is_shared:
            return each.used
        parts, ranks = self._parts(each), self._shares.world_size
        return sum(part + max(0, used - ranks * part) for part, (_, used) in zip(parts, each.chunks, strict=True))

    def _own_host_bytes(self, each: RangeSizes) -> int:
        return sum(self._parts(each)) if self.is_shared else each.used
