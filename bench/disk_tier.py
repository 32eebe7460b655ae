"""How fast do host copies go to a local disk and come back, beside fio (else dd) with the same
blocks? And what does a job wait for them?

The folder is `BENCH_DISK`, else that for temporary files: name one on the disk in question. Rates
on a disk that others use differ from run to run, so systems take turns, and the median counts.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

import placement
from bench import _rig
from bench._results import Results
from bench._rig import Rig
from placement.core.journal import HandleCounters
from placement.devices.host.disk_file import BLOCK_BYTES, DEPTH
from placement.devices.host.slab import Slab
from placement.storage.disk import Keeper, Spill
from placement.testing import SimulatedDevice

_RAW = "a host copy to the disk and back"
_JOB = "a job with more host copies than the limit"
_ROUNDS = 3
_CYCLES = 4
_SECONDS_OF_WORK = 0.5
"""What a phase of the job takes beside its moves. The disk works in that time."""


class _Holder:
    """The part of a handle's storage that a `Spill` uses."""

    lost: str | None = None
    ranges = ()


def _ours(folder: Path, slab: Slab) -> dict[str, Callable[[], object]]:
    """With checksums, and with the memory given back and taken again."""
    keeper = Keeper(slab.nbytes)
    spill = Spill(slab, _Holder(), "bench", str(folder), HandleCounters(), keeper)
    spill.can_leave = True

    def write() -> None:
        if spill._file is not None:
            spill._file.forget()  # write it anew
        assert spill.leave(lambda: True, lambda: None)

    def read() -> None:
        spill.claim()
        spill.is_claimed = False
        spill.require_values()

    return {"write": write, "read": read}


def _dd(path: Path, nbytes: int, processes: int) -> dict[str, Callable[[], object]]:
    """dd on as many parts of the file at once."""
    blocks = nbytes // BLOCK_BYTES // processes

    def run(*ends: str) -> None:
        running = []
        for part in range(processes):
            places = [end.format(offset=part * blocks) for end in ends]
            command = ["dd", f"bs={BLOCK_BYTES}", f"count={blocks}", "status=none", *places]
            running.append(subprocess.Popen(command))
        if any(each.wait() for each in running):
            raise RuntimeError("dd failed")

    return {
        "write": lambda: run(
            "if=/dev/zero", f"of={path}", "oflag=direct", "conv=notrunc,fdatasync", "seek={offset}"
        ),
        "read": lambda: run(f"if={path}", "of=/dev/null", "iflag=direct", "skip={offset}"),
    }


def _fio_rate(path: Path, nbytes: int, direction: str) -> float:
    """Bytes a second of one fio job with our blocks and depth."""
    command = [
        "fio",
        "--name=bench",
        f"--filename={path}",
        f"--size={nbytes}",
        f"--rw={direction}",
        "--direct=1",
        f"--bs={BLOCK_BYTES}",
    ]
    command += [f"--iodepth={DEPTH}", "--ioengine=libaio", "--end_fsync=1", "--output-format=json"]
    found = subprocess.run(command, check=True, capture_output=True, text=True)
    return float(json.loads(found.stdout)["jobs"][0][direction]["bw_bytes"])


