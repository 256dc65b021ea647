"""The only way to bound what is kept: what was not used for long is dropped."""

from __future__ import annotations

from typing import TypeVar

Key = TypeVar("Key")
Value = TypeVar("Value")


class BoundedCache(dict[Key, Value]):
    """A dictionary that keeps the entries used most recently: the last ``size`` at least, twice as many at most.

    There are two generations. The younger one is the dictionary itself, so that ``get`` costs what it costs in any
    dictionary. When it is full, it becomes the older one, and what was the older one is dropped. An entry that is found
    in the older one moves to the younger.

    Any number of threads may use it; entries are never lost to a race, at worst they are dropped sooner.

    >>> squares = BoundedCache(2)
    >>> for i in range(5):
    ...     squares.keep(i, i * i)
    >>> squares.get(4), squares.get(3), squares.recall(3), squares.recall(0)
    (16, None, 9, None)
    """

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size
        self._older: dict[Key, Value] = {}

    def recall(self, key: Key) -> Value | None:
        """The value of ``key`` in either generation, None where there is none."""
        value = self.get(key)
        if value is None:
            value = self._older.get(key)
            if value is not None:
                self.keep(key, value)
        return value

    def keep(self, key: Key, value: Value) -> None:
        """Set an entry of the younger generation."""
        if len(self) >= self.size:
            self._older = dict(self)
            super().clear()
        self[key] = value

    def clear(self) -> None:
        super().clear()
        self._older = {}
