"""What is installed, what works, and what to do about the rest: the findings that ``leanconv doctor`` prints.

It assumes nothing: that a kind of array works comes from running a small problem and checking the values.
"""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from importlib import import_module
from typing import Any, Literal

import numpy as np

import leanconv
from leanconv import api
from leanconv.bench.machine import installed_version
from leanconv.call.explain import NOMINAL
from leanconv.images.api import filter2d
from leanconv.kernels import ALGORITHMS
from leanconv.perf import tables
from leanconv.perf.tables import Table
from leanconv.plan import Target
from leanconv.problem import ConvProblem
from leanconv.runtime import bundle, cache, env, launch
from leanconv.runtime import compile as compiler
from leanconv.runtime.driver import CudaUnavailableError, driver, version_text
from leanconv.runtime.launch import why_no_gpu
from leanconv.tuning.verify import files, holding

#: Packages worth a line, each with the distributions that may bring it.
PACKAGES = (
    ("cuda-core", ("cuda-core",)),
    ("cuda-bindings", ("cuda-bindings",)),
    ("NVRTC", ("nvidia-cuda-nvrtc", "nvidia-cuda-nvrtc-cu12")),
    ("PyTorch", ("torch",)),
    ("CuPy", ("cupy-cuda13x", "cupy-cuda12x", "cupy")),
    ("Pillow", ("pillow",)),
    ("matplotlib", ("matplotlib",)),
    ("SciPy", ("scipy",)),
    ("OpenCV", ("opencv-python-headless", "opencv-python", "opencv-contrib-python-headless", "opencv-contrib-python")),
)

#: Architecture that kernels are compiled for where there is no GPU to ask.
_SOME_ARCH = "sm_80"


@dataclass(frozen=True)
class Finding:
    """One line. ``absent``: something is not there, which may be as wanted; ``broken``: it is there and fails."""

    name: str
    state: Literal["ok", "absent", "broken"]
    text: str
    #: what to do about it
    advice: str = ""


#: What to do about environment variables that say nothing that is known.
_SET = "set them to what they may say, or unset"
_FOLDER = "set LEANCONV_TUNING_DIR to a folder that can be written"
#: The version of what is not installed.
_NONE = "–"


def installed() -> list[tuple[str, str]]:
    """Names and versions of what matters here; a dash for what is not installed."""
    source = "" if installed_version("leanconv") else " (not installed: run from its source)"
    lines = [
        ("leanconv", leanconv.__version__ + source),
        ("Python", f"{platform.python_version()} on {platform.machine()}"),
        ("NumPy", np.__version__),
    ]
    for name, distributions in PACKAGES:
        versions = [f"{v} ({d})" if len(distributions) > 1 else v for d in distributions if (v := installed_version(d))]
        lines.append((name, ", ".join(versions) or _NONE))
    return lines


def examine() -> Iterator[Finding]:
    """Look at everything in turn; takes a few seconds, most of them for compiling a kernel."""
    if mistakes := env.mistakes():
        yield Finding("environment variables", "broken", "; ".join(mistakes), _SET)
    yield _checked("NumPy arrays on the CPU", _run)
    gpu = _gpu()
    yield gpu
    usable = gpu.state == "ok"
    compiles = _compiler(launch.open_device(0).target if usable else Target(_SOME_ARCH, 108), usable)
    yield compiles
    yield from _bundles()
    runs = usable and compiles.state == "ok"
    if runs:
        yield _checked("NumPy arrays on the GPU", lambda: _run(device="cuda"))
    else:
        first = gpu if not usable else compiles
        yield Finding("NumPy arrays on the GPU", "absent", f"device='cuda' needs what is missing at {first.name!r}")
    yield _torch(False, runs)
    yield _torch(True, runs)
    yield _cupy(runs)
    yield _store()
    yield _tables()
    yield _pictures()


def report() -> dict[str, Any]:
    """The same for programs: what is installed, None for what is not; all findings; whether none is broken."""
    findings = [asdict(finding) for finding in examine()]
    return {
        "installed": {name: None if version == _NONE else version for name, version in installed()},
        "findings": findings,
        "ok": all(finding["state"] != "broken" for finding in findings),
    }


def _checked(name: str, run: Callable[[], None]) -> Finding:
    """Run something that should work; an exception becomes the finding "broken"."""
    try:
        run()
    except Exception as error:
        # calls refuse a limit of workspace that is none
        advice = _SET if str(error) in env.mistakes() else "please report this, with what is above"
        return Finding(name, "broken", f"{type(error).__name__}: {error}", advice)
    return Finding(name, "ok", "a layer and a filter give the right values")


