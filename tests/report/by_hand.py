"""Finds figures that were written by hand: ``python -m tests.report.by_hand [PATH ...]`` prints file:line of each.

A figure is a number with a measured unit (times, ×, %, µs, ms, s, TFLOP/s, TB/s, GB/s) or an error such as 3e-4. In
the pages of the root and of docs/ one may stand

- between ``<!-- made: … -->`` and ``<!-- /made -->``, and in ``<!-- figure: … -->4.25<!-- /figure -->``: a command
  fills these from results files;
- in code, in fences or backquotes;
- in a section that has a line ``Explored: GPU, date, revision …``, its subsections included;
- in a paragraph, list or table (what blank lines enclose) that holds ``<!-- counted -->``, or follows it.

In comments and docstrings of src/ it may stand in a line ``figure: FILE WHO/AGAINST STAT = 4.25``, in a doctest, and in
a paragraph (between empty lines of comment) that has one of the words Explored, counted, peak. A power of ten (1e-4) is
a limit, not a figure.
"""

from __future__ import annotations

import io
import re
import sys
import tokenize
from collections.abc import Iterator, Sequence
from pathlib import Path

from report.fields import FIELD

ROOT = Path(__file__).resolve().parents[2]

_NUMBER = r"(?<![\w.,^-])\d[\d,]*(?:\.\d+)?"
_UNITS = r"%(?!\w)|(?:µs|us|ms|TFLOP/s|TFLOPS|TB/s|GB/s)\b|×(?!\s?[\w(])"
_ERRORS = r"(?<![\w.])(?:\d\.\d+|[2-9])e[-−]0?\d+\b"
_ABOUT_TIME = r"(?:as|faster|slower|quicker|longer|less|more|the|PyTorch|cuDNN|NPP|CuPy|TF32|ours|theirs|its)\b"
_SMALL = r"(?:two|three|four|five|six|seven|eight|nine|ten|twelve|twenty)"
_WORDS = (
    rf"\b(?:twice as (?:fast|long|quick)|half (?:as (?:fast|long)|(?:of )?(?:PyTorch|cuDNN)'s)|half the time"
    rf"|(?:third|fourth|quarter|fifth|tenth) (?:as long|of (?:the time|PyTorch|cuDNN))"
    rf"|{_SMALL}\s+times\s+{_ABOUT_TIME})"
)
#: Figures in a page. In a comment a whole number of times is a count, unless what follows compares times.
IN_PAGES = re.compile(rf"{_NUMBER}\s?(?:{_UNITS}|times\b|s\b(?!\s*[=,)\]]))|{_ERRORS}|{_WORDS}")
IN_COMMENTS = re.compile(rf"{_NUMBER}\s?(?:{_UNITS})|\d\.\d+\s+times\b|{_NUMBER}\s+times\s+{_ABOUT_TIME}|{_ERRORS}")

_COUNTED = "<!-- counted -->"
_HEADING = re.compile(r"^(#+) .*$", re.MULTILINE)
_EXPLORED = re.compile(r"^[>*_ ]*Explored\b.*(?:\n.+)*", re.MULTILINE)


def _blank(text: str, pattern: str, flags: int = 0) -> str:
    """The text with blanks in place of what matches, line by line as before."""
    return re.sub(pattern, lambda match: re.sub(r"[^\n]", " ", match[0]), text, flags=flags)


def _blocks(text: str) -> Iterator[tuple[int, str]]:
    """What blank lines enclose, each with its offset."""
    for match in re.finditer(r"(?:^[^\n]*\S[^\n]*(?:\n|\Z))+", text, re.MULTILINE):
        yield match.start(), match[0]


def _without_explored(text: str) -> str:
    headings = [(match.start(), len(match[1])) for match in _HEADING.finditer(text)]
    for line in _EXPLORED.finditer(text):
        begin, level = next(((at, n) for at, n in reversed(headings) if at < line.start()), (0, 1))
        if level == 1:  # not the whole page: from the line on
            begin, level = line.start(), 6
        end = next((at for at, n in headings if at > line.start() and n <= level), len(text))
        text = text[:begin] + re.sub(r"[^\n]", " ", text[begin:end]) + text[end:]
    return text


