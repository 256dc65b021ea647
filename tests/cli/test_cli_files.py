"""Strange files for ``leanconv filter``: too many bits, channels last, damaged, larger than they are, too large."""

from __future__ import annotations

import errno
import io
import json
import os
import stat
import struct
import sys
import tracemalloc
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from leanconv.cli import deep_pictures
from leanconv.cli import filter as work
from leanconv.cli import pictures as images
from leanconv.cli.command_line import FAILED, MISTAKE
from leanconv.images import filters
from leanconv.runtime.compile import CompileError
from tests.messages import line_of

Image = pytest.importorskip("PIL.Image", reason="pictures need Pillow")
ndimage = pytest.importorskip("scipy.ndimage")

SHAPE = (5, 7)


def png(channels: int, bits: int = 16, size: tuple[int, int] = SHAPE) -> bytes:
    """A black PNG: 1 channel is grey, 2 grey with transparency, 3 RGB, 4 RGBA."""

    def chunk(kind: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    height, width = size
    kind = {1: 0, 2: 4, 3: 2, 4: 6}[channels]
    header = struct.pack(">IIBBBBB", width, height, bits, kind, 0, 0, 0)
    rows = (b"\0" + bytes(width * channels * bits // 8)) * height
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")


def tiff(bits: int = 16) -> bytes:
    """A black RGB TIFF."""
    height, width = SHAPE
    pixels = bytes(height * width * 3 * bits // 8)
    tags = [(256, 3, 1, width), (257, 3, 1, height), (258, 3, 3, 8 + len(pixels)), (259, 3, 1, 1), (262, 3, 1, 2)]
    tags += [(273, 4, 1, 8), (277, 3, 1, 3), (278, 3, 1, height), (279, 4, 1, len(pixels))]
    directory = struct.pack("<H", len(tags)) + b"".join(struct.pack("<HHII", *tag) for tag in tags) + bytes(4)
    return struct.pack("<2sHI", b"II", 42, 8 + len(pixels) + 6) + pixels + struct.pack("<3H", *[bits] * 3) + directory


def sgi(bits: int = 16) -> bytes:
    header = struct.pack(">HBBHHHH", 474, 0, bits // 8, 3, SHAPE[1], SHAPE[0], 3)
    return header.ljust(512, b"\0") + bytes(SHAPE[0] * SHAPE[1] * 3 * bits // 8)


def ppm(most: int) -> bytes:
    return b"P6 # a comment\n7 5\n%d\n" % most + bytes(5 * 7 * 3 * (2 if most > 255 else 1))


DEEP = {
    "rgb.png": png(3), "la.png": png(2), "rgba.png": png(4), "rgb.tif": tiff(), "rgb.ppm": ppm(65535),
    "ten.ppm": ppm(1023), "rgb.sgi": sgi(),
}  # fmt: skip


@pytest.mark.parametrize("name", DEEP)
def test_pictures_that_pillow_would_cut_to_8_bits_are_refused(
    run: Any, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for library in ("imagecodecs", "tifffile"):
        monkeypatch.setitem(sys.modules, library, None)
    (tmp_path / name).write_bytes(DEEP[name])
    code, _, err = run("filter", tmp_path / name, tmp_path / "out.png", "-k", "box:3")
    if name.endswith((".png", ".tif")):
        library = "imagecodecs" if name.endswith(".png") else "tifffile"
        assert code == FAILED and f"need {library}: pip install 'leanconv[pictures]'" in line_of(err).replace(
            "needs", "need"
        )
    else:
        bits = 10 if name == "ten.ppm" else 16
        assert code == MISTAKE and f"{name} has {bits} bits in each channel" in line_of(err) and ".npy" in err
    assert not (tmp_path / "out.png").exists()


def test_jpeg_2000_of_16_bits_is_refused(run: Any, tmp_path: Path) -> None:
    cv2 = pytest.importorskip("cv2", reason="OpenCV writes the file")
    for dtype, name in ((np.uint16, "deep.jp2"), (np.uint8, "plain.jp2")):
        cv2.imwrite(str(tmp_path / name), np.zeros((32, 32, 3), dtype))
    code, _, err = run("filter", tmp_path / "deep.jp2", tmp_path / "out.png", "-k", "box:3")
    assert code == MISTAKE and "16 bits in each channel" in line_of(err)
    assert run("filter", tmp_path / "plain.jp2", tmp_path / "out.png", "-k", "box:3")[0] == 0


def test_pictures_of_8_bits_and_grey_ones_of_16_are_taken(run: Any, tmp_path: Path) -> None:
    plain = {"a.png": png(3, 8), "b.png": png(4, 8), "c.tif": tiff(8), "d.ppm": ppm(255), "e.sgi": sgi(8)}
    for name, content in {**plain, "grey.png": png(1)}.items():
        (tmp_path / name).write_bytes(content)
        assert run("filter", tmp_path / name, tmp_path / "out.npy", "-k", "sharpen")[0] == 0, name
        got = np.load(tmp_path / "out.npy")
        assert got.shape[:2] == SHAPE and got.dtype == (np.uint16 if name == "grey.png" else np.uint8)


@pytest.mark.parametrize("most, dtype", [(255, np.uint8), (65535, np.uint16)])
def test_a_long_comment_before_the_size(run: Any, tmp_path: Path, most: int, dtype: type) -> None:
    pixels = np.arange(35, dtype=dtype).reshape(SHAPE)
    comment = b"# 1 2 3\n#" + b"x" * 5000
    content = b"P5\n%s\n7 5 # size\n%d\n" % (comment, most) + pixels.astype(pixels.dtype.newbyteorder(">")).tobytes()
    (tmp_path / "in.pgm").write_bytes(content)
    code, _, err = run("filter", tmp_path / "in.pgm", tmp_path / "out.npy", "-k", "box:1")
    assert (code, err) == (0, "")
    got = np.load(tmp_path / "out.npy")
    assert got.dtype == dtype and np.array_equal(got, pixels)


@pytest.mark.parametrize("dtype", ["float32", "uint8", "uint16"])
def test_channels_last(run: Any, tmp_path: Path, rng: np.random.Generator, dtype: str) -> None:
    picture = (rng.random((48, 64, 4)) * 200).astype(dtype)
    kernel = filters.from_words("box:3")
    for channels in (3, 4):
        np.save(tmp_path / "in.npy", picture[..., :channels])
        code, out, err = run("filter", tmp_path / "in.npy", tmp_path / "out.npy", "-k", "box:3")
        assert code == 0 and f"48x64x{channels} {dtype}" in out, err
        got = np.load(tmp_path / "out.npy")
        assert got.shape == (48, 64, channels) and got.dtype == picture.dtype
        for channel in range(3):
            wanted = ndimage.correlate(picture[..., channel].astype(float), kernel.astype(float), mode="mirror")
            assert np.allclose(got[..., channel], wanted if dtype == "float32" else np.rint(wanted), atol=1e-3)
        if channels == 4:
            assert np.array_equal(got[..., 3], picture[..., 3]), "transparency stays"
    if dtype == "uint8":
        assert run("filter", tmp_path / "in.npy", tmp_path / "out.png", "-k", "box:3")[0] == 0
        assert np.array_equal(np.array(Image.open(tmp_path / "out.png")), got)


def test_other_arrays_are_images_along_their_last_axes(run: Any, tmp_path: Path) -> None:
    image = np.arange(2 * 3 * 5 * 3, dtype=np.float32)
    for shape in ((2, 3, 5, 3), (6, 15, 1), (30, 3)):
        np.save(tmp_path / "in.npy", image.reshape(shape))
        assert run("filter", tmp_path / "in.npy", tmp_path / "out.npy", "-k", "box:1")[0] == 0
        assert np.array_equal(np.load(tmp_path / "out.npy"), image.reshape(shape))


@pytest.mark.parametrize("mode, channels", [("RGBA", 4), ("LA", 2), ("RGB", 3)])
def test_an_array_of_a_picture_has_its_transparency(
    run: Any, tmp_path: Path, rng: np.random.Generator, mode: str, channels: int
) -> None:
    pixels = rng.integers(0, 256, (9, 11, channels), np.uint8)
    Image.fromarray(pixels, mode).save(tmp_path / "in.png")
    code, out, _ = run("filter", tmp_path / "in.png", tmp_path / "out.npy", "-k", "box:1")
    assert code == 0 and f"9x11x{channels} uint8" in out
    assert np.array_equal(np.load(tmp_path / "out.npy"), pixels)


def test_too_many_pixels(run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "in.png").write_bytes(png(3, 8))
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 20)  # Pillow warns above it, and refuses above twice as many
    code, _, err = run("filter", tmp_path / "in.png", tmp_path / "out.png", "-k", "box:3")
    assert (code, err) == (0, "")
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 10)
    code, _, err = run("filter", tmp_path / "in.png", tmp_path / "out.png", "-k", "box:3")
    assert code == MISTAKE and "in.png: Image size (35 pixels) exceeds limit of 20 pixels" in line_of(err)
    assert "--max-pixels 0 allows any" in err
    for most, allowed in ((33, False), (34, False), (35, True), (0, True)):
        code, _, err = run("filter", tmp_path / "in.png", tmp_path / "o.png", "-k", "box:3", "--max-pixels", most)
        assert (code == 0) == allowed == (tmp_path / "o.png").exists()
        assert allowed or f"Image size (35 pixels) exceeds limit of {most} pixels; --max-pixels 0" in line_of(err)
    assert Image.MAX_IMAGE_PIXELS == 10, "the limit is the one that it was"


def test_an_odd_limit_of_pixels_is_exact(run: Any, tmp_path: Path) -> None:
    Image.new("L", (30, 20)).save(tmp_path / "in.png")
    for most, allowed in ((599, False), (600, True)):
        code, _, err = run("filter", tmp_path / "in.png", tmp_path / "o.png", "-k", "box:3", "--max-pixels", most)
        assert (code == 0) == allowed and (allowed or "(600 pixels) exceeds limit of 599 pixels" in line_of(err))


def test_a_huge_picture_is_refused_by_its_header(run: Any, tmp_path: Path) -> None:
    """60,000 x 60,000 pixels of 8 and of 16 bits: nothing is allocated, nothing is written."""
    for bits in (8, 16):
        huge = bytearray(png(3, bits))
        huge[16:24] = struct.pack(">II", 60000, 60000)
        huge[29:33] = struct.pack(">I", zlib.crc32(huge[12:29]))
        (tmp_path / "huge.png").write_bytes(huge)
        tracemalloc.start()
        code, _, err = run("filter", tmp_path / "huge.png", tmp_path / "out.png", "-k", "box:3")
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert code == MISTAKE and "huge.png: Image size (3600000000 pixels) exceeds limit of 178956970" in line_of(err)
        assert peak < 64 << 20
        huge[16:24] = struct.pack(">II", 10**6, 10**6)
        huge[29:33] = struct.pack(">I", zlib.crc32(huge[12:29]))
        (tmp_path / "huge.png").write_bytes(huge)
        code, _, err = run("filter", tmp_path / "huge.png", tmp_path / "out.png", "-k", "box:3", "--max-pixels", 0)
        assert code == FAILED and f"huge.png takes {3 * bits // 8 * 10**12} bytes, and this machine has" in line_of(err)
        assert [path.name for path in tmp_path.iterdir()] == ["huge.png"]


def test_damaged_pictures(run: Any, tmp_path: Path, rng: np.random.Generator, recwarn: pytest.WarningsRecorder) -> None:
    """Wherever a file is cut or scratched: a result, or one line that names it, and no warning."""
    good = {"png": png(3, 8), "tif": tiff(8), "ppm": ppm(255), "sgi": sgi(8)}
    for suffix in ("jpg", "gif", "webp"):
        memory = io.BytesIO()
        Image.fromarray(rng.integers(0, 256, (*SHAPE, 3), np.uint8)).save(memory, format=suffix.replace("jpg", "jpeg"))
        good[suffix] = memory.getvalue()
    refused = 0
    for suffix, content in good.items():
        path = tmp_path / f"in.{suffix}"
        for trial in range(12):
            damaged = bytearray(content)
            if trial % 2:
                del damaged[int(rng.integers(len(damaged))) :]
            for _ in range(trial):
                if damaged:
                    damaged[int(rng.integers(len(damaged)))] = int(rng.integers(256))
            path.write_bytes(damaged)
            code, _, err = run("filter", path, tmp_path / "out.npy", "-k", "box:1")
            assert code == 0 or (code == MISTAKE and path.name in line_of(err)), err
            refused += code == MISTAKE
    assert refused > 30 and not recwarn.list


def test_one_grey_of_16_bits_may_be_transparent(tmp_path: Path) -> None:
    content = bytearray(png(1))
    transparent = b"tRNS\0\0"
    content[33:33] = struct.pack(">I", 2) + transparent + struct.pack(">I", zlib.crc32(transparent))
    (tmp_path / "in.png").write_bytes(content)
    read = images.read(tmp_path / "in.png")
    assert read.alpha and read.pixels.dtype == np.uint16 and not read.pixels.any()
    content[41 + 1] = 7  # what is transparent is no longer black
    content[43:47] = struct.pack(">I", zlib.crc32(bytes(content[37:43])))
    (tmp_path / "in.png").write_bytes(content)
    assert (images.read(tmp_path / "in.png").pixels[..., 1] == 65535).all()


def test_what_takes_more_memory_than_there_is(run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "in.png").write_bytes(png(3, 8))
    np.save(tmp_path / "in.npy", np.zeros((5, 7, 3), np.uint8))
    (tmp_path / "in.tif").write_bytes(tiff(16))
    monkeypatch.setattr(deep_pictures.os, "sysconf", lambda name: 2)
    for name, needed in (("in.png", 105), ("in.npy", 105), ("in.tif", 210)):
        code, _, err = run("filter", tmp_path / name, tmp_path / "out.png", "-k", "box:3")
        assert code == FAILED and f"{name} takes {needed} bytes, and this machine has 4" in line_of(err)


def npy(header: str, content: bytes = b"", version: bytes = b"\1\0") -> bytes:
    text = header.encode() + b"\n"
    return b"\x93NUMPY" + version + len(text).to_bytes(2 if version == b"\1\0" else 4, "little") + text + content


def claim(shape: str, dtype: str = "'<f4'") -> str:
    return f"{{'descr': {dtype}, 'fortran_order': False, 'shape': {shape}, }}"


BROKEN = {
    "claims more": (npy(claim("(100000, 100000)"), bytes(64)), "40000000000 bytes, and 64 follow"),
    "claims endlessly": (npy(claim(f"({10**30}, 4)"), bytes(64)), "bytes, and 64 follow"),
    "nothing and endless": (npy(claim(f"(0, {10**30})"), bytes(64)), "is not a .npy file of numbers"),
    "negative": (npy(claim("(-4, -4)"), bytes(64)), "shape (-4, -4)"),
    "cut off": (npy(claim("(4, 4)"), bytes(63)), "64 bytes, and 63 follow"),
    "no literal": (npy("{'descr': open('x')}"), "is not a .npy file of numbers"),
    "deep": (npy("(" * 5000), "is not a .npy file of numbers"),
    "long": (npy(claim("(4, 4)") + " " * 20000, bytes(64)), "is not a .npy file of numbers"),
    "unknown type": (npy(claim("(4, 4)", "'<q9'"), bytes(64)), "is not a .npy file of numbers"),
    "half a header": (npy(claim("(4, 4)"))[:20], "is not a .npy file of numbers"),
    "version": (npy(claim("(4, 4)"), bytes(64), b"\7\0"), "is not a .npy file of numbers"),
    "objects": (npy(claim("(2, 2)", "'|O'"), bytes(64)), "is not a .npy file of numbers"),
    "empty": (b"", "is not a .npy file of numbers"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_damaged_arrays(run: Any, tmp_path: Path, name: str) -> None:
    content, words = BROKEN[name]
    (tmp_path / "in.npy").write_bytes(content)
    (tmp_path / "image.npy").write_bytes(npy(claim("(4, 4)"), bytes(64)))
    for source, kernel in (("in.npy", "box:3"), ("image.npy", str(tmp_path / "in.npy"))):
        code, _, err = run("filter", tmp_path / source, tmp_path / "out.npy", "-k", kernel)
        assert code == MISTAKE and "in.npy" in line_of(err) and words in err, err


@pytest.mark.parametrize("order", ["C", "F"])
def test_whole_arrays_of_every_version(tmp_path: Path, order: Any) -> None:
    array = np.asarray(np.arange(12.0).reshape(3, 4), order=order)
    for version in ((1, 0), (2, 0), (3, 0)):
        with open(tmp_path / "in.npy", "wb") as file:
            np.lib.format.write_array(file, array, version)
        assert np.array_equal(images.read_array(tmp_path / "in.npy"), array)


def test_kernels_out_of_all_proportion(run: Any, tmp_path: Path) -> None:
    np.save(tmp_path / "in.npy", np.ones((4, 4), np.float32))
    for words in ("gaussian:100000", "box:100000", f"gaussian:{10**30}"):
        code, _, err = run("filter", tmp_path / "in.npy", tmp_path / "out.npy", "-k", words)
        assert code == MISTAKE and f"kernel={words!r}: the size must be at most 4096" in line_of(err)
    code, _, err = run("filter", tmp_path / "in.npy", tmp_path / "out.npy", "-k", "gaussian:3:1e300")
    assert (code, err) == (0, "") and np.allclose(np.load(tmp_path / "out.npy"), 1)


@pytest.mark.parametrize(
    "error", [MemoryError("Unable to allocate 74.5 GiB"), MemoryError(), CompileError("log", "", "")]
)
def test_what_is_not_the_user_s_fault_is_one_complaint(
    run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def fail(*arguments: Any, **options: Any) -> Any:
        raise error

    monkeypatch.setattr(work, "filtered", fail)
    np.save(tmp_path / "in.npy", np.ones((4, 4), np.float32))
    code, _, err = run("filter", tmp_path / "in.npy", tmp_path / "out.npy", "-k", "box:3")
    assert code == FAILED and err.startswith("error: ") and "Traceback" not in err
    assert ("memory is not enough" in err) == isinstance(error, MemoryError)


def test_the_result_keeps_mode_and_symlink(run: Any, tmp_path: Path) -> None:
    np.save(tmp_path / "in.npy", np.ones((4, 4), np.float32))
    secret, link = tmp_path / "secret.npy", tmp_path / "link.npy"
    secret.touch(0o600)
    link.symlink_to("secret.npy")
    assert run("filter", tmp_path / "in.npy", link, "-k", "box:3")[0] == 0
    assert link.is_symlink() and np.load(secret).shape == (4, 4) and stat.S_IMODE(secret.stat().st_mode) == 0o600
    before = os.umask(0o027)
    try:
        assert run("filter", tmp_path / "in.npy", tmp_path / "new.npy", "-k", "box:3")[0] == 0
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "new.npy").stat().st_mode) == 0o640
    code, _, err = run("filter", tmp_path / "in.npy", tmp_path / "absent" / "out.npy", "-k", "box:3")
    assert code == MISTAKE and line_of(err) == f"error: {tmp_path}/absent/out.npy: No such file or directory"


@pytest.mark.parametrize("suffix", [".png", ".npy", ".tif"])
def test_a_named_pipe_gets_the_whole_file(run: Any, tmp_path: Path, rng: np.random.Generator, suffix: str) -> None:
    Image.fromarray(rng.integers(0, 256, (9, 11, 3), np.uint8)).save(tmp_path / "in.png")
    pipe = tmp_path / f"pipe{suffix}"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        code, _, err = run("filter", tmp_path / "in.png", pipe, "-k", "box:3")
        assert (code, err) == (0, "") and stat.S_ISFIFO(pipe.stat().st_mode)
        sent = os.read(reader, 1 << 16)
    finally:
        os.close(reader)
    assert run("filter", tmp_path / "in.png", tmp_path / f"out{suffix}", "-k", "box:3")[0] == 0
    assert sent == (tmp_path / f"out{suffix}").read_bytes()


def test_a_named_pipe_gets_nothing_of_what_is_refused(run: Any, tmp_path: Path) -> None:
    Image.new("RGBA", (7, 5), (1, 2, 3, 4)).save(tmp_path / "in.png")
    os.mkfifo(tmp_path / "pipe.bmp")
    reader = os.open(tmp_path / "pipe.bmp", os.O_RDONLY | os.O_NONBLOCK)
    try:
        code, _, err = run("filter", tmp_path / "in.png", tmp_path / "pipe.bmp", "-k", "box:3")
        assert code == MISTAKE and "pipe.bmp: .bmp may not hold uint8" in line_of(err)
        assert os.read(reader, 1) == b""
    finally:
        os.close(reader)


class Unreadable(io.BytesIO):
    """A file whose reading fails."""

    def read(self, size: int | None = -1) -> bytes:
        raise OSError(errno.EIO, os.strerror(errno.EIO))


def test_an_error_of_reading_names_the_file(run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    np.save(tmp_path / "in.npy", np.ones((4, 4), np.float32))
    for name in ("bad.png", "bad.npy"):
        (tmp_path / name).touch()
    opened = images.open_regular
    monkeypatch.setattr(images, "open_regular", lambda path: Unreadable() if path.stem == "bad" else opened(path))
    for source, kernel in (("bad.png", "box:3"), ("bad.npy", "box:3"), ("in.npy", tmp_path / "bad.npy")):
        code, _, err = run("filter", tmp_path / source, tmp_path / "out.npy", "-k", kernel)
        named = kernel if source == "in.npy" else tmp_path / source
        assert code == MISTAKE and line_of(err) == f"error: {named}: Input/output error"


@pytest.mark.parametrize(
    "name", ["LEANCONV_CACHE_LIMIT", "LEANCONV_THREADS", "LEANCONV_TUNING", "LEANCONV_WORKSPACE_LIMIT"]
)
def test_the_doctor_names_a_variable_that_says_nothing(name: str, run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "foo")
    code, out, _ = run("doctor")
    assert code == 1 and f"{name}='foo'" in out


def test_the_doctor_names_a_folder_of_tables_that_is_none(
    run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    for folder, fine in ((tmp_path / "file", False), (tmp_path / "file" / "in", False), (tmp_path / "new", True)):
        monkeypatch.setenv("LEANCONV_TUNING_DIR", str(folder))
        _, out, _ = run("doctor", "--json")
        (found,) = [each for each in json.loads(out)["findings"] if each["name"] == "tables of tuned problems"]
        assert (found["state"] == "ok") == fine and (fine or f"{folder} is no folder" in found["text"])
