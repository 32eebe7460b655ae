"""Replicated handles: one host copy for the ranks of a machine, loaded by all of them together. Real processes over gloo."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from placement import Manager, RegistrationError
from placement.group import StoreGroup
from placement.testing import SimulatedDevice
from tests.group import frozen_worker as frozen
from tests.group import full_rank_worker, part_worker
from tests.group import replicated_worker as worker
from tests.group import trained_worker as trained
from tests.support.ranks import Ranks

_generations = itertools.count(1000)


@pytest.fixture
def generation() -> int:
    return next(_generations)


@pytest.fixture(scope="module")
def three() -> Iterator[Ranks]:
    started = Ranks(3)
    yield started
    started.close()


@pytest.fixture(params=["two_ranks", "three"])
def ranks(request: pytest.FixtureRequest) -> Ranks:
    found: Ranks = request.getfixturevalue(request.param)
    return found


def beside(function: Callable[..., Any], cases: Sequence[tuple[Any, ...]], *, dies: bool = True) -> list[list[Any]]:
    """Each case with three ranks of its own, of which most wait for the one that it names first: that one dies or stops."""

    def one(case: tuple[Any, ...]) -> list[Any]:
        ranks = Ranks(3)
        try:
            return ranks.run(function, next(_generations), *case, dies=case[0] if dies else None)
        finally:
            ranks.close()

    with ThreadPoolExecutor(3) as pool:
        return list(pool.map(one, cases))


def check_shares(seen: list[dict[str, Any]]) -> None:
    """One host copy in all, and no rank brought more than its share of it."""
    nbytes = seen[0]["bytes"]
    world_size = len(seen)
    slack = world_size * worker.PAGE * 2  # whole pages, and what does not divide in the last chunk
    assert nbytes <= sum(each["host"] for each in seen) < nbytes + worker.PAGE
    for each in seen:
        assert abs(each["host"] - nbytes / world_size) < slack
        assert all(abs(crossed - nbytes / world_size) < slack for crossed in each["crossed"])
    assert len({each["epoch"] for each in seen}) == 1


def test_values_host_memory_and_bytes_over_the_link(ranks: Ranks, generation: int) -> None:
    check_shares(ranks.run(worker.loads, generation, False))


def test_it_may_be_registered_inside_a_phase_and_stay_on_the_device(ranks: Ranks, generation: int) -> None:
    ranks.run(worker.joins, generation, False)


@pytest.mark.parametrize(("other", "name"), [(0, "body.0.bias"), (1, "bytes")])
def test_unequal_weights_are_refused_on_every_rank_by_name(ranks: Ranks, generation: int, other: int, name: str) -> None:
    for told, crossed in ranks.run(worker.different, generation, False, other, name):
        # Of two ranks nobody can say which is the odd one.
        odd = max(other, 1) if ranks.world_size == 2 else other
        assert f"'ref' cannot be replicated: {name!r} has other bytes on rank {odd}" in told
        assert crossed


def test_a_mistake_on_one_rank_is_told_to_all(three: Ranks, generation: int) -> None:
    first, second, third = three.run(worker.mistaken, generation)
    differ = ("not readonly", "an optimizer")
    assert {mistake: told for mistake, told in first.items() if mistake not in differ} == {
        mistake: told for mistake, told in third.items() if mistake not in differ
    }
    for mistake, words in (("a Lazy", "Lazy"), ("an engine", "engine"), ("external", "placement")):
        assert words in second[mistake]
        assert f"rank 1: {second[mistake]}" in first[mistake]
    for mistake in differ:
        # A rank that is late hears rank 1's own error before it has compared.
        words = ("rank 1 has other tensors than the rest", f"rank 1: {second[mistake]}")
        assert all(any(each in told[mistake] for each in words) for told in (first, third))
        assert "registers them in another way" in second[mistake]
    assert "rank 1: is about to enter log_prob" in first["something else"]


def test_an_fsdp2_actor_and_its_reference_train_on_after_one_rank_was_full(ranks: Ranks, generation: int) -> None:
    for told in ranks.run(full_rank_worker.trains_on, generation, "cpu", 1):
        assert len(told) == 2
        assert all("rank 1: DeviceMemoryError" in each for each in told)


@pytest.mark.parametrize("failing", [0, 1])
def test_out_of_memory_on_one_rank_is_everybodys_and_the_next_load_succeeds(ranks: Ranks, generation: int, failing: int) -> None:
    for told in ranks.run(worker.out_of_memory, generation, False, failing):
        assert all(f"rank {failing}: DeviceMemoryError" in each for each in told)


@pytest.mark.parametrize("failing", [0, 1])
def test_each_device_call_may_fail_in_a_registration_and_in_a_load(
    three: Ranks, generation: int, failing: int, counted: Callable[[str], None]
) -> None:
    cases = three.run(worker.faults, generation, failing)
    assert min(cases) > 20
    counted(f"replicated handles, 3 ranks: every device call of rank {failing} fails once: {max(cases)} cases")


def test_the_process_group_goes(three: Ranks, generation: int) -> None:
    for together, alone, reason, again in three.run(worker.destroyed, generation):
        assert together < alone == again
        assert reason == "the process group was destroyed"


def test_a_rank_that_cannot_read_the_decision_has_everything_and_the_others_go_on(three: Ranks, generation: int) -> None:
    told = [lost for lost, _ in three.run(worker.in_doubt, generation, 1)]
    assert "the prepared move is kept" in told[1]
    assert not told[0]
    assert not told[2]
    three.close()  # their process group is not what it was


def test_one_rank_leaves(three: Ranks, generation: int) -> None:
    (_, nothing), *others = three.run(worker.leaves, generation)
    assert nothing is None
    assert all(reason == "rank 0 has unregistered it" for _, reason in others)


def test_a_rank_dies_while_all_load() -> None:
    entering = {(2, "before put vote"): False, (0, "after put vote"): False, (1, "after put vote"): True, (0, "after put at"): True}
    for ((victim, _), enters), results in zip(entering.items(), beside(worker.killed_in_load, [*entering]), strict=True):
        for entered, alone in results[:victim] + results[victim + 1 :]:
            assert entered == enters
            assert (alone or "").startswith("a collective failed") == enters


def test_a_rank_dies_while_all_register() -> None:
    for results in beside(worker.killed_in_registration, [(0, "after wait basis"), (2, "before put vote")]):
        told = [each for each in results if each is not None]
        assert len(told) == 2
        assert all("cannot be replicated" in each for each in told)


@pytest.mark.parametrize("together", [True, False])
def test_rejoin(three: Ranks, generation: int, together: bool) -> None:
    """It is loaded by all ranks together as before; by each for itself where its new group has other ranks."""
    for crossed, alone, nbytes in three.run(worker.rejoins, generation, together):
        assert alone == (None if together else "the group was made anew with other ranks")
        assert [count < 0.6 * nbytes for count in crossed] == [True, together]


def test_one_rank_alone_has_an_ordinary_handle() -> None:
    manager = Manager(device=SimulatedDevice(1 << 20), group=StoreGroup(dist.HashStore(), 0, 1, 5.0))
    model = torch.nn.Linear(8, 8)
    handle = manager.register("ref", model, role="ref", readonly=True, replicated=True)
    before = model.weight.data_ptr()
    with manager.phase("log_prob"):
        assert handle.resident_bytes
    assert model.weight.data_ptr() == before
    manager.close()


def test_it_needs_a_group() -> None:
    manager = Manager(device=SimulatedDevice(1 << 20))
    with pytest.raises(RegistrationError, match="group="):
        manager.register("ref", torch.nn.Linear(8, 8), role="ref", readonly=True, replicated=True)
    assert not manager.handles


# --- frozen parameters of what is trained


@pytest.mark.parametrize("settings", [{}, {"policy": "cyclic"}, {"policy": "resident"}], ids=["colocated", "cyclic", "resident"])
def test_training_with_one_host_copy_of_what_is_frozen(two_ranks: Ranks, generation: int, settings: dict[str, Any]) -> None:
    seen = two_ranks.run(frozen.trains, generation, settings)
    fixed, everything = seen[0]["frozen"], seen[0]["all"]
    assert fixed > 0.8 * everything
    slack = 16 * worker.PAGE  # whole pages of each chunk
    assert abs(sum(each["host"] for each in seen) - (fixed + 2 * (everything - fixed))) < slack
    if not settings:
        for each in seen:
            assert abs(each["to_device"] - (fixed / 2 + everything - fixed)) < slack
            assert each["to_host"] == 0


@pytest.mark.parametrize("on", [[0], [1], [0, 1]])
def test_frozen_weights_that_change_are_kept_by_the_ranks_that_changed_them(two_ranks: Ranks, generation: int, on: list[int]) -> None:
    for rank, (alone, is_shared) in enumerate(two_ranks.run(frozen.merges, generation, on)):
        assert is_shared == (rank not in on)
        assert alone is not None
        assert ("has other bytes on rank" in alone) == (rank in on)


def test_a_frozen_layer_may_be_trained_later(two_ranks: Ranks, generation: int) -> None:
    assert two_ranks.run(frozen.unfreezes, generation) == [False, False]


def test_checkpoints(two_ranks: Ranks, generation: int, tmp_path: Path) -> None:
    assert two_ranks.run(frozen.saves_and_restores, generation, str(tmp_path / "a")) == [True, True]


@pytest.mark.parametrize("on", [[1], [0, 1]])
def test_a_checkpoint_of_changed_weights_that_are_on_the_device(two_ranks: Ranks, generation: int, tmp_path: Path, on: list[int]) -> None:
    # Where all have changed it alike, they share a host copy again.
    assert two_ranks.run(frozen.mirrors, generation, str(tmp_path / "a"), on) == [on == [0, 1] or rank not in on for rank in range(2)]


@pytest.mark.parametrize("failing", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_device_calls_may_fail_while_ranks_stop_sharing(
    two_ranks: Ranks, generation: int, failing: int, counted: Callable[[str], None]
) -> None:
    cases = two_ranks.run(frozen.faults, generation, failing, deadline_seconds=120.0)
    assert min(cases) > 10
    counted(f"replicated frozen weights that change: device calls of rank {failing} fail once: {cases[0]} cases")


# --- what is trained


@pytest.fixture(scope="module")
def four() -> Iterator[Ranks]:
    started = Ranks(4)
    yield started
    started.close()


def test_training_is_bit_exact_with_one_host_copy_of_weights_and_optimizer_state(four: Ranks, generation: int) -> None:
    together = four.run(trained.trains, generation, 6, False, True, {})
    alone = four.run(trained.trains, generation + 100_000, 6, False, False, {})
    for ours, theirs in zip(together, alone, strict=True):
        names = [name for name in ours["values"] if name != "seen"]
        assert all(ours["values"][name] == theirs["values"][name] == together[0]["values"][name] for name in names)
        slack = 20 * worker.PAGE  # whole pages of each chunk
        assert abs(ours["host"] - ours["own"] - ours["shared"] / 4) < slack
        assert abs(ours["to_host"] - ours["shared"] / 4) < slack
        assert abs(ours["first"] - ours["shared"] / 4) < slack
        assert theirs["host"] > 0.95 * ours["shared"] < 1.05 * theirs["to_host"]


@pytest.mark.parametrize("born", [False, True], ids=["later", "at birth"])
def test_replicas_that_differ_are_told_and_have_host_copies_of_their_own(three: Ranks, generation: int, born: bool) -> None:
    for told in three.run(trained.differs, generation, 2, born):
        assert len(told) == 2
        assert all("has other bytes on rank 2 than on the rest" in each for each in told)
        assert "'actor' has" in told[0]
        assert "'body.2.bias'" in told[0]
        assert "'optimizer'" in told[1]
        assert "exp_avg" in told[1]


@pytest.mark.parametrize("on", [[0, 1], [1]])
def test_what_is_written_into_a_host_copy_is_the_ranks_own(two_ranks: Ranks, generation: int, tmp_path: Path, on: list[int]) -> None:
    for rank, seen in enumerate(two_ranks.run(trained.writes_while_offloaded, generation, on, str(tmp_path / "a"))):
        trained_, written, alike, later, loaded, last = seen
        assert trained_ == later == last == [True, True]
        assert written == [rank not in on, True]
        assert alike == [True, True] if rank not in on else not alike[0]  # who holds a state dict keeps what it shows
        assert loaded == [False, False]


def test_a_rank_dies_while_all_write() -> None:
    """After a first step, at each step of the write; where the optimizer's state is born, and in a switch, at some."""
    cases = [(1, *step, False, False) for step in trained.STEPS]
    cases += [(1, *step, born, not born) for born in (True, False) for step in trained.STEPS[::4]]
    for case, (first, _, third) in zip(cases, beside(trained.killed, cases), strict=True):
        met = case[1:3] != ("meet", "before")
        for shares, told in (first, third):
            assert shares[0] == met, case
            assert met or "rank 1 has died" in told[0]


