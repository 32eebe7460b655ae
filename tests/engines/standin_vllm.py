"""Stand-ins of vLLM's server: routes, status codes, bodies and traps. Each behaviour names the file that it follows."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any, ClassVar

from placement.core.errors import DeviceMemoryError
from tests.engines.standin import GARBAGE, Reply, Routes, StandIn


def _error(code: int, message: str) -> Reply:
    return code, {"error": {"message": message, "type": "Error", "param": None, "code": code}}


class Vllm033(StandIn):
    """vLLM 0.33.0: vllm/entrypoints/serve/dev/sleep/api_router.py, vllm/entrypoints/rl/online/api_router.py.

    `sleep` pauses the scheduler and the last wake resumes it (vllm/v1/engine/core.py).
    """

    def __init__(self, shared: Path) -> None:
        super().__init__(shared, ("weights", "kv_cache"))
        self.sleeping: set[str] = set()
        self.is_paused = False
        self.host_copy: str | None = None
        self.prefix_cache = ""

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
            return _error(500, "Call to wake_up method failed: CUDA Error: out of memory at /csrc/cumem_allocator.cpp:163")
        if not self.sleeping:
            self.is_paused = False
        return 200, {"status": "sleeping" if self.sleeping else "awake", "tags": tags}

    def is_sleeping(self, query: dict[str, list[str]], body: Any) -> Reply:
        return 200, {"is_sleeping": bool(self.sleeping) or self.is_paused}  # vllm/v1/engine/core.py: is_sleeping

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

    reading = frozenset({"/is_sleeping", "/is_paused"})
    routes: ClassVar[Routes] = {
        "/sleep": sleep,
        "/wake_up": wake_up,
        "/is_sleeping": is_sleeping,
        "/release_kv_cache_memory": release_kv_cache_memory,
        "/pause": pause,
        "/resume": resume,
        "/is_paused": paused,
        "/reset_prefix_cache": reset_prefix_cache,
    }


class Vllm024(Vllm033):
    """vLLM 0.24.0: one flag for asleep, answers of 200 with nothing in them, and a pause that a wake does not end."""

    def executor_sleep(self, level: int) -> None:
        if self.sleeping:
            return  # "Executor is already sleeping.", although after a partial wake the weights are back
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
        **{path: route for path, route in Vllm033.routes.items() if path != "/release_kv_cache_memory"},
        "/sleep": sleep,
        "/wake_up": wake_up,
        "/is_sleeping": is_sleeping,
    }
