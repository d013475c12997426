"""Cordons and drains of GPUs and nodes: what was done, and what the sessions there are told."""

from __future__ import annotations

from gpushare_spawner.wording.amounts import duration, utc

UNREADABLE = "The file with the cordons of this node cannot be read."
"""Why a node is cordoned that nobody has cordoned."""
NOT_CORDONED = "New servers can come there already."


def cordoned(where: str, drain: bool, stop_after: float | None) -> str:
    """Return what was done. ``where``: like "GPU 0 of node a"; ``stop_after``: seconds, None: no server is stopped."""
    said = f"{where} gets no new servers."
    if not drain:
        return said
    if stop_after is None:
        return f"{said} The users of its sessions are told."
    when = f"after {duration(stop_after)}, and after their notice period" if stop_after else "after their notice period"
    return f"{said} The users of its sessions are told. Servers that are still there are stopped {when}."


def cordoned_already(where: str, drain: bool) -> str:
    """Return that nothing has changed."""
    return f"{where} is already {'drained' if drain else 'cordoned'}."


def uncordoned(where: str) -> str:
    """Return that new servers come again."""
    return f"{where} gets new servers again."


def closed(drain: bool, by: str, reason: str) -> str:
    """Return why no new sessions come to a GPU or node: "Draining (admin: kernel update). No new sessions."."""
    return f"{'Draining' if drain else 'Cordoned'} ({by}{f': {reason}' if reason else ''}). No new sessions."


def told(where: str, reason: str, stop_at: float | None) -> str:
    """Return what the user of a session on a drained GPU is told. ``stop_at``: seconds since the epoch; None: the
    server is not stopped."""
    end = "Please save your work, and restart your server: it then runs elsewhere."
    if stop_at is not None:
        end = (
            f"Your server will be stopped at {utc(stop_at)}. Save your work, and restart it before then: it then runs "
            "elsewhere."
        )
    return f"{taken_out(where, reason)} {end}"


def taken_out(where: str, reason: str) -> str:
    """Return how each notice of a drain begins."""
    reason = reason.rstrip()
    end = "" if not reason or reason[-1] in ".!?" else "."
    return f"{where} is being taken out of service. {reason}{end}".rstrip()
