"""The CUDA driver, as far as leanconv needs it: some twenty calls of libcuda through ctypes.

Why not cuda.core or cuda.bindings here: importing them takes longer than a first call from a warm disk cache, and their
launches are hardly cheaper. Explored (c158035, e070a85): imports 160 and 60 ms, this 2 ms; launches 4.2 and 4.3 µs of
host time, a prepared ctypes call 4.8, most of it the driver's own. Compiling goes through cuda.core.
"""

from __future__ import annotations

import ctypes
import sys
from ctypes import POINTER, byref, c_char_p, c_int, c_size_t, c_uint, c_uint64, c_void_p
from functools import cache
from typing import Any

from leanconv.runtime.errors import LeanconvError

#: Oldest driver interface that is supported (CUDA 12.0, driver 525).
MINIMUM_VERSION = 12000

SUCCESS = 0
OUT_OF_MEMORY = 2
#: errors of loading a cubin that mean: made for another GPU, or by a compiler newer than the driver
_REFUSED_IMAGE = (200, 209, 218, 222)

_SIGNATURES: dict[str, tuple[Any, ...]] = {
    "cuInit": (c_uint,),
    "cuDriverGetVersion": (POINTER(c_int),),
    "cuDeviceGetCount": (POINTER(c_int),),
    "cuDeviceGet": (POINTER(c_int), c_int),
    "cuDeviceGetName": (c_char_p, c_int, c_int),
    "cuDeviceGetAttribute": (POINTER(c_int), c_int, c_int),
    "cuDevicePrimaryCtxRetain": (POINTER(c_void_p), c_int),
    "cuCtxGetCurrent": (POINTER(c_void_p),),
    "cuCtxPushCurrent_v2": (c_void_p,),
    "cuCtxPopCurrent_v2": (POINTER(c_void_p),),
    "cuModuleLoadData": (POINTER(c_void_p), c_char_p),
    "cuModuleGetFunction": (POINTER(c_void_p), c_void_p, c_char_p),
    "cuFuncSetAttribute": (c_void_p, c_int, c_int),
    "cuMemAlloc_v2": (POINTER(c_uint64), c_size_t),
    "cuMemFree_v2": (c_uint64,),
    "cuMemcpyHtoD_v2": (c_uint64, c_void_p, c_size_t),
    "cuMemcpyDtoH_v2": (c_void_p, c_uint64, c_size_t),
    "cuLaunchKernelEx": (c_void_p,) * 4,
    "cuTensorMapEncodeTiled": (c_void_p, c_int, c_uint, *(c_void_p,) * 5, *(c_int,) * 4),
    "cuTensorMapEncodeIm2col": (c_void_p, c_int, c_uint, *(c_void_p,) * 5, c_uint, c_uint, c_void_p, *(c_int,) * 4),
    "cuModuleUnload": (c_void_p,),
    "cuThreadExchangeStreamCaptureMode": (POINTER(c_int),),
    "cuStreamIsCapturing": (c_void_p, POINTER(c_int)),
    "cuStreamSynchronize": (c_void_p,),
    "cuGetErrorName": (c_int, POINTER(c_char_p)),
    "cuGetErrorString": (c_int, POINTER(c_char_p)),
}


class CudaError(LeanconvError, RuntimeError):
    """A call of the CUDA driver failed."""


class CudaUnavailableError(CudaError):
    """The GPU cannot be used: no driver, too old a driver, no GPU, or no compiler. The message says what to do."""


class OutOfMemoryError(CudaError, MemoryError):
    """The GPU has too little free memory; the message gives the number of bytes."""


def _open_library() -> ctypes.CDLL:
    return ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")


class Driver:
    """The driver's functions by name (``driver.cuInit``), opened and initialised."""

    def __init__(self) -> None:
        advice = "NumPy arrays run on the CPU without a GPU"
        try:
            library = _open_library()
        except OSError as error:
            raise CudaUnavailableError(
                f"no NVIDIA driver was found ({error}); install the driver of this machine's GPU. {advice}."
            ) from None
        for name, types in _SIGNATURES.items():
            try:
                function = getattr(library, name)
            except AttributeError:
                raise CudaUnavailableError(
                    f"the NVIDIA driver is too old: it lacks {name}; update it. {advice}."
                ) from None
            function.argtypes = types
            function.restype = c_int
            setattr(self, name, function)
        number = c_int()
        code = self.call("cuDriverGetVersion", byref(number))
        #: CUDA version that the driver supports, 1000 * major + 10 * minor
        self.version = number.value
        if code != SUCCESS or self.version < MINIMUM_VERSION:
            raise CudaUnavailableError(
                f"the NVIDIA driver is too old: it supports CUDA {version_text(self.version)}, and leanconv needs "
                f"{version_text(MINIMUM_VERSION)} or newer; update the driver. {advice}."
            )
        code = self.call("cuInit", 0)
        count = c_int()
        if code == SUCCESS:
            code = self.call("cuDeviceGetCount", byref(count))
        if code != SUCCESS or not count.value:
            why = self.describe(code) if code != SUCCESS else "it lists no device"
            raise CudaUnavailableError(f"the NVIDIA driver sees no usable GPU: {why}. {advice}.")
        self.device_count = count.value

    def unconverted(self, name: str) -> Any:
        """The function, for ctypes objects only, without conversion, which takes time in each call."""
        pointer = ctypes.cast(getattr(self, name), c_void_p).value or 0
        return ctypes.CFUNCTYPE(c_int)(pointer)

    def call(self, name: str, *arguments: Any) -> int:
        return int(getattr(self, name)(*arguments))

    def check(self, name: str, *arguments: Any) -> None:
        """Call a function; raises CudaError naming it when it fails."""
        code = self.call(name, *arguments)
        if code != SUCCESS:
            self.fail(code, name)

    def fail(self, code: int, name: str) -> None:
        """Raise the exception for error ``code`` of function ``name``."""
        message = f"{name} failed: {self.describe(code)}"
        if code in _REFUSED_IMAGE:
            message += (
                f". The driver supports CUDA {version_text(self.version)}: if the compiler is newer, update the driver "
                "or install the matching extra, leanconv[cu12] or leanconv[cu13]"
            )
        raise (OutOfMemoryError if code == OUT_OF_MEMORY else CudaError)(message)

    def describe(self, code: int) -> str:
        """Name and sentence of an error code."""
        name, text = c_char_p(), c_char_p()
        self.call("cuGetErrorName", code, byref(name))
        self.call("cuGetErrorString", code, byref(text))
        return f"{(name.value or b'error').decode()} ({code}): {(text.value or b'no description').decode()}"


def version_text(number: int) -> str:
    """``13.0`` for 13000."""
    return f"{number // 1000}.{number % 1000 // 10}"


@cache
def driver() -> Driver:
    """The driver of this process. Raises CudaUnavailableError where it is missing, too old, or sees no GPU."""
    return Driver()
