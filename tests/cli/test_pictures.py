"""What a picture keeps in ``leanconv filter``: orientation, profile, palette, transparency; 16 bits and floats."""

from __future__ import annotations

import struct
import sys
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from leanconv.cli import deep_pictures, pictures
from leanconv.cli.command_line import FAILED, MISTAKE
from leanconv.cli.pictures import Picture
from leanconv.images import filters
from tests.cli.test_filter import correct, names
from tests.messages import line_of

Image = pytest.importorskip("PIL.Image", reason="pictures need Pillow")
ImageOps = pytest.importorskip("PIL.ImageOps")


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("suffix", [".jpg", ".png", ".tif"])
def test_pictures_are_turned_as_pillow_turns_them(
    run: Any, tmp_path: Path, rng: np.random.Generator, orientation: int, suffix: str
) -> None:
    source, target = tmp_path / f"in{suffix}", tmp_path / "out.png"
    exif = Image.Exif()
    exif[0x0112] = orientation
    Image.fromarray(rng.integers(0, 256, (9, 12, 3), np.uint8)).save(source, exif=exif)
    assert run("filter", source, target, "-k", "box:1")[0] == 0
    made = Image.open(target)
    assert made.getexif().get(0x0112) is None, "it is turned once"
    assert np.array_equal(np.array(made), np.array(ImageOps.exif_transpose(Image.open(source))))
    pixels = rng.integers(0, 9, (3, 4, 2))
    turned = np.array(ImageOps.exif_transpose(_oriented(pixels[..., 0].astype(np.uint8), orientation)))
    assert np.array_equal(deep_pictures.upright(pixels, orientation)[..., 0], turned)


def _oriented(pixels: np.ndarray, orientation: int) -> Any:
    image = Image.fromarray(pixels)
    image.getexif()[0x0112] = orientation
    return image


@pytest.mark.parametrize("suffix", [".jpg", ".png", ".tif", ".webp"])
def test_the_colour_profile_stays(run: Any, tmp_path: Path, suffix: str) -> None:
    cms = pytest.importorskip("PIL.ImageCms")
    profile = cms.ImageCmsProfile(cms.createProfile("sRGB")).tobytes()
    Image.new("RGB", (9, 8), (200, 100, 0)).save(tmp_path / f"in{suffix}", icc_profile=profile)
    assert run("filter", tmp_path / f"in{suffix}", tmp_path / f"out{suffix}", "-k", "box:3")[0] == 0
    assert Image.open(tmp_path / f"out{suffix}").info["icc_profile"] == profile


_RNG = np.random.default_rng(3)
PICTURES = {
    "grey": Picture(_RNG.integers(0, 256, (20, 30), np.uint8)),
    "colours": Picture(_RNG.integers(0, 256, (20, 30, 3), np.uint8), True),
    "alpha": Picture(_RNG.integers(0, 256, (20, 30, 4), np.uint8), True, True),
    "opaque": Picture(
        np.dstack((_RNG.integers(0, 256, (20, 30, 3)), np.full((20, 30), 255))).astype(np.uint8), True, True
    ),
    "grey alpha": Picture(_RNG.integers(0, 256, (20, 30, 2), np.uint8), True, True),
    "opaque grey": Picture(
        np.dstack((_RNG.integers(0, 256, (20, 30)), np.full((20, 30), 255))).astype(np.uint8), True, True
    ),
    "dark": Picture(_RNG.integers(0, 200, (20, 30), np.uint16)),
    "16 bits": Picture(_RNG.integers(0, 65536, (20, 30), np.uint16)),
    "32 bits": Picture(_RNG.integers(-(10**9), 10**9, (20, 30), np.int32)),
    "floats": Picture(_RNG.standard_normal((20, 30), np.float32)),
}


