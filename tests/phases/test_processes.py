"""Forked children, the end of the interpreter, and threads that never end."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import traceback
from collections.abc import Callable
from typing import Any

import pytest
import torch

from placement import PlacementError
from tests.support.forked import exit_code
from tests.support.programs import Programs
from tests.support.worker import Worker, assert_same, batch, in_a_range, learn, net

pytestmark = pytest.mark.filterwarnings(
    "ignore:This process .* is multi-threaded:DeprecationWarning"
)


def in_child(work: Callable[[], None]) -> None:
    """Run in a forked child, as a data loader would; what fails there fails here."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(reader)
        signal.alarm(20)  # a child that hangs fails its test
        faulthandler.enable(writer)  # a child that crashes says where
        torch.set_num_threads(1)  # OpenMP's threads did not come along
        message = b""
        try:
            work()
        except BaseException:  # sent to the parent
            message = traceback.format_exc().encode()
        os.write(writer, message)
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        message = pipe.read()
    _, status = os.waitpid(pid, 0)
    assert message == ""
    assert os.waitstatus_to_exitcode(status) == 0


def refused(work: Callable[[], object]) -> None:
    with pytest.raises(PlacementError, match="forked child") as caught:
        work()
    assert type(caught.value) is PlacementError


@pytest.mark.parametrize("phase", [None, "train"])
@pytest.mark.parametrize("what", ["parameter", "state dict", "clone"])
def test_a_forked_child_does_not_have_the_memory_of_handles(
    worker: Worker, what: str, phase: str | None
) -> None:
    """As docs/worker.md says: better a crash than old bytes."""
    tensor = {
        "parameter": worker.net[0].weight.detach(),
        "state dict": worker.net.state_dict()["0.weight"],
        "clone": worker.net.state_dict()["0.weight"].clone(),
    }[what]

    def read() -> int:
        torch.set_num_threads(1)
        return int(tensor[0, 0].item() * 0)

    with contextlib.nullcontext() if phase is None else worker.manager.phase(phase):
        assert exit_code(read) == (0 if what == "clone" else -signal.SIGSEGV)


@pytest.mark.parametrize("phase", [None, "train"])
def test_a_forked_child_can_use_nothing_of_the_parents_manager(
    worker: Worker, phase: str | None
) -> None:

    def child() -> None:
        manager = worker.manager
        refused(lambda: worker.net(batch()))
        refused(worker.net.state_dict)
        refused(worker.actor.state_dict)
        refused(worker.adam.state_dict)
        refused(lambda: worker.net.load_state_dict({}))
        refused(worker.adam.step)
        refused(lambda: manager.phase("values").__enter__())
        refused(lambda: manager.enter("values"))
        refused(lambda: manager.register("x", net()))
        refused(lambda: manager.unregister("actor"))
        refused(manager.audit)
        refused(manager.check_integrity)
        refused(manager.close)
        assert net()(batch()).isfinite().all()

    if phase is None:
        in_child(child)
    else:
        opened = worker.manager.phase(phase)
        with opened:

            def leave() -> None:
                child()
                refused(lambda: opened.switch("values"))
                refused(lambda: opened.__exit__(None, None, None))

            in_child(leave)
            learn(worker.net, worker.adam)
    with worker.manager.phase("train"):
        learn(worker.net, worker.adam)
    worker.manager.check_integrity()


def test_memory_of_a_child_never_lies_where_its_parents_memory_lies() -> None:
    """Handles and the storages of tensors are looked up by address, and a child inherits the tables
    of its parent."""
    workers = [Worker() for _ in range(3)]

    def child(taken: list[tuple[int, int]], generations: int) -> None:
        own = [Worker() for _ in range(6)]
        assert not [
            (one, other)
            for one in spans(own)
            for other in taken
            if one[0] < other[1] and other[0] < one[1]
        ]
        for worker in own:
            assert_same(dict(worker.ref.state_dict()), dict(worker.ref_values))
        if generations > 1:
            in_child(lambda: child(taken + spans(own), generations - 1))

    in_child(lambda: child(spans(workers), generations=2))


def spans(workers: list[Worker]) -> list[tuple[int, int]]:
    """First address and end of every range and host copy."""
    ranges = [
        each
        for worker in workers
        for handle in worker.manager.handles.values()
        for each in handle.storage.ranges
    ]
    places = [(each.layout.addresses.base, each.layout.addresses.nbytes) for each in ranges]
    places += [(each.host.address, each.host.nbytes) for each in ranges]
    return [(address, address + nbytes) for address, nbytes in places if nbytes]


def test_a_data_loader_with_forked_workers_inside_a_phase(worker: Worker) -> None:
    data: Any = torch.utils.data.DataLoader(
        torch.arange(12.0), batch_size=4, num_workers=1, multiprocessing_context="fork"
    )  # type: ignore[arg-type]
    with worker.manager.phase("train"):
        assert [int(part.sum()) for part in data] == [6, 22, 38]
        learn(worker.net, worker.adam)
    assert in_a_range(worker.net[0].weight)


BEGIN = """
import sys, threading, torch, placement
from placement.testing import SimulatedDevice
manager = placement.Manager(device=SimulatedDevice(8 << 20))
model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 8))
adam = torch.optim.AdamW(model.parameters())
actor = manager.register("actor", model, role="actor")
manager.register("adam", adam)
with manager.phase("train"):
    model(torch.ones(1, 64)).sum().backward()
    adam.step()
"""


@pytest.mark.parametrize(
    ("code", "status", "error"),
    [
        pytest.param(
            *("manager.enter('train'); held = actor.state_dict()", 0, ""), marks=pytest.mark.sweep
        ),
        ("with manager.phase('train'): sys.exit(3)", 3, ""),
        pytest.param(
            *("manager.enter('train'); raise ValueError('mine')", 1, "ValueError: mine"),
            marks=pytest.mark.sweep,
        ),
        (
            (
                "ready = threading.Event()\n"
                "def work():\n"
                "    with manager.phase('train'):\n"
                "        ready.set(); threading.Event().wait()\n"
                "threading.Thread(target=work, daemon=True).start(); ready.wait(); sys.exit(6)"
            ),
            6,
            "",
        ),
        pytest.param(
            *("import atexit\natexit.register(lambda: print(manager.audit().ok))", 0, ""),
            marks=pytest.mark.sweep,
        ),
        (
            (
                "manager.me = manager; actor.me = actor; model.me = [model]; del manager, actor, "
                "model, adam"
            ),
            0,
            "",
        ),
    ],
)
def test_the_exit_code_is_the_programs(
    programs: Programs, code: str, status: int, error: str
) -> None:
    done = programs.run(BEGIN + code)
    assert done.status == status, done.errors
    if error:
        assert done.errors.strip().endswith(error)
        assert "Exception ignored" not in done.errors
    else:
        assert done.errors == ""
