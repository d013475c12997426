"""The file of `gpushare service --notifiers`, and the interface of a notifier.

Texts of messages are Jinja templates, rendered in a sandbox. Reference for admins: docs/reference/notifiers.md.
`outbox` selects the messages; `senders` has our own notifiers.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, Protocol

from jinja2 import StrictUndefined, TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment
from pydantic import AfterValidator, Discriminator, Field, Tag, model_validator

from gpushare_spawner.model.part import FilePart
from gpushare_spawner.model.quantity import Seconds
from gpushare_spawner.templates.folder import OptionalFile
from gpushare_spawner.templates.parser import FileKind
from gpushare_spawner.wording.notices import DEFAULT_SUBJECT, DEFAULT_TEXT

SEND_SECONDS = 30.0
"""Time for one message with one notifier; a notifier that takes longer has failed."""


class NotSent(Exception):
    """A message could not be sent. The text states the reason for the log, without secrets."""


@dataclass(frozen=True)
class Notification:
    """One message about an upcoming idle action."""

    user: str
    server: str
    """Empty for the default server."""
    action: str
    """downgrade, release or stop."""
    at: float
    """Time of the action, seconds since the epoch."""
    subject: str
    text: str


class Notifier(Protocol):
    """A sender of messages. An admin's class gets the `options` of the file as keyword arguments."""

    async def send(self, message: Notification) -> None:
        """Send a message. Raises NotSent, or any other error; the task is cancelled after SEND_SECONDS."""


_MOST_LETTERS = 5000
OF_ADDRESS: Mapping[str, object] = {"user": "ada"}
OF_WEBHOOK: Mapping[str, object] = {
    **OF_ADDRESS,
    "server": "", "action": "stop", "time": "2026-11-23 14:05 UTC", "text": "It is idle.",
}  # fmt: skip
OF_MESSAGE: Mapping[str, object] = {
    **OF_ADDRESS,
    "server": "", "action": "stop", "time": "2026-11-23 14:05 UTC", "minutes": 5, "explanation": "It is idle.",
    "can_keep": True, "dashboard": "https://hub.example.org/services/gpushare/",
}  # fmt: skip
"""The names that templates can use, with examples."""


@cache
def _environment() -> ImmutableSandboxedEnvironment:
    # plain text: nothing is escaped here
    return ImmutableSandboxedEnvironment(undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)


def rendered(source: str, values: Mapping[str, object]) -> str:
    """Return the text. Raises NotSent."""
    try:
        return _environment().from_string(source).render(values)[:_MOST_LETTERS].strip()
    except (TemplateError, ArithmeticError, LookupError, TypeError, ValueError, AttributeError) as error:
        raise NotSent(str(error) or type(error).__name__) from None


Action = Literal["downgrade", "release", "stop"]
MOST_SECRET_BYTES = 64 * 1024


def _template_of(values: Mapping[str, object]) -> AfterValidator:
    """Return the check of a Jinja template that can use these names."""

    def check(source: str) -> str:
        try:
            rendered(source, values)
        except NotSent as error:
            names = ", ".join(values)
            raise ValueError(f"is no template that can be used here ({error}): use the names {names}") from None
        return source

    return AfterValidator(check)


_Written = Annotated[str, Field(min_length=1, max_length=10_000)]
Address = Annotated[_Written, _template_of(OF_ADDRESS)]
WebhookText = Annotated[_Written, _template_of(OF_WEBHOOK)]
Text = Annotated[_Written, _template_of(OF_MESSAGE)]
"""Jinja templates."""


class Secret(FilePart):
    """The place of a secret: the service's environment, or a file."""

    env: Annotated[str, Field(min_length=1)] | None = None
    """The name of an environment variable of the service."""
    file: Annotated[str, Field(min_length=1)] | None = None
    """The path of a file that the service can read; blanks around its content are left out."""

    @model_validator(mode="after")
    def _env_or_file(self) -> Secret:
        if (self.env is None) == (self.file is None):
            raise ValueError("give either env (a variable of the service) or file (a path)")
        return self

    def read(self) -> str:
        """Return the secret, read anew. Raises NotSent."""
        if self.env is not None:
            secret = os.environ.get(self.env, "")
        else:
            try:
                with Path(str(self.file)).open("rb") as file:
                    secret = file.read(MOST_SECRET_BYTES).decode()
            except (OSError, ValueError) as error:
                why = getattr(error, "strerror", None) or "it is not text"
                raise NotSent(f"the secret in {self.file} cannot be read: {why}") from None
        if not secret.strip():
            raise NotSent(f"the secret in {self.env or self.file} is empty")
        return secret.strip()