def prose_of_page(text: str) -> str:
    """What of a page was written by hand and is neither explored, counted nor code; offsets stay."""
    text = _blank(text, r"^(`{3,}).*?^\1`*$", re.MULTILINE | re.DOTALL)
    text = _blank(text, r"<!-- made(?: by research)?: .*?<!-- /made -->", re.DOTALL)
    text = _blank(text, FIELD.pattern, re.DOTALL)
    text = _blank(_without_explored(text), r"(`+)[^`\n]+\1|\]\([^)\s]+\)")
    counted = False
    for at, block in _blocks(text):
        only = block.strip() == _COUNTED
        if counted or _COUNTED in block:
            text = text[:at] + re.sub(r"[^\n]", " ", block) + text[at + len(block) :]
        counted = only
    return text


def _comments(path: Path, text: str) -> str:
    """The text with blanks in place of all but comments and docstrings."""
    if path.suffix != ".py":
        code = r"/\*.*?\*/|//[^\n]*"
        spans = [match.span() for match in re.finditer(code, text, re.DOTALL)]
    else:
        starts = [0]
        for line in text.splitlines(keepends=True):
            starts.append(starts[-1] + len(line))
        spans, statement = [], True
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            span = starts[token.start[0] - 1] + token.start[1], starts[token.end[0] - 1] + token.end[1]
            if token.type == tokenize.COMMENT or (token.type == tokenize.STRING and statement):
                spans.append(span)
            if token.type not in (tokenize.COMMENT, tokenize.NL):
                statement = token.type in (tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT)
    kept, last = [], 0
    for begin, end in spans:
        kept += [re.sub(r"[^\n]", " ", text[last:begin]), text[begin:end]]
        last = end
    return "".join([*kept, re.sub(r"[^\n]", " ", text[last:])])


def prose_of_source(path: Path, text: str) -> str:
    """What comments say that no file and no exploration is named for."""
    text = _blank(_comments(path, text), r"//[/!<]*|^\s*#+:?|\"{3}|/\*+|\*+/|(`+)[^`\n]+\1", re.MULTILINE)
    for at, block in _blocks(text):
        if re.search(r"\b(?:Explored|[Cc]ounted|peak)\b|>>> ", block):
            text = text[:at] + re.sub(r"[^\n]", " ", block) + text[at + len(block) :]
    return _blank(text, r"^.*\bfigure: .*$", re.MULTILINE)


def figures(path: Path) -> Iterator[str]:
    """Each figure of a file that was written by hand, as ``file:line: words``."""
    text = path.read_text(encoding="utf-8")
    page = path.suffix == ".md"
    prose = prose_of_page(text) if page else prose_of_source(path, text)
    name = path.relative_to(ROOT) if path.is_relative_to(ROOT) else path
    for match in (IN_PAGES if page else IN_COMMENTS).finditer(prose):
        number = text.count("\n", 0, match.start()) + 1
        yield f"{name}:{number}: {' '.join(match[0].split())!r} in: {text.splitlines()[number - 1].strip()}"
    for match in _EXPLORED.finditer(text) if page else ():
        if not (re.search(r"\b20\d\d\b", match[0]) and "revision" in match[0]):
            number = text.count("\n", 0, match.start()) + 1
            yield f"{name}:{number}: Explored without a date and a revision: {match[0].splitlines()[0]}"


def files(paths: Sequence[Path] = ()) -> list[Path]:
    """The files to look through: by default the root's pages, docs/ and src/; of a folder all pages and sources."""
    found = []
    for path in paths or (*ROOT.glob("*.md"), ROOT / "docs", ROOT / "src" / "leanconv"):
        path = path.resolve()
        found += sorted(p for p in path.rglob("*") if p.suffix in (".md", ".cuh", ".py")) if path.is_dir() else [path]
    return found


if __name__ == "__main__":
    everything = [figure for path in files([Path(word) for word in sys.argv[1:]]) for figure in figures(path)]
    print("\n".join([*everything, f"{len(everything)} figures by hand"]))
    sys.exit(bool(everything))
