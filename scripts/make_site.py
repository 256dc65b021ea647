"""Make the site: ``python scripts/make_site.py [FOLDER]`` writes it to build/site, without a network.

The pages stay as a repository shows them. This stages copies of them in build/site-source, one folder flatter: those of
the root beside those of docs/. Links between pages are changed accordingly; a link to a file that is no page becomes
the path of the file, and one that leads nowhere is an error. The pages that a part links to are its children in the
navigation, and the reference is made from the docstrings. Sphinx then builds it, each warning an error.
"""

from __future__ import annotations

import inspect
import os
import posixpath
import re
import shutil
import sys
from collections.abc import Iterator
from dataclasses import is_dataclass
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import leanconv

ROOT = Path(__file__).resolve().parents[1]
#: Pages of the root, besides all of docs/.
ROOT_PAGES = ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")
#: Examples, whose pages Sphinx makes when it executes them: one for each file, in a folder for each of theirs.
GALLERY = "examples/gallery"
#: The parts, in the order of the navigation, and what is in none of them.
PARTS = ("docs/start.md", GALLERY, "docs/guide.md", "docs/reference.md", "docs/how-it-works.md", "docs/measured.md")
OUTSIDE = ("CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md")
#: Pages of the reference: file, title, module, names of it in their order (all public ones where there are none).
REFERENCE: tuple[tuple[str, str, str, str], ...] = (
    (
        "layers", "Layers", "leanconv",
        "conv2d conv1d conv3d conv2d_input conv1d_input conv3d_input conv2d_weight conv1d_weight conv3d_weight "
        "conv_transpose3d prepare_weights PreparedWeights",
    ),
    (
        "images", "Image filters", "leanconv",
        "filter2d filter3d sep_filter2d gaussian_blur box_blur median_blur erode dilate sobel scharr prewitt laplacian "
        "unsharp_mask",
    ),
    (
        "choosing", "Choosing, compiling, tuning", "leanconv",
        "explain Explanation list_algorithms ConvProblem FilterProblem precompile PrecompileResult tune record_tuning "
        "TuningResult",
    ),
    (
        "errors", "Errors", "leanconv",
        "LeanconvError NoAlgorithmError CompileError CudaError CudaUnavailableError OutOfMemoryError TableError "
        "WrongResultError",
    ),
    ("torch", "leanconv.torch", "leanconv.torch", ""),
    ("ndimage", "leanconv.ndimage", "leanconv.ndimage", ""),
    ("signal", "leanconv.signal", "leanconv.signal", ""),
    ("filters", "leanconv.filters", "leanconv.filters", ""),
    ("stream", "leanconv.images.stream", "leanconv.images.stream", "filter_file"),
    ("dask", "leanconv.dask", "leanconv.dask", ""),
)  # fmt: skip
#: What of a class users meet, where the rest is for its own package.
MEMBERS = {"Patch": "disable, refresh, choose_anew, report"}
#: Public names of leanconv that are modules, with pages of their own.
MODULES = {"ndimage", "signal", "filters"}

_FENCE = re.compile(r"^(`{3,}).*?^\1`*$", re.MULTILINE | re.DOTALL)
_COMMENT = re.compile(r"<!--.*?-->", re.DOTALL)
_NAME = re.compile(r"(?<![\[`])`(leanconv\.[\w.]+)(?:\(\))?`(?![`\]])")
_LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s]+)\)")


def pages() -> list[str]:
    """Paths of all pages, from the root of the repository."""
    return [*ROOT_PAGES, *(p.relative_to(ROOT).as_posix() for p in sorted((ROOT / "docs").glob("**/*.md")))]


def place(path: str) -> str:
    """Where a page or a picture stands in the site."""
    if path.startswith(GALLERY):
        return (
            "gallery"
            + path.removeprefix(GALLERY).removesuffix(".py")
            + ("" if path.endswith(".py") else "/index")
            + ".rst"
        )
    return path.removeprefix("docs/") if path.startswith("docs/") else path.lower()


def outside_code(pattern: re.Pattern[str], text: str) -> Iterator[re.Match[str]]:
    spans = [match.span() for match in _FENCE.finditer(text)]
    for match in pattern.finditer(text):
        if not any(begin <= match.start() < end for begin, end in spans):
            yield match


