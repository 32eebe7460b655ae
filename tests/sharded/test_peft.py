"""PEFT: LoRA over a frozen base, adapters that come and go. The real package."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from placement import NotResidentError
from placement.testing import SimulatedDevice, assert_nothing_resident
from tests.sharded import peft_worker, training
from tests.support.frameworks import needs
from tests.support.ranks import Ranks
from tests.support.worker import make_manager

needs("peft")

GENERATION = 500_000
"""Of this file's one group: other files count theirs from small numbers, on the same processes."""


def test_steps_of_lora(one_rank: Ranks) -> None:
    (outcome,) = one_rank.run(peft_worker.compare, False, False)
    assert outcome.skipped_bytes["actor"] > outcome.offloaded_bytes["actor"]


def test_steps_of_lora_under_fsdp2(two_ranks: Ranks) -> None:
    for outcome in two_ranks.run(peft_worker.compare, True, True):
        assert outcome.skipped_bytes["actor"] > outcome.offloaded_bytes["actor"]


def test_ranks_share_the_base_also_after_adapters_are_merged_into_it(two_ranks: Ranks) -> None:
    before, after = zip(*two_ranks.run(peft_worker.shares_its_base, GENERATION), strict=True)
    assert [is_shared for is_shared, *_ in (*before, *after)] == [True] * 4
    assert sum(host for _, host, _ in after) == pytest.approx(sum(host for _, host, _ in before), abs=4096)


def test_adapters_that_are_added_switched_disabled_and_deleted_between_phases() -> None:
    told = peft_worker.tell()
    for number, (plain, seen) in enumerate(zip(told["plain"], told["seen"], strict=True)):
        assert seen[1] == plain[1], f"the loss of part {number} differs from the plain run's"
        assert list(seen[0]) == list(plain[0]), f"part {number}"
        assert seen[0] == plain[0], f"part {number}: {[name for name, value in plain[0].items() if seen[0][name] != value]}"
    hosts = told["hosts"]
    assert hosts[4] > hosts[3]  # the second adapter
    assert hosts[-1] == hosts[3]  # deleted: its host memory is given back


@pytest.mark.parametrize(
    ("what", "change"),
    [
        ("merged with its adapters", lambda model: model.merge_adapter()),
        ("merged with its adapters", lambda model: model.merge_and_unload()),
        # It copies the module that is to be saved.
        ("copied or pickled", lambda model: model.add_adapter("more", peft_worker.config(modules_to_save=["head"]))),
    ],
)
def test_what_would_compute_with_offloaded_weights_is_refused(what: str, change: Callable[[Any], Any]) -> None:
    """Merged while offloaded, NaN is added to NaN, which nobody sees; PEFT notes the merge and leaves the adapter out from then on."""
    model = peft_worker.adapted()
    output = training.as_bytes(model(peft_worker.batch(0)))
    manager = make_manager(device=SimulatedDevice(1 << 22, chunk_bytes=peft_worker.CHUNK_BYTES))
    manager.register("actor", model, role="actor")
    with pytest.raises(NotResidentError, match=what):
        change(model)
    with manager.phase("log_prob"):
        assert training.as_bytes(model(peft_worker.batch(0))) == output
    with manager.phase("log_prob"):
        model.merge_adapter()
        merged = training.as_bytes(model(peft_worker.batch(0)))
    assert_nothing_resident(manager)
    with pytest.raises(NotResidentError, match="merged with its adapters"):
        model.unmerge_adapter()
    with manager.phase("log_prob"):
        assert training.as_bytes(model(peft_worker.batch(0))) == merged
        model.unmerge_adapter()
    manager.close()
    assert not any({"merge", "unmerge"} & set(vars(module)) for module in model.modules())
