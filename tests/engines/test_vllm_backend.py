"""The sleep-mode backend, under the classes of each released vLLM (`released`)."""

from __future__ import annotations

import pickle
import signal
import sys
from typing import Any

import pytest
import torch

from placement import DeviceMemoryError, HostMemoryError, IntegrityError
from placement.devices.base import poison_bytes
from placement.engines import mirror
from placement.engines.mirror import WEIGHTS_DIFFER
from tests.docs.pages import DOCS
from tests.engines.released import VLLM, Vllm
from tests.support.sweeps import few

PAGE = 4096
CAPACITY = 1 << 20
SIZES = (5 * PAGE, PAGE, 3 * PAGE)


@pytest.fixture(params=few(VLLM, VLLM[0], VLLM[-1]))
def vllm(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Vllm:
    return Vllm(monkeypatch, request.param, CAPACITY)


class Engine:
    """An engine with weights, a KV cache, and the blocks that vLLM has beside them from 0.32 on."""

    def __init__(self, vllm: Vllm) -> None:
        self.vllm = vllm
        self.values = [
            torch.randint(0, 256, (size,), dtype=torch.uint8, generator=seed(size))
            for size in SIZES
        ]
        (self.kv_cache,) = vllm.allocate("kv_cache", torch.full((4 * PAGE,), 7, dtype=torch.uint8))
        self.weights = vllm.allocate("weights", *self.values)
        inner = ("runtime", "cudagraph", "workspace") if vllm.version >= "0.32" else ()
        self.inner = {
            tag: vllm.allocate(tag, torch.full((PAGE,), 20 + place, dtype=torch.uint8))[0]
            for place, tag in enumerate(inner)
        }
        self.backend: Any = vllm.backend.PlacementBackend()

    @property
    def is_whole(self) -> bool:
        return all(map(torch.equal, self.weights, self.values))

    def write(self, place: int) -> None:
        """Write a weight, as a weight sync does."""
        self.weights[place].add_(1)
        self.values[place] = self.weights[place].clone()


def seed(number: int) -> torch.Generator:
    return torch.Generator().manual_seed(number)


@pytest.fixture
def engine(vllm: Vllm) -> Engine:
    return Engine(vllm)


def poison(nbytes: int) -> torch.Tensor:
    return torch.frombuffer(bytearray(poison_bytes(0, nbytes)), dtype=torch.uint8)


def test_every_byte_comes_back_and_what_was_not_written_is_not_copied(engine: Engine) -> None:
    card, device = engine.vllm.card, engine.vllm.device
    engine.backend.suspend(1)
    assert card.mapped == {}
    first = [*device.copied]
    assert sum(first) == engine.backend.copied_bytes >= sum(SIZES)
    engine.backend.resume()
    assert engine.is_whole
    assert card.free_bytes == CAPACITY - sum(card.mapped.values())
    assert torch.equal(engine.kv_cache, poison(4 * PAGE))  # its bytes were never copied
    device.copied.clear()
    engine.backend.suspend(1)
    assert device.copied == []
    assert engine.backend.copied_bytes == 0
    engine.backend.resume()
    engine.write(1)
    device.copied.clear()
    engine.backend.suspend(1)
    assert device.copied == [SIZES[1]]
    engine.backend.resume()
    assert engine.is_whole


def test_of_a_large_block_only_the_pieces_that_were_written_are_copied(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mirror, "PIECE_BYTES", 2 * PAGE)
    engine.backend.suspend(1)
    engine.backend.resume()
    engine.weights[0][-3] += 1  # in the third piece, which is short
    engine.values[0] = engine.weights[0].clone()
    engine.vllm.device.copied.clear()
    engine.backend.suspend(1)
    assert engine.vllm.device.copied == [PAGE]
    engine.backend.resume()
    assert engine.is_whole


@pytest.mark.parametrize("level", [1, 2])
def test_each_tag_is_kept_or_discarded_as_by_vllms_own_backend(vllm: Vllm, level: int) -> None:
    """The same blocks, put to sleep and woken by both, tag by tag."""
    engine = Engine(vllm)
    seen = []
    for backend in (vllm.backends.CuMemBackend(), engine.backend):
        for tensor in (*engine.weights, engine.kv_cache, *engine.inner.values()):
            tensor.copy_(torch.arange(tensor.numel()).to(torch.uint8))
        backend.suspend(level)
        steps = [backend.state(), sorted(vllm.tags_asleep())]
        for tags in (["weights"], ["kv_cache"], None):
            if tags is None and not vllm.tags_asleep():
                continue  # until 0.27 vLLM's own backend maps everything a second time
            backend.resume(tags)
            steps += [backend.state(), sorted(vllm.tags_asleep())]
        steps += [
            bytes(each[:300].tolist())
            for each in (*engine.weights, engine.kv_cache, *engine.inner.values())
        ]
        seen.append(steps)
    assert seen[0] == seen[1]


def test_vllms_own_allocator_wakes_discards_and_frees_what_this_backend_put_to_sleep(
    engine: Engine,
) -> None:
    vllm = engine.vllm
    engine.backend.suspend(1)
    vllm.allocator.wake_up()
    assert engine.is_whole
    if hasattr(vllm.allocator, "discard"):
        vllm.allocator.discard(("kv_cache",))
        assert vllm.tags_asleep() == {"kv_cache"}
        vllm.allocator.discard(("weights",))
        engine.backend.resume(["weights"])
        vllm.allocator.wake_up()
        for weight, value in zip(engine.weights, engine.values, strict=True):
            weight.copy_(value)
    vllm.device.copied.clear()
    engine.backend.suspend(1)
    assert vllm.device.copied == []
    vllm.free(engine.weights.pop(0))  # while it sleeps
    engine.values.pop(0)
    engine.backend.resume()
    assert engine.is_whole
    vllm.free(engine.kv_cache)
    engine.backend.suspend(1)
    engine.backend.resume()
    assert engine.is_whole


def test_what_vllms_own_allocator_put_to_sleep_comes_back(engine: Engine) -> None:
    engine.backend.suspend(1)
    engine.backend.resume()
    engine.write(0)
    engine.vllm.allocator.sleep(("weights", "runtime", "cudagraph"))
    engine.backend.resume()
    assert engine.is_whole


def test_the_slab_is_exact_stays_and_follows_the_engine(engine: Engine) -> None:
    kept = sum(SIZES) + (2 * PAGE if engine.vllm.version >= "0.32" else 0)
    engine.backend.reserve()
    own = engine.backend.mirror
    assert own.host_bytes == kept
    assert engine.backend.state() == "RUNNING"
    places = []
    for _ in range(3):
        engine.backend.suspend(1)
        places.append([d.cpu_backup_tensor for d in engine.vllm.allocator.pointer_to_data.values()])
        engine.backend.resume()
    addresses = [[b.data_ptr() for b in each if b is not None] for each in places]
    assert addresses[0] == addresses[1] == addresses[2]
    assert own.host_bytes == kept
    engine.vllm.free(engine.weights.pop())
    engine.values.pop()
    engine.weights += engine.vllm.allocate("weights", torch.ones(2 * PAGE, dtype=torch.uint8))
    engine.values.append(engine.weights[-1].clone())
    engine.backend.suspend(1)
    assert own.host_bytes == kept - SIZES[-1] + 2 * PAGE
    engine.backend.resume()
    assert engine.is_whole


def test_an_engine_that_discards_its_weights_keeps_no_host_memory_for_them(engine: Engine) -> None:
    engine.backend.reserve()
    engine.backend.suspend(2)
    assert engine.backend.mirror.host_bytes == (2 * PAGE if engine.vllm.version >= "0.32" else 0)
    engine.backend.resume(["weights"])
    assert torch.equal(engine.weights[0], poison(SIZES[0]))
    for weight, value in zip(engine.weights, engine.values, strict=True):
        weight.copy_(value)
    engine.backend.resume(["kv_cache"])
    engine.backend.suspend(1)
    engine.backend.resume()
    assert engine.is_whole


def test_weights_that_are_discarded_once_give_their_host_memory_back(engine: Engine) -> None:
    """Woken alone, as `Manager.suspend(drop=...)` does."""
    kept = 2 * PAGE if engine.vllm.version >= "0.32" else 0
    engine.backend.suspend(1)
    engine.backend.resume(["weights"])
    engine.backend.suspend(2)
    assert engine.backend.mirror.host_bytes == kept
    engine.backend.resume()
    assert torch.equal(engine.weights[0], poison(SIZES[0]))
    for weight, value in zip(engine.weights, engine.values, strict=True):
        weight.copy_(value)
    for _ in range(2):
        engine.backend.suspend(1)
        assert engine.backend.mirror.host_bytes == sum(SIZES) + kept
        engine.backend.resume()
        assert engine.is_whole


def test_a_sleep_unmaps_each_block_as_soon_as_its_own_bytes_have_arrived(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    device, log = engine.vllm.device, engine.vllm.card.log
    log.clear()
    monkeypatch.setattr(device, "mark", lambda _: len(device.copied))
    monkeypatch.setattr(device, "wait", lambda num_copied: log.append(("wait", num_copied)))
    engine.backend.suspend(1)
    assert len(device.copied) >= len(SIZES)
    steps = [("to_host", nbytes) for nbytes in device.copied]
    steps.append(("unmap", 4 * PAGE))  # the KV cache, while the others are copied
    if engine.vllm.version >= "0.32":
        steps.append(("unmap", PAGE))  # the workspace
    for number, nbytes in enumerate(device.copied):
        steps += [("wait", number + 1), ("unmap", nbytes)]
    assert log == steps


def test_memory_without_bytes_is_mapped_when_the_copies_are_done(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = engine.vllm.device
    engine.backend.suspend(1)
    log = engine.vllm.card.log
    log.clear()
    monkeypatch.setattr(device, "wait", lambda _: log.append(("wait", 0)))
    engine.backend.resume()
    steps = [step for step, _ in log]
    done = steps.index("wait")
    assert steps[:done] == ["map", "to_device"] * (done // 2)
    assert set(steps[done + 1 :]) == {"map"}


CALLS = ("cuMemCreate", "cuMemMap", "cuMemSetAccess")


@pytest.mark.parametrize("how", ["no room", "second block", "copy", "interrupt", *CALLS])
@pytest.mark.parametrize("tags", [None, ["weights"]], ids=["all", "weights"])
def test_a_wake_that_fails_leaves_everything_asleep_and_can_be_repeated(
    engine: Engine, how: str, tags: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    vllm = engine.vllm
    engine.backend.suspend(1)
    asleep = vllm.tags_asleep()
    for _ in range(2):
        with monkeypatch.context() as patch:
            what: type[BaseException] = RuntimeError
            if how == "no room":
                what = DeviceMemoryError
                patch.setattr(vllm.card, "capacity_bytes", 6 * PAGE)
            elif how == "second block":
                what = DeviceMemoryError
                patch.setattr(vllm.card, "fails_in", 2)
            elif how == "copy":
                patch.setattr(vllm.device, "fails_in", 1)
            elif how == "interrupt":
                what = KeyboardInterrupt
                patch.setattr(vllm.device, "wait", raises_once(KeyboardInterrupt))
            else:
                patch.setattr(vllm.device.driver, "fails", how)
            with pytest.raises(what):
                engine.backend.resume(tags)
        assert vllm.card.mapped == vllm.card.memory == {}
        assert vllm.tags_asleep() == asleep
        assert engine.backend.state() == "SUSPENDED"
    if tags is not None:
        engine.backend.resume(tags)
    engine.backend.resume()
    assert engine.is_whole
    assert vllm.tags_asleep() == set()


@pytest.mark.parametrize("copies", [-1, 1], ids=["alone", "before an error"])
@pytest.mark.parametrize("function", CALLS)
def test_ctrl_c_in_a_call_of_the_driver_loses_no_memory(
    engine: Engine, function: str, copies: int
) -> None:
    vllm = engine.vllm
    engine.backend.suspend(1)
    for _ in range(2):
        vllm.device.driver.is_interrupted_in = function
        vllm.device.fails_in = copies
        with pytest.raises(KeyboardInterrupt):
            engine.backend.resume()
        assert vllm.card.mapped == vllm.card.memory == {}
    vllm.device.fails_in = -1
    engine.backend.resume()
    assert engine.is_whole


def interrupted_at_the_second(unmap: Any) -> Any:
    """The extension's function that unmaps, with a Ctrl-C before its second call begins."""
    handles = []

    def unmap_and_release(handle: Any) -> None:
        handles.append(handle)
        if len(handles) == 2:
            signal.raise_signal(signal.SIGINT)
        unmap(handle)

    return unmap_and_release


def test_ctrl_c_while_a_wake_is_undone_loses_no_memory(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    vllm = engine.vllm
    engine.backend.suspend(1)
    unmap = interrupted_at_the_second(vllm.cumem.unmap_and_release)
    monkeypatch.setattr(vllm.cumem, "unmap_and_release", unmap)
    vllm.card.fails_in = 3
    with pytest.raises(KeyboardInterrupt):
        engine.backend.resume()
    assert vllm.card.mapped == vllm.card.memory == {}
    vllm.card.fails_in = -1
    engine.backend.resume()
    assert engine.is_whole


def test_ctrl_c_in_a_sleep_leaves_each_block_mapped_or_asleep(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    vllm = engine.vllm
    unmap = interrupted_at_the_second(vllm.cumem.unmap_and_release)
    monkeypatch.setattr(vllm.cumem, "unmap_and_release", unmap)
    with pytest.raises(KeyboardInterrupt):
        engine.backend.suspend(1)
    for address, data in vllm.allocator.pointer_to_data.items():
        assert data.is_asleep is (address not in vllm.card.mapped)
    engine.backend.suspend(1)
    engine.backend.resume()
    assert engine.is_whole


def test_a_block_that_was_garbage_in_a_wake_that_fails_is_given_back_once(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    vllm = engine.vllm
    engine.backend.suspend(1)
    garbage = [engine.weights.pop()]
    engine.values.pop()

    def fail(_: object) -> None:
        while garbage:
            handle = vllm.allocator.python_free_callback(garbage.pop().data_ptr())
            vllm.cumem.unmap_and_release(handle)
        raise RuntimeError("cuEventSynchronize: CUDA_ERROR_UNKNOWN")

    with monkeypatch.context() as patch:
        patch.setattr(vllm.device, "wait", fail)
        with pytest.raises(RuntimeError, match="cuEventSynchronize"):
            engine.backend.resume()
    assert vllm.card.mapped == vllm.card.memory == {}
    engine.backend.resume()
    assert engine.is_whole


def test_what_vllm_itself_put_to_sleep_gets_memory_as_it_had(engine: Engine) -> None:
    """Before the backend has. The card's driver refuses other properties than vLLM's."""
    vllm = engine.vllm
    vllm.allocator.sleep(("weights", "runtime", "cudagraph"))
    engine.backend.resume()
    if hasattr(vllm.allocator, "discard"):
        vllm.allocator.discard(("kv_cache",))
        vllm.backend.PlacementBackend().resume()
    assert engine.is_whole
    assert vllm.tags_asleep() == set()


def raises_once(what: type[BaseException]) -> Any:
    left = [what]

    def wait(*_: Any) -> None:
        if left:
            raise left.pop()

    return wait


@pytest.mark.parametrize("how", ["copy", "host memory"])
def test_a_sleep_that_fails_leaves_everything_awake_and_can_be_repeated(
    engine: Engine, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    vllm = engine.vllm
    mapped = {**vllm.card.mapped}
    what: type[Exception] = RuntimeError
    with monkeypatch.context() as patch:
        if how == "copy":
            patch.setattr(vllm.device, "fails_in", 2)
        else:
            what = HostMemoryError
            patch.setattr(vllm.device, "host", refuse)
        with pytest.raises(what):
            engine.backend.suspend(1)
    assert vllm.card.mapped == mapped
    assert vllm.tags_asleep() == set()
    assert engine.backend.state() == "RUNNING"
    engine.backend.suspend(1)
    engine.backend.resume()
    assert engine.is_whole


def test_a_host_copy_that_was_half_written_is_never_taken_for_whole(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sleep fails after one block, and then the weights get their old values again."""
    engine.backend.suspend(1)
    engine.backend.resume()
    for weight in engine.weights:
        weight.add_(1)
    with monkeypatch.context() as patch:
        patch.setattr(engine.vllm.device, "fails_in", 1)
        with pytest.raises(RuntimeError):
            engine.backend.suspend(1)
    for weight in engine.weights:
        weight.sub_(1)
    engine.backend.suspend(1)
    engine.backend.resume()
    assert engine.is_whole


def refuse(nbytes: int) -> None:
    raise HostMemoryError("host memory: none")


def test_weights_that_come_back_wrong_get_no_traffic_until_they_are_filled(engine: Engine) -> None:
    vllm, weight = engine.vllm, engine.weights[1]
    engine.backend.suspend(1)
    vllm.device.flips = {weight.data_ptr()}
    for _ in range(2):
        with pytest.raises(IntegrityError, match=rf"{WEIGHTS_DIFFER} \(1 blocks, 0.0 MiB"):
            engine.backend.resume()
        assert vllm.card.mapped == {}
    engine.backend.resume(["weights"])
    assert not engine.is_whole
    for _ in range(2):
        with pytest.raises(IntegrityError, match="were not written since"):
            engine.backend.resume(["kv_cache"])
    # A sleep does not take them for good ones.
    engine.backend.suspend(1)
    vllm.device.flips = set()
    engine.backend.resume()
    assert engine.is_whole
    # Filled anew, they may stay.
    engine.backend.suspend(1)
    vllm.device.flips = {weight.data_ptr()}
    engine.backend.resume(["weights"])
    weight.copy_(torch.full_like(weight, 9))
    engine.values[1] = weight.clone()
    engine.backend.resume(["kv_cache"])
    vllm.device.flips = set()
    engine.backend.suspend(1)
    engine.backend.resume()
    assert engine.is_whole


def test_bytes_of_another_tag_that_come_back_wrong_are_an_error_at_once(engine: Engine) -> None:
    """Nothing fills them anew."""
    engine.backend.suspend(1)
    runtime = engine.inner.get("runtime", engine.weights[0])
    engine.vllm.device.flips = {runtime.data_ptr()}
    with pytest.raises(IntegrityError, match=WEIGHTS_DIFFER):
        engine.backend.resume(["weights"] if engine.inner else None)
    assert engine.vllm.card.mapped == {}


def test_a_mirror_that_was_written_is_found(engine: Engine) -> None:
    engine.backend.suspend(1)
    backups = [d.cpu_backup_tensor for d in engine.vllm.allocator.pointer_to_data.values()]
    next(each for each in backups if each is not None)[11] ^= 1
    with pytest.raises(IntegrityError, match=WEIGHTS_DIFFER):
        engine.backend.resume()


def test_blocks_that_were_garbage_are_given_back_once(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the weights are copied a collection finds one of them."""
    monkeypatch.setattr(
        engine.vllm.backend.gc, "collect", lambda: engine.vllm.free(engine.weights.pop())
    )
    engine.values.pop()
    engine.backend.suspend(1)
    assert engine.vllm.card.mapped == {}
    engine.backend.resume()
    assert engine.is_whole


def test_two_hundred_cycles_leave_no_byte_behind(engine: Engine) -> None:
    card = engine.vllm.card
    used, host = card.free_bytes, set()
    for cycle in range(200):
        engine.write(cycle % 3)
        engine.backend.suspend(1)
        assert card.mapped == {}
        host.add(engine.backend.mirror.host_bytes)
        engine.backend.resume(["weights"] if cycle % 2 else None)
        engine.backend.resume()
        assert card.free_bytes == used
    assert engine.is_whole
    assert len(host) == 1


def test_the_versions_of_the_page_are_those_that_are_tested() -> None:
    page = (DOCS / "engines.md").read_text(encoding="utf-8")
    assert f"Tested with vLLM {', '.join(VLLM)}." in page


# --- the plug-in


@pytest.fixture
def plugged(vllm: Vllm) -> Vllm:
    vllm.load_plugin()
    return vllm


def named(vllm: Vllm) -> dict[str, Any]:
    """What a user writes to have this backend."""
    return {"sleep_mode_backend": "placement"} if vllm.version >= "0.33" else {}


def test_the_plug_in_chooses_it_and_reserves_when_the_worker_has_warmed_up(plugged: Vllm) -> None:
    engine = Engine(plugged)
    worker = plugged.worker(**named(plugged))
    wrapper = plugged.wrapped(worker)
    wrapper.init_device()
    assert wrapper.check_health() is None
    assert wrapper.compile_or_warm_up_model() == "times"
    backend = worker._sleep_mode_backend
    assert type(backend).__name__ == "PlacementBackend"
    assert backend.mirror.host_bytes >= sum(SIZES)
    told = {"host_bytes": backend.mirror.host_bytes, "is_spoilt": False}
    assert wrapper.check_health() == {"placement": told}
    # vLLM's own worker drives it.
    worker.sleep(1)
    assert plugged.card.mapped == {}
    worker.wake_up(["weights"])
    assert engine.is_whole
    assert plugged.tags_asleep() >= {"kv_cache"}
    worker.wake_up(["kv_cache"])
    if hasattr(worker, "discard"):
        worker.discard(("kv_cache",))
        assert plugged.tags_asleep() == {"kv_cache"}
        worker.wake_up(["kv_cache"])
    worker.sleep(2)
    worker.wake_up()


def test_a_worker_whose_wake_failed_wakes_when_there_is_room(plugged: Vllm) -> None:
    engine = Engine(plugged)
    worker = plugged.worker(**named(plugged))
    scale = torch.empty(3)
    worker.model_runner.model.register_buffer("scale", scale)
    wrapper = plugged.wrapped(worker)
    wrapper.init_device()
    wrapper.compile_or_warm_up_model()
    for level in (1, 2):
        scale.fill_(1)
        worker.sleep(level)
        scale.fill_(0)
        plugged.card.capacity_bytes = 6 * PAGE
        for _ in range(2):
            with pytest.raises(DeviceMemoryError, match="out of memory") as failure:
                worker.wake_up()
            # vLLM's executor over processes sends the text, and the one over Ray the error
            assert str(pickle.loads(pickle.dumps(failure.value))) == str(failure.value)
            assert plugged.card.mapped == {}
        plugged.card.capacity_bytes = CAPACITY
        worker.wake_up()
        assert engine.is_whole is (level == 1)
        assert scale.tolist() == ([1] * 3 if level == 2 else [0] * 3)  # kept by the worker


def test_the_plug_in_leaves_alone_who_did_not_ask(plugged: Vllm) -> None:
    Engine(plugged)
    asleep = {"enable_sleep_mode": False, **named(plugged)}
    others: list[dict[str, Any]] = [asleep]
    if plugged.version >= "0.33":
        others.append({})
    for config in others:
        worker = plugged.worker(**config)
        wrapper = plugged.wrapped(worker)
        wrapper.init_device()
        wrapper.compile_or_warm_up_model()
        assert worker._sleep_mode_backend is None
        assert wrapper.check_health() is None
        assert worker.model_config.sleep_mode_backend == config.get("sleep_mode_backend", "cumem")


def test_the_plug_in_may_be_loaded_again(plugged: Vllm) -> None:
    wrapper = sys.modules["vllm.v1.worker.worker_base"].WorkerWrapperBase  # type: ignore[attr-defined]
    before = wrapper.init_device
    sys.modules["placement.engines.vllm_plugin"].register()  # type: ignore[attr-defined]
    assert wrapper.init_device is before


def test_an_engine_without_host_memory_starts_and_says_so(
    plugged: Vllm, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    Engine(plugged)
    monkeypatch.setattr(plugged.device, "host", refuse)
    worker = plugged.worker(**named(plugged))
    wrapper = plugged.wrapped(worker)
    wrapper.init_device()
    wrapper.compile_or_warm_up_model()
    assert "no host memory was reserved" in caplog.text


def test_a_vllm_without_backends_is_left_alone(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from placement.engines import vllm_plugin

    monkeypatch.setitem(sys.modules, "vllm", None)  # type: ignore[arg-type]
    with caplog.at_level("INFO", logger="placement"):
        vllm_plugin.register()
    assert "takes no sleep-mode backend" in caplog.text
