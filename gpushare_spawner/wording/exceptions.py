"""What an exception or an HTTP answer says, as a part of a sentence: never nothing."""

from __future__ import annotations


def reason(error: BaseException) -> str:
    """Return the text of an exception; the name of its class where it has none, as a bare ``TimeoutError()``."""
    return str(error) or type(error).__name__


def http_status(code: int | None, phrase: str | None) -> str:
    """Return an HTTP status with the server's phrase, if it sent one: "503 Service Unavailable", "503"."""
    return f"{code} {phrase or ''}".strip()
