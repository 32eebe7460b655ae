"""The link between host and device: its rates, and how long a phase transition takes."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_BESIDE = {
    "transition_seconds": "alone",
    "moving_seconds": "moving",
    "loaded_byte_seconds": "loaded_byte",
    "offloaded_byte_seconds": "offloaded_byte",
    "skipped_byte_seconds": "skipped_byte",
}
"""The seconds that phase transitions take beside the copies, with their names in the doctor's file."""
_RATES = ("to_device_bytes_per_second", "to_host_bytes_per_second", "both_bytes_per_second")


@dataclass(frozen=True, kw_only=True, slots=True)
class Link:
    """The rates of the link in bytes a second, and what else `placement doctor` has measured.

    Raises:
        ValueError: a rate is not positive.
    """

    to_device_bytes_per_second: float
    to_host_bytes_per_second: float
    both_bytes_per_second: float | None = None
    """Both directions at once, added up; None: the sum of the two."""
    free_bytes: int | None = None
    """Free bytes of the device; None: not known. So with the following."""
    chunk_bytes: int | None = None
    host_available_bytes: int | None = None
    transition_seconds: float = 0.0
    """The seconds of a phase transition that moves nothing. This and the following come on top of the copies."""
    moving_seconds: float = 0.0
    """The seconds of one that moves something, besides what comes for each byte."""
    loaded_byte_seconds: float = 0.0
    """For each byte that is loaded: memory is mapped behind addresses."""
    offloaded_byte_seconds: float = 0.0
    """For each byte that is copied to the host: fingerprints are computed, and memory goes back to the driver."""
    skipped_byte_seconds: float = 0.0
    """For each byte that leaves without a copy: the same."""

    def __post_init__(self) -> None:
        for name in _RATES:
            rate = getattr(self, name)
            if rate is not None and not rate > 0:
                raise ValueError(f"{name} must be more than 0, not {rate}")
        for name in _BESIDE:
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name} must be 0 or more, not {getattr(self, name)}")

    @classmethod
    def of(cls, source: Link | float | str | os.PathLike[str]) -> Link:
        """A link as it is, one with the same rate each way (bytes a second), or the one in a file that `placement doctor --json` wrote.

        Raises:
            OSError: the file cannot be read.
            ValueError: it is not such a file.
        """
        if isinstance(source, Link):
            return source
        if isinstance(source, (int, float)):
            return cls(to_device_bytes_per_second=source, to_host_bytes_per_second=source)
        path = Path(source)
        advice = "write one with: placement doctor --json > doctor.json"
        try:
            found: Any = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise FileNotFoundError(f"there is no file {path}; {advice}") from None
        except ValueError as error:
            raise ValueError(f"{path} is not JSON ({error}); {advice}") from error
        rates = found.get("link") if isinstance(found, Mapping) else None
        if not isinstance(rates, Mapping) or any(not isinstance(rates.get(name), (int, float)) for name in _RATES):
            raise ValueError(f"{path} has no link with {', '.join(_RATES)}; {advice}")
        to_device, to_host, both = (float(rates[name]) for name in _RATES)
        beside = found.get("transitions") or {}  # an earlier version did not measure them
        if not isinstance(beside, Mapping) or any(not isinstance(beside.get(name, 0.0), (int, float)) for name in _BESIDE.values()):
            raise ValueError(f"{path} has transitions that are not {', '.join(_BESIDE.values())} in seconds; {advice}")
        return cls(
            to_device_bytes_per_second=to_device,
            to_host_bytes_per_second=to_host,
            both_bytes_per_second=both,
            free_bytes=found.get("free_bytes"),
            chunk_bytes=found.get("chunk_bytes"),
            host_available_bytes=found.get("host_available_bytes"),
            **{name: float(beside.get(theirs, 0.0)) for name, theirs in _BESIDE.items()},
        )

    def seconds_beside(self, loaded_bytes: int, offloaded_bytes: int, skipped_bytes: int) -> float:
        """The seconds that a phase transition takes beside its copies."""
        if not (loaded_bytes or offloaded_bytes or skipped_bytes):
            return self.transition_seconds
        loaded, offloaded = loaded_bytes * self.loaded_byte_seconds, offloaded_bytes * self.offloaded_byte_seconds
        return self.moving_seconds + loaded + offloaded + skipped_bytes * self.skipped_byte_seconds
