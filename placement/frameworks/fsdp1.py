"""torch's FSDP1: flat parameters, each rank's shard of them, and the memory gathered from all ranks
for computing.

The module shows a flat parameter, or views of it under the original names. Both are in the memory
of the local shard, which moves. Gathered memory is freed before a move: the root keeps its own
after a forward pass, and under SHARD_GRAD_OP every unit does.

Published weights are gathered piece by piece, without FSDP1's unshard. Each rank's shard is one
span of the flat parameter, so every rank knows which rank has which piece of a weight. These ranks
broadcast their pieces, from the device or from the host copy.
"""

from __future__ import annotations

import functools
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist

from placement.core.errors import PhaseError
from placement.frameworks.base import Framework, Named, Wrapper
from placement.frameworks.weights import Reader, Weight
from placement.tensors.plain import Owned

_UNIT = Named("torch.distributed.fsdp", "FullyShardedDataParallel")
_GATHERED = ("_full_param_padded", "_full_prec_full_param_padded", "_mp_shard")
"""Fields of a flat parameter whose storages are allocated for computing only."""


class FSDP1(Framework):
    """All `FullyShardedDataParallel` modules (units) of a module tree. A unit without parameters of
    its own has no FSDP1 handle."""

    packages = ("torch.distributed.fsdp",)
    hangs_tensors = True
    recognised_by = (_UNIT,)
    wrappers = (Wrapper(_UNIT, "_fsdp_wrapped_module"),)
    gathers = "FSDP1 gathers every parameter on the device for it"

    def __init__(self, root: torch.nn.Module) -> None:
        super().__init__(root)
        # Found once, because walking a large model takes as long as all other work here. Wrapping
        # comes before registering.
        self._units: list[tuple[str, weakref.ref[torch.nn.Module]]] = []
        for path, unit in self.parts(_UNIT):
            self._units.append((path, weakref.ref(unit)))

    def refusal(self, compute_device: torch.device) -> str | None:
        if any(handle._offload_params for _, handle in self._handles()):
            return (
                "some of its FSDP1 units are under CPUOffload(offload_params=True) and some are "
                "not, so neither torch nor placement moves all of it; wrap all units alike, or "
                "register it with external=True to have it tracked and never moved"
            )
        summoned = self._summoned()
        if not summoned:
            return None
        return (
            f"the full parameters of {summoned} are summoned; register it outside "
            "FSDP.summon_full_params"
        )

    @property
    def external(self) -> str | None:
        offloaded = [handle._offload_params for _, handle in self._handles()]
        if offloaded and all(offloaded):
            return "FSDP1's CPUOffload keeps its parameters on the CPU"
        return None

    def ready(self) -> None:
        """Reshard every unit. Raises PhaseError: full parameters are summoned; values written to
        them would be lost."""
        summoned = self._summoned()
        if summoned:
            raise PhaseError(
                f"the full parameters of {summoned} are summoned, and values written to them are "
                "not in the shards yet: leave FSDP.summon_full_params before the phase ends, and "
                "enter it inside one phase"
            )
        units = [unit for _, unit in self._living_units()]
        if any(unit.training_state.name != "IDLE" for unit in units):  # it was interrupted
            for _, handle in self._handles():
                _end_iteration(handle)
            for unit in units:
                unit.training_state = type(unit.training_state).IDLE
                unit._post_backward_callback_queued = False
                unit._exec_order_data.next_iter()
        for _, handle in self._handles():
            flat = handle.flat_param
            has_orig_params = handle._use_orig_params
            if has_orig_params and all(parameter.grad is None for parameter in flat._params):
                # as the next forward pass would do, because zero_grad() reaches only the views
                flat.grad = None
            if _is_gathered(handle):
                _reshard(handle)
                handle._prefetched = False

    def own_tensors(self) -> dict[int, torch.Tensor]:
        """The original parameter for each view of gathered memory; without original parameters, the
        flat parameter for every view."""
        own_tensors: dict[int, torch.Tensor] = {}
        for _, handle in self._handles():
            flat = handle.flat_param
            infos = [*flat._param_infos, *flat._shared_param_infos]
            own = [flat] * len(infos)
            if handle._use_orig_params:
                own = [*flat._params, *flat._shared_params]
            gathered = {storage._cdata for storage in _gathered(flat)}
            for (name, module, *_), parameter in zip(infos, own, strict=True):
                view = module._parameters.get(name, module.__dict__.get(name))
                if not isinstance(view, torch.Tensor) or view is parameter:
                    continue
                if parameter is flat or view.untyped_storage()._cdata in gathered:
                    own_tensors[id(view)] = parameter
        return own_tensors

    def tensors(self) -> Iterator[Owned]:
        """Flat parameters, which the module may hide, the tensors in their fields, and the views of
        the last forward pass."""
        for path, handle in self._handles():
            flat = handle.flat_param
            yield Owned(f"{path}_flat_param", flat)
            for field, transient in (
                ("_local_shard", False),
                ("_saved_grad_shard", True),
                ("_cpu_grad", True),
            ):
                tensor = getattr(flat, field, None)
                if isinstance(tensor, torch.Tensor):
                    yield Owned(f"{path}_flat_param.{field}", tensor, transient)
            for index, parameter in enumerate(flat._params or ()):
                # Under no_sync() FSDP1 sets the `.data` of a view of the last gradient to another
                # one; the view still keeps its base alive.
                base = None if parameter.grad is None else parameter.grad._base
                if base is not None:
                    yield Owned(f"{path}_flat_param._params.{index}.grad._base", base, True)
            for index, view in enumerate(getattr(flat, "_tensors", None) or ()):
                # `.data`, because autograd refuses any use of such views after a step has written
                # to their base
                if view is not None:
                    yield Owned(f"{path}_flat_param._tensors.{index}", view.data)

    def weights(self) -> Mapping[int, Mapping[str, Weight | None]]:
        """The weight for each original parameter; None for names that show a flat parameter."""
        weights: defaultdict[int, dict[str, Weight | None]] = defaultdict(dict)
        for _, handle in self._handles():
            flat = handle.flat_param
            for part in handle._fully_sharded_module.modules():
                for name, parameter in part._parameters.items():
                    if parameter is flat:
                        weights[id(part)][name] = None
            spans = zip(handle._get_flat_param_offsets(), flat._is_padding_mask, strict=True)
            starts = [start for (start, _), is_padding in spans if not is_padding]
            for index, info in enumerate(flat._param_infos):
                weight = FlatWeight(handle, index, starts[index])
                weights[id(info.module)][info.param_name] = weight
            for shared in flat._shared_param_infos:
                primary = weights[id(shared.prim_module)][shared.prim_param_name]
                weights[id(shared.module)][shared.param_name] = primary
        return dict(weights)

    def unreduced_gradients(self) -> Iterator[torch.Tensor]:
        """This rank's shards of gradients that FSDP1 keeps apart in a backward pass without
        synchronisation (`no_sync()`)."""
        for _, handle in self._handles():
            saved = getattr(handle.flat_param, "_saved_grad_shard", None)
            if isinstance(saved, torch.Tensor):
                yield saved

    def drop_unreduced(self) -> None:
        for _, handle in self._handles():
            vars(handle.flat_param).pop("_saved_grad_shard", None)

    def _living_units(self) -> Iterator[tuple[str, Any]]:
        for path, alive in self._units:
            unit = alive()
            if unit is not None:
                yield path, unit

    def _handles(self) -> Iterator[tuple[str, Any]]:
        """Path prefix and FSDP1 handle of every unit."""
        for path, unit in self._living_units():
            if unit._handle is not None:
                yield path, unit._handle

    def _summoned(self) -> str:
        """The paths of the units whose full parameters are summoned."""
        paths = []
        for path, handle in self._handles():
            if handle._training_state.name == "SUMMON_FULL_PARAMS":
                paths.append(path.rstrip(".") or "the root")
        return ", ".join(paths)


