"""Puts the diagrams of docs/diagrams into the HTML itself, so that they take the colours of the reader's scheme.

As a file of its own an SVG knows the system's scheme only, not what the reader chose with the site's button.
"""

from __future__ import annotations

from pathlib import Path

from docutils import nodes
from sphinx.application import Sphinx


def inline(app: Sphinx, doctree: nodes.document, docname: str) -> None:
    """Replace each image of a diagram by the diagram."""
    if app.builder.format != "html":
        return
    for image in list(doctree.findall(nodes.image)):
        path = Path(app.srcdir, image["uri"])
        if path.suffix != ".svg" or path.parent.name != "diagrams":
            continue
        svg = path.read_text()
        svg = svg[svg.index("<svg") :]
        figure = f'<div class="diagram" tabindex="0">{svg}</div>'
        image.replace_self(nodes.raw("", figure, format="html"))


def setup(app: Sphinx) -> dict[str, bool]:
    """Called by Sphinx."""
    app.connect("doctree-resolved", inline)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
