"""Write checkpoints in another thread: freeze the values, protect host copies from being overwritten, and keep the order."""

from __future__ import annotations

import copy
import functools
import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from placement.core.journal import logger
from placement.storage.transfer.host_read_locks import HostReadLock
from placement.storage.transfer.mirror import mirror
from placement.tensors.plain import rewrapped

if TYPE_CHECKING:
    from placement.registration.handle import Handle


@contextmanager
def held(handles: Iterable[Handle]) -> Iterator[list[HostReadLock]]:
    """Bring the host copies of these handles up to date and lock them for reading. They are unlocked here only if the block fails."""
    host_read_locks: list[HostReadLock] = []
    try:
        for handle in handles:
            if (holding := handle.holding) is not None:
                mirror(holding)
                host_read_locks.append(holding.host_read_locks.lend())
        yield host_read_locks
    except BaseException:
        for lock in host_read_locks:
            lock.give_back()
        raise


class Frozen:
    """Makes copies of a handle's state dict that do not change. Their tensors use the host copy, or new host memory where that has no
    place for them."""

    def __init__(self, handle: Handle) -> None:
        self._handle = handle
        self._storages: dict[int, torch.UntypedStorage] = {}

    def copy(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            with torch.inference_mode(False), torch.no_grad():
                return rewrapped(value.detach(), self._copy_part)
        if isinstance(value, dict):
            return {key: self.copy(each) for key, each in value.items()}
        if type(value) in (list, tuple):
            return type(value)(self.copy(each) for each in value)
        return copy.deepcopy(value)

    def _copy_part(self, part: torch.Tensor) -> torch.Tensor:
        shown = self._handle.storage.over_mirror(part, self._storages)
        return part.detach().to("cpu", copy=True) if shown is None else shown


def submit(write: Callable[[], None], path: str | os.PathLike[str]) -> Future[None]:
    """Write after all earlier submissions. A failure is also logged, because the caller may never ask for the result."""

    def run() -> None:
        try:
            write()
        except BaseException as error:
            logger.error("checkpoint %s was not written: %s", os.fspath(path), str(error))
            raise

    return _writer(os.getpid()).submit(run)


def drain() -> None:
    """Wait until everything submitted so far is written, or has failed."""
    _writer(os.getpid()).submit(lambda: None).result()


@functools.cache
def _writer(pid: int) -> ThreadPoolExecutor:
    """The writing thread of a process. There is only one, so that every rank writes in the order of its calls."""
    return ThreadPoolExecutor(1, f"placement-checkpoint-{pid}")


_groups: list[tuple[Any, Any]] = []


def group_for(process_group: Any) -> Any:
    """A gloo group of the same ranks for the thread's collectives; None without torch.distributed. The first call is collective."""
    if not dist.is_initialized():
        return None
    of = dist.group.WORLD if process_group is None else process_group
    for known, group in _groups:
        if known is of:
            return group
    group = dist.new_group(dist.get_process_group_ranks(of), backend="gloo", use_local_synchronization=True)
    _groups.append((of, group))
    return group
