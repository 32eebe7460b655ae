"""Look up classes of optional packages without importing those packages."""

from __future__ import annotations

import sys


def loaded_class(module: str, name: str) -> type | None:
    """The class of a framework if that framework has been imported, else None: then no object can be an instance of it."""
    found = getattr(sys.modules.get(module), name, None)
    return found if isinstance(found, type) else None


def is_a(obj: object, module: str, name: str) -> bool:
    """Whether an object is an instance of a framework's class. The framework is not imported for the question."""
    cls = loaded_class(module, name)
    return cls is not None and isinstance(obj, cls)
