"""The line about another policy: when it comes, and whether it is true.

Its promise is compared with the same job under that policy.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from placement import Manager, Policy
from placement.core import journal
from placement.devices.simulated import device
from placement.engines.base import TorchEngine
from placement.engines.tagged import TaggedEngine
from placement.group import StoreGroup
from placement.phases import engines, moves, reconciler
from placement.planning.advice import cyclic_like, length_of_step
from placement.planning.policy_lookup import resolve_policy
from placement.policies import Colocated, Cyclic
from placement.storage.transfer import exchange
from placement.testing import SimulatedDevice
from tests.support.early import wait_for_copies
from tests.support.threads import on_all

MIB = 1 << 20
sweep = pytest.mark.sweep
RATE = 1e7  # bytes a second, of the clock below
GRPO = ("rollout", "log_prob", "train", "weight_sync")
PARTS = {"weights": MIB, "kv_cache": 3 * MIB}
PPO = ("rollout", "reward", "log_prob", "values", "train", "weight_sync")


class Clock:
    """A clock that only waiting and working move on, so that seconds are those of the link."""

    now = 1.0

    def monotonic(self) -> float:
        return self.now

    time = monotonic

    def sleep(self, seconds: float) -> None:
        self.now += seconds


CLOCK = Clock()


class Engine(TaggedEngine):
    """An engine whose memory takes some time to go and to come."""

    def __init__(self, device: SimulatedDevice) -> None:
        super().__init__(tag_bytes=PARTS, verify="answer", offloaded=tuple(PARTS))
        self.device = device
        self.moved_bytes = 0  # taken and given up, so far

    def drain(self) -> None: ...
    def admit(self) -> None: ...
    def receive(self, bucket: Sequence[tuple[str, torch.Tensor]]) -> None: ...

    def offload(self, tags: Collection[str]) -> None:
        self.move(-sum(PARTS[tag] for tag in tags))

    def load(self, tags: Collection[str]) -> None:
        self.move(sum(PARTS[tag] for tag in tags))

    def move(self, nbytes: int) -> None:
        CLOCK.sleep(abs(nbytes) / RATE)
        self.device.outside_bytes += nbytes
        self.moved_bytes += abs(nbytes)


def net() -> torch.nn.Module:
    return torch.nn.Sequential(*(torch.nn.Linear(256, 256, bias=False) for _ in range(8)))


@dataclass
class Job:
    """A job of RL post-training on a slow link, of models of 2 MiB."""

    policy: str | Policy | type[Policy] = "colocated"
    cycle: Sequence[str] = GRPO
    only: Mapping[str, Sequence[str]] = field(default_factory=dict)
    capacity_bytes: int = 64 * MIB
    budget_bytes: int | None = None
    has_critic: bool = False
    engine_kind: str = ""  # "tagged", "torch", or none
    group: StoreGroup | None = None
    is_one_phase: bool = False  # one phase stays open from step to step

    def __post_init__(self) -> None:
        torch.manual_seed(0)
        simulated = SimulatedDevice(
            self.capacity_bytes, chunk_bytes=256 << 10, bandwidth_bytes_per_second=RATE
        )
        self.manager = Manager(
            device=simulated, policy=self.policy, budget_bytes=self.budget_bytes, group=self.group
        )
        self.models: list[torch.nn.Module] = []
        self.optimizers: list[torch.optim.Optimizer] = []
        self.losses: list[float] = []
        self.actor = self.trained("actor")
        self.frozen("ref")
        self.frozen("reward")
        if self.has_critic:
            self.trained("critic")
        self.engine: Any = None
        if self.engine_kind == "tagged":
            self.engine = Engine(simulated)
        elif self.engine_kind == "torch":
            self.engine = TorchEngine(net())
        if self.engine is not None:
            self.manager.register("rollout", self.engine)

    def frozen(self, role: str) -> torch.nn.Module:
        self.models.append(net())
        self.manager.register(role, self.models[-1], role=role, readonly=True)
        return self.models[-1]

    def trained(self, role: str) -> torch.nn.Module:
        self.models.append(net())
        self.manager.register(role, self.models[-1], role=role)
        self.optimizers.append(torch.optim.AdamW(self.models[-1].parameters(), lr=1e-3))
        self.manager.register(f"{role}.optimizer", self.optimizers[-1])
        return self.models[-1]

    def work(self, phase: str) -> None:
        wait_for_copies(self.manager)
        CLOCK.sleep(0.1)
        if phase == "weight_sync" and self.engine is not None:
            for bucket in self.manager.handles["actor"].weights(bucket_bytes=4 * MIB):
                self.engine.update_weights(bucket)
        if phase != "train":
            return
        for optimizer in self.optimizers:
            if optimizer is self.optimizers[0]:
                loss = (self.actor(torch.ones(2, 256)) - 1).square().mean()
                loss.backward()
                self.losses.append(loss.item())
            else:
                for parameter in optimizer.param_groups[0]["params"]:
                    parameter.grad = torch.ones_like(parameter)
            optimizer.step()
            optimizer.zero_grad()

    def step(self, cycle: Sequence[str] | None = None) -> None:
        first, *others = self.cycle if cycle is None else cycle
        if self.is_one_phase and self.manager.phase_name != "idle":
            self.manager.switch(first, only=self.only.get(first))
        else:
            self.manager.enter(first, only=self.only.get(first))
        self.work(first)
        for phase in others:
            self.manager.switch(phase, only=self.only.get(phase))
            self.work(phase)
        if not self.is_one_phase:
            self.manager.leave()

    def copied_bytes(self) -> int:
        """Bytes that loads and offloads have copied so far, without those that an engine moves."""
        handles = [
            h for h in self.manager.snapshot().handles if not h.offloaded_tags + h.resident_tags
        ]
        return sum(handle.loaded_bytes + handle.offloaded_bytes for handle in handles)

    def stall_seconds(self) -> float:
        return sum(self.manager.snapshot().phase_stall_seconds.values())

    def moves(self) -> tuple[int, float]:
        """Do a step. Returns the bytes that it copied, and the seconds that it waited for moves."""
        before = self.copied_bytes(), self.stall_seconds()
        self.step()
        return self.copied_bytes() - before[0], self.stall_seconds() - before[1]

    def close(self) -> None:
        with contextlib.suppress(Exception):
            self.manager.leave()
        self.manager.close()


@pytest.fixture(autouse=True)
def _at_info(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    caplog.set_level(logging.INFO, "placement")
    for module in (device, exchange, moves, engines, reconciler, journal):
        monkeypatch.setattr(module, "time", CLOCK)


def advice_in(caplog: pytest.LogCaptureFixture) -> list[Any]:
    """The lines about another policy, as records."""
    return [record for record in caplog.records if "would have saved" in record.getMessage()]


@pytest.mark.parametrize(
    ("job", "proposed"),
    [
        pytest.param({}, "cyclic", id="everything fits", marks=sweep),
        pytest.param({"is_one_phase": True}, "cyclic", id="one phase stays open", marks=sweep),
        pytest.param(
            {"cycle": PPO, "has_critic": True, "budget_bytes": 15 * MIB},
            "cyclic",
            id="some fit",
            marks=sweep,
        ),
        pytest.param(
            {"only": {"log_prob": ["actor"], "train": ["actor"]}},
            "cyclic",
            id="phases with only",
            marks=sweep,
        ),
        pytest.param(
            {
                "only": {"log_prob": ["actor", "ref"]},
                "engine_kind": "torch",
                "capacity_bytes": int(7.8 * MIB),
            },
            "cyclic",
            id="early bytes have only the room that is left",
        ),
        pytest.param({"engine_kind": "tagged"}, "cyclic", id="an engine"),
        pytest.param(
            {"engine_kind": "torch"}, "cyclic", id="an engine of plain modules", marks=sweep
        ),
        pytest.param(
            {"engine_kind": "tagged", "policy": "colocated(stream_sync=True)"},
            "cyclic",
            id="a streamed weight sync",
            marks=sweep,
        ),
        pytest.param(
            {"policy": "cyclic(idle='empty')"}, "cyclic(idle='keep')", id="empty outside phases"
        ),
        pytest.param(
            {"policy": Colocated(drop_gradients=True)},
            "cyclic(drop_gradients=True)",
            id="with options",
            marks=sweep,
        ),
    ],
)
def test_one_line_names_the_policy_under_which_a_step_copies_what_it_promises(
    job: dict[str, Any], proposed: str, caplog: pytest.LogCaptureFixture
) -> None:
    own = Job(**job)
    for _ in range(5):
        own.step()
    (line,) = advice_in(caplog)
    text = line.getMessage()
    assert f"policy {proposed} would have saved" in text
    assert text.endswith(f'Manager(policy="{proposed}"), or PLACEMENT_POLICY="{proposed}"')
    other = Job(**{**job, "policy": proposed})
    for _ in range(5):
        other.step()
    (own_bytes, own_seconds), (other_bytes, other_seconds) = own.moves(), other.moves()
    assert own.losses == other.losses
    assert other_bytes == line.placement.copied_bytes < own_bytes
    promised_seconds = float(text.split("saved ")[1].split(" s")[0])
    assert promised_seconds > 0.2
    # else bytes arrive early under one of the two, and the seconds depend on threads
    if other_bytes == 0 and own.manager.policy.name == "colocated":
        assert promised_seconds == pytest.approx(own_seconds - other_seconds, rel=0.02)
    peak_bytes = other.capacity_bytes - line.placement.spare_bytes
    limit_bytes = other.budget_bytes or other.capacity_bytes
    assert other.manager.snapshot().peak_bytes <= peak_bytes <= limit_bytes
    own.close()
    other.close()
    assert len(advice_in(caplog)) == 1


def test_waits_of_kernels_for_bytes_count_as_seconds_of_the_moves(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    promised_seconds = []
    for waited_seconds in (0.0, 1.0):
        monkeypatch.setattr(SimulatedDevice, "waits", ("a load",), raising=False)
        monkeypatch.setattr(SimulatedDevice, "waited_seconds", lambda _, s=waited_seconds: s)
        job = Job()
        for _ in range(5):
            job.step()
        job.close()
        (line,) = advice_in(caplog)
        caplog.clear()
        promised_seconds.append(float(line.getMessage().split("saved ")[1].split(" s")[0]))
    without, with_waits = promised_seconds
    assert with_waits >= without + 1.0


def test_of_several_ranks_the_first_tells_it_for_the_least_budget(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def run(policy: str) -> list[Job]:
        """Two ranks. The second has less memory than everything needs."""
        store = torch.distributed.HashStore()
        jobs = []
        for rank, capacity_bytes in enumerate((64 * MIB, int(7.6 * MIB))):
            group = StoreGroup(store, rank, 2, 20.0)
            jobs.append(Job(policy, capacity_bytes=capacity_bytes, group=group))
        for _ in range(5):
            on_all(jobs, Job.step)
        return jobs

    own = run("colocated")
    (line,) = advice_in(caplog)
    other = run("cyclic")
    (copied_bytes, _), _ = on_all(other, Job.moves)
    assert 0 < copied_bytes == line.placement.copied_bytes
    for job in (*own, *other):
        job.close()


class Own(Colocated):
    """A policy of the user's own, even one that changes nothing and keeps the name."""


