"""Verify a round trip. The host copy is compared with the fingerprints of the device's bytes, and
later the device's bytes with both.

Verifying waits for every byte that it compares, so a load returns only when its last byte has
arrived. The CPU computes the host copy's fingerprints. This finds a bad memory module or link; it
is no mode for training at full speed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import UTC, datetime

import torch

from placement.core.errors import IntegrityError, listed
from placement.storage.fingerprints import differing, fingerprints
from placement.storage.layout import byte_view
from placement.storage.managed import ManagedStorage
from placement.storage.range import Range


class Verifier:
    """Compares the bytes that arrived with those that were sent, in every move."""

    def note(self, holdings: Iterable[ManagedStorage]) -> None:
        """Fingerprint every host copy that has no fingerprints yet (just adopted, or zeroed), so
        that changes are found."""
        for holding in holdings:
            for r in holding.ranges:
                if r.pages.prints is None and not holding.on_device and r.moving_in is None:
                    r.pages.prints = _of_host(r, 0, len(r.chunk_sizes))

    def check_host(
        self, holding: ManagedStorage, r: Range, chunks: range, prints: torch.Tensor
    ) -> None:
        """Check that the host has the same bytes as the device, before the memory of an offload's
        chunks is given up.
        `chunks`: those that have arrived.
        `prints`: the fingerprints that the host copy of the range must have."""
        first, last = chunks.start, chunks.stop
        bad = r.differing(prints[first:last], _of_host(r, first, last), first)
        if not bad:
            return
        # Have the chunks written again: now if the object is readonly and no offload would do it,
        # else by the next offload.
        is_device_right = holding.readonly
        for index in bad if holding.readonly else ():
            device_prints = r.fingerprint(index, index + 1).cpu()
            if differing(prints[index : index + 1], device_prints):
                is_device_right = False
        if is_device_right:
            holding.device.copy(r.pages.copies(bad), "to_host")
            holding.device.wait(holding.device.mark("to_host"))
        else:
            r.pages.prints = None
            r.pages.note_changed(bad)
        raise IntegrityError(
            f"{holding.name!r}: {_chunks(r, bad)} differ between the device and the host copy "
            "after the offload. The handle stays on the device, complete; its next offload copies "
            "them again."
        )

    def check_newborn(self, holding: ManagedStorage, fresh: Iterable[Range]) -> None:
        """Check the same, byte by byte, for new storages that have no place in a range yet, and
        stay where they are if it raises."""
        for r in fresh:
            for adoptee, offset in zip(r.moving_in or (), r.layout.offsets, strict=False):
                sent = byte_view(adoptee.storage).cpu()
                if not sent.equal(r.view(offset, adoptee.nbytes)):
                    raise IntegrityError(
                        f"{holding.name!r}: {adoptee.name!r} differs between the device and the "
                        "host copy after its first offload. The handle stays on the device, "
                        "complete."
                    )

    def check_device(self, holding: ManagedStorage) -> None:
        """Check before a load is committed that the device has the bytes that the host copy had
        when it was written. Waits for the copies. If the host copy is as it was, the load can be
        tried again. If not, no good copy exists any more, and the storage is `lost`."""
        for r in holding.ranges:
            num_chunks = len(r.chunk_sizes)
            if r.pages.prints is None or r.is_shown:
                prints = _of_host(r, 0, num_chunks)
            else:
                prints = r.pages.prints.cpu()
            bad = r.differing(prints, r.fingerprint(0, num_chunks).cpu())
            if not bad:
                continue
            spoilt = []
            for index in bad:
                if differing(prints[index : index + 1], _of_host(r, index, index + 1)):
                    spoilt.append(index)
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
            holding.lost = (
                f"{changed}, and no other copy of them exists. The handle stays off the device: "
                "unregister it, load a checkpoint into the object, and register it again."
            )
            raise IntegrityError(holding.lost)


def _of_host(r: Range, first: int, last: int) -> torch.Tensor:
    sizes = r.used_sizes[first:last]
    return fingerprints(r.view(r.starts[first], sum(sizes)), sizes)


def _chunks(r: Range, indices: Sequence[int]) -> str:
    """Words for a message: the numbers of chunks, and the names of the storages in them."""
    names = dict[str, None]()  # in order
    for entry in r.placed:
        for index in indices:
            start = r.starts[index]
            end = start + r.used_sizes[index]
            if entry.offset < end and entry.offset + entry.nbytes > start:
                names[entry.name] = None
    numbers = ", ".join(map(str, indices[:8]))
    if len(indices) > 8:
        numbers += ", ..."
    plural = "s" if len(indices) > 1 else ""
    return f"chunk{plural} {numbers} of {len(r.chunk_sizes)} ({listed([*names])})"
