"""Classes of released engines, on a machine without a GPU.

`python -m tests.engines.released FOLDER` fetches the few files that the tests read, from the wheels
on the package index, as pip looks into a wheel that it does not fetch (2 MB of 3 GB).
`ENGINE_RELEASES` names the folder; without it, `.venv/engines` is looked for, which `make test`
fills.

`Vllm` imports vLLM's own allocator and sleep-mode backends from these files. Under them is a `Card`
in place of the C extension that maps and unmaps memory.
"""

from __future__ import annotations

import ast
import contextlib
import copy
import ctypes
import functools
import importlib
import logging
import os
import shutil
import signal
import sys
import zipfile
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from placement.core.errors import DeviceMemoryError
from placement.devices.base import poison_bytes
from placement.devices.host.slab import Slab
from placement.devices.memory import Copy, Direction
from placement.testing import SimulatedDevice

ROOT = Path(__file__).parents[2]
VLLM = (
    *("0.25.1", "0.26.0", "0.27.1", "0.28.0", "0.29.0"),
    *("0.30.0", "0.31.0", "0.32.0", "0.33.0"),
)
"""One release of each minor version that has sleep-mode backends. docs/engines.md has the same."""
SGLANG = ("0.5.11", "0.5.12", "0.5.14", "0.5.16", "0.5.20", "0.5.23")
FILES = {
    "vllm": (
        "device_allocator/__init__.py",
        "device_allocator/alloc_conf.py",
        "device_allocator/cumem.py",
        "device_allocator/sleep_mode_backend.py",
        "engine/arg_utils.py",
        "v1/worker/gpu_worker.py",
        "v1/worker/worker_base.py",
    ),
    "sglang": (
        "srt/plugins/__init__.py",
        "srt/plugins/hook_registry.py",
        "srt/utils/torch_memory_saver_adapter.py",
    ),
}


def folder_of(package: str, version: str) -> Path:
    """The folder with a version's files. Skips where they were not fetched."""
    folder = Path(os.environ.get("ENGINE_RELEASES") or ROOT / ".venv" / "engines")
    found = folder / f"{package}-{version}"
    if not found.exists():
        pytest.skip(f"no files of {package} {version}: see {Path(__file__).name}")
    return found


def fetch(folder: Path) -> None:
    """Fetch the files of every version that is not in the folder yet."""
    from pip._internal.models.index import PyPI
    from pip._internal.network.lazy_wheel import LazyZipOverHTTP
    from pip._internal.network.session import PipSession

    session = PipSession(retries=3)
    for package, versions in (("vllm", VLLM), ("sglang", SGLANG)):
        missing = [each for each in versions if not (folder / f"{package}-{each}").exists()]
        if not missing:
            continue
        accept = {"Accept": "application/vnd.pypi.simple.v1+json"}
        found = session.get(f"{PyPI.simple_url}/{package}/", headers=accept).json()["files"]
        for version in missing:
            name = f"{package}-{version}"
            url = next(
                each["url"]
                for each in found
                if each["filename"].startswith(f"{name}-") and each["filename"].endswith(".whl")
            )
            partial = folder / f"{name}.partial"
            shutil.rmtree(partial, ignore_errors=True)
            with zipfile.ZipFile(LazyZipOverHTTP(url, session)) as wheel:
                for each in {f"{package}/{file}" for file in FILES[package]} & {*wheel.namelist()}:
                    wheel.extract(each, partial)
            partial.rename(folder / name)


class Modules:
    """Modules of one version that are imported from its files, beside others that stand in, for the
    length of a test."""

    def __init__(self, patch: pytest.MonkeyPatch, package: str, version: str) -> None:
        self._patch, self.folder = patch, folder_of(package, version)

    def forget(self, *names: str) -> None:
        """Have these imported anew, and forgotten at the end of the test."""
        for name in names:
            self._patch.setitem(sys.modules, name, ModuleType(name))
            del sys.modules[name]

    def package(self, name: str) -> None:
        """Have a package whose modules come from the files, and whose own file is not run."""
        self.module(name).__path__ = [str(self.folder.joinpath(*name.split(".")))]

    def module(self, name: str, **members: Any) -> ModuleType:
        made = ModuleType(name)
        made.__dict__.update(members)
        self._patch.setitem(sys.modules, name, made)
        return made


