"""Save and load all handles of a manager: at once, or saved by another thread from host copies that
it has locked for reading."""

from __future__ import annotations

import copy
import functools
import hashlib
import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager, nullcontext
from contextvars import copy_context
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.state_dict_loader import load as torch_load
from torch.distributed.checkpoint.state_dict_saver import save as torch_save

from placement.checkpoint.optimizer import Optimizer
from placement.checkpoint.parts import Model, Part, Path, Shown, apply, as_bytes, under
from placement.checkpoint.writer import writer
from placement.core.errors import CheckpointError, PlacementError
from placement.core.modes import without_modes
from placement.phases.phase import names_of
from placement.registration.guards import is_off
from placement.storage.transfer.mirror import mirror
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
    for key, value in values.items():
        if isinstance(value, Shown):
            with without_modes(), torch.inference_mode(False):
                values[key] = value.part.template((*path, str(key)), metadata)
        elif type(value) is dict:
            _make_room(value, (*path, str(key)), metadata)


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
    Collective where torch.distributed is initialized.

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
    """`save` in another thread. The saved values are those at the time of the call, whatever phases
    and steps follow.

    One write is not kept apart: an operation in place on a tensor of an offloaded handle's state
    dict goes into the host copy that the thread is reading. Wait for the future before it, or write
    inside a phase. `load_state_dict` waits by itself.

    The thread reads the host copies. Values that changed on the device are copied there first,
    which takes as long as in an offload. Until the files are written, an offload of a saved handle
    waits, and so do `unregister` and `close`. A load, and training after it, do not wait. State
    created since the last offload has no place in a host copy yet, so it is copied into new host
    memory.

    Saves of one process are written one after the other. With several ranks they use a gloo group
    of their own. A process that exits writes first what it has begun.

    Returns:
        A future that is done when this rank's files and the metadata are written. If that failed,
        `result()` raises CheckpointError. It cannot be cancelled: `cancel()` returns False. Its
        callbacks run on a thread of their own. They may call everything, also wait for another
        save; but a phase that another thread has open refuses what it refuses any other thread. On
        several ranks they must call nothing in which all ranks take part (`save`, `load`, phases of
        a group), because the ranks' callbacks have no common order.

    Raises:
        CheckpointError: a handle cannot be saved like this, or the process is exiting.
    """
    _require_manager(manager)
    with manager._stack.lock.transition():
        with _together(process_group):
            for handle in _chosen(manager, only):
                if handle.gathers is not None:
                    raise CheckpointError(
                        f"{handle.name!r}: {handle.gathers}: use save(), or leave it out with only="
                    )
        state = _collect(manager, only, process_group)
        group = (
            _gloo_group(dist.group.WORLD if process_group is None else process_group)
            if dist.is_initialized()
            else None
        )
        held = ExitStack()

        def write() -> None:
            with held, _torch_errors(f"saving to {os.fspath(path)!r}"):
                torch_save(frozen, checkpoint_id=path, process_group=group, no_dist=group is None)

        try:
            # or the writers of the others would wait for this rank's, and their next offloads for
            # them
            with _together(process_group):
                for holding in filter(None, (manager.handles[name].holding for name in state)):
                    mirror(holding)
                    held.callback(holding.lend_host_copy().set)
                frozen = {
                    name: _frozen(manager.handles[name], values) for name, values in state.items()
                }
            return writer(os.getpid()).submit(write)
        except BaseException:
            held.close()
            raise


