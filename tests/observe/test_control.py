"""Suspending over HTTP: who may ask, what is answered, and clients that are many, large or gone."""

from __future__ import annotations

import http.client
import json
import logging
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

import placement
from placement import PlacementError, State
from placement.cli import main
from placement.core.snapshot import SuspensionStatus
from placement.observe.discovery import Identity, Target, as_json
from placement.observe.server import MetricsServer
from tests.observe.managed import managed
from tests.support.threads import until

TOKEN = "a-token-of-the-tests"


class Worker:
    """A manager with a server. Counts its threads."""

    def __init__(self, token: str | None = TOKEN, **keywords: Any) -> None:
        self.threads = threading.active_count()
        self.manager, self.model = managed()
        self.server: MetricsServer = self.manager.serve(control=token, **keywords)
        self.suspension = self.manager._stack.suspension

    def post(self, path: str, body: Any = None, token: str | None = TOKEN) -> tuple[int, Any]:
        """The status of the answer, and its body as JSON, or as text where it is none."""
        connection = http.client.HTTPConnection("127.0.0.1", self.server.port, timeout=60)
        text = b"" if body is None else body if isinstance(body, bytes) else json.dumps(body)
        headers = {} if token is None else {"Authorization": f"Bearer {token}"}
        try:
            connection.request("POST", path, text, headers)
            answer = connection.getresponse()
            told = answer.read()
        finally:
            connection.close()
        try:
            return answer.status, json.loads(told)
        except ValueError:
            return answer.status, told.decode()

    def raw(self, head: str) -> socket.socket:
        client = socket.create_connection(("127.0.0.1", self.server.port), timeout=30)
        client.sendall(head.replace("\n", "\r\n").encode())
        return client


@pytest.fixture
def worker() -> Iterator[Worker]:
    made = Worker()
    yield made
    made.manager.close()
    until(lambda: threading.active_count() <= made.threads)


def test_suspend_and_resume(worker: Worker) -> None:
    code, answer = worker.post("/suspend", {"resume_after_seconds": 600, "epoch": 7})
    assert code == 200
    status = SuspensionStatus.model_validate_json(json.dumps(answer))
    assert (status.epoch, status.suspended, status.resident_bytes) == (7, True, 0)
    assert worker.manager.snapshot().suspended
    assert worker.post("/suspend")[1]["epoch"] == 7
    code, answer = worker.post("/resume", {"epoch": 7})
    assert (code, answer["epoch"], answer["suspended"]) == (200, 7, False)
    assert worker.post("/resume")[0] == 200
    with worker.manager.phase("log_prob"):
        assert worker.manager.handles["actor"].state is State.GPU_RESIDENT


def test_what_cannot_be_dropped_is_refused(worker: Worker) -> None:
    code, answer = worker.post("/suspend", {"drop": ["actor"]})
    assert code == 409
    assert "'actor' is no engine" in answer
    code, answer = worker.post("/suspend", {"drop": ["nobody", "actor"]})
    assert code == 409
    assert "no handle 'nobody'" in answer
    assert not worker.manager.snapshot().suspended


def test_a_suspension_over_http_ends_by_itself(worker: Worker) -> None:
    assert worker.post("/suspend", {"resume_after_seconds": 0.1})[1]["suspended"]
    with worker.manager.phase("log_prob"):  # waits, with nobody who resumes
        assert not worker.manager.snapshot().suspended


def test_refusals_say_what_holds_the_device(worker: Worker) -> None:
    with worker.manager.phase("log_prob"):
        code, answer = worker.post("/suspend", {"deadline_seconds": 0.05})
        assert code == 409
        assert "open phases: log_prob; on the device: actor" in answer
    worker.post("/suspend", {"epoch": 5})
    for path, epoch in (("/suspend", 4), ("/suspend", 6), ("/resume", 4)):
        code, answer = worker.post(path, {"epoch": epoch})
        assert code == 409
        assert "the last one, 5" in answer


def test_a_connection_may_wait_longer_than_others(worker: Worker) -> None:
    worker.server.timeout_seconds = 0.05
    with worker.manager.phase("log_prob"):
        answer = ThreadPoolExecutor(1).submit(worker.post, "/suspend")
        until(lambda: worker.suspension.asked)
        with worker.raw("GET") as idle:
            assert idle.recv(1) == b""  # dropped
        assert not answer.done()
    assert answer.result(30)[0] == 200


