"""`optimizer_in="streamed"`: the ordinary step's bytes, a bounded part of the device, the user's
hooks once, and clear refusals."""

from __future__ import annotations

import copy
import functools
import importlib
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn

import placement
from placement import Manager, NotResidentError, PhaseError, PolicyError
from placement.devices.memory import Chunk
from placement.policies import Colocated
from placement.testing import SimulatedDevice, assert_nothing_resident
from tests.support.buckets import set_bucket_bytes
from tests.support.frameworks import new_accelerator
from tests.support.sweeps import few
from tests.support.worker import OFF, assert_same

CHUNK = 16 << 10
BUCKET = 2 * CHUNK
WIDTH = 64


class Net(nn.Module):
    """Layers of which a step uses some, an embedding whose state is larger than a bucket, and a
    layer that is never used."""

    def __init__(self, layers: int = 8, words: int = 160) -> None:
        super().__init__()
        self.embed = nn.Embedding(words, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(layers))
        self.unused = nn.Linear(WIDTH, WIDTH)

    def forward(self, words: torch.Tensor, used: Sequence[int] | None = None) -> torch.Tensor:
        found: torch.Tensor = self.embed(words)
        for index in range(len(self.layers)) if used is None else used:
            found = torch.tanh(self.layers[index](found))
        return found.square().mean()


class Watched(SimulatedDevice):
    """A device that remembers the most bytes that its chunks have had together."""

    peak_bytes = 0

    def create(self, nbytes: int) -> Chunk:
        chunk = super().create(nbytes)
        self.peak_bytes = max(self.peak_bytes, self.memory().chunk_bytes)
        return chunk


@pytest.fixture(autouse=True)
def _buckets() -> None:
    set_bucket_bytes(BUCKET)


def words(step: int) -> torch.Tensor:
    return torch.randint(0, 160, (4,), generator=torch.Generator().manual_seed(step))


def manager_of(**keywords: Any) -> Manager:
    given = {
        "device": Watched(64 << 20, chunk_bytes=CHUNK),
        "policy": Colocated("streamed"),
    }
    return Manager(**{**given, **keywords})


def registered(model: nn.Module, optimizer: Any) -> tuple[Manager, placement.Handle]:
    """A manager with both, and the optimizer's handle."""
    manager = manager_of()
    manager.register("actor", model, role="actor")
    return manager, manager.register("adam", optimizer)


class Pair:
    """A placed model with its optimizer, which `make` makes, and the same without placement."""

    def __init__(
        self,
        make: Callable[[nn.Module], torch.optim.Optimizer],
        model: nn.Module | None = None,
        **keywords: Any,
    ) -> None:
        torch.manual_seed(0)
        self.net: Any = Net() if model is None else model
        self.plain: Any = copy.deepcopy(self.net)
        self.optimizer, self.other = make(self.net), make(self.plain)
        self.manager = manager_of(**keywords)
        self.device: Any = self.manager.device
        self.actor = self.manager.register("actor", self.net, role="actor")
        self.handle = self.manager.register("adam", self.optimizer)

    def both(self) -> list[tuple[Any, torch.optim.Optimizer]]:
        return [(self.net, self.optimizer), (self.plain, self.other)]

    def step(self, step: int, used: Sequence[int] | None = None) -> None:
        """One step of both, the placed one in a phase."""
        with self.manager.phase("train"):
            self.step_both(step, used)

    def step_both(self, step: int, used: Sequence[int] | None = None) -> None:
        for net, optimizer in self.both():
            optimizer.zero_grad()
            net(words(step), used).backward()
            optimizer.step()

    def step_layers(self, step: int) -> None:
        """The same where the model takes no words."""
        for net, optimizer in self.both():
            optimizer.zero_grad()
            net(torch.ones(2, WIDTH) * step).square().mean().backward()
            optimizer.step()

    def check(self) -> None:
        assert_same(dict(self.actor.state_dict()), dict(self.plain.state_dict()))
        assert_same(self.handle.state_dict(), self.other.state_dict())
        assert_nothing_resident(self.manager)


