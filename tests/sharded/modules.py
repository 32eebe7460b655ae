"""Modules that are there, or hidden, for a while."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Mapping
from typing import Any


@contextlib.contextmanager
def replaced(modules: Mapping[str, Any]) -> Iterator[None]:
    """These entries of `sys.modules`; None hides a module. What is imported in the meantime stays, unlike with `mock.patch.dict`: torch
    registers operators when parts of it are imported, and refuses to do so again."""
    known = {name: sys.modules[name] for name in modules if name in sys.modules}
    sys.modules.update(modules)
    try:
        yield
    finally:
        for name in modules:
            del sys.modules[name]
        sys.modules.update(known)
