"""Pictures and .npy files in and out, and one filter over them: what ``leanconv filter`` does.

Pictures are read and written by Pillow, which is imported only for them.
"""

from __future__ import annotations

import math
import os
import struct
import warnings
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from leanconv.dtypes import FILTERS
from leanconv.images.api import filter2d
from leanconv.options import border_name
from leanconv.runtime.files import open_regular, whole

#: Integers of at most 16 bits are exact in float32; they are filtered in it, then rounded and clipped to their range.
_NARROW = ("uint8", "int8", "uint16", "int16")


@dataclass(frozen=True)
class Picture:
    """Planes (…, height, width) and what else a file held. ``alpha`` (height, width) is carried along unfiltered.

    ``channels_last`` says that it came as an array (height, width, channels), and becomes one again.
    """

    planes: np.ndarray
    alpha: np.ndarray | None = None
    icc_profile: bytes | None = None
    channels_last: bool = False

    def array(self) -> np.ndarray:
        """All of it as one array: the planes, then the transparency; or these as channels, where they came so."""
        planes = self.planes
        if self.alpha is not None:
            planes = np.concatenate([planes.reshape(-1, *self.alpha.shape), self.alpha[None]])
        return np.ascontiguousarray(np.moveaxis(planes, 0, -1)) if self.channels_last else planes


def filtered(
    picture: Picture,
    kernel: np.ndarray,
    *,
    border: str | int = "reflect101",
    value: float = 0,
    delta: float = 0,
    absolute: bool = False,
    device: str | None = None,
) -> Picture:
    """Every plane filtered by `leanconv.filter2d`; the planes keep their dtype.

    ``absolute`` takes absolute values, after which ``delta`` is added. Raises ValueError for a dtype that cannot be
    filtered, or an int32 picture with a kernel that has fractions, and whatever filter2d raises.
    """
    planes = picture.planes
    dtype = planes.dtype
    narrow = dtype.name in _NARROW
    if not narrow and dtype.name not in FILTERS:
        *most, last = FILTERS
        raise ValueError(f"dtype {dtype} cannot be filtered; it must be {', '.join((*_NARROW, *most))} or {last}")
    for name, number in (("delta", delta), ("value", value)):
        if dtype.kind in "iu" and not math.isfinite(number):
            raise ValueError(f"{name}={number} is no number that pixels of {dtype} can have; give a finite one")
    work = planes.astype(np.float32) if narrow else planes.astype(dtype.newbyteorder("="), copy=False)
    weights = kernel.astype(work.dtype)
    if work.dtype == np.int32 and not np.array_equal(weights, kernel):
        raise ValueError("the image is int32 and the kernel has fractions; convert the image to float32 first")
    shift = 0 if absolute else delta
    result = filter2d(work, weights, border=border_name(border), value=value, delta=shift, device=device)
    if absolute:
        result = np.abs(result) + result.dtype.type(delta)
    if narrow:
        limits = np.iinfo(dtype)
        result = np.clip(np.rint(result), limits.min, limits.max).astype(dtype)
    return replace(picture, planes=result)


def read(path: Path) -> Picture:
    """A picture, or the array in a .npy file: (…, height, width), or (height, width, 3 or 4) with its channels last.

    Grey pictures give one plane of 8 or 16 bits, colour ones three of 8 bits (palettes and CMYK become RGB); pictures
    of 32-bit numbers keep them. A fourth channel is transparency. Raises ValueError for an unknown format, a damaged
    file, and one that Pillow would read with fewer bits than it has; OSError for an unreadable file, ImportError where
    Pillow is missing.
    """
    if path.suffix == ".npy":
        array = read_array(path)
        if array.ndim < 2:
            raise ValueError(f"{path} holds an array of shape {array.shape}; it must be (..., height, width)")
        if array.ndim == 3 and array.shape[-1] in (3, 4):
            planes = np.ascontiguousarray(np.moveaxis(array, -1, 0))
            return Picture(planes[:3], planes[3] if len(planes) == 4 else None, channels_last=True)
        return Picture(array)
    image, kind, icc_profile = _decoded(path)
    if image.mode.startswith("I;16") or (image.mode == "I" and kind == "PNG"):
        # older releases of Pillow open PNG of 16 bits in 32
        return Picture(np.asarray(image).astype(np.uint16), icc_profile=icc_profile)
    if image.mode in ("I", "F"):
        return Picture(np.array(image), icc_profile=icc_profile)
    transparent = image.mode in ("LA", "PA", "RGBA", "La", "RGBa") or "transparency" in image.info
    grey = image.mode in ("1", "L", "LA", "La")
    if image.mode == "CMYK":
        icc_profile = None  # it describes inks
    pixels = np.asarray(image.convert(("LA" if grey else "RGBA") if transparent else ("L" if grey else "RGB")))
    if pixels.ndim == 2:
        return Picture(pixels, None, icc_profile)
    planes = np.ascontiguousarray(np.moveaxis(pixels, -1, 0))
    alpha = planes[-1] if transparent else None
    planes = planes[:-1] if transparent else planes
    return Picture(planes[0] if grey else planes, alpha, icc_profile)


