"""The first buckets of a streamed step come while its phase computes: how many, when, and what becomes of them."""

from __future__ import annotations

import gc
import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from placement import Plan, State, View
from placement.policies import Colocated
from tests.support.worker import assert_same
from tests.unit.test_streamed_optimizer import BUCKET, WIDTH, Pair, adamw, words


def layers(count: int = 24) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(count)))


class Job(Pair):
    """A pair without an embedding, so that no piece is larger than a bucket, whose phases have as many steps as wanted."""

    def __init__(self, **keywords: Any) -> None:
        super().__init__(adamw, model=keywords.pop("model", None) or layers(), **keywords)
        self.count = 0

    def one_step(self) -> None:
        self.count += 1
        for net, optimizer in self.both():
            optimizer.zero_grad()
            net(torch.ones(2, WIDTH) * self.count).square().mean().backward()
            optimizer.step()

    def phase(self, steps: int) -> list[int]:
        """A phase with some steps. Returns the bytes that were early before each step, and at the end."""
        with self.manager.phase("train"):
            early = [self.handle.prefetched_bytes]
            for _ in range(steps):
                self.one_step()
                early.append(self.handle.prefetched_bytes)
        assert self.handle.prefetched_bytes == 0
        return early

    def bytes_in(self, chunk_bytes: int) -> int:
        """The bytes of state in the first so many device bytes: the chunks of ranges end with an unused part."""
        assert self.handle.holding is not None
        found = 0
        for r in self.handle.holding.ranges:
            for size, used in zip(r.chunk_sizes, r.used_sizes, strict=True):
                if chunk_bytes <= 0:
                    return found
                chunk_bytes, found = chunk_bytes - size, found + used
        return found

    def counted(self) -> tuple[int, int]:
        """Bytes that came early so far: used, and given up."""
        snapshot = self.manager.snapshot()
        return sum(handle.prefetch_used_bytes for handle in snapshot.handles), snapshot.prefetch_discarded_bytes


def test_as_many_buckets_as_the_window_has_room_for_come_before_the_step() -> None:
    job = Job()
    assert job.phase(1) == [0, 0], "the first step creates the state"
    before, after = job.phase(1)
    assert 2 * BUCKET < before <= 3 * BUCKET
    assert after == 0
    assert job.counted() == (job.bytes_in(before), 0)
    job.check()


def test_the_next_step_is_expected_where_the_phase_had_one_before() -> None:
    job = Job()
    job.phase(1)
    (_, none, still_none) = job.phase(2)
    assert (none, still_none) == (0, 0), "a second step was not expected"
    first, second, end = job.phase(2)
    assert first == second > 0
    assert end == 0
    used, discarded = job.counted()
    assert (used, discarded) == (job.bytes_in(first) * 3, 0)
    assert job.phase(1)[1] == first, "a second step was expected"
    assert job.counted() == (used + job.bytes_in(first), first)
    assert job.phase(1) == [first, 0]
    job.check()


def test_a_phase_without_a_step_changes_no_expectation() -> None:
    job = Job()
    job.phase(1)
    (early,) = job.phase(0)
    assert early > 0
    assert job.phase(1) == [early, 0]
    assert job.counted() == (job.bytes_in(early), early)
    job.check()


def test_a_step_of_other_parameters_gives_up_what_it_does_not_need() -> None:
    pair = Pair(adamw)
    pair.step(0)
    for step, used in enumerate([[6, 7], [2], [0, 1, 2], None], start=1):
        pair.step(step, used)
    pair.check()
    used_bytes = sum(handle.prefetch_used_bytes for handle in pair.manager.snapshot().handles)
    assert used_bytes > 0
    assert pair.manager.snapshot().prefetch_discarded_bytes > 0


def test_a_device_that_was_full_gets_nothing_early_any_more() -> None:
    job = Job()
    job.phase(1)
    with job.manager.phase("train"):
        assert job.handle.prefetched_bytes > 0
        job.device.run_out_of_memory()
        assert job.handle.prefetched_bytes == 0
        job.one_step()
    assert job.phase(1) == [0, 0]
    job.check()


def test_a_device_without_room_beside_the_phase_gets_nothing_early() -> None:
    job = Job()
    job.phase(2)
    with job.manager.phase("train"):
        assert job.handle.prefetched_bytes > 2 * BUCKET
        job.device.outside_bytes = job.device.memory().free_bytes + BUCKET
        job.one_step()
        assert job.handle.prefetched_bytes == 0
        job.one_step()
    job.device.outside_bytes = 0
    assert job.phase(1)[0] > 2 * BUCKET
    job.check()


def test_values_written_through_a_state_dict_reach_the_step() -> None:
    job = Job()
    job.phase(1)
    with job.manager.phase("train"):
        assert job.handle.prefetched_bytes > 0
        for optimizer in (job.optimizer, job.other):
            optimizer.state_dict()["state"][0]["exp_avg"].mul_(2)
        job.one_step()
    job.check()


def test_nothing_comes_early_while_somebody_may_write_into_the_host_copy() -> None:
    job = Job()
    job.phase(1)
    shown = job.optimizer.state_dict()["state"][3]["exp_avg"]
    with job.manager.phase("train"):
        assert job.handle.prefetched_bytes == 0
        for value in (shown, job.other.state_dict()["state"][3]["exp_avg"]):
            value.add_(1)
        job.one_step()
    part = shown[:2]
    del shown
    gc.collect()
    assert job.phase(1)[0] == 0, "a view is alive"
    del part
    gc.collect()
    assert job.phase(1)[0] > 0
    job.check()


