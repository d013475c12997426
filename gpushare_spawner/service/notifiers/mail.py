"""E-mail through an SMTP server, in a thread: smtplib waits for the network."""

from __future__ import annotations

import asyncio
import re
import smtplib
import ssl
from collections.abc import Callable
from email.message import EmailMessage
from email.utils import formatdate, make_msgid

from gpushare_spawner.service.notifiers.base import Message, NotSent
from gpushare_spawner.service.notifiers.config import Email
from gpushare_spawner.service.notifiers.texts import rendered
from gpushare_spawner.wording.errors import reason

NETWORK_SECONDS = 10.0
"""For each answer of the server."""
_ADDRESS = r"[^\s@<>,;:\"()\[\]\\]+@[^\s@<>,;:\"()\[\]\\]+"


class MailNotifier:
    """Sends each message to its user. ``context`` makes what verifies the server's certificate."""

    def __init__(self, settings: Email, context: Callable[[], ssl.SSLContext] = ssl.create_default_context) -> None:
        self._settings = settings
        self._context = context

    async def send(self, message: Message) -> None:
        """Send a message. Raises NotSent."""
        address = rendered(self._settings.address, {"user": message.user})
        if not re.fullmatch(_ADDRESS, address):
            # also a user's name that would add recipients or headers
            raise NotSent(f"{address!r} is no address: see the field address of email")
        mail = EmailMessage()
        mail["From"], mail["To"] = self._settings.sender, address
        mail["Subject"] = " ".join(message.subject.split())
        mail["Date"], mail["Message-ID"] = formatdate(), make_msgid(domain=self._settings.sender.rpartition("@")[2])
        mail["Auto-Submitted"] = "auto-generated"  # RFC 3834: no out-of-office answers
        mail.set_content(message.text)
        # a thread cannot be cancelled: it ends by its own time-outs
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
            return smtplib.SMTP_SSL(settings.host, settings.port, timeout=NETWORK_SECONDS, context=self._context())
        return smtplib.SMTP(settings.host, settings.port, timeout=NETWORK_SECONDS)


def _why(error: Exception) -> str:
    """Return the server's answer without what was sent to it: a failed login must not log the password."""
    if isinstance(error, smtplib.SMTPAuthenticationError):
        return f"the login was refused ({error.smtp_code})"
    if isinstance(error, smtplib.SMTPRecipientsRefused):
        return "the recipient was refused: " + ", ".join(f"{code}" for code, _ in error.recipients.values())
    return reason(error)
