"""For values that a test knows to be there, and whose type says that they may be missing."""

from __future__ import annotations

from typing import TypeVar

Value = TypeVar("Value")


def present(value: Value | None) -> Value:
    """Return the value. Fails where there is none."""
    assert value is not None
    return value
