"""Tensors of state dicts that placement handed out. They follow the handle, and writes into them
are counted.

A state dict's tensors alias the live ones, so after the next offload they would read poison.
Instead, those that are still alive are pointed to the host copy when the bytes go there. They are
pointed back to the device when the bytes return. The parts of a wrapper (a DTensor) follow, and its
device is corrected. A forked child has neither memory."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextvars import ContextVar

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from placement.core.journal import logger
from placement.core.weak import WeakIdSet
from placement.devices.base import Device
from placement.ownership.adapter import Adapter
from placement.storage.layout import form_of, over
from placement.storage.places import ObjectRanges
from placement.storage.range import Range
from placement.tensors.plain import (
    align,
    has_storage,
    is_plain_type,
    is_sparse,
    is_wrapper,
    made_of,
    parts_of,
    rewrapped,
)

are_only_read: ContextVar[bool] = ContextVar("are_only_read", default=False)
"""Whether the tensors that are handed out now are only read, and not for long: by a checkpoint that
is being saved."""


class StateDictTensors:
    """The living tensors of all state dicts of one object."""

    def __init__(self, device: Device, ranges: ObjectRanges, *, readonly: bool) -> None:
        self._device = device
        self._ranges = ranges
        self._readonly = readonly  # if so, writes into the host copy stay: see `came`
        # whether any tensor was ever handed out. Until then, nothing follows.
        self._was_used = False
        # plain tensors that were handed out, and the parts of wrappers
        self._tensors: WeakIdSet[torch.Tensor] = WeakIdSet()
        self._wrappers: WeakIdSet[torch.Tensor] = WeakIdSet()
        # the storage over each address that was handed out, while it is alive
        self._storages: dict[int, StorageWeakRef] = {}
        # how often all tensors were pointed elsewhere. That misses a tensor that another thread
        # hands out meanwhile: `registration.state_dicts.hand_out` repeats that if this has changed.
        self.num_pointings = 0
        # new storages (`_cdata`) that an offload under way takes in. Their tensors follow by
        # themselves.
        self.moving_in: Collection[int] = frozenset()

    def _note_used(self) -> None:
        """Called before the first tensor is handed out, by any thread."""
        if not self._was_used:
            _IN_USE.add(self)  # first: a Ctrl-C may come in between
            self._was_used = True

    def _at(
        self, tensor: torch.Tensor, address: int, make: Callable[[], torch.Tensor]
    ) -> torch.Tensor:
        """A tensor of the same form over a storage at another address, made if there is none:
        tensors that shared one share one again."""
        with torch.no_grad():
            reference = self._storages.get(address)
            storage = None
            if reference is not None and not reference.expired():
                storage = torch.UntypedStorage._new_with_weak_ptr(reference.cdata)
            # its holder may have moved it away (`share_memory_()`)
            if storage is None or storage.data_ptr() != address:
                storage = make().untyped_storage()
                self._storages[address] = StorageWeakRef(storage)
            return over(storage, form_of(tensor))

    def take_over(self, storages: Collection[int]) -> None:
        """Let those tensors that other objects handed out and that lie in these storages (`_cdata`)
        follow this object, which owns them. State that is a gradient is handed out by its optimizer
        as long as no object has taken the gradient in. Until `moving_in` is emptied, these storages
        are left alone."""
        self.moving_in = storages
        if not storages:
            return
        for other in _IN_USE:
            tensors = [tensor for tensor in other if tensor.untyped_storage()._cdata in storages]
            if other is self or not tensors:
                continue
            self._note_used()
            self._tensors.update(tensors)
            parts = {id(tensor) for tensor in tensors}
            for wrapper in other._wrappers:
                if not parts.isdisjoint(_parts(wrapper)):
                    self._wrappers.add(wrapper)
            for tensor in tensors:
                other._tensors.discard(tensor)

    def disown_live(self, adapter: Adapter) -> None:
        """Have state dicts forget the tensors that the object owns now. An optimizer's state may be
        a tensor that the state dict of its module has shown."""
        in_use = [self] if self else []
        if adapter.kind == "optimizer":
            in_use = [shown for shown in _IN_USE if shown]
        if not in_use:
            return
        unchanged = adapter.unchanged()
        if unchanged is not None:
            live = unchanged.tensors
        else:
            live = [owned.tensor for owned in adapter.owned()]
            live += adapter.borrowed()
        for shown in in_use:
            shown.disown(live)

    def disown(self, live: Iterable[torch.Tensor]) -> None:
        """Forget tensors that an object owns now: an optimizer's `load_state_dict` takes over the
        tensors that it is given."""
        if not self._tensors:
            return
        own = {id(tensor) for tensor in live}
        for shown in (self._tensors, self._wrappers):
            for tensor in shown:
                if not own.isdisjoint((id(tensor), *_parts(tensor))):
                    shown.discard(tensor)

    def __bool__(self) -> bool:
        return self._was_used and bool(self._tensors)

    @property
    def shares_addresses(self) -> bool:
        """Whether storages may be alive that show a place and are not the ones adopted there: those
        of tensors that were loaded back."""
        return bool(self._storages)

    @property
    def are_held(self) -> bool:
        """Whether a tensor that was handed out, or a view of one, is alive, so that its holder
        could write there."""
        return self._was_used and (bool(self._tensors) or bool(self._held()))

    @property
    def held_addresses(self) -> list[int]:
        """The addresses, ascending, of storages that were made for such tensors."""
        return sorted(self._held()) if self._storages else []

    def _held(self) -> dict[int, StorageWeakRef]:
        """The storages that were made for such tensors and are alive, on either side, by
        address."""
        storages = [*self._storages.items()]  # another thread may add one
        return {address: storage for address, storage in storages if not storage.expired()}

    def shown(self) -> list[torch.UntypedStorage]:
        """The storages that were made for tensors that were handed out, and are alive."""
        references = self._held().values()
        return [torch.UntypedStorage._new_with_weak_ptr(storage.cdata) for storage in references]

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(self._tensors)

    def hand_out(self, tensor: torch.Tensor, *, from_host: bool) -> torch.Tensor:
        """The tensor that a state dict may show for a live one. It follows the handle from now on,
        unless it is sparse: then it is a copy. `from_host`: whether the values are in the host
        copy. Another thread may move them meanwhile: the caller looks at `num_pointings`."""
        self._note_used()
        if isinstance(tensor, torch.nn.Parameter) and not from_host:
            return tensor  # state_dict(keep_vars=True) asks for the live parameter itself
        if is_sparse(tensor):
            indices = self._copy(tensor._indices(), from_host)
            return made_of(tensor, indices, self._copy(tensor._values(), from_host))
        if not is_wrapper(tensor):
            # A tensor of an unknown class (FSDP1's ShardedTensor) never lies in a range: it was
            # gathered and cut for this state dict.
            if not is_plain_type(type(tensor)) or not has_storage(tensor):
                return tensor
            if not tensor.untyped_storage().nbytes():
                return tensor
            return self._hand_out_plain(tensor, from_host)
        with torch.no_grad():
            # Not from tensor.detach(): wrappers have their own code for that, and some (torchao's
            # optimizer state) read values in it.
            shown = rewrapped(
                tensor, lambda part: self._hand_out_plain(part, from_host)
            ).requires_grad_(False)
        self._wrappers.add(shown)
        return shown

    def _copy(self, part: torch.Tensor, from_host: bool) -> torch.Tensor:
        """A copy of a sparse tensor's part with its present values. It cannot follow, because it
        cannot be pointed elsewhere."""
        host = self._over_host(part) if from_host and part.numel() else None
        return (part if host is None else host).clone()

    def _hand_out_plain(self, tensor: torch.Tensor, from_host: bool) -> torch.Tensor:
        """A plain tensor, or a part of a wrapper, as a state dict shows it. It follows the handle
        from now on. A tensor without a place stays in torch's own memory."""
        if not has_storage(tensor):
            return tensor
        host = self.lend_from_host(tensor) if from_host else None
        # a rank without a part of a sharded tensor names the same device as others
        if host is None and from_host and tensor.numel() == 0:
            host = torch.empty_like(tensor, device="cpu", requires_grad=False)
        shown = tensor.detach() if host is None else host
        self._tensors.add(shown)
        return shown

    def lend_from_host(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """A plain tensor of the offloaded object with its bytes in the host copy, where its holder
        may write from now on: pages that were brought early are given up. None where it has no
        place."""
        place = self.place_of(tensor)
        if place is None:
            return None
        self._note_used()
        host = self._over(tensor, *place)
        place[0].note_shown()
        return host

    def place_of(self, tensor: torch.Tensor) -> tuple[Range, int] | None:
        """The place of a plain tensor of the offloaded object, even if it was relocated. None where
        it has no place."""
        if not has_storage(tensor):
            return None
        storage = tensor.untyped_storage()
        place = self._place_of(storage)
        if place is not None:
            return place
        # it may have been relocated: its bytes are at its place, although it is not
        for r in self._ranges.all:
            entry = r.place_of(storage)
            if entry is not None and entry.nbytes == storage.nbytes():
                return r, entry.offset
        return None

    def _place_of(self, storage: torch.UntypedStorage) -> tuple[Range, int] | None:
        """The place of a storage, which may have still to move in: the host copy has its bytes.
        None for no range."""
        for r in self._ranges.all:
            entry = None if r.moving_in is None else r.place_of(storage)
            if entry is not None:
                return r, entry.offset
        return self._ranges.at(storage.data_ptr())

    def _over_host(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """The same plain tensor with its bytes in the host copy; None where its storage is not in a
        range."""
        place = self._place_of(tensor.untyped_storage())
        return None if place is None else self._over(tensor, *place)

    def _over(self, tensor: torch.Tensor, r: Range, offset: int) -> torch.Tensor:
        r.pages.wait_until_saved()  # also where a tensor over the place is alive already
        with torch.inference_mode(False):  # it must follow the handle later
            return self._at(
                tensor,
                r.host.address + offset,
                lambda: r.view(offset, tensor.untyped_storage().nbytes()),
            )

    def point_to_host(self) -> None:
        """Point every living tensor to the host copy, but those that are moving in. Idempotent."""

        def find(tensor: torch.Tensor) -> torch.Tensor | None:
            if tensor.numel() == 0 and not tensor.is_cpu:
                return torch.empty_like(tensor, device="cpu")
            if tensor.untyped_storage()._cdata in self.moving_in:
                return None
            return self._over_host(tensor)

        self._point_to(find)

    def point_to_device(self) -> None:
        """Point every living tensor to its place on the device. Idempotent."""

        def find(tensor: torch.Tensor) -> torch.Tensor | None:
            if tensor.numel() == 0 and tensor.device != self._device.torch_device:
                return torch.empty_like(tensor, device=self._device.torch_device)
            place = self._ranges.find(tensor)
            if place is None:
                return None
            r, offset = place
            storage = tensor.untyped_storage()
            address = r.layout.addresses.base + offset
            if storage.data_ptr() == address:
                return None
            return self._at(tensor, address, lambda: r.on_device(offset, storage.nbytes()))

        self._point_to(find)

    def left_on_host(self) -> list[tuple[Range, str]]:
        """The storages over the host copy, by range and name, that views still hold after
        `point_to_device`."""
        addresses = self._held()
        on_host: list[tuple[Range, str]] = []
        if not addresses:
            return on_host
        for r in self._ranges.all:
            for entry in r.placed:
                if r.host.address + entry.offset in addresses:
                    on_host.append((r, entry.name))
        return on_host

    def leave(self) -> None:
        """Give every living tensor memory of its own with its present values, on its present
        device, because the ranges are about to go."""
        self._point_to(lambda tensor: tensor.detach().clone())

    def leave_ranges(self, ranges: Sequence[Range]) -> None:
        """Give the tensors in these ranges host memory of their own, because their values are
        nowhere else."""

        def find(tensor: torch.Tensor) -> torch.Tensor | None:
            place = self._ranges.find(tensor)
            if place is None or place[0] not in ranges:
                return None
            return tensor.detach().to("cpu", copy=True)

        self._point_to(find)

    def _point_to(self, find: Callable[[torch.Tensor], torch.Tensor | None]) -> None:
        """Point every living tensor to the tensor that `find` returns for it; None leaves it where
        it is. Idempotent."""
        self.num_pointings += 1
        if not self._was_used:
            return
        with torch.no_grad():
            for tensor in self:
                target = find(tensor)
                if target is not None:
                    tensor.data = target
            for wrapper in self._wrappers:
                align(wrapper)
        self._storages = self._held()

    # --- told of moves

    def left(self) -> None:
        """Show the host copy, where holders may write from now on."""
        self.point_to_host()
        addresses = self._held()
        for r in self._ranges.all:
            offsets = (address - r.host.address for address in addresses)
            # one that was shown since the last load, too: its pages aside lack the writes
            if r.is_shown or any(0 <= offset < r.nbytes for offset in offsets):
                r.note_shown()
        if self:
            self._ranges.are_values_lent = True

    def came(self) -> None:
        """Show the device. Views cannot follow: they may still write into the host copy."""
        self.point_to_device()
        for r, _ in self.left_on_host():
            if self._readonly:
                # an offload copies nothing back: at the next load such writes become the values
                r.note_shown()
            elif not r.is_shared:  # no view may write into a shared host copy
                # the next offload copies every page over such writes
                r.pages.prints = None

    def warn_of_views(self) -> bool:
        """Log a warning if views show the host copy of the loaded object. Returns whether there are
        any."""
        names = [name for _, name in self.left_on_host()]
        if names:
            logger.warning(
                "%r: views of tensors of a state dict (%s) were taken while it was offloaded, and "
                "are still alive. The tensors themselves show the device now, these "
                "views show the host copy: they do not see what is changed from here on, and what "
                "is written to them is %s. Take views anew in each phase, or clone() them",
                self._ranges.name,
                ", ".join(names[:8]),
                "the handle's value from the next offload on" if self._readonly else "lost",
            )
        return bool(names)


def was_handed_out(tensor: torch.Tensor) -> bool:
    """Whether a state dict has shown this tensor."""
    return any(tensor in shown._tensors or tensor in shown._wrappers for shown in _IN_USE)


def _parts(wrapper: torch.Tensor) -> list[int]:
    return [id(part) for _, part in parts_of(wrapper, "")]


_IN_USE: WeakIdSet[StateDictTensors] = WeakIdSet()
