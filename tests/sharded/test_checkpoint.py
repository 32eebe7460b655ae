"""Checkpoints of sharded models: in every state, on one and two ranks, with and without placement, resumed bit for bit."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest

from tests.sharded import checkpoint_worker as worker
from tests.support.ranks import Ranks


@pytest.mark.parametrize("kind", ["fsdp2", "lora"])
def test_resuming_is_going_on(kind: str, two_ranks: Ranks, tmp_path: Path) -> None:
    two_ranks.run(worker.resume, kind, str(tmp_path))


@pytest.mark.parametrize("kind", ["plain", "ddp", "fsdp2", "external", "tp", "lora"])
def test_torch_reads_what_we_write_and_the_other_way_round(kind: str, two_ranks: Ranks, tmp_path: Path) -> None:
    two_ranks.run(worker.without_placement, kind, str(tmp_path))


@pytest.mark.parametrize("kind", ["fsdp2", "tp"])
def test_a_checkpoint_of_two_ranks_is_loaded_by_one_and_the_other_way_round(
    kind: str, one_rank: Ranks, two_ranks: Ranks, tmp_path: Path
) -> None:
    two, one = str(tmp_path / "two"), str(tmp_path / "one")
    saved = two_ranks.run(worker.whole, kind, two, "save")
    assert saved[0] == saved[1]
    assert one_rank.run(worker.whole, kind, two, "load") == saved[:1]
    saved = one_rank.run(worker.whole, kind, one, "save")
    assert two_ranks.run(worker.whole, kind, one, "load") == saved * 2


def test_the_wrappers_in_a_dict_of_the_users(two_ranks: Ranks, tmp_path: Path) -> None:
    two_ranks.run(worker.stateful, "fsdp2", str(tmp_path))


def test_what_fits_on_one_rank_only_changes_nothing_on_any(two_ranks: Ranks, tmp_path: Path) -> None:
    for rank, (fits, chosen, unchanged) in enumerate(two_ranks.run(worker.one_rank_that_cannot, str(tmp_path))):
        assert "'actor': row has shape (1, 12) in the checkpoint, but (1, 13) here" in fits, rank
        assert "no such handle" in chosen, rank
        assert unchanged


def test_replicas_on_two_meshes_are_saved_and_loaded_while_they_are_alike(tmp_path: Path) -> None:
    with contextlib.closing(Ranks(4)) as four_ranks:
        assert four_ranks.run(worker.in_two_dimensions, str(tmp_path / "alike"), False) == [("saved", True)] * 4
        for said, is_unchanged in four_ranks.run(worker.in_two_dimensions, str(tmp_path / "unlike"), True):
            assert said.startswith("actor.head.weight is sharded over ranks (0, 2) and over (1, 3), with other values")
            assert is_unchanged


@pytest.mark.parametrize("options", [{"full_state_dict": True}, {"full_state_dict": True, "broadcast_from_rank0": True}])
def test_a_full_state_dict_for_an_offloaded_module_is_refused_and_nothing_is_written(options: dict[str, bool], two_ranks: Ranks) -> None:
    for (said,) in two_ranks.run(worker.broadcast, options):
        assert "'actor' is CPU_OFFLOADED in phase 'idle' and cannot be given a state dict" in said
        assert ("The values that torch wrote before this error are lost" in said) is ("broadcast_from_rank0" in options)


def test_a_full_state_dict_for_an_offloaded_optimizer_is_refused_and_nothing_is_written(two_ranks: Ranks) -> None:
    for said in two_ranks.run(worker.broadcast_to_optimizer, {"full_state_dict": True, "broadcast_from_rank0": True}):
        assert "'actor.optimizer' is CPU_OFFLOADED in phase 'idle' and cannot be given a state dict" in said


@pytest.mark.parametrize(("phase", "refused_by"), [(None, None), ("restore", 0), (None, 1)])
def test_what_shows_copies_is_loaded_by_its_own_code_and_where_that_fails_every_rank_is_told_and_no_other_handle_loaded(
    phase: str | None, refused_by: int | None, two_ranks: Ranks, tmp_path: Path
) -> None:
    for rank, (said, is_right) in enumerate(two_ranks.run(worker.taken_over, str(tmp_path), phase, refused_by)):
        assert is_right
        assert said == "" if refused_by is None else "'actor' was being loaded by its own code" in said
        assert refused_by in (None, rank) or said.startswith(f"rank {refused_by}: ")


@pytest.mark.parametrize("use_orig_params", [True, False])
def test_fsdp1_is_saved_in_the_phase_for_it_and_loaded_by_torch(use_orig_params: bool, two_ranks: Ranks, tmp_path: Path) -> None:
    for unborn, offloaded, in_background, load in two_ranks.run(worker.fsdp1, str(tmp_path), use_orig_params):
        assert "'actor.optimizer' steps parameters whose state is not born yet" in unborn
        assert "save it inside manager.phase('checkpoint')" in offloaded
        assert "use save()" in in_background
        assert "Inside manager.phase('restore'): state = {'actor': get_model_state_dict(...)}" in load
        assert "set_model_state_dict" in load
