"""The link between host and device: its rates, and how long a phase transition keeps it busy."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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

    def __post_init__(self) -> None:
        for name in _RATES:
            rate = getattr(self, name)
            if rate is not None and not rate > 0:
                raise ValueError(f"{name} must be more than 0, not {rate}")

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
        return cls(
            to_device_bytes_per_second=to_device,
            to_host_bytes_per_second=to_host,
            both_bytes_per_second=both,
            free_bytes=found.get("free_bytes"),
            chunk_bytes=found.get("chunk_bytes"),
            host_available_bytes=found.get("host_available_bytes"),
        )

    def seconds(self, loaded_bytes: int, offloaded_bytes: int) -> float:
        """How long copies in both directions at once take: as the slower direction, or as both together where they share a limit."""
        directions = max(loaded_bytes / self.to_device_bytes_per_second, offloaded_bytes / self.to_host_bytes_per_second)
        if self.both_bytes_per_second is None or not loaded_bytes or not offloaded_bytes:
            return directions
        return max(directions, (loaded_bytes + offloaded_bytes) / self.both_bytes_per_second)
