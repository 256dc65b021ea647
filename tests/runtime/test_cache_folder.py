"""Where compiled kernels are kept, what happens to a user without a home, and whose files are loaded."""

from __future__ import annotations

import os
import pwd
import threading
import warnings
from pathlib import Path
from typing import Any

import pytest

from leanconv.cli import doctor
from leanconv.cli.main import main
from leanconv.runtime import cache, env, errors
from leanconv.runtime.compile import Compiled

NAME = "a" * 64
CODE = Compiled(b"code", "f", "sm_80", 1, 0, 0)


@pytest.fixture
def homeless(monkeypatch: pytest.MonkeyPatch) -> None:
    """No HOME and no entry in the list of users, as in a container that runs with a number for a user."""

    def unknown(uid: int) -> Any:
        raise KeyError(f"getpwuid(): uid not found: {uid}")

    for name in ("HOME", "LEANCONV_CACHE_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", unknown)
    monkeypatch.setattr(errors, "_warned", set())


def test_without_a_home_nothing_is_kept(homeless: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.warns(RuntimeWarning, match="this user has none.*LEANCONV_CACHE_DIR"):
        assert env.cache_dir() is None
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # it has warned already
        assert cache.directory() is None and cache.load(NAME) is None
        cache.store(NAME, CODE)
        assert cache.size() == cache.clear() == (0, 0)
        finding = doctor._store()
        assert finding.state == "absent" and "LEANCONV_CACHE_DIR" in finding.advice
    assert not [*tmp_path.iterdir()], "no folder called ~"
    with pytest.warns(RuntimeWarning, match="~/kept is in a home folder"):
        monkeypatch.setenv("LEANCONV_CACHE_DIR", "~/kept")
        assert env.cache_dir() is None
    monkeypatch.setenv("LEANCONV_CACHE_DIR", str(tmp_path))
    cache.store(NAME, CODE)
    assert cache.load(NAME) == CODE


@pytest.mark.filterwarnings("ignore:compiled kernels cannot be kept")
def test_the_command_without_a_home(homeless: None, capsys: pytest.CaptureFixture[str]) -> None:
    for action, code in (("show", 0), ("size", 0), ("clear", 0), ("path", 2)):
        with pytest.raises(SystemExit) as stopped:
            main(["cache", action])
        out, err = capsys.readouterr()
        assert (stopped.value.code or 0) == code
        assert "0 kernels" in out if code == 0 else err.startswith("error: ") and "LEANCONV_CACHE_DIR" in err


@pytest.fixture
def entry(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A stored kernel's file."""
    monkeypatch.setenv("LEANCONV_CACHE_DIR", str(tmp_path))
    cache.store(NAME, CODE)
    assert cache.load(NAME) == CODE
    return tmp_path / "kernels" / f"{NAME}{cache.SUFFIX}"


def test_files_of_others_are_not_loaded(entry: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    owner = entry.stat().st_uid
    for me, loaded in ((owner, True), (owner + 1, owner == 0)):
        monkeypatch.setattr(os, "geteuid", lambda me=me: me)
        assert (cache.load(NAME) == CODE) == loaded
    monkeypatch.undo()
    if os.geteuid() == 0:  # only root can give files away
        monkeypatch.setenv("LEANCONV_CACHE_DIR", str(entry.parent.parent))
        os.chown(entry, 54321, 54321)
        assert cache.load(NAME) is None
        cache.store(NAME, CODE)
        assert cache.load(NAME) == CODE and entry.stat().st_uid == 0


def test_the_doctor_counts_what_may_be_loaded(entry: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Links and files of others have no kernels, and neither has a link to what has no end."""
    assert cache.size() == (1, len(CODE.entry)) and cache.refused() == 0 and not doctor._store().advice
    for letter, target in ("b", entry.name), ("c", "/dev/zero"), ("d", "nowhere"):
        entry.with_name(f"{letter * 64}{cache.SUFFIX}").symlink_to(target)
    entry.with_name(f"{'e' * 64}{cache.SUFFIX}").mkdir()
    assert cache.size()[0] == 1 and cache.refused() == 3 and len(cache.stored()) == 1
    finding = doctor._store()
    assert finding.text.startswith("1 kernel, 0.0 MB") and "3 of its files are not loaded: links" in finding.text
    assert finding.state == "ok" and finding.advice == "leanconv cache clear removes them"
    with monkeypatch.context() as other:
        other.setattr(os, "geteuid", lambda: entry.stat().st_uid + 1)
        assert entry.stat().st_uid == 0 or (cache.size()[0], cache.refused()) == (0, 4)
    assert cache.clear()[0] == 1 and [path.name[0] for path in entry.parent.iterdir()] == ["e"]


def test_what_is_no_file_is_not_loaded(entry: Path) -> None:
    other = entry.with_name(f"{'b' * 64}{cache.SUFFIX}")
    entry.rename(other)
    entry.symlink_to(other.name)
    assert cache.load(NAME) is None, "a link may stand for another kernel"
    entry.unlink()
    entry.mkdir()
    assert cache.load(NAME) is None
    entry.rmdir()
    os.mkfifo(entry)
    loaded: list[Any] = []
    reader = threading.Thread(target=lambda: loaded.append(cache.load(NAME)), daemon=True)
    reader.start()
    reader.join(10)
    assert loaded == [None], "a FIFO is not waited for"
    cache.store(NAME, CODE)
    assert cache.load(NAME) == CODE
