"""Stand-ins of rollout engines' servers: HTTP on loopback, and memory on a simulated device.

Routes, status codes, bodies and traps are vLLM's and SGLang's; each behaviour names the file that
it follows. What would corrupt or kill the real engine is noted in `accidents`, and kills the
stand-in where it kills the real one: from then on connections break.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
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
        self._device = SimulatedDevice(
            self.capacity_bytes, chunk_bytes=self.chunk_bytes, shared_with=shared
        )
        self._chunks: dict[str, Chunk] = {}
        self.is_moving = True
        for tag in tags:
            self.take(tag)

    def take(self, tag: str) -> None:
        self._chunks[tag] = self._device.create(self.tag_bytes[tag])

    def give(self, tag: str) -> None:
        if self.is_moving:
            self._device.release(self._chunks.pop(tag))

    @property
    def tags(self) -> set[str]:
        return {*self._chunks}


class StandIn:
    """A server on loopback. A test sets what goes wrong, and reads what was sent."""

    memory_type: ClassVar = Memory

    def __init__(self, shared: Path, tags: tuple[str, ...], port: int = 0) -> None:
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
        self.listen(port)

    def close(self) -> None:
        self._let_go.set()
        self.end()

    def end(self) -> None:
        """Nobody listens there any more."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def listen(self, port: int = 0) -> None:
        self._server = ThreadingHTTPServer(("127.0.0.1", port), self._handler())
        self._server.daemon_threads = True
        self.port = self._server.server_address[1]
        self.url = f"http://127.0.0.1:{self.port}"
        serve = self._server.serve_forever
        self._thread = threading.Thread(target=lambda: serve(poll_interval=0.01), daemon=True)
        self._thread.start()

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
        if parts.path not in self.reading | {"/flush_cache", "/collective_rpc"}:
            self.sent.append(
                f"{method} {target}" if body is None else f"{method} {target} {json.dumps(body)}"
            )
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
                payload = (
                    said.encode()
                    if isinstance(said, str)
                    else b""
                    if said is ...
                    else json.dumps(said).encode()
                )
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


# --- vLLM


def _error(code: int, message: str) -> Reply:
    return code, {"error": {"message": message, "type": "Error", "param": None, "code": code}}