# --- who may ask


def test_without_the_token_nothing_happens(worker: Worker) -> None:
    with worker.manager.phase("log_prob"):
        for token in (None, "", "wrong", TOKEN + "x", TOKEN[:-1], "\xe9", f" {TOKEN}"):
            for path in ("/suspend", "/resume"):
                code, answer = worker.post(path, {"deadline_seconds": 3600}, token)
                assert (code, answer) == (401, "Unauthorized\n")
    assert not worker.manager.snapshot().suspended
    with worker.raw(f"POST /suspend HTTP/1.1\nAuthorization: Basic {TOKEN}\n\n") as client:
        told = client.makefile("rb").read()
        assert told.startswith(b"HTTP/1.0 401 Unauthorized")
        assert b"WWW-Authenticate: Bearer" in told


def test_the_scheme_may_be_written_in_any_case(worker: Worker) -> None:
    head = f"POST /resume HTTP/1.1\nAuthorization: bearer {TOKEN}\nContent-Length: 2\n\n{{}}"
    with worker.raw(head) as client:
        assert client.recv(1 << 16).startswith(b"HTTP/1.0 200")


def test_control_is_off_without_a_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PLACEMENT_CONTROL_TOKEN", raising=False)
    worker = Worker(None)
    assert worker.post("/suspend")[0] == worker.post("/resume")[0] == 404
    assert worker.post("/metrics")[0] == 405
    with worker.raw("GET /suspend HTTP/1.1\n\n") as client:
        assert client.recv(1 << 16).startswith(b"HTTP/1.0 405")
    worker.manager.close()


def test_the_token_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PLACEMENT_CONTROL_TOKEN", TOKEN)
    monkeypatch.setenv("PLACEMENT_DEVICE", "simulated:1MiB")
    worker = Worker(None)
    assert worker.post("/suspend")[0] == 200
    worker.manager.close()
    manager = placement.Manager.from_settings()  # it is no unknown setting
    assert TOKEN not in f"{manager.settings!r}{manager.settings.model_dump()}"
    manager.close()


def test_the_token_is_never_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    worker = Worker()
    worker.post("/suspend")
    worker.post("/suspend", b"{")
    worker.suspension._status = None  # type: ignore[assignment,method-assign]
    assert worker.post("/resume")[0] == 500
    shown = caplog.text + f"{worker.server!r}{worker.server._pages!r}{worker.manager.snapshot()!r}"
    assert "POST /suspend" in shown
    assert TOKEN not in shown
    worker.server.close()


@pytest.mark.parametrize("token", ["", "two words", "line\n", "é"])
def test_what_is_no_token(token: str) -> None:
    manager, _ = managed()
    with pytest.raises(PlacementError, match="token must be visible ASCII") as caught:
        manager.serve(control=token)
    assert not token or token not in str(caught.value)
    manager.close()


# --- bodies


@pytest.mark.parametrize(
    "body",
    [
        *(b"{", b"[]", b"\xff", b'{"deadline": 3}', b'{"deadline_seconds": 0}', b'{"epoch": "7"}'),
        *(b'{"deadline_seconds": NaN}', b'{"resume_after_seconds": true}', b'{"epoch": 0}'),
        *(b'{"drop": "actor"}', b'{"drop": [7]}'),
    ],
)
def test_bad_bodies(worker: Worker, body: bytes) -> None:
    code, answer = worker.post("/suspend", body)
    assert code == 400
    assert answer
    assert not worker.manager.snapshot().suspended


def test_a_body_without_a_length_is_refused(worker: Worker) -> None:
    head = f"POST /suspend HTTP/1.1\nAuthorization: Bearer {TOKEN}\n"
    for line in ("Transfer-Encoding: chunked", "Content-Length: -1", "Content-Length: x"):
        with worker.raw(f"{head}{line}\n\n") as client:
            assert client.recv(1 << 16).startswith(b"HTTP/1.0 400")


