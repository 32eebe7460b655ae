"""Save and load all handles of a manager."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.state_dict_loader import load as torch_load
from torch.distributed.checkpoint.state_dict_saver import save as torch_save

from placement.checkpoint import background, meshes
from placement.checkpoint.base import Change, Part, Path, Shown, apply, under
from placement.checkpoint.model import Model
from placement.checkpoint.optimizer import Optimizer
from placement.core.errors import CheckpointError, PlacementError
from placement.core.torch_modes import without_modes
from placement.phases.phase import names_of
from placement.storage import nan_check

if TYPE_CHECKING:
    from placement.manager import Manager
    from placement.registration.handle import Handle

_PARTS: Mapping[str, type[Part]] = {"module": Model, "optimizer": Optimizer}


class LoadPlanner(DefaultLoadPlanner):
    """A planner that loads `Model` and `Optimizer` parts into new host memory, so a checkpoint that does not fit changes nothing.

    It compares names, shapes and dtypes before anything is read. It takes from the checkpoint which state an optimizer had.
    """

    def set_up_planner(self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False) -> None:
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


def save(manager: Manager, path: str | os.PathLike[str], *, only: Iterable[str | Handle] | None = None, process_group: Any = None) -> None:
    """Save every module and optimizer that is not readonly, under its handle's name, with its present values. Nothing moves.

    Values of an offloaded handle are read from its host copy. Each rank writes its shards. A tensor that is not sharded is assumed to be
    equal on all ranks, as in torch.distributed.checkpoint. Collective where torch.distributed is initialized.

    Args:
        path: a directory.
        only: the handles to save, or their names; may include readonly ones.
        process_group: the ranks that save together; None: all.

    Raises:
        CheckpointError: a handle cannot be saved like this (the message says how it can), or a write failed. Raised on every rank.
        NotResidentError, BrokenHandleError: a handle named in `only` has no values.
    """
    _require_manager(manager)
    with manager._stack.lock.transition():
        state = _collect(manager, only, process_group)
        with _torch_errors(f"saving to {os.fspath(path)!r}"):
            torch_save(state, checkpoint_id=path, process_group=process_group, no_dist=not dist.is_initialized())


def async_save(
    manager: Manager, path: str | os.PathLike[str], *, only: Iterable[str | Handle] | None = None, process_group: Any = None
) -> Future[None]:
    """`save` in another thread. The saved values are those at the time of the call, whatever phases and steps follow.

    One write is not kept apart: an operation in place on a tensor of an offloaded handle's state dict goes into the host copy that the
    thread is reading. Wait for the future before it, or write inside a phase. `load_state_dict` waits by itself.

    The thread reads the host copies. Values that changed on the device are copied there first, which takes as long as in an offload.
    Until the files are written, an offload of a saved handle waits, and so do `unregister` and `close`. A load, and training after it, do
    not wait. State created since the last offload has no place in a host copy yet, so it is copied into new host memory.

    Saves of one process are written one after the other. With several ranks they use a gloo group of their own.

    Returns:
        A future that is done when this rank's files and the metadata are written. If that failed, `result()` raises CheckpointError.
    """
    _require_manager(manager)
    with manager._stack.lock.transition():
        with _together(process_group):
            for handle in _chosen(manager, only):
                if handle.gathers is not None:
                    raise CheckpointError(f"{handle.name!r}: {handle.gathers}: use save(), or leave it out with only=")
        state = _collect(manager, only, process_group)
        group = background.group_for(process_group)
        with background.held(manager.handles[name] for name in state) as host_read_locks:
            frozen = {name: background.Frozen(manager.handles[name]).copy(values) for name, values in state.items()}

            def write() -> None:
                try:
                    with _torch_errors(f"saving to {os.fspath(path)!r}"):
                        torch_save(frozen, checkpoint_id=path, process_group=group, no_dist=group is None)
                finally:
                    for lock in host_read_locks:
                        lock.give_back()

            return background.submit(write, path)


def load(manager: Manager, path: str | os.PathLike[str], *, only: Iterable[str | Handle] | None = None, process_group: Any = None) -> None:
    """Load what `save` saved, on any number of ranks. Nothing moves: the host copy of an offloaded handle is written.

    On every rank everything is read into host memory and compared before the first value is written. A checkpoint that does not fit or
    cannot be read leaves every handle of every rank unchanged. Tensor objects, aliases, addresses and an optimizer's keys stay the same.
    Entries of the checkpoint that belong to other handles are ignored.

    Args:
        only: the handles to load, or their names; None: every module and optimizer that is not readonly.

    Raises:
        CheckpointError: there is no checkpoint, or it does not fit; the message names handle and key.
        PhaseError: a handle is publishing its weights.
        NotResidentError: a handle is not built yet, or it is offloaded and its object must load its own state.
    """
    _require_manager(manager)
    with manager._stack.lock.transition():
        background.drain()
        parts: dict[str, Part] = {}
        given: dict[str, Any] = {}
        with _together(process_group):
            metadata = _metadata(path)
            for handle in _chosen(manager, only):
                if handle.is_built or only is not None or any(True for _ in under(metadata, (handle.name,))):
                    part = parts[handle.name] = _part(handle)
                    part.require_writable()
                    given[handle.name] = part.state_dict()
        with _torch_errors(f"loading from {os.fspath(path)!r}", lambda: _truncated(path, metadata)):
            torch_load(given, checkpoint_id=path, planner=LoadPlanner(), process_group=process_group, no_dist=not dist.is_initialized())
        changes: list[Change] = []
        with _together(process_group):
            changes = [part.prepare(given[name]) for name, part in parts.items()]
        apply(changes, _together(process_group))


def _require_manager(given: object) -> None:
    from placement.manager import Manager  # here, so that `placement.checkpoint` alone does not import it

    if not isinstance(given, Manager):
        name = getattr(given, "name", None)
        hint = f"; for one handle write only=[{name!r}]" if isinstance(name, str) else ""
        raise TypeError(f"the first argument is the manager, not a {type(given).__name__}{hint}")


def _part(handle: Handle) -> Part:
    if handle.kind not in _PARTS:
        raise CheckpointError(f"{handle.name!r} has kind {handle.kind} and nothing to save: its weights belong to another handle")
    return _PARTS[handle.kind](handle)


def _metadata(path: str | os.PathLike[str]) -> Metadata:
    try:
        return FileSystemReader(path).read_metadata()
    except Exception as error:  # a damaged pickle can raise anything
        raise CheckpointError(f"there is no complete checkpoint in {os.fspath(path)!r}: {error}") from error


def _chosen(manager: Manager, only: Iterable[str | Handle] | None) -> list[Handle]:
    names = names_of(only)
    if names is not None:
        return [manager._stack.members.known(name) for name in dict.fromkeys(names)]
    return [handle for handle in manager.handles.values() if handle.kind in _PARTS and not handle.readonly]


def _collect(manager: Manager, only: Iterable[str | Handle] | None, process_group: Any) -> dict[str, Shown]:
    """The state dicts to save, by handle name. If one rank cannot give its own, every rank raises."""
    found: dict[str, Shown] = {}
    with _together(process_group) as facts:
        for handle in _chosen(manager, only):
            if handle.is_built or only is not None:
                found[handle.name] = _part(handle).state_dict()
                if handle.holding is not None:
                    nan_check.refuse(handle.holding)
        facts.append(meshes.own_meshes(found))
    if several := meshes.on_several(facts):
        with _together(process_group) as facts:
            facts.append(meshes.shards(found, several))
        meshes.refuse_experts(facts)
    return found


@contextmanager
def _together(process_group: Any) -> Iterator[list[Any]]:
    """A block that must succeed on every rank. Facts that the ranks append to the list are exchanged: afterwards each rank has all.

    Raises:
        PlacementError: this rank's own error, or a CheckpointError with another rank's.
    """
    facts: list[Any] = []
    error: Exception | None = None
    try:
        yield facts
    except Exception as raised:
        error = raised
    if dist.is_initialized():
        told: list[Any] = [None] * dist.get_world_size(process_group)
        dist.all_gather_object(told, (None if error is None else _said(error), facts), group=process_group)
        if error is None:
            for rank, (reason, _) in enumerate(told):
                if reason is not None:
                    raise CheckpointError(f"rank {rank}: {reason}")
        facts[:] = [fact for _, each in told for fact in each]
    if error is not None:
        raise error


@contextmanager
def _torch_errors(what: str, find: Callable[[], str] = str) -> Iterator[None]:
    """Turn errors of torch.distributed.checkpoint into CheckpointErrors with their cause. Such an error is raised on every rank.

    Args:
        find: returns further details of a failure.
    """
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            yield
    except CheckpointException as error:
        reasons = {rank: failure[0] for rank, failure in error.failures.items()}
        first = next((reason for reason in reasons.values() if isinstance(reason, PlacementError)), None)
        detail = str(first) if first is not None else "; ".join(f"rank {rank}: {_said(reason)}" for rank, reason in reasons.items())
        raise CheckpointError(f"{what} failed: {detail}{find()}") from error
    except (OSError, RuntimeError, ValueError, AssertionError) as error:
        raise CheckpointError(f"{what} failed: {_said(error)}{find()}") from error


def _said(error: BaseException) -> str:
    """The text of an exception, or its type's name where the text is empty (unpickling a truncated file)."""
    return str(error).rstrip(".") or type(error).__name__


def _truncated(path: str | os.PathLike[str], metadata: Metadata) -> str:
    """Details about files of a checkpoint that are missing, or shorter than the metadata says."""
    ends: dict[str, int] = {}
    for info in metadata.storage_data.values():
        name = getattr(info, "relative_path", None)
        if name is not None:
            ends[name] = max(ends.get(name, 0), info.offset + info.length)
    found = []
    for name, end in ends.items():
        file = os.path.join(path, name)
        nbytes = os.path.getsize(file) if os.path.exists(file) else None
        if nbytes is None or nbytes < end:
            found.append(f"{name} " + ("is missing" if nbytes is None else f"ends after {nbytes:,} of {end:,} bytes"))
    return f". Damaged files: {', '.join(found)}" if found else ""
