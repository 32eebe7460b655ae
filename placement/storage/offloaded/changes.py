"""Find changes to an offloaded object that would lose its registered values, and the words for the error that reports them.

`half()`, `to()`, `resize_token_embeddings()` or `.data =` on an offloaded module read poison and put new tensors in place of the
registered ones. If they stayed, the host copy would belong to nobody and be dropped, with the only good values in it. A backward
outside a phase leaves gradients that were computed from poison, too. Poison spreads as NaN, so a NaN in a tensor that is new since the
offload gives it away. `share_memory()` takes storages away from their places, with poison for values.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from placement.core.errors import IntegrityError
from placement.devices.base import POISON_WORD
from placement.storage.range import Range
from placement.storage.range_layout import Claim
from placement.storage.scanning.places import Place
from placement.storage.scanning.scanner import Versions

SIGNED = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_NUMBERS = sorted(
    {
        int.from_bytes(POISON_WORD[start : start + width], "little", signed=True)
        for width in SIGNED
        for start in range(0, len(POISON_WORD), width)
    }
)
"""The signed integers that poison reads as, in every width, and as which they come out of a conversion (to a narrower type: -1)."""


@dataclass(frozen=True, slots=True)
class Changes:
    """The changes that were found in one offloaded object."""

    replaced: Sequence[Claim] = ()
    """Tensors that were computed from poison and put in place of registered ones."""
    added: Sequence[Claim] = ()
    """Tensors that were computed from poison, under names that no registered tensor had."""
    gradients: Sequence[Claim] = ()
    moved: Sequence[Claim] = ()
    """Storages that were taken away from their places."""
    lost: str | None = None
    """Words for what could not be undone, and what to do; None where everything could."""

    def __bool__(self) -> bool:
        return bool(self.replaced or self.added or self.gradients or self.moved)

    def message(self, name: str) -> str:
        """The text of an error: what happened to the object, and what to do."""
        told = []
        if self.moved:
            told.append(
                f"{_names(self.moved)} of {name!r} were moved to other memory while it was offloaded (share_memory(), a "
                "torch.multiprocessing queue, resize_()). Whoever received them got poison (NaN), which offloaded tensors read. They have "
                "their places and their registered values again. Share memory before registering, or send copies of handle.state_dict()."
            )
        if self.replaced:
            told.append(
                f"{_names(self.replaced)} of {name!r} were replaced while it was offloaded, by tensors computed from poison (NaN), which "
                "offloaded tensors read: half(), to(), resize_token_embeddings(), .data =. The registered values were put back. Do it "
                "inside a phase that has it on the device, or before you register it."
            )
        if self.added:
            told.append(
                f"{_names(self.added)} were added to {name!r} while it was offloaded, and were computed from poison (NaN), which offloaded "
                "tensors read: add_adapter(), register_buffer(), a copy of a weight. They have no registered values and stay NaN until you "
                "give them values or remove them; this is not raised again. Add them inside a phase that has it on the device."
            )
        if self.gradients and not self.replaced:
            told.append(
                f"{_names(self.gradients)} of {name!r} were computed while it was offloaded, from poison (NaN), which offloaded tensors "
                "read: a backward ran outside a phase. Its gradients were dropped, as zero_grad() does. Call backward() inside "
                "manager.phase('train')."
            )
        if self.lost is not None:
            told.append(f"But {self.lost}.")
        return " ".join(told)


def computed_from_poison(stay: Sequence[Claim], transient: Sequence[Claim], places: Mapping[str, Place]) -> Changes:
    """Find out which of these tensors, all new since the offload, were computed from poison.

    Args:
        stay: claims of parameters, buffers and optimizer state.
        transient: claims of gradients.
        places: the places of the registered tensors, by name.
    """
    placed = {id(claim): any(owned.name in places for owned in claim.owned) for claim in stay}
    # Nobody replaces a value by NaN on purpose, so one NaN proves it. A tensor of a new name may be memory that is still to be filled.
    values = [claim for claim in stay if _has_nan(claim, throughout=not placed[id(claim)])]
    gradients = [claim for claim in transient if _has_nan(claim, throughout=False)]
    # Integers have no NaN. They were copied from poison if they hold only its numbers and are weights, or came together with a NaN.
    values += [c for c in stay if placed[id(c)] and (values or isinstance(c.aliases[0], torch.nn.Parameter)) and _is_poison(c)]
    if values:  # a tensor with its registered values, such as padding of zeros, was replaced by the same call: put it back, too
        known = {id(claim) for claim in values}
        values += [c for c in stay if placed[id(c)] and id(c) not in known and _is_as_registered(c, places)]
    return Changes([c for c in values if placed[id(c)]], [c for c in values if not placed[id(c)]], gradients)


def written(before: Versions, now: Versions, ranges: Sequence[Range]) -> list[str]:
    """Names of the storages that were written in place between two looks, as far as version counters tell. They miss `.data` writes."""
    storages = now.written_since(before)
    return [entry.name for r in ranges for entry in r.placed if entry.ref.cdata in storages] if storages else []


class WrittenWhileOffloaded(IntegrityError):
    """Raised by a load when version counters show that values were written in place while offloaded."""


def refuse_written(name: str, names: Sequence[str], also: str) -> None:
    """Raise if storages were written in place while offloaded. The host copy still has the registered values.

    Args:
        name: the handle.
        names: the storages that were written.
        also: text about changes that were found beside the writes; may be empty.

    Raises:
        WrittenWhileOffloaded: `names` is not empty.
    """
    if names:
        raise WrittenWhileOffloaded(
            f"{', '.join(names[:8])} of {name!r} were written while it was offloaded, when only poison lies behind its tensors; the "
            "written values are lost, and the handle's values are unchanged. Look for writes outside the phases that have it on the device "
            f"(EMA updates, initialisers).{also and ' '}{also}"
        )


def listed(names: Sequence[str]) -> str:
    """The first names of a list, and how many more there are."""
    return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")


def _names(claims: Sequence[Claim]) -> str:
    return listed([claim.name for claim in claims])


def _is_as_registered(claim: Claim, places: Mapping[str, Place]) -> bool:
    """Whether every tensor of the claim has its registered values, so that it can be put back without losing anything."""
    for owned in claim.owned:
        if (place := places.get(owned.name)) is None:
            return False
        dtype, offset, size, stride = place.form
        host = place.range.view(place.entry.offset, place.entry.nbytes).untyped_storage()
        registered = torch.empty(0, dtype=dtype, device="cpu").set_(host, offset, size, stride)
        now = owned.tensor.detach()
        if now.size() != size or not torch.equal(now.cpu().to(dtype), registered):
            return False
    return True


def _is_poison(claim: Claim) -> bool:
    """Whether a tensor of a type without NaN has the numbers of poison and no others.

    Their order does not matter: the tensor may be a part of what was copied, or transposed, or begin anywhere in the poison word.
    """
    return not _has_nan(claim, throughout=False) and is_poison(claim.aliases[0].detach())


def is_poison(tensor: torch.Tensor) -> bool:
    """Whether a tensor of a type that has no NaN, or one byte, has the numbers of poison and no others."""
    if not tensor.numel() or (tensor.is_floating_point() and tensor.dtype.itemsize != 1) or tensor.is_complex():
        return False
    numbers = tensor.reshape(-1).contiguous().view(torch.uint8).view(SIGNED[tensor.dtype.itemsize])
    return bool(are_poison(numbers).all().item())


def are_poison(numbers: torch.Tensor) -> torch.Tensor:
    """Whether each of these signed integers is one of those that poison reads as."""
    found = torch.zeros_like(numbers, dtype=torch.bool)
    for number in _NUMBERS:
        if number >= torch.iinfo(numbers.dtype).min:
            found |= numbers == number
    return found


def has_nan(tensor: torch.Tensor, *, throughout: bool) -> bool:
    """Whether any element of a tensor is NaN (`throughout`: whether all are). False for a type without NaN.

    With `throughout`, one element in eight may be a number. float8 poison, and values computed from it, read so: see `POISON_WORD`.
    """
    if not tensor.numel():
        return False
    nan = are_nan(tensor)
    if throughout:
        return tensor.numel() - int(nan.sum().item()) <= (tensor.numel() + 1) // 8
    return bool(nan.any().item())


def are_nan(tensor: torch.Tensor) -> torch.Tensor:
    """Whether each element is NaN; none is in a type without NaN."""
    if not (tensor.is_floating_point() or tensor.is_complex()) or tensor.dtype is torch.float4_e2m1fn_x2:
        return torch.zeros_like(tensor, dtype=torch.bool)
    return (tensor.float() if tensor.dtype.itemsize == 1 else tensor).isnan()


def _has_nan(claim: Claim, *, throughout: bool) -> bool:
    return has_nan(claim.aliases[0].detach(), throughout=throughout)
