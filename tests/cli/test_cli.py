"""The command line: what it prints, writes and exits with; and the small kernels and picture files behind it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import leanconv
from leanconv.bench import columns
from leanconv.cli import doctor
from leanconv.cli import pictures as images
from leanconv.cli.command_line import FAILED, MISTAKE
from leanconv.images import filters
from leanconv.runtime import cache as store
from leanconv.runtime import launch
from leanconv.runtime.driver import CudaUnavailableError
from tests.messages import line_of

Image = pytest.importorskip("PIL.Image", reason="pictures need Pillow")
ndimage = pytest.importorskip("scipy.ndimage")
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> Any:
        raise CudaUnavailableError("no NVIDIA driver was found (a test)")

    monkeypatch.setattr(doctor, "driver", missing)
    monkeypatch.setattr(launch, "driver", missing)
    monkeypatch.setattr(launch, "_devices", {})


# The small kernels


@pytest.mark.parametrize("size, sigma", [(1, None), (2, None), (7, 0.4), (8, 3.0), (31, 1e-3), (32, 1e-3), (9, 1e6)])
def test_gaussian_is_a_mean(size: int, sigma: float | None) -> None:
    kernel = filters.gaussian(size, sigma)
    assert kernel.shape == (size, size) and kernel.dtype == np.float32
    assert abs(kernel.sum(dtype=np.float64) - 1) < 1e-6 and (kernel >= 0).all()
    assert np.array_equal(kernel, kernel[::-1, ::-1]) and kernel.max() == kernel[size // 2, size // 2]


def test_fixed_kernels_on_pictures_whose_answer_is_known() -> None:
    """On a slope, a parabola and a constant the derivatives are exact."""
    y, x = np.mgrid[0:12, 0:14].astype(np.float32)
    inner = (slice(1, -1), slice(1, -1))
    assert (leanconv.filter2d(x, filters.sobel_x())[inner] == 8).all()  # slope 1, weights 1 + 2 + 1 over two pixels
    assert (leanconv.filter2d(y, filters.sobel_x())[inner] == 0).all()
    assert (leanconv.filter2d(y, filters.sobel_y())[inner] == 8).all()
    assert (leanconv.filter2d(x * x + 2 * y * y, filters.laplacian())[inner] == 2 + 4).all()
    assert np.allclose(leanconv.filter2d(np.full((9, 9), 7, np.float32), filters.box(5)), 7)
    bent = x * x
    assert (leanconv.filter2d(bent, filters.sharpen())[inner] == (bent - 2)[inner]).all()
    # Brighter to the lower right, by 1 a pixel either way: 2 * 4 along the diagonal, 1 * 2 * 2 along the axes.
    assert (leanconv.filter2d(x + y, filters.emboss())[inner] == (x + y + 8 + 4)[inner]).all()


@pytest.mark.parametrize(
    "text", ["", "gauss:5", "gaussian", "gaussian:x", "gaussian:5:1:2", "box:5:1", "sobel-x:3", "box:0", "gaussian:5:0"]
)
def test_kernels_that_are_not_understood(text: str) -> None:
    with pytest.raises(ValueError, match="kernel=|size=|sigma="):
        filters.from_words(text)


def test_every_word_is_a_kernel() -> None:
    for word in filters.WORDS:
        text = word.replace("[:SIGMA]", ":1.5").replace("SIZE", "5")
        assert filters.from_words(text).ndim == 2


# leanconv filter


def photo(mode: str, size: tuple[int, int] = (23, 17)) -> Any:
    random = np.random.default_rng(3)
    if mode == "I;16":
        return Image.fromarray(random.integers(0, 65536, size[::-1], np.uint16))
    bands = {"L": 1, "LA": 2, "RGB": 3, "RGBA": 4}[mode]
    return Image.fromarray(random.integers(0, 256, (*size[::-1], bands), np.uint8).squeeze(), mode)


def expected(plane: np.ndarray, kernel: np.ndarray, mode: str = "mirror") -> np.ndarray:
    """SciPy's float64 answer, rounded and clipped to the plane's type."""
    limits = np.iinfo(plane.dtype)
    return np.clip(np.rint(ndimage.correlate(plane.astype(float), kernel.astype(float), mode=mode)), 0, limits.max)


@pytest.mark.parametrize("mode", ["L", "LA", "RGB", "RGBA", "I;16"])
def test_filter_pictures(run: Any, tmp_path: Path, mode: str) -> None:
    source, target = tmp_path / "in.png", tmp_path / "out.png"
    photo(mode).save(source)
    code, out, err = run("filter", source, target, "--kernel", "sharpen", "--border", "nearest")
    assert (code, err) == (0, "") and str(target) in out
    before, after = np.array(Image.open(source)), np.array(Image.open(target))
    assert after.dtype == before.dtype and after.shape == before.shape
    assert Image.open(target).mode == Image.open(source).mode
    channels = before.reshape(*before.shape[:2], -1)
    results = after.reshape(channels.shape)
    for channel in range(channels.shape[2]):
        if mode.endswith("A") and channel == channels.shape[2] - 1:
            assert np.array_equal(results[..., channel], channels[..., channel])
        else:
            wanted = expected(channels[..., channel], filters.sharpen(), "nearest")
            assert np.array_equal(results[..., channel], wanted)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.png", "out.png"]


def test_filter_turns_pictures_as_their_exif_says(run: Any, tmp_path: Path) -> None:
    picture = photo("L")
    exif = Image.Exif()
    exif[0x0112] = 6  # to be shown turned right
    picture.save(tmp_path / "in.png", exif=exif)
    assert run("filter", tmp_path / "in.png", tmp_path / "out.png", "-k", "box:1")[0] == 0
    assert np.array_equal(np.array(Image.open(tmp_path / "out.png")), np.rot90(np.array(picture), -1))


@pytest.mark.parametrize("dtype", ["uint8", "int8", "uint16", "int16", "int32", "float32", "float64", ">f4", ">i2"])
def test_filter_arrays(run: Any, tmp_path: Path, rng: np.random.Generator, dtype: str) -> None:
    planes = (rng.standard_normal((2, 3, 15, 13)) * 60).astype(dtype)
    np.save(tmp_path / "in.npy", planes)
    np.save(tmp_path / "kernel.npy", np.array([[1, -2, 3]]))
    code, _, err = run("filter", tmp_path / "in.npy", tmp_path / "out.npy", "-k", tmp_path / "kernel.npy", "--delta", 5)
    assert code == 0, err
    got = np.load(tmp_path / "out.npy")
    assert got.dtype.newbyteorder("=") == planes.dtype.newbyteorder("=") and got.shape == planes.shape
    wanted = ndimage.correlate(planes.astype(float), np.array([[[[1, -2, 3]]]], float), mode="mirror") + 5
    if np.dtype(dtype).kind in "iu":
        wanted = np.clip(wanted, np.iinfo(dtype).min, np.iinfo(dtype).max)
    assert np.allclose(got, wanted, rtol=1e-6, atol=1e-4)


def test_filter_absolute(run: Any, tmp_path: Path) -> None:
    image = np.array([[10, 10, 0, 0]], np.uint8)
    np.save(tmp_path / "in.npy", image)
    np.save(tmp_path / "kernel.npy", np.array([[-1, 0, 1.0]]))
    arguments = ("filter", tmp_path / "in.npy", tmp_path / "out.npy", "-k", tmp_path / "kernel.npy")
    for extra, wanted in (
        ((), [0, 0, 0, 0]),
        (("--absolute",), [0, 10, 10, 0]),
        (("--delta", 128), [128, 118, 118, 128]),
    ):
        assert run(*arguments, *extra)[0] == 0
        assert np.load(tmp_path / "out.npy").tolist() == [wanted]
    assert run(*arguments, "--absolute", "--delta", 250)[0] == 0
    assert np.load(tmp_path / "out.npy").tolist() == [[250, 255, 255, 250]]


@pytest.mark.parametrize("mode", ["L", "RGB", "RGBA"])
def test_filter_on_a_device(run: Any, tmp_path: Path, host_device: Any, mode: str) -> None:
    photo(mode).save(tmp_path / "in.png")
    for device, name in (("cuda", "there.png"), (None, "here.png"), ("cpu", "here_too.png")):
        extra = ("--device", device) if device else ()
        assert run("filter", tmp_path / "in.png", tmp_path / name, "-k", "gaussian:5", *extra)[0] == 0
    assert len(host_device.launches) == 1
    there, here = (np.array(Image.open(tmp_path / name)).astype(int) for name in ("there.png", "here.png"))
    assert np.abs(there - here).max() <= 1  # both are rounded
    assert (tmp_path / "here_too.png").read_bytes() == (tmp_path / "here.png").read_bytes()


def test_filter_mistakes(run: Any, tmp_path: Path, no_gpu: None) -> None:
    photo("RGB").save(tmp_path / "in.png")
    np.save(tmp_path / "line.npy", np.zeros(4, np.float32))
    np.save(tmp_path / "complex.npy", np.zeros((4, 4), complex))
    np.save(tmp_path / "int.npy", np.zeros((4, 4), np.int32))
    np.save(tmp_path / "float.npy", np.zeros((4, 4), np.float32))
    np.save(tmp_path / "empty.npy", np.zeros((4, 0), np.uint8))
    photo("RGBA").save(tmp_path / "clear.png")
    np.savez(tmp_path / "archive.npz", np.zeros(3))
    (tmp_path / "archive.npz").rename(tmp_path / "archive.npy")
    (tmp_path / "text.npy").write_text("no numbers")
    for suffix in ("png", "npy"):
        os.mkfifo(tmp_path / f"fifo.{suffix}")
    (tmp_path / "text.png").write_text("no picture")
    frames = [photo("L"), photo("L").transpose(Image.Transpose.ROTATE_180)]
    frames[0].save(tmp_path / "film.gif", save_all=True, append_images=frames[1:])
    cases: list[tuple[str, str, str, tuple[str, ...], str]] = [
        ("absent.png", "out.png", "box:3", (), "absent.png: No such file"),
        ("in.png", "out.png", "gauss:3", (), "kernel='gauss:3' is not known"),
        ("in.png", "out.png", "absent.npy", (), "absent.npy: No such file"),
        ("in.png", "out.png", "box:3", ("--border", "round"), "border='round' is not known"),
        ("in.png", "out.png", "box:3", ("--device", "gpu"), "device='gpu' is not known"),
        ("in.png", "out.xyz", "box:3", (), "'.xyz' names no format"),
        ("in.png", "folder", "box:3", (), "try .png or .npy, or a folder that exists"),
        ("absent", "folder", "box:3", (), "absent: No such file"),
        ("in.png", "no/folder/out.png", "box:3", (), "No such file or directory"),
        ("text.png", "out.png", "box:3", (), "Pillow cannot identify image data in it"),
        ("film.gif", "out.png", "box:3", (), "holds 2 pictures"),
        ("fifo.png", "out.png", "box:3", (), "fifo.png is no regular file"),
        ("fifo.npy", "out.png", "box:3", (), "fifo.npy is not a .npy file of numbers"),
        ("text.npy", "out.npy", "box:3", (), "is not a .npy file"),
        ("archive.npy", "out.npy", "box:3", (), "archive"),
        ("line.npy", "out.npy", "box:3", (), r"shape (4,); it must be (..., height, width)"),
        ("empty.npy", "out.png", "box:3", (), "shape (4, 0) has no pixel to show"),
        ("complex.npy", "out.npy", "box:3", (), "image has dtype complex128; supported are float32"),
        ("int.npy", "out.jpg", "laplacian", (), "make it uint8 first, or write a .tif or .npy file"),
        ("float.npy", "out.png", "laplacian", (), "make it uint8 first, or write a .tif or .npy file"),
        ("clear.png", "out.jpg", "box:3", (), "write a .png file, which holds it, or a picture without"),
        ("in.png", "out.png", "box:3", ("--delta", "nan"), "delta=nan is no number, and the result has dtype uint8"),
        ("in.png", "out.png", "box:3", ("--absolute", "--delta", "nan"), "delta=nan is no number"),
        ("in.png", "out.png", "box:3", ("--absolute", "--delta", "1e39"), "delta=1e+39 is beyond float32"),
        ("in.png", "out.png", "box:3", ("--value", "nan"), "value=nan is no uint8, the dtype of the image"),
        ("int.npy", "out.npy", "laplacian", ("--value", "inf"), "value=inf is no int32, the dtype of the image"),
        ("in.png", "out.png", "box:3", ("--border", "99"), "border=99 is not known"),
        ("in.png", "out.png", str(tmp_path / "line.npy"), (), "a kernel is (rows, columns)"),
    ]
    before = sorted(path.name for path in tmp_path.iterdir())
    for source, target, kernel, extra, message in cases:
        code, out, err = run("filter", tmp_path / source, tmp_path / target, "--kernel", kernel, *extra)
        assert code == MISTAKE and out == "" and message in line_of(err), (source, target, err)
    code, _, err = run("filter", tmp_path / "in.png", tmp_path / "out.png", "-k", "box:3", "--device", "cuda")
    assert code == FAILED and "no NVIDIA driver was found" in line_of(err)
    assert sorted(path.name for path in tmp_path.iterdir()) == before


def test_a_picture_that_cannot_be_written_leaves_the_old_one(tmp_path: Path) -> None:
    target = tmp_path / "out.jpg"
    target.write_bytes(b"precious")
    with pytest.raises(ValueError, match="out.jpg"):
        images.write(target, images.Picture(np.zeros((4, 4), np.float32)))
    assert target.read_bytes() == b"precious" and [path.name for path in tmp_path.iterdir()] == ["out.jpg"]


# The other commands


def test_explain(run: Any, no_gpu: None) -> None:
    code, out, _ = run("explain", "conv:n8,c64,h56,k64,r3,pad1")
    assert code == 0 and "NumPy engine on the CPU" in out
    for name in ("im2col", "winograd1d", "im2win", "direct"):
        assert name in out
    code, out, _ = run("explain", "conv:n8,c64,h56,k64,r3,pad1,CHWN", "--device", "cuda")
    assert code == 0 and "fprop CHWN float32 8x64x56x56" in out and "not  im2win: layout='CHWN'" in out
    code, out, _ = run("explain", "filter:480x640,7x7", "--device", "cuda")
    assert code == 0 and "runs register_cache" in out and "no NVIDIA driver was found" in out
    code, out, _ = run("explain", "conv:c64,h56,k64,r3,stride2", "--algorithm", "winograd1d")
    assert code == 0 and "runs nothing" in out and "stride" in out
    code, _, err = run("explain", "conv:c64")
    assert code == MISTAKE and "h, k, r must be given" in line_of(err)
    code, _, err = run("explain", "conv:c64,h56,k64,r3", "--algorithm", "fft")
    assert code == MISTAKE and "algorithm='fft' is not known" in line_of(err)


def test_a_border_by_opencvs_number(run: Any, tmp_path: Path) -> None:
    photo("L").save(tmp_path / "in.png")
    for border in ("1", "replicate"):
        assert run("filter", tmp_path / "in.png", tmp_path / f"{border}.png", "-k", "box:3", "--border", border)[0] == 0
    assert (tmp_path / "1.png").read_bytes() == (tmp_path / "replicate.png").read_bytes()


def test_inks_become_colours_without_the_profile_of_inks(run: Any, tmp_path: Path) -> None:
    photo("RGB").convert("CMYK").save(tmp_path / "in.tif", icc_profile=b"of inks")
    assert run("filter", tmp_path / "in.tif", tmp_path / "out.png", "-k", "box:1")[0] == 0
    made = Image.open(tmp_path / "out.png")
    assert made.mode == "RGB" and "icc_profile" not in made.info
    assert np.array_equal(np.array(made), np.array(Image.open(tmp_path / "in.tif").convert("RGB")))


def test_an_array_that_cannot_be_written_leaves_the_old_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.npy"
    images.write(path, images.Picture(np.ones((3, 3))))
    before = path.read_bytes()

    def half(file: Any, array: Any) -> None:
        file.write(b"x")
        raise OSError(28, "full")

    monkeypatch.setattr(np, "save", half)
    with pytest.raises(OSError, match="full"):
        images.write(path, images.Picture(np.ones((4, 4))))
    assert path.read_bytes() == before


def test_kernels_are_compiled_without_a_gpu(run: Any, no_gpu: None, nvrtc: None) -> None:
    code, out, err = run("explain", "filter:480x640,7x7", "--compile")
    assert code == 0 and "an H200 (assumed" in out and " registers, 0 bytes spilled" in out, err
    code, _, err = run("explain", "filter:480x640,7x7", "--compile", "--device", "cpu")
    assert code == MISTAKE and "--compile is for a GPU" in line_of(err)
    code, _, err = run("explain", "filter:480x640,7x7", "--device", "cuda:0x")
    assert code == MISTAKE and "device='cuda:0x' is not known" in line_of(err)


def test_a_terminal_of_ascii() -> None:
    environment = {**os.environ, "PYTHONIOENCODING": "ascii", "PYTHONPATH": str(ROOT / "src")}
    for arguments in (("filter", "–.png", "o.png", "-k", "box:3"), ("tune", "--show")):
        command = [sys.executable, "-m", "leanconv.cli.main", *arguments]
        done = subprocess.run(command, capture_output=True, text=True, env=environment)
        assert done.returncode in (0, 2) and "Traceback" not in done.stderr and "?" in done.stdout + done.stderr


def test_cache(run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LEANCONV_CACHE_DIR", str(tmp_path))
    folder = tmp_path / "kernels"
    assert run("cache", "path")[:2] == (0, f"{folder}\n")
    folder.mkdir()
    for name in "ab":
        (folder / f"{name * 64}{store.SUFFIX}").write_bytes(b"x" * 600_000)
    assert run("cache")[:2] == (0, f"2 kernels, 1.2 MB in {folder}\n")
    assert run("cache", "size")[:2] == (0, "2 kernels, 1.2 MB\n")
    assert run("cache", "clear")[:2] == (0, f"removed 2 kernels, 1.2 MB from {folder}\n")
    assert list(folder.iterdir()) == []
    monkeypatch.setenv("LEANCONV_NO_CACHE", "1")
    assert "LEANCONV_NO_CACHE is set" in run("cache")[1]
    assert run("cache", "burn")[0] == MISTAKE


def test_bench(run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.chdir(tmp_path)
    words = "conv:c4,h12,k6,r3,pad1"
    code, out, err = run(
        "bench", words, "--quick", "--device", "cpu", "--engines", "leanconv", "--out", "r.json", "--plot", "bars.png"
    )
    assert code == 0, err
    assert "results: r.json" in out and "plot: bars.png" in out
    rows = columns.read(Path("r.json"))["rows"]
    assert {row["algorithm"] for row in rows} >= {"im2col", "direct"}
    assert all(row["error"] < 1e-5 and row["us"] > 0 for row in rows)
    assert Image.open("bars.png").size[0] > 300
    code, _, err = run("bench", "im2lose")
    assert code == MISTAKE and "no suite (im2win" in line_of(err)
    for layout in ("NHWC", "CHWN"):
        code, _, err = run("bench", words, "--layout", layout)
        assert code == MISTAKE and f"layout='{layout}' is for suites" in line_of(err)


def test_bench_refuses_before_it_measures(run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.chdir(tmp_path)
    words = "conv:c4,h12,k6,r3,pad1"
    with monkeypatch.context() as patch:
        patch.setattr("leanconv.bench.run._measure", lambda *arguments: pytest.fail("it measured"))
        for extra, message in (
            (("--plot", "o.xyz"), "o.xyz: the suffix '.xyz' names no format that can be drawn; choose one of "),
            (("--out", "."), ".: Is a directory"),
            (("--out", f"{__file__}/o.json"), "test_cli.py/o.json: Not a directory"),
            (("--engines", "nothing"), "engines='nothing' matches none of leanconv, "),
            (("--engines", "leanconv,typo*"), "engines='typo*' matches none of leanconv, "),
        ):
            code, out, err = run("bench", words, "--quick", "--device", "cpu", *extra)
            assert code == MISTAKE and message in line_of(err) and not [*tmp_path.iterdir()], out
        code, _, err = run("bench", "conv:n0,c4,h8,k4,r3", "--device", "cpu")
        assert code == MISTAKE and "batch=0 of 'n0,c4,h8,k4,r3' has nothing to time; it must be" in line_of(err)
    code, out, _ = run("bench", words, "--device", "cpu", "--engines", "npp", "--plot", "o.png")
    assert code == FAILED and "nothing was measured" in out and not Path("o.png").exists()


def test_bench_keeps_the_parts_of_earlier_runs(run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    options = ("--quick", "--device", "cpu", "--engines", "leanconv", "--algorithms", "direct")
    problems = ("conv:c4,h12,k6,r3", "conv:c4,h12,k7,r3", "filter:9x9,3x3")
    for words in problems[:2]:
        assert run("bench", words, *options)[0] == 0
    assert run("bench", problems[2], "--quick", "--device", "cpu", "--engines", "leanconv")[0] == 0
    kept = [*Path("benchmarks/results/cpu").iterdir()]
    seen = {about["words"] for path in kept for about in columns.read(path)["problems"]}
    assert len(kept) == 3 and {path.stem for path in kept} == {"problem-part", "problem-part-2", "problem-part-3"}
    assert len(seen) == 3


def test_only_a_whole_suite_is_replaced(tmp_path: Path) -> None:
    from leanconv.bench import Results, default_path

    whole = Results({"gpu": None}, "im2win", "NCHW")
    for partial, names in ((False, ["im2win", "im2win"]), (True, ["im2win-part", "im2win-part-2", "im2win-part-3"])):
        for name in names:
            path = default_path(whole, partial, tmp_path)
            assert path.stem == name
            whole.write(path)


def test_doctor_without_a_gpu(run: Any, no_gpu: None) -> None:
    code, out, _ = run("doctor")
    assert code == 0 and "BROKEN" not in out
    assert leanconv.__version__ in out and np.__version__ in out
    assert "no NVIDIA driver was found" in out


def test_doctor_for_programs(run: Any, no_gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    code, out, _ = run("doctor", "--json")
    told = json.loads(out)
    assert code == 0 and told["ok"] is True
    assert (
        told["installed"]["leanconv"].startswith(leanconv.__version__) and told["installed"]["NumPy"] == np.__version__
    )
    found = {finding["name"]: finding for finding in told["findings"]}
    assert found["NumPy arrays on the CPU"]["state"] == "ok" and found["GPU"]["state"] == "absent"
    assert "no NVIDIA driver was found" in found["GPU"]["text"] and set(found) == set(states())
    broken = doctor.Finding("a part", "broken", "it fails", "mend it")
    monkeypatch.setattr(doctor, "examine", lambda: iter([broken]))
    monkeypatch.setattr(doctor, "installed_version", lambda name: None)
    code, out, _ = run("doctor", "--json")
    told = json.loads(out)
    assert code == FAILED and told["ok"] is False and told["installed"]["PyTorch"] is None
    assert told["findings"] == [{"name": "a part", "state": "broken", "text": "it fails", "advice": "mend it"}]


def test_shells_complete_commands_and_suites() -> None:
    """Bash asks the program itself, as the script of --show-completion makes it."""
    command = [sys.executable, "-m", "leanconv.cli.main"]
    for line, wanted in (
        ("leanconv pre", {"precompile"}),
        ("leanconv bench im2", {"im2win"}),
        ("leanconv ca", {"cache"}),
    ):
        words = {"_LEANCONV_COMPLETE": "complete_bash", "COMP_WORDS": line, "COMP_CWORD": str(line.count(" "))}
        done = subprocess.run(command, env=os.environ | words, capture_output=True, text=True, check=False)
        assert set(done.stdout.split()) == wanted, (line, done)


def states() -> dict[str, doctor.Finding]:
    return {finding.name: finding for finding in doctor.examine()}


def test_doctor_with_a_gpu(host_device: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "driver", lambda: type("Driver", (), {"device_count": 1, "version": 13000}))
    found = states()
    assert found["GPU"].state == "ok" and "stand-in (sm_90a); the driver supports CUDA 13.0" in found["GPU"].text
    if found["compiling kernels"].state == "ok":
        assert found["NumPy arrays on the GPU"].state == "ok"
        assert len(host_device.launches) == 2


def test_doctor_runs_what_cupy_has(fake_cupy: Any, host_device: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fake_cupy.ndarray, "get", lambda self: self.host, raising=False)
    found = doctor._cupy(True)
    assert (found.state, found.text) == ("ok", "a layer and a filter give the right values")
    assert len(host_device.launches) == 2 and doctor._cupy(False).state == "absent"


def test_doctor_sees_wrong_values(run: Any, no_gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    honest = doctor.api.conv2d
    monkeypatch.setattr(doctor.api, "conv2d", lambda *a, **o: honest(*a, **o) * np.float32(1.0001))
    code, out, _ = run("doctor")
    assert code == FAILED and "BROKEN" in out and "conv2d has a relative error of 1.0e-04" in " ".join(out.split())


def test_doctor_advises(no_gpu: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("LEANCONV_CACHE_DIR", str(tmp_path / "file"))
    monkeypatch.setattr(doctor, "installed_version", lambda name: None)
    found = states()
    assert found["cache of kernels"].state == "broken" and "LEANCONV_CACHE_DIR" in found["cache of kernels"].advice
    assert "leanconv[torch]" in found["PyTorch tensors on the CPU"].advice
    assert "leanconv[bench]" in found["pictures and plots"].advice
    assert found["GPU"].state == "absent"
    deep = ("tifffile", "imagecodecs")
    monkeypatch.setattr(doctor, "installed_version", lambda name: None if name in deep else "1")
    seen = states()["pictures and plots"]
    assert (seen.state, seen.advice) == (
        "ok",
        "pip install 'leanconv[pictures]'",
    ) and "tifffile and imagecodecs" in seen.text


def test_doctor_on_a_limit_that_is_none(no_gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls refuse it, which is nothing to report."""
    monkeypatch.setenv("LEANCONV_WORKSPACE_LIMIT", "foo")
    broken = [finding for finding in doctor.examine() if finding.state == "broken"]
    assert [finding.name for finding in broken][:2] == ["environment variables", "NumPy arrays on the CPU"]
    for finding in broken:
        assert "LEANCONV_WORKSPACE_LIMIT='foo' is no number of bytes" in finding.text
        assert finding.advice == "set them to what they may say, or unset"