class Vllm033(StandIn):
    """vLLM 0.33.0: vllm/entrypoints/serve/dev/sleep/api_router.py,
    vllm/entrypoints/rl/online/api_router.py.

    `sleep` pauses the scheduler and the last wake resumes it (vllm/v1/engine/core.py).
    """

    def __init__(self, shared: Path, port: int = 0) -> None:
        super().__init__(shared, ("weights", "kv_cache"), port)
        self.sleeping: set[str] = set()
        self.is_paused = False
        self.host_copy: str | None = None
        self.prefix_cache = ""
        self.started: float | None = 1795000000.25

    def restart(self) -> None:
        """The process is another one: everything is on the device again, from disk."""
        for tag in sorted(self.sleeping):
            self.memory.take(tag)
        self.sleeping, self.weights, self.is_paused, self.is_dead = set(), "disk", False, False
        if self.started is not None:
            self.started += 60

    # --- vllm/v1/executor/abstract.py

    def executor_sleep(self, level: int) -> None:
        if "weights" in self.sleeping:
            return  # "Executor is already sleeping."
        for tag in {"weights", "kv_cache"} - self.sleeping:
            self.memory.give(tag)
        self.host_copy = self.weights if level == 1 else None
        self.weights = GARBAGE
        self.sleeping |= {"weights", "kv_cache"}

    def executor_wake(self, tags: list[str] | None) -> None:
        if not self.sleeping:
            return  # "Executor is not sleeping."
        if tags and not set(tags) <= self.sleeping:
            self.accidents.append(f"wake of {tags}, asleep are {sorted(self.sleeping)}")
            return  # "Tag ... is not in sleeping tags"
        for tag in tags or sorted(self.sleeping):
            if tag not in self.memory.tags:
                self.memory.take(tag)
            if tag == "weights":
                self.weights = self.host_copy or GARBAGE
                self.host_copy = None
        self.sleeping -= set(tags or self.sleeping)

    # --- the routes

    def sleep(self, query: dict[str, list[str]], body: Any) -> Reply:
        level, mode = query.get("level", ["1"])[0], query.get("mode", ["abort"])[0]
        if level not in ("0", "1", "2") or mode not in ("abort", "wait", "keep"):
            return _error(400, "bad")
        self.pause({"mode": [mode]}, None)
        if level != "0":
            self.executor_sleep(int(level))
        return 200, {"status": "sleeping", "level": int(level)}

    def wake_up(self, query: dict[str, list[str]], body: Any) -> Reply:
        tags = query.get("tags")
        try:
            if tags is None or (tags := [tag for tag in tags if tag != "scheduling"]):
                self.executor_wake(tags)
        except DeviceMemoryError:
            return _error(
                500,
                "Call to wake_up method failed: CUDA Error: out of memory at "
                "/csrc/cumem_allocator.cpp:163",
            )
        if not self.sleeping:
            self.is_paused = False
        return 200, {"status": "sleeping" if self.sleeping else "awake", "tags": tags}

    def is_sleeping(self, query: dict[str, list[str]], body: Any) -> Reply:
        # vllm/v1/engine/core.py: is_sleeping
        return 200, {"is_sleeping": bool(self.sleeping) or self.is_paused}

    def release_kv_cache_memory(self, query: dict[str, list[str]], body: Any) -> Reply:
        if not self.is_paused or self.in_flight or self.sleeping:
            return _error(500, "release_kv_cache_memory() requires a completed pause first")
        self.memory.give("kv_cache")
        self.sleeping.add("kv_cache")
        return 200, {"status": "kv_cache_released"}

    def pause(self, query: dict[str, list[str]], body: Any) -> Reply:
        if query.get("mode", ["abort"])[0] == "wait":
            self._lock.release()
            try:
                while self.in_flight and not self._let_go.is_set():
                    time.sleep(0.005)  # the test ends the requests, which nobody is told of
            finally:
                self._lock.acquire()
        else:
            self.aborted, self.in_flight = self.aborted + self.in_flight, 0
        self.is_paused = True
        return 200, {"status": "paused"}

    def resume(self, query: dict[str, list[str]], body: Any) -> Reply:
        self.is_paused = False
        return 200, {"status": "resumed"}

    def paused(self, query: dict[str, list[str]], body: Any) -> Reply:
        return 200, {"is_paused": self.is_paused}

    def reset_prefix_cache(self, query: dict[str, list[str]], body: Any) -> Reply:
        if "kv_cache" not in self.memory.tags:
            self.accidents.append("prefix cache reset without its memory")
        self.prefix_cache = ""
        return 200, {"success": True}

    def metrics(self, query: dict[str, list[str]], body: Any) -> Reply:
        # vllm/entrypoints/serve/instrumentator/metrics.py: prometheus_client's own of the process
        if self.started is None:  # several API servers
            return 200, "vllm:num_requests_running 0.0\n"
        return 200, f"vllm:num_requests_running 0.0\nprocess_start_time_seconds {self.started}\n"

    def collective_rpc(self, query: dict[str, list[str]], body: Any) -> Reply:
        # vllm/entrypoints/serve/dev/rpc/api_router.py
        return 200, {"results": self.workers(body["method"])}

    def workers(self, method: str) -> list[Any]:
        assert method == "check_health"
        return [None]

    reading = frozenset({"/is_sleeping", "/is_paused", "/metrics"})
    routes: ClassVar[Routes] = {
        "/sleep": sleep,
        "/wake_up": wake_up,
        "/is_sleeping": is_sleeping,
        "/release_kv_cache_memory": release_kv_cache_memory,
        "/pause": pause,
        "/resume": resume,
        "/is_paused": paused,
        "/reset_prefix_cache": reset_prefix_cache,
        "/metrics": metrics,
        "/collective_rpc": collective_rpc,
    }


class Vllm024(Vllm033):
    """vLLM 0.24.0: one flag for asleep, answers of 200 with nothing in them, and a pause that a
    wake does not end."""

    def executor_sleep(self, level: int) -> None:
        if self.sleeping:
            # "Executor is already sleeping.", although after a partial wake the weights are back
            return
        super().executor_sleep(level)

    def sleep(self, query: dict[str, list[str]], body: Any) -> Reply:
        if self.in_flight:
            self.accidents.append("a request in flight lost its memory")
        self.executor_sleep(int(query.get("level", ["1"])[0]))
        return 200, ...

    def wake_up(self, query: dict[str, list[str]], body: Any) -> Reply:
        paused = self.is_paused
        status, said = super().wake_up(query, body)
        self.is_paused = paused
        return (status, said) if status != 200 else (200, ...)

    def is_sleeping(self, query: dict[str, list[str]], body: Any) -> Reply:
        return 200, {"is_sleeping": bool(self.sleeping)}

    routes: ClassVar[Routes] = {
        **{
            path: route
            for path, route in Vllm033.routes.items()
            if path != "/release_kv_cache_memory"
        },
        "/sleep": sleep,
        "/wake_up": wake_up,
        "/is_sleeping": is_sleeping,
    }