@pytest.mark.parametrize(
    ("suffix", "holds"),
    [
        (".png", "grey, colours, alpha, opaque, grey alpha, opaque grey, dark, 16 bits"), (".jpg", "grey, colours"),
        (".webp", "grey, colours, alpha, opaque, grey alpha, opaque grey"), (".bmp", "grey, colours, opaque"),
        (".gif", "grey, opaque grey"), (".tga", "grey, colours, alpha, opaque, grey alpha, opaque grey"),
        (".ico", "grey, colours, alpha, opaque, grey alpha, opaque grey"),
        (".pgm", "grey, dark, 16 bits"), (".ppm", "grey, colours, opaque, dark, 16 bits"), (".pbm", ""),
        (".pfm", "floats"), (".pnm", "grey, colours, opaque, dark, 16 bits, floats"),
        (".pdf", "grey, colours, alpha, opaque, grey alpha, opaque grey"),
        (".tif", ", ".join(PICTURES)), (".NPY", ", ".join(PICTURES)),
    ],
)  # fmt: skip
def test_what_a_format_cannot_hold_is_refused(tmp_path: Path, suffix: str, holds: str) -> None:
    """Pillow's writers cut deep pictures to 8 bits, leave out transparency or change the size, without a word."""
    written = []
    for name, picture in PICTURES.items():
        path = tmp_path / f"{name}{suffix}"
        try:
            pictures.write(path, picture)
        except ValueError as error:
            assert f"{suffix} may not hold {picture.pixels.dtype}" in str(error) and not path.exists()
            continue
        written.append(name)
        if suffix in (".png", ".tif", ".NPY") or (suffix, name) == (".pgm", "16 bits"):
            found = pictures.read(path)
            assert found.pixels.dtype == picture.pixels.dtype and np.array_equal(found.pixels, picture.pixels)
    assert ", ".join(written) == holds


@pytest.mark.parametrize(
    ("suffix", "name", "right"),
    [(".pgm", "colours", ".ppm"), (".ppm", "floats", ".pfm"), (".pfm", "colours", ".ppm"), (".pbm", "grey", ".pgm")],
)
def test_the_suffix_that_holds_a_picture_is_named(tmp_path: Path, suffix: str, name: str, right: str) -> None:
    with pytest.raises(ValueError, match=f"write a {right} file"):
        pictures.write(tmp_path / f"a{suffix}", PICTURES[name])
    assert names(tmp_path) == []
    pictures.write(tmp_path / f"a{right}", PICTURES[name])
    assert np.array_equal(pictures.read(tmp_path / f"a{right}").pixels, PICTURES[name].pixels)


@pytest.mark.parametrize("channels", [(), (3,)], ids=["grey", "colours"])
def test_integers_of_8_bits_with_a_sign_stay_such(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, channels: tuple[int, ...]
) -> None:
    pytest.importorskip("tifffile")
    picture = Picture(_RNG.integers(-128, 128, (4, 5, *channels), np.int8), bool(channels))
    pictures.write(tmp_path / "in.tif", picture)
    found = pictures.read(tmp_path / "in.tif").pixels
    assert found.dtype == np.int8 and np.array_equal(found, picture.pixels)
    if not channels:
        monkeypatch.setattr(deep_pictures, "has_tifffile", lambda: False)
        with pytest.raises(ImportError, match="signed integers of 8 bits need tifffile"):
            pictures.read(tmp_path / "in.tif")


