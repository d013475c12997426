"""What an SMTP server and a webhook of the tests keep."""

from __future__ import annotations

import json
from email import message_from_bytes
from email.message import EmailMessage
from email.policy import default
from typing import Any

from tornado.web import RequestHandler


class Inbox:
    """Keeps what the SMTP server accepts."""

    def __init__(self) -> None:
        self.mails: list[tuple[list[str], EmailMessage]] = []

    async def handle_DATA(self, server: object, session: object, envelope: Any) -> str:
        mail = message_from_bytes(envelope.content, policy=default)
        self.mails.append((envelope.rcpt_tos, mail))
        return "250 OK"

    async def handle_RCPT(self, server: object, session: object, envelope: Any, address: str, options: Any) -> str:
        if address.startswith("nobody@"):
            return "550 no such user"
        envelope.rcpt_tos.append(address)
        return "250 OK"


class Hook(RequestHandler):
    """Keeps what is posted."""

    def post(self) -> None:
        self.settings["posted"].append((dict(self.request.headers), json.loads(self.request.body)))
        if self.settings["status"] == 302:
            self.redirect("/elsewhere")
        else:
            self.set_status(self.settings["status"])
            self.write("secret-in-answer")
