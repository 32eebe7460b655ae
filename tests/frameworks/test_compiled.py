"""Calls of an offloaded module, whole or in part, eager or compiled in any way and at any time:
refused, and compiled once."""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounter

from placement import Manager, NotResidentError
from placement.testing import assert_nothing_resident
from tests.support.sweeps import diagonal
from tests.support.worker import assert_same, batch, learn, make_manager, net

Call = Callable[[torch.Tensor], Any]
REFUSED = (
    r"^'actor' is CPU_OFFLOADED in phase 'idle' and cannot be "
    r"called: "
    r"open "
    r".* "
    r"manager\.phase\('log_prob'\) or phase\('train'\)$"
)


class Block(nn.Module):
    """A module with a forward of its own, which dynamo compiles by itself; one of torch's is traced
    through its caller."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.act, self.down = nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.act(self.up(x)))  # type: ignore[no-any-return]


class Stack(nn.Module):
    """Blocks whose layers are compiled one by one, as torchtitan does."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(64, 64), Block()])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


ROOTS: dict[str, Callable[[], nn.Module]] = {"sequential": net, "block": Block}


def of_root(compile_it: Callable[..., Any], model: nn.Module) -> dict[str, Callable[[], Call]]:
    def in_place() -> Call:
        model.compile(**compile_it.keywords)  # type: ignore[attr-defined]
        return model

    return {
        "wrapper": lambda: compile_it(model),
        "in place": in_place,
        "function": lambda: compile_it(lambda x: model(x) * 1),
        "function of forward": lambda: compile_it(lambda x: model.forward(x) * 1),
    }


@pytest.fixture(autouse=True)
def _dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def compiler(counter: CompileCounter | str, *, fullgraph: bool = False) -> Callable[..., Any]:
    return functools.partial(torch.compile, backend=counter, fullgraph=fullgraph)


def registered(manager: Manager, model: nn.Module, make: Callable[[], Call], when: str) -> Call:
    """What calls the model: made before it is registered, made and called before, or made after, in
    a phase or while it is offloaded."""
    if when in ("after", "while offloaded"):
        manager.register("actor", model, role="actor")
        with manager.phase("log_prob") if when == "after" else contextlib.nullcontext():
            return make()
    call = make()
    if when == "called before":
        with torch.no_grad():
            call(batch())
    manager.register("actor", model, role="actor")
    return call


def placed(make: Callable[[], Any]) -> tuple[CompileCounter, Manager, Any, torch.Tensor]:
    """A counter of graphs, a manager, its actor, and what that computed before."""
    manager, model = make_manager(), make()
    with torch.no_grad():
        wanted = model(batch())
    manager.register("actor", model, role="actor")
    return CompileCounter(), manager, model, wanted


def assert_guarded(
    manager: Manager,
    call: Call,
    wanted: torch.Tensor,
    counter: CompileCounter,
    graphs: int | None = None,
) -> None:
    """Refused while offloaded, right in a phase, and compiled in the first phase only."""
    found: list[int] = []
    for _ in range(2):
        for _ in range(2):
            with pytest.raises(NotResidentError, match=REFUSED) as caught:
                call(batch())
            assert type(caught.value) is NotResidentError
        with manager.phase("log_prob"), torch.no_grad():
            assert_same(call(batch()), wanted)
        found.append(counter.frame_count)
    assert found[0] == found[1]
    assert graphs is None or found[0] == graphs
    assert_nothing_resident(manager)


@pytest.mark.parametrize(
    ("when", "form"),
    diagonal(
        ["after", "before", "while offloaded", "called before"],
        ["wrapper", "in place", "function", "function of forward"],
    ),
)
def test_a_compiled_model_is_refused_and_compiled_once(form: str, when: str) -> None:
    root = "sequential" if when == "called before" else "block"
    counter, manager, model = CompileCounter(), make_manager(), ROOTS[root]()
    with torch.no_grad():
        wanted = model(batch())
    call = registered(
        manager, model, of_root(compiler(counter, fullgraph=when == "after"), model)[form], when
    )
    # Before 2.14 torch leaves the call of its own modules as it is.
    torch_compiles_it = form != "in place" or root == "block" or torch.__version__ >= (2, 14)
    assert_guarded(manager, call, wanted, counter, int(torch_compiles_it))


@pytest.mark.parametrize("in_place", [False, True])
def test_compiled_parts_of_a_model_are_refused_and_compiled_once(in_place: bool) -> None:
    counter, manager, model, wanted = placed(Stack)
    with manager.phase("log_prob"):
        if in_place:
            for layer in model.layers:
                layer.compile(backend=counter)
        parts = model.layers if in_place else [compiler(counter)(layer) for layer in model.layers]
    assert_guarded(manager, lambda x: parts[1](parts[0](x)), wanted, counter)
    if in_place:
        assert_guarded(manager, model, wanted, counter)


def test_a_compiled_wrapper_that_was_registered_itself() -> None:
    counter, manager, model = CompileCounter(), make_manager(), net()
    wrapper = compiler(counter)(model)
    with torch.no_grad():
        wanted = wrapper(batch())
    handle = manager.register("actor", wrapper, role="actor")
    assert_guarded(manager, wrapper, wanted, counter, 1)
    assert_guarded(manager, model, wanted, counter, 1)
    assert handle.weights_info()[0].name == "0.weight"