@pytest.mark.parametrize("sent", [b"", b"{}", b'{"epoch": 7'])
def test_a_body_that_ends_too_early_asks_for_nothing(worker: Worker, sent: bytes) -> None:
    """A client has died in the middle of it."""
    head = f"POST /suspend HTTP/1.1\nAuthorization: Bearer {TOKEN}\nContent-Length: 60\n\n"
    with worker.raw(head) as client:
        client.sendall(sent)
        client.shutdown(socket.SHUT_WR)
        assert client.recv(1 << 16).startswith(b"HTTP/1.0 400")
    assert not worker.manager.snapshot().suspended


def test_a_large_body_is_not_read(worker: Worker) -> None:
    """The answer comes although not one byte of a megabyte was sent."""
    head = f"POST /suspend HTTP/1.1\nAuthorization: Bearer {TOKEN}\nContent-Length: "
    for length in ("1048576", "9" * 5_000):
        with worker.raw(f"{head}{length}\n\n") as client:
            assert client.recv(1 << 16).startswith(b"HTTP/1.0 413")
    assert worker.post("/suspend", b" " * (64 << 10))[0] == 400
    assert not worker.manager.snapshot().suspended


# --- clients


def test_a_hundred_clients_at_once(worker: Worker) -> None:
    with ThreadPoolExecutor(100) as pool:
        with worker.manager.phase("log_prob"):
            futures = [pool.submit(worker.post, "/suspend") for _ in range(100)]
            until(lambda: len(worker.suspension.asked) == 100)
        answers = [future.result(60) for future in futures]
    assert {(code, answer["epoch"], answer["suspended"]) for code, answer in answers} == {
        (200, 1, True)
    }


def test_a_client_that_dies_is_forgotten(worker: Worker) -> None:
    """Its thread ends, and nobody is suspended who would not be resumed."""
    body = b'{"deadline_seconds": 3600}'
    head = f"POST /suspend HTTP/1.1\nAuthorization: Bearer {TOKEN}\nContent-Length: {len(body)}\n\n"
    with worker.manager.phase("log_prob"):
        clients = [worker.raw(head) for _ in range(3)]
        for client in clients:
            client.sendall(body)
        until(lambda: len(worker.suspension.asked) == 3)
        for client in clients:
            client.close()
        until(lambda: not worker.suspension.asked)
        until(lambda: threading.active_count() == worker.threads + 1)
    with worker.manager.phase("log_prob"):
        assert worker.manager.snapshot().suspended_seconds < 1


# --- the commands


