"""One phase transition at a time: in one thread, in the process that made the manager, and outside of graph captures."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch

from placement.core.errors import PhaseError, PlacementError
from placement.core.interrupts import deferred
from placement.core.torch_modes import without_modes
from placement.devices.base import Device
from placement.group.vote import GroupVote

_NOTHING = nullcontext()


def _without_inference_mode() -> AbstractContextManager[object]:
    """Context manager in which inference mode is off. torch's own costs two microseconds even where the mode is off already."""
    return torch.inference_mode(False) if torch.is_inference_mode_enabled() else _NOTHING


class TransitionLock:
    """The lock of one manager. It is held during every phase transition.

    Args:
        vote: tells the ranks of the group about phase transitions that failed here.
        sweep: leaves abandoned phases and forgets garbage-collected objects. Called at the beginning of every phase transition.
        is_outside: whether no phase is open. Then this rank may have missed phase transitions of the other ranks.
    """

    def __init__(self, device: Device, vote: GroupVote, sweep: Callable[[], None], is_outside: Callable[[], bool]) -> None:
        self._device = device
        self._vote = vote
        self._sweep = sweep
        self._is_outside = is_outside
        self._lock = threading.RLock()
        self._is_busy = False
        """Whether a phase transition is under way. Code that runs inside it (a policy, a factory, a finalizer) must not begin another."""
        self.pid = os.getpid()
        self.is_closed = False

    @contextmanager
    def attempt(
        self, vote: GroupVote | None = None, *, begins: bool = False, own: bool = False, error: BaseException | None = None
    ) -> Iterator[None]:
        """Tell every rank of the group, once, if the block fails, even if it fails before a phase transition begins.

        Args:
            vote: tells the group; None: the vote with which phases are entered and left.
            begins: a phase is about to begin. Outside every phase, this rank may have missed phase transitions of the others.
            own: a rank that fails raises its own error. Otherwise all ranks raise the same error.
            error: the user's exception with which a phase is left, if any.
        """
        vote = self._vote if vote is None else vote
        if vote.is_alone or os.getpid() != self.pid:  # a forked child is not a rank
            yield
            return
        with self._lock, deferred():
            if self._is_busy:  # the transition around this one tells the group
                yield
                return
            with vote.attempt(catches_up=begins and self._is_outside(), error=error):
                try:
                    yield
                except BaseException as raised:
                    if (told := self._tell(vote, raised, own)) is not None:
                        try:
                            raise told from raised
                        finally:
                            del told  # its traceback has this frame: a cycle would keep the tensors of all frames until they are collected
                    raise

    def _tell(self, vote: GroupVote, error: BaseException, own: bool) -> BaseException | None:
        self._is_busy = True  # objects that are garbage-collected while this waits must not begin a phase transition
        try:
            told = vote.failed(error, waits=not own)
        finally:
            self._is_busy = False
        return None if own else told

    @contextmanager
    def transition(self) -> Iterator[None]:
        """Hold the lock for one phase transition, with Ctrl-C deferred. torch's modes are off inside, and abandoned phases have been left.

        Raises:
            PhaseError: another phase transition is under way in this thread, or a CUDA graph is being captured.
            PlacementError: the manager is closed, or belongs to another process.
        """
        with self._lock, deferred():
            self.check_process()
            if self._is_busy:
                raise PhaseError("a policy or a Lazy's factory must not change phases or register: it runs inside a phase transition")
            if self._device.is_capturing():
                raise PhaseError("phases cannot change while a graph is being captured: moving memory would become part of it")
            self._is_busy = True
            try:
                with without_modes(), _without_inference_mode(), torch.no_grad():
                    self._sweep()
                    yield
            finally:
                self._is_busy = False

    @contextmanager
    def if_free(self) -> Iterator[bool]:
        """Hold the lock if that is possible at once, outside of any phase transition. Gives whether it is held."""
        with deferred():
            held = self._lock.acquire(blocking=False)
            try:
                yield held and not self._is_busy and not self.is_closed and os.getpid() == self.pid
            finally:
                if held:
                    self._lock.release()

    @contextmanager
    def step(self) -> Iterator[None]:
        """Hold the lock while a step of an optimizer streams its state. torch's modes stay on, because the step runs inside.

        Raises:
            PhaseError: a phase transition is under way in this thread, or a CUDA graph is being captured.
            PlacementError: the manager is closed, or belongs to another process.
        """
        with self._lock, deferred():
            self.check_process()
            if self._is_busy:
                raise PhaseError("a policy or a Lazy's factory must not call step(): it runs inside a phase transition")
            if self._device.is_capturing():
                raise PhaseError("a step that streams its state cannot be captured in a graph: use optimizer_in='train'")
            self._is_busy = True
            try:
                yield
            finally:
                self._is_busy = False

    def sweep_if_free(self) -> None:
        """Sweep now, unless a phase transition is under way in this or another thread. In that case the next one sweeps."""
        with self.if_free() as is_free:
            if is_free:
                with self.transition():
                    pass

    def check_process(self) -> None:
        """Refuse any use by a forked child process, or after `close`.

        Raises:
            PlacementError: the manager is closed, or belongs to another process.
        """
        if os.getpid() != self.pid:
            raise PlacementError(
                f"this manager belongs to process {self.pid}; a forked child has neither its device memory nor its host copies. "
                "Make a manager of its own there."
            )
        if self.is_closed:
            raise PlacementError("this manager is closed")