class Card:
    """Device memory for `CuMemAllocator`. What is mapped has poison until it is written, and what
    is not mapped may not be touched."""

    def __init__(self, capacity_bytes: int) -> None:
        self.capacity_bytes = capacity_bytes
        self.blocks: dict[int, Slab] = {}
        self.mapped: dict[int, int] = {}
        self.fails_in = -1
        """The number of blocks that can still be mapped; negative: as many as there is room for."""
        self.log: list[tuple[str, int]] = []
        self.memory: dict[int, int] = {}
        """Bytes by the driver's handle of memory that was created and not released."""
        self._behind: dict[int, int] = {}
        """The memory behind each mapped address."""
        self.usable: set[int] = set()
        """Mapped addresses that the device may read and write."""
        self._created = 0

    @property
    def free_bytes(self) -> int:
        return self.capacity_bytes - sum(self.memory.values())

    def reserve(self, nbytes: int) -> int:
        slab = Slab(nbytes)
        self.blocks[slab.address] = slab
        return slab.address

    def has_room(self, nbytes: int) -> bool:
        return nbytes <= self.free_bytes and self.fails_in != 0

    def create(self, nbytes: int) -> int:
        self._created += 1
        self.memory[self._created] = nbytes
        return self._created

    def map(self, address: int, memory: int) -> None:
        assert address not in self.mapped, "mapped twice"
        self.fails_in -= 1
        nbytes = self.memory[memory]
        self.mapped[address], self._behind[address] = nbytes, memory
        self.log.append(("map", nbytes))
        ctypes.memmove(address, poison_bytes(0, nbytes), nbytes)

    def unmap(self, address: int, nbytes: int) -> int:
        assert self.mapped.pop(address) == nbytes, "not mapped"
        self.usable.discard(address)
        self.log.append(("unmap", nbytes))
        ctypes.memset(address, 0xAA, nbytes)
        return self._behind.pop(address)

    def back(self, address: int, nbytes: int) -> int:
        """Have new memory behind an address. Returns its handle."""
        memory = self.create(nbytes)
        self.map(address, memory)
        self.usable.add(address)
        return memory

    def take(self, address: int, nbytes: int) -> int:
        """Undo `back`."""
        memory = self.unmap(address, nbytes)
        del self.memory[memory]
        return memory

    def create_and_map(self, device: int, nbytes: int, address: int, place: int) -> None:
        """As in the C extension: `place` is the address of the word for the memory's handle."""
        if not self.has_room(nbytes):
            raise RuntimeError("CUDA Error: out of memory at csrc/cumem_allocator.cpp")
        ctypes.c_uint64.from_address(place).value = self.back(address, nbytes)

    def unmap_and_release(self, device: int, nbytes: int, address: int, place: int) -> None:
        memory = self.take(address, nbytes)
        assert memory == ctypes.c_uint64.from_address(place).value, "another block's memory"

    def check(self, address: int, nbytes: int) -> None:
        assert any(
            base <= address and address + nbytes <= base + self.mapped[base] for base in self.usable
        ), "a copy from or to memory that is not mapped, or may not be used"

    def memcpy(self, target: int, source: int, nbytes: int) -> None:
        """The runtime's `cudaMemcpy`, in either direction."""
        self.check(target if target in self.blocks else source, nbytes)
        ctypes.memmove(target, source, nbytes)