def _raw(rig: Rig, results: Results, folder: Path) -> None:
    nbytes = (
        rig.pick(8 << 20, 1 << 30, 8 << 30) // (BLOCK_BYTES * DEPTH) * (BLOCK_BYTES * DEPTH)
        or BLOCK_BYTES * DEPTH
    )
    slab = Slab(nbytes)
    slab.view(0, nbytes).view(torch.int64).random_()
    path = folder / f"placement-bench-{os.getpid()}"
    reference = f"dd, {DEPTH} at once"
    systems = {
        "placement": _ours(folder, slab),
        "dd": _dd(path, nbytes, 1),
        reference: _dd(path, nbytes, DEPTH),
    }
    rates: dict[tuple[str, str], list[float]] = {}
    for _ in range(_ROUNDS):
        for direction in ("write", "read"):
            for system, work in systems.items():
                began = time.perf_counter()
                work[direction]()
                rates.setdefault((system, direction), []).append(
                    nbytes / (time.perf_counter() - began)
                )
            if shutil.which("fio"):
                reference = "fio"
                rates.setdefault((reference, direction), []).append(
                    _fio_rate(path, nbytes, direction)
                )
    path.unlink(missing_ok=True)
    for (system, direction), found in rates.items():
        results.add(_RAW, system, f"{direction}, rate", statistics.median(found) / 1e9, "GB/s")
    for direction in ("write", "read"):
        share = statistics.median(rates["placement", direction]) / statistics.median(
            rates[reference, direction]
        )
        results.add(_RAW, "placement", f"{direction}, share of {reference}", 100 * share, "%")


def _model(rig: Rig, width: int) -> torch.nn.Module:
    with rig.torch_device:
        return torch.nn.Sequential(*(torch.nn.Linear(width, width, bias=False) for _ in range(8)))


def _job(rig: Rig, results: Results, folder: Path, name: str, share: float | None) -> None:
    """A cycle of three phases over an actor with its optimizer, a reference and a critic: six times
    the bytes of one model."""
    width = rig.pick(64, 768, 8192)
    model_bytes = 8 * width * width * 4
    limit = (
        {}
        if share is None
        else {"host_limit_bytes": int(6 * share * model_bytes), "disk_directory": folder}
    )
    chosen = (
        rig.device
        if rig.is_cuda
        else SimulatedDevice(
            8 * model_bytes, chunk_bytes=1 << 22 if rig.size != "tiny" else 1 << 14
        )
    )
    manager = placement.Manager(device=chosen, **limit)
    models = {role: _model(rig, width) for role in ("actor", "ref", "critic", "reward")}
    adam = torch.optim.AdamW(models["actor"].parameters())
    for role, model in models.items():
        manager.register(role, model, role=role, readonly=role in ("ref", "reward"))
    manager.register("adam", adam)
    work = 0.0 if rig.size == "tiny" else _SECONDS_OF_WORK
    before = manager.snapshot()
    for cycle in range(_CYCLES):
        if cycle == _CYCLES // 2:
            before = manager.snapshot()
        with manager.phase("log_prob") as step:
            time.sleep(work)
            step.switch("values")
            time.sleep(work)
            step.switch("reward")
            time.sleep(work)
            step.switch("train")
            for parameter in models["actor"].parameters():
                parameter.grad = torch.ones_like(parameter)
            adam.step()
            adam.zero_grad()
            time.sleep(work)
        time.sleep(work)
    after = manager.snapshot()
    figures, cycles = after.since(before), _CYCLES - _CYCLES // 2
    results.add(
        _JOB, name, "host memory", sum(handle.host_bytes for handle in after.handles) / 1e9, "GB"
    )
    results.add(
        _JOB, name, "on disk", sum(handle.disk_bytes for handle in after.handles) / 1e9, "GB"
    )
    results.add(_JOB, name, "stall a cycle", figures["placement/stall_seconds"] / cycles, "s")
    results.add(
        _JOB,
        name,
        "waited for the disk a cycle",
        figures["placement/disk_wait_seconds"] / cycles,
        "s",
    )
    manager.close()


def measure(rig: Rig, results: Results) -> None:
    folder = Path(os.environ.get("BENCH_DISK", tempfile.gettempdir()))
    with results.system(_RAW, "placement"):
        _raw(rig, results, folder)
    jobs = {"placement": 0.9, "placement, limit of 75 %": 0.75, "placement, no limit": None}
    for name, share in jobs.items():
        with results.system(_JOB, name):
            _job(rig, results, folder, name, share)
            rig.clean()


def main(arguments: Sequence[str] | None = None) -> None:
    _rig.run("disk_tier", __doc__, measure, arguments)


if __name__ == "__main__":
    main()
