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
"""Maximum seconds for a notifier to send a message. A notifier that takes longer has failed."""


class NotSent(Exception):
    """Error: a message could not be sent. The text states the reason for the log, without secrets."""


@dataclass(frozen=True)
class Notification:
    """One message about an upcoming idle action."""

    user: str
    server: str
    """The server's name; empty for the default server."""
    action: str
    """downgrade, release, stop or bypass."""
    at: float
    """Time of the action, seconds since the epoch. For bypass: the time of the notice."""
    subject: str
    text: str


class Notifier(Protocol):
    """A sender of messages. An admin's class gets the file's `options` as keyword arguments."""

    async def send(self, message: Notification) -> None:
        """Send a message. Raises NotSent or any other error. The task is cancelled after SEND_SECONDS."""


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
    # plain text, so nothing is escaped
    return ImmutableSandboxedEnvironment(undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)


def rendered(source: str, values: Mapping[str, object]) -> str:
    """Return the text. Raises NotSent."""
    try:
        return _environment().from_string(source).render(values)[:_MOST_LETTERS].strip()
    except (TemplateError, ArithmeticError, LookupError, TypeError, ValueError, AttributeError) as error:
        raise NotSent(str(error) or type(error).__name__) from None


Action = Literal["downgrade", "release", "stop", "bypass"]
BYPASS: Literal["bypass"] = "bypass"
MOST_SECRET_BYTES = 64 * 1024


def _template_of(values: Mapping[str, object]) -> AfterValidator:
    """Return the validator of a Jinja template that can use these names."""

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
"""A Jinja template for a message."""


class Secret(FilePart):
    """The location of a secret: an environment variable of the service, or a file."""

    env: Annotated[str, Field(min_length=1)] | None = None
    """The name of an environment variable in the service."""
    file: Annotated[str, Field(min_length=1)] | None = None
    """The path of a file that the service can read. Whitespace around its content is ignored."""

    @model_validator(mode="after")
    def _env_or_file(self) -> Secret:
        if (self.env is None) == (self.file is None):
            raise ValueError("give either env (a variable of the service) or file (a path)")
        return self

    def read(self) -> str:
        """Read and return the secret. Raises NotSent."""
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
"""A value, or the location of a secret."""


class Email(FilePart):
    """E-mail through an SMTP server."""

    host: Annotated[str, Field(min_length=1)]
    """The SMTP server."""
    port: Annotated[int, Field(ge=1, le=65535, strict=True)] = 587
    """Its port."""
    security: Literal["starttls", "tls", "none"] = "starttls"
    """`starttls`: the connection is upgraded to TLS, or nothing is sent. `tls`: TLS from the start, usually on port
    465. `none`: no encryption, for a server on this machine."""
    username: str | None = None
    """User name for the login. Not given: no login."""
    password: Secret | None = None
    """Password for the login. Needs `username`."""
    sender: Annotated[str, Field(min_length=3)]
    """The sender's address."""
    address: Address
    """Template of the user's address, like `{{ user }}@example.org`."""

    @model_validator(mode="after")
    def _login(self) -> Email:
        if (self.username is None) != (self.password is None):
            raise ValueError("username and password belong together: give both or neither")
        if self.password is not None and self.security == "none" and self.host not in ("localhost", "127.0.0.1", "::1"):
            raise ValueError("a password is not sent without encryption: write  security: starttls  or tls")
        return self


class Webhook(FilePart):
    """A POST of JSON to an address, as accepted by Slack, Mattermost and others."""

    url: TextOrSecret
    """The address, or the location of a secret, because anyone with a Slack webhook's address can post there."""
    headers: dict[str, TextOrSecret] = {}
    """Headers of the request, like Authorization; values can be secrets."""
    text: WebhookText | None = None
    """Template of the JSON's field `text`. Not given: the user and the text of the message."""
    fields: dict[str, str] = {}
    """Additional fields of the JSON, like `channel`."""

    @model_validator(mode="after")
    def _url(self) -> Webhook:
        if isinstance(self.url, str) and not self.url.startswith(("https://", "http://")):
            raise ValueError("the url begins neither with https nor with http: write the whole address")
        return self


def _class_path(path: str) -> str:
    if not re.fullmatch(r"[\w.]+:\w+", path):
        raise ValueError(f"{path!r} is not the path of a class: write it like package.module:Class")
    return path


class OwnClass(FilePart):
    """An admin's notifier."""

    path: Annotated[str, AfterValidator(_class_path)]
    """The class, as `package.module:Class`, with the coroutine `send(message)`."""
    options: dict[str, Any] = {}
    """Keyword arguments of the class."""


class NotifierConfig(FilePart):
    """Messages to users with a closed tab. Raises pydantic.ValidationError, which names each invalid field."""

    email: Email | None = None
    """E-mail to the user. Not given: none."""
    webhooks: tuple[Webhook, ...] = ()
    """Addresses that get each message."""
    classes: tuple[OwnClass, ...] = ()
    """Your own notifiers."""
    actions: tuple[Action, ...] = ("stop", "bypass")
    """The idle actions that cause messages: downgrade, release, stop. The first two lose no data. `bypass`: a notice of
    the template's `gpu.bypass`, with its own text, also while a tab is open."""
    closed_after: Seconds = 900.0
    """A tab counts as closed when the hub has recorded no activity of the server for this long. Servers report activity
    every 5 minutes."""
    dashboard: str = ""
    """The dashboard's public address, for the link in messages, like
    `https://hub.example.org/services/gpushare/`."""
    subject: Text = DEFAULT_SUBJECT
    """Template of the subject."""
    text: Text = DEFAULT_TEXT
    """Template of the text."""


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
