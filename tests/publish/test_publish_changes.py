"""`handle.weight_changes()`: receivers that write the changes have the bits of a whole publication,
whatever came in between."""

from __future__ import annotations

import copy
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import placement.checkpoint
from placement import Manager, PhaseError
from placement.policies import Colocated
from placement.publish.changes import WeightChange
from placement.testing import Faults, SimulatedDevice, assert_nothing_resident
from tests.support.early import Early
from tests.support.sweeps import few

CHUNK = 16 << 10


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(64, 64)
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(6))
        self.frozen = nn.Linear(256, 256)
        self.frozen.requires_grad_(False)
        self.head = nn.Linear(64, 64, bias=False)
        self.head.weight = self.embed.weight  # tied
        self.register_buffer("steps", torch.zeros(3, dtype=torch.int64))

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.embed(words)
        for layer in self.layers:
            found = torch.tanh(layer(found))
        self.steps += 1
        return self.head(found).square().mean()


class Receiver:
    """Has full weights of its own, and writes what comes."""

    loaded_bytes = 0  # what the last publication has loaded

    def __init__(self, actor: Any, **how: Any) -> None:
        self.actor, self.how = actor, how
        self.version: int | None = None
        weights = {
            info.name: torch.zeros(info.shape, dtype=info.dtype)
            for info in actor.weights_info(**how)
        }
        self.weights = {
            name: nn.Parameter(each, requires_grad=each.is_floating_point())
            for name, each in weights.items()
        }

    def sync(self, bucket_bytes: int = 1 << 16) -> dict[str, WeightChange]:
        """Take one publication. Returns its changes, with tensors of their own."""
        got: dict[str, WeightChange] = {}
        before = self.actor.counters.loaded_bytes
        for bucket in self.actor.weight_changes(
            since=self.version, bucket_bytes=bucket_bytes, **self.how
        ):
            assert bucket.nbytes <= bucket_bytes or len(bucket) == 1
            assert bucket.base in (None, self.version)
            for change in bucket:
                change.write_into(self.weights[change.name])
                got[change.name] = copy.deepcopy(change)
            version = bucket.version
        self.version = version
        self.loaded_bytes = self.actor.counters.loaded_bytes - before
        return got

    def take(self) -> dict[str, WeightChange]:
        """Take one publication, and compare with a whole one. Returns its changes."""
        got = self.sync()
        self.check()
        return got

    def check(self) -> None:
        """Compare with a whole publication, bit by bit."""
        seen = {}
        for bucket in self.actor.weights(**self.how):
            seen |= {name: tensor.clone() for name, tensor in bucket}
        assert seen.keys() == self.weights.keys()
        for name, tensor in seen.items():
            assert (
                tensor.view(-1)
                .view(torch.uint8)
                .equal(self.weights[name].view(-1).view(torch.uint8))
            ), name


class Job:
    """One actor with AdamW, a step of which changes few elements of the bf16 weights."""

    def __init__(
        self,
        dtype: torch.dtype = torch.float32,
        policy: Any = None,
        *,
        lr: float = 1e-5,
        device: Any = None,
        **settings: Any,
    ) -> None:
        torch.manual_seed(0)
        self.model: Any = Model().to(dtype)
        self.optimizer = torch.optim.AdamW(
            [p for p in self.model.parameters() if p.requires_grad], lr=lr
        )
        device = device or SimulatedDevice(64 << 20, chunk_bytes=CHUNK)
        self.manager = Manager(device=device, policy=policy or Colocated(), **settings)
        self.actor = self.manager.register("actor", self.model, role="actor")
        self.manager.register("adam", self.optimizer)

    def step(self, seed: int = 0) -> None:
        self.optimizer.zero_grad()
        self.model(
            torch.randint(0, 64, (8,), generator=torch.Generator().manual_seed(seed))
        ).backward()
        self.optimizer.step()

    def train(self, seed: int = 0) -> None:
        with self.manager.phase("train"):
            self.step(seed)

    def train_and_publish(self, receiver: Receiver, seed: int = 0) -> dict[str, WeightChange]:
        """A step, and a publication before it is offloaded."""
        with self.manager.phase("train") as phase:
            self.step(seed)
            phase.switch("weight_sync")
            return receiver.take()

    def publish(self, receiver: Receiver) -> dict[str, WeightChange]:
        """A publication in a phase of its own, which the receiver takes."""
        with self.manager.phase("weight_sync"):
            return receiver.take()


