"""Links from a page to a file of the repository that is no page lead to the file on GitHub.

On GitHub the relative links of the Markdown files work as they stand. In the site such a file would be a download.
"""

from __future__ import annotations

from pathlib import Path

from docutils import nodes
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.util import logging

ROOT = Path(__file__).resolve().parents[2]
log = logging.getLogger(__name__)


def to_repository(app: Sphinx, doctree: nodes.document) -> None:
    """Replace download links by links to the repository; warn about a file that does not exist."""
    page = Path(app.env.doc2path(app.env.docname))
    for link in list(doctree.findall(addnodes.download_reference)):
        target = (app.srcdir / link["reftarget"].lstrip("/")).resolve()
        if not link["reftarget"].startswith("/"):
            target = (page.parent / link["reftarget"]).resolve()
        if not target.exists() or not target.is_relative_to(ROOT):
            log.warning("the link leads to no file: %s", link["reftarget"], location=link)
            continue
        kind = "tree" if target.is_dir() else "blob"
        url = f"{app.config.source_url}/{kind}/main/{target.relative_to(ROOT)}"
        link.replace_self(nodes.reference("", "", *link.children, refuri=url, internal=False))


def setup(app: Sphinx) -> dict[str, bool]:
    """Called by Sphinx."""
    app.add_config_value("source_url", "", "env")
    # before Sphinx copies the files
    app.connect("doctree-read", to_repository, priority=100)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