def learnt(net: Any, optimizer: torch.optim.Optimizer, step: int) -> torch.Tensor:
    """The loss of a step's words, after its backward pass."""
    optimizer.zero_grad()
    loss: torch.Tensor = net(words(step))
    loss.backward()
    return loss


def of(cls: Any, **options: Any) -> Callable[[nn.Module], torch.optim.Optimizer]:
    return lambda net: cls(net.parameters(), **options)  # type: ignore[no-any-return]


adamw = of(torch.optim.AdamW, lr=1e-2)


@pytest.fixture
def pair() -> Pair:
    """After a first step, in which the state was born."""
    made = Pair(adamw)
    made.step(0)
    return made


def in_groups(net: Any) -> torch.optim.Optimizer:
    groups = [
        {
            "params": [net.embed.weight, *net.layers[:3].parameters()],
            "lr": 3e-2,
            "weight_decay": 0.1,
        },
        {"params": list(net.layers[3:].parameters()), "foreach": True},
        {"params": list(net.unused.parameters()), "lr": torch.tensor(1e-3)},
    ]
    return torch.optim.AdamW(groups, lr=1e-2)


def muon(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Muon([p for p in net.parameters() if p.dim() == 2], lr=1e-2)


STEPPED: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "AdamW": adamw,
    "AdamW, fused": of(torch.optim.AdamW, fused=True),
    "AdamW, several groups": in_groups,
    "Adam, amsgrad, foreach": of(torch.optim.Adam, amsgrad=True, foreach=True),
    "SGD": of(torch.optim.SGD, lr=1e-2),
    "SGD, nesterov, foreach": of(
        torch.optim.SGD, lr=1e-2, momentum=0.9, nesterov=True, foreach=True
    ),
    "NAdam": of(torch.optim.NAdam),
    "RAdam": of(torch.optim.RAdam, foreach=True),
    "Adamax": of(torch.optim.Adamax),
    "Adadelta": of(torch.optim.Adadelta),
    "Adagrad": of(torch.optim.Adagrad),
    "RMSprop": of(torch.optim.RMSprop, momentum=0.9, centered=True),
    "Rprop": of(torch.optim.Rprop),
}
if hasattr(torch.optim, "Muon"):
    STEPPED["Muon"] = muon


@pytest.mark.parametrize(
    "name",
    few(
        STEPPED,
        "AdamW",
        "Adam, amsgrad, foreach",
        "SGD, nesterov, foreach",
        *(["Muon"] if "Muon" in STEPPED else []),
    ),
)
def test_five_steps_are_those_of_the_optimizer_alone(name: str) -> None:
    """Parameters without a gradient in some steps, whose state is born late or never, and one that
    is stepped slice by slice."""
    pair = Pair(STEPPED[name])
    for step, used in enumerate([(0, 2, 3, 7), None, (1, 2), (6, 5, 4), None]):
        pair.step(step, used)
    pair.check()
    words = pair.net.embed.weight
    state = [
        value.nbytes
        for value in pair.optimizer.state.get(words, {}).values()
        if isinstance(value, torch.Tensor)
    ]
    num_slices = len(pair.handle.streamed.parts_of(pair.optimizer, words))  # type: ignore[union-attr]
    assert (num_slices > 1) is (max(state, default=0) > BUCKET and name != "Muon"), (
        "the state of one parameter is larger than a bucket"
    )
    assert all(handle.state is OFF for handle in pair.manager.handles.values())


