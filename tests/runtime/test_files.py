"""The writer of whole files: modes, symlinks, errors, and what is left behind."""

from __future__ import annotations

import errno
import os
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from leanconv.runtime import cache
from leanconv.runtime.files import check_writable, read_bytes, whole, write_text

ROOT = Path(__file__).resolve().parents[2]


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.fixture(params=[0o022, 0o077, 0o002])
def umask(request: pytest.FixtureRequest) -> Any:
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


def test_a_new_file_has_the_mode_that_the_umask_leaves(tmp_path: Path, umask: int) -> None:
    write_text(tmp_path / "deep" / "new.txt", "äöü")
    assert (tmp_path / "deep" / "new.txt").read_text(encoding="utf-8") == "äöü"
    assert mode(tmp_path / "deep" / "new.txt") == 0o666 & ~umask


@pytest.mark.parametrize("before", [0o600, 0o640, 0o755, 0o444])
def test_a_replaced_file_keeps_its_mode(tmp_path: Path, before: int) -> None:
    path = tmp_path / "old.txt"
    path.write_text("old")
    path.chmod(before)
    with whole(path) as file:
        assert mode(file) == 0o600, "nobody else reads it before its mode is known"
        file.write_text("new")
        assert path.read_text() == "old"
    assert path.read_text() == "new" and mode(path) == before


def test_a_symlink_stays_and_its_file_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    target, link = tmp_path / "folder" / "target.txt", tmp_path / "link.txt"
    target.write_text("old")
    link.symlink_to(Path("folder") / "target.txt")
    write_text(link, "new")
    assert link.is_symlink() and target.read_text() == "new"
    dangling = tmp_path / "dangling.txt"
    dangling.symlink_to(Path("folder") / "absent.txt")
    write_text(dangling, "there")
    assert dangling.is_symlink() and (tmp_path / "folder" / "absent.txt").read_text() == "there"
    assert {path.name for path in tmp_path.rglob("*.txt")} == {"target.txt", "link.txt", "dangling.txt", "absent.txt"}