def _end_iteration(handle: Any) -> None:
    """End a forward or backward pass that an exception interrupted: else torch would compute with
    memory that is no longer gathered. Gradients that were not reduced yet are dropped: they are
    incomplete, and `zero_grad()` does not reach them."""
    flat = handle.flat_param
    if handle.uses_sharded_strategy and flat.grad is not None:
        is_whole = flat.grad.size() != flat._local_shard.size()
        if is_whole:
            flat.grad = None
    saved = flat.__dict__.pop("_saved_grad_shard", None)
    hooked = flat.__dict__.pop("_post_backward_hook_state", None)
    if hooked is not None:
        hooked[-1].remove()
    handle._training_state = type(handle._training_state).IDLE
    handle._ran_pre_backward_hook = False
    handle._needs_pre_backward_unshard = False
    handle._prefetched = False
    flat._post_backward_called = False
    handle._post_forward_index = None
    if _is_gathered(handle):
        _reshard(handle)
    if saved is not None:
        flat.grad = saved
    if handle._use_orig_params:
        handle._use_sharded_grad_views()


def _reshard(handle: Any) -> None:
    handle.reshard(handle.uses_sharded_strategy)
    handle.post_reshard()


def _is_gathered(handle: Any) -> bool:
    """Whether memory that exists only for computing is allocated, or is shown by the module."""
    flat = handle.flat_param
    shard = getattr(flat, "_local_shard", None)
    if shard is None:
        return False  # nothing is gathered before the first forward pass
    return (
        handle._skipped_use_sharded_views
        or flat.data_ptr() != shard.data_ptr()
        or any(storage.nbytes() for storage in _gathered(flat))
    )


