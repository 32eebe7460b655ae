"""In which order the tests run, and which of them in the same one of xdist's processes.

What takes long begins first, so that nothing long begins at the end: `durations.json` knows. The
ranks that a process starts live as long as it does: files whose ranks import the same framework run
in the same process, and it is imported once a rank. So do files that import transformers or torch's
compiler themselves. Those are listed here: a test file does not tell which of the frameworks that
its workers mention they import.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import pytest

from tests.support.durations import file_of, recorded

_TOGETHER = {
    "programs": (
        "tests/phases/test_processes.py",
        "tests/devices/test_host.py",
        "tests/devices/test_host_files.py",
        "tests/devices/test_host_reserve.py",
        "tests/observe/test_logs.py",
        "tests/sharded/test_async_checkpoint.py",
    ),
    "sharded": (
        "tests/sharded/test_checkpoint.py",
        "tests/sharded/test_state_dicts.py",
        "tests/sharded/test_peft.py",
        "tests/sharded/test_publish_lora.py",
        "tests/engines/test_frameworks.py",
        "tests/sharded/test_megatron.py",
        "tests/sharded/test_megatron_fsdp.py",
        "tests/field_bugs/test_megatron_4623_hybrid_device_optimizer.py",
        "tests/sharded/test_publish_frameworks.py",
        "tests/sharded/test_deepspeed.py",
        "tests/sharded/test_veomni.py",
        "tests/sharded/test_restore.py",
        "tests/integrations/test_trl_ranks.py",
        "tests/integrations/verl/test_fsdp_engines.py",
        "tests/integrations/verl/test_several_engines.py",
        "tests/integrations/verl/test_rollout.py",
        "tests/integrations/verl/test_plugin.py",
        "tests/integrations/verl/test_tensorboard.py",
    ),
    "trl": (
        "tests/integrations/test_transformers_trainer.py",
        "tests/integrations/test_trl.py",
        "tests/integrations/test_grpo_examples.py",
        "tests/integrations/test_tensorboard.py",
        "tests/integrations/test_causal_models.py",
        "tests/integrations/test_demo.py",
        "tests/integrations/verl/test_bench_inputs.py",
        "tests/forecasting/test_forecast.py",
        "tests/forecasting/test_forecast_truth.py",
        "tests/cli/test_plan_command.py",
        "tests/docs/test_code_blocks.py",
        "tests/publish/test_publish_checkpoint_names.py",
        "tests/frameworks/test_compiled.py",
        "tests/sharded/test_quantized.py",
    ),
}
_SCOPES = {place: scope for scope, places in _TOGETHER.items() for place in places}
_MEGATRON = ("megatron.core.distributed", "megatron.core.optimizer", "megatron.core.transformer")
_IMPORTS = {
    "ray": ("ray",),
    # one scope: a process takes what is imported for its first one alone
    "sharded": ("peft", *_MEGATRON, "deepspeed"),
}
"""What ranks of these scopes import that takes seconds."""
_IMPORTS_OF_SWEEPS = {
    "sharded": ("trl.trainer.grpo_trainer", "tests.integrations.verl.imported"),
}
"""And what only those of sweeps import."""

_SPLIT = ("tests/faults/test_allocations.py", "tests/faults/test_interrupts.py")
"""Files that take minutes, of tests that share nothing: each test runs where there is room."""


def scope_of(place: str) -> str:
    """What runs in one process: a file, or a group of files."""
    return "ray" if place.startswith("tests/ray/") else _SCOPES.get(place, place)


def imports_of(place: str, has_sweeps: bool) -> tuple[str, ...]:
    """The modules that the processes of a scope need, in a run with sweeps or without."""
    scope = scope_of(place)
    return _IMPORTS.get(scope, ()) + (_IMPORTS_OF_SWEEPS.get(scope, ()) if has_sweeps else ())


def ordered(items: list[pytest.Item]) -> list[pytest.Item]:
    """The scope that takes longest first, and of each scope and file the tests one after the other.

    A file that was not recorded counts as average.
    """
    known = recorded()
    average = sum(known.values()) / max(len(known), 1)
    seconds: defaultdict[str, float] = defaultdict(float)
    # sums in another order may differ, and so would the processes' orders
    for place in sorted({file_of(item.nodeid) for item in items}):
        seconds[scope_of(place)] += known.get(place, average)

    def rank(item: pytest.Item) -> tuple[float, str, str]:
        place = file_of(item.nodeid)
        return -seconds[scope_of(place)], scope_of(place), place

    return sorted(items, key=rank)


def make_scheduler(config: pytest.Config, log: Any) -> Any:
    """xdist's `loadfile`, with groups of files."""
    from xdist.scheduler import LoadFileScheduling

    class Scheduling(LoadFileScheduling):  # type: ignore[misc, unused-ignore]
        def _split_scope(self, nodeid: str) -> str:
            place = super()._split_scope(nodeid)
            return nodeid if place in _SPLIT else scope_of(place)

    return Scheduling(config, log)
