"""Make a virtual environment with pip in it: ``python3 make_venv.py FOLDER``. Needs nothing but Python.

Where the standard library's ensurepip is missing (Debian keeps it in the package python3-venv), pip comes from the
system's own pip, from virtualenv, or from pip's own installer at bootstrap.pypa.io; where all fail, the message says
what to install.
"""

import contextlib
import io
import os
import shutil
import subprocess
import sys
import tempfile
import urllib.request
import venv


def works(folder: str) -> bool:
    """Whether the environment's pip runs."""
    python = os.path.join(folder, "bin", "python")
    done = subprocess.run([python, "-m", "pip", "--version"], capture_output=True, check=False)
    return done.returncode == 0


def with_ensurepip(folder: str) -> None:
    """As the standard library does it."""
    said = io.StringIO()
    try:
        # Debian's Python explains itself and exits where ensurepip is missing
        with contextlib.redirect_stdout(said):
            venv.EnvBuilder(with_pip=True, clear=True).create(folder)
    except SystemExit as error:
        raise OSError(said.getvalue().strip().partition("\n\n")[0]) from error


def with_system_pip(folder: str) -> None:
    """An environment without pip, into which the system's pip puts one."""
    venv.EnvBuilder(with_pip=False, clear=True).create(folder)
    python = os.path.join(folder, "bin", "python")
    subprocess.run([sys.executable, "-m", "pip", "--python", python, "install", "-q", "pip"], check=True)


def with_virtualenv(folder: str) -> None:
    """By virtualenv, which brings its own pip."""
    subprocess.run([sys.executable, "-m", "virtualenv", "-q", "--clear", folder], check=True)


def with_get_pip(folder: str) -> None:
    """An environment without pip, and pip's own installer, fetched from where pip's documentation says."""
    venv.EnvBuilder(with_pip=False, clear=True).create(folder)
    with tempfile.TemporaryDirectory() as downloads:
        installer = os.path.join(downloads, "get-pip.py")
        with urllib.request.urlopen("https://bootstrap.pypa.io/get-pip.py", timeout=30) as answer:
            with open(installer, "wb") as file:
                file.write(answer.read())
        subprocess.run([os.path.join(folder, "bin", "python"), installer, "-q"], check=True)


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
    for way in (with_ensurepip, with_system_pip, with_virtualenv, with_get_pip):
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
