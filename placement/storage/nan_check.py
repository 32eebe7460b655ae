"""Find tensors that were numbers and are NaN throughout, before they replace the last good values
in the host copy.

Whatever is computed from a tensor of an offloaded handle is computed from poison, which is NaN; a
training that diverges gives the same. A few elements of every tensor show whether it may be NaN;
only such a tensor and its host copy are looked at in full. Gradients are left out, because a loss
scaler makes them NaN and then skips the step.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime

import torch

from placement.core.errors import IntegrityError
from placement.devices.base import POISON_WORD, Device
from placement.storage.changes import BITS, bits_of
from placement.storage.layout import Adoptee, Form, form_of, over
from placement.storage.range import ObjectRanges, Place, PlacedStorage, Range
from placement.tensors.plain import plain_parts

_POISON_PARTS = [
    POISON_WORD[start : start + width]
    for width in BITS
    for start in range(0, len(POISON_WORD), width)
]
_NUMBERS = sorted({int.from_bytes(part, "little", signed=True) for part in _POISON_PARTS})
"""The signed integers that poison reads as, in every width, and as which they come out of a
conversion (to a narrower type: -1)."""
_SAMPLES = 8
# the elements that are looked at together. It bounds the memory that a look in full takes.
_PIECE = 1 << 24
# the tensors that are sampled together: above 1 MiB torch's allocator takes 20 MiB at once
_TOGETHER = (1 << 20) // (8 * _SAMPLES)
_REAL = {
    torch.complex32: torch.float16,
    torch.complex64: torch.float32,
    torch.complex128: torch.float64,
}
_CAUSES = (
    "Either they were computed from a tensor of an offloaded handle, which reads NaN (an average "
    "of weights, an anchor to another model or a reset from it): do that in a phase that has both "
    "on the device. Or the training diverged: load a checkpoint, with the optimizer's state. "
    "nan_check=False in the manager's settings turns this check off."
)


# --- poison as a program reads it: NaN in every type that has it, else a few numbers


def is_poison(tensor: torch.Tensor) -> bool:
    """Whether a tensor of a type that has no NaN, or one byte, has the numbers of poison and no
    others."""
    if (
        not tensor.numel()
        or (tensor.is_floating_point() and tensor.dtype.itemsize != 1)
        or tensor.is_complex()
    ):
        return False
    return bool(are_poison(bits_of(tensor.reshape(-1).contiguous())).all().item())


def are_poison(numbers: torch.Tensor) -> torch.Tensor:
    """Whether each of these signed integers is one of those that poison reads as."""
    found = torch.zeros_like(numbers, dtype=torch.bool)
    for number in _NUMBERS:
        if number >= torch.iinfo(numbers.dtype).min:
            found |= numbers == number
    return found


def has_nan(tensor: torch.Tensor, *, throughout: bool) -> bool:
    """Whether any element is NaN; with `throughout`, whether all are, but for one in eight, as in
    float8 poison (see `POISON_WORD`)."""
    if not tensor.numel():
        return False
    num_nan, count = int(are_nan(tensor).sum().item()), tensor.numel()
    return count - num_nan <= (count + 1) // 8 if throughout else num_nan > 0


def are_nan(tensor: torch.Tensor) -> torch.Tensor:
    """Whether each element is NaN; none is in a type without NaN."""
    if (
        not (tensor.is_floating_point() or tensor.is_complex())
        or tensor.dtype is torch.float4_e2m1fn_x2
    ):
        return torch.zeros_like(tensor, dtype=torch.bool)
    return (tensor.float() if tensor.dtype.itemsize == 1 else tensor).isnan()


def listed(names: Sequence[str]) -> str:
    return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")


# --- the look at an object


Asked = Sequence[
    tuple[
        Range, "Samples", Sequence[tuple[Sequence[str], torch.Tensor, Callable[[], torch.Tensor]]]
    ]
]
"""The names of each range's tensors, whether each may be NaN throughout (on the device), and what
gives the number of those that may."""


class Samples:
    """A few elements of every tensor in one range, read as the 8-byte words in which they lie, and
    looked at on the device: there may be tens of thousands of tensors, and only a number has to
    come to the host."""

    def __init__(self, r: Range, places: Mapping[str, Place], device: torch.device) -> None:
        self.placed = r.placed
        alike = {
            (entry.offset, form): (name, entry, form)
            for name, (_, entry, form) in places.items()
            if 0 not in form[2]
        }
        # without the range: it is the key in a weak table
        self.places = {name: (entry, form) for name, entry, form in alike.values()}
        self._groups: list[tuple[torch.dtype, list[str], torch.Tensor, torch.Tensor]] = []
        """Tensors of one dtype: their names, the indices of their words in the range, and each
        sample's place among the words' elements."""
        for dtype in dict.fromkeys(form[0] for _, form in self.places.values()):
            names, real = (
                [name for name, (_, form) in self.places.items() if form[0] == dtype],
                _REAL.get(dtype, dtype),
            )
            for some in [
                names[start : start + _TOGETHER] for start in range(0, len(names), _TOGETHER)
            ]:
                offsets = torch.tensor(
                    [_spots(*self.places[name]) for name in some], dtype=torch.int64, device="cpu"
                )
                elements = (
                    torch.arange(0, 8 * _SAMPLES, 8, device="cpu") + offsets % 8
                ) // real.itemsize
                self._groups.append((real, some, (offsets // 8).to(device), elements.to(device)))

    def ask(
        self, device: Device, words: torch.Tensor
    ) -> Iterator[tuple[Sequence[str], torch.Tensor, Callable[[], torch.Tensor]]]:
        """Have the device look at the samples in the range's words. See `Asked`."""
        for dtype, names, indices, elements in self._groups:
            mine = words[indices].view(BITS[dtype.itemsize]).gather(1, elements)
            wrong = are_nan(mine.view(dtype))
            if dtype.itemsize == 1 or not dtype.is_floating_point:
                wrong |= are_poison(mine)
            rows = wrong.sum(1) >= _SAMPLES - 1  # one may be a number: see `has_nan`
            yield names, rows, device.ask(rows.sum().view(1))


