"""In which order the tests run, and which of them in the same one of xdist's processes.

What takes long begins first, so that nothing long begins at the end, and what waits runs beside what computes. The ranks that a process
starts live as long as it does: files whose ranks import the same framework run in the same process, and it is imported once a rank.
"""

from __future__ import annotations

from typing import Any

import pytest

_TOGETHER = {
    "programs": ("tests/unit/test_processes.py", "tests/unit/test_host.py", "tests/unit/test_host_reserve.py"),
    "ray": ("tests/ray/test_fleet.py", "tests/ray/test_faults.py", "tests/ray/test_examples.py"),
    "peft": (
        "tests/sharded/test_one_of_each.py",
        "tests/sharded/test_checkpoint.py",
        "tests/sharded/test_state_dicts.py",
        "tests/sharded/test_peft.py",
        "tests/sharded/test_publish_lora.py",
        "tests/field_bugs/test_verl_6188_weight_sync.py",
    ),
    "megatron": (
        "tests/sharded/test_megatron.py",
        "tests/sharded/test_megatron_fsdp.py",
        "tests/field_bugs/test_megatron_4623_hybrid_device_optimizer.py",
        "tests/sharded/test_publish_frameworks.py",
        "tests/sharded/test_deepspeed.py",
        "tests/sharded/test_veomni.py",
    ),
}
_SCOPES = {place: scope for scope, places in _TOGETHER.items() for place in places}
_IMPORTS = {
    "peft": ("peft",),
    "megatron": ("megatron.core.distributed", "megatron.core.optimizer", "megatron.core.transformer"),
}
"""What ranks of these import that takes seconds."""
_FIRST = (
    "ray",
    "peft",
    "megatron",
    "tests/observe/test_prometheus.py",
    "tests/faults/test_interrupts.py",
    "tests/group/test_faults.py",
    "tests/sharded/test_fsdp1.py",
    "tests/group/test_lease_swaps.py",
    "tests/unit/test_phases.py",
    "tests/model/test_barrier_spin.py",
    "tests/faults/test_allocations.py",
    "tests/sharded/test_disrupted_training.py",
    "programs",
    "tests/integrations/test_demo.py",
    "tests/unit/test_steady.py",
    "tests/model/test_manager_machine.py",
    "tests/observe/test_discovery.py",
)
"""Files and groups of files that take long, those that mostly wait between those that compute."""


def scope_of(place: str) -> str:
    """What runs in one process: a file, or a group of files."""
    return _SCOPES.get(place, place)


def imports_of(place: str) -> tuple[str, ...]:
    """The modules that the processes of a scope need."""
    return _IMPORTS.get(scope_of(place), ())


def ordered(items: list[pytest.Item]) -> list[pytest.Item]:
    """The tests of a scope one after the other, each file's in its own order."""

    def key(item: pytest.Item) -> tuple[int, bool, str, str]:
        place = item.location[0]
        scope = scope_of(place)
        return _FIRST.index(scope) if scope in _FIRST else len(_FIRST), not place.startswith("tests/sharded/"), scope, place

    return sorted(items, key=key)


def make_scheduler(config: pytest.Config, log: Any) -> Any:
    """xdist's `loadfile`, with groups of files."""
    from xdist.scheduler import LoadFileScheduling

    class Scheduling(LoadFileScheduling):  # type: ignore[misc, unused-ignore]
        def _split_scope(self, nodeid: str) -> str:
            return scope_of(super()._split_scope(nodeid))

    return Scheduling(config, log)