def test_a_checkpoint_between_the_phases_keeps_what_comes_early_right() -> None:
    job = Job()
    job.phase(1)
    for _ in range(3):
        kept = {name: value.clone() for name, value in job.actor.state_dict().items()}
        state = [value["exp_avg"].clone() for value in job.handle.state_dict()["state"].values()]
        gc.collect()
        assert job.phase(1)[0] > 0
        assert_same(kept.keys(), job.plain.state_dict().keys())
        assert len(state) == len(list(job.plain.parameters()))
        job.check()


class _WithReference(Colocated):
    """Streams the optimizer's state in `train`, and wants the reference early there."""

    def plan(self, view: View) -> Plan:
        plan = super().plan(view)
        if view.phase != "train" or "ref" not in view.handles:
            return plan
        return replace(plan, prefetch={"ref": view.handles["ref"].num_bytes})


def test_a_step_and_another_handle_share_the_phase() -> None:
    job = Job(policy=_WithReference("streamed"))
    reference = layers(4)
    ref = job.manager.register("ref", reference, role="ref", readonly=True)
    wanted = {name: value.clone() for name, value in ref.state_dict().items()}
    gc.collect()
    job.phase(1)
    with job.manager.phase("train"):
        assert ref.prefetched_bytes == ref.num_bytes
        assert 2 * BUCKET < job.handle.prefetched_bytes <= 3 * BUCKET
        job.one_step()
        assert ref.prefetched_bytes == ref.num_bytes, "the step has given up what is another handle's"
        assert job.handle.prefetched_bytes == 0
    with job.manager.phase("log_prob"):
        assert ref.state is State.GPU_RESIDENT
        assert_same(dict(reference.state_dict()), wanted)
    job.check()


def test_what_fails_after_the_step_does_not_fail_the_step(caplog: pytest.LogCaptureFixture) -> None:
    job = Job()
    job.phase(2)
    with job.manager.phase("train"):
        job.device.copy = _failing_beside_steps(job)
        with caplog.at_level(logging.WARNING, "placement"):
            job.one_step()
        del job.device.copy
        assert "nothing more comes early" in caplog.text
        job.one_step()
    job.check()


def _failing_beside_steps(job: Job) -> Any:
    """A copy function of a device that fails for the optimizer's state where no streamed step is under way."""
    copy, holding = job.device.copy, job.handle.holding

    def checked(copies: Sequence[Any], direction: str) -> None:
        assert holding is not None
        slabs = [(r.host.address, r.host.address + r.nbytes) for r in holding.ranges]
        is_state = any(start <= each.host_address < end for each in copies for start, end in slabs)
        if is_state and not holding.is_stepping:
            raise RuntimeError("the device failed")
        copy(copies, direction)

    return checked


def test_the_window_of_an_optimizer_whose_pieces_are_large() -> None:
    pair = Pair(adamw)  # its embedding is larger than a bucket
    pair.step(0)
    with pair.manager.phase("train"):
        assert pair.handle.streamed is not None
        assert 0 < pair.handle.prefetched_bytes <= pair.handle.streamed.window_bytes
        for net, optimizer in pair.both():
            optimizer.zero_grad()
            net(words(1)).backward()
            optimizer.step()
    pair.check()


@pytest.mark.parametrize("state", [State.SYNCING, State.TRAINING])
def test_nothing_comes_early_where_no_step_is_due(state: State) -> None:
    """Outside every phase, and for an optimizer whose state is only published."""

    class Streaming(Colocated):
        def plan(self, view: View) -> Plan:
            plan = super().plan(view)
            is_here = view.phase in ("idle", "log_prob") and "adam" in view.handles
            here = State.SYNCING if view.phase == "log_prob" else state
            return replace(plan, targets={**plan.targets, "adam": here}, streamed=plan.streamed | {"adam"}) if is_here else plan

    job = Job(policy=Streaming("streamed"))
    job.phase(1)
    assert job.handle.is_streaming
    with job.manager.phase("log_prob"):
        assert (job.handle.is_streaming, job.handle.prefetched_bytes) == (True, 0)
    assert job.phase(1)[0] > 0
    assert_same(job.handle.state_dict(), job.other.state_dict())


def test_a_handle_joins_although_nothing_can_come_early(caplog: pytest.LogCaptureFixture) -> None:
    """A registration inside a phase is carried out before anything is brought early, so a failure of that must not fail it."""
    job = Job()
    job.phase(1)
    with job.manager.phase("train"):
        late = layers(2)
        optimizer = torch.optim.AdamW(late.parameters())
        critic = job.manager.register("critic", late, role="critic")
        job.device.copy = _failing_beside_steps(job)
        with caplog.at_level(logging.WARNING, "placement"):
            handle = job.manager.register("critic.adam", optimizer)
        del job.device.copy
        assert "nothing more comes early" in caplog.text
        assert (handle.state, critic.state) == (State.TRAINING, State.TRAINING)
        job.one_step()
    assert_same(job.handle.state_dict(), job.other.state_dict())
    assert_same(dict(job.actor.state_dict()), dict(job.plain.state_dict()))
