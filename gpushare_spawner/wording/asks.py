"""A notebook server's sentences about a request that the service does not answer.

The service's answers are in `wording.actions`.
"""

from __future__ import annotations

from collections.abc import Iterable

from gpushare_spawner.model.frames import AskKind

NO_SHARE = "This server has no GPU share: it was started without one."
ASK_UNKNOWN = "The GPU agent of this machine is older than your notebook server and does not know this request."


def no_answer(seconds: float) -> str:
    """Return that the service has not answered within some seconds, and the remedy."""
    why = "perhaps the idle culler is unavailable"
    return f"No answer came within {seconds:g} s: {why}. Check the share before you try again."


def wrong_kind(kinds: Iterable[str]) -> str:
    """Return which kinds of requests there are."""
    return f'"kind" must be one of {", ".join(kinds)}.'


def wrong_keep_time(given: str, end: str) -> str:
    """Return that ``given`` is not the length of a keep, and a valid value. ``end``: the word that ends a keep."""
    return (
        f"{given!r} is not a time for which a share can be kept. Write a time of at least a second, like 90m or 4h, or "
        f"{end!r} to end the keep."
    )


def wrong_value(kind: AskKind) -> str:
    """Return which value a request of this kind has."""
    what = "the length of the keep in seconds" if kind is AskKind.KEEP else "the share in units of 1 %"
    return f'"value" must be a number of at least 1: {what}.'
