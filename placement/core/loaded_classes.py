"""Classes of packages that may not be installed, and that are never imported for the asking."""

from __future__ import annotations

import sys


def loaded_class(module: str, name: str) -> type | None:
    """A class of a framework if the framework has been imported, else None: then nothing can be an instance of it."""
    found = getattr(sys.modules.get(module), name, None)
    return found if isinstance(found, type) else None


def is_a(obj: object, module: str, name: str) -> bool:
    """Whether an object is an instance of a class of a framework, which need not be loaded."""
    cls = loaded_class(module, name)
    return cls is not None and isinstance(obj, cls)
