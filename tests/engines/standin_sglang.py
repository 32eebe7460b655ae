"""Stand-ins of SGLang's server: routes, status codes, bodies, and what it dies of. Each behaviour names the file that it follows."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

from placement.core.errors import DeviceMemoryError
from tests.engines.standin import GARBAGE, Reply, Routes, StandIn


class Sglang0523(StandIn):
    """SGLang 0.5.23: sglang/srt/entrypoints/http_server.py, sglang/srt/managers/scheduler_components/weight_updater.py."""

    info_route = "/server_info"
    tags: ClassVar = ("weights", "kv_cache", "cuda_graph")

    def __init__(self, shared: Path, *, keeps_weights: bool = False, has_saver: bool = True) -> None:
        super().__init__(shared, self.tags)
        self.memory.is_moving = has_saver
        self.settings = {"enable_memory_saver": has_saver, "enable_weights_cpu_backup": keeps_weights, "startup_time": {"total": 12.5}}
        self.offload_tags: set[str] = set()
        self.is_paused = False
        self.host_copy: str | None = None

    def die(self, why: str) -> Reply:
        self.accidents.append(why)
        self.is_dead = True
        return 500, ...

    def answer(self, method: str, target: str, body: Any) -> Reply:
        if method == "POST" and body is None and target != "/flush_cache":
            return 400, {"object": "error", "message": "Field required", "type": "Bad Request", "code": 400}
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
                self.host_copy = self.weights if self.settings["enable_weights_cpu_backup"] else None
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
    """SGLang 0.5.9: the same core; its settings have the older name only, and no time of the start."""

    routes: ClassVar[Routes] = {route: call for route, call in Sglang0523.routes.items() if route != "/server_info"}

    def __init__(self, shared: Path, **options: Any) -> None:
        super().__init__(shared, **options)
        del self.settings["startup_time"]
