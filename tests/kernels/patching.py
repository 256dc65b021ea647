"""Changes in CUDA C++ that are found by a few tokens: how tests break kernels on purpose.

A `Patch` names the function, method or struct that holds the place, and shows the change as C++ in which
`{{old => new}}` marks what is replaced, and `{{old}}` what is deleted:

    "cp_async_wait_group<stages - {{2 => 1}}>"    a number
    "{{__syncthreads();}} read(0, 0)"             a statement is deleted
    "{{=> __syncthreads();}} read(0, 0)"          a statement is inserted
    "if ({{... => true}}) continue"               a condition
    "min({{_1 => _2}}, {{_2 => _1}})"             two arguments are exchanged

What is outside the marks must be there and stays: it tells this place from others. White space, comments, preprocessor
lines and the paths of headers do not matter. Wildcards stand for names that may change:

    ...      any tokens, or none, with balanced brackets and within one statement; as few as possible
    _        one identifier
    _1, _2   one identifier, everywhere the same; the replacement may use it
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import NamedTuple

from leanconv.runtime.compile import INCLUDE

#: Preprocessor lines, white space, comments, and tokens. `>` is always a token: it may close template arguments.
TOKENS = re.compile(
    r"""^[ \t]*\#(?:\\\n|[^\n])* | \s | //[^\n]* | /\*.*?\*/
    | (?P<token> "(?:\\.|[^"\\])*" | '(?:\\.|[^'\\])*' | [A-Za-z_]\w* | \.?\d(?:[eEpP][+-]|[\w.'])*
    | \.\.\. | :: | -> | \+\+ | -- | && | \|\| | <<=? | [-+*/%&|^!=<>]= | . )""",
    re.VERBOSE | re.DOTALL | re.MULTILINE,
)
OPENING, CLOSING = ("(", "[", "{"), (")", "]", "}")
#: What has parentheses ahead of a function's name.
ATTRIBUTES = ("alignas", "decltype", "__align__", "__launch_bounds__")


@dataclass(frozen=True)
class Patch:
    """``change`` is found in ``where`` ``times`` times, and made every time, or only the ``only``-th time.

    ``where`` is a C++ name, qualified as far as needed: ``run``, ``TileProduct::run``, a struct or a constant; or
    several, separated by commas. All that have the name are searched: overloads, specialisations.
    """

    name: str
    where: str
    change: str
    times: int = 1
    only: int | None = None

    def __str__(self) -> str:
        return self.name


class StalePatch(AssertionError):
    """The kernels do not have what a patch changes."""


class Token(NamedTuple):
    text: str
    begin: int
    end: int


class Scope(NamedTuple):
    """A function, a struct or a constant: its qualified name, and its tokens from ``begin`` to ``end``."""

    path: tuple[str, ...]
    begin: int
    end: int


class Edit(NamedTuple):
    """``new`` replaces the characters from ``begin`` to ``end``."""

    begin: int
    end: int
    new: str


#: All marks of a change, at one place.
Edits = tuple[Edit, ...]


def tokens_of(text: str) -> list[Token]:
    return [Token(m["token"], *m.span()) for m in TOKENS.finditer(text) if m["token"]]


class Source:
    """The tokens of a header, and its functions, structs and constants."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.tokens = tokens_of(text)
        #: For each opening bracket the token after the closing one.
        self.after: dict[int, int] = {}
        opened: list[int] = []
        for i, token in enumerate(self.tokens):
            if token.text in OPENING:
                opened.append(i)
            elif token.text in CLOSING:
                self.after[opened.pop()] = i + 1
        assert not opened, "brackets are not balanced"
        self.scopes = [*self._scopes(0, len(self.tokens), ())]

    def named(self, where: str) -> list[Scope]:
        names = [tuple(name.split("::")) for name in where.split(", ")]
        return [scope for scope in self.scopes if any(scope.path[-len(name) :] == name for name in names)]

    def places(self, patch: Patch) -> list[Edits]:
        """Every place of the patch, in order."""
        change = Change(patch.change)
        return sorted({edits for scope in self.named(patch.where) for edits in change.found(self, scope)})

    def changed(self, places: Iterable[Edits]) -> str:
        text = self.text
        for begin, end, new in sorted({edit for edits in places for edit in edits}, reverse=True):
            text = text[:begin] + new + text[end:]
        return text

    def _scopes(self, begin: int, end: int, path: tuple[str, ...]) -> Iterator[Scope]:
        """What is declared between two brackets: in a file, a namespace or a struct."""
        head, here = begin, begin
        while here < end:
            text, after = self.tokens[here].text, self.after.get(here, here + 1)
            if text == "{":
                kind, name = _opened_by(self._words(head, here))
                own = (*path, name) if name else path
                if name:
                    yield Scope(own, head, after)
                if kind == "members":
                    yield from self._scopes(here + 1, after - 1, own)
                if kind != "value":
                    head = after
            elif text == ";":
                words = self._words(head, here)
                name = words[words.index("=") - 1] if "=" in words[1:] else ""
                if name.isidentifier():
                    yield Scope((*path, name), head, after)
                head = after
            here = after

    def _words(self, here: int, end: int) -> list[str]:
        """The tokens of a declaration, without what is in brackets, attributes and template parameters."""
        while self.tokens[here].text == "template":
            here = self._after_angles(here + 1)
        words: list[str] = []
        while here < end:
            words.append(self.tokens[here].text)
            if words[-1] in OPENING:
                words[-1] += self.tokens[self.after[here] - 1].text
                if words[-2:-1] and words[-2] in ATTRIBUTES:
                    del words[-2:]
            here = self.after.get(here, here + 1)
        return words

    def _after_angles(self, here: int) -> int:
        depth = 0
        while True:
            depth += {"<": 1, ">": -1}.get(self.tokens[here].text, 0)
            here = self.after.get(here, here + 1)
            if not depth:
                return here


