"""Texts of messages, from Jinja templates in a sandbox: the admin's, or ours."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

from jinja2 import StrictUndefined, TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from gpushare_spawner.service.notifiers.base import NotSent

_MOST_LETTERS = 5000
OF_ADDRESS: Mapping[str, object] = {"user": "ada"}
OF_WEBHOOK: Mapping[str, object] = {
    **OF_ADDRESS,
    "server": "", "action": "stop", "time": "2026-11-23 14:05 UTC", "text": "It is idle.",
}  # fmt: skip
OF_MESSAGE: Mapping[str, object] = {
    **OF_ADDRESS,
    "server": "", "action": "stop", "time": "2026-11-23 14:05 UTC", "minutes": 5, "explanation": "It is idle.",
    "can_keep": True, "dashboard": "https://hub.example.org/services/gpushare/",
}  # fmt: skip
"""The names that templates can use, with examples."""


@cache
def _environment() -> ImmutableSandboxedEnvironment:
    # plain text: nothing is escaped here
    return ImmutableSandboxedEnvironment(undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)


def check_text(source: str, values: Mapping[str, object]) -> str:
    """Return what is wrong with a template that can use the names of ``values``; empty: nothing."""
    try:
        rendered(source, values)
    except NotSent as error:
        return str(error)
    return ""


def rendered(source: str, values: Mapping[str, object]) -> str:
    """Return the text. Raises NotSent."""
    try:
        return _environment().from_string(source).render(values)[:_MOST_LETTERS].strip()
    except (TemplateError, ArithmeticError, LookupError, TypeError, ValueError, AttributeError) as error:
        raise NotSent(str(error) or type(error).__name__) from None
