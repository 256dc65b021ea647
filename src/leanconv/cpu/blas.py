"""How many threads BLAS takes for the CPU engine's matrix products: one, except for a product that is large.

The products of a layer are those of cache-sized blocks, most of them under a millisecond. The threads of one product
wait for each other, so where a core is busy with something else a product takes until that core is free.
"""

from __future__ import annotations

import os
import threading
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
from threadpoolctl import ThreadpoolController

from leanconv.runtime.threads import cores

#: Multiply-adds, counted as two operations, from which a product takes several threads.
#: Explored (two busy cores, 9359ac7), milliseconds with one thread and with two: 1e6 operations 0.02 and 3.9, 7e7 2.7
#: and 4.1, 2.4e8 9 and 70, 4.5e8 16 and 13, 1.8e9 52 and 35.
LEAST_WORK = 1_000_000_000


#: Operations of all products of a call below which BLAS takes one thread by itself: OpenBLAS splits a product of a
#: matrix and a vector from 9216 elements on, of two matrices from 262144 multiply-adds on. Such a call is spared
#: setting the number.
TINY_WORK, TINY_MATRICES = 2 * 9216, 2 * 262144


def numpys_libraries() -> list[Any]:
    """The BLAS that NumPy calls, as threadpoolctl sees it; every BLAS of the process where that cannot be told."""
    libraries = ThreadpoolController().select(user_api="blas").lib_controllers
    # a wheel brings its own, beside those of SciPy and PyTorch
    return [each for each in libraries if "numpy" in str(getattr(each, "filepath", ""))] or libraries


class _Numbers:
    """The numbers of threads of some libraries, and how many calls hold them at one."""

    def __init__(self, libraries: list[Any]) -> None:
        self.libraries, self.inside = libraries, 0
        #: the numbers before the first call
        self.before: list[int] = []

    def enter(self) -> None:
        if self.inside == 0:
            self.before = [library.num_threads for library in self.libraries]
            self.change(self.before, self.ones)
        self.inside += 1

    def leave(self) -> None:
        self.inside -= 1
        if self.inside == 0:
            self.change(self.ones, self.before)

    @property
    def ones(self) -> list[int]:
        return [1] * len(self.libraries)

    def change(self, expected: list[int], wanted: list[int]) -> None:
        """Change the numbers from ``expected`` to ``wanted``. One that somebody else has set is left."""
        for library, now, then in zip(self.libraries, expected, wanted, strict=True):
            if now != then and library.num_threads == now:
                # NOTE: threadpoolctl 3.8 lets only the first thread set OpenBLAS' number, until that control is
                # cleared; but here any thread may be the last to leave
                clear = getattr(library, "clear_controlling_thread", None)
                if clear is not None:
                    clear(force=True)
                library.set_num_threads(then)
                if clear is not None:
                    clear(force=True)


class OneThread:
    """A context in which BLAS takes one thread, and `matmul` more for a large product.

    Most builds of BLAS have one number of threads for the process. The first call to enter stores it, the last to leave
    restores it; until then BLAS calls of the caller's other threads find one thread too. OpenBLAS on OpenMP has a
    number for each thread, and so have the calls. A number that somebody else has set meanwhile stays. Where BLAS has
    no such number (Accelerate) nothing happens.
    """

    def __init__(self) -> None:
        self._lock, self._local = threading.Lock(), threading.local()
        self._shared: _Numbers | None = None
        self._own: list[Any] = []
        self._cores = 1

    def _find(self) -> _Numbers:
        """The search for libraries takes milliseconds, once."""
        libraries = numpys_libraries()
        own = [each for each in libraries if each.internal_api == "openblas" and each.threading_layer == "openmp"]
        self._own, self._cores = own, cores()
        self._shared = _Numbers([each for each in libraries if each not in own])
        return self._shared

    def _numbers_of_this_thread(self) -> _Numbers:
        if not hasattr(self._local, "numbers"):
            self._local.numbers = _Numbers(self._own)
        return self._local.numbers

    def __enter__(self) -> None:
        with self._lock:
            (self._shared or self._find()).enter()
        if self._own:
            self._numbers_of_this_thread().enter()

    def __exit__(self, *exception: object) -> None:
        if self._own:
            self._numbers_of_this_thread().leave()
        with self._lock:
            assert self._shared is not None
            self._shared.leave()

    def after_fork(self) -> None:
        """In the new process, where the calls of other threads are not running."""
        self._lock = threading.Lock()
        if self._shared is not None and self._shared.inside:
            self._shared.inside = 1
            self._shared.leave()

    def matmul(self, a: np.ndarray, b: np.ndarray, out: np.ndarray | None = None) -> np.ndarray:
        """``np.matmul``; one of `LEAST_WORK` or more takes the cores that the process may use, if no other call runs,
        but not more than BLAS would have taken before."""
        if 2 * a.shape[-2] * a.shape[-1] * b.shape[-1] < LEAST_WORK or self._shared is None:
            return np.matmul(a, b, out=out)
        groups = [each for each in (self._shared, self._numbers_of_this_thread()) if each.inside == 1]
        several = [[min(self._cores, number) for number in each.before] for each in groups]
        with self._lock:
            for each, numbers in zip(groups, several, strict=True):
                each.change(each.ones, numbers)
        try:
            return np.matmul(a, b, out=out)
        finally:
            with self._lock:
                for each, numbers in zip(groups, several, strict=True):
                    each.change(numbers, each.ones)


ONE_THREAD = OneThread()
matmul = ONE_THREAD.matmul
_NOTHING: AbstractContextManager[None] = nullcontext()


def one_thread(work: int, matrices: bool = False) -> AbstractContextManager[None]:
    """`ONE_THREAD` for products of ``work`` operations in all; a context that does nothing where that is tiny.

    ``matrices``: none is a product with a vector.
    """
    return _NOTHING if work < (TINY_MATRICES if matrices else TINY_WORK) else ONE_THREAD


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=ONE_THREAD.after_fork)