def _run(
    to: Callable[[np.ndarray], Any] = np.asarray, back: Callable[[Any], Any] = np.asarray, device: str | None = None
) -> None:
    """Run a layer and a filter on arrays of a library. Raises AssertionError unless the values are right."""
    from leanconv.bench.suites import dense_filter
    from leanconv.cpu import oracle

    random = np.random.default_rng(0)
    shapes = (2, 3, 17, 19), (5, 3, 3, 3), (33, 41), (5, 5)
    x, w, image, kernel = (random.standard_normal(shape, np.float32) for shape in shapes)
    layer, filtering = ConvProblem(2, 3, 17, 19, 5, 3, 3, padding=(1, 1, 1, 1)), dense_filter(1, 33, 41, 5, 5)
    y = back(api.conv2d(to(x), to(w), padding=1, device=device))
    z = back(filter2d(to(image), to(kernel), device=device))
    answers = oracle.conv2d(layer, x, w), oracle.filter2d(filtering, image[None], kernel)[0]
    bounds = oracle.error_bound(layer, x, w), oracle.filter_error_bound(filtering, image[None], kernel)
    for name, found, answer, bound in zip(("conv2d", "filter2d"), (y, z), answers, bounds, strict=True):
        if not (error := oracle.relative_error(found, answer)) <= bound:
            raise AssertionError(f"{name} has a relative error of {error:.1e}, and {bound:.1e} is allowed")


def _gpu() -> Finding:
    try:
        if why := why_no_gpu():
            return Finding("GPU", "absent", why)
        devices = ((why_no_gpu(i) or launch.open_device(i)) for i in range(driver().device_count))
        names = "; ".join(d if isinstance(d, str) else f"{d.name} ({d.target.arch})" for d in devices)
    except Exception as error:
        return Finding("GPU", "broken", f"{type(error).__name__}: {error}", "reinstall the NVIDIA driver")
    return Finding("GPU", "ok", f"{names}; the driver supports CUDA {version_text(driver().version)}")


def _compiler(target: Target, needed: bool) -> Finding:
    """Whether NVRTC is there, and whether it compiles a kernel for the target."""
    name = "compiling kernels"
    advice = f"pip install 'leanconv[{'cu12' if needed and driver().version < 13000 else 'cu13'}]'"
    algorithm = ALGORITHMS[0]
    problem = ConvProblem(2, 3, 17, 19, 5, 3, 3, padding=(1, 1, 1, 1))
    plan = algorithm.plan(problem, next(iter(algorithm.configs(problem, target))), target)
    try:
        version = cache.compiler_version()
        begin = time.perf_counter()
        for each in plan.every_launch:
            compiler.compile_launch(each, target.arch)
    except CudaUnavailableError as error:
        text = str(error) if needed else "NVRTC or cuda-core is not installed, and without a GPU neither is needed"
        return Finding(name, "absent", text, advice if needed else "")
    except (ImportError, compiler.CompileError) as error:
        first = str(error).strip().partition("\n")[0]
        if isinstance(error, ImportError):
            return Finding(name, "absent", f"cuda-core cannot be imported ({first})", advice if needed else "")
        return Finding(name, "broken", f"NVRTC refused a kernel for {target.arch}: {first}", advice)
    seconds = time.perf_counter() - begin
    return Finding(name, "ok", f"{version.partition('.dist')[0]} took {seconds:.1f} s for {target.arch}")


#: What libraries on a GPU need besides themselves.
_NEEDS = "they need the GPU and the compiler; see there"


def _torch(on_gpu: bool, usable: bool) -> Finding:
    name = f"PyTorch tensors on the {'GPU' if on_gpu else 'CPU'}"
    if installed_version("torch") is None:
        return Finding(name, "absent", "PyTorch is not installed", "pip install 'leanconv[torch]', if you use it")
    if on_gpu and not usable:
        return Finding(name, "absent", _NEEDS)
    if not on_gpu:
        return _checked(name, lambda: _run(import_module("torch").from_numpy))
    torch = import_module("torch")
    if not torch.cuda.is_available():
        advice = "install a CUDA build of PyTorch that your driver supports, from pytorch.org"
        return Finding(name, "absent", f"PyTorch {torch.__version__} sees no GPU", advice)
    return _checked(name, lambda: _run(lambda a: torch.from_numpy(a).cuda(), lambda y: np.asarray(y.cpu())))