class CardDriver:
    """The driver's calls that the backend makes for itself, for a card."""

    property = "of a GPU"
    access = ("this GPU", "another GPU")

    def __init__(self, card: Card) -> None:
        self.card = card
        self.fails = ""
        """The function that fails."""
        self.is_interrupted_in = ""
        """The function in which Ctrl-C comes once."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        pass

    def call(self, function: str, *arguments: Any) -> Any:
        if function == self.fails:
            raise RuntimeError(f"{function}: CUDA_ERROR_UNKNOWN")
        value = getattr(self, function)(*arguments)
        if function == self.is_interrupted_in:
            self.is_interrupted_in = ""
            signal.raise_signal(signal.SIGINT)
        return value

    def failed(self, function: str, *arguments: Any) -> str | None:
        try:
            self.call(function, *arguments)
        except RuntimeError as error:
            return str(error)
        return None

    def cuMemGetAllocationPropertiesFromHandle(self, memory: int) -> str:
        assert memory in self.card.memory
        return "of vLLM's blocks"

    def cuMemCreate(self, nbytes: int, properties: str, flags: int) -> int:
        assert properties == "of vLLM's blocks"
        if not self.card.has_room(nbytes):
            raise DeviceMemoryError("cuMemCreate: CUDA_ERROR_OUT_OF_MEMORY: out of memory")
        return self.card.create(nbytes)

    def cuMemMap(self, address: int, nbytes: int, start: int, memory: int, flags: int) -> None:
        assert self.card.memory[memory] == nbytes
        self.card.map(address, memory)

    def cuMemSetAccess(
        self, address: int, nbytes: int, access: tuple[str, ...], count: int
    ) -> None:
        assert access == ("this GPU",)
        assert count == 1
        assert self.card.mapped[address] == nbytes
        self.card.usable.add(address)

    def cuMemUnmap(self, address: int, nbytes: int) -> None:
        if address not in self.card.mapped:
            raise RuntimeError("cuMemUnmap: CUDA_ERROR_INVALID_VALUE")
        self.card.unmap(address, nbytes)

    def cuMemRelease(self, memory: int) -> None:
        del self.card.memory[memory]


class CardDevice(SimulatedDevice):
    """A device whose copies go between a card and the host."""

    def __init__(self, card: Card) -> None:
        super().__init__(1 << 20)
        self.card = card
        self.driver = CardDriver(card)
        self.copied: list[int] = []
        self.fails_in = -1
        self.flips: set[int] = set()
        """Addresses of blocks of which a bit is wrong each time that they arrive."""

    def copy(self, copies: Iterable[Copy], direction: Direction) -> None:
        for each in copies:
            if self.fails_in == 0:
                raise RuntimeError("cuMemcpy: CUDA_ERROR_ECC_UNCORRECTABLE")
            self.fails_in -= 1
            self.card.check(each.device_address, each.nbytes)
            self.card.log.append((direction, each.nbytes))
            self.copied.append(each.nbytes)
            super().copy([each], direction)
            if direction == "to_device" and each.device_address in self.flips:
                ctypes.c_uint8.from_address(each.device_address + 5).value ^= 1


class Vllm:
    """vLLM of one version: its allocator on a card, and its backends. Its tensors are blocks of
    whole pages."""

    def __init__(self, patch: pytest.MonkeyPatch, version: str, capacity_bytes: int) -> None:
        self.version = version
        self.modules = Modules(patch, "vllm", version)
        self.folder = self.modules.folder
        self.card = Card(capacity_bytes)
        self.device = CardDevice(self.card)
        self.places: list[ctypes.c_uint64] = []
        self._stand_in()
        for name, given in (
            ("synchronize", lambda *_: None),
            ("empty_cache", lambda: None),
            ("get_memory_info", lambda *_: (self.card.free_bytes, self.card.capacity_bytes)),
        ):
            patch.setattr(torch.accelerator, name, given)
        patch.setattr(torch.cuda, "synchronize", lambda *_: None)
        self.cumem = importlib.import_module("vllm.device_allocator.cumem")
        self.backends = importlib.import_module("vllm.device_allocator.sleep_mode_backend")
        self.allocator = self.cumem.CuMemAllocator.get_instance()
        self.backend = importlib.import_module("placement.engines.vllm_backend")
        patch.setattr(self.backend.gc, "collect", int)  # takes long, and finds nothing here
        patch.setattr(self.backend, "select_device", lambda _: self.device)
        patch.setattr(self.backend.PlacementBackend, "is_supported", lambda: True)

    def _stand_in(self) -> None:
        allocator = "vllm.device_allocator"
        names = (f"{allocator}.{each}" for each in ("cumem", "sleep_mode_backend", "alloc_conf"))
        self.modules.forget(allocator, *names, "placement.engines.vllm_backend")
        communicators = "vllm.distributed.device_communicators"
        packages = "vllm", "vllm.v1", "vllm.v1.worker", "vllm.engine", "vllm.utils"
        for name in (*packages, "vllm.distributed", communicators):
            self.modules.package(name)
        platform = SimpleNamespace(
            is_cuda_alike=lambda: True, is_rocm=lambda: False, is_xpu=lambda: False
        )
        runtime = SimpleNamespace(cudaMemcpy=self.card.memcpy)
        module = self.modules.module
        module("vllm.logger", init_logger=logging.getLogger)
        module("vllm.platforms", current_platform=platform)
        module("vllm.utils.system_utils", find_loaded_library=lambda _: None)
        module("vllm.utils.torch_utils", PIN_MEMORY=False)
        module(f"{communicators}.cuda_wrapper", CudaRTLibrary=lambda: runtime)
        module(
            "vllm.cumem_allocator",
            init_module=None,
            python_create_and_map=self.card.create_and_map,
            python_unmap_and_release=self.card.unmap_and_release,
        )

    def allocate(self, tag: str, *values: torch.Tensor) -> list[torch.Tensor]:
        """Tensors with these values, each in a block of its own, as in `use_memory_pool(tag)`."""
        self.allocator.current_tag = tag
        tensors = []
        for value in values:
            nbytes = -(-value.nbytes // 4096) * 4096
            address = self.card.reserve(nbytes)
            self.places.append(ctypes.c_uint64())
            handle = (0, nbytes, address, ctypes.addressof(self.places[-1]))
            self.cumem.create_and_map(handle)
            self.allocator.python_malloc_callback(handle)
            view = self.card.blocks[address].view(0, value.nbytes).view(value.dtype)
            tensors.append(view.view(value.shape).copy_(value))
        return tensors

    def free(self, tensor: torch.Tensor) -> None:
        """What happens when torch gives a block back."""
        asleep = self.allocator.pointer_to_data[tensor.data_ptr()].is_asleep
        handle = self.allocator.python_free_callback(tensor.data_ptr())
        if not asleep:
            self.cumem.unmap_and_release(handle)

    def tags_asleep(self) -> set[str]:
        return {data.tag for data in self.allocator.pointer_to_data.values() if data.is_asleep}

    def worker(self, **model_config: Any) -> Any:
        """vLLM's worker, with its own methods about sleep, in its own wrapper."""
        config = SimpleNamespace(
            enable_sleep_mode=True,
            enable_nccl_comm_suspend=False,
            sleep_mode_backend="cumem",
            sleep_preserve_parameter_names=[],
        )
        vars(config).update(model_config)
        worker = methods(self.folder / "vllm/v1/worker/gpu_worker.py", "Worker", _OF_A_WORKER)()
        model = torch.nn.Module()
        worker.vllm_config = SimpleNamespace(model_config=config)
        worker.model_config = config
        worker._sleep_mode_backend = None
        worker._sleep_saved_buffers, worker._sleep_saved_draft_buffers = {}, {}
        worker._sleep_saved_parameters = {}
        worker._sleep_rebuild_draft_metadata_buffers = False
        worker.get_draft_model = lambda: None
        worker.model_runner = SimpleNamespace(model=model, post_kv_cache_wake_up=lambda: None)
        worker.init_device = worker.synchronize_device = lambda: None
        worker.compile_or_warm_up_model = lambda: "times"
        return worker

    def wrapped(self, worker: Any) -> Any:
        """A worker in vLLM's `WorkerWrapperBase`, as it is after `init_worker`."""
        wrapper = sys.modules["vllm.v1.worker.worker_base"].WorkerWrapperBase()  # type: ignore[attr-defined]
        wrapper.worker, wrapper.vllm_config = worker, worker.vllm_config
        wrapper._worker_extension_cls = None
        return wrapper

    def load_plugin(self) -> None:
        """Load the plug-in as vLLM does, with what it imports of vLLM beside the backends."""
        file = self.folder / "vllm/v1/worker/worker_base.py"
        wrapper = methods(file, "WorkerWrapperBase", ("init_device", "__getattr__"))
        self.modules.module("vllm.v1.worker.worker_base", WorkerWrapperBase=wrapper)
        source = (self.folder / "vllm/engine/arg_utils.py").read_text()
        fields = {
            each.target.id: None
            for each in _class(source, "EngineArgs").body
            if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name)
        }
        self.modules.module("vllm.engine.arg_utils", EngineArgs=type("EngineArgs", (), fields))
        importlib.import_module("placement.engines.vllm_plugin").register()