@pytest.mark.parametrize(
    ("make", "width"), [(adamw, 48), pytest.param(muon, 200, marks=pytest.mark.sweep)]
)
def test_the_device_holds_the_model_and_a_window_at_most(make: Any, width: int) -> None:
    # last chunks of several sizes; pieces larger than a bucket
    shapes = [(WIDTH, width), (width, WIDTH)] * 12 + [(WIDTH, WIDTH)] * 5
    layers = nn.Sequential(*(nn.Linear(*shape, bias=False) for shape in shapes))
    model_bytes = sum(p.nbytes for p in layers.parameters())
    pair = Pair(make, model=layers)
    for step in range(3):
        pair.device.peak_bytes = 0
        with pair.manager.phase("train"):
            window = pair.handle.window_bytes
            early = pair.handle.resident_bytes  # the first buckets
            assert 0 < early <= window <= 4 * BUCKET if step else early == 0
            held = pair.device.memory().chunk_bytes - early
            pair.step_layers(step)
            # a step gives back what it needs, and the gradients of the step before
            assert pair.device.memory().chunk_bytes == pair.actor.resident_bytes <= held
            assert pair.device.peak_bytes <= held + window
            assert held <= model_bytes * 2 + 2 * CHUNK  # the model and its gradients
    pair.check()
    state_bytes = sum(r.nbytes for r in pair.handle.holding.ranges)  # type: ignore[union-attr]
    assert (pair.handle.counters.loaded_bytes, pair.handle.counters.offloaded_bytes) == (
        2 * state_bytes,
        3 * state_bytes,
    )
    pair.device.peak_bytes = 0
    with pair.manager.phase("train"):
        for net, _ in pair.both():
            net[:2].requires_grad_(requires_grad=False)  # what has come early for these is not used
        pair.step_layers(3)
    pair.check()
    assert pair.device.peak_bytes <= held + window
    # gradients move with the model
    assert pair.manager.snapshot().peak_bytes <= model_bytes * 2 + 2 * CHUNK + window


def test_what_a_step_leaves_aside_counts_once_in_the_peak() -> None:
    pair = Pair(
        adamw, model=nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3)))
    )
    for step in range(2):
        with pair.manager.phase("train"):
            pair.step_layers(step)
            pair.optimizer.zero_grad()
        # the second step uses a third of what has come before it
        pair.net[1:].requires_grad_(requires_grad=False)
    assert pair.manager.snapshot().peak_bytes <= pair.actor.num_bytes + pair.handle.num_bytes


@pytest.mark.parametrize(
    ("how", "when"),
    [
        pytest.param("added", "between phases", marks=pytest.mark.sweep),
        ("unfrozen", "in the phase"),
    ],
)
def test_the_state_of_parameters_that_come_later_is_taken_in_bucket_by_bucket(
    how: str, when: str
) -> None:
    layers = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(16)))

    def first_ones(net: Any) -> torch.optim.Optimizer:
        if how == "unfrozen":
            net[1:].requires_grad_(False)
        return torch.optim.AdamW((net if how == "unfrozen" else net[0]).parameters(), lr=1e-2)

    def come(net: Any, optimizer: torch.optim.Optimizer) -> None:
        if how == "added":
            optimizer.add_param_group({"params": [*net[1:].parameters()], "lr": 3e-2})
        net.requires_grad_()

    pair = Pair(first_ones, model=layers)
    for step in range(4):
        coming = pair.both() if step == 2 else []
        for each in coming if when == "between phases" else ():
            come(*each)
        with pair.manager.phase("train"):
            for each in coming if when == "in the phase" else ():
                come(*each)
            pair.step_layers(step)
        pair.check()
    assert pair.handle.num_bytes > 10 * BUCKET
    assert max(r.nbytes for r in pair.handle.holding.ranges) <= BUCKET  # type: ignore[union-attr]


@pytest.mark.parametrize("is_born", [True, False])
def test_a_compiled_function_ends_before_the_step(*, is_born: bool) -> None:
    """A graph would compute with the state when it has left again."""
    pair = Pair(adamw)
    torch._dynamo.reset()
    step = torch.compile(lambda: pair.optimizer.step(), backend="eager")  # noqa: PLW0108
    if is_born:
        pair.step(0)
    for number in (1, 2):
        with pair.manager.phase("train"):
            for net, optimizer in pair.both():
                optimizer.zero_grad()
                net(words(number)).backward()
                step() if optimizer is pair.optimizer else optimizer.step()
    torch._dynamo.reset()
    pair.check()


