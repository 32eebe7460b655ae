"""Ranks for tests: processes with a process group that stay alive, because starting one costs
seconds.

`run` calls one function on every rank and gives what each returned. A rank that raises fails the
test with its traceback; one that does not answer in time (a collective that the other never called)
is ended, and the next call starts fresh ones.
"""

from __future__ import annotations

import faulthandler
import functools
import gc
import importlib
import inspect
import os
import signal
import sys
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from placement.group import StoreGroup
from tests.support.forked import processes
from tests.support.seeds import seed

START_SECONDS = 90.0
"""Importing torch and a framework on a busy machine of two cores."""


def group_of_all(generation: int, deadline_seconds: float = 20.0) -> StoreGroup:
    """On a rank: the group of all, for managers that change phase together. No two have the same
    generation."""
    store = dist.distributed_c10d._get_default_store()
    return StoreGroup(
        store, dist.get_rank(), dist.get_world_size(), deadline_seconds, generation=generation
    )


def on_ranks(fixture: str) -> Callable[[Callable[..., Any]], Callable[..., None]]:
    """Decorates a test that runs on every rank of a fixture ("one_rank", "two_ranks"). What it
    asserts there fails it here.

    What it takes of fixtures and parameters is pickled.
    """

    def decorate(body: Callable[..., Any]) -> Callable[..., None]:
        @functools.wraps(body)
        def test(**arguments: Any) -> None:
            arguments.pop(fixture).run(_call, body.__module__, body.__name__, arguments)

        added = inspect.Parameter(fixture, inspect.Parameter.KEYWORD_ONLY)
        test.__signature__ = inspect.Signature(
            [*inspect.signature(body).parameters.values(), added]
        )  # type: ignore[attr-defined]
        return test

    return decorate


def _call(module: str, name: str, arguments: dict[str, Any]) -> None:
    getattr(importlib.import_module(module), name).__wrapped__(**arguments)


def no_collectives() -> Any:
    """Whoever calls a collective of torch.distributed fails meanwhile."""
    names = (
        "all_gather",
        "all_gather_into_tensor",
        "all_gather_object",
        "all_reduce",
        "broadcast",
        "barrier",
        "reduce_scatter_tensor",
    )
    return mock.patch.multiple(
        dist,
        **{name: mock.Mock(side_effect=AssertionError(f"{name} was called")) for name in names},
    )


class RankError(AssertionError):
    """What a rank raised, with its traceback as text."""


def _serve(rank: int, world_size: int, port: int, backend: str, connection: Connection) -> None:
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(world_size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )
    faulthandler.enable()
    torch.set_num_threads(1)
    if "cuda" in backend:
        torch.cuda.set_device(rank)
    store = dist.TCPStore(
        "127.0.0.1", port, world_size, False, timeout=timedelta(seconds=START_SECONDS)
    )
    dist.init_process_group(
        backend, store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=60)
    )
    connection.send((True, None))
    num_modules = 0
    while True:
        try:
            function, arguments = connection.recv()
        except EOFError:
            return
        except Exception:  # the function's module cannot be imported
            connection.send((False, traceback.format_exc()))
            continue
        seed(0)
        try:
            answer = True, function(*arguments)
        except BaseException:
            answer = False, traceback.format_exc()
        gc.collect()  # managers and process groups of one test do not live into the next
        # what torch and a framework are made of need not be looked at after each test
        if len(sys.modules) > num_modules:
            gc.freeze()
            num_modules = len(sys.modules)
        connection.send(answer)


class Ranks:
    """`world_size` processes, started at the first `run`.

    Args:
        backend: of the process group; one that names cuda gives each rank the GPU of its number.
        context: how processes are started: a context of multiprocessing, or its name; "spawn" for
            what needs a GPU.
    """

    def __init__(self, world_size: int, backend: str = "gloo", context: Any = processes) -> None:
        self.world_size = world_size
        self._backend = backend
        self._context = (
            torch.multiprocessing.get_context(context) if isinstance(context, str) else context
        )
        self._connections: list[Connection] = []
        self._processes: list[Any] = []
        self._store: dist.TCPStore | None = None

    def run(
        self,
        function: Callable[..., Any],
        *arguments: Any,
        deadline_seconds: float = 60.0,
        dies: int | None = None,
    ) -> list[Any]:
        """`function(*arguments)` on every rank, which finds its number in torch.distributed.
        Returns the results by rank.

        Args:
            function: of a module that can be imported; it, its arguments and what it returns are
                pickled.
            dies: the rank that the call kills; it returns None, and the next call starts fresh
                processes.
        """
        if not self._processes:
            self._start()
        for connection in self._connections:
            connection.send((function, arguments))
        answers = self._answers(deadline_seconds, dies)
        if dies is not None:
            self.close()
        return answers

    def close(self) -> None:
        for connection in self._connections:
            connection.close()
        for process in self._processes:
            process.join(5)
            if process.is_alive():
                process.kill()
                process.join()
        self._connections, self._processes, self._store = [], [], None

    def _start(self) -> None:
        timeout = timedelta(seconds=START_SECONDS)
        self._store = dist.TCPStore(
            "127.0.0.1", 0, self.world_size, True, timeout=timeout, wait_for_workers=False
        )
        for rank in range(self.world_size):
            ours, theirs = self._context.Pipe()
            arguments = (rank, self.world_size, self._store.port, self._backend, theirs)
            process = self._context.Process(target=_serve, args=arguments, daemon=True)
            process.start()
            theirs.close()
            self._connections.append(ours)
            self._processes.append(process)
        self._answers(START_SECONDS)

    def _answers(self, deadline_seconds: float, dies: int | None = None) -> list[Any]:
        try:
            return self._gathered(deadline_seconds, dies)
        except BaseException:
            # an answer that comes after a timeout would be taken for that of the next call
            self.close()
            raise

    def _gathered(self, deadline_seconds: float, dies: int | None) -> list[Any]:
        answers: dict[int, Any] = {}
        failures: dict[int, str] = {}
        while len(answers) + len(failures) < self.world_size:
            waiting = {
                self._connections[rank]: rank
                for rank in range(self.world_size)
                if rank not in answers and rank not in failures
            }
            # Once a rank has failed, the others wait for it in a collective: they get little more
            # time.
            ready = wait(list(waiting), timeout=5.0 if failures else deadline_seconds)
            if not ready:
                failures |= {
                    rank: failures.get(rank, "no answer; its stack is in the captured output")
                    for rank in waiting.values()
                }
                for process in self._processes:
                    os.kill(process.pid, signal.SIGABRT)  # faulthandler prints where it is
                break
            for connection in ready:
                rank = waiting[connection]
                try:
                    is_fine, value = connection.recv()
                except (EOFError, ConnectionError):
                    is_fine, value = rank == dies, None if rank == dies else "the process died"
                (answers if is_fine else failures)[rank] = value
        if failures:
            raise RankError(
                "\n".join(f"rank {rank}: {failures[rank]}" for rank in sorted(failures))
            )
        return [answers[rank] for rank in range(self.world_size)]
