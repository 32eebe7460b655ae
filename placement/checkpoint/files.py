"""Save and load all handles of a manager: at once, or saved by another thread from host copies that
it has locked for reading."""

from __future__ import annotations

import copy
import functools
import hashlib
import itertools
import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager, suppress
from contextvars import copy_context
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.state_dict_loader import load as torch_load
from torch.distributed.checkpoint.state_dict_saver import save as torch_save

from placement.checkpoint.optimizer import Optimizer
from placement.checkpoint.parts import Model, Part, Path, Shown, apply, as_bytes, under
from placement.checkpoint.writer import writer
from placement.core.errors import CheckpointError, PlacementError
from placement.core.modes import without_modes
from placement.phases.phase import names_of
from placement.registration.guards import is_off
from placement.storage.transfer.host_refresh import refresh_host_copy
from placement.storage.watch.state_dicts import are_only_read
from placement.tensors.plain import nested_tensors, parts_of, rewrapped

if TYPE_CHECKING:
    from placement.manager import Manager
    from placement.registration.handle import Handle

_PARTS: Mapping[str, type[Part]] = {"module": Model, "optimizer": Optimizer}


class LoadPlanner(DefaultLoadPlanner):
    """A planner that loads `Model` and `Optimizer` parts into new host memory, so a checkpoint that
    does not fit changes nothing.

    It compares names, shapes and dtypes before anything is read. It takes from the checkpoint which
    state an optimizer had.

    Example:
        ::

            parts = {"optimizer": placement.checkpoint.Optimizer(adam)}
            torch.distributed.checkpoint.load(parts, checkpoint_id=path, planner=LoadPlanner())
    """

    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        metadata: Metadata | None = None,
        is_coordinator: bool = False,
    ) -> None:
        assert metadata is not None
        _make_room(state_dict, (), metadata)
        super().set_up_planner(state_dict, metadata, is_coordinator)


def _make_room(values: dict[str, Any], path: Path, metadata: Metadata) -> None:
    """Replace each `Shown` by new host memory into which torch reads: see `Part.template`. `path`:
    the keys that lead to these values."""
    for key, value in values.items():
        if isinstance(value, Shown):
            with without_modes(), torch.inference_mode(False):
                values[key] = value.part.template((*path, str(key)), metadata)
        elif type(value) is dict:
            _make_room(value, (*path, str(key)), metadata)