def _cupy(usable: bool) -> Finding:
    name = "CuPy arrays"
    try:
        cupy = import_module("cupy")
    except ImportError:
        advice = "pip install cupy-cuda13x or cupy-cuda12x, if you use it"
        return Finding(name, "absent", "CuPy is not installed", advice)
    except Exception as error:
        return Finding(name, "broken", f"import cupy raises {type(error).__name__}: {error}", "reinstall CuPy")
    if not usable:
        return Finding(name, "absent", _NEEDS)
    return _checked(name, lambda: _run(cupy.asarray, lambda y: np.asarray(y.get())))


def _tables() -> Finding:
    name, found = "tables of tuned problems", []
    if env.tuning_mode() == "off":
        return Finding(name, "absent", "LEANCONV_TUNING=off: the cost model alone chooses")
    folder = env.tuning_dir()
    if folder is not None and not next(each for each in (folder, *folder.parents) if os.path.exists(each)).is_dir():
        return Finding(name, "broken", f"{folder} is no folder: no table is read there, nor written", _FOLDER)
    for source, path in files():
        try:
            table = Table.read(path)
            lost = sum(table.get(key) is None for key in table)
            unread = f", {lost} of which cannot be read" if lost else ""
            found.append(f"{source} has {len(table)} for {table.gpu.get('name')}{unread}{_holding(table, source)}")
        except (OSError, ValueError) as error:
            return Finding(name, "broken", str(error), "move it away; leanconv tune writes a new one")
    return Finding(name, "ok", "; ".join(found) or "there is none; leanconv tune writes one")


def _holding(table: Table, source: str) -> str:
    """How many of a table's winners hold, and what of them is not looked at here: nothing is compiled."""
    text = holding(table, source)
    more = " (leanconv tune --verify compares their machine code)" if source == tables.SHIPPED_TABLE else ""
    return text and f", {text}{more}"


def _store() -> Finding:
    name = "cache of kernels"
    if env.cache_disabled():
        return Finding(name, "absent", "LEANCONV_NO_CACHE switches it off: every process compiles its kernels again")
    folder = cache.directory()
    if folder is None:
        text = "this user has no home folder to keep it in: every process compiles its kernels again"
        return Finding(name, "absent", text, "set LEANCONV_CACHE_DIR to a writable folder")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / f".doctor.{time.time_ns()}"
        probe.touch()
        probe.unlink()
    except OSError as error:
        advice = "set LEANCONV_CACHE_DIR to one that can"
        return Finding(name, "broken", f"{folder} cannot be written ({error})", advice)
    if env.cache_limit() == 0:
        text = "LEANCONV_CACHE_LIMIT=0 keeps no kernel: every process compiles its kernels again"
        return Finding(name, "absent", text, "leave it out, or set it to bytes such as 256MiB")
    (count, total), refused = cache.size(), cache.refused()
    text = f"{count} kernel{'s' * (count != 1)}, {total / 1e6:.1f} MB in {folder}"
    if refused:
        text += (
            f"; {refused} of its files {'are' if refused > 1 else 'is'} not loaded: links, devices, or of other users"
        )
        return Finding(name, "ok", text, "leanconv cache clear removes them")
    return Finding(name, "ok", text)


def _bundles() -> Iterator[Finding]:
    """Each bundle of kernels that LEANCONV_BUNDLE names."""
    arch = NOMINAL.arch if why_no_gpu() else launch.open_device(0).target.arch
    for path, found, why in bundle.examined(arch):
        name, told = "bundle of kernels", f"{path}: {why or found}"
        made = "" if found is None else f", made by leanconv {found.version} with CUDA {version_text(found.cuda)}"
        if why:
            yield Finding(name, "broken", told + made, "leanconv precompile --bundle makes one, on such a GPU")
        else:
            yield Finding(name, "ok", told + made)


def _pictures() -> Finding:
    name = "pictures and plots"
    missing = [name for name in ("pillow", "matplotlib") if installed_version(name) is None]
    if missing:
        text = f"{' and '.join(missing)} not installed: leanconv filter takes .npy files only, nothing is drawn"
        if missing == ["matplotlib"]:
            text = "matplotlib is not installed: bench --plot and the demo draw nothing"
        return Finding(name, "absent", text, "pip install 'leanconv[bench]'")
    text = "leanconv filter, bench --plot and the demo can read and draw them"
    missing = [name for name in ("tifffile", "imagecodecs") if installed_version(name) is None]
    if missing:
        text += f"; not colours of 16 bits nor of floats: {' and '.join(missing)} not installed"
    return Finding(name, "ok", text, "pip install 'leanconv[pictures]'" if missing else "")
