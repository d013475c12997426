"""The dashboard's dialogs: each form is a request that the table of forms names, and the API takes."""

from __future__ import annotations

import re
from pathlib import Path

from gpushare_spawner.service import web
from gpushare_spawner.service.dashboard.dialog_targets import FORMS

HTML = (Path(next(iter(web.__path__))) / "pages" / "parts" / "dialogs.html").read_text()


def attributes(tag: str) -> dict[str, str]:
    return dict(re.findall(r'data-(action|method|path)="([^"]*)"', tag))


def test_each_form_is_the_request_that_the_table_names() -> None:
    forms = [attributes(tag) for tag in re.findall(r"<form data-action[^>]*>", HTML)]
    said = {one["action"]: (one["method"], f"/{one['path']}" if one.get("path") else "") for one in forms}
    assert said == FORMS
    assert len(forms) == len(FORMS)