def _decoded(path: Path) -> tuple[Any, str, bytes | None]:
    """Pillow's image, upright, its format and its colour profile. Raises ValueError for what `read` refuses."""
    pillow, operations = _pillow()
    file = open_regular(path)
    try:
        # the user has named this file, and Pillow refuses twice as many pixels as it warns of
        with file, warnings.catch_warnings():
            warnings.simplefilter("ignore", pillow.DecompressionBombWarning)
            with pillow.open(file) as image:
                frames, kind, icc_profile = getattr(image, "n_frames", 1), image.format, image.info.get("icc_profile")
                bits, mode = _bits(file, image), image.mode
                if frames == 1:
                    image = operations.exif_transpose(image)
    except pillow.DecompressionBombError as error:
        raise ValueError(f"{path}: {error}; cut it into smaller pictures, or convert it to a .npy file") from error
    except MemoryError:
        raise
    except Exception as error:
        # NOTE: damaged files make Pillow raise almost anything: SyntaxError, struct.error, EOFError, IndexError, ...
        if isinstance(error, OSError) and error.errno is not None:
            raise
        raise ValueError(f"{path} cannot be read as a picture: {error}") from error
    if frames > 1:
        raise ValueError(f"{path} holds {frames} pictures, and only one can be filtered")
    if bits > 8 and mode in ("L", "LA", "La", "P", "PA", "RGB", "RGBA", "RGBa", "RGBX", "CMYK", "YCbCr", "LAB", "HSV"):
        raise ValueError(
            f"{path} has {bits} bits in each channel, of which Pillow reads 8 ({mode}); convert it to 8 bits, or to a "
            ".npy file of uint16 (height, width, channels), which keeps 16"
        )
    return image, kind, icc_profile


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
        lines = (line.partition(b"#")[0] for line in head[: 1 << 12].splitlines())
        return int(b" ".join(lines).split()[3]).bit_length()  # the magic number, width, height, the largest value
    if image.format == "JPEG2000":
        size = head.index(b"\xff\x4f\xff\x51")  # start of the codestream, then its sizes
        (channels,) = struct.unpack_from(">H", head, size + 40)
        return max(head[size + 42 + 3 * channel] & 0x7F for channel in range(channels)) + 1
    return 8


def write(path: Path, picture: Picture) -> None:
    """Write a picture in the format that the suffix names, or as the array that it is. It appears whole or not at all.

    Raises ValueError where the format cannot hold it, OSError where the file cannot be written.
    """
    if path.suffix == ".npy":
        with whole(path) as temporary:
            np.save(temporary, picture.array())
        return
    pillow, _ = _pillow()
    if path.suffix.lower() not in pillow.registered_extensions():
        raise ValueError(f"{path}: the suffix {path.suffix!r} names no format that can be written; try .png or .npy")
    planes = picture.planes
    if not (planes.ndim == 2 or (planes.ndim == 3 and len(planes) == 3 and planes.dtype == np.uint8)):
        raise ValueError(f"{path}: {planes.dtype} of shape {planes.shape} makes no picture; write it to a .npy file")
    if planes.dtype.name not in ("uint8", "uint16", "int32", "float32"):
        raise ValueError(f"{path}: pixels of dtype {planes.dtype} make no picture; write them to a .npy file")
    stack = [*(planes if planes.ndim == 3 else [planes])] + ([] if picture.alpha is None else [picture.alpha])
    image = pillow.fromarray(stack[0] if len(stack) == 1 else np.ascontiguousarray(np.stack(stack, axis=-1)))
    options: dict[str, Any] = {"icc_profile": picture.icc_profile} if picture.icc_profile else {}
    if path.suffix.lower() in (".jpg", ".jpeg"):
        options |= {"quality": 95}
    with whole(path) as temporary:
        try:
            image.save(temporary, **options)
        except (OSError, KeyError, ValueError, struct.error, OverflowError) as error:
            if isinstance(error, OSError) and error.errno is not None:
                raise
            advice = f"{path.suffix} may not hold {planes.dtype}"
            if picture.alpha is not None:
                advice += " with transparency; write a .png file, which holds it, or a picture without"
            else:
                advice += "; make it uint8 or uint16 first, or write a .tif or a .npy file"
            raise ValueError(f"{path}: {error.args[0] if error.args else error}: {advice}") from error


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
            file.seek(0)
            array: np.ndarray = np.load(file, allow_pickle=False)
    except (OSError, MemoryError):
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
        raise ImportError("pictures need Pillow: pip install 'leanconv[bench]' (.npy files do without it)") from error
    return Image, ImageOps
