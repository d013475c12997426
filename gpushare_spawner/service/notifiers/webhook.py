"""A POST of JSON, as Slack's incoming webhooks take it."""

from __future__ import annotations

import json

from tornado.httpclient import AsyncHTTPClient, HTTPClientError, HTTPRequest

from gpushare_spawner.service.notifiers.base import Message, NotSent
from gpushare_spawner.service.notifiers.config import Secret, Webhook
from gpushare_spawner.service.notifiers.texts import rendered
from gpushare_spawner.wording.amounts import utc
from gpushare_spawner.wording.errors import reason

NETWORK_SECONDS = 15.0
_ANSWER_BYTES = 64 * 1024


class WebhookNotifier:
    """Posts each message. The address is the admin's; redirects are not followed."""

    def __init__(self, settings: Webhook) -> None:
        self._settings = settings
        self._client = AsyncHTTPClient(force_instance=True, max_body_size=_ANSWER_BYTES)

    async def send(self, message: Message) -> None:
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
            connect_timeout=NETWORK_SECONDS,
            request_timeout=NETWORK_SECONDS,
            follow_redirects=False,
        )
        try:
            await self._client.fetch(request)
        except HTTPClientError as error:
            # neither address nor answer: the one can be a secret, the other can repeat it
            why = f"answered {error.code}" if error.response is not None else "does not answer"
            raise NotSent(f"the webhook {why}") from None
        except (OSError, ValueError) as error:
            raise NotSent(f"the webhook cannot be reached: {reason(error)}") from None

    def _text(self, message: Message) -> str:
        if self._settings.text is None:
            return f"{_escaped(message.user)}: {_escaped(message.text)}"
        values = {"user": message.user, "server": message.server, "action": message.action, "text": message.text}
        values["time"] = utc(message.at)
        return rendered(self._settings.text, {name: _escaped(value) for name, value in values.items()})


def _read(value: str | Secret) -> str:
    return value.read() if isinstance(value, Secret) else value


def _escaped(text: str) -> str:
    """Return text without Slack's mark-up, so that a server's name cannot mention a channel: Slack's three escapes."""
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