_OF_A_WORKER = (
    "check_health",
    "sleep",
    "wake_up",
    "discard",
    "sleep_mode_backend",
    "_get_sleep_mode_backend",
    "_save_sleep_parameters",
    "_get_sleep_parameters",
)


def methods(file: Path, name: str, wanted: Iterable[str]) -> Any:
    """A class of a file, with these of its methods only: the rest needs all of vLLM."""
    found = copy.copy(_class(file.read_text(), name))
    found.body = [
        each for each in found.body if isinstance(each, ast.FunctionDef) and each.name in wanted
    ]
    found.bases, found.decorator_list = [], []
    future = ast.parse("from __future__ import annotations").body
    tree = ast.Module([*future, found], [])
    given: dict[str, Any] = {
        "torch": torch,
        "time": SimpleNamespace(monotonic=float, sleep=None),
        "logger": logging.getLogger("vllm"),
        "current_platform": sys.modules["vllm.platforms"].current_platform,  # type: ignore[attr-defined]
        "format_gib": str,
        "has_kv_transfer_group": lambda: False,
        "set_current_vllm_config": contextlib.nullcontext,
    }
    exec(compile(ast.fix_missing_locations(tree), str(file), "exec"), given)
    return given[name]


@functools.cache
def _class(source: str, name: str) -> ast.ClassDef:
    return next(
        each
        for each in ast.parse(source).body
        if isinstance(each, ast.ClassDef) and each.name == name
    )


if __name__ == "__main__":
    fetch(Path(sys.argv[1]))