def wholes(got: dict[str, WeightChange]) -> set[str]:
    return {name for name, change in got.items() if change.positions is None}


def test_steps_that_are_published_before_they_are_offloaded() -> None:
    """AdamW at an RL learning rate in bf16."""
    job = Job(torch.bfloat16, lr=1e-6)
    receiver = Receiver(job.actor)
    whole = sum(t.nbytes for t in receiver.weights.values())
    for index in range(6):
        got = job.train_and_publish(receiver, index)
        if not index:
            assert wholes(got) == set(receiver.weights)
            continue
        assert wholes(got) <= {"steps"}
        assert 0 < sum(change.nbytes for change in got.values()) < whole / 10
        assert got["frozen.weight"].values.numel() == 0
    assert_nothing_resident(job.manager)


@pytest.mark.parametrize("streams", [False, True])
def test_steps_that_are_offloaded_before_the_publication(streams: bool) -> None:
    job = Job(torch.bfloat16, Colocated(stream_sync=streams), lr=1e-6)
    receiver = Receiver(job.actor)
    job.publish(receiver)
    for index in range(3):
        job.train(index)
        with job.manager.phase("weight_sync"):
            got = receiver.sync()
            assert (receiver.loaded_bytes, job.actor.resident_bytes > 0) == (0, not streams)
            receiver.check()
        trained = {name for name, weight in job.model.named_parameters() if weight.requires_grad}
        assert trained <= wholes(got)
        assert sum(change.nbytes for change in job.publish(receiver).values()) == 0
    assert_nothing_resident(job.manager)


class Views(nn.Module):
    """Parameters that share storages: a part of another one, at its beginning, and one with gaps.
    Types that torch cannot index."""

    def __init__(self) -> None:
        super().__init__()
        whole = torch.zeros(64, 256, dtype=torch.bfloat16)
        self.part, self.whole = nn.Parameter(whole[:4]), nn.Parameter(whole)
        self.gaps = nn.Parameter(torch.zeros(64, 4096, dtype=torch.bfloat16)[:, ::256])
        for dtype in (
            torch.uint16,
            torch.uint32,
            torch.uint64,
            torch.float8_e8m0fnu,
            torch.float4_e2m1fn_x2,
        ):
            self.register_buffer(str(dtype)[6:], torch.zeros(4096, dtype=torch.uint8).view(dtype))


@pytest.mark.parametrize("offloads", [False, True])
def test_parameters_that_are_views(offloads: bool) -> None:
    model = Views()
    manager = Manager(device=SimulatedDevice(64 << 20, chunk_bytes=CHUNK))
    actor = manager.register("actor", model, role="actor")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    manager.register("sgd", optimizer)
    receiver = Receiver(actor)
    for index in range(4):
        with manager.phase("train") as phase:
            with torch.no_grad():
                model.whole[3 + 60 * (index % 2), 7] += 1
                model.gaps[63, index] += 1
                for buffer in model.buffers():
                    buffer.view(torch.uint8)[8 * index] = index
            if offloads:
                phase.switch("idle")
            phase.switch("weight_sync")
            receiver.take()