def test_hooks_a_scheduler_and_a_closure_see_one_step() -> None:
    pair, seen, sizes = Pair(adamw), list[str](), list[int]()
    schedulers = [
        torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5) for _, optimizer in pair.both()
    ]
    pair.optimizer.register_step_pre_hook(
        lambda optimizer, *_: seen.append(f"before {len(optimizer.param_groups[0]['params'])}")
    )
    pair.optimizer.register_step_post_hook(
        lambda optimizer, *_: sizes.append(optimizer.param_groups[0]["params"][0].numel())
    )
    pair.optimizer.register_step_post_hook(lambda *_: seen.append("after"))
    with pair.manager.phase("train"):
        later = torch.optim.lr_scheduler.StepLR(pair.optimizer, 10)
        for step in range(3):
            losses = []
            for net, optimizer in pair.both():
                losses.append(optimizer.step(functools.partial(learnt, net, optimizer, step)))
            assert losses[0].equal(losses[1])
            for scheduler in schedulers:
                scheduler.step()  # warns, which fails the test, if it has seen no step before
        later.step()
    assert seen == [f"before {len(list(pair.net.parameters()))}", "after"] * 3
    assert sizes == [pair.net.embed.weight.numel()] * 3, "a hook has seen a slice"
    pair.check()


def test_a_closure_may_open_a_phase() -> None:
    """The state leaves for it and the step goes on when the phase has come back."""
    pair = Pair(adamw)
    critic = nn.Linear(WIDTH, WIDTH)
    pair.manager.register("critic", critic, role="critic")
    rewards = list[torch.Tensor]()
    for step in range(3):
        with pair.manager.phase("train"):
            for net, optimizer in pair.both():

                def closure(
                    net: Any = net, optimizer: torch.optim.Optimizer = optimizer, step: int = step
                ) -> torch.Tensor:
                    loss = learnt(net, optimizer, step)
                    with pair.manager.phase("values"):
                        rewards.append(critic(torch.ones(WIDTH)))
                    return loss

                optimizer.step(closure)
    assert all(reward.equal(rewards[0]) for reward in rewards)
    pair.check()


def test_a_scaler_skips_and_unscales_as_always() -> None:
    pair = Pair(of(torch.optim.AdamW, fused=True))
    scalers = [torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=2) for _ in range(2)]
    with pair.manager.phase("train"):
        for step in range(4):
            for (net, optimizer), scaler in zip(pair.both(), scalers, strict=True):
                optimizer.zero_grad()
                scaler.scale(net(words(step))).backward()
                if step == 1:
                    net.layers[2].weight.grad[0, 0] = float("inf")
                scaler.step(optimizer)
                scaler.update()
            assert_same(*([p.grad for p in net.parameters()] for net, _ in pair.both()))
    pair.check()


def learn_with(accelerator: Any, net: Any, wrapper: Any, step: int) -> None:
    loss = net(words(step))
    (loss if wrapper.scaler is None else wrapper.scaler.scale(loss)).backward()
    if accelerator.sync_gradients:
        accelerator.clip_grad_norm_(net.parameters(), 0.5)
    wrapper.step()
    wrapper.zero_grad()


