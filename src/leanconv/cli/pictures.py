"""Pictures and .npy files in and out.

Pillow reads and writes pictures of 8 bits, and grey ones of more; `deep_pictures` the others. Libraries are imported
when a file needs them.
"""

from __future__ import annotations

import errno
import math
import os
import re
import struct
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from leanconv.cli import deep_pictures as deep
from leanconv.runtime.files import open_regular, whole

_ORIENTATION, _SAMPLE_FORMAT = 0x0112, 339
_SAMPLES_PER_PIXEL, _IMAGE_DEPTH = 277, 32997
#: What Pillow calls pictures whose channels it reads with 8 bits.
_8_BITS = ("L", "LA", "La", "P", "PA", "RGB", "RGBA", "RGBa", "RGBX", "CMYK", "YCbCr", "LAB", "HSV")
#: What keeps every pixel of some types, and what by its nature changes them a little, of 8 bits.
_EXACT = {"PNG": ("uint8", "uint16"), "TIFF": ("uint8", "uint16", "int32", "float32")}
_LOSSY = ("JPEG", "MPO", "WEBP", "AVIF")
#: How the files begin that a suffix stands for; readers of PPM take PGM. A .pnm may be any of them.
_MAGIC = {".pbm": (b"P4",), ".pgm": (b"P5",), ".ppm": (b"P5", b"P6"), ".pfm": (b"Pf",)}
_SUFFIX_OF = {b"P5": ".pgm", b"P6": ".ppm", b"Pf": ".pfm"}
#: Of these Pillow knows the suffix, and reads and writes nothing by itself.
_STUBS = ("BUFR", "GRIB", "HDF5")


@dataclass(frozen=True)
class Picture:
    """Pixels (…, height, width), or (height, width, channels) where ``channels_last``; and what else a file held.

    With ``alpha`` the last channel is transparency.
    """

    pixels: np.ndarray
    channels_last: bool = False
    alpha: bool = False
    icc_profile: bytes | None = None


def read(path: Path, max_pixels: int | None = None) -> Picture:
    """A picture, or the array in a .npy file: (…, height, width), or (height, width, 3 or 4) with its channels last.

    A picture is turned as its orientation (Exif, TIFF) says. Palettes and CMYK become RGB of 8 bits, single bits become
    8; others keep their bits. ``max_pixels`` is the most that a picture may have, 0 is any number; by default it is
    Pillow's limit, 178,956,970.

    Raises ValueError for an unknown format, a damaged file, a larger picture, and one that would be read with fewer
    bits than it has; OSError for an unreadable file; ImportError, with what installs it, where a library is missing.
    """
    if path.suffix.lower() == ".npy":
        array = read_array(path)
        if array.ndim < 2:
            raise ValueError(f"{path} holds an array of shape {array.shape}; it must be (..., height, width)")
        channels_last = array.ndim == 3 and array.shape[-1] in (3, 4)
        return Picture(array, channels_last, channels_last and array.shape[-1] == 4)
    pillow, _ = _pillow()
    # NOTE: Pillow warns of many pixels, and refuses twice as many
    most = 2 * (pillow.MAX_IMAGE_PIXELS or 0) if max_pixels is None else max_pixels
    file = open_regular(path)
    try:
        with file, warnings.catch_warnings(), _pixels_allowed(pillow, most):
            warnings.filterwarnings("ignore", module="PIL")  # of damage an error tells, or a result
            if file.read(4) in deep.TIFF_MAGIC and deep.has_tifffile():
                found = deep.read_tiff(path, most or None)
                if found is not None:
                    pixels, alpha, icc_profile = found
                    return Picture(pixels, pixels.ndim == 3, alpha, icc_profile)
            file.seek(0)
            with pillow.open(file) as image:
                if 0 < most < image.width * image.height:
                    raise pillow.DecompressionBombError(f"Image size ({image.width * image.height} pixels)")
                return _decoded(file, image, path)
    except pillow.DecompressionBombError as error:
        # NOTE: Pillow's own limit is even
        size = f"{str(error).partition(' exceeds')[0]} exceeds limit of {most} pixels"
        raise ValueError(f"{path}: {size}; --max-pixels 0 allows any, or cut it into smaller pictures") from error
    except deep.Refused as error:
        raise ValueError(f"{path} {error}") from error
    except (MemoryError, ImportError):
        raise
    except pillow.UnidentifiedImageError as error:  # which names the open file
        with open_regular(path) as file:
            missing = file.read(4) in deep.TIFF_MAGIC and not deep.has_tifffile()
        instead = "; of a TIFF tifffile may: pip install 'leanconv[pictures]'" if missing else ""
        said = f"{path} cannot be read as a picture: Pillow cannot identify image data in it{instead}"
        raise ValueError(said) from error
    except Exception as error:
        # NOTE: damaged files make Pillow raise almost anything: SyntaxError, struct.error, EOFError, IndexError, ...
        if isinstance(error, OSError) and error.errno is not None:
            _name(error, path)
            raise
        raise ValueError(f"{path} cannot be read as a picture: {' '.join(str(error).split())}") from error