def test_a_rank_stops_while_all_write_and_goes_on_later() -> None:
    cases = [(1, "meet", "before"), (1, "meet", "after"), (1, "note_arrived", "before"), (1, "wait_for_shares", "before")]
    for case, (first, _, third) in zip(cases, beside(trained.stopped, cases, dies=False), strict=True):
        assert first[0] == third[0] == (case != cases[0]), case


@pytest.mark.parametrize("born", [False, True], ids=["later", "at birth"])
def test_each_step_of_the_shared_write_may_fail_on_one_rank(three: Ranks, generation: int, born: bool) -> None:
    for shares in three.run(trained.fails, generation, 1, born):
        assert shares == [[True, True]] * len(trained.STEPS)


@pytest.mark.parametrize(("failing", "switches"), [(0, False), pytest.param(1, True, marks=pytest.mark.slow)])
def test_device_calls_may_fail_while_replicas_train(
    two_ranks: Ranks, generation: int, failing: int, switches: bool, counted: Callable[[str], None]
) -> None:
    cases = two_ranks.run(trained.faults, generation, failing, switches, deadline_seconds=240.0)
    assert min(cases) > 10
    counted(f"trained replicas: device calls of rank {failing} fail once: {cases[0]} cases")


@pytest.mark.parametrize(
    "settings", [{"policy": "cyclic"}, {"policy": "resident"}, {"verify": "always"}], ids=["cyclic", "resident", "verified"]
)
def test_replicas_are_shared_under_each_policy(two_ranks: Ranks, generation: int, settings: dict[str, Any]) -> None:
    first, second = two_ranks.run(trained.trains, generation, 6, False, True, settings, True)
    assert first["host"] + second["host"] < 1.1 * first["shared"]