@pytest.mark.parametrize(
    "way",
    few(
        ["plain", "scheduled inside", "scheduled outside", "scaled", "scaled and stepped before"],
        "scaled and stepped before",
    ),
)
def test_steps_through_accelerates_wrapper_are_streamed(way: str) -> None:
    """Every other batch only adds to the gradients: then the wrapper's step does nothing."""
    accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed here")
    accelerator = new_accelerator(gradient_accumulation_steps=2)
    schedulers: list[Any] = []

    def prepared(net: nn.Module) -> Any:
        adam = torch.optim.AdamW(net.parameters(), lr=0.05)
        if way == "scheduled inside":
            schedulers.append(torch.optim.lr_scheduler.ExponentialLR(adam, 0.5))
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0) if "scaled" in way else None
        wrapper = accelerate.optimizer.AcceleratedOptimizer(adam, scaler=scaler)
        if way == "scaled and stepped before":
            learn_with(accelerator, net, wrapper, 7)
        return wrapper

    pair = Pair(prepared)
    if way == "scheduled outside":
        schedulers += [torch.optim.lr_scheduler.ExponentialLR(each, 0.5) for _, each in pair.both()]
    for step in range(6):
        with pair.manager.phase("train"), accelerator.accumulate(pair.net, pair.plain):
            for net, wrapper in pair.both():
                learn_with(accelerator, net, wrapper, step)
            for scheduler in schedulers if accelerator.sync_gradients else ():
                scheduler.step()  # warns, which fails the test, if it has seen no step before
    with pytest.raises(NotResidentError, match="cannot be stepped"):
        pair.optimizer.step()
    pair.check()
    pair.manager.close()
    with accelerator.accumulate(pair.net, pair.plain):
        for net, wrapper in pair.both():
            learn_with(accelerator, net, wrapper, 6)
    assert_same(dict(pair.net.state_dict()), dict(pair.plain.state_dict()))


def test_the_implementation_is_that_of_the_whole_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch takes the for-loop for all parameters of a group if foreach does not fit one of them;
    here, for those of a subclass."""
    from torch.optim import optimizer as module

    odd: Any = type("Odd", (nn.Parameter,), {})
    monkeypatch.setattr(module, "_get_foreach_kernels_supported_devices", lambda: ["cpu"])
    adam, chosen = importlib.import_module("torch.optim.adam"), list[bool]()
    original = adam._multi_tensor_adam
    monkeypatch.setattr(
        adam,
        "_multi_tensor_adam",
        lambda *args, **kw: (chosen.append(True), original(*args, **kw))[1],
    )
    pair = Pair(adamw)
    pair.step(0)
    assert chosen
    chosen.clear()
    with pair.manager.phase("train"):
        for net, optimizer in pair.both():
            net(words(1)).backward()
            net.layers[0].weight.__class__ = odd
            optimizer.step()
            net.layers[0].weight.__class__ = nn.Parameter
    assert not chosen
    pair.check()


def test_a_step_waits_for_readers_of_the_host_copy(pair: Pair) -> None:
    lock = pair.handle.holding.lend_host_copy()  # type: ignore[union-attr]
    original = lock.wait
    lock.wait = lambda timeout=None: (lock.set(), original(timeout))[1]  # type: ignore[method-assign]
    pair.step(1)
    assert lock.is_set()
    pair.check()


def test_values_written_while_offloaded_are_reported_before_the_step(pair: Pair) -> None:
    with pair.manager.phase("train"):
        pair.net(words(1)).backward()
        pair.optimizer.state[pair.net.embed.weight]["exp_avg"].add_(1)
        before = copy.deepcopy(pair.net.state_dict())
        with pytest.raises(placement.IntegrityError, match=r"exp_avg"):
            pair.optimizer.step()
        assert_same(dict(pair.net.state_dict()), dict(before))
        pair.optimizer.zero_grad()
        pair.device.heal_poison()
    pair.step(1)
    pair.check()


def test_the_first_buckets_are_there_before_the_step_and_are_not_fetched_again(pair: Pair) -> None:
    """They come while the forward and backward pass leave the link idle, and are shown when the
    step begins."""
    loaded, fetched = pair.handle.counters.loaded_bytes, list[int]()
    with pair.manager.phase("train"):
        early = pair.handle.prefetched_bytes
        copy_all = pair.device.copy

        def watched(copies: Any, to: str) -> None:
            fetched.extend(each.nbytes for each in copies if to == "to_device")
            copy_all(copies, to)

        pair.device.copy = watched
        pair.step_both(1)
        assert early >= 2 * BUCKET
        assert (
            pair.handle.counters.loaded_bytes - loaded - sum(fetched)
            == pair.handle.counters.prefetch_used_bytes
            == early
        )
        assert pair.handle.prefetched_bytes == 0  # nobody knows whether there is another step
        pair.step_both(2)
    pair.check()


def test_state_that_is_not_stepped_any_more_does_not_come_early() -> None:
    set_bucket_bytes(1 << 20)  # a window has room for all
    pair = Pair(lambda net: torch.optim.AdamW(net.layers.parameters()))
    with pair.manager.phase("train"):
        pair.step_both(0)
        pair.step_both(1)
    del pair.optimizer.param_groups[0]["params"][1:]
    with pair.manager.phase("train"):
        assert 0 < pair.handle.prefetched_bytes < pair.handle.num_bytes


def test_a_window_that_was_measured_while_the_ranges_changed_is_measured_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Any thread may ask for it."""
    pair = Pair(adamw)
    with pair.manager.phase("train"):
        pair.step_both(0)
    streamed = pair.handle.streamed
    parts_of = streamed.parts_of
    streamed._window = None

    def change_and_look(*arguments: Any) -> Any:
        monkeypatch.undo()
        streamed.storage.ranges = (*streamed.storage.ranges,)  # another object
        return parts_of(*arguments)

    monkeypatch.setattr(streamed, "parts_of", change_and_look)
    stale = streamed.measured()
    assert stale.ranges is not streamed.storage.ranges
    assert streamed.measured() is not stale


