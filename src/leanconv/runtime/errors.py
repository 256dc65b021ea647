"""The base of leanconv's own errors, and warnings that are given once."""

import warnings


class LeanconvError(Exception):
    """Base of every error that leanconv defines. Those of a wrong argument are ValueErrors too."""


_warned: set[str] = set()


def warn_once(about: str, text: str) -> None:
    """Warn of something that ``about`` names, unless this process has warned of it."""
    if about not in _warned:
        _warned.add(about)
        warnings.warn(text, RuntimeWarning, stacklevel=3)
