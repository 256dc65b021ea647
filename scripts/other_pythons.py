"""Run the host half's tests on other Pythons and other versions of what leanconv needs, from the wheel that is built.

``python scripts/other_pythons.py 3.10+lowest 3.13`` runs two environments, and ``all`` every one of `MATRIX`. A name is
a version of Python and settings: ``lowest`` takes the lowest stated version of every dependency, ``numpyVERSION`` one
of NumPy, ``cu12`` and ``cu13`` compile kernels with that compiler, ``torch`` runs the tests of leanconv.torch.

An sdist is built from the checkout, and a wheel from it. Each environment, ``.venv-<name>``, has this wheel installed,
and the tests run on it, not on the checkout's sources. What is not installed here is named and left out.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
#: What `all` runs. PyTorch's oldest and newest take gigabytes each: its builds for the CPU are not on PyPI.
MATRIX = (
    "3.10+lowest", "3.10", "3.11+numpy1.26", "3.12", "3.12+numpy1.26", "3.13", "3.14", "3.11+cu12", "3.11+cu12+lowest",
    "3.11+cu13", "3.11+cu13+lowest", "3.11+torch+lowest", "3.13+torch",
)  # fmt: skip
#: What a call on the host goes through, and the CPU engine.
TESTS = (
    "tests/api/test_api.py", "tests/api/test_options.py", "tests/api/test_imports.py", "tests/cpu",
)  # fmt: skip
#: Kernels of several families, as `leanconv explain --compile` takes them: an H200's and one that every GPU runs.
KERNELS = (
    "conv:n8,c64,h56,k64,r3,pad1,NHWC,bias,scale,add,relu", "conv:n2,c3,h9,k4,r3,bias", "filter:480x640,7x7",
)  # fmt: skip
DIST = ROOT / "dist"


def interpreter(version: str) -> Path | None:
    """The interpreter of a version such as 3.10, if there is one that runs."""
    found = [Path(path) for path in [shutil.which(f"python{version}")] if path]
    found += sorted(Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")).glob(f"versions/{version}.*/bin/python"))
    for path in found:
        done = subprocess.run(
            [path, "-c", "import sys; print(sys.version)"], capture_output=True, text=True, check=False
        )
        if done.returncode == 0 and done.stdout.startswith(f"{version}."):
            return path
    return None


def floors(text: str) -> list[str]:
    """What users install of a pyproject.toml, pinned to the lowest version that it states or to a repair of it; of two
    floors the higher.

    What tests need, which stands last, is taken as new as there is.

    >>> floors('a = ["x>=1.2,<2", "y>=3"]; b = ["x>=1.10", "z[w]>=4"]')
    ['x==1.10.*', 'y==3.0.*', 'z==4.0.*']
    """
    lowest: dict[str, str] = {}
    text = text.partition("\ntest-host = ")[0].partition("\ndependencies = ")[2] or text
    for name, version in re.findall(r'"([\w-]+)(?:\[\w+\])?>=([\d.]+)[^"]*"', text):
        numbers = [[int(part) for part in each.split(".")] for each in (version, lowest.get(name, "0"))]
        lowest[name] = version if numbers[0] > numbers[1] else lowest[name]
    return [f"{name}=={version}{'.0' * ('.' not in version)}.*" for name, version in lowest.items()]


def run(*command: object, **more: object) -> int:
    return subprocess.run([str(each) for each in command], check=False, **more).returncode  # type: ignore[call-overload]


def pip(python: Path, *arguments: object) -> None:
    options = "--disable-pip-version-check", "-q", "--no-compile"
    subprocess.run([str(each) for each in (python, "-m", "pip", "install", *options, *arguments)], check=True)


def wheel(python: Path) -> Path:
    """Build an sdist of the checkout and a wheel of the sdist."""
    shutil.rmtree(DIST, ignore_errors=True)
    pip(python, "hatchling>=1.26")
    build = "from hatchling.build import build_sdist; print(build_sdist('dist'))"
    DIST.mkdir()
    subprocess.run([python, "-c", build], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    (sdist,) = DIST.glob("*.tar.gz")
    command = [python, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", DIST, sdist]
    subprocess.run(command, check=True)
    return next(DIST.glob("*.whl"))


def lacking(built: Path, sources: Path = ROOT / "src") -> set[str]:
    """The files of the package that a wheel has not: a kernel, a table of measured times."""
    files = (path for path in (sources / "leanconv").rglob("*") if path.is_file() and path.suffix != ".pyc")
    with zipfile.ZipFile(built) as archive:
        return {path.relative_to(sources).as_posix() for path in files} - {*archive.namelist()}


def tested(name: str, built: list[Path]) -> bool:
    """Whether the tests pass in an environment; True where its Python is not installed."""
    version, *settings = name.split("+")
    python = interpreter(version)
    if python is None:
        print(f"{name}: Python {version} is not installed here: left out")
        return True
    folder = ROOT / f".venv-{name}"
    own = folder / "bin" / "python"
    if not own.exists():
        subprocess.run([python, ROOT / "scripts/make_venv.py", folder], check=True)
    if not built:
        built.append(wheel(own))
        if missing := lacking(built[0]):
            print(f"{built[0].name} has not", *sorted(missing))
            return False
    extras = [each for each in settings if each in ("cu12", "cu13", "torch")]
    pins = [f"numpy=={each.removeprefix('numpy')}.*" for each in settings if each.startswith("numpy")]
    if "lowest" in settings:
        # the two compilers' extras state different ones of the same packages
        other = rf"^{'cu13' if 'cu12' in settings else 'cu12'} = .*$"
        pins = floors(re.sub(other, "", (ROOT / "pyproject.toml").read_text(encoding="utf-8"), flags=re.MULTILINE))
    constraints = folder / "pins.txt"
    constraints.write_text("\n".join(pins))
    pip(own, "-c", constraints, f"leanconv[{','.join(['test-host', *extras])}] @ {built[0].as_uri()}")
    pip(own, "--force-reinstall", "--no-deps", built[0])  # an earlier one has the same version
    where = subprocess.check_output([own, "-I", "-c", "import leanconv; print(leanconv.__file__)"], text=True)
    assert Path(where).is_relative_to(folder), f"{where} is not that of the wheel"
    print(f"{name}:", flush=True)
    compiles = {each for each in settings if each.startswith("cu")}
    if compiles:
        empty = {**os.environ, "LEANCONV_CACHE_DIR": str(folder / "cache"), "LEANCONV_NO_CACHE": "1"}
        command = [folder / "bin" / "leanconv", "explain", "--compile"]
        return not any([run(*command, kernel, env=empty, cwd=folder) for kernel in KERNELS])
    # the emulator needs CUDA's headers, which this environment does not have
    tests: Sequence[str] = ("tests/torch",) if "torch" in settings else TESTS
    chosen = ["-m", "not exhaustive", "-k", "not emulator", "-o", "pythonpath=."]
    return not run(
        own, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-n", "2", *chosen, "-r", "fE", *tests, cwd=ROOT,
        env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
    )  # fmt: skip


def main() -> int:
    """Test each environment; 1 where one fails."""
    names, built = sys.argv[1:], []
    failed = [name for name in (MATRIX if names == ["all"] else names) if not tested(name, built)]
    if failed:
        print("failed:", *failed)
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
