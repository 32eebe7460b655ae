"""The one manager of a process. Actor, reference and critic of a colocated worker share its GPU, so they share the manager."""

from __future__ import annotations

import itertools
import logging
import os
import threading
import weakref
from collections.abc import Callable

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, _get_default_store

from placement.core.errors import PhaseError
from placement.group import Group, StoreGroup
from placement.manager import Manager

logger = logging.getLogger("placement.integrations.verl")
logger.setLevel(os.environ.get("VERL_LOGGING_LEVEL", "INFO"))  # verl sets the root logger to WARNING

_lock = threading.Lock()
_made: list[Manager] = []
_numbers = itertools.count()
_joined: list[Group] = []
"""The group of the manager. It outlives a manager that could not be made: a rank joins once, and the others wait for it in this group."""
_ended: list[weakref.WeakMethod[Callable[[], None]]] = []
"""Methods that end the rollout's phase, called when an engine begins one."""


def manager() -> Manager:
    """The manager that verl's engines in this process share, made at the first call with the settings in `PLACEMENT_*`.

    All ranks of the worker group change phase together. With `PLACEMENT_DISCOVERY` set it serves its metrics, too.

    Raises:
        ValueError: a `PLACEMENT_*` variable is wrong.
        PlacementError: the device does not exist, there is no such policy, or the folder of `PLACEMENT_DISCOVERY` cannot be written.
    """
    with _lock:
        if not _made:
            made = Manager.from_settings(group=_group())
            if made.settings.discovery is not None:
                try:
                    made.serve()
                except BaseException:
                    made.close()  # else the next call would give one that nobody can read
                    raise
            _made.append(made)
        return _made[0]


def current() -> Manager | None:
    """The manager of this process, if there is one already."""
    return _made[0] if _made else None


def on_next_phase(end: weakref.WeakMethod[Callable[[], None]]) -> None:
    """Call `end` before an engine of this process begins a phase, each time."""
    _ended.append(end)


def next_phase() -> None:
    """An engine of this process is about to begin a phase in which the rollout is not needed."""
    for end in _ended:
        method = end()
        if method is not None:
            method()


def use_manager(made: Manager) -> None:
    """Let verl's engines in this process use a manager of your own: with a policy object, or a device that no variable can name.

    Raises:
        PhaseError: this process has a manager already.
    """
    with _lock:
        if _made:
            raise PhaseError("verl's engines in this process have a manager; call use_manager() before the first one is built")
        _made.append(made)


def close_manager() -> None:
    """Close the manager of this process, so that the next call of `manager` makes a new one. Every rank does so, or none.

    Raises:
        PhaseError: a phase is open.
    """
    with _lock:
        if _made:
            next_phase()
            _made[0].close()
            _made.clear()
            _ended.clear()
        _joined.clear()


def _group() -> Group | None:
    """The ranks of verl's worker group, over the store of their process group. A number keeps the keys of each manager apart."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return None
    if not _joined:
        store = PrefixStore(f"verl/{next(_numbers)}", _get_default_store())
        _joined.append(StoreGroup(store, dist.get_rank(), dist.get_world_size()))
    return _joined[0]