def links(text: str) -> Iterator[re.Match[str]]:
    """The links of a page to files, those in code left out."""
    for match in outside_code(_LINK, text):
        if "://" not in match[3] and not match[3].startswith(("#", "mailto:")):
            yield match


def without_comments(text: str) -> str:
    """A page without its comments: a line that begins with one is HTML to Markdown, and not part of its paragraph."""
    for match in reversed([*outside_code(_COMMENT, text)]):
        text = text[: match.start()] + text[match.end() :]
    return text


def with_names(text: str, names: set[str]) -> str:
    """A page whose public names in code lead to their places in the reference; of a link's text none."""
    spans = [match.span() for match in outside_code(_LINK, text)]
    for match in reversed([*outside_code(_NAME, text)]):
        if match[1] in names and not any(begin <= match.start() < end for begin, end in spans):
            text = f"{text[: match.start()]}{{py:obj}}{match[0].replace('()', '')}{text[match.end() :]}"
    return text


def target(page: str, link: str) -> tuple[str, str]:
    """The path from the root, and the heading, that a link names. Raises ValueError where there is no such file."""
    name, hashes, heading = link.partition("#")
    path = posixpath.normpath(posixpath.join(posixpath.dirname(page), name))
    if path.startswith("..") or not (ROOT / path).exists():
        raise ValueError(f"{page}: the link {link} leads nowhere")
    return path, hashes + heading


def staged(page: str, text: str, known: set[str]) -> str:
    """A page with its links as the site needs them, without comments."""
    text = without_comments(text)
    parts, last = [], 0
    for match in links(text):
        path, heading = target(page, match[3])
        if match[1] or path in known or path.startswith(GALLERY):
            to = posixpath.relpath(place(path), posixpath.dirname(place(page)) or ".")
            link = f"{match[1]}[{match[2]}]({to}{heading})"
        else:
            text_is_name = match[2].strip("`") in (path, posixpath.basename(path))
            link = f"`{path}`" if text_is_name else f"{match[2]} (`{path}`)"
        parts += [text[last : match.start()], link]
        last = match.end()
    return "".join([*parts, text[last:]])


def children(page: str, text: str, known: set[str]) -> list[str]:
    """The pages that a page links to, each once."""
    return list(dict.fromkeys(path for match in links(text) if (path := target(page, match[3])[0]) in known))


def tree(entries: list[str]) -> str:
    return "\n\n```{toctree}\n:hidden:\n\n" + "\n".join(entries) + "\n```\n"


def site(known: set[str]) -> dict[str, str]:
    """Every source of the site by its place."""
    texts = {page: (ROOT / page).read_text(encoding="utf-8") for page in known}
    names = {f"{module}.{name}" for _, _, module, listed in REFERENCE for name in listed.split() or public(module)}
    done = {page: with_names(staged(page, text, known), names) for page, text in texts.items()}
    taken = {*PARTS, *OUTSIDE, "docs/index.md"}
    for page in (*(part for part in PARTS if part != GALLERY), "docs/algorithms/index.md"):
        below = [path for path in children(page, texts[page], known) if path not in taken]
        if page == "docs/start.md":
            below = []  # it leads to pages of other parts
        taken.update(below)
        entries = [f"/{place(path).removesuffix('.md')}" for path in below]
        if page == "docs/reference.md":
            entries = [f"/reference/{name}" for name, *_ in REFERENCE]
            rows = "\n".join(f"- [{title}](reference/{name}.rst)" for name, title, *_ in REFERENCE)
            done[page] += f"\n{rows}\n"
        done[page] += tree(entries) if entries else ""
    if left := known - taken:
        raise ValueError(f"no part of the site links to {', '.join(sorted(left))}")
    done["docs/index.md"] += tree([f"/{posixpath.splitext(place(page))[0]}" for page in (*PARTS, *OUTSIDE)])
    return {place(page): text for page, text in done.items()} | reference()


def module_of(name: str) -> ModuleType:
    """A module by the name that users write: leanconv.filters lies elsewhere."""
    return leanconv.filters if name == "leanconv.filters" else import_module(name)