def test_an_error_on_one_rank_parts_the_ranks_until_the_next_step(three: Ranks, generation: int) -> None:
    for rank, (parted, told, later) in enumerate(three.run(trained.errs, generation, 1)):
        assert parted == [False, False]
        assert "alone" in told[0] if rank == 1 else "rank 1" in told[0]
        assert later == [True, True]


def test_a_rank_without_memory_for_a_copy_of_its_own_keeps_its_values(two_ranks: Ranks, generation: int) -> None:
    (told, stays, shares), (others, leaves, theirs) = two_ranks.run(trained.lacks_memory, generation, 0)
    assert "HostMemoryError" in told
    assert stays
    assert not leaves
    assert "rank 0: HostMemoryError" in others
    assert not shares[0]
    assert not theirs[0]


def test_a_run_that_is_resumed_shares_its_optimizer_state(two_ranks: Ranks, generation: int, tmp_path: Path) -> None:
    for loaded, stepped in two_ranks.run(trained.resumes, generation, str(tmp_path / "a")):
        assert loaded == [False, False]
        assert stepped == [True, True]


# --- a part of the group


def test_ranks_of_a_mesh_that_replicates_share_their_shards(four: Ranks, generation: int) -> None:
    seen = four.run(part_worker.hybrid, generation, "cpu")
    for rank, (members, _) in enumerate(seen):
        assert set(members) == {(rank % 2, rank % 2 + 2)}
        assert len(members) >= 2  # of the weights, and of the optimizer's state
    shares = [share for _, share in seen]
    assert [shares[rank] + shares[rank + 2] for rank in (0, 1)] == pytest.approx([1, 1], rel=0.15)  # whole pages


@pytest.mark.parametrize("different", [None, 3])
def test_ranks_of_each_process_group_share_a_copy(four: Ranks, generation: int, different: int | None) -> None:
    for rank, told in enumerate(four.run(part_worker.pairs, generation, different)):
        if different is None or rank % 2 != different % 2:
            assert told == []
        else:
            assert "'odd' or 'body.0.weight' has other bytes on rank 3 than on the rest" in told[0]


def test_ranks_of_each_machine_share_a_copy(three: Ranks, generation: int) -> None:
    assert three.run(part_worker.machines, generation, 1) == [[(0, 2)] * 2, [(1,)] * 2, [(0, 2)] * 2]


def test_a_group_that_nobody_can_tell_is_refused(three: Ranks, generation: int) -> None:
    for sharded, unequal in three.run(part_worker.refused, generation):
        assert "0 replicate all of them" in sharded
        # Rank 0 has another group than the others. All raise the reason of the rank that failed first.
        assert any(f"of the {of} ranks of its process group {came} register it" in unequal for of, came in ((2, 1), (3, 2)))


def test_weights_that_are_the_cast_of_shared_masters(ranks: Ranks, generation: int) -> None:
    ranks.run(trained.weights_of_masters, generation)
