"""FSDP1 (`FullyShardedDataParallel`), the real one, on CPU ranks with gloo."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
import torch
from torch.distributed.fsdp import MixedPrecision, ShardingStrategy

from tests.sharded import fsdp1_worker as worker
from tests.sharded import training
from tests.sharded.fsdp1_worker import HALF, Variant
from tests.support.ranks import Ranks

FULL, GRAD_OP, NO, HYBRID = (ShardingStrategy[name] for name in ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD"))
ORIGINAL, FLAT = Variant(True), Variant(False)

VARIANTS = {
    "original-full": Variant(True, FULL, clips=True),
    "original-no_shard": Variant(True, NO),
    "original-half": Variant(True, FULL, HALF),
    "original-accumulating": Variant(True, FULL, accumulates=True, optimizer=torch.optim.Adam),
    "original-frozen": Variant(True, FULL, frozen=True),
    "flat-full": Variant(False, FULL, clips=True),
    "flat-no_shard": Variant(False, NO, optimizer=torch.optim.Adam),
    "flat-replicated": Variant(False, HYBRID, mesh=(2, 1)),
    "flat-half": Variant(False, HYBRID, HALF, mesh=(1, 2)),
    "flat-accumulating": Variant(False, GRAD_OP, accumulates=True),
}
BOTH = pytest.mark.parametrize("variant", [ORIGINAL, FLAT], ids=["original", "flat"])


@pytest.mark.parametrize("name", VARIANTS)
def test_training_between_offloads_is_bit_identical(two_ranks: Ranks, name: str) -> None:
    for outcome in two_ranks.run(training.compare, VARIANTS[name].program):
        assert outcome.resident_bytes["actor"] > 0
        assert outcome.offloaded_bytes["actor.optimizer"] > 0


@pytest.mark.parametrize("name", ["flat-full"])
def test_so_it_is_in_a_world_of_one_where_nothing_is_sharded(one_rank: Ranks, name: str) -> None:
    (outcome,) = one_rank.run(training.compare, VARIANTS[name].program)
    assert outcome.offloaded_bytes["actor"] > 0


@BOTH
@pytest.mark.parametrize(
    "train",
    [training.compare_dropping, training.compare_zeroing, training.compare_setting_aside],
    ids=["dropped", "zeroed", "aside"],
)
def test_gradients(two_ranks: Ranks, variant: Variant, train: Callable[..., object]) -> None:
    """Dropped with the phase; zeroed while they are offloaded; reduced ones beside such as are not, which FSDP1 keeps in another field."""
    assert two_ranks.run(train, variant.program)


@BOTH
def test_what_was_gathered_is_given_up(two_ranks: Ranks, variant: Variant) -> None:
    """The trap: after a forward pass without gradients the root stays gathered, under SHARD_GRAD_OP every unit does."""
    for strategy, kept in ((FULL, 1), (GRAD_OP, 3)):
        for inside, after in two_ranks.run(worker.what_stays_gathered, dataclasses.replace(variant, strategy=strategy)):
            assert sum(nbytes > 0 for nbytes in inside.values()) == kept
            assert set(after.values()) == {0}


@BOTH
def test_summoned_parameters_are_not_torn_from_their_shards(two_ranks: Ranks, variant: Variant) -> None:
    for said in two_ranks.run(worker.summons_across_a_transition, variant):
        at_a_transition, at_registration, at_the_end = said
        assert "leave FSDP.summon_full_params before the phase ends" in at_a_transition
        assert "outside FSDP.summon_full_params" in at_registration
        assert at_the_end == at_a_transition


@pytest.mark.parametrize("name", ["original-full", "flat-accumulating", "original-no_shard"])
def test_a_graph_outlives_an_offload_and_a_registration(two_ranks: Ranks, name: str) -> None:
    """Registered while the module shows what was gathered, the optimizer finds its owner, and `backward()` gathers again."""
    two_ranks.run(worker.backward_in_another_phase, VARIANTS[name])


def test_buffers_that_are_cast_at_the_first_forward_move_from_then_on(two_ranks: Ranks) -> None:
    cast = dataclasses.replace(ORIGINAL, mixed_precision=MixedPrecision(buffer_dtype=torch.bfloat16))
    assert two_ranks.run(worker.casts_buffers, cast) == [torch.bfloat16] * 2


@BOTH
def test_offloaded_parameters_are_torchs_to_place(two_ranks: Ranks, variant: Variant) -> None:
    """Without training, for whose backward pass FSDP1 wants an accelerator."""
    for why in two_ranks.run(worker.is_tracked, dataclasses.replace(variant, offloads=True)):
        assert all("CPUOffload keeps" in reason for reason in why)
    assert all("wrap all units alike" in said for said in two_ranks.run(worker.mixes_offload, variant))
