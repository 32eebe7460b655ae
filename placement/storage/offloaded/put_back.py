"""Put registered tensors back that were replaced: each gets its own place and its own form again.

A tensor is known by the name under which its object owns it, because nothing else of it may be left: `to()` on a DTensor exchanges
the tensor inside, `half()` every dtype. Some tensors share the new storage but have no name, such as the base of a view or a tensor of
a state dict. They go where the named tensor of the same form goes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch

from placement.devices.base import Device
from placement.storage.range_layout import Claim, exchange
from placement.storage.scanning.places import Form, Place, Relocated, form_of
from placement.tensors.plain import Outline, parts_of, point_to, restore


def put_back(device: Device, claims: Sequence[Claim], places: Mapping[str, Place], outlines: Mapping[str, Outline]) -> bool:
    """Give the tensors of these claims their places and forms again, where these are known. Idempotent.

    Returns whether any tensor had got another dtype or device.

    Args:
        claims: each has at least one tensor whose place is known.
        outlines: the registered outlines of wrappers, by the names of their parts.
    """
    homes: dict[int, torch.UntypedStorage] = {}
    converted = False
    for claim in claims:
        for tensor, place, form in _targets(claim, places):
            converted = converted or tensor.dtype is not form[0] or tensor.device != device.torch_device
            if (home := homes.get(id(place.entry))) is None:
                home = homes[id(place.entry)] = _home(device, place)
            point_to(tensor, home, *form)
    # Gradients first: a wrapper refuses a gradient of another dtype than its own.
    parts = sorted((owned for claim in claims for owned in claim.owned if owned.wrapper is not None), key=lambda owned: not owned.transient)
    for owned in parts:
        if owned.wrapper is not None and (known := outlines.get(owned.name)) is not None:
            restore(owned.wrapper, known)
    return converted


def bring_back(device: Device, relocated: Sequence[Relocated], places: Mapping[str, Place]) -> None:
    """Point relocated storages to their places again. The bytes at the place count; those of the other memory are dropped. Idempotent."""
    for each in relocated:
        claim = each.claim
        home = device.view(each.range.layout.addresses, each.entry.offset, each.entry.nbytes).untyped_storage()
        if exchange(claim.storage, home):
            home = claim.storage
        else:
            each.range.replace(each.entry, home)
        known = {id(owned.tensor): places[owned.name].form for owned in claim.owned if owned.name in places}
        for tensor in (*claim.bases, *claim.aliases):
            form = known.get(id(tensor), form_of(tensor))
            if form != form_of(tensor) or tensor.untyped_storage().data_ptr() != home.data_ptr():
                point_to(tensor, home, *form)


def renew_empty(owners: Iterable[torch.Tensor]) -> None:
    """Give gradients without an element on this rank, which have no place, the dtype of their owners again."""
    for owner in owners:
        gradient = owner.grad
        if gradient is not None and gradient.dtype is not owner.dtype and not any(part.numel() for _, part in parts_of(gradient, "")):
            owner.grad = None
            owner.grad = torch.zeros_like(owner)


def _home(device: Device, place: Place) -> torch.UntypedStorage:
    """The storage at a place: the adopted one while anybody uses it, else a new one."""
    home = place.entry.storage()
    if home is None:
        home = device.view(place.range.layout.addresses, place.entry.offset, place.entry.nbytes).untyped_storage()
        place.range.replace(place.entry, home)
    return home


def _targets(claim: Claim, places: Mapping[str, Place]) -> list[tuple[torch.Tensor, Place, Form]]:
    """Every tensor of a claim, with its place and the form that it will get."""
    named = [(owned.tensor, places[owned.name]) for owned in claim.owned if owned.name in places]
    targets = [(tensor, place, place.form) for tensor, place in named]
    done = {id(tensor) for tensor, _ in named}
    by_form = {form_of(tensor): place for tensor, place in named}
    first, place = named[0]
    for tensor in (*claim.bases, *claim.aliases):
        if id(tensor) in done:
            continue
        if (same := by_form.get(form_of(tensor))) is not None:
            targets.append((tensor, same, same.form))
        else:
            targets.append((tensor, place, _translated(tensor, first.dtype, place)))
    return targets


def _translated(tensor: torch.Tensor, dtype: torch.dtype, place: Place) -> Form:
    """The form that an unknown tensor gets at a place, in the dtype that belongs there. It gets no elements if the place is too small."""
    now, offset, size, stride = form_of(tensor)
    wanted = place.form[0] if now == dtype else now
    end = offset + 1 + sum((length - 1) * step for length, step in zip(size, stride, strict=True))
    if not tensor.numel() or end * wanted.itemsize > place.entry.nbytes:
        return wanted, 0, torch.Size((0,)), (1,)
    return wanted, offset, size, stride