class NanCheck:
    """The look at one object's tensors. It keeps what it found until the offload that is committed
    next tells it. `readonly`: whether the host copy is never replaced.
    `is_on`: whether anything is looked at."""

    def __init__(
        self, ranges: ObjectRanges, device: Device, kind: str, *, readonly: bool, is_on: bool
    ) -> None:
        self._ranges, self._device, self._kind, self._readonly = ranges, device, kind, readonly
        self._is_on = is_on
        self._samples: weakref.WeakKeyDictionary[Range, Samples] = weakref.WeakKeyDictionary()
        self._put_right: list[str] = []
        self._left: list[str] = []  # tensors without earlier values
        # tensors in place that were left at the last look. They are told once.
        self._known: frozenset[str] = frozenset()

    def ask(self) -> Asked:
        """Have the device read the samples of everything in place. Nothing waits for it."""
        asked = []
        for r in self._ranges.all if self._is_on and not self._readonly else ():
            if r.transient or r.moving_in is not None:
                continue
            samples = self._samples.get(r)
            if samples is None or samples.placed is not r.placed:
                samples = self._samples[r] = Samples(
                    r, self._ranges.places([r]), self._device.torch_device
                )
            asked.append(
                (
                    r,
                    samples,
                    [*samples.ask(self._device, r.on_device(0, r.nbytes).view(torch.int64))],
                )
            )
        return asked

    def put_right(self, asked: Asked) -> None:
        """Give tensors that were numbers and are NaN throughout the values of the host copy again,
        on the device."""
        gone = self._gone(asked)
        lacking = frozenset(name for name, place in gone.items() if _lacks_values(place))
        for name, place in gone.items():
            if name not in lacking & self._known:
                self._go_back(name, place.on_device(), place)
        self._known = lacking

    def refuse(self) -> None:
        """Raise IntegrityError, before a checkpoint, if tensors on the device are NaN throughout
        that are numbers in the host copy."""
        if names := [
            name for name, place in self._gone(self.ask()).items() if not _lacks_values(place)
        ]:
            what = (
                f"{listed(names)} of {self._ranges.name!r} were numbers and are NaN throughout. No "
                "checkpoint was written."
            )
            raise IntegrityError(f"{what} {_CAUSES}")

    def refuse_gradients(self, parameters: Sequence[torch.Tensor]) -> None:
        """Raise IntegrityError if a gradient is NaN throughout, before a step that overwrites the
        host copy of the state."""
        parts = [
            part.detach()
            for each in parameters
            if self._is_on and each.grad is not None
            for _, part in plain_parts(each.grad, "")
        ]
        firsts = [
            each.view(-1)[:_SAMPLES]
            for each in parts
            if each.is_floating_point() and each.itemsize > 1 and each.is_contiguous()
        ]
        # One look at all, because each look waits for the device. None is NaN throughout if none
        # begins with NaN.
        if (
            len(firsts) == len(parts)
            and len({each.device for each in firsts}) == 1
            and not torch.cat(firsts).isnan().any()
        ):
            return
        if nan := [str(tuple(part.shape)) for part in parts if _is_gone(part)]:
            raise IntegrityError(
                f"{len(nan)} gradients of the parameters that {self._ranges.name!r} steps are NaN "
                f"throughout (shapes {listed(nan)}). Nothing was stepped. {_CAUSES}"
            )

    def take(self, since_timestamp_seconds: float) -> str:
        """Words for an error about all that was found since the last offload, which is forgotten;
        empty if nothing was."""
        name, told = self._ranges.name, []
        since = datetime.fromtimestamp(since_timestamp_seconds, UTC).isoformat(timespec="seconds")
        if self._put_right:
            told.append(
                f"{listed(self._put_right)} of {name!r} were numbers at its last offload ({since}) "
                "and are NaN throughout at this one. They have the values of the last one again; "
                "every other tensor has its newest."
            )
        if self._left:
            told.append(
                f"{listed(self._left)} of {name!r} are NaN throughout, and there are no earlier "
                "values to go back to."
            )
        self._put_right, self._left = [], []
        return " ".join([*told, _CAUSES]) if told else ""

    def look_at_new(self, adoptees: Sequence[Adoptee]) -> None:
        """Look at tensors that have no place yet. Those in place of registered ones of the same
        shape get their values. Others may be NaN if they are a module's, because they may be still
        to be filled. An optimizer's are told, unless they were before."""
        owned = [each for adoptee in adoptees for each in adoptee.owned] if self._is_on else []
        places = self._ranges.named_places() if owned else {}
        for each in owned:
            place, storage = places.get(each.name), each.tensor.untyped_storage()
            if place is not None or (
                self._kind == "optimizer" and storage._cdata not in self._ranges.told
            ):
                now = over(storage, form_of(each.tensor))
                if _is_gone(now) and (place is None or _was_numbers(place)):
                    self._go_back(each.name, now, place)

    def _gone(self, asked: Asked) -> dict[str, Place]:
        """The tensors in place that are NaN throughout and were numbers, as far as is known. Those
        that have become NaN in part beside them, too: they would spoil the others at the next use.
        By itself that may be meant."""
        found = [
            (names, rows) for *_, groups in asked for names, rows, count in groups if int(count())
        ]
        suspects = [
            names[row] for names, rows in found for row in rows.nonzero().flatten().tolist()
        ]
        everything = (
            [
                (name, Place(r, *place))
                for r, samples, _ in asked
                for name, place in samples.places.items()
            ]
            if suspects
            else []
        )
        places = {name: place for name, place in everything if not place.entry.ref.expired()}
        likely = [
            name for name in suspects if name in places and _is_gone(places[name].on_device())
        ]
        gone = {name: places[name] for name in likely if _was_numbers(places[name])}
        for name, place in places.items() if gone else ():
            if (
                name not in gone
                and _has_nan(place.on_device())
                and not _lacks_values(place)
                and not _has_nan(place.on_host())
            ):
                gone[name] = place
        return gone

    def _go_back(self, name: str, now: torch.Tensor, place: Place | None) -> None:
        if place is None or _lacks_values(place) or place.form[2] != now.size():
            self._left.append(name)
        else:
            now.copy_(place.on_host())
            self._put_right.append(name)


