"""Our notifiers: e-mail through an SMTP server, and a POST of JSON as accepted by Slack's incoming webhooks.

E-mail is sent in a thread, because smtplib blocks. `outbox` selects the messages.
"""

from __future__ import annotations

import asyncio
import json
import re
import smtplib
import ssl
from collections.abc import Callable
from email.message import EmailMessage
from email.utils import formatdate, make_msgid

from tornado.httpclient import AsyncHTTPClient, HTTPClientError, HTTPRequest

from gpushare_spawner.service.notifiers.config import Email, Notification, NotSent, Secret, Webhook, rendered
from gpushare_spawner.wording.amounts import reason, utc

MAIL_SECONDS = 10.0
"""Maximum seconds to wait for each answer of the server."""
_ADDRESS = r"[^\s@<>,;:\"()\[\]\\]+@[^\s@<>,;:\"()\[\]\\]+"


class MailNotifier:
    """Notifier that sends each message to its user by e-mail. ``context`` checks the server's certificate."""

    def __init__(self, settings: Email, context: Callable[[], ssl.SSLContext] = ssl.create_default_context) -> None:
        self._settings = settings
        self._context = context

    async def send(self, message: Notification) -> None:
        """Send a message. Raises NotSent."""
        address = rendered(self._settings.address, {"user": message.user})
        if not re.fullmatch(_ADDRESS, address):
            # including a user name that would add recipients or headers
            raise NotSent(f"{address!r} is not an address: see the field address of email")
        mail = EmailMessage()
        mail["From"], mail["To"] = self._settings.sender, address
        mail["Subject"] = " ".join(message.subject.split())
        mail["Date"], mail["Message-ID"] = formatdate(), make_msgid(domain=self._settings.sender.rpartition("@")[2])
        mail["Auto-Submitted"] = "auto-generated"  # RFC 3834: prevents out-of-office replies
        mail.set_content(message.text)
        # a thread cannot be cancelled; it ends by its own timeouts
        await asyncio.to_thread(self._deliver, mail)

    def _deliver(self, mail: EmailMessage) -> None:
        settings = self._settings
        password = settings.password.read() if settings.password is not None else None
        try:
            with self._connected() as server:
                if settings.security == "starttls":
                    server.starttls(context=self._context())
                if settings.username is not None and password is not None:
                    server.login(settings.username, password)
                server.send_message(mail)
        except (OSError, smtplib.SMTPException, ValueError) as error:
            raise NotSent(f"{settings.host}:{settings.port}: {_why(error)}") from error

    def _connected(self) -> smtplib.SMTP:
        settings = self._settings
        if settings.security == "tls":
            return smtplib.SMTP_SSL(settings.host, settings.port, timeout=MAIL_SECONDS, context=self._context())
        return smtplib.SMTP(settings.host, settings.port, timeout=MAIL_SECONDS)


def _why(error: Exception) -> str:
    """Return the server's answer without the text sent to it, so that a failed login does not log the password."""
    if isinstance(error, smtplib.SMTPAuthenticationError):
        return f"the login was refused ({error.smtp_code})"
    if isinstance(error, smtplib.SMTPRecipientsRefused):
        return "the recipient was refused: " + ", ".join(f"{code}" for code, _ in error.recipients.values())
    return reason(error)


WEBHOOK_SECONDS = 15.0
_ANSWER_BYTES = 64 * 1024


class WebhookNotifier:
    """Notifier that posts each message to the admin's address. Redirects are not followed."""

    def __init__(self, settings: Webhook) -> None:
        self._settings = settings
        self._client = AsyncHTTPClient(force_instance=True, max_body_size=_ANSWER_BYTES)

    async def send(self, message: Notification) -> None:
        """Send a message. Raises NotSent."""
        url = _read(self._settings.url)
        if not url.startswith(("https://", "http://")):
            raise NotSent("the webhook's address does not begin with https:// or http://")
        headers = {name: _read(value) for name, value in self._settings.headers.items()}
        request = HTTPRequest(
            url,
            method="POST",
            headers=headers | {"Content-Type": "application/json"},
            body=json.dumps(self._settings.fields | {"text": self._text(message)}),
            connect_timeout=WEBHOOK_SECONDS,
            request_timeout=WEBHOOK_SECONDS,
            follow_redirects=False,
        )
        try:
            await self._client.fetch(request)
        except HTTPClientError as error:
            # without address and answer, because the address can be a secret and the answer can repeat it
            why = f"answered {error.code}" if error.response is not None else "does not answer"
            raise NotSent(f"the webhook {why}") from None
        except (OSError, ValueError) as error:
            raise NotSent(f"the webhook cannot be reached: {reason(error)}") from None

    def _text(self, message: Notification) -> str:
        if self._settings.text is None:
            return f"{_escaped(message.user)}: {_escaped(message.text)}"
        values = {"user": message.user, "server": message.server, "action": message.action, "text": message.text}
        values["time"] = utc(message.at)
        return rendered(self._settings.text, {name: _escaped(value) for name, value in values.items()})


def _read(value: str | Secret) -> str:
    return value.read() if isinstance(value, Secret) else value


def _escaped(text: str) -> str:
    """Return text with Slack's three escapes, so that a server's name cannot mention a channel."""
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
