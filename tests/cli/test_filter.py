"""``leanconv filter`` over folders, long images and integers; Ctrl-C."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import leanconv
from leanconv import __main__ as entry
from leanconv.cli import filter as work
from leanconv.cli import pictures
from leanconv.cli.command_line import FAILED, INTERRUPTED, MISTAKE
from leanconv.cli.pictures import Picture
from leanconv.images import filters
from leanconv.images.borders import BORDERS
from leanconv.runtime import files
from tests.messages import line_of

Image = pytest.importorskip("PIL.Image", reason="pictures need Pillow")
ImageOps = pytest.importorskip("PIL.ImageOps")
ndimage = pytest.importorskip("scipy.ndimage")
ROOT = Path(__file__).resolve().parents[2]


def correct(pixels: np.ndarray, kernel: np.ndarray) -> np.ndarray:
    """SciPy's float64 answer for (height, width, …), rounded and clipped where the pixels are integers."""
    kernel = kernel.astype(float).reshape(*kernel.shape, *[1] * (pixels.ndim - 2))
    wanted: np.ndarray = ndimage.correlate(pixels.astype(float), kernel, mode="mirror")
    if pixels.dtype.kind in "iu":
        limits = np.iinfo(pixels.dtype)
        wanted = np.clip(np.rint(wanted), limits.min, limits.max)
    return wanted


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.fixture
def folder(tmp_path: Path, rng: np.random.Generator) -> Path:
    """Five files to filter, and others that are left out."""
    made = tmp_path / "in"
    (made / "more.png").mkdir(parents=True)
    (made / "notes.txt").write_text("no picture")
    (made / "table.h5").write_bytes(b"\x89HDF\r\n\x1a\n")
    (made / ".hidden.png").write_bytes(b"")
    for name in ("a.png", "b.JPG", "c.tif", "e.webp"):
        Image.fromarray(rng.integers(0, 256, (9, 11, 3), np.uint8)).save(made / name)
    np.save(made / "d.npy", rng.standard_normal((3, 5, 7)).astype(np.float32))
    return made


# Folders


def test_a_folder_goes_into_a_folder(run: Any, folder: Path, tmp_path: Path) -> None:
    code, out, err = run("filter", folder, tmp_path / "new" / "out", "-k", "sharpen")
    assert (code, out, err) == (0, f"{tmp_path}/new/out: 5 files\n", "")
    assert names(tmp_path / "new" / "out") == ["a.png", "b.JPG", "c.tif", "d.npy", "e.webp"]
    for name in ("a.png", "c.tif"):
        before, after = (np.array(Image.open(where / name)) for where in (folder, tmp_path / "new" / "out"))
        assert np.array_equal(after, correct(before, filters.sharpen()))


def test_several_files_go_into_a_folder(run: Any, folder: Path, tmp_path: Path) -> None:
    assert run("filter", folder / "a.png", folder / "d.npy", tmp_path / "out", "-k", "box:3")[0] == 0
    assert names(tmp_path / "out") == ["a.png", "d.npy"]
    code, out, _ = run("filter", folder / "c.tif", tmp_path / "out", "-k", "box:3")
    assert code == 0 and out.startswith(f"{tmp_path}/out/c.tif: 9x11x3") and len(names(tmp_path / "out")) == 3


def test_a_broken_file_is_named_and_the_others_are_filtered(run: Any, folder: Path, tmp_path: Path) -> None:
    (folder / "b.JPG").write_bytes(b"no picture")
    (folder / "b2.png").write_bytes((folder / "a.png").read_bytes()[:60])
    np.save(folder / "complex.npy", np.zeros((4, 4), complex))
    code, out, err = run("filter", folder, tmp_path / "out", "-k", "box:3")
    assert code == FAILED and out == f"{tmp_path}/out: 4 of 7 files are written\n"
    lines = err.splitlines()
    assert len(lines) == 3 and all(line.startswith("error: ") for line in lines)
    for line, name in zip(lines, ("b.JPG", "b2.png", "complex.npy"), strict=True):
        assert str(folder / name) in line
    assert names(tmp_path / "out") == ["a.png", "c.tif", "d.npy", "e.webp"]


