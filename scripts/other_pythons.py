"""Run the host half's tests on other Pythons, without PyTorch: ``python scripts/other_pythons.py 3.10 3.13``.

An interpreter is looked for on the PATH and among those of pyenv. One that is not installed is named and left out. Each
gets a virtual environment of its own, ``.venv-<version>``.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
#: What a call on the host goes through, and the CPU engine.
TESTS = ("tests/api/test_api.py", "tests/api/test_options.py", "tests/api/test_imports.py", "tests/cpu")


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


def tested(version: str) -> bool:
    """Whether the tests pass on a version; True where it is not installed."""
    python = interpreter(version)
    if python is None:
        print(f"Python {version} is not installed here: left out")
        return True
    folder = ROOT / f".venv-{version}"
    own = folder / "bin" / "python"
    if not own.exists():
        subprocess.run([python, ROOT / "scripts/make_venv.py", folder], check=True)
    install = [
        own,
        "-m",
        "pip",
        "--disable-pip-version-check",
        "install",
        "-q",
        "--no-compile",
        "-e",
        f"{ROOT}[test-host]",
    ]
    subprocess.run(install, check=True)
    print(f"Python {version}:", flush=True)
    # the emulator needs CUDA's headers, which this environment does not have
    chosen = ["-m", "not exhaustive", "-k", "not emulator"]
    run = [own, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-n", "2", *chosen, "-r", "fE", *TESTS]
    return subprocess.run(run, cwd=ROOT, check=False).returncode == 0


def main() -> int:
    """Test each version; 1 where one fails."""
    return int(not all([tested(version) for version in sys.argv[1:]]))


if __name__ == "__main__":
    sys.exit(main())
