"""What was computed from poison while its object was offloaded.

`half()`, `to()`, `resize_token_embeddings()` or `.data =` on an offloaded module read poison and put new tensors in place of
the registered ones: then the host copy would belong to nobody and be dropped with the only good values in it. A backward outside
a phase leaves gradients of the same kind. Poison spreads as NaN, so NaN in a tensor that was born meanwhile tells.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from placement.errors import IntegrityError
from placement.memory.adopt import Claim
from placement.memory.base import Device
from placement.memory.intake import Versions
from placement.memory.range import Placed, Range

Born = tuple[list[Claim], list[Claim]]
"""What an object owns outside its ranges: to stay, and loose."""


def refuse(device: Device, name: str, born: Born, ranges: Sequence[Range]) -> None:
    """Raise where what was born while offloaded was computed from poison. The object has its registered values again then.

    Raises:
        IntegrityError: what was computed, and what to do.
    """
    values, gradients = put_back(device, born, ranges)
    names = ", ".join(claim.name for claim in (values or gradients)[:8])
    if values:
        raise IntegrityError(
            f"{names} of {name!r} were replaced while it was offloaded, by tensors computed from what lies there then (NaN): half(), "
            "to(), resize_token_embeddings(), .data =. The registered values were put back. Do it inside a phase that has it on the "
            "device, or before it is registered."
        )
    if gradients:
        raise IntegrityError(
            f"{names} of {name!r} came to be while it was offloaded, from what lies there then (NaN): a backward outside a phase. "
            "Drop the gradients with zero_grad(), and call backward() inside manager.phase('train')."
        )


def put_back(device: Device, born: Born, ranges: Sequence[Range]) -> Born:
    """Give tensors that stand in place of registered ones the registered values again: their dtype, shape and place.

    Returns what was computed from poison. Gradients are put back with values only: alone they are of a backward, and what was
    there before may have been dropped on purpose.
    """
    stay, loose = born
    if not stay and not loose:
        return [], []
    placed = {entry.name: (r, entry) for r in ranges for entry in r.placed}
    # Nobody puts NaN in place of a value on purpose; a tensor of a new name may be memory that is still to be filled.
    values = [claim for claim in stay if _has_nan(claim, throughout=claim.name not in placed)]
    gradients = [claim for claim in loose if _has_nan(claim, throughout=False)]
    # Integers have no NaN. Weights of nothing but -1, or anything of -1 that came with a NaN, was copied from what lies there.
    values += [c for c in stay if c.name in placed and (values or isinstance(c.aliases[0], torch.nn.Parameter)) and _is_poison(c)]
    for claim in (*values, *gradients) if values else ():
        if claim.name in placed:
            _put_back(device, claim, *placed[claim.name])
    return values, gradients


def written(before: Versions, now: Versions, ranges: Sequence[Range]) -> list[str]:
    """Names of what was written in place between two looks, as far as version counters tell: not through `.data`."""
    storages = now.written_since(before)
    return [entry.name for r in ranges for entry in r.placed if entry.ref.cdata in storages] if storages else []


class WrittenWhileOffloaded(IntegrityError):
    """A load has found at the version counters that values were written in place."""


def refuse_written(name: str, names: Sequence[str]) -> None:
    """Raise where values were written in place while offloaded. The host copy has the registered ones.

    Raises:
        WrittenWhileOffloaded: what was written.
    """
    if names:
        raise WrittenWhileOffloaded(
            f"{', '.join(names[:8])} of {name!r} were written while it was offloaded, where nothing can be written: what was written is "
            "lost, every value is as it was. Look for updates outside a phase that has it on the device (EMA updates, initialisers)."
        )


def _put_back(device: Device, claim: Claim, r: Range, entry: Placed) -> None:
    home = entry.storage() or device.view(r.adoption.addresses, entry.offset, entry.nbytes).untyped_storage()
    dtype, offset, size, stride = entry.form
    with torch.no_grad():
        for alias in claim.aliases:
            alias.data = torch.empty(0, dtype=dtype, device=home.device).set_(home, offset, size, stride)
    r.counted = None  # before the old storage may be freed, whose address is in there
    entry.ref, entry.use_count = StorageWeakRef(claim.aliases[0].untyped_storage()), 0


def _is_poison(claim: Claim) -> bool:
    """Whether a tensor of a type that cannot say NaN has the bytes of poison and no others."""
    tensor = claim.aliases[0].detach()
    if not tensor.numel() or (tensor.is_floating_point() and tensor.dtype.itemsize != 1) or tensor.is_complex():
        return False
    return not _has_nan(claim, throughout=False) and bool((tensor.contiguous().view(torch.uint8) == 0xFF).all().item())


def _has_nan(claim: Claim, *, throughout: bool) -> bool:
    tensor = claim.aliases[0].detach()
    if not (tensor.is_floating_point() or tensor.is_complex()) or not tensor.numel():
        return False
    nan = (tensor.float() if tensor.dtype.itemsize == 1 else tensor).isnan()
    return bool((nan.all() if throughout else nan.any()).item())