def test_mistakes_are_found_before_anything_is_written(run: Any, folder: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").touch()
    (tmp_path / "twin").mkdir()
    (tmp_path / "twin" / "a.png").write_bytes((folder / "a.png").read_bytes())
    out = tmp_path / "out"
    for arguments, message in (
        ((folder, out, "-k", "gauss:3"), "kernel='gauss:3' is not known"),
        ((folder, out, "-k", "box:3", "--border", "round"), "border='round' is not known"),
        ((folder, out, "-k", "box:3", "--border", "9" * 5000), "9' is not known; choose one of 'constant'"),
        ((folder, out, "-k", "box:3", "--device", "gpu"), "device='gpu' is not known"),
        (("", out, "-k", "box:3"), "Invalid value for 'IN': it is empty"),
        ((folder, "", out, "-k", "box:3"), "Invalid value for 'IN': it is empty"),
        ((folder, "", "-k", "box:3"), "Invalid value for 'OUT': it is empty"),
        ((folder, folder, "-k", "box:3"), "a.png would be replaced by its result"),
        ((folder / "a.png", folder, "-k", "box:3"), "a.png would be replaced by its result"),
        ((folder, tmp_path / "file", "-k", "box:3"), "file is no folder"),
        ((folder, tmp_path / "twin", out, "-k", "box:3"), "would both be written to"),
        ((tmp_path / "empty", out, "-k", "box:3"), "empty holds no file with the suffix of a picture"),
    ):
        before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
        code, _, err = run("filter", *arguments)
        assert code == MISTAKE and message in line_of(err), err
        assert before == {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}


@pytest.mark.parametrize("where", ["source", "result", "one file"])
def test_a_symlink_to_another_file_of_the_run(where: str, run: Any, folder: Path, tmp_path: Path) -> None:
    out, beside = tmp_path / "out", tmp_path / "one.png"
    out.mkdir()
    points_to = {"source": folder / "b.JPG", "result": out / "c.tif", "one file": beside}[where]
    (out / "a.png").symlink_to(points_to)
    if where == "one file":
        (out / "c.tif").symlink_to(points_to)
    message = {
        "source": f"{folder / 'b.JPG'} would be replaced by the result of {folder / 'a.png'}",
        "result": f"{folder / 'a.png'} and {folder / 'c.tif'} would both be written to {points_to}",
    }
    before = (folder / "b.JPG").read_bytes()
    code, _, err = run("filter", folder, out, "-k", "box:3")
    assert code == MISTAKE and message.get(where, message["result"]) in line_of(err), err
    assert (folder / "b.JPG").read_bytes() == before and points_to.exists() == (where == "source")


def test_where_to_write_is_checked_before_anything_is_read(run: Any, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(pictures, "read", lambda *arguments: pytest.fail("it is read"))
    np.save(tmp_path / "in.npy", np.zeros((4, 5)))
    for target, message in (("out.h5", "'.h5' names no format"), ("out.psd", "'.psd' names"), ("no/o.npy", "No such")):
        code, _, err = run("filter", tmp_path / "in.npy", tmp_path / target, "-k", "box:3")
        assert code == MISTAKE and message in line_of(err)


def test_what_fails_for_every_file_ends_the_run(run: Any, folder: Path, tmp_path: Path, monkeypatch: Any) -> None:
    def gone(*arguments: Any) -> Any:
        raise leanconv.CudaUnavailableError("no NVIDIA driver was found (a test)")

    monkeypatch.setattr(work, "filtered", gone)
    code, _, err = run("filter", folder, tmp_path / "out", "-k", "box:3", "--device", "cuda")
    assert code == FAILED and err.count("no NVIDIA driver was found") == 1
    assert "stopped: 0 of 5 files are written" in err


def commands() -> list[str]:
    """Those of the pages that are about pictures."""
    pages = ("README.md", "docs/command-line.md", "docs/filter-files.md")
    text = "\n".join((ROOT / name).read_text(encoding="utf-8") for name in pages)
    found = [line.partition("#")[0].strip() for line in text.splitlines() if line.startswith("leanconv filter ")]
    return list(dict.fromkeys(found))


@pytest.mark.parametrize("command", commands())
def test_commands_of_the_pages(
    run: Any, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, host_device: Any, command: str
) -> None:
    monkeypatch.chdir(tmp_path)
    folder.rename("photos")
    picture = Image.fromarray(np.arange(90, dtype=np.uint8).reshape(5, 6, 3))
    for name in ("photo.jpg", "scan.tif", "a.png", "b.jpg", "map.png"):
        picture.save(name)
    np.save("c.npy", np.ones((4, 5), np.float32))
    np.save("weights.npy", np.ones((3, 3)) / 9)
    _, *words = command.split()
    code, out, err = run(*words)
    assert (code, err) == (0, "") and words[words.index("--kernel") - 1].rstrip("/") in out


# Ctrl-C


def test_ctrl_c_says_what_was_written(run: Any, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    honest = np.save

    def interrupted(file: Any, array: np.ndarray) -> None:
        file.write(b"half a file")
        raise KeyboardInterrupt

    monkeypatch.setattr(np, "save", interrupted)
    code, out, err = run("filter", folder, tmp_path / "out", "-k", "box:3")
    assert code == INTERRUPTED and out == "" and "Traceback" not in err
    assert err == f"interrupted: 3 of 5 files are written to {tmp_path}/out\n"
    assert names(tmp_path / "out") == ["a.png", "b.JPG", "c.tif"]
    code, out, err = run("filter", folder / "d.npy", tmp_path / "one.npy", "-k", "box:3")
    assert (code, out, err) == (INTERRUPTED, "", f"interrupted: {tmp_path}/one.npy is not written\n")
    assert names(tmp_path) == ["in", "out"]
    monkeypatch.setattr(np, "save", honest)
    assert run("filter", folder / "d.npy", tmp_path / "one.npy", "-k", "box:3")[0] == 0


@pytest.mark.parametrize("error", [TypeError("expected str, bytes or os.PathLike object"), None])
def test_ctrl_c_that_a_library_loses(
    run: Any, folder: Path, tmp_path: Path, monkeypatch: Any, error: Any, request: pytest.FixtureRequest
) -> None:
    """np.fromfile does: a TypeError, or nothing, is all that is left of it."""
    honest = pictures.read

    def losing(path: Path, *arguments: Any) -> Picture:
        if path.name == "c.tif":
            with pytest.raises(KeyboardInterrupt):
                signal.raise_signal(signal.SIGINT)
            if error:
                raise error
        return honest(path, *arguments)

    monkeypatch.setattr(pictures, "read", losing)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # background jobs of a shell ignore it
    request.addfinalizer(lambda: signal.signal(signal.SIGINT, before))
    code, _, err = run("filter", folder, tmp_path / "out", "-k", "box:3")
    assert (code, err) == (INTERRUPTED, f"interrupted: 2 of 5 files are written to {tmp_path}/out\n")
    code, _, err = run("filter", folder / "c.tif", tmp_path / "one.npy", "-k", "box:3")
    assert (code, err) == (INTERRUPTED, f"interrupted: {tmp_path}/one.npy is not written\n")
    assert names(tmp_path / "out") == ["a.png", "b.JPG"] and not (tmp_path / "one.npy").exists()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.skipif(os.name == "nt", reason="signals are sent as on POSIX")
def test_a_signal_ends_a_long_run(tmp_path: Path) -> None:
    """A process of its own, interrupted once the first file is written."""
    (tmp_path / "in").mkdir()
    for name in range(400):
        np.save(tmp_path / "in" / f"{name:03}.npy", np.zeros((300, 300), np.float32))
    command = [sys.executable, "-m", "leanconv.cli.main", "filter", "in", "out", "-k", "gaussian:31"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    heard = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)  # a shell has its jobs in the background ignore it
    with subprocess.Popen(
        command, cwd=tmp_path, env=environment, stderr=subprocess.PIPE, text=True, preexec_fn=heard
    ) as process:
        until = time.monotonic() + 60
        while not (tmp_path / "out" / "000.npy").exists() and time.monotonic() < until:
            time.sleep(0.01)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
    written = names(tmp_path / "out")
    assert process.returncode == INTERRUPTED and "Traceback" not in err, err
    assert 0 < len(written) < 400 and all(np.load(tmp_path / "out" / name).shape == (300, 300) for name in written)
    count = int(err.removeprefix("interrupted: ").split()[0])
    assert len(written) - 1 <= count <= len(written)


# Long images


@pytest.mark.parametrize("border", BORDERS)
@pytest.mark.parametrize("shape", [(3, 61, 5), (61, 6, 4), (2, 3, 61, 3), (61, 3), (1, 9), (0, 7), (40, 2, 2)])
def test_strips_give_what_the_whole_gives(
    border: str, shape: tuple[int, ...], rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel = rng.integers(-3, 4, (4, 3)).astype(float)
    pixels = rng.integers(0, 256, shape).astype(np.uint8)
    channels_last = len(shape) == 3 and shape[-1] == 4
    wanted = work.Settings(kernel, border, 7, 3)
    if pixels.size:
        whole = work.filtered(Picture(pixels, channels_last), wanted).pixels
        assert np.array_equal(
            whole, leanconv.filter2d(pixels, kernel, border=border, value=7, delta=3, channels_last=channels_last)  # type: ignore[arg-type]
        )  # fmt: skip
    monkeypatch.setattr(work, "STEP_PRODUCTS", 1)
    monkeypatch.setattr(work, "STEP_PIXELS", 1)
    steps = len(
        [
            *work._parts(
                (1, *shape) if channels_last else (-(-pixels.size // (shape[-2] * shape[-1] or 1)), *shape[-2:]), wanted
            )
        ]
    )
    assert shape[-2] < 61 or border == "wrap" or steps >= 3
    strips = work.filtered(Picture(pixels, channels_last), wanted).pixels
    assert strips.shape == shape and (not pixels.size or np.array_equal(strips, whole))


def test_one_bar_that_moves(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[int, bool, list[str]]] = []

    class Bar:
        def __init__(self, total: int, wanted: bool = True) -> None:
            seen.append((total, wanted, []))

        def __enter__(self) -> Any:
            return seen[-1][2].append

        def __exit__(self, *reason: object) -> None:
            pass

    monkeypatch.setattr(work, "progress", Bar)
    settings = work.Settings(filters.box(3))
    work.run([folder], tmp_path / "out", settings)
    assert [each for each in seen if each[1]] == [(5, True, ["a.png", "b.JPG", "c.tif", "d.npy", "e.webp"])]
    seen.clear()
    monkeypatch.setattr(work, "STEP_PRODUCTS", 1)
    monkeypatch.setattr(work, "STEP_PIXELS", 1)
    np.save(tmp_path / "long.npy", np.zeros((50, 8), np.float32))
    work.run([tmp_path / "long.npy"], tmp_path / "out", settings)
    assert seen == [(4, True, ["row 0", "row 12", "row 25", "row 37"])]


def test_few_calls_for_many_small_images_and_one_on_a_gpu(
    rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch, host_device: Any
) -> None:
    calls = []
    honest = work.filter2d
    monkeypatch.setattr(work, "filter2d", lambda *a, **o: calls.append(a[0].shape) or honest(*a, **o))
    pixels = rng.random((300, 9, 8)).astype(np.float32)
    here = work.filtered(Picture(pixels), work.Settings(filters.box(3))).pixels
    assert calls == [(300, 9, 8)]
    monkeypatch.setattr(work, "STEP_PRODUCTS", 1)
    monkeypatch.setattr(work, "STEP_PIXELS", 1)
    there = work.filtered(Picture(pixels), work.Settings(filters.box(3), device="cuda")).pixels
    assert calls[1:] == [(300, 9, 8)] and np.allclose(here, there, atol=1e-6)


# Integers


def test_integers_are_filtered_as_filter2d_filters_them(
    run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By its own types: no copy in float32, halves to the even integer, sums of int32 in float64, saturation."""
    types = []
    honest = work.filter2d
    monkeypatch.setattr(
        work, "filter2d", lambda image, *a, **o: types.append(image.dtype.name) or honest(image, *a, **o)
    )
    np.save(tmp_path / "half.npy", np.array([[0.5]]))
    arguments = (tmp_path / "out.npy", "-k", tmp_path / "half.npy")
    for dtype, wanted in (("uint8", [0, 2, 2, 4]), ("int16", [0, 2, 2, 4]), ("int32", [0, 2, 2, 4])):
        np.save(tmp_path / "in.npy", np.array([[1, 3, 5, 7]], dtype))
        assert run("filter", tmp_path / "in.npy", *arguments)[0] == 0
        assert np.load(tmp_path / "out.npy").tolist() == [wanted]
    assert types == ["uint8", "int16", "int32"]
    np.save(tmp_path / "in.npy", np.array([[2**31 - 1, -(2**31), 16777217]], np.int32))
    np.save(tmp_path / "half.npy", np.array([[2]]))
    assert run("filter", tmp_path / "in.npy", *arguments)[0] == 0
    assert np.load(tmp_path / "out.npy").tolist() == [[2**31 - 1, -(2**31), 33554434]]
    assert run("filter", tmp_path / "in.npy", *arguments, "--absolute")[0] == 0
    assert np.load(tmp_path / "out.npy").tolist() == [[2**31 - 1, 2**31 - 1, 33554434]]
    np.save(tmp_path / "in.npy", np.array([[1, -3, 5, 127]], np.int8))
    np.save(tmp_path / "half.npy", np.array([[0.5]]))
    assert run("filter", tmp_path / "in.npy", *arguments, "--absolute", "--delta", 65)[0] == 0
    assert np.load(tmp_path / "out.npy").tolist() == [[66, 66, 68, 127]]


def test_a_nan_is_no_pixel_of_integers(run: Any, folder: Path, tmp_path: Path) -> None:
    for option in ("--value", "--delta"):
        code, _, err = run("filter", folder / "a.png", tmp_path / "o.png", "-k", "box:3", option, "nan")
        assert code == MISTAKE and f"{option[2:]}=nan is no" in line_of(err) and "uint8" in err
    assert run("filter", folder / "d.npy", tmp_path / "o.npy", "-k", "box:3", "--value", "nan")[0] == 0


@pytest.mark.parametrize("dtype", ["uint8", "int16", "int32"])
def test_a_sum_that_is_nan_is_zero(dtype: str) -> None:
    kernel = np.array([[np.inf]])
    for absolute in (False, True):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            done = work.filtered(Picture(np.zeros((3, 4), dtype)), work.Settings(kernel, absolute=absolute))
        assert done.pixels.dtype == dtype and not done.pixels.any()


def test_absolute_values_beyond_float16_are_infinite_without_a_warning() -> None:
    pixels = np.full((3, 4), 200, np.float16)
    for absolute in (False, True):
        wanted = work.Settings(filters.box(3), delta=70000, absolute=absolute)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert np.isposinf(work.filtered(Picture(pixels), wanted).pixels).all()


def test_the_writer_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*arguments: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(files.os, "replace", interrupted)
    for suffix in (".png", ".npy", ".tif"):
        with pytest.raises(KeyboardInterrupt):
            pictures.write(tmp_path / f"out{suffix}", Picture(np.zeros((4, 4), np.uint8)))
    assert names(tmp_path) == []


def test_ctrl_c_while_the_command_line_is_imported(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Importing:
        def __getattr__(self, name: str) -> Any:
            raise KeyboardInterrupt

    monkeypatch.setitem(sys.modules, "leanconv.cli.main", Importing())  # type: ignore[arg-type]
    with pytest.raises(SystemExit) as stopped:
        entry.main()
    assert (stopped.value.code, capsys.readouterr().err) == (130, "interrupted\n")
