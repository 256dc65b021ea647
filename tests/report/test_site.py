"""The site is staged from the pages: links, parts of the navigation, and a reference of every public name.

Sphinx itself, which `make site` runs, need not be installed here.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import leanconv
from scripts import make_site

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = sorted((ROOT / make_site.GALLERY).glob("*/*.py"))
#: The pages that Sphinx makes of the examples.
GALLERY = {"gallery/index.rst", *(make_site.place(path.relative_to(ROOT).as_posix()) for path in EXAMPLES)}
pytest.importorskip("torch")
pytest.importorskip("dask")


@pytest.fixture(scope="module")
def sources() -> dict[str, str]:
    return make_site.site(set(make_site.pages()))


def test_every_page_is_in_one_tree(sources: dict[str, str]) -> None:
    pages = [name for name in sources if name != "index.md"]
    trees = re.findall(r"```\{toctree\}\n:hidden:\n\n(.*?)\n```", "\n".join(sources.values()), re.DOTALL)
    entries = [entry for tree in trees for entry in tree.splitlines()]
    assert sorted(entries) == sorted(["/gallery/index", *("/" + name.rsplit(".", 1)[0] for name in pages)])
    assert len(pages) > 40 and {"readme.md", "algorithms/im2win.md", "reference/torch.rst"} <= set(pages)


def test_links_go_to_pages_of_the_site(sources: dict[str, str]) -> None:
    """Each is there, and none leads to a file that the site does not have."""
    found = 0
    for name, text in sources.items():
        for match in make_site.links(text):
            aim = (Path(name).parent / match[3].partition("#")[0]).as_posix() if match[3][0] != "#" else name
            aim = make_site.posixpath.normpath(aim)
            picture = aim.startswith("pictures/") and (ROOT / "docs" / aim).exists()
            assert aim in sources or picture or aim in GALLERY, (name, match[0])
            found += 1
    assert found > 200


def test_a_page_keeps_its_text(sources: dict[str, str]) -> None:
    """Nothing but links to files without a page, comments, and names of the reference changes."""
    before = (ROOT / "docs" / "numerics.md").read_text(encoding="utf-8")
    assert "<!-- made" in before and "<!-- figure" in before
    assert sources["numerics.md"].replace("{py:obj}", "") == re.sub(r"<!--.*?-->", "", before)
    assert make_site.without_comments("`` <!-- gone -->\n```\n<!-- kept -->\n```\n") == "`` \n```\n<!-- kept -->\n```\n"


def test_the_gallery_has_examples_with_pictures() -> None:
    """Each is short, has a title, a text and a figure. `make site` executes them."""
    assert len(EXAMPLES) >= 12 and "gallery/images/blur_and_sharpen.rst" in GALLERY
    for path in EXAMPLES:
        text = path.read_text(encoding="utf-8")
        title, line, _, said = re.match(r'"""\n(.+)\n(=+)\n(\n)(.+)', text).groups()  # type: ignore[union-attr]
        assert len(title) == len(line) and said and "plt.subplots" in text and "leanconv" in text, path
        assert len(text.splitlines()) <= 75, path
    for folder in {path.parent for path in EXAMPLES}:
        assert (folder / "GALLERY_HEADER.rst").exists()


def test_links_are_turned() -> None:
    known = {"docs/a.md", "README.md", "docs/algorithms/im2win.md"}
    page = "docs/algorithms/im2win.md"
    text = "[one](../../README.md#limits) [self](#x) [source](../../Makefile) [`cli`](../../src/leanconv/cli)"
    code = "\n```\n[kept](../../README.md)\n```\n![seen](../pictures/im2win.svg) [far](https://example.org/x.md)\n"
    assert make_site.staged(page, text + code, known) == (
        "[one](../readme.md#limits) [self](#x) source (`Makefile`) `src/leanconv/cli`\n"
        "```\n[kept](../../README.md)\n```\n![seen](../pictures/im2win.svg) [far](https://example.org/x.md)\n"
    )
    gallery = "[all](../examples/gallery) [one](../examples/gallery/images/blur_and_sharpen.py)"
    assert make_site.staged("docs/a.md", gallery, known) == (
        "[all](gallery/index.rst) [one](gallery/images/blur_and_sharpen.rst)"
    )
    assert make_site.staged("README.md", "[the page](docs/algorithms/im2win.md#a)", known) == (
        "[the page](algorithms/im2win.md#a)"
    )
    with pytest.raises(ValueError, match=r"README.md: the link docs/no.md leads nowhere"):
        make_site.staged("README.md", "[it](docs/no.md)", known)


def test_names_lead_to_the_reference(sources: dict[str, str]) -> None:
    text = "`leanconv.conv2d` and `leanconv.torch.enable()`, [`leanconv.conv2d`](x.md), `leanconv.no`\n"
    text += "```\n`leanconv.conv2d`\n```"
    named = make_site.with_names(text, {"leanconv.conv2d", "leanconv.torch.enable"})
    assert named == text.replace("`leanconv.conv2d` and", "{py:obj}`leanconv.conv2d` and").replace(
        "`leanconv.torch.enable()`", "{py:obj}`leanconv.torch.enable`"
    )
    assert "{py:obj}`leanconv.filter2d`" in sources["start.md"]


def test_what_is_left_out_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    known = set(make_site.pages())
    monkeypatch.setattr(make_site, "PARTS", make_site.PARTS[:-1])
    with pytest.raises(ValueError, match="no part of the site links to .*docs/measured.md"):
        make_site.site(known)
    monkeypatch.setattr(leanconv, "__all__", [*leanconv.__all__, "new"])
    with pytest.raises(ValueError, match="differ by {'new'}"):
        make_site.reference()


def test_a_docstring_that_leaves_an_argument_out_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def told(size: int, sigma: float) -> None:
        """``size`` and ``sigma`` are in pixels."""

    def untold(size: int, sigma: float) -> None:
        """A bell of a ``size``."""

    def other(size: int, sigma: float) -> None:
        """Arguments as those of `told`."""

    assert (make_site.untold(told), make_site.untold(untold), make_site.untold(other)) == ([], ["sigma"], [])
    monkeypatch.setattr(leanconv, "conv1d", untold)
    with pytest.raises(ValueError, match=r"docstring of leanconv.conv1d does not say what sigma is"):
        make_site.page_of("layers", "leanconv", "conv1d")
    untold.__doc__ = None
    with pytest.raises(ValueError, match=r"leanconv.conv1d has no docstring"):
        make_site.page_of("layers", "leanconv", "conv1d")


def test_every_public_name_is_in_the_reference(sources: dict[str, str]) -> None:
    text = "".join(text for name, text in sources.items() if name.startswith("reference/"))
    for module in ("leanconv", "leanconv.torch", "leanconv.ndimage", "leanconv.signal", "leanconv.dask"):
        for name in set(make_site.public(module)) - make_site.MODULES:
            assert len(re.findall(rf"^\.\. auto\w+:: {module}\.{name}$", text, re.MULTILINE)) == 1, name
    assert "fftconvolve" in text and ".. autofunction:: leanconv.filters.gaussian\n" in text