@pytest.mark.parametrize(
    "job",
    [
        pytest.param({"policy": "cyclic"}, id="it has the best policy"),
        pytest.param({"policy": Own}, id="a policy of its own"),
        pytest.param(
            {"cycle": ("ref_log_prob", "reward"), "budget_bytes": 2 * MIB}, id="nothing may stay"
        ),
        pytest.param(
            {"capacity_bytes": 7 * MIB, "budget_bytes": 64 * MIB},
            id="the budget is more than the device has",
        ),
    ],
)
def test_there_is_no_line_where_nothing_would_be_saved_or_nothing_is_known(
    job: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    own = Job(**job)
    for _ in range(5):
        own.step()
    own.close()
    assert advice_in(caplog) == []


def test_there_is_no_line_for_steps_of_different_phases(caplog: pytest.LogCaptureFixture) -> None:
    job = Job()
    for number in range(8):
        job.step(("rollout", *("log_prob", "train") * (1 + number % 3), "weight_sync"))
    job.close()
    assert advice_in(caplog) == []


def test_a_part_of_a_step_that_is_repeated_is_not_the_step(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """In a step of many updates the rollout still needs its room."""
    job = Job()
    job.step(("rollout", *("log_prob", "train") * 20))
    assert advice_in(caplog) == []
    job.close()


def test_a_step_is_what_has_come_three_times_and_has_every_phase_so_far() -> None:
    def length(phases: str) -> int:
        return length_of_step([journal.PhaseSpan(phase, 0.0, 0.0) for phase in phases])

    assert [length("ab"), length("abab"), length("bababa"), length("aaa")] == [0, 0, 2, 1]
    assert [length("abcbcbcbc"), length("abcbc" * 3)] == [0, 5]
    assert length("bbabab") == 0


def test_there_is_no_line_where_the_worker_gives_handles_up_by_hand(
    caplog: pytest.LogCaptureFixture,
) -> None:
    job = Job()
    for _ in range(5):
        with job.manager.phase("log_prob") as phase:
            phase.done_with("ref")
            phase.done_with("actor")
            phase.switch("train")
            job.work("train")
    job.close()
    assert advice_in(caplog) == []


def test_a_job_whose_handles_go_meanwhile_is_not_disturbed(
    caplog: pytest.LogCaptureFixture,
) -> None:
    job = Job()
    for number in range(5):
        job.step()
        job.manager.unregister(f"late{number - 1}") if number else None
        job.models.append(torch.nn.Linear(256, 256))
        job.manager.register(f"late{number}", job.models[-1], role="actor")
    assert len(job.losses) == 5
    job.close()


def test_nothing_is_told_where_nobody_reads_it(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "placement")
    job = Job()
    for _ in range(5):
        job.step()
    caplog.set_level(logging.INFO, "placement")  # from now on it is read
    for _ in range(5):
        job.step()
    assert len(advice_in(caplog)) == 1
    job.close()


@pytest.mark.parametrize(
    ("policy", "has_turns", "proposed"),
    [
        (Colocated(), True, "cyclic(idle='empty')"),
        (
            Cyclic(("rollout", "train"), idle="empty"),
            False,
            "cyclic(cycle=('rollout', 'train'), idle='keep')",
        ),
        (Own(), False, ""),
    ],
)
def test_the_proposed_policy_has_the_options_of_the_job_s_own(
    policy: Policy, has_turns: bool, proposed: str
) -> None:
    assert cyclic_like(policy, has_turns=has_turns) == proposed
    if proposed:
        made = resolve_policy(proposed)
        assert isinstance(made, Cyclic)
        assert made.idle == ("empty" if has_turns else "keep")
        assert made.cycle == getattr(policy, "cycle", ())