def test_calls_that_are_refused_do_not_add_up_to_the_limit_of_recompilations() -> None:
    counter, manager, model, _ = placed(Block)
    compiled = compiler(counter)(lambda x: model(x) * 1)
    for _ in range(2):
        for _ in range(12):
            with pytest.raises(NotResidentError):
                compiled(batch())
        with manager.phase("log_prob"):
            assert compiled(batch()).isfinite().all()
    assert counter.frame_count == 1


@pytest.mark.filterwarnings("ignore:Dynamo does not know how to trace")
def test_phases_inside_a_compiled_function() -> None:
    counter, manager, model, wanted = placed(Block)

    @compiler(counter)
    def score(x: torch.Tensor) -> torch.Tensor:
        with manager.phase("log_prob"):
            return model(x) * 2

    with torch.no_grad():
        for _ in range(2):
            assert_same(score(batch()), wanted * 2)
    assert_nothing_resident(manager)


def test_training_compiled_by_aot_autograd() -> None:
    models = [Block(), Block()]
    models[1].load_state_dict(models[0].state_dict())
    manager = make_manager()
    compiled = [torch.compile(model, backend="aot_eager", fullgraph=True) for model in models]
    adams = [torch.optim.AdamW(model.parameters(), lr=1e-2) for model in models]
    manager.register("actor", models[0], role="actor")
    manager.register("adam", adams[0])
    for seed in range(3):
        with manager.phase("train"):
            found = learn(compiled[0], adams[0], seed)
        assert_same(found, learn(compiled[1], adams[1], seed))
        with pytest.raises(NotResidentError):
            compiled[0](batch())
    assert_same(dict(manager.handles["actor"].state_dict()), dict(models[1].state_dict()))


# --- eager


@pytest.mark.parametrize(
    "of", ["forward", ("class's forward of a part"), "part", "part's part", "functional_call"]
)
def test_what_passes_the_hooks_of_the_root_is_refused(of: str) -> None:
    manager, model = make_manager(), Stack()
    values = {name: torch.zeros_like(value) for name, value in model.named_parameters()}
    manager.register("actor", model, role="actor")
    calls: dict[str, Call] = {
        "forward": lambda x: model.forward(x) * 1,
        "class's forward of a part": lambda x: Stack.forward(model, x),
        "part": model.layers[0],
        "part's part": model.layers[1].up,
        "functional_call": lambda x: torch.func.functional_call(model, values, (x,)),
    }
    with manager.phase("log_prob"):
        assert calls[of](batch()).isfinite().all()
    with pytest.raises(NotResidentError, match="'actor' is CPU_OFFLOADED"):
        calls[of](batch())


def test_a_part_without_tensors_can_be_called_at_any_time() -> None:
    manager, model = make_manager(), Block()
    model.norm = nn.LayerNorm(64, elementwise_affine=False)
    model.loss = nn.Sequential(nn.Identity(), nn.Dropout(0.0))
    model.scaled = nn.Identity()
    model.scaled.by = torch.ones(2)  # a plain attribute counts
    manager.register("actor", model, role="actor")
    assert_same(model.act(batch()), batch().relu())
    assert model.norm(batch()).isfinite().all()
    assert_same(model.loss(batch()), batch())
    with pytest.raises(NotResidentError):
        model.scaled(batch())


def test_the_refusal_comes_before_the_hooks_of_a_framework() -> None:
    manager, model = make_manager(), net()
    seen: list[nn.Module] = []
    for part in model.modules():
        part.register_forward_pre_hook(lambda module, _: seen.append(module), prepend=True)
    manager.register("actor", model, role="actor")
    late = model[0].register_forward_pre_hook(lambda module, _: seen.append(module), prepend=True)
    for _ in range(2):
        with manager.phase("log_prob"):
            model(batch())
        seen.clear()
        for part in (model, model[0], model[2]):
            with pytest.raises(NotResidentError):
                part(batch())
        assert not seen
    late.remove()
    manager.unregister("actor")
    assert len(model._forward_pre_hooks) == len(model[0]._forward_pre_hooks) == 1


def test_the_signature_of_forward_can_be_asked_for() -> None:
    manager, model = make_manager(), Block()
    wanted = inspect.signature(model.forward)
    manager.register("actor", model, role="actor")
    assert inspect.signature(model.forward) == wanted


# --- what makes something else of a module


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
def test_a_module_is_scripted_traced_and_exported_in_a_phase_and_refused_outside() -> None:
    _, manager, model, _ = placed(net)
    makers: dict[str, Callable[[], Any]] = {
        "script": lambda: torch.jit.script(model),
        "trace": lambda: torch.jit.trace(model, batch()),
        "export": lambda: torch.export.export(model, (batch(),)).module(),
        "strict export": lambda: torch.export.export(model, (batch(),), strict=True).module(),
    }
    for make in makers.values():
        with pytest.raises(NotResidentError, match="'actor' is CPU_OFFLOADED"):
            make()
        with manager.phase("log_prob"):
            assert_same(make()(batch()), model(batch()))


def test_a_part_that_is_copied_or_pickled_is_refused_while_offloaded_and_whole_otherwise() -> None:
    _, manager, model, _ = placed(Stack)
    for copies in (copy.deepcopy, lambda part: pickle.loads(pickle.dumps(part))):
        with pytest.raises(NotResidentError):
            copies(model.layers[1])
        with manager.phase("log_prob"):
            twin = copies(model.layers[1])
            wanted = model.layers[1](batch())
        assert_same(twin(batch()), wanted)