def test_what_is_no_file_is_written_to_and_stays(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        with whole(pipe) as file, file.open("wb") as opened:
            opened.write(b"Through")
            opened.seek(0)
            opened.write(b"t")
        assert os.read(reader, 100) == b"through" and stat.S_ISFIFO(pipe.stat().st_mode)
        with pytest.raises(ValueError), whole(pipe) as file:
            file.write_bytes(b"half")
            raise ValueError
        with pytest.raises(OSError) as raised, whole(pipe):
            raise OSError(errno.ENOSPC, "disk full")
        assert raised.value.filename == str(pipe) and os.read(reader, 100) == b"" and not file.exists()
    finally:
        os.close(reader)


def test_standard_output_is_written_to_where_it_is_a_pipe() -> None:
    code = "from leanconv.runtime.files import write_text; write_text('/dev/stdout', 'through')"
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert (done.returncode, done.stdout) == (0, "through"), done.stderr


def test_without_follow_what_has_the_name_makes_way(tmp_path: Path) -> None:
    """Nobody can make the store write elsewhere, or wait, by putting a symlink or a pipe into its folder."""
    precious, path = tmp_path / "precious", tmp_path / "file"
    precious.write_text("old")
    for plant in (lambda: path.symlink_to(precious), lambda: os.mkfifo(path), lambda: path.write_text("older")):
        plant()
        with whole(path, follow=False) as file:
            file.write_text("new")
        assert path.read_text() == "new" and not path.is_symlink() and precious.read_text() == "old"
        path.unlink()


@pytest.mark.parametrize("failure", [ValueError("no"), KeyboardInterrupt(), OSError(errno.ENOSPC, "disk full")])
def test_a_failure_leaves_the_old_file_and_nothing_else(tmp_path: Path, failure: BaseException) -> None:
    path = tmp_path / "old.txt"
    path.write_text("old")
    with pytest.raises(type(failure)), whole(path) as file:
        file.write_text("half")
        raise failure
    assert path.read_text() == "old" and [*tmp_path.iterdir()] == [path]


def test_ctrl_c_as_soon_as_the_new_file_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Python raises it between two instructions, so also right behind the call that makes the file."""
    honest = os.close

    def interrupted(number: int) -> None:
        honest(number)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(os, "close", interrupted)
        write_text(tmp_path / "new.txt", "text")
    assert not [*tmp_path.iterdir()]
    taken = tmp_path / ".new.00000000.txt"
    taken.write_text("somebody else's")
    with monkeypatch.context() as patch, pytest.raises(FileExistsError):
        patch.setattr(os, "urandom", bytes)
        write_text(tmp_path / "new.txt", "text")
    assert [*tmp_path.iterdir()] == [taken]


def test_errors_name_the_target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    absent = tmp_path / "no folder" / "file.txt"
    with pytest.raises(FileNotFoundError) as raised, whole(absent):
        pass
    assert raised.value.filename == str(absent) and "no folder/file.txt'" in str(raised.value)

    def refuse(source: Any, target: Any) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", str(source), None, str(target))

    path = tmp_path / "file.txt"
    with monkeypatch.context() as patch, pytest.raises(PermissionError) as raised:
        patch.setattr(os, "replace", refuse)
        write_text(path, "text")
    assert str(raised.value) == f"[Errno {errno.EACCES}] Permission denied: '{path}'" and not [*tmp_path.iterdir()]

    with pytest.raises(IsADirectoryError) as raised:
        write_text(tmp_path, "text")
    assert raised.value.filename == str(tmp_path)
    with pytest.raises(FileNotFoundError) as raised, whole(path):
        (tmp_path / "another file").read_text()
    assert raised.value.filename == str(tmp_path / "another file"), "an error about another file stays as it is"


def test_where_nothing_can_be_written_is_known_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("old")
    (tmp_path / "link").symlink_to(tmp_path / "file" / "below")
    for path in (tmp_path, tmp_path / "file" / "new.json", tmp_path / "file" / "deep" / "new.json", tmp_path / "link"):
        with pytest.raises(OSError) as raised:
            check_writable(path)
        assert raised.value.filename == str(path) and raised.value.errno in (errno.EISDIR, errno.ENOTDIR)
    os.mkfifo(tmp_path / "pipe")
    before = sorted(tmp_path.rglob("*"))
    for name in ("file", "new.json", "deep/er/new.json", "pipe"):
        check_writable(tmp_path / name)
    monkeypatch.chdir(tmp_path)
    check_writable("new.json")
    assert sorted(tmp_path.rglob("*")) == before and (tmp_path / "file").read_text() == "old"
    if os.geteuid():  # root may write there
        tmp_path.chmod(0o500)
        with pytest.raises(PermissionError, match="deep/new.json"):
            check_writable(tmp_path / "deep" / "new.json")
        tmp_path.chmod(0o700)


def test_the_new_file_has_the_suffix_and_a_name_that_fits(tmp_path: Path) -> None:
    with whole(tmp_path / "picture.png") as file:
        assert file.parent == tmp_path and file.suffix == ".png" and file.name.startswith(".picture.")
    for name in ("n" * 250 + ".txt", "\N{GRINNING FACE}" * 62 + ".png", "result." + "x" * 240, "." + "n" * 254):
        write_text(tmp_path / name, "text")
        assert (tmp_path / name).read_text() == "text"
    with whole(tmp_path / ("\N{GRINNING FACE}" * 62 + ".png")) as file:
        assert file.suffix == ".png"


def test_more_than_a_reader_allows_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"1234")
    assert read_bytes(path, 4) == b"1234"
    with pytest.raises(ValueError, match="has 4 bytes, and 3 are read at most"):
        read_bytes(path, 3)


def test_the_cache_knows_what_a_dead_process_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LEANCONV_CACHE_DIR", str(tmp_path))
    folder = tmp_path / "kernels"
    folder.mkdir()
    monkeypatch.setattr(os, "replace", lambda source, target: None)
    with whole(folder / f"{'a' * 64}{cache.SUFFIX}") as file:
        file.write_bytes(b"12345")
    (left,) = folder.iterdir()
    assert cache.size() == (0, 0), "another process may be writing it"
    os.utime(left, (0, 0))
    assert cache.size() == (0, 5) and cache.clear() == (0, 5) and not [*folder.iterdir()]
