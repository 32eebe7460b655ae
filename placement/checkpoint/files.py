"""Saving and loading all handles of a manager."""

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

if TYPE_CHECKING:
    from placement.manager import Manager
    from placement.registration.handle import Handle

_PARTS: Mapping[str, type[Part]] = {"module": Model, "optimizer": Optimizer}


class LoadPlanner(DefaultLoadPlanner):
    """Reads what `Model` and `Optimizer` show into host memory of its own, so that a checkpoint that does not fit changes nothing.

    It compares names, shapes and dtypes before anything is read, and asks the checkpoint what state an optimizer had.
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
    """Save every module and optimizer that is not readonly, under its handle's name, as the values are now. Nothing moves.

    Values of an offloaded handle are read from its host copy. Each rank writes its shards; what is not sharded is taken to be the
    same on every rank, as torch.distributed.checkpoint does. Collective where torch.distributed is initialized.

    Args:
        path: a directory.
        only: the handles meant, or their names, readonly ones included.
        process_group: the ranks that save together; None: all.

    Raises:
        CheckpointError: a handle cannot be saved so (the message says how it can), or the files cannot be written. On every rank.
        NotResidentError, BrokenHandleError: a handle that `only` names has no values.
    """
    with manager._stack.lock.transition():
        state = _collect(manager, only, process_group)
        with _torch_errors(f"saving to {os.fspath(path)!r}"):
            torch_save(state, checkpoint_id=path, process_group=process_group, no_dist=not dist.is_initialized())


def async_save(
    manager: Manager, path: str | os.PathLike[str], *, only: Iterable[str | Handle] | None = None, process_group: Any = None
) -> Future[None]:
    """`save` in another thread. What is saved are the values at the time of the call, whatever happens afterwards.

    They are read from the host copies; what changed on the device is brought there first, in the time that an offload takes for it.
    Until the files are written, an offload of what they are read from waits, as do `unregister` and `close`; a load, and training after
    it, do not. State that was born since the last offload has no place in a host copy yet and is copied into new host memory.

    Saves of one process are written one after the other. On several ranks they have a gloo group of their own.

    Returns:
        Done when this rank's files and the metadata are written; its `result()` raises CheckpointError when they were not.
    """
    with manager._stack.lock.transition():
        with _together(process_group):
            for handle in _chosen(manager, only):
                if handle.gathers is not None:
                    raise CheckpointError(f"{handle.name!r}: {handle.gathers}: save() it, or leave it out with only=")
        state = _collect(manager, only, process_group)
        group = background.group_for(process_group)
        with background.held(manager.handles[name] for name in state) as host_read_locks:
            frozen = {name: background.frozen(manager.handles[name], values) for name, values in state.items()}

            def write() -> None:
                try:
                    with _torch_errors(f"saving to {os.fspath(path)!r}"):
                        torch_save(frozen, checkpoint_id=path, process_group=group, no_dist=group is None)
                finally:
                    for lock in host_read_locks:
                        lock.give_back()

            return background.submit(write, path)


def load(manager: Manager, path: str | os.PathLike[str], *, only: Iterable[str | Handle] | None = None, process_group: Any = None) -> None:
    """Load what `save` saved, on as many ranks as there are now. Nothing moves: of an offloaded handle the host copy is written.

    Everything is read into host memory and compared before the first value is written, on every rank: a checkpoint that does not fit
    or cannot be read leaves every handle of every rank as it was. Tensor objects, aliases, addresses and an optimizer's keys stay.
    What the checkpoint has of other handles is left alone.

    Args:
        only: the handles meant, or their names; None: every module and optimizer that is not readonly.

    Raises:
        CheckpointError: no checkpoint there, or it does not fit; the message names handle and key.
        PhaseError: a handle is publishing its weights.
        NotResidentError: a handle is not built yet, or its object wants to take state over itself and is offloaded.
    """
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


def _part(handle: Handle) -> Part:
    if handle.kind not in _PARTS:
        raise CheckpointError(f"{handle.name!r} is of kind {handle.kind}, which has nothing to save: its weights are another handle's")
    return _PARTS[handle.kind](handle)


def _metadata(path: str | os.PathLike[str]) -> Metadata:
    try:
        return FileSystemReader(path).read_metadata()
    except Exception as error:  # pickled: what is wrong with it may show as anything
        raise CheckpointError(f"there is no complete checkpoint in {os.fspath(path)!r}: {error}") from error


def _chosen(manager: Manager, only: Iterable[str | Handle] | None) -> list[Handle]:
    names = names_of(only)
    if names is not None:
        return [manager._stack.known(name) for name in dict.fromkeys(names)]
    return [handle for handle in manager.handles.values() if handle.kind in _PARTS and not handle.readonly]


def _collect(manager: Manager, only: Iterable[str | Handle] | None, process_group: Any) -> dict[str, Shown]:
    """What is to be saved, by handle. Every rank can, or none does."""
    found: dict[str, Shown] = {}
    with _together(process_group) as facts:
        for handle in _chosen(manager, only):
            if handle.is_built or only is not None:
                found[handle.name] = _part(handle).state_dict()
        facts.append(meshes.own_meshes(found))
    if several := meshes.on_several(facts):
        with _together(process_group) as facts:
            facts.append(meshes.shards(found, several))
        meshes.refuse_experts(facts)
    return found


@contextmanager
def _together(process_group: Any) -> Iterator[list[Any]]:
    """What every rank has to manage for any to go on. What a rank puts into the list, all have from all in it afterwards.

    Raises:
        PlacementError: this rank's own error, or that of another.
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
    """What torch.distributed.checkpoint raises, by its cause. It raises on every rank when one fails.

    Args:
        find: what else there is to say of a failure.
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
    """An exception in words; some have none (what unpickling a file raises that ends too soon)."""
    return str(error).rstrip(".") or type(error).__name__


def _truncated(path: str | os.PathLike[str], metadata: Metadata) -> str:
    """The files of a checkpoint that are missing, or end before what the metadata says they have."""
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
    return f". Of its files, {', '.join(found)}" if found else ""