def test_offloads_between_two_publications_make_a_weight_whole_once() -> None:
    job = Job(torch.bfloat16)
    receiver = Receiver(job.actor)
    weight = job.model.layers[2].weight
    job.publish(receiver)
    with job.manager.phase("train"), torch.no_grad():
        first = weight[1, 1].clone()
        weight[1, 1] = weight[3, 40] = 5.0
    with job.manager.phase("log_prob"):
        pass
    with job.manager.phase("train") as phase:
        with torch.no_grad():
            weight[1, 1] = first  # as it was published
            weight[3, 40] = 6.0
        phase.switch("weight_sync")
        assert "layers.2.weight" in wholes(receiver.take())
    assert job.publish(receiver)["layers.2.weight"].values.numel() == 0


def test_sent_is_what_differs_in_the_published_dtype_by_its_bits() -> None:
    job = Job(torch.float32)
    receiver = Receiver(job.actor, dtype="bfloat16")
    weight = job.model.layers[1].weight
    found = []
    for value in (1.0, 1.0 + 1e-6, 0.0, -0.0, float("nan"), float("nan")):
        with job.manager.phase("train") as phase:
            with torch.no_grad():
                weight[3, 5] = value
            phase.switch("weight_sync")
            change = receiver.take()["layers.1.weight"]
        found.append(None if change.positions is None else change.positions.tolist())
    assert found == [None, [], [197], [197], [197], []]


