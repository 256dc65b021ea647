"""Sphinx' settings; scripts/make_site.py stages the pages and runs it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sphinx.util import logging

import leanconv

project = "leanconv"
author = "The leanconv contributors"
copyright = f"2026, {author}"
version = release = leanconv.__version__
root_doc = "index"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.autosummary", "sphinx.ext.napoleon"]
extensions += ["sphinx_gallery.gen_gallery"]

# A link to a heading is what repositories' web views make of it; the longest headings are of the fourth level.
myst_heading_anchors = 4
myst_enable_extensions = ["strikethrough"]

# Docstrings: sections as Google writes them, and single backquotes around names of this library.
default_role = "py:obj"
napoleon_numpy_docstring = False
napoleon_use_rtype = False
autosummary_generate = False
autodoc_typehints_format = "short"
autodoc_member_order = "bysource"
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 88
toc_object_entries_show_parents = "hide"
add_module_names = True

# The gallery: every example is executed, and one that raises fails the build.
sphinx_gallery_conf = {
    "examples_dirs": str(Path(__file__).resolve().parents[1] / "examples" / "gallery"),
    "gallery_dirs": "gallery",
    "filename_pattern": r"\.py",
    "within_subsection_order": "FileNameSortKey",
    "only_warn_on_example_error": False,
    "download_all_examples": False,
    "show_memory": False,
    "capture_repr": (),
    "min_reported_time": 1e9,
    "write_computation_times": False,
}

html_theme = "pydata_sphinx_theme"
html_title = f"leanconv {version}"
html_show_sourcelink = False
html_copy_source = False
html_static_path = ["_static"]
html_js_files = ["sort.js"]
html_css_files = ["site.css"]
html_theme_options = {
    "navigation_with_keys": False,
    "show_toc_level": 2,
    "navbar_align": "left",
    "header_links_before_dropdown": 6,
    "secondary_sidebar_items": ["page-toc"],
    "footer_start": ["copyright"],
    "footer_end": [],
}
html_sidebars = {"index": [], "start": []}


def plain_first_line(app: Any, what: str, name: str, each: Any, options: Any, lines: list[str]) -> None:
    """Napoleon would take the words before a colon in a property's first line for its type."""
    if what in ("attribute", "property") and lines:
        lines[0] = lines[0].replace(": ", " – ")


def name_the_missing(app: Any, env: Any, node: Any, text: Any) -> None:
    """A name in single backquotes that the reference does not have is a warning; it may have two of them."""
    # those of signatures have no such attribute
    if (node.get("refdomain"), node["reftype"]) == ("py", "obj") and "refexplicit" in node:
        message = "the reference does not have %r: write it with its module, or in double backquotes"
        logging.getLogger(__name__).warning(message, node["reftarget"], location=node)


def setup(app: Any) -> None:
    app.connect("autodoc-process-docstring", plain_first_line, priority=400)
    app.connect("missing-reference", name_the_missing, priority=900)
