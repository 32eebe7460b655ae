"""Does anything grow over 2,000 cycles of three models of 128 to 512 MiB: used device memory,
page-locked bytes, the process?"""

from __future__ import annotations

import gc
import os
import statistics
import time
from collections.abc import Sequence
from pathlib import Path

import placement
from bench import _rig
from bench._models import blob, change, module_tensors
from bench._results import Results
from bench._rig import Rig

_WARM_UPS = 10
_CHANGE_EVERY = 10


def _process_bytes() -> int:
    """Resident memory of this process."""
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * os.sysconf(
        "SC_PAGE_SIZE"
    )


def measure(rig: Rig, results: Results) -> None:
    cycles = rig.pick(12, 200, 2_000)
    scenario = f"{cycles:,} cycles of three models"
    sizes = [rig.pick(1 << 16, mib << 20, mib << 20) for mib in (128, 256, 512)]
    with results.system(scenario, "placement"):
        manager = placement.Manager(device=rig.placement_device())
        models = [blob(rig, nbytes) for nbytes in sizes]
        for index, model in enumerate(models):
            manager.register(f"critic{index}", model, role="critic")
        rig.empty_cache()
        free: list[int] = []
        host: list[int] = []
        process: list[int] = []
        times: list[float] = []
        for cycle in range(_WARM_UPS + cycles):
            began = time.perf_counter()
            with manager.phase("values"):
                if cycle % _CHANGE_EVERY == 0:
                    for model in models:
                        change(module_tensors(model))
            times.append(time.perf_counter() - began)
            free.append(rig.free_bytes())
            host.append(sum(handle.host_bytes for handle in manager.handles.values()))
            process.append(_process_bytes())
        free, host, process = free[_WARM_UPS:], host[_WARM_UPS:], process[_WARM_UPS:]
        results.add(scenario, "placement", "one cycle", statistics.median(times), "s")
        results.add(
            scenario,
            "placement",
            "free device bytes, largest less smallest",
            max(free) - min(free),
            "bytes",
        )
        results.add(
            scenario,
            "placement",
            "page-locked bytes, largest less smallest",
            max(host) - min(host),
            "bytes",
        )
        results.add(
            scenario,
            "placement",
            "memory of the process, last less first",
            process[-1] - process[0],
            "bytes",
        )
        models.clear()
        del model
        gc.collect()  # dead objects need no ordinary memory at close()
        manager.close()


def main(arguments: Sequence[str] | None = None) -> None:
    _rig.run("cycles", __doc__, measure, arguments)


if __name__ == "__main__":
    main()
