"""Files that take the bytes of slabs: what is written comes back, on any file system, and whatever the kernel answers."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import stat
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from placement.devices.host import spill_directory, spill_file
from placement.devices.host.slab import Slab
from placement.devices.host.spill_directory import SpillDirectory
from placement.devices.host.spill_file import SpillFile

BLOCK = 8192


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spill_file, "BLOCK_BYTES", BLOCK)
    monkeypatch.setattr(spill_file, "_warning", threading.Lock())


@pytest.fixture
def directory(tmp_path: Path) -> Iterator[SpillDirectory]:
    made = SpillDirectory(tmp_path)
    yield made
    made.close()


def slab_of(nbytes: int, seed: int = 0) -> Slab:
    slab = Slab(nbytes)
    slab.view(0, nbytes).copy_(torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed)))
    return slab


def same(a: Slab, b: Slab) -> bool:
    return torch.equal(a.view(0, a.nbytes), b.view(0, b.nbytes))


def round_trip(directory: SpillDirectory, nbytes: int) -> None:
    source, target = slab_of(nbytes), Slab(nbytes)
    file = SpillFile(directory, "a", nbytes)
    assert file.write(source.address)
    assert file.read(target.address)
    assert same(source, target)


@given(nbytes=st.integers(1, 12 * BLOCK))
def test_what_is_written_comes_back(tmp_path_factory: pytest.TempPathFactory, nbytes: int) -> None:
    directory = SpillDirectory(tmp_path_factory.getbasetemp())
    round_trip(directory, nbytes)
    directory.close()


def test_the_folder_is_for_this_user_alone_and_goes_with_its_owner(tmp_path: Path) -> None:
    directory = SpillDirectory(tmp_path)
    assert stat.S_IMODE(directory.path.stat().st_mode) == 0o700
    assert str(os.getpid()) in directory.path.name
    file = SpillFile(directory, "a", BLOCK)
    assert [*directory.path.iterdir()] == []  # no name: a killed process leaves nothing
    directory.close()
    directory.close()
    assert [*tmp_path.iterdir()] == []
    source = slab_of(BLOCK)
    assert file.write(source.address)  # what is open stays


def test_a_file_gives_its_descriptor_back(directory: SpillDirectory) -> None:
    before = len(os.listdir("/proc/self/fd"))
    files = [SpillFile(directory, "a", BLOCK) for _ in range(4)]
    assert len(os.listdir("/proc/self/fd")) == before + 4
    files.clear()
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize("nowhere", ["missing", "file"])
def test_a_wrong_folder_is_refused(tmp_path: Path, nowhere: str) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match=r"disk_directory .* is no folder; set disk_directory to a folder on a local disk"):
        SpillDirectory(tmp_path / nowhere)


# --- what a file system may refuse


def refusing(flags: int, number: int) -> Callable[..., int]:
    real = os.open

    def open_(path: Any, given: int, *rest: Any, **more: Any) -> int:
        if given & flags == flags:
            raise OSError(number, os.strerror(number))
        return real(path, given, *rest, **more)

    return open_


def test_without_direct_io_the_cache_is_used_and_said_once(
    directory: SpillDirectory, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(os, "open", refusing(os.O_DIRECT, errno.EINVAL))
    round_trip(directory, 3 * BLOCK + 5)
    round_trip(directory, BLOCK)
    assert [record.getMessage().count("refuses direct IO") for record in caplog.records] == [1]


@pytest.mark.parametrize("name", ["pwritev", "preadv"])
def test_direct_io_that_is_refused_to_several_threads_at_once(
    directory: SpillDirectory, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    real = getattr(os, name)
    # One block a thread: none is refused before all of them have begun with direct IO.
    all_began = threading.Barrier(3)

    def refuse_direct(file: int, *rest: Any) -> int:
        if fcntl.fcntl(file, fcntl.F_GETFL) & os.O_DIRECT:
            all_began.wait(timeout=30)
            raise OSError(errno.EINVAL, "no direct IO")
        return real(file, *rest)

    monkeypatch.setattr(os, name, refuse_direct)
    round_trip(directory, 3 * BLOCK)
    assert [record.getMessage().count("refuses direct IO") for record in caplog.records] == [1]


def test_a_block_that_is_refused_without_direct_io_is_an_error(directory: SpillDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> int:
        raise OSError(errno.EINVAL, "never")

    monkeypatch.setattr(os, "pwritev", refuse)
    with pytest.raises(OSError, match="never"):
        round_trip(directory, 3 * BLOCK)


def test_without_nameless_files_the_name_goes_at_once(directory: SpillDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "open", refusing(os.O_TMPFILE, errno.EOPNOTSUPP))
    round_trip(directory, 2 * BLOCK)
    assert [*directory.path.iterdir()] == []


def test_a_full_disk_shows_before_a_byte_is_written(directory: SpillDirectory) -> None:
    with pytest.raises(OSError) as caught:  # noqa: PT011 - the number is checked below
        SpillFile(directory, "a", 1 << 60)
    assert caught.value.errno in (errno.ENOSPC, errno.EFBIG)


def test_short_calls_are_continued(directory: SpillDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    write, read = os.pwritev, os.preadv
    monkeypatch.setattr(os, "pwritev", lambda file, parts, offset: write(file, [memoryview(parts[0])[:4096]], offset))
    monkeypatch.setattr(os, "preadv", lambda file, parts, offset: read(file, [memoryview(parts[0])[:4096]], offset))
    round_trip(directory, 3 * BLOCK)


def test_a_file_that_ends_early_is_an_error(directory: SpillDirectory) -> None:
    source = slab_of(4 * BLOCK)
    file = SpillFile(directory, "a", 4 * BLOCK)
    file.write(source.address)
    os.ftruncate(file._file, BLOCK)
    with pytest.raises(OSError, match="the file ends at"):
        file.read(source.address)


@pytest.mark.parametrize("call", ["pwritev", "fdatasync", "preadv"])
def test_every_failing_call_is_raised(directory: SpillDirectory, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    real = getattr(os, call)
    for failing in range(1, 9 if call != "fdatasync" else 2):
        count = iter(range(1, 100))

        def fails(*arguments: Any, count: Iterator[int] = count, failing: int = failing) -> Any:
            if next(count) == failing:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            return real(*arguments)

        source = slab_of(8 * BLOCK)
        file = SpillFile(directory, "a", 8 * BLOCK)
        with monkeypatch.context() as patched:
            patched.setattr(os, call, fails)
            with pytest.raises(OSError, match="Input/output error"):
                assert file.write(source.address) == file.read(source.address)
        assert file.write(source.address)  # it can be tried again
        assert file.read(source.address)


def test_it_stops_when_it_is_told_to(directory: SpillDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spill_file, "DEPTH", 1)  # else the other threads may have done everything before it is told
    source = slab_of(64 * BLOCK)
    file = SpillFile(directory, "a", 64 * BLOCK)
    assert not file.write(source.address, goes_on=lambda: False)
    assert file.write(source.address)
    assert not file.read(source.address, goes_on=lambda: False)


def test_every_block_is_looked_at_once(directory: SpillDirectory) -> None:
    source, seen = slab_of(5 * BLOCK + 1), []
    file = SpillFile(directory, "a", source.nbytes)
    file.write(source.address, look=lambda offset, nbytes: seen.append((offset, nbytes)))
    assert sorted(seen) == [*((i * BLOCK, BLOCK) for i in range(5)), (5 * BLOCK, 4096)]


# --- litter

OWNER = """
import sys, time
from placement.devices.host.spill_directory import SpillDirectory
directory = SpillDirectory(sys.argv[1])
(directory.path / "named").write_bytes(b"left behind by a file system without nameless files")
print(directory.path, flush=True)
time.sleep(60)  # until it is killed
"""


def test_what_a_killed_process_left_is_removed_and_what_a_living_one_has_is_not(tmp_path: Path) -> None:
    root = Path(spill_directory.__file__).parents[3]
    owners = [subprocess.Popen([sys.executable, "-c", OWNER, str(tmp_path)], stdout=subprocess.PIPE, text=True, cwd=root) for _ in range(2)]
    try:
        paths = [Path(owner.stdout.readline().strip()) for owner in owners if owner.stdout is not None]
        (tmp_path / "placement-elsewhere-1-2.0").mkdir()
        (tmp_path / "somebody's").mkdir()
        owners[0].send_signal(signal.SIGKILL)
        owners[0].wait()
        assert spill_directory.remove_abandoned(tmp_path) == [paths[0]]
        assert not paths[0].exists()
        assert (paths[1] / "named").exists()
        mine = SpillDirectory(tmp_path)
        assert {path.name for path in tmp_path.iterdir()} == {mine.path.name, paths[1].name, "placement-elsewhere-1-2.0", "somebody's"}
        mine.close()
    finally:
        for owner in owners:
            owner.kill()
            owner.wait()
            assert owner.stdout is not None
            owner.stdout.close()


@pytest.mark.parametrize("most", [0, 2])
def test_without_threads_the_calling_one_does_the_rest(directory: SpillDirectory, monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    started: list[threading.Thread] = []
    start = threading.Thread.start

    def limited(thread: threading.Thread) -> None:
        if len(started) >= most:
            raise RuntimeError("can't start new thread")
        started.append(thread)
        start(thread)

    monkeypatch.setattr(spill_file.BackgroundThread, "start", limited)
    round_trip(directory, 5 * BLOCK + 3)
    assert len(started) == most


def test_an_advice_that_is_refused_is_no_error(directory: SpillDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: Any) -> None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(os, "posix_fadvise", refused)
    round_trip(directory, 2 * BLOCK)
