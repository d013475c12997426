"""Configuration of the documentation site. `make docs` builds it into build/docs; every warning is an error."""

from __future__ import annotations

import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE / "_ext")]

from gpushare_spawner import __version__  # noqa: E402

project = "gpushare-spawner"
copyright = "the gpushare-spawner contributors. MIT licence"
release = version = __version__
source_url = "https://github.com/gpushare-spawner/gpushare-spawner"

extensions = ["myst_parser", "sphinx_copybutton", "sphinx_design", "source_links", "inline_svg", "generated"]
exclude_patterns = ["_ext", "_static"]

myst_enable_extensions = ["colon_fence", "deflist", "attrs_inline"]
myst_heading_anchors = 4
# the pages of the repository link to files beside docs/: see _ext/source_links.py
myst_links_external_new_tab = False
highlight_language = "none"
add_module_names = False
toc_object_entries_show_parents = "hide"
# prompts are not copied
copybutton_prompt_text = r"\$ |>>> "
copybutton_prompt_is_regexp = True

html_theme = "pydata_sphinx_theme"
html_title = "gpushare-spawner"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_sourcelink = False
html_theme_options = {
    "logo": {"text": "gpushare-spawner"},
    "github_url": source_url,
    "navbar_align": "left",
    "header_links_before_dropdown": 5,
    "show_toc_level": 2,
    "navigation_with_keys": False,
    "secondary_sidebar_items": ["page-toc"],
    "footer_start": ["copyright"],
    "footer_end": [],
}
html_sidebars: dict[str, list[str]] = {"index": [], "tutorial/index": []}
