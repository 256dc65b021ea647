"""Processes that need the same kernel at once: one compiles it, and nobody waits for one that died or sleeps."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from leanconv.runtime import files

ROOT = Path(__file__).resolve().parents[2]
#: compiles, which takes half a second here, and says so
PROCESS = """
import sys, time
from leanconv.plan import Launch
from leanconv.runtime import cache
from leanconv.runtime.compile import Compiled

def compile_launch(launch, arch):
    print("compiles", flush=True)
    time.sleep(0.5)
    if sys.argv[1] == "dies":
        raise SystemExit
    return Compiled(b"code", "f", arch, 1, 0, 0)

cache.compiler.compile_launch, cache.compiler_version = compile_launch, lambda: "nvrtc"
launch = Launch("kernels/direct/direct.cuh", "leanconv::direct", (), (), (), grid=1, block=32)
assert cache.compiled(launch, "sm_90a").cubin == b"code"
"""


def start(folder: Path, word: str) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "LEANCONV_CACHE_DIR": str(folder)}
    return subprocess.Popen(
        [sys.executable, "-c", PROCESS, word],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_one_of_several_processes_compiles(tmp_path: Path) -> None:
    processes = [start(tmp_path, "lives") for _ in range(3)]
    told = [process.communicate(timeout=60) for process in processes]
    assert all(process.returncode == 0 for process in processes), told
    assert sorted(out for out, _ in told) == ["", "", "compiles\n"]


def test_a_process_that_dies_frees_its_lock(tmp_path: Path) -> None:
    first = start(tmp_path, "dies")
    assert first.stdout is not None and first.stdout.readline() == "compiles\n"
    second = start(tmp_path, "lives")
    assert second.communicate(timeout=60) == ("compiles\n", "") and second.returncode == 0
    first.communicate(timeout=60)


def test_what_cannot_be_locked_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    holder = (
        "import fcntl, sys, time; f = open(sys.argv[1], 'w'); fcntl.lockf(f, 2, 1, 5); print(1, flush=True); input()"
    )
    path = tmp_path / "locks"
    with subprocess.Popen(
        [sys.executable, "-c", holder, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None and process.stdout.readline()
        monkeypatch.setattr(files, "PATIENCE", 0.1)
        begun = time.monotonic()
        with files.process_lock(path, 5) as waited:
            assert waited and 0.1 <= time.monotonic() - begun < 5
        with files.process_lock(path, 6) as waited:
            assert not waited, "another byte is another lock"
        process.communicate("\n")
    with files.process_lock(path, 5) as waited:
        assert not waited
    with files.process_lock(tmp_path / "locks" / "below a file", 5) as waited:
        assert not waited


@pytest.mark.skipif(files.fcntl is None, reason="Windows has no modes of files")
def test_the_locks_of_a_user_are_nobody_elses(tmp_path: Path) -> None:
    """Who can open the file can hold its locks for ever."""
    with files.process_lock(tmp_path / "new" / "lock", 0):
        assert (tmp_path / "new" / "lock").stat().st_mode & 0o777 == 0o600


@pytest.mark.skipif(files.fcntl is None, reason="Windows has no such locks")
def test_a_file_stands_for_a_lock_where_there_are_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on network file systems that are mounted without locks: without it every process compiles every kernel."""

    def refuses(*arguments: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(files.fcntl, "lockf", refuses)
    path, told = tmp_path / "locks", []

    def second() -> None:
        with files.process_lock(path, 5) as waited:
            told.append((waited, time.monotonic()))

    with files.process_lock(path, 5) as waited:
        thread = threading.Thread(target=second)
        thread.start()
        time.sleep(0.1)
        ended = time.monotonic()
    thread.join()
    assert not waited and told[0][0] and told[0][1] >= ended
    assert [each.name for each in tmp_path.iterdir()] == ["locks"], "nothing is left behind"
    files._stand_in(path, 6).touch()  # of a process that died
    monkeypatch.setattr(files, "_PATIENCE_WITH_FILES", 0.05)
    for waits in (True, False):
        with files.process_lock(path, 6) as waited:
            assert waited == waits, "it is waited for once"


def test_what_is_there_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hundreds of processes that wait for a kernel do not take its lock one after the other."""
    held, answers = threading.Event(), iter([False, True])

    def busy(*arguments: object) -> None:
        held.set()
        raise BlockingIOError

    monkeypatch.setattr(files, "_lock_byte", busy)
    begun = time.monotonic()
    with files.process_lock(tmp_path / "locks", 5, lambda: next(answers)) as waited:
        assert waited and held.is_set() and time.monotonic() - begun < 10
    assert next(answers, None) is None, "it was asked until it was there"
