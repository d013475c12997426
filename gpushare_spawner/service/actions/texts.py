"""What admins write, as it is passed on to others. Pure."""

from __future__ import annotations

import unicodedata

_TURN_AROUND = frozenset(range(0x202A, 0x202F)) | frozenset(range(0x2066, 0x206A))
"""Unicode's marks that change the direction of the text after them (UAX 9). Letters have a direction without them."""


def harmless(text: str) -> str:
    """Return a text without what a terminal obeys, and without marks that make the text after it read otherwise.

    `gpushare status` prints messages in users' terminals. Line breaks stay.
    """
    lines = text.replace("\r\n", "\n").replace("\r", "\n").split("\n")
    return "\n".join("".join(map(_shown, line)) for line in lines).strip()


def _shown(letter: str) -> str:
    if ord(letter) in _TURN_AROUND:
        return ""
    # control characters of both kinds, and line separators that only some programs know
    return " " if unicodedata.category(letter) in ("Cc", "Zl", "Zp") else letter
