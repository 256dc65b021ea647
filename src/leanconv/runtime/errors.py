"""The base of leanconv's own errors."""


class LeanconvError(Exception):
    """Base of every error that leanconv defines. Those of a wrong argument are ValueErrors too."""
