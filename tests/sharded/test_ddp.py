"""DistributedDataParallel and what steps it, the real ones, on CPU ranks with gloo."""

from __future__ import annotations

import pytest
import torch

from tests.sharded import ddp_worker as worker
from tests.sharded import training
from tests.sharded.ddp_worker import Variant, zero
from tests.support.ranks import Ranks

VIEWS = {"gradient_as_bucket_view": True}
UNUSED = {**VIEWS, "find_unused_parameters": True}

VARIANTS = {
    "apart": Variant(),
    "apart-no_sync": Variant(accumulates=True),
    "views": Variant(VIEWS),
    "views-no_sync": Variant(VIEWS, accumulates=True),
    "views-static": Variant({**VIEWS, "static_graph": True}),
    "views-unused": Variant(UNUSED, leaves_out=True),
    "views-power_sgd": Variant(VIEWS, hook="power_sgd"),
    "views-zero": Variant(VIEWS, optimizer=zero()),
    "apart-zero-views": Variant(optimizer=zero(torch.optim.SGD, momentum=0.9, parameters_as_bucket_view=True)),
}


@pytest.mark.parametrize("name", VARIANTS)
def test_training_between_offloads_is_bit_identical(two_ranks: Ranks, name: str) -> None:
    for outcome in two_ranks.run(training.compare, VARIANTS[name].program):
        assert outcome.resident_bytes["actor"] > 0
        assert outcome.offloaded_bytes["actor.optimizer"] > 0


@pytest.mark.parametrize("name", ["apart-zero-views"])
def test_so_it_is_in_a_world_of_one(one_rank: Ranks, name: str) -> None:
    (outcome,) = one_rank.run(training.compare, VARIANTS[name].program)
    assert outcome.offloaded_bytes["actor"] > 0


@pytest.mark.parametrize("name", ["apart", "views-unused"])
def test_gradients_that_die_with_their_phase_leave_the_reducer_working(two_ranks: Ranks, name: str) -> None:
    """The trap: a bucket is gone with its gradients, and the reducer goes on adding up in memory that is nobody's."""
    assert two_ranks.run(training.compare_dropping, VARIANTS[name].program)


@pytest.mark.parametrize("drops", [False, True], ids=["moved", "dropped"])
def test_buckets_lie_in_the_handles_ranges(two_ranks: Ranks, drops: bool) -> None:
    two_ranks.run(worker.buckets_stay_in_place, drops)


@pytest.mark.parametrize("name", ["views"])
def test_gradients_zeroed_while_they_are_offloaded(two_ranks: Ranks, name: str) -> None:
    assert two_ranks.run(training.compare_zeroing, VARIANTS[name].program)


def test_a_reducer_that_keeps_gradients_apart_is_foreign_and_named(two_ranks: Ranks) -> None:
    (nbytes, _), seen = two_ranks.run(worker.gradient_bytes, Variant()), two_ranks.run(worker.kept_by_framework, Variant(), 3)
    for each in seen:
        assert (each.foreign_bytes, each.snapshot_bytes, each.is_ok) == (nbytes, nbytes, True)
        assert f"foreign: actor: reducer's buckets (gradient_as_bucket_view=False) ({nbytes:,} bytes)" in each.report


@pytest.mark.parametrize("name", ["default", "views"])
def test_the_assertion_that_nothing_is_resident_names_them(two_ranks: Ranks, name: str) -> None:
    """DDP as it is by default keeps a copy of every gradient; with views it keeps nothing once a gradient has shown its bucket."""
    variant = Variant() if name == "default" else VARIANTS["views"]
    nbytes = two_ranks.run(worker.gradient_bytes, variant)[0]
    for before, after in two_ranks.run(worker.assertions, variant):
        wanted = "gradient_as_bucket_view=False" if name == "default" else "no gradient is a view of them yet"
        kept = f"actor is CPU_OFFLOADED, and its framework keeps {nbytes:,} bytes on the device: reducer's buckets ({wanted})"
        assert before.startswith(kept)
        assert "gradient_as_bucket_view=True" in before
        assert "allow_foreign=True" in before
        assert after == (before if name == "default" else "")


def test_the_map_of_used_parameters_is_foreign(two_ranks: Ranks) -> None:
    for each in two_ranks.run(worker.kept_by_framework, VARIANTS["views-unused"], 1):
        assert each.is_ok
        assert "map of used parameters" in each.report


def test_what_cannot_be_moved_is_refused(two_ranks: Ranks) -> None:
    for said in two_ranks.run(worker.refuses_mixed_precision):
        assert "torch.autocast" in said
    for said in two_ranks.run(worker.refuses_overlap):
        assert "leave overlap_with_ddp out" in said
