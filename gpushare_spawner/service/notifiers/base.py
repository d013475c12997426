"""What a notifier is: it sends one message to one user, or to a channel."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

SEND_SECONDS = 30.0
"""For one message with one notifier; what takes longer counts as failed."""


class NotSent(Exception):
    """A message could not be sent. The text says why, for the log; it has no secret in it."""


@dataclass(frozen=True)
class Message:
    """One message about a coming idle action."""

    user: str
    server: str
    """Empty for the default server."""
    action: str
    """downgrade, release or stop."""
    at: float
    """When it comes, seconds since the epoch."""
    subject: str
    text: str


class Notifier(Protocol):
    """Sends messages. A class of the admin's is made with the `options` of the file as keyword arguments."""

    async def send(self, message: Message) -> None:
        """Send a message. Raises NotSent, or any other error; the task is cancelled after SEND_SECONDS."""
