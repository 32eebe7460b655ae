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
from placement.storage.fingerprints import fingerprints
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
        """Check that the bytes of an offload have arrived on the host, before the memory of these
        chunks is given up. Raises IntegrityError if not: the handle stays on the device, and the
        host copy is made good, now or by the next offload.
        `chunks`: those whose copies are complete.
        `prints`: the fingerprints of all chunks of the range that the host copy must have. They are
        the device's, or for a readonly handle the earlier ones of the host copy."""
        first, last = chunks.start, chunks.stop
        bad = r.differing(prints[first:last], _of_host(r, first, last), first)
        if not bad:
            return
        # no offload copies a readonly handle's chunks that are on the device as they were
        if holding.readonly and _are_on_device(r, bad, prints):
            holding.device.copy(r.pages.copies(bad), "to_host")
            holding.device.wait(holding.device.mark("to_host"))
            remedy = "they were copied again"
        else:
            # the device's bytes count, also where those of a readonly handle changed
            r.pages.prints = None
            r.pages.note_changed(bad)
            remedy = "its next offload copies them again"
        raise IntegrityError(
            f"{holding.name!r}: {_chunks(r, bad)} differ between the device and the host copy "
            f"after the offload. The handle stays on the device, complete; {remedy}."
        )

    def check_newborn(self, holding: ManagedStorage, fresh: Iterable[Range]) -> None:
        """Check, byte by byte, that the new storages of an offload have arrived on the host. Called
        once their copies are complete, before they move into these ranges. Raises IntegrityError if
        not: the storages stay where they are."""
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
                on_host = _of_host(r, index, index + 1)
                if not torch.equal(on_host, prints[index : index + 1]):
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


def _are_on_device(r: Range, indices: Sequence[int], prints: torch.Tensor) -> bool:
    """Whether the device's bytes of these chunks have the fingerprints in `prints`, which are those
    of the whole range."""
    for index in indices:
        on_device = r.fingerprint(index, index + 1).cpu()
        if not torch.equal(on_device, prints[index : index + 1]):
            return False
    return True


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