def _opened_by(words: list[str]) -> tuple[str, str]:
    """What a brace after these words of a declaration opens ("members", a "body" or a "value"), and its name if any."""
    if words[0] == "namespace" or (words[0] == "extern" and "()" not in words):
        return "members", ""
    if words[0] in ("struct", "class", "union"):
        return "members", words[1]
    if "operator" in words:
        name = words.index("operator")
        return "body", "".join(words[name : words.index("()", name + 2)])
    if "=" in words or "()" not in words or words[0] == "enum":
        return "value", ""
    name = words.index("()")
    if ":" in words[name:] and re.match(r"\w", words[-1]):
        return "value", ""  # of a member that a constructor initialises
    name -= 1
    while words[name] == ">":  # a specialisation
        name = max(i for i in range(name) if words[i] == "<") - 1
    return "body", words[name]


class Change:
    """A change as it is written: tokens and wildcards to be found, and which of them are replaced by what."""

    def __init__(self, text: str) -> None:
        self.items: list[str] = []
        self.marks: list[tuple[int, int, str]] = []
        rest = text
        while rest:
            before, mark, rest = rest.partition("{{")
            marked, _, rest = rest.partition("}}")
            old, _, new = marked.partition("=>")
            self.items += [token.text for token in tokens_of(before)]
            begin = len(self.items)
            self.items += [token.text for token in tokens_of(old)]
            if mark:
                self.marks.append((begin, len(self.items), new.strip()))
        if not self.marks or not self.items or "..." in (self.items[0], self.items[-1]):
            raise ValueError(f"{text!r} marks nothing to be replaced, or begins or ends with a wildcard of any length")
        #: Where a wildcard ends at the latest: it has semicolons only in parentheses that the pattern opens.
        self.stops: list[tuple[str, ...]] = []
        opened: list[str] = []
        for item in self.items:
            if item in OPENING:
                opened.append(item)
            elif item in CLOSING:
                del opened[-1:]
            self.stops.append(CLOSING if opened[-1:] == ["("] else (*CLOSING, ";"))

    def found(self, source: Source, scope: Scope) -> Iterator[Edits]:
        for begin in range(scope.begin, scope.end):
            names: dict[str, str] = {}
            if at := self._match(source, begin, scope.end, 0, names):
                yield tuple(self._edit(source.tokens, at, mark, names) for mark in self.marks)

    def _match(self, source: Source, here: int, end: int, first: int, names: dict[str, str]) -> list[int]:
        """Where the items begin from ``first`` on, if that one begins ``here``, and where the last ends; or nothing."""
        at: list[int] = []
        for number, item in enumerate(self.items[first:], first):
            at.append(here)
            if item == "...":
                while True:
                    bound = dict(names)
                    if rest := self._match(source, here, end, number + 1, bound):
                        names.update(bound)
                        return at + rest
                    if here >= end or source.tokens[here].text in self.stops[number]:
                        return []
                    here = source.after.get(here, here + 1)
            if here >= end:
                return []
            text = source.tokens[here].text
            if re.fullmatch(r"_\d*", item):
                if not re.match(r"[A-Za-z_]", text) or (item != "_" and names.setdefault(item, text) != text):
                    return []
            elif item != text:
                return []
            here += 1
        return [*at, here]

    def _edit(self, tokens: list[Token], at: list[int], mark: tuple[int, int, str], names: dict[str, str]) -> Edit:
        first, last, new = mark
        new = re.sub(r"\b_\d+\b", lambda m: names[m[0]], new)
        if at[first] < at[last]:
            begin, end = tokens[at[first]].begin, tokens[at[last] - 1].end
        else:
            begin = end = tokens[at[first]].begin if first < len(self.items) else tokens[at[first] - 1].end
        return Edit(begin, end, f" {new} ")


source_of = cache(Source)


@cache
def kernel_headers() -> dict[Path, str]:
    return {path: path.read_text("utf-8") for path in sorted(INCLUDE.rglob("*.cuh"))}


def patched(patch: Patch, headers: Mapping[Path, str]) -> dict[Path, str]:
    """The texts of those headers that the patch changes, changed."""
    sources = {path: source_of(text) for path, text in headers.items()}
    found = [(path, place) for path, source in sources.items() for place in source.places(patch)]
    if len(found) != patch.times:
        what = f"`{patch.where}` has {patch.change!r} {len(found)} times, not {patch.times}"
        if not any(source.named(patch.where) for source in sources.values()):
            what = f"there is no `{patch.where}`"
        raise StalePatch(f"{patch.name}: {what}: adapt the patch")
    if patch.only is not None:
        found = [found[patch.only - 1]]
    return {path: sources[path].changed(place for where, place in found if where == path) for path, _ in found}


def copied_headers(folder: Path) -> Path:
    """``folder`` with a copy of every header, to include from."""
    for path, text in kernel_headers().items():
        copy = folder / path.relative_to(INCLUDE)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_text(text, "utf-8")
    return folder


def broken_kernels(folder: Path, patch: Patch, headers: Mapping[Path, str] | None = None) -> Path:
    """A copy of the kernels in ``folder`` with the patch made in ``headers``, or in whichever has its place."""
    copy = copied_headers(folder / "kernels")
    for path, text in patched(patch, headers or kernel_headers()).items():
        (copy / path.relative_to(INCLUDE)).write_text(text, "utf-8")
    return copy