def test_a_phase_whose_window_does_not_fit_is_refused() -> None:
    enough = Pair(adamw)
    needed = enough.actor.num_bytes + enough.handle.window_bytes
    assert needed < enough.actor.num_bytes + enough.handle.num_bytes
    small = Pair(adamw, budget_bytes=needed - 1)
    with pytest.raises(placement.DeviceMemoryError, match="adam"), small.manager.phase("train"):
        pass
    Pair(adamw, budget_bytes=needed).step(0)


def test_a_device_without_room_for_a_window_steps_bucket_by_bucket(
    caplog: pytest.LogCaptureFixture, pair: Pair
) -> None:
    with pair.manager.phase("train"):
        pair.step_both(1)  # the first buckets of this one have come before it
        for net, _ in pair.both():
            net(words(2)).backward()
        free = pair.device.memory().free_bytes
        # the largest bucket, with two chunks that the one before has, too
        pair.device.outside_bytes = free - 4 * CHUNK
        for _, optimizer in pair.both():
            optimizer.step()
        pair.device.outside_bytes = 0
        pair.actor.object.zero_grad()
        pair.plain.zero_grad()
    assert "streams bucket by bucket" in caplog.text
    pair.check()


def test_a_device_without_room_for_a_bucket_stops_there(pair: Pair) -> None:
    with pair.manager.phase("train"):
        pair.step_both(1)
        before = copy.deepcopy(pair.handle.state_dict())
        pair.net(words(2)).backward()
        pair.device.outside_bytes = pair.device.memory().free_bytes
        with pytest.raises(placement.DeviceMemoryError) as caught:
            pair.optimizer.step()
        assert "Leave more device memory free" in caught.value.__notes__[0]
        pair.device.outside_bytes = 0
        assert_same(pair.handle.state_dict(), before)
        pair.net.zero_grad()
    pair.step(1)
    pair.check()


