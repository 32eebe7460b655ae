"""Verify a round trip. The host copy is compared with the fingerprints of the device's bytes, and
later the device's bytes with both.

Verifying waits for every byte that it compares, so a load returns only when its last byte has
arrived, and the CPU computes the host copy's fingerprints. This finds a bad memory module or link;
it is no mode for training at full speed.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime

import torch

from placement.core.errors import IntegrityError, listed
from placement.core.settings import Verify
from placement.storage.disk import NO_OTHER_COPY, chunk_words
from placement.storage.fingerprints import differing, fingerprints
from placement.storage.layout import byte_view
from placement.storage.managed import ManagedStorage
from placement.storage.range import Range


class Verifier:
    """Compares the bytes that arrived with those that were sent.
    `mode`: "always": every chunk of every move. "sample": one chunk of each handle that moves,
    drawn anew each time."""

    def __init__(self, mode: Verify) -> None:
        self._mode = mode
        self._random = random.Random()  # noqa: S311 - not the global one, which a training script seeds

    def choose(self, ranges: Iterable[Range]) -> dict[Range, range]:
        """The chunks of these ranges to compare in one move."""
        whole = {r: range(len(r.chunk_sizes)) for r in ranges}
        if self._mode == "always" or not whole:
            return whole
        r, index = self._random.choice(
            [(r, index) for r, chunks in whole.items() for index in chunks]
        )
        return {r: range(index, index + 1)}

    def note(self, holdings: Iterable[ManagedStorage]) -> None:
        """With "always", fingerprint every host copy that has no fingerprints yet (just adopted, or
        zeroed), so that changes are found."""
        if self._mode == "always":
            for holding in holdings:
                for r in holding.ranges:
                    if r.pages.prints is None and not holding.on_device and r.moving_in is None:
                        r.pages.prints = _of_host(r, 0, len(r.chunk_sizes))

    def check_host(
        self, holding: ManagedStorage, r: Range, chunks: range, wanted: torch.Tensor
    ) -> None:
        """Check that the host has the same bytes as the device, before the memory of an offload's
        chunks is given up. `chunks`: those that have arrived.
        `wanted`: the fingerprints that the host copy of the range must have."""
        if bad := r.differing(
            wanted[chunks.start : chunks.stop], _of_host(r, chunks.start, chunks.stop), chunks.start
        ):
            # Have the chunks written again: now if the object is readonly and no offload would do
            # it, else by the next offload.
            found = (
                [r.fingerprint(index, index + 1).cpu() for index in bad] if holding.readonly else []
            )
            if found and not any(
                differing(wanted[index : index + 1], each)
                for each, index in zip(found, bad, strict=True)
            ):
                holding.device.copy(r.pages.copies(bad), "to_host")
                holding.device.wait(holding.device.mark("to_host"))
            else:
                r.pages.prints = None
                r.pages.note_changed(bad)
            raise IntegrityError(
                f"{holding.name!r}: {_chunks(r, bad)} differ between the device and the host copy "
                "after the offload. The handle stays on the device, complete; its next offload "
                "copies them again."
            )

    def check_newborn(self, holding: ManagedStorage, fresh: Iterable[Range]) -> None:
        """Check the same, byte by byte, for new storages that have no place in a range yet, and
        stay where they are if it raises."""
        arrived = [(r, index) for r in fresh for index in range(len(r.moving_in or ()))]
        if self._mode == "sample" and arrived:
            arrived = [self._random.choice(arrived)]
        for r, index in arrived:
            assert r.moving_in is not None
            adoptee = r.moving_in[index]
            if (
                not byte_view(adoptee.storage)
                .cpu()
                .equal(r.view(r.layout.offsets[index], adoptee.nbytes))
            ):
                raise IntegrityError(
                    f"{holding.name!r}: {adoptee.name!r} differs between the device and the host "
                    "copy after its first offload. The handle stays on the device, complete."
                )

    def check_device(self, holding: ManagedStorage) -> None:
        """Check before a load is committed that the device has the bytes that the host copy had
        when it was written. Waits for the copies. If the host copy is as it was, the load can be
        tried again. If not, no good copy exists any more, and the storage is `lost`."""
        for r, chunks in self.choose(holding.ranges).items():
            first, last = chunks.start, chunks.stop
            wanted = (
                _of_host(r, first, last)
                if r.pages.prints is None or r.is_shown
                else r.pages.prints[first:last].cpu()
            )
            bad = r.differing(wanted, r.fingerprint(first, last).cpu(), first)
            if not bad:
                continue
            spoilt = [
                index
                for index in bad
                if differing(wanted[index - first :][:1], _of_host(r, index, index + 1))
            ]
            if not spoilt:
                raise IntegrityError(
                    f"{holding.name!r}: {_chunks(r, bad)} did not arrive on the device as they are "
                    "in the host copy. The load was undone; the host copy is complete."
                )
            since = datetime.fromtimestamp(holding.offloaded_timestamp_seconds, UTC).isoformat(
                timespec="seconds"
            )
            changed = (
                f"{_chunks(r, spoilt)} changed in the host copy of {holding.name!r} after it was "
                f"offloaded at {since}"
            )
            holding.lost = f"{changed}, {NO_OTHER_COPY}"
            raise IntegrityError(holding.lost)


def _of_host(r: Range, first: int, last: int) -> torch.Tensor:
    sizes = r.used_sizes[first:last]
    return fingerprints(r.view(r.starts[first], sum(sizes)), sizes)


def _chunks(r: Range, indices: Sequence[int]) -> str:
    """Words for a message: the numbers of chunks, and the names of the storages in them."""
    spans = [(r.starts[index], r.starts[index] + r.used_sizes[index]) for index in indices]
    names = [
        p.name
        for p in r.placed
        if any(p.offset < end and p.offset + p.nbytes > start for start, end in spans)
    ]
    return f"{chunk_words(indices, len(r.chunk_sizes))} ({listed(names)})"
