"""The dashboard's dialogs: each form is a request that the table of forms names, and the API takes."""

from __future__ import annotations

import re
from pathlib import Path

from gpushare_spawner.model.template import Template
from gpushare_spawner.service import web
from gpushare_spawner.service.api.api import OPERATIONS
from gpushare_spawner.service.dashboard import choices_of_sessions
from gpushare_spawner.service.hub.caller import Caller
from gpushare_spawner.wording.service import session_terms

HTML = (Path(next(iter(web.__path__))) / "pages" / "parts" / "dialogs.html").read_text()


def attributes(tag: str) -> dict[str, str]:
    return dict(re.findall(r'data-(action|method|path)="([^"]*)"', tag))


def test_each_action_of_the_api_has_its_form() -> None:
    tags = [attributes(tag) for tag in re.findall(r"<form data-action[^>]*>", HTML)]
    forms = {(tag["method"], f"/{tag['path']}" if tag.get("path") else "") for tag in tags}
    assert len({tag["action"] for tag in tags}) == len(forms) == len(tags)
    places = (
        "budgets/{account}/users/{user}",
        "budgets/{account}",
        "sessions/{id}",
        "nodes/{node}/gpus/{uuid}",
        "nodes/{node}",
        "queue/{user}/{server}",
    )
    actions = {(operation.method, operation.path) for operation in OPERATIONS if operation.acts}
    assert forms == {
        (method, path.removeprefix(next(one for one in places if path.startswith(one)))) for method, path in actions
    }


def test_users_choose_from_what_they_may_use() -> None:
    templates = [
        Template(name="quarter", display_name="0.25 GPU", gpu={"fraction": 0.25}),
        Template(name="half", display_name="Half", gpu={"fraction": 0.5}, access={"groups": ["optics"]}),
        Template(name="two", display_name="2 GPUs", gpu={"count": 2}),
        Template(name="cpu", display_name="CPU"),
    ]
    user = choices_of_sessions(Caller("ann"), templates)
    assert user == {"templates": [("quarter", "0.25 GPU"), ("two", "2 GPUs"), ("cpu", "CPU")]}
    assert ("half", "Half") in choices_of_sessions(Caller("ann", groups=frozenset({"optics"})), templates)["templates"]
    assert ("half", "Half") in choices_of_sessions(Caller("root", is_admin=True), templates)["templates"]


def test_terms_of_a_session_tell_its_template_and_its_share() -> None:
    assert session_terms("0.25 GPU", 50, 1) == "template 0.25 GPU, share 0.50 GPU", "the share was changed"
    assert session_terms("Two", 100, 2) == "template Two, share 2 GPUs"
    assert session_terms("CPU only", 0, 0) == "template CPU only"
