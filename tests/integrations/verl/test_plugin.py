"""How verl finds placement's engines, what is said where that does not work, and the one manager of
a process that has them."""

from __future__ import annotations

import importlib
import importlib.util
import os
import re
import sys
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import pytest
import torch.distributed as dist

from placement import PlacementError
from placement.devices.simulated.device import SimulatedDevice
from placement.integrations import verl as integration
from placement.integrations.verl.plugin import after_import
from placement.policies import Colocated
from tests.integrations.verl import worker
from tests.integrations.verl.subject import logged
from tests.support.frameworks import needs
from tests.support.ranks import on_ranks
from tools.imports import ROOT


@contextmanager
def _chosen(is_chosen: bool) -> Iterator[list[str]]:
    """VERL_ENGINE_VENDOR=placement or not, and nothing registered; the lines that the integration
    logs meanwhile."""
    from verl.workers.engine.base import EngineRegistry

    for model_type in ("language_model", "value_model"):
        for strategy in ("fsdp", "fsdp2"):
            for device in ("cuda", "npu"):
                EngineRegistry._engines[model_type][strategy].pop((device, "placement"), None)
    os.environ.pop("VERL_ENGINE_VENDOR", None)
    if is_chosen:
        os.environ["VERL_ENGINE_VENDOR"] = "placement"
    with logged() as records:
        yield records


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A package on the path that nobody has imported, with a module `late` inside."""
    name = "placement_late_package"
    folder = tmp_path / name
    folder.mkdir()
    (folder / "__init__.py").write_text("")
    (folder / "late.py").write_text("value = 1\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    before = list(sys.meta_path)
    yield name
    for each in [each for each in sys.modules if each.startswith(name)]:
        del sys.modules[each]
    assert sys.meta_path == before


def test_an_import_that_failed_may_be_tried_again_and_a_module_that_is_there_needs_no_waiting(
    package: str, tmp_path: Path
) -> None:
    late = tmp_path / package / "late.py"
    late.write_text("raise OSError('not yet')\n")
    seen: list[int] = []
    after_import(f"{package}.late", lambda: seen.append(1))
    with pytest.raises(OSError, match="not yet"):
        importlib.import_module(f"{package}.late")
    assert seen == []
    late.write_text("value = 1  # and longer than before\n")
    importlib.invalidate_caches()
    importlib.import_module(f"{package}.late")
    assert seen == [1]
    after_import(f"{package}.late", lambda: seen.append(2))
    assert seen == [1, 2]


def test_an_error_of_the_call_is_one_of_the_import(package: str) -> None:
    def refuse() -> None:
        raise ValueError("too old")

    after_import(f"{package}.late", refuse)
    with pytest.raises(ValueError, match="too old"):
        importlib.import_module(f"{package}.late")


def test_verl_finds_the_plugin_by_its_entry_point() -> None:
    project = tomllib.loads((ROOT.parent / "pyproject.toml").read_text())
    (module,) = project["project"]["entry-points"]["verl.plugins"].values()
    assert importlib.util.find_spec(module) is not None


def test_no_module_imports_verl_when_it_is_imported() -> None:
    folder = ROOT / "integrations" / "verl"
    importing = {
        path.name
        for path in folder.glob("*.py")
        for line in path.read_text().splitlines()
        if re.match(r"(import|from) verl", line)
    }
    assert importing == set()


@pytest.mark.sweep
@on_ranks("one_rank")
def test_the_plugin_says_that_it_is_active_once() -> None:
    needs("verl")
    worker.import_verl()
    from placement.integrations.verl.plugin import register_engines

    told = (
        "placement is active: param_offload and optimizer_offload of verl's fsdp and fsdp2 engines "
        "mean that placement places"
    )
    for is_chosen in (False, True):
        with _chosen(is_chosen) as records:
            register_engines()
        assert records == ([told] if is_chosen else [])


@pytest.mark.sweep
@on_ranks("one_rank")
def test_a_verl_that_lacks_something_is_refused_where_placement_was_asked_for() -> None:
    needs("verl")
    worker.import_verl()
    from verl.workers.engine.base import BaseEngine
    from verl.workers.engine.fsdp.transformer_impl import FSDPEngine

    from placement.integrations.verl.plugin import register_engines

    with pytest.MonkeyPatch.context() as patch:
        for owner in (FSDPEngine, BaseEngine):
            patch.delattr(owner, "get_per_tensor_param_shard")
        with _chosen(False):
            register_engines()
        with (
            _chosen(True),
            pytest.raises(
                PlacementError, match=r"lacks FSDPEngineWithLMHead\.get_per_tensor_param_shard"
            ),
        ):
            register_engines()
    with _chosen(True):
        register_engines()


@pytest.mark.sweep
@pytest.mark.parametrize("has_sglang", [True, False])
@on_ranks("one_rank")
def test_the_rollouts_that_are_handles(has_sglang: bool) -> None:
    """Where verl has an adapter of SGLang, and where it has none, which is logged."""
    needs("verl")
    worker.import_verl()
    from verl.workers.rollout import base

    from placement.integrations.verl import rollout
    from placement.integrations.verl.plugin import place_rollouts, register_engines

    names = ("vllm", "trtllm", *(["sglang"] if has_sglang else []))
    own = {(name, "async"): f"verl.{name}.ServerAdapter" for name in names}
    with (
        mock.patch.dict(base._ROLLOUT_REGISTRY, own, clear=True),
        mock.patch.dict(rollout._bases, clear=True),
        _chosen(True) as records,
    ):
        place_rollouts()
        paths = {
            name: path.rpartition(".")[2] for (name, _), path in base._ROLLOUT_REGISTRY.items()
        }
        kinds = {attribute: kind.__name__ for attribute, (kind, _) in rollout._bases.items()}
        register_engines()
    assert paths == {"vllm": "Placed_vllm", "trtllm": "ServerAdapter"} | (
        {"sglang": "Placed_sglang"} if has_sglang else {}
    )
    assert kinds == {"Placed_vllm": "PlacedRollout"} | (
        {"Placed_sglang": "PlacedSglang"} if has_sglang else {}
    )
    told = (
        "a rollout by sglang is no handle of placement: this verl has no adapter under ('sglang', "
        "'async')"
    )
    assert (told in records) is not has_sglang


# --- the one manager of a process that has its engines; verl itself is not needed for it


@pytest.fixture
def simulated(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    integration.close_manager()
    monkeypatch.setenv("PLACEMENT_DEVICE", "simulated:16MiB")
    yield
    integration.close_manager()


@pytest.mark.usefixtures("simulated")
def test_a_manager_that_cannot_be_announced_is_none(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The next call does not give one whose metrics nobody can read."""
    targets = tmp_path / "targets"
    targets.write_text("")  # a file where a folder should be
    monkeypatch.setenv("PLACEMENT_DISCOVERY", str(targets))
    for _ in range(2):
        with pytest.raises(PlacementError, match=f"cannot announce this worker in {targets}"):
            integration.manager()
    targets.unlink()
    assert integration.manager() is integration.manager()
    assert [file.suffix for file in targets.iterdir()] == [".json"]


