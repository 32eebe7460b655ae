"""In which order the tests run, and which of them in the same one of xdist's processes.

What takes long begins first, so that nothing long begins at the end, and what waits runs beside what computes: `durations.json` knows. The
ranks that a process starts live as long as it does: files whose ranks import the same framework run in the same process, and it is imported
once a rank. Those are listed here: a test file does not tell which of the frameworks that its workers mention they import.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from itertools import zip_longest
from typing import Any

import pytest

from tests.support.durations import Duration, file_of, recorded

_TOGETHER = {
    "programs": ("tests/unit/test_processes.py", "tests/unit/test_host.py", "tests/unit/test_host_reserve.py"),
    "peft": (
        "tests/sharded/test_one_of_each.py",
        "tests/sharded/test_checkpoint.py",
        "tests/sharded/test_state_dicts.py",
        "tests/sharded/test_peft.py",
        "tests/sharded/test_publish_lora.py",
        "tests/engines/test_frameworks.py",
    ),
    "trl": (
        "tests/integrations/test_transformers_trainer.py",
        "tests/integrations/test_trl.py",
        "tests/integrations/test_trl_runs.py",
        "tests/integrations/test_trl_vllm.py",
        "tests/docs/test_code_blocks.py",
    ),
    "megatron": (
        "tests/sharded/test_megatron.py",
        "tests/sharded/test_megatron_fsdp.py",
        "tests/field_bugs/test_megatron_4623_hybrid_device_optimizer.py",
        "tests/sharded/test_publish_frameworks.py",
        "tests/sharded/test_deepspeed.py",
        "tests/sharded/test_veomni.py",
        "tests/sharded/test_put_back.py",
    ),
    "verl": (
        "tests/integrations/verl/test_fsdp_engines.py",
        "tests/integrations/verl/test_several_engines.py",
        "tests/integrations/verl/test_two_ranks.py",
        "tests/integrations/verl/test_rollout.py",
        "tests/integrations/verl/test_plugin.py",
    ),
}
_SCOPES = {place: scope for scope, places in _TOGETHER.items() for place in places}
_MEGATRON = ("megatron.core.distributed", "megatron.core.optimizer", "megatron.core.transformer")
_IMPORTS = {
    "peft": ("peft",),
    "trl": ("trl.trainer.grpo_trainer",),
    "megatron": (*_MEGATRON, "deepspeed"),
    "verl": ("tests.integrations.verl.imported",),
}
"""What ranks of these scopes import that takes seconds."""


_SPLIT = ("tests/faults/test_allocations.py", "tests/faults/test_interrupts.py")
"""Files that take minutes, of tests that share nothing: each test runs where there is room."""


def scope_of(place: str) -> str:
    """What runs in one process: a file, or a group of files."""
    return "ray" if place.startswith("tests/ray/") else _SCOPES.get(place, place)


def imports_of(place: str) -> tuple[str, ...]:
    """The modules that the processes of a scope need."""
    return _IMPORTS.get(scope_of(place), ())


def ordered(items: list[pytest.Item]) -> list[pytest.Item]:
    """The tests of a scope one after the other, each file's in its own order."""
    places = dict.fromkeys(file_of(item.nodeid) for item in items)
    ranks = {scope: rank for rank, scope in enumerate(ranked(durations_of(places, recorded())))}
    return sorted(items, key=lambda item: (ranks[scope_of(file_of(item.nodeid))], file_of(item.nodeid)))


def durations_of(places: Iterable[str], known: Mapping[str, Duration]) -> dict[str, Duration]:
    """How long each scope of these files takes. A file that was not recorded counts as average."""
    average = Duration(*(sum(each) / len(known) for each in zip(*known.values(), strict=True))) if known else Duration(1.0, 1.0)
    scopes: defaultdict[str, Duration] = defaultdict(lambda: Duration(0.0, 0.0))
    for place in places:
        scopes[scope_of(place)] += known.get(place, average)  # type: ignore[assignment]
    return scopes


def ranked(scopes: Mapping[str, Duration]) -> list[str]:
    """The scopes, longest first. Of those that take longer than average, one that mostly waits and one that computes take turns."""
    longest_first = sorted(scopes, key=lambda scope: (-scopes[scope].seconds, scope))
    usual = Duration(*(sum(each) for each in zip(*scopes.values(), strict=True))) if scopes else Duration(0.0, 0.0)
    average = usual.seconds / max(len(scopes), 1)
    long = [scope for scope in longest_first if scopes[scope].seconds > average]
    waiting = [scope for scope in long if _mostly_waits(scopes[scope], usual)]
    computing = [scope for scope in long if scope not in waiting]
    turns = [scope for pair in zip_longest(waiting, computing) for scope in pair if scope is not None]
    return turns + longest_first[len(long) :]


def _mostly_waits(duration: Duration, usual: Duration) -> bool:
    """For a server, a deadline or another process. Processes that share cores get a part of one each: compared with what is usual."""
    return duration.processor_seconds * usual.seconds < 0.75 * usual.processor_seconds * duration.seconds


def make_scheduler(config: pytest.Config, log: Any) -> Any:
    """xdist's `loadfile`, with groups of files."""
    from xdist.scheduler import LoadFileScheduling

    class Scheduling(LoadFileScheduling):  # type: ignore[misc, unused-ignore]
        def _split_scope(self, nodeid: str) -> str:
            place = super()._split_scope(nodeid)
            return nodeid if place in _SPLIT else scope_of(place)

    return Scheduling(config, log)