def test_doctor_on_the_compiler(monkeypatch: pytest.MonkeyPatch, no_gpu: None) -> None:
    def refuse(*arguments: Any) -> Any:
        raise doctor.compiler.CompileError("NVRTC_ERROR_INVALID_OPTION: --gpu-architecture\nmore", "-o", "code")

    def absent(*arguments: Any) -> Any:
        raise ImportError("No module named 'cuda'")

    monkeypatch.setattr(store, "compiler_version", lambda: "nvrtc-1")
    for failure, state in ((refuse, "broken"), (absent, "absent")):
        monkeypatch.setattr(doctor.compiler, "compile_launch", failure)
        assert states()["compiling kernels"].state == state
    # with a GPU the compiler is needed, and the extra is the one that the driver serves
    for version, extra in ((13000, "cu13"), (12040, "cu12")):
        monkeypatch.setattr(doctor, "driver", lambda version=version: type("Driver", (), {"version": version}))
        finding = doctor._compiler(doctor.Target("sm_90a", 132), True)
        assert finding.advice == f"pip install 'leanconv[{extra}]'"


def test_version_and_help(run: Any) -> None:
    assert run("--version")[:2] == (0, f"leanconv {leanconv.__version__}\n")
    code, out, _ = run("--help")
    assert code == 0
    for command in ("doctor", "bench", "filter", "explain", "tune", "cache", "demo"):
        assert command in out
        assert run(command, "--help")[0] == 0
    assert run("sing")[0] == MISTAKE