@pytest.mark.parametrize(
    "how",
    [
        "state dict before",
        "state dict",
        "restore",
        "failed offload",
        "load_state_dict",
        "swapped",
    ],
)
def test_what_breaks_the_proof_makes_weights_whole(
    how: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    faults = Faults(SimulatedDevice(64 << 20, chunk_bytes=CHUNK))
    job = Job(torch.bfloat16, device=faults)
    receiver = Receiver(job.actor)
    job.publish(receiver)
    if how == "restore":
        placement.checkpoint.save(job.manager, tmp_path)
    if how == "state dict before":
        job.actor.state_dict()["layers.0.weight"][0] = 7.0
    job.manager.enter("train")
    job.step(1)
    if how == "load_state_dict":
        job.model.load_state_dict(
            {name: value * 2 for name, value in job.model.state_dict().items()}
        )
    elif how == "swapped":
        one, other = (job.model.layers[at].weight for at in (2, 3))
        one.data, other.data = other.data, one.data
    elif how == "failed offload":
        faults.fail("copy", at=3)
        with pytest.raises(RuntimeError, match="injected fault"):
            job.manager.switch("idle")
        job.step(2)
    assert ("offload failed" in caplog.text) is (how == "failed offload")
    if how in ("state dict", "restore"):
        job.manager.switch("idle")
        if how == "state dict":
            job.actor.state_dict()["layers.0.weight"][0] = 7.0
        else:
            placement.checkpoint.load(job.manager, tmp_path)
    job.manager.switch("weight_sync")
    got = receiver.take()
    job.manager.leave()
    # which brings back what was published
    assert ("layers.0.weight" in wholes(got)) is (how != "restore")
    assert wholes(job.train_and_publish(receiver, 3)) <= {"steps"}


def test_a_write_into_the_host_copy_that_is_undone_after_a_publication() -> None:
    job = Job(torch.bfloat16, Colocated(stream_sync=True))
    receiver = Receiver(job.actor)
    with job.manager.phase("log_prob"):
        pass
    job.publish(receiver)
    shown = job.actor.state_dict()["layers.0.weight"]
    before = shown.clone()
    shown.fill_(7.0)
    job.publish(receiver)
    shown.copy_(before)
    del shown
    with job.manager.phase("log_prob"):
        pass
    job.publish(receiver)


@pytest.mark.parametrize("operation", few(["copy", "sync"], "copy"))
def test_an_offload_that_fails_under_way(operation: str) -> None:
    for at in (1, 2, 3, 5, 8, 13, 21, 34, 55):
        faults = Faults(SimulatedDevice(64 << 20, chunk_bytes=CHUNK))
        job = Job(torch.bfloat16, device=faults)
        receiver = Receiver(job.actor)
        for index in range(3):
            job.manager.enter("train")
            job.step(index)
            if index == 1:
                faults.fail(operation, at=at)
                with suppress(RuntimeError):
                    job.manager.switch("idle")
                faults.clear()
            job.manager.switch("weight_sync")
            receiver.take()
            job.manager.leave()
        if not faults.fired:
            break
    assert at > 1
    assert not faults.fired  # there are no more calls


@pytest.mark.parametrize(
    ("how", "offloads"),
    [
        *((how, True) for how in ("missed", "early end", "restart")),
        *(pytest.param(how, True, marks=pytest.mark.sweep) for how in ("unknown", "another dtype")),
        ("missed", False),
        pytest.param("early end", False, marks=pytest.mark.sweep),
    ],
)
def test_a_receiver_that_lacks_the_version_gets_everything(how: str, offloads: bool) -> None:
    job = Job(torch.bfloat16)
    receiver, late = Receiver(job.actor), Receiver(job.actor)

    def publish(*receivers: Receiver) -> list[dict[str, WeightChange]]:
        with job.manager.phase("train") as phase:
            job.step()
            if offloads:
                phase.switch("idle")
            phase.switch("weight_sync")
            if how == "early end" and job.actor.published is not None:
                next(iter(job.actor.weight_changes(since=receiver.version, bucket_bytes=4096)))
            return [each.take() for each in receivers]

    publish(receiver)
    if how == "missed":
        job.publish(late)
        publish(receiver)  # to the other alone: its version is not `late`'s
        assert wholes(publish(late)[0]) == set(late.weights)
    elif how == "unknown":
        receiver.version = 12345
        assert wholes(publish(receiver)[0]) == set(receiver.weights)
    elif how == "early end":
        assert wholes(publish(receiver)[0]) == set(receiver.weights)
        with job.manager.phase("weight_sync"):
            next(iter(job.actor.weight_changes(since=receiver.version, bucket_bytes=4096)))
        # nobody knows what the receivers have
        assert wholes(publish(receiver)[0]) == set(receiver.weights)
    elif how == "another dtype":
        other = Receiver(job.actor, dtype="float32")
        other.version = receiver.version
        assert wholes(publish(other)[0]) == set(other.weights)
    else:
        job.manager.close()
        job.manager = Manager(device=SimulatedDevice(64 << 20, chunk_bytes=CHUNK))
        receiver.actor = job.manager.register("actor", job.model, role="actor")
        assert wholes(job.publish(receiver)) == set(receiver.weights)


@pytest.mark.parametrize("by", ["a policy that leaves it aside", "a checkpoint"])
def test_what_has_reached_the_host_copy_before_the_publication_comes_whole(
    by: str, tmp_path: Path
) -> None:
    # saved while that phase computes
    job = Job(torch.bfloat16, Early({"ref_log_prob": {"actor": 1 << 30}}))
    receiver = Receiver(job.actor)
    for index in range(3):
        with job.manager.phase("train") as phase:
            job.step(index)
            if by == "a checkpoint":
                placement.checkpoint.async_save(job.manager, tmp_path / str(index)).result()
            else:
                phase.switch("ref_log_prob")
                assert job.actor.prefetched_bytes
            phase.switch("weight_sync")
            got = receiver.take()
        assert "layers.0.weight" in wholes(got)


def test_errors_are_those_of_weights_and_a_receiver_of_another_kind_is_told() -> None:
    job = Job(torch.bfloat16)
    with pytest.raises(PhaseError, match="weights are published while SYNCING"):
        job.actor.weight_changes(since=None)
    with job.manager.phase("weight_sync"):
        with pytest.raises(ValueError, match="bucket_bytes must be positive"):
            job.actor.weight_changes(since=None, bucket_bytes=0)
        (bucket,) = list(job.actor.weight_changes(since=None))
        with pytest.raises(ValueError, match=r"'embed\.weight' is torch\.bfloat16 of shape"):
            bucket[0].write_into(torch.zeros(64, 64))
        kept = job.actor.weight_changes(since=None, bucket_bytes=4096)
        next(kept)
    with pytest.raises(PhaseError):
        next(kept)
