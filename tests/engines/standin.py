"""What the stand-ins of rollout engines' servers share: HTTP on loopback, and memory on a simulated device.

What would corrupt or kill the real engine is noted in `accidents`, and kills the
stand-in where it kills the real one: from then on connections break.
"""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import parse_qs, urlsplit

from placement.core.errors import DeviceMemoryError
from placement.devices.memory import Chunk
from placement.testing import SimulatedDevice

CHUNK = 4096
CAPACITY = 64 * CHUNK
TAG_BYTES = {"weights": 8 * CHUNK, "kv_cache": 24 * CHUNK, "cuda_graph": 2 * CHUNK}
GARBAGE = "!!!!"
"""What a model says whose weights were never filled (vllm#29341)."""

Reply = tuple[int, Any]
"""Status and body; `...` for an empty one."""
Routes = dict[str, Callable[[Any, dict[str, list[str]], Any], Reply]]


class Memory:
    """What an engine holds on the device, by tag, beside the manager under test."""

    capacity_bytes = CAPACITY
    chunk_bytes = CHUNK
    tag_bytes: ClassVar = TAG_BYTES

    def __init__(self, shared: Path, tags: tuple[str, ...]) -> None:
        self._device = SimulatedDevice(self.capacity_bytes, chunk_bytes=self.chunk_bytes, shared_with=shared)
        self._chunks: dict[str, list[Chunk]] = {}
        self.is_moving = True
        for tag in tags:
            self.take(tag)

    def take(self, tag: str) -> None:
        chunks: list[Chunk] = []
        try:
            for _ in range(self.tag_bytes[tag] // self.chunk_bytes):
                chunks.append(self._device.create(self.chunk_bytes))
        except DeviceMemoryError:
            for chunk in chunks:
                self._device.release(chunk)
            raise
        self._chunks[tag] = chunks

    def give(self, tag: str) -> None:
        if self.is_moving:
            for chunk in self._chunks.pop(tag):
                self._device.release(chunk)

    @property
    def tags(self) -> set[str]:
        return {*self._chunks}


class StandIn:
    """A server on loopback. A test sets what goes wrong, and reads what was sent."""

    memory_type: ClassVar = Memory

    def __init__(self, shared: Path, tags: tuple[str, ...]) -> None:
        self.memory = self.memory_type(shared, tags)
        self.sent: list[str] = []
        """The requests that do something, in order: "POST /sleep?level=1"."""
        self.accidents: list[str] = []
        self.in_flight = 0
        self.aborted = 0
        self.weights = "disk"
        """What the model would say: whose weights it has."""
        self.is_dead = False
        self.failing: dict[str, Reply] = {}
        """Routes that answer with this, and do nothing."""
        self.hanging: set[str] = set()
        self._let_go = threading.Event()
        self._lock = threading.Lock()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=lambda: self._server.serve_forever(poll_interval=0.01), daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._let_go.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    routes: ClassVar[Routes]
    reading: ClassVar[frozenset[str]] = frozenset()
    """Routes that change nothing, with the method GET."""

    def generate(self) -> str:
        """What a request would get now, by whatever way it comes."""
        if self.memory.tags < {"weights", "kv_cache"}:
            self.accidents.append("a forward on memory that was given away")
        return self.weights

    def answer(self, method: str, target: str, body: Any) -> Reply:
        parts = urlsplit(target)
        if parts.path not in self.routes:
            return 404, {"detail": "Not Found"}
        if (method == "GET") is not (parts.path in self.reading):
            return 405, {"detail": "Method Not Allowed"}
        if parts.path not in self.reading and parts.path != "/flush_cache":
            self.sent.append(f"{method} {target}" if body is None else f"{method} {target} {json.dumps(body)}")
        if parts.path in self.hanging:
            self._let_go.wait(20)
            return 503, ...
        if parts.path in self.failing:
            return self.failing[parts.path]
        with self._lock:
            return self.routes[parts.path](self, parse_qs(parts.query), body)

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        standin = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                self._serve("GET")

            def do_POST(self) -> None:
                self._serve("POST")

            def _serve(self, method: str) -> None:
                length = int(self.headers.get("Content-Length") or 0)
                raw = self.rfile.read(length)
                status, said = standin.answer(method, self.path, json.loads(raw) if raw else None)
                if standin.is_dead:
                    self.close_connection = True
                    self.connection.close()
                    return
                payload = said.encode() if isinstance(said, str) else b"" if said is ... else json.dumps(said).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(payload)))
                self.end_headers()
                self.wfile.write(payload)

            def log_message(self, *_: Any) -> None:
                pass

            def handle(self) -> None:
                with contextlib.suppress(OSError, ValueError):  # a client that did not wait
                    super().handle()

        return Handler
