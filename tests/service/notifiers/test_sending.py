"""E-mail to a real SMTP server, and webhooks to a real HTTP server."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from aiosmtpd.controller import Controller
from aiosmtpd.smtp import AuthResult, LoginPassword
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from tornado.httpserver import HTTPServer
from tornado.testing import bind_unused_port
from tornado.web import Application

from gpushare_spawner.service.notifiers.config import Email, Notification, NotSent, Webhook
from gpushare_spawner.service.notifiers.senders import MailNotifier, WebhookNotifier
from tests.ports import free_port
from tests.service.notifiers.inbox import Hook, Inbox

MESSAGE = Notification("ada", "", "stop", 1_764_158_400.0, "Your server will stop", "It is idle.\n.\nGrüße")


def login(server: object, session: object, envelope: object, mechanism: str, data: LoginPassword) -> AuthResult:
    right = (data.login, data.password) == (b"hub", b"right")
    return AuthResult(success=right, handled=right)


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A key and a certificate for 127.0.0.1 in one file."""
    key, now = ec.generate_private_key(ec.SECP256R1()), datetime.now(UTC)
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "localhost")])
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName("localhost")]), critical=False)
        .sign(key, hashes.SHA256())
    )
    pem = serialization.Encoding.PEM
    private = key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    path = tmp_path_factory.mktemp("tls") / "server.pem"
    path.write_bytes(private + made.public_bytes(pem))
    return path


@pytest.fixture
def smtp(certificate: Path) -> Iterator[Callable[..., tuple[Inbox, int]]]:
    """Start SMTP servers; each gives its inbox and port."""
    running: list[Controller] = []

    def start(tls: bool = False, **settings: Any) -> tuple[Inbox, int]:
        inbox = Inbox()
        if tls:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(certificate)
            settings |= {"tls_context": context, "require_starttls": True}
        controller = Controller(inbox, hostname="127.0.0.1", port=free_port(), **settings)
        controller.start()
        running.append(controller)
        return inbox, controller.port

    yield start
    for controller in running:
        controller.stop()


def email(port: int, **changes: Any) -> Email:
    values = {"host": "localhost", "port": port, "security": "none", "sender": "hub@example.org"}
    return Email.model_validate(values | {"address": "{{ user }}@example.org"} | changes)


async def test_a_mail_reaches_its_user(smtp: Callable[..., tuple[Inbox, int]]) -> None:
    inbox, port = smtp()
    await MailNotifier(email(port)).send(MESSAGE)
    ((recipients, mail),) = inbox.mails
    assert recipients == ["ada@example.org"]
    assert (mail["From"], mail["To"], mail["Subject"]) == ("hub@example.org", "ada@example.org", MESSAGE.subject)
    assert mail["Auto-Submitted"] == "auto-generated"
    assert mail.get_content().replace("\r\n", "\n").strip() == MESSAGE.text


async def test_a_mail_is_encrypted_and_the_service_logs_in(
    smtp: Callable[..., tuple[Inbox, int]], certificate: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inbox, port = smtp(tls=True, authenticator=login, auth_required=True)
    settings = email(port, security="starttls", username="hub", password={"env": "PASSWORD"})

    def trusting() -> ssl.SSLContext:
        return ssl.create_default_context(cafile=str(certificate))

    monkeypatch.setenv("PASSWORD", "right")
    await MailNotifier(settings, trusting).send(MESSAGE)
    assert len(inbox.mails) == 1
    monkeypatch.setenv("PASSWORD", "wrong-secret")
    with pytest.raises(NotSent, match="the login was refused") as refused:
        await MailNotifier(settings, trusting).send(MESSAGE)
    assert "wrong-secret" not in str(refused.value)
    monkeypatch.setenv("PASSWORD", "right")
    with pytest.raises(NotSent, match="certificate"):
        await MailNotifier(settings).send(MESSAGE)
    assert len(inbox.mails) == 1


async def test_nothing_is_sent_without_the_encryption_that_is_asked_for(smtp: Callable[..., tuple[Inbox, int]]) -> None:
    inbox, port = smtp()
    with pytest.raises(NotSent, match="STARTTLS"):
        await MailNotifier(email(port, security="starttls")).send(MESSAGE)
    assert not inbox.mails


@pytest.mark.parametrize("user", ["ada, eve", "ada@evil.org>, <eve", "ada\nBcc: eve", "a b", "<ada>", ""])
async def test_a_name_that_would_reach_others_gets_no_mail(smtp: Callable[..., tuple[Inbox, int]], user: str) -> None:
    inbox, port = smtp()
    with pytest.raises(NotSent, match="is not an address"):
        await MailNotifier(email(port)).send(replace(MESSAGE, user=user))
    assert not inbox.mails


async def test_refused_recipients_and_silent_servers_are_reasons(smtp: Callable[..., tuple[Inbox, int]]) -> None:
    _, port = smtp()
    with pytest.raises(NotSent, match="the recipient was refused: 550"):
        await MailNotifier(email(port)).send(replace(MESSAGE, user="nobody"))
    socket, free = bind_unused_port()
    socket.close()
    with pytest.raises(NotSent, match="localhost:"):
        await MailNotifier(email(free)).send(MESSAGE)


@pytest.fixture
async def hook() -> AsyncIterator[tuple[str, Application]]:
    application = Application([(r"/.*", Hook)], posted=[], status=200)
    socket, port = bind_unused_port()
    server = HTTPServer(application)
    server.add_socket(socket)
    yield f"http://127.0.0.1:{port}/T0/secret", application
    server.stop()
    await server.close_all_connections()


async def test_a_webhook_gets_json_with_secrets_from_the_environment(
    hook: tuple[str, Application], monkeypatch: pytest.MonkeyPatch
) -> None:
    url, application = hook
    monkeypatch.setenv("URL", url)
    monkeypatch.setenv("TOKEN", "Bearer abc")
    settings = {"url": {"env": "URL"}, "headers": {"Authorization": {"env": "TOKEN"}}, "fields": {"channel": "#gpus"}}
    await WebhookNotifier(Webhook.model_validate(settings)).send(replace(MESSAGE, text="<!channel> & more"))
    ((headers, body),) = application.settings["posted"]
    assert headers["Authorization"] == "Bearer abc"
    assert body == {"channel": "#gpus", "text": "ada: &lt;!channel&gt; &amp; more"}


async def test_a_webhooks_own_text_has_the_names_escaped(hook: tuple[str, Application]) -> None:
    url, application = hook
    text = "<@{{ user }}> {{ action }} of {{ server }} at {{ time }}"
    await WebhookNotifier(Webhook(url=url, text=text)).send(replace(MESSAGE, server="<x>"))
    ((_, body),) = application.settings["posted"]
    assert body == {"text": "<@ada> stop of &lt;x&gt; at 2025-11-26 12:00 UTC"}


@pytest.mark.parametrize("status", [302, 404, 500])
async def test_a_webhook_that_refuses_is_a_reason_without_secrets(hook: tuple[str, Application], status: int) -> None:
    url, application = hook
    application.settings["status"] = status
    with pytest.raises(NotSent, match=f"answered {status}") as refused:
        await WebhookNotifier(Webhook(url=url)).send(MESSAGE)
    assert "secret" not in str(refused.value)
    assert len(application.settings["posted"]) == 1


async def test_a_webhook_that_is_not_there_is_a_reason() -> None:
    socket, port = bind_unused_port()
    socket.close()
    with pytest.raises(NotSent, match="the webhook"):
        await asyncio.wait_for(WebhookNotifier(Webhook(url=f"http://127.0.0.1:{port}/secret")).send(MESSAGE), 5)
