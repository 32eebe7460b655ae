"""The real cuda-bindings has every name that placement uses and takes the arguments that it gives.
Needs no GPU and no driver."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from placement.devices.cuda import driver

SOURCES = sorted(Path(driver.__file__).parent.glob("*.py"))

CALLS = """
import json
from cuda.bindings import driver as api

device = api.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
prop = api.CUmemAllocationProp()
prop.type = api.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
prop.location.type, prop.location.id = device, 3
access = []
for index in (2, 5):
    access.append(api.CUmemAccessDesc())
    access[-1].flags = api.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
    access[-1].location.type, access[-1].location.id = device, index
assert (prop.location.type, prop.location.id) == (device, 3), "the nested structure is a copy"
assert [each.location.id for each in access] == [2, 5], "the nested structure is a copy"
attribute = api.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED
option = api.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_RECOMMENDED
relaxed = api.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
step, at, stream = 2 << 20, 1 << 40, api.CUstream(64)
calls = {
    "cuDeviceGet": ((0,), 1),
    "cuDeviceGetAttribute": ((attribute, api.CUdevice(0)), 1),
    "cuDevicePrimaryCtxGetState": ((api.CUdevice(0),), 2),
    "cuDevicePrimaryCtxRetain": ((api.CUdevice(0),), 1),
    "cuCtxPushCurrent": ((api.CUcontext(64),), 0),
    "cuCtxPopCurrent": ((), 1),
    "cuCtxSynchronize": ((), 0),
    "cuMemGetAllocationGranularity": ((prop, option), 1),
    "cuMemAddressReserve": ((step, 0, 0, 0), 1),
    "cuMemAddressFree": ((at, step), 0),
    "cuMemCreate": ((step, prop, 0), 1),
    "cuMemRelease": ((64,), 0),
    "cuMemMap": ((at, step, 0, 64, 0), 0),
    "cuMemUnmap": ((at, step), 0),
    "cuMemSetAccess": ((at, step, access, len(access)), 0),
    "cuMemcpyHtoDAsync": ((at, step, 64, stream), 0),
    "cuMemcpyDtoHAsync": ((step, at, 64, stream), 0),
    "cuMemsetD8Async": ((at, 255, step, stream), 0),
    "cuMemHostRegister": ((step, step, 0), 0),
    "cuMemHostUnregister": ((step,), 0),
    "cuMemHostGetFlags": ((step,), 1),
    "cuThreadExchangeStreamCaptureMode": ((relaxed,), 1),
    "cuStreamCreate": ((api.CUstream_flags.CU_STREAM_NON_BLOCKING,), 1),
    "cuModuleLoadData": ((b"machine code",), 1),
    "cuGetErrorName": ((api.CUresult.CUDA_ERROR_OUT_OF_MEMORY,), 1),
    "cuGetErrorString": ((api.CUresult.CUDA_ERROR_OUT_OF_MEMORY,), 1),
}
wrong = {}
for name, (arguments, values) in calls.items():
    try:
        outcome = getattr(api, name)(*arguments)
    except RuntimeError:
        continue  # there is no driver: it was asked for after the arguments had been taken
    except Exception as error:
        wrong[name] = repr(error)
    else:  # there is one, and nobody has initialised it: it touches nothing and says so
        if not isinstance(outcome, tuple) or len(outcome) != 1 + values:
            wrong[name] = repr(outcome)
        elif not isinstance(outcome[0], api.CUresult):
            wrong[name] = repr(outcome)
print(json.dumps({"wrong": wrong, "called": list(calls)}))
"""


@pytest.fixture(scope="module")
def api() -> ModuleType:
    module: ModuleType = pytest.importorskip(
        "cuda.bindings.driver", reason="cuda-bindings is not installed"
    )
    return module


def functions_in_use() -> set[str]:
    """The driver's functions that the sources name: called by name, or taken from the module."""
    text = "\n".join(path.read_text(encoding="utf-8") for path in SOURCES)
    return set(re.findall(r'"(cu[A-Z]\w+)"', text)) | set(re.findall(r"\bapi\.(cu[A-Z]\w+)", text))


def test_every_name_in_use_is_there(api: ModuleType) -> None:
    text = "\n".join(path.read_text(encoding="utf-8") for path in SOURCES)
    names = {*functions_in_use(), *re.findall(r"\bapi\.(CU\w+(?:\.\w+)?)", text)}
    assert len(names) > 25, "the sources are read in another way than they are written"
    missing = []
    for name in sorted(names):
        found: Any = api
        for part in name.split("."):
            found = getattr(found, part, None)
        if found is None:
            missing.append(name)
    assert not missing


def test_every_function_takes_the_arguments_that_it_is_given(api: ModuleType) -> None:
    done = subprocess.run(
        [sys.executable, "-c", CALLS], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert answer["wrong"] == {}
    assert functions_in_use() <= set(answer["called"])