def _decoded(file: BinaryIO, image: Any, path: Path) -> Picture:
    """What Pillow has opened. Raises Refused and ImportError for what `read` refuses."""
    kind, mode, icc_profile = image.format, image.mode, image.info.get("icc_profile")
    frames = _frames(file, image)
    if frames > 1:
        raise deep.Refused(f"holds {frames} pictures, and only one can be filtered")
    bits = _bits(file, image)
    deep.check_memory(path, image.width * image.height * max(8, bits) // 8 * len(image.getbands()))
    if bits > 8 and mode in _8_BITS:
        if kind == "PNG":
            pixels = deep.upright(deep.read_png(file, path), image.getexif().get(_ORIENTATION, 1))
            return Picture(pixels, True, pixels.shape[2] in (2, 4), icc_profile)
        if kind == "TIFF":
            raise ImportError(f"{path}: {bits} bits in a channel need tifffile: pip install 'leanconv[pictures]'")
        raise deep.Refused(
            f"has {bits} bits in each channel, of which Pillow reads 8 ({mode}); convert it to a .png, "
            ".tif or .npy file, which keep 16"
        )
    if kind == "TIFF" and bits < 32 and (mode == "I" or deep.SIGNED in image.tag_v2.get(_SAMPLE_FORMAT, ())):
        raise ImportError(f"{path}: signed integers of {bits} bits need tifffile: pip install 'leanconv[pictures]'")
    if kind == "TIFF":
        _check_tiff(image)
    _, operations = _pillow()
    image = operations.exif_transpose(image)
    if mode.startswith("I;16") or (mode == "I" and kind in ("PNG", "PPM")):
        # Pillow opens PPM of 16 bits in 32, older releases PNG too
        pixels = np.asarray(image).astype(np.uint16)
        if "transparency" in image.info:  # one grey that is transparent
            visible = np.where(pixels == image.info["transparency"], 0, 65535).astype(np.uint16)
            return Picture(np.stack((pixels, visible), axis=-1), True, True, icc_profile)
        return Picture(pixels, icc_profile=icc_profile)
    if mode in ("I", "F"):
        return Picture(np.array(image), icc_profile=icc_profile)
    if kind == "PNG" and mode == "L" and isinstance(image.info.get("transparency"), int):
        # a grey of so many bits, of which Pillow makes 8
        image.info["transparency"] = image.info["transparency"] * 255 // (2**bits - 1)
    transparent = mode in ("LA", "PA", "RGBA", "La", "RGBa") or "transparency" in image.info
    grey = mode in ("1", "L", "LA", "La")
    if mode == "CMYK":
        icc_profile = None  # it describes inks
    pixels = np.asarray(image.convert(("LA" if grey else "RGBA") if transparent else ("L" if grey else "RGB")))
    return Picture(pixels, pixels.ndim == 3, transparent, icc_profile)


def _frames(file: BinaryIO, image: Any) -> int:
    """How many pictures a file holds, those that Pillow leaves out included; of PGM and its like no more than 2."""
    if image.format == "MPO":  # a JPEG of a camera, with previews behind the picture
        return 1
    if image.format == "ICNS":
        return len(image.info["sizes"])
    if image.format in ("ICO", "CUR"):
        (number,) = struct.unpack("<H", _part(file, 4, 2))
        return int(number)
    if image.format == "PPM" and _part(file, 0, 2) in (b"P4", b"P5", b"P6"):
        codec, _, begin, _ = image.tile[0]
        samples = image.width * image.height * len(image.getbands())
        wide = codec == "ppm" and image.tile[0][3][1] > 255
        size = (image.width + 7) // 8 * image.height if image.mode == "1" else samples << wide
        rest = _part(file, begin + size, 64).lstrip()
        return 2 if re.match(rb"P[1-7]\s", rest) else 1
    return int(getattr(image, "n_frames", 1))


def _part(file: BinaryIO, begin: int, size: int) -> bytes:
    """Bytes of a file, which stays where it is."""
    at = file.tell()
    file.seek(begin)
    found = file.read(size)
    file.seek(at)
    return found


def _check_tiff(image: Any) -> None:
    """Raise Refused for slices and channels that Pillow leaves out without a word."""
    deep.check_slices(image.tag_v2.get(_IMAGE_DEPTH, 1))
    channels = image.tag_v2.get(_SAMPLES_PER_PIXEL, 1)
    read = len(image.getbands()) - (image.mode == "RGBX")
    if channels > read:
        raise deep.Refused(
            f"has {channels} channels, of which Pillow reads {read}; leave the others out, or mark the "
            "last one as transparency, if it is"
        )


def _name(error: OSError, path: Path) -> None:
    """Have an error of reading name the file: one of a read alone does not."""
    if error.filename is None:
        error.filename = str(path)


@contextmanager
def _pixels_allowed(pillow: Any, most: int) -> Iterator[None]:
    """Pillow's limit, for the block, 0 for none: it refuses more than twice that number, an odd ``most`` and one."""
    before = pillow.MAX_IMAGE_PIXELS
    pillow.MAX_IMAGE_PIXELS = (most + 1) // 2 or None
    try:
        yield
    finally:
        pillow.MAX_IMAGE_PIXELS = before


def _bits(file: BinaryIO, image: Any) -> int:
    """Bits of a channel in the file, as far as its format has more than 8; Pillow tells only those that it reads."""
    if image.format == "TIFF":
        return int(max(image.tag_v2.get(258, (1,))))  # BitsPerSample
    at, head = file.tell(), b""
    if image.format in ("PNG", "SGI", "PPM", "JPEG2000"):
        file.seek(0)
        head = file.read()
        file.seek(at)
    if image.format == "PNG":
        return head[24]  # IHDR, the first chunk, has the depth behind width and height
    if image.format == "SGI":
        return 8 * head[3]
    if image.format == "PPM" and head[:2] in (b"P2", b"P3", b"P5", b"P6"):
        words = (each[0] for each in re.finditer(rb"#[^\r\n]*|[^\s#]+", head))
        # the magic number, width, height, the largest value
        return int(next(islice((word for word in words if word[:1] != b"#"), 3, None))).bit_length()
    if image.format == "JPEG2000":
        size = head.index(b"\xff\x4f\xff\x51")  # start of the codestream, then its sizes
        (channels,) = struct.unpack_from(">H", head, size + 40)
        return max(head[size + 42 + 3 * channel] & 0x7F for channel in range(channels)) + 1
    return 8


def suffixes() -> set[str]:
    """Of files that can be both read and written. Raises ImportError where Pillow is missing."""
    pillow, _ = _pillow()
    known = pillow.registered_extensions().items()
    return {".npy"} | {
        suffix for suffix, kind in known if kind in pillow.OPEN and kind in pillow.SAVE and kind not in _STUBS
    }


def check_target(path: Path) -> None:
    """Raise ValueError unless the suffix names a format that can be written, OSError where the folder is missing,
    ImportError where Pillow is."""
    if not path.parent.exists():
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
    if path.suffix.lower() == ".npy":
        return
    pillow, _ = _pillow()
    kind = pillow.registered_extensions().get(path.suffix.lower())
    if kind not in pillow.SAVE or kind in _STUBS:
        folder = "" if path.suffix else ", or a folder that exists"
        raise ValueError(
            f"{path}: the suffix {path.suffix!r} names no format that can be written; try .png or .npy{folder}"
        )


def write(path: Path, picture: Picture) -> None:
    """Write a picture in the format that the suffix names, or as the array that it is. It appears whole or not at all.

    An array (3, height, width) is written as RGB. Raises ValueError where the format cannot hold the picture, OSError
    where the file cannot be written, ImportError, with what installs it, where a library is missing.
    """
    check_target(path)
    pixels, suffix = picture.pixels, path.suffix.lower()
    if suffix == ".npy":
        with whole(path) as temporary, temporary.open("wb") as file:  # to whose name NumPy adds nothing
            np.save(file, pixels)
        return
    if pixels.ndim == 3 and len(pixels) == 3 and not picture.channels_last:
        pixels = np.moveaxis(pixels, 0, -1)
    elif pixels.ndim != 2 and not picture.channels_last:
        raise ValueError(f"{path}: {pixels.dtype} of shape {pixels.shape} makes no picture; write it to a .npy file")
    if not pixels.size:
        raise ValueError(f"{path}: an array of shape {pixels.shape} has no pixel to show; write it to a .npy file")
    dtype = pixels.dtype.name
    by_pillow = dtype == "uint8" or (pixels.ndim == 2 and dtype in ("uint16", "int32", "float32"))
    tiff = suffix in (".tif", ".tiff")
    if not by_pillow and not tiff and (suffix, dtype) != (".png", "uint16"):
        takers = ".png, .tif or .npy" if dtype == "uint16" else ".tif or .npy"
        raise ValueError(f"{path}: {suffix} may not hold {dtype} of shape {pixels.shape}; write a {takers} file")
    with whole(path) as temporary:
        if by_pillow:
            _save(temporary, pixels, picture, path)
        elif tiff:
            deep.write_tiff(temporary, pixels, picture.alpha, picture.icc_profile)
        else:
            deep.write_png(temporary, pixels, picture.icc_profile)


def _save(temporary: Path, pixels: np.ndarray, picture: Picture, path: Path) -> None:
    """Let Pillow write; errors are about ``path``."""
    pillow, _ = _pillow()
    options: dict[str, Any] = {"icc_profile": picture.icc_profile} if picture.icc_profile else {}
    if path.suffix.lower() in (".jpg", ".jpeg"):
        options |= {"quality": 95}
    if path.suffix.lower() == ".ico":
        options |= {"sizes": [pixels.shape[1::-1]]}  # by default smaller ones besides
    try:
        pillow.fromarray(np.ascontiguousarray(pixels)).save(temporary, **options)
    except (OSError, KeyError, ValueError, TypeError, SystemError, struct.error, OverflowError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise
        said = error.args[0] if error.args else error
        raise ValueError(f"{path}: {said}: {_advice(path, pixels, picture)}") from error
    if not _is_kept(temporary, pixels, picture):
        raise ValueError(f"{path}: {_advice(path, pixels, picture)}")
    suffix = path.suffix.lower()
    if suffix in _MAGIC:
        with temporary.open("rb") as file:
            magic = file.read(2)
        if magic not in _MAGIC[suffix]:
            refused = f"{suffix} may not hold {pixels.dtype} of shape {pixels.shape}"
            raise ValueError(f"{path}: {refused}; write a {_SUFFIX_OF.get(magic, '.png')} file")


def _advice(path: Path, pixels: np.ndarray, picture: Picture) -> str:
    advice = f"{path.suffix} may not hold {pixels.dtype} of shape {pixels.shape}"
    if picture.alpha:
        return advice + " with transparency; write a .png file, which holds it, or a picture without"
    if pixels.dtype == np.uint8:
        return advice + "; write a .png file"
    takers = "a .png, .tif or .npy file" if pixels.dtype == np.uint16 else "a .tif or .npy file"
    return advice + f"; make it uint8 first, or write {takers}"


def _is_kept(path: Path, pixels: np.ndarray, picture: Picture) -> bool:
    """Whether Pillow reads what it has written as the same picture. Its writers cut some to 8 bits, leave out
    transparency, or change the size, without a word."""
    pillow, _ = _pillow()
    kind = pillow.registered_extensions().get(path.suffix.lower())
    if pixels.dtype.name in _EXACT.get(kind, ()):
        return True
    if pixels.dtype != np.uint8 and (kind in (*_LOSSY, "ICO") or kind not in pillow.OPEN):
        return False
    if kind not in pillow.OPEN or kind == "EPS":  # a page, which another program shows
        return True
    try:
        found = read(path, 0)
    except ValueError:
        return False
    again, alpha = found.pixels, picture.alpha
    if alpha and not found.alpha and bool((pixels[..., -1] == 255).all()):
        pixels, alpha = pixels[..., :-1], False  # some leave out what is opaque
        pixels = pixels[..., 0] if pixels.shape[2] == 1 else pixels
    if (
        again.shape[:2] != pixels.shape[:2]
        or found.alpha != alpha
        or (again.dtype == np.uint8) > (pixels.dtype == np.uint8)
    ):
        return False
    if again.ndim == 3 and pixels.ndim == 2:  # grey as colours
        pixels = np.stack((pixels,) * 3, axis=-1)
    elif again.shape[2:] == (4,) and pixels.shape[2:] == (2,):
        pixels = pixels[..., [0, 0, 0, 1]]
    return again.shape == pixels.shape and (kind in _LOSSY or np.array_equal(again, pixels))


def read_array(path: Path) -> np.ndarray:
    """The array in a .npy file. Raises ValueError where it holds none, OSError where it cannot be read."""
    form = np.lib.format
    try:
        with open_regular(path) as file:
            if file.read(4) == b"PK\3\4":
                raise ValueError("it is an archive of several arrays")
            file.seek(0)
            version = form.read_magic(file)
            # NumPy has a third version, for names of fields beyond Latin-1; numbers have no fields
            header = form.read_array_header_1_0 if version == (1, 0) else form.read_array_header_2_0
            shape, _, dtype = header(file)
            there = os.fstat(file.fileno()).st_size - file.tell()
            needed = math.prod(shape) * dtype.itemsize
            if min(shape, default=0) < 0 or needed > there:
                claim = f"{dtype} of shape {shape}, {needed} bytes"
                raise ValueError(f"its header claims {claim}, and {there} follow; the file is damaged or cut off")
            deep.check_memory(path, needed)
            file.seek(0)
            array: np.ndarray = np.load(file, allow_pickle=False)
    except OSError as error:
        _name(error, path)
        raise
    except MemoryError:
        raise
    except Exception as error:
        # NOTE: damaged headers make NumPy raise almost anything, some of it on several lines
        raise ValueError(f"{path} is not a .npy file of numbers: {' '.join(str(error).split())}") from error
    return array


def _pillow() -> tuple[Any, Any]:
    """Pillow's Image and ImageOps. Raises ImportError with the command that installs it."""
    try:
        from PIL import Image, ImageOps
    except ImportError as error:
        raise ImportError("pictures need Pillow: pip install 'leanconv[pictures]' (.npy files do without)") from error
    return Image, ImageOps
