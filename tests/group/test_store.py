"""A torch store as the board of a group: what it does, and what it does when it does not answer."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

from placement.core.errors import CoordinatorLost
from placement.core.states import Plan, State
from placement.group import Board, BoardLost, Group, StoreGroup, from_environment
from placement.group.store import StoreBoard
from tests.group.processes import Processes, StoreService

PLAN = Plan({"actor": State.TRAINING})


def change(group: Group) -> int:
    group.propose("enter train", 1)
    group.agree(PLAN)
    return group.epoch


def test_a_store_that_is_stopped_holds_nobody_past_the_deadline() -> None:
    """torch's client waits for an answer without a limit, whatever timeout it was given."""
    service = StoreService()
    store = dist.TCPStore("127.0.0.1", service.port, None, False, timeout=timedelta(seconds=30))
    asking: dict[str, Callable[[Board], Any]] = {
        "look": lambda board: board.look(["a"]),
        "claim": lambda board: board.claim("b", b"x"),
        "wait": lambda board: board.wait("c", 0.05),
        "remove": lambda board: board.remove(["a"]),
    }
    boards = {name: StoreBoard(store, answer_seconds=0.5) for name in asking}
    group = StoreGroup(store, 0, 1, 0.5)
    change(group)
    service.stop()
    for name, call in asking.items():
        with pytest.raises(BoardLost, match=r"no answer within 0\.5 s"):
            call(boards[name])
        with pytest.raises(BoardLost, match="an earlier call"):
            call(boards[name])
    with pytest.raises(CoordinatorLost, match="no answer within"):
        group.propose("enter train", 1)
    with pytest.raises(CoordinatorLost, match="join"):
        StoreGroup(store, 0, 1, 0.5, generation=1)
    service.go_on()
    service.kill()
    with pytest.raises(CoordinatorLost):
        StoreGroup(store, 0, 1, 0.5, generation=2)


def test_others_who_use_the_store_do_not_hold_the_group_up() -> None:
    """A client of a TCPStore takes one call at a time: a wait of somebody else's on it would keep ours out."""
    server = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    shared = dist.TCPStore("127.0.0.1", server.port, None, False)
    before = shared.timeout
    group = StoreGroup(shared, 0, 1, 5.0)
    waits = threading.Thread(target=lambda: shared.wait(["never"], timedelta(seconds=20)), daemon=True)
    waits.start()
    assert change(group) == 1
    assert waits.is_alive()
    assert shared.timeout == before
    server.set("never", "now")
    waits.join(20)


@pytest.mark.parametrize("kind", ["hash", "file", "tcp", "prefix"])
def test_every_store_of_torch_is_a_board(kind: str, tmp_path: Any) -> None:
    server = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False) if kind in ("tcp", "prefix") else None
    stores: dict[str, Callable[[], Any]] = {
        "hash": dist.HashStore,
        "file": lambda: dist.FileStore(str(tmp_path / "store"), 1),
        "tcp": lambda: server,
        "prefix": lambda: dist.PrefixStore("mine", server),
    }
    board = StoreBoard(stores[kind]())
    assert board.look(["a"]) is None
    assert board.wait("a", 0.01) is None
    board.put("a", b"1")
    board.put("a", b"1")
    assert board.look(["a"]) == [b"1"]
    assert board.look(["a", "b"]) is None
    assert board.claim("b", b"first") == b"first"
    assert board.claim("b", b"second") == b"first"
    assert board.wait("b", 5.0) == b"first"
    assert board.look(["a", "b"]) == [b"1", b"first"]
    board.remove(["a", "never"])
    assert board.look(["a"]) is None
    assert board.claim("a", b"anew") == b"anew"


class Launched:
    """A process of a launcher that is not torchrun: its rank 0 serves the store itself."""

    def budgets(self) -> tuple[int, int]:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        dist.init_process_group("gloo")
        group, other = from_environment(deadline_seconds=30), from_environment("critic", deadline_seconds=30)
        dist.destroy_process_group()
        return group.propose("enter train", 7).budget_bytes, other.propose("enter values", 8).budget_bytes


def test_the_environment_of_a_launcher_that_is_not_torchrun_after_init_process_group(processes: Processes) -> None:
    assert processes.start(Launched).call("budgets") == (7, 8)


def test_a_server_in_this_process_lives_as_long_as_the_group() -> None:
    group = StoreGroup(dist.TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=30), wait_for_workers=False), 0, 1, 5.0)
    assert change(group) == 1