@pytest.mark.usefixtures("simulated")
@pytest.mark.parametrize(("chosen", "streams"), [(None, True), ("colocated", False)])
def test_a_sync_is_streamed_unless_a_policy_is_chosen(
    monkeypatch: pytest.MonkeyPatch, chosen: str | None, streams: bool
) -> None:
    if chosen is not None:
        monkeypatch.setenv("PLACEMENT_POLICY", chosen)
    policy = integration.manager().policy
    assert isinstance(policy, Colocated)
    assert policy.stream_sync == streams


@on_ranks("two_ranks")
def test_a_rank_that_is_announced_at_the_second_try_is_in_the_group_of_the_others(
    tmp_path: Path,
) -> None:
    """And the next manager of both is in a group of its own. The second rank's folder is a file at
    first."""
    folder, later = tmp_path / "first", tmp_path / "second"
    integration.close_manager()
    os.environ.update(
        PLACEMENT_DEVICE=f"simulated:{worker.CAPACITY}",
        PLACEMENT_DISCOVERY=str(folder if dist.get_rank() == 0 else later),
    )
    try:
        if dist.get_rank() == 1:
            later.write_text("")
            with pytest.raises(PlacementError):
                integration.manager()
            later.unlink()
        for _ in range(2):
            with integration.manager().phase("log_prob"):
                assert integration.manager().phase_name == "log_prob"
            assert isinstance(integration.manager().device, SimulatedDevice)
            integration.close_manager()
    finally:
        del os.environ["PLACEMENT_DEVICE"], os.environ["PLACEMENT_DISCOVERY"]