def load(
    manager: Manager,
    path: str | os.PathLike[str],
    *,
    only: Iterable[str | Handle] | None = None,
    process_group: Any = None,
) -> None:
    """Load what `save` saved, on any number of ranks, in every state. The host copy of an offloaded
    handle is written, and nothing moves.

    But what only an object's own code can load (extra state, a state dict that shows copies, an
    optimizer with a `load_state_dict` of its own) is loaded by that code, on the device, in a phase
    `restore` that is opened for these handles.

    On every rank everything is read into host memory and compared before the first value is
    written. A checkpoint that does not fit or cannot be read leaves every handle of every rank
    unchanged. Tensor objects, aliases, addresses and an optimizer's keys stay the same. What an
    object's own code does is its own: where that raises, some of the object's values may be the
    saved ones. Entries of the checkpoint that belong to other handles are ignored.

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
        writer(os.getpid()).wait()  # what was saved so far may be what is loaded
        with _together(process_group) as away:
            metadata = _metadata(path)
            for handle in _chosen(manager, only):
                if (
                    handle.is_built
                    or only is not None
                    or any(True for _ in under(metadata, (handle.name,)))
                ):
                    part = parts[handle.name] = _part(handle)
                    part.require_writable()
                    if is_off(handle) and part.needs_device() is not None:
                        away += [handle.name, *(owner.name for owner in handle.owners)]
    with (
        manager.phase("restore", only=dict.fromkeys(away)) if away else nullcontext(),
        manager._stack.lock.transition(),
    ):
        with _together(process_group):
            given: dict[str, Any] = {name: part.state_dict() for name, part in parts.items()}
        with _torch_errors(f"loading from {os.fspath(path)!r}", lambda: _truncated(path, metadata)):
            torch_load(
                given,
                checkpoint_id=path,
                planner=LoadPlanner(),
                process_group=process_group,
                no_dist=not dist.is_initialized(),
            )
        with _together(process_group):
            changes = [
                change for name, part in parts.items() for change in part.prepare(given[name])
            ]
        apply(changes, _together(process_group))


def _require_manager(given: object) -> None:
    # here, so that `placement.checkpoint` alone does not import it
    from placement.manager import Manager

    if not isinstance(given, Manager):
        name = getattr(given, "name", None)
        hint = f"; for one handle write only=[{name!r}]" if isinstance(name, str) else ""
        raise TypeError(f"the first argument is the manager, not a {type(given).__name__}{hint}")


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


def _chosen(manager: Manager, only: Iterable[str | Handle] | None) -> list[Handle]:
    names = names_of(only)
    if names is not None:
        return [manager._stack.known(name) for name in dict.fromkeys(names)]
    return [
        handle
        for handle in manager.handles.values()
        if handle.kind in _PARTS and not handle.readonly
    ]


def _collect(
    manager: Manager, only: Iterable[str | Handle] | None, process_group: Any
) -> dict[str, Shown]:
    """The state dicts to save, by handle name. If one rank cannot give its own, every rank
    raises."""
    found: dict[str, Shown] = {}
    with _together(process_group) as facts:
        for handle in _chosen(manager, only):
            if handle.is_built or only is not None:
                context = copy_context()
                context.run(are_only_read.set, True)
                found[handle.name] = context.run(_part(handle).state_dict)
        facts.append({key: _ranks(value) for key, value in _on_own_meshes(found)})
    several = {
        key
        for each in facts
        for key, ranks in each.items()
        if any(other.get(key, ranks) != ranks for other in facts)
    }
    if several:
        with _together(process_group) as facts:
            facts.append(
                {key: _shard(value) for key, value in _on_own_meshes(found) if key in several}
            )
        _refuse_experts(facts)
    return found


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
        told: list[Any] = [None] * dist.get_world_size(process_group)
        dist.all_gather_object(
            told, (None if error is None else _said(error), facts), group=process_group
        )
        if error is None:
            for rank, (reason, _) in enumerate(told):
                if reason is not None:
                    raise CheckpointError(f"rank {rank}: {reason}")
        facts[:] = [fact for _, each in told for fact in each]
    if error is not None:
        raise error


@contextmanager
def _torch_errors(what: str, find: Callable[[], str] = str) -> Iterator[None]:
    """Turn errors of torch.distributed.checkpoint into CheckpointErrors with their cause. `find`
    returns further details of a failure."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            yield
    except CheckpointException as error:
        reasons = {rank: failure[0] for rank, failure in error.failures.items()}
        first = next(
            (reason for reason in reasons.values() if isinstance(reason, PlacementError)), None
        )
        detail = (
            str(first)
            if first is not None
            else "; ".join(f"rank {rank}: {_said(reason)}" for rank, reason in reasons.items())
        )
        raise CheckpointError(f"{what} failed: {detail}{find()}") from error
    except (OSError, RuntimeError, ValueError, AssertionError) as error:
        raise CheckpointError(f"{what} failed: {_said(error)}{find()}") from error


def _said(error: BaseException) -> str:
    """The text of an exception, or its type's name where the text is empty (unpickling a truncated
    file)."""
    return str(error).rstrip(".") or type(error).__name__


