"""The file of notifiers: what is wrong is said with its place, and secrets come from elsewhere."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpushare_spawner.service.notifiers.config import KIND, NotSent, Secret, notifier_file
from gpushare_spawner.templates.parser import parse

GOOD = """\
email:
  host: smtp.example.org
  username: hub
  password: {file: /run/secrets/smtp}
  sender: hub@example.org
  address: "{{ user }}@example.org"
webhooks:
  - url: {env: SLACK_URL}
    headers: {Authorization: {env: TOKEN}}
    fields: {channel: "#gpus"}
actions: [release, stop]
closed_after: 20m
"""
EMAIL = "email: {host: h, sender: a@b, address: '%s'}"


def test_a_good_file_is_read() -> None:
    read = parse(KIND, GOOD, "notifiers.yaml")
    assert read.problems == ()
    assert read.content is not None
    assert read.content.email is not None
    assert (read.content.email.port, read.content.email.security) == (587, "starttls")
    assert read.content.closed_after == 1200


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("emial: {}", "unknown field; did you mean 'email'?"),
        (EMAIL % "{{ usr }}@b", "is no template that can be used here ('usr' is undefined); use the names user"),
        (EMAIL % "{{ user", "is no template that can be used here (unexpected end of template"),
        ("text: '{{ user.__class__.__mro__ }}'", "is no template that can be used here (access to attribute"),
        ("text: '{{ 10 ** 10 ** 10 }} {% for a in b %}'", "is no template"),
        ("webhooks:\n  - url: ftp://a", "webhooks.0: the url begins neither with https nor with http; write the whole"),
        ("webhooks:\n  - url: {env: A, file: B}", "webhooks.0.url.secret: give either env (a variable of the service)"),
        ("webhooks:\n  - {url: http://a, headers: {A: 1}}", "webhooks.0.headers.A.text: must be text, not 1"),
        ("email: {host: h, sender: a@b, address: a@b, username: u}", "belong together; give both or neither"),
        (
            "email: {host: h, sender: a@b, address: a@b, username: u, password: {env: P}, security: none}",
            "a password is not sent without encryption",
        ),
        (
            "classes:\n  - path: module",
            "classes.0.path: 'module' is not the path of a class; write it like package.module:",
        ),
    ],
)
def test_what_is_wrong_is_said(source: str, said: str) -> None:
    read = parse(KIND, source, "notifiers.yaml")
    assert read.content is None
    (problem,) = map(str, read.problems)
    assert said in problem


def test_secrets_are_read_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKEN", " one\n")
    assert Secret(env="TOKEN").read() == "one"
    monkeypatch.delenv("TOKEN")
    with pytest.raises(NotSent, match="the secret in TOKEN is empty"):
        Secret(env="TOKEN").read()
    path = tmp_path / "secret"
    path.write_text("two\n")
    secret = Secret(file=str(path))
    assert secret.read() == "two"
    path.write_text("three")
    assert secret.read() == "three"
    path.unlink()
    with pytest.raises(NotSent, match="cannot be read: No such file"):
        secret.read()


def test_the_last_valid_file_stays_in_force(tmp_path: Path) -> None:
    path = tmp_path / "notifiers.yaml"
    path.write_text(GOOD)
    file = notifier_file(path)
    assert file.load().content is not None
    path.write_text("email: yes")
    kept = file.load()
    assert kept.content is not None
    assert "the last valid version of the notifiers stays in force" in str(kept.problems[0])
