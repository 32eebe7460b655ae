"""The ground layer: states and their transitions, the journal, snapshots, errors and settings. It
imports no other folder of placement.

Whatever is imported of placement imports this folder, also where OpenStack's
`placement/__init__.py` has taken the place of ours.

`on_demand` gives a package attributes that are imported when they are first used: importing torch
takes two seconds, and code that only talks or displays (`placement status`) does not need it.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Mapping
from typing import Any

__version__ = "0.1.0"  # the one place that says it

_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
if os.path.exists(os.path.join(_PACKAGE, "deploy.py")):
    raise ImportError(
        f"OpenStack's openstack-placement has put files into the same folder {_PACKAGE}, and has "
        "replaced or will replace files of placement-rl. Give each an environment of its own. In "
        "this one: pip uninstall openstack-placement, then reinstall placement-rl (pip install "
        "--force-reinstall --no-deps . in a checkout), because pip has also removed files of the "
        "same name"
    )


def on_demand(
    package: str,
    places: Mapping[str, str],
) -> Callable[[str], Any]:
    """Return a `__getattr__` for the package of this name. `places` has the module of each
    attribute.

    A place "observe.trace:write_trace" means another name in that module; one that is the
    attribute's own name, the module itself.
    """

    def load(name: str) -> Any:
        place = places.get(name)
        if place is None:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        path, _, other_name = place.partition(":")
        value: Any = importlib.import_module(f"{package}.{path}")
        if place != name:
            value = getattr(value, other_name or name)
        setattr(sys.modules[package], name, value)
        return value

    return load