@pytest.mark.parametrize("bits", [1, 2, 4, 8])
def test_a_grey_that_is_transparent_stays_so(run: Any, tmp_path: Path, bits: int) -> None:
    """Pillow makes 8 bits of fewer, but not of the number of the grey."""
    rows, grey = (np.arange(8).reshape(1, 8) % 2**bits).astype(np.uint8), min(2, 2**bits - 1)
    packed = np.packbits(np.unpackbits(rows[..., None], axis=2)[..., 8 - bits :].reshape(1, -1), axis=1)

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head = struct.pack(">IIBBBBB", 8, 1, bits, 0, 0, 0, 0)
    parts = (
        chunk(b"IHDR", head),
        chunk(b"tRNS", struct.pack(">H", grey)),
        chunk(b"IDAT", zlib.compress(b"\0" + packed.tobytes())),
    )
    (tmp_path / "in.png").write_bytes(b"\x89PNG\r\n\x1a\n" + b"".join(parts) + chunk(b"IEND", b""))
    assert run("filter", tmp_path / "in.png", tmp_path / "out.npy", "-k", "box:1")[0] == 0
    found = np.load(tmp_path / "out.npy")
    assert found.shape == (1, 8, 2) and np.array_equal(found[..., 0], rows * np.uint8(255 // (2**bits - 1)))
    assert np.array_equal(found[..., 1] == 0, rows == grey)


def test_capitals_of_a_suffix_mean_the_same(run: Any, tmp_path: Path) -> None:
    np.save(tmp_path / "in.npy", np.ones((8, 8), np.float32))
    (tmp_path / "in.npy").rename(tmp_path / "IN.NPY")
    np.save(tmp_path / "kernel.npy", np.ones((1, 1)))
    (tmp_path / "kernel.npy").rename(tmp_path / "KERNEL.NPY")
    assert run("filter", tmp_path / "IN.NPY", tmp_path / "OUT.NPY", "-k", tmp_path / "KERNEL.NPY")[0] == 0
    assert np.load(tmp_path / "OUT.NPY").shape == (8, 8)


def test_palettes_become_colours_with_their_transparency(run: Any, tmp_path: Path) -> None:
    picture = Image.new("RGB", (8, 8), (250, 0, 0)).quantize(4)
    picture.info["transparency"] = 1
    for extra, mode in (({"transparency": 0}, "RGBA"), ({}, "RGB")):
        Image.new("RGB", (8, 8), (250, 0, 0)).quantize(4).save(tmp_path / "in.png", **extra)
        assert run("filter", tmp_path / "in.png", tmp_path / "out.png", "-k", "box:3")[0] == 0
        made = Image.open(tmp_path / "out.png")
        assert made.mode == mode and made.getpixel((3, 3)) == ((250, 0, 0, 0) if extra else (250, 0, 0))


SEVERAL = {
    "two.pgm": (b"P5 2 1 255\nab" + b"P5 2 1 255\ncd", 2),
    "deep.pgm": (b"P5 2 1 999\nabcd\n" + b"P5 2 1 255\ncd", 2),
    "bits.pbm": (b"P4 9 2\nabcd" + b"P4 9 2\nabcd", 2),
    "colours.ppm": (b"P6 1 1 255\nabc" + b"P6 1 1 255\nabc", 2),
    "noise.pgm": (b"P5 2 1 255\nab" + b"P5, as it were", 1),
    "raster.pgm": (b"P5 4 1 255\nP5 1" + b"\n", 1),
}


@pytest.mark.parametrize("name", SEVERAL)
def test_one_pgm_behind_another(tmp_path: Path, name: str) -> None:
    content, number = SEVERAL[name]
    (tmp_path / name).write_bytes(content)
    if number == 1:
        assert pictures.read(tmp_path / name).pixels.size in (2, 4)
        return
    with pytest.raises(ValueError, match=f"{name} holds 2 pictures, and only one can be filtered"):
        pictures.read(tmp_path / name)


def test_icons_have_one_size(run: Any, tmp_path: Path, rng: np.random.Generator) -> None:
    image = Image.fromarray(rng.integers(0, 256, (64, 64, 4), np.uint8))
    for suffix in (".ico", ".icns"):
        image.save(tmp_path / f"several{suffix}")
        code, _, err = run("filter", tmp_path / f"several{suffix}", tmp_path / "out.png", "-k", "box:3")
        assert code == 2 and "pictures, and only one can be filtered" in err
    image.save(tmp_path / "one.ico", sizes=[(64, 64)])
    assert run("filter", tmp_path / "one.ico", tmp_path / "out.ico", "-k", "box:1")[0] == 0
    assert np.array_equal(pictures.read(tmp_path / "out.ico").pixels, np.asarray(image))


def test_the_photograph_of_a_camera_with_its_preview(run: Any, tmp_path: Path, rng: np.random.Generator) -> None:
    photo, preview = (Image.fromarray(rng.integers(0, 256, (n, n, 3), np.uint8)) for n in (16, 8))
    photo.save(tmp_path / "in.jpg", format="MPO", save_all=True, append_images=[preview])
    assert Image.open(tmp_path / "in.jpg").n_frames == 2
    assert run("filter", tmp_path / "in.jpg", tmp_path / "out.png", "-k", "box:1")[0] == 0
    assert np.array_equal(np.array(Image.open(tmp_path / "out.png")), np.array(Image.open(tmp_path / "in.jpg")))


@pytest.mark.parametrize("channels", [2, 3, 4])
def test_png_of_16_bits(run: Any, tmp_path: Path, rng: np.random.Generator, channels: int) -> None:
    codecs = pytest.importorskip("imagecodecs", reason="it reads 16 bits of several channels")
    cms = pytest.importorskip("PIL.ImageCms")
    profile = cms.ImageCmsProfile(cms.createProfile("sRGB")).tobytes()
    pixels = rng.integers(0, 65536, (9, 11, channels)).astype(np.uint16)
    alpha = channels in (2, 4)
    pictures.write(tmp_path / "in.png", Picture(pixels, True, alpha, profile))
    assert run("filter", tmp_path / "in.png", tmp_path / "out.png", "-k", "gaussian:5")[0] == 0
    got = codecs.png_decode((tmp_path / "out.png").read_bytes())
    assert got.dtype == np.uint16 and Image.open(tmp_path / "out.png").info["icc_profile"] == profile
    wanted = correct(pixels, filters.gaussian(5))
    colours = slice(None, -1 if alpha else None)
    assert np.abs(got[..., colours].astype(int) - wanted[..., colours]).max() <= 1  # sums in float32
    assert not alpha or np.array_equal(got[..., -1], pixels[..., -1])
    orientation = b"eXIfMM\0*\0\0\0\x08\0\x01\x01\x12\0\x03\0\0\0\x01\0\x06\0\0\0\0\0\0"
    chunk = struct.pack(">I", len(orientation) - 4) + orientation + struct.pack(">I", zlib.crc32(orientation))
    content = (tmp_path / "in.png").read_bytes()
    (tmp_path / "in.png").write_bytes(content[:-12] + chunk + content[-12:])
    assert np.array_equal(pictures.read(tmp_path / "in.png").pixels, np.rot90(pixels, -1))
    (tmp_path / "in.png").write_bytes(content[:-40])
    code, _, err = run("filter", tmp_path / "in.png", tmp_path / "out2.png", "-k", "box:3")
    assert code == MISTAKE and "in.png cannot be read as a picture" in line_of(err)


@pytest.mark.parametrize("dtype", ["uint16", "int16", "float32", "float64"])
@pytest.mark.parametrize("channels", [1, 3, 4])
def test_tiff_of_16_bits_and_of_floats(
    run: Any, tmp_path: Path, rng: np.random.Generator, dtype: str, channels: int
) -> None:
    tifffile = pytest.importorskip("tifffile", reason="it reads 16 bits of several channels")
    pixels = (rng.random((9, 11, channels)) * 3e4).astype(dtype).squeeze()
    extra = {"extrasamples": ["unassalpha"]} if channels == 4 else {}
    colour = "minisblack" if channels == 1 else "rgb"
    turned = [(274, 3, 1, 6, True)]
    for planar in ("contig", "separate")[: 2 if channels > 1 else 1]:
        data = np.moveaxis(pixels, -1, 0) if planar == "separate" else pixels
        tifffile.imwrite(
            tmp_path / "in.tif", data, photometric=colour, planarconfig=planar, iccprofile=b"profile", metadata=None,
            extratags=turned, compression="zlib", **extra,
        )  # fmt: skip
        assert run("filter", tmp_path / "in.tif", tmp_path / "out.tif", "-k", "sharpen")[0] == 0
        with tifffile.TiffFile(tmp_path / "out.tif") as made:
            got, tags = made.asarray(), made.pages[0].tags
            assert tuple(made.pages[0].extrasamples) == ((2,) if channels == 4 else ())
            profile, orientation = tags.valueof(34675), tags.valueof(274, 1)
        upright = np.rot90(pixels, -1)
        wanted = correct(upright, filters.sharpen())
        if channels == 4:
            wanted[..., 3] = upright[..., 3]
        assert got.dtype == pixels.dtype and np.allclose(got, wanted, rtol=1e-5, atol=1e-2)
        assert profile == b"profile" and int(orientation) == 1


def test_tiff_that_is_refused(run: Any, tmp_path: Path) -> None:
    tifffile = pytest.importorskip("tifffile", reason="it reads what is refused")
    zeros = np.zeros((6, 7, 4), np.uint16)
    rgba = {"photometric": "rgb", "planarconfig": "contig"}
    for data, options, message in (
        (zeros, {**rgba, "extrasamples": ["assocalpha"]}, "multiplied by their transparency"),
        (
            zeros,
            {"photometric": "separated", "planarconfig": "contig"},
            "16 bits in 4 channels of kind SEPARATED",
        ),
        (zeros[..., 0], {"photometric": "miniswhite"}, "channels of kind MINISWHITE"),
        (np.zeros((3, 6, 7), np.float32), {"photometric": "minisblack"}, "holds 3 pictures"),
        (np.zeros((6, 7, 5), np.uint16), {**rgba, "extrasamples": [2, 0]}, "16 bits in 5 channels of kind RGB"),
        (zeros[..., :3].astype(np.uint32), {**rgba}, "image has dtype uint32"),
    ):
        tifffile.imwrite(tmp_path / "in.tif", data, metadata=None, **options)
        code, _, err = run("filter", tmp_path / "in.tif", tmp_path / "out.tif", "-k", "box:3")
        assert code == MISTAKE and message in line_of(err), err
    tifffile.imwrite(tmp_path / "in.tif", zeros[..., :3], photometric="rgb", metadata=None)
    code, _, err = run("filter", tmp_path / "in.tif", tmp_path / "o.tif", "-k", "box:3", "--max-pixels", 40)
    assert code == MISTAKE and "in.tif has 7 x 6 pixels, more than 40; --max-pixels 0" in line_of(err)
    tifffile.imwrite(tmp_path / "in.tif", zeros[..., 0], photometric="minisblack", metadata=None)
    content = (tmp_path / "in.tif").read_bytes()
    bits = [struct.pack("<HHIH", 258, 3, 1, number) for number in (16, 12)]
    assert bits[0] in content
    (tmp_path / "in.tif").write_bytes(content.replace(*bits))
    code, _, err = run("filter", tmp_path / "in.tif", tmp_path / "out.tif", "-k", "box:3")
    assert code == MISTAKE and "12 bits in each channel; convert it to 8" in line_of(err)
    (tmp_path / "in.tif").write_bytes(content[:-100])
    code, _, err = run("filter", tmp_path / "in.tif", tmp_path / "out.tif", "-k", "box:3")
    assert code == MISTAKE and "in.tif" in line_of(err)
    assert names(tmp_path) == ["in.tif"]


@pytest.mark.parametrize("alone", [False, True], ids=["with tifffile", "Pillow alone"])
def test_tiff_of_8_bits_of_which_pillow_reads_a_part(
    run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, alone: bool
) -> None:
    tifffile = pytest.importorskip("tifffile", reason="it writes what is refused")
    if alone:
        monkeypatch.setattr(deep_pictures, "has_tifffile", lambda: False)
    rgb: dict[str, Any] = {"photometric": "rgb", "planarconfig": "contig"}
    slices: dict[str, Any] = {"volumetric": True, "tile": (1, 16, 16)}
    cases: tuple[tuple[tuple[int, ...], dict[str, Any], str], ...] = (
        ((3, 4, 5), {**rgb, "extrasamples": [0, 0]}, "has 5 channels, of which Pillow reads 3;"),
        ((3, 4, 5), {**rgb, "extrasamples": [2, 0]}, "has 5 channels, of which Pillow reads 4;"),
        ((3, 4, 4), {**rgb, "extrasamples": [0]}, "has 4 channels, of which Pillow reads 3;"),
        ((3, 4, 2), {**rgb, "photometric": "minisblack", "extrasamples": [0]}, "has 2 channels, of which Pillow"),
        ((2, 16, 16), {**slices, "photometric": "minisblack"}, "holds 2 slices, and only one can be filtered"),
        ((2, 16, 16, 3), {**slices, "photometric": "rgb"}, "holds 2 slices"),
    )
    for shape, options, message in cases:
        tifffile.imwrite(tmp_path / "in.tif", np.zeros(shape, np.uint8), metadata=None, **options)
        code, _, err = run("filter", tmp_path / "in.tif", tmp_path / "out.tif", "-k", "box:1")
        assert code == MISTAKE and f"in.tif {message}" in line_of(err), err
    if not alone:
        tifffile.imwrite(tmp_path / "in.tif", np.zeros((2, 16, 16), np.uint16), photometric="minisblack", **slices)
        code, _, err = run("filter", tmp_path / "in.tif", tmp_path / "out.tif", "-k", "box:1")
        assert code == MISTAKE and "in.tif holds 2 slices" in line_of(err)
    assert names(tmp_path) == ["in.tif"]
    for channels, extra in ((3, {}), (4, {"extrasamples": [2]})):
        pixels = _RNG.integers(0, 256, (3, 4, channels), np.uint8)
        tifffile.imwrite(tmp_path / "in.tif", pixels, metadata=None, **rgb, **extra)
        assert run("filter", tmp_path / "in.tif", tmp_path / "out.npy", "-k", "box:1")[0] == 0
        assert np.array_equal(np.load(tmp_path / "out.npy"), pixels)


@pytest.mark.parametrize("compression", ["jpeg2000", "jpegxl", "lerc", "png", "webp", "deflate"])
def test_tiff_of_8_bits_in_every_compression(
    compression: str, tmp_path: Path, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    tifffile = pytest.importorskip("tifffile")
    pixels, path = rng.integers(0, 256, (40, 50, 3), np.uint8), tmp_path / "a.tif"
    tifffile.imwrite(path, pixels, photometric="rgb", compression=compression)
    assert np.array_equal(pictures.read(path).pixels, pixels)
    if compression in ("jpegxl", "lerc", "png"):
        monkeypatch.setattr(pictures.deep, "has_tifffile", lambda: False)
        with pytest.raises(ValueError, match=r"of a TIFF tifffile may: pip install 'leanconv\[pictures\]'"):
            pictures.read(path)


@pytest.mark.parametrize("suffix", [".png", ".tif"])
def test_damaged_pictures_of_16_bits(
    run: Any, tmp_path: Path, rng: np.random.Generator, suffix: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Wherever a file is cut or scratched: a result, or one line that names it."""
    pytest.importorskip("imagecodecs", reason="it reads 16 bits of several channels")
    pytest.importorskip("tifffile")
    path = tmp_path / f"in{suffix}"
    pictures.write(path, Picture(rng.integers(0, 65536, (5, 7, 3)).astype(np.uint16), True))
    content, refused = path.read_bytes(), 0
    for trial in range(40):
        damaged = bytearray(content)
        if trial % 2:
            del damaged[int(rng.integers(len(damaged))) :]
        for _ in range(trial // 4):
            if damaged:
                damaged[int(rng.integers(len(damaged)))] = int(rng.integers(256))
        path.write_bytes(damaged)
        code, _, err = run("filter", path, tmp_path / "out.npy", "-k", "box:1")
        assert code == 0 or (code in (MISTAKE, FAILED) and path.name in line_of(err)), err
        refused += code != 0
    assert refused > 15 and not caplog.records


def test_shapes_that_could_be_planes(tmp_path: Path, rng: np.random.Generator) -> None:
    pytest.importorskip("tifffile")
    for shape in ((3, 4, 3), (3, 9, 4), (4, 5, 4)):
        pixels = rng.random(shape).astype(np.float32)
        pictures.write(tmp_path / "a.tif", Picture(pixels, True, shape[2] == 4))
        assert np.array_equal(pictures.read(tmp_path / "a.tif").pixels, pixels)


def test_signed_tiff_of_16_bits_without_tifffile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pillow would read it as int32."""
    pytest.importorskip("tifffile")
    pictures.write(tmp_path / "in.tif", Picture(np.zeros((4, 5), np.int16)))
    monkeypatch.setitem(sys.modules, "tifffile", None)
    with pytest.raises(ImportError, match="16 bits need tifffile"):
        pictures.read(tmp_path / "in.tif")


@pytest.mark.parametrize("suffix, library", [(".png", "imagecodecs"), (".tif", "tifffile")])
def test_a_missing_library_is_named_when_writing(
    run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, suffix: str, library: str
) -> None:
    monkeypatch.setitem(sys.modules, library, None)
    np.save(tmp_path / "in.npy", np.zeros((4, 5, 3), np.uint16))
    code, _, err = run("filter", tmp_path / "in.npy", tmp_path / f"out{suffix}", "-k", "box:3")
    assert code == FAILED and f"needs {library}: pip install 'leanconv[pictures]'" in line_of(err)
    code, _, err = run("filter", tmp_path / "in.npy", tmp_path / "out.jpg", "-k", "box:3")
    assert code == MISTAKE and ".jpg may not hold uint16" in line_of(err) and "write a .png, .tif or .npy file" in err
    assert names(tmp_path) == ["in.npy"]


def test_jpeg_is_written_with_little_loss(run: Any, tmp_path: Path) -> None:
    y, x = np.mgrid[0:64, 0:64]
    Image.fromarray((127 + 60 * np.sin(x / 5) * np.cos(y / 7)).astype(np.uint8)).save(tmp_path / "in.png")
    assert run("filter", tmp_path / "in.png", tmp_path / "out.jpg", "-k", "box:1")[0] == 0
    before, after = (np.array(Image.open(tmp_path / name)).astype(int) for name in ("in.png", "out.jpg"))
    assert np.abs(before - after).max() <= 3