def test_the_commands(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PLACEMENT_CONTROL_TOKEN", TOKEN)
    folder = tmp_path / "workers"
    workers = [Worker(discovery=folder, identity=Identity(rank=rank)) for rank in range(2)]
    assert main(["suspend", str(folder), "--deadline", "5", "--resume-after", "600"]) == 0
    lines = [f"node0/rank{rank}: suspended, epoch 1, 0 on the device" for rank in range(2)]
    assert capsys.readouterr().out.splitlines() == lines
    assert all(worker.manager.snapshot().suspended for worker in workers)
    assert main(["resume", str(folder)]) == 0
    assert "node0/rank1: not suspended, epoch 1" in capsys.readouterr().out
    with workers[1].manager.phase("log_prob"):
        assert main(["suspend", str(folder), "--deadline", "0.05"]) == 1
    out = capsys.readouterr().out
    assert "node0/rank0: suspended, epoch 2" in out
    assert "rank1: http://127.0.0.1" in out
    assert "on the device: actor" in out
    for worker in workers:
        worker.manager.close()


def test_the_command_does_not_ask_another_worker(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker was killed, and one of another run has its port."""
    monkeypatch.setenv("PLACEMENT_CONTROL_TOKEN", TOKEN)
    stranger = Worker(identity=Identity(run="another", rank=3))
    killed = Target.of(f"127.0.0.1:{stranger.server.port}", Identity(run="ours", rank=3))
    file = tmp_path / "ours.node0-rank3.json"
    file.write_text(as_json([killed]))
    assert main(["suspend", str(tmp_path)]) == 1
    out = capsys.readouterr().out
    assert "is another worker now" in out
    assert "Remove the file" in out
    assert main(["status", str(tmp_path)]) == 1
    assert "is another worker now" in capsys.readouterr().out
    assert not stranger.manager.snapshot().suspended
    file.write_text(as_json([stranger.server.target]))  # type: ignore[list-item]
    monkeypatch.setenv("PLACEMENT_CONTROL_TOKEN", "x" * len(TOKEN))
    assert main(["suspend", str(tmp_path)]) == 1
    assert "PLACEMENT_CONTROL_TOKEN is not the token of this worker" in capsys.readouterr().out
    monkeypatch.setenv("PLACEMENT_CONTROL_TOKEN", TOKEN)
    assert main(["suspend", str(tmp_path)]) == 0
    stranger.manager.close()


def test_the_command_sends_no_token_to_another_server(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PLACEMENT_CONTROL_TOKEN", TOKEN)
    seen = []

    class Stranger(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            seen.append(str(self.headers))
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b'{"epoch": 1, "suspended": true, "resident_bytes": 0}')

        do_POST = do_GET  # noqa: N815 (the base class wants this name)

    with ThreadingHTTPServer(("127.0.0.1", 0), Stranger) as server:
        begun = ThreadPoolExecutor(1).submit(server.serve_forever)
        assert main(["suspend", f"http://127.0.0.1:{server.server_port}"]) == 1
        server.shutdown()
        begun.result(30)
    assert "is no placement worker" in capsys.readouterr().out
    assert seen
    assert TOKEN not in "".join(seen)


@pytest.mark.parametrize(
    ("body", "length"), [(b"one\nanother: all is well", 1000), (b"x" * (1 << 20), None)]
)
def test_the_command_has_one_line_for_a_refusal_that_is_cut_or_long(
    body: bytes,
    length: int | None,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PLACEMENT_CONTROL_TOKEN", TOKEN)

    class Dying(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b'[{"name": "dying", "labels": {}}]')

        def do_POST(self) -> None:
            self.send_response(409)
            if length is not None:
                self.send_header("Content-Length", str(length))
            self.end_headers()
            self.wfile.write(body)

    with ThreadingHTTPServer(("127.0.0.1", 0), Dying) as server:
        begun = ThreadPoolExecutor(1).submit(server.serve_forever)
        assert main(["suspend", f"http://127.0.0.1:{server.server_port}"]) == 1
        server.shutdown()
        begun.result(30)
    out = capsys.readouterr().out
    assert out.count("\n") == 1
    assert f"409 Conflict: {body[:3].decode()}" in out
    assert len(out) < 11_000


def test_the_command_fails_where_there_is_no_worker(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PLACEMENT_CONTROL_TOKEN", TOKEN)
    assert main(["suspend", str(tmp_path)]) == 1
    assert "no worker has announced itself in" in capsys.readouterr().err


def test_the_command_says_if_a_suspension_is_over_already(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PLACEMENT_CONTROL_TOKEN", TOKEN)
    worker = Worker()
    assert main(["suspend", worker.server.url, "--resume-after", "1e-9"]) == 1
    assert "not suspended, epoch 1" in capsys.readouterr().out
    worker.manager.close()


def test_the_command_refuses_a_time_that_cannot_be_waited(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PLACEMENT_CONTROL_TOKEN", TOKEN)
    for seconds in ("1e300", "inf", "nan", "0", "-1"):
        with pytest.raises(SystemExit):
            main(["suspend", "http://127.0.0.1:9", f"--deadline={seconds}"])
        assert "is not a number of seconds above 0" in capsys.readouterr().err


def test_the_commands_need_a_token(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PLACEMENT_CONTROL_TOKEN", TOKEN)
    assert main(["resume", "http://127.0.0.1:9"]) == 1
    assert "does not answer" in capsys.readouterr().out
    for token, error in (
        ("", "set PLACEMENT_CONTROL_TOKEN"),
        ("first-line\nsecond", "visible ASCII"),
    ):
        monkeypatch.setenv("PLACEMENT_CONTROL_TOKEN", token)
        assert main(["suspend", "http://127.0.0.1:9"]) == 1
        told = capsys.readouterr()
        assert error in told.err
        assert "first-line" not in told.out + told.err