def _gathered(flat: Any) -> Iterator[torch.UntypedStorage]:
    for field in _GATHERED:
        tensor = getattr(flat, field, None)
        if isinstance(tensor, torch.Tensor):
            yield tensor.untyped_storage()


class FlatWeight(Weight):
    """One original parameter in the flat parameter of an FSDP1 unit."""

    def __init__(self, handle: Any, index: int, start: int) -> None:
        flat = handle.flat_param
        self.shape = flat._shapes[index]
        self.dtype = flat.dtype
        self._handle = handle
        self._start = start
        self._stride = None if flat._contiguities[index] else flat._strides[index]
        self._is_extended = flat._param_extensions[index] is not None

    @property
    def is_collective(self) -> bool:
        return bool(self._handle.uses_sharded_strategy) and self._handle.world_size > 1

    @property
    def problem(self) -> str | None:
        if not self._is_extended:
            return None
        return (
            "is a DTensor inside an FSDP1 flat parameter; use fully_shard (FSDP2) with tensor "
            "parallelism"
        )

    def _shard(self) -> torch.Tensor:
        """This rank's shard of the flat parameter. Before the first forward pass, which creates
        `_local_shard`, the parameter itself is the shard."""
        flat = self._handle.flat_param
        shard: torch.Tensor = getattr(flat, "_local_shard", flat).detach()
        return shard

    def whole(self, reader: Reader, dtype: torch.dtype) -> torch.Tensor:
        handle = self._handle
        shard = self._shard()
        full = torch.empty(self.shape.numel(), dtype=dtype, device=reader.device)
        ranks = range(handle.world_size) if self.is_collective else (handle.rank,)
        under_way = []
        for rank in ranks:
            begin, first, last = self._span(rank, shard)
            if first >= last:
                continue
            piece = full[first - self._start : last - self._start]
            if rank == handle.rank:
                reader.fill(piece, shard[first - begin : last - begin])
            if self.is_collective:
                work = dist.broadcast(
                    piece.view(torch.uint8),  # because a backend may not support the dtype
                    group=handle.process_group,
                    group_src=rank,
                    async_op=True,
                )
                under_way.append(work)
        for work in under_way:
            work.wait()
        if self._stride is None:
            return full.view(self.shape)
        return full.as_strided(self.shape, self._stride)

    def _span(self, rank: int, shard: torch.Tensor) -> tuple[int, int, int]:
        """In elements of the flat parameter: where a rank's shard begins, and the span of this
        weight that it has."""
        begin = rank * shard.numel() if self._handle.uses_sharded_strategy else 0
        end = self._start + self.shape.numel()
        return begin, max(self._start, begin), min(end, begin + shard.numel())

    def writer(self, value: torch.Tensor) -> Callable[[], object]:
        if self.problem is not None:
            raise ValueError(self.problem)
        return functools.partial(self._write, value)

    def _write(self, value: torch.Tensor) -> None:
        shard = self._shard()
        begin, first, last = self._span(self._handle.rank, shard)
        if first >= last:
            return
        flat_value = value.reshape(-1)
        if self._stride is not None:  # the elements in the order in which they are in memory
            flat_value = torch.empty_like(flat_value)
            flat_value.as_strided(value.shape, self._stride).copy_(value)
        own_value = flat_value[first - self._start : last - self._start]
        shard[first - begin : last - begin].copy_(own_value)
