"""Make a virtual environment with pip in it: ``python3 make_venv.py FOLDER``. Needs nothing but Python.

Where the standard library's ensurepip is missing (Debian keeps it in the package python3-venv), pip comes from the
system's own pip or from virtualenv; where there is neither, the message says what to install.
"""

import os
import shutil
import subprocess
import sys
import venv


def works(folder: str) -> bool:
    """Whether the environment's pip runs."""
    python = os.path.join(folder, "bin", "python")
    done = subprocess.run([python, "-m", "pip", "--version"], capture_output=True, check=False)
    return done.returncode == 0


def with_ensurepip(folder: str) -> None:
    """As the standard library does it."""
    venv.EnvBuilder(with_pip=True, clear=True).create(folder)


def with_system_pip(folder: str) -> None:
    """An environment without pip, into which the system's pip puts one."""
    venv.EnvBuilder(with_pip=False, clear=True).create(folder)
    python = os.path.join(folder, "bin", "python")
    subprocess.run([sys.executable, "-m", "pip", "--python", python, "install", "-q", "pip"], check=True)


def with_virtualenv(folder: str) -> None:
    """By virtualenv, which brings its own pip."""
    subprocess.run([sys.executable, "-m", "virtualenv", "-q", "--clear", folder], check=True)


def main() -> int:
    """Try one way after the other."""
    if len(sys.argv) != 2:
        print(f"usage: {sys.argv[0]} FOLDER", file=sys.stderr)
        return 2
    if sys.version_info < (3, 10):  # noqa: UP036 - an older Python shall say so in words
        print(f"error: this is Python {sys.version.split()[0]}, and leanconv needs 3.10 or newer", file=sys.stderr)
        return 1
    folder = os.path.abspath(sys.argv[1])
    failures = []
    for way in (with_ensurepip, with_system_pip, with_virtualenv):
        try:
            way(folder)
            if works(folder):
                return 0
        except (OSError, subprocess.CalledProcessError) as error:
            failures.append(f"{way.__name__}: {error}")
    shutil.rmtree(folder, ignore_errors=True)
    print("error: no virtual environment could be made; on Debian: apt install python3-venv", file=sys.stderr)
    print("\n".join(failures), file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
