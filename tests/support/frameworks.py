"""Frameworks that a test needs, imported where it runs: every process that runs tests loads every
test file, and few of them run it."""

from __future__ import annotations

import importlib
import importlib.util
import warnings
from importlib.metadata import version
from typing import Any

import pytest
from packaging.version import Version


class Later:
    """A module that is imported at the first look into it, without its warnings."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        # pytest asks everything in a test file whether it is a fixture
        if attribute.startswith("_"):
            raise AttributeError(attribute)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return getattr(importlib.import_module(self._name), attribute)


def needs(name: str, at_least: str = "") -> Any:
    """For the head of a test file: the module, to be imported later; skips the file where its
    package is not installed, or has an older version."""
    package = ".".join(name.split(".")[:2])  # to look for a module imports the packages around it
    try:
        is_there = importlib.util.find_spec(package) is not None
    except ModuleNotFoundError as error:
        if error.name is None or not f"{package}.".startswith(f"{error.name}."):
            raise  # something else is missing, which a package around it needs
        is_there = False
    if not is_there:
        pytest.skip(f"{package} is not installed here", allow_module_level=True)
    if at_least and Version(version(package)) < Version(at_least):
        pytest.skip(f"{package} is older than {at_least} here", allow_module_level=True)
    return Later(name)


def new_accelerator(**options: Any) -> Any:
    """An accelerator that knows nothing of earlier ones.

    accelerate keeps its precision, and whether the next step is one, for the whole process: after a
    test that stops between two steps, the wrapper of another test's optimizer would not step.
    """
    accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed here")
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    accelerate.state.GradientState._reset_state()
    return accelerate.Accelerator(cpu=True, **options)