def _kind(value: Any) -> str:
    return "secret" if isinstance(value, (dict, Secret)) else "text"


TextOrSecret = Annotated[Annotated[str, Tag("text")] | Annotated[Secret, Tag("secret")], Discriminator(_kind)]
"""A value, or the place of a secret."""


class Email(FilePart):
    """E-mail through an SMTP server."""

    host: Annotated[str, Field(min_length=1)]
    """The SMTP server."""
    port: Annotated[int, Field(ge=1, le=65535, strict=True)] = 587
    """Its port."""
    security: Literal["starttls", "tls", "none"] = "starttls"
    """`starttls`: the connection is encrypted after its beginning, or nothing is sent. `tls`: from its beginning, port
    465 as a rule. `none`: not encrypted, for a server on this machine."""
    username: str | None = None
    """User name of the login. Not given: no login."""
    password: Secret | None = None
    """Password of the login. Needs `username`."""
    sender: Annotated[str, Field(min_length=3)]
    """The address that messages come from."""
    address: Address
    """The user's address, a template like `{{ user }}@example.org`."""

    @model_validator(mode="after")
    def _login(self) -> Email:
        if (self.username is None) != (self.password is None):
            raise ValueError("username and password belong together: give both or neither")
        if self.password is not None and self.security == "none" and self.host not in ("localhost", "127.0.0.1", "::1"):
            raise ValueError("a password is not sent without encryption: write  security: starttls  or tls")
        return self


class Webhook(FilePart):
    """A POST of JSON to an address, as Slack, Mattermost and others take it."""

    url: TextOrSecret
    """The address, or the place of a secret: the address of a Slack webhook is enough to post there."""
    headers: dict[str, TextOrSecret] = {}
    """Headers of the request, like Authorization; values can be secrets."""
    text: WebhookText | None = None
    """The field `text` of the JSON, a template. Not given: the user, and the text of the message."""
    fields: dict[str, str] = {}
    """More fields of the JSON, like `channel`."""

    @model_validator(mode="after")
    def _url(self) -> Webhook:
        if isinstance(self.url, str) and not self.url.startswith(("https://", "http://")):
            raise ValueError("the url begins neither with https nor with http: write the whole address")
        return self


def _class_path(path: str) -> str:
    if not re.fullmatch(r"[\w.]+:\w+", path):
        raise ValueError(f"{path!r} is no path of a class: write it like package.module:Class")
    return path


class OwnClass(FilePart):
    """An admin's notifier."""

    path: Annotated[str, AfterValidator(_class_path)]
    """The class, as `package.module:Class`. It has the coroutine `send(message)`."""
    options: dict[str, Any] = {}
    """Keyword arguments of the class."""


class NotifierConfig(FilePart):
    """Messages to users with a closed tab. Raises pydantic.ValidationError, which names each wrong field."""

    email: Email | None = None
    """E-mail to the user. Not given: none."""
    webhooks: tuple[Webhook, ...] = ()
    """Addresses that get each message."""
    classes: tuple[OwnClass, ...] = ()
    """Your own notifiers."""
    actions: tuple[Action, ...] = ("stop",)
    """The idle actions that cause messages: downgrade, release, stop. After the first two nothing is lost."""
    closed_after: Seconds = 900.0
    """A tab counts as closed when the hub has seen no activity of the server for this long. The hub learns of it every
    5 minutes."""
    dashboard: str = ""
    """The dashboard's public address, for the link in messages, like
    `https://hub.example.org/services/gpushare/`."""
    subject: Text = DEFAULT_SUBJECT
    """The subject, a template."""
    text: Text = DEFAULT_TEXT
    """The text, a template."""


KIND = FileKind(
    model=NotifierConfig,
    title="Notifiers",
    begin="email:",
    required="write at least  webhooks: []  or leave --notifiers out",
    usual="notifiers have some tens of values, at most 4 levels deep",
    content="notifiers",
)


def notifier_file(path: Path) -> OptionalFile[NotifierConfig]:
    """Return the admin's file."""
    return OptionalFile(KIND, path)
