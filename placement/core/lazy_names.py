"""Names of a package that load when they are first used.

What only talks or shows (the board and the coordinator on Ray, `placement top`) never needs torch, which takes two seconds to import: it
is back that much earlier after a restart.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from typing import Any


def on_demand(package: str, places: Mapping[str, str]) -> Callable[[str], Any]:
    """The `__getattr__` of a package.

    Args:
        package: its name.
        places: by name, the module of the package that has it ("observe.trace:write_trace" where it has another name there); a name in
            its own place is the module itself.
    """

    def load(name: str) -> Any:
        if (place := places.get(name)) is None:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        path, _, other_name = place.partition(":")
        module = importlib.import_module(f"{package}.{path}")
        found = module if place == name else getattr(module, other_name or name)
        setattr(sys.modules[package], name, found)
        return found

    return load