class Wrapper:
    """Steps an optimizer in a way of its own."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    def step(self) -> None:
        self.optimizer.step()


class Clipping(torch.optim.AdamW):
    """Looks at all parameters in its step."""

    def step(self, closure: Any = None) -> Any:
        nn.utils.clip_grad_norm_(self.param_groups[0]["params"], 1.0)
        return super().step(closure)


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (of(torch.optim.LBFGS), r"LBFGS is not known to treat each parameter by itself .*AdamW"),
        (of(Clipping), r"Clipping is not known to treat each parameter by itself"),
        (of(torch.optim.AdamW, differentiable=True), r"differentiable=True"),
        (lambda net: Wrapper(adamw(net)), r"Wrapper steps other optimizers by code of its own"),
    ],
    ids=["LBFGS", "own step", "differentiable", "wrapper"],
)
def test_a_plan_that_streams_a_step_that_cannot_be_streamed_is_refused(
    make: Callable[[nn.Module], Any], reason: str
) -> None:
    net = Net()
    optimizer = make(net)
    manager, handle = registered(net, optimizer)
    with (
        pytest.raises(
            PolicyError, match=rf"streams the state of 'adam'.*{reason}.*optimizer_in='train'"
        ),
        manager.phase("train"),
    ):
        pass
    assert handle.state is OFF
    manager.close()


def test_a_step_that_comes_around_the_method_is_refused() -> None:
    pair = Pair(adamw)
    early = pair.optimizer.step
    pair.step(0)
    with pair.manager.phase("train"):
        pair.net(words(1)).backward()
        with pytest.raises(NotResidentError, match=r"came around the method.*optimizer_in='train'"):
            early()
        pair.net.zero_grad()
    pair.check()


def test_sparse_gradients_are_refused() -> None:
    net = nn.Embedding(16, 8, sparse=True)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    manager, _ = registered(net, optimizer)
    with manager.phase("train"):
        net(torch.tensor([1, 2])).sum().backward()
        with pytest.raises(PhaseError, match=r"sparse gradients"):
            optimizer.step()
        net.zero_grad()
    manager.close()


def test_a_parameter_that_stands_twice_is_refused() -> None:
    """Torch warns, and steps it twice. Where it has moments of several buckets its state would
    leave between the two."""
    net = nn.ParameterList([nn.Parameter(torch.zeros(8)), nn.Parameter(torch.zeros(CHUNK))])
    with pytest.warns(UserWarning, match="duplicate"):
        optimizer = torch.optim.AdamW([net[0], net[1], net[1]], foreach=False)
    manager, _ = registered(net, optimizer)
    with manager.phase("train"):
        net[0].grad, net[1].grad = torch.ones(8), torch.ones(CHUNK)
        with pytest.raises(
            PhaseError,
            match=r"a parameter stands twice in its groups.*optimizer_in='train'",
        ):
            optimizer.step()
        optimizer.zero_grad()
    assert not any(value.any() for value in net.state_dict().values())
    manager.close()


@pytest.mark.parametrize(
    ("policy", "how"), [("streamed", "by name"), ("train", "by position"), ("streamed", "a hook")]
)
def test_a_closure_or_a_hook_that_leaves_the_phase_steps_nothing(policy: Any, how: str) -> None:
    pair, called = Pair(adamw, policy=Colocated(policy)), list[object]()
    pair.step(0)
    hold = pair.manager.hold("train")
    pair.net(words(1)).backward()

    def leave(*arguments: object) -> None:
        called.append(arguments)
        hold.release()

    if how == "a hook":
        pair.optimizer.register_step_pre_hook(leave)
        with pytest.raises(
            PhaseError,
            match=r"a closure or a hook of the step has "
            r"left "
            r"the "
            r"phase. "
            r"Nothing was stepped",
        ):
            pair.optimizer.step()
    else:
        with pytest.raises(NotResidentError, match=r"cannot be stepped"):
            pair.optimizer.step(closure=leave) if how == "by name" else pair.optimizer.step(leave)  # type: ignore[arg-type]
    assert len(called) == 1
    pair.net.zero_grad()
    pair.check()


def test_a_step_method_that_was_replaced_is_refused() -> None:
    pair = Pair(adamw)
    pair.optimizer.step = lambda *_: None  # type: ignore[method-assign]
    with (
        pytest.raises(PhaseError, match=r"has replaced its step\(\) by '.*lambda"),
        pair.manager.phase("train"),
    ):
        pass
    del pair.optimizer.step
    pair.step(0)
    pair.check()
