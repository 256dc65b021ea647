"""The only check whether there is a usable GPU."""

from __future__ import annotations

from leanconv.runtime import launch
from leanconv.runtime.driver import CudaUnavailableError


def why_no_gpu(index: int = 0) -> str | None:
    """Why GPU number ``index`` cannot be used: no driver, too old a driver, no GPU, too old a GPU. None where it can.

    Opens the GPU. Raises CudaError where that fails for another reason.
    """
    try:
        launch.open_device(index)
    except CudaUnavailableError as error:
        return str(error)
    return None