class _SavePlanner(DefaultSavePlanner):
    """A planner that makes the checkpoint in a directory incomplete before it is overwritten. A
    save that fails half-way would otherwise leave files of both under the metadata of the old
    one."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        super().__init__()
        self._path = path

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        plans = super().create_global_plan(all_plans)
        # on one rank, while all others wait for its plan
        with suppress(FileNotFoundError, NotADirectoryError):
            os.remove(os.path.join(self._path, ".metadata"))
        return plans


def save(
    manager: Manager,
    path: str | os.PathLike[str],
    *,
    only: Iterable[str | Handle] | None = None,
    process_group: Any = None,
) -> None:
    """Save every module and optimizer that is not readonly, under its handle's name, with its
    present values. Nothing moves.

    Values of an offloaded handle are read from its host copy. Each rank writes its shards. A tensor
    that is not sharded is assumed to be equal on all ranks, as in torch.distributed.checkpoint.
    Collective where torch.distributed is initialized. A checkpoint in the directory is overwritten:
    after a save that failed there, `load` finds no complete one.

    Args:
        path: a directory.
        only: the handles to save, or their names; may include readonly ones.
        process_group: the ranks that save together; None: all.

    Raises:
        CheckpointError: a handle cannot be saved like this (the message says how it can), or a
            write failed. Raised on every rank.
        NotResidentError, BrokenHandleError: a handle named in `only` has no values.
        IntegrityError: tensors of a handle were replaced while it was offloaded.
    """
    _require_manager(manager)
    with manager._stack.lock.transition():
        state = _collect(manager, only, process_group)
        with _torch_errors(f"saving to {os.fspath(path)!r}"):
            torch_save(
                state,
                checkpoint_id=path,
                planner=_SavePlanner(path),
                process_group=process_group,
                no_dist=not dist.is_initialized(),
            )


def async_save(
    manager: Manager,
    path: str | os.PathLike[str],
    *,
    only: Iterable[str | Handle] | None = None,
    process_group: Any = None,
) -> Future[None]:
    """`save` in another thread. The saved values are those at the time of the call; later phases
    and steps do not change them.

    One write is not kept apart: an operation in place on a tensor of an offloaded handle's state
    dict goes into the host copy that the thread is reading. Wait for the future before it, or write
    inside a phase. `load_state_dict` waits by itself.

    The thread reads the host copies. Values that changed on the device are copied there first,
    which takes as long as in an offload. Until the files are written, an offload of a saved handle
    waits, and so do `unregister` and `close`. A load, and training after it, do not wait. State
    created since the last offload has no place in a host copy yet, so it is copied into new host
    memory.

    Saves of one process are written one after the other. With several ranks they use a gloo group
    of their own. A process that exits completes its saves first.

    Returns:
        A future that is done when this rank's files and the metadata are written. If that failed,
        `result()` raises CheckpointError. It cannot be cancelled: `cancel()` returns False. Its
        callbacks run on a thread of their own. They may make any call, and wait for another save. A
        phase that another thread has open refuses their calls as those of any other thread. On
        several ranks they must make no call of all ranks (`save`, `load`, phases of a group): the
        ranks' callbacks have no common order.

    Raises:
        CheckpointError: a handle cannot be saved like this, or the process is exiting.
    """
    _require_manager(manager)
    with manager._stack.lock.transition():
        with _together(process_group):
            for handle in _selected(manager, only):
                if handle.gathers is not None:
                    raise CheckpointError(
                        f"{handle.name!r}: {handle.gathers}: use save(), or leave it out with only="
                    )
        state = _collect(manager, only, process_group)
        group = None
        if dist.is_initialized():
            group = _gloo_group(dist.group.WORLD if process_group is None else process_group)
        lent_copies = ExitStack()
        frozen: dict[str, Any] = {}

        def write() -> None:
            with lent_copies, _torch_errors(f"saving to {os.fspath(path)!r}"):
                torch_save(
                    frozen,
                    checkpoint_id=path,
                    planner=_SavePlanner(path),
                    process_group=group,
                    no_dist=group is None,
                )

        try:
            # all ranks or none: else the writers of the other ranks would wait for this rank's, and
            # their next offloads for them
            with _together(process_group):
                for name, values in state.items():
                    handle = manager.handles[name]
                    if handle.holding is not None:
                        refresh_host_copy(handle.holding)
                        lent_copies.callback(handle.holding.lend_host_copy().set)
                    frozen[name] = _frozen(handle, values)
            return writer(os.getpid()).submit(write)
        except BaseException:
            lent_copies.close()
            raise


def load(
    manager: Manager,
    path: str | os.PathLike[str],
    *,
    only: Iterable[str | Handle] | None = None,
    process_group: Any = None,
) -> None:
    """Load a checkpoint of `save`, on any number of ranks, in every state. The host copy of an
    offloaded handle is written, and nothing moves.

    Some values can be loaded only by an object's own code: extra state, a state dict that shows
    copies, an optimizer with a `load_state_dict` of its own. That code runs on the device, in a
    phase `restore` that is opened for these handles.

    On every rank everything is read into host memory and compared before the first value is
    written. A checkpoint that does not fit or cannot be read leaves every handle of every rank
    unchanged. Tensor objects, aliases, addresses and an optimizer's keys stay the same. Where an
    object's own code raises, some of its values may be the saved ones. Entries of the checkpoint
    that belong to other handles are ignored.

    Args:
        only: the handles to load, or their names; None: every module and optimizer that is not
            readonly.

    Raises:
        CheckpointError: there is no checkpoint, or it does not fit, or an object's own code failed;
            the message names handle and key.
        PhaseError: a handle is publishing its weights.
        NotResidentError: a handle is not built yet, or the policy has no place in `restore` for one
            that needs the device.
        IntegrityError: as for `save`.
        DeviceMemoryError: handles that need the device do not fit there together. Nothing was
            loaded: load fewer at once, with `only`.
    """
    _require_manager(manager)
    parts: dict[str, Part] = {}
    with manager._stack.lock.transition():
        writer(os.getpid()).wait()  # the checkpoint may be one of those that are being saved
        with _together(process_group) as to_load_first:
            metadata = _metadata(path)
            for handle in _selected(manager, only):
                is_wanted = handle.is_built or only is not None
                if not is_wanted and not any(True for _ in under(metadata, (handle.name,))):
                    continue
                part = parts[handle.name] = _part(handle)
                part.require_writable()
                if is_off(handle) and part.needs_device() is not None:
                    to_load_first += [handle.name, *(owner.name for owner in handle.owners)]
    with ExitStack() as entered:
        with _together(process_group):
            if to_load_first:
                restore = manager.phase("restore", only=dict.fromkeys(to_load_first))
                entered.enter_context(restore)
            entered.enter_context(manager._stack.lock.transition())
            values: dict[str, Any] = {}
            for name, part in parts.items():
                values[name] = part.state_dict()
        with _torch_errors(f"loading from {os.fspath(path)!r}", lambda: _truncated(path, metadata)):
            torch_load(
                values,
                checkpoint_id=path,
                planner=LoadPlanner(),
                process_group=process_group,
                no_dist=not dist.is_initialized(),
            )
        changes = []
        with _together(process_group):
            for name, part in parts.items():
                changes += part.prepare(values[name])
        apply(changes, _together(process_group))


def _require_manager(argument: object) -> None:
    # here, so that `placement.checkpoint` alone does not import it
    from placement.manager import Manager

    if not isinstance(argument, Manager):
        name = getattr(argument, "name", None)
        hint = f"; for one handle write only=[{name!r}]" if isinstance(name, str) else ""
        raise TypeError(f"the first argument is the manager, not a {type(argument).__name__}{hint}")


def _part(handle: Handle) -> Part:
    if handle.kind not in _PARTS:
        raise CheckpointError(
            f"{handle.name!r} has kind {handle.kind} and nothing to save: its weights belong to "
            "another handle"
        )
    if handle.holding is not None and is_off(handle):
        handle.holding.watch.scan()
        handle.holding.watch.require_whole()  # else new values would mix with registered ones
    return _PARTS[handle.kind](handle)


def _metadata(path: str | os.PathLike[str]) -> Metadata:
    try:
        return FileSystemReader(path).read_metadata()
    except Exception as error:  # a damaged pickle can raise anything
        raise CheckpointError(
            f"there is no complete checkpoint in {os.fspath(path)!r}: {error}"
        ) from error


def _selected(manager: Manager, only: Iterable[str | Handle] | None) -> list[Handle]:
    names = names_of(only)
    if names is not None:
        return [manager._stack.members.find(name) for name in dict.fromkeys(names)]
    handles = []
    for handle in manager.handles.values():
        if handle.kind in _PARTS and not handle.readonly:
            handles.append(handle)
    return handles


def _collect(
    manager: Manager, only: Iterable[str | Handle] | None, process_group: Any
) -> dict[str, Shown]:
    """The state dicts to save, by handle name. If one rank cannot give its own, every rank
    raises."""
    states: dict[str, Shown] = {}
    with _together(process_group) as meshes:
        for handle in _selected(manager, only):
            if handle.is_built or only is not None:
                context = copy_context()
                context.run(are_only_read.set, True)
                states[handle.name] = context.run(_part(handle).state_dict)
        meshes.append({key: _ranks(value) for key, value in _on_own_meshes(states)})
    on_several = _on_several_meshes(meshes)
    if on_several:
        with _together(process_group) as shards:
            own = dict(_on_own_meshes(states))
            shards.append({key: _shard(own[key]) for key in own if key in on_several})
        _refuse_experts(shards)
    return states


def _on_several_meshes(
    meshes: Sequence[Mapping[str, tuple[int, ...]]],
) -> set[str]:
    """The tensors that ranks have on several meshes, from each rank's mesh of each tensor."""
    first: dict[str, tuple[int, ...]] = {}
    on_several = set()
    for of_rank in meshes:
        for key, ranks in of_rank.items():
            if first.setdefault(key, ranks) != ranks:
                on_several.add(key)
    return on_several