def _is_gone(tensor: torch.Tensor) -> bool:
    """Whether a tensor is NaN throughout; one of a type without NaN: whether it has no numbers but
    those of poison."""
    values = tensor.reshape(-1)
    if not all(
        has_nan(each, throughout=True) or is_poison(each)
        for each in (values[:_SAMPLES], *values.split(_PIECE))
    ):
        return False
    # Integers that are -1 throughout may be meant: poison has other bytes among them.
    return has_nan(values[:_SAMPLES], throughout=False) or bool((bits_of(values) != -1).any())


def _has_nan(tensor: torch.Tensor) -> bool:
    return any(has_nan(each, throughout=False) for each in tensor.reshape(-1).split(_PIECE))


def _was_numbers(place: Place) -> bool:
    return _lacks_values(place) or not _is_gone(place.on_host())


def _lacks_values(place: Place) -> bool:
    """Whether the host copy may have come back to host memory without its bytes, because the device
    had them."""
    return place.range.can_be_cast or (
        place.range.spill is not None and place.range.pages.prints is None
    )


def _spots(entry: PlacedStorage, form: Form) -> list[int]:
    """The bytes at which samples of a tensor lie, from the beginning of its range: its first, its
    last, and the diagonal between them."""
    dtype, offset, size, stride = form
    edges = [(length - 1, step * dtype.itemsize) for length, step in zip(size, stride, strict=True)]
    start = entry.offset + offset * dtype.itemsize
    return [
        start + sum(last * k // (_SAMPLES - 1) * step for last, step in edges)
        for k in range(_SAMPLES)
    ]
