"""Publishing sharded and wrapped models: the full weights by clean names, within bounded memory,
whatever a consumer does.

Real torch wrappers on two ranks (bodies in publish_worker.py), resident and streamed from the host
copy.
"""

from __future__ import annotations

import copy
import itertools
import pickle
from collections import deque
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.distributed_c10d import PrefixStore, _get_default_store
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from placement import EngineError, GroupError, Manager, PhaseError, RegistrationError, TorchEngine
from placement.frameworks.weights import Reader, weight_of
from placement.group import StoreGroup
from placement.publish import VllmWeightSource
from placement.publish.ahead import ReadAhead, plainly
from placement.testing import Faults, SimulatedDevice, assert_nothing_resident
from tests.engines.test_vllm_source import Source033, stand_in
from tests.sharded import one_of_each
from tests.sharded import publish_worker as worker
from tests.sharded.publish_worker import BUILDS, assert_same, manager_of, placed, read, wanted_of
from tests.support.ranks import Ranks, on_ranks
from tests.support.sweeps import diagonal


@pytest.mark.parametrize(
    ("build", "streams"), diagonal(BUILDS.keys(), {"resident": False, "streamed": True})
)
def test_the_full_weights_of_the_plain_model(two_ranks: Ranks, build: str, streams: bool) -> None:
    found = two_ranks.run(worker.publish, build, streams)
    assert [each["external"] for each in found] == [build == "fsdp2_external"] * 2


@pytest.mark.parametrize("build", ["fsdp2", "fsdp1_flat"])
def test_a_world_of_one(one_rank: Ranks, build: str) -> None:
    one_rank.run(worker.publish, build, False)


@pytest.mark.sweep
def test_what_torch_gathers_for_a_checkpoint_is_the_same(two_ranks: Ranks) -> None:
    for published in two_ranks.run(one_of_each.publish, "fsdp2", "cpu", False):
        one_of_each.check_published(published)