def _truncated(path: str | os.PathLike[str], metadata: Metadata) -> str:
    """Details about files of a checkpoint that are missing, or shorter than the metadata says."""
    ends: dict[str, int] = {}
    for info in metadata.storage_data.values():
        if (name := getattr(info, "relative_path", None)) is not None:
            ends[name] = max(ends.get(name, 0), info.offset + info.length)
    found = []
    for name, end in ends.items():
        size = os.path.getsize(file) if os.path.exists(file := os.path.join(path, name)) else None
        if size is None or size < end:
            found.append(
                f"{name} "
                + ("is missing" if size is None else (f"ends after {size:,} of {end:,} bytes"))
            )
    return f". Damaged files: {', '.join(found)}" if found else ""


def _frozen(handle: Handle, values: Shown) -> Any:
    """A copy of a handle's state dict that does not change. Its tensors use the host copy, or new
    host memory where that has no place."""
    storages: dict[int, torch.UntypedStorage] = {}

    def frozen(part: torch.Tensor) -> torch.Tensor:
        shown = handle.storage.read_host(part, storages)
        return part.detach().to("cpu", copy=True) if shown is None else shown

    return copy.deepcopy(
        values,
        {
            id(tensor): rewrapped(tensor.detach(), frozen)
            for _, tensor in nested_tensors(values, "")
        },
    )


@functools.cache
def _gloo_group(process_group: Any) -> Any:
    """A gloo group of the same ranks, for the thread's collectives. The first call is
    collective."""
    return dist.new_group(
        dist.get_process_group_ranks(process_group), backend="gloo", use_local_synchronization=True
    )


# --- tensors of one name on several device meshes
#
# Ranks of different meshes may hold the same values (replicas: FSDP2 over one dimension of a
# two-dimensional mesh, without tensor parallelism along the other) or different ones (experts that
# expert parallelism splits by name). torch.distributed.checkpoint treats both alike: it writes one
# mesh's values, and would lose experts. Only the values tell the cases apart.


def _on_own_meshes(found: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The tensors that are not sharded over all ranks, by their paths in the checkpoint."""
    for key, value in found.items():
        if isinstance(value, Mapping):
            yield from _on_own_meshes(value, f"{prefix}{key}.")
        elif (
            mesh := getattr(value, "device_mesh", None)
        ) is not None and mesh.size() < dist.get_world_size():
            yield f"{prefix}{key}", value


def _ranks(tensor: Any) -> tuple[int, ...]:
    return tuple(tensor.device_mesh.mesh.flatten().tolist())


def _shard(tensor: Any) -> tuple[tuple[int, ...], str, bytes]:
    """A rank's shard, to compare with the shards of another mesh: the ranks of its mesh, its place
    in the mesh, and a digest."""
    digest = hashlib.blake2b(digest_size=16)
    for _, part in parts_of(tensor._local_tensor, ""):
        digest.update(f"{tuple(part.shape)} {part.dtype}".encode())
        digest.update(as_bytes(part).numpy().data)
    mesh = tensor.device_mesh
    place = f"{mesh.get_coordinate()} {tuple(mesh.shape)} {tensor.placements} {tuple(tensor.shape)}"
    return _ranks(tensor), place, digest.digest()


def _refuse_experts(facts: Iterable[Mapping[str, tuple[tuple[int, ...], str, bytes]]]) -> None:
    """Raise CheckpointError unless every mesh of a tensor has the same bytes at the same places.
    Gives the same result on every rank."""
    found: dict[str, dict[tuple[int, ...], dict[str, bytes]]] = {}
    for each in facts:
        for key, (ranks, place, digest) in each.items():
            found.setdefault(key, {}).setdefault(ranks, {})[place] = digest
    for key, by_mesh in found.items():
        (first, wanted), *others = by_mesh.items()
        for ranks in (ranks for ranks, shards in others if shards != wanted):
            raise CheckpointError(
                f"{key} is sharded over ranks {first} and over {ranks}, with other values: "
                "torch.distributed.checkpoint would write only one of them (experts split by "
                "expert parallelism). Save it with its framework's checkpoint, and leave it out "
                "here with only=. Nothing was written."
            )