def public(module: str) -> list[str]:
    """The public functions and classes of a module."""
    found = module_of(module)
    names = getattr(found, "__all__", None)
    if names is None:
        home = found.__name__
        own = (n for n, each in vars(found).items() if getattr(each, "__module__", None) == home and callable(each))
        names = [name for name in own if not name.startswith("_")]
    return [*names]


def reference() -> dict[str, str]:
    """The pages of the reference. Raises ValueError if a public name of leanconv is in none, or in two."""
    named = [name for _, _, module, names in REFERENCE if module == "leanconv" for name in names.split()]
    if sorted([*named, *MODULES]) != sorted(public("leanconv")):
        raise ValueError(f"REFERENCE and leanconv.__all__ differ by {set(named) ^ (set(public('leanconv')) - MODULES)}")
    return {f"reference/{file}.rst": page_of(*rest) for file, *rest in REFERENCE}


def untold(function: Any) -> list[str]:
    """The arguments of a function that its docstring neither names nor leaves to another function that it names."""
    text = inspect.getdoc(function) or ""
    if re.search(r"(?<!`)`[\w.]+`(?!`)", text):
        return []
    given = inspect.signature(function).parameters.values()
    return [each.name for each in given if not re.search(rf"\b{each.name}\b", text)]


def page_of(title: str, module: str, listed: str) -> str:
    """A page of the reference: what the module says of itself, a table of its names, and each in full.

    Raises ValueError for a name without a docstring, and for a docstring that leaves an argument out.
    """
    names = listed.split() or public(module)
    lines = [title, "=" * len(title), ""]
    if module != "leanconv":
        lines += [f".. automodule:: {module_of(module).__name__}", ""]
    lines += [f".. currentmodule:: {module}", "", ".. autosummary::", "   :nosignatures:", ""]
    lines += [f"   {name}" for name in names] + [""]
    for name in names:
        each = getattr(module_of(module), name)
        if not inspect.getdoc(each):
            raise ValueError(f"{module}.{name} has no docstring")
        if not inspect.isclass(each):
            if missing := untold(each):
                raise ValueError(f"the docstring of {module}.{name} does not say what {', '.join(missing)} is")
            lines += [f".. autofunction:: {module}.{name}", ""]
        elif issubclass(each, BaseException):
            lines += [f".. autoexception:: {module}.{name}", "   :show-inheritance:", ""]
        else:
            bases = ["   :show-inheritance:"] if each.__base__ is not object else []
            shown = [f"   :members: {MEMBERS.get(name, '')}".rstrip()]
            shown += ["   :undoc-members:"] if is_dataclass(each) else []
            lines += [f".. autoclass:: {module}.{name}", *shown, *bases, ""]
    return "\n".join(lines)


def stage(folder: Path) -> None:
    """Write what has changed into a folder, and remove what is no source any more."""
    sources: dict[str, bytes] = {name: text.encode() for name, text in site(set(pages())).items()}
    for path in sorted((ROOT / "docs" / "pictures").iterdir()):
        sources[f"pictures/{path.name}"] = path.read_bytes()
    for path in [path for path in folder.rglob("*") if path.is_file()]:
        if path.relative_to(folder).as_posix() not in sources and path.relative_to(folder).parts[0] != "gallery":
            path.unlink()
    for name, content in sources.items():
        path = folder / name
        if not path.exists() or path.read_bytes() != content:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)


def main(arguments: list[str]) -> int:
    from sphinx.cmd.build import build_main

    build = ROOT / "build"
    out = Path(arguments[0]) if arguments else build / "site"
    shutil.rmtree(out, ignore_errors=True)
    stage(build / "site-source")
    os.environ["MPLBACKEND"] = "agg"
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(ROOT / "src"), os.environ.get("PYTHONPATH"))))
    sphinx = ["-b", "html", "-c", str(ROOT / "docs"), "-d", str(build / "site-cache"), "-q", "-W", "--keep-going"]
    code = build_main([*sphinx, str(build / "site-source"), str(out)])
    if not code:
        print(f"the site: {out / 'index.html'}")
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
