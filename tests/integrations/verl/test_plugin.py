"""How verl finds placement's engines, and what is said where that does not work."""

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

from bench.code_paths import ROOT
from placement.integrations.verl.plugin import after_import
from tests.integrations.verl import worker
from tests.integrations.verl.subject import logged
from tests.support.frameworks import needs
from tests.support.ranks import on_ranks


@contextmanager
def _chosen(is_chosen: bool) -> Iterator[list[str]]:
    """VERL_ENGINE_VENDOR=placement or not, and nothing registered; the lines that the integration logs meanwhile."""
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


def test_a_module_that_is_there_needs_no_waiting(package: str) -> None:
    importlib.import_module(package)
    seen: list[int] = []
    after_import(package, lambda: seen.append(1))
    assert seen == [1]


def test_an_import_that_failed_may_be_tried_again(package: str, tmp_path: Path) -> None:
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
        path.name for path in folder.glob("*.py") for line in path.read_text().splitlines() if re.match(r"(import|from) verl", line)
    }
    assert importing == set()


@on_ranks("one_rank")
def test_the_plugin_says_that_it_is_active_once() -> None:
    needs("verl")
    worker.import_verl()
    from placement.integrations.verl.plugin import register_engines

    told = "placement is active: param_offload and optimizer_offload of verl's fsdp and fsdp2 engines mean that placement places"
    for is_chosen in (False, True):
        with _chosen(is_chosen) as records:
            register_engines()
        assert records == ([told] if is_chosen else [])


@on_ranks("one_rank")
def test_a_verl_that_lacks_something_is_refused_where_placement_was_asked_for() -> None:
    needs("verl")
    worker.import_verl()
    from verl.workers.engine.base import BaseEngine
    from verl.workers.engine.fsdp.transformer_impl import FSDPEngine

    from placement import PlacementError
    from placement.integrations.verl.plugin import register_engines

    with pytest.MonkeyPatch.context() as patch:
        for owner in (FSDPEngine, BaseEngine):
            patch.delattr(owner, "get_per_tensor_param_shard")
        with _chosen(False):
            register_engines()
        with _chosen(True), pytest.raises(PlacementError, match=r"lacks FSDPEngineWithLMHead\.get_per_tensor_param_shard"):
            register_engines()
    with _chosen(True):
        register_engines()


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
    with mock.patch.dict(base._ROLLOUT_REGISTRY, own, clear=True), mock.patch.dict(rollout._bases, clear=True), _chosen(True) as records:
        place_rollouts()
        paths = {name: path.rpartition(".")[2] for (name, _), path in base._ROLLOUT_REGISTRY.items()}
        kinds = {attribute: kind.__name__ for attribute, (kind, _) in rollout._bases.items()}
        register_engines()
    assert paths == {"vllm": "Placed_vllm", "trtllm": "ServerAdapter"} | ({"sglang": "Placed_sglang"} if has_sglang else {})
    assert kinds == {"Placed_vllm": "PlacedRollout"} | ({"Placed_sglang": "PlacedSglang"} if has_sglang else {})
    told = "a rollout by sglang is no handle of placement: this verl has no adapter under ('sglang', 'async')"
    assert (told in records) is not has_sglang