@pytest.mark.parametrize(
    ("build", "dtype"),
    [
        pytest.param("plain", None, marks=pytest.mark.sweep),
        ("fsdp2", torch.bfloat16),
        pytest.param("fsdp2_external", None, marks=pytest.mark.sweep),
        ("fsdp2_rows", None),
        pytest.param("fsdp1_flat", None, marks=pytest.mark.sweep),
    ],
)
def test_the_device_holds_one_bucket_and_what_makes_one_weight(
    two_ranks: Ranks, build: str, dtype: torch.dtype | None
) -> None:
    """One more tensor of the largest weight's size; cut along another dimension than the first, its
    local part as well. Streamed, also the next bucket, which comes meanwhile."""
    bucket_bytes = 40_000
    for streams in (False, True):
        for peak, largest in two_ranks.run(worker.peak, build, streams, bucket_bytes, dtype):
            assert largest <= bucket_bytes
            ahead = bucket_bytes if streams else 0
            assert (
                largest
                < peak
                <= bucket_bytes + largest + ahead + (largest // 2 if build == "fsdp2_rows" else 0)
            )


def test_the_next_bucket_of_a_streamed_sync_comes_while_one_is_used() -> None:
    model = torch.nn.Sequential(*[torch.nn.Linear(64, 64, bias=False) for _ in range(8)])
    manager, actor = placed(model, streams=True)
    one = 64 * 64 * 4
    with manager.phase("weight_sync"), worker.Live(actor) as live:
        buckets = actor.weights(bucket_bytes=2 * one)
        for count in range(3):
            bucket = next(buckets)
            assert len(bucket) == 2
            assert live.now == 4 * one, count  # this bucket and the next
        buckets.close()  # type: ignore[attr-defined]
        del bucket
        assert live.now == 0
    assert_nothing_resident(manager)


def _even_rows() -> Any:
    module = torch.nn.Module()
    module.blocks = torch.nn.ModuleList(torch.nn.Linear(64, 64, bias=False) for _ in range(8))
    return BUILDS["fsdp2"](module)


@on_ranks("two_ranks")
def test_rows_that_are_published_under_two_names_have_the_dtype_of_each() -> None:
    weight = next(iter(_even_rows().parameters()))
    wanted = [(weight_of(weight), dtype) for dtype in (torch.float32, torch.bfloat16)]
    for names in ([(wanted[0][0], dtype) for _, dtype in wanted], wanted):
        ahead = ReadAhead(reader := Reader(torch.device("cpu")), names, 1 << 20)
        with plainly():
            ahead.fetch()
            assert all(
                torch.equal(each.whole(reader, dtype), weight.full_tensor().to(dtype))
                for each, dtype in names
            )


@on_ranks("two_ranks")
def test_changes_of_rows_that_stayed_on_the_device_take_the_memory_of_two_buckets() -> None:
    module = _even_rows()
    manager, actor = placed(module)
    manager.register("sgd", sgd := torch.optim.SGD(module.parameters(), lr=0.1))
    for step in range(3):
        with manager.phase("train") as phase:
            _change_some(module, step)
            phase.switch("weight_sync")
            since = actor.published.version if actor.published else None
            with worker.Live(actor) as live:
                deque(actor.weight_changes(since=since, bucket_bytes=1 << 14), maxlen=0)
    assert 0 < live.peak < 3 << 14, sgd


def _change_some(module: Any, by: int) -> None:
    with torch.no_grad():
        for index, parameter in enumerate(module.parameters()):
            getattr(parameter.data, "_local_tensor", parameter.data).view(-1)[: 1 + index % 3] += by


class _Receivers:
    """Full weights into which the changes of all ranks are written, and the bytes that this rank
    has sent in each sync."""

    def __init__(self, actor: Any) -> None:
        self.actor = actor
        self.weights = {
            info.name: torch.zeros(info.shape, dtype=info.dtype) for info in actor.weights_info()
        }
        self.version: int | None = None
        self.sent: list[int] = []

    def sync(self, *, stops: bool = False, check: bool = True) -> None:
        """`stops`: this rank stops in the middle; what it has read is lost."""
        mine: list[Any] = []
        for bucket in self.actor.weight_changes(
            since=self.version, bucket_bytes=20 if stops else 20_000
        ):
            if stops:
                break
            mine += copy.deepcopy(list(bucket))
            self.version = bucket.version
        of_ranks: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(of_ranks, mine)
        for change in itertools.chain.from_iterable(of_ranks):
            change.write_into(self.weights[change.name])
        self.sent.append(sum(change.nbytes for change in mine))
        now = read(self.actor)
        if check:
            assert_same(self.weights, now)


def _changes(build: str, breaks: bool = False, streams: bool | None = None) -> list[int]:
    """Each rank sends its own parts; a receiver that writes those of all ranks has the whole
    weights. Returns the bytes of each sync.

    Args:
        breaks: whether the first rank stops in the middle of the second sync.
        streams: whether weights are published from the host copy; then, and where it is False, they
            were offloaded after the training.
    """
    torch.manual_seed(0)
    module = BUILDS[build](worker.Model())
    manager, actor = placed(module, streams=bool(streams))
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    manager.register("sgd", optimizer)  # a phase "train" loads what is trained
    receivers = _Receivers(actor)
    for step in range(3):
        with manager.phase("train") as phase:
            _change_some(module, step)
            if streams is not None:
                phase.switch("idle")
            phase.switch("weight_sync")
            is_broken = breaks and step == 1
            receivers.sync(stops=is_broken and dist.get_rank() == 0, check=not is_broken)
    assert_nothing_resident(manager)
    return receivers.sent


@pytest.mark.parametrize(
    ("build", "streams"),
    [
        pytest.param("plain", None, marks=pytest.mark.sweep),
        ("plain", False),
        pytest.param("fsdp2", None, marks=pytest.mark.sweep),
        ("fsdp2", True),
        ("fsdp2_rows", None),
        pytest.param("fsdp2_rows", False, marks=pytest.mark.sweep),
        ("fsdp2_external", None),
        ("fsdp1_flat", True),
    ],
)
def test_changes_of_the_parts_of_all_ranks_are_the_whole_weights(
    two_ranks: Ranks, build: str, streams: bool | None
) -> None:
    for first, *later in two_ranks.run(_changes, build, False, streams):
        # offloaded before, no host copy of ours, or no block of the weight: whole each time
        is_whole = streams is not None or build == "fsdp2_external"
        assert min(later) > first / 2 if is_whole else max(later) < first / 4


@pytest.mark.parametrize("streams", [None, True], ids=["", "streamed"])
def test_a_rank_that_stops_in_the_middle_publishes_its_part_whole_the_next_time(
    two_ranks: Ranks, streams: bool | None
) -> None:
    (first, stopped, later), others = two_ranks.run(_changes, "fsdp2", True, streams)
    assert stopped == 0
    assert later == first
    assert others[2] == others[0] if streams else others[2] < others[0] / 4


def _changes_beside_a_failure(operation: str) -> None:
    """Offloads of the first rank fail at one call after the other. Both ranks go back, train on,
    and publish."""
    module = BUILDS["fsdp2"](worker.Model())
    faults = Faults(SimulatedDevice(64 << 20, chunk_bytes=worker.CHUNK_BYTES))
    group = StoreGroup(
        PrefixStore(f"changes/{operation}", _get_default_store()),
        dist.get_rank(),
        dist.get_world_size(),
    )
    manager = Manager(device=faults, group=group)
    actor = manager.register("actor", module, role="actor")
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    manager.register("sgd", optimizer)
    receivers, failed = _Receivers(actor), 0
    for step in range(12):
        manager.enter("train")
        _change_some(module, step)
        if step > 1:
            if dist.get_rank() == 0:
                faults.fail(operation, at=step - 1)
            try:
                manager.switch("idle")
            except (GroupError, RuntimeError):
                failed += 1
                if actor.resident_bytes:  # not where only the end of a decided offload has failed
                    _change_some(module, step)
            faults.clear()
        manager.switch("weight_sync")
        receivers.sync()
        manager.leave()
    assert_nothing_resident(manager)
    assert failed


@pytest.mark.sweep  # tests/publish/test_publish_changes.py has one rank
@pytest.mark.parametrize("operation", ["copy", "sync"])
def test_an_offload_that_fails_on_one_rank_loses_no_change_on_any(
    two_ranks: Ranks, operation: str
) -> None:
    two_ranks.run(_changes_beside_a_failure, operation)


# --- ranks that do not do the same


@pytest.mark.parametrize(
    "kind", ["raises", "raises, streamed", "breaks", "vLLM drops it", "its convert raises"]
)
@on_ranks("two_ranks")
def test_a_rank_that_stops_half_way_lets_the_others_finish(kind: str) -> None:
    """Rank 0 stops after a bucket, rank 1 goes on; then both publish again."""
    module = BUILDS["fsdp2"](worker.Model())
    manager, actor = placed(module, streams=kind == "raises, streamed")
    wanted = len(actor.weights_info())
    names: list[str] = []
    error = ""
    try:
        with manager.phase("weight_sync"):
            if kind == "vLLM drops it":
                with pytest.MonkeyPatch.context() as patch:
                    stand_in(patch, Source033)
                    pairs = VllmWeightSource(actor, names="module").iter_full()  # type: ignore[attr-defined]
                if dist.get_rank() == 0:
                    next(pairs)
                    pairs = iter(())
                names = [name for name, _ in pairs]
            elif kind == "its convert raises":
                names = [
                    name
                    for bucket in actor.weights(bucket_bytes=1000, convert=_fails_on_rank_0)
                    for name, _ in bucket
                ]
            else:
                for bucket in actor.weights(bucket_bytes=1000 * (1 + dist.get_rank())):
                    names += [name for name, _ in bucket]
                    if dist.get_rank() == 0 and kind == "breaks":
                        break
                    if dist.get_rank() == 0:
                        raise RuntimeError("engine died")
    except RuntimeError as raised:
        error = str(raised)
    assert_nothing_resident(manager)
    with manager.phase("weight_sync"):
        again = read(actor)
    assert len(again) == wanted
    assert_nothing_resident(manager)
    stops = dist.get_rank() == 0
    assert (len(names) == wanted, error) == (
        not stops,
        "engine died" if stops and "raises" in kind else "",
    )


def _fails_on_rank_0(name: str, tensor: torch.Tensor) -> torch.Tensor:
    if dist.get_rank() == 0 and not tensor.is_meta:
        raise RuntimeError("engine died")
    return tensor


# --- one process


def test_names_are_clean_of_wrappers_around_the_model_and_its_parts() -> None:
    model: Any = worker.Model()
    wanted = wanted_of(model)
    compiled, checkpointed = model.blocks
    model.blocks = torch.nn.ModuleList(
        [torch.compile(compiled, backend="eager"), checkpoint_wrapper(checkpointed)]
    )
    model = checkpoint_wrapper(torch.compile(model, backend="eager"))
    manager, actor = placed(model)
    with manager.phase("weight_sync"):
        assert_same(read(actor), wanted)


def test_a_wrappers_name_that_is_the_models_own_stays() -> None:
    """A wrapper is known by its class: a model may call a part `module` or `_orig_mod` itself."""
    model = torch.nn.ModuleDict(
        {"module": torch.nn.Linear(2, 2), "_orig_mod": torch.nn.Linear(2, 2, bias=False)}
    )
    actor = manager_of().register("actor", model, role="actor")
    assert [info.name for info in actor.weights_info()] == [
        "module.weight",
        "module.bias",
        "_orig_mod.weight",
    ]


def test_a_bucket_is_valid_until_the_next_iteration_and_says_so_afterwards() -> None:
    model = worker.Model()
    manager, actor = placed(model)
    with manager.phase("weight_sync"):
        *kept, last = actor.weights(bucket_bytes=1000)
        assert len(kept) > 3
        for bucket in kept:
            with pytest.raises(PhaseError, match="before asking for the next one"):
                dict(bucket)
        assert last[-1][0] == actor.weights_info()[-1].name
        first = next(iter(actor.weights()))  # the generator is gone at once, what it gave is not
        assert len(dict(first)) == len(actor.weights_info())
        assert type(pickle.loads(pickle.dumps(first))) is list


class Opaque(torch.Tensor):
    """Shaped as bitsandbytes' Params4bit: a subclass whose bytes mean nothing without what lies
    beside them."""


def test_what_cannot_be_published_is_named_before_anything_is() -> None:
    model = torch.nn.Linear(4, 4)
    model.weight = torch.nn.Parameter(
        torch.Tensor._make_subclass(Opaque, torch.randn(4, 4)), requires_grad=False
    )
    manager = manager_of()
    actor = manager.register("actor", model, role="actor", external=True)
    assert [info.name for info in actor.weights_info()] == ["weight", "bias"]
    with (
        manager.phase("weight_sync"),
        pytest.raises(
            RegistrationError,
            match=r"'actor': 'weight' is a .*Opaque.*adapters='separate'",
        ),
    ):
        actor.weights()


# --- quantised


def _quantized() -> torch.nn.Module:
    made = torch.nn.Module()
    made.router, made.float8, made.packed = (torch.nn.Linear(6, 5, bias=False) for _ in range(3))
    made.router.register_buffer("e_score_correction_bias", torch.rand(5))
    made.float8.weight = torch.nn.Parameter(
        torch.rand(5, 6).to(torch.float8_e4m3fn), requires_grad=False
    )
    made.float8.weight_scale_inv = torch.nn.Parameter(torch.rand(5, 1))
    made.packed.weight = torch.nn.Parameter(
        torch.arange(30, dtype=torch.int8).reshape(5, 6), requires_grad=False
    )
    return made


@pytest.mark.parametrize("streams", [False, True], ids=["resident", "streamed"])
@on_ranks("two_ranks")
def test_quantised_shards_are_published_as_they_are_or_not_at_all(
    streams: bool,
) -> None:
    torch.manual_seed(1)
    model, inner, lacking = _quantized(), _quantized(), _quantized()
    wanted = {
        name: tensor.detach().view(torch.uint8).clone()
        for name, tensor in model.state_dict().items()
    }
    wanted["router.weight"] = model.router.weight.detach().to(torch.bfloat16).view(torch.uint8)
    del lacking.packed
    before = lacking.router.weight.detach().clone()
    manager, actor = placed(fully_shard(model), streams=streams)
    manager.register("rollout", engine := TorchEngine(fully_shard(inner)), role="rollout")
    with manager.phase("weight_sync") as phase:
        with pytest.raises(EngineError, match=r"'packed\.weight' is not a weight of"):
            TorchEngine(fully_shard(lacking)).update_weights(next(actor.weights(bucket_bytes=1)))
        for bucket in actor.weights(dtype="bfloat16", bucket_bytes=100):
            for name, tensor in bucket:
                assert tensor.contiguous().view(torch.uint8).equal(wanted[name]), name
            engine.update_weights(bucket)
        phase.switch("rollout")
        for name, tensor in inner.state_dict().items():
            here = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
            whole = (
                wanted[name].view(torch.bfloat16).float().view(torch.uint8)
                if name == "router.weight"
                else wanted[name]
            )
            rows = whole.chunk(2)[dist.get_rank()] if isinstance(tensor, DTensor) else whole
            assert here.view(torch.uint8).equal(rows), name
    assert lacking.router.weight.full_tensor().equal(before)