# --- SGLang


class Sglang0523(StandIn):
    """SGLang 0.5.23: sglang/srt/entrypoints/http_server.py,
    sglang/srt/managers/scheduler_components/weight_updater.py."""

    info_route = "/server_info"
    tags: ClassVar = ("weights", "kv_cache", "cuda_graph")

    def __init__(
        self,
        shared: Path,
        port: int = 0,
        *,
        keeps_weights: bool = False,
        has_saver: bool = True,
    ) -> None:
        super().__init__(shared, self.tags, port)
        self.memory.is_moving = has_saver
        self.settings = {
            "enable_memory_saver": has_saver,
            "enable_weights_cpu_backup": keeps_weights,
            "startup_time": {"total": 12.5},
        }
        self.offload_tags: set[str] = set()
        self.is_paused = False
        self.host_copy: str | None = None

    def die(self, why: str) -> Reply:
        self.accidents.append(why)
        self.is_dead = True
        return 500, ...

    def answer(self, method: str, target: str, body: Any) -> Reply:
        if method == "POST" and body is None and target != "/flush_cache":
            return 400, {
                "object": "error",
                "message": "Field required",
                "type": "Bad Request",
                "code": 400,
            }
        return super().answer(method, target, body)

    @staticmethod
    def tags_of(body: Any) -> list[str]:
        return body.get("tags") or ["kv_cache", "weights", "cuda_graph"]  # GPU_MEMORY_ALL_TYPES

    def release(self, query: dict[str, list[str]], body: Any) -> Reply:
        if self.in_flight:
            return self.die("release_memory_occupation should be called only when server is idle.")
        for tag in self.tags_of(body):
            if tag in self.offload_tags:
                self.accidents.append(f"{tag} was released twice")
                continue
            self.offload_tags.add(tag)
            self.memory.give(tag)
            if tag == "weights" and self.settings["enable_memory_saver"]:
                self.host_copy = (
                    self.weights if self.settings["enable_weights_cpu_backup"] else None
                )
                self.weights = GARBAGE
        return 200, None

    def resume_memory(self, query: dict[str, list[str]], body: Any) -> Reply:
        for tag in self.tags_of(body):
            if tag not in self.offload_tags:
                return self.die(f"KeyError: {tag!r}")  # offload_tags.remove(tag) in the scheduler
            self.offload_tags.remove(tag)
            try:
                if tag not in self.memory.tags:
                    self.memory.take(tag)
            except DeviceMemoryError:
                return self.die("torch_memory_saver: out of memory")
            if tag == "weights":
                self.weights = self.host_copy or self.weights
        return 200, None

    def flush(self, query: dict[str, list[str]], body: Any) -> Reply:
        if "kv_cache" in self.offload_tags:
            return self.die("flush_cache without its memory")  # sglang#19029
        if self.in_flight:
            return 400, "Flush cache failed.\n"
        return 200, "Cache flushed.\nPlease check backend logs for more details.\n"

    def pause(self, query: dict[str, list[str]], body: Any) -> Reply:
        self.aborted, self.in_flight = self.aborted + self.in_flight, 0
        self.is_paused = True
        return 200, {"message": "Generation paused successfully.", "status": "ok"}

    def go_on(self, query: dict[str, list[str]], body: Any) -> Reply:
        self.is_paused = False
        return 200, {"message": "Generation continued successfully.", "status": "ok"}

    def info(self, query: dict[str, list[str]], body: Any) -> Reply:
        return 200, {**self.settings, "internal_states": [{}], "version": "0.5.23"}

    def restart(self) -> None:
        """The process is another one: everything is on the device again, from disk."""
        for tag in sorted(self.offload_tags):
            self.memory.take(tag)
        self.offload_tags, self.weights, self.is_paused, self.is_dead = set(), "disk", False, False
        self.settings["startup_time"] = {"total": 13.25}

    reading = frozenset({"/server_info", "/get_server_info"})
    routes: ClassVar[Routes] = {
        "/release_memory_occupation": release,
        "/resume_memory_occupation": resume_memory,
        "/flush_cache": flush,
        "/pause_generation": pause,
        "/continue_generation": go_on,
        "/server_info": info,
        "/get_server_info": info,
    }


class Sglang059(Sglang0523):
    """SGLang 0.5.9: the same core; its settings have the older name only, and no time of the
    start."""

    routes: ClassVar[Routes] = {
        route: call for route, call in Sglang0523.routes.items() if route != "/server_info"
    }

    def __init__(self, shared: Path, **options: Any) -> None:
        super().__init__(shared, **options)
        del self.settings["startup_time"]
