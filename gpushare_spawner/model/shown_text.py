"""Text that is shown to others: it has no letters that hide or reorder what stands beside them."""

from __future__ import annotations

import unicodedata

from pydantic import AfterValidator

_DIRECTIONS = frozenset("\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")
"""Bidirectional controls (Unicode Standard Annex 9): they can make "0.25" look like "52.0"."""
_HIDDEN = frozenset({"Cc", "Cs", "Zl", "Zp"})
"""Categories: control characters like escape, surrogates, line and paragraph separators."""


def _shown(text: str, allowed: str) -> str:
    for letter in text:
        if letter in _DIRECTIONS or (unicodedata.category(letter) in _HIDDEN and letter not in allowed):
            raise ValueError(
                f"the character U+{ord(letter):04X} is not shown, or changes how other text is shown: remove it"
            )
    return text


SHOWN_LINE = AfterValidator(lambda text: _shown(text, ""))
"""Validates one line of text."""

SHOWN_TEXT = AfterValidator(lambda text: _shown(text, "\n\r\t"))
"""Validates text that can have several lines."""
