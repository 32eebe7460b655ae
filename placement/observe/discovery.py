"""How Prometheus, `placement top` and the status page find the workers of a run, none of which has a port of its own choosing.

Two ways, the same targets in both, in the form that Prometheus reads:

* a folder with one file a worker (`file_sd_configs`), which workers of one node, or of many with a shared folder, write by
  themselves. A file goes when its worker ends; one whose worker was killed is removed after a while by another worker of its
  node, or by `placement discover`. The worker holds a POSIX lock on it, which the system drops with the process.
* a page (`http_sd_configs`), see `DiscoveryServer`, where there is no shared folder.

Format: Prometheus documentation, "file_sd_config" and "HTTP SD".
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import json
import os
import re
import socket
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from placement.core.errors import PlacementError
from placement.core.weak_set import WeakIdSet

_HOST = "__meta_placement_host"
"""The machine that a file's worker runs on; Prometheus drops labels that begin with two underscores."""
REAP_SECONDS = 300.0
"""How long the file of a worker that was killed stays."""
_FOUND_DEAD: dict[tuple[Path, int], float] = {}
"""When a file, by its path and inode, was first seen without its worker."""
_UNSAFE = re.compile(r"[^A-Za-z0-9_.-]+")


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """Who a worker is in its run: the labels of its target."""

    run: str = "default"
    node: str = "node0"
    rank: int = 0
    gpu_uuid: str = ""
    """As `nvidia-smi -L` says it, to join with the metrics of DCGM; empty without a GPU."""

    @classmethod
    def from_launcher(cls, environment: Mapping[str, str] = os.environ, *, run: str | None = None, gpu_uuid: str = "") -> Identity:
        """What torchrun (RANK, GROUP_RANK, TORCHELASTIC_RUN_ID) or Slurm (SLURM_PROCID, SLURM_NODEID, SLURM_JOB_ID) say of this process.

        Raises:
            PlacementError: a rank that is no number.
        """

        def first(*names: str, default: str) -> str:
            return next((environment[name] for name in names if environment.get(name)), default)

        rank = first("RANK", "SLURM_PROCID", default="0")
        if not rank.isdecimal():
            raise PlacementError(f"RANK is {rank!r}, which is no number; it names this worker in Prometheus")
        node = first("GROUP_RANK", "SLURM_NODEID", default="0")
        run = run or first("TORCHELASTIC_RUN_ID", "SLURM_JOB_ID", default="default")
        return cls(run=run, node=f"node{node}" if node.isdecimal() else node, rank=int(rank), gpu_uuid=gpu_uuid)

    @property
    def instance(self) -> str:
        """`node0/rank3`: the same after a restart on another port, so that a worker's series go on."""
        return f"{self.node}/rank{self.rank}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """Where one worker is scraped, and its labels there."""

    address: str
    """host:port."""
    labels: Mapping[str, str]

    @classmethod
    def of(cls, address: str, identity: Identity) -> Target:
        labels = {"instance": identity.instance, "run": identity.run, "node": identity.node, "rank": str(identity.rank)}
        return cls(address=address, labels=labels | ({"gpu_uuid": identity.gpu_uuid} if identity.gpu_uuid else {}))

    @property
    def name(self) -> str:
        return self.labels.get("instance", self.address)

    @property
    def url(self) -> str:
        return f"http://{self.address}"


def as_json(targets: Iterable[Target]) -> str:
    """Targets in Prometheus' form, one group each."""
    return json.dumps([{"targets": [each.address], "labels": dict(each.labels)} for each in targets], indent=1) + "\n"


def from_json(text: str | bytes, where: object) -> list[Target]:
    """Targets from Prometheus' form.

    Raises:
        PlacementError: it is something else; names `where`.
    """
    try:
        groups = json.loads(text)
        return [Target(address=str(address), labels=dict(group["labels"])) for group in groups for address in group["targets"]]
    except (ValueError, TypeError, KeyError) as error:
        raise PlacementError(f"{where} holds no list of Prometheus targets: {error!r}") from error


class Announcement:
    """One worker's file in a discovery folder, from now until `close()` or the end of the process.

    Args:
        folder: made if it is not there.
        target: whose `instance` and `run` name the file: a worker that restarts replaces its own.

    Raises:
        PlacementError: the folder or file cannot be written.
    """

    def __init__(self, folder: str | os.PathLike[str], target: Target) -> None:
        labels = dict(target.labels) | {_HOST: socket.gethostname()}
        # Flat: Prometheus takes a pattern in the last part of a path only.
        self.path = Path(folder) / f"{_UNSAFE.sub('-', labels['run'])}.{_UNSAFE.sub('-', labels['instance'])}.json"
        self._pid = os.getpid()
        # Prometheus watches *.json; it must never see half a file.
        partial = self.path.with_suffix(f".{self._pid}.partial")
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = partial.open("w+")
            self._file.write(as_json([Target(address=target.address, labels=labels)]))
            self._file.flush()
            with contextlib.suppress(OSError):  # a file system without locks: then nobody reaps the file either
                fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            partial.replace(self.path)
        except OSError as error:
            raise PlacementError(f"cannot announce this worker in {self.path.parent}: {error}") from error
        _OWN.add(self)
        atexit.register(self.close)
        reap(folder)

    def close(self) -> None:
        """Take the file away, unless a later worker of the same name has replaced it. Idempotent; nothing in a forked child."""
        if self._file.closed or os.getpid() != self._pid:
            return
        with contextlib.suppress(OSError):
            if self.path.stat().st_ino == os.fstat(self._file.fileno()).st_ino:
                self.path.unlink()
        self._file.close()
        _OWN.discard(self)
        atexit.unregister(self.close)


_OWN: WeakIdSet[Announcement] = WeakIdSet()
"""Of this process. A POSIX lock is lost when its process closes ANY descriptor of the file: these are never opened to look."""


def files_in(folder: str | os.PathLike[str]) -> Iterator[Path]:
    """The discovery files of all runs in a folder, in order."""
    return iter(sorted(Path(folder).glob("*.json")))


def targets_in(folder: str | os.PathLike[str]) -> list[Target]:
    """The targets of a discovery folder. A file that vanishes in the meantime is left out.

    Raises:
        PlacementError: a file holds something else.
    """
    found: list[Target] = []
    own = {each.path: each for each in _OWN}
    for path in files_in(folder):
        with contextlib.suppress(FileNotFoundError):
            # Reading its own file by another descriptor would give up the lock.
            text = os.pread(own[path]._file.fileno(), 1 << 20, 0) if path in own else path.read_bytes()
            found += from_json(text, path)
    return found


def reap(folder: str | os.PathLike[str]) -> list[Path]:
    """Remove the files of workers of this machine that were found dead `REAP_SECONDS` ago. Returns them.

    Not at once: while a dead worker is listed, Prometheus sees that it does not answer, and can tell it from one that ended in order.
    Of this machine only: whether a lock is seen from another one depends on how the folder is mounted.
    """
    gone: list[Path] = []
    now = time.monotonic()
    own = {each.path for each in _OWN}
    for path in files_in(folder):
        if path in own:
            continue
        with contextlib.suppress(OSError, PlacementError), path.open("r+") as file:
            if any(target.labels.get(_HOST) != socket.gethostname() for target in from_json(file.read(), path)):
                continue
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # raises while the worker lives
            inode = os.fstat(file.fileno()).st_ino
            if path.stat().st_ino == inode and now - _FOUND_DEAD.setdefault((path, inode), now) >= REAP_SECONDS:
                path.unlink()  # else a new worker has replaced it by now
                gone.append(path)
    return gone
