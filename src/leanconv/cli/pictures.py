"""Pictures and .npy files in and out, and one filter over them: what ``leanconv filter`` does.

Pictures are read and written by Pillow, which is imported only for them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from leanconv.api import filter2d
from leanconv.call.arguments import border_name
from leanconv.dtypes import FILTERS
from leanconv.runtime.files import whole

#: Integers of at most 16 bits are exact in float32; they are filtered in it, then rounded and clipped to their range.
_NARROW = ("uint8", "int8", "uint16", "int16")


@dataclass(frozen=True)
class Picture:
    """Planes (…, height, width) and what else a file held. ``alpha`` (height, width) is carried along unfiltered."""

    planes: np.ndarray
    alpha: np.ndarray | None = None
    icc_profile: bytes | None = None


def filtered(
    picture: Picture,
    kernel: np.ndarray,
    *,
    border: str = "reflect101",
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
    """A picture, or the array in a .npy file, which must be (…, height, width).

    Grey pictures give one plane of 8 or 16 bits, colour ones three of 8 bits (palettes and CMYK become RGB); pictures
    of 32-bit numbers keep them. Raises ValueError for an unknown format, OSError for an unreadable file, ImportError
    where Pillow is missing.
    """
    if path.suffix == ".npy":
        array = read_array(path)
        if array.ndim < 2:
            raise ValueError(f"{path} holds an array of shape {array.shape}; it must be (..., height, width)")
        return Picture(array)
    from PIL import ImageOps

    with _pillow().open(path) as image:
        frames = getattr(image, "n_frames", 1)
        if frames > 1:
            raise ValueError(f"{path} holds {frames} pictures, and only one can be filtered")
        icc_profile = image.info.get("icc_profile")
        kind = image.format
        image = ImageOps.exif_transpose(image)
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


def write(path: Path, picture: Picture) -> None:
    """Write a picture in the format that the suffix names, or its planes as .npy. The file appears whole or not at all.

    Raises ValueError where the format cannot hold it, OSError where the file cannot be written.
    """
    if path.suffix == ".npy":
        with whole(path) as temporary:
            np.save(temporary, picture.planes)
        return
    pillow = _pillow()
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
        except (OSError, KeyError) as error:
            if isinstance(error, OSError) and error.errno is not None:
                raise
            raise ValueError(f"{path}: {error.args[0] if error.args else error}") from error


def read_array(path: Path) -> np.ndarray:
    """The array in a .npy file. Raises ValueError where it holds none, OSError where it cannot be read."""
    try:
        array = np.load(path, allow_pickle=False)
    except (ValueError, EOFError) as error:
        raise ValueError(f"{path} is not a .npy file of numbers: {error}") from error
    if not isinstance(array, np.ndarray):
        raise ValueError(f"{path} is not a .npy file but an archive of several arrays")
    return array


def _pillow() -> Any:
    try:
        from PIL import Image
    except ImportError as error:
        raise ImportError("pictures need Pillow: pip install pillow (.npy files do without it)") from error
    return Image
