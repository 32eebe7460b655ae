"""Writes into the host copy of an offloaded object, as torch counts them, so that the object's own tensors tell of them once it is loaded.

Torch raises a tensor's version counter (`_version`) at each write. Caches of derived weights look at it, and so does a backward, which
must not use values that changed after its forward. A tensor over the host copy has a counter of its own: were it that of the object's
tensor, a legitimate write there could not be told from a wrong one into poison. So a load raises the counters of what was written.
"""

from __future__ import annotations

import bisect
import itertools
import weakref
from collections.abc import Sequence

import torch

from placement.ownership.adapter import Adapter
from placement.storage.range import RangesByAddress
from placement.tensors.plain import parts_of

_Span = tuple[int, int]
"""Addresses in host memory, from the first up to the last (not included)."""


class HostVersions:
    """The version counters of everything that shows the host copy of one object."""

    def __init__(self) -> None:
        self._tensors: dict[_Span, tuple[torch.Tensor, int]] = {}
        """An empty tensor by the bytes that are shown, with the counter of the tensors over them, and its version at the last load."""
        self._wrappers: dict[int, tuple[weakref.ref[torch.Tensor], torch.Tensor, Sequence[_Span]]] = {}
        """Wrappers by identity, whose writes do not count in their parts; each with a tensor that has only its counter, and its parts."""
        self._written: set[_Span] = set()
        """The bytes that were written through wrappers, as far as that has been noticed."""

    def counting(self, host: torch.Tensor, version: int) -> torch.Tensor:
        """The same tensor, with the counter of the bytes that it shows. It begins at the version of the object's own tensor."""
        with torch.inference_mode(False):
            span = _span(host)
            if span not in self._tensors:
                self._tensors[span] = torch.empty(0, device="cpu"), version
                torch._C._autograd._unsafe_set_version_counter((self._tensors[span][0],), (version,))
            counter, _ = self._tensors[span]
            shown = counter.detach()
            shown.data = host
        return shown

    def watch(self, wrapper: torch.Tensor) -> None:
        """Count the writes through a new wrapper."""
        if id(wrapper) in self._wrappers or len(self._wrappers) % 256 == 255:
            self._forget_dead()
        with torch._C._DisableTorchDispatch():  # a plain tensor instead of one more wrapper, which would keep the parts
            counter = wrapper.detach()
        self._wrappers[id(wrapper)] = weakref.ref(wrapper), counter, [_span(part) for _, part in parts_of(wrapper, "")]

    def _forget_dead(self) -> None:
        for key, (wrapper, counter, spans) in [*self._wrappers.items()]:
            self._written.update(spans if counter._version else ())
            if wrapper() is None or counter._version:
                del self._wrappers[key]

    def raise_written(self, adapter: Adapter, places: RangesByAddress, *, are_held: bool) -> None:
        """Raise the counters of the object's tensors whose bytes in the host copy were written since the last load.

        Args:
            are_held: whether anybody still has a tensor that shows the host copy, and may write again.
        """
        self._forget_dead()
        counters = [*self._tensors.items()]
        written, self._written = sorted(self._written.union(s for s, (counter, noted) in counters if counter._version != noted)), set()
        if not are_held:
            self._tensors, self._wrappers = {}, {}
        if not written:
            return
        self._tensors.update((span, (counter, counter._version)) for span, (counter, _) in counters if are_held)
        starts, ends = [start for start, _ in written], [*itertools.accumulate((end for _, end in written), max)]
        for owned in adapter.owned():
            if (place := places.find(owned.tensor)) is not None and not owned.tensor.is_inference():
                to_host = place[0].host.address + place[1] - owned.tensor.untyped_storage().data_ptr()
                first, last = _span(owned.tensor)
                before = bisect.bisect_left(starts, last + to_host)
                if before and ends[before - 1] > first + to_host:
                    torch.autograd.graph.increment_version(owned.tensor if owned.wrapper is None else owned.wrapper)


def _span(tensor: torch.Tensor) -> _Span:
    last = sum((size - 1) * stride for size, stride in zip(tensor.size(), tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size() * bool(tensor.numel())