@contextmanager
def _together(process_group: Any) -> Iterator[list[Any]]:
    """A block that must succeed on every rank, or every rank raises. Each rank gets the facts that
    all of them append to the list."""
    facts: list[Any] = []
    error: Exception | None = None
    try:
        yield facts
    except Exception as raised:
        error = raised
    if dist.is_initialized():
        own_report = None if error is None else _text_of(error), facts
        reports: list[Any] = [None] * dist.get_world_size(process_group)
        dist.all_gather_object(reports, own_report, group=process_group)
        if error is None:
            for rank, (reason, _) in enumerate(reports):
                if reason is not None:
                    raise CheckpointError(f"rank {rank}: {reason}")
        facts[:] = itertools.chain.from_iterable(of_rank for _, of_rank in reports)
    if error is not None:
        raise error


@contextmanager
def _torch_errors(action: str, details: Callable[[], str] = str) -> Iterator[None]:
    """Turn errors of torch.distributed.checkpoint into CheckpointErrors with their cause. `details`
    returns more of a failure."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            yield
    except CheckpointException as error:
        raise CheckpointError(f"{action} failed: {_cause_of(error)}{details()}") from error
    except (OSError, RuntimeError, ValueError, AssertionError) as error:
        raise CheckpointError(f"{action} failed: {_text_of(error)}{details()}") from error


def _cause_of(error: CheckpointException) -> str:
    """The first error of placement itself, else the errors of all ranks."""
    reasons = []
    for rank, (reason, *_) in error.failures.items():
        if isinstance(reason, PlacementError):
            return str(reason)
        reasons.append(f"rank {rank}: {_text_of(reason)}")
    return "; ".join(reasons)


def _text_of(error: BaseException) -> str:
    """The text of an exception, or its type's name where the text is empty (unpickling a truncated
    file)."""
    return str(error).rstrip(".") or type(error).__name__


def _truncated(path: str | os.PathLike[str], metadata: Metadata) -> str:
    """Details about files of a checkpoint that are missing, or shorter than the metadata says."""
    ends: dict[str, int] = {}
    for info in metadata.storage_data.values():
        name = getattr(info, "relative_path", None)
        if name is not None:
            ends[name] = max(ends.get(name, 0), info.offset + info.length)
    damaged = []
    for name, end in ends.items():
        file = os.path.join(path, name)
        if not os.path.exists(file):
            damaged.append(f"{name} is missing")
        elif os.path.getsize(file) < end:
            damaged.append(f"{name} ends after {os.path.getsize(file):,} of {end:,} bytes")
    return f". Damaged files: {', '.join(damaged)}" if damaged else ""


def _frozen(handle: Handle, values: Shown) -> Any:
    """A copy of a handle's state dict that does not change. Its tensors use the host copy, or new
    host memory where that has no place."""
    storages: dict[int, torch.UntypedStorage] = {}

    def frozen(part: torch.Tensor) -> torch.Tensor:
        host_copy = handle.storage.read_host(part, storages)
        return part.detach().to("cpu", copy=True) if host_copy is None else host_copy

    copies: dict[int, Any] = {}
    for _, tensor in nested_tensors(values, ""):
        copies[id(tensor)] = rewrapped(tensor.detach(), frozen)
    return copy.deepcopy(values, copies)


@functools.cache
def _gloo_group(process_group: Any) -> Any:
    """A gloo group of the same ranks, for the thread's collectives. The first call is
    collective."""
    ranks = dist.get_process_group_ranks(process_group)
    return dist.new_group(ranks, backend="gloo", use_local_synchronization=True)


# --- tensors of one name on several device meshes
#
# Ranks of different meshes may hold the same values (replicas: FSDP2 over one dimension of a
# two-dimensional mesh, without tensor parallelism along the other) or different ones (experts that
# expert parallelism splits by name). torch.distributed.checkpoint treats both alike: it writes one
# mesh's values, and would lose experts. Only the values tell the cases apart.


Shard = tuple[tuple[int, ...], str, bytes]
"""A rank's shard, to compare with the shards of another mesh: the ranks of its mesh, its place in
the mesh, and a digest."""


def _on_own_meshes(
    values: Mapping[str, Any],
    prefix: str = "",
) -> Iterator[tuple[str, Any]]:
    """The tensors that are not sharded over all ranks, by their paths in the checkpoint."""
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from _on_own_meshes(value, f"{prefix}{key}.")
            continue
        mesh = getattr(value, "device_mesh", None)
        if mesh is not None and mesh.size() < dist.get_world_size():
            yield f"{prefix}{key}", value


def _ranks(tensor: Any) -> tuple[int, ...]:
    return tuple(tensor.device_mesh.mesh.flatten().tolist())


def _shard(tensor: Any) -> Shard:
    digest = hashlib.blake2b(digest_size=16)
    for _, part in parts_of(tensor._local_tensor, ""):
        digest.update(f"{tuple(part.shape)} {part.dtype}".encode())
        digest.update(as_bytes(part).numpy().data)
    mesh = tensor.device_mesh
    place = f"{mesh.get_coordinate()} {tuple(mesh.shape)} {tensor.placements} {tuple(tensor.shape)}"
    return _ranks(tensor), place, digest.digest()


def _refuse_experts(shards: Iterable[Mapping[str, Shard]]) -> None:
    """Raise CheckpointError unless every mesh of a tensor has the same bytes at the same places.
    Gives the same result on every rank. `shards`: those of each rank, by the tensor's path."""
    digests: dict[str, dict[tuple[int, ...], dict[str, bytes]]] = {}
    for of_rank in shards:
        for key, (ranks, place, digest) in of_rank.items():
            digests.setdefault(key, {}).setdefault(ranks, {})[place] = digest
    for key, by_mesh in digests.items():
        first = next(iter(by_mesh))
        for ranks, by_place in by_mesh.items():
            if by_place == by_mesh[first]:
                continue
            raise CheckpointError(
                f"{key} is sharded over ranks {first} and over {ranks}, with other values: "
                "torch.distributed.checkpoint would write only one of them (experts split by "
                "expert parallelism). Save it with its framework's checkpoint, and leave it out "
                "here with only=. Nothing was written."
            )
